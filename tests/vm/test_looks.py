"""An IF_INTERRUPT that nobody looks at is done in few steps, and at once where compiled code is left in front of it:
turns, counters, interrupts and records are as they are without that."""
from __future__ import annotations

from typing import Any

import pytest

import m3jit
from m3jit.vm import scheduler
from m3jit.vm.interpreter import Interpreter
from m3jit.vm.stopping import ATTENTION

SOURCE = """
    .reg rOwn R1
    .reg rI R2
    .reg rC R3
        LOADI rI, 0
        LOADI rOwn, 1
        FORK rC, work
        LOADI rOwn, 2
        FORK rC, work
        LOADI rOwn, 3
    work:
        JUMP {first}
    loop:
        {head}
        IF_INTERRUPT out
        {behind}
        STREAM rOwn
    next:
        ADD rI, rI, 1
        COMPARE rI, 25
        IF_GREATER_EQUAL out
        JUMP loop
    out:
        STREAM rI
        HALT"""
PROGRAMS = {"at a loop head": m3jit.assemble(SOURCE.format(first="loop", head="", behind="")),
            "behind one": m3jit.assemble(SOURCE.format(first="next", head="ADD rC, rI, 3", behind="")),
            "twice": m3jit.assemble(SOURCE.format(first="loop", head="ADD rC, rI, 3", behind="IF_INTERRUPT out"))}


@pytest.fixture
def done(monkeypatch) -> list[bool]:
    """Whether IF_INTERRUPT was done at once, for each try."""
    found: list[bool] = []
    look = Interpreter._sees_nothing

    def looked(self: Interpreter, ctx: Any, i: int) -> bool:
        found.append(look(self, ctx, i))
        return found[-1]
    monkeypatch.setattr(Interpreter, "_sees_nothing", looked)
    return found


def run(name: str, backend: str, at: int | None = None, **how: Any) -> tuple[m3jit.VM, list[tuple]]:
    """The machine, and each item with the context that wrote it and the instructions done.  at: the item behind which
    the context is interrupted."""
    vm, items = m3jit.VM(PROGRAMS[name], backend=backend, threads=1, **how), []

    def seen(item: Any) -> None:
        ctx = vm.machine.ctx
        items.append((str(item), ctx.id, ctx.retired, vm.retired, ctx.flags))
        if len(items) == at:
            vm.interrupt(ctx)
    vm.set_sink("OUTPUT", seen)
    return vm.run(), items


@pytest.mark.parametrize("name", PROGRAMS)
def test_turns_are_the_interpreter_s(name, done, monkeypatch):
    for quantum in range(3, 40):
        monkeypatch.setattr(scheduler, "QUANTUM", quantum)
        expected = run(name, "interpreter", record=True)
        assert not any(done)
        for backend in "cpu", "interpreter":
            vm, items = run(name, backend)
            assert items == expected[1] and vm.retired == expected[0].retired, quantum
            assert any(done)
            done.clear()


@pytest.mark.parametrize("name", PROGRAMS)
def test_interrupts_are_seen_where_the_interpreter_sees_them(name, done):
    found: dict[str, set[bool]] = {"cpu": set(), "interpreter": set()}
    for at in range(1, 80, 7):
        expected = run(name, "interpreter", at, record=True)
        for backend, ways in found.items():
            done.clear()
            vm, items = run(name, backend, at)
            assert items == expected[1] and vm.retired == expected[0].retired, at
            ways.update(done)
    assert all(ways == {False, True} for ways in found.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_record_or_a_profile_sees(name, done):
    """They look at every IF_INTERRUPT, so none is passed by."""
    plain = run(name, "cpu")
    assert any(done)
    done.clear()
    vm, items = run(name, "cpu", 30, record=True)
    again, repeated = run(name, "cpu", replay=vm.recorder.log)
    assert repeated == items and again.retired == vm.retired
    assert ("interrupt" in [e.what for e in vm.recorder.log]) and items != plain[1]
    counted, seen = run(name, "cpu", profile=True)
    assert seen == plain[1]
    looks = [n for n, i in zip(counted.interpreter.counts, counted.image.instructions) if i.op.name == "IF_INTERRUPT"]
    assert looks == [72 if name == "behind one" else 75] * len(looks)
    assert not any(done)


@pytest.mark.parametrize("somebody_looks", [
    lambda vm, i: vm.interrupt(), lambda vm, i: vm.stop_word.set(ATTENTION),
    lambda vm, i: vm.interpreter.stop_in_front([i], lambda ctx: True), lambda vm, i: vm.interpreter.profile(True),
    lambda vm, i: setattr(vm.interpreter, "watch", print), lambda vm, i: setattr(vm.recorder, "idle", False)],
    ids=["interrupt", "stop word", "breakpoint", "profile", "watch", "record"])
def test_who_looks(somebody_looks):
    vm = m3jit.VM(PROGRAMS["behind one"], backend="cpu", threads=1)
    ctx, (i,) = vm.main, vm.interpreter.looks
    assert vm.interpreter._sees_nothing(ctx, i) and (ctx.retired, ctx.index, ctx.looked) == (1, i + 1, (1, i + 1))
    somebody_looks(vm, i)
    assert not vm.interpreter._sees_nothing(ctx, i) and (ctx.retired, ctx.index, ctx.looked) == (1, i + 1, (1, i + 1))


def test_a_flag_is_looked_at():
    code = m3jit.assemble("LOADI rF, 0\nADD rN, rF, 1\nIF_INTERRUPT out, rN\nLOADI rN, 5\nout:\nHALT")
    vm = m3jit.VM(code, backend="cpu", threads=1)
    assert not vm.interpreter.looks and vm.run().get("rN") == 1
