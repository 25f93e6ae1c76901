"""Entering and leaving compiled regions: binds registers to the frame of a region, runs it, writes registers back."""
from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter, setitem
from sys import getrefcount
from typing import Any, Callable, Iterable, Mapping, Protocol, Sequence

import numpy as np

from m3jit.ir.region import ExitInfo, Region, Weight
from m3jit.ir.plan import ABANDONED, FrameWord
from m3jit.ir.tensor import DimExpr, F64T, I64T, OpaqueType, ScalarType, Sym, TensorType, Type, eval_dim
from m3jit.ir.trace_model import kv_type
from m3jit.ir.trace_recurrent import CellsType
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.types import Tensor
from m3jit.kernels.lowering import KV_BLOCKS
from m3jit.vm.array_address import address_of
from m3jit.vm.region_cells import RegionCells
from m3jit.vm.region_exits import Numbers, Way
from m3jit.vm.region_streams import RegionStreams

ALIGN = 64
MAX_LAYOUTS = 6                 # frames are kept for this many combinations of dimensions per region
BLOCK_STEP = 16                 # attention buffers grow in steps of this many blocks of 64 keys
MAX_SPARE, SPARE_BYTES = 3, 1 << 22      # arrays for results are kept for so many entries, of so many bytes each
NO_BUDGET = 2 ** 63 - 1
STOP, BUDGET, EXIT, RETIRED = map(int, (FrameWord.STOP, FrameWord.BUDGET, FrameWord.EXIT, FrameWord.RETIRED))


class Registers(Protocol):
    """A context as compiled code sees it.  Keys: see m3jit.ir.lift."""
    def get(self, key: Any) -> Any: ...
    def pick(self, wanted: "Guards | Picked") -> Sequence[Any]: ...         # the values of wanted.keys
    def write(self, way: Way, values: list[Any], states: list[tuple[Any, Any]], retired: int) -> None: ...


def type_of_value(key: Any, value: Any) -> Type | None:
    """Type of a live-in: the first dimension of a tensor is symbolic unless it is 0 or 1."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        shape = value.shape
        fixed = (isinstance(key, tuple) and key[0] == "V") or (value.dtype.is_block and len(shape) == 1)
        if shape and shape[0] >= 2 and not fixed:
            return TensorType(value.dtype, (Sym(f"n_{name_of(key)}"), *shape[1:]))
        return TensorType(value.dtype, shape)
    if isinstance(value, bool):
        return OpaqueType("bool")
    if isinstance(value, int):
        return I64T
    if isinstance(value, float):
        return F64T
    if isinstance(value, KVStream):
        return kv_type(value.geometry, value.dtype.name)
    if isinstance(value, CellState):
        return CellsType("cells", value.shapes)
    return OpaqueType(type(value).__name__)


def name_of(key: Any) -> str:
    return f"{key[0]}{key[1]}" if isinstance(key, tuple) and len(key) == 2 else str(key).replace(" ", "")


def binds(shape: Sequence[int], dims: Sequence[Any], syms: dict[Sym, int]) -> bool:
    """Does a shape have these dimensions?  Binds symbols, which are 2 at least."""
    if len(shape) != len(dims):
        return False
    for have, want in zip(shape, dims):
        if want.__class__ is int:
            if have != want:
                return False
        elif have < 2 or syms.setdefault(want, have) != have:
            return False
    return True


def fits(value: Any, t: Type | None, syms: dict[Sym, int]) -> bool:
    """Does a live-in value have type t?  Binds symbols."""
    if isinstance(t, TensorType):
        return type(value) is Tensor and value.dtype is t.dtype and binds(value.shape, t.shape, syms)
    if t is None:
        return value is None
    if isinstance(t, ScalarType):
        return type(value) is (int if t == I64T else float)
    return type_of_value(None, value) == t


def from_general(keys: Sequence[Any]) -> Callable[[Any], Any] | None:
    """What picks the values of these keys from a context's general registers; None: not all are such."""
    if len(keys) < 2 or not all(isinstance(k, tuple) and k[0] == "R" for k in keys):
        return None
    return itemgetter(*(k[1] for k in keys))


