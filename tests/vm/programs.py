"""Shared by the machine's tests: programs from assembly text or from instructions."""
from __future__ import annotations

import threading
import time
from typing import Any, Callable

from m3jit.frontend.assembler import assemble
from m3jit.isa.fields import Reg
from m3jit.isa.table import BY_NAME, Instruction, load_table
from m3jit.vm.vm import VM

load_table()
LONG = 120                          # seconds that nothing takes, however loaded the machine is


def machine(source: str, **options: Any) -> VM:
    """A machine for an assembly text, interpreted unless a backend is named."""
    options.setdefault("backend", "interpreter")
    return VM(assemble(source, "test.m3asm"), **options)


def run(source: str, **options: Any) -> VM:
    """The machine after its run."""
    return machine(source, **options).run()


def wait_until(condition: Callable[[], Any]) -> None:
    """AssertionError when it is not true within LONG seconds."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it never came true"
        threading.Event().wait(0.002)


def wait_until_all_wait(vm: VM) -> None:
    """Until every context of a machine that runs in another thread waits."""
    wait_until(lambda: all(ctx.waiting_for is not None for ctx in list(vm.scheduler.contexts.values())))


def ins(name: str, **args: Any) -> Instruction:
    """An instruction; "R5", "V1", "S0" in strings of that form become registers."""
    row = BY_NAME[name]
    return Instruction(row, {k: _reg(v) for k, v in args.items()}, size=row.size)


def _reg(v: Any) -> Any:
    if isinstance(v, str) and v[:1] in "RVS" and v[1:].isdigit():
        return Reg("RVS".index(v[0]), int(v[1:]))
    return tuple(_reg(x) for x in v) if isinstance(v, tuple) else v


def outputs(source: str, **options: Any) -> list[Any]:
    """What a program streams to OUTPUT."""
    got: list[Any] = []
    vm = machine(source, **options)
    vm.set_sink("OUTPUT", got.append)
    vm.run()
    return got
