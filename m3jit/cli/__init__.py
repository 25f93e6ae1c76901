"""The command line: `m3jit` and `python -m m3jit`.

Every command is a module of this package, imported when it is named; what a command needs beyond this package is
imported inside it, so that `m3jit --help` and a small program start without LLVM, numba or a model library.
"""
from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from typing import Any, Iterator, Sequence

from m3jit.cli.interrupts import raised_again
from m3jit.errors import (InternalError, M3Error, NoRoom, SinkClosed, Trap, UserError, brief, no_memory, no_thread,
                          printable)

LONGEST_NAME = 4096                                    # characters of a path in a message
USAGE, INTERRUPTED, CLOSED_PIPE, TERMINATED, MEMORY = 2, 130, 141, 143, 4
memory_limit: int | None = None                        # bytes: the --memory-limit that holds for the command


def debug() -> bool:
    """Does the user want tracebacks (M3_DEBUG=1 or more)?"""
    return os.environ.get("M3_DEBUG", "0") not in ("", "0")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code.  Errors become messages on standard error, never tracebacks."""
    _open_standard_streams()
    global memory_limit
    before = memory_limit = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with _memory_limit_of_before(), raised_again():
            code = _run(argv)
    except BaseException as error:
        code = report(error)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return _finish_output(code)


@contextlib.contextmanager
def _memory_limit_of_before() -> Iterator[None]:
    """A command's limit (`m3jit.cli.machine.limit_memory`) ends with it: the process may go on with other work."""
    try:
        import resource
        before = resource.getrlimit(resource.RLIMIT_DATA)
    except (ImportError, OSError):                     # a system without such limits
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # a lower hard limit that somebody set meanwhile stays
            resource.setrlimit(resource.RLIMIT_DATA, before)


def _run(argv: Sequence[str] | None) -> int:
    from click.exceptions import Exit
    from m3jit.cli.commands import group
    try:
        with warnings.catch_warnings(), \
                group.make_context("m3jit", list(sys.argv[1:] if argv is None else argv)) as context:
            warnings.showwarning = _show_warning
            warnings.simplefilter("default", UserWarning)
            result = group.invoke(context)
    except Exit as done:                               # --help and --version
        return done.exit_code
    return result if isinstance(result, int) else 0


def _show_warning(message: Warning | str, *_: Any) -> None:
    """A library's warning as a line of ours, without the place in the code that Python adds."""
    sys.stderr.write(f"warning: {printable(brief(str(message)))}\n")


def _open_standard_streams() -> None:
    """Standard streams that were closed: files opened next must not become them.  Writing to such an output fails."""
    for name, number, mode in (("stdin", 0, os.O_RDONLY), ("stdout", 1, os.O_RDONLY), ("stderr", 2, os.O_WRONLY)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, mode)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):             # a terminal that has no ≤ shows ? for it
            stream.reconfigure(errors="replace")


def _terminate(number: int, frame: Any) -> None:
    raise SystemExit(TERMINATED)


def report(error: BaseException) -> int:
    """Say what went wrong; the exit code."""
    if debug() and not isinstance(error, SystemExit):
        import traceback
        traceback.print_exception(error)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, (SinkClosed, BrokenPipeError)):
        return CLOSED_PIPE
    if isinstance(error, KeyboardInterrupt):
        return _say("interrupted", INTERRUPTED)
    missing = no_memory(error)
    if missing is not None:
        return _say(_without_memory(error, missing), MEMORY)
    if isinstance(error, InternalError):
        return _say(f"{error}\n(M3_DEBUG=1 shows where)", error.exit_code)
    if isinstance(error, M3Error):
        return _say(_worded(error), exit_code(error))
    if isinstance(error, OSError):
        where = f"{_named(error.filename)}: " if error.filename is not None else ""
        return _say(f"error: {where}{error.strerror or error}", 1)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):          # click's own
        return _usage(error)
    return _say(f"{InternalError(f'{type(error).__name__}: {error}')}\n(M3_DEBUG=1 shows where)", 70)


def _without_memory(error: BaseException, missing: BaseException) -> str:
    """What is said of an error that comes of `missing` memory: where, of what, whose limit it was, and what to do."""
    if isinstance(error, M3Error) and not isinstance(error, InternalError):       # its message says where and of what
        return f"{_worded(error)}; {_advice()}"
    what = "out of memory, or of threads" if no_thread(missing) else "out of memory"
    if memory_limit is not None:
        return f"error: {what}: {_advice()}"
    return f"error: {what}{f': {missing}' if str(missing) else ''}; {_advice()}"


def _advice() -> str:
    """Whose limit it was that memory met, and what to do."""
    if memory_limit is None:
        return "close other programs, or work on less at once"
    return f"this needs more than --memory-limit {size_text(memory_limit)}; give a larger one, or leave it out"


def explained(error: M3Error | OSError) -> str:
    """The message of an error behind which a command goes on."""
    return str(error) if no_memory(error) is None else f"{error}; {_advice()}"


def exit_code(error: M3Error | OSError) -> int:
    """What a command ends with that ends with this error."""
    if isinstance(error.__cause__, NoRoom) or no_memory(error) is not None:
        return MEMORY
    return error.exit_code if isinstance(error, M3Error) and not _of_the_system(error) else 1


def _worded(error: M3Error) -> str:
    """Its message, with a word in front that says what it is."""
    text = str(error)
    return text if _names_its_kind(text) else f"error: {text}"


def size_text(size: int) -> str:
    """Bytes as --memory-limit takes them: in the largest unit that has them with two decimals at most (1.5G, 1025M),
    else in mebibytes, rounded up."""
    units = (1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M")
    unit, name = next((u for u in units if size >= u[0] and size * 100 % u[0] == 0), units[-1])
    whole, hundredths = divmod(-(-size * 100 // unit), 100)
    return f"{whole}.{hundredths:02}".rstrip("0").rstrip(".") + name


def _of_the_system(error: M3Error) -> bool:
    """Did what a program writes or reads fail for a reason of the system (a full disk, a file that cannot be opened)?
    The program did nothing wrong then."""
    return isinstance(error, Trap) and isinstance(error.__cause__, UserError) and \
        isinstance(error.__cause__.__cause__, OSError)


def _named(filename: Any) -> str:
    """A path of an OSError, which may be bytes, a number, or empty."""
    return os.fsdecode(filename) if isinstance(filename, bytes) and filename else str(filename) or "''"


def _names_its_kind(text: str) -> bool:
    """Messages of the assembler and of traps begin with a place and carry their own word."""
    return ": error: " in text or "trap: " in text or text.startswith(("error:", "internal error:"))


def _usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    hint = f" (`{context.command_path} --help` lists what there is)" if context is not None else ""
    return _say(f"error: {brief(error.format_message().rstrip('.'))}{hint}", error.exit_code)


def _say(text: str, code: int) -> int:
    try:
        sys.stderr.write(printable(brief(text, LONGEST_NAME, None)) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):                      # nobody can hear it
        pass
    return code


def _finish_output(code: int) -> int:
    """Write out what Python still holds, here rather than at exit, where a closed pipe would print a traceback."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            if stream is sys.stdout and code == 0:
                named = error if not isinstance(error, OSError) or isinstance(error, BrokenPipeError) else \
                    OSError(error.errno, error.strerror, "standard output")
                code = report(named) if isinstance(error, OSError) else 1
            _silence(stream)
    return code


def _silence(stream: Any) -> None:
    """What is left in the buffer goes nowhere."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):                      # a stream without a descriptor, or closed: nothing can be left
        pass
