"""Entering a compiled region with several contexts at once.

Every temporary and every result is laid out context behind context without gaps, so that launches over rows of
neighbouring contexts are launches over the rows of all of them (`m3jit.backends.cpu.batch_region`).  What a context
brings and takes is bound as for a context alone.
"""
from __future__ import annotations

import threading
from typing import Any, Sequence

import numpy as np

from m3jit.ir.region import ExitInfo
from m3jit.ir.plan import ABANDONED
from m3jit.ir.tensor import Sym, dim_syms, eval_dim
from m3jit.isa.kv import KVStream
from m3jit.vm.array_address import address_of
from m3jit.vm.native import ALIGN, EXIT, RETIRED, CompiledRegion, Held, new_array, stored_shape

MAX_LAYOUTS = 16


class Layout:
    """Frames of some contexts with everything that depends on their dimensions alone.  Temporaries lie in `arena`,
    which all layouts of a region use, one at a time."""

    def __init__(self, region: CompiledRegion, native: Any, syms: Sequence[dict[Sym, int]], arena: "_Arena"):
        r, n = region.region, len(syms)
        self.known: list[dict[Any, Any]] = [{} for _ in syms]        # addresses of page tables in the frames
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
        self.results = []          # word, element type, shape or part of each context, elements, bytes before each
        for word, t in r.outputs:
            dtype = np.dtype(t.dtype.storage)
            shapes = [tuple(stored_shape(t, s)) for s in syms]
            firsts = np.cumsum([0, *(int(np.prod(shape, dtype=np.int64)) for shape in shapes)])
            parts: Any = list(zip(firsts.tolist(), firsts[1:].tolist(), shapes))
            if len(set(shapes)) == 1 and shapes[0]:    # elements of one dimension would be copies
                parts = (n, *shapes[0])
            self.results.append((word, dtype, parts, int(firsts[-1]), firsts[:-1] * dtype.itemsize))
        self.words = [word for word, *_ in self.results]
        self.call = native.bind(self.frames, region.nthreads)

    def fresh(self) -> list[dict[int, np.ndarray]]:
        """New memory for the results of all contexts: for each, word -> its array."""
        columns = []
        for word, dtype, parts, count, offsets in self.results:
            a = new_array([count], dtype)
            self.frames[:, word] = address_of(a) + offsets
            columns.append(a.reshape(parts) if parts.__class__ is tuple else
                           [a[start:stop].reshape(shape) for start, stop, shape in parts])
        return [dict(zip(self.words, arrays)) for arrays in zip(*columns)] if columns else [{}] * len(self.frames)


class _Arena:
    """Memory for temporaries; `number` changes when it had to move."""

    def __init__(self) -> None:
        self.memory, self.number = new_array([ALIGN], np.uint8), 0

    def address(self, nbytes: int) -> int:
        """Where `nbytes` bytes lie, aligned."""
        if self.memory.nbytes < nbytes + ALIGN:
            self.memory, self.number = new_array([nbytes + ALIGN], np.uint8), self.number + 1
        return -(-self.memory.ctypes.data // ALIGN) * ALIGN


class Outcome:
    """One context's part of a region that was run; `leave` writes its registers."""
    __slots__ = ("compiled", "entry", "frame", "fresh", "held")

    def __init__(self, compiled: CompiledRegion, entry: Any, frame: np.ndarray, fresh: dict[int, np.ndarray],
                 held: Held):
        self.compiled, self.entry, self.frame, self.fresh, self.held = compiled, entry, frame, fresh, held

    @property
    def info(self) -> ExitInfo | None:
        """The exit taken; None: abandoned."""
        number = int(self.frame[EXIT])
        return None if number == ABANDONED else self.compiled.region.exits[number]

    @property
    def retired(self) -> int:
        return int(self.frame[RETIRED])

    def leave(self) -> tuple[ExitInfo | None, int]:
        return self.compiled.leave(memoryview(self.frame), self.entry.regs, self.fresh, self.held, self.entry.syms)


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

    def run(self, entries: Sequence[Any], whole: bool = False) -> list[tuple[ExitInfo | None, int]]:
        """Enter with `entries` (m3jit.vm.jit.Parked); for each what `CompiledRegion.run` gives.  When the stop word of
        one machine becomes urgent, nothing is done for any who has not left (whole: they go on).

        MemoryError: nothing was done."""
        commits = self._reserve(entries)
        with self.lock:
            layout, fresh, held = self._enter(entries, commits, whole)
            return self._leave(entries, layout.frames, fresh, held)

    def _leave(self, entries: Sequence[Any], frames: np.ndarray, fresh: list[dict[int, np.ndarray]],
               held: list[Held]) -> list[tuple[ExitInfo | None, int]]:
        """Write the registers of all contexts; those that took one exit are read from their frames together."""
        c = self.compiled
        numbers, retired = frames[:, EXIT].tolist(), frames[:, RETIRED].tolist()
        out: list[tuple[ExitInfo | None, int]] = [(None, 0)] * len(entries)
        for number in dict.fromkeys(numbers):
            if number == ABANDONED:
                continue
            way, rows = c.way(number), [i for i, n in enumerate(numbers) if n == number]
            for i, found in zip(rows, way.numbers(frames if len(rows) == len(frames) else frames[rows])):
                e = entries[i]
                c.write_back(e.regs, way, found, fresh[i], held[i], e.syms, retired[i])
                out[i] = (way.info, retired[i])
        return out

    def run_first(self, entries: Sequence[Any]) -> tuple[tuple[ExitInfo | None, int], list["Outcome"], int]:
        """The same, leaving with the first alone: its result, the others' outcomes, the launches that were joined."""
        commits, before = self._reserve(entries), self.joined
        with self.lock:
            layout, fresh, held = self._enter(entries, commits)
            first, *others = map(Outcome, [self.compiled] * len(entries), entries, layout.frames, fresh, held)
            for outcome in others:
                outcome.frame = outcome.frame.copy()           # the next entry uses the frames again
            return first.leave(), others, self.joined - before

    def _reserve(self, entries: Sequence[Any]) -> list[dict[Any, KVStream]]:
        c = self.compiled
        return [c._reserve(e.regs, e.syms) if c.region.kv else {} for e in entries]

    def _enter(self, entries: Sequence[Any], commits: list[dict[Any, KVStream]], whole: bool = False
               ) -> tuple[Layout, list[dict[int, np.ndarray]], list[Held]]:
        layout = self._layout([e.syms for e in entries])
        fresh = layout.fresh()
        held = self.compiled.fill_all(layout.frames, entries, commits, layout.known)
        before, stop = layout.call.launches, layout.call.stop
        words = {} if whole else dict.fromkeys(e.jit.machine.stop for e in entries)
        stop[0] = 0
        try:
            for word in words:
                word.reach(stop)
            layout.call()
        finally:
            for word in words:
                word.reach(None)
        after = layout.call.launches
        self.items += after[0] - before[0]
        self.joined += after[1] - before[1]
        return layout, fresh, held

    def _layout(self, syms: list[dict[Sym, int]]) -> Layout:
        """The layout for these dimensions; the newest few are kept."""
        key = tuple(tuple(s[name] for name in self.syms) for s in syms) if self.syms else (len(syms),)
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
