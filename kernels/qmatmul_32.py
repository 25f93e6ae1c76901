"""Blocks of 32 elements of the integer matmuls: Q8_0 Q4_0 Q5_0 IQ4_NL MXFP4 (d c), Q4_1 Q5_1 (d c + m).

Codes enter dot4 as unsigned bytes; the bias that makes them so is taken off by the value the sum starts from.
"""
from __future__ import annotations

from typing import Callable, Sequence

from m3jit.ir.eager_blocks import E2M1_VALUES, IQ4_VALUES
from m3jit.ir.loop import Buffer, Value
from m3jit.ir.loop_builder import Builder
from m3jit.kernels.qmatmul_parts import AHEAD_TOKENS, NIBBLE, Block, Pairs, Sums, dot, moved, table_words
from m3jit.kernels.quantize import BIAS8, BIAS128, D32, SUM32

Unpack = Callable[[int, Value, int], Value]  # (tile, vector as loaded, its number) -> four codes of 16 rows


def _dots(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer], start: Sequence[Value], count: int,
          low: Unpack | None = None, high: Unpack | None = None) -> Sums:
    """Sums over the `count` vectors at each of ws, from `start`.  Vector v serves word v of the tokens as `low` gives
    it (absent: as it is), and with `high` word count + v too."""
    sums = [list(start) for _ in ws]
    for v in range(count):
        raws = [b.load_lanes("i32", w, 16 * v, ahead=_ahead(x)) for w in ws]
        dot(b, sums, [low(i, r, v) for i, r in enumerate(raws)] if low else raws, x, v)
        if high:
            dot(b, sums, [high(i, r, v) for i, r in enumerate(raws)], x, count + v)
    return sums


def _ahead(x: Sequence[Buffer]) -> int:
    """How far behind a load the bytes are asked for that will be read soon."""
    return AHEAD_TOKENS.get(len(x), 0)


def _nibbles(b: Builder) -> tuple[Unpack, Unpack]:
    return lambda _i, r, _v: r & NIBBLE, lambda _i, r, _v: b.lshr(r, 4) & NIBBLE


def _fifths(b: Builder, words: Sequence[Value]) -> tuple[Unpack, Unpack]:
    """Nibbles with bit v of each byte of `words` as bit 4 of the codes of word v."""
    def high_bit(i: int, v: int) -> Value:
        return moved(b, words[i], 4 - v) & 0x10101010
    return (lambda i, r, v: (r & NIBBLE) | high_bit(i, v),
            lambda i, r, v: (b.lshr(r, 4) & NIBBLE) | high_bit(i, v + 4))


def _looked_up(b: Builder, values: Sequence[int]) -> tuple[Unpack, Unpack]:
    """Entries of a table of 16 signed values, + 128."""
    table = table_words(values, 128)
    return lambda _i, r, _v: b.lookup(r & NIBBLE, table), lambda _i, r, _v: b.lookup(b.lshr(r, 4) & NIBBLE, table)


def _scaled(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer], sums: Sums,
            scale: Callable[[Buffer], Value]) -> Pairs:
    """(d dx, isum)."""
    dx = [b.load("f32", r, D32) for r in x]
    out: Pairs = []
    for w, s in zip(ws, sums):
        dw = scale(w)
        out.append([(dw * d, b.cvt(t, "f32")) for t, d in zip(s, dx)])
    return out


def _shifted(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer], sums: Sums) -> Pairs:
    """(dx, d isum + m S)."""
    dx, qsum = [b.load("f32", r, D32) for r in x], [b.load("f32", r, SUM32) for r in x]
    out: Pairs = []
    for w, s in zip(ws, sums):
        dw, m = b.load_lanes("f16", w, 0, ahead=_ahead(x)), b.load_lanes("f16", w, 16)
        out.append([(d, b.fma(dw, b.cvt(t, "f32"), m * q)) for t, d, q in zip(s, dx, qsum)])
    return out


def _half(b: Builder, x: Sequence[Buffer]) -> Callable[[Buffer], Value]:
    return lambda w: b.load_lanes("f16", w, 0, ahead=_ahead(x))


def _power(b: Builder) -> Callable[[Buffer], Value]:
    """2^(e - 128) of the exponent bytes; subnormal for e < 2."""
    def scale(w: Buffer) -> Value:
        e = b.load_lanes("u8", w, 0)
        return b.bits(b.select(e < 2, ((e & 1) + 1) * 0x00200000, (e - 1) << 23))
    return scale


def _q8_0(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    sums = _dots(b, [w.at(32) for w in ws], x, [b.load("i32", r, BIAS128) for r in x], 8)
    return _scaled(b, ws, x, sums, _half(b, x))


def _q4_0(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    sums = _dots(b, [w.at(32) for w in ws], x, [b.load("i32", r, BIAS8) for r in x], 4, *_nibbles(b))
    return _scaled(b, ws, x, sums, _half(b, x))


def _q5_0(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    unpack = _fifths(b, [b.load_lanes("i32", w.at(32), 0) for w in ws])
    sums = _dots(b, [w.at(96) for w in ws], x, [b.load("i32", r, BIAS8) * 2 for r in x], 4, *unpack)
    return _scaled(b, ws, x, sums, _half(b, x))


def _iq4_nl(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    start = [b.load("i32", r, BIAS128) for r in x]
    sums = _dots(b, [w.at(32) for w in ws], x, start, 4, *_looked_up(b, IQ4_VALUES))
    return _scaled(b, ws, x, sums, _half(b, x))


def _mxfp4(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    start = [b.load("i32", r, BIAS128) for r in x]
    sums = _dots(b, [w.at(16) for w in ws], x, start, 4, *_looked_up(b, E2M1_VALUES))
    return _scaled(b, ws, x, sums, _power(b))


def _q4_1(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    return _shifted(b, ws, x, _dots(b, [w.at(64) for w in ws], x, [b.i32(0)] * len(x), 4, *_nibbles(b)))


def _q5_1(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    unpack = _fifths(b, [b.load_lanes("i32", w.at(64), 0) for w in ws])
    return _shifted(b, ws, x, _dots(b, [w.at(128) for w in ws], x, [b.i32(0)] * len(x), 4, *unpack))


BLOCKS: dict[str, Block] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q5_0": _q5_0, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4,
                            "Q4_1": _q4_1, "Q5_1": _q5_1}
