"""Recurrent states: the immutable values behind the state operands of SSM_SCAN, SSM_RESET and CONV.

A `CellState` maps (layer, part) to one F32 array, a *cell*: the part "scan" is h of SSM_SCAN, the part "window"
the last rows [taps - 1, channels] that CONV has seen.  A cell nobody has written is zero, so the number of layers is
not declared ahead.  A cell's shape is fixed by its first use.

h has shape [runs, length, d_state]: channels in runs that share what a step is made of (heads, or groups).  It is
stored in tiles of 16 neighbouring channels of a run, [tiles, d_state, 16], so that a kernel walks through it in order:

    h of run r, channel i, state n:  data[((r ceil(length / 16) + i / 16) d_state + n) 16 + i % 16]

Where a tile goes beyond its run its contents are unspecified.

Cells are never written in place: an instruction, or a compiled region when it is left, makes new ones, and the value
that holds them shares the others with the value before.  So a snapshot is a reference, and rolling back costs nothing.
The memory of a cell that nobody holds any more is kept for the next one of its size (`take`): a generated token then
allocates nothing, it writes where the token before the last one had its state.
"""
from __future__ import annotations

import math
from typing import Any, Mapping

import numpy as np

from m3jit.errors import OperandError
from m3jit.isa import spare

Key = tuple[int, str]                        # (layer, part)
SCAN, WINDOW = "scan", "window"
LANES = 16                                   # channels of a tile


def stored_shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the memory of a cell."""
    if part != SCAN:
        return shape
    runs, length, d_state = shape
    return runs * -(-length // LANES), d_state, LANES


def tiled(a: np.ndarray) -> np.ndarray:
    """h [runs, length, d_state] in tiles; lanes beyond a run are 0."""
    runs, length, d_state = a.shape
    tiles = -(-length // LANES)
    padded = np.zeros((runs, tiles * LANES, d_state), np.float32)
    padded[:, :length] = a
    return np.ascontiguousarray(padded.reshape(runs * tiles, LANES, d_state).transpose(0, 2, 1))


def untiled(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `tiled`, a copy."""
    runs, length, d_state = shape
    rows = a.reshape(runs, -1, d_state, LANES).transpose(0, 1, 3, 2).reshape(runs, -1, d_state)
    return np.ascontiguousarray(rows[:, :length])


class Memory:
    """A block of f32 elements that holds one cell or several.  It is used again when it dies: nothing may keep a view
    of `data` longer."""
    __slots__ = ("data", "address", "_block", "__weakref__")

    def __init__(self, block: spare.Block):
        self._block, self.data, self.address = block, block.data.view(np.float32), block.address

    def __del__(self, blocks: Any = spare) -> None:     # this module's names may be gone already
        try:
            block = self._block
        except AttributeError:                         # making it was interrupted
            return
        if blocks.give is not None:                    # the process ends
            blocks.give(block)


def take(elements: int) -> Memory:
    """A block with arbitrary contents.  MemoryError when there is no room for it."""
    return Memory(spare.take(4 * elements))


def elements_of(part: str, shape: tuple[int, ...]) -> int:
    """Elements of the memory of a cell."""
    return math.prod(stored_shape(part, shape))


class Cell:
    """A cell: where it begins in a block of memory, and its shape (not the memory's)."""
    __slots__ = ("memory", "start", "shape")

    def __init__(self, memory: Memory, start: int, shape: tuple[int, ...]):
        self.memory, self.start, self.shape = memory, start, shape

    @property
    def address(self) -> int:
        return self.memory.address + 4 * self.start

    def stored(self, part: str) -> np.ndarray:
        """The memory, in the shape it has; valid while the cell is alive."""
        shape = stored_shape(part, self.shape)
        return self.memory.data[self.start:self.start + math.prod(shape)].reshape(shape)


def cell_of(part: str, a: np.ndarray) -> Cell:
    """A cell with a copy of these values."""
    out = Cell(take(max(elements_of(part, a.shape), 1)), 0, a.shape)
    out.stored(part)[:] = tiled(a) if part == SCAN else a
    return out


