"""Key/value streams: the immutable values behind ATTN's state operand.

A stream maps layer -> (pages, length).  A page is one NumPy array of PAGE = 64 positions of one layer; `kv_layout` says
how rows lie in it, `kv_pages` how they are listed, shared and written.  A value that appends where no live value has
rows writes in place (nobody can see the new positions); one that appends to the same place as a living sibling copies
that one page first.  So a snapshot is a reference, and appending after a fork costs at most one page per layer.

With keys and values of one width, in F16, BF16 or F32:
    K of head h, feature d, position p:  page[h * 2 * 64 * head_dim + d * 64 + p % 64]
    V of head h, feature d, position p:  page[h * 2 * 64 * head_dim + 64 * head_dim + (p % 64) * head_dim + d]

The contents of positions at or beyond a value's length are unspecified (zero in a new page).
"""
from __future__ import annotations

import sys
from typing import Mapping, Sequence

import numpy as np

from m3jit.errors import InternalError, OperandError
from m3jit.isa import kv_pages
from m3jit.isa.kv_layout import DTYPES, PAGE, KVGeometry, one_of, read, storage, write
from m3jit.isa.kv_pages import NO_PAGES, Claim, Mark, Page, PageTable
from m3jit.isa.types import F16, DType


Held = tuple[Claim, "Held | None"] | None      # claims of whole pages, the last one's first


