"""Scalar primitives of the eager namespace: what the integer and float registers compute.

Integers are signed 64-bit and wrap; floats are f64.  A float result that is NaN is the canonical quiet NaN, so that
register bits never depend on the machine.  Mixed kinds are an error everywhere but in i2f and f2i.
"""
from __future__ import annotations

import math
from typing import Any, Callable

import numpy as np

from m3jit.errors import OperandError
from m3jit.isa.types import BF16, Tensor

INT_MIN, INT_MAX = -2 ** 63, 2 ** 63 - 1
NAN = float("nan")

EQUAL, LESS, GREATER, UNORDERED, NOT_COMPARED = range(5)      # the flags register; the last before any COMPARE


def wrap64(v: int) -> int:
    """v modulo 2^64 as a signed 64-bit integer."""
    return v if INT_MIN <= v <= INT_MAX else (v - INT_MIN) % 2 ** 64 + INT_MIN


def float_to_int(v: float) -> int:
    """Truncate toward zero, saturate, NaN -> 0."""
    if v != v:
        return 0
    return int(max(min(v, 2.0 ** 63), -2.0 ** 63)) if abs(v) < 2.0 ** 63 else (INT_MAX if v > 0 else INT_MIN)


def round_immediate(value: int | float, to_float: bool) -> int | float:
    """A COMPARE immediate in the other side's type: int -> f64 to nearest even; float -> integer half to even,
    saturated.  A NaN stays a NaN (it is unordered with everything)."""
    if to_float:
        return float(value)
    if isinstance(value, int) or value != value:
        return value
    return round(value) if abs(value) < 2.0 ** 63 else (INT_MAX if value > 0 else INT_MIN)


def flags_of(a: int | float, b: int | float) -> int:
    """The flags of a comparison of two numbers of one kind."""
    return EQUAL if a == b else LESS if a < b else GREATER if a > b else UNORDERED


# IF_<word> rows by number; the branch is taken if the flags are one of these.
PREDICATES: dict[str, frozenset[int]] = {
    "EQUAL": frozenset({EQUAL}),
    "NOT_EQUAL": frozenset({LESS, GREATER, UNORDERED, NOT_COMPARED}),
    "LESS": frozenset({LESS}),
    "LESS_EQUAL": frozenset({EQUAL, LESS}),
    "GREATER": frozenset({GREATER}),
    "GREATER_EQUAL": frozenset({EQUAL, GREATER}),
}


def _divide(a: int, b: int) -> int:
    if b == 0:
        raise OperandError("division by zero")
    q = abs(a) // abs(b)
    return wrap64(q if (a < 0) == (b < 0) else -q)


def _modulo(a: int, b: int) -> int:
    if b == 0:
        raise OperandError("modulo by zero")
    r = abs(a) % abs(b)
    return -r if a < 0 else r


def _quotient(a: float, b: float) -> float:
    if b:
        r = a / b
        return r if r == r else NAN
    if a != a or a == 0 or b != b:
        return NAN
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def _clean(r: float) -> float:
    return r if r == r else NAN


_INT_OPS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: wrap64(a + b),
    "sub": lambda a, b: wrap64(a - b),
    "mul": lambda a, b: wrap64(a * b),
    "div": _divide,
    "mod": _modulo,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: wrap64(a << (b & 63)),
    "shr": lambda a, b: wrap64((a & (2 ** 64 - 1)) >> (b & 63)),
    "sar": lambda a, b: a >> (b & 63),
    "min": lambda a, b: a if a < b else b,
    "max": lambda a, b: a if a > b else b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
_FLOAT_OPS: dict[str, Callable[..., Any]] = {
    "fadd": lambda a, b: _clean(a + b),
    "fsub": lambda a, b: _clean(a - b),
    "fmul": lambda a, b: _clean(a * b),
    "fdiv": _quotient,
    "fmin": lambda a, b: _clean(a if a < b else b),
    "fmax": lambda a, b: _clean(a if a > b else b),
    "feq": lambda a, b: a == b,
    "fne": lambda a, b: a != b,
    "flt": lambda a, b: a < b,
    "fle": lambda a, b: a <= b,
}
_BOOL_OPS: dict[str, Callable[..., Any]] = {
    "bool_and": lambda a, b: a and b,
    "bool_or": lambda a, b: a or b,
}
_UNARY: dict[str, tuple[type, Callable[..., Any]]] = {
    "neg": (int, lambda a: wrap64(-a)),
    "fneg": (float, lambda a: _clean(-a)),
    "fsqrt": (float, lambda a: NAN if a < 0 or a != a else math.sqrt(a)),
    "bool_not": (bool, lambda a: not a),
    "i2f": (int, float),
    "f2i": (float, float_to_int),
}
_BINARY: dict[str, tuple[type, Callable[..., Any]]] = {
    **{k: (int, f) for k, f in _INT_OPS.items()},
    **{k: (float, f) for k, f in _FLOAT_OPS.items()},
    **{k: (bool, f) for k, f in _BOOL_OPS.items()},
}
_NAMES = {int: "an integer", float: "a float", bool: "a condition", Tensor: "a tensor", type(None): "nothing"}


