"""Plans as native regions: scalar code, exits, polls, barriers, launches, copies, frame words."""
from __future__ import annotations

import ctypes
import math
import struct
import threading

import numpy as np
import pytest

from m3jit.backends.cpu.region import PlanError
from m3jit.ir.loop_builder import Builder
from m3jit.ir.plan import (Barrier, Branch, Copy, Exit, FrameWord, Jump, Launch, Plan, PlanBlock, Poll, Retire, Scalar,
                           StoreFrame)
from tests.backends.cpu_engines import LEVELS, engine
from tests.loop_eval import STORAGE, bf16_bits

FREE = int(FrameWord.FIRST_FREE)
HUGE = (1 << 63) - 1


def const(value, type: str = "i64") -> Scalar:
    return Scalar("const", type, attrs={"value": value})


def frame_of(words: int, budget: int = HUGE, stop: np.ndarray | None = None) -> np.ndarray:
    frame = np.zeros(words, np.int64)
    frame[FrameWord.BUDGET] = budget
    if stop is not None:
        frame[FrameWord.STOP] = stop.ctypes.data
    return frame


def wrap(x: int) -> int:
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def trunc_div(a: int, b: int) -> int:
    return wrap((abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1))


INTEGER = {
    "add": lambda a, b: wrap(a + b), "sub": lambda a, b: wrap(a - b), "mul": lambda a, b: wrap(a * b),
    "div": lambda a, b: trunc_div(a, b) if b else None,
    "mod": lambda a, b: a - b * (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1) if b else None,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: wrap(a << (b & 63)), "shr": lambda a, b: wrap((a % (1 << 64)) >> (b & 63)),
    "sar": lambda a, b: a >> (b & 63), "min": min, "max": max,
}
INTEGERS = [0, 1, -1, 2, 7, -7, 63, 64, 65, 1 << 31, -(1 << 31), (1 << 62) + 3, HUGE, -HUGE - 1, -123456789012345]
FLOATS = [0.0, -0.0, 1.0, -1.5, 0.1, 1e308, -1e308, 5e-324, math.inf, -math.inf, math.nan, 2.0 ** 63, -2.0 ** 63,
          9.3e18, -9.3e18, 1.0000000596046448, 3.5]


@pytest.mark.parametrize("level", LEVELS)
def test_integer_scalars(level):
    a, b = (Scalar("frame", "i64", attrs={"word": FREE + i}) for i in range(2))
    # the divisor is tested before, as the plan's builder must: here by replacing zero
    safe = Scalar("select", "i64", (zero := Scalar("eq", "b1", (b, const(0))), const(1), b))
    body = [a, b, zero, safe]
    names = list(INTEGER)
    for op in names:
        body.append(Scalar(op, "i64", (a, safe if op in ("div", "mod") else b)))
    neg = Scalar("neg", "i64", (a,))
    to_float = Scalar("i2f", "f64", (a,))
    compares = [Scalar(op, "b1", (a, b)) for op in ("eq", "ne", "lt", "le")]
    both, either = Scalar("bool_and", "b1", tuple(compares[1:3])), Scalar("bool_or", "b1", (compares[0], compares[2]))
    negated = Scalar("bool_not", "b1", (compares[3],))
    body += [neg, to_float, *compares, both, either, negated]
    results = body[4:]
    plan = Plan("ints", FREE + 2 + len(results), [PlanBlock("entry", body=body, end=Exit(7, [
        StoreFrame(FREE + 2 + i, r) for i, r in enumerate(results)]))])
    region, frame = engine(level).region(plan), frame_of(plan.words)
    for x in INTEGERS:
        for y in INTEGERS:
            frame[FREE:FREE + 2] = x, y
            assert region.run(frame) == 7 == frame[FrameWord.EXIT]
            got = frame[FREE + 2:].tolist()
            for op, g in zip(names, got):
                expected = INTEGER[op](x, y) if y or op not in ("div", "mod") else INTEGER[op](x, 1)
                assert g == expected, (op, x, y)
            rest = got[len(names):]
            assert rest[0] == wrap(-x)
            assert rest[1] == struct.unpack("<q", struct.pack("<d", float(x)))[0]
            assert rest[2:] == [x == y, x != y, x < y, x <= y, x != y and x < y, x == y or x < y, not x <= y]


