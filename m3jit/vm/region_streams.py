"""The key/value streams of a compiled region: room for the rows it appends, the words with tables and lengths.

A model has one layer of a stream for each of its own, so everything here is done for all layers at once.
"""
from __future__ import annotations

from itertools import repeat
from operator import setitem
from typing import Any, Collection, Iterable, Sequence

import numpy as np

from m3jit.ir.region import KvUse
from m3jit.ir.tensor import Sym, eval_dim
from m3jit.isa.kv import DTYPES, PAGE, KVStream
from m3jit.isa.kv_layout import one_of


class _Stream:
    """What a region does with the stream of one state register."""

    def __init__(self, uses: list[KvUse], lengths: list[tuple[int, int]]):
        self.geometry, self.dtype = one_of(uses[0].geometry), uses[0].dtype
        self.alike = all((u.geometry, u.dtype) == (self.geometry, self.dtype) for u in uses)
        self.layers, self._rows = tuple(u.layer for u in uses), [u.rows for u in uses]
        self._fixed = all(r.__class__ is int for r in self._rows)
        self.most = max(self._rows) if self._fixed else None
        self.table_words = np.array([u.table_word for u in uses], np.intp)
        self.length_layers = tuple(layer for layer, _ in lengths)
        self.length_places = [word for _, word in lengths]
        self.length_words = np.array(self.length_places, np.intp)
        if self.length_layers == self.layers:
            self.length_layers = self.layers         # one object: streams recognise it

    def rows(self, syms: dict[Sym, int]) -> list[int]:
        """Rows the region appends to each layer."""
        return self._rows if self._fixed else [eval_dim(r, syms) for r in self._rows]


class RegionStreams:
    """uses: the layers of streams the region reads or appends to.  lengths: (state register, layer, word) of those
    whose length it asks for.  present: state registers whose streams must exist."""

    def __init__(self, uses: Sequence[KvUse], lengths: Iterable[tuple[Any, int, int]], present: Collection[Any] = ()):
        self.present = present
        of: dict[Any, tuple[list, list]] = {}
        for u in uses:
            of.setdefault(u.key, ([], []))[0].append(u)
        for key, layer, word in lengths:
            of[key][1].append((layer, word))
        self.streams = {key: _Stream(*parts) for key, parts in of.items()}
        self._most = None if any(use.most is None for use in self.streams.values()) else \
            max((use.most for use in self.streams.values()), default=1) or 1

    def in_order(self, key: Any, layers: Collection[int]) -> tuple[int, ...]:
        """These layers of a stream in the region's order: the very tuple `_Stream.layers` when they are all."""
        known = self.streams[key].layers
        return known if len(layers) == len(known) else tuple(n for n in known if n in layers)

    def match(self, regs: Any, seen: dict[int, Any]) -> bool:
        """Whether the streams of these registers fit.  seen: states other registers name, by identity."""
        for key, use in self.streams.items():
            stream = regs.get(key)
            if stream is None:
                if key in self.present:
                    return False
                continue
            if seen.setdefault(id(stream), key) != key:
                return False                     # two registers name one stream: its rows depend on their order
            if stream.__class__ is not KVStream or stream.dtype.name != use.dtype or not use.alike:
                return False
            if stream.geometry is not use.geometry and stream.geometry not in (None, use.geometry):
                return False
        return True

    def reserve(self, regs: Any, syms: dict[Sym, int]) -> tuple[dict[Any, KVStream], int]:
        """Streams with room for the rows the region appends, and the most blocks of 64 keys one may reach."""
        out: dict[Any, KVStream] = {}
        most = 1
        for key, use in self.streams.items():
            stream = regs.get(key)
            if stream is None:
                stream = KVStream(use.geometry, DTYPES[use.dtype])
            elif stream.geometry is None:
                stream = KVStream(use.geometry, stream.dtype)
            rows = use.rows(syms)
            new = out[key] = stream.reserve_all(use.layers, rows)
            length = new.common_length(use.layers) if use.most is not None else None
            most = max(most, length + use.most if length is not None else
                       max(map(int.__add__, new.lengths(use.layers), rows)))
        return out, -(-most // PAGE)

    def most_rows(self, syms: dict[Sym, int]) -> int:
        """Most rows an entry appends to a layer; 1 when it appends none."""
        if self._most is not None:
            return self._most
        return max((max(use.rows(syms)) for use in self.streams.values()), default=1) or 1

    def fill(self, frame: np.ndarray, words: memoryview, reserved: dict[Any, KVStream], known: dict[Any, Any]) -> None:
        """Put the addresses of page tables and the lengths into a frame, whose words they are.  known: the addresses
        it has already, by state register."""
        for key, use in self.streams.items():
            stream = reserved[key]
            addresses = stream.table_addresses(use.layers)
            if known.get(key) is not addresses:          # they change with every 64th row
                frame[use.table_words] = known[key] = addresses
            if use.length_places:
                length = stream.common_length(use.length_layers)
                any(map(setitem, repeat(words), use.length_places,
                        repeat(length) if length is not None else stream.lengths(use.length_layers)))

    def fill_all(self, frames: np.ndarray, reserved: Sequence[dict[Any, KVStream]],
                 known: list[dict[Any, Any]]) -> None:
        """`fill` for frames [contexts, words].  known: for each, the addresses it has already, by state register."""
        for key, use in self.streams.items():
            streams = [r[key] for r in reserved]
            for frame, stream, has in zip(frames, streams, known):
                addresses = stream.table_addresses(use.layers)
                if has.get(key) is not addresses:
                    frame[use.table_words] = has[key] = addresses
            if len(use.length_words):
                lengths = [stream.common_length(use.length_layers) for stream in streams]
                if None in lengths:
                    frames[:, use.length_words] = [stream.lengths(use.length_layers) for stream in streams]
                else:
                    frames[:, use.length_words] = np.array(lengths)[:, None]
