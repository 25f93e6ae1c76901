"""Random loop-IR kernels: the same bytes on every executor, and the same kernel after printing and parsing."""
from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from m3jit.ir.loop import PURE, canonical, walk
from m3jit.ir.loop_text import parse_kernel, print_kernel
from tests.backends import executors as E
from tests.backends.executors import agree
from tests.backends.random_kernels import random_args, random_kernel

QUICK = [E.EVALUATOR, E.CPU[0], E.CPU[-1], E.PLAIN, E.PTX]


def check(seed: int, on: list[E.Executor], statements: int = 45) -> None:
    kernel = random_kernel(seed, statements)
    agree(kernel, lambda: random_args(kernel, seed), on)


@pytest.mark.parametrize("seed", range(30))
def test_random_kernels(seed: int):
    check(seed, QUICK)


@pytest.mark.parametrize("seed", range(1000, 1008))
def test_random_kernels_on_numba(seed: int):
    check(seed, [E.EVALUATOR, *E.CPU, E.NUMBA])


@pytest.mark.parametrize("seed", range(2000, 2004))
def test_random_kernels_on_opencl(seed: int):
    why = E.opencl_missing()
    if why:
        pytest.skip(why)
    check(seed, [E.EVALUATOR, E.OPENCL])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3000, 3200))
def test_many_random_kernels(seed: int):
    on = [E.EVALUATOR, *E.CPU, E.PLAIN, E.NUMBA, E.PTX]
    check(seed, on + ([E.OPENCL] if seed % 10 == 0 and E.opencl_missing() is None else []), statements=90)


def test_printing_and_parsing_random_kernels():
    for seed in range(200):
        kernel = random_kernel(seed)
        again = parse_kernel(print_kernel(kernel))
        assert canonical(again) == canonical(kernel)
        assert print_kernel(again) == print_kernel(kernel)


def test_what_the_generator_reaches():
    """Every pure operation, every statement, nesting; long kernels; results that are not all alike."""
    seen: Counter[str] = Counter()
    sizes = []
    for seed in range(200):
        kernel = random_kernel(seed)
        statements = list(walk(kernel.body))
        sizes.append(len(statements))
        seen.update(v.op for v in statements)
        seen.update(f"{v.op} masked" for v in statements if v.attrs.get("masked"))
        seen.update(f"{a.op} operand" for v in statements for a in v.args)
    wanted = (set(PURE) - {"lane", "group"}) | {
        "loop",
        "if",
        "var",
        "get",
        "set",
        "scratch",
        "sync",
        "load",
        "store",
        "load_lanes",
        "store_lanes",
        "load masked",
        "store masked",
        "lane operand",
        "group operand",
        "store_lanes masked",
        "load_lanes masked",
    }
    assert not wanted - set(seen)
    assert np.mean(sizes) > 50
    args = random_args(random_kernel(7), 7)
    E.EVALUATOR.run(random_kernel(7), args)
    assert len({a.tobytes() for i, a in enumerate(args) if i in E.written(random_kernel(7))}) > 5
