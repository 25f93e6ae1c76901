"""Lowers a region (tensor IR after the passes) to a launch plan: groups, nodes, edges between blocks, exits.

What a plan is written with is m3jit.ir.plan_writer.  Primitives other than fused groups are lowered by the kernel
library (`m3jit.kernels.lowering`), which is handed in: `library[op](lowering, node)`.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping

from m3jit.ir.loop import Kernel
from m3jit.ir.passes.fuse import Group
from m3jit.ir.plan import Barrier, Branch, Exit, Jump, Plan, PlanBlock, Poll, Retire, Scalar, StoreFrame
from m3jit.ir.plan_writer import REPLICATED_BYTES, Memory, PlanWriter
from m3jit.ir.region import ExitInfo, Region, Slot, Store
from m3jit.ir.tensor import F64T, Block, Check, CondGoto, Dim, Function, Goto, Leave, Node, Retired, TensorType, dim_mul
from m3jit.ir.trace_recurrent import is_cell

Library = Mapping[str, Callable[[PlanWriter, Node], None]]


class Lowering(PlanWriter):
    """The way over one region: every block, its nodes in order, its end."""

    def __init__(self, f: Function, library: Library, build_group: Callable[[Group, str], Kernel], name: str):
        super().__init__()
        self.f, self.library, self.build_group, self.name = f, library, build_group, name
        self.outputs: list[tuple[int, TensorType]] = []
        self.cells_out: list[tuple[Any, int]] = []
        self.exits: list[ExitInfo] = []
        self.blocks: dict[Block, PlanBlock] = {}
        self.order: list[PlanBlock] = []

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

    def _root(self, n: Node) -> Node:
        while n.op == "reshape":
            n = n.args[0]
        return n

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
            self.scratches = []
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
                self.release(m)
            self._release_dead(s, i)
        self._end(b)

    def _release_dead(self, s: Any, i: int) -> None:
        reads = [a for a, _ in s.inputs] if isinstance(s, Group) else s.args if isinstance(s, Node) else []
        for a in dict.fromkeys(self._root(a) for a in reads):      # in order: the same plan in every process
            if self.last.get(a) == i:
                for key in [a] + [k for k in self.memory if isinstance(k, tuple) and k[0] is a]:
                    if key in self.memory and self.memory[key].kind == "temp":
                        self.release(self.memory[key])

    def _node(self, n: Node) -> None:
        self.node = n
        if n.op in ("weight", "imm", "const", "dim", "true", "from_scalar", "reshape"):
            return
        for a in n.args:
            if a.op == "input" and a.is_tensor and a not in self.memory:
                self.memory[a] = Memory(self.input_word(a), "input", a.type.nbytes())
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
            self.memory[r] = Memory(self.input_word(r), "input", r.type.nbytes())

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

    # -- exits ---------------------------------------------------------------------------------------------------------
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

    # -- edges ---------------------------------------------------------------------------------------------------------
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
        copies = []
        saved = False                                   # a source that another pair overwrites is read first
        for dst, src, n in pairs:
            if src.word in targets and len(pairs) > 1:
                kept = self.temp(n)
                self.copy(kept, src, n)
                src, saved = kept, True
            copies.append((dst, src, n))
        if saved:
            self.emit(Barrier())
        for dst, src, n in copies:
            self.copy(dst, src, n)
        if pairs:
            self.emit(Barrier())
            self.has_launches = True
        return scalars

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
