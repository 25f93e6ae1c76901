"""The PTX of the first slice: what it contains, that ptxas takes it, that it computes the CPU's bytes."""
from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest

from m3jit.backends.cuda.render import STATIC_SHARED, refusal, render_ptx
from m3jit.errors import UserError
from m3jit.ir.loop import walk
from m3jit.ir.loop_builder import Builder
from m3jit.kernels import attention
from tests.backends import executors as E
from tests.backends.kernel_cases import CASES
from tests.backends.random_kernels import random_args, random_kernel

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
KERNELS = {c.kernel.digest(): c.kernel for c in CASES if c.first_slice}
SMALL = [k for k in KERNELS.values() if not k.name.startswith("qmatmul") or k.name.endswith(("q8_0", "q4_k"))]
PTXAS = shutil.which("ptxas")


def by_name(kernels):
    return pytest.mark.parametrize("kernel", kernels, ids=lambda k: k.name)


@by_name(list(KERNELS.values()))
def test_nothing_is_approximate_flushed_or_fused(kernel):
    text = render_ptx(kernel)
    assert f".entry {kernel.name}(" in text
    opcodes = re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z][\w.]*)", text, re.M)
    for opcode in opcodes:
        parts = opcode.split(".")
        assert not {"approx", "ftz", "full"} & set(parts), opcode
        if parts[-1] in ("f32", "f64") and parts[0] in ("add", "sub", "mul", "div", "sqrt", "rcp", "fma", "mad"):
            assert "rn" in parts, opcode
        assert parts[0] not in ("mad", "fma") or parts[-1] in ("s32", "s64") or opcode.startswith("fma.rn."), opcode
        assert opcode not in ("min.f32", "max.f32", "min.f64", "max.f64"), opcode
    wanted, found = sum(v.op == "fma" for v in walk(kernel.body)), sum(o.startswith("fma") for o in opcodes)
    assert found <= wanted and (found > 0) == (wanted > 0)              # equal ones are computed once


@pytest.mark.skipif(PTXAS is None, reason="no ptxas here: CUDA's tool kit assembles the PTX where it is installed")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ptxas_assembles(arch, tmp_path):
    """Every kernel of the first slice for every architecture, a few at a time in one file each."""
    for kernel in SMALL if arch != "sm_80" else KERNELS.values():
        source = tmp_path / f"{kernel.name}.ptx"
        source.write_text(render_ptx(kernel, arch))
        done = subprocess.run([PTXAS, f"-arch={arch}", "-O0", "-o", str(tmp_path / "out.cubin"), str(source)],
                              capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, f"{kernel.name}: {done.stderr}"


def test_dot4_is_one_instruction():
    text = render_ptx(next(k for k in KERNELS.values() if k.name == "qmatmul_q8_0"))
    assert text.count("dp4a.u32.s32") == sum(v.op == "dot4" for v in walk(next(
        k for k in KERNELS.values() if k.name == "qmatmul_q8_0").body))


def test_dot4_extremes():
    """255 * -128 in every byte, and an accumulator that wraps."""
    b = Builder("dots", 64)
    p, q, o = b.ptr("p", "r", "i32"), b.ptr("q", "r", "i32"), b.ptr("o", "w", "i32")
    b.set_grid(b.scalar("groups"))
    at = b.group * 64
    u, s = b.load_lanes("i32", p, at), b.load_lanes("i32", q, at)
    b.store_lanes("i32", o, at, b.dot4(b.dot4(b.i32(2 ** 31 - 1), u, s), s, u))
    kernel = b.finish()
    rng = np.random.default_rng(0)
    u, s = (rng.choice(np.array([0, 1, 127, 128, 129, 255], np.uint8), 4 * 128).view(np.int32) for _ in range(2))
    u[:8], s[:8] = -1, np.frombuffer(b"\x80\x80\x80\x80", np.int32)[0]
    E.agree(kernel, lambda: [u, s, np.zeros(128, np.int32), 2], [E.EVALUATOR, *E.CPU, E.PTX])


def test_comparison_and_selection_stay_that():
    """LLVM would make `-0.0 < x ? x : -0.0` a max.f32, which gives +0 for x = +0."""
    b = Builder("zeros", 8)
    x, y, z = b.ptr("x", "r", "f32"), b.ptr("y", "w", "f32"), b.ptr("z", "w", "f64")
    b.set_grid(1)
    v = b.load_lanes("f32", x, 0)
    b.store_lanes("f32", y, 0, b.fmax(v, -0.0))
    b.store_lanes("f64", z, 0, b.fmin(b.f64(0.0), b.cvt(v, "f64")))
    data = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, 1e-45, -1e-45], np.float32)
    first = E.agree(b.finish(), lambda: [data, np.ones(8, np.float32), np.ones(8)], [E.EVALUATOR, *E.CPU, E.PTX])
    assert np.signbit(first[1][:2]).all()


def test_too_much_shared_memory_is_refused():
    kernel = attention.attn_rows(attention.Geometry(3, 1, 8))
    assert f"bytes of shared memory, a block has {STATIC_SHARED}" in refusal(kernel)
    message = rf"{kernel.name} needs \d+ bytes of shared memory, a block has 49152 \(use the CPU"
    with pytest.raises(UserError, match=message):
        render_ptx(kernel)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_computes_the_same(arch):
    """The text differs between architectures; the bytes do not."""
    from tests.ptx import interpreter

    def run(kernel, args):
        interpreter.run_kernel(kernel, args, arch)
        E.LAUNCHES[arch] += 1
    for name in ("fused_softmax_2x63", "quantize_activation_32_3", "qmatmul_Q8_0_1x50", "fused_from_f32_i8_200"):
        case = next(c for c in CASES if c.name == name)
        E.agree(case.kernel, case.args, [E.CPU[-1], E.Executor(arch, run)])
    kernel = random_kernel(77)
    E.agree(kernel, lambda: random_args(kernel, 77), [E.EVALUATOR, E.Executor(arch, run)])
