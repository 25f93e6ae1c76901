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

Kernels are written with a `Builder` (m3jit.ir.loop_builder), which types and checks them (m3jit.ir.loop_check).  Text
form: `print_kernel` writes it, `parse_kernel` reads it back (m3jit.ir.loop_text).
"""
from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Iterator, Sequence

if TYPE_CHECKING:
    from m3jit.ir.loop_builder import Builder

TYPES = ("b1", "i32", "i64", "f32", "f64")
INTS = ("i32", "i64")
FLOATS = ("f32", "f64")
# memory type -> (bytes, the value type a load gives and a store takes)
MEMORY: dict[str, tuple[int, str]] = {
    "i8": (1, "i32"), "u8": (1, "i32"), "i16": (2, "i32"), "u16": (2, "i32"), "i32": (4, "i32"), "i64": (8, "i64"),
    "f16": (2, "f32"), "bf16": (2, "f32"), "f32": (4, "f32"), "f64": (8, "f64"), "bool": (1, "i32"),
}

# op -> (number of value operands, meaning).  Result types: `loop_check.result_type`.
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

    def digest(self) -> str:
        """Hash of structure (name and parameter names excluded by renumbering): equal kernels compile once."""
        if not self._digest:
            self._digest = hashlib.blake2b(canonical(self).encode(), digest_size=16).hexdigest()
        return self._digest


def walk(body: Sequence[Value]) -> Iterator[Value]:
    """All statements, outer before inner."""
    for v in body:
        yield v
        if v.body is not None:
            yield from walk(v.body)
        if v.orelse:
            yield from walk(v.orelse)


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
