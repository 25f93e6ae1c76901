"""Write tiny random GGUF models with latent attention (architecture deepseek2), in both layouts of its files.

Width 256 and tokens as make_tiny_architectures.py; 4 heads with keys of 64 + 32 (rotated) features and values of 96, a
latent row of 128; 8 experts, 3 of them chosen.  Older files hold keys and values of the latent in one matrix
(attn_kv_b), newer ones have attn_k_b and attn_v_b, and one kv head in their metadata.  Both layouts of a family hold
the same numbers, so in F32 they are the same model.  llama.cpp takes files of 26 layers for "lite" ones, whose queries
are not compressed.

Rounding can change which experts a token goes to, and then logits can be compared by luck alone.  So experts have F32
weights, but for the family "routed", whose routers read ROUTED features that no layer writes, as in
make_tiny_architectures.py.  It has two layers and no YaRN: over three with it, llama.cpp's own perplexity is 3 % from
the unrounded model's, and a rule of 1 % would judge nobody.  In its Q4_K file the matrices whose rows are no whole
super-blocks (the second ones of the latents, attn_output) are Q8_0; the experts are Q4_K.

The files are made where they are needed and never stored; tests/oracles/tiny_deepseek.json.gz holds the SHA-256 of each
and what llama.cpp computes with it.

    python tools/make_tiny_deepseek.py DIRECTORY
"""
from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import make_tiny_architectures as tiny
import numpy as np
from gguf import GGMLQuantizationType as Type
from make_tiny_models import SUPER_BLOCK, add_matrix, built, finish, print_sums, q4_k_blocks, uniform

WIDTH, VOCAB, CONTEXT, EPS, SEED = tiny.WIDTH, tiny.VOCAB, tiny.CONTEXT, tiny.EPS, 777
HEADS, NOPE, ROPE, VALUE, RANK, Q_RANK, FFN = 4, 64, 32, 96, 128, 64, 256
EXPERT_FFN = 64
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_log_multiplier": 0.0707}


@dataclass(frozen=True)
class Family:
    """One kind of model; dense: layers before those with experts (none: all)."""
    layers: int = 2
    q_rank: int = Q_RANK                       # 0: queries are not compressed
    dense: int | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    probability_bias: bool = False             # of the router
    expert_ffn: int = EXPERT_FFN
    routed: bool = False                       # routers read features that no layer writes
    types: tuple[str, ...] = ("F32",)
    layouts: tuple[str, ...] = ("old", "new")


