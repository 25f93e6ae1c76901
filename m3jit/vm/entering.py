"""Who may touch a machine: its lock, for calls from any thread and for a run."""
from __future__ import annotations

import threading
import time
from typing import Any

from m3jit.vm.stopping import ATTENTION, TIMED_OUT


class Entered:
    """The machine's lock, asked for while a run may hold it."""

    def __init__(self, vm: Any):
        self.vm, self._acquire, self._release = vm, vm._lock.acquire, vm._lock.release

    def __enter__(self) -> None:
        if self._acquire(False):
            return
        vm = self.vm
        vm._wanting += 1
        try:
            vm.stop_word.set(ATTENTION)
            vm._lock.acquire()
        finally:
            vm._wanting -= 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._release()


class Timed:
    """A run: holds the lock, measures time, sets the timeout."""

    def __init__(self, vm: Any):
        self.vm, self.timer = vm, None                 # type: ignore[var-annotated]

    def __enter__(self) -> None:
        vm = self.vm
        vm._lock.acquire()
        vm._runner = threading.get_ident()
        self.began = time.perf_counter()
        if vm.timeout is not None:
            self.timer = threading.Timer(vm.timeout, self._fire)
            self.timer.daemon = True
            self.timer.start()

    def _fire(self) -> None:
        self.vm.stop_word.set(TIMED_OUT)
        self.vm._wake()

    def __exit__(self, *_: object) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.vm.seconds += time.perf_counter() - self.began
        self.vm._runner = None
        self.vm._lock.release()