class Picked:
    """Keys whose values are picked together (`Registers.pick`)."""
    __slots__ = ("keys", "pick")

    def __init__(self, keys: Sequence[Any]):
        self.keys, self.pick = keys, from_general(keys)


class Guards:
    """The types of a region's live-ins: `keys` and the classes their values have (`kinds`), then shapes and dtypes.

    pick: the values from a context's general registers, where all keys are such (None: not all)."""

    def __init__(self, types: list[tuple[Any, Type | None]]):
        known = [(k, t) for k, t in types if t is None or isinstance(t, ScalarType | TensorType)]
        self.others = [(k, t) for k, t in types if (k, t) not in known]
        self.keys = [k for k, _ in known]
        self.kinds = tuple(type(None) if t is None else Tensor if isinstance(t, TensorType) else int if t == I64T
                           else float for _, t in known)
        tensors = [(i, t) for i, (_, t) in enumerate(known) if isinstance(t, TensorType)]
        symbolic = [not all(isinstance(d, int) for d in t.shape) for _, t in tensors]
        self.symbolic, self.fixed = ([(i, t.dtype, tuple(t.shape)) for (i, t), named in zip(tensors, symbolic)
                                      if named is wanted] for wanted in (True, False))
        self.pick = from_general(self.keys)

    def match(self, regs: Registers) -> dict[Sym, int] | None:
        """Symbol values when all live-ins fit, else None."""
        values = regs.pick(self)
        if tuple(map(type, values)) != self.kinds:
            return None
        for i, dtype, shape in self.fixed:
            v = values[i]
            if v.dtype is not dtype or v.shape != shape:
                return None
        syms: dict[Sym, int] = {}
        for i, dtype, dims in self.symbolic:
            v = values[i]
            if v.dtype is not dtype or not binds(v.shape, dims, syms):
                return None
        for key, other in self.others:
            if not fits(regs.get(key), other, syms):
                return None
        return syms


@dataclass(eq=False, slots=True)
class Layout:
    """A frame with everything filled in that depends on the dimensions alone, and its arena.

    words: the frame's.  known: the addresses of page tables that are in it, by state register."""
    frame: np.ndarray
    arena: np.ndarray
    call: Callable[[], int]
    words: memoryview
    known: dict[Any, Any]
    owner: list | None = None


@dataclass(eq=False, slots=True)
class Held:
    """What an entry must keep while the region runs, and needs afterwards."""
    alive: list[Any]
    commits: dict[Any, KVStream]
    cells: Any


