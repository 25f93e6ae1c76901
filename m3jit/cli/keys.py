"""Single keys of a terminal: its mode, which is put back on every way out, and what the bytes of a key mean.

POSIX only (`available` says whether it can be done): elsewhere, and without a terminal, lines are all there is.
"""
from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from typing import Any, Callable, Iterator

try:
    import termios
except ImportError:                 # not POSIX
    termios = None                  # type: ignore[assignment]

ESCAPE_SECONDS = 0.05               # what follows an Esc later than that is another key
ESC, ENTER, BACKSPACE, LEFT, RIGHT, UP, DOWN, HOME, END, INTERRUPT, EOF = (
    "esc", "enter", "backspace", "left", "right", "up", "down", "home", "end", "interrupt", "eof")
_FINAL = {"A": UP, "B": DOWN, "C": RIGHT, "D": LEFT, "H": HOME, "F": END}
_NUMBERED = {"1": HOME, "7": HOME, "4": END, "8": END}
_CONTROL = {"\r": ENTER, "\n": ENTER, "\x7f": BACKSPACE, "\x08": BACKSPACE, "\x03": INTERRUPT, "\x04": EOF,
            "\x01": HOME, "\x05": END, "\x02": LEFT, "\x06": RIGHT, "\x10": UP, "\x0e": DOWN}
# Bracketed paste (xterm's control sequences, DEC private mode 2004): the terminal says where a paste begins and ends.
_PASTES, _NO_PASTES = b"\x1b[?2004h", b"\x1b[?2004l"
_PASTE, _PASTED = "200", "201"
_PASTE_BEGINS = f"\x1b[{_PASTE}~".encode()


def available() -> bool:
    """Whether standard input is a terminal whose keys can be read one by one, and a screen is there to draw on."""
    return termios is not None and sys.stdin.isatty() and sys.stderr.isatty() and \
        os.environ.get("TERM", "dumb") not in ("dumb", "")


