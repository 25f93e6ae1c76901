"""`m3jit.compile`: arguments, outputs, names, variants, fallbacks, threads, errors, the cost of a call."""
from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import timeit

import ml_dtypes
import numpy as np
import pytest

import m3jit
from m3jit.api import compiled
from m3jit.isa.types import BF16, F16, F32, Q8_0
from tests.api.outcomes import exact

CHAIN = """
    MUL rA, rX, rY
    ADD rA, rA, rX
    SIGMOID rA, rA
    MUL rA, rA, rY
    EXP rA, rA
    ADD rA, rA, rY
    TANH rA, rA
    MUL rA, rA, rA
    ADD rA, rA, rX
    RELU rZ, rA
    HALT
"""


def both(source: str, inputs: list[str], outputs: list[str], *args, **options):
    """The result of the native call, which must equal the interpreter's, and the compiled program."""
    f = m3jit.compile(source, inputs, outputs, **options)
    got = f(*args)
    want = m3jit.compile(source, inputs, outputs, backend="interpreter")(*args)
    for a, b in zip(got if len(outputs) > 1 else (got,), want if len(outputs) > 1 else (want,)):
        assert exact(a) == exact(b)
    return got, f


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# -- results ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (1000,), (3, 4), (1, 7), (7, 1), (2, 3, 5), (0, 4), (70_001,)])
def test_a_chain_of_ten(shape):
    x, y = noise(*shape), noise(*shape, seed=1)
    _, f = both(CHAIN, ["rX", "rY"], ["rZ"], x, y)
    assert ": compiled" in f.report()


def test_the_chain_is_one_kernel_and_close_to_numpy():
    f = m3jit.compile(CHAIN, ["rX", "rY"], ["rZ"], threads=2)
    x, y = noise(50_000), noise(50_000, seed=1)
    z = f(x, y)
    variant = next(iter(f._variants.values()))[0]
    assert len(variant.region.plan.kernels()) == 1 and not variant.region.slots
    a = 1 / (1 + np.exp(-(x.astype(float) * y + x)))
    np.testing.assert_allclose(z, np.maximum(np.tanh(np.exp(a * y) + y) ** 2 + x, 0), rtol=2e-5, atol=2e-6)


def test_several_outputs_numbers_and_passed_through_values():
    source = "ADD rS, rX, rK\nMOV rC, rX\nMOV rD, rC\nDIM rN, rX, 0\nLOADI rF, 2.5\nSUB rM, rN, 1\nHALT"
    x = noise(6, 2)
    got, _ = both(source, ["rX", "rK"], ["rS", "rC", "rD", "rN", "rF", "rM", "rX", "rK"], x, 1.5)
    s, c, d, n, f, m, same, k = got
    assert (n, f, m, k) == (6, 2.5, 5, 1.5) and np.array_equal(s, x + np.float32(1.5))
    for array in (c, d, same):
        assert array is not x and np.array_equal(array, x) and array.flags.writeable
    assert not np.shares_memory(c, d) and not np.shares_memory(c, x)


def test_outputs_belong_to_the_caller():
    f = m3jit.compile(CHAIN, ["rX", "rY"], ["rZ"])
    x = noise(9)
    a, b = f(x, x), f(x, x)
    assert a is not b and not np.shares_memory(a, b)
    constant = m3jit.compile(".data\nc: .f32 [1, 2]\n.text\nLOADI rZ, @c\nHALT", [], ["rZ"])
    one = constant()
    one[:] = 9
    assert constant().tolist() == [1, 2]


def test_two_names_for_one_result():
    got, _ = both("EXP rA, rX\nMOV rB, rA\nRESHAPE rC, rA, [2, -1]\nHALT", ["rX"], ["rA", "rB", "rC"], noise(8))
    assert got[2].shape == (2, 4) and not np.shares_memory(got[0], got[1]) and not np.shares_memory(got[0], got[2])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.uint8, np.int16, np.int32, np.int64])
def test_dtypes(dtype):
    x = (noise(3, 17) * 4).astype(dtype)
    got, f = both("ADD rZ, rX, rX\nMUL rZ, rZ, rX\nHALT", ["rX"], ["rZ"], x)
    assert got.dtype == dtype and ": compiled" in f.report()


