"""Rows of a table by integer ids, as f32, and whole-tensor dequantisation (the same with every row)."""
from __future__ import annotations

import functools

from m3jit.ir.loop import Buffer, Kernel, Value
from m3jit.ir.loop_builder import Builder
from m3jit.isa.types import DTYPES, DType
from m3jit.kernels import blocks

FLOAT_MEMORY = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@functools.lru_cache(maxsize=None)
def embed(dtype_name: str, ids_type: str = "i64") -> Kernel:
    """ids r i64 or i32 [T], table r row-major [V, D] (float, or the file's block bytes), y w f32 [T, D], T, D i64.

    0 <= id < V is the caller's duty.  One group per token and piece of 1024 columns."""
    dtype = DTYPES[dtype_name]
    b = Builder(f"embed_{dtype_name.lower()}_{ids_type}", 64 if not dtype.is_block else blocks.LANES)
    ids, table, y = b.ptr("ids", "r", ids_type), b.ptr("table", "r", _memory(dtype)), b.ptr("y", "w", "f32")
    tokens, cols = b.scalar("T"), b.scalar("D")
    pieces = (cols + 1023) // 1024
    b.set_grid(tokens * pieces)
    token, piece = b.group // pieces, b.group % pieces
    row = b.cvt(b.load(ids_type, ids, token), "i64")
    _decode_row(b, dtype, _row(table, dtype, row, cols), y.at(token * cols * 4), piece * 1024,
                b.imin(piece * 1024 + 1024, cols))
    return b.finish()


@functools.lru_cache(maxsize=None)
def dequantize(dtype_name: str) -> Kernel:
    """x r row-major blocks, y w f32 [count], count i64 (a multiple of the block).  One group per 4096 elements."""
    dtype = DTYPES[dtype_name]
    b = Builder(f"dequantize_{dtype_name.lower()}", blocks.LANES)
    x, y = b.ptr("x", "r", "u8"), b.ptr("y", "w", "f32")
    count = b.scalar("count")
    b.set_grid((count + 4095) // 4096)
    _decode_row(b, dtype, x, y, b.group * 4096, b.imin(b.group * 4096 + 4096, count))
    return b.finish()


def _memory(dtype: DType) -> str:
    return "u8" if dtype.is_block else FLOAT_MEMORY[dtype.name]


def _row(table: Buffer, dtype: DType, row: Value, cols: Value) -> Buffer:
    return table.at(row * (cols // dtype.block * dtype.nbytes))


def _decode_row(b: Builder, dtype: DType, row: Buffer, y: Buffer, lo: Value, hi: Value) -> None:
    """y[lo .. hi) = the row's elements as f32; lo is a multiple of the block."""
    if dtype.is_block:
        with b.loop(lo, hi, dtype.block) as at:
            block = row.at(at // dtype.block * dtype.nbytes)
            for part in range(dtype.block // 16):
                value = b.canonical_nan(blocks.decode16(b, dtype, block, part))
                b.store_lanes("f32", y, at + 16 * part, value)
        return
    with b.loop(lo, hi, 64) as at:
        inside = b.in_range(at, hi)
        value = b.canonical_nan(b.load_lanes(_memory(dtype), row, at, inside))
        b.store_lanes("f32", y, at, value, inside)
