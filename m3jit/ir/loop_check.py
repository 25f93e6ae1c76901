"""Checks of loop IR: the types of pure operations, and `verify_kernel` over a whole kernel."""
from __future__ import annotations

from typing import Sequence

from m3jit.ir.loop import COMPARES, FLOATS, INTS, MEMORY, TYPES, Kernel, LoopError, Value


def result_type(op: str, args: Sequence[Value], attrs: dict, where: str) -> str:
    """Type of a pure operation; raises LoopError when operand types do not fit."""
    types = [a.type for a in args]

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise LoopError(f"{where}: {op} expects {what}, got {', '.join(map(str, types))}")
    if op in ("lane",):
        return "i32"
    if op == "group":
        return "i64"
    if op in ("add", "sub", "mul"):
        need(types[0] == types[1] and types[0] in INTS + FLOATS, "two numbers of one type")
        return types[0]
    if op == "div":
        need(types[0] == types[1] and types[0] in FLOATS, "two floats of one type")
        return types[0]
    if op in ("idiv", "irem", "imin", "imax", "shl", "lshr", "ashr"):
        need(types[0] == types[1] and types[0] in INTS, "two integers of one type")
        return types[0]
    if op in ("and", "or", "xor"):
        need(types[0] == types[1] and types[0] in INTS + ("b1",), "two integers or b1 of one type")
        return types[0]
    if op in ("sqrt", "floor", "rint"):
        need(types[0] in FLOATS, "a float")
        return types[0]
    if op in ("neg", "abs"):
        need(types[0] in INTS + FLOATS, "a number")
        return types[0]
    if op == "fma":
        need(len(set(types)) == 1 and types[0] in FLOATS, "three floats of one type")
        return types[0]
    if op in COMPARES:
        need(types[0] == types[1] and types[0] != "b1", "two numbers of one type")
        return "b1"
    if op == "select":
        need(types[0] == "b1" and types[1] == types[2], "b1 and two values of one type")
        return types[1]
    if op == "not":
        need(types[0] == "b1", "b1")
        return "b1"
    if op == "bits":
        need(types[0] in ("i32", "f32", "i64", "f64"), "a 32- or 64-bit value")
        return {"i32": "f32", "f32": "i32", "i64": "f64", "f64": "i64"}[types[0]]
    if op == "cvt":
        need(attrs.get("to") in TYPES, "a target type")
        return attrs["to"]
    if op == "zext":
        need(types[0] == "i32", "an i32")
        return "i64"
    if op == "dot4":
        need(types == ["i32"] * 3, "three i32")
        return "i32"
    if op == "lookup":
        need(types == ["i32"] * 5 and all(a.op == "const" for a in args[1:]), "an i32 and four constants i32")
        return "i32"
    return types[0]                # first, fold, shuffle_down


def verify_kernel(k: Kernel) -> None:
    """Checks definition before use, uniform control, types of operands, memory types, lanes."""
    if k.lanes not in (1, 8, 16, 32, 64):
        raise LoopError(f"{k.name}: lanes must be 1, 8, 16, 32 or 64, got {k.lanes}")
    names = [p.name for p in k.params]
    if len(set(names)) != len(names):
        raise LoopError(f"{k.name}: duplicate parameter names {names}")
    defined: set[int] = set()
    _verify_block(k, k.prologue, defined, in_prologue=True)
    if k.grid.op not in ("const", "param") and id(k.grid) not in defined:
        raise LoopError(f"{k.name}: the grid is not computed in the prologue")
    _verify_block(k, k.body, defined, in_prologue=False)


def _verify_block(k: Kernel, body: Sequence[Value], defined: set[int], in_prologue: bool) -> None:
    local: list[int] = []
    for v in body:
        for a in v.args:
            free = a.op in ("const", "param", "lane", "group") or (v.op == "loop" and a.op == "index")
            if not free and id(a) not in defined:
                raise LoopError(f"{k.name}: {v.op} uses a {a.op} that is not defined before it in scope")
            if in_prologue and (a.varying or a.op in ("group", "lane")):
                raise LoopError(f"{k.name}: the prologue must be uniform and group-independent ({v.op})")
        if v.op in ("loop", "if"):
            if any(a.varying for a in v.args):
                raise LoopError(f"{k.name}: {v.op} needs uniform operands")
            inner = set(defined)
            if v.op == "loop":
                inner.add(id(v.args[2]))
            _verify_block(k, v.body, inner, in_prologue)
            if v.orelse:
                _verify_block(k, v.orelse, set(defined), in_prologue)
        elif v.op == "set":
            cell, val = v.args
            if val.type != cell.type or (val.varying and not cell.varying):
                raise LoopError(f"{k.name}: set of a {cell.type} cell with {val.type}"
                                f"{' varying' if val.varying else ''}")
        elif v.op in ("store", "store_lanes"):
            if MEMORY[v.attrs["dtype"]][1] != v.args[3].type:
                raise LoopError(f"{k.name}: store of {v.args[3].type} as {v.attrs['dtype']}")
            if v.op == "store" and v.args[3].varying and not v.args[2].varying:
                raise LoopError(f"{k.name}: a varying value needs a varying index or store_lanes")
        defined.add(id(v))
        local.append(id(v))
