"""Moves: bits go from one place to another unchanged.

Transpose, slice, concatenate, broadcast, pad and tile are all `strided_copy` with other strides; a block-quantised
tensor is moved along its leading axes as bytes.
"""
from __future__ import annotations

import functools

from m3jit.ir.loop import Kernel, Value
from m3jit.ir.loop_builder import Builder

WIDTHS = {1: "u8", 2: "u16", 4: "i32", 8: "i64"}     # bytes of an element -> memory type that copies its bits
RANK = 5
PIECE = 1024                                         # innermost elements of one group


@functools.lru_cache(maxsize=None)
def strided_copy(width: int) -> Kernel:
    """src r, dst w (elements of `width` bytes), d0 .. d4, s0 .. s4, t0 .. t3, src_offset, dst_offset i64:
    dst[dst_offset + i0 t0 + i1 t1 + i2 t2 + i3 t3 + i4] = src[src_offset + i0 s0 + ... + i4 s4] for all i < d.

    Strides and offsets count elements and may be 0 (source: repeats) or negative; lower ranks have leading d = 1."""
    memory = WIDTHS[width]
    b = Builder(f"strided_copy_{8 * width}", 64)
    src, dst = b.ptr("src", "r", memory), b.ptr("dst", "w", memory)
    dims = [b.scalar(f"d{i}") for i in range(RANK)]
    steps = [b.scalar(f"s{i}") for i in range(RANK)]
    targets = [b.scalar(f"t{i}") for i in range(RANK - 1)]
    src_at, dst_at = b.scalar("src_offset"), b.scalar("dst_offset")
    pieces = (dims[4] + (PIECE - 1)) // PIECE
    b.set_grid(dims[0] * dims[1] * dims[2] * dims[3] * pieces)
    rest, first = b.group // pieces, b.group % pieces * PIECE
    for i in (3, 2, 1, 0):
        index = rest if i == 0 else rest % dims[i]
        src_at, dst_at = src_at + index * steps[i], dst_at + index * targets[i]
        if i:
            rest = rest // dims[i]
    end = b.imin(first + PIECE, dims[4])
    with b.if_(steps[4].equals(1)):
        with b.loop(first, end, 64) as at:
            inside = b.in_range(at, end)
            b.store_lanes(memory, dst, dst_at + at, b.load_lanes(memory, src, src_at + at, inside), inside)
    with b.else_():
        with b.loop(first, end, 64) as at:
            inside = b.in_range(at, end)
            index = src_at + (b.cvt(b.lane, "i64") + at) * steps[4]
            b.store_lanes(memory, dst, dst_at + at, b.load(memory, src, index, inside), inside)
    return b.finish()


@functools.lru_cache(maxsize=None)
def gather(width: int, index_type: str = "i64") -> Kernel:
    """table r [outer, n, inner], index r i64 or i32 [m], out w [outer, m, inner], outer, n, m, inner i64:
    out[o, j, :] = table[o, index[j], :].  0 <= index < n is the caller's duty."""
    memory = WIDTHS[width]
    b = Builder(f"gather_{8 * width}_{index_type}", 64)
    table, index, out = b.ptr("table", "r", memory), b.ptr("index", "r", index_type), b.ptr("out", "w", memory)
    outer, n, m, inner = (b.scalar(s) for s in ("outer", "n", "m", "inner"))
    few = inner < 32                                 # short slices: lanes run over the indices instead
    pieces = b.select(few, (m + 63) // 64, m * ((inner + (PIECE - 1)) // PIECE))
    b.set_grid(outer * pieces)
    o, piece = b.group // pieces, b.group % pieces
    with b.if_(few):
        j = piece * 64
        inside = b.in_range(j, m)
        row = (b.cvt(b.load_lanes(index_type, index, j, inside), "i64") + o * n) * inner
        target = (b.cvt(b.lane, "i64") + (o * m + j)) * inner
        with b.loop(0, inner) as i:
            b.store(memory, out, target + i, b.load(memory, table, row + i, inside), inside)
    with b.else_():
        per = (inner + (PIECE - 1)) // PIECE
        j, first = piece // per, piece % per * PIECE
        row = b.cvt(b.load(index_type, index, j), "i64") + o * n
        end = b.imin(first + PIECE, inner)
        with b.loop(first, end, 64) as at:
            inside = b.in_range(at, end)
            v = b.load_lanes(memory, table, row * inner + at, inside)
            b.store_lanes(memory, out, (o * m + j) * inner + at, v, inside)
    return b.finish()


@functools.lru_cache(maxsize=None)
def scatter(memory: str, mode: str, index_type: str = "i64") -> Kernel:
    """out rw [outer, n, inner], index r [m], values r [outer, m, inner], outer, n, m, inner i64; mode ADD or MAX:
    out[o, index[j], :] = combine(out[o, index[j], :], values[o, j, :]), j in order.

    f32 (canonical NaN where written; a NaN loses in MAX) and integers (ADD wraps).  Lanes run over inner."""
    if mode not in ("ADD", "MAX") or memory not in ("f32", "i8", "u8", "i16", "i32", "i64"):
        raise ValueError(f"scatter does ADD and MAX on f32 and integers, not {mode} on {memory}")
    b = Builder(f"scatter_{mode.lower()}_{memory}_{index_type}", 64)
    out, index = b.ptr("out", "rw", memory), b.ptr("index", "r", index_type)
    values = b.ptr("values", "r", memory)
    outer, n, m, inner = (b.scalar(s) for s in ("outer", "n", "m", "inner"))
    pieces = (inner + 63) // 64
    b.set_grid(outer * pieces)
    o, column = b.group // pieces, b.group % pieces * 64
    inside = b.in_range(column, inner)
    with b.loop(0, m) as j:
        at = (b.cvt(b.load(index_type, index, j), "i64") + o * n) * inner + column
        old = b.load_lanes(memory, out, at, inside)
        new = b.load_lanes(memory, values, (o * m + j) * inner + column, inside)
        b.store_lanes(memory, out, at, _combine(b, mode, memory, old, new), inside)
    return b.finish()


def _combine(b: Builder, mode: str, memory: str, old: Value, new: Value) -> Value:
    if mode == "ADD":
        return b.canonical_nan(old + new) if memory == "f32" else old + new
    return b.canonical_nan(b.fmax(old, new)) if memory == "f32" else b.imax(old, new)


@functools.lru_cache(maxsize=None)
def float_copy(source: str, target: str) -> Kernel:
    """x r, y w, count i64: float storage to float storage (f32, f16, bf16), rounded to nearest even, canonical NaN."""
    b = Builder(f"float_copy_{source}_{target}", 64)
    x, y, count = b.ptr("x", "r", source), b.ptr("y", "w", target), b.scalar("count")
    b.set_grid((count + 4095) // 4096)
    end = b.imin(b.group * 4096 + 4096, count)
    with b.loop(b.group * 4096, end, 64) as at:
        inside = b.in_range(at, end)
        b.store_lanes(target, y, at, b.canonical_nan(b.load_lanes(source, x, at, inside)), inside)
    return b.finish()
