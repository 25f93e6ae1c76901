"""Write tiny random GGUF models with state-space layers, one for each architecture and weight type.

Width 256, 512 channels, a vocabulary of 272 byte-level tokens, a context of 128; the rest stands in FAMILIES. Matrices
have the file's weight type (the product that makes step sizes, whose rows are shorter than a block, is F32, as are
convolutions, decays, gains and biases). Step sizes and decays are such that a state remembers from about one to about
fifty tokens: what was read earlier in a prompt changes the logits of its end. Routers of quantised files read features
that no layer writes, as in make_tiny_architectures.py.

The files are made where they are needed and never stored; tests/oracles/tiny_recurrent.json.gz holds the SHA-256 of
each and what llama.cpp computes with it (tools/make_architecture_oracles.py).

    python tools/make_tiny_recurrent.py DIRECTORY [--family NAME ...]
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from make_tiny_architectures import CONTEXT, EPS, FFN, ROUTED, VOCAB, WIDTH, add_tokenizer, encoded
from make_tiny_models import add_matrix, built, finish, print_sums, uniform

SEED = 4711
CHANNELS, TAPS = 2 * WIDTH, 4                # llama.cpp wants twice the width for mamba
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64         # of layers that attend
EXPERTS, USED = 4, 2
TYPES = {name: Type[name] for name in ("F32", "Q8_0")}


@dataclass(frozen=True)
class Family:
    """One architecture.  rank: "ssm.time_step_rank" (mamba2: heads); attends: key/value heads of each layer, 0: it
    scans; groups 0: mamba's layers, else mamba2's."""
    arch: str
    states: int
    rank: int
    groups: int = 0
    attends: tuple[int, ...] = (0, 0)
    inner_norms: bool = False                # gains for dt, B and C
    routed: tuple[int, ...] = ()             # layers whose feed-forward part is 4 experts, of which 2 are used
    shared: int = 0                          # elements of shared experts
    keys: dict[str, Any] = field(default_factory=dict)       # without the architecture's name
    tied: bool = False
    types: tuple[str, ...] = ("F32", "Q8_0")


HYBRID = (0, KV_HEADS, 0)
FAMILIES: dict[str, Family] = {
    "mamba": Family("mamba", 16, 16),
    "falcon-mamba": Family("mamba", 16, 16, keys={"ssm.dt_b_c_rms": True}, types=("F32",)),
    "mamba2": Family("mamba2", 32, 8, groups=2),
    "mamba2-one-group": Family("mamba2", 24, 4, groups=1, tied=True, types=("F32",)),
    "jamba": Family("jamba", 16, 16, attends=HYBRID, inner_norms=True),
    "granitehybrid": Family("granitehybrid", 32, 8, groups=1, attends=HYBRID,
                            keys={"rope.scaling.finetuned": False, "embedding_scale": 3.0, "residual_scale": 0.5,
                                  "logit_scale": 2.0, "attention.scale": 0.1}),
    "jamba-experts": Family("jamba", 16, 16, attends=HYBRID, inner_norms=True, routed=(1,), types=("F32",)),
    "granitehybrid-experts": Family("granitehybrid", 32, 8, groups=1, attends=HYBRID, routed=(0, 1, 2), shared=128,
                                    keys={"rope.scaling.finetuned": False, "expert_shared_feed_forward_length": 128}),
    "granitehybrid-rope": Family("granitehybrid", 32, 8, groups=1, attends=HYBRID, types=("F32",),
                                 keys={"rope.dimension_count": HEAD_DIM}),
}


def matrices(family: Family) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors that have the file's weight type."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, WIDTH)}
    if not family.tied:
        shapes["output"] = (VOCAB, WIDTH)
    mixed = CHANNELS + 2 * family.groups * family.states
    scanning = {"ssm_in": (CHANNELS + mixed + family.rank, WIDTH) if family.groups else (2 * CHANNELS, WIDTH),
                "ssm_out": (WIDTH, CHANNELS)}
    if not family.groups:
        scanning["ssm_x"] = (family.rank + 2 * family.states, CHANNELS)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    attending = {"attn_q": (q, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH), "attn_output": (WIDTH, q)}
    gated = {"ffn_gate": (FFN, WIDTH), "ffn_up": (FFN, WIDTH), "ffn_down": (WIDTH, FFN)}
    experts: dict[str, tuple[int, ...]] = {f"{name}_exps": (EXPERTS, *shape) for name, shape in gated.items()}
    if family.shared:
        experts |= {"ffn_gate_shexp": (family.shared, WIDTH), "ffn_up_shexp": (family.shared, WIDTH),
                    "ffn_down_shexp": (WIDTH, family.shared)}
    for i, attends in enumerate(family.attends):
        ffn = experts if i in family.routed else gated if any(family.attends) else {}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in ((attending if attends else scanning) | ffn).items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def vectors(family: Family, kind: Type = Type.F32) -> dict[str, np.ndarray]:
    """Name -> values of the F32 tensors of a file with weights of that type."""
    gains = {"output_norm.weight": (WIDTH,)}
    others: dict[str, np.ndarray] = {}

    def noise(name: str, *shape: int) -> np.ndarray:
        return uniform(SEED, name, int(np.prod(shape))).reshape(shape)
    columns = CHANNELS + 2 * family.groups * family.states if family.groups else CHANNELS
    steps = family.rank if family.groups else CHANNELS
    for i, attends in enumerate(family.attends):
        b = f"blk.{i}."
        gains |= {b + name: (WIDTH,) for name in ("attn_norm.weight", "ffn_norm.weight")[:1 + any(family.attends)]}
        if i in family.routed:
            router = noise(b + "router", EXPERTS, WIDTH) * 0.2
            if kind is not Type.F32:
                router *= (np.arange(WIDTH) < ROUTED) * (WIDTH / ROUTED)**0.5
            others[b + "ffn_gate_inp.weight"] = router
        if attends:
            continue
        if family.inner_norms:
            gains |= {b + "ssm_dt_norm.weight": (family.rank,), b + "ssm_b_norm.weight": (family.states,),
                      b + "ssm_c_norm.weight": (family.states,)}
        if family.groups:
            gains[b + "ssm_norm.weight"] = (family.groups, CHANNELS // family.groups)
        else:
            others[b + "ssm_dt.weight"] = noise(b + "ssm_dt.weight", CHANNELS, family.rank) * 0.4
        others |= {b + "ssm_conv1d.weight": noise(b + "conv", columns, TAPS),
                   b + "ssm_conv1d.bias": noise(b + "cb", columns),
                   b + "ssm_dt.bias": noise(b + "dtb", steps) * 1.5 - 2.5,
                   b + "ssm_a": -np.exp(noise(b + "a", *((steps, 1) if family.groups else (CHANNELS, family.states)))),
                   b + "ssm_d": noise(b + "d", *((steps, 1) if family.groups else (CHANNELS,)))}
    out = {name: 1.0 + 0.5 * noise(name, *shape) for name, shape in gains.items()} | others
    return {name: value.astype(np.float32) for name, value in out.items()}


def write_model(path: Path, family: Family, kind: Type, dequantised: bool = False) -> None:
    """Write one model; dequantised: the same values of its weights, stored as F32."""
    writer = gguf.GGUFWriter(path, family.arch)
    writer.add_name(f"tiny random {family.arch}, {kind.name} weights")
    writer.add_block_count(len(family.attends))
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN if any(family.attends) else 0)
    writer.add_head_count(HEADS if any(family.attends) else 0)
    if any(family.attends):
        writer.add_head_count_kv(list(family.attends))
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(CONTEXT)
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_inner_size(CHANNELS)
    writer.add_ssm_state_size(family.states)
    writer.add_ssm_time_step_rank(family.rank)
    if family.groups:
        writer.add_ssm_group_count(family.groups)
    if family.routed:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(USED)
    for key, value in family.keys.items():
        add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}[type(value)]
        add(f"{family.arch}.{key}", value)
    add_tokenizer(writer)
    for name, values in vectors(family, kind).items():
        writer.add_tensor(name, values)
    for name, shape in matrices(family).items():
        std = (0.19 if family.tied else 1.0) if name.startswith("token_embd") else \
            (3.0 if name.startswith("output.") else 1.5) / shape[-1]**0.5
        raw = encoded(f"{family.arch}/{name}", shape, std, kind)
        if family.routed and kind is not Type.F32 and any(
                part in name for part in ("attn_output", "ssm_out", "ffn_down")):
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
    parser = argparse.ArgumentParser(description="Write tiny random GGUF models with state-space layers.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", dest="families", action="append", choices=tuple(FAMILIES), help="(repeatable)")
    options = parser.parse_args(arguments)
    print_sums(build(options.directory, name) for name in names()
               if not options.families or name.partition("/")[0] in options.families)
    return 0


if __name__ == "__main__":
    sys.exit(main())
