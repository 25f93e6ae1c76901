"""Function pointers: through ctypes, from C, and from numba, with the bytes of the Python call."""
from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading

import numpy as np
import pytest

import m3jit
from m3jit.api import native_entry, variants
from m3jit.api.native_entry import DONE, LEFT, UNFIT
from tests.api.outcomes import exact
from tests.api.random_programs import generate

SOURCE = """
    MUL rA, rX, rY
    SOFTMAX rB, rA
    ADD rB, rB, rS
    DIM rN, rX, 0
    ADD rN, rN, rK
    MOV rC, rX
    LOADI rF, 0.5
    HALT
"""
NAMES = (["rX", "rY", "rS", "rK"], ["rB", "rN", "rC", "rF", "rS"])
TYPES = ("f32[n, 4]", "f32[n, 4]", "f64", "i64")


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def call(native, *args):
    """Call through ctypes, with outputs of the declared types; (code, outputs)."""
    given, sizes = [], {}
    for a, t in zip(args, native.inputs.values()):
        if isinstance(a, np.ndarray):
            given.append(a.ctypes.data)
            if t.shape and not isinstance(t.shape[0], int):
                sizes[t.shape[0]] = a.shape[0]
                given.append(a.shape[0])
        else:
            given.append(a)
    outs = []
    for t in native.outputs.values():
        if hasattr(t, "shape"):
            outs.append(np.zeros([d if isinstance(d, int) else sizes[d] for d in t.shape], t.dtype.numpy))
        else:
            outs.append(np.zeros(1, np.int64 if t.name == "i64" else np.float64))
    code = native.function(*given, *(o.ctypes.data for o in outs))
    return code, [o if hasattr(t, "shape") else o[0].item() for o, t in zip(outs, native.outputs.values())]


@pytest.mark.parametrize("threads", [1, 2])
def test_through_ctypes(threads):
    f = m3jit.compile(SOURCE, *NAMES)
    native = f.native(*TYPES, threads=threads)
    assert native.signature == (
        "int64_t program(const void *rX, int64_t rX_n, const void *rY, int64_t rY_n, double rS, int64_t rK, "
        "void *rB_out, int64_t *rN_out, void *rC_out, double *rF_out, double *rS_out)")
    for n in (2, 3, 1, 50, 20_000):
        x, y = noise(n, 4), noise(n, 4, seed=1)
        code, got = call(native, x, y, 1.5, 10)
        assert code == DONE and [exact(v) for v in got] == [exact(v) for v in f(x, y, 1.5, 10)]
    assert call(native, noise(3, 4), noise(4, 4), 1.0, 1)[0] == UNFIT


def test_empty_and_single_rows_have_their_own_variants():
    f = m3jit.compile("ADD rZ, rX, rY\nEXP rM, rZ\nHALT", ["rX", "rY"], ["rZ", "rM"])
    native = f.native("f32[n]", "f32[n]")
    for n in (4, 1, 0):
        x, y = noise(n), noise(n, seed=1)
        code, got = call(native, x, y)
        assert code == DONE and [exact(v) for v in got] == [exact(v) for v in f(x, y)], n
    assert call(native, noise(1), noise(0))[0] == UNFIT


@pytest.mark.parametrize("stack", [0, 1 << 14])
def test_temporaries_on_stack_and_heap(stack, monkeypatch):
    monkeypatch.setattr(native_entry, "STACK_BYTES", stack)
    source = "SORT rA, rX\nMATVEC rB, rA, rW\nSORT rZ, rB\nHALT"
    f = m3jit.compile(source, ["rX", "rW"], ["rZ"])
    for types in (("f32[n, 8]", "f32[8, 3]"), ("f32[1, 8]", "f32[8, 3]")):
        native = f.native(*types)
        x, w = noise(1 if "1" in types[0] else 6, 8), noise(8, 3)
        code, (z,) = call(native, x, w)
        assert code == DONE and exact(z) == exact(f(x, w))


def test_types_from_sample_values_and_their_errors():
    f = m3jit.compile("ADD rZ, rX, rK\nHALT", ["rX", "rK"], ["rZ"])
    x = noise(5)
    assert exact(call(f.native(x, 1.0), x, 2.0)[1][0]) == exact(f(x, 2.0))
    for bad in ("f33[n]", "f32[n", "f32[2, m]", "f32[n, -1]", "double", "i64[2]x"):
        with pytest.raises(m3jit.UserError, match="rX"):
            f.native(bad, "f64")
    with pytest.raises(m3jit.UserError, match="one type for each of rX, rK; got 1"):
        f.native("f32[n]")
    with pytest.raises(m3jit.UnsupportedError, match="broadcast"):
        m3jit.compile("ADD rZ, rX, rY\nHALT", ["rX", "rY"], ["rZ"]).native("f32[n]", "f32[m]")
    with pytest.raises(m3jit.UnsupportedError, match="makes no native functions"):
        m3jit.compile("ADD rZ, rX, rK\nHALT", ["rX", "rK"], ["rZ"], backend="interpreter").native("f32[n]", "f64")
    with pytest.raises(m3jit.UnsupportedError, match="CYCLES_COUNT"):
        m3jit.compile("CYCLES_COUNT rZ\nHALT", [], ["rZ"]).native()


