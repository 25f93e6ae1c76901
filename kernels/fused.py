"""Fused kernels: elementwise chains and row reductions, built from a group of tensor-IR nodes.

A group has one iteration domain, rows x columns (columns = last axis).  "flat" groups have no row structure and are
cut into chunks of `CHUNK` elements.  A reduction along the last axis splits the work into phases: phase p runs over the
columns with the results of the reductions of earlier phases at hand; element values are recomputed in each phase, or
read back where an earlier phase stored them.  Fusing changes no byte: every node computes what it computes alone.

Parameter order of the kernel: input pointers, output pointers, [rows], columns, scalars.
"""
from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import Any

from m3jit.ir import scalar_math
from m3jit.ir.loop import Kernel, Value
from m3jit.ir.loop_builder import Builder
from m3jit.ir.passes.fuse import Group
from m3jit.ir.tensor import Node
from m3jit.isa import types as T
from m3jit.kernels.reduce import combine

CHUNK = 4096                      # elements of one group of a flat kernel
LANES = 64

MEMORY_OF = {"F32": "f32", "F16": "f16", "BF16": "bf16", "I8": "i8", "U8": "u8", "I16": "i16", "I32": "i32",
             "I64": "i64", "BOOL": "bool"}


def compute_type(dtype: T.DType) -> str:
    """Loop-IR type an element of `dtype` has while it is computed with."""
    if dtype.kind == "float":
        return "f32"
    return "b1" if dtype.kind == "bool" else "i64" if dtype is T.I64 else "i32"


_built: OrderedDict[tuple, Kernel] = OrderedDict()      # the latest used last
_KEPT = 256
_lock = threading.Lock()


def build(group: Group, name: str) -> Kernel:
    """The kernel of a group; equal groups share one (of those used lately: a kernel is a hundred kilobytes)."""
    key = (name, *structure(group))
    with _lock:
        kernel = _built.get(key)
        if kernel is None:
            kernel = _built[key] = _Fused(group, name).build()
            while len(_built) > _KEPT:
                _built.popitem(last=False)
        _built.move_to_end(key)
        return kernel


def structure(g: Group) -> tuple:
    """Everything the kernel of a group depends on."""
    ids: dict[Node, Any] = {n: ("in", i) for i, (n, _) in enumerate(g.inputs)}
    ids |= {n: ("scalar", i) for i, n in enumerate(g.scalars)}

    def operand(a: Node) -> Any:
        if a.op == "imm":
            return ("imm", a.dtype.name, repr(a.attrs["value"]))
        return ids[a]
    members = []
    for i, n in enumerate(g.nodes):
        attrs = tuple(sorted((k, repr(v)) for k, v in n.attrs.items()))
        members.append((n.op, n.dtype.name, attrs, tuple(operand(a) for a in n.args)))
        ids[n] = ("node", i)
    columns = g.columns if isinstance(g.columns, int) else None
    return (tuple((n.dtype.name, how) for n, how in g.inputs), tuple(n.dtype.name for n in g.scalars), tuple(members),
            tuple(ids[n] for n in g.outputs), g.flat, columns if not g.flat else None)


def is_reduce(n: Node) -> bool:
    return n.op == "reduce"


