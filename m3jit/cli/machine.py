"""A machine as the command line wants it: input from options or standard input, progress, limits on memory."""
from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any, Iterable, Iterator

from m3jit import cli
from m3jit.cli.terminal import Progress, note
from m3jit.vm.sources import QueueSource
from m3jit.vm.vm import VM
from m3jit.vm.waiting import Wait

STDIN = 0
_CHUNK = 1 << 16


class StandardInput(QueueSource):
    """Standard input, read by a thread that starts with the program's first SENSE, so that stopping and timeouts work
    while nothing comes.  Items: the whole text without its last line feed, or one line each.

    terminal: of this machine; what is typed while its program works interrupts it (`VM.push_input`)."""

    def __init__(self, name: str, signal: Any, lines: bool, first: Iterable[str] = (), terminal: VM | None = None):
        super().__init__(name, signal, waits=True)
        self._lines, self._started, self._terminal = lines, False, terminal
        self.goes_on = terminal is not None            # nobody types it again
        self.items.extend(first)

    def read(self, position: int, count: int, blocking: bool) -> tuple[Any, int]:
        self._begin(position)
        return super().read(position, count, blocking)

    def wait_for_item(self, position: int) -> Wait:
        self._begin(position)
        return super().wait_for_item(position)

    def _begin(self, position: int) -> None:
        """Read, when an item is wanted that is not there."""
        if not self._started and not self._has(position):
            self._started = True
            threading.Thread(target=self._pump, name="m3jit standard input", daemon=True).start()

    def _pump(self) -> None:
        held = b""
        # os.read: a thread blocked in sys.stdin would hold its lock when the interpreter ends.
        while chunk := self._next_chunk():
            held += chunk
            if self._lines:
                *done, held = held.split(b"\n")
                for line in done:
                    self._come(line.decode("utf-8", "replace"))
        if held:
            self.push(held.decode("utf-8", "replace").removesuffix("\n"))
        self.close()

    def _come(self, line: str) -> None:
        if self._terminal is None:
            self.push(line)
        else:
            self._terminal.hand_over(self, line, True)

    @staticmethod
    def _next_chunk() -> bytes:
        try:
            return os.read(STDIN, _CHUNK)
        except OSError:                                # closed, or a directory
            return b""


def give_input(vm: VM, prompts: list[str], lines: bool, taken: bool = False) -> None:
    """Connect the program's USER_INPUT: the prompts in order, else standard input (lines of a terminal, or all of a
    pipe).  taken: standard input belongs to somebody else; the program then has no input."""
    if prompts:
        for text in prompts:
            vm.push_input(text)
        return
    if taken:
        return
    terminal = os.isatty(STDIN) if _open(STDIN) else False
    if _open(STDIN):
        vm.set_source("USER_INPUT", StandardInput("USER_INPUT", vm.signal, lines or terminal,
                                                  terminal=vm if terminal else None))


def _open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
        return True
    except OSError:
        return False


def read_standard_input() -> str | None:
    """All of standard input for a model's prompt; None on a terminal, or when it is closed."""
    if not _open(STDIN) or os.isatty(STDIN):
        return None
    return standard_input().decode("utf-8", "replace").removesuffix("\n")


def standard_input() -> bytes:
    """All bytes of standard input.  OSError names it."""
    parts = []
    try:
        while chunk := os.read(STDIN, _CHUNK):
            parts.append(chunk)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard input") from None
    return b"".join(parts)


def read_text(path: str) -> str:
    """The text of an --input file ("-": standard input)."""
    if path == "-":
        return standard_input().decode("utf-8", "replace").removesuffix("\n")
    with open(path, "rb") as file:
        return file.read().decode("utf-8", "replace").removesuffix("\n")


def available_memory() -> int:
    """Bytes that programs can still take without the system having to end one."""
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:                                    # not Linux: all memory there is
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limit_memory(limit: int | None) -> None:
    """Make allocations beyond `limit` (default: three quarters of the memory that is free now) fail as out of memory,
    instead of letting the system end some process.  Mapped model files do not count."""
    cli.memory_limit = None
    try:
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = limit or available_memory() // 4 * 3
        for bound in (soft, hard):
            if bound != resource.RLIM_INFINITY:
                wanted = min(wanted, bound)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
        if wanted == limit:                            # else a lower one of the system is what holds
            cli.memory_limit = limit
    except (ImportError, ValueError, OverflowError, OSError) as error:
        if limit is not None:
            note(f"warning: --memory-limit: this system does not limit memory ({error})")


def show_progress(vm: VM, progress: Progress) -> None:
    """Let compiling and repacking show themselves when they take long."""
    if vm.regions is None or not progress.on:
        return
    compiler = vm.regions.compiler
    compile_region, pointer = compiler.compile, compiler.weights.pointer

    def compiling(function: Any, name: str) -> Any:
        with progress.activity(f"compiling {place(vm, function.entry_pc)}"):
            return compile_region(function, name)

    def preparing(tensor: Any, layout: str) -> int:
        with progress.activity("repacking weights for the kernels (once; kept in the cache)"):
            return pointer(tensor, layout)
    compiler.compile = compiling
    compiler.weights = _Forward(compiler.weights, pointer=preparing)


class _Forward:
    """An object with some of its methods replaced."""

    def __init__(self, inner: Any, **replaced: Any):
        self._inner = inner
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def place(vm: VM, pc: int) -> str:
    """A pc as people know it: the label at or before it."""
    program = vm.image.program
    best: tuple[int, str] | None = None
    for symbol in program.symbols if program is not None else ():
        if symbol.kind.name in ("LABEL", "FUNC") and symbol.value <= pc and (best is None or symbol.value > best[0]):
            best = (symbol.value, symbol.name)
    if best is None:
        return f"0x{pc:04x}"
    return best[1] if best[0] == pc else f"{best[1]}+0x{pc - best[0]:x}"


@contextlib.contextmanager
def line_end(stream: Any, sink: Any) -> Iterator[None]:
    """On a terminal, what is said after the program's output starts on a line of its own."""
    try:
        yield
    finally:
        if stream.isatty() and sys.stderr.isatty() and getattr(sink, "last", b"\n") != b"\n":
            sys.stderr.write("\n")
