"""Vocabulary-only GGUF files for the tokeniser tests, all derived from SmolLM2's vocabulary.

tests/oracles/smollm2_vocab.json.gz holds that vocabulary: tokens and merges of SmolLM2-135M-Instruct (HuggingFaceTB,
Apache-2.0), written by tools/make_tokenizer_oracles.py. Every token after the first 252 is the join of one merge.
The variants change the pre-tokeniser, or turn the tokens into a scored ("llama") vocabulary.
"""

import gzip
import json
import random
from functools import cache, partial
from pathlib import Path

import gguf

from m3jit.models.byte_pairs import BYTE_CHARACTERS, decode_characters

ORACLES = Path(__file__).parent.parent / "oracles"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@cache
def smollm2() -> dict:
    """{"metadata": scalar tokenizer.* values, "tokens": [...], "kinds": [...], "merges": [...]}"""
    stored = json.loads(gzip.decompress((ORACLES / "smollm2_vocab.json.gz").read_bytes()))
    joined = [merge.replace(" ", "", 1) for merge in stored["merges"]]
    kinds = [CONTROL if index in stored["control"] else NORMAL for index in range(len(stored["head"]) + len(joined))]
    return stored | {"tokens": stored["head"] + joined, "kinds": kinds}


def _writer(path: Path, architecture: str = "llama") -> gguf.GGUFWriter:
    """A writer with the hyperparameters llama.cpp insists on even when only the vocabulary is loaded."""
    writer = gguf.GGUFWriter(path, architecture)
    if architecture == "bert":
        writer.add_layer_norm_eps(1e-5)
        writer.add_causal_attention(False)
    for name, value in (("block_count", 1), ("context_length", 512), ("embedding_length", 64), ("head_count", 1),
                        ("layer_norm_rms_eps", 1e-5), ("feed_forward_length", 64), ("rope_dimension_count", 64)):
        getattr(writer, f"add_{name}")(value)
    return writer


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def write_byte_pairs(path: Path, pre: str | None, add_eos: bool = False, user_defined: tuple[str, ...] = ()) -> None:
    """A "gpt2" file with SmolLM2's tokens and merges and the given pre-tokeniser."""
    vocabulary = smollm2()
    kinds = list(vocabulary["kinds"])
    for text in user_defined:
        kinds[vocabulary["tokens"].index(text)] = USER_DEFINED
    writer = _writer(path)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(kinds)
    writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if add_eos:
        writer.add_add_eos_token(True)
    if pre == "smollm":
        writer.add_add_bos_token(False)
        writer.add_chat_template(vocabulary["metadata"]["tokenizer.chat_template"])
    _finish(writer)


