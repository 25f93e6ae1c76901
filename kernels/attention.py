"""Attention over key/value pages: append, then attend.

Value, for query row t (position p = past + t) of one head, keys by absolute position, blocks of 64:
    s_j = scale * (fold over d of fma(q_d, k_jd, acc) from +0);  softcap c: c tanh(s_j / c)
    visible: j < keys, p - j < window and, when causal, j <= p
    block b: m_b = max of visible s_j;  w_j = exp(s_j - m_b), 0 where invisible;  l_b = 64-lane halving tree of w;
             mix_b[d] = fold over visible j in order of fma(w_j, v_jd, acc) from +0
    M = max of m_b;  e_b = exp(m_b - M);  L = fold of fma(l_b, e_b, acc);  out_d = (fold of fma(mix_bd, e_b, acc)) / L
    blocks without a visible key are skipped; no visible key at all gives 0

Pages and dense keys: `attention_pages`.

Schedule: up to FEW_TOKENS rows: one group per (token, block, kv head) writes partial results (`attn_blocks`), which
`attn_combine` folds.  More rows: `attn_rows`, one group per 16 query rows of a kv head, finds M in a first pass over
the keys and everything else in a second, so that nothing of size tokens x keys is ever stored (the scores of the first
2048 visible keys are kept in scratch, those beyond computed again).  All three may be launched one after the other (a
barrier before attn_combine); those that do not apply have an empty grid.
"""
from __future__ import annotations

import functools
from typing import Sequence

from m3jit.ir import scalar_math
from m3jit.ir.loop import Buffer, Kernel, Value
from m3jit.ir.loop_builder import Builder, Var
from m3jit.kernels.attention_pages import BLOCK, Geometry, Pages, chunk_mask, kv_append, leaf_tables  # noqa: F401

FEW_TOKENS = 1                               # up to this many query tokens, blocks are spread over groups
HEADER = 16                                  # floats before a partial mix: m_b, l_b, unused
TILE = 4                                     # query rows whose scores are computed together
GROUP_ROWS = 16                              # query rows of one group of attn_rows
KEPT_BLOCKS = 32                             # blocks whose scores attn_rows keeps from its first pass for the second
NO_WINDOW = 1 << 40                          # window argument that hides nothing


