"""Elementwise primitives of the eager namespace.

Tensors broadcast as in NumPy and have one dtype; float dtypes mix to F32.  A Python number joins in the tensors'
arithmetic type: f32 for float tensors, wrapped to the dtype for integer ones.
"""
from __future__ import annotations

from typing import Any, Callable

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir import eager_math
from m3jit.ir.eager_values import (describe, element_of, floats, int_bounds, make, narrow, plain, to_f32,
                                   widen)
from m3jit.isa.types import BOOL, F32, FLOATS, DType, Tensor


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a where b < a or b is NaN, else b: a NaN loses, equal values (also -0 and +0) give b."""
    return np.where((b < a) | (b != b), a, b)


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a where a < b or b is NaN, else b."""
    return np.where((a < b) | (b != b), a, b)


def float_to_int(v: np.ndarray, dtype: DType) -> np.ndarray:
    """f32 values rounded half to even, saturated, NaN -> 0."""
    low, high = int_bounds(dtype)
    r = np.rint(v).astype(np.float64)
    above, below = r >= 2.0 ** (high.bit_length()), r <= float(low)
    inside = np.where(above | below | (r != r), 0.0, r).astype(np.int64)
    return np.where(above, high, np.where(below, low, inside)).astype(dtype.numpy)


class Elementwise:
    """Mixin of `EagerXp`."""

    def _operands(self, values: tuple[Any, ...]) -> tuple[DType, list[np.ndarray]]:
        """The dtype of the result and the operands as arrays of its arithmetic type."""
        dtypes = {plain(v).dtype for v in values if not isinstance(v, (int, float))}
        if not dtypes:
            raise OperandError("no tensor operand: " + ", ".join(map(describe, values)))
        if len(dtypes) > 1 and not dtypes <= set(FLOATS):
            raise OperandError("operands of different dtypes: " + ", ".join(map(describe, values)) + "; CAST converts")
        dtype = F32 if len(dtypes) > 1 else next(iter(dtypes))
        if dtype in FLOATS:
            arrays = [to_f32(v) if isinstance(v, (int, float)) else widen(v) for v in values]
        else:
            arrays = [np.asarray(element_of(dtype, v)) if isinstance(v, (int, float)) else v.data for v in values]
        try:
            shape = np.broadcast_shapes(*(a.shape for a in arrays))
        except ValueError:
            raise OperandError("shapes do not broadcast: " + ", ".join(map(describe, values))) from None
        self.room(shape, F32 if dtype in FLOATS else dtype)
        return dtype, arrays

    def _numbers(self, name: str, f: Callable[..., np.ndarray], *values: Any) -> Tensor:
        dtype, arrays = self._operands(values)
        if dtype is BOOL:
            raise OperandError(f"{name} needs numbers, got {', '.join(map(describe, values))}; CAST converts")
        with np.errstate(all="ignore"):
            out = np.asarray(f(*arrays))
        return floats(out, dtype) if dtype in FLOATS else make(out.astype(dtype.numpy, copy=False), dtype)

    def _floats(self, name: str, f: Callable[..., np.ndarray], *values: Any) -> Tensor:
        dtype, arrays = self._operands(values)
        if dtype not in FLOATS:
            raise OperandError(f"{name} needs float tensors, got {', '.join(map(describe, values))}; CAST converts")
        with np.errstate(all="ignore"):
            return floats(f(*arrays), dtype)

    def _compare(self, f: Callable[..., np.ndarray], *values: Any) -> Tensor:
        _, arrays = self._operands(values)
        return make(f(*arrays), BOOL)

    def add(self, a, b): return self._numbers("add", np.add, a, b)
    def sub(self, a, b): return self._numbers("sub", np.subtract, a, b)
    def mul(self, a, b): return self._numbers("mul", np.multiply, a, b)
    def div(self, a, b): return self._floats("div", np.divide, a, b)
    def minimum(self, a, b): return self._numbers("minimum", minimum, a, b)
    def maximum(self, a, b): return self._numbers("maximum", maximum, a, b)
    def neg(self, a): return self._numbers("neg", np.negative, a)
    def abs(self, a): return self._numbers("abs", np.abs, a)
    def sqrt(self, a): return self._floats("sqrt", np.sqrt, a)
    def floor(self, a): return self._floats("floor", np.floor, a)
    def rint(self, a): return self._floats("rint", np.rint, a)
    def fma(self, a, b, c): return self._floats("fma", eager_math.fma32, a, b, c)
    def exp(self, a): return self._floats("exp", eager_math.exp32, a)
    def log(self, a): return self._floats("log", eager_math.log32, a)
    def sin(self, a): return self._floats("sin", eager_math.sin32, a)
    def cos(self, a): return self._floats("cos", eager_math.cos32, a)
    def tanh(self, a): return self._floats("tanh", eager_math.tanh32, a)
    def erf(self, a): return self._floats("erf", eager_math.erf32, a)
    def sigmoid(self, a): return self._floats("sigmoid", eager_math.sigmoid32, a)
    def softplus(self, a): return self._floats("softplus", eager_math.softplus32, a)
    def lt(self, a, b): return self._compare(np.less, a, b)
    def le(self, a, b): return self._compare(np.less_equal, a, b)
    def eq(self, a, b): return self._compare(np.equal, a, b)
    def ne(self, a, b): return self._compare(np.not_equal, a, b)

    def logical_not(self, a):
        if plain(a).dtype is not BOOL:
            raise OperandError(f"logical_not needs a BOOL tensor, got {describe(a)}")
        return make(np.logical_not(a.data), BOOL)

    def select(self, c, a, b):
        """a where the BOOL tensor c holds, else b.  Bits are copied; a NaN that is selected becomes canonical."""
        if plain(c).dtype is not BOOL:
            raise OperandError(f"select needs a BOOL condition, got {describe(c)}")
        dtype, arrays = self._operands((a, b))
        try:
            out = np.where(c.data, *arrays)
        except ValueError:
            raise OperandError(f"shapes do not broadcast: {describe(c)}, {describe(a)}, {describe(b)}") from None
        return floats(out, dtype) if dtype in FLOATS else make(out, dtype)

    def cast(self, x, dtype: DType):
        """x in another dtype.  float -> integer: half to even, saturated, NaN -> 0; integer -> integer wraps; to BOOL:
        not zero (NaN is true); to F16 and BF16: from f32, nearest even."""
        x = plain(x)
        if dtype.is_block:
            raise OperandError(f"CAST does not make {dtype.name} blocks; QUANTIZE does")
        if x.dtype is dtype:
            return x
        source = widen(x) if x.dtype in FLOATS else x.data
        with np.errstate(all="ignore"):
            if dtype is BOOL:
                return make(source != 0, BOOL)
            if dtype in FLOATS:
                return make(narrow(source.astype(np.float32), dtype), dtype)
            if x.dtype in FLOATS:
                return make(float_to_int(source, dtype), dtype)
            return make(source.astype(dtype.numpy), dtype)


