"""The OpenCL backend beside its bytes: what is refused, and how; names; exactness where compilers go wrong."""
from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from m3jit.backends.opencl import engine as opencl
from m3jit.backends.opencl.render import render_opencl, symbol
from m3jit.errors import InternalError, UnsupportedError, UserError
from m3jit.ir.loop_builder import Builder
from m3jit.kernels import attention
from tests.backends import executors as E
from tests.backends.kernel_cases import CASES

cl = pytest.importorskip("pyopencl")
missing = E.opencl_missing()
needs_device = pytest.mark.skipif(missing is not None, reason=str(missing))


def device(**changes):
    """A device that can do everything, except for the changes."""
    F = cl.device_fp_config
    everything = F.DENORM | F.INF_NAN | F.FMA | F.ROUND_TO_NEAREST | F.CORRECTLY_ROUNDED_DIVIDE_SQRT
    able = {"name": "Test device", "single_fp_config": everything, "double_fp_config": everything,
            "extensions": "cl_khr_fp64", "local_mem_size": 1 << 15, "max_work_group_size": 256}
    return SimpleNamespace(**{**able, **changes})


def refusing(device) -> opencl.OpenCLEngine:
    engine = opencl.OpenCLEngine.__new__(opencl.OpenCLEngine)
    engine.device = device
    return engine


