"""Witnesses of low-rank adapters: float64 products."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from m3jit.isa.types import F16, F32, Q4_0, Q4_K, Q8_0
from tests.ops.cases import FLOATS, Case, close, noise, tensor, values, witness
from tests.ops.witness_layout import blocks, decoded
from tests.ops.witness_transformer import quantised

SHAPES = (((), 1, 1, 1), ((3,), 5, 7, 2), ((2, 2), 3, 67, 4), ((0,), 4, 6, 2), ((1,), 70, 130, 65))


@witness("LORA_APPLY")
def lora_apply() -> Iterator[Case]:
    for i, (rows, n, k, rank) in enumerate(SHAPES):
        for dtype in FLOATS:
            x, base = noise(*rows, k, seed=i), tensor(noise(n, k, seed=i + 1), dtype)
            a, b = tensor(noise(rank, k, seed=i + 2), dtype), tensor(noise(n, rank, seed=i + 3), dtype)
            for scale in (1.0, -0.375, 0.0):
                yield _apply_case(f"{dtype} {rows} {n} {k} {rank}", x, base, values(base), a, b, scale, "FP32")
    for dtype in (Q8_0, Q4_0, Q4_K):
        base = blocks((7, 2 * dtype.block), dtype, 5)
        x, a, b = noise(3, 2 * dtype.block, seed=1), tensor(noise(4, 2 * dtype.block, seed=2), F16), \
            tensor(noise(7, 4, seed=3), F32)
        for precision in ("FP32", "INT8"):
            yield _apply_case(f"{dtype}", x, base, decoded(base).astype(np.float64), a, b, 0.5, precision)
    x, base, a, b = (tensor(noise(*s, seed=9)) for s in ((2, 9), (5, 9), (3, 9), (5, 3)))
    for precision, dtype in (("FP16", F16), ("BF16", FLOATS[2])):
        want = values(x) @ values(base).T + 2.0 * (values(x) @ values(a).T) @ values(b).T
        yield Case(precision, {"x": x, "base": base, "a": a, "b": b, "scale": 2.0, "precision": precision},
                   close(want, dtype, 40, 20.0), (2, 5))


def _apply_case(label: str, x: np.ndarray, base, dense: np.ndarray, a, b, scale: float, precision: str) -> Case:
    x64 = x.astype(np.float64)
    first = (quantised(x64, base.dtype.block) if precision == "INT8" else x64) @ dense.T
    want = first + scale * (x64 @ values(a).T) @ values(b).T
    size = np.abs(x64) @ np.abs(dense).T + abs(scale) * (np.abs(x64) @ np.abs(values(a)).T) @ np.abs(values(b)).T
    return Case(f"{label} {scale} {precision}",
                {"x": tensor(x), "base": base, "a": a, "b": b, "scale": scale, "precision": precision},
                close(want, F32, 16, size), (*x.shape[:-1], len(dense)))


@witness("LORA_MERGE")
def lora_merge() -> Iterator[Case]:
    for i, (_, n, k, rank) in enumerate(SHAPES):
        for dtype in FLOATS:
            base = tensor(noise(n, k, seed=i + 1), dtype)
            a, b = tensor(noise(rank, k, seed=i + 2)), tensor(noise(n, rank, seed=i + 3))
            for scale, subtract in ((1.0, False), (0.25, True)):
                delta = scale * values(b) @ values(a)
                want = values(base) - delta if subtract else values(base) + delta
                size = np.abs(values(base)) + scale * np.abs(values(b)) @ np.abs(values(a))
                yield Case(f"{dtype} {n} {k} {rank} {scale} {subtract}",
                           {"base": base, "a": a, "b": b, "scale": scale, "subtract": subtract},
                           close(want, dtype, 8, size), (n, k))
    empty = {"base": tensor(np.zeros((0, 3))), "a": tensor(noise(2, 3)), "b": tensor(np.zeros((0, 2)))}
    yield Case("no rows", empty, close(np.zeros((0, 3)), F32), (0, 3))
