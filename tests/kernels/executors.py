"""One call that runs a kernel on the independent evaluator and on the CPU engine, and insists on equal bytes."""
from __future__ import annotations

import functools
import re
from typing import Any, Sequence

import numpy as np

from m3jit.backends.cpu.engine import Engine
from m3jit.backends.cpu.target import available_levels
from m3jit.ir.loop import Kernel, walk
from tests.loop_eval import run_kernel

# fma is a dozen operations where the CPU has none: LLVM needs ten times as long, seconds for kernels with many.
FEW_FMAS, MOST_FMAS = 64, 340
# Of the kernels with more than FEW_FMAS, those on baseline by default: one of each builder, and its variants.
ON_BASELINE = ("attn_blocks_2_1_9_q8_0_causal_shared", "attn_blocks_2_2_24_f16_causal",
               "attn_blocks_4_2_33x66_bf16_causal", "attn_combine_2_8", "attn_combine_4_8_causal",
               "matmul_columns_f16_grouped", "matmul_columns_f32", "qmatmul_gated_q8_0_q5_0",
               "qmatmul_q2_k_bias_residual", "qmatmul_q4_1", "qmatmul_q4_k", "rope_24_neox")
all_levels = False                                     # set by conftest.py: baseline runs all up to MOST_FMAS


@functools.cache
def engine(level: str) -> Engine:
    return Engine(level)


def levels(kernel: Kernel) -> tuple[str, ...]:
    """The CPU levels a kernel is tested on: all the host has; baseline only for kernels with few fmas and those of
    ON_BASELINE, with `-m slow` for those up to MOST_FMAS (tests/backends/test_same_bytes.py runs each kind of kernel
    there, and with `-m slow` every case)."""
    fmas = vector_fmas(kernel)
    baseline = fmas <= (MOST_FMAS if all_levels else FEW_FMAS) or kernel.name in ON_BASELINE
    return tuple(n for n in available_levels() if n != "baseline" or baseline)


def kind_of(kernel: Kernel) -> str:
    """Its builder and variant: the kernel's name without sizes, as attn_rows_3_1_66x40_q8_0 is attn_rows_q8_0."""
    return re.sub(r"(?<![a-z]\d)_\d+(x\d+)?(?=_|$)", "", kernel.name)


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
