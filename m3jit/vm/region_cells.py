"""The recurrent states of a compiled region: which cells it reads and which it leaves behind.

A region reads cells in place and writes fresh ones; they take the place of the old ones when it is left.  So it can be
given up at any time, and a snapshot that holds the old value sees nothing.  What a region writes of a state lies in one
block of memory: a state all of whose cells it has written is that block and a layout that is made once.
"""
from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from m3jit.ir.region import Store
from m3jit.isa.cells import Cell, CellState, Key, Layout, Memory, elements_of, take, zero

EMPTY = CellState()
ALIGN = 16                                       # elements between the beginnings of cells: whole cache lines
MAX_KNOWN = 8                                    # layouts of states that are remembered


class RegionCells:
    """The cells of one region.  Keys: ("cell", state register, layer, part, shape)."""

    def __init__(self, reads: Sequence[tuple[Any, int]], writes: Sequence[tuple[Any, int]]):
        self.states = list(dict.fromkeys(key[1] for key, _ in (*reads, *writes)))
        self.shares = [_Share(s, [r for r in reads if r[0][1] == s], [w for w in writes if w[0][1] == s])
                       for s in self.states]

    def match(self, regs: Any, seen: dict[int, Any]) -> bool:
        """Whether the states of these registers fit.  seen: states other registers name, by identity."""
        for share in self.shares:
            state = regs.get(share.register)
            if state is None:
                continue
            if state.__class__ is not CellState or seen.setdefault(id(state), share.register) != share.register:
                return False                     # two registers name one state: what it holds depends on their order
            if state.shapes is not share.known_shapes:
                if any(state.shapes.get(at, shape) != shape for at, shape in share.shapes):
                    return False
                share.known_shapes = state.shapes
        return True

    def enter(self, regs: Any, frame: np.ndarray) -> "Entered":
        """Put the addresses of all cells into a frame.  MemoryError when there is no room for the fresh ones."""
        return Entered(self, [share.enter(regs.get(share.register) or EMPTY, frame) for share in self.shares])


class _Share:
    """The part of a region in one state."""

    def __init__(self, register: Any, reads: Sequence[tuple[Any, int]], writes: Sequence[tuple[Any, int]]):
        self.register = register
        self.shapes = [(key[2:4], key[4]) for key, _ in (*reads, *writes)]
        self.known_shapes: Any = None            # shapes that were found to fit
        self.reads = [(key[2:4], key[3:5]) for key, _ in reads]
        self.read_words = np.array([word for _, word in reads], np.intp)
        self.read_bytes: dict[Layout, np.ndarray | None] = {}    # where the cells lie in states of a layout, if all do
        self.zeros: dict[tuple, Cell] = {}       # (part, shape) -> what a cell nobody has written reads as
        self.write_words = np.array([word for _, word in writes], np.intp)
        self.starts: dict[int, int] = {}         # word -> element of the block
        self.elements = 0
        for key, word in writes:
            self.starts[word] = self.elements
            self.elements += -(-max(elements_of(key[3], key[4]), 1) // ALIGN) * ALIGN
        self.write_bytes = 4 * np.array(list(self.starts.values()), np.int64)
        self.ways: dict[int, Layout] = {}        # exit (its stores, by identity) -> what it leaves

    def enter(self, state: CellState, frame: np.ndarray) -> tuple[CellState, Memory | None]:
        """The state, which has to stay alive, and the block that is written."""
        if self.reads:
            offsets = None if state.layout is None else self._offsets(state.layout)
            frame[self.read_words] = state.memory.address + offsets if offsets is not None else \
                [(state.cells.get(at) or self._nothing(kind)).address for at, kind in self.reads]
        if not self.elements:
            return state, None
        memory = take(self.elements)
        frame[self.write_words] = memory.address + self.write_bytes
        return state, memory

    def _offsets(self, layout: Layout) -> np.ndarray | None:
        if layout not in self.read_bytes:
            while len(self.read_bytes) >= MAX_KNOWN:
                del self.read_bytes[next(iter(self.read_bytes))]
            inside = all(at in layout.starts for at, _ in self.reads)
            starts = [layout.starts[at] for at, _ in self.reads] if inside else None
            self.read_bytes[layout] = None if starts is None else 4 * np.array(starts, np.int64)
        return self.read_bytes[layout]

    def _nothing(self, kind: tuple[str, tuple[int, ...]]) -> Cell:
        """A cell of zeros, made once; nobody writes to it."""
        if kind not in self.zeros:
            self.zeros[kind] = zero(*kind)
        return self.zeros[kind]

    def leave(self, state: CellState, memory: Memory | None, stores: Sequence[Store]) -> CellState | None:
        """The state as an exit leaves it; None when it changes nothing."""
        layout = self.ways.get(id(stores))
        if layout is None:
            mine = [s for s in stores if s.how == "cell" and s.key[1] == self.register]
            shapes: dict[Key, tuple[int, ...]] = {s.key[2:4]: s.key[4] for s in mine}
            layout = self.ways[id(stores)] = Layout({s.key[2:4]: self.starts[s.word] for s in mine}, shapes,
                                                    self.elements)
        if not layout.starts:
            return None
        if state.shapes is layout.shapes or state.shapes.keys() <= layout.starts.keys():
            return CellState.laid_out(memory, layout)
        return state.with_cells({k: Cell(memory, at, layout.shapes[k]) for k, at in layout.starts.items()})


class Entered:
    """One run of a region: the states it came with (kept alive) and the memory it writes."""
    __slots__ = ("cells", "brought")

    def __init__(self, cells: RegionCells, brought: list[tuple[CellState, Memory | None]]):
        self.cells, self.brought = cells, brought

    def leave(self, stores: Sequence[Store]) -> dict[Any, CellState]:
        """The states as the exit leaves them, by register."""
        found = {share.register: share.leave(state, memory, stores)
                 for share, (state, memory) in zip(self.cells.shares, self.brought)}
        return {register: state for register, state in found.items() if state is not None}
