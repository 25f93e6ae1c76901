"""Products with the experts that a router chose: row p of y is row p / S of x times w[experts[p]] transposed.

Each output has the value `qmatmul` or `matmul_rows` gives it for that expert's matrix alone.

Schedule: a group computes 16 rows of a matrix for one choice after the other, so that with one token (each expert read
once) all groups share the reading, and with many the rows of an expert that is chosen again come from the cache.
"""
from __future__ import annotations

import functools
from typing import Sequence

from m3jit.ir.loop import Kernel, Value
from m3jit.ir.loop_builder import Builder
from m3jit.isa.types import DTYPES, DType
from m3jit.kernels import layout
from m3jit.kernels.matmul import QUARTERS, ROWS, RowsKernel
from m3jit.kernels.qmatmul import Shape, accumulate


@functools.lru_cache(maxsize=None)
def routed_qmatmul(dtype_name: str) -> Kernel:
    """act r records (`quantize_activation` of the type's block) [T / S, K], w r u8 R16 [E N, K] with N a multiple of
    16, y w f32 [T, N], T (choices), K, N i64, experts r i64 [T], S i64 (choices that share a row of act)."""
    dtype = DTYPES[dtype_name]
    b = Builder(f"routed_qmatmul_{dtype_name.lower()}", 16)
    act, w, y = b.ptr("act", "r", "i32"), b.ptr("w", "r", "u8"), b.ptr("y", "w", "f32")
    shape = Shape(b, dtype)
    experts, share = b.ptr("experts", "r", "i64"), b.scalar("S")
    b.set_grid(shape.tiles)
    row = b.group * 16
    inside = b.in_range(row, shape.rows)
    matrix = shape.tiles * shape.blocks * layout.tile_block_bytes(dtype)
    with b.loop(0, shape.tokens) as choice:
        tile = shape.tile(w.at(b.load("i64", experts, choice) * matrix), b.group)
        value = accumulate(b, shape, [tile], [shape.record(act, choice // share)])[0][0]
        b.store_lanes("f32", y, shape.rows * choice + row, b.canonical_nan(value), inside)
    return b.finish()


class _Routed(RowsKernel):
    """routed_matmul under construction."""

    def __init__(self, dtype: DType):
        super().__init__(dtype, "routed_matmul")
        self.experts, self.share = self.b.ptr("experts", "r", "i64"), self.b.scalar("S")
        self.matrices = self.w

    def build(self) -> Kernel:
        b = self.b
        b.set_grid((self.rows + (ROWS - 1)) // ROWS)
        with b.loop(0, self.tokens) as choice:
            self.w = self.matrices.at(b.load("i64", self.experts, choice) * self.rows * self.row_bytes)
            x = self.token_row(choice // self.share)
            with b.loop(b.group * ROWS, b.imin(b.group * ROWS + ROWS, self.rows)) as row:
                acc: Sequence[Sequence] = [[b.var("f32", 0.0)] for _ in range(QUARTERS)]
                self.fold(acc, [self.weight_row(row)], [x], range(QUARTERS))
                quarters: list[Value] = [q[0].get() for q in acc]
                self.finish(quarters, choice, row)
        return b.finish()


@functools.lru_cache(maxsize=None)
def routed_matmul(dtype_name: str) -> Kernel:
    """x r f32 [T / S, K], w r [E, N, K] row-major (block types: file bytes), y w f32 [T, N], T (choices), K, N i64,
    experts r i64 [T], S i64 (choices that share a row of x)."""
    return _Routed(DTYPES[dtype_name]).build()
