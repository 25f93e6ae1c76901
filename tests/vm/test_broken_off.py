"""Ctrl-C in the middle of an instruction: where the context stands is told, and it goes on from there as it would
have."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from m3jit.durable import Store
from m3jit.errors import Trap
from m3jit.frontend import assemble
from m3jit.isa import cells, kv_pages
from m3jit.vm import scheduler
from m3jit.vm.checked import comparable
from m3jit.vm.vm import VM
from tests.vm.state_model.faults import Signal
from tests.vm.test_looks import PROGRAMS, SOURCE

PROGRAM = assemble("""
    LOADI rN, 0
    LOADI rAt, 0x3000000000000000
loop:
    ADD rN, rN, 1
    RNG_UNIFORM rU
    MATVEC rH, rX, rW TRANSPOSE
    ATTN rX, rH, rH, rH, sKV HEADS=2 LAYER=0 CAUSAL
    ADD rX, rX, rU
    FORK rKept
    MEMSET rAt, PATTERN=1, LEN=100
    CALL deeper, ARGS=[rN]
    COMPARE rN, 2
    IF_LESS loop
    HALT
deeper:
    ADD R0, R0, 5
    RET
""", "broken.m3asm")


def begun(backend: str) -> VM:
    vm = VM(PROGRAM, backend=backend, threads=1)
    rng = np.random.default_rng(3)
    vm.set("rX", rng.standard_normal((3, 8)).astype(np.float32))
    vm.set("rW", rng.standard_normal((8, 8)).astype(np.float32))
    return vm


def outcome(vm: VM) -> Any:
    ctx = vm.main
    return ([comparable(v) for v in (*ctx.R, *ctx.V)],
            [comparable(ctx.states.get(h.id)) for h in ctx.S if h is not None],
            ctx.rng, ctx.flags, ctx.retired, ctx.depth, ctx.status, vm.retired, vm.finished)


@pytest.mark.parametrize("backend, stride", [
    ("interpreter", 11), ("cpu", 11), pytest.param("interpreter", 1, marks=pytest.mark.slow),
    pytest.param("cpu", 1, marks=pytest.mark.slow)])
def test_a_context_goes_on_from_where_it_stands(backend, stride):
    """Whenever the signal comes; and what is said is where that is."""
    straight = begun(backend)
    straight._loop(lambda: False)
    expected, ways, moment, came = outcome(straight), set(), 0, True
    while came:
        moment += stride
        vm, signal = begun(backend), Signal(moment)
        came = signal.hit(signal.run(lambda: vm._loop(lambda: False)))
        found, ctx = vm.broken_off, vm.main
        if found is not None:
            pcs = [*vm.image.pcs, len(vm.image.text)]
            assert (found.context, found.goes_on, found.retired) == (1, pcs[ctx.index], ctx.retired), signal.said
            assert found.done or found.pc == found.goes_on, signal.said
            ways.add(found.done)
        assert came or vm.finished
        vm._loop(lambda: False)
        assert outcome(vm) == expected, signal.said
    assert ways == {False, True} and moment > 300


@pytest.mark.parametrize("by_input", [False, True])
def test_no_interrupt_is_lost(by_input):
    """IF_INTERRUPT ends it and goes to its label, or neither; wherever the signal comes."""
    program = assemble("IF_INTERRUPT there\nLOADI rX, 1\nHALT\nthere:\nLOADI rX, 2\nIF_INTERRUPT there\nHALT")
    moment, came = 0, True
    while came:
        moment += 1
        vm, signal = VM(program, backend="interpreter"), Signal(moment)
        if by_input:
            vm.push_input("now", interrupt=True)
        else:
            vm.interrupt()
        came = signal.hit(signal.run(lambda: vm._loop(lambda: False)))
        vm._loop(lambda: False)
        assert vm.get("rX") == 2 and not vm.main.interrupt, signal.said
    assert moment > 30


def test_it_is_told(tmp_path):
    """In the exception and by the machine; and a version of the machine as it stands goes on in another one."""
    expected, said, moment = outcome(begun("interpreter").run())[:4], set(), 0
    while len(said) < 2:
        moment += 1
        vm, signal = begun("interpreter"), Signal(moment)
        error = raised(signal, vm)
        assert signal.reached, "it comes in front of an instruction's stores, and behind those of another one"
        found = vm.broken_off
        if found is None or found.done in said:
            continue
        said.add(found.done)
        [note] = error.__notes__
        assert note == str(found) and f"it goes on at pc 0x{found.goes_on:04x} (broken.m3asm:" in note
        assert ("has taken effect" in note) is found.done and note.endswith(f"{found.retired} instructions are done")
        with Store.open(tmp_path / f"{found.done}") as store:
            store.commit(vm, "there")
            other = begun("interpreter")
            store.restore(other, "there")
            other.run()
        assert outcome(other)[:4] == expected


def raised(signal: Signal, vm: VM) -> BaseException:
    """What a run that a signal comes to raises."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            vm.run()
        except KeyboardInterrupt as error:
            found.append(error)
    signal.run(run)
    return found[0] if found else KeyboardInterrupt()


