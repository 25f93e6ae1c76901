"""Rotary positions."""
from __future__ import annotations

import functools

from m3jit.ir import scalar_math
from m3jit.ir.loop import Buffer, Kernel, Value
from m3jit.ir.loop_builder import Builder


@functools.lru_cache(maxsize=None)
def rope(head_dim: int, pairing: str, factors: bool = False) -> Kernel:
    """x r f32 [T, heads head_dim], freq r f32 [head_dim / 2], [factors r f32 [head_dim / 2],] y w f32 (x's shape),
    T, heads, pos i64.

    Row t has position pos + t; angle_i = f32(pos + t) (freq_i / factors_i); a' = fma(a, cos, -(b sin)),
    b' = fma(a, sin, b cos) for the pairs (2i, 2i + 1) NORM or (i, i + head_dim / 2) NEOX.  One group per row: its sines
    and cosines are computed once, for all heads."""
    if head_dim % 2 or pairing not in ("NORM", "NEOX"):
        raise ValueError(f"rope needs an even head_dim and pairing NORM or NEOX, got {head_dim} and {pairing}")
    lanes = next((n for n in (8, 16, 32) if n >= head_dim), 64)
    b = Builder(f"rope_{head_dim}_{pairing.lower()}{'_factors' if factors else ''}", lanes)
    x, freq = b.ptr("x", "r", "f32"), b.ptr("freq", "r", "f32")
    factor = b.ptr("factors", "r", "f32") if factors else None
    y = b.ptr("y", "w", "f32")
    tokens, heads, pos = b.scalar("T"), b.scalar("heads"), b.scalar("pos")
    b.set_grid(tokens)
    position = b.cvt(pos + b.group, "f32")
    half = head_dim // 2
    sines, cosines = b.scratch("sines", "f32", half), b.scratch("cosines", "f32", half)
    for at in range(0, half, lanes):
        mask = None if at + lanes <= half else b.lane < half - at
        f = b.load_lanes("f32", freq, at, mask)
        if factor is not None:
            f = f / b.load_lanes("f32", factor, at, mask)
        _sincos(b, position * f, sines, cosines, at, mask)
    b.sync()
    row = b.group * heads * (4 * head_dim)
    if pairing == "NEOX":
        _rotate_halves(b, head_dim, heads, x.at(row), y.at(row), sines, cosines)
    else:
        _rotate_neighbours(b, head_dim, heads, x.at(row), y.at(row), sines, cosines)
    return b.finish()


def _sincos(b: Builder, angle: Value, sines: Buffer, cosines: Buffer, at: int, mask: Value | None) -> None:
    """Both tables; the reduction of large angles runs only where some angle is large."""
    def put(sine: Value, cosine: Value) -> None:
        b.store_lanes("f32", sines, at, sine, mask)
        b.store_lanes("f32", cosines, at, cosine, mask)
    magnitude = b.abs(angle) if mask is None else b.select(mask, b.abs(angle), b.f32(0.0))
    with b.if_(b.fold(magnitude, "fmax") < scalar_math.SMALL_ANGLE):
        put(*scalar_math.sincos_small(b, angle))
    with b.else_():
        put(*scalar_math.sincos(b, angle))


def _rotate_halves(b: Builder, head_dim: int, heads: Value, x: Buffer, y: Buffer, sines: Buffer,
                   cosines: Buffer) -> None:
    half = head_dim // 2
    for at in range(0, half, b.lanes):
        mask = None if at + b.lanes <= half else b.lane < half - at
        sine, cosine = b.load_lanes("f32", sines, at, mask), b.load_lanes("f32", cosines, at, mask)
        with b.loop(0, heads) as h:
            base = h * head_dim + at
            first, second = b.load_lanes("f32", x, base, mask), b.load_lanes("f32", x, base + half, mask)
            b.store_lanes("f32", y, base, b.canonical_nan(b.fma(first, cosine, -(second * sine))), mask)
            b.store_lanes("f32", y, base + half, b.canonical_nan(b.fma(first, sine, second * cosine)), mask)


def _rotate_neighbours(b: Builder, head_dim: int, heads: Value, x: Buffer, y: Buffer, sines: Buffer,
                       cosines: Buffer) -> None:
    """Lanes are elements: an even one takes its partner from the right, an odd one from the left."""
    even = (b.lane & 1).equals(0)
    pair = b.lshr(b.lane, 1)
    for at in range(0, head_dim, b.lanes):
        mask = None if at + b.lanes <= head_dim else b.lane < head_dim - at
        left, right = (even & mask, _without(b, even, mask)) if mask is not None else (even, b.logical_not(even))
        sine = b.load("f32", sines, pair + at // 2, mask)
        cosine = b.load("f32", cosines, pair + at // 2, mask)
        with b.loop(0, heads) as h:
            base = h * head_dim + at
            own = b.load_lanes("f32", x, base, mask)
            partner = b.select(even, b.load_lanes("f32", x, base + 1, left), b.load_lanes("f32", x, base - 1, right))
            rotated = b.select(even, b.fma(own, cosine, -(partner * sine)), b.fma(partner, sine, own * cosine))
            b.store_lanes("f32", y, base, b.canonical_nan(rotated), mask)


def _without(b: Builder, even: Value, mask: Value) -> Value:
    return b.logical_not(even) & mask
