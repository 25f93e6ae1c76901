"""Stopping a run: the word that compiled code and the interpreter look at, and Ctrl-C while native code runs."""
from __future__ import annotations

import signal
import socket
import threading
from contextlib import contextmanager
from typing import Iterator

import numpy as np

ATTENTION, INTERRUPT, STOPPED, TIMED_OUT = "attention", "interrupt", "stopped", "timeout"
_STRENGTH = {"": 0, ATTENTION: 1, INTERRUPT: 2, STOPPED: 3, TIMED_OUT: 3}
SOON, URGENT = 1, 2                  # what native code reads


class StopWord:
    """One flag, seen by native code as an int32: SOON, leave at the next loop head (ATTENTION: somebody wants the run to
    look around), or URGENT, leave between two kernels or pieces of one (every other reason).  INTERRUPT replaces
    ATTENTION; the first of the reasons that end a run stays until it is taken."""

    def __init__(self) -> None:
        self.word = np.zeros(1, np.int32)            # compiled code reads this
        self.raised = False
        self._reason = ""
        self._lock = threading.RLock()               # a signal handler may interrupt `take`

    def set(self, reason: str) -> None:
        with self._lock:
            if _STRENGTH[reason] > _STRENGTH[self._reason]:
                self._reason = reason
                self.word[0] = SOON if reason == ATTENTION else URGENT
            self.raised = True

    def take(self) -> str:
        """The reason, lowering the flag ("" when it was not raised)."""
        with self._lock:
            reason, self._reason, self.raised = self._reason, "", False
            self.word[0] = 0
            return reason


class _Listener:
    """A thread that hears of signals while the main thread is inside native code, and raises stop words then.

    Python runs its own signal handlers only between bytecodes of the main thread; the raised word brings the native
    code back there, and the handler (KeyboardInterrupt for Ctrl-C) runs."""

    def __init__(self) -> None:
        self.ear, self.mouth = socket.socketpair()
        self.mouth.setblocking(False)
        self.words: list[StopWord] = []
        threading.Thread(target=self._listen, name="m3jit signals", daemon=True).start()

    def _listen(self) -> None:
        while self.ear.recv(64):
            for word in list(self.words):
                word.set(INTERRUPT)


_listener: _Listener | None = None


@contextmanager
def interruptible(word: StopWord) -> Iterator[None]:
    """While inside, a signal reaches native code that polls `word`.  Does nothing outside the main thread, or where
    somebody else listens for signals already."""
    global _listener
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _listener is None:
        _listener = _Listener()
    before = signal.set_wakeup_fd(_listener.mouth.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        yield
        return
    _listener.words.append(word)
    try:
        yield
    finally:
        _listener.words.remove(word)
        signal.set_wakeup_fd(-1)
