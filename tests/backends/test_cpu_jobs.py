"""Jobs of a region: chunks claimed in any order by any number of threads, batches, sleeping workers, background load.

Tests that could hang run in a process of their own with a time limit."""
from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from m3jit.backends.cpu import pool
from m3jit.backends.cpu.cache import DiskCache
from m3jit.backends.cpu.engine import Engine
from m3jit.backends.cpu.runtime import CHUNKS_PER_THREAD, MAX_THREADS
from m3jit.backends.cpu.runtime_jobs import MOST_ITEMS
from m3jit.ir.loop import Kernel
from m3jit.ir.loop_builder import Builder
from m3jit.ir.plan import Barrier, Copy, Exit, FrameWord, Launch, Plan, PlanBlock, Scalar
from tests.backends.cpu_engines import engine
from tests.backends.test_cpu_region import FREE, chain_plan, const, frame_of

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def in_process(function: str, *args: int, seconds: int = 300) -> None:
    """Calls a function of this module in a fresh process, which must end by itself."""
    code = f"from tests.backends.test_cpu_jobs import *\n{function}{args!r}\nprint('done')"
    r = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=seconds, text=True)
    assert r.returncode == 0 and r.stdout == "done\n", r.stderr


def uneven_kernel() -> Kernel:
    """x[g, :] = x[g, :] * 3 + sum of 0 .. work[g] - 1; the groups' work differs, so that chunks end in odd orders."""
    b = Builder("uneven", 8)
    x, work = b.ptr("x", "rw", "i32"), b.ptr("work", "r", "i32")
    b.set_grid(b.scalar("n"))
    acc = b.var("i32", 0)
    with b.loop(0, b.cvt(b.load("i32", work, b.group), "i64"), 1) as i:
        acc.set(acc.get() + b.cvt(i, "i32"))
    b.store_lanes("i32", x, b.group * 8, b.load_lanes("i32", x, b.group * 8) * 3 + acc.get())
    return b.finish()


