"""Which kernels the tests of this folder run on the baseline level."""
from __future__ import annotations

import inspect

from m3jit.ir.loop import Kernel
from m3jit.kernels import attention, matmul, qmatmul, rope
from tests.backends.kernel_cases import CASES
from tests.kernels import executors
from tests.kernels.executors import FEW_FMAS, MOST_FMAS, ON_BASELINE, levels, vector_fmas

FUNCTIONS = {name: inspect.unwrap(f) for module in (attention, matmul, qmatmul, rope)
             for name, f in vars(module).items() if callable(f)}
BUILDERS = {name for name, f in FUNCTIONS.items()
            if inspect.isfunction(f) and f.__annotations__.get("return") in (Kernel, "Kernel")}
KERNELS = [c.kernel for c in CASES]


def builder_of(name: str) -> str:
    """Kernels are named after the function that builds them; "" for those of other modules."""
    return max((b for b in BUILDERS if f"{name}_".startswith(f"{b}_")), key=len, default="")


def test_each_builder_is_on_baseline_by_default():
    needed = {builder_of(k.name) for k in KERNELS if FEW_FMAS < vector_fmas(k) <= MOST_FMAS} - {""}
    assert needed >= {"attn_blocks", "attn_combine", "matmul_columns", "qmatmul", "rope"}
    missing = needed - {builder_of(name) for name in ON_BASELINE}
    assert not missing, f"add a kernel of {', '.join(sorted(missing))} to ON_BASELINE"
    assert all(map(builder_of, ON_BASELINE)), "a name that no builder gives"


def test_slow_tests_take_all_that_compile_in_seconds(monkeypatch):
    """A kernel that is not named is on baseline with `-m slow` alone."""
    other = next(k for k in KERNELS if FEW_FMAS < vector_fmas(k) <= MOST_FMAS and k.name not in ON_BASELINE)
    assert "baseline" not in levels(other)
    monkeypatch.setattr(executors, "all_levels", True)
    assert "baseline" in levels(other)
