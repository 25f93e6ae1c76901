"""Decoding of file-order (row-major) quantised blocks, 16 elements at a time.

Exactly ggml's values, each operation rounded on its own (f32):
    Q8_0  d q        Q4_0  d (q - 8)        Q4_1  d q + m
    Q4_K  (d sc_j) q - dmin m_j             Q6_K  (d sc_j) (q - 32)
"""
from __future__ import annotations

from m3jit.ir.loop import Buffer, Builder, Value
from m3jit.isa.types import DType

LANES = 16


def _f32(b: Builder, v: Value) -> Value:
    return b.cvt(v, "f32")


def _nibbles(b: Builder, block: Buffer, at: int, high: bool) -> Value:
    raw = b.load_lanes("u8", block, at)
    return b.lshr(raw, 4) if high else raw & 15


def _k4_scale(b: Builder, block: Buffer, j: int) -> tuple[Value, Value]:
    """Scale and min of sub-block j of a Q4_K block (6 bits each), uniform i32."""
    def byte(i: int) -> Value:
        return b.load("u8", block, 4 + i)
    if j < 4:
        return byte(j) & 63, byte(j + 4) & 63
    both = byte(j + 4)
    return (both & 15) | (b.lshr(byte(j - 4), 6) << 4), b.lshr(both, 4) | (b.lshr(byte(j), 6) << 4)


def decode16(b: Builder, dtype: DType, block: Buffer, part: int) -> Value:
    """Elements 16 part .. 16 part + 15 of the block at `block`, as f32 lanes.  The kernel has 16 lanes."""
    match dtype.name:
        case "Q8_0":
            return b.load("f16", block, 0) * _f32(b, b.load_lanes("i8", block, 2 + 16 * part))
        case "Q4_0":
            return b.load("f16", block, 0) * (_f32(b, _nibbles(b, block, 2, part == 1)) - 8.0)
        case "Q4_1":
            return b.load("f16", block, 0) * _f32(b, _nibbles(b, block, 4, part == 1)) + b.load("f16", block, 1)
        case "Q4_K":
            j = part // 2
            scale, low = _k4_scale(b, block, j)
            q = _nibbles(b, block, 16 + 32 * (j // 2) + 16 * (part % 2), j % 2 == 1)
            return b.load("f16", block, 0) * _f32(b, scale) * _f32(b, q) - b.load("f16", block, 1) * _f32(b, low)
        case "Q6_K":
            h, quarter, s = part // 8, part % 8 // 2, part % 2
            q = _nibbles(b, block, 64 * h + 32 * (quarter % 2) + 16 * s, quarter >= 2)
            top = b.lshr(b.load_lanes("u8", block, 128 + 32 * h + 16 * s), 2 * quarter) & 3
            scale = b.load("f16", block, 104) * _f32(b, b.load("i8", block, 192 + part))
            return scale * (_f32(b, q | (top << 4)) - 32.0)
    raise ValueError(f"no kernel decodes {dtype.name} blocks; expected Q8_0, Q4_0, Q4_1, Q4_K or Q6_K")
