"""The disk cache of object code, and the worker pool: corruption, concurrency, read-only directories, forks."""
from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from m3jit.backends.cpu.cache import DiskCache, default_directory
from m3jit.backends.cpu.engine import Engine
from tests.backends.cpu_engines import engine
from tests.backends.test_cpu_code import scale_kernel
from tests.backends.test_cpu_region import FREE, chain_plan, frame_of


def run_scale(e: Engine) -> np.ndarray:
    x, y = np.arange(100, dtype=np.float16), np.zeros(100, np.float16)
    e.kernel(scale_kernel())([x, y, 100])
    return y


EXPECTED = (np.arange(100.0) ** 2 + np.arange(100)).astype(np.float16)


def test_second_engine_compiles_nothing(tmp_path):
    first = Engine("native", cache=DiskCache(tmp_path))
    assert (run_scale(first) == EXPECTED).all()
    assert first.statistics.compiled == 2 and first.statistics.cached == 0          # the kernel and its launch
    second = Engine("native", cache=DiskCache(tmp_path))
    assert (run_scale(second) == EXPECTED).all()
    assert second.statistics.compiled == 0 and second.statistics.cached == 2
    assert "cached 2" in str(second.statistics)
    assert run_scale(second) is not None and second.statistics.reused >= 2


def test_levels_do_not_share_code(tmp_path):
    run_scale(Engine("baseline", cache=DiskCache(tmp_path)))
    other = Engine("native", cache=DiskCache(tmp_path))
    run_scale(other)
    assert other.statistics.compiled == 2


