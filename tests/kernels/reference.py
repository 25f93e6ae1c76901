"""The definitions of docs/dev/plan.md in plain NumPy, written for clarity and independent of the kernels."""
from __future__ import annotations

import functools

import numpy as np

from m3jit.ir import scalar_math
from m3jit.ir.loop import Builder
from m3jit.isa.types import DType
from tests.loop_eval import fma32, run_kernel

f32 = np.float32
NAN_BITS = np.uint32(0x7FC00000)


def canonical(x: np.ndarray) -> np.ndarray:
    """NaN replaced by the canonical quiet NaN."""
    out = np.array(x, f32)
    out.view(np.uint32)[np.isnan(out)] = NAN_BITS
    return out


def random_blocks(rng: np.random.Generator, dtype: DType, rows: int, cols: int) -> np.ndarray:
    """Random block bytes whose f16 scales are small finite numbers."""
    raw = rng.integers(0, 256, (rows, cols // dtype.block, dtype.nbytes), dtype=np.uint8)
    offsets = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}[dtype.name]
    for at in offsets:
        scale = rng.normal(0, 0.01, raw.shape[:2]).astype(np.float16)
        raw[:, :, at:at + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def quantize(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """(q int8 [.., K], d f32 [.., K / block])."""
    with np.errstate(all="ignore"):
        xb = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
        amax = np.fmax.reduce(np.abs(xb), axis=-1)
        amax = np.where(np.isnan(amax), 0, amax).astype(f32)
        r = (f32(127) / amax).astype(f32)
        ok = (amax > 0) & np.isfinite(r)
        q = xb * r[..., None]
        q = np.where(ok[..., None] & ~np.isnan(q), np.rint(q), 0)
        d = np.where(ok, amax / f32(127), f32(0)).astype(f32)
    return q.astype(np.int8).reshape(x.shape), d


def _f16(raw: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(raw[..., at:at + 2]).view(np.float16)[..., 0].astype(f32)


def _nibbles(qs: np.ndarray) -> np.ndarray:
    """Low nibbles of all bytes, then high ones, along the last axis."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1).astype(np.int64)


def k4_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 six-bit scales and mins of Q4_K blocks."""
    s = raw[..., 4:16].astype(np.int64)
    sc = [s[..., j] & 63 if j < 4 else (s[..., j + 4] & 15) | (s[..., j - 4] >> 6) << 4 for j in range(8)]
    m = [s[..., j + 4] & 63 if j < 4 else (s[..., j + 4] >> 4) | (s[..., j] >> 6) << 4 for j in range(8)]
    return np.stack(sc, -1), np.stack(m, -1)


def codes(raw: np.ndarray, dtype: DType) -> np.ndarray:
    """Integer codes [.., blocks, block] of blocks [.., blocks, nbytes], in element order, unbiased where signed."""
    n = dtype.name
    if n == "Q8_0":
        return raw[..., 2:].view(np.int8).astype(np.int64)
    if n in ("Q4_0", "Q4_1"):
        return _nibbles(raw[..., 2:] if n == "Q4_0" else raw[..., 4:]) - (8 if n == "Q4_0" else 0)
    if n == "Q4_K":
        return np.concatenate([_nibbles(raw[..., 16 + 32 * c:48 + 32 * c]) for c in range(4)], axis=-1)
    parts = []
    for h in range(2):
        ql, qh = raw[..., 64 * h:64 * h + 64].astype(np.int64), raw[..., 128 + 32 * h:160 + 32 * h].astype(np.int64)
        low = [ql[..., :32] & 15, ql[..., 32:] & 15, ql[..., :32] >> 4, ql[..., 32:] >> 4]
        parts += [v | ((qh >> 2 * i) & 3) << 4 for i, v in enumerate(low)]
    return np.concatenate(parts, axis=-1) - 32


def qmatmul(x: np.ndarray, raw: np.ndarray, dtype: DType) -> np.ndarray:
    """x f32 [T, K], raw block bytes [N, row bytes] -> f32 [T, N]."""
    q, dx = quantize(x, dtype.block)
    blocks = raw.reshape(len(raw), -1, dtype.nbytes)
    w = codes(blocks, dtype)
    q = q.reshape(len(x), blocks.shape[1], dtype.block).astype(np.int64)
    acc = np.zeros((len(x), len(raw)), f32)
    with np.errstate(all="ignore"):
        for k in range(blocks.shape[1]):
            acc = _block(acc, q[:, k], dx[:, k, None], blocks[:, k], w[:, k], dtype)
    return canonical(acc)


def _block(acc, q, dx, raw, w, dtype):
    n, size = dtype.name, dtype.block
    if n in ("Q8_0", "Q4_0"):
        return fma32(_f16(raw, 0) * dx, (q @ w.T).astype(f32), acc)
    if n == "Q4_1":
        m = _f16(raw, 2) * q.sum(1).astype(f32)[:, None]
        return fma32(dx, fma32(_f16(raw, 0)[None] + 0 * m, (q @ w.T).astype(f32), m), acc)
    parts = 8 if n == "Q4_K" else 16
    sub = np.einsum("tjk,njk->tnj", q.reshape(len(q), parts, size // parts), w.reshape(len(w), parts, size // parts))
    if n == "Q6_K":
        isum = (sub * raw[:, 192:208].view(np.int8).astype(np.int64)).sum(-1)
        return fma32(dx, _f16(raw, 208) * isum.astype(f32), acc)
    sc, m = k4_scales(raw)
    isum, msum = (sub * sc).sum(-1), q.reshape(len(q), 8, 32).sum(-1) @ m.T
    u = fma32(_f16(raw, 0) + 0 * acc, isum.astype(f32), -(_f16(raw, 2) * msum.astype(f32)))
    return fma32(dx, u, acc)


@functools.lru_cache(maxsize=None)
def _map_kernel(function, count: int):
    b = Builder("apply", 64)
    ptrs = [b.ptr(f"x{i}", "r", "f32") for i in range(count)]
    out, n = b.ptr("y", "w", "f32"), b.scalar("n")
    b.set_grid((n + 63) // 64)
    inside = b.in_range(b.group * 64, n)
    y = function(b, *[b.load_lanes("f32", p, b.group * 64, inside) for p in ptrs])
    b.store_lanes("f32", out, b.group * 64, b.canonical_nan(y), inside)
    return b.finish()


def apply(function, *arrays: np.ndarray) -> np.ndarray:
    """A scalar_math function over arrays of one shape, by evaluating a kernel of loads, the function, one store."""
    result = np.empty(arrays[0].shape, f32)
    inputs = [np.ascontiguousarray(a, f32) for a in arrays]
    run_kernel(_map_kernel(function, len(arrays)), [*inputs, result, result.size])
    return result


def silu(x: np.ndarray) -> np.ndarray:
    return canonical(x * apply(scalar_math.sigmoid, x))
