"""Model files with random weights in the shapes that the speed tables name.

    python -m benchmarks.models tinyllama-q4_k_m OUT.gguf

Speed depends on shapes and types alone.  The bytes of the blocks are random, with scales that keep the numbers of a
forward pass ordinary (weights of about 1/50), so that no operand is denormal, infinite or NaN.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np

SPREAD = 0.02                                # standard deviation of the weights, roughly


@dataclass(frozen=True)
class Shape:
    """Sizes of a llama model."""
    layers: int = 22
    width: int = 2048
    hidden: int = 5632
    heads: int = 32
    kv_heads: int = 4
    vocabulary: int = 32000
    context: int = 8192


TINYLLAMA = Shape()


def q8_0(rng: np.random.Generator, blocks: int) -> np.ndarray:
    out = np.empty((blocks, 34), np.uint8)
    out[:, :2] = _halves(np.full(blocks, SPREAD / 73))
    out[:, 2:] = rng.integers(-127, 128, (blocks, 32), np.int8).view(np.uint8)
    return out


def q4_k(rng: np.random.Generator, blocks: int) -> np.ndarray:
    out = rng.integers(0, 256, (blocks, 144), np.uint8)
    out[:, :2] = _halves(np.full(blocks, SPREAD / 220))
    out[:, 2:4] = _halves(np.full(blocks, 7.5 * SPREAD / 220))
    return out


def q6_k(rng: np.random.Generator, blocks: int) -> np.ndarray:
    out = rng.integers(0, 256, (blocks, 210), np.uint8)
    out[:, 192:208] = rng.integers(20, 64, (blocks, 16), np.uint8)
    out[:, 208:] = _halves(np.full(blocks, SPREAD / 780))
    return out


def _halves(values: np.ndarray) -> np.ndarray:
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


BLOCKS: dict[str, tuple[int, Callable]] = {"Q8_0": (32, q8_0), "Q4_K": (256, q4_k), "Q6_K": (256, q6_k)}


def q4_k_m(name: str, layer: int, layers: int) -> str:
    """llama.cpp's mixture: the head, and values and down projections of half the layers, in Q6_K."""
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "Q6_K" if name == "output" or (more and name in ("attn_v", "ffn_down")) else "Q4_K"


TYPES: dict[str, Callable[[str, int, int], str]] = {
    "tinyllama-q4_k_m": q4_k_m, "tinyllama-q8_0": lambda name, layer, layers: "Q8_0"}


def add_vocabulary(writer: Any, count: int) -> None:
    """A vocabulary of `count` entries: three special ones, 256 bytes and made-up words."""
    words = [f"▁w{i}" for i in range(count - 259)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(words))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_vocab_size(count)


def write_llama(path: Path, s: Shape, type_of: Callable[[str, int, int], str], seed: int = 1) -> None:
    """A llama model with random weights; its vocabulary is 256 bytes and made-up words."""
    import gguf
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("random weights")
    writer.add_context_length(s.context)
    writer.add_embedding_length(s.width)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.hidden)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(s.width // s.heads)
    add_vocabulary(writer, s.vocabulary)
    rng = np.random.default_rng(seed)
    kv = s.width // s.heads * s.kv_heads

    def matrix(name: str, rows: int, columns: int, layer: int = -1) -> None:
        kind = type_of(name, layer, s.layers)
        block, make = BLOCKS[kind]
        data = make(rng, rows * columns // block).reshape(rows, -1)
        full = f"{name}.weight" if layer < 0 else f"blk.{layer}.{name}.weight"
        writer.add_tensor(full, data, raw_dtype=gguf.GGMLQuantizationType[kind])

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(s.width, np.float32))
    matrix("token_embd", s.vocabulary, s.width)
    norm("output_norm")
    matrix("output", s.vocabulary, s.width)
    for i in range(s.layers):
        norm(f"blk.{i}.attn_norm")
        norm(f"blk.{i}.ffn_norm")
        for name, rows, columns in (("attn_q", s.width, s.width), ("attn_k", kv, s.width), ("attn_v", kv, s.width),
                                    ("attn_output", s.width, s.width), ("ffn_gate", s.hidden, s.width),
                                    ("ffn_up", s.hidden, s.width), ("ffn_down", s.width, s.hidden)):
            matrix(name, rows, columns, i)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=sorted(TYPES))
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    write_llama(options.out, TINYLLAMA, TYPES[options.what])
    return 0


if __name__ == "__main__":
    sys.exit(main())
