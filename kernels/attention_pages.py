"""Key/value pages in kernels: their geometry, reading blocks of rows, appending.

Pages hold 64 positions of one layer, laid out as `m3jit.isa.kv_layout` says: per kv head K as [head_dim][64], then V
as [64][value_dim], in the stream's type, unless the values are shared: then V is the first value_dim rows of K, which
every group turns round in its scratch, a block at a time.

Stream kernels take `base` (any address) and `table` (`m3jit.isa.kv_pages`): an i64 per leaf, its byte offset from base;
a leaf has an i64 for each of up to FAN pages, likewise.  With base 0 they are addresses.  Dense kernels have no table:
page i stands at i * page_bytes; dense K and V are first packed by `kv_append` with dtype F32, past 0.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Callable

import numpy as np

from m3jit.ir.loop import Buffer, Kernel, Value
from m3jit.ir.loop_builder import Builder
from m3jit.isa.kv_layout import BLOCK as SCALED
from m3jit.isa.kv_layout import DTYPES, FAN, PAGE, KVGeometry, part_bytes, plain_bytes
from m3jit.isa.kv_layout import scales as scale_count
from m3jit.kernels.quantize import quantized

BLOCK = PAGE                                 # keys of a page and of a block
MAX_DIM = 1024                               # features of a key or value of one head
MEMORY_TYPE = {"F16": "f16", "BF16": "bf16", "F32": "f32", "Q8_0": "i8"}


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
    value_dim: int = 0                       # 0: as head_dim
    shared: bool = False                     # a value is the first value_dim features of its key

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
        if self.kv_heads < 1 or self.heads % self.kv_heads or not 1 <= max(self.head_dim, self.value_dim) <= MAX_DIM:
            raise ValueError(f"attention needs heads a multiple of kv_heads and 1 <= head_dim <= {MAX_DIM}, got {self}")
        if self.shared and self.value_dim > self.head_dim:
            raise ValueError(f"shared values are at most as wide as the keys, got {self}")
        if self.dtype not in DTYPES:
            raise ValueError(f"key/value pages are {', '.join(DTYPES)}, not {self.dtype}")

    @property
    def name(self) -> str:
        flags = "".join(f"_{f}" for f in ("causal", "softcap", "dense", "shared") if getattr(self, f))
        width = f"{self.head_dim}" if self.value_dim == self.head_dim else f"{self.head_dim}x{self.value_dim}"
        return f"{self.heads}_{self.kv_heads}_{width}_{self.dtype.lower()}{flags}"

    @property
    def group_heads(self) -> int:
        return self.heads // self.kv_heads

    @property
    def chunks(self) -> int:
        """Vectors of 64 elements of a value."""
        return -(-self.value_dim // 64)

    @property
    def layout(self) -> KVGeometry:
        return KVGeometry(self.kv_heads, self.head_dim, self.value_dim, self.shared)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page (64 positions of one layer)."""
        return self.layout.page_bytes(DTYPES[self.dtype])

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys of one head in a page."""
        return part_bytes(DTYPES[self.dtype], self.head_dim)


class Pages:
    """Parameters `base` [, `table`], and the rows of a block: stored numbers as f32 vectors, and back."""

    def __init__(self, b: Builder, g: Geometry, access: str):
        self.b, self.g, self.type = b, g, MEMORY_TYPE[g.dtype]
        self.scaled = g.dtype == "Q8_0"
        self.base = b.ptr("base", access, self.type)
        self.table = None if g.dense else b.ptr("table", "r", "i64")
        self.turned: Buffer | None = None              # a block's shared values, in scratch
        # Bytes between its rows: an odd number of cache lines, as columns are written.
        self.stride = 16 * (-(-g.value_dim // 16) | 1)

    def scratch(self) -> None:
        """Before `values` of shared ones."""
        if self.g.shared:
            self.turned = self.b.scratch("values", "f32", BLOCK * self.stride)

    def keys(self, block: Value, kv_head: Value) -> Buffer:
        """K of a head in a page, [head_dim][64]."""
        g = self.g
        at = block * g.page_bytes if self.table is None else \
            self.b.load("i64", self.base.at(self.b.load("i64", self.table, block // FAN)), block % FAN)
        return self.base.at(at + kv_head * g.layout.head_bytes(DTYPES[g.dtype]))

    def scales(self, part: Buffer, dim: int) -> Buffer:
        """The scales behind the numbers of K or V."""
        return part.at(plain_bytes(DTYPES[self.g.dtype], dim))

    def each_feature(self, keys: Buffer, count: int, body: Callable[[Value, Value], None], ahead: int = 0) -> None:
        """body(feature, its 64 keys) for features 0 .. count-1 in order."""
        b = self.b

        def walk(lo: Value | int, hi: Value | int, step: int, scale: Value | None) -> None:
            with b.loop(lo, hi, step) as i:
                for u in range(step):
                    k = b.load_lanes(self.type, keys, (i + u) * BLOCK, ahead=ahead)
                    body(i + u, k if scale is None else b.cvt(k, "f32") * scale)
        if not self.scaled:
            return walk(0, count, next(s for s in (4, 2, 1) if count % s == 0), None)
        scales, whole = self.scales(keys, self.g.head_dim), count // SCALED
        if whole:
            with b.loop(0, whole) as n:
                walk(n * SCALED, n * SCALED + SCALED, 4, b.load_lanes("f16", scales, n * BLOCK))
        if count % SCALED:
            walk(whole * SCALED, count, 1, b.load_lanes("f16", scales, whole * BLOCK))

    def values(self, keys: Buffer) -> Buffer:
        """V of the head, [64][value_dim].  Shared: copied out of K now, for the whole block."""
        b, g = self.b, self.g
        if not g.shared:
            return keys.at(g.key_bytes)
        turned, lane = self.turned, b.cvt(b.lane, "i64")
        self.each_feature(keys, g.value_dim, lambda d, k: b.store("f32", turned, lane * self.stride + d, k))
        b.sync()
        return turned

    def value(self, values: Buffer, j: Value, chunk: int, ahead: int = 0) -> Value:
        """64 elements of the value of key j of the block."""
        b, g = self.b, self.g
        mask = chunk_mask(b, g.value_dim, chunk)
        if g.shared:
            return b.load_lanes("f32", values, j * self.stride + 64 * chunk, mask)
        v = b.load_lanes(self.type, values, j * g.value_dim + 64 * chunk, mask, ahead=ahead)
        if not self.scaled:
            return v
        scales, per_row = self.scales(values, g.value_dim), scale_count(g.value_dim)
        first = j * per_row + 2 * chunk
        d = b.load("f16", scales, first)
        if 2 * chunk + 1 < per_row:
            d = b.select(b.lane < SCALED, d, b.load("f16", scales, first + 1))
        return b.cvt(v, "f32") * d

    def store(self, part: Buffer, dim: int, chunk: int, v: Value, slot: Value, keys: bool) -> None:
        """64 elements of a row of K (keys) or V, rounded once, to position `slot`."""
        b, mask = self.b, chunk_mask(self.b, dim, chunk)

        def put(x: Value) -> None:
            if keys:
                b.store(self.type, part, (b.cvt(b.lane, "i64") + 64 * chunk) * BLOCK + slot, x, mask)
            else:
                b.store_lanes(self.type, part, slot * dim + 64 * chunk, x, mask)
        if not self.scaled:
            return put(b.canonical_nan(v))
        scales, numbers = self.scales(part, dim), []
        sizes = b.bits(b.abs(v) if mask is None else b.select(mask, b.abs(v), b.f32(0.0)))     # in order of magnitude
        for half in range(min(2, scale_count(dim) - 2 * chunk)):
            ours = b.lane < SCALED if half == 0 else b.logical_not(b.lane < SCALED)
            top = b.bits(b.fold(b.select(ours, sizes, b.i32(0)), "imax"))                # a NaN wins
            reciprocal = b.f32(127.0) / top
            numbers.append(quantized(b, v, reciprocal < float("inf"), reciprocal))
            n = 2 * chunk + half
            b.store("f16", scales, n * BLOCK + slot if keys else slot * scale_count(dim) + n,
                    b.canonical_nan(top / 127.0))
        put(numbers[0] if len(numbers) == 1 else b.select(b.lane < SCALED, *numbers))


def leaf_tables(offsets: np.ndarray, at: int) -> tuple[np.ndarray, np.ndarray]:
    """(leaves, top) of pages in one buffer with these byte offsets, for leaves that lie at byte `at` of that buffer."""
    return offsets.astype(np.int64), at + 8 * FAN * np.arange(-(-len(offsets) // FAN), dtype=np.int64)


def chunk_mask(b: Builder, dim: int, chunk: int) -> Value | None:
    """Lanes of a 64-wide piece of `dim` elements that exist; None for all."""
    left = dim - 64 * chunk
    return None if left >= 64 else b.lane < left


@functools.lru_cache(maxsize=None)
def kv_append(g: Geometry) -> Kernel:
    """k r f32 [T, kv_heads head_dim][, v r f32 [T, kv_heads value_dim] unless shared], base rw pages[, table r i64], T,
    past i64: row t becomes position past + t, rounded once to the pages' dtype.  heads and the masks do not matter."""
    b = Builder(f"kv_append_{g.name}", 64)
    sources = [(b.ptr("k", "r", "f32"), g.head_dim)]
    if not g.shared:
        sources.append((b.ptr("v", "r", "f32"), g.value_dim))
    pages = Pages(b, g, "rw")
    tokens, past = b.scalar("T"), b.scalar("past")
    b.set_grid(tokens * g.kv_heads)
    token, head = b.group // g.kv_heads, b.group % g.kv_heads
    position = past + token
    slot = position % BLOCK
    part = pages.keys(position // BLOCK, head)
    for n, (rows, dim) in enumerate(sources):
        for c in range(-(-dim // 64)):
            row = b.load_lanes("f32", rows, b.group * dim + 64 * c, chunk_mask(b, dim, c))
            pages.store(part if n == 0 else part.at(g.key_bytes), dim, c, row, slot, n == 0)
    return b.finish()
