"""Writing a launch plan: memory and words of the frame, launches with the barriers between them.

The driver (m3jit.ir.lower) goes over the region and hands this to the kernel library (m3jit.kernels.lowering): a
lowering function asks for the memory of its node's arguments and result and appends launches.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

from m3jit.ir.loop import Kernel
from m3jit.ir.plan import Barrier, Copy, FrameWord, Launch, PlanBlock, Scalar
from m3jit.ir.region import KvUse, Slot, Weight
from m3jit.ir.tensor import Dim, Node, dim_add
from m3jit.ir.trace_recurrent import is_cell
from m3jit.isa.kv import KVGeometry

REPLICATED_BYTES = 16384        # results up to this size may be left to one thread
SPARE_SLOTS = 3                 # small temporaries rotate among a few slots, so that reuse rarely needs a barrier


@dataclass(eq=False, slots=True)
class Memory:
    """A piece of memory reached through frame word `word`.  kind: input weight output temp kv."""
    word: int
    kind: str
    nbytes: Dim = 0
    slot: Slot | None = None


class PlanWriter:
    """The plan of one region while it is written: kernels' lowering functions use the methods of the first half."""

    def __init__(self) -> None:
        self.words = int(FrameWord.FIRST_FREE)
        self.memory: dict[Any, Memory] = {}                 # node (or (node, part)) -> memory
        self.view_of: dict[Node, Node] = {}
        self.scalar_of: dict[Node, Scalar] = {}
        self.dim_words: dict[Dim, int] = {}
        self.key_words: dict[Any, int] = {}
        self.weights: dict[Any, tuple[int, Weight, str]] = {}
        self.slots: list[Slot] = []
        self.free: list[Slot] = []
        self.scratches: list[Memory] = []                   # of the node being lowered
        self.kv: dict[tuple, KvUse] = {}
        self.pointers: list[tuple[Any, int]] = []
        self.cells_in: list[tuple[Any, int]] = []
        self.scalars: list[tuple[Any, int, str]] = []
        self.null_word = -1
        self.has_launches = False
        self.current: PlanBlock | None = None
        self.written: set[int] = set()
        self.read: set[int] = set()
        self.node: Node | None = None
        self.kernel_cache: dict[str, Kernel] = {}

    # -- for kernels' lowering functions ----------------------------------------------------------------------------
    def emit(self, s: Any) -> Any:
        self.current.body.append(s)
        return s

    def new_word(self) -> int:
        self.words += 1
        return self.words - 1

    def pointer(self, m: Memory) -> Scalar:
        return self.emit(Scalar("frame", "ptr", (), {"word": m.word}))

    def of(self, node: Node, part: str = "") -> Memory:
        """Memory of a tensor node (or of a named part of an opaque one)."""
        while node in self.view_of:
            node = self.view_of[node]
        if node.op == "weight":
            return self.weight(node.attrs["tensor"], "raw")
        return self.memory[(node, part) if part else node]

    def weight(self, weight: Weight, layout: str) -> Memory:
        """A constant in a given layout; the runtime prepares it."""
        key = (tuple(map(id, weight)) if isinstance(weight, tuple) else id(weight), layout)
        if key not in self.weights:
            self.weights[key] = (self.new_word(), weight, layout)
        return Memory(self.weights[key][0], "weight")

    def out(self, node: Node, part: str = "", nbytes: Dim | None = None) -> Memory:
        """Allocates the memory of a result."""
        size = node.type.nbytes() if nbytes is None else nbytes
        key = (node, part) if part else node
        if key not in self.memory:
            self.memory[key] = self.temp(size)
        return self.memory[key]

    def adopt(self, node: Node, source: Node, part: str) -> None:
        """Memory of a part of `source` becomes the memory of `node` (an exit's memory: copied there)."""
        m = self.memory.pop((source, part))
        if node not in self.memory:
            self.memory[node] = m
            return
        self.barrier()
        self.copy(self.memory[node], m, node.type.nbytes())
        self.has_launches = True
        self.emit(Barrier())

    def scratch(self, nbytes: Dim) -> Memory:
        """Memory for the node being lowered alone."""
        m = self.temp(nbytes)
        self.scratches.append(m)
        return m

    def dim(self, d: Dim) -> Scalar:
        """A dimension as an i64 scalar."""
        if isinstance(d, int):
            return Scalar("const", "i64", (), {"value": d})
        if d not in self.dim_words:
            self.dim_words[d] = self.new_word()
        return self.emit(Scalar("frame", "i64", (), {"word": self.dim_words[d]}))

    def null(self) -> Scalar:
        """A null pointer (base of tables that hold addresses)."""
        if self.null_word < 0:
            self.null_word = self.new_word()
        return self.emit(Scalar("frame", "ptr", (), {"word": self.null_word}))

    def i64(self, v: int) -> Scalar:
        return Scalar("const", "i64", (), {"value": v})

    def f32(self, v: float) -> Scalar:
        return Scalar("const", "f32", (), {"value": v})

    def scalar(self, n: Node) -> Scalar:
        """A scalar node's value here."""
        if n.op == "const":
            return Scalar("const", n.type.name, (), {"value": n.attrs["value"]})
        if n.op == "true":
            return Scalar("const", "b1", (), {"value": True})
        if n.op == "dim":
            return self.dim(n.attrs["dim"])
        if n.op == "input":
            word = self.input_word(n)
            return self.emit(Scalar("frame", n.type.name, (), {"word": word}))
        return self.scalar_of[n]

    def element(self, m: Memory, dtype: str, index: Scalar, type: str) -> Scalar:
        """Read one element of memory written before (a barrier is placed when needed)."""
        if m.word in self.written:
            self.barrier()
        self.read.add(m.word)
        return self.emit(Scalar("element", type, (self.pointer(m), index), {"dtype": dtype}))

    def launch(self, kernel: Kernel, args: list[Any], reads: list[Memory], writes: list[Memory],
               small: bool = False, rows: int = -1, strides: Mapping[int, Dim] | None = None) -> None:
        """Append a launch; args: Memory (pointer) or Scalar.  A barrier goes before it when it depends on a launch
        since the last one.  small: if what it writes is small too, it is not shared between threads and needs no
        barrier afterwards.  rows: the argument that counts rows, when each row of the result depends on the same rows
        of the arguments in `strides` (argument -> bytes of a row) and on everything else as a whole (`Launch.rows`)."""
        r, w = {m.word for m in reads}, {m.word for m in writes}
        replicated = small and self.is_small(writes) and not r & w
        if r & self.written or w & (self.written | self.read):
            self.barrier()
        self.read |= r
        if replicated:
            self.read |= w              # no barrier for its readers; a later writer waits for them
        else:
            self.written |= w
        kernel = self.kernel_cache.setdefault(kernel.digest(), kernel)
        scalars = [self.pointer(a) if isinstance(a, Memory) else a for a in args]
        pc, op = self.node.where if self.node is not None else (-1, "")
        by_row = {i: self.dim(d) for i, d in (strides or {}).items()}
        self.emit(Launch(kernel, scalars, f"{op} {pc:#x}" if pc >= 0 else op, True, replicated, rows, by_row))
        self.has_launches = True

    @staticmethod
    def is_small(writes: list[Memory]) -> bool:
        return all(isinstance(m.nbytes, int) and m.nbytes <= REPLICATED_BYTES for m in writes)

    def barrier(self) -> None:
        if self.read or self.written:
            self.emit(Barrier())
        self.read, self.written = set(), set()

    def kv_use(self, key: Any, layer: int, geometry: KVGeometry, dtype: str, rows: Dim = 0) -> Memory:
        """The page table of one layer of a stream; `rows` more rows are to be reserved before entry."""
        k = (key, layer)
        if k not in self.kv:
            self.kv[k] = KvUse(key, layer, self.new_word(), geometry, dtype, 0)
        self.kv[k].rows = dim_add(self.kv[k].rows, rows)
        return Memory(self.kv[k].table_word, "kv")

    def copy(self, dst: Memory, src: Memory, nbytes: Dim) -> None:
        self.emit(Copy(self.pointer(dst), self.pointer(src), self.dim(nbytes)))

    # -- memory planning ----------------------------------------------------------------------------------------------
    def temp(self, nbytes: Dim) -> Memory:
        """A temporary of that many bytes, until `release`."""
        # the slot that has been free longest: most likely nobody reads it since the last barrier
        same = [s for s in self.free if s.nbytes == nbytes]
        if len(same) > (SPARE_SLOTS if isinstance(nbytes, int) and nbytes <= REPLICATED_BYTES else 0):
            self.free.remove(same[0])
            return Memory(same[0].word, "temp", nbytes, same[0])
        s = Slot(self.new_word(), nbytes)
        self.slots.append(s)
        return Memory(s.word, "temp", nbytes, s)

    def release(self, m: Memory) -> None:
        """Others may use the memory of a temporary from here on."""
        if m.slot is not None and m.slot not in self.free:
            self.free.append(m.slot)

    def input_word(self, n: Node) -> int:
        """The frame word in which a live register comes in."""
        key = n.attrs["key"]
        if key not in self.key_words:
            self.key_words[key] = self.new_word()
            if n.is_tensor:
                (self.cells_in if is_cell(key) else self.pointers).append((key, self.key_words[key]))
            else:
                self.scalars.append((key, self.key_words[key], n.type.name))
        return self.key_words[key]