class Layer:
    """Pages and length of one layer; immutable.

    claim: of the rows in the last page that `length` reaches.  held: of all pages before the last one.  reserved: of
    the rows in the last page of all, where more rows may be written than `length` says."""
    __slots__ = ("pages", "length", "claim", "held", "reserved")

    def __init__(self, pages: PageTable = NO_PAGES, length: int = 0, claim: Claim | None = None, held: Held = None,
                 reserved: Claim | None = None):
        self.pages, self.length, self.claim, self.held, self.reserved = pages, length, claim, held, reserved

    @classmethod
    def of(cls, pages: Sequence[Page], length: int, claims: Sequence[Claim]) -> "Layer":
        """A layer of these pages, which `length` rows reach, each with a claim of its rows."""
        held: Held = None
        for claim in claims[:-1]:
            held = claim, held
        return cls(NO_PAGES.spliced(0, pages), length, claims[-1], held)

    def whole_pages(self) -> list[tuple[Page, Claim]]:
        """The pages all of whose rows it has, with their claims: the rows stay while a claim lives."""
        count = -(-self.length // PAGE)
        claims, held = [self.claim], self.held_of(count)
        while held is not None:
            claims.append(held[0])
            held = held[1]
        return [(page, claim) for page, claim, _ in zip(self.pages, reversed(claims), range(self.length // PAGE))]

    @property
    def room(self) -> int:
        """Rows that this value may have: those it has and those reserved."""
        if self.reserved is None:
            return self.length
        return (len(self.pages) - 1) * PAGE + self.reserved.stop

    def held_of(self, count: int) -> Held:
        """`held` of the first `count` pages."""
        held = self.held
        for _ in range(len(self.pages) - max(count, 1)):
            held = held[1]
        return held

    def at(self, length: int, number: int) -> "Layer":
        """The layer with another length.  OperandError, InternalError: no such rows (of layer `number`, they say)."""
        if not 0 <= length <= len(self.pages) * PAGE:
            raise OperandError(f"layer {number} of the KV stream has pages for {len(self.pages) * PAGE} rows, "
                               f"not {length}")
        if length > self.room:
            raise InternalError(f"rows up to {length} of layer {number} of the KV stream were not reserved")
        if not length:
            return _EMPTY
        count = -(-length // PAGE)
        stop = length - (count - 1) * PAGE
        if count == len(self.pages):
            if self.reserved is None and length == self.length:
                return self
            if self.reserved is not None and stop == self.reserved.stop:
                return Layer(self.pages, length, self.reserved, self.held)
        pages = self.pages if count == len(self.pages) else self.pages.spliced(count)
        with kv_pages.lock:
            claim = pages[-1].mark.hold(stop)
        return Layer(pages, length, claim, self.held_of(count))


_EMPTY = Layer()


class _Rank:
    """Layers of one length as one thing: their last pages, the mark these share, the addresses of their page tables."""
    __slots__ = ("layers", "mark", "count", "addresses")

    def __init__(self, layers: tuple[int, ...], mark: Mark, count: int, addresses: np.ndarray):
        self.layers, self.mark, self.count, self.addresses = layers, mark, count, addresses

    def take(self, first: int, stop: int) -> Claim | None:
        """Positions first .. stop-1 of every last page for writing; None unless all are free."""
        with kv_pages.lock:
            return None if self.mark.broken else self.mark.take(first, stop)


class _Fresh:
    """Makes the pages that an append adds: those at the same place in several layers share their mark and claim."""

    def __init__(self, geometry: KVGeometry, dtype: DType):
        self.nbytes, self.storage = geometry.page_bytes(dtype), storage(dtype)
        self.marks: dict[tuple[int, int], tuple[Mark, Claim]] = {}
        self.chains: dict[tuple[int, int], Held] = {}

    def mark(self, place: int, stop: int) -> tuple[Mark, Claim]:
        found = self.marks.get((place, stop))
        if found is None:
            mark = Mark(0)
            found = self.marks[place, stop] = mark, mark.take(0, stop)
        return found

    def page(self, place: int, stop: int, of: Page | None = None) -> tuple[Page, Claim]:
        """A page whose first `stop` positions are claimed, zero or a copy.  MemoryError: no room."""
        mark, claim = self.mark(place, stop)
        page = Page.zeros(self.nbytes, self.storage, mark) if of is None else of.copied(mark)
        mark.members += 1
        return page, claim

    def held(self, claim: Claim, below: Held) -> Held:
        """(claim, below), one object for all layers."""
        return self.chains.setdefault((id(claim), id(below)), (claim, below))

    def reserved(self, old: Layer, rows: int, claim: Claim | None) -> Layer:
        """`old` with room for more rows.  claim: of their share of the last page, None where there is none or they are
        another's: then that page is copied."""
        start, stop = old.length, old.length + rows
        used, pages = -(-start // PAGE), []
        keep, held = used, old.held_of(used)
        ours, last = old.claim, claim
        if start % PAGE:
            if claim is None:
                page, ours = self.page(used - 1, min(PAGE, stop - (used - 1) * PAGE), old.pages[used - 1])
                pages, keep, last = [page], used - 1, ours
            elif stop > used * PAGE:
                held = self.held(claim, held)
        elif used:
            held = self.held(ours, held)
        while (keep + len(pages)) * PAGE < stop:
            if pages:
                held = self.held(last, held)
            page, last = self.page(keep + len(pages), min(PAGE, stop - (keep + len(pages)) * PAGE))
            pages.append(page)
        table = old.pages if not pages and keep == len(old.pages) else old.pages.spliced(keep, pages)
        return Layer(table, start, ours, held, last)


class KVStream:
    """A stream value.  Every method that changes something returns a new value; this one stays as it is.

    geometry: None until the first append fixes it.  dtype: storage of keys and values, one of `DTYPES`."""
    __slots__ = ("geometry", "dtype", "_layers", "_rank", "_length", "_claim", "_reserved", "__weakref__")
    kind_name = "KV stream"

    def __init__(self, geometry: KVGeometry | None = None, dtype: DType = F16,
                 layers: Mapping[int, Layer] | None = None):
        if dtype not in DTYPES.values():
            raise OperandError(f"a KV stream stores {', '.join(DTYPES)}, not {dtype.name}")
        self.geometry, self.dtype = geometry, dtype
        self._layers: Mapping[int, Layer] = layers if layers is not None else {}
        self._rank: _Rank | None = None
        self._length = -1                      # of the rank's layers, where `_layers` has an older one; -1: it has none
        self._claim: Claim | None = None       # of the rank's last rows, with `_length`
        self._reserved: Claim | None = None    # of rows of the rank's last pages that may be written

    @property
    def layers(self) -> Mapping[int, Layer]:
        """Layer number -> pages and length."""
        length = self._length                  # another thread may be here too
        if length >= 0:
            layers = dict(self._layers)
            for number in self._rank.layers:
                layers[number] = Layer(layers[number].pages, length, self._claim, layers[number].held)
            self._layers, self._length = layers, -1
        return self._layers

    def _ranked(self, layers: tuple[int, ...]) -> tuple[_Rank, int] | None:
        """The layers as a rank, and their length, when they have one length that does not end with a page."""
        rank = self._rank
        known = rank is not None and rank.layers is layers and not rank.mark.broken
        if known and self._length >= 0:
            return rank, self._length
        found = [self.layers.get(number, _EMPTY) for number in layers]
        length, count = found[0].length, len(found[0].pages)
        if length // PAGE + 1 != count or any(f.length != length or len(f.pages) != count for f in found):
            return None
        if not known:
            last = [f.pages[-1] for f in found]
            if not kv_pages.all_different(last):       # a claim of all would be one page's, for two layers to write to
                return None
            rank = self._rank = _Rank(layers, kv_pages.common_mark(last), count,
                                      np.array([f.pages.address for f in found], np.int64))
        claim = found[0].claim
        if all(f.claim is claim and f.reserved is None for f in found):        # next time they are not asked one by one
            self._claim, self._length = claim, length
        return rank, length

    # -- reading ----------------------------------------------------------------------------------------------------
    @property
    def page_bytes(self) -> int:
        return self.geometry.page_bytes(self.dtype) if self.geometry else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pages this value can reach (shared ones included)."""
        return sum(len(layer.pages) for layer in self.layers.values()) * self.page_bytes

    def length(self, layer: int) -> int:
        """Rows of a layer; 0 for a layer without any."""
        return self.layers.get(layer, _EMPTY).length

    def lengths(self, layers: Sequence[int]) -> list[int]:
        """Rows of several layers."""
        if self._length >= 0 and self._rank.layers is layers:
            return [self._length] * len(layers)
        get = self.layers.get
        return [get(layer, _EMPTY).length for layer in layers]

    def common_length(self, layers: Sequence[int]) -> int | None:
        """Rows of each of several layers, None when they have different ones."""
        if self._length >= 0 and self._rank.layers is layers:
            return self._length
        lengths = self.lengths(layers)
        return lengths[0] if lengths.count(lengths[0]) == len(lengths) else None

    def pages(self, layer: int) -> PageTable:
        return self.layers.get(layer, _EMPTY).pages

    def tables_of_its_own(self) -> list[PageTable]:
        """The page tables of all layers, unless another value shares them all (a value of the same last pages)."""
        return [] if sys.getrefcount(self._layers) > 2 else [layer.pages for layer in self._layers.values()]

    def page_table(self, layer: int) -> np.ndarray:
        """Addresses of the layer's pages, one int64 each.  Valid while this value is alive."""
        return self.pages(layer).addresses()

    def table_addresses(self, layers: tuple[int, ...]) -> np.ndarray:
        """Addresses of the top tables of several layers, as int64.  Valid while this value is alive."""
        if self._rank is not None and self._rank.layers is layers:
            return self._rank.addresses
        return np.array([self.pages(layer).address for layer in layers], np.int64)

    def rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """(keys, values) as f32 [length, kv_heads * head_dim] and [length, kv_heads * value_dim], copied out."""
        n, g = self.length(layer), self.geometry or KVGeometry(0, 0, 0)
        k = np.empty((n, g.kv_heads, g.head_dim), np.float32)
        v = np.empty((n, g.kv_heads, g.value_dim), np.float32)
        for i, page in enumerate(self.pages(layer)):
            at, stop = i * PAGE, min(n, (i + 1) * PAGE)
            if at >= n:
                break
            k[at:stop], v[at:stop] = read(page.data, g, self.dtype, stop - at)
        return k.reshape(n, g.kv_heads * g.head_dim), v.reshape(n, g.kv_heads * g.value_dim)

    # -- appending --------------------------------------------------------------------------------------------------
    def with_geometry(self, kv_heads: int, head_dim: int, value_dim: int = 0, shared: bool = False) -> "KVStream":
        """This stream, its geometry fixed by a first append.  OperandError if it has another one.

        value_dim 0: as head_dim.  shared: a value is the first value_dim features of its key, and not stored."""
        g = one_of(KVGeometry(kv_heads, head_dim, value_dim or head_dim, shared))
        if self.geometry == g:
            return self
        if self.geometry:
            raise OperandError(f"the KV stream has {self.geometry}; an append of {g} does not fit it")
        if kv_heads <= 0 or head_dim <= 0 or g.value_dim < 0:
            raise OperandError(f"a KV stream needs at least one head and one feature, got {kv_heads} of {head_dim}")
        if shared and g.value_dim > head_dim:
            raise OperandError(f"values that are part of the keys have at most their {head_dim} features, not "
                               f"{g.value_dim}")
        return KVStream(g, self.dtype, self.layers)

    def reserve(self, layer: int, rows: int) -> "KVStream":
        """A value with the same lengths whose pages can take `rows` more rows of a layer at their place: positions are
        claimed, a page another value may write is copied, missing pages are added (zero-filled).

        Writers (a compiled region) then fill positions length .. length + rows - 1 and commit with `with_lengths`.  A
        reservation that is given up lets its claims go.  MemoryError: nothing was done."""
        return self._reserve_each((layer,), [rows])

    def reserve_all(self, layers: tuple[int, ...], rows: Sequence[int]) -> "KVStream":
        """`reserve` for several layers: rows[i] more of layers[i]."""
        n = rows[0]
        if n and rows.count(n) == len(rows):           # mostly the last pages have room, and nobody else took it
            ranked = self._ranked(layers)
            if ranked is not None:
                first = ranked[1] % PAGE
                claim = ranked[0].take(first, first + n) if first and first + n <= PAGE else None
                if claim is not None:
                    return self._with(self._layers, self._length, self._claim, claim)
        return self._reserve_each(layers, rows)

    def _reserve_each(self, layers: Sequence[int], rows: Sequence[int]) -> "KVStream":
        if self.geometry is None:
            raise OperandError("a KV stream without geometry cannot be reserved; append or with_geometry first")
        new, fresh, old = dict(self.layers), _Fresh(self.geometry, self.dtype), self.layers
        by_place: dict[tuple[int, int], list[int]] = {}      # (positions taken in the last page, rows) -> layers
        for layer, n in zip(layers, rows):
            if n:
                by_place.setdefault((old.get(layer, _EMPTY).length % PAGE, n), []).append(layer)
        for (first, n), group in by_place.items():
            olds = [old.get(layer, _EMPTY) for layer in group]
            claims = kv_pages.take_all([o.pages[o.length // PAGE] for o in olds], first, min(PAGE, first + n)) \
                if first else [None] * len(group)
            for layer, o, claim in zip(group, olds, claims):
                new[layer] = fresh.reserved(o, n, claim)
        return KVStream(self.geometry, self.dtype, new) if by_place else self

    def _with(self, layers: Mapping[int, Layer], length: int, claim: Claim | None,
              reserved: Claim | None) -> "KVStream":
        """A value with this one's rank."""
        out = KVStream.__new__(KVStream)
        out.geometry, out.dtype, out._layers, out._rank = self.geometry, self.dtype, layers, self._rank
        out._length, out._claim, out._reserved = length, claim, reserved
        return out

    def with_all_lengths(self, layers: tuple[int, ...], rows: Sequence[int]) -> "KVStream":
        """`with_lengths`: rows[i] rows of layers[i]."""
        n, rank, reserved = rows[0], self._rank, self._reserved
        if reserved is None or rank.layers is not layers or rows.count(n) != len(rows) or \
                n != (rank.count - 1) * PAGE + reserved.stop:
            return self.with_lengths(dict(zip(layers, rows)))
        return self._with(self._layers, n, reserved, None)

    def with_lengths(self, lengths: Mapping[int, int]) -> "KVStream":
        """The value with new row counts of some layers: fewer than it has, or rows that were reserved."""
        layers, reserved = dict(self.layers), self._reserved
        for layer, n in lengths.items():
            old = layers.get(layer, _EMPTY)
            if reserved is not None and layer in self._rank.layers:
                old = Layer(old.pages, old.length, old.claim, old.held, reserved)
            layers[layer] = old.at(n, layer)
        return KVStream(self.geometry, self.dtype, layers)

    def append(self, layer: int, k: np.ndarray, v: np.ndarray | None) -> "KVStream":
        """The stream with rows k f32 [rows, kv_heads * head_dim] and v [rows, kv_heads * value_dim] after the layer's
        last row, rounded once.  v is not looked at where the values are shared."""
        rows, start = len(k), self.length(layer)
        out = self.reserve(layer, rows)
        g = out.geometry
        keys = k.reshape(rows, g.kv_heads, g.head_dim)
        values = None if g.shared else v.reshape(rows, g.kv_heads, g.value_dim)
        at = 0
        while at < rows:
            position = start + at
            page, slot = out.pages(layer)[position // PAGE], position % PAGE
            n = min(PAGE - slot, rows - at)
            write(page.data, g, self.dtype, slot, keys[at:at + n], None if values is None else values[at:at + n])
            at += n
        return out.with_lengths({layer: start + rows})

    # -- shortening -------------------------------------------------------------------------------------------------
    def truncate(self, length: int) -> "KVStream":
        """Every layer keeps its first min(rows, length) rows; pages past the end are let go."""
        if length < 0:
            raise OperandError(f"a KV stream cannot be truncated to {length} rows")
        layers = {key: old.at(min(old.length, length), key) for key, old in self.layers.items()}
        return KVStream(self.geometry, self.dtype, layers)

    def compress(self, sink: int, window: int) -> "KVStream":
        """Every layer longer than sink + window keeps its first `sink` and its last `window` rows (rows keep the
        rotation of the positions they were made at); others stay."""
        if sink < 0 or window < 0 or sink + window == 0:
            raise OperandError(f"KV_COMPRESS needs SINK and WINDOW from 0 and not both 0, got {sink} and {window}")
        out = self
        for key, old in self.layers.items():
            if old.length <= sink + window:
                continue
            k, v = self.rows(key)
            keep = np.r_[0:sink, old.length - window:old.length]
            out = out._replace(key, _EMPTY).append(key, k[keep], v[keep])
        return out

    def _replace(self, layer: int, value: Layer) -> "KVStream":
        layers = dict(self.layers)
        layers[layer] = value
        return KVStream(self.geometry, self.dtype, layers)

    def __repr__(self) -> str:
        lengths = {k: layer.length for k, layer in self.layers.items()}
        return f"KVStream({self.dtype.name}, {self.geometry}, rows {lengths})"