@pytest.mark.parametrize("level", LEVELS)
def test_float_scalars(level):
    a, b = (Scalar("frame", "f64", attrs={"word": FREE + i}) for i in range(2))
    floats = [Scalar(op, "f64", (a, b)) for op in ("fadd", "fsub", "fmul", "fdiv", "fmin", "fmax")]
    floats += [Scalar("fneg", "f64", (a,)), Scalar("fsqrt", "f64", (a,)), Scalar("f2f32", "f32", (a,))]
    compares = [Scalar(op, "b1", (a, b)) for op in ("feq", "fne", "flt", "fle")]
    to_int = Scalar("f2i", "i64", (a,))
    results = floats + compares + [to_int]
    plan = Plan("floats", FREE + 2 + len(results), [PlanBlock("entry", body=[a, b, *results], end=Exit(0, [
        StoreFrame(FREE + 2 + i, r) for i, r in enumerate(results)]))])
    region, frame = engine(level).region(plan), frame_of(plan.words)
    floats_view = frame.view(np.float64)
    for x in FLOATS:
        for y in FLOATS:
            floats_view[FREE:FREE + 2] = x, y
            region.run(frame)
            X, Y = np.float64(x), np.float64(y)
            with np.errstate(all="ignore"):
                expected = np.array([X + Y, X - Y, X * Y, X / Y, x if x < y else y, x if x > y else y, -X, np.sqrt(X),
                                     np.float64(np.float32(X))])
            got = floats_view[FREE + 2:FREE + 2 + len(floats)]
            assert (np.isnan(got) == np.isnan(expected)).all()
            keep = ~np.isnan(expected)
            assert got[keep].tobytes() == expected[keep].tobytes(), (x, y)
            assert frame[FREE + 2 + len(floats):-1].tolist() == [x == y, x != y, x < y, x <= y]
            whole = 0 if x != x else max(-HUGE - 1, min(HUGE, math.trunc(x))) if abs(x) < math.inf else \
                (HUGE if x > 0 else -HUGE - 1)
            assert frame[-1] == whole


def loop_plan(polls: bool = True) -> Plan:
    """x = x * 6364136223846793005 + 1442695040888963407, n times; six instructions retired each time."""
    n = Scalar("frame", "i64", attrs={"word": FREE})
    x0 = Scalar("frame", "i64", attrs={"word": FREE + 1})
    i, x = Scalar("param", "i64"), Scalar("param", "i64")
    product = Scalar("mul", "i64", (x, const(6364136223846793005)))
    total = Scalar("add", "i64", (product, const(1442695040888963407)))
    following = Scalar("add", "i64", (i, const(1)))
    more = Scalar("lt", "b1", (following, n))
    loop = PlanBlock("loop", params=[i, x], body=[product, total, following, more, Retire(6)])
    done = PlanBlock("done", end=Exit(1, [StoreFrame(FREE + 1, total), StoreFrame(FREE + 2, following)]))
    back = PlanBlock("back", end=Jump(loop, [following, total]))
    if polls:
        back.body.append(Poll(2, [StoreFrame(FREE + 1, total), StoreFrame(FREE + 2, following)]))
    loop.end = Branch(more, back, [], done, [])
    entry = PlanBlock("entry", body=[n, x0], end=Jump(loop, [const(0), x0]))
    return Plan("lcg", FREE + 3, [entry, loop, back, done])


def lcg(n: int, x: int) -> int:
    for _ in range(n):
        x = wrap(x * 6364136223846793005 + 1442695040888963407)
    return x


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("level", LEVELS)
def test_scalar_loop_and_budget(level, threads):
    region = engine(level).region(loop_plan())
    frame = frame_of(FREE + 3)
    frame[FREE:FREE + 2] = 1000, 42
    assert region.run(frame, threads) == 1
    assert frame[FREE + 1] == lcg(1000, 42) and frame[FrameWord.RETIRED] == 6000 and frame[FREE + 2] == 1000
    for budget, iterations in ((1, 1), (6, 1), (7, 2), (599, 100), (-5, 1), (5999, 1000)):
        frame = frame_of(FREE + 3, budget)
        frame[FREE:FREE + 2] = 1000, 42
        assert region.run(frame, threads) == (2 if iterations < 1000 else 1)
        assert frame[FREE + 2] == iterations and frame[FrameWord.RETIRED] == 6 * iterations
        assert frame[FREE + 1] == lcg(iterations, 42)


