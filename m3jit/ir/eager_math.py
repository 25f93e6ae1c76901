"""The loop-IR builder's arithmetic, computed at once on NumPy arrays with the contract's rounding.

`NumpyMath` offers the methods of `loop.Builder` that `scalar_math` uses; its values are `Lanes` (an array and its loop
type).  `fma32` and `fma64` are correctly rounded for every operand, subnormal results and overflow included.
"""
from __future__ import annotations

from fractions import Fraction
from typing import Any, Callable

import numpy as np

from m3jit.ir import scalar_math

CHUNK = 1 << 15                    # elements worked on at a time, so that temporaries stay in the cache
NUMPY_TYPES = {"b1": np.bool_, "i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64}


# -- fused multiply-add ---------------------------------------------------------------------------------------------

def fma32(a: Any, b: Any, c: Any, out: np.ndarray | None = None) -> np.ndarray:
    """a*b + c in f32, rounded once; broadcasts.  out: result array (may be c itself).

    The product is exact in f64.  Rounding the f64 sum to f32 differs from rounding the exact sum only where the f64 sum
    lies exactly between two f32 values (or where f32 is subnormal): there `_round_odd` repairs the f64 sum first."""
    a, b, c = (np.asarray(x, np.float32) for x in (a, b, c))
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        total = np.asarray(product + c)
        hard = _double_rounding_risk(total)
        if hard.any():
            shape = total.shape
            p, addend = np.broadcast_to(product, shape)[hard], np.broadcast_to(c, shape)[hard].astype(np.float64)
            total[hard] = _sum_to_odd(p, addend)
        if out is None:
            return total.astype(np.float32)
        out[...] = total
        return out


def _double_rounding_risk(total: np.ndarray) -> np.ndarray:
    """True where a float64 lies halfway between two f32 values, or is nonzero below the least normal f32."""
    bits = total.view(np.uint64)
    risk = (bits & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    risk |= ((bits << np.uint64(1)) - np.uint64(1)) < np.uint64((0x3810 << 49) - 1)
    return risk


def _sum_to_odd(p: np.ndarray, c: np.ndarray) -> np.ndarray:
    """p + c in f64 rounded to odd: when inexact, of the two neighbours the one with an odd last bit."""
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    bits = s.view(np.int64)
    inexact = (error != 0) & np.isfinite(s) & (bits & 1 == 0)
    step = np.where((error > 0) == (s > 0), 1, -1)
    return np.where(inexact, bits + step, bits).view(np.float64)


def fma64(a: Any, b: Any, c: Any) -> np.ndarray:
    """a*b + c in f64, rounded once; broadcasts.  Products and sums split exactly (Dekker, Knuth), the low parts rounded
    to odd before the last addition (Boldo and Melquiond); operands whose exponents do not allow that go through exact
    fractions, one by one."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (a, b, c)))
    with np.errstate(all="ignore"):
        hi = a * b
        lo = _product_error(a, b, hi)
        t, t_low = _two_sum(c, lo)
        v, v_low = _two_sum(hi, t)
        out = np.asarray(v + _sum_to_odd(np.atleast_1d(t_low), np.atleast_1d(v_low)).reshape(np.shape(t)))
        magnitude = np.abs(hi)
        safe = (magnitude < 2.0 ** 1000) & (np.abs(c) < 2.0 ** 1000) & (magnitude > 2.0 ** -900) & \
            (np.maximum(np.abs(a), np.abs(b)) < 2.0 ** 990) & (magnitude + np.abs(c) > 2.0 ** -900)
        plain = ~np.isfinite(a) | ~np.isfinite(b) | ~np.isfinite(c) | (a == 0) | (b == 0)
        out = np.where(plain, hi + c, out)
        rare = ~(safe | plain)
    if rare.any():
        out[rare] = [_fma_fraction(*map(float, abc)) for abc in zip(a[rare], b[rare], c[rare])]
    return out


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _product_error(a: np.ndarray, b: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """a*b - hi exactly (Dekker's product with Veltkamp's splitting)."""
    def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        t = x * 134217729.0
        top = t - (t - x)
        return top, x - top
    a1, a2 = split(a)
    b1, b2 = split(b)
    return ((a1 * b1 - hi) + a1 * b2 + a2 * b1) + a2 * b2


def _fma_fraction(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c           # signs of zero as IEEE addition gives them; an underflown product keeps its sign
    try:
        return float(exact)        # Fraction -> float rounds correctly, subnormals included
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


# -- the namespace --------------------------------------------------------------------------------------------------

class Lanes:
    """An array with the loop type it has; arithmetic as `loop.Value`."""
    __slots__ = ("array", "type")
    __array_ufunc__ = None

    def __init__(self, array: np.ndarray, type: str):
        self.array, self.type = array, type

    def _with(self, f: Callable, other: Any, swap: bool = False, type: str | None = None) -> "Lanes":
        o = other.array if isinstance(other, Lanes) else NUMPY_TYPES[self.type](other)
        return Lanes(f(o, self.array) if swap else f(self.array, o), type or self.type)

    def __add__(self, o): return self._with(np.add, o)
    def __radd__(self, o): return self._with(np.add, o, True)
    def __sub__(self, o): return self._with(np.subtract, o)
    def __rsub__(self, o): return self._with(np.subtract, o, True)
    def __mul__(self, o): return self._with(np.multiply, o)
    def __rmul__(self, o): return self._with(np.multiply, o, True)
    def __truediv__(self, o): return self._with(np.divide, o)
    def __rtruediv__(self, o): return self._with(np.divide, o, True)
    def __and__(self, o): return self._with(np.bitwise_and, o)
    def __or__(self, o): return self._with(np.bitwise_or, o)
    def __xor__(self, o): return self._with(np.bitwise_xor, o)
    def __lshift__(self, o): return self._with(np.left_shift, o)
    def __rshift__(self, o): return self._with(np.right_shift, o)
    def __neg__(self): return Lanes(np.negative(self.array), self.type)
    def __lt__(self, o): return self._with(np.less, o, type="b1")
    def __le__(self, o): return self._with(np.less_equal, o, type="b1")
    def __gt__(self, o): return self._with(np.greater, o, type="b1")
    def __ge__(self, o): return self._with(np.greater_equal, o, type="b1")
    def equals(self, o): return self._with(np.equal, o, type="b1")


class NumpyMath:
    """The builder's pure operations over `Lanes`.  Use `apply` to run a `scalar_math` function over an f32 array."""

    def const(self, type: str, value: Any) -> Lanes: return Lanes(NUMPY_TYPES[type](value), type)
    def f32(self, v: float) -> Lanes: return self.const("f32", v)
    def f64(self, v: float) -> Lanes: return self.const("f64", v)
    def i32(self, v: int) -> Lanes: return self.const("i32", v)
    def i64(self, v: int) -> Lanes: return self.const("i64", v)
    def b1(self, v: bool) -> Lanes: return self.const("b1", v)

    def lift(self, v: Any, type: str) -> Lanes:
        return v if isinstance(v, Lanes) else self.const(type, v)

    def fma(self, a: Any, b: Any, c: Any) -> Lanes:
        t = next(x.type for x in (a, b, c) if isinstance(x, Lanes))
        x, y, z = (self.lift(v, t).array for v in (a, b, c))
        return Lanes((fma32 if t == "f32" else fma64)(x, y, z), t)

    def select(self, c: Lanes, a: Any, b: Any) -> Lanes:
        t = next(x.type for x in (a, b) if isinstance(x, Lanes))
        return Lanes(np.where(c.array, self.lift(a, t).array, self.lift(b, t).array), t)

    def sqrt(self, a): return Lanes(np.sqrt(a.array), a.type)
    def abs(self, a): return Lanes(np.abs(a.array), a.type)
    def floor(self, a): return Lanes(np.floor(a.array), a.type)
    def rint(self, a): return Lanes(np.rint(a.array), a.type)
    def imin(self, a, b): return a._with(np.minimum, b)
    def imax(self, a, b): return a._with(np.maximum, b)
    def logical_not(self, a): return Lanes(np.logical_not(a.array), "b1")

    def lshr(self, a, n):
        unsigned = a.array.view(np.uint32 if a.type == "i32" else np.uint64)
        count = n.array.view(unsigned.dtype) if isinstance(n, Lanes) else unsigned.dtype.type(n)
        return Lanes((unsigned >> count).view(a.array.dtype), a.type)

    def bits(self, a):
        to = {"i32": "f32", "f32": "i32", "i64": "f64", "f64": "i64"}[a.type]
        return Lanes(a.array.view(NUMPY_TYPES[to]), to)

    def cvt(self, a, to: str): return a if a.type == to else Lanes(a.array.astype(NUMPY_TYPES[to]), to)
    def zext(self, a): return Lanes(a.array.view(np.uint32).astype(np.int64), "i64")

    def fmax(self, a, b):
        b = self.lift(b, a.type)
        return self.select((b < a) | self.logical_not(b.equals(b)), a, b)

    def fmin(self, a, b):
        b = self.lift(b, a.type)
        return self.select((a < b) | self.logical_not(b.equals(b)), a, b)


MATH = NumpyMath()


def apply(f: Callable, x: np.ndarray) -> np.ndarray:
    """f(m, x) elementwise over an f32 array, a cache-sized chunk at a time."""
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    out = np.empty(flat.shape, np.float32)
    with np.errstate(all="ignore"):
        for at in range(0, flat.size, CHUNK):
            out[at:at + CHUNK] = f(MATH, Lanes(flat[at:at + CHUNK], "f32")).array
    return out.reshape(np.shape(x))


def exp32(x: np.ndarray) -> np.ndarray: return apply(scalar_math.exp, x)
def log32(x: np.ndarray) -> np.ndarray: return apply(scalar_math.log, x)
def tanh32(x: np.ndarray) -> np.ndarray: return apply(scalar_math.tanh, x)
def erf32(x: np.ndarray) -> np.ndarray: return apply(scalar_math.erf, x)
def sin32(x: np.ndarray) -> np.ndarray: return apply(scalar_math.sin, x)
def cos32(x: np.ndarray) -> np.ndarray: return apply(scalar_math.cos, x)
def sigmoid32(x: np.ndarray) -> np.ndarray: return apply(scalar_math.sigmoid, x)
def softplus32(x: np.ndarray) -> np.ndarray: return apply(scalar_math.softplus, x)
