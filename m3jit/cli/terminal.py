"""Notes, progress and files on the user's terminal.  Everything here writes to standard error."""
from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from pathlib import Path
from typing import Iterator

from m3jit.cli.options import UsageError
from m3jit.errors import printable
from m3jit.new_file import NewFile

DELAY = 1.0                                            # seconds an activity may last before it is shown
PERIOD = 0.1
BAR = 24


def note(text: str) -> None:
    """A line on standard error."""
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


class Progress:
    """One line on a terminal for what has lasted over a second; nothing when standard error is no terminal.

    `with progress.activity("compiling"):` shows an activity of unknown length; `progress.step(what, done, total)` shows
    a bar.  The line is drawn by a thread of its own, so that it moves while native code runs, and is wiped at the end.
    """

    def __init__(self) -> None:
        self.on = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()
        self._text, self._began, self._done, self._total = "", 0.0, 0, 0
        self._drawn = False
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def activity(self, text: str) -> Iterator[None]:
        """Shows `text` and the seconds gone while inside."""
        before = (self._text, self._began, self._done, self._total)
        self._show(text, time.monotonic(), 0, 0)
        try:
            yield
        finally:
            self._show(*before)

    def step(self, what: str, done: int, total: int) -> None:
        """A step of something with a known end (bytes or pieces); done == total ends it."""
        if done >= total > 0:
            self._show("", 0.0, 0, 0)
        else:
            self._show(what, self._began if what == self._text else time.monotonic(), done, total)

    def _show(self, text: str, began: float, done: int, total: int) -> None:
        if not self.on:
            return
        with self._lock:
            self._text, self._began, self._done, self._total = text, began, done, total
            if not text:
                self._wanted.clear()
                self._wipe()
                return
            self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._draw_always, name="m3jit progress", daemon=True)
            self._thread.start()

    def _draw_always(self) -> None:
        while self._wanted.wait():
            with self._lock:
                if self._text and time.monotonic() - self._began >= DELAY:
                    sys.stderr.write(f"\r\x1b[K{self._line()}")
                    sys.stderr.flush()
                    self._drawn = True
            time.sleep(PERIOD)

    def _line(self) -> str:
        seconds = time.monotonic() - self._began
        if self._total <= 0:
            return f"{self._text} ... {seconds:.0f} s"
        part = min(self._done / self._total, 1.0)
        filled = round(part * BAR)
        amount = f" of {self._total / 1e6:.0f} MB" if self._total > 100_000 else f" of {self._total}"
        return f"{self._text} [{'#' * filled}{'.' * (BAR - filled)}] {100 * part:3.0f} %{amount}, {seconds:.0f} s"

    def _wipe(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False


def keep_inputs(output: str | None, *inputs: str, remedy: str = "give the output another name") -> None:
    """UsageError when an output file is one of the files a command reads: it would be lost."""
    for path in inputs:
        try:
            same = output not in (None, "-") and os.path.isfile(path) and os.path.samefile(output, path)
        except (OSError, ValueError):                  # the output is not there yet
            continue
        if same:
            raise UsageError(f"{output}: is the file that is read ({path}); it would be overwritten; {remedy}")


def write_file(path: str, data: bytes) -> None:
    """Write a whole file or none: a temporary file beside it takes its place when it is complete.

    "-" is standard output.  Devices and pipes are written directly; a link stays one, and a file that is replaced keeps
    its permissions.  OSError names the path."""
    if path == "-":
        try:
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None
        return
    try:
        _replace(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    except ValueError as error:                        # a NUL in the name
        raise UsageError(f"{path}: cannot be a file name: {error}") from None


def _replace(target: Path, data: bytes) -> None:
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is write-protected")
    with NewFile(target) as new:
        new.handle.write(data)
        new.commit()


def table(head: tuple[str, ...], rows: list[tuple], right: str = "") -> str:
    """Columns in plain text; `right` holds the numbers of the columns that are numbers ("12": the second and third)."""
    texts = [tuple(str(c) for c in row) for row in [head, *rows]]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    return "\n".join("  ".join(c.rjust(w) if str(i) in right else c.ljust(w)
                               for i, (c, w) in enumerate(zip(row, widths))).rstrip() for row in texts)
