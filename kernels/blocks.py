"""Decoding of file-order (row-major) quantised blocks, 16 elements at a time.

Exactly ggml's values, each operation rounded on its own (f32); formulas and layouts: `m3jit/ir/eager_blocks`.
"""
from __future__ import annotations

from typing import Callable

from m3jit.ir.eager_blocks import E2M1_VALUES, IQ4_VALUES
from m3jit.ir.loop import Buffer, Value
from m3jit.ir.loop_builder import Builder
from m3jit.isa.types import DType
from m3jit.kernels.qmatmul_parts import table_words

LANES = 16


def _f32(b: Builder, v: Value) -> Value:
    return b.cvt(v, "f32")


def _nibbles(b: Builder, block: Buffer, at: int, high: bool) -> Value:
    raw = b.load_lanes("u8", block, at)
    return b.lshr(raw, 4) if high else raw & 15


def _bit(b: Builder, block: Buffer, at: int, bit: int) -> Value:
    """Bit `bit` of 16 bytes from `at` on."""
    return b.lshr(b.load_lanes("u8", block, at), bit) & 1


def _fifth(b: Builder, block: Buffer, at: int, part: int) -> Value:
    """Bit 4 of 16 elements: bits 16 part .. of the word at byte `at`."""
    word = b.load("u8", block, at + 2 * part) | (b.load("u8", block, at + 2 * part + 1) << 8)
    return (b.lshr(word + b.lane * 0, b.lane) & 1) << 4


def _entry(b: Builder, code: Value, values: tuple[int, ...]) -> Value:
    """The table entry a code 0..15 of each lane numbers, as f32."""
    return _f32(b, (b.lookup(code, table_words(values, 128)) & 255) - 128)


