"""Writing a kernel of loop IR: a `Builder` types each operation and keeps its place in the program."""
from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Sequence

from m3jit.ir.loop import FLOATS, MEMORY, PURE, Buffer, Kernel, LoopError, Param, Value
from m3jit.ir.loop_check import result_type, verify_kernel


class Builder:
    """Builds one kernel.  Typical use::

        b = Builder("scale", lanes=64)
        x, y = b.ptr("x", "r", "f32"), b.ptr("y", "w", "f32")
        n, k = b.scalar("n", "i64"), b.scalar("k", "f32")
        b.set_grid((n + 63) // 64)
        base = b.group * 64
        inside = b.in_range(base, n)
        v = b.load_lanes("f32", x, base, mask=inside)
        b.store_lanes("f32", y, base, v * k, mask=inside)
        kernel = b.finish()
    """

    def __init__(self, name: str, lanes: int = 64):
        self.name, self.lanes = name, lanes
        self.params: list[Param] = []
        self.prologue: list[Value] = []
        self.body: list[Value] = []
        self._stack = [self.prologue]
        self._grid: Value | None = None
        self._consts: dict[tuple, Value] = {}
        self._lane = self._group = None

    # -- parameters -------------------------------------------------------------------------------------------
    def ptr(self, name: str, access: str, dtype: str) -> Buffer:
        self.params.append(Param(name, "ptr", access, dtype))
        return Buffer(Value("param", "ptr", False, attrs={"name": name}, owner=self))

    def scalar(self, name: str, type: str = "i64") -> Value:
        self.params.append(Param(name, type))
        return Value("param", type, False, attrs={"name": name}, owner=self)

    def set_grid(self, groups: Value | int) -> None:
        """Ends the prologue: what follows is the body of one group."""
        self._grid = self.lift(groups, "i64")
        self._stack = [self.body]
        # constants of the prologue stay usable: they are immediate operands, not statements

    @property
    def group(self) -> Value:
        if self._group is None:
            self._group = Value("group", "i64", False, owner=self)
        return self._group

    @property
    def lane(self) -> Value:
        if self._lane is None:
            self._lane = Value("lane", "i32", True, owner=self)
        return self._lane

    # -- constants and pure operations ------------------------------------------------------------------------
    def const(self, type: str, value: int | float | bool) -> Value:
        """An immediate.  Floats are given as Python floats (f32: rounded to f32 when rendered; must be exact)."""
        key = (type, value.hex() if isinstance(value, float) else value)
        if key not in self._consts:
            self._consts[key] = Value("const", type, False, attrs={"value": value}, owner=self)
        return self._consts[key]

    def i64(self, v: int) -> Value: return self.const("i64", int(v))
    def i32(self, v: int) -> Value: return self.const("i32", int(v))
    def f32(self, v: float) -> Value: return self.const("f32", float(v))
    def f64(self, v: float) -> Value: return self.const("f64", float(v))
    def b1(self, v: bool) -> Value: return self.const("b1", bool(v))

    def lift(self, v: Any, type: str) -> Value:
        if isinstance(v, Value):
            return v
        return self.const(type, float(v) if type in FLOATS else bool(v) if type == "b1" else int(v))

    def emit(self, v: Value) -> Value:
        v.owner = self
        self._stack[-1].append(v)
        return v

    def pure(self, op: str, /, *args: Value, **attrs: Any) -> Value:
        count, _ = PURE[op]
        if len(args) != count:
            raise LoopError(f"{self.name}: {op} takes {count} operands, got {len(args)}")
        t = result_type(op, args, attrs, self.name)
        varying = op == "shuffle_down" or (op not in ("first", "fold") and any(a.varying for a in args))
        return self.emit(Value(op, t, varying, args, attrs))

    def fma(self, a, b, c) -> Value:
        t = next(x.type for x in (a, b, c) if isinstance(x, Value))
        return self.pure("fma", self.lift(a, t), self.lift(b, t), self.lift(c, t))

    def sqrt(self, a): return self.pure("sqrt", a)
    def abs(self, a): return self.pure("abs", a)
    def select(self, c, a, b):
        t = next(x.type for x in (a, b) if isinstance(x, Value))
        return self.pure("select", c, self.lift(a, t), self.lift(b, t))
    def imin(self, a, b): return a._b("imin", b)
    def imax(self, a, b): return a._b("imax", b)
    def lshr(self, a, n): return a._b("lshr", n)
    def bits(self, a): return self.pure("bits", a)
    def floor(self, a): return self.pure("floor", a)
    def rint(self, a): return self.pure("rint", a)
    def cvt(self, a, to: str): return a if a.type == to else self.pure("cvt", a, to=to)
    def zext(self, a): return self.pure("zext", a)
    def logical_not(self, a): return self.pure("not", a)
    def dot4(self, acc, u8x4, s8x4): return self.pure("dot4", acc, u8x4, s8x4)

    def lookup(self, codes: Value, table: Sequence[int]) -> Value:
        """Bytes 0..15 of i32 `codes` replaced by bytes of the table, four i32 words."""
        return self.pure("lookup", codes, *map(self.i32, table))

    def first(self, a): return self.pure("first", a)
    def fold(self, a, op: str): return self.pure("fold", a, op=op)
    def shuffle_down(self, a, by: int): return self.pure("shuffle_down", a, by=by)

    def fmax(self, a: Value, b: Value | float) -> Value:
        """a > b or b is NaN ? a : b ... defined as: a if (b < a) or (b != b) else b, so a NaN operand loses."""
        b = self.lift(b, a.type)
        return self.select((b < a) | b_is_nan(self, b), a, b)

    def fmin(self, a: Value, b: Value | float) -> Value:
        """a if (a < b) or b is NaN else b: a NaN operand loses."""
        b = self.lift(b, a.type)
        return self.select((a < b) | b_is_nan(self, b), a, b)

    def fold_pairs(self, values: Sequence[Value], combine: Callable) -> list[Value]:
        """Halving tree over lanes of several values at once: combine(own, other) -> new list; lane 0's results."""
        cur, n = list(values), self.lanes // 2
        while n:
            other = [self.shuffle_down(v, n) for v in cur]
            cur, n = list(combine(cur, other)), n // 2
        return [self.first(v) for v in cur]

    # -- memory -----------------------------------------------------------------------------------------------
    def load(self, dtype: str, buf: Buffer, index: Value | int, mask: Value | None = None) -> Value:
        """Element `index` (i64/i32, uniform -> uniform value; varying -> gather).  Masked-off lanes read 0."""
        return self._memory("load", dtype, buf, index, None, mask)

    def store(self, dtype: str, buf: Buffer, index: Value | int, value: Value, mask: Value | None = None) -> None:
        """Uniform index and value: one store per group.  Varying: a scatter (indices of active lanes distinct)."""
        self._memory("store", dtype, buf, index, value, mask)

    def load_lanes(self, dtype: str, buf: Buffer, base: Value | int, mask: Value | None = None,
                   ahead: int = 0) -> Value:
        """Lane l reads element base + l (contiguous: one vector load).  Masked-off lanes read 0.

        ahead > 0: a hint that the bytes that far behind the address will be read soon (they need not exist)."""
        v = self._memory("load_lanes", dtype, buf, base, None, mask)
        if ahead:
            v.attrs["ahead"] = ahead
        return v

    def store_lanes(self, dtype: str, buf: Buffer, base: Value | int, value: Value, mask: Value | None = None) -> None:
        """Lane l writes element base + l; f32 -> f16/bf16 rounds to nearest even, ints wrap; NaN is NOT changed
        here (canonicalise with `canonical_nan` where the op's contract stores a float result)."""
        self._memory("store_lanes", dtype, buf, base, value, mask)

    def _memory(self, op, dtype, buf, index, value, mask):
        index = self.lift(index, "i64")
        offset = buf.offset if buf.offset is not None else self.i64(0)
        args = [buf.base, offset, index]
        if value is not None:
            args.append(self.lift(value, MEMORY[dtype][1]))
        attrs = {"dtype": dtype}
        if mask is not None:
            args.append(mask)
            attrs["masked"] = True
        is_load = value is None
        varying = op in ("load_lanes", "store_lanes") or index.varying
        return self.emit(Value(op, MEMORY[dtype][1] if is_load else None, varying, tuple(args), attrs))

    def scratch(self, name: str, dtype: str, count: int) -> Buffer:
        """An array of `count` elements private to the group (GPU: local memory).  Contents start undefined."""
        v = Value("scratch", "ptr", False, attrs={"name": name, "dtype": dtype, "count": count}, owner=self)
        self._stack[-1].append(v)
        return Buffer(v)

    def sync(self) -> None:
        """Writes of any lane to scratch before are visible to all lanes after.  Uniform control flow only."""
        self.emit(Value("sync", None, False))

    # -- variables and control --------------------------------------------------------------------------------
    def var(self, type: str, init: Value | int | float, varying: bool = True) -> "Var":
        init = self.lift(init, type)
        cell = self.emit(Value("var", type, varying, (init,)))
        return Var(self, cell)

    @contextlib.contextmanager
    def loop(self, lo: Value | int, hi: Value | int, step: int = 1) -> Iterator[Value]:
        """for i in range(lo, hi, step): uniform i64; step > 0."""
        index = Value("index", "i64", False, owner=self)
        node = self.emit(Value("loop", None, False, (self.lift(lo, "i64"), self.lift(hi, "i64"), index),
                               {"step": step}, body=[]))
        self._stack.append(node.body)
        yield index
        self._stack.pop()

    @contextlib.contextmanager
    def if_(self, cond: Value) -> Iterator[None]:
        node = self.emit(Value("if", None, False, (cond,), body=[], orelse=[]))
        self._stack.append(node.body)
        yield
        self._stack.pop()

    @contextlib.contextmanager
    def else_(self) -> Iterator[None]:
        node = self._stack[-1][-1]
        if node.op != "if":
            raise LoopError(f"{self.name}: else_ must follow if_")
        self._stack.append(node.orelse)
        yield
        self._stack.pop()

    # -- conveniences -----------------------------------------------------------------------------------------
    def in_range(self, base: Value, n: Value) -> Value:
        """Varying b1: base + lane < n."""
        return self.cvt(self.lane, "i64") + base < n

    def canonical_nan(self, v: Value) -> Value:
        """v, with every NaN replaced by the canonical quiet NaN (f32 0x7fc00000)."""
        q = self.const(v.type, float("nan"))
        return self.select(self.pure("eq", v, v), v, q)

    def finish(self) -> Kernel:
        if self._grid is None:
            raise LoopError(f"{self.name}: set_grid was not called")
        k = Kernel(self.name, self.lanes, self.params, self.body, self._grid, self.prologue)
        verify_kernel(k)
        return k


@dataclass(slots=True)
class Var:
    """A mutable cell; `get` reads it (emits a `get` statement), `set` writes it."""
    b: Builder
    cell: Value

    def get(self) -> Value:
        return self.b.emit(Value("get", self.cell.type, self.cell.varying, (self.cell,)))

    def set(self, v: Value | int | float) -> None:
        v = self.b.lift(v, self.cell.type)
        self.b.emit(Value("set", None, self.cell.varying, (self.cell, v)))


def b_is_nan(b: Builder, v: Value) -> Value:
    return b.pure("ne", v, v)
