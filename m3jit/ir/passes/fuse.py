"""Fusion: elementwise chains and row reductions become groups, one kernel each (m3jit.kernels.fused)."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from m3jit.ir.tensor import ELEMENTWISE, Block, Check, Dim, Function, Node, TensorType, uses
from m3jit.isa import types as T

INLINE = ("imm", "from_scalar")           # operands without memory of their own
FUSIBLE_RESULT = (T.F32, T.I32, T.I64, T.BOOL)
MAX_MEMBERS = 64
SHORT_ROW = 8192                          # columns of a row that one thread may do


@dataclass(eq=False)
class Group:
    """One fused kernel.  inputs: (node, access) with access full | row | col | one; outputs are members."""
    nodes: list[Node]
    inputs: list[tuple[Node, str]] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    scalars: list[Node] = field(default_factory=list)      # from_scalar nodes
    flat: bool = True
    columns: Dim = 1
    lead: tuple[Dim, ...] = ()
    open: bool = True

    @property
    def shape(self) -> tuple[Dim, ...]:
        return (*self.lead, self.columns)


def domain(n: Node) -> tuple[Dim, ...] | None:
    """Iteration shape of a node that can be a member, else None."""
    if n.op in ELEMENTWISE and n.is_tensor:
        return n.shape or (1,)
    if n.op == "reduce" and n.attrs["axis"] == n.args[0].rank - 1:
        return n.args[0].shape
    return None


def access(operand: Node, shape: tuple[Dim, ...]) -> str | None:
    """How an operand is read over an iteration shape; None = needs a materialised broadcast.

    An operand of lower rank serves every row also where there is one row only: the rows of several contexts may become
    one launch.  (Not where the row is so long that its parts should go to several threads.)"""
    s = (1,) * (len(shape) - operand.rank) + tuple(operand.shape)
    if s == shape and (operand.rank == len(shape) or shape[-1] == 1 or not isinstance(shape[-1], int) or
                       shape[-1] > SHORT_ROW):
        return "full"
    if all(d == 1 for d in s):
        return "one"
    if s[-1] == shape[-1] and all(d == 1 for d in s[:-1]):
        return "row"
    if s[-1] == 1 and s[:-1] == shape[:-1]:
        return "col"
    return None


def fuse(f: Function) -> None:
    """Replace members by their Group, placed where the last member stood."""
    outside = _uses_outside_groups(f)
    for b in f.blocks:
        _fuse_block(b, outside)


def _uses_outside_groups(f: Function) -> dict[Node, list[Any]]:
    users: dict[Node, list[Any]] = {}
    for b in f.blocks:
        for s in b.body:
            if isinstance(s, Node):
                for a in s.args:
                    users.setdefault(a, []).append(s)
            elif isinstance(s, Check):
                for a in (s.cond, *s.leave.env.values()):
                    users.setdefault(a, []).append("leave")
        for a in uses(Block(b.name, b.pc, end=b.end)):
            users.setdefault(a, []).append("leave")
        for p in b.polls.env.values() if b.polls is not None else ():
            users.setdefault(p, []).append("leave")
    return users


def _fuse_block(b: Block, users: dict[Node, list[Any]]) -> None:
    group_of: dict[Node, Group] = {}
    position: dict[Group, int] = {}
    items: list[Any] = []
    for s in b.body:
        if not isinstance(s, Node) or s.op in INLINE:
            if isinstance(s, Check):
                for a in (s.cond, *s.leave.env.values()):
                    _close(group_of.get(a))
            items.append(s)
            continue
        shape = domain(s)
        if shape is not None and s.op != "reduce":
            for made in _materialise(s, shape):
                _close(group_of.get(made.args[0]))
                users.setdefault(made.args[0], []).append(made)
                items.append(made)
        if shape is None:
            for a in s.args:
                _close(group_of.get(a))
            items.append(s)
            continue
        g = _joinable(s, shape, group_of)
        for a in s.args:
            if group_of.get(a) is not g:
                _close(group_of.get(a))
        if g is None:
            g = Group([s], columns=shape[-1], lead=tuple(shape[:-1]))
            g.open = _fusible(s)
        else:
            g.nodes.append(s)
            items.remove(g)
        group_of[s] = g
        items.append(g)
        if len(g.nodes) >= MAX_MEMBERS:
            g.open = False
    b.body = items
    for g in {id(g): g for g in group_of.values()}.values():
        _finish(g, users)


def _materialise(n: Node, shape: tuple[Dim, ...]) -> list[Node]:
    """Broadcasts for operands whose elements a kernel cannot address directly."""
    out = []
    for i, a in enumerate(n.args):
        if a.op not in INLINE and access(a, shape) is None:
            n.args[i] = Node("broadcast", TensorType(a.dtype, shape), [a], {}, n.where)
            out.append(n.args[i])
    return out


def _close(g: Group | None) -> None:
    if g is not None:
        g.open = False


def _fusible(n: Node) -> bool:
    """Members whose value may stay in a register: types that compute as they are stored."""
    return n.dtype in FUSIBLE_RESULT and all(a.dtype in FUSIBLE_RESULT for a in n.args if a.is_tensor)


def _joinable(n: Node, shape: tuple[Dim, ...], group_of: dict[Node, Group]) -> Group | None:
    """The open group of a producer that n can join: same iteration shape (a row-level node may be narrower)."""
    if not _fusible(n):
        return None
    for a in n.args:
        g = group_of.get(a)
        if g is None or not g.open:
            continue
        if shape == g.shape or (n.op in ELEMENTWISE and _row_level(n, g, group_of)):
            if all(_reads(x, g, group_of) for x in n.args):
                return g
        elif n.op in ELEMENTWISE and len(shape) == len(g.shape) and g.columns == 1 and shape[:-1] == g.lead:
            continue
    return None


def _row_level(n: Node, g: Group, group_of: dict[Node, Group]) -> bool:
    """n works on one value per row of g (for example 1 / sqrt(mean))."""
    return n.shape == (*g.lead, 1) and len(g.shape) > 0


def _reads(x: Node, g: Group, group_of: dict[Node, Group]) -> bool:
    if x.op in INLINE or group_of.get(x) is g:
        return x.op in INLINE or x.rank == len(g.shape)
    return access(x, g.shape) is not None


def _finish(g: Group, users: dict[Node, list[Any]]) -> None:
    members = set(g.nodes)
    seen: dict[Node, None] = {}
    for n in g.nodes:
        for a in n.args:
            if a not in members and a not in seen:
                seen[a] = None
    for a in seen:
        if a.op == "from_scalar":
            g.scalars.append(a)
        elif a.op != "imm":
            g.inputs.append((a, access(a, g.shape)))
    g.outputs = [n for n in g.nodes if any(u == "leave" or u not in members for u in users.get(n, []))]
    g.flat = all(how in ("full", "one") for _, how in g.inputs) and \
        not any(n.op == "reduce" for n in g.nodes) and all((n.shape or (1,)) == g.shape for n in g.nodes)
    if g.flat:
        from m3jit.ir.tensor import dim_mul
        g.columns, g.lead = dim_mul(*g.shape), ()
