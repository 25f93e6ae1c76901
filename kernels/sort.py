"""Stable sorting and selection of the k first, along the last axis.

Order: NaN is the largest, -0 = +0, ties go to the lower index in both directions.  An element becomes an unsigned key
whose order is the wanted one (descending: complemented), and rows are sorted by key, byte by byte from the lowest
(radix sort): each pass is stable, so the whole is.
"""
from __future__ import annotations

import functools

from m3jit.ir.loop import MEMORY, Buffer, Kernel, Value
from m3jit.ir.loop_builder import Builder

DIGITS = 256
KEY_BYTES = {"f32": 4, "f16": 4, "bf16": 4, "i8": 4, "u8": 4, "i16": 4, "i32": 4, "i64": 8}
# Bytes of the key that can differ between elements; f16 and bf16 are sorted as the f32 they widen to.
_PASSES = {"i8": (0, 3), "u8": (0,), "i16": (0, 1, 3)}


def work_bytes(memory: str, rows: int, n: int) -> int:
    """Size of the work buffer of `sort_rows` and `topk_rows`."""
    return rows * n * 2 * (KEY_BYTES[memory] + 4)


def sort_key(b: Builder, memory: str, v: Value, descending: bool) -> Value:
    """Key of an element, i32 or i64 bits compared as unsigned."""
    if v.type == "f32":
        v = b.select(v.equals(0.0), b.f32(0.0), v)
        bits = b.bits(v)
        ordered = bits ^ b.select(bits < 0, b.i32(-1), b.i32(-2 ** 31))
        key = b.select(b.pure("ne", v, v), b.i32(-1), ordered)
    else:
        key = v ^ (b.i64(-2 ** 63) if v.type == "i64" else b.i32(-2 ** 31))
    return key ^ -1 if descending else key


class _Sorter:
    """Radix sort of one row by one group of one lane."""

    def __init__(self, b: Builder, memory: str, work: Buffer, n: Value):
        self.b, self.memory, self.n = b, memory, n
        size = KEY_BYTES[memory]
        self.key_type = "i64" if size == 8 else "i32"
        row = work.at(b.group * n * (2 * (size + 4)))
        self.keys = [row, row.at(n * size)]
        self.indices = [row.at(n * (2 * size)), row.at(n * (2 * size + 4))]
        self.counts = b.scratch("counts", "i32", DIGITS)

    def fill(self, x: Buffer, descending: bool) -> None:
        b = self.b
        with b.loop(0, self.n) as i:
            b.store(self.key_type, self.keys[0], i, sort_key(b, self.memory, b.load(self.memory, x, i), descending))
            b.store("i32", self.indices[0], i, b.cvt(i, "i32"))

    def sort(self, count: Value, passes: tuple[int, ...]) -> Buffer:
        """Sorts the first `count` entries; the buffer that holds the indices at the end."""
        for number, byte in enumerate(passes):
            radix_pass(self.b, self.counts, self.key_type, self.keys, self.indices, number % 2, byte, count)
        return self.indices[len(passes) % 2]


def radix_pass(b: Builder, counts: Buffer, key_type: str, keys: list[Buffer], indices: list[Buffer], side: int,
               byte: Value | int, count: Value) -> None:
    """One stable pass: entries (key, index) of side `side` go to the other side in order of a byte of the key.

    counts: scratch of DIGITS i32."""
    def digit(key: Value) -> Value:
        shift = byte * 8 if isinstance(byte, int) else b.cvt(byte * 8, key_type)
        return b.cvt(b.lshr(key, shift) & 255, "i32")
    with b.loop(0, DIGITS) as d:
        b.store("i32", counts, d, b.i32(0))
    with b.loop(0, count) as i:
        at = digit(b.load(key_type, keys[side], i))
        b.store("i32", counts, at, b.load("i32", counts, at) + 1)
    start = b.var("i32", 0, varying=False)
    with b.loop(0, DIGITS) as d:
        size = b.load("i32", counts, d)
        b.store("i32", counts, d, start.get())
        start.set(start.get() + size)
    with b.loop(0, count) as i:
        key = b.load(key_type, keys[side], i)
        at = digit(key)
        place = b.load("i32", counts, at)
        b.store("i32", counts, at, place + 1)
        b.store(key_type, keys[1 - side], place, key)
        b.store("i32", indices[1 - side], place, b.load("i32", indices[side], i))


def _passes(memory: str) -> tuple[int, ...]:
    return _PASSES.get(memory, tuple(range(KEY_BYTES[memory])))


@functools.lru_cache(maxsize=None)
def sort_rows(memory: str, descending: bool = False) -> Kernel:
    """x r [rows, n], values w [rows, n] of x's type, indices w i64 [rows, n], work rw u8 (`work_bytes`), rows, n i64
    with n < 2^31.  One group, of one lane, per row."""
    return _build(memory, descending, topk=False, ordered=True)


@functools.lru_cache(maxsize=None)
def topk_rows(memory: str, largest: bool = True, ordered: bool = True) -> Kernel:
    """x r [rows, n], values w [rows, k], indices w i64 [rows, k], work rw u8 (`work_bytes`), rows, n, k i64 with
    1 <= k <= n: the first k of the sorted row (descending for `largest`); not ordered: in the order they have in x."""
    return _build(memory, largest, topk=True, ordered=ordered)


def _build(memory: str, descending: bool, topk: bool, ordered: bool) -> Kernel:
    flags = ("_descending" if descending else "") + ("" if ordered else "_unordered")
    b = Builder(f"{'topk' if topk else 'sort'}_{memory}{flags}", 1)
    copy = {"f32": "i32", "f16": "u16", "bf16": "u16"}.get(memory, memory)     # values move as bits
    x, values = b.ptr("x", "r", memory), b.ptr("values", "w", copy)
    indices, work = b.ptr("indices", "w", "i64"), b.ptr("work", "rw", "i32")
    rows, n = b.scalar("rows"), b.scalar("n")
    k = b.scalar("k") if topk else n
    b.set_grid(rows)
    row = x.at(b.group * n * MEMORY[memory][0])
    s = _Sorter(b, memory, work, n)
    s.fill(row, descending)
    order = s.sort(n, _passes(memory))
    if not ordered:
        order = _by_position(b, s, order, k)
    with b.loop(0, k) as i:
        at = b.cvt(b.load("i32", order, i), "i64")
        b.store("i64", indices, b.group * k + i, at)
        b.store(copy, values, b.group * k + i, b.load(copy, row, at))
    return b.finish()


def _by_position(b: Builder, s: _Sorter, order: Buffer, k: Value) -> Buffer:
    """Sorts the first k indices themselves."""
    with b.loop(0, k) as i:
        index = b.load("i32", order, i)
        key = b.cvt(index, "i64") if s.key_type == "i64" else index
        b.store(s.key_type, s.keys[0], i, key)
        b.store("i32", s.indices[0], i, index)
    return s.sort(k, (0, 1, 2, 3))