class _Fused:
    def __init__(self, group: Group, name: str):
        self.g = group
        self.b = Builder(name, LANES)
        self.members = set(group.nodes)
        self.level: dict[Node, str] = {}           # "col" or "row"
        self.depth: dict[Node, int] = {}
        self.row_values: dict[Node, Value] = {}    # row-level values computed so far in this row
        self.stored: dict[Node, int] = {}          # output -> phase that stored it
        self.access = dict(group.inputs)
        self._classify()

    def _classify(self) -> None:
        for n in self.g.nodes:
            args = [a for a in n.args]
            self.depth[n] = max([self.depth.get(a, 0) for a in args], default=0) + (1 if is_reduce(n) else 0)
            varying = any(self.level.get(a) == "col" or self.access.get(a) in ("full", "row") for a in args)
            self.level[n] = "row" if is_reduce(n) or not varying else "col"
            if self.g.flat:
                self.level[n] = "col"

    def build(self) -> Kernel:
        b, g = self.b, self.g
        self.buffers = {n: b.ptr(f"in{i}", "r", MEMORY_OF[n.dtype.name]) for i, (n, _) in enumerate(g.inputs)}
        self.out_buffers = {n: b.ptr(f"out{i}", "rw", MEMORY_OF[n.dtype.name]) for i, n in enumerate(g.outputs)}
        rows = None if g.flat else b.scalar("rows")
        columns = b.scalar("columns")
        self.static_columns = g.columns if isinstance(g.columns, int) else None
        self.scalar_params = {s: b.scalar(f"s{i}", {"f32": "f32", "i64": "i64", "i32": "i64"}[compute_type(s.dtype)])
                              for i, s in enumerate(g.scalars)}
        if g.flat:
            b.set_grid((columns + (CHUNK - 1)) // CHUNK)
            lo = b.group * CHUNK
            self.row = None
            self.phase(0, lo, b.imin(lo + CHUNK, columns), columns)
        else:
            b.set_grid(rows)
            self.row = b.group
            self.row_base = b.group * columns
            last = max(self.depth.values(), default=0)
            self.row_members(0)
            for p in range(last + 1):
                if self.phase_needed(p):
                    self.phase(p, b.i64(0), columns, columns)
                self.row_members(p + 1)
            for n in g.outputs:
                if self.level[n] == "row":
                    self.store(n, self.row_values[n], b.group, None)
        return b.finish()

    # -- phases -----------------------------------------------------------------------------------------------------
    def reduces(self, p: int) -> list[Node]:
        return [n for n in self.g.nodes if is_reduce(n) and self.depth[n] == p + 1]

    def outputs(self, p: int) -> list[Node]:
        return [n for n in self.g.outputs if self.level[n] == "col" and self.depth[n] == p]

    def phase_needed(self, p: int) -> bool:
        return bool(self.reduces(p) or self.outputs(p))

    def row_members(self, depth: int) -> None:
        """Row-level elementwise nodes of this depth (after the reductions they use)."""
        if self.g.flat:
            return
        for n in self.g.nodes:
            if self.level[n] == "row" and not is_reduce(n) and self.depth[n] == depth:
                self.row_values[n] = self.compute(n, [self.row_value(a) for a in n.args])

    def row_value(self, a: Node) -> Value:
        if a in self.row_values:
            return self.row_values[a]
        if a in self.access:
            v = self.load_uniform(a)
            self.row_values[a] = v
            return v
        return self.leaf(a)

    def phase(self, p: int, lo: Value, hi: Value, columns: Value) -> None:
        b = self.b
        accumulators = [(n, b.var(self.accumulator_type(n), self.identity(n))) for n in self.reduces(p)]
        for a in self.hoisted(p):
            self.row_value(a)
        full = lo + (hi - lo) // LANES * LANES
        static = self.static_columns is not None and self.static_columns % LANES == 0 and not self.g.flat
        with b.loop(lo, hi if static else full, LANES) as c:
            self.step(p, c, None, accumulators)
        if not static:
            with b.if_(full < hi):
                self.step(p, full, b.in_range(full, hi), accumulators)
        for n, acc in accumulators:
            self.row_values[n] = self.finish_reduce(n, acc.get())
        for n in self.outputs(p):
            self.stored[n] = p

    def hoisted(self, p: int) -> list[Node]:
        """Uniform inputs the phase reads: loaded once before the loop."""
        if self.g.flat:
            return [n for n, how in self.g.inputs if how == "one"]
        return [n for n, how in self.g.inputs if how in ("one", "col")]

    def step(self, p: int, c: Value, mask: Value | None, accumulators: list) -> None:
        cache: dict[Node, Value] = {}
        for n, acc in accumulators:
            v = self.element(n.args[0], p, c, mask, cache)
            v = self.widen(n, v)
            if mask is not None:
                v = self.b.select(mask, v, self.b.const(v.type, self.identity(n)))
            acc.set(self.combine(n, acc.get(), v))
        for n in self.outputs(p):
            v = self.element(n, p, c, mask, cache)
            self.store(n, v, c if self.row is None else self.row_base + c, mask, lanes=True)

    def element(self, n: Node, p: int, c: Value, mask: Value | None, cache: dict[Node, Value]) -> Value:
        """Value of n at the 64 columns from c."""
        if n in cache:
            return cache[n]
        if n in self.row_values:
            return self.row_values[n]
        if n in self.members:
            if self.stored.get(n, p) < p:
                v = self.load_lanes(self.out_buffers[n], n, c if self.row is None else self.row_base + c, mask)
            else:
                v = self.compute(n, [self.element(a, p, c, mask, cache) for a in n.args])
        elif n in self.access:
            how = self.access[n]
            if how in ("one", "col"):
                v = self.row_value(n)
            else:
                index = c if how == "row" or self.row is None else self.row_base + c
                v = self.load_lanes(self.buffers[n], n, index, mask)
        else:
            v = self.leaf(n)
        cache[n] = v
        return v

    # -- leaves and memory ------------------------------------------------------------------------------------------
    def leaf(self, n: Node) -> Value:
        t = compute_type(n.dtype)
        if n.op == "imm":
            v = n.attrs["value"]
            if t == "f32":
                import numpy as np
                return self.b.f32(float(np.float32(v)))
            return self.b.const(t, bool(v) if t == "b1" else int(v))
        if n.op == "from_scalar":
            v = self.scalar_params[n]
            return self.b.cvt(v, "i32") if t == "i32" else v
        raise AssertionError(f"{n.op} is not a leaf of the group")

    def typed(self, n: Node, v: Value) -> Value:
        return self.b.pure("ne", v, self.b.i32(0)) if n.dtype.kind == "bool" else v

    def load_uniform(self, n: Node) -> Value:
        index: Any = self.b.i64(0) if self.access[n] == "one" else self.row
        return self.typed(n, self.b.load(MEMORY_OF[n.dtype.name], self.buffers[n], index))

    def load_lanes(self, buffer, n: Node, index: Value, mask: Value | None) -> Value:
        return self.typed(n, self.b.load_lanes(MEMORY_OF[n.dtype.name], buffer, index, mask=mask))

    def store(self, n: Node, v: Value, index: Value, mask: Value | None, lanes: bool = False) -> None:
        b = self.b
        if n.dtype.kind == "float":
            v = b.canonical_nan(v)
        elif n.dtype.kind == "bool":
            v = b.cvt(v, "i32")
        memory = MEMORY_OF[n.dtype.name]
        if lanes:
            b.store_lanes(memory, self.out_buffers[n], index, v, mask=mask)
        else:
            b.store(memory, self.out_buffers[n], index, v)

    # -- operations -------------------------------------------------------------------------------------------------
    def compute(self, n: Node, args: list[Value]) -> Value:
        return compute(self.b, n, args)

    def accumulator_type(self, n: Node) -> str:
        return "f32" if n.args[0].dtype.kind == "float" else \
            "i64" if n.attrs["op"] in ("SUM", "PROD") else compute_type(n.args[0].dtype)

    def identity(self, n: Node) -> int | float:
        op, dtype = n.attrs["op"], n.args[0].dtype
        if op == "SUM":
            return 0.0 if dtype.kind == "float" else 0
        if op == "PROD":
            return 1.0 if dtype.kind == "float" else 1
        if dtype.kind == "float":
            return math.nan
        bits = 8 * dtype.nbytes
        low, high = (0, 2 ** bits - 1) if dtype is T.U8 else (-2 ** (bits - 1), 2 ** (bits - 1) - 1)
        return low if op == "MAX" else high

    def widen(self, n: Node, v: Value) -> Value:
        return self.b.cvt(v, self.accumulator_type(n)) if v.type != self.accumulator_type(n) else v

    def combine(self, n: Node, acc: Value, v: Value) -> Value:
        return combine(self.b, n.attrs["op"], acc, v)

    def finish_reduce(self, n: Node, acc: Value) -> Value:
        return self.b.fold_pairs([acc], lambda own, other: [self.combine(n, own[0], other[0])])[0] \
            if n.attrs["op"] in ("MAX", "MIN") and acc.type == "f32" else \
            self.b.fold(acc, {"SUM": "add", "PROD": "mul", "MAX": "imax", "MIN": "imin"}[n.attrs["op"]])


_DIRECT = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "neg": "neg", "abs": "abs", "sqrt": "sqrt",
           "floor": "floor", "rint": "rint", "lt": "lt", "le": "le", "eq": "eq", "ne": "ne"}
