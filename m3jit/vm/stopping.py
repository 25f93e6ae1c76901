"""Stopping a run: the word that compiled code and the interpreter look at, and signals while native code runs."""
from __future__ import annotations

import signal
import socket
import threading
from contextlib import contextmanager
from functools import partial
from typing import Any, Iterator, Protocol

import numpy as np

ATTENTION, SIGNAL, INTERRUPT, STOPPED, TIMED_OUT = "attention", "signal", "interrupt", "stopped", "timeout"
_STRENGTH = {"": 0, ATTENTION: 1, SIGNAL: 2, INTERRUPT: 3, STOPPED: 4, TIMED_OUT: 4}
SOON, URGENT = 1, 2                  # what native code reads


class StopWord:
    """One flag, seen by native code as an int32: SOON, leave at the next loop head (ATTENTION: somebody wants the run
    to look around), or URGENT, leave between two kernels or pieces of one (every other reason).  SIGNAL and INTERRUPT
    replace ATTENTION; the first of the reasons that end a run stays until it is taken.

    URGENT drops what a region had computed, so what raises it again and again must get something done in between:
    INTERRUPT is raised when an interrupt becomes pending, and SIGNAL is URGENT once for each number (`heard`)."""

    def __init__(self) -> None:
        self.word = np.zeros(2, np.int32)            # compiled code reads the first; the second is URGENT or 0
        self.raised = False
        self.running: Any = None                     # the context whose turn it is
        self._also: np.ndarray | None = None         # a word that compiled code of several machines reads (`reach`)
        self._reason = ""
        self._lock = threading.RLock()               # a signal handler may interrupt `take`

    def set(self, reason: str) -> None:
        with self._lock:
            if _STRENGTH[reason] > _STRENGTH[self._reason]:
                self._reason = reason
                self.word[:] = (SOON, 0) if reason == ATTENTION else URGENT
                self._pass_on()
            self.raised = True

    def reach(self, also: np.ndarray | None) -> None:
        """From now on be URGENT in the first of these words too, now if it is; None: in none."""
        with self._lock:
            self._also = also
            self._pass_on()

    def _pass_on(self) -> None:
        if self._also is not None and self.word[1] == URGENT:
            self._also[0] = URGENT

    def heard(self, number: int) -> None:
        """A signal came.  It is URGENT, but for one that came since the running context got an instruction done: a
        timer that is faster than a region would bring it out again and again."""
        ctx = self.running
        with self._lock:
            again = ctx is not None and number in ctx.heard
            if ctx is not None:
                ctx.heard |= {number}
            self.set(ATTENTION if again else SIGNAL)

    def take(self) -> str:
        """The reason, lowering the flag ("" when it was not raised)."""
        with self._lock:
            reason, self._reason, self.raised = self._reason, "", False
            self.word[:] = 0
            return reason


class Hears(Protocol):
    """What is told of signals: a stop word, or several (a batch)."""
    def heard(self, number: int) -> None: ...


class _Listener:
    """A thread that hears of signals while the main thread is inside native code, and raises stop words then.

    Python runs its own signal handlers only between bytecodes of the main thread; the raised word brings the native
    code back there, and the handler (KeyboardInterrupt for Ctrl-C) runs."""

    def __init__(self) -> None:
        self.ear, self.mouth = socket.socketpair()
        self.mouth.setblocking(False)
        self.words: list[Hears] = []
        threading.Thread(target=self._listen, name="m3jit signals", daemon=True).start()

    def _listen(self) -> None:
        while numbers := self.ear.recv(64):            # Python writes the number of each signal, as a byte
            for word in list(self.words):
                for number in numbers:
                    word.heard(number)


_listener: _Listener | None = None


@contextmanager
def interruptible(word: Hears) -> Iterator[None]:
    """While inside, a signal reaches native code that polls `word`.  Does nothing outside the main thread, or where
    somebody else listens for signals already."""
    global _listener
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _listener is None:
        _listener = _Listener()
    words, ours = _listener.words, _listener.mouth.fileno()
    before: list[int] = []                             # noted by the call itself: no KeyboardInterrupt comes in between
    try:
        before.extend(map(partial(signal.set_wakeup_fd, warn_on_full_buffer=False), (ours,)))
    finally:
        if before and before[0] not in (-1, ours):
            signal.set_wakeup_fd(before[0])
    if before[0] not in (-1, ours):                    # ours: around this, or where KeyboardInterrupt came at the end
        yield
        return
    try:
        words.append(word)
        yield
    finally:
        try:
            if len(words) <= 1:
                signal.set_wakeup_fd(-1)
        finally:
            if word in words:
                words.remove(word)
