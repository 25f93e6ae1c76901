"""Worker threads: Python daemon threads that wait in native code, outside the interpreter lock.

One pool per process, made on the first launch with more than one thread and grown on demand.  Workers take chunks of
the jobs that a region publishes (runtime.py); no region waits for a worker that has none.  A launch that finds the pool
busy (another Python thread is in a region) runs alone on its own thread.  After a fork the child has no workers;
it starts its own pool at its next launch.
"""
from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time

from m3jit.backends.cpu.runtime import BUSY, MAX_THREADS, POOL_BYTES, READY

_START_SECONDS = 30.0


class PoolError(Exception):
    """The worker threads did not start."""


class Pool:
    """`threads - 1` workers around one shared memory block; `address` is the block (a region's `pool`)."""

    def __init__(self, worker: int, stop: int, keep: object):
        self._memory = ctypes.create_string_buffer(POOL_BYTES + 128)
        self.address = (ctypes.addressof(self._memory) + 127) & ~127
        self._worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(worker)
        self._stop = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(stop)
        self._keep = keep                   # the code the workers run
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def threads(self) -> int:
        """Threads a launch can use, the caller among them."""
        return len(self._threads) + 1

    def grow(self, threads: int) -> None:
        """Makes sure that a launch can use `threads` threads; returns when the new workers wait in native code."""
        if not 1 <= threads <= MAX_THREADS:
            raise ValueError(f"nthreads must be 1 .. {MAX_THREADS}, got {threads}")
        with self._lock:
            while self.threads < threads and not self._stopped:
                number = self.threads
                t = threading.Thread(target=self._worker, args=(self.address, number), daemon=True,
                                     name=f"m3jit-worker-{number}")
                t.start()
                self._await(number)
                self._threads.append(t)

    def _await(self, worker: int) -> None:
        ready = ctypes.c_int32.from_address(self.address + READY + 4 * worker)
        limit = time.monotonic() + _START_SECONDS
        while not ready.value:
            if time.monotonic() > limit:
                raise PoolError(f"worker thread {worker} did not start within {_START_SECONDS:.0f} s")
            time.sleep(0.0001)

    def stop(self) -> None:
        """Waits for the running launch and ends the workers.  Later launches run alone."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._stop(self.address, self.threads)
                for t in self._threads:
                    t.join(_START_SECONDS)
            self._threads.clear()

    def abandon(self) -> None:
        """In a forked child: the workers stayed behind.  Marked busy, so that launches bound before run alone."""
        ctypes.c_int32.from_address(self.address + BUSY).value = 1


_pool: Pool | None = None
_guard = threading.Lock()
_left_behind: list[Pool] = []
generation = [0]           # changes when pool addresses held elsewhere become invalid (after a fork)


def shared(worker: int, stop: int, keep: object) -> Pool:
    """The process's pool; the arguments (code addresses, and what keeps the code loaded) serve for making it."""
    global _pool
    pool = _pool
    if pool is None:
        with _guard:
            if _pool is None:
                _pool = Pool(worker, stop, keep)
            pool = _pool
    return pool


def _shutdown() -> None:
    if _pool is not None:
        _pool.stop()


def _forget() -> None:
    """In a forked child: start anew."""
    global _pool, _guard
    if _pool is not None:
        _pool.abandon()
        _left_behind.append(_pool)         # bound launches hold the address of its memory
    _pool, _guard = None, threading.Lock()
    generation[0] += 1


atexit.register(_shutdown)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
