"""The readable-Python backend: its text, its executors' details, plans, the cache of compiled kernels."""
from __future__ import annotations

import ctypes
import inspect
import math
import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from m3jit.backends.python import source_cache
from m3jit.backends.python.control_word import default_rounding
from m3jit.backends.python.engine import PythonEngine
from m3jit.backends.python.render import HELPERS, identifier, render_python
from m3jit.backends.python import runtime_plain
from m3jit.ir.loop_builder import Builder
from tests.backends import test_cpu_region as plans
from tests.backends.executors import CPU, EVALUATOR, NUMBA, PLAIN, PTX, agree
from tests.backends.kernel_cases import CASES

TEXT = '''\
def norms(thread, threads, x, w, y, rows, columns, k):
    """64 lanes; groups are independent."""
    lane = lane_numbers()
    groups = rows
    for group in range(groups * thread // threads, groups * (thread + 1) // threads):
        u1 = group * columns
        var1 = splat_f32(0.0)
        for i in range(0, columns, 64):
            x_1 = load_lanes_f32(x, u1 + i, to_i64(lane) + i < columns)
            var1 = fma(x_1, x_1, var1)
        u2 = fold_add(var1)
        for i1 in range(0, columns, 64):
            mask1 = to_i64(lane) + i1 < columns
            v1 = load_lanes_f32(x, u1 + i1, mask1) * (k / sqrt(u2)) + load_lanes_f32(w, i1, mask1)
            store_lanes_f16(y, u1 + i1, v1, mask1)
'''


def norms():
    b = Builder("norms", 64)
    x, w, y = b.ptr("x", "r", "f32"), b.ptr("w", "r", "f32"), b.ptr("y", "w", "f16")
    rows, columns, k = b.scalar("rows"), b.scalar("columns"), b.scalar("k", "f32")
    b.set_grid(rows)
    row, total = b.group * columns, b.var("f32", 0.0)
    with b.loop(0, columns, 64) as i:
        v = b.load_lanes("f32", x, row + i, b.in_range(i, columns))
        total.set(b.fma(v, v, total.get()))
    length = b.fold(total.get(), "add")
    with b.loop(0, columns, 64) as i:
        inside = b.in_range(i, columns)
        v = b.load_lanes("f32", x, row + i, inside)
        b.store_lanes("f16", y, row + i, v * (k / b.sqrt(length)) + b.load_lanes("f32", w, i, inside), inside)
    return b.finish()


def test_the_text_of_a_kernel():
    assert render_python(norms()) == TEXT
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 70)).astype(np.float32), rng.standard_normal(70).astype(np.float32)
    agree(norms(), lambda: [x, w, np.zeros((3, 70), np.float16), 3, 70, 0.5], [EVALUATOR, *CPU, PLAIN, NUMBA])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_no_stray_lines(case):
    """Every line does something that is used: no name is assigned and never read, none is a copy of another."""
    text = render_python(case.kernel)
    assert max(map(len, text.splitlines())) < 240
    body = text.split('"""', 2)[2]
    uses = Counter(re.findall(r"\w+", body))
    for name in re.findall(r"^\s*(\w+) = ", body, re.M):
        assert uses[name] > 1 or name.startswith("var"), f"{name} is never read"
    assert not re.findall(r"^\s*[uv]\d+ = [uv]\d+$", body, re.M)


def test_names_hide_nothing():
    b = Builder("for", 8)
    x, y = b.ptr("fma", "r", "f32"), b.ptr("lane", "w", "f32")
    n = b.scalar("group"), b.scalar("2nd"), b.scalar("u1")
    b.set_grid(n[1])
    v = b.load_lanes("f32", x, b.group * 8)
    b.store_lanes("f32", y, b.group * 8, b.fma(v, v, 1.0) + b.cvt(b.cvt(n[0] + n[2], "i32") + b.lane, "f32"))
    kernel = b.finish()
    assert identifier("for") == "for_" and identifier("2nd") == "k_2nd"
    assert "def for_(thread, threads, fma_, lane_, group_, k_2nd, u1):" in render_python(kernel)
    data = np.arange(16, dtype=np.float32)
    for executor in (PLAIN, NUMBA):
        args = [data, np.zeros(16, np.float32), 3, 2, 5]
        executor.run(kernel, args)
        assert (args[1] == data * data + 1 + 8 + np.arange(16) % 8).all()


