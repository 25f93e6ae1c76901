"""Recurrences: causal convolution by channel with a window, and the state-space scan.

Both go through the rows of their input in order; lanes are 16 neighbouring channels, groups are independent tiles of
channels.  What is carried from row to row stays in registers and is read from and written to memory once.
"""
from __future__ import annotations

import functools

from m3jit.ir import scalar_math
from m3jit.ir.loop import Kernel, Value
from m3jit.ir.loop_builder import Builder, Var
from m3jit.ir.trace_recurrent import MAX_TAPS
from m3jit.isa.cells import LANES

BLOCK = 16                                   # states of a channel that are kept in registers


@functools.lru_cache(maxsize=None)
def causal_conv(taps: int, bias: bool = False) -> Kernel:
    """x r f32 [T, C], w r f32 [C, taps], [bias r f32 [C],] before r f32 [taps - 1, C], y w f32 [T, C],
    after w f32 [taps - 1, C], T, C i64.

    y[t, c] folds fma(row, w[c, k], acc) over the rows t - taps + 1 .. t, the oldest first, from bias[c] or +0; rows
    before 0 stand in `before`.  `after` are the last taps - 1 rows of before and x."""
    if not 1 <= taps <= MAX_TAPS:
        raise ValueError(f"a causal convolution kernel has 1 to {MAX_TAPS} taps, not {taps}")
    b = Builder(f"causal_conv_{taps}{'_bias' if bias else ''}", LANES)
    x, w = b.ptr("x", "r", "f32"), b.ptr("w", "r", "f32")
    bias_p = b.ptr("bias", "r", "f32") if bias else None
    before, y, after = b.ptr("before", "r", "f32"), b.ptr("y", "w", "f32"), b.ptr("after", "w", "f32")
    rows, channels = b.scalar("T"), b.scalar("C")
    b.set_grid((channels + (LANES - 1)) // LANES)
    first = b.group * LANES
    inside = b.in_range(first, channels)
    at = (b.cvt(b.lane, "i64") + first) * taps
    weights = [b.load("f32", w, at + k, inside) for k in range(taps)]
    start = b.f32(0.0) if bias_p is None else b.load_lanes("f32", bias_p, first, inside)
    window = [b.var("f32", b.load_lanes("f32", before, channels * k + first, inside)) for k in range(taps - 1)]
    with b.loop(0, rows) as t:
        seen = [*(cell.get() for cell in window), b.load_lanes("f32", x, channels * t + first, inside)]
        acc = start
        for row, weight in zip(seen, weights):
            acc = b.fma(row, weight, acc)
        b.store_lanes("f32", y, channels * t + first, b.canonical_nan(acc), inside)
        for cell, row in zip(window, seen[1:]):
            cell.set(row)
    for k, cell in enumerate(window):
        b.store_lanes("f32", after, channels * k + first, cell.get(), inside)
    return b.finish()


class _Scan:
    """A tile of 16 channels of one run."""

    def __init__(self, d_state: int, heads: bool, skip: str, packed: bool):
        name = f"scan_{d_state}{'_heads' if heads else ''}{'_packed' if packed else ''}{skip and '_skip_' + skip}"
        self.b = b = Builder(name, LANES)
        self.d_state, self.heads, self.packed, self.skip = d_state, heads, packed, skip
        self.before, self.x, self.dt, self.a, self.input, self.output = \
            (b.ptr(p, "r", "f32") for p in ("before", "x", "dt", "a", "B", "C"))
        self.d = b.ptr("D", "r", "f32") if skip else None
        self.y, self.after = b.ptr("y", "rw", "f32"), b.ptr("after", "w", "f32")
        self.rows, self.runs, length, groups = (b.scalar(n) for n in ("T", "runs", "length", "groups"))
        tiles = (length + (LANES - 1)) // LANES
        b.set_grid(self.runs * tiles)
        self.run = b.group // tiles
        at = b.group % tiles * LANES
        self.inside = b.in_range(at, length)
        self.channel, self.channels = self.run * length + at, self.runs * length
        self.shared, self.width = self.run // (self.runs // groups) * d_state, groups * d_state

    def lanes(self, p, t: Value) -> Value:
        """16 channels of row t of a [T, channels] array."""
        return self.b.load_lanes("f32", p, self.channels * t + self.channel, self.inside)

    def skipped(self) -> Value | None:
        """D of the channels."""
        if self.d is None:
            return None
        return self.b.load("f32", self.d, self.run) if self.skip == "head" else \
            self.b.load_lanes("f32", self.d, self.channel, self.inside)

    def exponents(self, first: Value, count: int) -> list[Value]:
        """A of the channels for states first .. first + count - 1."""
        b = self.b
        if self.packed:
            return [b.load_lanes("f32", self.a, self.place(first + i)) for i in range(count)]
        at = (b.cvt(b.lane, "i64") + self.channel) * self.d_state + first
        return [b.load("f32", self.a, at + i, self.inside) for i in range(count)]

    def place(self, state: Value) -> Value:
        """Where state n of the tile stands in h (and in a packed A)."""
        return (self.b.group * self.d_state + state) * LANES

    def states(self, first: Value, count: int, only: bool) -> None:
        """All rows with `count` states from `first`; only: these are all there are."""
        b = self.b
        cells = [b.var("f32", b.load_lanes("f32", self.before, self.place(first + i))) for i in range(count)]
        exponents = [] if self.heads else self.exponents(first, count)
        skipped = self.skipped() if only else None
        with b.loop(0, self.rows) as t:
            x = self.lanes(self.x, t)
            step = b.load("f32", self.dt, self.runs * t + self.run) if self.heads else self.lanes(self.dt, t)
            decay = b.load("f32", self.a, self.runs * t + self.run) if self.heads else None
            acc = b.f32(0.0) if only else b.select(first.equals(0), b.f32(0.0), self.lanes(self.y, t))
            acc = self.row(cells, exponents, decay, step, step * x, acc, self.width * t + (self.shared + first))
            if only:
                acc = b.canonical_nan(acc if skipped is None else b.fma(skipped, x, acc))
            b.store_lanes("f32", self.y, self.channels * t + self.channel, acc, self.inside)
        for i, cell in enumerate(cells):
            b.store_lanes("f32", self.after, self.place(first + i), b.canonical_nan(cell.get()))

    def row(self, cells: list[Var], exponents: list[Value], decay: Value | None, step: Value, u: Value, acc: Value,
            at: Value) -> Value:
        """One row: the states move on, and acc folds over them."""
        b = self.b
        for i, cell in enumerate(cells):
            factor = decay if decay is not None else scalar_math.exp(b, step * exponents[i])
            h = b.fma(cell.get(), factor, u * b.load("f32", self.input, at + i))
            cell.set(h)
            acc = b.fma(h, b.load("f32", self.output, at + i), acc)
        return acc

    def finish_rows(self) -> None:
        """y of all rows from what was folded over the states."""
        b = self.b
        skipped = self.skipped()
        with b.loop(0, self.rows) as t:
            y = self.lanes(self.y, t)
            y = y if skipped is None else b.fma(skipped, self.lanes(self.x, t), y)
            b.store_lanes("f32", self.y, self.channels * t + self.channel, b.canonical_nan(y), self.inside)


@functools.lru_cache(maxsize=None)
def scan(d_state: int, heads: bool = False, skip: str = "", packed: bool = False) -> Kernel:
    """before r f32 tiles of h, x r f32 [T, channels], dt r f32 [T, channels], A r f32 [channels, d_state] (packed: in
    tiles as h), B and C r f32 [T, groups d_state], [D r f32 [channels],] y rw f32 [T, channels], after w f32 tiles of
    h, T, runs, length, groups i64; channels = runs length.  heads: dt and A are [T, runs], A the decays.  skip: ""
    (no D), "channel", "head" (D [runs]).

    u = dt x; h = fma(h, exp(dt A), u B); y folds fma(h, C, acc) over the states in order from +0, then fma(D, x, y)."""
    k = _Scan(d_state, heads, skip, packed)
    b = k.b
    if d_state <= BLOCK:
        k.states(b.i64(0), d_state, True)
        return b.finish()
    whole = d_state // BLOCK * BLOCK
    with b.loop(0, whole, BLOCK) as first:
        k.states(first, BLOCK, False)
    if d_state % BLOCK:
        k.states(b.i64(whole), d_state % BLOCK, False)
    k.finish_rows()
    return b.finish()
