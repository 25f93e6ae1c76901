"""An executor of loop-IR kernels that shares nothing with the renderers: NumPy lanes, exact fma, checked addresses.

`run_kernel(kernel, args)` runs every group in turn.  A pointer argument is a C-contiguous NumPy array (any dtype, read
and written through its bytes); a scalar argument is a number.  Every access is checked against its array, so a kernel
that reads or writes outside fails here by name even where a native run would get away with it.
"""
from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any, Sequence

import numpy as np

from m3jit.ir.loop import MEMORY, Kernel, Value

NUMPY = {"b1": np.bool_, "i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64}
STORAGE = {"i8": "<i1", "u8": "<u1", "i16": "<i2", "u16": "<u2", "i32": "<i4", "i64": "<i8", "f16": "<f2",
           "bf16": "<u2", "f32": "<f4", "f64": "<f8", "bool": "<u1"}


class OutOfBounds(AssertionError):
    """A kernel touched memory outside an argument."""


def fma32(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once to f32: exact f64 product, f64 sum rounded to odd, then to f32."""
    p = np.multiply(a, b, dtype=np.float64)
    c = np.asarray(c, np.float64)
    s = np.asarray(p + c)
    t = s - p
    err = (p - (s - t)) + (c - t)                                # TwoSum: s + err == p + c
    bits = s.view(np.int64)
    fix = np.isfinite(s) & (err != 0) & np.isfinite(err) & ((bits & 1) == 0)
    toward = np.where((err > 0) == (s > 0), 1, -1)               # one ulp away from or toward zero
    odd = np.where(fix, bits + np.where(s == 0, 0, toward), bits).view(np.float64)
    return odd.astype(np.float32)[()]


def fma64(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once to f64, by exact rationals (slow; few kernels use it)."""
    def one(x: float, y: float, z: float) -> float:
        if not all(map(np.isfinite, (x, y, z))):
            # The product of floats may overflow where the exact one is finite.
            return z if np.isfinite(x) and np.isfinite(y) else x * y + z
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if exact == 0:
            return x * y + z
        try:
            return exact.numerator / exact.denominator           # int / int is correctly rounded
        except OverflowError:
            return float("inf") if exact > 0 else float("-inf")
    return np.vectorize(one, otypes=[np.float64])(a, b, c)[()]


def fma(a: Any, b: Any, c: Any) -> Any:
    return fma32(a, b, c) if np.asarray(a).dtype == np.float32 else fma64(a, b, c)


def bf16_bits(x: Any) -> Any:
    """f32 -> bfloat16 bits, nearest even; a NaN keeps its upper bits and is made quiet."""
    i = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (i + 0x7FFF + ((i >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (i >> 16) | 0x40, rounded).astype(np.uint16)


def _unsigned(x: Any) -> Any:
    return np.asarray(x).view({4: np.uint32, 8: np.uint64}[np.asarray(x).dtype.itemsize])


def lshr(a: Any, n: Any) -> Any:
    a = np.asarray(a)
    return (_unsigned(a) >> _unsigned(np.asarray(n, a.dtype))).view(a.dtype)[()]


def dot4(acc: Any, u: Any, s: Any) -> Any:
    """acc + sum over 4 bytes of unsigned byte of u times signed byte of s."""
    total = np.asarray(acc, np.int64)
    u, s = np.asarray(u, np.int32), np.asarray(s, np.int32)
    for i in range(4):
        total = total + ((u >> 8 * i) & 0xFF).astype(np.int64) * ((s << (24 - 8 * i)) >> 24)
    return total.astype(np.int32)[()]


def lookup(x: Any, *words: Any) -> Any:
    """Bytes of x replaced by the entries of a table of 16 bytes, given as four words, that they number (mod 16)."""
    table = np.array(words, np.int32).view(np.uint8)
    a = np.ascontiguousarray(np.atleast_1d(np.asarray(x, np.int32)))
    out = table[a.view(np.uint8) & 15].view(np.int32)
    return out if np.ndim(x) else out[0]


def convert(x: Any, to: str) -> Any:
    x = np.asarray(x)
    if x.dtype.kind == "f" and to in ("i32", "i64"):
        lo, hi = (-2.0 ** 31, 2.0 ** 31) if to == "i32" else (-2.0 ** 63, 2.0 ** 63)
        t = np.trunc(x.astype(np.float64))
        x = np.where((t >= lo) & (t < hi), t, 0.0)               # out of range is undefined: masked lanes may hold it
    return x.astype(NUMPY[to])[()]


def idiv(a: Any, b: Any) -> Any:
    return type(a)(abs(int(a)) // int(b) * (1 if a >= 0 else -1))


def tree(x: Any, op: str, lanes: int) -> Any:
    """The halving tree over lanes."""
    x = np.broadcast_to(x, lanes)
    n = lanes // 2
    while n:
        a, b = x[:n], x[n:2 * n]
        if op == "add":
            x = a + b
        elif op == "mul":
            x = a * b
        elif op == "fmax":
            x = np.where((b < a) | (b != b), a, b)
        elif op == "fmin":
            x = np.where((a < b) | (b != b), a, b)
        else:
            x = {"imin": np.minimum, "imax": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}[op](a, b)
        n //= 2
    return x[0]


class Memory:
    """One pointer argument or scratch array."""

    def __init__(self, name: str, array: np.ndarray, writable: bool = True):
        if not array.flags.c_contiguous:
            raise ValueError(f"argument {name} is not C-contiguous")
        self.name, self.bytes, self.writable = name, array.reshape(-1).view(np.uint8), writable

    def _address(self, dtype: str, offset: Any, index: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        size = MEMORY[dtype][0]
        at = np.atleast_1d(np.asarray(offset, np.int64) + np.asarray(index, np.int64) * size)
        on = np.broadcast_to(np.asarray(mask if mask is not None else True, bool), at.shape)
        bad = on & ((at < 0) | (at + size > self.bytes.size))
        if bad.any():
            raise OutOfBounds(f"{self.name}: {dtype} at byte {int(at[bad][0])} of {self.bytes.size}")
        return np.where(on, at, 0), on

    def load(self, dtype: str, offset: Any, index: Any, mask: Any = None) -> Any:
        at, on = self._address(dtype, offset, index, mask)
        size = MEMORY[dtype][0]
        out = np.zeros((at.size, size), np.uint8)
        if on.any():
            out[on] = self.bytes[at[on][:, None] + np.arange(size)]
        raw = out.reshape(-1).view(STORAGE[dtype])
        if dtype == "bf16":
            v = (raw.astype(np.uint32) << 16).view(np.float32)
        elif dtype == "f16":
            v = raw.astype(np.float32)
            v.view(np.uint32)[np.isnan(v)] |= 0x00400000         # a NaN becomes quiet and keeps its bits
        else:
            v = raw.astype(NUMPY[MEMORY[dtype][1]])
        return v if np.ndim(index) else v[0]

    def store(self, dtype: str, offset: Any, index: Any, value: Any, mask: Any = None) -> None:
        if not self.writable:
            raise OutOfBounds(f"{self.name}: write to a read-only parameter")
        at, on = self._address(dtype, offset, index, mask)
        value = np.broadcast_to(value, at.shape)
        if dtype == "bf16":
            raw = bf16_bits(value)
        elif dtype == "f16":
            bits = np.ascontiguousarray(value).view(np.uint32)
            kept = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
            raw = np.where(np.isnan(value), kept, value.astype(np.float16).view(np.uint16)).astype(np.uint16)
        else:
            raw = value.astype(STORAGE[dtype])
        size = MEMORY[dtype][0]
        rows = np.ascontiguousarray(raw).view(np.uint8).reshape(-1, size)
        self.bytes[at[on][:, None] + np.arange(size)] = rows[on]


_BINARY = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "and": "{0} & {1}",
           "or": "{0} | {1}", "xor": "{0} ^ {1}", "shl": "{0} << {1}", "ashr": "{0} >> {1}", "lt": "{0} < {1}",
           "le": "{0} <= {1}", "eq": "{0} == {1}", "ne": "{0} != {1}", "idiv": "idiv({0}, {1})",
           "irem": "{0} - idiv({0}, {1}) * {1}", "imin": "np.minimum({0}, {1})", "imax": "np.maximum({0}, {1})",
           "lshr": "lshr({0}, {1})", "fma": "fma({0}, {1}, {2})", "sqrt": "np.sqrt({0})", "neg": "-{0}",
           "abs": "np.abs({0})", "select": "np.where({0}, {1}, {2})[()]", "not": "~{0}", "floor": "np.floor({0})",
           "rint": "np.rint({0})", "dot4": "dot4({0}, {1}, {2})",
           "lookup": "lookup({0}, {1}, {2}, {3}, {4})", "first": "np.broadcast_to({0}, L)[0]"}
_BITS = {"i32": "np.int32", "i64": "np.int64", "f32": "np.float32", "f64": "np.float64"}


class _Source:
    """Python source of one kernel's group function."""

    def __init__(self, kernel: Kernel):
        self.k, self.lines, self.ids = kernel, [], {}

    def ref(self, v: Value) -> str:
        if v.op == "const":
            x = v.attrs["value"]
            return f"const({v.type!r}, {x!r})"
        if v.op == "param":
            return f"A[{v.attrs['name']!r}]"
        if v.op == "group":
            return "group"
        if v.op == "lane":
            return "LANE"
        return self.ids.setdefault(id(v), f"v{len(self.ids)}")

    def block(self, body: Sequence[Value], depth: int) -> None:
        if not body:
            self.lines.append("    " * depth + "pass")
        for v in body:
            self.statement(v, depth)

    def statement(self, v: Value, depth: int) -> None:
        a = [self.ref(x) for x in v.args]
        put = lambda text: self.lines.append("    " * depth + text)
        name = self.ref(v)
        if v.op == "loop":
            put(f"for {a[2]} in range(int({a[0]}), int({a[1]}), {v.attrs['step']}):")
            self.lines.append("    " * (depth + 1) + f"{a[2]} = np.int64({a[2]})")
            self.block(v.body, depth + 1)
        elif v.op == "if":
            put(f"if {a[0]}:")
            self.block(v.body, depth + 1)
            if v.orelse:
                put("else:")
                self.block(v.orelse, depth + 1)
        elif v.op == "var":
            put(f"{name} = np.broadcast_to({a[0]}, L)" if v.varying else f"{name} = {a[0]}")
        elif v.op == "get":
            put(f"{name} = {a[0]}")
        elif v.op == "set":
            put(f"{a[0]} = np.broadcast_to({a[1]}, L)" if v.args[0].varying else f"{a[0]} = {a[1]}")
        elif v.op == "scratch":
            put(f"{name} = scratch({v.attrs['name']!r}, {v.attrs['dtype']!r}, {v.attrs['count']})")
        elif v.op == "sync":
            put("pass")
        elif v.op in ("load", "load_lanes", "store", "store_lanes"):
            self.memory(v, a, name, put)
        elif v.op == "bits":
            to = {"i32": "f32", "f32": "i32", "i64": "f64", "f64": "i64"}[v.args[0].type]
            put(f"{name} = np.asarray({a[0]}).view({_BITS[to]})[()]")
        elif v.op == "cvt":
            put(f"{name} = convert({a[0]}, {v.attrs['to']!r})")
        elif v.op == "zext":
            put(f"{name} = np.asarray({a[0]}).view(np.uint32).astype(np.int64)[()]")
        elif v.op == "fold":
            put(f"{name} = tree({a[0]}, {v.attrs['op']!r}, L)")
        elif v.op == "shuffle_down":
            put(f"{name} = shift(np.broadcast_to({a[0]}, L), {v.attrs['by']})")
        else:
            put(f"{name} = " + _BINARY[v.op].format(*a))

    def memory(self, v: Value, a: list[str], name: str, put) -> None:
        mask = f", mask={a[-1]}" if v.attrs.get("masked") else ""
        index = f"({a[2]} + LANE)" if v.op.endswith("lanes") else a[2]
        call = f"{a[0]}.{v.op.split('_')[0]}({v.attrs['dtype']!r}, {a[1]}, {index}"
        if v.op.startswith("load"):
            put(f"{name} = {call}{mask})")
        else:
            put(f"{call}, {a[3]}{mask})")

    def text(self) -> str:
        self.lines = ["def grid(A):"]
        self.block(self.k.prologue, 1)
        self.lines.append(f"    return int({self.ref(self.k.grid)})")
        self.lines.append("def run(A, group):")
        self.block(self.k.prologue, 1)                            # prologue values are visible in the body
        self.block(self.k.body, 1)
        return "\n".join(self.lines)



@functools.lru_cache(maxsize=None)
def _constant(type: str, text: str) -> Any:
    """By its text: 0.0 and -0.0 are equal, and so would be one entry of the cache."""
    return NUMPY[type](eval(text, {"inf": float("inf"), "nan": float("nan")}))


def _scratch(name: str, dtype: str, count: int) -> Memory:
    a = np.full(count * MEMORY[dtype][0], 0xA5, np.uint8)         # undefined contents: not zero, to catch reliance
    return Memory(f"scratch {name}", a)


def _shift(x: np.ndarray, by: int) -> np.ndarray:
    return np.concatenate([x[by:], x[len(x) - by:]])


@functools.lru_cache(maxsize=256)
def compile_kernel(kernel: Kernel) -> dict[str, Any]:
    """The namespace with `grid(A)` and `run(A, group)`."""
    names: dict[str, Any] = {
        "np": np, "fma": fma, "dot4": dot4, "lookup": lookup, "lshr": lshr, "convert": convert, "idiv": idiv,
        "tree": tree,
        "const": lambda t, x: _constant(t, repr(x)), "scratch": _scratch, "shift": _shift, "L": kernel.lanes,
        "LANE": np.arange(kernel.lanes, dtype=np.int32), "inf": float("inf"), "nan": float("nan")}
    exec(compile(_Source(kernel).text(), f"<loop_eval {kernel.name}>", "exec"), names)
    return names


def run_kernel(kernel: Kernel, args: Sequence[Any], groups: Sequence[int] | None = None) -> int:
    """Runs all groups (or those given, in that order) over `args` in parameter order; returns the grid size."""
    if len(args) != len(kernel.params):
        raise ValueError(f"{kernel.name} takes {[p.name for p in kernel.params]}, got {len(args)} arguments")
    A: dict[str, Any] = {}
    for p, x in zip(kernel.params, args):
        A[p.name] = Memory(p.name, x, "w" in p.access) if p.kind == "ptr" else NUMPY[p.kind](x)
    names = compile_kernel(kernel)
    with np.errstate(all="ignore"):
        n = names["grid"](A)
        for g in range(n) if groups is None else groups:
            names["run"](A, np.int64(g))
    return n