class CompiledRegion:
    """A region compiled for one backend, with the types of its live-ins as guards."""

    def __init__(self, region: Region, native: Any, pointer_of_weight: Callable[[Weight, str], int], nthreads: int):
        self.region, self.native, self.nthreads = region, native, nthreads
        self.pointer_of_weight = pointer_of_weight
        self.types = [(k, n.type) for k, n in region.function.inputs.items()
                      if not (isinstance(k, tuple) and k[0] in ("kvlen", "cell"))]
        self.types += [(k, None) for k in sorted(region.function.nulls, key=repr)]
        self.guards = Guards(self.types)
        self.equal = tuple(region.function.guards)       # dimensions
        self.cells = RegionCells(region.cells_in, region.cells_out)
        self.scalars = [s for s in region.scalars if s[0][0] != "kvlen"]
        self.integers, self.floats = (Picked([k for k, _, how in self.scalars if (how == "i64") is integer])
                                      for integer in (True, False))
        self.integer_words, self.float_words = ([w for _, w, how in self.scalars if (how == "i64") is integer]
                                                for integer in (True, False))
        self.streams = RegionStreams(region.kv, [(k[1], k[2], w) for k, w, _ in region.scalars if k[0] == "kvlen"],
                                     region.function.present)
        self.results = [(word, None if any(isinstance(d, Sym | DimExpr) for d in t.shape) else stored_shape(t, {}), t)
                        for word, t in region.outputs]           # word, shape where it is always the same, type
        self.fixed: Any = None                   # words, shapes and dtypes of results that are used again
        if self.results and all(shape is not None for _, shape, _ in self.results):
            self.fixed = tuple(zip(*((word, shape, t.dtype.storage) for word, shape, t in self.results)))
        self.spare: deque[Results] = deque()     # of fixed shapes, the one that was used last at the end
        self.ways: dict[int, Way] = {}           # by exit, made when first taken
        self.layouts: dict[tuple, list[Layout]] = {}
        self.lock = threading.Lock()
        self.together: Any = None                # the same for several contexts at once (native_batch.py), on first use
        self.one_round = bool(region.kv) and appends_in_a_loop(region.function)
        self.weight_words: list[tuple[int, int]] | None = None
        self.keep: list[Any] = []
        self.entries = 0
        self.seconds = 0.0
        self.retired = 0

    def matches(self, regs: Registers) -> dict[Sym, int] | None:
        """Symbol values when all live-ins fit, else None."""
        syms = self.guards.match(regs)
        if syms is None:
            return None
        seen: dict[int, Any] = {}
        if self.region.kv and not self.streams.match(regs, seen):
            return None
        if self.cells.states and not self.cells.match(regs, seen):
            return None
        for a, b in self.equal:
            if eval_dim(a, syms) != eval_dim(b, syms):
                return None
        return syms

    def rows(self, syms: dict[Sym, int]) -> int:
        """Most rows an entry appends to a stream's layer (`RegionStreams.most_rows`)."""
        return self.streams.most_rows(syms)

    def _weights(self) -> list[tuple[int, int]]:
        if self.weight_words is None:
            self.weight_words = [(word, self.pointer_of_weight(t, layout)) for word, t, layout in self.region.weights]
        return self.weight_words

    def _new_layout(self, syms: dict[Sym, int]) -> Layout:
        r = self.region
        frame = np.zeros(r.plan.words, np.int64)
        for word, d in r.dims:
            frame[word] = eval_dim(d, syms)
        sizes = [-(-max(eval_dim(s.nbytes, syms), 1) // ALIGN) * ALIGN for s in r.slots]
        arena = new_array([sum(sizes) + ALIGN], np.uint8)
        at = -(-arena.ctypes.data // ALIGN) * ALIGN
        for s, size in zip(r.slots, sizes):
            frame[s.word] = at
            at += size
        for word, address in self._weights():
            frame[word] = address
        call = self.native.bind(frame, self.nthreads)
        return Layout(frame, arena, call, memoryview(frame), {})

    def run(self, regs: Registers, syms: dict[Sym, int], stop_address: int,
            budget: int = NO_BUDGET) -> tuple[ExitInfo | None, int]:
        """Enter; returns (exit, retired instructions); exit None: abandoned, registers are unchanged.

        Registers are written back according to the exit taken."""
        try:
            commits = self._reserve(regs, syms) if self.region.kv else {}
            results = self._results(syms) if self.results else NOTHING
            layout = self._layout(syms)
            words = layout.words
            held = self.fill(layout.frame, words, regs, commits, layout.known, stop_address, budget)
        except MemoryError:                            # interpreted, the instruction at fault says what it needs
            return None, 0
        if results.words:
            put(words, results.words, results.addresses)
        layout.call()
        left = self.leave(words, regs, results.arrays, held, syms)
        layout.owner.append(layout)
        if results.unused is not None and len(self.spare) < MAX_SPARE:
            self.spare.append(results)
        return left

    def fill(self, frame: np.ndarray, words: memoryview, regs: Registers, commits: dict[Any, KVStream],
             known: dict[Any, Any], stop_address: int, budget: int) -> "Held":
        """Put what a context brings into a frame, whose words they are.  The result keeps it alive.  known: see
        `RegionStreams.fill`.  MemoryError: no room for its cells."""
        cells = self.cells.enter(regs, frame) if self.cells.states else None
        if commits:
            self.streams.fill(frame, words, commits, known)
        alive = []
        for k, word in self.region.pointers:
            t = regs.get(k)
            alive.append(t)
            words[word] = address_of(t.data)
        if self.integer_words:
            put(words, self.integer_words, regs.pick(self.integers))
        if self.float_words:
            frame.view(np.float64)[self.float_words] = regs.pick(self.floats)
        words[STOP] = stop_address
        words[BUDGET] = 1 if self.one_round else budget        # rows are reserved for one round
        return Held(alive, commits, cells)

    def fill_all(self, frames: np.ndarray, entries: Sequence[Any], commits: Sequence[dict[Any, KVStream]],
                 known: list[dict[Any, Any]]) -> list["Held"]:
        """`fill` for frames [contexts, words], of m3jit.vm.jit.Parked.  known: see `RegionStreams.fill_all`."""
        if self.cells.states:
            return [self.fill(frame, memoryview(frame), e.regs, k, has, e.jit.stop_address, e.budget)
                    for frame, e, k, has in zip(frames, entries, commits, known)]
        regs = [e.regs for e in entries]
        if self.region.kv:
            self.streams.fill_all(frames, commits, known)
        alive: list[list[Any]] = [[] for _ in entries]
        for k, word in self.region.pointers:
            tensors = [r.get(k) for r in regs]
            frames[:, word] = [address_of(t.data) for t in tensors]
            for kept, t in zip(alive, tensors):
                kept.append(t)
        if self.integers.keys:
            frames[:, self.integer_words] = [r.pick(self.integers) for r in regs]
        if self.floats.keys:
            frames.view(np.float64)[:, self.float_words] = [r.pick(self.floats) for r in regs]
        frames[:, STOP] = [e.jit.stop_address for e in entries]
        frames[:, BUDGET] = 1 if self.one_round else [e.budget for e in entries]
        return [Held(kept, k, None) for kept, k in zip(alive, commits)]

    def leave(self, words: memoryview, regs: Registers, fresh: Mapping[int, np.ndarray], held: "Held",
              syms: dict[Sym, int]) -> tuple[ExitInfo | None, int]:
        """(exit, retired instructions) of a frame that was run, its registers written back; exit None: abandoned."""
        number, retired = words[EXIT], words[RETIRED]
        if number == ABANDONED:
            return None, 0
        way = self.ways.get(number) or self.way(number)
        self.write_back(regs, way, way.numbers_in(words), fresh, held, syms, retired)
        return way.info, retired

    def way(self, number: int) -> Way:
        """An exit, ready to be left by."""
        way = self.ways.get(number)
        if way is None:
            shapes = {word: tuple(shape) for word, shape, _ in self.results if shape is not None}
            way = self.ways[number] = Way(self.region.exits[number], self.streams, shapes)
        return way

    def write_back(self, regs: Registers, way: Way, numbers: Numbers, fresh: Mapping[int, np.ndarray], held: "Held",
                   syms: dict[Sym, int], retired: int) -> None:
        """Give the registers what they hold behind an exit: everything is made before anything is written.  retired:
        instructions to count with it."""
        values = way.values(regs, numbers, fresh, syms)
        states: Any = ()
        if held.commits or held.cells is not None:
            found: dict[Any, Any] = way.streams(numbers, held.commits)
            if held.cells is not None:
                found |= held.cells.leave(way.info.stores)
            states = [(k, found[k]) for k in self.region.function.states if k in found]
        regs.write(way, values, states, retired)

    def _results(self, syms: dict[Sym, int]) -> "Results":
        """Arrays for the tensors the region leaves behind.  MemoryError: there is no room for them."""
        if self.fixed is None:
            return Results([word for word, *_ in self.results],
                           [new_array(shape if shape is not None else stored_shape(t, syms), t.dtype.storage)
                            for word, shape, t in self.results])
        found = None
        if self.spare:
            try:
                found = self.spare.popleft()
            except IndexError:                         # another thread has it
                pass
        if found is not None and found.references() == found.unused:
            return found                               # no tensor, no view and nobody else has any of them
        words, shapes, dtypes = self.fixed
        new = Results(words, [*map(new_array, shapes, dtypes)])
        if sum(a.nbytes for a in new.arrays.values()) <= SPARE_BYTES:
            new.unused = new.references()
        if found is not None and len(self.spare) < MAX_SPARE - 1:      # a context has it still, and may let go of it
            self.spare.append(found)
        return new

    def _layout(self, syms: dict[Sym, int]) -> Layout:
        """A free frame for these dimensions; of rarely used dimensions only the newest few are kept."""
        key = tuple(syms.values())
        free = self.layouts.get(key)
        if free:
            try:
                return free.pop()
            except IndexError:                         # another thread has it
                pass
        with self.lock:
            free = self.layouts.get(key)
            if free is None:
                while len(self.layouts) >= MAX_LAYOUTS:
                    del self.layouts[next(iter(self.layouts))]
                free = self.layouts[key] = []
            if free:
                return free.pop()
        layout = self._new_layout(syms)
        layout.owner = free
        return layout

    def _reserve(self, regs: Registers, syms: dict[Sym, int]) -> dict[Any, KVStream]:
        """Streams with room for the rows the region appends; binds KV_BLOCKS."""
        streams, blocks = self.streams.reserve(regs, syms)
        syms[KV_BLOCKS] = -(-blocks // BLOCK_STEP) * BLOCK_STEP
        return streams


class Results:
    """Arrays that take the tensors an entry leaves behind, by frame word.

    unused: how often each of the arrays is referred to while nobody else has it; None: they are not used again."""
    __slots__ = ("words", "arrays", "addresses", "unused")

    def __init__(self, words: Sequence[int], made: list[np.ndarray]):
        self.words, self.arrays, self.addresses = words, dict(zip(words, made)), [address_of(a) for a in made]
        self.unused: list[int] | None = None

    def references(self) -> list[int]:
        """How often each of the arrays is referred to."""
        return [*map(getrefcount, self.arrays.values())]


NOTHING = Results((), [])


def put(words: memoryview, places: Sequence[int], values: Iterable[int]) -> None:
    """words[place] = value for each place, by one call into C."""
    any(map(setitem, repeat(words), places, values))


def appends_in_a_loop(f: Any) -> bool:
    """Whether a block that appends to a KV stream can be executed again before the region is left."""
    return any(comes_again(block) for block in f.blocks if any(n.op == "kv_append" for n in block.nodes()))


def comes_again(block: Any) -> bool:
    """Whether a way leads from a block back to it inside the region."""
    seen: set[int] = set()
    todo = [e.target for e in block.edges()]
    while todo:
        at = todo.pop()
        if at is block:
            return True
        if id(at) not in seen:
            seen.add(id(at))
            todo += [e.target for e in at.edges()]
    return False


def new_array(shape: list[int], dtype: Any) -> np.ndarray:
    """An array with arbitrary contents; MemoryError also for sizes that no machine has."""
    try:
        return np.empty(shape, dtype)
    except (ValueError, OverflowError) as error:
        raise MemoryError(str(error)) from None


def stored_shape(t: TensorType, syms: dict[Sym, int]) -> list[int]:
    """Shape of the array that stores a tensor of this type (block types: packed bytes along the last axis)."""
    shape = [eval_dim(d, syms) for d in t.shape]
    if t.dtype.is_block:
        shape[-1] = t.dtype.row_bytes(shape[-1])
    return shape
