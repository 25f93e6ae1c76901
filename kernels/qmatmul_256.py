"""Super-blocks of 256 elements of the integer matmuls: Q2_K Q3_K Q4_K Q5_K Q6_K, IQ4_XS, TQ2_0 (TQ1_0 is kept so).

A super-block is walked in equal pieces, one after the other in memory (`layout`): each load of the loop moves on by the
same step then, which is what a processor's prefetchers follow (but for the 32 or 64 bytes with d that stand in front of
the pieces of most types).  There is one tile at a time: `ws` has one element.
"""
from __future__ import annotations

from typing import Callable, Sequence

from m3jit.ir.eager_blocks import IQ4_VALUES
from m3jit.ir.loop import Buffer, Value
from m3jit.ir.loop_builder import Builder
from m3jit.kernels.qmatmul_parts import AHEAD, FEW, NIBBLE, Block, Pairs, Sums, add_scaled, dot, moved, table_words
from m3jit.kernels.quantize import BIAS32, D256, HIGH, LOW, MINUS_SUM

# -- 8 sub-blocks of 32 with scales and mins: Q4_K, Q5_K ---------------------------------------------------------------
SIX_BITS = 0x3F3F3F3F


class _K4Block:
    """One tile's super-block of Q4_K or Q5_K.  A piece has two sub-blocks; its first vector their mins and scales and
    two bits of each byte of d and dmin, which are together after four pieces."""

    def __init__(self, b: Builder, number: int, tokens: int):
        self.b, self.number, self.head = b, number, b.i32(0)
        self.mins = [b.var("i32", 0) for _ in range(2)]          # of the sub-blocks 0..3, 4..7: a byte each
        self.floats = b.var("i32", 0)
        self.isum = [b.var("i32", 0) for _ in range(tokens)]

    def take(self, head: Value) -> None:
        """Begin a piece."""
        b, (early, late) = self.b, self.mins
        self.head = head
        early.set(b.lshr(early.get(), 16) | (late.get() << 16))
        late.set(b.lshr(late.get(), 16) | (head << 16 & SIX_BITS))
        self.floats.set(b.lshr(self.floats.get(), 2) | (head & ~SIX_BITS))

    def add(self, sums: Sequence[Value], half: int) -> None:
        add_scaled(self.isum, sums, self.b.lshr(self.head, 16 + 8 * half) & 63)

    def pairs(self, x: Sequence[Buffer]) -> list[tuple[Value, Value]]:
        """(dx, d isum - dmin msum) of each token."""
        b = self.b
        table = b.scratch(f"floats{self.number}", "i32", 16)
        b.sync()
        b.store_lanes("i32", table, 0, self.floats.get())
        b.sync()
        d, dmin = b.load_lanes("f16", table, 0), b.load_lanes("f16", table, 16)
        return [(b.load("f32", r, D256), b.fma(d, b.cvt(t.get(), "f32"), -(dmin * b.cvt(self._min_sum(r), "f32"))))
                for t, r in zip(self.isum, x)]

    def _min_sum(self, r: Buffer) -> Value:
        """sum_j m_j sum q, exact: the sums of q come as two signed bytes, low and high."""
        b, low, high = self.b, self.b.i32(0), self.b.i32(0)
        for i, mins in enumerate(self.mins):
            low = b.dot4(low, mins.get(), b.load("i32", r, LOW + i))
            high = b.dot4(high, mins.get(), b.load("i32", r, HIGH + i))
        return low + (high << 7)