def test_leaving_compiled_code_is_told():
    native = m3jit.compile("DIV rZ, rA, rB\nHALT", ["rA", "rB"], ["rZ"]).native("i64", "i64")
    assert call(native, 7, 2) == (DONE, [3]) and call(native, 7, 0)[0] == LEFT
    gather = m3jit.compile("GATHER rZ, rX, rI\nHALT", ["rX", "rI"], ["rZ"])
    native = gather.native("f32[n]", "i64[3]")
    x = noise(10)
    code, (z,) = call(native, x, np.array([0, 9, 5]))
    assert code == DONE and np.array_equal(z, x[[0, 9, 5]])
    assert call(native, x, np.array([0, 10, 5]))[0] == LEFT


def test_several_ways_to_the_end():
    source = "COMPARE rK, 0\nIF_LESS neg\nEXP rZ, rX\nMOV rY, rX\nHALT\nneg: TANH rZ, rX\nEXP rY, rZ\nHALT"
    f = m3jit.compile(source, ["rX", "rK"], ["rZ", "rY"])
    native = f.native("f32[n]", "i64")
    x = noise(33)
    for k in (1, -1):
        code, got = call(native, x, k)
        assert code == DONE and [exact(v) for v in got] == [exact(v) for v in f(x, k)]


@pytest.mark.parametrize("seed", (501, 502, 503, 504, 506, 507))          # programs that are one region
def test_random_programs(seed):
    p = generate(seed, length=30)
    tensors = [i for i in p.items if i.kind != "tensor" or i.dtype.name not in ("BF16",)]
    f = p.builder.compile([i.value for i in p.inputs], [i.value for i in tensors], backend="cpu")
    want = f(*p.arguments)
    assert ": compiled" in f.report() and "left" not in f.report(), "no longer one region: take another seed"
    native = f.native(*p.arguments)
    args = [a.data if isinstance(a, m3jit.Tensor) else a for a in p.arguments]
    outs = [np.zeros_like(w) if isinstance(w, np.ndarray) else np.zeros(1, type(w)) for w in want]
    given = []
    for a, t in zip(args, native.inputs.values()):
        given += [a.ctypes.data, *([a.shape[0]] if t.shape and not isinstance(t.shape[0], int) else [])] \
            if isinstance(a, np.ndarray) else [a]
    assert native.function(*given, *(o.ctypes.data for o in outs)) == DONE
    for o, w in zip(outs, want):
        assert (exact(o) if isinstance(w, np.ndarray) else exact(o[0].item())) == exact(w)


def test_many_threads_at_once(monkeypatch):
    monkeypatch.setattr(variants, "SMALL_BYTES", 0)
    f = m3jit.compile(SOURCE, *NAMES)
    native = f.native(*TYPES, threads=2)
    x, y = noise(3000, 4), noise(3000, 4, seed=1)
    want = [exact(v) for v in f(x, y, 1.0, 0)]
    wrong: list = []

    def work() -> None:
        for _ in range(30):
            code, got = call(native, x, y, 1.0, 0)
            if code or [exact(v) for v in got] != want:
                wrong.append(code)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_from_c(tmp_path):
    """A C function gets the pointer and calls it in a loop."""
    (tmp_path / "user.c").write_text("""
        #include <stdint.h>
        typedef int64_t (*program)(const void *x, int64_t n, double s, void *z);
        int64_t use(program f, const float *x, int64_t n, float *z, int times) {
            for (int i = 0; i < times; i++) { int64_t r = f(x, n, i, z); if (r) return r; }
            return 0;
        }
    """)
    library = tmp_path / "user.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "user.c"], check=True, timeout=60)
    use = ctypes.CDLL(str(library)).use
    pointer = ctypes.c_void_p
    use.restype, use.argtypes = ctypes.c_int64, [pointer, pointer, ctypes.c_int64, pointer, ctypes.c_int]
    f = m3jit.compile("ADD rZ, rX, rS\nHALT", ["rX", "rS"], ["rZ"])
    native = f.native("f32[n]", "f64")
    x, z = noise(100), np.empty(100, np.float32)
    assert use(native.address, x.ctypes.data, 100, z.ctypes.data, 4) == 0
    assert np.array_equal(z, f(x, 3.0))


def test_from_numba():
    numba = pytest.importorskip("numba")
    f = m3jit.compile(SOURCE, *NAMES)
    g = f.numba(*TYPES)
    x, y = noise(3, 4), noise(3, 4, seed=1)
    assert [exact(np.asarray(v)) for v in g(x, y, 1.5, 10)] == [exact(np.asarray(v)) for v in f(x, y, 1.5, 10)]

    @numba.njit
    def summed(x, y, times):
        total = 0
        for i in range(times):
            b, n, c, half, s = g(x, y, float(i), i)
            total += n
        return total
    assert summed(x, y, 10) == sum(3 + i for i in range(10))
    frozen = x.copy()
    frozen.flags.writeable = False
    assert summed(frozen, y, 1) == 3
    with pytest.raises(ValueError, match="rX has another size on axis 1 than 4"):
        g(noise(3, 5), y, 1.0, 1)
    with pytest.raises(RuntimeError, match="dimensions"):
        g(noise(7, 4), y, 1.0, 1)
    with pytest.raises(TypeError):
        g(noise(4, 3).T, y, 1.0, 1)                            # not C-contiguous


def test_numba_keeps_the_code_alive():
    pytest.importorskip("numba")
    import gc
    g = m3jit.compile("ADD rZ, rX, rX\nHALT", ["rX"], ["rZ"]).numba("f32[n]")
    gc.collect()
    x = noise(9)
    assert np.array_equal(g(x), x + x)


def test_numba_has_no_half_floats():
    pytest.importorskip("numba")
    with pytest.raises(m3jit.UnsupportedError, match="numba has no arrays of F16"):
        m3jit.compile("ADD rZ, rX, rX\nHALT", ["rX"], ["rZ"]).numba("f16[n]")
