"""How stored tensors become the tensors of GGUF files where the two are not the same bytes.

Matrices are used where they lie, whole or a range of their rows; small tensors are computed in F32; matrices of experts
are copied side by side, for the machine wants them in one piece.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Keys = Mapping[str, Any]                               # keys of the architecture, without its prefix


@dataclass(frozen=True)
class Transform:
    """shape: from the stored shape to the tensor's.  rows: first row and end of what is used, of so many; inner: of the
    second axis, not the first.  values: computed from F32 to F32; None: bytes as stored.  stacked: several stored
    tensors along a new first axis."""
    shape: Callable[[Shape, Keys], Shape] = lambda shape, keys: shape
    rows: Callable[[int], tuple[int, int]] | None = None
    values: Callable[[np.ndarray], np.ndarray] | None = None
    stacked: bool = False
    inner: bool = False

    @property
    def axis(self) -> int:
        """The axis of `rows`."""
        return 1 if self.inner else 0

    @property
    def is_view(self) -> bool:
        """Whether the tensor's bytes lie in the file in one piece."""
        return self.values is None and not self.stacked and not self.inner

    def shape_of(self, stored: Sequence[Shape], keys: Keys) -> Shape:
        """The tensor's shape; ValueError when the stored ones do not fit."""
        shape = stored[0]
        if any(other != shape for other in stored):
            raise ValueError(f"shapes {', '.join(map(str, sorted(set(stored))))}")
        if self.rows is not None:
            if len(shape) <= self.axis:
                raise ValueError(f"{len(shape)} axes")
            first, end = self.rows(shape[self.axis])
            shape = (*shape[:self.axis], max(0, end - first), *shape[self.axis + 1:])
        shape = self.shape(shape, keys)
        return (len(stored), *shape) if self.stacked else shape


def negative_exp(values: np.ndarray) -> np.ndarray:
    """-e^x, by the machine's own exponential: the same bytes on every machine."""
    from m3jit.ir.eager import EagerXp
    from m3jit.isa.types import Tensor

    return np.negative(EagerXp().exp(Tensor.of(values)).data)


def _without_middle(shape: Shape, keys: Keys) -> Shape:
    if len(shape) != 3 or shape[1] != 1:
        raise ValueError("a shape other than [channels, 1, taps]")
    return shape[0], shape[2]


def _groups(shape: Shape, keys: Keys) -> Shape:
    groups = keys["ssm.group_count"]
    if len(shape) != 1 or groups < 1 or shape[0] % groups:
        raise ValueError(f"a shape that {groups} groups do not divide")
    return groups, shape[0] // groups


def _column(shape: Shape, keys: Keys) -> Shape:
    return (*shape, 1)


AS_STORED = Transform()
ONE_PLUS = Transform(values=lambda w: np.float32(1) + w)
DECAY = Transform(values=negative_exp)                                         # A = -e^(A_log)
HEAD_DECAY = Transform(shape=_column, values=negative_exp)
COLUMN = Transform(shape=_column)
TAPS = Transform(shape=_without_middle)
GROUPED = Transform(shape=_groups)
EXPERTS = Transform(stacked=True)
FIRST_HALF = Transform(rows=lambda n: (0, n // 2))
SECOND_HALF = Transform(rows=lambda n: (n // 2, n))
FIRST_HALVES = Transform(rows=lambda n: (0, n // 2), inner=True)               # of each expert
SECOND_HALVES = Transform(rows=lambda n: (n // 2, n), inner=True)
AFTER_TWO = Transform(rows=lambda n: (2, n))           # positions that RoBERTa counts from 2
