"""The debugger without its terminal: places to stop at, going to them both ways, versions to compare."""
from __future__ import annotations

import tempfile
from typing import Any, Callable

from m3jit.errors import UserError
from m3jit.timetravel.engine import Engine, check_time
from m3jit.models.grammar import registry
from m3jit.timetravel.history import History, Watcher, heard
from m3jit.timetravel.hosting import Host
from m3jit.timetravel.log_file import MAGIC, LogReader
from m3jit.timetravel.replay import STOPPED, KnownModels, check_version, machine, program_of
from m3jit.timetravel.steering import SINKS, Steering
from m3jit.timetravel.stops import Breakpoint, Watch, layer_pcs, place
from m3jit.vm.context import Context
from m3jit.vm.regions import check as check_backend


class Version:
    """A version of a context's state: its root, and where and when it was."""

    def __init__(self, name: str, time: int, context: int, root: Any):
        self.name, self.time, self.context, self.root = name, time, context, root


class Debugger:
    """A run, its stops and its marks."""

    def __init__(self, vm: Any, watcher: Watcher, host: Host | None = None):
        self.vm, self.engine = vm, Engine(vm, watcher, host)
        self.breakpoints: dict[int, Breakpoint] = {}
        self.watches: dict[int, Watch] = {}
        self.marks: dict[str, Version] = {}
        self._numbers = 0
        self.scratch: Any = None                       # a folder that goes with the debugger
        self.torn = False                              # a log that has no end is looked at

    # -- where we are -----------------------------------------------------------------------------------------------
    @property
    def context(self) -> Context:
        """The context one looks at: the one whose instruction is next, else the main one."""
        return self.engine.upcoming or self.vm.main

    def find_context(self, number: int) -> Context:
        """A context by its number.  UserError: it is not there now."""
        for ctx in self.engine.contexts:
            if ctx.id == number:
                return ctx
        there = ", ".join(str(c.id) for c in self.engine.contexts)
        raise UserError(f"there is no context {number} now; there are {there}")

    # -- stops ------------------------------------------------------------------------------------------------------
    def add_break(self, text: str) -> tuple[int, Breakpoint]:
        """A breakpoint at a place, and its number."""
        made = place(self.vm, text)
        self._numbers += 1
        self.breakpoints[self._numbers] = made
        return self._numbers, made

    def add_watch(self, text: str) -> tuple[int, Watch]:
        """A watchpoint, and its number."""
        made = Watch(self.vm, text, self.context)
        self._numbers += 1
        self.watches[self._numbers] = made
        return self._numbers, made

    def delete(self, number: int) -> None:
        """Remove a stop.  UserError: no such number."""
        if self.breakpoints.pop(number, None) is None and self.watches.pop(number, None) is None:
            raise UserError(f"there is no breakpoint or watchpoint {number}")

    @property
    def pcs(self) -> frozenset[int]:
        """All instructions with a breakpoint."""
        return frozenset().union(*(b.pcs for b in self.breakpoints.values()))

    # -- going ------------------------------------------------------------------------------------------------------
    def go_on(self) -> str:
        """Forward to the next stop; what stopped the run."""
        self._settle()
        return self._why() if self._forward(None) else "end"

    def go_back(self) -> str:
        """Back to the stop before; what it is."""
        self._settle()
        found = self.engine.last_before(self._forward, self._stands, self._settle)
        return self._why() if found else "beginning"

    def outputs(self, count: int) -> bool:
        """`count` outputs forward (below 0: back); False when there were fewer."""
        return self._places(count, self.engine.to_output, lambda: False)

    def layers(self, count: int) -> bool:
        """`count` beginnings of layers forward (below 0: back); False when there were fewer."""
        pcs = layer_pcs(self.vm)
        return self._places(count, lambda end=None: self.engine.run_to(pcs, end), lambda: self._next_pc() in pcs)

    def _places(self, count: int, forward: Callable, stands: Callable[[], bool]) -> bool:
        if count < 0:
            return self.engine.last_before(forward, stands, count=-count)
        return all(forward() for _ in range(count))

    def _forward(self, end: int | None) -> bool:
        self._fired: Any = None
        if not self.watches:
            return self.engine.run_to(self.pcs, end) if self.breakpoints else self.engine.run(end)
        return self.engine.run_while(self._test, end)

    def _test(self) -> bool:
        for number, watch in self.watches.items():
            if watch.changed():
                self._fired = (number, watch, watch.shown)
                return True
        return self._stands()

    def _stands(self) -> bool:
        return self._next_pc() in self.pcs

    def _settle(self) -> None:
        """What is watched is compared with what it is here."""
        for watch in self.watches.values():
            watch.changed()

    def _next_pc(self) -> int:
        ctx = self.engine.upcoming
        return self.vm.image.pcs[ctx.index] if ctx is not None and ctx.index < len(self.vm.image.pcs) else -1

    def _why(self) -> str:
        if self._fired is not None:
            return f"watchpoint {self._fired[0]}: {self._fired[1].text} has changed: {' -> '.join(self._fired[2])}"
        pc = self._next_pc()
        numbers = [str(n) for n, b in self.breakpoints.items() if pc in b.pcs]
        return f"breakpoint {', '.join(numbers)}" if numbers else "stop"

    # -- versions ---------------------------------------------------------------------------------------------------
    def version(self, text: str) -> Version:
        """A version by name: now, @TIME, #SNAPSHOT, or a mark.  UserError: there is none."""
        if text in ("now", ""):
            return Version("now", self.engine.time, self.context.id, self.context.capture())
        if text.startswith("@"):
            return self._at_time(text)
        if text.startswith("#"):
            for snapshot in self.vm.snapshots.live():
                if str(snapshot.id) == text[1:]:
                    return Version(text, -1, snapshot.context, snapshot.root)
            raise UserError(f"there is no snapshot {text[1:]} now; `snapshots` lists those that are alive")
        if text in self.marks:
            return self.marks[text]
        raise UserError(f"no version {text!r}: now, @TIME, #SNAPSHOT and names given with `mark` are")

    def _at_time(self, text: str) -> Version:
        here, watched = self.engine.time, self.context.id
        ended = self.engine.ended is not None
        self.engine.go(check_time(text))
        try:
            ctx = next((c for c in self.engine.contexts if c.id == watched), None)
            if ctx is None:
                raise UserError(f"{text}: context {watched} is not there then")
            return Version(text, self.engine.time, ctx.id, ctx.capture())
        finally:
            self.engine.go(here + ended)

    def mark(self, name: str) -> Version:
        """Keep the version as it is now under a name."""
        if not name.isidentifier() or name == "now":
            raise UserError(f"{name!r}: a mark is a word of letters, digits and _")
        found = self.version("now")
        self.marks[name] = Version(name, found.time, found.context, found.root)
        return found