def test_integers_wrap_where_it_shows():
    """Uniform sums and products are wrapped at the end of a chain, i32 at 32 bits, constants too."""
    b = Builder("wraps", 8)
    out, big, small = b.ptr("out", "w", "i64"), b.scalar("big"), b.scalar("small", "i32")
    b.set_grid(1)
    huge = b.i64(2 ** 62 + 1)
    values = [big * big + 1, huge * huge, (small * small).equals(1), small * small + small, big << 5,
              b.lshr(big * 3, 1), b.i64(1) << 63, -(b.i64(-2 ** 63) + 0), b.abs(big * 2), b.abs(b.i32(-2 ** 31)),
              b.abs(b.imin(big, -2 ** 63))]
    for i, v in enumerate(values):
        b.store("i64", out, i, b.cvt(v, "i64"))
    kernel = b.finish()
    agree(kernel, lambda: [np.zeros(len(values), np.int64), 2 ** 62 + 12345, -(2 ** 31) + 7], [PLAIN, NUMBA])
    args = [np.zeros(len(values), np.int64), 2 ** 62 + 12345, -(2 ** 31) + 7]
    PLAIN.run(kernel, args)

    def wrap(x, bits=64):
        return (x + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
    x, y = args[1], args[2]
    assert args[0].tolist() == [wrap(x * x + 1), wrap((2 ** 62 + 1) ** 2), 0, wrap(wrap(y * y, 32) + y, 32),
                                wrap(x << 5), wrap(x * 3) % 2 ** 64 >> 1, -2 ** 63, -2 ** 63, abs(wrap(x * 2)),
                                -2 ** 31, -2 ** 63]


def test_values_outside_the_mask_do_no_harm():
    """A masked-off lane may hold a NaN where the others are converted to integers, and addresses nothing owns."""
    b = Builder("masked", 16)
    x, y, n = b.ptr("x", "r", "f32"), b.ptr("y", "w", "i32"), b.scalar("n")
    b.set_grid(1)
    inside = b.in_range(b.i64(0), n)
    v = b.load_lanes("f32", x, 0, inside)
    far = b.cvt(b.select(inside, b.lane, b.i32(2 ** 30)), "i64") * 2 ** 20
    w = b.load("f32", x, far & 7, inside)
    b.store_lanes("i32", y, 0, b.cvt(v / v, "i32") + b.cvt(w, "i32"), inside)
    kernel = b.finish()
    agree(kernel, lambda: [np.arange(1, 9, dtype=np.float32), np.zeros(5, np.int32), 5], [PLAIN, NUMBA])


# -- plans ------------------------------------------------------------------------------------------------------------

PLAN_TESTS = [(plans.test_integer_scalars, {"level": "python"}), (plans.test_float_scalars, {"level": "python"}),
              (plans.test_scalar_loop_and_budget, {"level": "python", "threads": 1}),
              (plans.test_barriers_order_launches, {"level": "python", "n": 64}),
              (plans.test_barriers_order_launches, {"level": "python", "n": 1024}),
              (plans.test_stop_word_set_before_entry, {"threads": 2}),
              (plans.test_both_edges_of_a_branch_to_one_block, {}), (plans.test_shared_copies, {"size": 65537}),
              *((plans.test_element, {"level": "python", "dtype": d}) for d in plans.STORAGE)]


PLAN_TESTS = [(*t, "plain") for t in PLAN_TESTS] + [(*PLAN_TESTS[3], "numba")]


@pytest.mark.parametrize("test, how, mode", PLAN_TESTS, ids=lambda v: v.__name__ if inspect.isfunction(v) else str(v))
def test_the_cpu_backends_plan_tests(test, how, mode, monkeypatch):
    engine = PythonEngine(mode)
    monkeypatch.setattr(plans, "engine", lambda level: engine)
    test(**how)
    if test is plans.test_barriers_order_launches:
        assert engine.launches == {"step": 31 * 5}


def test_short_frames_are_refused():
    region = PythonEngine().region(plans.loop_plan())
    with pytest.raises(ValueError, match="the frame has 3 words, the plan needs 7"):
        region.run(np.zeros(3, np.int64))


@pytest.mark.skipif(sys.platform != "linux", reason="sets the control word through glibc")
@pytest.mark.parametrize("executor", (PLAIN, NUMBA), ids=lambda e: e.name)
def test_denormals_survive_a_caller_that_flushes_them(executor):
    b = Builder("halve", 8)
    x, y = b.ptr("x", "r", "f32"), b.ptr("y", "w", "f32")
    b.set_grid(1)
    b.store_lanes("f32", y, 0, b.load_lanes("f32", x, 0) * 0.5)
    kernel, libm = b.finish(), ctypes.CDLL("libm.so.6")
    data, out = np.full(8, 1.1754944e-38, np.float32), np.zeros(8, np.float32)
    executor.run(kernel, [data, out.copy()])                       # compile outside

    class Environment(ctypes.Structure):                           # glibc x86-64: the last word is MXCSR
        _fields_ = [("x87", ctypes.c_uint32 * 7), ("mxcsr", ctypes.c_uint32)]
    env = Environment()
    libm.fegetenv(ctypes.byref(env))
    normal = env.mxcsr
    env.mxcsr = normal | 0x8040                                    # flush to zero, denormals are zero
    libm.fesetenv(ctypes.byref(env))
    try:
        executor.run(kernel, [data, out])
        after = Environment()
        libm.fegetenv(ctypes.byref(after))
    finally:
        env.mxcsr = normal
        libm.fesetenv(ctypes.byref(env))
    assert (out.view(np.int32) == 0x00400000).all()
    assert after.mxcsr & 0x8040 == 0x8040                          # the caller has its own setting back


def test_control_word_is_put_back_after_an_error():
    with pytest.raises(ZeroDivisionError), default_rounding():
        1 // 0


# -- helpers ----------------------------------------------------------------------------------------------------------

def test_both_runtimes_offer_the_same_helpers():
    numba = pytest.importorskip("numba")
    assert numba
    from m3jit.backends.python import runtime_numba
    plain, compiled = set(runtime_plain.namespace(16)), set(runtime_numba.namespace(16))
    assert plain - compiled == {"as_b1"} and not compiled - plain
    words = {w for w in HELPERS if w in plain}
    assert {n for n in plain if n not in HELPERS} == set() and len(words) == len(plain)


def test_half_precision_is_exact():
    """All 65,536 halves widen and every f32 near a rounding boundary narrows as NumPy does; NaNs become quiet and keep
    their top bits."""
    b = Builder("halves", 64)
    h, wide = b.ptr("h", "r", "f16"), b.ptr("wide", "w", "f32")
    x, narrow = b.ptr("x", "r", "f32"), b.ptr("n", "w", "f16")
    b.set_grid(b.scalar("groups"))
    at = b.group * 64
    b.store_lanes("f32", wide, at, b.load_lanes("f16", h, at))
    b.store_lanes("f16", narrow, at, b.load_lanes("f32", x, at))
    kernel = b.finish()
    halves = np.arange(65536, dtype=np.uint16)
    f = halves.view(np.float16).astype(np.float32)
    rng = np.random.default_rng(0)
    bits = f.view(np.uint32) + rng.choice([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], 65536).astype(np.uint32)
    x = bits.view(np.float32)
    assert np.isnan(x).sum() > 1000
    number = ~np.isnan(f)
    for executor in (EVALUATOR, *CPU, PLAIN, NUMBA, PTX):
        args = [halves, np.zeros(65536, np.float32), x, np.zeros(65536, np.uint16), 1024]
        executor.run(kernel, args)
        assert (args[1][number].view(np.uint32) == f[number].view(np.uint32)).all()
        nan = halves[~number].astype(np.uint32)
        quiet = (nan & 0x8000) << 16 | 0x7FC00000 | (nan & 0x3FF) << 13
        assert (args[1][~number].view(np.uint32) == quiet).all(), executor.name
        with np.errstate(all="ignore"):
            expected = x.astype(np.float16).view(np.uint16)
        top = (bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF).astype(np.uint16)
        assert (args[3] == np.where(np.isnan(x), top, expected)).all(), executor.name


# -- the cache of compiled kernels ------------------------------------------------------------------------------------

RUN = """
import sys, time, numpy as np
from m3jit.backends.python.engine import PythonEngine
from m3jit.kernels import quantize
x = np.linspace(-3, 3, 64, dtype=np.float32)
q, d = np.zeros(64, np.int8), np.zeros(2, np.float32)
f = PythonEngine("numba").function(quantize.quantize_rows(32))
PythonEngine("numba").kernel(quantize.quantize_rows(32))([x, q, d, 2])
print(q.sum(), d.sum().hex() if hasattr(d.sum(), 'hex') else float(d.sum()).hex(), dict(f.stats.cache_hits) != {})
"""


def run_cached(directory: str) -> tuple[str, str, str]:
    env = {**os.environ, "M3JIT_CACHE_DIR": directory}
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return tuple(done.stdout.split())


def test_the_second_process_compiles_nothing(tmp_path):
    first, second = run_cached(str(tmp_path)), run_cached(str(tmp_path))
    assert first[2] == "False" and second[2] == "True" and first[:2] == second[:2]
    assert len(list((tmp_path / "python").glob("k_*.py"))) == 1
    off = run_cached("")
    assert off[2] == "False" and off[:2] == first[:2]
    (next((tmp_path / "python").glob("k_*.py"))).write_text("raise SystemExit('damaged')")
    assert run_cached(str(tmp_path))[:2] == first[:2]


def test_an_unwritable_cache_is_done_without(tmp_path):
    (tmp_path / "python").write_text("a file where the directory should be")
    assert run_cached(str(tmp_path))[2] == "False"


def test_trim_removes_the_oldest(tmp_path):
    (tmp_path / "__pycache__").mkdir()
    for age, name in enumerate(("k_c", "k_b", "k_a")):
        for path in (tmp_path / f"{name}.py", tmp_path / "__pycache__" / f"{name}.f-1.py311.nbi"):
            path.write_bytes(bytes(100))
            os.utime(path, (1000 - age, 1000 - age))
    source_cache.trim(tmp_path, 600)
    assert len(list(tmp_path.rglob("k_*"))) == 6
    source_cache.trim(tmp_path, 500)
    assert sorted(p.name.split(".")[0] for p in tmp_path.rglob("k_*")) == ["k_b", "k_b", "k_c", "k_c"]


def test_float_text_reads_back():
    from m3jit.backends.python.render import float_text
    for x in (0.1, -0.0, 1e-45, 3.4028234663852886e38, math.inf, -math.inf):
        again = eval(float_text(x), {"inf": math.inf})
        assert again == x and math.copysign(1, again) == math.copysign(1, x)
