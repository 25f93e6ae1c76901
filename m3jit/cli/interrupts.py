"""Ctrl-C in a conversation, one handler from its first prompt to its end; and signals that come in a finaliser.

CPython runs a signal's handler between any two bytecodes of the main thread, also in a finaliser, where an exception is
written to standard error and lost.  So the handler raises only while a line is waited for; otherwise it leaves word,
and what is under way looks at that: an answer is stopped, the editor of corrections takes it as a key.  Who presses
twice has no patience: that raises KeyboardInterrupt wherever it is.
"""
from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any, Callable, Iterator

LATER = 0.05                                           # seconds until a finaliser has surely ended


@contextlib.contextmanager
def raised_again() -> Iterator[None]:
    """While inside, the KeyboardInterrupt or SystemExit that a signal's handler raised where CPython drops exceptions
    (a finaliser, a callback from C) is not written: the signal comes again a little later."""
    main = threading.main_thread()
    if threading.current_thread() is not main or not hasattr(signal, "pthread_kill"):
        yield
        return
    before, timers = sys.unraisablehook, []            # type: ignore[var-annotated]

    def hook(dropped: Any) -> None:
        number = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}.get(dropped.exc_type)
        if number is None or threading.current_thread() is not main:
            before(dropped)
            return
        timer = threading.Timer(LATER, signal.pthread_kill, (main.ident, number))
        timer.daemon = True
        timers.append(timer)
        timer.start()
    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.cancel()


class Interrupts:
    """`presses`: those since the last line, answer or key that nothing has answered yet."""

    def __init__(self) -> None:
        self.presses = 0
        self._line: list[str] | None = None            # the line that is waited for, when it has come; None: nothing is
        self._taking = self._as_keys = False
        self._stop: Callable[[], Any] | None = None
        self._pipe: tuple[int, int] | None = None

    def _pressed(self, *_: Any) -> None:
        if self._as_keys:
            self._write()
            return
        if self._line is not None and not self._line:
            raise KeyboardInterrupt                    # a finaliser drops it, and it comes again: still waiting
        if self._line is None and not self._taking:    # between two prompts
            self.presses = 1
            return
        self.presses += 1
        if self.presses > 1:
            raise KeyboardInterrupt
        if self._stop is not None:
            self._stop()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """While inside, Ctrl-C comes here.  Inside another one, and outside the main thread, it changes nothing."""
        if threading.current_thread() is not threading.main_thread() or \
                signal.getsignal(signal.SIGINT) == self._pressed:
            yield
            return
        before = signal.signal(signal.SIGINT, self._pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """While a line is obeyed."""
        with self.handled():
            before, self._taking = self._taking, True
            try:
                yield
            finally:
                self._taking = before
                if self._line is None and not before:  # nobody waits for lines here: it has been obeyed
                    self.presses = 0

    def line(self, read: Callable[[str], str], prompt: str) -> str:
        """read(prompt).  KeyboardInterrupt: Ctrl-C came before it had a line; later it belongs to that line."""
        got: list[str] = []
        try:
            self._line = got
            if self.presses:
                self.presses = 0
                raise KeyboardInterrupt
            got.extend(map(read, (prompt,)))           # in one call: what comes behind `read` sees the line
        except KeyboardInterrupt:
            self._line = None                          # one is enough to leave the prompt
            raise
        return got[0]

    @contextlib.contextmanager
    def answering(self, stop: Callable[[], Any]) -> Iterator[None]:
        """While an answer comes: Ctrl-C stops it, also one that came since the line did."""
        self._stop = stop
        try:
            if self.presses:
                stop()
            yield
        finally:
            self.presses = 0                           # one that comes behind this is for what follows
            self._stop = None

    @contextlib.contextmanager
    def as_keys(self) -> Iterator[None]:
        """While keys are read: Ctrl-C makes `file` readable, also one that came before.  One that no key was read for
        belongs to what follows."""
        self._as_keys = True
        try:
            if self.presses:
                self.presses = 0
                self._write()
            yield
        finally:
            self._as_keys = False
            with contextlib.suppress(BlockingIOError):           # nothing came
                if os.read(self.file, 64):
                    self.presses = 1

    @property
    def file(self) -> int:
        """A descriptor that can be read when Ctrl-C came as a key."""
        return self._both()[0]

    def _both(self) -> tuple[int, int]:
        if self._pipe is None:
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
        return self._pipe

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):     # full: there is enough to read
            os.write(self._both()[1], b"x")

    def close(self) -> None:
        """Give the descriptors back."""
        if self._pipe is not None:
            for end in self._pipe:
                os.close(end)
            self._pipe = None