def is_log(path: str) -> bool:
    """Does a file begin as logs do?"""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_log(path: str, models: Any, backend: str = "auto", threads: int | None = None,
             moved: tuple[str, ...] = (), any_version: bool = False) -> Debugger:
    """A debugger of a recorded run.  moved, any_version: as `m3jit.timetravel.replay.Replay`.

    LogError, UserError: the log is damaged, of something else, or of another version."""
    check_backend(backend)                             # before models are loaded
    reader = LogReader(path)
    check_version(reader.head, path, any_version)
    program = program_of(reader.head, path)
    history = History(map(heard, reader.events()))
    steering = Steering.of(reader.head, path)
    history.steered = steering is not None
    watcher = Watcher(history, live=False)
    end = reader.end
    watcher.end = end["retired"] if end is not None and type(end.get("retired")) is int else 0
    hosted = "talk" in reader.head
    watcher.ended_by_itself = end is not None and end.get("status") not in STOPPED and not hosted
    known = KnownModels(models, reader.head["models"], path, moved)
    for reference in reader.head["models"]:
        known.load(reference)
    scratch = tempfile.TemporaryDirectory(prefix="m3jit-debug-")       # for files that the program writes
    matcher = steering.matcher(known, path, any_version) if steering is not None else None
    extensions = registry(matcher) if steering is not None else None
    vm = machine(reader.head, program, known if moved else models, watcher, backend, threads, scratch.name, extensions)
    for name in SINKS if steering is not None else ():
        vm.set_sink(name, lambda item: None)           # what the host made of it is in the log
    debugger = Debugger(vm, watcher, Host(vm, matcher, history.events) if hosted else None)
    debugger.scratch, debugger.torn = scratch, end is None
    return debugger
