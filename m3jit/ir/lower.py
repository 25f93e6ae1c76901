"""Lowers a region (tensor IR after the passes) to a launch plan: memory planning, barriers, launches, exits.

Primitives other than fused groups are lowered by the kernel library (`m3jit.kernels.lowering`), which is handed in:
`library[op](lowering, node)`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping

from m3jit.ir.loop import Kernel
from m3jit.ir.passes.fuse import Group
from m3jit.ir.plan import (Barrier, Branch, Copy, Exit, FrameWord, Jump, Launch, Plan, PlanBlock, Poll, Retire, Scalar,
                           StoreFrame)
from m3jit.ir.tensor import (F64T, Block, Check, CondGoto, Dim, Function, Goto, Leave, Node,
                             Retired, TensorType, dim_add, dim_mul)
from m3jit.ir.trace_recurrent import is_cell
from m3jit.isa.kv import KVGeometry
from m3jit.isa.types import Tensor

REPLICATED_BYTES = 16384        # results up to this size may be left to one thread
SPARE_SLOTS = 3                 # small temporaries rotate among a few slots, so that reuse rarely needs a barrier
Library = Mapping[str, Callable[["Lowering", Node], None]]


@dataclass(eq=False, slots=True)
class Memory:
    """A piece of memory reached through frame word `word`.  kind: input weight output temp kv."""
    word: int
    kind: str
    nbytes: Dim = 0
    slot: "Slot | None" = None


@dataclass(eq=False, slots=True)
class Slot:
    """Space in the region's arena for one temporary at a time."""
    word: int
    nbytes: Dim


@dataclass(slots=True)
class KvUse:
    """Rows a region appends to one layer of a KV stream."""
    key: Any
    layer: int
    table_word: int
    geometry: KVGeometry
    dtype: str
    rows: Dim


@dataclass(slots=True)
class Store:
    """What a register holds after an exit.  how: i64 | f64 (frame word), tensor (output word), input (unchanged
    value of another register), weight, cell (output word)."""
    key: Any
    how: str
    word: int = -1
    type: TensorType | None = None
    source: Any = None


@dataclass(slots=True)
class ExitInfo:
    pc: int
    reason: str
    stores: list[Store]


@dataclass(eq=False)
class Region:
    """A lowered region and what the runtime needs to enter and leave it."""
    function: Function
    plan: Plan
    pointers: list[tuple[Any, int]]                         # live-in tensors: key -> word
    scalars: list[tuple[Any, int, str]]                     # key, word, "i64" | "f64"
    dims: list[tuple[int, Dim]]
    weights: list[tuple[int, Tensor, str]]                  # word, tensor, layout ("raw", "R16", …)
    outputs: list[tuple[int, TensorType]]
    slots: list[Slot]
    kv: list[KvUse]
    cells_in: list[tuple[Any, int]]                         # cells of recurrent states: key, word
    cells_out: list[tuple[Any, int]]
    exits: list[ExitInfo]
    has_launches: bool


