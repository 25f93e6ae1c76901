"""Where a weight is not finite: floats that are NaN or infinite, and block scales that are.

A block with such a scale has NaN or infinities for all its values, and one row of a matrix makes every result of the
model NaN; the file is damaged, or a conversion overflowed F16.
"""
from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import numpy as np

from m3jit.ir.eager_blocks import FORMATS, split
from m3jit.isa.types import DType, Tensor

AT_ONCE = 1 << 22                            # elements or blocks looked at together
MOST = 1000                                  # places counted beyond the first
# float type -> (unsigned integer of its size, its exponent's bits)
_EXPONENT = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}


class WeightWarning(UserWarning):
    """A weight that is about to be used is not finite."""


def places(dtype: DType, shape: tuple[int, ...], data: np.ndarray) -> Iterator[str]:
    """Sentences for the values and scales that are not finite, in the order of the data.

    data: the tensor's array as `Tensor` holds it; integer types have no such values."""
    if dtype.name in _EXPONENT:
        kind, mask = _EXPONENT[dtype.name]
        bits, fraction = np.ascontiguousarray(data).reshape(-1).view(kind), (mask & -mask) - 1
        for at in _all_ones(bits, mask):
            yield f"{'NaN' if int(bits[at]) & fraction else 'an infinity'} at {_index(at, shape)}"
    elif dtype.is_block:
        yield from _scales(dtype, shape, data)


def _all_ones(bits: np.ndarray, mask: int) -> Iterator[int]:
    for start in range(0, len(bits), AT_ONCE):
        part = bits[start:start + AT_ONCE]
        found = (part & part.dtype.type(mask)) == mask
        if found.any():
            yield from (start + np.flatnonzero(found)).tolist()


def _scales(dtype: DType, shape: tuple[int, ...], data: np.ndarray) -> Iterator[str]:
    raw, form = split(dtype, np.asarray(data)).reshape(-1, dtype.nbytes), FORMATS[dtype.name]
    per_row = shape[-1] // dtype.block
    for start in range(0, len(raw), AT_ONCE):
        part = raw[start:start + AT_ONCE]
        halves = [] if form.d is None else [(form.d, "d ")] if form.m is None else [(form.d, "d "), (form.m, "m ")]
        marks = [(part[:, at + 1] & 0x7C == 0x7C, name) for at, name in halves] or [(part[:, 0] == 255, "")]
        for found, name in marks:
            for block in np.flatnonzero(found).tolist():
                first = (start + block) % per_row * dtype.block
                row = _index((start + block) // per_row, shape[:-1]) if len(shape) > 1 else "0"
                yield (f"a scale {name}that is not finite in row {row}, for its columns {first} to "
                       f"{first + dtype.block - 1}")


def _index(at: int, shape: tuple[int, ...]) -> str:
    numbers = np.unravel_index(at, shape) if shape else ()
    return str(int(numbers[0])) if len(numbers) == 1 else str([int(n) for n in numbers])


def report(t: Tensor) -> str:
    """What is wrong with a tensor, "" where all is finite: the first place and how many more there are."""
    found = places(t.dtype, t.shape, t.data)
    first = next(found, "")
    more = sum(1 for _ in itertools.islice(found, MOST))
    if not more:
        return first
    return f"{first}, and {'at least ' if more == MOST else ''}{more} more place{'s' if more > 1 else ''}"


def warn_where_not_finite(t: Tensor) -> None:
    """A `WeightWarning` for a weight with a value or scale that is not finite."""
    wrong = report(t)
    if wrong:
        name = f"tensor {t.key.split('/', 1)[1]!r}" if t.key and "/" in t.key else "a weight"
        warnings.warn(f"{name} ({t.dtype.name} {list(t.shape)}) holds {wrong}; results that use it will not be finite. "
                      "`m3jit verify MODEL` lists all such places; obtain or convert the model again.", WeightWarning,
                      stacklevel=2)
