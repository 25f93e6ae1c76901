"""Ctrl-C wherever CPython can raise it: no lock stays taken, none is given back twice, and the machine can be used."""
from __future__ import annotations

import signal as signals
import threading
import time
from typing import Any, Callable

import numpy as np
import pytest

from m3jit.frontend import assemble
from m3jit.vm import stopping, turns
from m3jit.vm.batch import Batch
from m3jit.vm.stopping import interruptible
from m3jit.vm.vm import VM
from m3jit.vm.waiting import Signal as Changed
from tests.vm.programs import LONG
from tests.vm.state_model.faults import Signal

SHORT = assemble("LOADI r1, 1\nloop:\nADD r1, r1, 1\nCOMPARE r1, 4\nIF_LESS loop\nHALT\n", "short.m3asm")
READER = assemble("SENSE r1, USER_INPUT\nSTREAM r1, OUTPUT TEXT\nHALT\n", "reader.m3asm")


def short() -> VM:
    return VM(SHORT, backend="interpreter")


def at_every_moment(made: Callable[[], Any], action: Callable[[Any], Any], locks: Callable[[Any], list[Any]],
                    check: Callable[[Any], Any] = lambda _: None, stride: int = 1, generators: bool = False) -> int:
    """Do the action with Ctrl-C at the first moment, at the next one and so on, until none is left; how many."""
    moment, came = 1 - stride, True
    while came:
        moment += stride
        here, signal = made(), Signal(moment, generators)
        outcome = signal.run(lambda: action(here))
        came = signal.reached
        assert outcome is None or isinstance(outcome, KeyboardInterrupt), f"{signal.said}: {outcome!r}"
        assert not [lock for lock in locks(here) if lock._is_owned()], signal.said
        check(here)
    return moment


def lock_of(vm: VM) -> list[Any]:
    return [vm._lock, vm.signal._lock, vm.stop_word._lock]


def goes_on(vm: VM) -> None:
    assert not vm._wanting and vm._runner is None
    vm.stop_word.take()


@pytest.mark.parametrize("call", [lambda vm: vm.get("r1"), lambda vm: vm.set("r1", 5), lambda vm: vm.abort(vm.fork()),
                                  lambda vm: vm.run(), lambda vm: vm.step(3), lambda vm: vm.push_input("text"),
                                  lambda vm: list(vm.output()), lambda vm: vm.interrupt(), lambda vm: vm.stats],
                         ids=["get", "set", "fork", "run", "step", "push_input", "output", "interrupt", "stats"])
def test_no_call_keeps_a_lock(call):
    assert at_every_moment(short, call, lock_of, goes_on) > 5


def test_a_run_with_a_time_limit_leaves_nothing_behind():
    """A timer that was left behind does not end a later run."""
    def late(vm: VM) -> None:
        goes_on(vm)
        for timer in [t for t in threading.enumerate() if isinstance(t, threading.Timer)]:
            timer.function()
            timer.cancel()
        assert not vm.stop_word.raised
    assert at_every_moment(lambda: VM(SHORT, backend="interpreter", timeout=LONG), lambda vm: vm.run(), lock_of,
                           late, stride=3) > 40


def held_by_another(vm: VM) -> threading.Event:
    """Another thread has the machine's lock until somebody wants it, or the event is set."""
    has, over = threading.Event(), threading.Event()

    def hold() -> None:
        with vm._lock:
            has.set()
            while not vm._wanting and not over.is_set():
                time.sleep(0)
    threading.Thread(target=hold, daemon=True).start()
    assert has.wait(LONG)
    return over


def test_whoever_asks_for_a_machine_that_runs():
    def made() -> tuple[VM, threading.Event]:
        vm = short()
        return vm, held_by_another(vm)

    def check(here: tuple[VM, threading.Event]) -> None:
        here[1].set()
        goes_on(here[0])
    assert at_every_moment(made, lambda here: here[0].get("r1"), lambda here: lock_of(here[0]), check) > 10


class Looks:
    """True so often."""

    def __init__(self, times: int):
        self.times = times

    def __bool__(self) -> bool:
        self.times -= 1
        return self.times >= 0


def test_a_run_that_lets_others_in_has_the_lock_again():
    def made() -> VM:
        vm = short()
        vm._wanting = Looks(3)                         # type: ignore[assignment]
        return vm

    def run(vm: VM) -> None:
        with vm._lock:
            try:
                vm._let_others_in()
            finally:
                assert vm._lock._is_owned()
    assert at_every_moment(made, run, lock_of) > 10


def test_a_run_that_sleeps_has_the_lock_again(monkeypatch):
    monkeypatch.setattr(turns, "patience", lambda waits: 0.0)

    def made() -> VM:
        vm = VM(READER, backend="interpreter", wait_input=True)
        vm._slice(*vm._turn())
        assert vm.scheduler.waiting()
        return vm

    def run(vm: VM) -> None:
        with vm._lock:
            try:
                vm._wait()
            finally:
                assert vm._lock._is_owned()

    def check(vm: VM) -> None:
        goes_on(vm)
        vm.push_input("text")
        assert "".join(vm.output()) == "text" and vm.finished
    assert at_every_moment(made, run, lock_of, check) > 20


