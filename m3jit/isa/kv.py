"""Key/value streams: the immutable values behind ATTN's state operand.

A stream maps layer -> (pages, length).  A page is one NumPy array of PAGE = 64 positions of one layer; `kv_layout` says
how rows lie in it.  Pages are shared between the values that have them in common, and are append-only: a *claim mark*
per page says how many of its positions some value has taken.  A value that appends where its own length equals the mark
writes in place (nobody can see the new positions); one that appends below the mark, or to the same place as a sibling,
copies that one page first.  So a snapshot is a reference, and appending after a fork costs at most one page per layer.

With keys and values of one width, in F16, BF16 or F32:
    K of head h, feature d, position p:  page[h * 2 * 64 * head_dim + d * 64 + p % 64]
    V of head h, feature d, position p:  page[h * 2 * 64 * head_dim + 64 * head_dim + (p % 64) * head_dim + d]

The contents of positions at or beyond a value's length are unspecified (zero in a new page).
"""
from __future__ import annotations

import threading
from typing import Mapping, Sequence

import numpy as np

from m3jit.errors import InternalError, OperandError
from m3jit.isa.kv_layout import DTYPES, PAGE, KVGeometry, read, write
from m3jit.isa.types import F16, DType

_claims = threading.Lock()          # guards every page's mark; held for a comparison and an assignment only


class Page:
    """64 positions of one layer.  `claimed`: positions 0 .. claimed-1 belong to some value."""
    __slots__ = ("data", "address", "claimed", "__weakref__")

    def __init__(self, data: np.ndarray, claimed: int = 0):
        self.data, self.address, self.claimed = data, data.ctypes.data, claimed

    def claim(self, start: int, stop: int) -> bool:
        """Take positions start .. stop-1 for writing in place; False when another value has taken them."""
        with _claims:
            if self.claimed != start:
                return False
            self.claimed = stop
            return True


class Layer:
    """Pages and length of one layer; immutable."""
    __slots__ = ("pages", "length", "_table")

    def __init__(self, pages: tuple[Page, ...] = (), length: int = 0, table: np.ndarray | None = None):
        self.pages, self.length, self._table = pages, length, table

    @property
    def table(self) -> np.ndarray:
        """Addresses of the pages, one int64 each."""
        if self._table is None:
            self._table = np.array([p.address for p in self.pages], np.int64)
        return self._table

    def at(self, length: int) -> "Layer":
        """The same pages with another length."""
        return Layer(self.pages, length, self._table)


_EMPTY = Layer()


class _Rank:
    """Layers of one length as one thing: their last pages and the addresses of their page tables."""
    __slots__ = ("layers", "pages", "count", "addresses")

    def __init__(self, layers: tuple[int, ...], pages: list[Page], count: int, addresses: np.ndarray):
        self.layers, self.pages, self.count, self.addresses = layers, pages, count, addresses

    def claim(self, first: int, stop: int) -> bool:
        """Take positions first .. stop-1 of every last page; False (and nothing taken) unless all are free."""
        with _claims:
            for page in self.pages:
                if page.claimed != first:
                    return False
            for page in self.pages:
                page.claimed = stop
        return True


