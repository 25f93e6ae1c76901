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


def fenced_stores(kernel: Kernel) -> set[int]:
    """ids of the uniform stores that need a barrier before and after: uniform code runs once per group in the loop IR,
    but here every lane runs its loads and lane 0 its stores, and some uniform load reads the same array."""
    if kernel.lanes == 1:
        return set()

    def base(v: Value) -> object:
        return v.args[0].attrs["name"] if v.args[0].op == "param" else id(v.args[0])
    statements = list(walk(kernel.body))
    read = {base(v) for v in statements if v.op == "load" and not v.varying}
    return {id(v) for v in statements if v.op == "store" and not v.varying and base(v) in read}


def uses_type(kernel: Kernel, type: str) -> bool:
    """Does a value of this type occur (parameters and constants included)?"""
    def of(v: Value) -> bool:
        return v.type == type or any(a.type == type for a in v.args)
    return any(p.kind == type for p in kernel.params) or any(map(of, walk([*kernel.prologue, *kernel.body])))
