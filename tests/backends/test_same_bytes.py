"""Every kernel builder on every executor: the same bytes.

The default run takes the cases that are quick to compile; `-m slow` takes all of them, on all executors.
"""
from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from typing import Any

import numpy as np
import pytest

import m3jit.kernels
from m3jit.backends.cuda.render import refusal as cuda_refusal
from m3jit.ir.loop import Kernel
from m3jit.ir.loop_builder import Builder
from tests.backends import executors as E
from tests.backends.executors import LAUNCHES, agree
from tests.backends.kernel_cases import CASES, Case
from tests.kernels.executors import kind_of, vector_fmas

FAST = [c for c in CASES if not c.slow]
# The baseline level has no fma and LLVM needs seconds for what computes it: of the kernels with many, one of each kind.
MANY_FMAS = 300
ON_BASELINE = ("attn_blocks_2_1_66x40_q8_0_causal_1", "attn_blocks_3_1_8_f16_causal_1",
               "attn_blocks_4_1_70x66_f16_causal_shared_1", "attn_rows_2_1_9x5_f16_causal_shared_5",
               "attn_rows_3_1_8_f16_causal_5", "fused_functions_333", "fused_softmax_2x63", "matmul_rows_BF16_1x5x33",
               "matmul_rows_F32_1x37x200", "matmul_rows_Q8_0_1x5x96", "matmul_rows_grouped_1",
               "qmatmul_gated_Q4_1_Q4_1", "rope_80_NEOX_1")
# One kernel of each kind of the first slice; PoCL needs seconds for each.
ON_OPENCL = (
    "fused_chain_4097",
    "fused_integers_4097",
    "fused_row_operands_5x200",
    "fused_rms_norm_5x200",
    "fused_sum_f16_3x70",
    "fused_float_reductions_3x0",
    "quantize_activation_32_3",
    "quantize_rows_256_3",
    "qmatmul_Q8_0_1x50",
    "qmatmul_Q4_1_1x50",
)


def by_name(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.name)


def opencl_or_skip() -> None:
    why = E.opencl_missing()
    if why:
        pytest.skip(why)


@by_name(FAST)
def test_cpu_python_and_ptx(case: Case):
    """Evaluator, CPU levels, plain Python, numba; the first slice also as interpreted PTX."""
    quick = vector_fmas(case.kernel) <= MANY_FMAS or case.name in ON_BASELINE
    on = [E.EVALUATOR, *(e for e in E.CPU if quick or e.name != "cpu baseline"), E.PLAIN]
    if not case.heavy:
        on.append(E.NUMBA)
    if case.first_slice:
        on.append(E.PTX)
    agree(case.kernel, case.args, on)


@by_name([c for c in CASES if c.name in ON_OPENCL])
def test_opencl(case: Case):
    opencl_or_skip()
    agree(case.kernel, case.args, [E.CPU[0], E.OPENCL])
    assert E.opencl_engine().groups[case.kernel.name] >= 2


def test_named_cases_exist():
    assert {c.name for c in CASES} >= set(ON_OPENCL) and {c.name for c in FAST} >= set(ON_BASELINE)


def test_each_kind_of_kernel_is_on_baseline():
    """One case each: a kind without one is not tested on that level, more cost seconds."""
    many = {c.name: kind_of(c.kernel) for c in FAST if vector_fmas(c.kernel) > MANY_FMAS}
    assert sorted(set(many.values())) == sorted(many[name] for name in ON_BASELINE), "ON_BASELINE lacks a kind"


@by_name([c for c in CASES if c.name.startswith("sample")])
def test_sampling_on_ptx(case: Case):
    """Its lanes exchange data through memory; the PTX interpreter reports races."""
    agree(case.kernel, case.args, [E.CPU[0], E.PTX])


@pytest.mark.slow
@by_name(CASES)
def test_all_executors(case: Case):
    kernel = case.kernel
    on = [E.EVALUATOR, *E.CPU, E.PLAIN, E.NUMBA]
    if cuda_refusal(kernel) is None:
        on.append(E.PTX)
    if case.first_slice and E.opencl_missing() is None:
        on.append(E.OPENCL)
    agree(kernel, case.args, on)


@pytest.mark.parametrize(
    "name", ("fused_chain_4097", "fused_softmax_5x200", "qmatmul_Q8_0_1x50", "quantize_activation_32_3")
)
def test_ptx_runs_several_blocks(name: str):
    case = next(c for c in FAST if c.name == name)
    LAUNCHES["ptx groups"] = 0
    agree(case.kernel, case.args, [E.CPU[-1], E.PTX])
    assert LAUNCHES["ptx groups"] >= 2