_MATH = {"exp", "log", "sin", "cos", "tanh", "erf", "sigmoid", "softplus"}


def compute(b: Builder, n: Node, args: list[Value]) -> Value:
    """Loop IR of one elementwise node.  Narrow integers are computed in i32 and wrap at the store."""
    op = n.op
    if op in _DIRECT:
        return b.pure(_DIRECT[op], *args)
    if op in _MATH:
        return getattr(scalar_math, op)(b, args[0])
    if op == "fma":
        return b.fma(*args)
    if op == "select":
        return b.select(*args)
    if op == "logical_not":
        return b.logical_not(args[0])
    if op in ("minimum", "maximum"):
        if args[0].type == "f32":
            return (b.fmin if op == "minimum" else b.fmax)(*args)
        return (b.imin if op == "minimum" else b.imax)(*args)
    if op == "cast":
        return cast(b, args[0], n.args[0].dtype, n.dtype)
    raise AssertionError(f"no loop IR for elementwise {op}")


def cast(b: Builder, v: Value, source: T.DType, target: T.DType) -> Value:
    """CAST: float -> int rounds half to even and saturates, NaN -> 0; int -> int wraps (at the store); to BOOL: != 0;
    int -> float rounds to nearest even."""
    t = compute_type(target)
    if target.kind == "bool":
        return v if v.type == "b1" else b.pure("ne", v, b.const(v.type, 0))
    if v.type == "b1":
        return b.cvt(v, t) if t != "f32" else b.cvt(b.cvt(v, "i32"), "f32")
    if target.kind == "float":
        return v if v.type == "f32" else b.cvt(v, "f32")
    if v.type != "f32":
        return v if v.type == t else b.cvt(v, t)
    bits = 8 * target.nbytes
    low, high = (0, 2 ** bits - 1) if target is T.U8 else (-2 ** (bits - 1), 2 ** (bits - 1) - 1)
    # the largest f32 below 2^(bits-1) bounds the range in which the conversion itself is defined
    r = b.rint(v)
    top = float(high) if bits < 32 else float(2 ** (bits - 1))
    below = b.select(r < float(low), b.f32(float(low)), r)
    safe = b.select(below >= top, b.f32(0.0), below)
    safe = b.select(b.pure("eq", v, v), safe, b.f32(0.0))
    i = b.cvt(safe, t)
    return b.select(below >= top, b.const(t, high), i)
