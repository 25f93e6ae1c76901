"""How an instruction waits, and how whoever it waits for wakes the machine."""
from __future__ import annotations

import threading
import time
from typing import Any, Callable, Iterable

from m3jit.vm.entering import without

PATIENCE = 0.05


class Wait:
    """What a context waits for.  `ready()` is asked by the scheduler; `external`: the host can make it ready.  source:
    the source it waits for; until: when it is ready at the latest (`time.monotonic`); terms: what it waits for in plain
    values (m3jit.durable.contexts)."""
    __slots__ = ("ready", "what", "external", "source", "until", "terms")

    def __init__(self, ready: Callable[[], bool], what: str, external: bool, source: object = None,
                 until: float | None = None, terms: tuple = ()):
        self.ready, self.what, self.external, self.source, self.until = ready, what, external, source, until
        self.terms = terms


def patience(waits: Iterable[Wait]) -> float:
    """Seconds a machine sleeps without looking while all of its contexts wait: until the time of one is up, at most
    PATIENCE."""
    now = time.monotonic()
    return max(0.0, min([PATIENCE, *(w.until - now for w in waits if w.until is not None)]))


class Blocked(Exception):
    """Raised by an instruction that cannot go on yet: it has done nothing and is executed again later."""

    def __init__(self, wait: Wait):
        self.wait = wait


class Signal:
    """A lock with a condition: guards rings and input queues, and tells the machine that something changed."""
    # The lock's own methods lie in slots: in C, no KeyboardInterrupt comes between them and the lock.
    __slots__ = ("_lock", "_bells", "listeners", "__enter__", "__exit__")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bells: list[Any] = []                          # of those who wait: locks that `notify` releases
        self.listeners: list[Callable[[], object]] = []      # called at every change; they must not take locks
        self.__enter__, self.__exit__ = self._lock.__enter__, self._lock.__exit__

    def notify(self) -> None:
        with self._lock:
            bells, self._bells = self._bells, []
            for bell in bells:
                bell.release()
        for tell in list(self.listeners):
            tell()

    def wait(self, seconds: float) -> None:
        """Until something changes, at most that long.  The lock must be held, once; it is held again afterwards, also
        when KeyboardInterrupt comes."""
        bell = threading.Lock()
        bell.acquire()
        self._bells = [*self._bells, bell]
        try:
            without(self._lock, lambda: bell.acquire(timeout=seconds))
        finally:
            self._bells = [b for b in self._bells if b is not bell]

    def block(self, ready: Callable[[], bool], what: str, external: bool, source: object = None) -> None:
        """Leave the instruction until `ready`."""
        raise Blocked(Wait(ready, what, external, source))
