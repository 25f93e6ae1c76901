"""Patterns that have a kernel of their own: silu(gate) * up over two quantised matrices."""
from __future__ import annotations

from m3jit.ir.tensor import Function, Node, uses


def match_patterns(f: Function) -> None:
    """mul(mul(g, sigmoid(g)), u) with g and u integer products of one activation becomes one node."""
    users: dict[Node, int] = {}
    for b in f.blocks:
        for n in uses(b):
            users[n] = users.get(n, 0) + 1
    for b in f.blocks:
        for n in list(b.nodes()):
            found = _gated(n, users)
            if found is not None:
                g, u = found
                n.op, n.args = "qdot_gated", [g.args[0], g.args[1], u.args[1]]


def _gated(n: Node, users: dict[Node, int]) -> tuple[Node, Node] | None:
    if n.op != "mul" or len(n.args) != 2:
        return None
    m, u = n.args
    if m.op != "mul" or u.op != "qdot" or users.get(m) != 1 or users.get(u) != 1 or len(m.args) != 2:
        return None
    g, s = m.args
    if g.op != "qdot" or s.op != "sigmoid" or s.args[0] is not g or users.get(s) != 1 or users.get(g) != 2:
        return None
    same = g.args[0] is u.args[0] and g.args[1].dtype.block == u.args[1].dtype.block and g.type == u.type
    return (g, u) if same else None
