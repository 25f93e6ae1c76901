"""Write tiny random llama-architecture GGUF models, one file for each weight type.

The models have 2 layers, width 256, 4 query heads and 2 key/value heads of 64, feed-forward width 512, a vocabulary
of 512 byte-level BPE tokens, an output matrix of their own (not tied) and a context of 256. All matrices of a file
have the file's weight type; norm gains are F32. Weights come from SplitMix64 over (seed, tensor name, element
number), so files are a pure function of the seed and of the quantiser: F16, BF16 and the types that the gguf package
quantises to are rounded by it from the same float32 weights (those of F64 are not rounded to float32); the others are
drawn directly as random valid blocks. In the file MIX the matrices of a layer have different types, as in the mixes
that quantisers make.

The files are made where they are needed and never stored; tests/oracles/tiny_logits.json.gz (TYPES) and
tiny_types.json.gz (MORE_TYPES) hold the SHA-256 of each and what llama.cpp computes with it.

    python tools/make_tiny_models.py DIRECTORY [--seed N] [--type NAME ...]
"""
from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

SEED = 20260
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, CONTEXT = 2, 256, 4, 2, 64, 512, 512, 256
SUPER_BLOCK = 256  # weights in one Q4_K or Q6_K block
TYPES = {name: Type[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")}
MIX = "MIX"
MORE_TYPES: dict[str, Type | None] = {name: Type[name] for name in (
    "F64", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4")} | {MIX: None}
# part of a tensor's name -> its type in the layers 0 and 1 of MIX
MIXED = {"token_embd": ("Q5_K",) * 2, "output.": ("Q6_K",) * 2, "attn_q": ("Q5_0", "Q4_K"),
         "attn_k": ("Q8_0", "IQ4_NL"),
         "attn_v": ("Q6_K", "Q5_1"), "attn_output": ("Q4_K", "F16"), "ffn_gate": ("Q4_K", "Q5_0"),
         "ffn_up": ("Q5_0", "Q4_K"), "ffn_down": ("Q6_K", "Q4_1")}
# type -> where d stands, where dmin does, dmin / d, and the standard deviation of the values of random bytes with d = 1
RANDOM_BLOCKS: dict[str, tuple[int, int | None, float, float]] = {
    "Q2_K": (80, 82, 1.5, 14.0), "Q3_K": (108, None, 0.0, 43.0), "Q5_K": (0, 2, 15.5, 500.0),
    "IQ4_NL": (0, None, 0.0, 69.0), "IQ4_XS": (0, None, 0.0, 1280.0)}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKEN_NORMAL, TOKEN_CONTROL = 1, 3

# Only the counts of letter pairs in this text matter: it gives the tiny vocabulary plausible merges.
MERGE_TEXT = """
A river does not hurry. It leaves the mountain as a thread of cold water, gathers the smaller streams that come down
from both sides, and by the time it reaches the plain it carries sand, leaves and the colour of every field it passed.
People who live beside it learn its moods: in spring the banks are under water for a week, in late summer a child can
walk across on the stones. They build their houses a little higher than their parents did, they mark the highest flood
on the wall of the mill, and they argue about whether the next one will be worse. The mill itself stopped grinding long
ago. Its wheel still turns when the sluice is open, because nobody found a good reason to stop it, and because visitors
like the sound. On market days the square in front of the church fills with bread, cheese, apples, honey and second
hand books. You can buy a clock that has not worked for thirty years, and the man who sells it will tell you exactly
why it stopped and what it would take to repair it. Nobody does. The clocks are bought for the stories. In the evening
the last tables are folded, somebody sweeps the cabbage leaves into the gutter, and the river takes them away with the
rest, past the weir, under the iron bridge and out of sight, to the sea that most of the town has never seen.
"""


def uniform(seed: int, name: str, count: int) -> np.ndarray:
    """`count` float64 values in [-1, 1), element i being SplitMix64(key + (i+1)*golden) of key = first 8 bytes of
    SHA-256("seed/name"). Spelled out here because NumPy does not promise the same stream from release to release."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    z = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def integers(seed: int, name: str, count: int, low: int, high: int) -> np.ndarray:
    """`count` int64 values in low..high, both included."""
    return np.floor((uniform(seed, name, count) * 0.5 + 0.5) * (high - low + 1)).astype(np.int64) + low


def byte_alphabet() -> list[str]:
    """The GPT-2 byte-to-character table: printable Latin-1 bytes stand for themselves, the rest for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def byte_pair_merges(text: str, count: int) -> list[tuple[str, str]]:
    """The `count` most frequent merges of `text`, ties broken alphabetically; words keep their leading space."""
    alphabet = byte_alphabet()
    space = alphabet[0x20]
    words = Counter(tuple(space + "".join(alphabet[b] for b in word.encode())) for word in text.split())
    merges: list[tuple[str, str]] = []
    for _ in range(count):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merge(word, best): times for word, times in words.items()})
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    at = 0
    while at < len(word):
        if word[at:at + 2] == pair:
            out.append(pair[0] + pair[1])
            at += 2
        else:
            out.append(word[at])
            at += 1
    return tuple(out)


def q4_k_blocks(seed: int, name: str, rows: int, columns: int, std: float) -> np.ndarray:
    """Random Q4_K blocks, (rows, bytes) uint8: weight = d*sc*q - dmin*m, q in 0..15, sc and m in 0..63 per 32 weights.

    Block bytes: d f16, dmin f16, 12 bytes of packed 6-bit sc and m, 128 bytes of nibbles (low nibbles are the first 32
    of each 64). m follows sc so that a sub-block is roughly centred (dmin = 7.5 d); sc runs over its whole range.
    """
    blocks = rows * columns // SUPER_BLOCK
    sc = integers(seed, name + ".sc", blocks * 8, 0, 63).reshape(blocks, 8)
    m = np.clip(sc + integers(seed, name + ".m", blocks * 8, -6, 6).reshape(blocks, 8), 0, 63)
    # std of sc*(q - 7.5) for sc uniform on 0..63 and q uniform on 0..15: sqrt(E[sc^2] * 21.25) = 168
    d = (std / 168.0 * (1.0 + 0.5 * uniform(seed, name + ".d", blocks))).astype(np.float16)
    dmin = (d.astype(np.float32) * 7.5).astype(np.float16)
    scales = np.empty((blocks, 12), np.uint8)
    scales[:, 0:4] = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    scales[:, 4:8] = m[:, :4] | (m[:, 4:] >> 4) << 6
    scales[:, 8:12] = (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    nibbles = integers(seed, name + ".qs", blocks * 128, 0, 255).astype(np.uint8).reshape(blocks, 128)
    parts = [d.reshape(-1, 1).view(np.uint8), dmin.reshape(-1, 1).view(np.uint8), scales, nibbles]
    return np.concatenate(parts, axis=1).reshape(rows, -1)


def q6_k_blocks(seed: int, name: str, rows: int, columns: int, std: float) -> np.ndarray:
    """Random Q6_K blocks, (rows, bytes) uint8: weight = d*scale*(q - 32), q in 0..63, int8 scale per 16 weights.

    Block bytes: 128 low nibbles, 64 upper bit pairs, 16 int8 scales, d f16. Scales and d take both signs, and scales
    reach -128 and 127: a reader that drops a sign or clips a scale is off everywhere.
    """
    blocks = rows * columns // SUPER_BLOCK
    quants = integers(seed, name + ".q", blocks * 192, 0, 255).astype(np.uint8).reshape(blocks, 192)
    scales = integers(seed, name + ".scale", blocks * 16, -128, 127).astype(np.int8).reshape(blocks, 16)
    sign = np.where(integers(seed, name + ".sign", blocks, 0, 1) == 1, 1.0, -1.0)
    # std of scale*(q - 32): sqrt(5461 * 341.5) = 1366
    d = (sign * std / 1366.0 * (1.0 + 0.5 * uniform(seed, name + ".d", blocks))).astype(np.float16)
    return np.concatenate([quants, scales.view(np.uint8), d.reshape(-1, 1).view(np.uint8)], axis=1).reshape(rows, -1)


def random_blocks(seed: int, name: str, kind: Type, rows: int, columns: int, std: float) -> np.ndarray:
    """Blocks of random bytes, (rows, bytes) uint8, with d such that the values have the wanted standard deviation."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    at, at_min, ratio, spread = RANDOM_BLOCKS[kind.name]
    count = rows * columns // block
    raw = integers(seed, name + ".bytes", count * nbytes, 0, 255).astype(np.uint8).reshape(count, nbytes)
    d = (std / spread * (1.0 + 0.5 * uniform(seed, name + ".d", count))).astype(np.float16)
    raw[:, at:at + 2] = d.reshape(-1, 1).view(np.uint8)
    if at_min is not None:
        raw[:, at_min:at_min + 2] = (d.astype(np.float32) * ratio).astype(np.float16).reshape(-1, 1).view(np.uint8)
    return raw.reshape(rows, -1)


def type_of(name: str, model: str) -> Type:
    """The type of matrix `name` in the file `model`."""
    if model != MIX:
        return Type[model]
    part = next(p for p in MIXED if (p in name if p != "output." else name.startswith(p)))
    return Type[MIXED[part][int(".1." in name)]]


def matrix_shapes() -> dict[str, tuple[int, int, float]]:
    """Tensor name -> (rows, columns, wanted standard deviation). Logits come out with a standard deviation near 3."""
    shapes = {"token_embd.weight": (VOCAB, WIDTH, 1.0), "output.weight": (VOCAB, WIDTH, 3.0 / WIDTH**0.5)}
    for layer in range(LAYERS):
        for part, rows, columns in (
            ("attn_q", HEADS * HEAD_DIM, WIDTH), ("attn_k", KV_HEADS * HEAD_DIM, WIDTH),
            ("attn_v", KV_HEADS * HEAD_DIM, WIDTH), ("attn_output", WIDTH, HEADS * HEAD_DIM),
            ("ffn_gate", FFN, WIDTH), ("ffn_up", FFN, WIDTH), ("ffn_down", WIDTH, FFN),
        ):
            shapes[f"blk.{layer}.{part}.weight"] = (rows, columns, 1.5 / columns**0.5)
    return shapes


def encoded_matrix(seed: int, name: str, kind: Type) -> np.ndarray:
    """One matrix in the storage of `kind`; the float types and the legacy quants all round the same float32 weights."""
    rows, columns, std = matrix_shapes()[name]
    if kind is Type.Q4_K:
        return q4_k_blocks(seed, name, rows, columns, std)
    if kind is Type.Q6_K:
        return q6_k_blocks(seed, name, rows, columns, std)
    if kind.name in RANDOM_BLOCKS:
        return random_blocks(seed, name, kind, rows, columns, std)
    exact = (uniform(seed, name, rows * columns) * (std * 3.0**0.5)).reshape(rows, columns)
    if kind is Type.F64:
        return exact
    weights = exact.astype(np.float32)
    return weights if kind is Type.F32 else gguf.quants.quantize(weights, kind)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A GPT-2 style byte-level BPE vocabulary: 3 control tokens, 256 bytes, 253 merged tokens."""
    merges = byte_pair_merges(MERGE_TEXT, VOCAB - 256 - len(SPECIALS))
    tokens = [*SPECIALS, *byte_alphabet(), *(left + right for left, right in merges)]
    assert len(tokens) == len(set(tokens)) == VOCAB
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TOKEN_CONTROL] * len(SPECIALS) + [TOKEN_NORMAL] * (VOCAB - len(SPECIALS)))
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)


