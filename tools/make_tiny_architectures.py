"""Write tiny random GGUF models, one for each architecture and weight type: what `make_tiny_models.py` is for `llama`.

Width 256, feed-forward width 256, a vocabulary of 272 byte-level tokens, a context of 128; layers, heads and the rest
stand in FAMILIES. Matrices have the file's weight type, norm gains and biases are F32. Sizes are chosen so that every
part of an architecture changes the logits: windows are shorter than the prompt, soft caps are within reach of the
scores, head sizes differ from width / heads where the format allows it.

Rounding can change which experts a token goes to, and then logits can be compared by luck alone. So in quantised files
the routers read ROUTED features that no layer writes: the order of the experts is that of the embeddings, exactly.
In F32 files they read all features.

The files are made where they are needed and never stored; tests/oracles/tiny_architectures.json.gz holds the SHA-256 of
each and what llama.cpp computes with it.

    python tools/make_tiny_architectures.py DIRECTORY [--family NAME ...]
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from make_tiny_models import (TOKEN_CONTROL, TOKEN_NORMAL, add_matrix, built, byte_alphabet, finish, print_sums,
                              q4_k_blocks, uniform)

SEED = 31337
WIDTH, FFN, VOCAB, CONTEXT, EPS = 256, 256, 272, 128, 1e-5
SPECIALS = ("<unk>", "<s>", "</s>", "<|endoftext|>")           # llama.cpp looks for all of them in phi3 files
TYPES = {name: Type[name] for name in ("F32", "Q8_0", "Q4_K")}
ROUTED = 16


@dataclass(frozen=True)
class Family:
    """One architecture: sizes, metadata beyond what all have, and which tensors a layer has."""
    arch: str
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    keys: dict[str, Any] = field(default_factory=dict)         # without the architecture's name
    tied: bool = False
    bias: tuple[str, ...] = ()                                 # products with a bias
    norms: tuple[str, ...] = ("attn_norm", "ffn_norm")
    head_norms: bool = False                                   # gains of q and k per head
    wide_norms: bool = False                                   # gains of q and k over all heads
    fused: bool = False                                        # one tensor for q, k, v and one for gate, up
    experts: int = 0
    extra: Callable[["Family"], dict[str, np.ndarray]] | None = None   # further F32 tensors
    embedding: float = 1.0                                     # standard deviation
    types: tuple[str, ...] = ("F32", "Q8_0", "Q4_K")           # a variant of another family needs fewer


GEMMA_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
WINDOW = {"attention.sliding_window": 8}


def longrope(family: Family) -> dict[str, np.ndarray]:
    """Factors that divide the rotary frequencies: 1 .. 2 for short contexts, 1 .. 9 for long ones."""
    count = family.keys.get("rope.dimension_count", family.head_dim) // 2
    return {f"rope_factors_{name}.weight": (1 + top * (0.5 + 0.5 * uniform(SEED, name, count))).astype(np.float32)
            for name, top in (("short", 1), ("long", 8))}


def llama3_factors(family: Family) -> dict[str, np.ndarray]:
    """Factors 1 .. 8, as Llama 3.1's files have them."""
    return {"rope_freqs.weight": (4.5 + 3.5 * uniform(SEED, "freqs", family.head_dim // 2)).astype(np.float32)}


FAMILIES: dict[str, Family] = {
    "llama3": Family("llama", keys={"rope.freq_base": 500000.0}, tied=True, embedding=0.19, extra=llama3_factors),
    "llama-linear": Family("llama", keys={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, types=("F32",)),
    "llama-yarn": Family("llama", keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                                        "rope.scaling.original_context_length": 64}, types=("F32",)),
    "qwen2": Family("qwen2", keys={"rope.freq_base": 1000000.0}, bias=("attn_q", "attn_k", "attn_v")),
    "qwen3": Family("qwen3", head_dim=128, keys={"rope.freq_base": 1000000.0}, tied=True, embedding=0.19,
                    head_norms=True),
    "llama-experts": Family("llama", experts=4, keys={"expert_count": 4, "expert_used_count": 2}),
    "qwen3moe": Family("qwen3moe", head_dim=128, head_norms=True, experts=8,
                       keys={"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": FFN}),
    "gemma2": Family("gemma2", head_dim=128, norms=GEMMA_NORMS, tied=True, embedding=0.19,
                     keys=WINDOW | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0}),
    "gemma3": Family("gemma3", layers=7, kv_heads=1, head_dim=128, norms=GEMMA_NORMS, tied=True, head_norms=True,
                     embedding=0.08, keys=WINDOW | {"rope.freq_base": 1000000.0}),
    "phi3": Family("phi3", fused=True, extra=longrope, types=("F32",),
                   keys={"rope.scaling.original_context_length": 4096, "rope.scaling.attn_factor": 1.19}),
    "phi3-long": Family("phi3", fused=True, extra=longrope,
                        keys={"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.19,
                              "rope.dimension_count": 48}),
    "olmo2": Family("olmo2", norms=("post_attention_norm", "post_ffw_norm"), wide_norms=True,
                    keys={"rope.freq_base": 500000.0}),
    "olmo2-window": Family("olmo2", layers=4, norms=("post_attention_norm", "post_ffw_norm"), wide_norms=True,
                           types=("F32",), keys=WINDOW | {"rope.freq_base": 500000.0}),
}


def matrices(family: Family) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors that have the file's weight type."""
    q, kv = family.heads * family.head_dim, family.kv_heads * family.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, WIDTH)}
    if not family.tied:
        shapes["output"] = (VOCAB, WIDTH)
    layer: dict[str, tuple[int, ...]] = {"attn_output": (WIDTH, q)}
    layer |= {"attn_qkv": (q + 2 * kv, WIDTH)} if family.fused else \
        {"attn_q": (q, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH)}
    if family.experts:
        layer |= {"ffn_gate_exps": (family.experts, FFN, WIDTH), "ffn_up_exps": (family.experts, FFN, WIDTH),
                  "ffn_down_exps": (family.experts, WIDTH, FFN)}
    elif family.fused:
        layer |= {"ffn_up": (2 * FFN, WIDTH), "ffn_down": (WIDTH, FFN)}
    else:
        layer |= {"ffn_gate": (FFN, WIDTH), "ffn_up": (FFN, WIDTH), "ffn_down": (WIDTH, FFN)}
    for i in range(family.layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def vectors(family: Family, kind: Type = Type.F32) -> dict[str, np.ndarray]:
    """Name -> values of the F32 tensors of a file with weights of that type: gains around 1, biases around 0,
    routers."""
    sizes = {"output_norm.weight": WIDTH}
    widths = {"attn_q": family.heads * family.head_dim, "attn_k": family.kv_heads * family.head_dim,
              "attn_v": family.kv_heads * family.head_dim}
    biases = {}
    for i in range(family.layers):
        sizes |= {f"blk.{i}.{name}.weight": WIDTH for name in family.norms}
        if family.head_norms:
            sizes |= {f"blk.{i}.attn_{n}_norm.weight": family.head_dim for n in "qk"}
        if family.wide_norms:
            sizes |= {f"blk.{i}.attn_{n}_norm.weight": widths[f"attn_{n}"] for n in "qk"}
        biases |= {f"blk.{i}.{name}.bias": widths[name] for name in family.bias}
    out = {name: 1.0 + 0.5 * uniform(SEED, name, size) for name, size in sizes.items()}
    out |= {name: uniform(SEED, name, size) for name, size in biases.items()}
    if family.experts:
        for i in range(family.layers):
            name = f"blk.{i}.ffn_gate_inp.weight"
            out[name] = uniform(SEED, name, family.experts * WIDTH).reshape(family.experts, WIDTH) * 0.2
            if kind is not Type.F32:
                out[name] *= (np.arange(WIDTH) < ROUTED) * (WIDTH / ROUTED)**0.5
    return {name: value.astype(np.float32) for name, value in out.items()} | \
        (family.extra(family) if family.extra else {})


def encoded(name: str, shape: tuple[int, ...], std: float, kind: Type) -> np.ndarray:
    """One matrix in the storage of `kind`."""
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    if kind is Type.Q4_K:
        return q4_k_blocks(SEED, name, rows, columns, std).reshape(*shape[:-1], -1)
    weights = (uniform(SEED, name, rows * columns) * (std * 3.0**0.5)).astype(np.float32).reshape(shape)
    return weights if kind is Type.F32 else gguf.quants.quantize(weights, kind)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Control tokens, 256 bytes, one merge, and words that no merge makes: only ids are compared."""
    spare = [f"<spare{i}>" for i in range(VOCAB - 257 - len(SPECIALS))]
    tokens = [*SPECIALS, *byte_alphabet(), "th", *spare]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TOKEN_CONTROL] * len(SPECIALS) + [TOKEN_NORMAL] * (VOCAB - len(SPECIALS)))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)


def write_model(path: Path, family: Family, kind: Type, dequantised: bool = False) -> None:
    """Write one model; dequantised: the same values of its weights, stored as F32."""
    writer = gguf.GGUFWriter(path, family.arch)
    writer.add_name(f"tiny random {family.arch}, {kind.name} weights")
    writer.add_block_count(family.layers)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(family.heads)
    writer.add_head_count_kv(family.kv_heads)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_vocab_size(VOCAB)
    keys = {"context_length": CONTEXT, "rope.dimension_count": family.head_dim, **family.keys}
    if family.head_dim != WIDTH // family.heads:
        keys |= {"attention.key_length": family.head_dim, "attention.value_length": family.head_dim}
    for key, value in keys.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{family.arch}.{key}", value)
    add_tokenizer(writer)
    for name, values in vectors(family, kind).items():
        writer.add_tensor(name, values)
    for name, shape in matrices(family).items():
        std = family.embedding if name.startswith("token_embd") else \
            (3.0 if name.startswith("output.") else 1.5) / shape[-1]**0.5
        raw = encoded(name, shape, std, kind)
        if family.experts and kind is not Type.F32 and ("attn_output" in name or "ffn_down" in name):
            raw[..., :ROUTED, :] = 0                 # blocks of zeros
        add_matrix(writer, name, raw, shape, kind, dequantised)
    finish(writer)


def names() -> list[str]:
    """Every model: "family/type"."""
    return [f"{family}/{kind}" for family in FAMILIES for kind in FAMILIES[family].types]


def build(directory: Path | str, name: str, dequantised: bool = False) -> Path:
    """Write the model `name` ("family/type") into a directory, unless it is there."""
    family, _, kind = name.partition("/")
    path = Path(directory) / f"{family}-{kind.lower()}{'-f32' if dequantised else ''}.gguf"
    return built(path, lambda new: write_model(new, FAMILIES[family], TYPES[kind], dequantised))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write tiny random GGUF models of each architecture and weight type.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", dest="families", action="append", choices=tuple(FAMILIES), help="(repeatable)")
    options = parser.parse_args(arguments)
    print_sums(build(options.directory, name) for name in names()
               if not options.families or name.partition("/")[0] in options.families)
    return 0


if __name__ == "__main__":
    sys.exit(main())