@pytest.mark.parametrize("made", [kv_pages.Page, cells.Memory])
def test_what_was_interrupted_as_it_was_made_goes_quietly(made):
    made.__new__(made).__del__()


BESIDE = assemble("""
    FORK rChild, other, GREEN
    LOADI rN, 0
loop:
    ADD rN, rN, 1
    COMPARE rN, 12
    IF_LESS loop
    HALT
other:
    LOADI rN, 100
again:
    ADD rN, rN, 1
    YIELD
    COMPARE rN, 106
    IF_LESS again
    DIV rN, rN, 0
""", "beside.m3asm")


@pytest.mark.parametrize("step, stride", [
    (False, 23), (True, 61), pytest.param(False, 1, marks=pytest.mark.slow),
    pytest.param(True, 11, marks=pytest.mark.slow)])
def test_contexts_take_their_turns_as_they_would_have(monkeypatch, step, stride):
    """What was done of a slice is accounted for, whenever the signal comes."""
    monkeypatch.setattr(scheduler, "QUANTUM", 7)

    def go(vm: VM) -> None:
        vm.step(1000) if step else vm._loop(lambda: False)

    def seen(vm: VM, child: Any) -> Any:
        return [(c.retired, c.status, c.virtual_time, c.R[1]) for c in (vm.main, child)], vm.scheduler.turns, vm.retired

    def made() -> tuple[VM, list[Any]]:
        vm, children = VM(BESIDE, backend="interpreter"), []
        real = vm.new_context
        vm.new_context = lambda: children.append(real()) or children[-1]       # type: ignore[func-returns-value]
        return vm, children
    straight, children = made()
    go(straight)
    expected, moment, came = seen(straight, children[-1]), 0, True
    while came:
        moment += stride
        (vm, children), signal = made(), Signal(moment)
        came = signal.hit(signal.run(lambda: go(vm)))
        go(vm)
        assert seen(vm, children[-1]) == expected, signal.said
    assert moment > 300


LOOKING = {**PROGRAMS, "begins at a jump": assemble(SOURCE.format(first="loop", head="JUMP on\non: ADD rC, rI, 3",
                                                                  behind=""))}


@pytest.mark.parametrize("name", LOOKING)
@pytest.mark.parametrize("place", ["enter", "_sees_nothing"])
def test_turns_around_compiled_code_are_as_they_would_have_been(monkeypatch, name, place):
    """A region may begin at a jump, and is left in front of an IF_INTERRUPT, which is then done at once: Ctrl-C comes
    behind either, each time that is done, in slices of all kinds of lengths."""
    came = 0
    for quantum in range(3, 12):
        monkeypatch.setattr(scheduler, "QUANTUM", quantum)
        straight, expected = looking(name)
        straight._loop(lambda: False)
        for time in range(1, 1000, 1 if quantum in (3, 7) else 5):
            vm, items = looking(name)
            calls = signal_behind(vm.regions if place == "enter" else vm.interpreter, place, time)
            try:
                vm._loop(lambda: False)
            except KeyboardInterrupt:
                came += 1
                vm._loop(lambda: False)
            assert (items, vm.retired) == (expected, straight.retired), (quantum, time)
            assert vm.scheduler.turns == straight.scheduler.turns, (quantum, time)
            if len(calls) < time:
                break
    assert came > 50