def partial_floats(tokens: int, keys: int, heads: int, value_dim: int) -> int:
    """f32 elements of the partial buffer of attn_blocks (none when attn_rows does the work)."""
    return tokens * heads * -(-keys // BLOCK) * (value_dim + HEADER) if tokens <= FEW_TOKENS else 0


class _Attention:
    """Shared parts of the kernels; a builder with the parameters q, base[, table], `extra`, T, past, keys, window,
    scale[, softcap].  Rows of a tile are named by their number in it where a loop can do instead of copies of code."""

    def __init__(self, name: str, g: Geometry, extra: str, ahead: bool = False):
        self.g = g
        # K's loads ask for V, V's for the next head's K: both lie as far behind as K is long
        self.ahead = g.key_bytes if ahead and not g.shared else 0
        self.b = b = Builder(f"{name}_{g.name}", 64)
        self.q = b.ptr("q", "r", "f32")
        self.pages = Pages(b, g, "r")
        self.out = b.ptr(extra, "w", "f32")
        self.tokens, self.past, self.keys = b.scalar("T"), b.scalar("past"), b.scalar("keys")
        self.window, self.scale = b.scalar("window"), b.scalar("scale", "f32")
        self.cap = b.scalar("softcap", "f32") if g.softcap else None
        self.blocks = (self.keys + (BLOCK - 1)) // BLOCK

    def scratch(self, tiles: int = 1) -> None:
        """Arrays of a tile: raw scores (of `tiles` tiles), then weights, of each row with the block's 64 keys."""
        self.pages.scratch()
        self.raw = self.b.scratch("scores", "f32", tiles * TILE * BLOCK)
        self.table = self.b.scratch("weights", "f32", TILE * BLOCK)

    def visible(self, token: Value) -> tuple[Value, Value]:
        """First visible key and one past the last of query row `token`."""
        return visible(self.b, self.g, self.past + token, self.keys, self.window)

    def within(self, key: Value, block_start: Value) -> Value:
        """A key's number in the block, clamped to 0..64."""
        b = self.b
        return b.imin(b.imax(key - block_start, b.i64(0)), b.i64(BLOCK))

    def query(self, token: Value, head: Value) -> Buffer:
        return self.q.at((token * self.g.heads + head) * (4 * self.g.head_dim))

    def dots(self, queries: Sequence[Buffer], keys: Buffer, raw: Buffer) -> None:
        """raw = dot products of the queries with the block's keys, one key per lane."""
        b = self.b
        acc = [b.var("f32", 0.0) for _ in queries]

        def add(feature: Value, k: Value) -> None:
            for a, q in zip(acc, queries):
                a.set(b.fma(b.load("f32", q, feature), k, a.get()))
        self.pages.each_feature(keys, self.g.head_dim, add, self.ahead)
        for r, a in enumerate(acc):
            b.store_lanes("f32", raw, BLOCK * r, a.get())
        b.sync()

    def score(self, row: Value, raw: Buffer) -> Value:
        """Scaled (and capped) scores of the tile's row `row`."""
        s = self.b.load_lanes("f32", raw, row * BLOCK) * self.scale
        return s if self.cap is None else self.cap * scalar_math.tanh(self.b, s / self.cap)

    def seen(self, lo: Value, hi: Value) -> Value:
        """b1 per key: lo <= number in the block < hi."""
        b = self.b
        return (b.cvt(lo, "i32") <= b.lane) & (b.lane < b.cvt(hi, "i32"))

    def ranks(self, s: Value, lo: Value, hi: Value) -> Value:
        """Scores of a row that sees lo .. hi as integers of the same order; invisible ones and NaN as -inf."""
        b = self.b
        bits = b.bits(b.select(self.seen(lo, hi) & b.pure("eq", s, s), s, b.f32(float("-inf"))))
        return b.select(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def greatest(self, ranks: Value) -> Value:
        """The greatest of ranked scores: m_b of a block, M of a row.

        An integer maximum is one instruction.  (A zero's sign may differ from the float maximum's: m and M only enter
        through exp(x - m), which is 1 for either.)"""
        b = self.b
        top = b.fold(ranks, "imax")
        return b.bits(b.select(top < 0, top ^ 0x7FFFFFFF, top))

    def weights(self, row: Value, s: Value, top: Value, lo: Value, hi: Value) -> Value:
        """l_b of a row that sees lo .. hi and has m_b = top; its weights go to the table."""
        b = self.b
        w = b.select(self.seen(lo, hi), scalar_math.exp(b, s - top), b.f32(0.0))
        b.store_lanes("f32", self.table, row * BLOCK, w)
        return b.fold(w, "add")

    def mix(self, acc: Sequence[Var], first_row: Value | int, values: Buffer, chunk: int, lo: Value, hi: Value) -> None:
        """acc[i] folds the weights of row first_row + i times V over keys lo .. hi, for 64 elements of the head."""
        b = self.b
        with b.loop(lo, hi) as j:
            v = self.pages.value(values, j, chunk, self.ahead)
            for i, cell in enumerate(acc):
                cell.set(b.fma(b.load("f32", self.table, j + BLOCK * i + first_row * BLOCK), v, cell.get()))


def visible(b: Builder, g: Geometry, position: Value, keys: Value, window: Value) -> tuple[Value, Value]:
    """Visible keys lo <= j < hi of a query at `position`."""
    lo = b.imax(position - window + 1, b.i64(0))
    return lo, b.imin(position + 1, keys) if g.causal else keys


@functools.lru_cache(maxsize=None)
def attn_blocks(g: Geometry) -> Kernel:
    """q r f32 [T, heads head_dim], base r pages[, table r i64], partial w f32 (`partial_floats`), T, past, keys,
    window i64, scale f32[, softcap f32].  Empty grid when T > FEW_TOKENS.

    Partial results of row (t, head) and block b stand at ((t heads + head) blocks + b) (value_dim + HEADER)."""
    a = _Attention("attn_blocks", g, "partial", ahead=True)
    b = a.b
    b.set_grid(b.select(a.tokens <= FEW_TOKENS, a.tokens * a.blocks * g.kv_heads, b.i64(0)))
    kv_head, rest = b.group % g.kv_heads, b.group // g.kv_heads
    block, token = rest % a.blocks, rest // a.blocks
    keys = a.pages.keys(block, kv_head)
    start = block * BLOCK
    lo, hi = (a.within(v, start) for v in a.visible(token))
    tiles = -(-g.group_heads // TILE)
    size = -(-g.group_heads // tiles)        # heads of a tile; the last tile may repeat the last head

    def head(tile: Value, i: Value | int) -> Value:
        return kv_head * g.group_heads + b.imin(tile * size + i, b.i64(g.group_heads - 1))

    def result(tile: Value, i: Value | int) -> Buffer:
        return a.out.at(((token * g.heads + head(tile, i)) * a.blocks + block) * (4 * (g.value_dim + HEADER)))
    a.scratch()
    with b.if_(lo < hi):
        values = a.pages.values(keys)
        with b.loop(0, tiles) as tile:
            a.dots([a.query(token, head(tile, i)) for i in range(size)], keys, a.raw)
            with b.loop(0, size) as i:
                score = a.score(i, a.raw)
                top = a.greatest(a.ranks(score, lo, hi))
                b.store("f32", result(tile, i), 0, top)
                b.store("f32", result(tile, i), 1, a.weights(i, score, top, lo, hi))
            b.sync()
            for c in range(g.chunks):
                acc = [b.var("f32", 0.0) for _ in range(size)]
                a.mix(acc, 0, values, c, lo, hi)
                for i, cell in enumerate(acc):
                    b.store_lanes("f32", result(tile, i), HEADER + 64 * c, cell.get(), chunk_mask(b, g.value_dim, c))
            b.sync()
    return b.finish()


@functools.lru_cache(maxsize=None)
def attn_combine(g: Geometry) -> Kernel:
    """partial r f32 (of attn_blocks), out w f32 [T, heads value_dim], T, past, keys, window i64.  Empty grid when
    T > FEW_TOKENS.  Only heads, value_dim and causal of the geometry matter."""
    b = Builder(f"attn_combine_{g.heads}_{g.value_dim}{'_causal' if g.causal else ''}", 64)
    partial, out = b.ptr("partial", "r", "f32"), b.ptr("out", "w", "f32")
    tokens, past, keys, window = (b.scalar(n) for n in ("T", "past", "keys", "window"))
    b.set_grid(b.select(tokens <= FEW_TOKENS, tokens * g.heads, b.i64(0)))
    stride = g.value_dim + HEADER
    rows = partial.at(b.group * ((keys + (BLOCK - 1)) // BLOCK) * (4 * stride))
    lo, hi = visible(b, g, past + b.group // g.heads, keys, window)
    first, last = lo // BLOCK, (hi + (BLOCK - 1)) // BLOCK
    top = b.var("f32", float("-inf"), varying=False)
    with b.loop(first, last) as i:
        top.set(b.fmax(top.get(), b.load("f32", rows, i * stride)))
    total = b.var("f32", 0.0, varying=False)
    acc = [b.var("f32", 0.0) for _ in range(g.chunks)]
    with b.loop(first, last) as i:
        e = scalar_math.exp(b, b.load("f32", rows, i * stride) - top.get())
        total.set(b.fma(b.load("f32", rows, i * stride + 1), e, total.get()))
        for c, cell in enumerate(acc):
            m = b.load_lanes("f32", rows, i * stride + (HEADER + 64 * c), chunk_mask(b, g.value_dim, c))
            cell.set(b.fma(m, e, cell.get()))
    for c, cell in enumerate(acc):
        y = b.select(first < last, cell.get() / total.get(), b.f32(0.0))
        b.store_lanes("f32", out, b.group * g.value_dim + 64 * c, b.canonical_nan(y), chunk_mask(b, g.value_dim, c))
    return b.finish()


class _Rows:
    """attn_rows: a group's query rows are numbered token by token, row = token group_heads + head; their state is in
    scratch, and two passes over the keys fill it."""

    def __init__(self, g: Geometry):
        self.a = a = _Attention("attn_rows", g, "out")
        self.g, self.b = g, a.b
        b = a.b
        count = a.tokens * g.group_heads
        groups = (count + (GROUP_ROWS - 1)) // GROUP_ROWS
        b.set_grid(b.select(a.tokens <= FEW_TOKENS, b.i64(0), groups * g.kv_heads))
        self.kv_head = b.group % g.kv_heads
        self.first = b.group // g.kv_heads * GROUP_ROWS
        self.last = b.imin(self.first + GROUP_ROWS, count) - 1
        a.scratch(GROUP_ROWS // TILE * (KEPT_BLOCKS + 1))
        self.ranks = b.scratch("ranks", "i32", GROUP_ROWS * BLOCK)     # running maxima per lane, as `ranks`
        self.tops, self.totals = b.scratch("tops", "f32", GROUP_ROWS), b.scratch("totals", "f32", GROUP_ROWS)
        self.sums = b.scratch("sums", "f32", GROUP_ROWS * g.chunks * 64)
        self.mixed = b.scratch("mixed", "f32", TILE * 64)
        self.scales, self.block_tops = b.scratch("scales", "f32", TILE), b.scratch("block_tops", "f32", TILE)
        self.lows, self.highs = b.scratch("lows", "i64", TILE), b.scratch("highs", "i64", TILE)
        # per row of the group: its first visible key, one past its last, its number in q and out
        self.begins, self.ends = b.scratch("begins", "i64", GROUP_ROWS), b.scratch("ends", "i64", GROUP_ROWS)
        self.places = b.scratch("places", "i64", GROUP_ROWS)

    def start(self) -> None:
        """Where the rows are and what they see; nothing summed yet.  Rows beyond the last stand for it."""
        a, b, g = self.a, self.b, self.g
        with b.loop(0, GROUP_ROWS) as r:
            row = b.imin(self.first + r, self.last)
            token, head = row // g.group_heads, self.kv_head * g.group_heads + row % g.group_heads
            lo, hi = a.visible(token)
            b.store("i64", self.begins, r, lo)
            b.store("i64", self.ends, r, hi)
            b.store("i64", self.places, r, token * g.heads + head)
            b.store_lanes("i32", self.ranks, r * BLOCK, b.i32(-2 ** 31))
            b.store("f32", self.totals, r, b.f32(0.0))
            with b.loop(0, g.chunks) as c:
                b.store_lanes("f32", self.sums, (r * g.chunks + c) * 64, b.f32(0.0))
        b.sync()

    def passes(self) -> None:
        """For every block and tile of TILE rows in which some row sees a key: the scores, then what the pass wants."""
        a, b = self.a, self.b
        lo, hi = b.load("i64", self.begins, 0), b.load("i64", self.ends, GROUP_ROWS - 1)
        first = lo // BLOCK
        with b.loop(0, 2) as second:
            with b.if_(second.equals(1)):
                self.join_tops()
            with b.loop(first, (hi + (BLOCK - 1)) // BLOCK) as block:
                keys = a.pages.keys(block, self.kv_head)
                values = self.values(second, keys)
                kept = b.imin(block - first, b.i64(KEPT_BLOCKS))         # the last place is for blocks not kept
                with b.loop(0, self.last - self.first + 1, TILE) as tile:
                    raw = a.raw.at((tile * (KEPT_BLOCKS + 1) + kept * TILE) * (4 * BLOCK))
                    fresh = second.equals(0) | kept.equals(KEPT_BLOCKS)
                    self.tile(second, block * BLOCK, keys, values, tile, raw, fresh)

    def values(self, second: Value, keys: Buffer) -> Buffer:
        """V of a block; where it must be copied out of K, only for the pass that reads it."""
        if not self.g.shared:
            return self.a.pages.values(keys)
        with self.b.if_(second.equals(1)):
            return self.a.pages.values(keys)

    def tile(self, second: Value, start: Value, keys: Buffer, values: Buffer, tile: Value, raw: Buffer,
             fresh: Value) -> None:
        """One tile of rows with one block; `raw` holds the scores unless they are to be computed afresh."""
        a, b = self.a, self.b
        lows = [a.within(b.load("i64", self.begins, tile + i), start) for i in range(TILE)]
        highs = [a.within(b.load("i64", self.ends, tile + i), start) for i in range(TILE)]
        for i in range(TILE):
            b.store("i64", self.lows, i, lows[i])
            b.store("i64", self.highs, i, highs[i])
        # keys that every row sees are lo .. hi; positions are in order of the rows, so the ends are the outer rows'
        lo = lows[-1]
        hi = b.imax(lo, highs[0])
        with b.if_(lows[0] < highs[-1]):
            with b.if_(fresh):
                a.dots([a.q.at(b.load("i64", self.places, tile + i) * (4 * self.g.head_dim)) for i in range(TILE)],
                       keys, raw)
            rows = b.imin(self.last - self.first - tile + 1, b.i64(TILE))
            with b.if_(second.equals(0)):
                self.find_tops(tile, rows, raw)
            with b.else_():
                self.add_block(tile, rows, raw, lo, hi, values)

    def find_tops(self, tile: Value, rows: Value, raw: Buffer) -> None:
        """First pass: running maximum of the visible scores, per lane."""
        a, b = self.a, self.b
        with b.loop(0, rows) as i:
            ranks = a.ranks(a.score(i, raw), b.load("i64", self.lows, i), b.load("i64", self.highs, i))
            at = (tile + i) * BLOCK
            b.store_lanes("i32", self.ranks, at, b.imax(b.load_lanes("i32", self.ranks, at), ranks))
        b.sync()

    def join_tops(self) -> None:
        """M of every row."""
        b = self.b
        with b.loop(0, GROUP_ROWS) as r:
            b.store("f32", self.tops, r, self.a.greatest(b.load_lanes("i32", self.ranks, r * BLOCK)))
        b.sync()

    def add_block(self, tile: Value, rows: Value, raw: Buffer, lo: Value, hi: Value, values: Buffer) -> None:
        """Second pass: one block's weights and mix, added to the sums of the rows that see a key of it.

        Keys lo .. hi are walked for the whole tile at once, those before and after them row by row."""
        a, b, g = self.a, self.b, self.g
        with b.loop(0, TILE) as i:           # a loop of its own: the rows' maxima are found side by side
            score = a.score(i, raw)
            b.store_lanes("f32", raw, i * BLOCK, score)
            top = a.greatest(a.ranks(score, b.load("i64", self.lows, i), b.load("i64", self.highs, i)))
            b.store("f32", self.block_tops, i, top)
        b.sync()
        with b.loop(0, TILE) as i:
            slot, top = tile + i, b.load("f32", self.block_tops, i)
            low, high = b.load("i64", self.lows, i), b.load("i64", self.highs, i)
            total = a.weights(i, b.load_lanes("f32", raw, i * BLOCK), top, low, high)
            e = scalar_math.exp(b, top - b.load("f32", self.tops, slot))
            b.store("f32", self.scales, i, e)
            with b.if_(low < high):
                b.store("f32", self.totals, slot, b.fma(total, e, b.load("f32", self.totals, slot)))
        b.sync()
        for c in range(g.chunks):
            with b.loop(0, TILE) as i:
                self.mix_row(i, values, c, b.load("i64", self.lows, i), b.imin(b.load("i64", self.highs, i), lo), None)
            acc = [b.var("f32", b.load_lanes("f32", self.mixed, 64 * i)) for i in range(TILE)]
            a.mix(acc, 0, values, c, lo, hi)
            for i, cell in enumerate(acc):
                b.store_lanes("f32", self.mixed, 64 * i, cell.get())
            with b.loop(0, rows) as i:
                low, high = b.load("i64", self.lows, i), b.load("i64", self.highs, i)
                self.mix_row(i, values, c, b.imax(low, hi), high, b.load_lanes("f32", self.mixed, i * 64))
                with b.if_(low < high):
                    at = ((tile + i) * g.chunks + c) * 64
                    m, e = b.load_lanes("f32", self.mixed, i * 64), b.load("f32", self.scales, i)
                    b.store_lanes("f32", self.sums, at, b.fma(m, e, b.load_lanes("f32", self.sums, at)))
            b.sync()

    def mix_row(self, i: Value, values: Buffer, chunk: int, lo: Value, hi: Value, start: Value | None) -> None:
        """mixed[i] = start (or +0) folded over keys lo .. hi."""
        b = self.b
        acc = b.var("f32", b.f32(0.0) if start is None else start)
        self.a.mix([acc], i, values, chunk, lo, hi)
        b.store_lanes("f32", self.mixed, i * 64, acc.get())

    def finish(self) -> None:
        a, b, g = self.a, self.b, self.g
        with b.loop(0, self.last - self.first + 1) as slot:
            lo, hi = b.load("i64", self.begins, slot), b.load("i64", self.ends, slot)
            total = b.load("f32", self.totals, slot)
            for c in range(g.chunks):
                y = b.load_lanes("f32", self.sums, (slot * g.chunks + c) * 64) / total
                y = b.canonical_nan(b.select(lo < hi, y, b.f32(0.0)))
                at = b.load("i64", self.places, slot) * g.value_dim + 64 * c
                b.store_lanes("f32", a.out, at, y, chunk_mask(b, g.value_dim, c))


@functools.lru_cache(maxsize=None)
def attn_rows(g: Geometry) -> Kernel:
    """q r f32 [T, heads head_dim], base r pages[, table r i64], out w f32 [T, heads value_dim], T, past, keys,
    window i64, scale f32[, softcap f32].  Empty grid when T <= FEW_TOKENS."""
    rows = _Rows(g)
    rows.start()
    rows.passes()
    rows.finish()
    return rows.b.finish()
