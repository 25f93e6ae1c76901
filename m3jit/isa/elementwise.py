"""Elementwise arithmetic and activations: ADD MUL SILU GELU SIGMOID TANH RELU EXP LOG CLIP.

V registers take part as F32 tensors of 8.  F16 and BF16 compute in f32 and round once; a NaN result is the canonical
quiet NaN.  INPLACE empties the first source register, so that its memory can be used again; results do not change.
"""
from __future__ import annotations

from typing import Any

from m3jit.isa import forms
from m3jit.isa.fields import F32, R1, R2, Enum, Rd
from m3jit.isa.forms import FLOAT, INPLACE, NUMBERS, in_f32
from m3jit.isa.table import op

_EITHER = ("tensor", "int", "float")


def _two(xp: Any, name: str, a: Any, b: Any) -> Any:
    """The tensor primitive, or with two numbers the scalar operation of their kind."""
    if xp.is_scalar(a) and xp.is_scalar(b):
        return xp.scalar(name if xp.number_kind(a, b) == "int" else "f" + name, a, b)
    return getattr(xp, name)(a, b)


@op(0x0A, "ADD", shape="broadcast of a and b", dtypes=NUMBERS)
def add(xp, rd: Rd(*_EITHER), a: R1(*_EITHER), b: R2(*_EITHER), inplace: INPLACE = False):
    """rd = a + b, elementwise with broadcasting; two numbers add as numbers.

    Tensors have one dtype (float dtypes mix to F32); integers wrap.  A number beside a tensor takes its arithmetic type
    (f32, or the integer dtype, wrapped).  Traps: shapes that do not broadcast, dtypes that do not mix, an integer and a
    float register."""
    return _two(xp, "add", a, b)


@op(0x11, "MUL", shape="broadcast of a and b", dtypes=NUMBERS)
def mul(xp, rd: Rd(*_EITHER), a: R1(*_EITHER), b: R2(*_EITHER), inplace: INPLACE = False):
    """rd = a * b, elementwise with broadcasting; two numbers multiply as numbers.  Otherwise as ADD."""
    return _two(xp, "mul", a, b)


@op(0x12, "SILU", shape="that of x", dtypes=FLOAT, source="Elfwing, Uchibe and Doya 2017")
def silu(xp, rd: Rd, x: R1, inplace: INPLACE = False):
    """rd = x * sigmoid(x).  -inf gives NaN (-inf * 0)."""
    return in_f32(xp, x, lambda v: forms.silu(xp, v))


@op(0x3D, "GELU", shape="that of x", dtypes=FLOAT, positional=("approx",), source="Hendrycks and Gimpel 2016")
def gelu(xp, rd: Rd, x: R1, approx: Enum("ERF TANH")[0] = "ERF", inplace: INPLACE = False):
    """rd = 0.5 x (1 + erf(x / sqrt 2)); APPROX=TANH: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).

    The sum 1 + erf cancels for x far below 0: the error there is about 6e-8 |x| absolute.  -inf gives NaN."""
    f = forms.gelu if approx == "ERF" else forms.gelu_tanh
    return in_f32(xp, x, lambda v: f(xp, v))


@op(0x3E, "SIGMOID", shape="that of x", dtypes=FLOAT)
def sigmoid(xp, rd: Rd, x: R1, inplace: INPLACE = False):
    """rd = 1 / (1 + e^-x).  -inf gives 0, +inf 1; small results pass through the subnormals."""
    return xp.sigmoid(x)


@op(0x3F, "TANH", shape="that of x", dtypes=FLOAT)
def tanh(xp, rd: Rd, x: R1, inplace: INPLACE = False):
    """rd = tanh x.  +-inf gives +-1; -0 is kept."""
    return xp.tanh(x)


@op(0x40, "RELU", shape="that of x", dtypes=NUMBERS)
def relu(xp, rd: Rd, x: R1, inplace: INPLACE = False):
    """rd = max(x, 0).  NaN and -0 give +0."""
    return xp.maximum(x, 0)


@op(0x41, "EXP", shape="that of x", dtypes=FLOAT)
def exp(xp, rd: Rd, x: R1, inplace: INPLACE = False):
    """rd = e^x.  Overflow gives +inf, underflow passes through the subnormals to +0."""
    return xp.exp(x)


@op(0x42, "LOG", shape="that of x", dtypes=FLOAT)
def log(xp, rd: Rd, x: R1, inplace: INPLACE = False):
    """rd = natural logarithm of x.  +-0 gives -inf, negative numbers NaN."""
    return xp.log(x)


@op(0x43, "CLIP", shape="that of x", dtypes=FLOAT, positional=("min", "max"), sample={"min": -1.0, "max": 1.0})
def clip(xp, rd: Rd, x: R1, min: F32[0], max: F32[4], inplace: INPLACE = False):
    """rd = min(max(x, MIN), MAX).  NaN stays NaN.  Traps: MIN or MAX not finite, MIN > MAX."""
    if not (abs(min) < float("inf") and abs(max) < float("inf") and min <= max):
        raise xp.error(f"CLIP needs finite MIN <= MAX, got {min!r} and {max!r}")
    if x.dtype.kind != "float":
        raise xp.error(f"CLIP takes float tensors, got {x.dtype.name}")
    return in_f32(xp, x, lambda v: xp.select(xp.ne(v, v), v, xp.minimum(xp.maximum(v, min), max)))
