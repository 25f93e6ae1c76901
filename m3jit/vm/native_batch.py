"""Entering a compiled region with several contexts at once.

Every temporary and every result is laid out context behind context without gaps, so that launches over rows of
neighbouring contexts are launches over the rows of all of them (`m3jit.backends.cpu.batch_region`).  What a context
brings and takes is bound as for a context alone.
"""
from __future__ import annotations

import threading
from typing import Any, Sequence

import numpy as np

from m3jit.ir.lower import ExitInfo
from m3jit.ir.plan import FrameWord
from m3jit.ir.tensor import Sym, dim_syms, eval_dim
from m3jit.isa.kv import KVStream
from m3jit.vm.native import ALIGN, CompiledRegion, Held, new_array, stored_shape

MAX_LAYOUTS = 16


class Layout:
    """Frames of some contexts with everything that depends on their dimensions alone.  Temporaries lie in `arena`,
    which all layouts of a region use, one at a time."""

    def __init__(self, region: CompiledRegion, native: Any, syms: Sequence[dict[Sym, int]], arena: "_Arena"):
        r, n = region.region, len(syms)
        self.frames = np.zeros((n, native.words), np.int64)
        for word, d in r.dims:
            self.frames[:, word] = [eval_dim(d, s) for s in syms]
        sizes = np.array([[eval_dim(s.nbytes, k) for k in syms] for s in r.slots], np.int64).reshape(len(r.slots), n)
        room = -(-sizes.sum(axis=1) // ALIGN) * ALIGN
        starts = arena.address(int(room.sum())) + np.cumsum(room) - room
        for slot, start, size in zip(r.slots, starts, sizes):
            self.frames[:, slot.word] = start + np.cumsum(size) - size
        for word, address in region._weights():
            self.frames[:, word] = address
        self.results = []          # word, element type, first element of each context (and the end), bytes to it
        for word, t in r.outputs:
            counts = [int(np.prod(stored_shape(t, s), dtype=np.int64)) for s in syms]
            firsts = np.cumsum([0, *counts])
            dtype = np.dtype(t.dtype.storage)
            self.results.append((word, dtype, firsts.tolist(), firsts[:-1] * dtype.itemsize))
        self.call = native.bind(self.frames, region.nthreads)

    def fresh(self) -> dict[int, tuple[np.ndarray, list[int]]]:
        """New memory for the results of all contexts: word -> (one array, first element of each context)."""
        out = {}
        for word, dtype, firsts, offsets in self.results:
            a = new_array([firsts[-1]], dtype)
            self.frames[:, word] = a.__array_interface__["data"][0] + offsets
            out[word] = (a, firsts)
        return out


class _Arena:
    """Memory for temporaries; `number` changes when it had to move."""

    def __init__(self) -> None:
        self.memory, self.number = new_array([ALIGN], np.uint8), 0

    def address(self, nbytes: int) -> int:
        """Where `nbytes` bytes lie, aligned."""
        if self.memory.nbytes < nbytes + ALIGN:
            self.memory, self.number = new_array([nbytes + ALIGN], np.uint8), self.number + 1
        return -(-self.memory.ctypes.data // ALIGN) * ALIGN


class _Share:
    """The results of one context: word -> its part of the array."""
    __slots__ = ("arrays", "context")

    def __init__(self, arrays: dict[int, tuple[np.ndarray, list[int]]], context: int):
        self.arrays, self.context = arrays, context

    def __getitem__(self, word: int) -> np.ndarray:
        a, firsts = self.arrays[word]
        return a[firsts[self.context]:firsts[self.context + 1]]


class Outcome:
    """One context's part of a region that was run; `leave` writes its registers."""
    __slots__ = ("compiled", "entry", "frame", "share", "held")

    def __init__(self, compiled: CompiledRegion, entry: Any, frame: np.ndarray, share: _Share, held: Held):
        self.compiled, self.entry, self.frame, self.share, self.held = compiled, entry, frame, share, held

    @property
    def info(self) -> ExitInfo | None:
        """The exit taken; None: abandoned."""
        number = int(self.frame[FrameWord.EXIT])
        return None if number == self.compiled.region.abandon else self.compiled.region.exits[number]

    @property
    def retired(self) -> int:
        return int(self.frame[FrameWord.RETIRED])

    def leave(self) -> tuple[ExitInfo | None, int]:
        return self.compiled.leave(self.frame, self.entry.regs, self.share, self.held, self.entry.syms)


class BatchedRegion:
    """A compiled region for several contexts.  `items`: launches made; `joined`: those another context's served."""

    def __init__(self, compiled: CompiledRegion):
        self.compiled = compiled
        self.native = compiled.native.engine.batch(compiled.region.plan)
        self.layouts: dict[tuple, Layout] = {}
        self.arena = _Arena()
        r = compiled.region
        dims = [d for _, d in r.dims] + [s.nbytes for s in r.slots] + [d for _, t in r.outputs for d in t.shape]
        self.syms = list(dict.fromkeys(s for d in dims for s in dim_syms(d)))      # those that the layout depends on
        self.lock = threading.Lock()
        self.items = self.joined = 0

    def run(self, entries: Sequence[Any]) -> list[tuple[ExitInfo | None, int]]:
        """Enter with `entries` (m3jit.vm.jit.Parked); for each what `CompiledRegion.run` gives.

        MemoryError: nothing was done."""
        commits = self._reserve(entries)
        with self.lock:
            return [outcome.leave() for outcome in self._enter(entries, commits)]

    def run_first(self, entries: Sequence[Any]) -> tuple[tuple[ExitInfo | None, int], list["Outcome"], int]:
        """The same, leaving with the first alone: its result, the others' outcomes, the launches that were joined."""
        commits, before = self._reserve(entries), self.joined
        with self.lock:
            first, *others = self._enter(entries, commits)
            for outcome in others:
                outcome.frame = outcome.frame.copy()           # the next entry uses the frames again
            return first.leave(), others, self.joined - before

    def _reserve(self, entries: Sequence[Any]) -> list[dict[Any, KVStream]]:
        c = self.compiled
        return [c._reserve(e.regs, e.syms) if c.region.kv else {} for e in entries]

    def _enter(self, entries: Sequence[Any], commits: list[dict[Any, KVStream]]) -> list["Outcome"]:
        layout = self._layout([e.syms for e in entries])
        fresh = layout.fresh()
        held = [self.compiled.fill(frame, e.regs, k, e.jit.stop_address, e.budget)
                for frame, e, k in zip(layout.frames, entries, commits)]
        before = layout.call.launches
        layout.call()
        after = layout.call.launches
        self.items += after[0] - before[0]
        self.joined += after[1] - before[1]
        return [Outcome(self.compiled, e, frame, _Share(fresh, i), h)
                for i, (e, frame, h) in enumerate(zip(entries, layout.frames, held))]

    def _layout(self, syms: list[dict[Sym, int]]) -> Layout:
        """The layout for these dimensions; the newest few are kept."""
        key = tuple(tuple(s[name] for name in self.syms) for s in syms)
        layout = self.layouts.pop(key, None)
        if layout is None:
            number = self.arena.number
            layout = Layout(self.compiled, self.native, syms, self.arena)
            if self.arena.number != number:              # the others' addresses are no longer valid
                self.layouts.clear()
        self.layouts[key] = layout
        while len(self.layouts) > MAX_LAYOUTS:
            del self.layouts[next(iter(self.layouts))]
        return layout


def can_batch(compiled: CompiledRegion) -> bool:
    """Is there code for several contexts of this region's backend?"""
    return hasattr(getattr(compiled.native, "engine", None), "batch")


def batched(compiled: CompiledRegion) -> BatchedRegion:
    """The region for several contexts; compiled on first use."""
    if compiled.together is None:
        with compiled.lock:
            if compiled.together is None:
                compiled.together = BatchedRegion(compiled)
    return compiled.together
