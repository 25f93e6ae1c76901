"""Operands of random tensor programs: random values of every dtype, and the items that hold them."""
from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from m3jit import Builder, Tensor
from m3jit.api.builder import Value
from m3jit.isa import types as T
from m3jit.isa.types import DType

SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 65, 100)
MAX_ELEMENTS = 6000
FLOATS = (T.F32, T.F32, T.F32, T.F16, T.BF16)
INTS = (T.I64, T.I32, T.I16, T.I8, T.U8)
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38, 1.0, -1.0], np.float32)


@dataclass(eq=False)
class Item:
    """A register with what it holds.  shape None: a number, kind int or float."""
    value: Value
    dtype: DType | None
    shape: tuple[int, ...] | None
    kind: str = "tensor"

    @property
    def rank(self) -> int:
        return len(self.shape or ())


@dataclass
class Program:
    """A builder with inputs in order, their values, and everything that holds a result."""
    builder: Builder
    inputs: list[Item] = field(default_factory=list)
    arguments: list[Any] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    opcodes: list[str] = field(default_factory=list)


def array(rng: random.Random, dtype: DType, shape: tuple[int, ...], special: float = 0.02) -> Any:
    """Random values of a dtype; BF16 as an m3jit.Tensor."""
    g = np.random.default_rng(rng.getrandbits(32))
    if dtype.kind == "bool":
        return g.random(shape) < 0.5
    if dtype.kind == "int":
        info = np.iinfo(dtype.numpy)
        wide = rng.random() < 0.3
        low, high = (info.min, info.max) if wide else (max(-9, info.min), 9)
        return g.integers(low, high, shape, dtype=dtype.numpy, endpoint=True)
    x = (g.standard_normal(shape) * rng.choice((0.5, 1, 1, 4, 30))).astype(np.float32)
    if x.size and rng.random() < 0.5:
        mask = g.random(shape) < special
        x = np.where(mask, SPECIAL[g.integers(0, len(SPECIAL), shape)], x).astype(np.float32)
    if dtype is T.BF16:
        return Tensor(T.BF16, shape, (x.view(np.uint32) >> 16).astype(np.uint16).reshape(shape))
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(x.astype(dtype.numpy))