def _k4(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer], fifth: bool) -> Pairs:
    blocks = [_K4Block(b, i, len(x)) for i in range(len(ws))]
    few = len(ws) * len(x) <= FEW                        # both nibbles of a vector at once: each byte is read once
    bits_at, codes_at = 16, 48 if fifth else 16
    with b.loop(0, 4) as c:
        pieces = [w.at(c * (704 if fifth else 576)) for w in ws]
        for block, piece in zip(blocks, pieces):
            block.take(b.load_lanes("i32", piece, 0, ahead=AHEAD))
        fifths = [[b.load_lanes("i32", piece, bits_at + 16 * i, ahead=AHEAD) for i in range(2)] for piece in pieces] \
            if fifth else []
        for halves in ([(0, 1)] if few else [(0,), (1,)]):           # low nibbles: sub-block 2c, high: 2c + 1
            sums: dict[int, Sums] = {h: [[b.i32(0)] * len(x) for _ in ws] for h in halves}
            for v in range(8):                           # each line is asked for once
                raws = [b.load_lanes("i32", piece, codes_at + 16 * v, ahead=AHEAD if 0 in halves else 0)
                        for piece in pieces]
                for h in halves:
                    weights = [(b.lshr(r, 4) if h else r) & NIBBLE for r in raws]
                    if fifth:
                        weights = [w | (moved(b, f[v // 4], 4 - 2 * (v % 4) - h) & 0x10101010)
                                   for w, f in zip(weights, fifths)]
                    dot(b, sums[h], weights, x, c * 16 + (8 * h + v))
            for h in halves:
                for block, s in zip(blocks, sums[h]):
                    block.add(s, h)
    return [block.pairs(x) for block in blocks]


def _q4_k(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    return _k4(b, ws, x, fifth=False)


def _q5_k(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    return _k4(b, ws, x, fifth=True)


# -- 16 sub-blocks of 16: Q6_K, Q3_K, Q2_K -----------------------------------------------------------------------------
# Piece g = 2h + s of the layouts holds the sub-blocks 8h + s, + 2, + 4, + 6 (parts 0..3): one loop over the pieces.


def _first(g: Value) -> Value:
    return (g >> 1 << 3) + (g & 1)


def _scales(b: Builder, piece: Buffer, part: int) -> Value:
    """Signed scales of a sub-block: four times 16 bytes, with which a piece begins."""
    return b.load_lanes("i8", piece, 16 * part, ahead=0 if part else AHEAD)


def _scaled(b: Builder, x: Sequence[Buffer], ds: Sequence[Value], isums: Sequence[Sequence]) -> Pairs:
    """(dx, d isum)."""
    return [[(b.load("f32", r, D256), d * b.cvt(t.get(), "f32")) for t, r in zip(isum, x)]
            for d, isum in zip(ds, isums)]


def _q6_k(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    few = len(ws) * len(x) <= FEW // 2
    ds = [b.load_lanes("f16", w, 0, ahead=AHEAD) for w in ws]
    isums = [[b.var("i32", 0) for _ in x] for _ in ws]
    with b.loop(0, 4) as g:
        first = _first(g)
        pieces = [w.at(g * 832 + 32) for w in ws]
        quants = [p.at(64) for p in pieces]
        for parts in ([(0, 1, 2, 3)] if few else [(0,), (1,), (2,), (3,)]):
            start = {part: [b.load("i32", r, first + (BIAS32 + 2 * part)) for r in x] for part in parts}
            sums = {part: [list(s) for _ in ws] for part, s in start.items()}
            for v in range(4):
                _q6_step(b, quants, x, sums, v, first)
            for part in parts:
                for piece, isum, s in zip(pieces, isums, sums[part]):
                    add_scaled(isum, s, _scales(b, piece, part))
    return _scaled(b, x, ds, isums)


def _q6_step(b: Builder, quants: Sequence[Buffer], x: Sequence[Buffer], sums: dict[int, Sums], v: int,
             first: Value) -> None:
    """One vector (4 elements of 16 rows) of the sub-blocks `first + 2 part`: four low bits, two high bits together."""
    sides = sorted({part % 2 for part in sums})
    raws, highs = [], []
    for q in quants:                                     # each line is asked for once
        raws.append({side: b.load_lanes("i32", q, 16 * (3 * v + side), ahead=AHEAD if side in sums else 0)
                     for side in sides})
        highs.append(b.load_lanes("i32", q, 16 * (3 * v + 2), ahead=AHEAD if 0 in sums else 0))
    for part in sums:
        weights = []
        for raw, high in zip(raws, highs):
            low = (b.lshr(raw[part % 2], 4) if part >= 2 else raw[part % 2]) & NIBBLE
            weights.append(low | (moved(b, high, 4 - 2 * part) & 0x30303030))
        dot(b, sums[part], weights, x, first * 4 + (8 * part + v))


def _two_bits(b: Builder, quants: Sequence[Buffer], x: Sequence[Buffer], start: Callable[[int], list[Value]],
              first: Value, third: Callable[[int, int, int], Value] | None,
              finish: Callable[[int, Sums], None]) -> None:
    """One piece of Q2_K or Q3_K: codes of two bits, with `third`(tile, vector, part) or-ed to them as bit 2;
    start(part) gives each token's first value, finish(part, sums) takes the sums."""
    few = len(quants) * len(x) <= FEW
    for parts in ([(0, 1, 2, 3)] if few else [(0,), (1,), (2,), (3,)]):
        sums: dict[int, Sums] = {}
        for part in parts:
            values = start(part)
            sums[part] = [list(values) for _ in quants]
        for v in range(4):
            raws = [b.load_lanes("i32", q, 16 * v, ahead=AHEAD if 0 in parts else 0) for q in quants]
            for part in parts:
                weights = [moved(b, r, -2 * part) & 0x03030303 for r in raws]
                if third is not None:
                    weights = [w | third(i, v, part) for i, w in enumerate(weights)]
                dot(b, sums[part], weights, x, first * 4 + (8 * part + v))
        for part in parts:
            finish(part, sums[part])


def _q3_k(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    ds = [b.load_lanes("f16", w, 0, ahead=AHEAD) for w in ws]
    isums = [[b.var("i32", 0) for _ in x] for _ in ws]
    with b.loop(0, 4) as g:
        first = _first(g)
        pieces = [w.at(g * 448 + 32) for w in ws]
        tops = [[b.load_lanes("i32", p.at(64), 16 * i, ahead=AHEAD) for i in range(2)] for p in pieces]

        def start(part: int) -> list[Value]:             # -4 sum q
            return [b.load("i32", r, first + (BIAS32 + 2 * part)) >> 3 for r in x]

        def third(i: int, v: int, part: int) -> Value:
            return moved(b, tops[i][v // 2], 2 - 4 * (v % 2) - part) & 0x04040404

        def finish(part: int, sums: Sums) -> None:
            for piece, isum, s in zip(pieces, isums, sums):
                add_scaled(isum, s, _scales(b, piece, part))
        _two_bits(b, [p.at(192) for p in pieces], x, start, first, third, finish)
    return _scaled(b, x, ds, isums)


def _q2_k(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    ds = [b.load_lanes("f16", w, 0, ahead=AHEAD) for w in ws]
    dmins = [b.load_lanes("f16", w, 16) for w in ws]
    isums, msums = ([[b.var("i32", 0) for _ in x] for _ in ws] for _ in range(2))
    with b.loop(0, 4) as g:
        first = _first(g)
        pieces = [w.at(g * 320 + 64) for w in ws]

        def finish(part: int, sums: Sums) -> None:
            biases = [b.load("i32", r, first + (2 * part + BIAS32)) for r in x]  # -32 sum q
            for piece, isum, msum, s in zip(pieces, isums, msums, sums):
                both = b.load_lanes("u8", piece, 16 * part, ahead=0 if part else AHEAD)
                add_scaled(isum, s, both & 15)
                add_scaled(msum, biases, b.lshr(both, 4))
        _two_bits(b, [p.at(64) for p in pieces], x, lambda _part: [b.i32(0)] * len(x), first, None, finish)
    return [[(b.load("f32", r, D256),
              b.fma(d, b.cvt(t.get(), "f32"), -(dmin * b.cvt(-(m.get() >> 5), "f32"))))
             for t, m, r in zip(isum, msum, x)] for d, dmin, isum, msum in zip(ds, dmins, isums, msums)]


# -- table codes, ternary codes ----------------------------------------------------------------------------------------

def _iq4_xs(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    ds = [b.load_lanes("f16", w, 0, ahead=AHEAD) for w in ws]
    isums = [[b.var("i32", 0) for _ in x] for _ in ws]
    table = table_words(IQ4_VALUES, 128)
    with b.loop(0, 8) as j:
        pieces = [w.at(j * 272 + 32) for w in ws]
        start = []                                       # -128 sum q of the sub-block
        for r in x:
            biases = [b.load("i32", r, j * 2 + (BIAS32 + i)) for i in range(2)]
            start.append((biases[0] + biases[1]) * 4)
        sums = [list(start) for _ in ws]
        for v in range(4):
            raws = [b.load_lanes("i32", p.at(16), 16 * v, ahead=AHEAD) for p in pieces]
            for h in range(2):
                weights = [b.lookup((b.lshr(r, 4) if h else r) & NIBBLE, table) for r in raws]
                dot(b, sums, weights, x, j * 8 + (4 * h + v))
        for p, isum, s in zip(pieces, isums, sums):
            add_scaled(isum, s, b.load_lanes("i8", p, 0, ahead=AHEAD))
    return _scaled(b, x, ds, isums)


def _tq2_0(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    ds = [b.load_lanes("f16", w, 0, ahead=AHEAD) for w in ws]
    isums = [[b.var("i32", b.load("i32", r, MINUS_SUM)) for r in x] for _ in ws]
    few = len(ws) * len(x) <= FEW                        # a chain of sums for each plane
    with b.loop(0, 2) as h:
        chains = [[[t.get() for t in isum] for isum in isums]]
        chains += [[[b.i32(0)] * len(x) for _ in ws] for _ in range(3 if few else 0)]
        for v in range(8):
            raws = [b.load_lanes("i32", w.at(h * 512 + 32), 16 * v, ahead=AHEAD) for w in ws]
            for plane in range(4):
                weights = [moved(b, r, -2 * plane) & 0x03030303 for r in raws]
                dot(b, chains[plane if few else 0], weights, x, h * 32 + (8 * plane + v))
        for i, isum in enumerate(isums):
            for t, cell in enumerate(isum):
                total = chains[0][i][t]
                for other in chains[1:]:
                    total = total + other[i][t]
                cell.set(total)
    return _scaled(b, x, ds, isums)


BLOCKS: dict[str, Block] = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
                            "IQ4_XS": _iq4_xs, "TQ1_0": _tq2_0, "TQ2_0": _tq2_0}
