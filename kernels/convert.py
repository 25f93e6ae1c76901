"""Packing f32 rows into block formats: ggml's reference quantisation.

Per block of 32 consecutive elements (f32, each operation rounded once; trunc toward zero, the scale stored as F16):
    Q8_0  d = max|x| / 127;             q = x (1/d) rounded, halves away from zero
    Q4_0  d = peak / -8, peak the first element of largest magnitude, with its sign;  q = trunc(x (1/d) + 8.5) in 0..15
    Q4_1  d = (max - min) / 15, m = min;  q = trunc((x - min) (1/d) + 0.5) in 0..15
    1/d that is not finite counts as 0.
Values must be finite and scales must fit F16; `flags` tells where they are not, so that the caller can refuse.
"""
from __future__ import annotations

import functools

from m3jit.ir.loop import Buffer, Kernel, Value
from m3jit.ir.loop_builder import Builder
from m3jit.isa.types import DTYPES

TYPES = ("Q8_0", "Q4_0", "Q4_1")
F16_LIMIT = 65520.0                          # the least magnitude that rounds to infinity in F16
NOT_FINITE, SCALE_TOO_LARGE = 1, 2


@functools.lru_cache(maxsize=None)
def quantize(dtype_name: str) -> Kernel:
    """x r f32 [blocks, 32], out w u8 blocks, flags w u8 [blocks], blocks i64.

    flags: NOT_FINITE where a block holds an infinity or NaN, SCALE_TOO_LARGE where a scale overflows F16, else 0."""
    if dtype_name not in TYPES:
        raise ValueError(f"QUANTIZE kernels make {', '.join(TYPES)}, not {dtype_name}")
    b = Builder(f"quantize_{dtype_name.lower()}", 32)
    x, out, flags = b.ptr("x", "r", "f32"), b.ptr("out", "w", "u8"), b.ptr("flags", "w", "u8")
    b.set_grid(b.scalar("blocks"))
    v = b.load_lanes("f32", x, b.group * 32)
    finite = b.fold(b.cvt(b.abs(v) < float("inf"), "i32"), "and")
    v = b.select(b.abs(v) < float("inf"), v, b.f32(0.0))       # the result of a refused block is not used
    block = out.at(b.group * DTYPES[dtype_name].nbytes)
    scales = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}[dtype_name](b, v, block)
    large = b.i32(0)
    for i, s in enumerate(scales):
        b.store("f16", block, i, s)
        large = large | b.cvt(b.f32(F16_LIMIT) <= b.abs(s), "i32")
    b.store("u8", flags, b.group, b.select(finite.equals(1), large << 1, b.i32(NOT_FINITE)))
    return b.finish()


def _inverse(b: Builder, d: Value) -> Value:
    r = b.f32(1.0) / d
    return b.select(b.abs(r) < float("inf"), r, b.f32(0.0))


def _q8_0(b: Builder, v: Value, block: Buffer) -> list[Value]:
    d = b.fold(b.abs(v), "fmax") / 127.0
    t = v * _inverse(b, d)
    a = b.abs(t)
    whole = b.floor(a)
    whole = b.select(b.f32(0.5) <= a - whole, whole + 1.0, whole)
    q = b.cvt(whole, "i32")
    b.store_lanes("i8", block, 2, b.select(t < 0.0, -q, q))
    return [d]


def _pair(b: Builder, t: Value, block: Buffer, at: int) -> None:
    """Truncated to 0..15; element l and l + 16 share byte l."""
    t = b.fmin(b.fmax(t, 0.0), 15.0)
    q = b.cvt(t, "i32")
    packed = q | (b.shuffle_down(q, 16) << 4)
    b.store_lanes("u8", block, at, packed, b.lane < 16)


def _q4_0(b: Builder, v: Value, block: Buffer) -> list[Value]:
    def combine(own, other):
        (a, i, x), (c, j, y) = own, other
        take = (a < c) | (a.equals(c) & (j < i))
        return [b.select(take, c, a), b.select(take, j, i), b.select(take, y, x)]
    _, _, peak = b.fold_pairs([b.abs(v), b.lane, v], combine)
    d = peak / -8.0
    _pair(b, v * _inverse(b, d) + 8.5, block, 2)
    return [d]


def _q4_1(b: Builder, v: Value, block: Buffer) -> list[Value]:
    low, high = b.fold(v, "fmin"), b.fold(v, "fmax")
    d = (high - low) / 15.0
    _pair(b, (v - low) * _inverse(b, d) + 0.5, block, 4)
    return [d, low]
