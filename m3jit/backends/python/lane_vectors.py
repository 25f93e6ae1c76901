"""A numba type for vectors of lanes: LLVM vectors, with NumPy's operators.

`Lanes(element, count)` is what `runtime_numba` loads, computes and stores.  Operators take two vectors or a vector and
a number; the number is converted to the element type and repeated.
"""

from __future__ import annotations

import operator
from typing import Any, Callable

from llvmlite import ir
from numba import types
from numba.core import typing
from numba.core.datamodel import models
from numba.core.imputils import lower_cast
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import lower_builtin, register_model

ELEMENTS = {"b1": types.boolean, "i32": types.int32, "i64": types.int64, "f32": types.float32, "f64": types.float64}
LLVM = {
    "b1": ir.IntType(1),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
}
KIND = {element: name for name, element in ELEMENTS.items()}


class Lanes(types.Type):
    """`count` values of one element type (a numba scalar type)."""

    def __init__(self, element: types.Type, count: int):
        self.element, self.count = element, count
        super().__init__(name=f"Lanes({element} x {count})")

    @property
    def kind(self) -> str:
        return KIND[self.element]


@register_model(Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Lanes):
        super().__init__(dmm, fe_type, ir.VectorType(LLVM[fe_type.kind], fe_type.count))


def splat(builder: ir.IRBuilder, x: ir.Value, count: int) -> ir.Value:
    """A vector with `count` copies of a scalar."""
    vector = ir.VectorType(x.type, count)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


@lower_cast(types.Number, Lanes)
@lower_cast(types.Boolean, Lanes)
def _number_to_lanes(context, builder, fromty, toty, val):
    return splat(builder, context.cast(builder, val, fromty, toty.element), toty.count)


@lower_cast(Lanes, Lanes)
def _wider(context, builder, fromty, toty, val):
    """i32 to i64, as an index."""
    if (fromty.kind, toty.kind, fromty.count) != ("i32", "i64", toty.count):
        raise NotImplementedError(f"no conversion from {fromty} to {toty}")
    return builder.sext(val, ir.VectorType(LLVM["i64"], toty.count))


# -- operators ------------------------------------------------------------------------------------------------------

def _by_kind(integer: str, floating: str) -> Callable:
    """The builder method for an element type."""
    def emit(builder: ir.IRBuilder, kind: str, a: ir.Value, b: ir.Value) -> ir.Value:
        return getattr(builder, floating if kind in ("f32", "f64") else integer)(a, b)
    return emit


def _compare(symbol: str) -> Callable:
    def emit(builder: ir.IRBuilder, kind: str, a: ir.Value, b: ir.Value) -> ir.Value:
        if kind in ("f32", "f64"):
            return (builder.fcmp_unordered if symbol == "!=" else builder.fcmp_ordered)(symbol, a, b)
        return builder.icmp_signed(symbol, a, b)
    return emit


_ARITHMETIC = {
    operator.add: _by_kind("add", "fadd"),
    operator.sub: _by_kind("sub", "fsub"),
    operator.mul: _by_kind("mul", "fmul"),
    operator.truediv: _by_kind("", "fdiv"),
    operator.and_: _by_kind("and_", ""),
    operator.or_: _by_kind("or_", ""),
    operator.xor: _by_kind("xor", ""),
    operator.lshift: _by_kind("shl", ""),
    operator.rshift: _by_kind("ashr", ""),
}
_COMPARISON = {operator.lt: _compare("<"), operator.le: _compare("<="), operator.eq: _compare("=="),
               operator.ne: _compare("!=")}


def common(*args: types.Type) -> Lanes | None:
    """The vector type among the operands; None when there is none, or two different ones."""
    found = {a for a in args if isinstance(a, Lanes)}
    numbers = all(isinstance(a, (Lanes, types.Number, types.Boolean)) for a in args)
    return found.pop() if len(found) == 1 and numbers else None


def _binary(symbol: Any, emit: Callable, compares: bool) -> None:
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            v = common(*args) if len(args) == 2 and not kws else None
            if v is None:
                return None
            return typing.signature(Lanes(types.boolean, v.count) if compares else v, v, v)
    infer_global(symbol)(Template)

    @lower_builtin(symbol, Lanes, Lanes)
    def lower(context, builder, sig, args):
        return emit(builder, sig.args[0].kind, *args)


def _unary(symbol: Any, emit: Callable) -> None:
    class Template(AbstractTemplate):
        def generic(self, args, kws):
            return typing.signature(args[0], args[0]) if len(args) == 1 and isinstance(args[0], Lanes) else None
    infer_global(symbol)(Template)

    @lower_builtin(symbol, Lanes)
    def lower(context, builder, sig, args):
        return emit(builder, sig.args[0].kind, *args)


for _symbol, _emit in _ARITHMETIC.items():
    _binary(_symbol, _emit, False)
for _symbol, _emit in _COMPARISON.items():
    _binary(_symbol, _emit, True)
_unary(operator.neg, lambda b, kind, a: b.fneg(a) if kind in ("f32", "f64") else b.neg(a))
_unary(operator.invert, lambda b, kind, a: b.not_(a))
