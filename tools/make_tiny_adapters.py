"""Write tiny random low-rank adapters (LoRA) for the models of make_tiny_architectures.py.

ADAPTERS: for each matrix they name a pair a [rank, K], b [N, rank] whose product is about as large as the matrix; the
pair of the embeddings is a [vocabulary, rank], b [width, rank].  CASES: models with adapters and scales, as
tests/oracles/tiny_adapters.json.gz has them.

    python tools/make_tiny_adapters.py DIRECTORY
"""
from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import make_tiny_architectures as tiny
import numpy as np
from make_tiny_models import finish, print_sums, uniform


@dataclass(frozen=True)
class Shape:
    """One adapter: the family it is for, its rank, alpha (0: none stated), the type of its tensors, which matrices."""
    family: str
    rank: int
    alpha: float
    dtype: type
    matrices: tuple[str, ...] = ()                             # parts of names; none: all

    def wants(self, name: str) -> bool:
        return not self.matrices or any(part in name for part in self.matrices)


ADAPTERS = {
    "all": Shape("qwen2", 8, 16.0, np.float32),
    "few": Shape("qwen2", 4, 0.0, np.float16, ("attn_q", "attn_output", "ffn_down")),
}
CASES: dict[str, tuple[str, tuple[tuple[str, float], ...]]] = {
    "one": ("qwen2/F32", (("all", 1.0),)),
    "weaker": ("qwen2/Q8_0", (("all", 0.4),)),
    "two": ("qwen2/Q8_0", (("few", 0.75), ("all", -0.5))),
}


def pairs(shape: Shape) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Matrix -> (a, b)."""
    out = {}
    for name, (n, k) in tiny.matrices(tiny.FAMILIES[shape.family]).items():
        if not shape.wants(name):
            continue
        rows, columns = ((n, shape.rank), (k, shape.rank)) if name.startswith("token_embd") else \
            ((shape.rank, k), (n, shape.rank))
        a, b = (uniform(tiny.SEED, f"{name}/{shape.rank}/{part}", size[0] * size[1]).reshape(size)
                for part, size in (("a", rows), ("b", columns)))
        out[name] = ((a * 0.1).astype(shape.dtype), (b * 0.3).astype(shape.dtype))
    return out


def build(directory: Path | str, name: str) -> Path:
    """Write the adapter `name` into a directory, unless it is there."""
    path, shape = Path(directory) / f"lora-{name}.gguf", ADAPTERS[name]
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, tiny.FAMILIES[shape.family].arch)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    if shape.alpha:
        writer.add_float32("adapter.lora.alpha", shape.alpha)
    for matrix, (a, b) in pairs(shape).items():
        writer.add_tensor(matrix + ".lora_a", a)
        writer.add_tensor(matrix + ".lora_b", b)
    finish(writer)
    return path


if __name__ == "__main__":
    print_sums(build(sys.argv[1], adapter) for adapter in ADAPTERS)