def signal_behind(owner: Any, name: str, time: int) -> list[Any]:
    """Raise KeyboardInterrupt behind a call of this method, for the time-th time; the list has one item for each."""
    real, calls = getattr(owner, name), []

    def call(*arguments: Any) -> Any:
        found = real(*arguments)
        calls.append(found)
        if len(calls) == time:
            raise KeyboardInterrupt
        return found
    setattr(owner, name, call)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKING)
@pytest.mark.parametrize("quantum", [5, 7, 8])
def test_turns_around_compiled_code_at_every_moment(monkeypatch, name, quantum):
    monkeypatch.setattr(scheduler, "QUANTUM", quantum)
    straight, expected = looking(name)
    straight._loop(lambda: False)
    assert straight.regions.retired > 100
    moment, came = 0, True
    while came:
        moment += 11
        (vm, items), signal = looking(name), Signal(moment)
        came = signal.hit(signal.run(lambda: vm._loop(lambda: False)))
        vm._loop(lambda: False)
        again = [item for i, item in enumerate(items) if item not in items[:i]]        # written, and stopped behind it
        assert again == expected and vm.retired == straight.retired, signal.said
        assert vm.scheduler.turns == straight.scheduler.turns, signal.said
    assert moment > 300


def looking(name: str) -> tuple[VM, list[Any]]:
    """A machine for a program that looks for interrupts, and its items: each with when it was written."""
    vm, items = VM(LOOKING[name], backend="cpu", threads=1), []
    vm.set_sink("OUTPUT", lambda item: items.append((str(item), vm.machine.ctx.retired, vm.retired)))
    return vm, items


WAITS = assemble("SENSE rX, USER_INPUT\nSENSE rX, rStatus, USER_INPUT\nADD rX, rX, 1\nDIV rX, rX, 0\n", "waits.m3asm")


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_record_has_every_wait_once(stride):
    """Whether the signal comes before or after it is noted; and the run that went on is replayed."""
    def asleep(vm: VM) -> bool:
        return vm.main.waiting_for is not None and not vm.main.waiting_for.ready()

    def go(vm: VM) -> None:
        while not vm.finished:
            if asleep(vm):
                vm.push_input(5)
            vm._loop(lambda: asleep(vm))

    def recorded() -> VM:
        return VM(WAITS, backend="interpreter", wait_input=True, record=True)

    def gone(vm: VM) -> list[Any]:
        with pytest.raises(Trap):
            go(vm)
        return vm.recorder.log
    expected = gone(recorded())
    assert [e.what for e in expected] == ["block", "wake", "sense"] * 2
    moment, came, same = 0, True, 0
    while came:
        moment += stride
        vm, signal = recorded(), Signal(moment)
        came = signal.hit(signal.run(lambda: go(vm)))
        log = vm.recorder.log if vm.finished else gone(vm)
        assert [e for e in log if e.what != "sense"] == [e for e in expected if e.what != "sense"], signal.said
        if log == expected:                            # else the signal came behind what SENSE saw: it looked again
            same += 1
            again = VM(WAITS, backend="interpreter", replay=log)
            with pytest.raises(Trap):
                again.run()
            assert (again.retired, again.recorder.waits) == (vm.retired, vm.recorder.waits), signal.said
    assert same > 0.8 * moment / stride > 10


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_profile_has_what_was_done(watched, stride):
    """Every instruction that was completed is counted and timed, whenever the signal comes; and it is told where."""
    program = assemble("LOADI rN, 0\nloop:\nADD rN, rN, 1\nFORK rS\nCOMPARE rN, 3\nIF_LESS loop\nHALT\n", "timed.m3asm")
    moment, came, ways = 0, True, set()
    while came:
        moment += stride
        vm, signal = VM(program, backend="interpreter", profile=True), Signal(moment)
        if watched:
            vm.interpreter.watch = lambda ctx, i, began, ended: None
        came = signal.hit(signal.run(lambda: vm._loop(lambda: False)))
        if vm.broken_off is not None:
            ways.add(vm.broken_off.done)
        vm._loop(lambda: False)
        assert {name: n for name, _, n, _ in vm.profile()} == {
            "LOADI": 1, "ADDI": 3, "FORK": 3, "COMPAREI": 3, "IF_LESS": 3, "HALT": 1}, signal.said
        assert vm.retired == 14 and all(ns > 0 for _, _, _, ns in vm.profile()), signal.said
    assert ways == {False, True} and moment > 60


