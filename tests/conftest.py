"""Has Ctrl-C heard, and says why a worker of pytest-xdist went away, and how much memory the others took.

xdist reports a worker that is gone as "crashed" and no more.  faulthandler shows a crash of native code, but neither a
signal from outside (the kernel's, where memory is short, is one), nor a stack that overflows outside the main thread,
nor a pipe to the worker that was closed.  The exit status tells them apart."""
from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest

_causes: dict[Any, str] = {}                           # of workers that are gone
_killed_at_first: list[int] = []
_peaks: dict[str, int] = {}                            # MiB, of workers that ended as they should


def killed_for_memory() -> int:
    """How many processes the kernel has ended because memory was short (0 where it does not say)."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def ending(status: int | None) -> str:
    """An exit status of `subprocess` in words."""
    if status is None:
        return "its process still runs: the pipe to it was closed"
    if status >= 0:
        return f"its process ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    more = {"SIGKILL": "; short of memory, or killed by hand",
            "SIGSEGV": "; without a traceback above: a stack overflow outside the main thread"}.get(name, "")
    return f"its process was ended by {name}{more}"


def pytest_sessionstart(session: pytest.Session) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:      # as a shell starts what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _killed_at_first.append(killed_for_memory())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    if error is None:
        _peaks[node.gateway.id] = getattr(node, "workeroutput", {}).get("peak", 0)
        return
    process = getattr(node.gateway._io, "popen", None)
    if process is None:
        return
    try:
        status = process.wait(30)
    except Exception:                                  # subprocess.TimeoutExpired: a worker that has only lost its pipe
        status = None
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    killed = killed_for_memory() - _killed_at_first[0]
    _causes[node.gateway.id] = (f"{ending(status)}; processes killed for memory on this machine meanwhile: {killed}; "
                                f"most memory that an ended worker or child had: {largest} MiB")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):        # of a worker: what it hands to who started it
        session.config.workeroutput["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _peaks:
        peaks = ", ".join(f"{name} {peak}" for name, peak in sorted(_peaks.items()))
        terminalreporter.write_line(f"most memory of the workers, mapped files included, in MiB: {peaks}")


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any, sched: Any) -> None:
    name = getattr(getattr(report, "node", None), "gateway", None)
    cause = _causes.get(getattr(name, "id", None))
    if cause is not None:
        report.longrepr = f"{report.longrepr}\n{cause}"