def mixed_plan() -> Plan:
    """The loop, after a parallel launch: most of its polls have no launch between them."""
    b = Builder("touch", 16)
    p = b.ptr("p", "rw", "i32")
    b.set_grid(4)
    b.store_lanes("i32", p, b.group * 16, b.load_lanes("i32", p, b.group * 16) + 1)
    kernel, plan = b.finish(), loop_plan()
    p = Scalar("frame", "ptr", attrs={"word": FREE + 3})
    plan.blocks[0].body += [p, Launch(kernel, [p]), Barrier()]
    plan.words += 1
    return plan


@pytest.mark.parametrize("plan, threads", ((loop_plan(), 1), (mixed_plan(), 1), (mixed_plan(), 2), (mixed_plan(), 3)))
def test_stop_word_leaves_a_running_loop(plan, threads):
    region, stop = engine("native").region(plan), np.zeros(1, np.int32)
    data = np.zeros(64, np.int32)
    frame = frame_of(plan.words, stop=stop)
    frame[FREE:FREE + 2] = HUGE, 42
    if plan.words > FREE + 3:
        frame[FREE + 3] = data.ctypes.data
    timer = threading.Timer(0.05, lambda: stop.__setitem__(0, 1))      # runs: the region holds no interpreter lock
    timer.start()
    assert region.run(frame, threads) == 2             # of HUGE rounds
    timer.join()
    assert frame[FrameWord.RETIRED] == 6 * frame[FREE + 2] > 0


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_stop_word_set_before_entry(threads):
    plan = mixed_plan()
    stop, data, frame = np.ones(1, np.int32), np.zeros(64, np.int32), frame_of(plan.words)
    frame[FrameWord.STOP] = stop.ctypes.data
    frame[FREE:FREE + 4] = 10, 42, 0, data.ctypes.data
    assert engine("native").region(plan).run(frame, threads) == 2
    assert frame[FREE + 2] == 1 and (data == 1).all()