def add_matrix(writer: gguf.GGUFWriter, name: str, raw: np.ndarray, shape: tuple[int, ...], kind: Type,
               dequantised: bool) -> None:
    """A tensor of encoded weights; dequantised: the same values, stored as F32."""
    if dequantised:
        writer.add_tensor(name, gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(shape))
    else:
        writer.add_tensor(name, raw, raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def built(path: Path, write: Callable[[Path], None]) -> Path:
    """A file, written unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    return path


def print_sums(paths: Iterable[Path]) -> None:
    """A line for each file: its SHA-256, bytes and path."""
    for path in paths:
        print(f"{sha256(path)}  {path.stat().st_size:>8}  {path}")


def write_model(path: Path, model: str, seed: int = SEED, split: int = 0, as_f32: bool = False) -> None:
    """Write one model, whose matrices have the type `model` or, with MIX, several; an existing file is replaced.

    split > 0: as several files of that many tensors, NAME-00001-of-0000N.gguf.  as_f32: F64 weights rounded to F32."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_name(f"tiny random llama, {model} weights")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    add_tokenizer(writer)
    gains = ["output_norm.weight"]
    gains += [f"blk.{layer}.{part}.weight" for layer in range(LAYERS) for part in ("attn_norm", "ffn_norm")]
    for name in gains:
        writer.add_tensor(name, (1.0 + 0.5 * uniform(seed, name, WIDTH)).astype(np.float32))
    for name in matrix_shapes():
        kind = type_of(name, model)
        raw = encoded_matrix(seed, name, kind)
        if as_f32:
            raw, kind = raw.astype(np.float32), Type.F32
        writer.add_tensor(name, raw, raw_dtype=kind)
    finish(writer)


def build(directory: Path | str, names: tuple[str, ...] = tuple(TYPES), seed: int = SEED) -> dict[str, Path]:
    """Write the models `names` (keys of TYPES and MORE_TYPES) as DIRECTORY/tiny-NAME.gguf; returns name -> path."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {name: directory / f"tiny-{name.lower()}.gguf" for name in names}
    for name, path in paths.items():
        write_model(path, name, seed)
    return paths


def sha256(path: Path) -> str:
    """SHA-256 of a file as hexadecimal text."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write tiny random GGUF models, one for each weight type.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--type", dest="names", action="append", choices=(*TYPES, *MORE_TYPES),
                        help="this type (repeatable)")
    options = parser.parse_args(arguments)
    print_sums(build(options.directory, tuple(options.names or TYPES), options.seed).values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
