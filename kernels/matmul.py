"""Float matrix products: y [T, N] = x [T, K] times w, f32 arithmetic, canonical dots.

Each output: 64 lanes, lane l folds acc = fma(x_k, w_k, acc) over k = l, l + 64, ... from +0 (K padded to a multiple of
64 with +0 on both sides, the padded steps performed), then the halving tree: lane l adds lane l + 32, then 16, 8 ... 1.
w is F32, F16 or BF16, [N, K] (`matmul_rows`) or [K, N] (`matmul_columns`), or a block type [N, K] in file order, each
element decoded exactly as `dequantize` does.

Grouped kernels take x [T, G, K], w [G, N, K] or [G, K, N] and give y [T, G, N]: row g of a token by matrix g.

Schedule: the 64 lanes are independent until the tree, so a kernel of 16 lanes takes them in four quarters, one after
the other over the whole of K for a tile of rows x tokens (accumulators stay in registers), and joins the quarters at
the end: (q0 + q2) + (q1 + q3), then the tree over 16.  One token: all four quarters at once, two rows half the matrix
apart.
"""
from __future__ import annotations

import functools
from typing import Callable, Sequence

from m3jit.ir.loop import MEMORY, Buffer, Kernel, Value
from m3jit.ir.loop_builder import Builder
from m3jit.isa.types import DTYPES, DType
from m3jit.kernels import blocks
from m3jit.kernels.embed import FLOAT_MEMORY
from m3jit.kernels.qmatmul import token_tiles

LANES, QUARTERS, DOT = 16, 4, 64
ROWS = 16                                    # weight rows of a group
COLUMN_VECTORS = 2                           # vectors of 16 columns of a matmul_columns group


