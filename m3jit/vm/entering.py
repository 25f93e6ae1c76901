"""Who may touch a machine: its lock, for calls from any thread and for a run; and taking locks under Ctrl-C.

CPython runs signal handlers, and so raises KeyboardInterrupt, as a function in Python begins, behind a call of one in C
and before a jump back.  A lock that is taken in `__enter__` of a class in Python can therefore stay taken for ever, and
so can one whose `__exit__` is in Python.  So locks are given back by their own `__exit__`, which is in C, and where one
has to be taken otherwise, that it was taken is noted by the same call into C.
"""
from __future__ import annotations

import threading
import time
from itertools import compress
from operator import call
from typing import Any, Callable

from m3jit.vm.stopping import ATTENTION, TIMED_OUT

_AT_ONCE = (False,)                # not blocking


def take(lock: Any, held: list[Any], blocking: bool = True) -> None:
    """Acquire a lock and append it to `held`: both or, when KeyboardInterrupt comes, perhaps neither.  Not blocking:
    neither where another thread has it.  Whoever made the list releases what is in it, whatever happens."""
    held.extend(compress((lock,), map(lock.acquire, (blocking,))))


def is_free(lock: Any) -> bool:
    """Could this thread have the lock now?"""
    held: list[Any] = []
    try:
        take(lock, held, blocking=False)
    finally:
        for taken in held:
            taken.release()
    return bool(held)


def without(lock: Any, work: Callable[[], Any]) -> None:
    """Do it while others may have the lock, which this thread has; it has it again afterwards, also when one
    KeyboardInterrupt comes, which is then raised.  (A second one, before the jump back behind the first, may keep it
    from getting the lock.)"""
    given: list[None] = []
    held: list[Any] = []
    try:
        given.extend(map(call, (lock.release,)))
        work()
    finally:
        late: BaseException | None = None
        while given and not held:
            try:
                take(lock, held)
            except BaseException as e:                 # while it waited for the lock
                late = e
        if late is not None:
            raise late


class Entered:
    """The machine's lock, asked for while a run may hold it."""
    __slots__ = ("vm", "_locks", "_acquire", "__exit__")      # in a slot: the lock's own, and none in Python around it

    def __init__(self, vm: Any):
        lock = vm._lock
        self.vm, self._locks, self._acquire, self.__exit__ = vm, (lock,), lock.acquire, lock.__exit__

    def __enter__(self) -> None:
        held: list[Any] = []
        try:
            held.extend(compress(self._locks, map(self._acquire, _AT_ONCE)))       # `take`
            if not held:
                self._ask(held)
        except BaseException:
            for lock in held:
                lock.release()
            raise

    def _ask(self, held: list[Any]) -> None:
        """Take the lock from a run that holds it."""
        vm = self.vm
        vm._wanting += 1
        try:
            vm.stop_word.set(ATTENTION)
            take(self._locks[0], held)
        finally:
            vm._wanting -= 1


class Timed:
    """A run by a thread that has the lock: measures time, sets the timeout.  Whoever enters it clears `_runner` and
    `_timed` of the machine at the end: KeyboardInterrupt may come as `__exit__` begins."""

    def __init__(self, vm: Any):
        self.vm, self.timer = vm, None                 # type: ignore[var-annotated]

    def __enter__(self) -> None:
        vm = self.vm
        vm._timed, vm._runner = self, threading.get_ident()
        self.began = time.perf_counter()
        if vm.timeout is not None:
            self.timer = threading.Timer(vm.timeout, self._fire)
            self.timer.daemon = True
            self.timer.start()

    def _fire(self) -> None:
        if self.vm._timed is self:                     # its run still goes on
            self.vm.stop_word.set(TIMED_OUT)
            self.vm._wake()

    def __exit__(self, *_: object) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.vm.seconds += time.perf_counter() - self.began