def test_without_the_library(monkeypatch, tmp_path):
    """The message names the extra; a library that is there and broken is not called missing."""
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    words = r"needs pyopencl, which is not installed: pip install 'm3jit\[opencl\]'"
    with pytest.raises(UnsupportedError, match=words):
        opencl.OpenCLEngine()
    (tmp_path / "pyopencl.py").write_text("raise ImportError('libOpenCL.so.1: cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "pyopencl")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match=r"which cannot be loaded \(libOpenCL.so.1: cannot open"):
        opencl.OpenCLEngine()


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr(opencl, "devices", lambda: [])
    with pytest.raises(UserError, match=r"no OpenCL device: install a driver .*pip install 'pyopencl\[pocl\]'"):
        opencl.OpenCLEngine()


@pytest.mark.parametrize("bit, name", (("DENORM", "denormals"), ("INF_NAN", "infinities and NaNs"),
                                       ("FMA", "fused multiply-add"), ("ROUND_TO_NEAREST", "round to nearest"),
                                       ("CORRECTLY_ROUNDED_DIVIDE_SQRT", "correctly rounded division and square root")))
def test_devices_without_exact_arithmetic_are_refused(bit, name):
    assert opencl.device_refusal(device()) is None
    config = device().single_fp_config & ~getattr(cl.device_fp_config, bit)
    assert opencl.device_refusal(device(single_fp_config=config)) == f"Test device: no {name} in single precision"


def test_kernels_a_device_cannot_run_are_refused():
    b = Builder("wide", 64)
    y = b.ptr("y", "w", "f64")
    b.set_grid(1)
    b.store("f64", y, 0, b.f64(1.0) + 2.0)
    wide = b.finish()
    assert refusing(device()).refusal(wide) is None and refusing(device()).supports(wide)
    assert refusing(device(extensions="")).refusal(wide) == \
        "wide computes in f64, Test device has no f64 there (use the CPU backend)"
    config = device().double_fp_config & ~cl.device_fp_config.FMA
    assert "has no fused multiply-add there" in refusing(device(double_fp_config=config)).refusal(wide)
    assert "wide has 64 lanes, a work-group of Test device holds 32" in \
        refusing(device(max_work_group_size=32)).refusal(wide)
    rows = attention.attn_rows(attention.Geometry(3, 1, 8))
    assert "bytes of local memory, Test device has 32768 (use the CPU backend)" in refusing(device()).refusal(rows)


@needs_device
def test_addresses_are_refused():
    case = next(c for c in CASES if c.name == "kv_append_3_1_8_f16_causal_1")
    args = case.args()
    args[2] = 0                                              # a table of addresses: the base is null
    message = r"kernel kv_append_.*: argument base is an address \(0\); OpenCL buffers have none"
    with pytest.raises(UserError, match=message):
        E.opencl_engine().kernel(case.kernel)(args)


def test_unknown_devices_are_named():
    if not opencl.devices():
        pytest.skip("no OpenCL device")
    with pytest.raises(UserError, match="no OpenCL device named 'zebra'; there are: "):
        opencl.OpenCLEngine("zebra")


@needs_device
def test_a_compiler_error_leaves_a_reproducer(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(opencl, "render_opencl", lambda kernel: "__kernel void f(__global int *x) { x[0] = nothing; }")
    case = next(c for c in CASES if c.name == "fill_f32")
    message = "compiler rejects kernel fill_f32, .* the source and the loop IR are in"
    with pytest.raises(InternalError, match=message) as e:
        E.opencl_engine()._build(case.kernel)
    left = list(tmp_path.rglob("fill_f32.cl"))
    assert len(left) == 1 and str(left[0]) in str(e.value)
    assert "x[0] = nothing" in left[0].read_text() and "kernel fill_f32(out: ptr w f32" in left[0].read_text()


@needs_device
def test_names_of_the_language_and_of_the_renderer():
    b = Builder("kernel", 8)
    x, y = b.ptr("half", "r", "f32"), b.ptr("global", "w", "f32")
    n, u = b.scalar("float"), b.scalar("u1")
    b.set_grid(n)
    b.store_lanes("f32", y, b.group * 8, b.load_lanes("f32", x, b.group * 8) + b.cvt(u, "f32"))
    kernel = b.finish()
    assert symbol("kernel") == "kernel_" and symbol("u1") == "u1_" and symbol("x") == "x"
    data = np.arange(16, dtype=np.float32)
    E.agree(kernel, lambda: [data, np.zeros(16, np.float32), 2, 7], [E.EVALUATOR, E.OPENCL, E.PTX, E.PLAIN])


@needs_device
def test_minus_zero_and_the_least_integer():
    """LLVM 15 gives the wrong zero for `-0.0 < x ? -0.0 : x`, and knows no absolute value of the least integer."""
    b = Builder("corners", 8)
    x, y, z, w = b.ptr("x", "r", "f32"), b.ptr("y", "w", "f32"), b.ptr("z", "w", "f32"), b.ptr("w", "w", "i32")
    b.set_grid(1)
    v = b.load_lanes("f32", x, 0)
    b.store_lanes("f32", y, 0, b.fmin(b.f32(-0.0) + b.cvt(b.i32(0), "f32") * -0.0, v))
    b.store_lanes("f32", z, 0, b.fmax(b.fmin(b.f32(-0.0), v), b.f32(-0.0)))
    b.store_lanes("i32", w, 0, b.abs(b.imin(b.i32(-2 ** 31), b.lane)))
    kernel = b.finish()
    assert "minus_zero_f32" in render_opencl(kernel)
    data = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, 1e-45, -1e-45], np.float32)
    blank = lambda: [data, np.ones(8, np.float32), np.ones(8, np.float32), np.ones(8, np.int32)]
    first = E.agree(kernel, blank, [E.EVALUATOR, *E.CPU, E.PLAIN, E.NUMBA, E.OPENCL, E.PTX])
    assert (first[3] == -2 ** 31).all() and (np.signbit(first[1]) != np.signbit(first[2])).any()


def test_nothing_is_fused_by_the_text():
    """Contraction is off, and no statement holds a product and a sum of floats."""
    checked = 0
    for case in CASES:
        if not case.first_slice:
            continue
        text = render_opencl(case.kernel)
        assert text.startswith("#pragma OPENCL FP_CONTRACT OFF\n")
        for line in text.splitlines():
            m = re.match(r"\s*const (?:float|double) \w+ = (.*);", line)
            if m and not re.search(r"__global|__local|= tree_|get_work_dim", line):       # those compute addresses
                checked += 1
                assert len(re.findall(r" [-+*/] ", m[1])) <= 1, line
    assert checked > 1000
