"""Write tiny random GGUF models of the architecture bitnet (BitNet b1.58): llama.cpp's SiLU and the squared ReLU.

Width 256 and tokens as make_tiny_architectures.py; 4 heads (2 kv) of 64, feed-forward width 512, tied embeddings in F16
where the other matrices are ternary.  Ternary weights are -d, 0 or d, so TQ1_0 and TQ2_0 hold them exactly but for d.
"scales": each matrix holds -1, 0, 1 and a `.scale` of its own.

The files are made where they are needed and never stored; tests/oracles/tiny_bitnet.json.gz (llama.cpp) and
tiny_bitnet_relu2.json.gz (torch, by make_bitnet_oracles.py) hold the SHA-256 of each and what they compute with it.

    python tools/make_tiny_bitnet.py DIRECTORY
"""
from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import make_tiny_architectures as tiny
import numpy as np
from gguf import GGMLQuantizationType as Type
from make_tiny_models import built, finish, integers, print_sums, uniform

WIDTH, VOCAB, CONTEXT, EPS, SEED = tiny.WIDTH, tiny.VOCAB, tiny.CONTEXT, tiny.EPS, 158
LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, THETA = 2, 4, 2, 64, 512, 500000.0


@dataclass(frozen=True)
class Family:
    types: tuple[str, ...]
    activation: str = ""                       # metadata key hidden_activation
    scales: bool = False


FAMILIES = {
    "silu": Family(("F32", "Q8_0", "TQ1_0", "TQ2_0")),
    "scales": Family(("F32", "TQ2_0"), scales=True),
    "relu2": Family(("F32", "TQ2_0"), activation="relu2"),
}


def matrices() -> dict[str, tuple[int, int]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {"attn_q": (q, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH), "attn_output": (WIDTH, q),
             "ffn_gate": (FFN, WIDTH), "ffn_up": (FFN, WIDTH), "ffn_down": (WIDTH, FFN)}
    return {"token_embd.weight": (VOCAB, WIDTH)} | {
        f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}


def scale_of(name: str, columns: int) -> float:
    """The size of a ternary matrix's weights."""
    return float(np.float32(1.5 * (1.0 + 0.3 * uniform(SEED, name + "/scale", 1)[0]) / columns**0.5))


def tensors(family: Family, kind: Type, dequantised: bool) -> dict[str, tuple[np.ndarray, Type]]:
    """Name -> (values in their storage, type)."""
    out: dict[str, tuple[np.ndarray, Type]] = {}
    sizes = {"output_norm.weight": WIDTH} | {f"blk.{i}.{name}.weight": size for i in range(LAYERS) for name, size in (
        ("attn_norm", WIDTH), ("ffn_norm", WIDTH), ("attn_sub_norm", HEADS * HEAD_DIM), ("ffn_sub_norm", FFN))}
    for name, size in sizes.items():
        out[name] = ((1.0 + 0.5 * uniform(SEED, name, size)).astype(np.float32), Type.F32)
    for name, (rows, columns) in matrices().items():
        embedding, type_ = name.startswith("token_embd"), kind
        if embedding:
            values = (uniform(SEED, name, rows * columns) * 0.33).reshape(rows, columns)
            type_ = Type.F16 if kind in (Type.TQ1_0, Type.TQ2_0) else kind
        else:
            values = integers(SEED, name, rows * columns, -1, 1).reshape(rows, columns).astype(np.float64)
            if family.scales:
                out[name.replace(".weight", ".scale")] = (np.array([scale_of(name, columns)], np.float32), Type.F32)
            else:
                values *= scale_of(name, columns)
        raw = values.astype(np.float32)
        raw = raw if type_ is Type.F32 else gguf.quants.quantize(raw, type_)
        if dequantised and type_ is not Type.F32:
            raw, type_ = gguf.quants.dequantize(raw, type_).astype(np.float32).reshape(rows, columns), Type.F32
        out[name] = (raw, type_)
    return out


def write_model(path: Path, family: Family, kind: Type, dequantised: bool = False) -> None:
    """Write one model; dequantised: the same values of its weights, stored as F32."""
    writer = gguf.GGUFWriter(path, "bitnet")
    writer.add_name(f"tiny random bitnet, {kind.name} weights")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(THETA)
    writer.add_vocab_size(VOCAB)
    if family.activation:
        writer.add_string("bitnet.hidden_activation", family.activation)
    tiny.add_tokenizer(writer)
    for name, (raw, type_) in tensors(family, kind, dequantised).items():
        writer.add_tensor(name, raw, raw_dtype=type_)
    finish(writer)


def names(peer: bool = True) -> list[str]:
    """Every model that llama.cpp computes ("family/type"), or with peer false the others."""
    return [f"{name}/{kind}" for name, family in FAMILIES.items() for kind in family.types
            if peer == (not family.activation)]


def build(directory: Path | str, name: str, dequantised: bool = False) -> Path:
    """Write the model `name` ("family/type") into a directory, unless it is there."""
    family, _, kind = name.partition("/")
    path = Path(directory) / f"bitnet-{family}-{kind.lower()}{'-f32' if dequantised else ''}.gguf"
    return built(path, lambda new: write_model(new, FAMILIES[family], Type[kind], dequantised))


if __name__ == "__main__":
    print_sums(build(sys.argv[1], model) for model in names() + names(peer=False))