FAMILIES: dict[str, Family] = {
    "plain": Family(types=("F32", "Q8_0")),
    "yarn": Family(keys=YARN),
    "lite": Family(layers=26, q_rank=0, layouts=("new",)),
    "experts": Family(layers=3, dense=1, layouts=("new",), keys=YARN | {
        "expert_weights_scale": 1.5, "expert_weights_norm": False, "expert_gating_func": 1}),
    "sigmoid": Family(layers=2, dense=1, probability_bias=True, layouts=("new",), keys={
        "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2}),
    "groups": Family(layers=2, dense=1, probability_bias=True, layouts=("new",), keys={
        "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2, "expert_group_count": 4,
        "expert_group_used_count": 2}),
    "routed": Family(dense=1, expert_ffn=256, routed=True, types=("Q8_0", "Q4_K"), layouts=("new",), keys={
        "expert_weights_scale": 1.5, "expert_weights_norm": False, "expert_gating_func": 1}),
}
EXPERTS, USED, SHARED = 8, 3, 2


def matrices(family: Family, layout: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors with the file's weight type; those of the latent are made by `latent`."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, WIDTH), "output": (VOCAB, WIDTH)}
    q, hidden = HEADS * (NOPE + ROPE), family.expert_ffn
    for i in range(family.layers):
        layer: dict[str, tuple[int, ...]] = {"attn_kv_a_mqa": (RANK + ROPE, WIDTH),
                                             "attn_output": (WIDTH, HEADS * VALUE)}
        layer |= {"attn_q_a": (family.q_rank, WIDTH), "attn_q_b": (q, family.q_rank)} if family.q_rank else \
            {"attn_q": (q, WIDTH)}
        if family.dense is None or i < family.dense:
            layer |= {"ffn_gate": (FFN, WIDTH), "ffn_up": (FFN, WIDTH), "ffn_down": (WIDTH, FFN)}
        else:
            layer |= {"ffn_gate_exps": (EXPERTS, hidden, WIDTH), "ffn_up_exps": (EXPERTS, hidden, WIDTH),
                      "ffn_down_exps": (EXPERTS, WIDTH, hidden), "ffn_gate_shexp": (SHARED * hidden, WIDTH),
                      "ffn_up_shexp": (SHARED * hidden, WIDTH), "ffn_down_shexp": (WIDTH, SHARED * hidden)}
        layer |= {"attn_kv_b": (HEADS * (NOPE + VALUE), RANK)} if layout == "old" else \
            {"attn_k_b": (HEADS, RANK, NOPE), "attn_v_b": (HEADS, VALUE, RANK)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The f32 numbers of a matrix; a layer's latent has one matrix [heads, NOPE + VALUE, RANK] in either layout."""
    part = name.split(".")[-2]
    if part in ("attn_kv_b", "attn_k_b", "attn_v_b"):
        both = values_of(name.replace(part, "latent"), (HEADS, NOPE + VALUE, RANK))
        if part == "attn_kv_b":
            return both.reshape(shape)
        return np.ascontiguousarray(both[:, :NOPE].transpose(0, 2, 1) if part == "attn_k_b" else both[:, NOPE:])
    return (uniform(SEED, name, int(np.prod(shape))) * (deviation(name, shape) * 3.0**0.5)).astype(
        np.float32).reshape(shape)


def deviation(name: str, shape: tuple[int, ...]) -> float:
    """The standard deviation of a matrix."""
    part = name.split(".")[-2]
    return 1.0 if part == "token_embd" else (3.0 if part == "output" else 1.5) / shape[-1]**0.5


def encoded(name: str, shape: tuple[int, ...], kind: Type) -> np.ndarray:
    """One matrix in the storage of `kind`."""
    if kind is Type.Q4_K:
        rows = int(np.prod(shape[:-1]))
        return q4_k_blocks(SEED, name, rows, shape[-1], deviation(name, shape)).reshape(*shape[:-1], -1)
    return values_of(name, shape) if kind is Type.F32 else gguf.quants.quantize(values_of(name, shape), kind)


def vectors(family: Family) -> dict[str, np.ndarray]:
    """Name -> values of the F32 tensors."""
    sizes = {"output_norm.weight": WIDTH}
    routers: dict[str, np.ndarray] = {}
    for i in range(family.layers):
        b = f"blk.{i}."
        sizes |= {b + "attn_norm.weight": WIDTH, b + "ffn_norm.weight": WIDTH, b + "attn_kv_a_norm.weight": RANK}
        if family.q_rank:
            sizes[b + "attn_q_a_norm.weight"] = family.q_rank
        if family.dense is not None and i >= family.dense:
            name = b + "ffn_gate_inp.weight"
            routers[name] = uniform(SEED, name, EXPERTS * WIDTH).reshape(EXPERTS, WIDTH) * 0.2
            if family.routed:
                routers[name] *= (np.arange(WIDTH) < tiny.ROUTED) * (WIDTH / tiny.ROUTED)**0.5
            if family.probability_bias:
                routers[b + "exp_probs_b.bias"] = uniform(SEED, b + "bias", EXPERTS)
    out = {name: 1.0 + 0.5 * uniform(SEED, name, size) for name, size in sizes.items()} | routers
    return {name: value.astype(np.float32) for name, value in out.items()}


def metadata(family: Family, layout: str) -> dict[str, Any]:
    keys = {"block_count": family.layers, "embedding_length": WIDTH, "feed_forward_length": FFN, "vocab_size": VOCAB,
            "context_length": CONTEXT, "attention.head_count": HEADS, "attention.layer_norm_rms_epsilon": EPS,
            "rope.dimension_count": ROPE, "attention.kv_lora_rank": RANK,
            "expert_feed_forward_length": family.expert_ffn, "expert_shared_count": SHARED,
            "leading_dense_block_count": family.layers if family.dense is None else family.dense, **family.keys}
    if family.q_rank:
        keys["attention.q_lora_rank"] = family.q_rank
    if family.dense is not None:
        keys |= {"expert_count": EXPERTS, "expert_used_count": USED}
    if layout == "old":
        return keys | {"attention.head_count_kv": HEADS, "attention.key_length": NOPE + ROPE,
                       "attention.value_length": VALUE}
    return keys | {"attention.head_count_kv": 1, "attention.key_length": RANK + ROPE, "attention.value_length": RANK,
                   "attention.key_length_mla": NOPE + ROPE, "attention.value_length_mla": VALUE}


def write_model(path: Path, family: Family, layout: str, kind: Type, dequantised: bool = False) -> None:
    """Write one model; dequantised: the same values of its weights, stored as F32."""
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_name(f"tiny random deepseek2, {kind.name} weights, {layout} layout")
    for key, value in metadata(family, layout).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
               bool: writer.add_bool}[type(value)]
        add(f"deepseek2.{key}", value)
    tiny.add_tokenizer(writer)
    for name, values in vectors(family).items():
        writer.add_tensor(name, values)
    for name, shape in matrices(family, layout).items():
        stored = Type.Q8_0 if kind is Type.Q4_K and shape[-1] % SUPER_BLOCK else kind
        raw = encoded(name, shape, stored)
        if family.routed and ("attn_output" in name or "ffn_down" in name):
            raw[..., :tiny.ROUTED, :] = 0                # blocks of zeros
        add_matrix(writer, name, raw, shape, stored, dequantised)
    finish(writer)


def names() -> list[str]:
    """Every model: "family/layout/type"."""
    return [f"{name}/{layout}/{kind}" for name, family in FAMILIES.items() for layout in family.layouts
            for kind in family.types]


def build(directory: Path | str, name: str, dequantised: bool = False) -> Path:
    """Write the model `name` into a directory, unless it is there."""
    family, layout, kind = name.split("/")
    path = Path(directory) / f"deepseek2-{family}-{layout}-{kind.lower()}{'-f32' if dequantised else ''}.gguf"
    return built(path, lambda new: write_model(new, FAMILIES[family], layout, Type[kind], dequantised))


if __name__ == "__main__":
    print_sums(build(sys.argv[1], model) for model in names())
