"""Shared by the command line's tests: commands in this process and in processes of their own."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from m3jit.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FOREVER = "LOADI r1, 0\nloop:\nADDI r1, r1, 1\nJUMP loop\n"
COMMAND = [sys.executable, "-m", "m3jit"]
LONG = 180                          # seconds that no command here takes, however loaded the machine is


class Result(NamedTuple):
    """What a command did."""
    code: int
    out: str
    err: str

    def clean(self) -> "Result":
        """The result, which must not look like a bug of m3jit."""
        assert "Traceback" not in self.err and "internal error" not in self.err and self.code != 70, self
        return self


def call(capfd: Any, *args: Any) -> Result:
    """Run a command in this process."""
    capfd.readouterr()
    code = main([str(a) for a in args])
    out, err = capfd.readouterr()
    return Result(code, out, err).clean()


def environment(**more: str) -> dict[str, str]:
    """A process finds the package of this checkout and writes no tracebacks."""
    kept = {k: v for k, v in os.environ.items() if k != "M3_DEBUG"}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def process(*args: Any, stdin: bytes = b"", timeout: float = LONG, env: dict[str, str] | None = None,
            cwd: Path | None = None) -> Result:
    """Run a command in a process of its own; a test fails when it hangs."""
    done = subprocess.run([*COMMAND, *map(str, args)], input=stdin, capture_output=True, timeout=timeout, cwd=cwd,
                          env=env or environment())
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode()).clean()


def start(*args: Any, **options: Any) -> subprocess.Popen:
    """Start a command with pipes; it hears Ctrl-C even where the tests run in the background.  command: what takes the
    arguments instead of m3jit."""
    options.setdefault("stdin", subprocess.DEVNULL)
    command = options.pop("command", COMMAND)
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([*command, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=environment(), **options)


def finish(child: subprocess.Popen, timeout: float = LONG) -> Result:
    """Wait for it; kill it and fail when it does not end."""
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise
    return Result(child.returncode, (out or b"").decode(), (err or b"").decode()).clean()


def source(folder: Path, text: str, name: str = "prog.m3asm") -> Path:
    """A source file."""
    path = folder / name
    path.write_text(text)
    return path
