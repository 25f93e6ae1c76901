"""Lifts bytecode to tensor IR: everything reachable from an entry point without crossing a slow-path instruction.

Types flow forward from the entry (the kinds, dtypes and shapes of live-in registers).  A block exists once per
(pc, types of the registers the region modifies), at most `MAX_VERSIONS` times per pc, so that a loop whose first
iteration sees unwritten registers is peeled once and then runs typed.  Where lifting cannot go on, the region leaves
to the interpreter at that instruction with its registers written back.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Protocol

from m3jit.ir.tensor import (B1T, F64T, I64T, Block, Check, CondGoto, Dim, DimExpr, Function, Goto, Leave,
                             Node, OpaqueType, Retired, Sym, TensorType, Type, dim_add, dim_ceildiv, dim_mul, eval_dim,
                             weight_name)
from m3jit.ir.trace import Recorder, TraceXp, Untraceable
from m3jit.ir.trace_model import KVRef, kv_of_type
from m3jit.ir.trace_recurrent import CellKey, CellRef, CellsType, cell_type, is_cell
from m3jit.isa.fields import (REQUIRED, SPECIAL, STATE, FloatOrReg, Hidden, IntOrReg, PayloadReg, Reg, RegField,
                              ShapeField)
from m3jit.isa.kv import KVGeometry
from m3jit.isa.table import Instruction
from m3jit.isa.types import F32

MAX_VERSIONS = 4
HUGE = 1 << 62                            # more than any dimension
MAX_INSTRUCTIONS = 20_000
FULL, VARIANTS = "the region is full", "too many type variants"     # of exits: the next region may begin right there
Key = Any        # ("R", 5), ("S", 0), ("V", 1), "flags", "rng", ("kvlen", ("S", 0), layer),
                 # ("cell", ("S", 0), layer, part, shape)
_BANKS = {0: "R", 1: "V", 2: "S"}
VECTOR = TensorType(F32, (8,))                       # what a V register holds


class ProgramView(Protocol):
    """What lifting needs of a program."""
    def at(self, pc: int) -> Instruction | None: ...
    def constant(self, ins: Instruction) -> Any: ...     # value of a symbol-loading instruction: Tensor, int or None


@dataclass
class Entry:
    """Live-in types.  `type_of(key)`: None = null register; OpaqueType = not usable in compiled code."""
    pc: int
    type_of: Callable[[Key], Type | None]
    actual: dict[Sym, int] = field(default_factory=dict)          # today's value of each symbol
    stop_at: frozenset[int] = frozenset()                         # leave here (breakpoints, region borders)
    live_out: frozenset[Key] | None = None                        # registers wanted at HALT or RET (None: all); other
                                                                  # exits then hand back nothing: start over elsewhere


def reg_key(r: Reg) -> Key:
    return (_BANKS[r.bank], r.index)


def written_keys(ins: Instruction) -> list[Key]:
    """Registers and hidden state an instruction writes."""
    out: list[Key] = []
    for f in ins.op.fields:
        if isinstance(f, Hidden):
            out.append(f.state)
        elif isinstance(f, (RegField, PayloadReg)) and (f.dest or f.both):
            r = ins.args.get(f.name)
            if r is None or r.bank == SPECIAL:
                continue
            out.append(reg_key(r))
            if f.both and "state" in f.kinds and "layer" in ins.args:
                out.append(("kvlen", reg_key(r), ins.args["layer"]))
    return out


class Lifter(Recorder):
    """One use: `Lifter(view, entry).lift(name)`."""

    def __init__(self, view: ProgramView, entry: Entry):
        self.view, self.entry = view, entry
        self.inputs: dict[Key, Node] = {}
        self.read_keys: set[Key] = set()                 # live-in registers an instruction read, null ones included
        self.streams: dict[Key, tuple[KVGeometry, str]] = {}     # what the region's appends take a stream to be
        self.present: set[Key] = set()                   # streams that must be there at entry
        self.states: dict[Key, None] = {}                # state registers, in the order of their first uses
        self.guards: list[tuple[Dim, Dim]] = []
        self.same_as: dict[Dim, Dim] = {}
        self.versions: dict[tuple, Block] = {}
        self.work: list[tuple[Block, dict[Key, Node]]] = []
        self.blocks: list[Block] = []
        self.modified: set[Key] = set()
        self.leaders: set[int] = set()
        self.back_targets: set[int] = set()
        self.instructions = 0
        self.xp = TraceXp(self)
        self.block: Block | None = None
        self.env: dict[Key, Node] = {}
        self.pc = entry.pc
        self.pending = 0

    # -- recorder ------------------------------------------------------------------------------------------------
    def emit(self, node: Node) -> Node:
        self.block.body.append(node)
        return node

    def canonical(self, d: Dim) -> Dim:
        while d in self.same_as:
            d = self.same_as[d]
        return d

    def assume_equal(self, a: Dim, b: Dim) -> bool:
        a, b = self.canonical(a), self.canonical(b)
        if a == b:
            return True
        if (isinstance(a, int) and a < 2) or (isinstance(b, int) and b < 2):
            return False                               # symbols are never 0 or 1
        if eval_dim(a, self.entry.actual) != eval_dim(b, self.entry.actual):
            return False
        self.guards.append((a, b))
        if isinstance(a, int) or (isinstance(a, Sym) and isinstance(b, DimExpr)):
            a, b = b, a                                # an expression is named by a symbol, never the reverse
        self.same_as[a] = b
        return True

    def today(self, d: Dim) -> int:
        """The value of a dimension at this entry."""
        return eval_dim(d, self.entry.actual)

    def assume_at_least(self, d: Dim, n: int) -> bool:
        """Guard that d >= n, when it holds today: ceil((d - n + 1) / huge) is 1 then and 0 below."""
        if self.today(d) < n:
            return False
        if n > 2 or not isinstance(d, Sym):                    # symbols are at least 2
            self.guards.append((dim_ceildiv(dim_add(d, 1 - n), HUGE), 1))
        return True

    def check(self, cond: Node, reason: str) -> None:
        self.flush()
        self.block.body.append(Check(cond, self.leave(self.pc, reason)))

    def same_stream(self, key: Key, geometry: KVGeometry, dtype: str, new: str) -> bool:
        if key not in self.streams and dtype != new:
            self.present.add(key)                      # one that is made here would be of the instruction's type
        return self.streams.setdefault(key, (geometry, dtype)) == (geometry, dtype)

    def cell(self, state: CellRef, key: CellKey) -> Node:
        """The cell's value here.  One cell has one shape: another one is the interpreter's to refuse."""
        t = self.entry.type_of(state.key)
        shapes = [k[4] for k in (*state.cells, *self.inputs) if is_cell(k) and k[:4] == key[:4]]
        shapes += [t.shapes[key[2:4]]] if isinstance(t, CellsType) and key[2:4] in t.shapes else []
        if any(s != key[4] for s in shapes):
            raise Untraceable("a cell of another shape")
        return state.cells.get(key) or self.input(key, cell_type(key))

    def kv_length(self, kv: KVRef, layer: int) -> Node:
        return self.input(("kvlen", kv.key, layer), I64T)

    # -- environment ------------------------------------------------------------------------------------------------
    def input(self, key: Key, type: Type) -> Node:
        if key not in self.inputs:
            self.inputs[key] = Node("input", type, attrs={"key": key})
        return self.inputs[key]

    def lookup(self, key: Key) -> Node | None:
        """The value of a register or state here; None when null."""
        if key in self.env:
            return self.env[key]
        t = self.entry.type_of(key)
        return None if t is None else self.input(key, t)

    def leave(self, pc: int, reason: str) -> Leave:
        env = {k: v for k, v in self.env.items() if not (v.op == "input" and v.attrs["key"] == k)}
        if self.entry.live_out is not None:
            ins = self.view.at(pc)
            wanted = self.entry.live_out if ins is not None and ins.op.control in ("halt", "ret") else frozenset()
            env = {k: v for k, v in env.items() if k in wanted}
        return Leave(pc, env, reason)

    def flush(self) -> None:
        if self.pending:
            self.block.body.append(Retired(self.pending))
            self.pending = 0

    # -- discovery --------------------------------------------------------------------------------------------------
    def discover(self) -> None:
        """Static reach from the entry: leaders, back-edge targets, the registers that may be modified."""
        todo, seen = [self.entry.pc], set()
        while todo:
            pc = todo.pop()
            while pc not in seen:
                ins = self.view.at(pc)
                if ins is None or (pc != self.entry.pc and pc in self.entry.stop_at):
                    break
                seen.add(pc)
                op = ins.op
                if len(seen) > MAX_INSTRUCTIONS or op.route not in ("value", "control"):
                    break
                if op.route == "control":
                    if op.control not in ("next", "jump", "branch"):
                        break
                    if op.control != "next":
                        target = pc + ins.args["target"]
                        self.leaders.add(target)
                        if target <= pc:
                            self.back_targets.add(target)
                        if op.control == "branch":
                            self.leaders.add(pc + ins.size)
                            todo.append(pc + ins.size)
                        pc = target
                        continue
                else:
                    self.modified.update(written_keys(ins))
                pc += ins.size

        heads = getattr(self.view, "loop_heads", frozenset()) & seen     # the interpreter polls there, whatever is seen
        self.back_targets |= heads
        self.leaders |= heads

    # -- lifting ----------------------------------------------------------------------------------------------------
    def lift(self, name: str) -> Function | None:
        """The region, or None when not even its first instruction can be compiled."""
        try:
            return self._lift(name)
        finally:                                       # `xp` leads back here, and `entry` may lead to a context: the
            del self.xp, self.entry                    # states it names would live until the garbage collector comes by

    def _lift(self, name: str) -> Function | None:
        self.discover()
        start = Block("entry", self.entry.pc)
        self.blocks.append(start)
        if self.entry.pc in self.back_targets:
            self.block, self.env = start, {}
            start.end = self.edge(self.entry.pc)
        else:
            self.work.append((start, {}))
        while self.work:
            self.run_block(*self.work.pop())
        if not self.instructions:
            return None
        self._rename_dims()
        syms = {t.shape[0]: (k, 0) for k, n in self.inputs.items()
                if (t := n.type) is not None and hasattr(t, "shape") and t.rank and isinstance(t.shape[0], Sym)}
        nulls = frozenset(k for k in self.read_keys if k not in self.inputs)
        return Function(name, self.entry.pc, self.blocks, self.inputs, self.guards, syms, self.instructions,
                        frozenset(self.read_keys - nulls), nulls, tuple(self.states), frozenset(self.present))

    def _rename_dims(self) -> None:
        """Write every dimension by the name of its class of equal dimensions."""
        if not self.same_as:
            return
        for n in [*self.inputs.values(), *(p for b in self.blocks for p in b.params),
                  *(n for b in self.blocks for n in b.nodes())]:
            if isinstance(n.type, TensorType):
                n.type = TensorType(n.type.dtype, self._renamed(n.type.shape))
            for key, v in n.attrs.items():
                if isinstance(v, (Sym, DimExpr, tuple)):
                    n.attrs[key] = self._renamed(v)
        self.guards = [(self._named(a), self._named(b)) for a, b in self.guards
                       if isinstance(a, DimExpr) or isinstance(b, DimExpr)]

    # Methods, not functions of `_rename_dims` that call themselves: those would be a cycle that holds the lifter.
    def _renamed(self, d: Any) -> Any:
        """A dimension, or a tuple with some, by the name of its class."""
        if isinstance(d, tuple):
            return tuple(map(self._renamed, d))
        return _rebuilt(self.canonical(d), self._renamed) if isinstance(d, (Sym, DimExpr)) else d

    def _named(self, d: Dim) -> Dim:
        """The expression over the symbols that are left; not replaced itself, or the guard would say nothing."""
        return _rebuilt(d, self._named) if isinstance(d, DimExpr) else self.canonical(d)

    def edge(self, pc: int) -> Goto:
        """Go to the version of the block at `pc` that fits the current types; leave when there are too many."""
        values: dict[Key, Node] = {}
        for key in sorted(self.modified | {k for k in self.env if is_cell(k)}, key=repr):
            v = self.env.get(key)
            if v is None and not (isinstance(key, tuple) and key[0] == "kvlen"):
                v = self.lookup(key)
            if v is not None and not isinstance(v.type, OpaqueType):
                values[key] = v
            elif v is not None and key in self.env:
                return self._leave_block(pc, f"{key} is not a compiled kind")
        signature = tuple((k, v.type) for k, v in values.items())
        target = self.versions.get((pc, signature))
        if target is None:
            if sum(1 for p, _ in self.versions if p == pc) >= MAX_VERSIONS:
                return self._leave_block(pc, VARIANTS)
            target = Block(f"b{pc:x}" + (f"_{n}" if (n := sum(1 for p, _ in self.versions if p == pc)) else ""), pc)
            target.params = [Node("param", v.type, attrs={"key": k}) for k, v in values.items()]
            if pc in self.back_targets:
                target.polls = Leave(pc, dict(zip(values, target.params)), "poll")
            self.versions[(pc, signature)] = target
            self.blocks.append(target)
            self.work.append((target, dict(zip(values, target.params))))
        return Goto(target, list(values.values()))

    def _leave_block(self, pc: int, reason: str) -> Goto:
        b = Block(f"leave{pc:x}_{len(self.blocks)}", pc)
        b.end = self.leave(pc, reason)
        self.blocks.append(b)
        return Goto(b, [])

    def run_block(self, block: Block, env: dict[Key, Node]) -> None:
        self.block, self.env, self.pending = block, env, 0
        pc = block.pc
        while True:
            self.pc = pc
            ins = self.view.at(pc)
            stop = pc in self.entry.stop_at and pc != self.entry.pc
            if ins is None or stop or ins.op.route not in ("value", "control"):
                return self.finish(self.leave(pc, ins.op.name if ins is not None else "end of program"))
            if self.instructions > MAX_INSTRUCTIONS:
                return self.finish(self.leave(pc, FULL))
            if ins.op.route == "control":
                end = self.control(ins)
                if end is not None:
                    return self.finish(end)
            else:
                mark, pending = len(block.body), self.pending
                try:
                    self.value(ins)
                except Untraceable as e:
                    del block.body[mark:]
                    self.pending = pending           # a check of this instruction may have counted those before it
                    return self.finish(self.leave(pc, f"{ins.op.name}: {e}"))
            self.pending += 1
            self.instructions += 1
            pc += ins.size
            if pc in self.leaders:
                return self.finish(self.edge(pc))

    def finish(self, end: Any) -> None:
        self.flush()
        self.block.end = end

    def control(self, ins: Instruction) -> Any:
        """A block end, or None to go on."""
        kind = ins.op.control
        if kind == "next":
            return None
        if kind not in ("jump", "branch"):
            return self.leave(self.pc, ins.op.name)
        target = self.pc + ins.args["target"]
        if kind == "branch":
            flags = self.lookup("flags")
            if flags is None or flags.type != I64T:
                return self.leave(self.pc, "no comparison yet")
            cond = self.branch_condition(flags, ins.op.sub)
        self.pending += 1
        self.instructions += 1
        if kind == "jump":
            return self.edge(target)
        return CondGoto(cond, self.edge(target), self.edge(self.pc + ins.size))

    def branch_condition(self, flags: Node, predicate: int) -> Node:
        """b1 node: does a branch with this predicate (0 EQUAL 1 NOT_EQUAL 2 LESS 3 LESS_EQUAL 4 GREATER
        5 GREATER_EQUAL) take?  flags: 0 equal, 1 less, 2 greater, 3 unordered."""
        self.xp.where = (self.pc, "IF")
        if flags.op == "compare":
            a, b = flags.args
            f = "f" if a.type == F64T else ""
            if predicate == 1:
                return self.xp.node(f + "ne", B1T, a, b)
            if predicate >= 4:
                a, b = b, a
            return self.xp.node(f + ("eq", "", "lt", "le", "lt", "le")[predicate], B1T, a, b)
        def is_(code: int) -> Node:
            return self.xp.node("eq", B1T, flags, self.xp.const(code))
        if predicate == 1:
            return self.xp.node("ne", B1T, flags, self.xp.const(0))
        if predicate in (0, 2, 4):
            return is_({0: 0, 2: 1, 4: 2}[predicate])
        return self.xp.node("bool_or", B1T, is_(0), is_(1 if predicate == 3 else 2))

    # -- value instructions -------------------------------------------------------------------------------------------
    def value(self, ins: Instruction) -> None:
        op = ins.op
        self.xp.where = (self.pc, op.name)
        if ins.args.get("inplace"):
            raise Untraceable("INPLACE empties its source register")
        args: dict[str, Any] = {}
        for f in op.fields:
            args[f.name] = self.operand(f, ins)
        if "constant" in op.reads:
            result = self.load_constant(ins)
        else:
            result = op.body(self.xp, **args)
        dests = [f for f in op.fields if isinstance(f, Hidden) or getattr(f, "dest", False) or
                 getattr(f, "both", False)]
        results = result if isinstance(result, tuple) else (result,)
        if len(results) != len(dests):
            raise Untraceable(f"{len(results)} results for {len(dests)} destinations")
        for f, v in zip(dests, results):
            key = f.state if isinstance(f, Hidden) else ins.args.get(f.name)
            if key is None:
                continue
            if isinstance(key, Reg):
                if key.bank == SPECIAL:
                    raise Untraceable("writes a special register")
                key = reg_key(key)
            self.assign(key, v)

    def assign(self, key: Key, v: Any) -> None:
        if isinstance(v, CellRef):
            self.env.update(v.cells)
            return
        if isinstance(v, KVRef):
            for layer, length in v.lengths.items():
                self.env[("kvlen", v.key, layer)] = length
            return
        if isinstance(v, (int, float)) and not isinstance(v, bool):
            v = self.xp.const(v)
        if not isinstance(v, Node) or isinstance(v.type, OpaqueType) or v.type == B1T:
            raise Untraceable(f"result of kind {getattr(v, 'type', type(v).__name__)}")
        if isinstance(key, tuple) and key[0] == "V" and v.type != VECTOR:
            raise Untraceable(f"a V register cannot hold {v.type}")
        self.env[key] = v

    def load_constant(self, ins: Instruction) -> Any:
        from m3jit.isa.types import Tensor
        v = self.view.constant(ins)
        if isinstance(v, Tensor):
            return self.xp.node("weight", TensorType(v.dtype, v.shape), tensor=v,
                                name=weight_name(v, f"c{self.pc:x}"))
        if isinstance(v, (int, float)):
            return self.xp.const(v)
        raise Untraceable("a constant that is not a tensor or number")

    def operand(self, f: Any, ins: Instruction) -> Any:
        if isinstance(f, Hidden):
            return self.lookup(f.state)
        v = ins.args.get(f.name, None if f.default is REQUIRED else f.default)
        if isinstance(f, (RegField, PayloadReg)):
            if f.dest and not f.both or v is None:
                return None
            if v.bank == STATE and not (f.both and "state" in f.kinds):
                raise Untraceable(f"{v} is passed on as a handle")
            return self.of_kind(self.read(v), f.kinds, v)
        if isinstance(f, (IntOrReg, FloatOrReg)) and isinstance(v, Reg):
            return self.of_kind(self.need(v), ("float",) if isinstance(f, FloatOrReg) else ("int",), v)
        if isinstance(f, ShapeField):
            return tuple(self.need(d) if isinstance(d, Reg) else d for d in v)
        return v

    def of_kind(self, v: Any, kinds: tuple[str, ...], r: Reg) -> Any:
        """v, when a register may hold that here; the interpreter traps otherwise."""
        if isinstance(v, (KVRef, CellRef)) or ("any" in kinds and v is not None):
            return v
        have = "null" if v is None else "tensor" if v.is_tensor else "float" if v.type == F64T else "int"
        if have not in kinds and not (have == "tensor" and "vector" in kinds):
            raise Untraceable(f"{r} was never written" if v is None else f"{r} holds {have}, not {' or '.join(kinds)}")
        return v

    def need(self, r: Reg) -> Node:
        v = self.read(r)
        if v is None:
            raise Untraceable(f"{r} was never written")
        return v

    def read(self, r: Reg) -> Any:
        if r.bank == SPECIAL:
            raise Untraceable("reads a special register")
        key = reg_key(r)
        if r.bank == STATE:
            return self.state(key)
        v = self.lookup(key)
        if key not in self.env or (v.op == "param" and key in self.inputs):
            self.read_keys.add(key)
        if v is not None and isinstance(v.type, OpaqueType):
            raise Untraceable(f"{r} holds a {v.type.name}")
        return v

    def state(self, key: Key) -> KVRef | CellRef:
        t = self.entry.type_of(key)
        self.states[key] = None
        cells = {k: v for k, v in self.env.items() if is_cell(k) and k[1] == key}
        if isinstance(t, CellsType) or cells or (t is None and any(is_cell(k) and k[1] == key for k in self.inputs)):
            return CellRef(key, cells)
        if t is not None and not (isinstance(t, OpaqueType) and t.name.startswith("kv:")):
            raise Untraceable(f"{key} is not a KV stream")
        geometry, dtype = kv_of_type(t.name) if t is not None else (None, None)
        lengths = {k[2]: v for k, v in self.env.items() if isinstance(k, tuple) and k[0] == "kvlen" and k[1] == key}
        return KVRef(key, geometry, dtype, lengths)


def _rebuilt(d: Dim, part: Callable[[Dim], Dim]) -> Dim:
    """A dimension with `part` of the two parts of an expression."""
    if not isinstance(d, DimExpr):
        return d
    return {"mul": dim_mul, "add": dim_add, "ceildiv": dim_ceildiv}[d.op](part(d.a), part(d.b))
