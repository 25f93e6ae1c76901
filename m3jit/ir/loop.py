"""Loop IR: one kernel = a parallel grid of independent groups x lanes x ordered loops over scalars.

A kernel is the *definition of a value*: nothing in it depends on scheduling.  Renderers (`m3jit.backends.*`) turn it
into LLVM vectors (lanes = SIMD lanes), a GPU work-group (lanes = work-items) or readable Python.

Model
-----
* The grid has `kernel.grid` groups (an i64 value computed from the scalar parameters).  Groups are independent and may
  run in any order, on any thread.  Group g writes bytes no other group touches.
* A group has `kernel.lanes` lanes (64 for reductions and elementwise work, 16 for one tile of weight rows).  Control
  flow is uniform: loops and ifs take uniform values; lanes differ only in data.  Every value is *uniform* or *varying*
  (one value per lane); a uniform value is accepted wherever a varying one is expected.
* Value types: b1, i32, i64, f32, f64.  Memory types (`MEMORY`): what a load widens and a store narrows.
* Floats are IEEE-754, round to nearest even, never contracted; `fma` is the only fused operation.
* Statements run in program order.  `var` is a mutable cell (a stack slot); every other value is SSA.
* A statement with uniform operands runs once per group: a uniform store is seen by the uniform loads after it.  Where a
  lane reads what another lane or a uniform store wrote, or overwrites what one read, a `sync` stands between.

Text form: `print(kernel)`; `parse_kernel` (m3jit.ir.loop_text) reads it back; `verify_kernel` checks it.
"""
from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Sequence

TYPES = ("b1", "i32", "i64", "f32", "f64")
INTS = ("i32", "i64")
FLOATS = ("f32", "f64")
# memory type -> (bytes, the value type a load gives and a store takes)
MEMORY: dict[str, tuple[int, str]] = {
    "i8": (1, "i32"), "u8": (1, "i32"), "i16": (2, "i32"), "u16": (2, "i32"), "i32": (4, "i32"), "i64": (8, "i64"),
    "f16": (2, "f32"), "bf16": (2, "f32"), "f32": (4, "f32"), "f64": (8, "f64"), "bool": (1, "i32"),
}

# op -> (number of value operands, meaning).  Result types are given by `result_type`.
PURE: dict[str, tuple[int, str]] = {
    "add": (2, "a + b (ints wrap)"), "sub": (2, "a - b"), "mul": (2, "a * b"),
    "div": (2, "floats: IEEE a / b"), "sqrt": (1, "IEEE square root"), "fma": (3, "a * b + c, rounded once (floats)"),
    "neg": (1, "-a (floats: sign bit flip)"), "abs": (1, "|a| (floats: sign bit cleared)"),
    "idiv": (2, "signed i64/i32 quotient, truncated; divisor must be > 0 (uniform use only)"),
    "irem": (2, "signed remainder of idiv"),
    "and": (2, "bitwise (b1: logical)"), "or": (2, "bitwise"), "xor": (2, "bitwise"),
    "shl": (2, "a << b, 0 <= b < width"), "lshr": (2, "logical a >> b"), "ashr": (2, "arithmetic a >> b"),
    "imin": (2, "signed minimum"), "imax": (2, "signed maximum"),
    "lt": (2, "a < b (floats: false with NaN)"), "le": (2, "a <= b"), "eq": (2, "a == b"), "ne": (2, "not (a == b)"),
    "select": (3, "c ? a : b"), "not": (1, "logical not of b1"),
    "bits": (1, "reinterpret: f32<->i32, f64<->i64"),
    "floor": (1, "round to integral, toward -inf"), "rint": (1, "round to integral, ties to even"),
    "cvt": (1, "convert to attrs['to']: int->float rne; f32->f64 exact; f64->f32 rne; float->int truncates, "
               "operand must be in range; i32->i64 sign-extends; i64->i32 wraps; b1->int 0/1"),
    "zext": (1, "i32 -> i64 zero-extended"),
    "dot4": (3, "acc + sum of 4 products u8(a byte i) * s8(b byte i), i32, exact (wraps)"),
    "lookup": (5, "i32: each byte of a, all 0..15, replaced by that byte of the table of 16 in the constants b, c, d, "
                  "e (little-endian)"),
    "shuffle_down": (1, "lane l receives the value of lane l + attrs['by']; lanes >= lanes-by receive their own"),
    "first": (1, "the value of lane 0, as a uniform"),
    "fold": (1, "halving tree over lanes with attrs['op'] in add,mul,fmin,fmax,imin,imax,and,or: lane l combines "
                "(own, other) with lane l+n/2, then n/4 ... 1; uniform result"),
    "lane": (0, "lane number, varying i32"), "group": (0, "group number, uniform i64"),
}
COMPARES = ("lt", "le", "eq", "ne")


class LoopError(Exception):
    """A malformed kernel: always a bug of the kernel's builder, never of the user's program."""


