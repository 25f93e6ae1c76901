"""Every executor of loop-IR kernels, behind one signature: run(kernel, args) changes `args` in place.

`LAUNCHES[name]` counts what each executor itself says it ran, so that a test can tell a result from a leftover.
"""
from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import numpy as np

from m3jit.backends.cpu.cache import DiskCache
from m3jit.backends.cpu.engine import Engine
from m3jit.backends.cpu.target import available_levels
from m3jit.backends.opencl import engine as opencl
from m3jit.backends.python.engine import PythonEngine
from m3jit.ir.loop import Kernel
from tests import loop_eval
from tests.ptx import interpreter as ptx

LEVELS = tuple(available_levels())
LAUNCHES: Counter[str] = Counter()


@dataclass(frozen=True)
class Executor:
    name: str
    run: Callable[[Kernel, list[Any]], None]


def _evaluate(kernel: Kernel, args: list[Any]) -> None:
    loop_eval.run_kernel(kernel, args)
    LAUNCHES["evaluator"] += 1


@functools.cache
def cpu_engine(level: str) -> Engine:
    return Engine(level, cache=DiskCache.off())


def _cpu(level: str, threads: int) -> Callable:
    def run(kernel: Kernel, args: list[Any]) -> None:
        call = cpu_engine(level).kernel(kernel)
        call(args, threads)
        LAUNCHES[f"cpu {level}"] += call.region.address != 0
    return run


@functools.cache
def python_engine(mode: str) -> PythonEngine:
    return PythonEngine(mode)


def _python(mode: str) -> Callable:
    def run(kernel: Kernel, args: list[Any]) -> None:
        engine = python_engine(mode)
        before = engine.launches.get(kernel.name, 0)
        engine.kernel(kernel)(args, 2 if mode == "numba" else 1)
        LAUNCHES[mode] += engine.launches[kernel.name] - before
    return run


@functools.cache
def opencl_engine() -> opencl.OpenCLEngine:
    return opencl.OpenCLEngine()


def opencl_missing() -> str | None:
    """Why OpenCL cannot be tested here, or None."""
    try:
        opencl_engine()
    except Exception as e:
        return str(e)
    return None


def _opencl(kernel: Kernel, args: list[Any]) -> None:
    engine = opencl_engine()
    before = engine.launches.get(kernel.name, 0)
    engine.kernel(kernel)(args)
    LAUNCHES["opencl"] += engine.launches[kernel.name] - before
    LAUNCHES["opencl groups"] = max(LAUNCHES["opencl groups"], engine.groups[kernel.name])


def _ptx(kernel: Kernel, args: list[Any]) -> None:
    done = ptx.run_kernel(kernel, args)
    LAUNCHES["ptx"] += 1
    LAUNCHES["ptx groups"] = max(LAUNCHES["ptx groups"], done.blocks)
    assert done.blocks == 0 or done.instructions > 0


EVALUATOR = Executor("evaluator", _evaluate)
CPU = tuple(Executor(f"cpu {level}", _cpu(level, threads)) for level, threads in zip(LEVELS, (1, 2, 3, 2)))
PLAIN = Executor("plain", _python("plain"))
NUMBA = Executor("numba", _python("numba"))
OPENCL = Executor("opencl", _opencl)
PTX = Executor("ptx", _ptx)


def written(kernel: Kernel) -> list[int]:
    """Indices of the parameters a kernel may store to."""
    return [i for i, p in enumerate(kernel.params) if p.kind == "ptr" and "w" in p.access]


def agree(kernel: Kernel, make_args: Callable[[], list[Any]], executors: Sequence[Executor]) -> list[Any]:
    """Runs the kernel on each executor with fresh arguments; all bytes of all outputs must equal the first one's.  Each
    executor's own counter must have gone up.  Returns the first one's arguments."""
    first: list[Any] | None = None
    for executor in executors:
        before = LAUNCHES[executor.name]
        args = make_args()
        executor.run(kernel, args)
        assert LAUNCHES[executor.name] == before + 1, f"{executor.name} did not run {kernel.name}"
        if first is None:
            first = args
            continue
        for i in written(kernel):
            if args[i].tobytes() != first[i].tobytes():
                raise AssertionError(_difference(kernel, i, executors[0].name, first[i], executor.name, args[i]))
    return first


def _difference(kernel: Kernel, i: int, a_name: str, a: np.ndarray, b_name: str, b: np.ndarray) -> str:
    size = a.itemsize
    bad = np.flatnonzero((a.reshape(-1).view(np.uint8).reshape(-1, size) !=
                          b.reshape(-1).view(np.uint8).reshape(-1, size)).any(axis=1))
    at = int(bad[0])
    return (
        f"{kernel.name}: {kernel.params[i].name}[{at}] is {a.reshape(-1)[at]!r} on {a_name}, {b.reshape(-1)[at]!r} on "
        f"{b_name} ({bad.size} of {a.size} differ)"
    )