@pytest.mark.parametrize("profile", [False, True])
def test_what_a_watch_raises_is_its_own(profile):
    """It leaves the run as it is; the instruction was done."""
    vm = VM(assemble("LOADI rN, 0\nFORK rS\nHALT\n", "watched.m3asm"), backend="interpreter", profile=profile)

    def watch(*_: Any) -> None:
        raise KeyError("host")
    vm.interpreter.watch = watch
    with pytest.raises(KeyError, match="host"):
        vm._loop(lambda: False)
    assert (vm.main.retired, vm.main.index, vm.main.trap) == (2, 2, None)
    vm.interpreter.watch = None
    vm._loop(lambda: False)
    assert vm.finished and vm.retired == 3


class Models:
    """Gives one model, and checks nothing."""

    class Model:
        name, content_hash = "net", "00"

    def load(self, reference: str, quant: str = "") -> Any:
        return self.Model()


def test_a_model_is_loaded_or_not(tmp_path):
    """A register that names it and the state that it names come together, and the message says which."""
    program = assemble('.model net "net.gguf"\nLOADI rM, @net\nSNAPSHOT rS\nLOADI rM, @net\nHALT', "loads.m3asm")
    moment, came, ways = 0, True, set()
    while came:
        moment += 1
        vm, signal = VM(program, backend="interpreter", models=Models()), Signal(moment)
        came = signal.hit(signal.run(lambda: vm._loop(lambda: False)))
        named, states = vm.get("rM"), [number for number, _ in vm.main.states.items()]
        assert states == ([] if named is None else [named.id]), signal.said
        if vm.broken_off is not None and vm.broken_off.pc == 0:
            assert vm.broken_off.done is (named is not None), signal.said
            ways.add(vm.broken_off.done)
        vm._loop(lambda: False)
        assert len(list(vm.main.states.items())) == 1 and vm.retired == 4, signal.said
    assert ways == {False, True} and moment > 40


def test_what_may_have_been_written_outside_is_told():
    """An item is out before its instruction has happened; one that wrote nothing outside says nothing of it."""
    program = assemble("LOADI rX, 1\nSTREAM rX, OUTPUT TEXT\nFORK rS\nHALT", "writes.m3asm")
    moment, came, seen = 0, True, set()
    while came:
        moment += 1
        (vm, wrote), signal = (VM(program, backend="interpreter"), []), Signal(moment)
        vm.set_sink("OUTPUT", wrote.append)
        came = signal.hit(signal.run(lambda: vm._loop(lambda: False)))
        found = vm.broken_off
        if found is None:
            continue
        streams = found.pc == vm.image.pcs[1]
        assert found.outside is streams, signal.said
        assert ("may have written outside of the machine, and will again" in str(found)) is (streams and not found.done)
        if wrote and not found.done:
            seen.add(streams)
    assert True in seen