def odd_orders(threads: int, rounds: int) -> None:
    """Groups of very different length; every group is computed exactly once, whoever claims it."""
    kernel, rng = uneven_kernel(), np.random.default_rng(threads)
    x, work = (Scalar("frame", "ptr", attrs={"word": FREE + i}) for i in range(2))
    n = Scalar("frame", "i64", attrs={"word": FREE + 2})
    body: list = [x, work, n]
    for _ in range(10):
        body += [Launch(kernel, [x, work, n]), Barrier()]
    region = engine("native").region(Plan("uneven", FREE + 3, [PlanBlock("e", body=body, end=Exit(0, []))]))
    for r in range(rounds):
        groups = int(rng.integers(0, 70))
        w = (rng.integers(0, 2, groups) * rng.integers(0, 30000, groups)).astype(np.int32)
        sums = (w.astype(np.int64) * (w.astype(np.int64) - 1) // 2).astype(np.int32)
        got = np.arange(8 * groups + 8, dtype=np.int32)
        expected = got.copy()
        with np.errstate(over="ignore"):
            for _ in range(10):
                expected[:8 * groups] = expected[:8 * groups] * np.int32(3) + np.repeat(sums, 8)
        frame = frame_of(FREE + 3)
        frame[FREE:] = got.ctypes.data, w.ctypes.data, groups
        region.run(frame, threads)
        assert (got == expected).all(), (r, groups, np.flatnonzero(got != expected))


@pytest.mark.parametrize("threads", range(1, 8))
def test_chunks_claimed_in_odd_orders(threads):
    in_process("odd_orders", threads, 30)


def many_tiny_jobs(threads: int, jobs: int) -> None:
    """x += 1 on a few groups, `jobs` times, with pauses in which workers fall asleep."""
    b = Builder("inc", 8)
    p = b.ptr("p", "rw", "i32")
    b.set_grid(b.scalar("n"))
    b.store_lanes("i32", p, b.group * 8, b.load_lanes("i32", p, b.group * 8) + 1)
    kernel = b.finish()
    x, n = (Scalar("frame", t, attrs={"word": FREE + i}) for i, t in enumerate(("ptr", "i64")))
    body: list = [x, n]
    for _ in range(100):
        body += [Launch(kernel, [x, n]), Barrier()]
    region = engine("native").region(Plan("tiny", FREE + 2, [PlanBlock("e", body=body, end=Exit(0, []))]))
    data, frame = np.zeros(8 * 20, np.int32), frame_of(FREE + 2)
    call = region.bind(frame, threads)
    for i in range(jobs // 100):
        groups = i % 20 + 1
        frame[FREE:] = data.ctypes.data, groups
        data[:] = i
        call()
        assert (data[:8 * groups] == i + 100).all() and (data[8 * groups:] == i).all()
        if i % 100 == 99:
            time.sleep(0.003)


def test_a_hundred_thousand_tiny_launches():
    in_process("many_tiny_jobs", 3, 100_000)


def workers_wake_up(pauses: int) -> None:
    """After every pause, in which they fall asleep, the workers take chunks again; a lost wake-up would end that."""
    kernel, groups = uneven_kernel(), 64
    p = [Scalar("frame", "ptr", attrs={"word": FREE + i}) for i in range(2)]
    body = [*p, Launch(kernel, [*p, const(groups)]), Barrier()]
    region = engine("native").region(Plan("wake", FREE + 2, [PlanBlock("e", body=body, end=Exit(0, []))]))
    x, work, frame = np.zeros(8 * groups, np.int32), np.full(groups, 50_000, np.int32), frame_of(FREE + 2)
    frame[FREE:] = x.ctypes.data, work.ctypes.data
    call = region.bind(frame, 2)
    done = ctypes.c_int64.from_address(pool._pool.address)          # chunks that workers computed of the last job
    for _ in range(pauses):
        time.sleep(0.005)
        limit = time.monotonic() + 120
        call()
        while done.value == 0:
            assert time.monotonic() < limit, "the worker computes nothing"
            call()


def test_sleeping_workers_take_part_again():
    in_process("workers_wake_up", 50)


def test_more_threads_than_cores():
    in_process("many_tiny_jobs", 8, 20_000)
    in_process("odd_orders", 8, 30)


def under_load(threads: int) -> None:
    """The chain while other processes keep the cores busy and an idle pool of more workers exists."""
    loops = [subprocess.Popen([sys.executable, "-c",
                               "import os\nos.nice(19)\np = os.getppid()\nwhile os.getppid() == p: pass"])
             for _ in range(3)]
    try:
        region, n = engine("native").region(chain_plan(31, 64 * 100)), 6400
        reference = None
        for t in (1, 7, threads, threads, threads, 1):
            p, q, out = np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32)
            frame = frame_of(FREE + 5)
            frame[FREE:FREE + 3] = p.ctypes.data, q.ctypes.data, out.ctypes.data
            region.run(frame, t)
            reference = out.tobytes() if reference is None else reference
            assert out.tobytes() == reference
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize("threads", (2, 8))
def test_busy_neighbours(threads):
    in_process("under_load", threads)


def batch_region(items: int, n: int):
    """One batch of `items` launches of different lengths and a copy: y_i += i + 1 on i + 1 groups, then one barrier."""
    b = Builder("add_to", 8)
    p, k, count = b.ptr("p", "rw", "i32"), b.scalar("k", "i32"), b.scalar("count")
    b.set_grid(count)
    b.store_lanes("i32", p, b.group * 8, b.load_lanes("i32", p, b.group * 8) + k)
    kernel = b.finish()
    dst, src, *ys = (Scalar("frame", "ptr", attrs={"word": FREE + i}) for i in range(items + 2))
    body: list = [dst, src, *ys, Copy(dst, src, const(n))]
    body += [Launch(kernel, [y, const(i + 1), const(i)]) for i, y in enumerate(ys)]
    body.append(Barrier())
    return engine("native").region(Plan("batch", FREE + 2 + items, [PlanBlock("e", body=body, end=Exit(0, []))]))


@pytest.mark.parametrize("items", (1, 3, MOST_ITEMS, 2 * MOST_ITEMS + 5))
def test_independent_launches_form_a_batch(items):
    region, n = batch_region(items, 100_000), 100_000
    source = np.random.default_rng(items).integers(0, 256, n, dtype=np.uint8)
    for threads in (1, 2, 3, 5):
        target, ys = np.zeros(n, np.uint8), np.zeros((items, 8 * items), np.int32)
        frame = frame_of(FREE + 2 + items)
        frame[FREE:FREE + 2] = target.ctypes.data, source.ctypes.data
        frame[FREE + 2:] = [y.ctypes.data for y in ys]
        region.run(frame, threads)
        assert (target == source).all()
        for i, y in enumerate(ys):
            assert (y[:8 * i] == i + 1).all() and (y[8 * i:] == 0).all()


def test_the_largest_share_fits_its_ticket():
    assert MOST_ITEMS * CHUNKS_PER_THREAD < 1 << 16 and MAX_THREADS >= 8


def counted_claims() -> None:
    """Each claim of a chunk looks at the stop word once, which counts by two."""
    b = Builder("add_one", 8)
    p, count = b.ptr("p", "rw", "i32"), b.scalar("count")
    b.set_grid(count)
    b.store_lanes("i32", p, b.group * 8, b.load_lanes("i32", p, b.group * 8) + 1)
    kernel, counting = b.finish(), Engine("native", cache=DiskCache.off(), counted=True)

    def claims(*groups: int) -> int:
        ys = [Scalar("frame", "ptr", attrs={"word": FREE + i}) for i in range(len(groups))]
        body = [*ys, *(Launch(kernel, [y, const(n)]) for y, n in zip(ys, groups)), Barrier()]
        region = counting.region(Plan("batch", FREE + len(ys), [PlanBlock("e", body=body, end=Exit(0, []))]))
        frame, stop = frame_of(FREE + len(ys)), np.full(1, -(1 << 20), np.int32)
        arrays = [np.zeros((n, 8), np.int32) for n in groups]
        frame[FrameWord.STOP] = stop.ctypes.data
        frame[FREE:] = [a.ctypes.data for a in arrays]
        region.run(frame, 2)
        assert all((a == 1).all() for a in arrays)
        return (int(stop[0]) + (1 << 20)) // 2

    assert CHUNKS_PER_THREAD == 4
    assert claims(60) == 8 and claims(5) == 5
    assert claims(36, 12, 12) == 5 + 2 + 2
    assert claims(1000, 1, 10) == 8 + 1 + 2
    assert claims(1, 1, 1) == 3, "nothing worth sharing: item after item"


def test_launches_of_a_batch_share_the_chunks_by_their_groups():
    """In a process of its own: workers run the code of the engine that started them, and this one's counts."""
    in_process("counted_claims")
