"""Facts about a kernel that matter where a group is a work-group or thread block."""
from __future__ import annotations

from m3jit.ir.loop import MEMORY, Kernel, Value, walk

_TREE_BYTES = {"b1": 1, "i32": 4, "i64": 8, "f32": 4, "f64": 8}


def group_memory_bytes(kernel: Kernel) -> int:
    """Memory shared by the lanes of a group: scratch arrays, and one slot per lane for each type that crosses lanes."""
    total, trees = 0, set()
    for v in walk(kernel.body):
        if v.op == "scratch":
            total += -(-MEMORY[v.attrs["dtype"]][0] * v.attrs["count"] // 16) * 16
        elif v.op in ("fold", "shuffle_down", "first"):
            trees.add(v.args[0].type)
    return total + kernel.lanes * sum(_TREE_BYTES[t] for t in trees)


def uses_type(kernel: Kernel, type: str) -> bool:
    """Does a value of this type occur (parameters and constants included)?"""
    def of(v: Value) -> bool:
        return v.type == type or any(a.type == type for a in v.args)
    return any(p.kind == type for p in kernel.params) or any(map(of, walk([*kernel.prologue, *kernel.body])))
