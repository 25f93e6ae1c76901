"""Write what the tokeniser tests compare with.

    python tools/make_tokenizer_oracles.py vocabulary MODEL.gguf   # tests/oracles/smollm2_vocab.json.gz
    python tools/make_tokenizer_oracles.py variants                # tests/oracles/tokenizer_variants.json.gz
    python tools/make_tokenizer_oracles.py real MODEL.gguf         # tests/oracles/gemma3_tokens.json.gz

`vocabulary` extracts SmolLM2-135M-Instruct's tokens and merges (Apache-2.0), so that the tests need no model file.
`variants` needs llama-cpp-python: it writes the vocabulary files of tests/models/vocabularies.py and records
llama.cpp's ids for the strings below, special tokens parsed and begin/end tokens added as the file says.
`real` does the same with a model file (Gemma 3 270M, whose vocabulary is not stored here).
"""

import argparse
import gzip
import json
import random
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
ORACLES = ROOT / "tests" / "oracles"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models")]

PIECES = """
's 'T 're 'LL 'ſ a B ab the Hello world é é ß İ ı 日本語 한국어 עברית العربية ไทย हिन्दी 😀 👨‍👩‍👧 🇩🇪 1 23 456 ٣
Ⅷ ½ ² ४ ! ?! ... — € $ <|im_start|> <|im_end|> <|endoftext|> <|im_ start|> <repo_name> <reponame> <s>
</s> <unk> <0x0A> <div> [UNK] _ __init__ \\ / // http://x.y/z?q=1 {} [[ ]] && &amp; # C++ can't I'M x' ''
▁ ▁▁
""".split()
SPACES = [" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u0085", "\u2003", "\u3000", "\u2028"]
# Assigned in different Unicode versions, unassigned, private, non-characters, controls, zero width.
STRANGE = ["\u200b", "\u200d", "\ufeff", "\0", "\1", "\4", "\x7f", "\x1c", "\x1f", "\u180e", "\U0002ebf0", "\u2ffc",
           "\U00010efd", "\u1c89", "\U0001e5d0", "\ud7fc", "\uff11", "ǅ", "ʰ", "\u0378", "\ue000", "\U0010ffff",
           "\ufffd"]


def strings(count: int) -> list[str]:
    """Nasty strings: joined pieces, random code points, and long runs."""
    rng = random.Random(20260)
    pool = PIECES + SPACES * 3 + STRANGE
    made = ["", " ", "\n", " " * 50 + "x", " " * 50, "\n" * 30, "a" * 500, "ab " * 60, "'" * 20,
            " ".join(f"it'{end}{letter}" for end in ("s", "t", "m", "d", "re") for letter in "abcdefgh")]
    while len(made) < count * 3 // 4:
        made.append("".join(rng.choices(pool, k=rng.choice([1, 2, 3, 5, 8, 15]))))
    while len(made) < count:
        points = [rng.randrange(rng.choice([0x80, 0x800, 0x10000, 0x110000])) for _ in range(rng.randint(1, 12))]
        made.append("".join(chr(point) for point in points if not 0xD800 <= point < 0xE000))
    return made


def write(name: str, value: object) -> None:
    raw = json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()
    packed = gzip.compress(raw, 9, mtime=0)
    (ORACLES / name).write_bytes(packed)
    print(f"{ORACLES / name}: {len(packed)} bytes")


def vocabulary(model: str) -> None:
    from m3jit.models.gguf_file import GGUFFile

    metadata = GGUFFile(model).metadata
    tokens, merges = (metadata[f"tokenizer.ggml.{name}"].tolist() for name in ("tokens", "merges"))
    head = len(tokens) - len(merges)
    if tokens[head:] != [merge.replace(" ", "", 1) for merge in merges]:
        sys.exit(f"{model}: tokens from {head} on are not the joined merges; this is not SmolLM2's vocabulary")
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    write("smollm2_vocab.json.gz", {
        "source": "SmolLM2-135M-Instruct, HuggingFaceTB", "licence": "Apache-2.0", "head": tokens[:head],
        "control": [index for index, kind in enumerate(kinds) if kind == 3], "merges": merges,
        "metadata": {key: metadata[key] for key in metadata
                     if key.startswith("tokenizer.") and metadata.type_name(key) != "array"}})


def variants() -> None:
    from llama_cpp import Llama
    from vocabularies import VARIANTS, WORD_PIECES

    texts = strings(400)
    ids = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in (VARIANTS | WORD_PIECES).items():
            path = Path(folder) / "vocabulary.gguf"
            make(path)
            model = Llama(str(path), vocab_only=True, verbose=False)
            ids[name] = [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]
    write("tokenizer_variants.json.gz", {"llama-cpp-python": version("llama-cpp-python"), "strings": texts, "ids": ids})


def real(path: str) -> None:
    from llama_cpp import Llama

    texts = strings(300)
    model = Llama(path, vocab_only=True, verbose=False)
    write("gemma3_tokens.json.gz", {
        "llama-cpp-python": version("llama-cpp-python"), "strings": texts,
        "ids": [model.tokenize(text.encode(), add_bos=True, special=True) for text in texts]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("vocabulary", "variants", "real"))
    parser.add_argument("model", nargs="?")
    options = parser.parse_args()
    variants() if options.what == "variants" else {"vocabulary": vocabulary, "real": real}[options.what](options.model)
