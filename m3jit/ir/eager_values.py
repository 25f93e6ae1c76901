"""Tensors as NumPy arrays for the eager namespace: widening to f32, rounding back, operand checks.

Floats compute in f32 whatever their storage is; a stored float result has every NaN replaced by the canonical quiet
NaN (0x7FC00000, F16 0x7E00, BF16 0x7FC0).
"""
from __future__ import annotations

import math
from typing import Any, Sequence

import numpy as np

from m3jit.errors import OperandError
from m3jit.isa.types import BF16, BOOL, F16, F32, FLOATS, I64, MAX_RANK, U8, DType, Tensor

CANONICAL_NAN = np.uint32(0x7FC00000).view(np.float32)


def widen(x: Tensor) -> np.ndarray:
    """The values of a float tensor as f32 (F32: the stored array itself, not a copy)."""
    if x.dtype is F32:
        return x.data
    if x.dtype is BF16:
        return (x.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.data.astype(np.float32)


def narrow(a: np.ndarray, dtype: DType) -> np.ndarray:
    """f32 values rounded (nearest even) to a float dtype's storage, NaN canonical.  May write into `a`."""
    a = np.asarray(a, np.float32)
    nan = a != a
    if nan.any():
        a = np.where(nan, CANONICAL_NAN, a)
    if dtype is F32:
        return a
    with np.errstate(all="ignore"):
        if dtype is F16:
            return a.astype(np.float16)
        bits = a.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.where(nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def floats(a: np.ndarray, dtype: DType = F32) -> Tensor:
    """A float tensor of computed f32 values."""
    return make(narrow(a, dtype), dtype)


def make(a: np.ndarray, dtype: DType) -> Tensor:
    """A tensor over an array that already has the storage type (copied only if it is not C-contiguous)."""
    a = np.asarray(a)
    if not a.flags.c_contiguous:
        a = np.ascontiguousarray(a)
    return Tensor(dtype, a.shape, a)


def tensor(v: Any) -> Tensor:
    """The operand, which must be a tensor."""
    if v.__class__ is not Tensor:
        raise OperandError(f"expected a tensor, got {describe(v)}")
    return v


def describe(v: Any) -> str:
    """An operand in words."""
    if v.__class__ is Tensor:
        return f"{v.dtype.name} {list(v.shape)}"
    return {int: "an integer", float: "a float", type(None): "nothing"}.get(v.__class__, f"a {type(v).__name__}")


def plain(v: Any) -> Tensor:
    """The operand, which must be a tensor of single elements."""
    x = tensor(v)
    if x.dtype.is_block:
        raise OperandError(f"{x.dtype.name} is a weight type that only matrix products, EMBED, GATHER and DEQUANT "
                           "read; DEQUANT it first")
    return x


def float_tensor(v: Any) -> Tensor:
    x = plain(v)
    if x.dtype not in FLOATS:
        raise OperandError(f"expected a float tensor (F32 F16 BF16), got {describe(x)}; CAST converts")
    return x


def to_axis(x: Tensor, axis: int) -> int:
    """axis as 0..rank-1; negative ones count from the last."""
    if not isinstance(axis, int):
        raise OperandError(f"an axis is an integer, got {describe(axis)}")
    if not -x.rank <= axis < x.rank:
        raise OperandError(f"axis {axis} of a tensor with {x.rank} dimension{'s' if x.rank != 1 else ''}, "
                           f"{describe(x)}")
    return axis % x.rank


def to_shape(shape: Sequence[Any], inferred: int | None = None) -> tuple[int, ...]:
    """Checked dimensions.  inferred: element count from which one -1 is derived."""
    dims = list(shape)
    if len(dims) > MAX_RANK:
        raise OperandError(f"a tensor has at most {MAX_RANK} dimensions, got {dims}")
    for d in dims:
        if not isinstance(d, int) or isinstance(d, bool) or d < (-1 if inferred is not None else 0):
            raise OperandError(f"dimension {d!r} in shape {dims}; it must be an integer from 0"
                               + (" or -1 for the one to infer" if inferred is not None else ""))
    if -1 in dims:
        rest = math.prod(d for d in dims if d != -1)
        if dims.count(-1) > 1 or rest == 0 or inferred % rest:
            raise OperandError(f"cannot infer -1 in shape {dims} from {inferred} elements")
        dims[dims.index(-1)] = inferred // rest
    return tuple(dims)


def element_of(dtype: DType, value: Any) -> Any:
    """A Python number as one stored element: floats rounded once, integers wrapped, BOOL: not zero."""
    if not isinstance(value, (int, float)):
        raise OperandError(f"expected a number, got {describe(value)}")
    if dtype in FLOATS:
        return narrow(to_f32(value), dtype)[()]
    if dtype is BOOL:
        return np.bool_(value != 0)
    if isinstance(value, float):
        if not value.is_integer():
            raise OperandError(f"{value!r} is not an integer; the tensor's dtype is {dtype.name}")
        value = int(value)
    return np.array(value & (1 << 64) - 1, np.uint64).astype(dtype.numpy)[()]


def to_f32(value: int | float) -> np.ndarray:
    """A register's number in f32, rounded to nearest even (a register holds f64 or a 64-bit integer)."""
    with np.errstate(all="ignore"):
        return np.asarray(value, np.float64 if isinstance(value, float) else np.int64).astype(np.float32)


def index_tensor(v: Any) -> np.ndarray:
    """An integer tensor's values as int64."""
    x = plain(v)
    if x.dtype.kind != "int":
        raise OperandError(f"indices must be integers, got {describe(x)}; CAST converts")
    return x.data.astype(np.int64, copy=False)


def int_bounds(dtype: DType) -> tuple[int, int]:
    """Least and greatest value of an integer dtype."""
    bits = 8 * dtype.nbytes
    return (0, 2 ** bits - 1) if dtype is U8 else (-2 ** (bits - 1), 2 ** (bits - 1) - 1)


def ints(a: np.ndarray, dtype: DType = I64) -> Tensor:
    return make(np.asarray(a).astype(dtype.numpy, copy=False), dtype)