def _half(b: Builder, block: Buffer, at: int) -> Value:
    return b.load("f16", block, at // 2)


# -- 32 elements -------------------------------------------------------------------------------------------------------

def _q8_0(b: Builder, block: Buffer, part: int) -> Value:
    return _half(b, block, 0) * _f32(b, b.load_lanes("i8", block, 2 + 16 * part))


def _q4_0(b: Builder, block: Buffer, part: int) -> Value:
    return _half(b, block, 0) * (_f32(b, _nibbles(b, block, 2, part == 1)) - 8.0)


def _q4_1(b: Builder, block: Buffer, part: int) -> Value:
    return _half(b, block, 0) * _f32(b, _nibbles(b, block, 4, part == 1)) + _half(b, block, 2)


def _q5_0(b: Builder, block: Buffer, part: int) -> Value:
    q = _nibbles(b, block, 6, part == 1) | _fifth(b, block, 2, part)
    return _half(b, block, 0) * (_f32(b, q) - 16.0)


def _q5_1(b: Builder, block: Buffer, part: int) -> Value:
    q = _nibbles(b, block, 8, part == 1) | _fifth(b, block, 4, part)
    return _half(b, block, 0) * _f32(b, q) + _half(b, block, 2)


def _iq4_nl(b: Builder, block: Buffer, part: int) -> Value:
    return _half(b, block, 0) * _entry(b, _nibbles(b, block, 2, part == 1), IQ4_VALUES)


def _mxfp4(b: Builder, block: Buffer, part: int) -> Value:
    e = b.load("u8", block, 0)
    d = b.bits(b.select(e < 2, ((e & 1) + 1) * 0x00200000, (e - 1) << 23))
    return d * _entry(b, _nibbles(b, block, 1, part == 1), E2M1_VALUES)


# -- 256 elements ------------------------------------------------------------------------------------------------------

def _k4_scale(b: Builder, block: Buffer, j: int) -> tuple[Value, Value]:
    """Scale and min of sub-block j of a Q4_K or Q5_K block (6 bits each), uniform i32."""
    def byte(i: int) -> Value:
        return b.load("u8", block, 4 + i)
    if j < 4:
        return byte(j) & 63, byte(j + 4) & 63
    both = byte(j + 4)
    return (both & 15) | (b.lshr(byte(j - 4), 6) << 4), b.lshr(both, 4) | (b.lshr(byte(j), 6) << 4)


def _k4(b: Builder, block: Buffer, part: int, fifth: bool) -> Value:
    j = part // 2
    scale, low = _k4_scale(b, block, j)
    q = _nibbles(b, block, (48 if fifth else 16) + 32 * (j // 2) + 16 * (part % 2), j % 2 == 1)
    if fifth:
        q = q | (_bit(b, block, 16 + 16 * (part % 2), j) << 4)
    return _half(b, block, 0) * _f32(b, scale) * _f32(b, q) - _half(b, block, 2) * _f32(b, low)


def _q4_k(b: Builder, block: Buffer, part: int) -> Value:
    return _k4(b, block, part, fifth=False)


def _q5_k(b: Builder, block: Buffer, part: int) -> Value:
    return _k4(b, block, part, fifth=True)


def _q6_k(b: Builder, block: Buffer, part: int) -> Value:
    h, quarter, s = part // 8, part % 8 // 2, part % 2
    q = _nibbles(b, block, 64 * h + 32 * (quarter % 2) + 16 * s, quarter >= 2)
    top = b.lshr(b.load_lanes("u8", block, 128 + 32 * h + 16 * s), 2 * quarter) & 3
    scale = _half(b, block, 208) * _f32(b, b.load("i8", block, 192 + part))
    return scale * (_f32(b, q | (top << 4)) - 32.0)


def _two_bits(b: Builder, block: Buffer, at: int, part: int) -> Value:
    """Codes of 64 bytes from `at` on: per 32 bytes four planes of 32 elements."""
    h, plane, s = part // 8, part % 8 // 2, part % 2
    return b.lshr(b.load_lanes("u8", block, at + 32 * h + 16 * s), 2 * plane) & 3


def _q2_k(b: Builder, block: Buffer, part: int) -> Value:
    both, q = b.load("u8", block, part), _f32(b, _two_bits(b, block, 16, part))
    return _half(b, block, 80) * _f32(b, both & 15) * q - _half(b, block, 82) * _f32(b, b.lshr(both, 4))


def _q3_k(b: Builder, block: Buffer, part: int) -> Value:
    q = _two_bits(b, block, 32, part) | (_bit(b, block, 16 * (part % 2), part // 2) << 2)
    low = b.load("u8", block, 96 + part % 8)
    low = b.lshr(low, 4) if part >= 8 else low & 15
    scale = low | ((b.lshr(b.load("u8", block, 104 + part % 4), 2 * (part // 4)) & 3) << 4)
    return _half(b, block, 108) * _f32(b, scale - 32) * (_f32(b, q) - 4.0)


def _iq4_xs(b: Builder, block: Buffer, part: int) -> Value:
    j = part // 2
    low = b.load("u8", block, 4 + j // 2)
    low = b.lshr(low, 4) if j % 2 else low & 15
    scale = low | ((b.lshr(b.load("u8", block, 2 + j // 4), 2 * (j % 4)) & 3) << 4)
    q = _nibbles(b, block, 8 + 16 * j, part % 2 == 1)
    return _half(b, block, 0) * _f32(b, scale - 32) * _entry(b, q, IQ4_VALUES)


def _tq2_0(b: Builder, block: Buffer, part: int) -> Value:
    return _half(b, block, 64) * (_f32(b, _two_bits(b, block, 0, part)) - 1.0)


def _tq1_0(b: Builder, block: Buffer, part: int) -> Value:
    if part == 15:                               # four bytes of four digits
        raw, digit = b.load("u8", block.at(48), b.lane & 3), b.lshr(b.lane, 2)
        power = b.select(digit < 2, b.select(digit < 1, b.i32(1), b.i32(3)), b.select(digit < 3, b.i32(9), b.i32(27)))
    else:
        n, at = (part // 2, 16 * (part % 2)) if part < 10 else (part - 10, 32)
        raw, power = b.load_lanes("u8", block, at), b.i32(3 ** n)
    q = b.lshr(((raw * power) & 255) * 3, 8)
    return _half(b, block, 52) * (_f32(b, q) - 1.0)


_DECODE: dict[str, Callable[[Builder, Buffer, int], Value]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_XS": _iq4_xs, "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}


def decode16(b: Builder, dtype: DType, block: Buffer, part: int) -> Value:
    """Elements 16 part .. 16 part + 15 of the block at `block`, as f32 lanes.  The kernel has 16 lanes."""
    if dtype.name not in _DECODE:
        raise ValueError(f"no kernel decodes {dtype.name} blocks; expected one of {', '.join(_DECODE)}")
    return _DECODE[dtype.name](b, block, part)
