"""One call that runs a kernel on the independent evaluator and on the CPU engine, and insists on equal bytes."""
from __future__ import annotations

import functools
from typing import Any, Sequence

import numpy as np

from m3jit.backends.cpu.engine import Engine
from m3jit.backends.cpu.target import available_levels
from m3jit.ir.loop import Kernel, walk
from tests.loop_eval import run_kernel

# fma is a dozen operations where the CPU has none: LLVM needs ten times as long, seconds for kernels with many
FEW_FMAS, MOST_FMAS = 64, 340


@functools.cache
def engine(level: str) -> Engine:
    return Engine(level)


@functools.lru_cache(maxsize=256)
def levels(kernel: Kernel) -> tuple[str, ...]:
    """The CPU levels a kernel is tested on: all the host has; baseline only for kernels with few fmas and one in four
    of those with more (tests/backends/test_same_bytes.py runs each kind of kernel there)."""
    fmas = vector_fmas(kernel)
    baseline = fmas <= FEW_FMAS or fmas <= MOST_FMAS and int(kernel.digest(), 16) % 4 == 0
    return tuple(n for n in available_levels() if n != "baseline" or baseline)


def vector_fmas(kernel: Kernel) -> int:
    """How many vectors of four floats its text multiplies and adds."""
    return sum(v.op == "fma" for v in walk(kernel.body)) * kernel.lanes // 4


def run(kernel: Kernel, args: Sequence[Any], evaluate: bool = True) -> None:
    """Runs `kernel` in place over `args` (NumPy arrays for pointers, numbers for scalars).

    The CPU levels run it with one thread and with three, each on fresh copies of what it writes, and so does the
    evaluator (evaluate=False leaves that out, for sizes it is too slow for); all results must be the same bytes."""
    written = [i for i, p in enumerate(kernel.params) if p.kind == "ptr" and "w" in p.access]
    before = {i: args[i].copy() for i in written}
    if evaluate:
        run_kernel(kernel, args)
    first = evaluate
    for level in levels(kernel):
        for threads in (1, 3):
            copy = [before[i].copy() if i in before else a for i, a in enumerate(args)]
            engine(level).kernel(kernel)(copy, threads)
            for i in written:
                if not first:
                    args[i][...] = copy[i]
                elif args[i].tobytes() != copy[i].tobytes():
                    raise AssertionError(f"{kernel.name}: parameter {kernel.params[i].name} differs between the "
                                         f"evaluator or another level and {level}, {threads} threads")
            first = True
