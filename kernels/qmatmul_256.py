"""Super-blocks of 256 elements of the integer matmuls: Q2_K Q3_K Q4_K Q5_K Q6_K, IQ4_XS, TQ2_0 (TQ1_0 is kept so)."""
from __future__ import annotations

from typing import Callable, Sequence

from m3jit.ir.eager_blocks import IQ4_VALUES
from m3jit.ir.loop import Buffer, Value
from m3jit.ir.loop_builder import Builder
from m3jit.kernels.qmatmul_parts import AHEAD, FEW, NIBBLE, Block, Pairs, Sums, add_scaled, dot, moved, table_words
from m3jit.kernels.quantize import BIAS32, D256, HIGH, LOW, MINUS_SUM

# -- 8 sub-blocks of 32 with scales and mins: Q4_K, Q5_K ---------------------------------------------------------------


class _K4Block:
    """One tile's super-block of Q4_K or Q5_K: scales unpacked to scratch, so that the loop over sub-blocks can stay a
    loop."""

    def __init__(self, b: Builder, number: int, w: Buffer, tokens: int, fifth: bool):
        self.fifths = w.at(256) if fifth else None
        self.quants = w.at(768 if fifth else 256)
        self.d, self.dmin = b.load_lanes("f16", w, 0, ahead=AHEAD), b.load_lanes("f16", w, 16)
        words = [b.load_lanes("i32", w.at(64), 16 * i, ahead=AHEAD) for i in range(3)]
        top = 0x03030303                                 # the two upper bits of scales and mins 4..7
        scales = [words[0] & 0x3F3F3F3F, (words[2] & NIBBLE) | ((b.lshr(words[0], 6) & top) << 4)]
        self.mins = [words[1] & 0x3F3F3F3F, (b.lshr(words[2], 4) & NIBBLE) | ((b.lshr(words[1], 6) & top) << 4)]
        self.table = b.scratch(f"scales{number}", "i32", 8 * 16)
        for j in range(8):
            b.store_lanes("i32", self.table, 16 * j, b.lshr(scales[j // 4], 8 * (j % 4)) & 255)
        self.isum = [b.var("i32", 0) for _ in range(tokens)]

    def min_sum(self, b: Builder, r: Buffer) -> Value:
        """sum_j m_j sum q, exact: the sums of q come as two signed bytes, low and high."""
        low, high = b.i32(0), b.i32(0)
        for i, mins in enumerate(self.mins):
            low = b.dot4(low, mins, b.load("i32", r, LOW + i))
            high = b.dot4(high, mins, b.load("i32", r, HIGH + i))
        return low + (high << 7)


def _k4(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer], fifth: bool) -> Pairs:
    blocks = [_K4Block(b, i, w, len(x), fifth) for i, w in enumerate(ws)]
    few = len(ws) * len(x) <= FEW                        # both nibbles of a vector at once: each byte is read once
    with b.loop(0, 4) as c:
        bit = b.cvt(c * 2, "i32") if fifth else None     # of the bytes of `fifths`: sub-block 2c, then 2c + 1
        for halves in ([(0, 1)] if few else [(0,), (1,)]):           # low nibbles: sub-block 2c, high: 2c + 1
            sums: dict[int, Sums] = {h: [[b.i32(0)] * len(x) for _ in ws] for h in halves}
            ahead = AHEAD if 0 in halves else 0      # each line is asked for once
            for v in range(8):
                raws = [b.load_lanes("i32", k.quants.at(c * 512), 16 * v, ahead=ahead) for k in blocks]
                tops = [b.lshr(b.load_lanes("i32", k.fifths, 16 * v, ahead=ahead), bit) for k in blocks] \
                    if fifth else []
                for h in halves:
                    weights = [(b.lshr(r, 4) if h else r) & NIBBLE for r in raws]
                    if fifth:
                        weights = [w | ((t << (4 - h)) & 0x10101010) for w, t in zip(weights, tops)]
                    dot(b, sums[h], weights, x, c * 16 + (8 * h + v))
            for h in halves:
                for k, s in zip(blocks, sums[h]):
                    add_scaled(k.isum, s, b.load_lanes("i32", k.table, c * 32 + 16 * h))
    return [[(b.load("f32", r, D256), b.fma(k.d, b.cvt(t.get(), "f32"), -(k.dmin * b.cvt(k.min_sum(b, r), "f32"))))
             for t, r in zip(k.isum, x)] for k in blocks]


def _q4_k(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    return _k4(b, ws, x, fifth=False)


def _q5_k(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    return _k4(b, ws, x, fifth=True)


# -- 16 sub-blocks of 16: Q6_K, Q3_K, Q2_K -----------------------------------------------------------------------------
# Group g = 2h + s of the layouts holds the sub-blocks 8h + s, + 2, + 4, + 6 (parts 0..3): one loop over the groups.


def _first(g: Value) -> Value:
    return (g >> 1 << 3) + (g & 1)


def _scales(b: Builder, w: Buffer, first: Value, part: int) -> Value:
    """Signed scales of the sub-block `first + 2 part`, which stand behind d."""
    return b.load_lanes("i8", w.at(32), (first + 2 * part) * 16, ahead=AHEAD if part % 2 else 0)


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
        quants = [w.at(g * 768 + 288) for w in ws]
        for parts in ([(0, 1, 2, 3)] if few else [(0,), (1,), (2,), (3,)]):
            start = {part: [b.load("i32", r, first + (BIAS32 + 2 * part)) for r in x] for part in parts}
            sums = {part: [list(s) for _ in ws] for part, s in start.items()}
            for v in range(4):
                _q6_step(b, quants, x, sums, v, first)
            for part in parts:
                for w, isum, s in zip(ws, isums, sums[part]):
                    add_scaled(isum, s, _scales(b, w, first, part))
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
    """One group of Q2_K or Q3_K: codes of two bits, with `third`(tile, vector, part) or-ed to them as bit 2;
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
        first, plane = _first(g), b.cvt(g >> 1 << 2, "i32")
        tops = [[b.lshr(b.load_lanes("i32", w.at((g & 1) * 256 + 288), 16 * v, ahead=AHEAD), plane) for v in range(4)]
                for w in ws]

        def start(part: int) -> list[Value]:             # -4 sum q
            return [b.load("i32", r, first + (BIAS32 + 2 * part)) >> 3 for r in x]

        def third(i: int, v: int, part: int) -> Value:
            return moved(b, tops[i][v], 2 - part) & 0x04040404

        def finish(part: int, sums: Sums) -> None:
            for w, isum, s in zip(ws, isums, sums):
                add_scaled(isum, s, _scales(b, w, first, part))
        _two_bits(b, [w.at(g * 256 + 800) for w in ws], x, start, first, third, finish)
    return _scaled(b, x, ds, isums)


def _q2_k(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    ds = [b.load_lanes("f16", w, 0, ahead=AHEAD) for w in ws]
    dmins = [b.load_lanes("f16", w, 16) for w in ws]
    isums, msums = ([[b.var("i32", 0) for _ in x] for _ in ws] for _ in range(2))
    with b.loop(0, 4) as g:
        first = _first(g)

        def finish(part: int, sums: Sums) -> None:
            at = first + 2 * part
            biases = [b.load("i32", r, at + BIAS32) for r in x]                  # -32 sum q
            for w, isum, msum, s in zip(ws, isums, msums, sums):
                both = b.load_lanes("u8", w.at(64), at * 16, ahead=0 if part % 2 else AHEAD)
                add_scaled(isum, s, both & 15)
                add_scaled(msum, biases, b.lshr(both, 4))
        _two_bits(b, [w.at(g * 256 + 320) for w in ws], x, lambda _part: [b.i32(0)] * len(x), first, None, finish)
    return [[(b.load("f32", r, D256),
              b.fma(d, b.cvt(t.get(), "f32"), -(dmin * b.cvt(-(m.get() >> 5), "f32"))))
             for t, m, r in zip(isum, msum, x)] for d, dmin, isum, msum in zip(ds, dmins, isums, msums)]


# -- table codes, ternary codes ----------------------------------------------------------------------------------------

def _iq4_xs(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    ds = [b.load_lanes("f16", w, 0, ahead=AHEAD) for w in ws]
    isums = [[b.var("i32", 0) for _ in x] for _ in ws]
    table = table_words(IQ4_VALUES, 128)
    with b.loop(0, 8) as j:
        start = []                                       # -128 sum q of the sub-block
        for r in x:
            biases = [b.load("i32", r, j * 2 + (BIAS32 + i)) for i in range(2)]
            start.append((biases[0] + biases[1]) * 4)
        sums = [list(start) for _ in ws]
        for v in range(4):
            raws = [b.load_lanes("i32", w.at(j * 256 + 160), 16 * v, ahead=AHEAD) for w in ws]
            for h in range(2):
                weights = [b.lookup((b.lshr(r, 4) if h else r) & NIBBLE, table) for r in raws]
                dot(b, sums, weights, x, j * 8 + (4 * h + v))
        for w, isum, s in zip(ws, isums, sums):
            add_scaled(isum, s, b.load_lanes("i8", w.at(32), j * 16))
    return _scaled(b, x, ds, isums)


def _tq2_0(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    ds = [b.load_lanes("f16", w, 0) for w in ws]
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