class RowsKernel:
    """A product with rows of weights under construction; parameters as `matmul_rows`."""

    def __init__(self, dtype: DType, name: str = "matmul_rows", grouped: bool = False):
        self.dtype = dtype
        self.b = b = Builder(f"{name}_{dtype.name.lower()}{'_grouped' * grouped}", LANES)
        self.memory = "u8" if dtype.is_block else FLOAT_MEMORY[dtype.name]
        self.x, self.w, self.y = b.ptr("x", "r", "f32"), b.ptr("w", "r", self.memory), b.ptr("y", "w", "f32")
        self.tokens, self.cols, self.rows = b.scalar("T"), b.scalar("K"), b.scalar("N")
        self.row_bytes = self.cols // dtype.block * dtype.nbytes
        self.groups = b.scalar("G") if grouped else None
        # several rows share the loads of x; decoding a block costs more than that, so there several tokens share it
        self.tile_rows, self.tile_tokens = (4, (6, 2, 1)) if not dtype.is_block else (1, (8, 2, 1))
        self.step = max(DOT, dtype.block)    # elements per round of the inner loop
        self.whole = self.cols // self.step * self.step

    def weight_row(self, row: Value) -> Buffer:
        return self.w.at(self.b.imin(row, self.rows - 1) * self.row_bytes)

    def weights(self, row: Buffer, k: Value, part: int, inside: Value | None) -> Value:
        """Elements k + 16 part .. + 15 of a row, k a multiple of `step`; 0 where `inside` does not hold."""
        if not self.dtype.is_block:
            return self.b.load_lanes(self.memory, row, k + LANES * part, inside)
        per_block = self.dtype.block // LANES
        block = row.at((k // self.dtype.block + part // per_block) * self.dtype.nbytes)
        return blocks.decode16(self.b, self.dtype, block, part % per_block)

    def fold(self, accumulators: Sequence[Sequence], rows: Sequence[Buffer], tokens: Sequence[Buffer],
             quarters: Sequence[int]) -> None:
        """Folds all of K into accumulators[quarter index][row * len(tokens) + token]."""
        b = self.b
        with b.loop(0, self.whole, self.step) as k:
            for part in range(self.step // LANES):
                if part % QUARTERS in quarters:
                    self.fold_step(accumulators[quarters.index(part % QUARTERS)], rows, tokens, k, part, None)
        with b.if_(self.whole < self.cols):  # the last, partly padded round of 64 (never with 256-element blocks)
            for i, quarter in enumerate(quarters):
                self.tail_step(accumulators[i], rows, tokens, quarter)

    def fold_step(self, acc: Sequence, rows: Sequence[Buffer], tokens: Sequence[Buffer], k: Value, part: int,
                  inside: Value | None) -> None:
        b = self.b
        ws = [self.weights(r, k, part, inside) for r in rows]
        for t, x in enumerate(tokens):
            v = b.load_lanes("f32", x, k + LANES * part, inside)
            for r, w in enumerate(ws):
                cell = acc[r * len(tokens) + t]
                cell.set(b.fma(v, w, cell.get()))

    def tail_step(self, acc: Sequence, rows: Sequence[Buffer], tokens: Sequence[Buffer], quarter: int) -> None:
        b, zero = self.b, self.b.f32(0.0)
        if not self.dtype.is_block:
            inside = b.in_range(self.whole + LANES * quarter, self.cols)
            self.fold_step(acc, rows, tokens, self.whole, quarter, inside)
            return
        with b.if_(self.whole + LANES * quarter < self.cols):
            self.fold_step(acc, rows, tokens, self.whole, quarter, None)
        with b.else_():
            for cell in acc:
                cell.set(b.fma(zero, zero, cell.get()))

    def finish(self, quarters: Sequence[Value], token: Value | int, row: Value) -> None:
        """Tree over the four quarters and the lanes; stores y[token, row] where the row exists."""
        b = self.b
        joined = (quarters[0] + quarters[2]) + (quarters[1] + quarters[3])
        value = b.canonical_nan(b.fold(joined, "add"))
        with b.if_(row < self.rows):
            b.store("f32", self.y, self.rows * self.row_of(token) + row, value)

    def row_of(self, token: Value | int) -> Value | int:
        """Number of a token's row in x and y."""
        return token if self.groups is None else self.groups * token + self.member

    def token_row(self, token: Value | int) -> Buffer:
        return self.x.at(self.cols * self.row_of(token) * 4)

    # -- one token ----------------------------------------------------------------------------------------------
    def single(self, first_rows: Sequence[Value]) -> None:
        b = self.b
        with b.loop(0, ROWS) as r:
            rows = [first + r for first in first_rows]
            acc = [[b.var("f32", 0.0) for _ in rows] for _ in range(QUARTERS)]
            self.fold(acc, [self.weight_row(row) for row in rows], [self.token_row(0)], range(QUARTERS))
            for i, row in enumerate(rows):
                self.finish([q[i].get() for q in acc], 0, row)

    # -- more tokens ----------------------------------------------------------------------------------------------
    def tile(self, first_row: Value, first_token: Value, count: int) -> None:
        """tile_rows rows x count tokens, quarter after quarter."""
        b, size = self.b, self.tile_rows * count
        partial = b.scratch("quarters", "f32", QUARTERS * size * LANES)
        rows = [self.weight_row(first_row + i) for i in range(self.tile_rows)]
        tokens = [self.token_row(first_token + i) for i in range(count)]
        for quarter in range(QUARTERS):
            acc = [b.var("f32", 0.0) for _ in range(size)]
            self.fold([acc], rows, tokens, [quarter])
            for i, cell in enumerate(acc):
                b.store_lanes("f32", partial, (quarter * size + i) * LANES, cell.get())
        b.sync()
        for i in range(size):
            parts = [b.load_lanes("f32", partial, (q * size + i) * LANES) for q in range(QUARTERS)]
            self.finish(parts, first_token + i % count, first_row + i // count)
        b.sync()

    def build(self) -> Kernel:
        b = self.b
        tiles = (self.rows + (ROWS - 1)) // ROWS
        half = (tiles + 1) // 2
        group = b.group
        if self.groups is None:
            b.set_grid(half)
        else:
            b.set_grid(half * self.groups)
            self.member, group = b.group // half, b.group % half
            self.w = self.w.at(self.member * self.rows * self.row_bytes)
        far = group + half
        two = far < tiles
        with b.if_(self.tokens.equals(1)):
            self.single([group * ROWS, b.select(two, far, group) * ROWS])
        with b.else_():
            with b.loop(0, b.cvt(two, "i64") + 1) as stream:
                base = (group + half * stream) * ROWS

                def tokens(first: Value, count: int) -> None:
                    with b.loop(0, ROWS, self.tile_rows) as r:
                        self.tile(base + r, first, count)
                token_tiles(b, self.tokens, tokens, self.tile_tokens)
        return b.finish()


@functools.lru_cache(maxsize=None)
def matmul_rows(dtype_name: str, grouped: bool = False) -> Kernel:
    """x r f32 [T, K], w r [N, K] row-major (block types: file bytes), y w f32 [T, N], T, K, N i64.
    grouped: x [T, G, K], w [G, N, K], y [T, G, N] and G i64 behind."""
    return RowsKernel(DTYPES[dtype_name], grouped=grouped).build()


@functools.lru_cache(maxsize=None)
def matmul_columns(dtype_name: str, grouped: bool = False) -> Kernel:
    """x r f32 [T, K], w r float [K, N], y w f32 [T, N], T, K, N i64.  16 lanes = 16 outputs; the 64 lanes of the dot
    are walked one after the other, their sums kept in scratch for the tree.
    grouped: x [T, G, K], w [G, K, N], y [T, G, N] and G i64 behind."""
    memory = FLOAT_MEMORY[dtype_name]
    b = Builder(f"matmul_columns_{dtype_name.lower()}{'_grouped' * grouped}", LANES)
    x, w, y = b.ptr("x", "r", "f32"), b.ptr("w", "r", memory), b.ptr("y", "w", "f32")
    tokens, cols, outs = b.scalar("T"), b.scalar("K"), b.scalar("N")
    width = LANES * COLUMN_VECTORS
    pieces = (outs + (width - 1)) // width
    if not grouped:
        b.set_grid(pieces)
        column = b.group * width

        def row_of(token: Value) -> Value:
            return token
    else:
        groups = b.scalar("G")
        b.set_grid(pieces * groups)
        member, column = b.group // pieces, b.group % pieces * width
        w = w.at(member * cols * outs * MEMORY[memory][0])

        def row_of(token: Value) -> Value:
            return token * groups + member
    inside = [b.in_range(column + LANES * v, outs) for v in range(COLUMN_VECTORS)]

    def tile(first: Value, count: int) -> None:
        size = count * COLUMN_VECTORS
        sums = b.scratch("lanes", "f32", DOT * size * LANES)
        with b.loop(0, DOT) as lane:
            acc = [b.var("f32", 0.0) for _ in range(size)]
            with b.loop(lane, cols, DOT) as k:
                ws = [b.load_lanes(memory, w, k * outs + column + LANES * v, m) for v, m in enumerate(inside)]
                for t in range(count):
                    xk = b.load("f32", x, row_of(first + t) * cols + k)
                    for v, wk in enumerate(ws):
                        cell = acc[t * COLUMN_VECTORS + v]
                        cell.set(b.fma(xk, wk, cell.get()))
            with b.if_((cols % DOT <= lane) & (0 < cols % DOT)):
                for cell in acc:             # this lane's last step is padding
                    cell.set(b.fma(b.f32(0.0), b.f32(0.0), cell.get()))
            for i, cell in enumerate(acc):
                b.store_lanes("f32", sums, (lane * size + i) * LANES, cell.get())
        b.sync()
        _vertical_tree(b, sums, size)
        for i in range(size):
            value = b.canonical_nan(b.load_lanes("f32", sums, i * LANES))
            t, v = divmod(i, COLUMN_VECTORS)
            b.store_lanes("f32", y, row_of(first + t) * outs + column + LANES * v, value, inside[v])
        b.sync()
    token_tiles(b, tokens, tile, (4, 1))
    return b.finish()


def _vertical_tree(b: Builder, sums: Buffer, size: int, combine: Callable[[Value, Value], Value] | None = None) -> None:
    """Halving tree over 64 rows of `size` vectors in scratch; the result is row 0."""
    n, width = DOT // 2, size * b.lanes
    while n:
        with b.loop(0, n * width, b.lanes) as at:
            own, other = b.load_lanes("f32", sums, at), b.load_lanes("f32", sums, at + n * width)
            b.store_lanes("f32", sums, at, own + other if combine is None else combine(own, other))
        b.sync()
        n //= 2