def test_whoever_waits_for_news_hears_of_the_next():
    """And nobody is rung for that has gone."""
    def wait(changed: Changed) -> None:
        with changed:
            changed.wait(0.0)

    def check(changed: Changed) -> None:
        changed.notify()
        assert not changed._bells
    assert at_every_moment(Changed, wait, lambda changed: [changed._lock], check) > 8


def test_who_notifies_wakes_who_waits():
    changed, woken, asleep = Changed(), threading.Event(), threading.Event()

    def wait() -> None:
        with changed:
            asleep.set()
            changed.wait(LONG)
            woken.set()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert asleep.wait(LONG)
    with changed:                                      # the thread has let go of it: it sleeps
        changed.notify()
    thread.join(LONG)
    assert woken.is_set()


def test_signals_reach_native_code_after_an_interrupt_here():
    class Word:
        def heard(self, number: int) -> None: ...

    def listen(word: Word) -> None:
        with interruptible(word):
            pass

    def check(word: Word) -> None:
        assert not stopping._listener.words
        with interruptible(word):
            assert stopping._listener.words == [word]
            with interruptible(other):                 # a run inside of a run
                assert stopping._listener.words == [word, other]
            assert stopping._listener.words == [word]
        found = signals.set_wakeup_fd(-1)
        assert found == -1
    other = Word()
    try:
        listen(other)                                  # the thread that listens is there
        assert at_every_moment(Word, listen, lambda _: [], check, generators=True) > 8
    finally:
        signals.set_wakeup_fd(-1)


TOGETHER = assemble("""
    LOADI rN, 0
loop:
    ADD rN, rN, 1
    MATVEC rX, rX, rW TRANSPOSE
    SILU rX, rX
    COMPARE rN, 3
    IF_LESS loop
    STREAM rN, OUTPUT TEXT
    HALT
""", "together.m3asm")


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_a_batch_keeps_no_lock(stride):
    """And goes on: whoever the signal did not end comes to the same end, and everybody is told of once."""
    def made() -> tuple[Batch, list[VM], list[Any]]:
        batch, vms, ended = Batch(), [], []
        for i in range(3):
            vm = VM(TOGETHER, backend="cpu", threads=1)
            rng = np.random.default_rng(i)
            vm.set("rX", rng.standard_normal((1, 8)).astype(np.float32))
            vm.set("rW", WEIGHT)
            vm.set_sink("OUTPUT", lambda item: None)
            vms.append(vm)
        return batch, vms, ended

    def run(here: tuple[Batch, list[VM], list[Any]]) -> None:
        batch, vms, ended = here
        for vm in vms:
            batch.add(vm, ended.append)
        batch.run()

    def check(here: tuple[Batch, list[VM], list[Any]]) -> None:
        batch, vms, ended = here
        for vm in vms:
            if vm.batch is None and not vm.finished and vm.error is None:
                batch.add(vm, ended.append)
        batch.run()
        assert all(vm.finished for vm in vms) and not batch._lock.locked() and not batch._stepping.locked()
        for i, vm in enumerate(vms):
            assert not vm.signal.listeners and vm.batch is None
            if vm.error is None:
                assert vm.get("rX").data.tobytes() == expected[i]
            else:
                assert isinstance(vm.error, KeyboardInterrupt)

    expected: list[bytes] = []
    for vm in made()[1]:
        expected.append(vm.run().get("rX").data.tobytes())
    def locks(here: tuple[Batch, list[VM], list[Any]]) -> list[Any]:
        return [lock for vm in here[1] for lock in lock_of(vm)]

    assert at_every_moment(made, run, locks, check, stride) > 300


WEIGHT = np.random.default_rng(9).standard_normal((8, 8)).astype(np.float32)


def test_every_sink_is_closed_whenever_ctrl_c_comes(tmp_path):
    """The files are there, or what was written of them is gone; none stays open."""
    program = assemble('LOADI rA, "text"\nSTREAM rA, FILE, NAME="a.txt"\nSTREAM rA, FILE, NAME="b.txt"\nHALT\n',
                       "files.m3asm")
    open_now: list[Any] = []

    def made() -> VM:
        for left in tmp_path.iterdir():
            left.unlink()
        vm = VM(program, backend="interpreter", files=tmp_path)
        vm._loop(lambda: False)
        open_now[:] = [s.file.handle for s in vm.sinks.values() if hasattr(s, "file")]
        assert len(open_now) == 2 and not any(h.closed for h in open_now) and vm.finished
        return vm

    def check(vm: VM) -> None:
        vm.close(complete=False)                       # Ctrl-C came before anything was done
        assert all(h.closed for h in open_now)
        left = {f.name: f.read_text() for f in tmp_path.iterdir()}
        assert all(left[name] == "text" for name in left) and left.keys() <= {"a.txt", "b.txt"}
    assert at_every_moment(made, lambda vm: vm.close(), lock_of, check) > 10