class Lowering:
    """State of lowering one region; kernels' lowering functions use the methods of the first half."""

    def __init__(self, f: Function, library: Library, build_group: Callable[[Group, str], Kernel], name: str):
        self.f, self.library, self.build_group, self.name = f, library, build_group, name
        self.words = int(FrameWord.FIRST_FREE)
        self.memory: dict[Any, Memory] = {}                 # node (or (node, part)) -> memory
        self.view_of: dict[Node, Node] = {}
        self.scalar_of: dict[Node, Scalar] = {}
        self.dim_words: dict[Dim, int] = {}
        self.key_words: dict[Any, int] = {}
        self.weights: dict[tuple[int, str], tuple[int, Tensor, str]] = {}
        self.outputs: list[tuple[int, TensorType]] = []
        self.slots: list[Slot] = []
        self.free: list[Slot] = []
        self.kv: dict[tuple, KvUse] = {}
        self.exits: list[ExitInfo] = []
        self.pointers: list[tuple[Any, int]] = []
        self.cells_in: list[tuple[Any, int]] = []
        self.cells_out: list[tuple[Any, int]] = []
        self.scalars: list[tuple[Any, int, str]] = []
        self.null_word = -1
        self.has_launches = False
        self.blocks: dict[Block, PlanBlock] = {}
        self.order: list[PlanBlock] = []
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

    def weight(self, tensor: Tensor, layout: str) -> Memory:
        """A constant in a given layout; the runtime prepares it."""
        key = (id(tensor), layout)
        if key not in self.weights:
            self.weights[key] = (self.new_word(), tensor, layout)
        return Memory(self.weights[key][0], "weight")

    def out(self, node: Node, part: str = "", nbytes: Dim | None = None) -> Memory:
        """Allocates the memory of a result."""
        size = node.type.nbytes() if nbytes is None else nbytes
        key = (node, part) if part else node
        if key not in self.memory:
            self.memory[key] = self._temp(size)
        return self.memory[key]

    def adopt(self, node: Node, source: Node, part: str) -> None:
        """Memory of a part of `source` becomes the memory of `node` (an exit's memory: copied there)."""
        m = self.memory.pop((source, part))
        if node not in self.memory:
            self.memory[node] = m
            return
        self.barrier()
        self._copy(self.memory[node], m, node.type.nbytes())
        self.has_launches = True
        self.emit(Barrier())

    def scratch(self, nbytes: Dim) -> Memory:
        """Memory for the node being lowered alone."""
        m = self._temp(nbytes)
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
            word = self._key_word(n)
            return self.emit(Scalar("frame", n.type.name, (), {"word": word}))
        return self.scalar_of[n]

    def launch(self, kernel: Kernel, args: list[Any], reads: list[Memory], writes: list[Memory],
               small: bool = False, rows: int = -1, strides: Mapping[int, Dim] | None = None) -> None:
        """Append a launch; args: Memory (pointer) or Scalar.  A barrier goes before it when it depends on a launch
        since the last one.  small: if what it writes is small too, it is not shared between threads and needs no barrier
        afterwards.  rows: the argument that counts rows, when each row of the result depends on the same rows of the
        arguments in `strides` (argument -> bytes of a row) and on everything else as a whole (`Launch.rows`)."""
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

    # -- memory planning ----------------------------------------------------------------------------------------------
    def _temp(self, nbytes: Dim) -> Memory:
        # the slot that has been free longest: most likely nobody reads it since the last barrier
        same = [s for s in self.free if s.nbytes == nbytes]
        if len(same) > (SPARE_SLOTS if isinstance(nbytes, int) and nbytes <= REPLICATED_BYTES else 0):
            self.free.remove(same[0])
            return Memory(same[0].word, "temp", nbytes, same[0])
        s = Slot(self.new_word(), nbytes)
        self.slots.append(s)
        return Memory(s.word, "temp", nbytes, s)

    def _release(self, m: Memory) -> None:
        if m.slot is not None and m.slot not in self.free:
            self.free.append(m.slot)

    def _key_word(self, n: Node) -> int:
        key = n.attrs["key"]
        if key not in self.key_words:
            self.key_words[key] = self.new_word()
            if n.is_tensor:
                (self.cells_in if is_cell(key) else self.pointers).append((key, self.key_words[key]))
            else:
                self.scalars.append((key, self.key_words[key], n.type.name))
        return self.key_words[key]

    def _root(self, n: Node) -> Node:
        while n.op == "reshape":
            n = n.args[0]
        return n

    # -- driver -------------------------------------------------------------------------------------------------------
    def run(self) -> Region:
        f = self.f
        self._place_outputs()
        self._uses()
        for b in f.blocks:
            p = PlanBlock(b.name, [])
            self.blocks[b] = p
            for node in b.params:
                if node.is_tensor:
                    if node not in self.memory:
                        self.memory[node] = self._dedicated(node)
                else:
                    s = Scalar("param", node.type.name)
                    p.params.append(s)
                    self.scalar_of[node] = s
        for b in f.blocks:
            self._block(b)
        plan = Plan(self.name, self.words, self.order)
        return Region(f, plan, self.pointers, self.scalars, [(w, d) for d, w in self.dim_words.items()],
                      list(self.weights.values()), self.outputs, self.slots, list(self.kv.values()),
                      self.cells_in, self.cells_out, self.exits, self.has_launches)

    def _dedicated(self, n: Node) -> Memory:
        s = Slot(self.new_word(), n.type.nbytes())
        self.slots.append(s)
        return Memory(s.word, "fixed", s.nbytes, None)

    def _place_outputs(self) -> None:
        """Tensors an exit hands back get fresh memory of their own."""
        for b in self.f.blocks:
            for env in (leave.env for leave in b.leaves()):
                for key, v in env.items():
                    v = self._root(v)
                    if v.is_tensor and v.op not in ("input", "weight") and v not in self.memory:
                        m = Memory(self.new_word(), "output", v.type.nbytes())
                        self.memory[v] = m
                        if is_cell(key):
                            self.cells_out.append((key, m.word))
                        else:
                            self.outputs.append((m.word, v.type))

    def _uses(self) -> None:
        """Last use of block-local nodes; nodes used in other blocks get dedicated memory."""
        home: dict[Node, Block] = {}
        for b in self.f.blocks:
            for s in b.body:
                for n in (s.nodes if isinstance(s, Group) else [s] if isinstance(s, Node) else []):
                    home[n] = b
                    if n.op == "reshape":
                        self.view_of[n] = n.args[0]
        self.last: dict[Node, int] = {}
        for b in self.f.blocks:
            for i, s in enumerate(b.body):
                reads = [a for a, _ in s.inputs] if isinstance(s, Group) else s.args if isinstance(s, Node) else []
                for a in reads:
                    self._use(self._root(a), b, i, home)
            for g in b.edges():
                for a in g.args:
                    self._use(self._root(a), b, len(b.body), home)

    def _use(self, a: Node, b: Block, i: int, home: dict[Node, Block]) -> None:
        if home.get(a) is not b:
            if a in home and a.is_tensor and a.op != "weight" and a not in self.memory:
                self.memory[a] = self._dedicated(a)
            return
        self.last[a] = max(self.last.get(a, -1), i)

    def _block(self, b: Block) -> None:
        self.current = self.blocks[b]
        self.order.append(self.current)
        self.read, self.written = set(), set()
        if b.polls is not None:
            self._poll(b.polls)
        for i, s in enumerate(b.body):
            self.scratches: list[Memory] = []
            match s:
                case Group():
                    self._group(s, i)
                case Node():
                    self._node(s)
                case Retired():
                    self.emit(Retire(s.count))
                case Check():
                    self._check(s)
            for m in self.scratches:
                self._release(m)
            self._release_dead(s, i)
        self._end(b)

    def _release_dead(self, s: Any, i: int) -> None:
        reads = [a for a, _ in s.inputs] if isinstance(s, Group) else s.args if isinstance(s, Node) else []
        for a in dict.fromkeys(self._root(a) for a in reads):      # in order: the same plan in every process
            if self.last.get(a) == i:
                for key in [a] + [k for k in self.memory if isinstance(k, tuple) and k[0] is a]:
                    if key in self.memory and self.memory[key].kind == "temp":
                        self._release(self.memory[key])

    def _node(self, n: Node) -> None:
        self.node = n
        if n.op in ("weight", "imm", "const", "dim", "true", "from_scalar", "reshape"):
            return
        for a in n.args:
            if a.op == "input" and a.is_tensor and a not in self.memory:
                self.memory[a] = Memory(self._key_word(a), "input", a.type.nbytes())
            self._input_root(a)
        if n.is_scalar and n.op not in self.library:
            self.scalar_of[n] = self._scalar_node(n)
        elif n.op in self.library:
            self.library[n.op](self, n)
        else:
            raise KeyError(f"no lowering for {n.op}")

    def _input_root(self, a: Node) -> None:
        r = self._root(a)
        if r.op == "input" and r.is_tensor and r not in self.memory:
            self.memory[r] = Memory(self._key_word(r), "input", r.type.nbytes())

    def _scalar_node(self, n: Node) -> Scalar:
        args = [self.scalar(a) for a in n.args]
        if n.op == "compare":
            a, b = args
            f = "f" if n.args[0].type == F64T else ""
            unordered = self.i64(3)
            eq, lt, gt = (self.emit(Scalar(f + op, "b1", pair)) for op, pair in
                          (("eq", (a, b)), ("lt", (a, b)), ("lt", (b, a))))
            v = self.emit(Scalar("select", "i64", (gt, self.i64(2), unordered)))
            v = self.emit(Scalar("select", "i64", (lt, self.i64(1), v)))
            return self.emit(Scalar("select", "i64", (eq, self.i64(0), v)))
        return self.emit(Scalar(n.op, n.type.name, tuple(args)))

    def element(self, m: Memory, dtype: str, index: Scalar, type: str) -> Scalar:
        """Read one element of memory written before (a barrier is placed when needed)."""
        if m.word in self.written:
            self.barrier()
        self.read.add(m.word)
        return self.emit(Scalar("element", type, (self.pointer(m), index), {"dtype": dtype}))

    def _group(self, g: Group, i: int) -> None:
        self.node = g.nodes[-1]
        kernel = self.build_group(g, "fused_" + "_".join(dict.fromkeys(n.op for n in g.nodes))[:40])
        for a, _ in g.inputs:
            self._input_root(a)
        outs = []
        for n in g.outputs:
            if n not in self.memory and len(g.outputs) == 1 and g.flat and \
                    not (isinstance(n.type.nbytes(), int) and n.type.nbytes() <= REPLICATED_BYTES):
                self._take_over(n, g, i)
            outs.append(self.out(n))
        ins = [self.of(a) for a, _ in g.inputs]
        args: list[Any] = [*ins, *outs]
        rows = len(args)
        if not g.flat:
            args.append(self.dim(dim_mul(*g.lead)))
        args.append(self.dim(g.columns))
        for s in g.scalars:
            v = self.scalar(s.args[0])
            args.append(self.emit(Scalar("f2f32", "f32", (v,))) if s.dtype.kind == "float" else v)
        self.launch(kernel, args, ins, outs, small=True, rows=rows, strides=_row_bytes(g))

    def _take_over(self, n: Node, g: Group, i: int) -> None:
        """In place: the output takes the memory of an input that dies here and is read at the same elements only."""
        for a, how in g.inputs:
            r = self._root(a)
            m = self.memory.get(r)
            if how == "full" and m is not None and m.kind == "temp" and self.last.get(r) == i and \
                    a.dtype.nbytes == n.dtype.nbytes and m.nbytes == n.type.nbytes():
                self.memory[n] = m
                self.last[r] = -2                       # its release now belongs to n
                return

    # -- exits ----------------------------------------------------------------------------------------------------------
    def _exit(self, leave: Leave) -> tuple[int, list[StoreFrame]]:
        stores: list[Store] = []
        frames: list[StoreFrame] = []
        for key, v in leave.env.items():
            if v.is_tensor:
                r = self._root(v)
                if is_cell(key):
                    if not (r.op == "input" and r.attrs["key"] == key):
                        stores.append(Store(key, "cell", self.memory[r].word))
                elif r.op == "input":
                    stores.append(Store(key, "input", source=r.attrs["key"], type=v.type))
                elif r.op == "weight":
                    stores.append(Store(key, "weight", source=r.attrs["tensor"], type=v.type))
                else:
                    stores.append(Store(key, "tensor", self.memory[r].word, v.type))
            else:
                word = self._exit_word(key)
                frames.append(StoreFrame(word, self.scalar(v)))
                stores.append(Store(key, v.type.name, word))
        self.exits.append(ExitInfo(leave.pc, leave.reason, stores))
        return len(self.exits) - 1, frames

    def _exit_word(self, key: Any) -> int:
        k = ("exit", key)
        if k not in self.key_words:
            self.key_words[k] = self.new_word()
        return self.key_words[k]

    def _poll(self, leave: Leave) -> None:
        number, frames = self._exit(leave)
        self.emit(Poll(number, frames))

    def _check(self, s: Check) -> None:
        cond = self.scalar(s.cond)
        here = self.current
        out = PlanBlock(f"{here.name}_out{len(self.exits)}")
        rest = PlanBlock(f"{here.name}_go{len(self.exits)}")
        here.end = Branch(cond, rest, [], out, [])
        self.current = out
        number, frames = self._exit(s.leave)
        out.end = Exit(number, frames)
        self.order += [out, rest]
        self.current = rest

    # -- edges ----------------------------------------------------------------------------------------------------------
    def _end(self, b: Block) -> None:
        match b.end:
            case Leave():
                number, frames = self._exit(b.end)
                self.current.end = Exit(number, frames)
            case Goto():
                self.current.end = Jump(self.blocks[b.end.target], self._edge(b.end))
            case CondGoto():
                cond = self.scalar(b.end.cond)
                self.barrier()
                then, other = (self._edge_block(g, b) for g in (b.end.then, b.end.other))
                self.current.end = Branch(cond, *then, *other)

    def _edge_block(self, g: Goto, b: Block) -> tuple[PlanBlock, list[Scalar]]:
        """Target and arguments of one way of a branch; copies get a block of their own."""
        if not any(a.is_tensor for a in g.args):
            return self.blocks[g.target], self._edge(g)
        saved = self.current
        self.current = PlanBlock(f"{b.name}_to_{g.target.name}_{len(self.order)}")
        self.order.append(self.current)
        self.current.end = Jump(self.blocks[g.target], self._edge(g))
        made, self.current = self.current, saved
        return made, []

    def _edge(self, g: Goto) -> list[Scalar]:
        pairs = []
        scalars = []
        for p, a in zip(g.target.params, g.args):
            if not a.is_tensor:
                scalars.append(self.scalar(a))
                continue
            self._input_root(a)
            if self.of(a).word != self.memory[p].word:
                pairs.append((self.memory[p], self.of(a), p.type.nbytes()))
        self.barrier()
        targets = {d.word for d, _, _ in pairs}
        staged = []
        for dst, src, n in pairs:
            if src.word in targets and len(pairs) > 1:
                tmp = self._temp(n)
                self._copy(tmp, src, n)
                staged.append(tmp)
                src = tmp
            else:
                tmp = None
            staged.append((dst, src, n)) if tmp is None else staged.append((dst, tmp, n))
        if any(isinstance(x, Memory) for x in staged):
            self.emit(Barrier())
        for item in staged:
            if isinstance(item, tuple):
                self._copy(*item)
        if pairs:
            self.emit(Barrier())
            self.has_launches = True
        return scalars

    def _copy(self, dst: Memory, src: Memory, nbytes: Dim) -> None:
        self.emit(Copy(self.pointer(dst), self.pointer(src), self.dim(nbytes)))


def _row_bytes(g: Group) -> dict[int, Dim]:
    """Bytes of a row of those arguments of a fused kernel that have rows; the rows of a flat one are elements."""
    columns = 1 if g.flat else g.columns
    strides = {i: dim_mul(columns if how == "full" else 1, a.dtype.nbytes)
               for i, (a, how) in enumerate(g.inputs) if how in ("full", "col")}
    for i, n in enumerate(g.outputs, len(g.inputs)):
        one = not g.flat and n.type.count() == dim_mul(*g.lead)             # one value for each row
        strides[i] = dim_mul(1 if one else columns, n.dtype.nbytes)
    return strides


def lower(f: Function, library: Library, build_group: Callable[[Group, str], Kernel], name: str) -> Region:
    """Region of a function after `run_passes`."""
    return Lowering(f, library, build_group, name).run()
