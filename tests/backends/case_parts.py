"""What the kernel cases are made of: the case itself, and the data arrays hold."""
from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import numpy as np

from m3jit.ir.loop import Kernel
from m3jit.isa import types as T

f32 = np.float32
SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-42, 3.4e38, -1.0, 88.8, -104.0, 0.5, 1.5], f32)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], Kernel]
    make: Callable[[np.random.Generator], list[Any]]
    first_slice: bool = False                # one of what OpenCL and PTX have to run
    slow: bool = False                       # in the sweep only
    heavy: bool = False                      # numba takes seconds to compile it: in the sweep only

    @property
    def kernel(self) -> Kernel:
        return self.build()

    def args(self) -> list[Any]:
        return self.make(np.random.default_rng(zlib.crc32(self.name.encode())))


def blank(shape: Any, dtype: Any = f32) -> np.ndarray:
    """An output array filled with bytes 0xA5."""
    return np.frombuffer(bytes([0xA5]) * (int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape).copy()


def floats(rng: np.random.Generator, *shape: int, special: bool = True) -> np.ndarray:
    x = (rng.normal(0, 1, shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(f32)
    if special and x.size > 1:
        flat = x.reshape(-1)
        at = rng.choice(flat.size, min(len(SPECIAL), flat.size // 2), replace=False)
        flat[at] = SPECIAL[:len(at)]
    return x


def storage(rng: np.random.Generator, dtype: T.DType, shape: Sequence[int], special: bool = True) -> np.ndarray:
    if dtype is T.BF16:
        return (floats(rng, *shape, special=special).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.kind == "float":
        with np.errstate(over="ignore"):
            return floats(rng, *shape, special=special).astype(dtype.numpy)
    if dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    info = np.iinfo(dtype.numpy)
    return rng.integers(info.min, info.max, shape, dtype.numpy, endpoint=True)
