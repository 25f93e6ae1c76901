"""Engines shared by the CPU backend's tests: one per level the host can run, without a disk cache."""
from __future__ import annotations

import functools
from typing import Any, Sequence

import numpy as np

from m3jit.backends.cpu.cache import DiskCache
from m3jit.backends.cpu.engine import Engine
from m3jit.backends.cpu.target import available_levels
from m3jit.ir.loop import Kernel
from tests.loop_eval import run_kernel

LEVELS = available_levels()


@functools.cache
def engine(level: str) -> Engine:
    return Engine(level, cache=DiskCache.off())


def canonical(a: np.ndarray) -> np.ndarray:
    """A copy with one NaN per float type: arithmetic fixes that a result is NaN, not which."""
    if a.dtype.kind == "f":
        a = a.copy()
        a[np.isnan(a)] = np.nan
    return a


def check(kernel: Kernel, args: Sequence[Any], levels: Sequence[str] = LEVELS,
          threads: Sequence[int] = (1, 2, 3)) -> None:
    """Runs `kernel` at every level and thread count and on the NumPy model; all written bytes must be equal."""
    expected = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    run_kernel(kernel, expected)
    for level in levels:
        run = engine(level).kernel(kernel)
        for n in threads:
            got = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
            run(got, n)
            for p, e, g in zip(kernel.params, expected, got):
                if isinstance(e, np.ndarray) and canonical(e).tobytes() != canonical(g).tobytes():
                    flat_e, flat_g = canonical(e).reshape(-1), canonical(g).reshape(-1)
                    u = f"u{e.dtype.itemsize}"
                    bad = np.flatnonzero(flat_e.view(u) != flat_g.view(u))
                    i = int(bad[0])
                    raise AssertionError(f"{kernel.name} at {level}, {n} threads: {p.name}[{i}] is {flat_g[i]!r}, "
                                         f"expected {flat_e[i]!r} ({bad.size} of {flat_e.size} differ)")