def test_bfloat16_and_blocks_are_tensors():
    x = noise(4, 64)
    half = x.astype(ml_dtypes.bfloat16)
    got, _ = both("ADD rZ, rX, rX\nMOV rY, rX\nHALT", ["rX"], ["rZ", "rY"], half)
    assert isinstance(got[0], m3jit.Tensor) and got[0].dtype is BF16
    assert np.array_equal(got[0].data.view(ml_dtypes.bfloat16), half + half)
    assert got[1].tobytes() == half.tobytes()
    got, _ = both("QUANTIZE rQ, rX, Q8_0\nDEQUANT rZ, rQ\nHALT", ["rX"], ["rQ", "rZ"], x)
    assert got[0].dtype.name == "Q8_0" and got[0].shape == (4, 64) and np.abs(got[1] - x).max() < 0.05
    again, _ = both("MOV rP, rQ\nDEQUANT rZ, rQ\nHALT", ["rQ"], ["rZ", "rP", "rQ"], got[0])
    assert np.array_equal(again[0], got[1]) and again[1].tobytes() == got[0].tobytes() == again[2].tobytes()


def test_bool_results():
    got, _ = both("CAST rZ, rX, BOOL\nHALT", ["rX"], ["rZ"], np.array([0.0, 1.0, np.nan], np.float32))
    assert got.dtype == bool and got.tolist() == [False, True, True]


# -- arguments --------------------------------------------------------------------------------------------------------

class Dlpack:
    """Nothing but the protocol."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kw):
        return self.array.__dlpack__(**kw)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_what_counts_as_an_array():
    f = m3jit.compile("ADD rZ, rX, rX\nHALT", ["rX"], ["rZ"])
    x = noise(6, 8)
    want = (x + x).tobytes()
    wide = np.zeros((6, 16), np.float32)
    wide[:, ::2] = x
    raw = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(6, 8)       # not aligned
    readonly = x.copy()
    readonly.flags.writeable = False
    for value in (x, Dlpack(x), m3jit.Tensor.of(x), wide[:, ::2], np.asfortranarray(x), x[::-1][::-1], raw,
                  x.astype(">f4"), x.astype(np.float64), readonly, x.view(np.matrix), memoryview(x)):
        if isinstance(value, memoryview):
            with pytest.raises(m3jit.UserError, match="rX: a memoryview is no argument"):
                f(value)
            continue
        for _ in range(2):                                     # the second call may go another way
            assert f(value).tobytes() == want, type(value)
    assert not x.flags.owndata or x.flags.c_contiguous


def test_tensors_that_promise_too_much_are_refused():
    f = m3jit.compile("ADD rZ, rX, rX\nHALT", ["rX"], ["rZ"])
    short = m3jit.Tensor(F32, (100,), np.zeros(3, np.float32))
    for use in (f, lambda t: m3jit.VM(m3jit.assemble("HALT")).set("R0", t)):
        for bad in (short, m3jit.Tensor(F32, (3,), np.zeros(3, np.int32)),
                    m3jit.Tensor(F16, (2, 2), np.zeros(4, np.float16)),
                    m3jit.Tensor(Q8_0, (32,), np.zeros(32, np.uint8))):
            with pytest.raises(m3jit.UserError, match="its array must be"):
                use(bad)
    scalar = m3jit.Tensor(BF16, (), np.uint16(0x4000))                                         # no array at all
    assert f(scalar).data.view(ml_dtypes.bfloat16) == 4


def test_arguments_by_name_and_their_errors():
    f = m3jit.compile("ADD rZ, rX, rK\nHALT", ["rX", "rK"], ["rZ"])
    x = noise(3)
    assert exact(f(rK=2.0, rX=x)) == exact(f(x, 2.0)) == exact(f(x, rK=np.float64(2)))
    with pytest.raises(m3jit.UserError, match="takes rX, rK; rK not given"):
        f(x)
    with pytest.raises(m3jit.UserError, match="takes rX, rK; 3 arguments"):
        f(x, 1.0, 2.0)
    with pytest.raises(m3jit.UserError, match="rB not expected"):
        f(x, rB=1.0)
    with pytest.raises(m3jit.UserError, match="rX: a list is no argument"):
        f([1.0, 2.0], 1.0)
    with pytest.raises(m3jit.UserError, match="rX: no tensor type for NumPy dtype complex64"):
        f(x.astype(np.complex64), 1.0)
    with pytest.raises(m3jit.UserError, match="rX: a tensor has at most 5 dimensions"):
        f(np.zeros((1,) * 6, np.float32), 1.0)
    for _ in range(2):
        with pytest.raises(m3jit.UserError, match="does not fit a signed 64-bit integer"):
            m3jit.compile("ADDI rZ, rK, 1\nHALT", ["rK"], ["rZ"])(2 ** 63)


def test_kinds_of_numbers_may_change_from_call_to_call():
    f = m3jit.compile("ADD rZ, rA, rB\nHALT", ["rA", "rB"], ["rZ"])
    x = noise(4)
    for _ in range(3):
        assert f(1, 2) == 3 and type(f(1, 2)) is int
        assert f(1.5, 2.0) == 3.5 and f(True, np.int8(2)) == 3
        assert np.array_equal(f(x, 1.0), x + np.float32(1)) and np.array_equal(f(1.0, x), x + np.float32(1))
        assert f(2 ** 63 - 1, 1) == -2 ** 63


# -- out= ------------------------------------------------------------------------------------------------------------

def test_preallocated_outputs():
    f = m3jit.compile("EXP rA, rX\nDIM rN, rX, 0\nADD rB, rA, rX\nHALT", ["rX"], ["rA", "rN", "rB"])
    x = noise(5, 3)
    want = f(x)
    a, b = np.empty_like(x), np.full_like(x, 7)
    got = f(x, out=(a, None, b))
    assert got[0] is a and got[1] == 5 and got[2] is b
    assert [exact(v) for v in got] == [exact(v) for v in want]
    strided = np.zeros((5, 6), np.float32)[:, ::2]
    assert f(x, out=[strided, None, None])[0] is strided and np.array_equal(strided, want[0])
    g = m3jit.compile("EXP rA, rX\nHALT", ["rX"], ["rA"], backend="interpreter")
    assert g(x, out=a) is a and np.array_equal(a, want[0])


@pytest.mark.parametrize("backend", ["cpu", "interpreter"])
def test_outputs_over_their_own_inputs(backend):
    """A result computed into memory that is still read would be wrong; it is not computed there."""
    f = m3jit.compile("REDUCE rM, rX, SUM, AXIS=0, KEEPDIMS\nADD rZ, rX, rM\nHALT", ["rX"], ["rZ"], backend=backend)
    x = noise(100, 3)
    want = f(x)
    store = np.zeros((101, 3), np.float32)
    for target, source in ((store[:100], store[:100]), (store[1:], store[:100])):
        source[:] = x
        assert f(source, out=target) is target and np.array_equal(target, want)


def test_wrong_outputs():
    f = m3jit.compile("EXP rA, rX\nDIM rN, rX, 0\nHALT", ["rX"], ["rA", "rN"])
    x = noise(5)
    for bad in (np.empty(4, np.float32), np.empty(5, np.float64), np.empty((5, 1), np.float32), [0.0] * 5):
        for _ in range(2):
            with pytest.raises(m3jit.UserError, match=r"out: rA is float32 \[5\]"):
                f(x, out=(bad, None))
    frozen = np.empty(5, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(m3jit.UserError, match="read-only"):
        f(x, out=(frozen, None))
    with pytest.raises(m3jit.UserError, match="rN is a number"):
        f(x, out=(None, np.empty(1, np.int64)))
    with pytest.raises(m3jit.UserError, match="out: expected 2 arrays"):
        f(x, out=np.empty(5, np.float32))


# -- names and entries -----------------------------------------------------------------------------------------------

FUNCTIONS = """
    JUMP main