def write_scored(path: Path, ties: int = 1, crossing: tuple[str, ...] = (), space_prefix: bool | None = None,
                 name: str | None = None) -> None:
    """A "llama" file: SmolLM2's tokens as text with U+2581, scored by rank. `ties` neighbours share a score;
    `crossing` tokens hold a space after another character; `name`: of the model."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|im_start|>", "<|im_end|>",
             "\n\n", "<div>", "  ", "http://"]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [CONTROL] * 2 + [USER_DEFINED] * 4
    scores = [0.0] * 261 + [-1000.0] * 4
    if name is not None:
        texts, kinds, scores = [*texts, "<|endoftext|>"], [*kinds, CONTROL], [*scores, 0.0]
    known = set(texts)
    rank = 0
    for token in [*smollm2()["tokens"][17:], *map(str, crossing)]:
        try:
            text = token if token in crossing else decode_characters(token).decode().replace(" ", "▁")
        except UnicodeDecodeError:
            continue
        inner_space = any(left != "▁" and right == "▁" for left, right in zip(text, text[1:]))
        if text in known or "\0" in text or (inner_space and not crossing):
            continue
        known.add(text)
        rank += 1
        texts.append(text)
        kinds.append(NORMAL)
        scores.append(-float(rank // ties) if token not in crossing else -5.0)
    writer = _writer(path)
    if name is not None:
        writer.add_name(name)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if space_prefix is not None:
        writer.add_add_space_prefix(space_prefix)
    _finish(writer)


def write_probe(path: Path, pre: str) -> None:
    """A "gpt2" file whose merges join any two common bytes, so that most ways to cut a text give other tokens; some
    words are tokens that no merge makes."""
    common = [*b"\t\n\r", *range(32, 127), *range(0x80, 0x88), 0xA0, 0xC2, 0xC3, 0xCC, 0xE2, 0xE3, 0xEF]
    pairs = [(BYTE_CHARACTERS[a], BYTE_CHARACTERS[b]) for a in common for b in common]
    random.Random(1).shuffle(pairs)
    tokens = [*BYTE_CHARACTERS, *(a + b for a, b in pairs), "the", "Hello", "Ġworld", "ĠĠĠ", "123"]
    writer = _writer(path)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * len(tokens))
    writer.add_token_merges([f"{a} {b}" for a, b in pairs])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    _finish(writer)


def write_word_pieces(path: Path, lowercase: bool = True) -> None:
    """A "bert" file: SmolLM2's tokens as words and continuations, and every letter of the other alphabets they miss."""
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    kinds = [CONTROL, UNKNOWN, CONTROL, CONTROL, CONTROL]
    known = dict.fromkeys(texts)
    letters = "".join(map(chr, [*range(33, 127), *range(0xA1, 0x250), *range(0x370, 0x590), *range(0x5D0, 0x5EB),
                                *range(0x620, 0x64B), *range(0x904, 0x93A), *range(0xE01, 0xE31),
                                *range(0x1100, 0x1200),
                                *range(0x2010, 0x2040), *range(0x3041, 0x3100), *range(0x4E00, 0x4F00)]))
    words = []
    for token in smollm2()["tokens"][17:]:
        try:
            words.append(decode_characters(token).decode())
        except UnicodeDecodeError:
            continue
    for word in [*(f for letter in letters for f in (letter, " " + letter)), *words]:
        word = word.lower() if lowercase else word
        start, text = word.startswith(" "), word.strip()
        if text and " " not in text and "\n" not in text and "\0" not in text:
            known["▁" + text if start else text] = None
    texts = list(known)
    writer = _writer(path, "bert")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(texts)
    writer.add_token_types(kinds + [NORMAL] * (len(texts) - len(kinds)))
    for name, token in (("padding", 0), ("unknown", 1), ("cls", 2), ("bos", 2), ("seperator", 3), ("mask", 4)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    if not lowercase:
        writer.add_bool("tokenizer.ggml.normalizer.lowercase", False)
    _finish(writer)


# One of each family of pre-tokenisers.
PROBES = ("default", "gpt-2", "smollm", "llama-bpe", "qwen2", "glm4", "jais-2", "qwen35", "seed-coder", "exaone-moe",
          "minicpm5", "falcon", "gpt-4o", "tekken", "deepseek-llm", "deepseek-coder", "deepseek-v3",
          "bloom", "viking", "dbrx", "laguna", "ufakzeka", "spark2_5", "granite-embed-multi-97m")
VARIANTS = {
    "smollm": lambda path: write_byte_pairs(path, "smollm"),
    "gpt-2": lambda path: write_byte_pairs(path, "gpt-2", add_eos=True, user_defined=("Ġthe", "Hello", "ing")),
    "default": lambda path: write_byte_pairs(path, "default"),
    "no pre": lambda path: write_byte_pairs(path, None),
    "llama-bpe": lambda path: write_byte_pairs(path, "llama-bpe", user_defined=("Hello",)),
    "qwen2": lambda path: write_byte_pairs(path, "qwen2"),
    "scored": write_scored,
    "scored, ties": lambda path: write_scored(path, ties=50),
    "scored, crossing": lambda path: write_scored(path, ties=50, crossing=("o▁w", "a▁b", "s▁", "e▁t", "the▁")),
    "scored, no prefix": lambda path: write_scored(path, space_prefix=False),
    "scored, phi-3": lambda path: write_scored(path, name="A Phi-3 Model"),
    **{f"probe {name}": partial(write_probe, pre=name) for name in PROBES},
}
WORD_PIECES = {"word pieces": write_word_pieces, "word pieces, cased": partial(write_word_pieces, lowercase=False)}