@contextlib.contextmanager
def single_keys(redraw: Callable[[], Any] = lambda: None, pastes: bool = False) -> Iterator[int]:
    """While inside, keys come one by one and are not shown; gives the terminal's file descriptor.  pastes: what is
    pasted is marked, so that `KeyReader` can tell it from keys.

    Ctrl-C and Ctrl-Z still are signals.  When the process is put to sleep the mode of before holds, and `redraw` is
    called when it wakes up.  The mode of before also comes back when it is ended by a signal."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    mode = termios.tcgetattr(fd)
    mode[3] &= ~(termios.ICANON | termios.ECHO)
    mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0

    def enter() -> None:
        termios.tcsetattr(fd, termios.TCSADRAIN, mode)
        if pastes:
            os.write(sys.stderr.fileno(), _PASTES)     # not through its buffer: a signal may come while that is written

    def leave() -> None:
        if pastes:
            os.write(sys.stderr.fileno(), _NO_PASTES)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
    with _signals(enter, leave, redraw):
        enter()
        try:
            yield fd
        finally:
            leave()


@contextlib.contextmanager
def _signals(enter: Callable[[], None], leave: Callable[[], None], redraw: Callable[[], Any]) -> Iterator[None]:
    """Handlers that leave the mode before a signal does what it does by default.  Nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, _: Any) -> None:
        leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        if number == signal.SIGTSTP:                   # awake again
            signal.signal(number, pass_on)
            enter()
            redraw()
    kept = {}
    for number in (signal.SIGTSTP, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            kept[number] = signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


class KeyReader:
    """Keys of a terminal: names of this module, or the character that a key gives.  Of what is pasted each character is
    one; ends of lines are "\\n" there, and end nothing.

    interrupted: a descriptor; when it can be read, INTERRUPT is the next key."""

    def __init__(self, fd: int, read: Callable[[int, int], bytes] = os.read,
                 waiting: Callable[[int, float | None], bool] | None = None, interrupted: int | None = None):
        self._fd, self._read, self._held, self._interrupted = fd, read, b"", interrupted
        self._pasting = self._return = False           # inside a paste; its last character was a carriage return
        self._waiting = waiting or (lambda fd, seconds: bool(select.select([fd], [], [], seconds)[0]))

    @property
    def held(self) -> bool:
        """Whether something has been read that no key was made of yet."""
        return bool(self._held)

    def key(self) -> str:
        """The next key, waiting for it; "" for one that has no meaning here."""
        if self._came_interrupt():
            # The terminal dropped what was not read yet, so the end of a paste does not come; nor is its rest typed.
            self._held = b"" if self._pasting else self._held.partition(_PASTE_BEGINS)[0]
            self._pasting = self._return = False
            return INTERRUPT
        first = self._byte(None)
        if not first:
            return EOF
        if first == b"\x1b":
            return self._escape()
        if first[0] < 0x80:
            text = first.decode()
            if self._pasting:
                return self._pasted(text)
            return _CONTROL.get(text, text if text.isprintable() else "")
        self._return = False
        length = 2 if first[0] < 0xE0 else 3 if first[0] < 0xF0 else 4
        raw = first
        while len(raw) < length and (more := self._byte(ESCAPE_SECONDS)):
            raw += more
        text = raw.decode("utf-8", "replace")
        return text if text.isprintable() and "\ufffd" not in text else ""

    def _came_interrupt(self) -> bool:
        """Wait for a key or an interrupt; whether it is the latter."""
        if self._interrupted is None:
            return False
        waits = [self._interrupted] if self._held else [self._interrupted, self._fd]
        if self._interrupted not in select.select(waits, [], [], 0 if self._held else None)[0]:
            return False
        os.read(self._interrupted, 64)
        return True

    def _pasted(self, text: str) -> str:
        """What an ASCII character means in a paste: terminals send the carriage return of Enter for an end of line."""
        before, self._return = self._return, text == "\r"
        if text in "\r\n":
            return "" if before and text == "\n" else "\n"
        return text if text.isprintable() or text == "\t" else ""

    def _byte(self, seconds: float | None) -> bytes:
        """One byte; none when there is none in time, or at the end of the input."""
        if not self._held:
            if seconds is not None and not self._waiting(self._fd, seconds):
                return b""
            self._held = self._read(self._fd, 64)
        byte, self._held = self._held[:1], self._held[1:]
        return byte

    def _escape(self) -> str:
        """Esc alone, or the key behind it: Esc [ numbers letter, Esc O letter, Esc [ number ~.  In a paste only its end
        and Esc alone mean anything."""
        kind = self._byte(ESCAPE_SECONDS)
        if not kind:
            self._pasting = False
            return ESC
        if kind not in (b"[", b"O"):
            return ""
        numbers = ""
        while byte := self._byte(ESCAPE_SECONDS):
            text = byte.decode("latin-1")
            if "@" <= text <= "~":
                if text == "~" and numbers in (_PASTE, _PASTED):
                    self._pasting, self._return = numbers == _PASTE, False
                if self._pasting:
                    return ""
                return _NUMBERED.get(numbers, "") if text == "~" else _FINAL.get(text, "")
            numbers += text
        return ""


class Watch:
    """Calls `pressed` from a thread of its own when Esc is pressed; keys before it are dropped, those behind it stay.
    `close` ends the thread."""

    def __init__(self, fd: int, reader: KeyReader, pressed: Callable[[], Any]):
        self._fd, self._reader, self._pressed = fd, reader, pressed
        self._wake, self._end = os.pipe()
        self._thread = threading.Thread(target=self._listen, name="m3jit keys", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            if not self._reader.held and self._wake in select.select([self._fd, self._wake], [], [])[0]:
                return
            key = self._reader.key()
            if key == ESC:
                self._pressed()
            if key in (ESC, EOF):                      # EOF: nothing more will come
                return

    def close(self) -> None:
        os.write(self._end, b"x")
        self._thread.join()
        os.close(self._wake)
        os.close(self._end)
