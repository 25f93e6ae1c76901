"""Reductions and orderings of the eager namespace, in the canonical order: 64 lanes, then a halving tree."""
from __future__ import annotations

from typing import Any, Callable

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir.eager_elementwise import maximum, minimum
from m3jit.ir.eager_layout import check_range
from m3jit.ir.eager_values import CANONICAL_NAN, describe, floats, ints, make, plain, to_axis, widen
from m3jit.isa.types import BOOL, FLOATS, Tensor

LANES = 64

# op -> (combine, what the lanes start from, what pads the last step)
FLOAT_FOLDS: dict[str, tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], float]] = {
    "SUM": (np.add, 0.0), "PROD": (np.multiply, 1.0), "MAX": (maximum, CANONICAL_NAN), "MIN": (minimum, CANONICAL_NAN),
}


def tree(acc: np.ndarray, combine: Callable) -> np.ndarray:
    """Halving tree over the last axis (64 lanes): lane l combines with lane l + 32, then l + 16, ... 1."""
    half = acc.shape[-1] // 2
    while half:
        acc = combine(acc[..., :half], acc[..., half:2 * half])
        half //= 2
    return acc[..., 0]


def fold64(x: np.ndarray, op: str) -> np.ndarray:
    """Canonical fold of f32 [.., n] along the last axis: lane l takes elements l, l + 64, ... in order."""
    combine, identity = FLOAT_FOLDS[op]
    n = x.shape[-1]
    acc = np.full((*x.shape[:-1], LANES), identity, np.float32)
    with np.errstate(all="ignore"):
        for at in range(0, n, LANES):
            step = x[..., at:at + LANES]
            if step.shape[-1] < LANES:
                padded = np.full((*x.shape[:-1], LANES), identity, np.float32)
                padded[..., :step.shape[-1]] = step
                step = padded
            acc = combine(acc, step)
        return tree(acc, combine)


def order(x: Tensor, axis: int, descending: bool) -> np.ndarray:
    """Stable order of x along an axis: NaN largest, -0 = +0, ties by the lower index in both directions."""
    keys = widen(x) if x.dtype in FLOATS else x.data
    if not descending:
        return np.argsort(keys, axis=axis, kind="stable")
    flipped = np.argsort(np.flip(keys, axis), axis=axis, kind="stable")
    return keys.shape[axis] - 1 - np.flip(flipped, axis)


class Reduce:
    """Mixin of `EagerXp`."""

    def reduce(self, x, op: str, axis: int | None = None, keepdims: bool = False):
        """SUM PROD MAX MIN along an axis, or (None) over all elements in row-major order as one row."""
        x = plain(x)
        if x.dtype is BOOL:
            raise OperandError(f"a reduction needs numbers, got {describe(x)}; CAST converts")
        if axis is None:
            out = self.reduce(self.reshape(x, (x.size,)), op, 0)
            return self.reshape(out, (1,) * x.rank) if keepdims else out
        at = to_axis(x, axis)
        if op in ("MAX", "MIN") and x.shape[at] == 0:
            raise OperandError(f"{op} over axis {at} of {describe(x)}: it is empty")
        if x.dtype in FLOATS:
            out = fold64(np.moveaxis(widen(x), at, -1), op)
            return floats(np.expand_dims(out, at) if keepdims else out, x.dtype)
        if op in ("SUM", "PROD"):
            f = np.sum if op == "SUM" else np.prod
            return ints(f(x.data, axis=at, dtype=np.int64, keepdims=keepdims))
        return make((np.max if op == "MAX" else np.min)(x.data, axis=at, keepdims=keepdims), x.dtype)

    def argmax(self, x, axis: int):
        """Index (I64) of the first maximum; the axis keeps length 1.  NaN is ignored unless all are NaN (then 0)."""
        x = plain(x)
        at = to_axis(x, axis)
        if x.shape[at] == 0:
            raise OperandError(f"ARGMAX over axis {at} of {describe(x)}: it is empty")
        if x.dtype not in FLOATS:
            return ints(np.argmax(x.data, axis=at, keepdims=True))
        v = widen(x)
        number = v == v
        top = np.max(np.where(number, v, -np.inf), axis=at, keepdims=True)
        return ints(np.argmax(number & (v == top), axis=at, keepdims=True))

    def sort(self, x, axis: int, descending: bool = False):
        """(values, I64 indices), stable, NaN largest, -0 = +0."""
        x = plain(x)
        at = to_axis(x, axis)
        i = order(x, at, descending)
        return make(np.take_along_axis(x.data, i, at), x.dtype), ints(i)

    def topk(self, x, k: int, axis: int, largest: bool = True, sorted: bool = True):
        """(values, I64 indices) of the k largest or smallest; ties go to the lower index.  Not sorted: in the order
        they have in x."""
        x = plain(x)
        at = to_axis(x, axis)
        check_range("k", k, 1, x.shape[at])
        i = np.take(order(x, at, largest), np.arange(k), axis=at)
        if not sorted:
            i = np.sort(i, axis=at)
        return make(np.take_along_axis(x.data, i, at), x.dtype), ints(i)

    def digest(self, x: Any, algorithm: str) -> int:
        """Hash of a tensor's canonical bytes as a signed 64-bit integer: FNV1A64 or CRC32 (0 .. 2^32 - 1).

        Canonical bytes: float and block tensors as F32 little-endian, others as stored, row-major."""
        from m3jit.ir.digest import crc32, fnv1a64
        data = self.canonical_bytes(x)
        return fnv1a64(data) if algorithm == "FNV1A64" else crc32(data)