@pytest.mark.parametrize("type", ("f32", "f64"))
def test_nans_are_stored_alike(type: str):
    """The hardware's own NaN has its sign set on x86 and no sign on NVIDIA's; compilers think them alike."""
    b = Builder(f"nans_{type}", 8)
    x, varying, uniform = b.ptr("x", "r", type), b.ptr("varying", "w", type), b.ptr("uniform", "w", type)
    b.set_grid(8)

    def bad(v):
        return [b.sqrt(v), v - v, (v - v) / (v - v), b.fma(v, b.const(type, math.inf), v), -b.sqrt(v)]
    for i, v in enumerate(bad(b.load_lanes(type, x, 0))):
        b.store_lanes(type, varying, (b.group * 5 + i) * 8, b.canonical_nan(v))
    for i, v in enumerate(bad(b.load(type, x, b.group))):
        b.store(type, uniform, b.group * 5 + i, b.canonical_nan(v))
    kernel, t = b.finish(), np.dtype({"f32": np.float32, "f64": np.float64}[type])
    data = np.array([-1, 4, np.inf, -np.inf, np.nan, 0, -0.0, -5], t)
    data[4:5].view(f"u{t.itemsize}")[0] |= 12345
    on = [E.EVALUATOR, *E.CPU, E.PLAIN, E.NUMBA, E.PTX] + ([] if E.opencl_missing() else [E.OPENCL])
    out = agree(kernel, lambda: [data, np.zeros(320, t), np.zeros(40, t)], on)
    for a in out[1:]:
        bits = a[np.isnan(a)].view(f"u{t.itemsize}")
        assert bits.size and (bits == (0x7FC00000 if type == "f32" else 0x7FF8000000000000)).all()


# -- do the checks bite? ----------------------------------------------------------------------------------------------

def test_every_builder_has_a_case():
    """A kernel file whose builder is missing here is not tested for equal bytes."""
    covered = {inspect.unwrap(c.build).__code__.co_names for c in CASES}
    named = {name for names in covered for name in names}
    missing = []
    for info in pkgutil.iter_modules(m3jit.kernels.__path__):
        module = importlib.import_module(f"m3jit.kernels.{info.name}")
        for name, f in vars(module).items():
            f = inspect.unwrap(f) if callable(f) else f
            if inspect.isfunction(f) and f.__module__ == module.__name__ and not name.startswith("_") and \
                    f.__annotations__.get("return") in (Kernel, "Kernel") and name not in named:
                missing.append(f"{info.name}.{name}")
    assert not missing, f"add cases to kernel_cases.py for {', '.join(missing)}"


def test_outputs_start_as_something_else():
    """Equal outputs prove nothing if no executor wrote them: the results differ from what the arrays held before."""
    for case in FAST:
        kernel, before, after = case.kernel, case.args(), case.args()
        E.EVALUATOR.run(kernel, after)
        changed = any(before[i].tobytes() != after[i].tobytes() for i in E.written(kernel))
        empty = all(before[i].size == 0 for i in E.written(kernel)) or E.ptx.grid_size(kernel, before) == 0
        assert changed or empty, case.name


def _chain(contract: bool) -> Kernel:
    b = Builder("chain", 64)
    x, y, z, out = (b.ptr(n, a, "f32") for n, a in (("x", "r"), ("y", "r"), ("z", "r"), ("out", "w")))
    n = b.scalar("n")
    b.set_grid((n + 63) // 64)
    at = b.group * 64
    u, v, w = (b.load_lanes("f32", p, at, b.in_range(at, n)) for p in (x, y, z))
    b.store_lanes("f32", out, at, b.fma(u, v, w) if contract else u * v + w, b.in_range(at, n))
    return b.finish()


@pytest.mark.parametrize("executor", [*E.CPU, E.PLAIN, E.NUMBA, E.PTX, E.OPENCL], ids=lambda e: e.name)
def test_a_contracted_product_is_noticed(executor: E.Executor):
    """The data tell a*b + c from fma(a, b, c), and every executor computes the one that was asked for."""
    if executor is E.OPENCL:
        opencl_or_skip()
    rng = np.random.default_rng(0)
    data = [rng.standard_normal(200).astype(np.float32) for _ in range(3)]
    results = []
    for contract in (False, True):
        args = [*data, np.zeros(200, np.float32), 200]
        executor.run(_chain(contract), args)
        exact = data[0].astype(np.float64) * data[1]
        expected = (exact.astype(np.float32) + data[2]) if not contract else (exact + data[2]).astype(np.float32)
        assert (args[3] == expected).mean() > 0.99          # f64 then f32 rounds twice in rare cases
        results.append(args[3])
    assert (results[0] != results[1]).any()


def test_a_difference_is_reported():
    case = next(c for c in FAST if c.name == "fused_chain_63")

    def wrong(kernel: Kernel, args: list[Any]) -> None:
        E.PLAIN.run(kernel, args)
        args[3][5] += 1
        LAUNCHES["wrong"] += 1
    with pytest.raises(
        AssertionError, match=r"fused_chain: out0\[5\] is .* on evaluator, .* on wrong \(1 of 63 differ\)"
    ):
        agree(case.kernel, case.args, [E.EVALUATOR, E.Executor("wrong", wrong)])
    with pytest.raises(AssertionError, match="idle did not run"):
        agree(case.kernel, case.args, [E.EVALUATOR, E.Executor("idle", lambda kernel, args: None)])
