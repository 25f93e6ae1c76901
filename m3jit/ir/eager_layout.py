"""Moves of the eager namespace: bits stay as they are.

Block-quantised tensors can be moved along every axis but the last one, whose elements are packed.
"""
from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir.eager_elementwise import maximum
from m3jit.ir.eager_values import (describe, element_of, floats, index_tensor, make, plain, tensor, to_axis, to_shape,
                                   widen)
from m3jit.isa.types import BOOL, FLOATS, I64, MAX_RANK, DType, Tensor


def movable(v: Any, axis: int) -> tuple[Tensor, int]:
    """The operand and its axis; a block type's last axis is refused."""
    x = tensor(v)
    at = to_axis(x, axis)
    if x.dtype.is_block and at == x.rank - 1:
        raise OperandError(f"the last axis of {describe(x)} is packed in blocks; DEQUANT it first")
    return x, at


def moved(x: Tensor, data: np.ndarray) -> Tensor:
    """A tensor of x's dtype over moved storage."""
    if not x.dtype.is_block:
        return make(data, x.dtype)
    columns = data.shape[-1] // x.dtype.nbytes * x.dtype.block
    return Tensor(x.dtype, (*data.shape[:-1], columns), np.ascontiguousarray(data))


def check_range(what: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or not low <= value <= high:
        raise OperandError(f"{what} is {value!r}; it must be an integer from {low} to {high}")
    return value


class Layout:
    """Mixin of `EagerXp`."""

    def reshape(self, x, shape: Sequence[int]):
        """The same elements in row-major order under another shape; one dimension may be -1."""
        x = tensor(x)
        dims = to_shape(shape, inferred=x.size)
        if int(np.prod(dims, dtype=object)) != x.size:
            raise OperandError(f"cannot reshape {describe(x)} to {list(dims)}: {x.size} elements")
        if x.dtype.is_block:
            if not dims or not x.shape or dims[-1] != x.shape[-1]:
                raise OperandError(f"the last axis of {describe(x)} is packed in blocks; it must stay {x.shape[-1]}")
            return Tensor(x.dtype, dims, x.data.reshape(*dims[:-1], x.data.shape[-1]), x.key)
        return Tensor(x.dtype, dims, x.data.reshape(dims))

    def broadcast(self, x, shape: Sequence[int]):
        """x repeated along axes of length 1 (and new leading axes) to the given shape."""
        x, dims = plain(x), to_shape(shape)
        self.room(dims, x.dtype)
        try:
            return make(np.broadcast_to(x.data, dims).copy(), x.dtype)
        except ValueError:
            raise OperandError(f"cannot broadcast {describe(x)} to {list(dims)}") from None

    def transpose(self, x, perm: Sequence[int]):
        """Axis i of the result is axis perm[i] of x."""
        x = tensor(x)
        if sorted(perm) != list(range(x.rank)):
            raise OperandError(f"axes {list(perm)} are not a permutation of the {x.rank} axes of {describe(x)}")
        if x.dtype.is_block and (not perm or perm[-1] != x.rank - 1):
            raise OperandError(f"the last axis of {describe(x)} is packed in blocks; DEQUANT it first")
        return moved(x, np.transpose(x.data, perm).copy())

    def slice(self, x, axis: int, start: int = 0, stop: int | None = None, step: int = 1):
        """Elements start, start + step, ... < stop along an axis.  Negative start and stop count from the end; stop
        None: to the end."""
        x, at = movable(x, axis)
        n = x.shape[at]
        start = check_range("start", start, -n, n) % n if start < 0 else check_range("start", start, -n, n)
        stop = n if stop is None else check_range("stop", stop, -n, n)
        stop = stop + n if stop < 0 else stop
        check_range("step", step, 1, 2 ** 62)
        if stop < start:
            raise OperandError(f"slice from {start} to {stop} of axis {at} of {describe(x)}: the end is before the "
                               "start")
        return moved(x, x.data[(slice(None),) * at + (slice(start, stop, step),)].copy())

    def concat(self, tensors: Sequence[Any], axis: int):
        """Tensors of one dtype, equal in all axes but this one, one after the other."""
        parts = [movable(t, axis) for t in tensors]
        first, at = parts[0]
        for t, other in parts[1:]:
            if t.dtype is not first.dtype or t.rank != first.rank or other != at or \
                    any(a != b for i, (a, b) in enumerate(zip(t.shape, first.shape)) if i != at):
                raise OperandError(f"cannot concatenate {describe(first)} and {describe(t)} along axis {at}: dtype and "
                                   "all other dimensions must agree")
        return moved(first, np.concatenate([t.data for t, _ in parts], axis=at))

    def pad(self, x, axis: int, before: int, after: int, value: int | float = 0):
        """`before` and `after` copies of a value around x along an axis."""
        x = plain(x)
        at = to_axis(x, axis)
        check_range("before", before, 0, 2 ** 40)
        check_range("after", after, 0, 2 ** 40)
        shape = list(x.shape)
        shape[at] += before + after
        self.room(shape, x.dtype)
        out = np.full(shape, element_of(x.dtype, value), x.dtype.numpy)
        out[(slice(None),) * at + (slice(before, before + x.shape[at]),)] = x.data
        return make(out, x.dtype)

    def tile(self, x, axis: int, reps: int):
        """The whole axis `reps` times over: a b c -> a b c a b c."""
        x, at = movable(x, axis)
        check_range("reps", reps, 0, 2 ** 40)
        shape = [*x.data.shape[:at], reps, *x.data.shape[at:]]
        self.room(shape, x.dtype)
        wide = np.broadcast_to(np.expand_dims(x.data, at), shape)
        shape[at:at + 2] = [reps * x.data.shape[at]]
        return moved(x, wide.reshape(shape) if reps > 1 else wide.reshape(shape).copy())

    def gather(self, table, index, axis: int):
        """Slices of table along an axis at integer indices: shape table[:axis] + index.shape + table[axis + 1:]."""
        x, at = movable(table, axis)
        i = self._indices(index, x.shape[at], f"axis {at} of {describe(x)}")
        if x.rank - 1 + i.ndim > MAX_RANK:
            raise OperandError(f"the result of GATHER would have {x.rank - 1 + i.ndim} dimensions; {MAX_RANK} at most")
        self.room((*x.data.shape[:at], *i.shape, *x.data.shape[at + 1:]), x.dtype)
        return moved(x, np.take(x.data, i, axis=at))

    def scatter(self, acc, index, values, axis: int, mode: str):
        """acc with values[.., n, ..] combined into acc[.., index n, ..], n in order.  mode ADD, or MAX (`maximum`, a
        NaN loses).  F16 and BF16 are summed in f32 and rounded once at the end; integers wrap."""
        acc, values = plain(acc), plain(values)
        at = to_axis(acc, axis)
        i = self._indices(index, acc.shape[at], f"axis {at} of {describe(acc)}")
        want = (*acc.shape[:at], *i.shape, *acc.shape[at + 1:])
        if acc.dtype is not values.dtype or acc.dtype is BOOL or values.shape != want:
            raise OperandError(f"SCATTER needs values {acc.dtype.name} {list(want)} for {describe(acc)}, "
                               f"got {describe(values)}")
        is_float = acc.dtype in FLOATS
        out = np.array(widen(acc) if is_float else acc.data)
        flat = np.moveaxis((widen(values) if is_float else values.data).reshape(
            *acc.shape[:at], i.size, *acc.shape[at + 1:]), at, 0)
        rows = np.moveaxis(out, at, 0)
        with np.errstate(all="ignore"):
            for n, target in enumerate(i.ravel()):
                old, new = rows[target], flat[n]
                rows[target] = old + new if mode == "ADD" else maximum(old, new)
        return floats(out, acc.dtype) if is_float else make(out, acc.dtype)

    def full(self, shape: Sequence[int], dtype: DType, value: int | float):
        """A tensor of one value."""
        if dtype.is_block:
            raise OperandError(f"a {dtype.name} tensor cannot be filled; QUANTIZE makes one")
        dims = to_shape(shape)
        self.room(dims, dtype)
        return make(np.full(dims, element_of(dtype, value), dtype.numpy), dtype)

    def iota(self, n: int, dtype: DType = I64):
        """0, 1, ... n - 1."""
        check_range("length", n, 0, 2 ** 40)
        self.room((n,), I64)
        return self.cast(make(np.arange(n, dtype=np.int64), I64), dtype)

    def _indices(self, index: Any, limit: int, where: str) -> np.ndarray:
        i = index_tensor(index)
        bad = (i < 0) | (i >= limit)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise OperandError(f"index {int(i.flat[at])} at position {at} is outside 0..{limit - 1} of {where}")
        return i
