"""Orderings and reductions: SORT TOPK ARGMAX REDUCE SOFTMAX SANITY_CHECK.

Order of values: NaN above everything, -0 equal to +0, ties to the lower index in both directions.  Sums run in the
canonical order: 64 lanes, then a halving tree.
"""
from __future__ import annotations

from typing import Any

from m3jit.isa.fields import F32, I8, R1, R2, Enum, IntOrReg, PayloadFlag, Rd
from m3jit.isa.forms import ANY, FLOAT, INPLACE, NUMBERS, in_f32
from m3jit.isa.table import op
from m3jit.isa.types import F32 as F32_TYPE
from m3jit.isa.types import I64

ALL = -128                                     # AXIS of a reduction over all elements


@op(0x30, "SORT", shape="that of x, both results", dtypes=ANY, positional=("order",))
def sort(xp, rd: Rd, x: R1, indices: R2("tensor", dest=True) = None, axis: I8[0] = 0,
         order: Enum("ASC DESC")[1] = "ASC"):
    """rd = x sorted along an axis, stable; indices (I64) = where each element came from.  NaN is the largest."""
    return xp.sort(x, axis, order == "DESC")


@op(0x31, "TOPK", shape="that of x, axis K, both results", dtypes=ANY, positional=("k",), sample={"k": 1})
def topk(xp, rd: Rd, x: R1, indices: R2("tensor", dest=True) = None, k: IntOrReg(fmt="i")[0, 4] = 1, axis: I8[5] = 0,
         smallest: PayloadFlag(0, "LARGEST")[6] = False, unsorted: PayloadFlag(1, "SORTED")[6] = False):
    """rd = the K largest (SMALLEST: smallest) elements along an axis, in that order; indices (I64) = their places.

    UNSORTED: in the order they have in x.  NaN is the largest.  Traps: K < 1 or beyond the axis."""
    return xp.topk(x, k, axis, not smallest, not unsorted)


@op(0x32, "ARGMAX", shape="that of x, axis 1", dtypes=ANY, positional=("axis",))
def argmax(xp, rd: Rd, x: R1, axis: I8[0] = 0):
    """rd (I64) = index of the first maximum along an axis, which keeps length 1.

    NaN is ignored unless all are NaN (then 0).  Traps: an empty axis."""
    return xp.argmax(x, axis)


@op(0x33, "REDUCE", shape="that of x without the axis (KEEPDIMS: 1); without AXIS: []", dtypes=NUMBERS,
    positional=("op", "axis"), sample={"op": "SUM"})
def reduce(xp, rd: Rd, x: R1, op: Enum("SUM MEAN MAX MIN PROD")[0], axis: I8[1] = ALL,
           keepdims: PayloadFlag(0)[2] = False):
    """rd = sum, mean, maximum, minimum or product along an axis, or of all elements (no AXIS).

    Floats fold in the canonical order, in f32.  MAX and MIN ignore NaN unless all are NaN.  SUM and PROD of integers
    give I64 and wrap; MEAN = sum / count in f32 (integers: converted to F32 first).  Empty: SUM 0, PROD 1, MEAN NaN.
    Traps: MAX or MIN of an empty axis."""
    where = None if axis == ALL else axis
    if op != "MEAN":
        return xp.reduce(x, op, where, keepdims)
    return in_f32(xp, x if x.dtype.kind == "float" else xp.cast(x, F32_TYPE), lambda v: _mean(xp, v, where, keepdims))


def _mean(xp: Any, x: Any, axis: int | None, keepdims: bool) -> Any:
    total = xp.reduce(x, "SUM", axis, keepdims)
    count: Any = 1
    for a in range(len(x.shape)) if axis is None else (axis,):
        count = xp.scalar("mul", count, xp.dim(x, a))
    return xp.div(total, xp.scalar("i2f", count))


def mean_last(xp: Any, x: Any) -> Any:
    """Mean along the last axis, which keeps length 1."""
    return _mean(xp, x, -1, True)


@op(0x3C, "SOFTMAX", shape="that of x", dtypes=FLOAT, positional=("axis",), key_aliases={"TEMPERATURE": "temp"},
    source="Bridle 1990")
def softmax(xp, rd: Rd, x: R1, axis: I8[0] = -1, temp: F32[1] = 1.0, inplace: INPLACE = False):
    """rd = e^((x - max) / TEMP) / sum, along an axis; TEMP=inf gives equal weights.

    max ignores NaN, but a NaN, a +inf or nothing above -inf makes the whole lane NaN.  Traps: TEMP not above 0, an
    empty axis."""
    if not temp > 0:
        raise xp.error(f"SOFTMAX needs TEMP above 0, got {temp!r}")

    def compute(v: Any) -> Any:
        shifted = xp.sub(v, xp.reduce(v, "MAX", axis, True))
        e = xp.exp(shifted if temp == 1 else xp.div(shifted, temp))
        return xp.div(e, xp.reduce(e, "SUM", axis, True))
    return in_f32(xp, x, compute)


@op(0x6C, "SANITY_CHECK", shape="that of x; count: a number", dtypes=FLOAT)
def sanity_check(xp, rd: Rd, x: R1, count: R2("int", dest=True) = None):
    """rd = x with every infinity and NaN replaced by +0; count = how many there were."""
    if x.dtype.kind != "float":
        raise xp.error(f"SANITY_CHECK looks at float tensors, got {x.dtype.name}")
    finite = xp.eq(xp.sub(x, x), 0.0)
    bad = xp.reduce(xp.cast(xp.logical_not(finite), I64), "SUM", None)
    return xp.select(finite, x, 0.0), xp.element(bad, 0)
