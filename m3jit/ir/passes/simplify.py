"""Trivial parameters, constant folding, common subexpressions, dead code."""
from __future__ import annotations

from typing import Any

from m3jit.ir.tensor import (B1T, I64T, Check, CondGoto, DimExpr, Function, Goto, Node, Sym, TensorType, dim_syms,
                             substitute)
from m3jit.ir.trace import wrap64

EFFECTS = {"kv_append"}                   # nodes that stay although nobody reads them


def remove_trivial_parameters(f: Function) -> None:
    """A parameter that receives one value only (besides itself) is that value."""
    while True:
        incoming: dict[Node, set[Node]] = {p: set() for b in f.blocks for p in b.params}
        for b in f.blocks:
            for g in b.edges():
                for p, a in zip(g.target.params, g.args):
                    incoming[p].add(a)
        table = {}
        for p, values in incoming.items():
            rest = values - {p}
            if len(rest) == 1:
                table[p] = rest.pop()
        if not table:
            break
        _drop_params(f, set(table))
        substitute(f, table)
    for b in f.blocks:                     # a register that still holds what it held at entry is not written back
        for leave in b.leaves():
            leave.env = {k: v for k, v in leave.env.items() if not (v.op == "input" and v.attrs["key"] == k)}



def _drop_params(f: Function, gone: set[Node]) -> None:
    for b in f.blocks:
        for g in b.edges():
            keep = [i for i, p in enumerate(g.target.params) if p not in gone]
            g.args = [g.args[i] for i in keep]
    for b in f.blocks:
        b.params = [p for p in b.params if p not in gone]


_INT = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
        "min": min, "max": max, "neg": lambda a: -a,
        "shl": lambda a, b: a << (b & 63), "sar": lambda a, b: a >> (b & 63),
        "shr": lambda a, b: (a % 2 ** 64) >> (b & 63)}
_BOOL = {"eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b}


def fold_constants(f: Function) -> None:
    """i64 operations on constants; checks of constant conditions that hold."""
    table: dict[Node, Node] = {}
    for b in f.blocks:
        body: list[Any] = []
        for s in b.body:
            if isinstance(s, Node):
                s.args = [table.get(a, a) for a in s.args]
                if s.args and all(a.op == "const" and a.type == I64T for a in s.args):
                    values = [a.attrs["value"] for a in s.args]
                    if s.op in _INT:
                        new = Node("const", I64T, [], {"value": wrap64(_INT[s.op](*values))}, s.where)
                        table[s] = new
                        s = new
                    elif s.op in _BOOL:
                        s = _fold_bool(s, _BOOL[s.op](*values), table)
            elif isinstance(s, Check) and s.cond.op == "true":
                continue
            body.append(s)
        b.body = body
    substitute(f, table)
    for b in f.blocks:
        b.body = [s for s in b.body if not (isinstance(s, Check) and s.cond.op == "true")]


def _fold_bool(s: Node, value: bool, table: dict[Node, Node]) -> Node:
    if not value:
        return s
    new = Node("true", B1T, [], {}, s.where)
    table[s] = new
    return new


def eliminate_common(f: Function) -> None:
    """Equal operations of one block; weights and constants of the whole region."""
    table: dict[Node, Node] = {}
    shared: dict[Any, Node] = {}
    entry = f.blocks[0]
    hoisted: list[Node] = []
    for b in f.blocks:
        local: dict[Any, Node] = {}
        body: list[Any] = []
        for s in b.body:
            if not isinstance(s, Node):
                body.append(s)
                continue
            s.args = [table.get(a, a) for a in s.args]
            key = _key(s)
            if s.op in ("weight", "imm", "const", "dim"):
                if key in shared:
                    table[s] = shared[key]
                else:
                    shared[key] = s
                    hoisted.append(s)
                continue
            if key is not None and key in local:
                table[s] = local[key]
                continue
            if key is not None:
                local[key] = s
            body.append(s)
        b.body = body
    entry.body[:0] = hoisted
    substitute(f, table)


def _key(n: Node) -> Any:
    if n.op in EFFECTS or n.op == "true":
        return None
    attrs = tuple(sorted((k, id(v) if k == "tensor" else (type(v).__name__, repr(v))) for k, v in n.attrs.items()
                         if k != "name"))
    return (n.op, n.type, tuple(id(a) for a in n.args), attrs)


def eliminate_dead(f: Function) -> None:
    """Drop nodes and parameters nobody reads (parameters that only feed themselves included)."""
    live: set[Node] = set()
    work: list[Node] = []
    feeds: dict[Node, list[Node]] = {}
    for b in f.blocks:
        for g in b.edges():
            for p, a in zip(g.target.params, g.args):
                feeds.setdefault(p, []).append(a)
        for s in b.body:
            if isinstance(s, Check):
                work += [s.cond, *s.leave.env.values()]
            elif isinstance(s, Node) and s.op in EFFECTS:
                work.append(s)
        if isinstance(b.end, CondGoto):
            work.append(b.end.cond)
        elif not isinstance(b.end, Goto):
            work += b.end.env.values()
        if b.polls is not None:
            work += b.polls.env.values()
    while work:
        n = work.pop()
        if n in live:
            continue
        live.add(n)
        work += n.args
        work += feeds.get(n, [])
    for b in f.blocks:
        b.body = [s for s in b.body if not isinstance(s, Node) or s in live]
    _drop_params(f, {p for b in f.blocks for p in b.params if p not in live})
    used = {s for a, b in f.guards for s in (*dim_syms(a), *dim_syms(b))}
    for n in live:
        if isinstance(n.type, TensorType):
            used.update(s for d in n.type.shape for s in dim_syms(d))
        for v in n.attrs.values():
            values = v if isinstance(v, tuple) else (v,)
            used.update(s for d in values if isinstance(d, (Sym, DimExpr)) for s in dim_syms(d))
    f.syms = {s: where for s, where in f.syms.items() if s in used}
    needed = {key for key, _ in f.syms.values()}
    for key in [k for k, n in f.inputs.items() if n not in live and k not in needed and k not in f.read]:
        del f.inputs[key]