.func scale(rX, rFactor, rOut)
    MUL rOut, rX, rFactor
    RET
.func twice(rX, rY)
    CALL scale ARGS=[rX, rY, rY]
    ADD rX, rX, rY
    RET
main:
    ADD rZ, rQ, rQ
    HALT
"""


def test_a_function_gives_names_and_ends_at_ret():
    f = m3jit.compile(FUNCTIONS, entry="scale")
    assert (f.inputs, f.outputs) == (("rX", "rFactor"), ("rOut",))
    assert f(np.float32([1, 2]), 3.0).tolist() == [3, 6] and ": compiled" in f.report()
    g = m3jit.compile(FUNCTIONS, entry="scale", backend="interpreter")
    assert g(np.float32([1, 2]), 3.0).tolist() == [3, 6]
    alone = m3jit.compile(".func neg(rX, rY)\nNEG rY, rX\nRET")
    assert (alone.inputs, alone.outputs, alone(5)) == (("rX",), ("rY",), -5)


def test_a_function_that_calls_runs_on_the_interpreter():
    f = m3jit.compile(FUNCTIONS, ["rX", "rY"], ["rX"], entry="twice")
    got = f(np.float32([1, 2]), np.float32([3, 4]))
    want = m3jit.compile(FUNCTIONS, ["rX", "rY"], ["rX"], entry="twice", backend="interpreter")(
        np.float32([1, 2]), np.float32([3, 4]))
    assert np.array_equal(got, want) and "interpreted: CALL (pc" in f.report()


def test_labels_and_registers_by_number():
    f = m3jit.compile(FUNCTIONS, ["rQ"], ["rZ"], entry="main")
    assert f(4) == 8
    assert m3jit.compile("ADD R9, R3, R3\nHALT", ["R3"], ["R9"])(2) == 4
    v = m3jit.compile("ADD V2, V1, V1\nHALT", ["V1"], ["V2"])(np.arange(8, dtype=np.float32))
    assert v.tolist() == [2 * i for i in range(8)]


def test_unknown_names_are_explained():
    with pytest.raises(m3jit.UserError, match=r"give inputs=\[...\] and outputs=\[...\]; the program reads rX, rY"):
        m3jit.compile(CHAIN)
    with pytest.raises(m3jit.UserError, match="entry= one of its functions scale, twice"):
        m3jit.compile(FUNCTIONS)
    with pytest.raises(m3jit.UserError, match="no register rV"):
        m3jit.compile(CHAIN, ["rV"], ["rZ"])
    with pytest.raises(m3jit.UserError, match="did you mean scale"):
        m3jit.compile(FUNCTIONS, entry="scal")
    with pytest.raises(m3jit.UserError, match="names no register"):
        m3jit.compile(CHAIN, ["rX", "rY"], [])
    with pytest.raises(m3jit.UserError, match="cannot be an input or output"):
        m3jit.compile("MOV S0, S1\nHALT", ["S1"], ["S0"])
    with pytest.raises(m3jit.UserError, match="no backend 'abacus'"):
        m3jit.compile(CHAIN, ["rX"], ["rZ"], backend="abacus")
    with pytest.raises(m3jit.UserError, match="threads: 1 to 256"):
        m3jit.compile(CHAIN, ["rX"], ["rZ"], threads=-1)
    with pytest.raises(m3jit.AssemblyError):
        m3jit.compile("FOO rX", ["rX"], ["rX"])
    with pytest.raises(m3jit.UserError, match="rW was never written"):
        m3jit.compile("COMPARE rX, 0\nIF_LESS out\nMOV rW, rX\nout: HALT", ["rX"], ["rW"])(-1)


def test_programs_from_files(tmp_path):
    (tmp_path / "a.m3asm").write_text(CHAIN)
    program = m3jit.load(tmp_path / "a.m3asm")
    (tmp_path / "a.m3b").write_bytes(program.to_bytes())
    x = noise(7)
    want = m3jit.compile(program, ["rX", "rY"], ["rZ"])(x, x)
    loaded = m3jit.load(str(tmp_path / "a.m3b"))
    for source in (str(tmp_path / "a.m3asm"), tmp_path / "a.m3b", program.to_bytes(), loaded):
        assert exact(m3jit.compile(source, ["rX", "rY"], ["rZ"])(x, x)) == exact(want)
    with pytest.raises(OSError):
        m3jit.compile(str(tmp_path / "none.m3b"), ["rX"], ["rZ"])
    (tmp_path / "bad.m3b").write_bytes(b"M3")
    with pytest.raises(m3jit.ContainerError):
        m3jit.load(tmp_path / "bad.m3b")


# -- variants and fallbacks ------------------------------------------------------------------------------------------

def test_variants_are_shared_by_lengths_and_bounded(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_VARIANTS", 3)
    monkeypatch.setattr(compiled, "MAX_CALLS", 5)
    f = m3jit.compile("ADD rZ, rX, rX\nHALT", ["rX"], ["rZ"])
    for n in (2, 3, 5, 100, 1000):
        assert f(noise(n)).shape == (n,)
    assert sum(map(len, f._variants.values())) == 1            # one length fits all
    for _ in range(2):
        for shape in ((2, 3), (2, 4), (2, 5), (1, 3), (4, 4, 4), (0,), (1,), ()):
            x = noise(*shape)
            assert np.array_equal(f(x), x + x)
    assert sum(map(len, f._variants.values())) <= 3 and len(f._calls) <= 5
    assert sum(map(len, f._tables.values())) == len(f._calls)


def test_lengths_that_disagree_trap_and_do_no_harm():
    f = m3jit.compile("ADD rZ, rX, rY\nHALT", ["rX", "rY"], ["rZ"])
    for _ in range(2):
        assert f(noise(4), noise(4)).shape == (4,)
        with pytest.raises(m3jit.Trap, match="broadcast"):
            f(noise(4), noise(5))
        assert f(noise(1), noise(5)).shape == (5,)


def test_what_is_not_compiled_says_why():
    f = m3jit.compile("ADD rZ, rX, rX\nCYCLES_COUNT rC\nHALT", ["rX"], ["rZ"])
    assert f(noise(3)).shape == (3,) and f.report() == "float32[3]: interpreted: CYCLES_COUNT (pc 0x0020)"
    g = m3jit.compile("DIV rZ, rA, rB\nHALT", ["rA", "rB"], ["rZ"])
    assert g(7, 2) == 3
    with pytest.raises(m3jit.Trap, match="zero") as trap:
        g(7, 0)
    assert trap.value.pc == 0 and "left 1 times" in g.report() and g(9, 3) == 3


def test_loops_and_branches_are_compiled():
    source = """
        LOADI rS, 0
    top: ADD rS, rS, rN
        SUB rN, rN, 1
        COMPARE rN, 0
        IF_GREATER top
        COMPARE rS, 100
        IF_GREATER big
        MOV rZ, rX
        HALT
    big: EXP rZ, rX
        HALT
    """
    x = noise(5)
    for n, want in ((3, x), (50, None)):
        got, f = both(source, ["rN", "rX"], ["rS", "rZ"], n, x)
        assert got[0] == n * (n + 1) // 2 and ": compiled" in f.report() and "left" not in f.report()
        assert want is None or np.array_equal(got[1], want)


def test_every_call_starts_anew():
    f = m3jit.compile("RNG_NEXT rA\nRNG_NEXT rB\nHALT", [], ["rA", "rB"])
    assert f() == f() == m3jit.compile("RNG_NEXT rA\nRNG_NEXT rB\nHALT", [], ["rA", "rB"], backend="interpreter")()


@pytest.mark.parametrize("backend", ["cpu:baseline", "python"])
def test_other_backends(backend):
    x = noise(33)
    both(CHAIN, ["rX", "rY"], ["rZ"], x, x, backend=backend)


# -- threads ---------------------------------------------------------------------------------------------------------

def test_many_threads_at_once(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_CALLS", 4)              # frames come and go meanwhile
    f = m3jit.compile(CHAIN, ["rX", "rY"], ["rZ"], threads=2)
    sizes = (1, 2, 17, 300, 40_000, 5)
    inputs = {n: (noise(n), noise(n, seed=1)) for n in sizes}
    want = {n: m3jit.compile(CHAIN, ["rX", "rY"], ["rZ"])(*inputs[n]).tobytes() for n in sizes}
    wrong: list = []

    def work(k: int) -> None:
        for i in range(40):
            n = sizes[(i + k) % len(sizes)]
            if f(*inputs[n]).tobytes() != want[n]:
                wrong.append((k, n))
    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(180)
    assert not wrong and not any(t.is_alive() for t in threads)


def test_native_code_runs_without_the_interpreter_lock():
    loop = "top: SUB rN, rN, 1\nCOMPARE rN, 0\nIF_GREATER top\nHALT"
    f = m3jit.compile(loop, ["rN"], ["rN"])
    f(2)
    ticks, done = [], threading.Event()

    def count() -> None:
        while not done.is_set():
            ticks.append(1)
            done.wait(0.001)
    t = threading.Thread(target=count)
    t.start()
    during = 0
    for _ in range(40):                                # on a busy machine a thread may get no turn within one call
        before = len(ticks)
        f(300_000_000)
        during = len(ticks) - before
        if during >= 3:
            break
    done.set()
    t.join()
    assert during >= 3


def test_ctrl_c_ends_a_compiled_loop():
    code = ("import m3jit\n"
            "f = m3jit.compile('top: ADD rN, rN, 0\\nCOMPARE rN, 1\\nIF_NOT_EQUAL top\\nHALT', ['rN'], ['rN'])\n"
            "f(1)\n"
            "try:\n    print('ready', flush=True)\n    f(2)\nexcept KeyboardInterrupt:\n    print('interrupted', f(1))")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.3)                                # most often it is in the loop by then
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=180)[0] == "interrupted 1\n"
    finally:
        child.kill()


def test_cost_of_a_call():
    """Printed, not asserted: it depends on what else the machine does."""
    f = m3jit.compile(CHAIN, ["rX", "rY"], ["rZ"])
    x, out = noise(16), np.empty(16, np.float32)
    f(x, x)
    n = 5000
    plain = min(timeit.repeat(lambda: f(x, x), number=n, repeat=3)) / n * 1e6
    into = min(timeit.repeat(lambda: f(x, x, out=out), number=n, repeat=3)) / n * 1e6
    print(f"\ncall with 16 elements: {plain:.2f} us, with out= {into:.2f} us")