class KVStream:
    """A stream value.  Every method that changes something returns a new value; this one stays as it is.

    geometry: None until the first append fixes it.  dtype: storage of keys and values, one of `DTYPES`."""
    __slots__ = ("geometry", "dtype", "_layers", "_rank", "_length", "__weakref__")
    kind_name = "KV stream"

    def __init__(self, geometry: KVGeometry | None = None, dtype: DType = F16,
                 layers: Mapping[int, Layer] | None = None):
        if dtype not in DTYPES.values():
            raise OperandError(f"a KV stream stores {', '.join(DTYPES)}, not {dtype.name}")
        self.geometry, self.dtype = geometry, dtype
        self._layers: Mapping[int, Layer] = layers if layers is not None else {}
        self._rank: _Rank | None = None
        self._length = -1                      # of the rank's layers, where `_layers` has an older one; -1: it has none

    @property
    def layers(self) -> Mapping[int, Layer]:
        """Layer number -> pages and length."""
        if self._length >= 0:
            layers = dict(self._layers)
            for number in self._rank.layers:
                layers[number] = layers[number].at(self._length)
            self._layers, self._length = layers, -1
        return self._layers

    def _ranked(self, layers: tuple[int, ...]) -> tuple[_Rank, int] | None:
        """The layers as a rank, and their length, when they have one length that does not end with a page."""
        rank = self._rank
        if self._length >= 0 and rank.layers is layers:
            return rank, self._length
        found = [self.layers.get(number, _EMPTY) for number in layers]
        length, count = found[0].length, len(found[0].pages)
        if length // PAGE + 1 != count or any(f.length != length or len(f.pages) != count for f in found):
            return None
        if rank is None or rank.layers is not layers:
            rank = self._rank = _Rank(layers, [f.pages[-1] for f in found], count,
                                      np.array([self.table_address(number) for number in layers], np.int64))
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

    def pages(self, layer: int) -> tuple[Page, ...]:
        return self.layers.get(layer, _EMPTY).pages

    def page_table(self, layer: int) -> np.ndarray:
        """Addresses of the layer's pages, one int64 each.  Valid while this value is alive."""
        return self.layers.get(layer, _EMPTY).table

    def table_address(self, layer: int) -> int:
        """Address of `page_table(layer)`."""
        return self.page_table(layer).__array_interface__["data"][0]

    def table_addresses(self, layers: tuple[int, ...]) -> np.ndarray:
        """Addresses of the page tables of several layers, as int64.  Valid while this value is alive."""
        if self._rank is not None and self._rank.layers is layers:
            return self._rank.addresses
        return np.array([self.table_address(layer) for layer in layers], np.int64)

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
        g = KVGeometry(kv_heads, head_dim, value_dim or head_dim, shared)
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

        Writers (a compiled region) then fill positions length .. length + rows - 1 through `page_table` and commit
        with `with_lengths`.  A reservation that is never committed costs only memory."""
        old = self.layers.get(layer, _EMPTY)
        start, stop = old.length, old.length + rows
        if self.geometry is None:
            raise OperandError("a KV stream without geometry cannot be reserved; append or with_geometry first")
        used, first = -(-start // PAGE), start % PAGE
        claimed = not (rows and first) or old.pages[used - 1].claim(first, min(PAGE, first + rows))
        if claimed and used == len(old.pages) and stop <= used * PAGE:
            return self                        # everything is there and ours
        pages = list(old.pages[:used])
        if not claimed:
            pages[-1] = Page(pages[-1].data.copy(), min(PAGE, first + rows))
        while len(pages) * PAGE < stop:
            pages.append(Page(self.geometry.new_page(self.dtype), min(PAGE, stop - len(pages) * PAGE)))
        return self._replace(layer, Layer(tuple(pages), start))

    def reserve_all(self, layers: tuple[int, ...], rows: Sequence[int]) -> "KVStream":
        """`reserve` for several layers: rows[i] more of layers[i]."""
        n = rows[0]
        if rows.count(n) == len(rows) and n:           # mostly the last pages have room, and nobody else took it
            ranked = self._ranked(layers)
            if ranked is not None:
                first = ranked[1] % PAGE
                if first and first + n <= PAGE and ranked[0].claim(first, first + n):
                    return self
        out = self
        for layer, n in zip(layers, rows):
            out = out.reserve(layer, n)
        return out

    def with_all_lengths(self, layers: tuple[int, ...], rows: Sequence[int]) -> "KVStream":
        """`with_lengths`: rows[i] rows of layers[i]."""
        n, rank = rows[0], self._rank
        if rank is None or rank.layers is not layers or rows.count(n) != len(rows) or \
                not (rank.count - 1) * PAGE < n <= rank.count * PAGE or rank.pages[0].claimed < (n - 1) % PAGE + 1:
            return self.with_lengths(dict(zip(layers, rows)))
        out = KVStream(self.geometry, self.dtype, self._layers)
        out._rank, out._length = rank, n
        return out

    def with_lengths(self, lengths: Mapping[int, int]) -> "KVStream":
        """The value with new row counts of some layers, which must lie within their pages."""
        layers = dict(self.layers)
        for layer, n in lengths.items():
            old = layers.get(layer, _EMPTY)
            if not 0 <= n <= len(old.pages) * PAGE:
                raise OperandError(f"layer {layer} of the KV stream has pages for {len(old.pages) * PAGE} rows, "
                                   f"not {n}")
            if n > old.length and old.pages[(n - 1) // PAGE].claimed < (n - 1) % PAGE + 1:
                raise InternalError(f"rows up to {n} of layer {layer} of the KV stream were not reserved")
            layers[layer] = old.at(n)
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
        layers = {}
        for key, old in self.layers.items():
            n = min(old.length, length)
            layers[key] = Layer(old.pages[:-(-n // PAGE)], n)
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
