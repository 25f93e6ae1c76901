"""One call that runs a kernel on every executor present and insists on equal bytes."""
from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from m3jit.ir.loop import Kernel
from tests.loop_eval import run_kernel


def run(kernel: Kernel, args: Sequence[Any]) -> None:
    """Runs `kernel` in place over `args` (NumPy arrays for pointers, numbers for scalars)."""
    run_kernel(kernel, args)
