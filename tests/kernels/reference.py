"""The definitions of docs/dev/plan.md in plain NumPy, written for clarity and independent of the kernels."""
from __future__ import annotations

import functools

import numpy as np

from m3jit.ir import scalar_math
from m3jit.ir.loop_builder import Builder
from m3jit.isa.types import DType
from tests.loop_eval import fma32, run_kernel

f32 = np.float32
NAN_BITS = np.uint32(0x7FC00000)


def canonical(x: np.ndarray) -> np.ndarray:
    """NaN replaced by the canonical quiet NaN."""
    out = np.array(x, f32)
    out.view(np.uint32)[np.isnan(out)] = NAN_BITS
    return out


# offsets of the f16 scales of each block type
SCALES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "IQ4_NL": [0], "MXFP4": [],
          "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_XS": [0], "TQ1_0": [52],
          "TQ2_0": [64]}


def random_blocks(rng: np.random.Generator, dtype: DType, rows: int, cols: int) -> np.ndarray:
    """Random block bytes whose f16 scales are small finite numbers."""
    raw = rng.integers(0, 256, (rows, cols // dtype.block, dtype.nbytes), dtype=np.uint8)
    for at in SCALES[dtype.name]:
        scale = rng.normal(0, 0.01, raw.shape[:2]).astype(np.float16)
        raw[:, :, at:at + 2] = scale[..., None].view(np.uint8)
    if dtype.name == "MXFP4":                            # exponents of numbers as small; in the first row all there are
        raw[..., 0] = 116 + raw[..., 0] % 8
        raw[:1, :, 0] = np.resize([0, 1, 2, 127, 200], raw.shape[1])
    return raw.reshape(rows, raw.shape[1] * dtype.nbytes)


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


def k4_scales(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 six-bit scales and mins of Q4_K blocks."""
    s = raw[..., 4:16].astype(np.int64)
    sc = [s[..., j] & 63 if j < 4 else (s[..., j + 4] & 15) | (s[..., j - 4] >> 6) << 4 for j in range(8)]
    m = [s[..., j + 4] & 63 if j < 4 else (s[..., j + 4] >> 4) | (s[..., j] >> 6) << 4 for j in range(8)]
    return np.stack(sc, -1), np.stack(m, -1)


IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


def codes(raw: np.ndarray, dtype: DType) -> np.ndarray:
    """Integer codes [.., blocks, block] of blocks [.., blocks, nbytes], in element order, unbiased where signed.
    Element by element, as ggml's loops do it."""
    n = dtype.name
    if n == "Q8_0":
        return raw[..., 2:].view(np.int8).astype(np.int64)
    r = raw.astype(np.int64)
    return np.stack([_code(r, n, i) for i in range(dtype.block)], axis=-1)


def _code(r: np.ndarray, n: str, i: int) -> np.ndarray:
    def nibble(at: int, high: bool) -> np.ndarray:
        return r[..., at] >> 4 if high else r[..., at] & 15
    half, l, quarter = i // 128, i % 32, i % 128 // 32
    match n:
        case "Q4_0": return nibble(2 + i % 16, i >= 16) - 8
        case "Q4_1": return nibble(4 + i % 16, i >= 16)
        case "Q5_0": return (nibble(6 + i % 16, i >= 16) | (r[..., 2 + i // 8] >> i % 8 & 1) << 4) - 16
        case "Q5_1": return nibble(8 + i % 16, i >= 16) | (r[..., 4 + i // 8] >> i % 8 & 1) << 4
        case "IQ4_NL": return IQ4[nibble(2 + i % 16, i >= 16)]
        case "MXFP4": return FP4[nibble(1 + i % 16, i >= 16)]
        case "Q4_K": return nibble(16 + i // 64 * 32 + l, i % 64 >= 32)
        case "Q5_K": return nibble(48 + i // 64 * 32 + l, i % 64 >= 32) | (r[..., 16 + l] >> i // 32 & 1) << 4
        case "Q6_K": return (nibble(64 * half + l + 32 * (quarter % 2), quarter >= 2) |
                             (r[..., 128 + 32 * half + l] >> 2 * quarter & 3) << 4) - 32
        case "Q2_K": return r[..., 16 + 32 * half + l] >> 2 * quarter & 3
        case "Q3_K": return (r[..., 32 + 32 * half + l] >> 2 * quarter & 3) - 4 * (1 - (r[..., l] >> i // 32 & 1))
        case "IQ4_XS": return IQ4[nibble(8 + i // 32 * 16 + i % 16, i % 32 >= 16)]
        case "TQ2_0": return (r[..., 32 * half + l] >> 2 * quarter & 3) - 1
    at, digit = (l, i // 32) if i < 160 else (32 + i % 16, (i - 160) // 16) if i < 240 else (48 + i % 4, (i - 240) // 4)
    return ((r[..., at] * 3 ** digit % 256) * 3 >> 8) - 1


def sub_scales(raw: np.ndarray, dtype: DType) -> tuple[np.ndarray, np.ndarray | None]:
    """Integer scales and mins of the sub-blocks of a super-block."""
    r, n = raw.astype(np.int64), dtype.name
    if n in ("Q4_K", "Q5_K"):
        return k4_scales(raw)
    if n == "Q6_K":
        return raw[..., 192:208].view(np.int8).astype(np.int64), None
    if n == "Q2_K":
        return r[..., :16] & 15, r[..., :16] >> 4
    if n == "Q3_K":
        s = [(r[..., 96 + j % 8] >> 4 * (j // 8) & 15) | (r[..., 104 + j % 4] >> 2 * (j // 4) & 3) << 4
             for j in range(16)]
        return np.stack(s, -1) - 32, None
    if n == "IQ4_XS":
        s = [(r[..., 4 + j // 2] >> 4 * (j % 2) & 15) | (r[..., 2 + j // 4] >> 2 * (j % 4) & 3) << 4 for j in range(8)]
        return np.stack(s, -1) - 32, None
    return np.ones((*raw.shape[:-1], 1), np.int64), None         # ternary


def block_scale(raw: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype.name == "MXFP4":
        return np.ldexp(f32(1), raw[..., 0].astype(int) - 128).astype(f32)
    return _f16(raw, SCALES[dtype.name][0])


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
    n, d = dtype.name, block_scale(raw, dtype)
    if dtype.block == 32:
        isum = (q @ w.T).astype(f32)
        if n not in ("Q4_1", "Q5_1"):
            return fma32(d * dx, isum, acc)
        m = _f16(raw, 2) * q.sum(1).astype(f32)[:, None]
        return fma32(dx, fma32(d[None] + 0 * m, isum, m), acc)
    scales, mins = sub_scales(raw, dtype)
    parts = scales.shape[-1]
    groups = q.reshape(len(q), parts, 256 // parts)
    sub = np.einsum("tjk,njk->tnj", groups, w.reshape(len(w), parts, 256 // parts))
    isum = (sub * scales).sum(-1).astype(f32)
    if mins is None:
        return fma32(dx, d * isum, acc)
    msum = (groups.sum(-1) @ mins.T).astype(f32)
    return fma32(dx, fma32(d + 0 * acc, isum, -(_f16(raw, SCALES[n][1]) * msum)), acc)


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
