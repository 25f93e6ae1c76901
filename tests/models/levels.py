"""Levels of the CPU backend that whole models run on in tests.

LLVM needs ten times as long for the baseline level as for the others.  By default tests/backends and tests/kernels run
every kind of kernel there, and of the models gemma3 and the llama with matrices of several types do; `-m slow` has
all."""
from __future__ import annotations

import pytest

at_levels = pytest.mark.parametrize("levels", [
    pytest.param((("cpu:native", 1), ("cpu:native", 3), ("cpu:avx2", 2)), id="newer"),
    pytest.param((("cpu:baseline", 2),), id="baseline", marks=pytest.mark.slow)])
