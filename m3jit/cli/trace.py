"""`m3jit run --trace FILE`: what a run did and when, in the Trace Event Format that Perfetto and Chrome read.

Events: every entry into a compiled region, every compilation, every instruction that took the slow path, TRACE_EVENTs.
One row for each context of the program.
"""
from __future__ import annotations

import json
import os
import time
from typing import Any

from m3jit.cli.options import UsageError
from m3jit.cli.terminal import note, write_file

FAST = ("next", "jump", "branch", "interrupt")         # control flow that stays on the fast path
MAX_EVENTS = 1_000_000                                 # about 150 MB of file; later ones are counted and dropped


class Trace:
    """Watches one machine; `write` makes the file."""

    def __init__(self, vm: Any, path: str):
        if not path or os.path.isdir(path):
            raise UsageError(f"--trace {path or repr(path)}: expected the name of a file")
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise FileNotFoundError(2, "there is no such folder", folder)
        self.vm, self.path = vm, path
        self.events: list[tuple[str, str, int, float, float, dict[str, Any]]] = []
        self.dropped = 0
        self.origin = time.perf_counter_ns()
        self.entered = False                           # the running instruction was a region
        vm.interpreter.watch = self.instruction
        vm.trace = self.told
        if vm.regions is not None:
            self._enter, vm.regions.enter = vm.regions.enter, self.enter
            compiler = vm.regions.compiler
            self._compile, compiler.compile = compiler.compile, self.compile

    def add(self, kind: str, name: str, row: int, began: int, ended: int, facts: dict[str, Any]) -> None:
        """Note an event; times in nanoseconds of the performance counter."""
        if len(self.events) >= MAX_EVENTS:
            self.dropped += 1
            return
        self.events.append((kind, name, row, (began - self.origin) / 1e3, (ended - began) / 1e3, facts))

    def enter(self, ctx: Any, pc: int) -> int | None:
        """As `Regions.enter`."""
        from m3jit.cli.machine import place
        before, began = ctx.retired, time.perf_counter_ns()
        new = self._enter(ctx, pc)
        if new is not None:
            self.entered = True
            self.add("region", place(self.vm, pc), ctx.id, began, time.perf_counter_ns(),
                     {"pc": f"0x{pc:04x}", "instructions": ctx.retired - before, "goes on at": f"0x{new:04x}"})
        return new

    def compile(self, function: Any, name: str) -> Any:
        """As `Compiler.compile`."""
        from m3jit.cli.machine import place
        began = time.perf_counter_ns()
        try:
            return self._compile(function, name)
        finally:
            self.add("compile", f"compile {place(self.vm, function.entry_pc)}", self.vm.machine.ctx.id, began,
                     time.perf_counter_ns(), {"instructions": function.instructions})

    def instruction(self, ctx: Any, index: int, began: int, ended: int) -> None:
        """An instruction of the slow path was executed."""
        if self.entered:
            self.entered = False
            return
        ins = self.vm.image.instructions[index]
        if ins.op.route == "value" or ins.op.control in FAST:
            return                                     # an entry point that is not compiled (yet)
        self.add("instruction", ins.op.name, ctx.id, began, ended, {"pc": f"0x{self.vm.image.pcs[index]:04x}"})

    def told(self, kind: str, facts: dict[str, Any]) -> None:
        """A TRACE_EVENT."""
        now = time.perf_counter_ns()
        self.add("event", f"event {facts['event']}", facts["context"], now, now, facts)

    def write(self) -> None:
        """The file, whole or not at all."""
        pid = os.getpid()
        rows = sorted({row for _, _, row, _, _, _ in self.events})
        out = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"m3jit {self.vm.image.name}"}}]
        out += [{"ph": "M", "pid": pid, "tid": row, "name": "thread_name", "args": {"name": f"context {row}"}}
                for row in rows]
        for kind, name, row, start, took, facts in self.events:
            event = {"name": name, "cat": kind, "ph": "X", "pid": pid, "tid": row, "ts": start, "dur": took,
                     "args": facts}
            if kind == "event":
                event |= {"ph": "i", "s": "t"}
                del event["dur"]
            out.append(event)
        text = json.dumps({"traceEvents": out, "displayTimeUnit": "ms"})
        write_file(self.path, text.encode())
        note(f"{self.path}: {len(self.events)} events"
             + (f", {self.dropped} more were dropped" if self.dropped else "") + "; open it at https://ui.perfetto.dev")
