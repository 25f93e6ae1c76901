"""The recurrent states of a compiled region: which cells it reads and which it leaves behind.

A region reads cells in place and writes fresh ones; they take the place of the old ones when it is left.  So it can be
given up at any time, and a snapshot that holds the old value sees nothing.
"""
from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from m3jit.ir.lower import Store
from m3jit.isa.cells import Cell, CellState, take, zero

EMPTY = CellState()


class RegionCells:
    """The cells of one region.  Keys: ("cell", state register, layer, part, shape)."""

    def __init__(self, reads: Sequence[tuple[Any, int]], writes: Sequence[tuple[Any, int]]):
        self.reads = [(key[1], key[2:4], key[3:5]) for key, _ in reads]
        self.zeros: dict[tuple, Cell] = {}       # (part, shape) -> what a cell nobody has written reads as
        self.read_words = np.array([word for _, word in reads], np.intp)
        self.writes = [(word, key[3], key[4]) for key, word in writes]
        self.write_words = np.array([word for _, word in writes], np.intp)
        self.states = list(dict.fromkeys(key[1] for key, _ in (*reads, *writes)))
        self.shapes = {s: [(key[2:4], key[4]) for key, _ in (*reads, *writes) if key[1] == s] for s in self.states}
        self.known: dict[Any, Any] = {}          # state register -> shapes that were found to fit

    def match(self, regs: Any, seen: dict[int, Any]) -> bool:
        """Whether the states of these registers fit.  seen: states other registers name, by identity."""
        for s in self.states:
            state = regs.get(s)
            if state is None:
                continue
            if state.__class__ is not CellState or seen.setdefault(id(state), s) != s:
                return False                     # two registers name one state: what it holds depends on their order
            if state.shapes is not self.known.get(s):
                if any(state.shapes.get(at, shape) != shape for at, shape in self.shapes[s]):
                    return False
                self.known[s] = state.shapes
        return True

    def enter(self, regs: Any, frame: np.ndarray) -> "Entered":
        """Put the addresses of all cells into a frame.  MemoryError when there is no room for the fresh ones."""
        states = {s: regs.get(s) or EMPTY for s in self.states}
        fresh = {}
        if self.reads:
            frame[self.read_words] = [(states[s].cells.get(at) or self.nothing(kind)).address
                                      for s, at, kind in self.reads]
        if self.writes:
            fresh = {word: take(part, shape) for word, part, shape in self.writes}
            frame[self.write_words] = [cell.address for cell in fresh.values()]
        return Entered(states, fresh)


    def nothing(self, kind: tuple[str, tuple[int, ...]]) -> Cell:
        """A cell of zeros, made once; nobody writes to it."""
        if kind not in self.zeros:
            self.zeros[kind] = zero(*kind)
        return self.zeros[kind]


class Entered:
    """One run of a region: the states it came with (kept alive) and the cells it writes."""
    __slots__ = ("states", "fresh")

    def __init__(self, states: dict[Any, CellState], fresh: dict[int, Cell]):
        self.states, self.fresh = states, fresh

    def leave(self, stores: Sequence[Store]) -> dict[Any, CellState]:
        """The states as the exit leaves them, by register."""
        new: dict[Any, dict[tuple[int, str], Cell]] = {}
        for s in stores:
            if s.how == "cell":
                new.setdefault(s.key[1], {})[s.key[2:4]] = self.fresh[s.word]
        return {key: self.states[key].with_cells(cells) for key, cells in new.items()}
