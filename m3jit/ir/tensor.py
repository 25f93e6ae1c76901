"""Tensor IR: SSA with block arguments over typed tensors and scalars.

A `Function` is one region of a program.  Dimensions are ints or symbolic (`Sym`, known at region entry, at least 2);
expressions of them are `DimExpr`.  Nodes are values; an operation with several results has `result` nodes.
"""
from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Iterator

from m3jit.isa.types import DType, Tensor


@dataclass(frozen=True, slots=True)
class Sym:
    """A dimension known at region entry, never 0 or 1."""
    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class DimExpr:
    """op in add, mul, ceildiv over dimensions."""
    op: str
    a: "Dim"
    b: "Dim"

    def __repr__(self) -> str:
        return f"({self.a}{ {'add': '+', 'mul': '*', 'ceildiv': '⌈/⌉'}[self.op] }{self.b})"


Dim = int | Sym | DimExpr


def dim_mul(*dims: Dim) -> Dim:
    """Product; integer factors are folded and come last."""
    const, rest = 1, []
    for d in dims:
        if isinstance(d, DimExpr) and d.op == "mul" and isinstance(d.b, int):
            const *= d.b
            d = d.a
        if isinstance(d, int):
            const *= d
        else:
            rest.append(d)
    if const == 0:
        return 0
    out: Dim | None = None
    for d in rest:
        out = d if out is None else DimExpr("mul", out, d)
    if out is None:
        return const
    return out if const == 1 else DimExpr("mul", out, const)