def zero(part: str, shape: tuple[int, ...]) -> Cell:
    """A cell of zeros."""
    out = Cell(take(max(elements_of(part, shape), 1)), 0, shape)
    out.stored(part)[:] = 0
    return out


class Layout:
    """Cells behind each other in one block: `starts` in elements, by key.  States laid out alike share the object."""
    __slots__ = ("starts", "shapes", "elements")

    def __init__(self, starts: Mapping[Key, int], shapes: Mapping[Key, tuple[int, ...]], elements: int):
        self.starts, self.shapes, self.elements = starts, shapes, elements


class CellState:
    """A state value.  `with_cells` and `reset` return new values; this one stays as it is.

    shapes: shape of every cell; the same object in values that agree in it, so that compiled code compares it once.
    memory, layout: where all cells lie, when a compiled region has written all of them; else None."""
    __slots__ = ("_cells", "shapes", "memory", "layout", "__weakref__")
    kind_name = "recurrent state"

    def __init__(self, cells: Mapping[Key, Cell] | None = None, shapes: Mapping[Key, tuple[int, ...]] | None = None):
        self._cells: Mapping[Key, Cell] | None = cells if cells is not None else {}
        self.shapes = shapes if shapes is not None else {k: c.shape for k, c in self._cells.items()}
        self.memory: Memory | None = None
        self.layout: Layout | None = None

    @classmethod
    def laid_out(cls, memory: Memory, layout: Layout) -> "CellState":
        """The state whose cells lie in a block."""
        out = cls.__new__(cls)
        out._cells, out.shapes, out.memory, out.layout = None, layout.shapes, memory, layout
        return out

    @property
    def cells(self) -> Mapping[Key, Cell]:
        """(layer, part) -> cell."""
        if self._cells is None:
            self._cells = {k: Cell(self.memory, at, self.layout.shapes[k]) for k, at in self.layout.starts.items()}
        return self._cells

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks this value can reach (shared ones included)."""
        return sum({id(c.memory): c.memory.data.nbytes for c in self.cells.values()}.values())

    def array(self, layer: int, part: str = SCAN) -> np.ndarray | None:
        """A copy of a cell; None for one that was never written."""
        found = self.cells.get((layer, part))
        if found is None:
            return None
        return untiled(found.stored(part), found.shape) if part == SCAN else found.stored(part).copy()

    def fits(self, layer: int, part: str, shape: tuple[int, ...]) -> bool:
        """Whether a cell of this shape may stand there."""
        return self.shapes.get((layer, part), shape) == shape

    def read(self, layer: int, part: str, shape: tuple[int, ...]) -> np.ndarray:
        """The cell's values, zero when it was never written.  OperandError when it has another shape."""
        if not self.fits(layer, part, shape):
            raise OperandError(f"the {part} of layer {layer} in this state is {list(self.shapes[layer, part])}; "
                               f"this instruction needs {list(shape)}.  SSM_RESET does not change a shape: use another "
                               "state")
        found = self.array(layer, part)
        return np.zeros(shape, np.float32) if found is None else found

    def with_cells(self, new: Mapping[Key, Cell]) -> "CellState":
        """The state with these cells in place of its own."""
        shapes = self.shapes
        if any(shapes.get(k) != c.shape for k, c in new.items()):
            shapes = {**shapes, **{k: c.shape for k, c in new.items()}}
        return CellState({**self.cells, **new}, shapes)

    def reset(self, layer: int = -1) -> "CellState":
        """All cells of a layer zero (-1: of every layer); shapes stay."""
        return self.with_cells({k: zero(k[1], c.shape) for k, c in self.cells.items() if layer in (-1, k[0])})

    def __repr__(self) -> str:
        return f"CellState({', '.join(f'{p} {k}: {list(s)}' for (k, p), s in sorted(self.shapes.items()))})"
