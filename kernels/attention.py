"""Attention over key/value pages: append, then attend.

Value, for query row t (position p = past + t) of one head, keys by absolute position, blocks of 64:
    s_j = scale * (fold over d of fma(q_d, k_jd, acc) from +0);  softcap c: c tanh(s_j / c)
    visible: j < keys, p - j < window and, when causal, j <= p
    block b: m_b = max of visible s_j;  w_j = exp(s_j - m_b), 0 where invisible;  l_b = 64-lane halving tree of w;
             mix_b[d] = fold over visible j in order of fma(w_j, v_jd, acc) from +0
    M = max of m_b;  e_b = exp(m_b - M);  L = fold of fma(l_b, e_b, acc);  out_d = (fold of fma(mix_bd, e_b, acc)) / L
    blocks without a visible key are skipped; no visible key at all gives 0

Pages hold 64 positions of one layer: per kv head K as [head_dim][64], then V as [64][head_dim], in the stream's dtype.
Stream kernels take `base` (any address) and `table` (i64 per page: byte offset of the page from base, so base 0 makes
it a table of addresses).  Dense kernels have no table: page i stands at i * page_bytes; dense K and V are first packed
by `kv_append` with dtype F32, past 0.

Schedule: up to FEW_TOKENS rows: one group per (token, block, kv head) writes partial results (`attn_blocks`), which
`attn_combine` folds.  More rows: `attn_rows`, one group per 32 query rows of a kv head, finds M in a first pass over
the keys and everything else in a second, so that nothing of size tokens x keys is ever stored.  All three may be
launched one after the other (a barrier before attn_combine); those that do not apply have an empty grid.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Sequence

from m3jit.ir import scalar_math
from m3jit.ir.loop import MEMORY, Buffer, Builder, Kernel, Value

BLOCK = 64                                   # keys of a page and of a block
FEW_TOKENS = 1                               # up to this many query tokens, blocks are spread over groups
HEADER = 16                                  # floats before a partial mix: m_b, l_b, unused
TILE = 4                                     # query rows whose scores are computed together
GROUP_ROWS = 32                              # query rows of one group of attn_rows
NO_WINDOW = 1 << 40                          # window argument that hides nothing

MEMORY_TYPE = {"F16": "f16", "BF16": "bf16", "F32": "f32"}


def page_bytes(dtype: str, kv_heads: int, head_dim: int) -> int:
    """Bytes of one page (64 positions of one layer)."""
    return kv_heads * 2 * BLOCK * head_dim * MEMORY[MEMORY_TYPE[dtype]][0]


def partial_floats(tokens: int, keys: int, heads: int, head_dim: int) -> int:
    """f32 elements of the partial buffer of attn_blocks (none when attn_rows does the work)."""
    return tokens * heads * -(-keys // BLOCK) * (head_dim + HEADER) if tokens <= FEW_TOKENS else 0


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a kernel is built for; everything else is an argument."""
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "F16"                       # of the pages
    causal: bool = True
    softcap: bool = False
    dense: bool = False

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads or not 1 <= self.head_dim <= 256:
            raise ValueError(f"attention needs heads a multiple of kv_heads and 1 <= head_dim <= 256, got {self}")
        if self.dtype not in MEMORY_TYPE:
            raise ValueError(f"key/value pages are F16, BF16 or F32, not {self.dtype}")

    @property
    def name(self) -> str:
        flags = "".join(f"_{f}" for f in ("causal", "softcap", "dense") if getattr(self, f))
        return f"{self.heads}_{self.kv_heads}_{self.head_dim}_{self.dtype.lower()}{flags}"

    @property
    def group_heads(self) -> int:
        return self.heads // self.kv_heads

    @property
    def chunks(self) -> int:
        """Vectors of 64 head-dim elements."""
        return -(-self.head_dim // 64)


class _Pages:
    """Parameters `base` [, `table`] and the addresses of a block's K and V."""

    def __init__(self, b: Builder, g: Geometry, access: str):
        self.b, self.g, self.type = b, g, MEMORY_TYPE[g.dtype]
        self.base = b.ptr("base", access, self.type)
        self.table = None if g.dense else b.ptr("table", "r", "i64")

    def keys(self, block: Value, kv_head: Value) -> Buffer:
        """K of a page, [head_dim][64]; V follows at `self.values`."""
        g = self.g
        at = block * page_bytes(g.dtype, g.kv_heads, g.head_dim) if self.table is None else \
            self.b.load("i64", self.table, block)
        return self.base.at(at + kv_head * (page_bytes(g.dtype, 1, g.head_dim)))

    def values(self, keys: Buffer) -> Buffer:
        return keys.at(page_bytes(self.g.dtype, 1, self.g.head_dim) // 2)


def _chunk_mask(b: Builder, g: Geometry, chunk: int) -> Value | None:
    """Lanes of a 64-wide piece of the head dimension that exist; None for all."""
    left = g.head_dim - 64 * chunk
    return None if left >= 64 else b.lane < left


@functools.lru_cache(maxsize=None)
def kv_append(kv_heads: int, head_dim: int, dtype: str = "F16", dense: bool = False) -> Kernel:
    """k r f32 [T, kv_heads head_dim], v r the same, base rw pages[, table r i64], T, past i64: row t becomes position
    past + t, rounded once to the pages' dtype."""
    g = Geometry(kv_heads, kv_heads, head_dim, dtype, dense=dense)
    b = Builder(f"kv_append_{g.name}", 64)
    k, v = b.ptr("k", "r", "f32"), b.ptr("v", "r", "f32")
    pages = _Pages(b, g, "rw")
    tokens, past = b.scalar("T"), b.scalar("past")
    b.set_grid(tokens * kv_heads)
    token, head = b.group // kv_heads, b.group % kv_heads
    position = past + token
    slot = position % BLOCK
    k_page = pages.keys(position // BLOCK, head)
    v_page = pages.values(k_page)
    row = b.group * head_dim
    for c in range(g.chunks):
        mask = _chunk_mask(b, g, c)
        kv = b.canonical_nan(b.load_lanes("f32", k, row + 64 * c, mask))
        b.store(pages.type, k_page, (b.cvt(b.lane, "i64") + 64 * c) * BLOCK + slot, kv, mask)
        vv = b.canonical_nan(b.load_lanes("f32", v, row + 64 * c, mask))
        b.store_lanes(pages.type, v_page, slot * head_dim + 64 * c, vv, mask)
    return b.finish()


@dataclass(slots=True)
class _Row:
    """One query row of a tile: its values and the visible keys of the block at hand."""
    q: Buffer
    lo: Value                                # visible keys lo <= j < hi, counted in the block, 0..64
    hi: Value


class _Attention:
    """Shared parts of the kernels; a builder with the parameters q, base[, table], `extra`, T, past, keys, window,
    scale[, softcap]."""

    def __init__(self, name: str, g: Geometry, extra: str, access: str):
        self.g = g
        self.b = b = Builder(f"{name}_{g.name}", 64)
        self.q = b.ptr("q", "r", "f32")
        self.pages = _Pages(b, g, "r")
        self.out = b.ptr(extra, access, "f32")
        self.tokens, self.past, self.keys = b.scalar("T"), b.scalar("past"), b.scalar("keys")
        self.window, self.scale = b.scalar("window"), b.scalar("scale", "f32")
        self.cap = b.scalar("softcap", "f32") if g.softcap else None
        self.blocks = (self.keys + (BLOCK - 1)) // BLOCK

    def visible(self, token: Value) -> tuple[Value, Value]:
        """First visible key and one past the last of query row `token`."""
        return visible(self.b, self.g, self.past + token, self.keys, self.window)

    def row(self, token: Value, head: Value, block_start: Value) -> _Row:
        b, g = self.b, self.g
        lo, hi = self.visible(token)
        zero, full = b.i64(0), b.i64(BLOCK)
        inside = [b.imin(b.imax(v - block_start, zero), full) for v in (lo, hi)]
        return _Row(self.q.at((token * g.heads + head) * (4 * g.head_dim)), *inside)

    def scores(self, rows: Sequence[_Row], keys: Buffer) -> list[Value]:
        """Scaled (and capped) scores of the rows with the block's 64 keys, one key per lane."""
        b, d = self.b, self.g.head_dim
        acc = [b.var("f32", 0.0) for _ in rows]
        step = next(s for s in (4, 2, 1) if d % s == 0)
        with b.loop(0, d, step) as i:
            for u in range(step):
                k = b.load_lanes(self.pages.type, keys, (i + u) * BLOCK)
                for a, r in zip(acc, rows):
                    a.set(b.fma(b.load("f32", r.q, i + u), k, a.get()))
        out = [a.get() * self.scale for a in acc]
        return out if self.cap is None else [self.cap * scalar_math.tanh(b, s / self.cap) for s in out]

    def seen(self, row: _Row) -> Value:
        """b1 per key: visible to the row."""
        b = self.b
        lo, hi = b.cvt(row.lo, "i32"), b.cvt(row.hi, "i32")
        return (lo <= b.lane) & (b.lane < hi)

    def weights(self, row: _Row, s: Value) -> tuple[Value, Value, Value]:
        """(m_b, l_b, w) of a row."""
        b = self.b
        seen = self.seen(row)
        top = b.fold(b.select(seen, s, b.f32(float("-inf"))), "fmax")
        w = b.select(seen, scalar_math.exp(b, s - top), b.f32(0.0))
        return top, b.fold(w, "add"), w

    def mix(self, rows: Sequence[_Row], table: Buffer, values: Buffer, chunk: int) -> list[Value]:
        """mix_b of the rows for 64 elements of the head dimension; `table` holds the rows' weights, 64 each."""
        b, g = self.b, self.g
        acc = [b.var("f32", 0.0) for _ in rows]
        mask = _chunk_mask(b, g, chunk)

        def keys(lo: Value, hi: Value, which: Sequence[int]) -> None:
            with b.loop(lo, hi) as j:
                v = b.load_lanes(self.pages.type, values, j * g.head_dim + 64 * chunk, mask)
                for r in which:
                    acc[r].set(b.fma(b.load("f32", table, j + BLOCK * r), v, acc[r].get()))
        # keys that every row sees are walked together; those before and after them that only some rows see, by row
        lo, hi = rows[0].lo, rows[0].hi
        for r in rows[1:]:
            lo, hi = b.imax(lo, r.lo), b.imin(hi, r.hi)
        hi = b.imax(lo, hi)
        if len(rows) > 1:
            for i, r in enumerate(rows):
                keys(r.lo, b.imin(r.hi, lo), [i])
        keys(lo, hi, range(len(rows)))
        if len(rows) > 1:
            for i, r in enumerate(rows):
                keys(b.imax(r.lo, hi), r.hi, [i])
        return [a.get() for a in acc]


def visible(b: Builder, g: Geometry, position: Value, keys: Value, window: Value) -> tuple[Value, Value]:
    """Visible keys lo <= j < hi of a query at `position`."""
    lo = b.imax(position - window + 1, b.i64(0))
    return lo, b.imin(position + 1, keys) if g.causal else keys


@functools.lru_cache(maxsize=None)
def attn_blocks(g: Geometry) -> Kernel:
    """q r f32 [T, heads head_dim], base r pages[, table r i64], partial w f32 (`partial_floats`), T, past, keys,
    window i64, scale f32[, softcap f32].  Empty grid when T > FEW_TOKENS.

    Partial results of row (t, head) and block b stand at ((t heads + head) blocks + b) (head_dim + HEADER)."""
    a = _Attention("attn_blocks", g, "partial", "w")
    b = a.b
    few = a.tokens <= FEW_TOKENS
    b.set_grid(b.select(few, a.tokens * a.blocks * g.kv_heads, b.i64(0)))
    kv_head, rest = b.group % g.kv_heads, b.group // g.kv_heads
    block, token = rest % a.blocks, rest // a.blocks
    k_page = a.pages.keys(block, kv_head)
    lo, hi = a.visible(token)
    start = block * BLOCK
    table = b.scratch("weights", "f32", TILE * BLOCK)
    with b.if_((start < hi) & (lo < start + BLOCK)):
        for first in range(0, g.group_heads, TILE):
            heads = [kv_head * g.group_heads + h for h in range(first, min(first + TILE, g.group_heads))]
            rows = [a.row(token, h, start) for h in heads]
            for r in rows:                   # one token: all rows see the same keys
                r.lo, r.hi = rows[0].lo, rows[0].hi
            at = [a.out.at(((token * g.heads + h) * a.blocks + block) * (4 * (g.head_dim + HEADER))) for h in heads]
            for i, s in enumerate(a.scores(rows, k_page)):
                top, total, w = a.weights(rows[i], s)
                b.store("f32", at[i], 0, top)
                b.store("f32", at[i], 1, total)
                b.store_lanes("f32", table, BLOCK * i, w)
            b.sync()
            for c in range(g.chunks):
                for i, m in enumerate(_mix_alike(a, rows, table, a.pages.values(k_page), c)):
                    b.store_lanes("f32", at[i], HEADER + 64 * c, m, _chunk_mask(b, g, c))
            b.sync()
    return b.finish()


def _mix_alike(a: _Attention, rows: Sequence[_Row], table: Buffer, values: Buffer, chunk: int) -> list[Value]:
    """`_Attention.mix` for rows that see the same keys."""
    b, g = a.b, a.g
    acc = [b.var("f32", 0.0) for _ in rows]
    mask = _chunk_mask(b, g, chunk)
    with b.loop(rows[0].lo, rows[0].hi) as j:
        v = b.load_lanes(a.pages.type, values, j * g.head_dim + 64 * chunk, mask)
        for r, cell in enumerate(acc):
            cell.set(b.fma(b.load("f32", table, j + BLOCK * r), v, cell.get()))
    return [c.get() for c in acc]


@functools.lru_cache(maxsize=None)
def attn_combine(g: Geometry) -> Kernel:
    """partial r f32 (of attn_blocks), out w f32 [T, heads head_dim], T, past, keys, window i64.  Empty grid when
    T > FEW_TOKENS.  Only heads, head_dim and causal of the geometry matter."""
    b = Builder(f"attn_combine_{g.heads}_{g.head_dim}{'_causal' if g.causal else ''}", 64)
    partial, out = b.ptr("partial", "r", "f32"), b.ptr("out", "w", "f32")
    tokens, past, keys, window = (b.scalar(n) for n in ("T", "past", "keys", "window"))
    b.set_grid(b.select(tokens <= FEW_TOKENS, tokens * g.heads, b.i64(0)))
    stride = g.head_dim + HEADER
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
            m = b.load_lanes("f32", rows, i * stride + (HEADER + 64 * c), _chunk_mask(b, g, c))
            cell.set(b.fma(m, e, cell.get()))
    for c, cell in enumerate(acc):
        y = b.select(first < last, cell.get() / total.get(), b.f32(0.0))
        b.store_lanes("f32", out, b.group * g.head_dim + 64 * c, b.canonical_nan(y), _chunk_mask(b, g, c))
    return b.finish()


class _Rows:
    """attn_rows: the state of a group's query rows in scratch, and the two passes over the keys."""

    def __init__(self, g: Geometry):
        self.a = a = _Attention("attn_rows", g, "out", "w")
        self.g, self.b = g, a.b
        b = a.b
        self.count = a.tokens * g.group_heads            # query rows of one kv head: row = token group_heads + head
        groups = (self.count + (GROUP_ROWS - 1)) // GROUP_ROWS
        b.set_grid(b.select(a.tokens <= FEW_TOKENS, b.i64(0), groups * g.kv_heads))
        self.kv_head = b.group % g.kv_heads
        self.first = b.group // g.kv_heads * GROUP_ROWS
        self.last = b.imin(self.first + GROUP_ROWS, self.count) - 1
        self.tops = b.scratch("tops", "f32", GROUP_ROWS * BLOCK)
        self.table = b.scratch("weights", "f32", TILE * BLOCK)
        self.totals = b.scratch("totals", "f32", GROUP_ROWS)
        self.sums = b.scratch("sums", "f32", GROUP_ROWS * g.chunks * 64)

    def place(self, tile: Value, i: int) -> tuple[Value, Value, Value]:
        """(slot in scratch, token, head) of the tile's i-th row; rows beyond the last stand for it (see `counts`)."""
        slot = self.b.imin(tile + i, self.last - self.first)
        row = self.first + slot
        return slot, row // self.g.group_heads, self.kv_head * self.g.group_heads + row % self.g.group_heads

    def each_tile(self, body) -> None:
        """body(K buffer, rows, slots, tile) for every block and tile in which some row sees a key."""
        a, b, g = self.a, self.b, self.g
        lo, _ = a.visible(self.first // g.group_heads)
        _, hi = a.visible(self.last // g.group_heads)
        with b.loop(lo // BLOCK, (hi + (BLOCK - 1)) // BLOCK) as block:
            keys = a.pages.keys(block, self.kv_head)
            start = block * BLOCK
            with b.loop(0, self.last - self.first + 1, TILE) as tile:
                places = [self.place(tile, i) for i in range(TILE)]
                rows = [a.row(token, head, start) for _, token, head in places]
                lowest, highest = rows[0].lo, rows[0].hi
                for r in rows[1:]:
                    lowest, highest = b.imin(lowest, r.lo), b.imax(highest, r.hi)
                with b.if_(lowest < highest):
                    body(keys, rows, [slot for slot, _, _ in places], tile)

    def find_tops(self, keys: Buffer, rows: Sequence[_Row], slots: Sequence[Value], tile: Value) -> None:
        """First pass: running maximum of the visible scores, per lane."""
        b = self.b
        for row, slot, s in zip(rows, slots, self.a.scores(rows, keys)):
            seen = b.select(self.a.seen(row), s, b.f32(float("-inf")))
            b.store_lanes("f32", self.tops, slot * BLOCK,
                          b.fmax(b.load_lanes("f32", self.tops, slot * BLOCK), seen))

    def add_block(self, keys: Buffer, rows: Sequence[_Row], slots: Sequence[Value], tile: Value) -> None:
        """Second pass: one block's weights and mix, added to the rows' sums."""
        a, b, g = self.a, self.b, self.g
        scales = []
        for i, (row, slot, s) in enumerate(zip(rows, slots, a.scores(rows, keys))):
            top, total, w = a.weights(row, s)
            b.store_lanes("f32", self.table, BLOCK * i, w)
            scales.append(scalar_math.exp(b, top - b.load("f32", self.tops, slot * BLOCK)))
            with b.if_(self.counts(i, rows, tile)):
                b.store("f32", self.totals, slot, b.fma(total, scales[-1], b.load("f32", self.totals, slot)))
        b.sync()
        for c in range(g.chunks):
            mixed = a.mix(rows, self.table, a.pages.values(keys), c)
            for i, (slot, m) in enumerate(zip(slots, mixed)):
                at = (slot * g.chunks + c) * 64
                with b.if_(self.counts(i, rows, tile)):
                    b.store_lanes("f32", self.sums, at, b.fma(m, scales[i], b.load_lanes("f32", self.sums, at)))
        b.sync()

    def counts(self, i: int, rows: Sequence[_Row], tile: Value) -> Value:
        """The tile's i-th row exists and sees a key of the block."""
        return (rows[i].lo < rows[i].hi) & (tile + i <= self.last - self.first)


@functools.lru_cache(maxsize=None)
def attn_rows(g: Geometry) -> Kernel:
    """q r f32 [T, heads head_dim], base r pages[, table r i64], out w f32 [T, heads head_dim], T, past, keys,
    window i64, scale f32[, softcap f32].  Empty grid when T <= FEW_TOKENS."""
    rows = _Rows(g)
    a, b = rows.a, rows.b
    with b.loop(0, GROUP_ROWS) as r:
        b.store_lanes("f32", rows.tops, r * BLOCK, b.f32(float("-inf")))
        b.store("f32", rows.totals, r, b.f32(0.0))
        for c in range(g.chunks):
            b.store_lanes("f32", rows.sums, (r * g.chunks + c) * 64, b.f32(0.0))
    b.sync()
    rows.each_tile(rows.find_tops)
    b.sync()
    with b.loop(0, GROUP_ROWS) as r:
        top = b.fold(b.load_lanes("f32", rows.tops, r * BLOCK), "fmax")
        b.sync()
        b.store("f32", rows.tops, r * BLOCK, top)
    b.sync()
    rows.each_tile(rows.add_block)
    with b.loop(0, rows.last - rows.first + 1) as i:
        _, token, head = rows.place(i, 0)
        lo, hi = a.visible(token)
        total = b.load("f32", rows.totals, i)
        for c in range(g.chunks):
            y = b.load_lanes("f32", rows.sums, (i * g.chunks + c) * 64) / total
            y = b.select(lo < hi, y, b.f32(0.0))
            at = (token * g.heads + head) * g.head_dim + 64 * c
            b.store_lanes("f32", a.out, at, b.canonical_nan(y), _chunk_mask(b, g, c))
    return b.finish()