def dim_add(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a == 0 or b == 0:
        return b if a == 0 else a
    return DimExpr("add", a, b)


def dim_ceildiv(a: Dim, b: int) -> Dim:
    return -(-a // b) if isinstance(a, int) else a if b == 1 else DimExpr("ceildiv", a, b)


def eval_dim(d: Dim, syms: dict[Sym, int]) -> int:
    if isinstance(d, int):
        return d
    if isinstance(d, Sym):
        return syms[d]
    a, b = eval_dim(d.a, syms), eval_dim(d.b, syms)
    return a + b if d.op == "add" else a * b if d.op == "mul" else -(-a // b)


def dim_syms(d: Dim) -> Iterator[Sym]:
    if isinstance(d, Sym):
        yield d
    elif isinstance(d, DimExpr):
        yield from dim_syms(d.a)
        yield from dim_syms(d.b)


@dataclass(frozen=True, slots=True)
class TensorType:
    dtype: DType
    shape: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    def count(self) -> Dim:
        return dim_mul(*self.shape)

    def nbytes(self) -> Dim:
        if self.dtype.is_block:
            return dim_mul(*self.shape[:-1], self.dtype.row_bytes(self.shape[-1]))
        return dim_mul(*self.shape, self.dtype.nbytes)

    def __repr__(self) -> str:
        return f"{self.dtype.name.lower()}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ScalarType:
    name: str                       # i64, f64, b1

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class OpaqueType:
    """A value the region only passes along (a handle, a snapshot …), or a group of results."""
    name: str

    def __repr__(self) -> str:
        return self.name


I64T, F64T, B1T = ScalarType("i64"), ScalarType("f64"), ScalarType("b1")
Type = TensorType | ScalarType | OpaqueType

# Elementwise primitives (one output element from one element of each operand) -> operand count
ELEMENTWISE = {"add": 2, "sub": 2, "mul": 2, "div": 2, "minimum": 2, "maximum": 2, "neg": 1, "abs": 1, "sqrt": 1,
               "floor": 1, "rint": 1, "fma": 3, "exp": 1, "log": 1, "sin": 1, "cos": 1, "tanh": 1, "erf": 1,
               "sigmoid": 1, "softplus": 1, "lt": 2, "le": 2, "eq": 2, "ne": 2, "select": 3, "logical_not": 1,
               "cast": 1}


@dataclass(eq=False, slots=True)
class Node:
    """One value.  `args` are nodes; `attrs` static data; `where` = (pc, mnemonic) it came from."""
    op: str
    type: Type
    args: list["Node"] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)
    where: tuple[int, str] = (-1, "")

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def rank(self) -> int:
        return len(self.type.shape)

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.type, TensorType)

    @property
    def is_scalar(self) -> bool:
        return isinstance(self.type, ScalarType)


# -- terminators ----------------------------------------------------------------------------------------------------

@dataclass(eq=False, slots=True)
class Goto:
    target: "Block"
    args: list[Node] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class CondGoto:
    cond: Node
    then: Goto
    other: Goto


@dataclass(eq=False, slots=True)
class Leave:
    """Leave the region: execution goes on at `pc` in the interpreter; `env` holds the registers that changed."""
    pc: int
    env: dict[Any, Node]
    reason: str = ""


@dataclass(eq=False, slots=True)
class Retired:
    """Statement: `count` instructions are done."""
    count: int


@dataclass(eq=False, slots=True)
class Check:
    """Statement: go on when `cond` holds, else take `leave`."""
    cond: Node
    leave: Leave


@dataclass(eq=False, slots=True)
class Block:
    name: str
    pc: int
    params: list[Node] = field(default_factory=list)
    body: list[Any] = field(default_factory=list)       # Node | Retired | Check
    end: Any = None                                     # Goto | CondGoto | Leave
    polls: Leave | None = None                          # a back edge arrives here: look at budget and stop word, and
                                                        # leave with this state when one says so

    def nodes(self) -> Iterator[Node]:
        return (s for s in self.body if isinstance(s, Node))

    def edges(self) -> list[Goto]:
        match self.end:
            case Goto():
                return [self.end]
            case CondGoto():
                return [self.end.then, self.end.other]
        return []

    @property
    def poll(self) -> bool:
        return self.polls is not None

    def leaves(self) -> list[Leave]:
        out = [self.polls] if self.polls is not None else []
        out += [s.leave for s in self.body if isinstance(s, Check)]
        return out + ([self.end] if isinstance(self.end, Leave) else [])


@dataclass(eq=False, slots=True)
class Function:
    """One region.  inputs: nodes of op "input" (attrs: key = register or state name).

    read: registers whose kind and type some instruction relied on; they stay guards of the region although no node may
    need their value.  nulls: registers that were read as never written, and must be so at entry."""
    name: str
    entry_pc: int
    blocks: list[Block]
    inputs: dict[Any, Node]
    guards: list[tuple[Dim, Dim]]                        # dims that must be equal at entry
    syms: dict[Sym, tuple[Any, int]]                     # symbol -> (input key, axis) that defines it
    instructions: int = 0
    read: frozenset = frozenset()
    nulls: frozenset = frozenset()
    states: tuple = ()                                   # state registers it uses, in the order of their first uses
    present: frozenset = frozenset()                     # streams that must exist: a new one would have another type

    def nodes(self) -> Iterator[Node]:
        for b in self.blocks:
            yield from b.nodes()

    def __str__(self) -> str:
        return print_function(self)


def uses(block: Block) -> Iterator[Node]:
    """Every node the block reads, with repetitions."""
    if block.polls is not None:
        yield from block.polls.env.values()
    for s in block.body:
        if isinstance(s, Node):
            yield from s.args
        elif isinstance(s, Check):
            yield s.cond
            yield from s.leave.env.values()
    match block.end:
        case Goto():
            yield from block.end.args
        case CondGoto():
            yield block.end.cond
            yield from block.end.then.args
            yield from block.end.other.args
        case Leave():
            yield from block.end.env.values()


def substitute(f: Function, table: dict[Node, Node]) -> None:
    """Replace nodes everywhere (following chains)."""
    if not table:
        return

    def get(n: Node) -> Node:
        while n in table:
            n = table[n]
        return n

    def env(e: dict) -> None:
        for k in e:
            e[k] = get(e[k])
    for b in f.blocks:
        if b.polls is not None:
            env(b.polls.env)
        b.body = [s for s in b.body if not (isinstance(s, Node) and s in table)]
        for s in b.body:
            if isinstance(s, Node):
                s.args = [get(a) for a in s.args]
            elif isinstance(s, Check):
                s.cond = get(s.cond)
                env(s.leave.env)
        match b.end:
            case Goto():
                b.end.args = [get(a) for a in b.end.args]
            case CondGoto():
                b.end.cond = get(b.end.cond)
                for g in (b.end.then, b.end.other):
                    g.args = [get(a) for a in g.args]
            case Leave():
                env(b.end.env)


class IRError(Exception):
    """The IR is malformed: a bug of a pass, never of the program; names the pass when raised between passes."""


def verify_function(f: Function) -> None:
    """Definitions dominate uses (checked along block order and edges), edges pass as many arguments as parameters of
    equal types, block ends are set."""
    defined: dict[Block, set[Node]] = {}
    preds: dict[Block, list[Block]] = {b: [] for b in f.blocks}
    for b in f.blocks:
        for g in b.edges():
            if g.target not in preds:
                raise IRError(f"{f.name}: {b.name} goes to a block outside the function")
            preds[g.target].append(b)
            if [a.type for a in g.args] != [p.type for p in g.target.params]:
                raise IRError(f"{f.name}: {b.name} -> {g.target.name}: arguments {[a.type for a in g.args]} "
                              f"for parameters {[p.type for p in g.target.params]}")
    inputs = set(f.inputs.values())
    everything = set(itertools.chain(inputs, f.nodes(), *(b.params for b in f.blocks)))
    for b in f.blocks:
        defined[b] = set(everything)
    defined[f.blocks[0]] = set(inputs)
    changed = True
    while changed:
        changed = False
        for b in f.blocks:
            start = set(inputs) if b is f.blocks[0] else \
                set.intersection(*[defined[p] for p in preds[b]]) if preds[b] else set(inputs)
            out = start | set(b.params) | set(b.nodes())
            if out != defined[b]:
                defined[b], changed = out, True
    for b in f.blocks:
        if b.end is None:
            raise IRError(f"{f.name}: {b.name} has no end")
        have = (set(inputs) if b is f.blocks[0] or not preds[b] else
                set.intersection(*[defined[p] for p in preds[b]])) | set(b.params)
        for a in b.polls.env.values() if b.polls is not None else ():
            if a not in have:
                raise IRError(f"{f.name}: {b.name}: its poll uses {a.op}, which is not defined there")
        for s in b.body:
            args = s.args if isinstance(s, Node) else [s.cond, *s.leave.env.values()] if isinstance(s, Check) else []
            for a in args:
                if a not in have:
                    raise IRError(f"{f.name}: {b.name}: {getattr(s, 'op', 'check')} uses {a.op} before its definition")
            if isinstance(s, Node):
                have.add(s)
        for a in uses(Block(b.name, b.pc, end=b.end)):
            if a not in have:
                raise IRError(f"{f.name}: {b.name}: its end uses {a.op}, which is not defined there")


def key_text(key: Any) -> str:
    """A register or state in texts: R5, S0, flags, kvlen(S0,3)."""
    if not isinstance(key, tuple):
        return str(key)
    if key and isinstance(key[0], int):                    # the shape of a cell
        return "x".join(map(str, key))
    return f"{key[0]}{key[1]}" if len(key) == 2 else f"{key[0]}({','.join(key_text(k) for k in key[1:])})"


def print_function(f: Function) -> str:
    """Readable text, one node a line."""
    ids: dict[Node, str] = {}
    for key, n in f.inputs.items():
        ids[n] = f"%{key_text(key)}"

    def ref(n: Node) -> str:
        if n.op == "imm":
            return repr(n.attrs["value"])
        if n.op == "weight":
            return f"@{n.attrs['name']}"
        return ids.setdefault(n, f"%{len(ids)}")

    def env(leave: Leave) -> str:
        return ", ".join(f"{key_text(k)}={ref(v)}" for k, v in leave.env.items())

    head = ", ".join(f"{ids[n]}: {n.type}" for n in f.inputs.values())
    out = [f"region {f.name}({head})"]
    out += [f"  guard {a} == {b}" for a, b in f.guards]
    for b in f.blocks:
        params = ", ".join(f"{ref(p)}: {p.type}" for p in b.params)
        out.append(f"{b.name}({params}):  ; pc {b.pc:#x}{' loop' if b.poll else ''}")
        if b.polls is not None:
            out.append(f"  poll else leave {b.polls.pc:#x} {env(b.polls)}".rstrip())
        for s in b.body:
            match s:
                case Node(op="imm") | Node(op="weight"):
                    continue
                case Node():
                    attrs = "".join(f" {k}={v}" for k, v in s.attrs.items() if v is not None)
                    out.append(f"  {ref(s)}: {s.type} = {s.op} {', '.join(map(ref, s.args))}{attrs}"
                               f"  ; {s.where[1]} {s.where[0]:#x}")
                case Check():
                    out.append(f"  check {ref(s.cond)} else leave {s.leave.pc:#x} ({s.leave.reason}) {env(s.leave)}")
                case Retired():
                    out.append(f"  retired {s.count}")
                case _ if hasattr(s, "outputs"):           # a Group of passes.fuse
                    gives = ", ".join(f"{ref(n)}: {n.type}" for n in s.outputs)
                    reads = ", ".join(ref(n) for n, _ in s.inputs)
                    out.append(f"  {gives} = fused({reads}) {' '.join(n.op for n in s.nodes)}")
        match b.end:
            case Goto():
                out.append(f"  goto {b.end.target.name}({', '.join(map(ref, b.end.args))})")
            case CondGoto():
                t, o = b.end.then, b.end.other
                out.append(f"  if {ref(b.end.cond)} goto {t.target.name}({', '.join(map(ref, t.args))}) else "
                           f"{o.target.name}({', '.join(map(ref, o.args))})")
            case Leave():
                out.append(f"  leave {b.end.pc:#x} ({b.end.reason}) {env(b.end)}")
    return "\n".join(out)


def weight_name(t: Tensor, fallback: str) -> str:
    return t.key.rsplit("/", 1)[-1] if t.key else fallback