@dataclass(eq=False, slots=True)
class Value:
    """One node.  `type` is None for statements without a result."""
    op: str
    type: str | None
    varying: bool
    args: tuple["Value", ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    body: list["Value"] | None = None          # loop, if
    orelse: list["Value"] | None = None        # if
    owner: "Builder | None" = None

    # arithmetic sugar: delegates to the builder that made the value
    def _b(self, op: str, other: Any, swap: bool = False) -> "Value":
        o = self.owner.lift(other, self.type)
        return self.owner.pure(op, *((o, self) if swap else (self, o)))

    def __add__(self, o): return self._b("add", o)
    def __radd__(self, o): return self._b("add", o, True)
    def __sub__(self, o): return self._b("sub", o)
    def __rsub__(self, o): return self._b("sub", o, True)
    def __mul__(self, o): return self._b("mul", o)
    def __rmul__(self, o): return self._b("mul", o, True)
    def __truediv__(self, o): return self._b("div", o)
    def __rtruediv__(self, o): return self._b("div", o, True)
    def __floordiv__(self, o): return self._b("idiv", o)
    def __mod__(self, o): return self._b("irem", o)
    def __and__(self, o): return self._b("and", o)
    def __or__(self, o): return self._b("or", o)
    def __xor__(self, o): return self._b("xor", o)
    def __lshift__(self, o): return self._b("shl", o)
    def __rshift__(self, o): return self._b("ashr", o)
    def __neg__(self): return self.owner.pure("neg", self)
    def __lt__(self, o): return self._b("lt", o)
    def __le__(self, o): return self._b("le", o)
    def __gt__(self, o): return self._b("lt", o, True)
    def __ge__(self, o): return self._b("le", o, True)
    def equals(self, o): return self._b("eq", o)


@dataclass(eq=False, slots=True)
class Buffer:
    """A memory operand: a pointer parameter or a scratch array, plus a uniform byte offset."""
    base: Value                    # op "param" (type "ptr") or "scratch"
    offset: Value | None = None    # uniform i64 bytes

    def at(self, offset: Value | int) -> "Buffer":
        b = self.base.owner
        offset = b.lift(offset, "i64")
        return Buffer(self.base, offset if self.offset is None else self.offset + offset)


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    kind: str                      # "ptr" or a value type (i64, i32, f32, f64)
    access: str = ""               # ptr: "r", "w" or "rw"
    dtype: str = ""                # ptr: memory type most of its accesses use (documentation, Python rendering)


@dataclass(eq=False, slots=True)
class Kernel:
    name: str
    lanes: int
    params: list[Param]
    body: list[Value]
    grid: Value                    # uniform i64, its operands are in `prologue`
    prologue: list[Value]          # uniform statements that compute `grid`; run once per launch
    _digest: str = ""

    def __str__(self) -> str:
        from m3jit.ir.loop_text import print_kernel
        return print_kernel(self)

    def digest(self) -> str:
        """Hash of structure (name and parameter names excluded by renumbering): equal kernels compile once."""
        if not self._digest:
            self._digest = hashlib.blake2b(canonical(self).encode(), digest_size=16).hexdigest()
        return self._digest


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

    def load_lanes(self, dtype: str, buf: Buffer, base: Value | int, mask: Value | None = None, ahead: int = 0) -> Value:
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


def walk(body: Sequence[Value]) -> Iterator[Value]:
    """All statements, outer before inner."""
    for v in body:
        yield v
        if v.body is not None:
            yield from walk(v.body)
        if v.orelse:
            yield from walk(v.orelse)


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


def canonical(k: Kernel) -> str:
    """A text in which names do not occur: equal texts mean equal kernels."""
    ids: dict[int, str] = {}
    order = {p.name: i for i, p in enumerate(k.params)}

    def ref(a: Value) -> str:
        if a.op == "const":
            v = a.attrs["value"]
            return f"{a.type}:{v.hex() if isinstance(v, float) else v}"
        if a.op == "param":
            return f"p{order[a.attrs['name']]}"
        if a.op in ("lane", "group"):
            return a.op
        return ids.setdefault(id(a), f"%{len(ids)}")

    out = [f"lanes {k.lanes} " + ",".join(f"{p.kind}{p.access}" for p in k.params)]

    def block(body: Sequence[Value], depth: int) -> None:
        for v in body:
            attrs = ",".join(f"{n}={x}" for n, x in sorted(v.attrs.items()) if n != "name")
            out.append(" " * depth + f"{ref(v)}={v.op}.{v.type}.{int(v.varying)}({','.join(map(ref, v.args))}){attrs}")
            if v.body is not None:
                block(v.body, depth + 1)
            if v.orelse:
                out.append(" " * depth + "else")
                block(v.orelse, depth + 1)
    block(k.prologue, 0)
    out.append(f"grid {ref(k.grid)}")
    block(k.body, 0)
    return "\n".join(out)
