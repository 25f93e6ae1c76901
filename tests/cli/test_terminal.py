"""Progress on a terminal, tables."""
from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time

from m3jit.cli import terminal
from tests.cli.command import COMMAND, LONG, environment


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(monkeypatch, delay: float = 0.0) -> Screen:
    monkeypatch.setattr(terminal, "DELAY", delay)
    monkeypatch.setattr(terminal, "PERIOD", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    out = Screen()
    monkeypatch.setattr(sys, "stderr", out)
    return out


def wait_for(out: Screen, pattern: str) -> None:
    end = time.monotonic() + LONG
    while not re.search(pattern, out.getvalue()) and time.monotonic() < end:
        time.sleep(0.01)
    assert re.search(pattern, out.getvalue())


def test_activities_show_and_vanish(monkeypatch):
    out = screen(monkeypatch)
    progress = terminal.Progress()
    with progress.activity("compiling main"):
        wait_for(out, r"compiling main \.\.\. \d+ s")
        with progress.activity("repacking"):
            wait_for(out, r"repacking \.\.\. \d+ s")
    assert out.getvalue().endswith("\r\x1b[K")
    length = len(out.getvalue())
    time.sleep(0.05)
    assert len(out.getvalue()) == length


def test_bars(monkeypatch):
    out = screen(monkeypatch)
    progress = terminal.Progress()
    progress.step("downloading", 46_000_000, 92_000_000)
    wait_for(out, re.escape("downloading [############............]  50 % of 92 MB"))
    progress.step("downloading", 92_000_000, 92_000_000)
    assert out.getvalue().endswith("\r\x1b[K")


def test_short_work_and_pipes_show_nothing(monkeypatch):
    out = screen(monkeypatch, delay=30.0)
    with terminal.Progress().activity("quick"):
        time.sleep(0.05)
    assert out.getvalue() == ""
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    monkeypatch.setattr(terminal, "DELAY", 0.0)
    with terminal.Progress().activity("unseen"):
        time.sleep(0.05)
    assert plain.getvalue() == ""


def test_on_a_terminal_messages_start_on_their_own_line(tmp_path):
    """A real pseudo-terminal for all three streams."""
    prog = tmp_path / "prog.m3asm"
    prog.write_text('LOADS r1, "no line feed"\nSTREAM r1\nLOADI r2, 0\nASSERT r2\nHALT\n')
    ours, theirs = pty.openpty()
    child = subprocess.Popen([*COMMAND, "run", str(prog)], stdin=theirs, stdout=theirs, stderr=theirs,
                             env=environment())
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 4096):
            said += chunk
    except OSError:                                    # how Linux reports the end of a terminal
        pass
    assert child.wait(LONG) == 3
    os.close(ours)
    assert said.startswith(b"no line feed\r\n") and b"assertion 0 failed" in said


def test_tables_align():
    assert terminal.table(("name", "n"), [("a", 5), ("long", 1000)], "1") == "name     n\na        5\nlong  1000"