@pytest.mark.parametrize("damage", ("flip", "truncate", "empty", "foreign"))
def test_damaged_files_are_compiled_anew(tmp_path, damage):
    run_scale(Engine("native", cache=DiskCache(tmp_path)))
    files = [path for _, _, path in DiskCache(tmp_path).entries()]
    assert len(files) == 3
    for path in files:
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[len(data) // 2] ^= 1
        data = {"truncate": data[:-5], "empty": b"", "foreign": b"#!/bin/sh\n"}.get(damage, data)
        path.write_bytes(bytes(data))
    cache = DiskCache(tmp_path)
    again = Engine("native", cache=cache)
    assert (run_scale(again) == EXPECTED).all()
    assert cache.corrupt == 3 and again.statistics.compiled == 2
    third = Engine("native", cache=DiskCache(tmp_path))
    run_scale(third)
    assert third.statistics.compiled == 0


def test_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = DiskCache(tmp_path / "file" / "below")
    assert (run_scale(Engine("native", cache=cache)) == EXPECTED).all()
    assert not cache.enabled and "below" in cache.reason


def test_environment_chooses_the_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("M3JIT_CACHE_DIR", str(tmp_path))
    assert default_directory() == tmp_path / "cpu"
    monkeypatch.setenv("M3JIT_CACHE_DIR", "")
    assert default_directory() is None and not DiskCache().enabled
    monkeypatch.delenv("M3JIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_directory() == tmp_path / "x" / "m3jit" / "cpu"


def test_least_recently_used_files_go_first(tmp_path):
    cache = DiskCache(tmp_path, limit_bytes=10_000)
    for i in range(20):
        cache.store(f"{i:040x}", bytes(900))
        os.utime(cache._path(f"{i:040x}"), (1000 + i, 1000 + i))
    assert cache.load(f"{3:040x}") is not None                 # used now: the youngest
    cache.trim()
    kept = {path.name for _, _, path in cache.entries()}
    assert sum(size for _, size, _ in cache.entries()) <= 10_000
    assert f"{3:040x}" in kept and f"{19:040x}" in kept and f"{0:040x}" not in kept


def test_one_file_in_64_has_the_cache_looked_through(tmp_path, monkeypatch):
    """Whoever makes it: a process that compiles a few functions does not pay for all that others left."""
    looks = []
    monkeypatch.setattr(DiskCache, "trim", lambda cache: looks.append(cache))
    for i in range(320):
        DiskCache(tmp_path).store(hashlib.blake2b(bytes([i % 256, i // 256]), digest_size=16).hexdigest(), b"code")
    assert 1 <= len(looks) <= 15 and len(DiskCache(tmp_path).entries()) == 320


_PROCESS = """
import sys
from m3jit.backends.cpu.cache import DiskCache
from m3jit.backends.cpu.engine import Engine
from tests.backends.test_cpu_cache import EXPECTED, run_scale
for _ in range(3):
    assert (run_scale(Engine("native", cache=DiskCache(sys.argv[1]))) == EXPECTED).all()
"""


def test_processes_share_the_cache(tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    ps = [subprocess.Popen([sys.executable, "-c", _PROCESS, str(tmp_path)], cwd=root, stderr=subprocess.PIPE)
          for _ in range(3)]
    for p in ps:
        _, err = p.communicate(timeout=120)
        assert p.returncode == 0, err.decode()
    assert len(DiskCache(tmp_path).entries()) == 3             # no temporary file is left


# -- worker threads ---------------------------------------------------------------------------------------------
def chain_frame(n: int):
    p, q, out = np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32)
    frame = frame_of(FREE + 5)
    frame[FREE:FREE + 3] = p.ctypes.data, q.ctypes.data, out.ctypes.data
    return frame, out, (p, q)


def test_concurrent_callers_get_the_same_bytes():
    region = engine("native").region(chain_plan(20, 64 * 100))
    frame, reference, keep = chain_frame(6400)
    region.run(frame, 1)

    def caller(_):
        for _ in range(20):
            mine, out, keep = chain_frame(6400)
            region.bind(mine, 2)()
            assert (out == reference).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(caller, range(4)))


def test_one_thread_starts_no_worker():
    code = ("import threading, numpy as np\n"
            "from tests.backends.test_cpu_cache import *\n"
            "r = engine('native').region(chain_plan(3, 640)); f, out, keep = chain_frame(640)\n"
            "r.run(f, 1); assert threading.active_count() == 1\n"
            "r.run(f, 3); assert threading.active_count() == 3\n"
            "print('done')\n")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    r = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, timeout=180, text=True)
    assert r.returncode == 0 and r.stdout == "done\n", r.stderr     # and the process ends by itself


def test_a_forked_child_has_its_own_workers():
    code = ("import os\n"
            "from tests.backends.test_cpu_cache import *\n"
            "r = engine('native').region(chain_plan(3, 640)); f, out, keep = chain_frame(640)\n"
            "r.run(f, 2); before = out.tobytes(); bound = r.bind(f, 2)\n"
            "pid = os.fork()\n"
            "keep[0][:] = np.arange(640); keep[1][:] = 0; out[:] = 0\n"
            "r.run(f, 2); ok = out.tobytes() == before\n"
            "keep[0][:] = np.arange(640); keep[1][:] = 0; out[:] = 0\n"
            "bound(); ok = ok and out.tobytes() == before\n"
            "if pid == 0: os._exit(0 if ok else 1)\n"
            "assert ok and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    r = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=root, capture_output=True, timeout=180,
                       text=True)
    assert r.returncode == 0, r.stderr


def test_sleeping_workers_wake_up():
    """Workers sleep after about a millisecond; a launch long after must reach them."""
    region = engine("native").region(chain_plan(3, 6400))
    reference = None
    for wait in (0.0, 0.05, 0.2):
        threading.Event().wait(wait)
        frame, out, keep = chain_frame(6400)
        region.run(frame, 3)
        reference = out.tobytes() if reference is None else reference
        assert out.tobytes() == reference


def test_a_plan_that_nobody_has_is_let_go_of():
    """Its code stays: another plan of the same text does not compile again."""
    code = engine("native")
    plan = chain_plan(5, 640)
    region = code.region(plan)
    assert code.region(plan) is region
    gone, compiled = weakref.ref(region), code.statistics.compiled
    del plan, region
    gc.collect()
    assert gone() is None
    code.region(chain_plan(5, 640))
    assert code.statistics.compiled == compiled