def describe(v: Any) -> str:
    """How a value is called in messages."""
    return _NAMES.get(v.__class__, f"a {v.__class__.__name__.lower()}")


class ScalarOps:
    """Mixin of `EagerXp`: the scalar half of the primitives.  Conditions (b1) are Python bools."""

    def scalar(self, op: str, a: Any, b: Any = None, c: Any = None) -> Any:
        """The operation of that name in `plan.SCALAR_OPS`.  OperandError on a kind it does not take."""
        found = _BINARY.get(op)
        if found is not None:
            kind, f = found
            if a.__class__ is kind and b.__class__ is kind:
                return f(a, b)
            raise OperandError(f"{op} takes two values of kind {_NAMES[kind].split()[-1]}, got {describe(a)} and "
                               f"{describe(b)}; CVT converts between integers and floats")
        if op == "select":
            if a.__class__ is not bool or b.__class__ is not c.__class__:
                raise OperandError(f"select takes two values of one kind, got {describe(b)} and {describe(c)}")
            return b if a else c
        kind, f = _UNARY[op]
        if a.__class__ is not kind:
            raise OperandError(f"{op} takes {_NAMES[kind]}, got {describe(a)}; CVT converts")
        return f(a)

    def number_kind(self, *values: Any) -> str:
        """"int" or "float": the kind that all values share.  OperandError if they differ or are not numbers."""
        kind = values[0].__class__
        for v in values:
            if v.__class__ is not kind:
                raise OperandError("operands of different kinds: " + ", ".join(map(describe, values))
                                   + "; CVT converts between integers and floats")
        if kind is int:
            return "int"
        if kind is float:
            return "float"
        raise OperandError(f"takes an integer or a float, got {describe(values[0])}")

    def compare(self, a: Any, b: Any, immediate: bool = False) -> int:
        """Flags of a against b (EQUAL LESS GREATER UNORDERED).  A one-element tensor compares as its element; an
        immediate b is rounded to a's kind first; other mixed kinds are an error."""
        if a.__class__ is int and b.__class__ is int:
            return flags_of(a, b)
        if a.__class__ is Tensor:
            a = self._only_element(a)
        if b.__class__ is Tensor:
            b = self._only_element(b)
        if immediate:
            b = round_immediate(b, a.__class__ is float)
            if b != b:
                return UNORDERED
        self.number_kind(a, b)
        return flags_of(a, b)

    def _only_element(self, x: Tensor) -> int | float:
        if x.size != 1:
            raise OperandError(f"compares numbers and one-element tensors, got {x!r}; GETELEM picks an element")
        return self.element(x, 0)

    def element(self, x: Tensor, index: int) -> int | float:
        """Element `index` of the flattened tensor: an int for integer and BOOL tensors, else a float (exact)."""
        if x.dtype.is_block:
            raise OperandError(f"an element of a {x.dtype.name} tensor cannot be read; DEQUANT it first")
        if not 0 <= index < x.size:
            raise OperandError(f"element {index} of {x!r}; it has {x.size} element{'s' if x.size != 1 else ''}")
        v = x.data.reshape(-1)[index]
        if x.dtype is BF16:
            v = np.uint32(int(v) << 16).view(np.float32)
        if x.dtype.kind == "float":
            return _clean(float(v))
        return int(v)

    def dim(self, x: Tensor, axis: int) -> int:
        """Length of an axis; a negative one counts from the last."""
        if not -x.rank <= axis < x.rank:
            raise OperandError(f"axis {axis} of {x!r}; it has {x.rank} dimension{'s' if x.rank != 1 else ''}")
        return x.shape[axis]

    def is_scalar(self, v: Any) -> bool:
        """Is it an integer or float register's value?"""
        return v.__class__ is int or v.__class__ is float

    def is_zero(self, v: Any) -> bool:
        """Is it known to be 0?"""
        return v == 0

    def const(self, value: int | float) -> int | float:
        """A scalar constant."""
        return value