def step_kernel():
    """y[i] = x[i] * k + y[(i + 64) % n]: reads what another group, maybe another thread, wrote in the step before."""
    b = Builder("step", 64)
    x, y = b.ptr("x", "r", "i32"), b.ptr("y", "w", "i32")
    n, k, f = b.scalar("n"), b.scalar("k", "i32"), b.scalar("f", "f32")
    b.set_grid(n // 64)
    other = (b.group * 64 + 64) % n
    v = b.load_lanes("i32", x, b.group * 64) * k + b.load_lanes("i32", x, other)
    b.store_lanes("i32", y, b.group * 64, v + b.cvt(f, "i32"))
    return b.finish()


def chain_plan(steps: int, n: int) -> Plan:
    """`steps` launches with barriers, back and forth between two arrays, then a copy and an element read."""
    kernel = step_kernel()
    p, q, out = (Scalar("frame", "ptr", attrs={"word": FREE + i}) for i in range(3))
    scale = Scalar("frame", "f64", attrs={"word": FREE + 3})
    narrow = Scalar("f2f32", "f32", (scale,))
    body: list = [p, q, out, scale, narrow]
    for i in range(steps):
        a, b = (p, q) if i % 2 == 0 else (q, p)
        body += [Launch(kernel, [a, b, const(n), const(3), narrow], label=f"step {i}", parallel=i % 5 != 4), Barrier()]
    last = p if steps % 2 == 0 else q
    value = Scalar("element", "i64", (out, const(n - 1)), attrs={"dtype": "i32"})
    body += [Copy(out, last, const(4 * n)), Barrier(), value, Retire(steps)]
    return Plan("chain", FREE + 5, [PlanBlock("entry", body=body, end=Exit(3, [StoreFrame(FREE + 4, value)]))])


@pytest.mark.parametrize("n", (64, 1024, 64 * 1000))
@pytest.mark.parametrize("level", ("baseline", "native"))
def test_barriers_order_launches(level, n):
    steps, plan = 31, chain_plan(31, n)
    start = np.arange(n, dtype=np.int32)
    x = start.copy()
    for _ in range(steps):
        x = x * 3 + np.roll(x.reshape(-1, 64), -1, axis=0).reshape(-1) + 2
    region = engine(level).region(plan)
    for threads in (1, 2, 3, 2, 5):
        p, q, out = start.copy(), np.zeros(n, np.int32), np.zeros(n + 16, np.int32)
        frame = frame_of(plan.words)
        frame[FREE:FREE + 3] = p.ctypes.data, q.ctypes.data, out.ctypes.data
        frame.view(np.float64)[FREE + 3] = 2.75
        assert region.run(frame, threads) == 3
        assert (out[:n] == x).all() and (out[n:] == 0).all()
        assert frame[FREE + 4] == x[-1] and frame[FrameWord.RETIRED] == steps


def test_replicated_launches_need_no_barrier_after_them():
    """The second, shared launch reads what the whole first step wrote, with no barrier between them."""
    kernel, n = step_kernel(), 640
    p, q, out = (Scalar("frame", "ptr", attrs={"word": FREE + i}) for i in range(3))
    zero = const(0.0, "f32")
    body = [p, q, out, Launch(kernel, [p, q, const(n), const(3), zero], replicated=True),
            Launch(kernel, [q, out, const(n), const(5), zero]), Barrier()]
    region = engine("native").region(Plan("replicated", FREE + 3, [PlanBlock("e", body=body, end=Exit(0, []))]))
    assert region.parallel
    x = np.arange(n, dtype=np.int32)
    first = x * 3 + np.roll(x, -64)
    for threads in (1, 2, 3) * 20:
        a, b, c, frame = x.copy(), np.full(n, -1, np.int32), np.zeros(n, np.int32), frame_of(FREE + 3)
        frame[FREE:] = a.ctypes.data, b.ctypes.data, c.ctypes.data
        region.run(frame, threads)
        assert (b == first).all() and (c == first * 5 + np.roll(first, -64)).all()


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("level", LEVELS)
def test_element(level, dtype):
    floating = dtype in ("f16", "bf16", "f32", "f64")
    p, i = (Scalar("frame", t, attrs={"word": FREE + k}) for k, t in enumerate(("ptr", "i64")))
    value = Scalar("element", "f64" if floating else "i64", (p, i), attrs={"dtype": dtype})
    plan = Plan("element", FREE + 3, [PlanBlock("e", body=[p, i, value], end=Exit(0, [StoreFrame(FREE + 2, value)]))])
    region, frame = engine(level).region(plan), frame_of(FREE + 3)
    if dtype == "bf16":
        data = bf16_bits(np.array([1.5, -2.0, 3e38, 1e-40], np.float32))
        expected = (data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    elif floating:
        data = np.array([1.5, -0.1, 6e4, 1e-7], STORAGE[dtype])
        expected = data.astype(np.float64)
    else:
        data = np.array([0, 1, 200, -3 % 256], np.int64).astype(np.uint8).astype(STORAGE[dtype])
        data[2:] = (~data[2:]).astype(data.dtype)
        expected = data.astype(np.int64)
    for k in range(4):
        frame[FREE:FREE + 2] = data.ctypes.data, k
        region.run(frame)
        assert frame[FREE + 2:].view(expected.dtype)[0] == expected[k]


def test_both_edges_of_a_branch_to_one_block():
    c = Scalar("frame", "b1", attrs={"word": FREE})
    x = Scalar("param", "i64")
    join = PlanBlock("join", params=[x], end=Exit(0, [StoreFrame(FREE + 1, x)]))
    entry = PlanBlock("entry", body=[c], end=Branch(c, join, [const(10)], join, [const(20)]))
    unreachable = PlanBlock("never", params=[Scalar("param", "i64")], end=Exit(9, []))
    region = engine("native").region(Plan("diamond", FREE + 2, [entry, join, unreachable]))
    frame = frame_of(FREE + 2)
    for word, expected in ((0, 20), (1, 10), (-4, 10)):
        frame[FREE] = word
        region.run(frame)
        assert frame[FREE + 1] == expected


@pytest.mark.parametrize("size", (0, 1, 63, 65535, 65536, 65537, 1_000_003))
def test_shared_copies(size):
    src, dst = (Scalar("frame", "ptr", attrs={"word": FREE + i}) for i in range(2))
    plan = Plan("copy", FREE + 2, [PlanBlock("e", body=[src, dst, Copy(dst, src, const(size))], end=Exit(0, []))])
    x = np.random.default_rng(0).integers(0, 256, size + 1, dtype=np.uint8)
    for threads in (1, 2, 3):
        y, frame = np.full(size + 64, 7, np.uint8), frame_of(plan.words)
        frame[FREE:] = x.ctypes.data, y.ctypes.data
        engine("native").region(plan).run(frame, threads)
        assert (y[:size] == x[:size]).all() and (y[size:] == 7).all()


def test_wrong_frames_and_plans_are_refused():
    region, frame = engine("native").region(loop_plan()), frame_of(FREE + 3)
    with pytest.raises(ValueError, match="the frame has 3 words, the plan needs 7"):
        region.run(frame[:3])
    with pytest.raises(ValueError, match="C-contiguous int64"):
        region.run(frame.astype(np.float64))
    with pytest.raises(ValueError, match="C-contiguous int64"):
        region.run(np.zeros(40, np.int64)[::2])
    p = Scalar("frame", "i64", attrs={"word": FREE})
    launch = Launch(step_kernel(), [p, p, p, p, p])
    with pytest.raises(PlanError, match="step takes x as ptr, the launch gives i64"):
        engine("native").region(Plan("bad", FREE + 1, [PlanBlock("e", body=[p, launch], end=Exit(0, []))]))
    with pytest.raises(PlanError, match="frame word 99 outside"):
        bad = Scalar("frame", "i64", attrs={"word": 99})
        engine("native").region(Plan("bad", FREE, [PlanBlock("e", body=[bad], end=Exit(0, []))]))


def test_region_sets_and_restores_the_control_word():
    """A caller that flushes denormals gets denormals inside the region and its own setting back."""
    a = Scalar("frame", "f64", attrs={"word": FREE})
    half = Scalar("fmul", "f64", (a, const(0.5, "f64")))
    plan = Plan("denormal", FREE + 2, [PlanBlock("e", body=[a, half], end=Exit(0, [StoreFrame(FREE + 1, half)]))])
    region, frame = engine("native").region(plan), frame_of(FREE + 2)
    frame.view(np.float64)[FREE] = 2.2250738585072014e-308
    libm = ctypes.CDLL("libm.so.6")

    class Environment(ctypes.Structure):                  # glibc x86-64: the last word is MXCSR
        _fields_ = [("x87", ctypes.c_uint32 * 7), ("mxcsr", ctypes.c_uint32)]

    env = Environment()
    libm.fegetenv(ctypes.byref(env))
    normal = env.mxcsr
    env.mxcsr = normal | 0x8040                           # flush to zero, denormals are zero
    libm.fesetenv(ctypes.byref(env))
    region.run(frame)
    libm.fegetenv(ctypes.byref(env))
    after, env.mxcsr = env.mxcsr, normal
    libm.fesetenv(ctypes.byref(env))
    assert frame.view(np.float64)[FREE + 1] == 2.2250738585072014e-308 / 2 > 0
    assert after & 0x8040 == 0x8040


def test_raw_address_runs_from_ctypes():
    region, frame = engine("native").region(loop_plan()), frame_of(FREE + 3)
    frame[FREE:FREE + 2] = 10, 1
    raw = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(region.address)
    raw(frame.ctypes.data, None)
    assert frame[FREE + 1] == lcg(10, 1) and frame[FrameWord.EXIT] == 1
    call = region.bind(frame)
    launch = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(region.call_address)
    frame[FREE + 1] = 1
    assert launch(call.argument) == 1 and frame[FREE + 1] == lcg(10, 1)
