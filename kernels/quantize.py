"""Activation quantisation: f32 rows to int8 blocks, as the integer matmuls read them.

Per block of 32 or 256 consecutive elements: amax = max |x| (a NaN loses), r = 127 / amax, d = amax / 127,
q = rint(x r) as int8 (a NaN product gives 0); where amax = 0 or r overflows: all q = 0 and d = 0.

The matmul kernels read **records**, one per block, row after row, so that one pointer per token and constant
displacements reach everything:

block 32 (48 bytes):  q i8[32], d f32, -128 S i32, -8 S i32, S as f32             S = sum of the block's q
block 256 (352 bytes): q i8[256], d f32, low i8[8], high i8[8], -32 s_j i32[16], -S i32, 8 bytes unused
    s_j = sum of the j-th 16 elements; low_i, high_i with 128 high_i + low_i = s_2i + s_2i+1, -64 <= low_i < 64: the
    sums of the 32-element sub-blocks as two signed bytes, so that dot4 multiplies them with unsigned mins.
"""
from __future__ import annotations

import functools

from m3jit.ir.loop import Buffer, Kernel, Value
from m3jit.ir.loop_builder import Builder

RECORD_BYTES = {32: 48, 256: 352}
# word offsets inside a record
D32, BIAS128, BIAS8, SUM32 = 8, 9, 10, 11
D256, LOW, HIGH, BIAS32, MINUS_SUM = 64, 65, 67, 69, 85


def activation_bytes(rows: int, cols: int, block: int) -> int:
    """Size of the records of [rows, cols] activations; cols is a multiple of block."""
    return rows * (cols // block) * RECORD_BYTES[block]


def largest(b: Builder, values: list[Value]) -> Value:
    """The greatest magnitude over all lanes of some vectors, uniform f32; a NaN counts as 0.

    Magnitudes are compared as integers, which have the same order and a single instruction for the maximum."""
    magnitudes = [b.bits(b.select(b.pure("eq", v, v), b.abs(v), b.f32(0.0))) for v in values]
    top = magnitudes[0]
    for m in magnitudes[1:]:
        top = b.imax(top, m)
    return b.bits(b.fold(top, "imax"))


def block_scale(b: Builder, amax: Value) -> tuple[Value, Value, Value]:
    """(usable, reciprocal, d) of a block with largest magnitude amax."""
    reciprocal = b.f32(127.0) / amax
    usable = (amax > 0.0) & (reciprocal < float("inf"))
    return usable, reciprocal, b.select(usable, amax / 127.0, b.f32(0.0))


def quantized(b: Builder, x: Value, usable: Value, reciprocal: Value) -> Value:
    """rint(x * reciprocal) as i32 in -127..127; 0 where the block is not usable or the product is NaN."""
    t = x * reciprocal
    keep = b.pure("eq", t, t) & usable
    return b.cvt(b.rint(b.select(keep, t, b.f32(0.0))), "i32")


@functools.lru_cache(maxsize=None)
def quantize_activation(block: int) -> Kernel:
    """x r f32 [rows, K], out w u8 records, blocks i64 = rows K / block.  One group per block."""
    if block not in RECORD_BYTES:
        raise ValueError(f"activations are quantised in blocks of 32 or 256, not {block}")
    lanes = 32 if block == 32 else 16
    b = Builder(f"quantize_activation_{block}", lanes)
    x, out = b.ptr("x", "r", "f32"), b.ptr("out", "w", "i32")
    b.set_grid(b.scalar("blocks"))
    record = out.at(b.group * RECORD_BYTES[block])
    row = x.at(b.group * (4 * block))
    (_block32 if block == 32 else _block256)(b, row, record)
    return b.finish()


def _block32(b: Builder, x: Buffer, record: Buffer) -> None:
    v = b.load_lanes("f32", x, 0)
    usable, reciprocal, d = block_scale(b, largest(b, [v]))
    q = quantized(b, v, usable, reciprocal)
    b.store_lanes("i8", record, 0, q)
    total = b.fold(q, "add")
    b.store("f32", record, D32, d)
    b.store("i32", record, BIAS128, total * -128)
    b.store("i32", record, BIAS8, total * -8)
    b.store("f32", record, SUM32, b.cvt(total, "f32"))


def _block256(b: Builder, x: Buffer, record: Buffer) -> None:
    values = [b.load_lanes("f32", x, 16 * j) for j in range(16)]
    usable, reciprocal, d = block_scale(b, largest(b, values))
    b.store("f32", record, D256, d)
    sums = []
    for j, v in enumerate(values):
        q = quantized(b, v, usable, reciprocal)
        b.store_lanes("i8", record, 16 * j, q)
        sums.append(b.fold(q, "add"))
        b.store("i32", record, BIAS32 + j, sums[-1] * -32)
    total = b.i32(0)
    for i in range(8):
        s = sums[2 * i] + sums[2 * i + 1]
        low = ((s + 64) & 127) - 64
        b.store("i8", record, 4 * LOW + i, low)
        b.store("i8", record, 4 * HIGH + i, (s - low) >> 7)
        total = total - s
    b.store("i32", record, MINUS_SUM, total)


@functools.lru_cache(maxsize=None)
def quantize_rows(block: int) -> Kernel:
    """The same values as plain tensors: x r f32 [rows, K], q w i8 [rows, K], d w f32 [rows, K / block],
    blocks i64 = rows K / block."""
    if block not in RECORD_BYTES:
        raise ValueError(f"activations are quantised in blocks of 32 or 256, not {block}")
    b = Builder(f"quantize_rows_{block}", 32)
    x, q_out, d_out = b.ptr("x", "r", "f32"), b.ptr("q", "w", "i8"), b.ptr("d", "w", "f32")
    b.set_grid(b.scalar("blocks"))
    base = b.group * block
    values = [b.load_lanes("f32", x, base + 32 * j) for j in range(block // 32)]
    usable, reciprocal, d = block_scale(b, largest(b, values))
    b.store("f32", d_out, b.group, d)
    for j, v in enumerate(values):
        b.store_lanes("i8", q_out, base + 32 * j, quantized(b, v, usable, reciprocal))
    return b.finish()
