"""Facts about a kernel that decide how it is rendered: lanes that are read, masks that guard it, register pressure."""
from __future__ import annotations

from typing import Sequence

from m3jit.ir.loop import Kernel, PURE, Value, walk

_CROSS_LANE = ("shuffle_down", "first", "fold", "scratch", "sync")


def lanes_read(kernel: Kernel) -> dict[int, int]:
    """id of a varying pure value or load -> bit mask of the lanes that anything depends on.

    A tree built from shuffle_down and `first` reads only half of the lanes at every level; the rest is not computed."""
    everything = (1 << kernel.lanes) - 1
    read: dict[int, int] = {}

    def use(a: Value, lanes: int) -> None:
        read[id(a)] = read.get(id(a), 0) | lanes

    def visit(body: Sequence[Value]) -> None:
        for v in reversed(body):
            if v.orelse:
                visit(v.orelse)
            if v.body is not None:
                visit(v.body)
            mine = read.get(id(v), 0)
            if v.op == "first":
                use(v.args[0], 1)
            elif v.op == "shuffle_down":
                by = v.attrs["by"]
                keep = mine & ~(everything >> by)
                use(v.args[0], ((mine & (everything >> by)) << by) | keep)
            elif v.op in PURE and v.op != "fold":
                for a in v.args:
                    use(a, mine if v.varying else everything)
            else:
                for a in v.args:
                    use(a, everything)

    visit(kernel.body)
    return read


def lanes_are_independent(kernel: Kernel) -> bool:
    """May a group be computed a few lanes at a time?  No cross-lane operation, nothing shared, no uniform store."""
    for v in walk(kernel.body):
        if v.op in _CROSS_LANE or (v.op == "store" and not v.args[2].varying):
            return False
        if v.op == "load" and any(p.access != "r" for p in kernel.params
                                  if p.kind == "ptr" and p.name == v.args[0].attrs.get("name")):
            return False
    return True


def guard_masks(kernel: Kernel) -> list[Value]:
    """Top-level comparisons that mask memory operations and depend only on parameters, prologue, group and lane."""
    ready = {id(v) for v in walk(kernel.prologue)}
    pure: set[int] = set()
    for v in kernel.body:
        if v.op in PURE and all(a.op in ("const", "param", "lane", "group") or id(a) in ready or id(a) in pure
                                for a in v.args):
            pure.add(id(v))
    used: dict[int, Value] = {}
    for v in walk(kernel.body):
        if v.attrs.get("masked") and v.args[-1].op == "lt" and v.args[-1].varying and id(v.args[-1]) in pure:
            used[id(v.args[-1])] = v.args[-1]
    return list(used.values())


def statements(kernel: Kernel) -> int:
    return sum(1 for _ in walk(kernel.body))


def pressure(kernel: Kernel) -> int:
    """Most varying values alive at once, in 32-bit vectors, counting variables as alive throughout."""
    order: dict[int, int] = {}
    last: dict[int, int] = {}
    weight: dict[int, int] = {}
    fixed = position = 0

    def visit(body: Sequence[Value]) -> None:
        nonlocal position, fixed
        for v in body:
            position += 1
            for a in v.args:
                if a.varying and id(a) in order:
                    last[id(a)] = position
            if v.op == "var" and v.varying:
                fixed += 2 if v.type in ("i64", "f64") else 1
            elif v.varying and v.type not in (None, "b1"):
                order[id(v)], weight[id(v)] = position, 2 if v.type in ("i64", "f64") else 1
            if v.body is not None:
                visit(v.body)
            if v.orelse:
                visit(v.orelse)

    visit(kernel.body)
    change = [0] * (position + 2)
    for key, start in order.items():
        if key in last:
            change[start] += weight[key]
            change[last[key]] -= weight[key]
    alive = most = 0
    for c in change:
        alive += c
        most = max(most, alive)
    return most + fixed
