"""Index of the first maximum."""
from __future__ import annotations

import functools
from typing import Sequence

from m3jit.ir.loop import MEMORY, Kernel, Value
from m3jit.ir.loop_builder import Builder

NONE = 0x7FFFFFFF                            # index of a lane that has seen no number yet


@functools.lru_cache(maxsize=None)
def argmax_rows(memory: str) -> Kernel:
    """x r [rows, n] of a memory type, out w i64 [rows], rows, n i64 with 1 <= n < 2^31: the first maximum of each row.

    NaN is ignored unless a row holds nothing else (then 0).  Lanes walk elements l, l + 64, ...; one group per row.
    What is not above the least value of the type is left to a second pass, over rows that hold nothing else."""
    b = Builder(f"argmax_rows_{memory}", 64)
    x, out = b.ptr("x", "r", memory), b.ptr("out", "w", "i64")
    rows, n = b.scalar("rows"), b.scalar("n")
    b.set_grid(rows)
    best, index = _start(b, memory)
    row = x.at(b.group * n * MEMORY[memory][0])

    def visit(at: Value, inside: Value | None) -> None:
        v = b.load_lanes(memory, row, at, inside)
        take = best.get() < v if inside is None else inside & (best.get() < v)
        best.set(b.select(take, v, best.get()))
        index.set(b.select(take, b.cvt(at, "i32") + b.lane, index.get()))
    whole = n // 64 * 64
    with b.loop(0, whole, 64) as at:
        visit(at, None)
    with b.loop(whole, n, 64) as at:
        visit(at, b.in_range(at, n))

    def combine(own: Sequence[Value], other: Sequence[Value]) -> list[Value]:
        (v, i), (w, j) = own, other
        take = (v < w) | (v.equals(w) & (j < i))
        return [b.select(take, w, v), b.select(take, j, i)]
    first = b.var("i32", b.fold_pairs([best.get(), index.get()], combine)[1], varying=False)
    with b.loop(0, b.select(first.get().equals(NONE), n, b.i64(0)), 64) as at:
        inside = b.in_range(at, n)
        v = b.load_lanes(memory, row, at, inside)
        number = inside & b.pure("eq", v, v)
        first.set(b.imin(first.get(), b.fold(b.select(number, b.cvt(at, "i32") + b.lane, b.i32(NONE)), "imin")))
    b.store("i64", out, b.group, b.select(first.get().equals(NONE), b.i64(0), b.cvt(first.get(), "i64")))
    return b.finish()


@functools.lru_cache(maxsize=None)
def argmax_columns(memory: str) -> Kernel:
    """x r [outer, n, inner], out w i64 [outer, inner], outer, n, inner i64: along the middle axis, lanes = inner."""
    b = Builder(f"argmax_columns_{memory}", 64)
    x, out = b.ptr("x", "r", memory), b.ptr("out", "w", "i64")
    outer, n, inner = b.scalar("outer"), b.scalar("n"), b.scalar("inner")
    pieces = (inner + 63) // 64
    b.set_grid(outer * pieces)
    o, column = b.group // pieces, b.group % pieces * 64
    inside = b.in_range(column, inner)
    best, index = _start(b, memory)
    with b.loop(0, n) as i:
        v = b.load_lanes(memory, x, (o * n + i) * inner + column, inside)
        _visit(b, best, index, v, b.cvt(i, "i32"), inside)
    first = index.get()
    b.store_lanes("i64", out, o * inner + column, b.select(first.equals(NONE), b.i64(0), b.cvt(first, "i64")), inside)
    return b.finish()


def _start(b: Builder, memory: str):
    t = MEMORY[memory][1]
    low = {"f32": float("-inf"), "f64": float("-inf"), "i32": -2 ** 31, "i64": -2 ** 63}[t]
    return b.var(t, low), b.var("i32", NONE)


def _visit(b: Builder, best, index, v: Value, at: Value, inside: Value) -> None:
    """Keep v if it beats the best so far; the first number a lane sees is kept even when it is the least one."""
    old, where = best.get(), index.get()
    number = b.pure("eq", v, v)
    take = inside & ((old < v) | (where.equals(NONE) & number))
    best.set(b.select(take, v, old))
    index.set(b.select(take, at, where))
