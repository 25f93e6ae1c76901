"""Reductions along an axis that is not the innermost one (fused kernels do those along the last axis)."""
from __future__ import annotations

import functools

from m3jit.ir.loop import MEMORY, Kernel, Value
from m3jit.ir.loop_builder import Builder

OPS = ("SUM", "PROD", "MAX", "MIN")
DOT = 64
LANES = 16


@functools.lru_cache(maxsize=None)
def reduce_columns(memory: str, op: str) -> Kernel:
    """x r [outer, n, inner], out w [outer, inner], outer, n, inner i64; op SUM PROD MAX MIN along the middle axis.

    Floats (out in x's type): the canonical order, 64 lanes fold elements l, l + 64, ... of the axis from the identity
    (NaN for MAX and MIN, where a NaN loses), then the halving tree; padded steps change nothing that starts from the
    identity.  Integers: SUM and PROD are i64 and wrap, MAX and MIN keep the type; n >= 1 for MAX and MIN.
    16 lanes = 16 positions of the inner axis; the 64 lanes of the fold are walked one after the other."""
    if op not in OPS:
        raise ValueError(f"reductions are {', '.join(OPS)}, not {op}")
    is_float = MEMORY[memory][1] == "f32"
    target = memory if is_float or op in ("MAX", "MIN") else "i64"
    b = Builder(f"reduce_columns_{op.lower()}_{memory}", LANES)
    x, out = b.ptr("x", "r", memory), b.ptr("out", "w", target)
    outer, n, inner = b.scalar("outer"), b.scalar("n"), b.scalar("inner")
    pieces = (inner + (LANES - 1)) // LANES
    b.set_grid(outer * pieces)
    o, column = b.group // pieces, b.group % pieces * LANES
    inside = b.in_range(column, inner)

    def element(i: Value) -> Value:
        v = b.load_lanes(memory, x, (o * n + i) * inner + column, inside)
        return v if is_float or target == memory else b.cvt(v, "i64")
    value = _folded(b, op, element, n) if is_float else _plain(b, op, memory, target, element, n)
    b.store_lanes(target, out, o * inner + column, value, inside)
    return b.finish()


def combine(b: Builder, op: str, a: Value, v: Value) -> Value:
    """One step of a reduction."""
    if op == "SUM":
        return a + v
    if op == "PROD":
        return a * v
    if a.type == "f32":
        return b.fmax(a, v) if op == "MAX" else b.fmin(a, v)
    return b.imax(a, v) if op == "MAX" else b.imin(a, v)


def _folded(b: Builder, op: str, element, n: Value) -> Value:
    identity = {"SUM": 0.0, "PROD": 1.0}.get(op, float("nan"))
    sums = b.scratch("lanes", "f32", DOT * LANES)
    with b.loop(0, DOT) as lane:
        acc = b.var("f32", identity)
        with b.loop(lane, n, DOT) as i:
            acc.set(combine(b, op, acc.get(), element(i)))
        b.store_lanes("f32", sums, lane * LANES, acc.get())
    b.sync()
    size = DOT // 2
    while size:
        with b.loop(0, size) as lane:
            own = b.load_lanes("f32", sums, lane * LANES)
            other = b.load_lanes("f32", sums, (lane + size) * LANES)
            b.store_lanes("f32", sums, lane * LANES, combine(b, op, own, other))
        b.sync()
        size //= 2
    return b.canonical_nan(b.load_lanes("f32", sums, 0))


def _plain(b: Builder, op: str, memory: str, target: str, element, n: Value) -> Value:
    """Integer reductions do not depend on the order."""
    t = MEMORY[target][1]
    low, high = (-2 ** 31, 2 ** 31 - 1) if t == "i32" else (-2 ** 63, 2 ** 63 - 1)
    acc = b.var(t, {"SUM": 0, "PROD": 1, "MAX": low, "MIN": high}[op])
    with b.loop(0, n) as i:
        acc.set(combine(b, op, acc.get(), element(i)))
    return acc.get()
