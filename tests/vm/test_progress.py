"""Whoever raises the stop word again and again: a run gets on, and what was dropped and looked at again repeats."""
from __future__ import annotations

import signal
import threading
from typing import Any, Callable

import numpy as np
import pytest

from m3jit.errors import Divergence, Interrupted, Trap
from m3jit.frontend.assembler import assemble
from m3jit.vm.batch import Batch
from m3jit.vm.context import ByInput
from m3jit.vm.native import CompiledRegion
from m3jit.vm.recording import Recorder, RecordEnds
from m3jit.vm.stopping import ATTENTION, SIGNAL, SOON, URGENT, StopWord, interruptible
from m3jit.vm.vm import VM
from tests.vm.programs import LONG, machine, wait_until, wait_until_all_wait

MATRIX = np.random.default_rng(1).random((96, 96)).astype(np.float32)
LAYERS = """
    LOADI rN, 0
go:
    SENSE rNow, TIME
    MATVEC rB, rB, rA
    SOFTMAX rB, rB
    ADD rN, rN, 1
    COMPARE rN, 6
    IF_LESS go
    HALT
"""


def layers(**options: Any) -> VM:
    vm = machine(LAYERS, timeout=LONG, **options)
    vm.set("rA", MATRIX)
    vm.set("rB", MATRIX[0])
    return vm


@pytest.fixture
def entering(monkeypatch) -> Callable[[Callable[[int], Any]], list[int]]:
    """What is called in front of every entry of compiled code, with its number; returns the list that counts them."""
    def install(before: Callable[[int], Any]) -> list[int]:
        entries: list[int] = []
        run = CompiledRegion.run

        def entered(self, *args, **more):
            entries.append(len(entries))
            assert len(entries) < 1000, "compiled code is entered again and again, and nothing is done"
            before(entries[-1])
            return run(self, *args, **more)
        monkeypatch.setattr(CompiledRegion, "run", entered)
        return entries
    return install


# -- getting on -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("numbers", [(signal.SIGALRM,), (signal.SIGALRM, signal.SIGCHLD, signal.SIGWINCH)])
@pytest.mark.parametrize("backend", ["cpu", "python"])
def test_signals_that_are_faster_than_a_region_do_not_hold_a_run_up(backend, numbers, entering):
    wanted = layers(backend=backend).run().get("rB").tobytes()
    vm = layers(backend=backend)
    entries = entering(lambda n: [vm.stop_word.heard(number) for number in numbers])
    vm.run()
    assert vm.get("rB").tobytes() == wanted and len(entries) > 1


def test_signals_of_changing_numbers_do_not_hold_a_run_up(entering):
    """Each number brings a context out once."""
    wanted = layers(backend="cpu").run().get("rB").tobytes()
    vm = layers(backend="cpu")
    entries = entering(lambda n: vm.stop_word.heard(1 + n % 64))
    vm.run()
    assert vm.get("rB").tobytes() == wanted and len(entries) > 64


@pytest.mark.parametrize("backend", ["cpu", "python"])
def test_threads_that_look_all_the_time_do_not_hold_a_run_up(backend, entering):
    wanted = layers(backend=backend).run().get("rB").tobytes()
    vm = layers(backend=backend)
    entries = entering(lambda n: vm.stop_word.set(ATTENTION))
    vm.run()
    assert vm.get("rB").tobytes() == wanted and entries


@pytest.mark.parametrize("reason", [ATTENTION, SIGNAL])
@pytest.mark.parametrize("backend", ["cpu", "python"])
def test_a_loop_that_is_entered_with_a_raised_word_is_not_interpreted(backend, reason, entering):
    """An entry at a loop head would be left there at once: its first kernel must not be the interpreter's, which is
    far slower."""
    vm = machine(LAYERS.replace("SENSE rNow, TIME", ""), backend=backend, timeout=LONG)
    vm.set("rA", MATRIX)
    vm.set("rB", MATRIX[0])
    entries = entering(lambda n: vm.stop_word.set(ATTENTION) if reason == ATTENTION else vm.stop_word.heard(14))
    vm.run()
    assert vm.regions.retired >= 6 * 5 and len(entries) > 6


def test_interrupts_that_nobody_takes_do_not_hold_a_run_up(entering):
    wanted = layers(backend="cpu").run().get("rB").tobytes()
    vm = layers(backend="cpu")
    entries = entering(lambda n: vm.interrupt())
    vm.run()
    assert vm.get("rB").tobytes() == wanted and entries


def test_a_context_that_is_held_up_gets_on_though_others_do_meanwhile(entering):
    """The child is woken each time the main context is brought out of its region."""
    vm = machine("""
        FORK rC, child, RED
        LOADI rN, 0
    go:
        SENSE rNow, TIME
        MATVEC rB, rB, rA
        ADD rN, rN, 1
        COMPARE rN, 6
        IF_LESS go
        STREAM rN, SINK, RAW, NAME="END"
        HALT
    child:
        SENSE rT, rStatus, USER_INPUT
        COMPARE rStatus, 1
        IF_EQUAL child
        HALT
    """, backend="cpu", wait_input=True, timeout=LONG)
    vm.set("rA", MATRIX)
    vm.set("rB", MATRIX[0])

    def disturb(n: int) -> None:
        if vm.machine.ctx is vm.main:
            vm.push_input("x")
            vm.stop_word.heard(signal.SIGALRM)
    entries = entering(disturb)
    vm.set_sink("END", lambda item: vm.close_input())
    vm.run()
    assert len(entries) > 6 and vm.get("rN") == 6


def test_a_stop_ends_a_region_however_many_signals_came(entering):
    vm = layers(backend="cpu")

    def disturb(n: int) -> None:
        vm.stop_word.heard(signal.SIGALRM)
        if n == 3:
            vm.stop()
            assert vm.stop_word.word[0] == URGENT
    entries = entering(disturb)
    with pytest.raises(Interrupted):
        vm.run()
    assert len(entries) == 4


def test_another_signal_is_urgent_however_many_of_one_came():
    """Ctrl-C behind a timer."""
    word, ctx = StopWord(), layers().main
    for number, level in ((14, URGENT), (14, SOON), (2, URGENT), (2, SOON)):
        word.running = ctx
        word.heard(number)
        assert (word.raised, word.word[0], word.take()) == (True, level, SIGNAL if level == URGENT else ATTENTION)
    word.heard(14)
    word.heard(17)
    assert word.word[0] == URGENT and word.take() == SIGNAL
    ctx.heard = frozenset()                            # it has got something done
    word.heard(14)
    assert word.word[0] == URGENT


def test_the_number_of_a_signal_reaches_the_word():
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread only")
    word, ctx, came = StopWord(), layers().main, []
    word.running = ctx
    before = signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    try:
        with interruptible(word):
            signal.raise_signal(signal.SIGUSR1)
            wait_until(lambda: word.raised)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came and word.take() == SIGNAL and ctx.heard == {signal.SIGUSR1}


def run_alone(vm: VM) -> None:
    vm.run()


def read_output(vm: VM) -> None:
    assert list(vm.output()) == []


def run_batch(vm: VM) -> None:
    batch = Batch()
    batch.add(vm)
    batch.run()
    assert vm.error is None


@pytest.mark.parametrize("run", [run_alone, read_output, run_batch])
def test_a_signal_is_heard_by_compiled_code_however_it_is_run(run, entering):
    """Python's handler runs only when compiled code is left: the word says that it is to be."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread only")
    vm, heard = layers(backend="cpu"), []

    def signalled(entry: int) -> None:
        if entry == 1:
            signal.raise_signal(signal.SIGUSR1)
            wait_until(lambda: vm.stop_word.raised)
            heard.append(int(vm.stop_word.word[0]))
    entering(signalled)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        run(vm)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [URGENT] and vm.get("rN") == 6


def test_an_interrupt_that_becomes_visible_behind_the_look_is_no_reason_to_look_again():
    """IF_INTERRUPT counts itself: at its place input is quiet still."""
    ctx = layers().main
    ctx.raised, ctx.retired, ctx.index, ctx.quiet_until = ByInput(), 70, 3, 70
    ctx.looked = (70, 3)
    assert ctx.sees_interrupt() and not ctx.looks_again() and (ctx.retired, ctx.index) == (70, 3)
    ctx.quiet_until = 69
    assert ctx.looks_again() and (ctx.retired, ctx.index) == (69, 2) and not ctx.looks_again()


# -- looks that were taken back, in a replay ------------------------------------------------------------------------

TOGETHER = """
    LOADI rHeard, 0
    LOADI rK, 0
    FORK rC, child, RED
work:
    IF_INTERRUPT heard
    MATVEC rB, rB, rA
    SOFTMAX rB, rB
    ADD rN, rN, 1
    COMPARE rN, 12
    IF_LESS work
    STREAM rN, SINK, RAW, NAME="END"
    HALT
heard:
    ADD rHeard, rHeard, 1
    STREAM rN, OUTPUT, TEXT, LINE
    JUMP work
child:
    SENSE rT, USER_INPUT
    STREAM rT, OUTPUT, TEXT, LINE
    ADD rK, rK, 1
    COMPARE rK, 4
    IF_LESS child
    HALT
"""


def together(backend: str, **how: Any) -> tuple[VM, list]:
    vm, said = VM(assemble(TOGETHER, "together.m3asm"), backend, 1, wait_input=True, timeout=LONG, **how), []
    vm.set("rA", MATRIX)
    vm.set("rB", MATRIX[0])
    vm.set("rN", 0)
    vm.set_sink("OUTPUT", said.append)
    vm.set_sink("END", lambda item: vm.close_input())
    return vm, said


@pytest.fixture(scope="module")
def recorded() -> tuple[list, list, int]:
    """(log, output, instructions): the child's input and an interrupt come in front of the same region, four times."""
    vm, said = together("cpu", record=True)
    run, entries = CompiledRegion.run, []

    def entered(self, *args, **more):
        entries.append(1)
        if len(entries) in (2, 5, 9, 10):
            vm.push_input(f"x{len(entries)}")
            vm.interrupt()
        return run(self, *args, **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledRegion, "run", entered)
        vm.run()
    return vm.recorder.log, said, vm.retired


def test_the_child_comes_first_where_both_come_together(recorded):
    log, said, _ = recorded
    seen = [e for e in log if e.what == "interrupt"]
    assert len(seen) >= 3 and said[0] == "x2\n"
    at = log.index(seen[0])
    assert log[at - 1].context != 1                    # the look that saw it is behind what the child did


@pytest.mark.parametrize("backend", ["interpreter", "python", "cpu", "cpu:baseline"])
def test_input_and_interrupt_at_one_moment_are_replayed_anywhere(backend, recorded):
    log, said, retired = recorded
    again, repeated = together(backend, replay=log)
    again.run()
    assert repeated == said and again.retired == retired and again.get("rHeard") >= 3


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_signals_during_a_replay_change_nothing(backend, recorded, entering):
    log, said, retired = recorded
    again, repeated = together(backend, replay=log)
    entering(lambda n: (again.stop_word.heard(signal.SIGALRM), again.interrupt()))
    again.run()
    assert repeated == said and again.retired == retired


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_random_moments_of_input_and_interrupts_are_replayed(backend):
    """Pushed and raised in front of entries that a seed chooses, alone and together."""
    for seed in range(6):
        vm, said = together("cpu", record=True)
        moments = iter(np.random.default_rng(seed).integers(0, 5, 1000).tolist())

        def disturb() -> None:
            what = next(moments)
            if what in (0, 1):
                vm.push_input("x")
            if what in (1, 2):
                vm.interrupt()
            if what == 3:
                vm.stop_word.heard(signal.SIGALRM)
        with pytest.MonkeyPatch.context() as patch:
            run = CompiledRegion.run

            def entered(self, *args, **more):
                disturb()
                return run(self, *args, **more)
            patch.setattr(CompiledRegion, "run", entered)
            vm.run()
        assert vm.recorder.log
        again, repeated = together(backend, replay=vm.recorder.log)
        again.run()
        assert repeated == said and again.retired == vm.retired, seed


# -- a replay that cannot go on -------------------------------------------------------------------------------------

WAITS = """
    FORK rC, child, RED
    SENSE rT, TOKEN
    STREAM rT, LINE
    HALT
child:
    SENSE rU, USER_INPUT
    STREAM rU, LINE
    HALT
"""


def waits(**how: Any) -> VM:
    vm = machine(WAITS, wait_input=True, timeout=LONG, **how)
    vm.set_sink("OUTPUT", lambda item: None)
    return vm


def log_of_waits() -> list:
    vm = waits(record=True)
    sleep, given = vm._wait, []

    def wait() -> None:                                # every context waits
        if not given:
            given.append(threading.Thread(target=lambda: (vm.push_input("a", "TOKEN"), vm.push_input("b"))))
            given[0].start()
            given[0].join()
        sleep()
    vm._wait = wait
    vm.run()
    return vm.recorder.log


def test_waits_that_the_log_never_ends_are_said():
    """Every context waits, and the next event is of none of them: nothing outside can end that."""
    log = log_of_waits()
    waits(replay=log).run()
    at = [n for n, e in enumerate(log) if e.what == "wake"]
    assert at, "nobody waited"
    for n in at:
        with pytest.raises(Divergence, match="no context can go on|stopped waiting|waits for|goes on|comes to"):
            waits(replay=log[:n] + log[n + 1:]).run()
    n = at[0]                                          # a moment that never comes
    later = log[n]._replace(value=(log[n].value[0], log[n].value[1], log[n].value[2] + 1000))
    with pytest.raises(Divergence) as e:
        waits(replay=log[:n] + [later] + log[n + 1:]).run()
    assert "no context can go on" in str(e.value) and "went on with wake of context" in str(e.value)
    assert "another program, version or input" in str(e.value)


@pytest.mark.parametrize("by_itself, error", [(False, RecordEnds), (True, Divergence)])
def test_waits_behind_the_end_of_a_log(by_itself, error):
    log = log_of_waits()
    n = next(n for n, e in enumerate(log) if e.what == "wake")
    recorder = Recorder(replay=log[:n])
    recorder.ended_by_itself = by_itself
    with pytest.raises(error, match="waits for"):
        waits(record=recorder).run()


def test_a_batch_says_it_too():
    from m3jit.vm.batch import Batch
    log = log_of_waits()
    n = next(n for n, e in enumerate(log) if e.what == "wake")
    batch = Batch()
    member = batch.add(waits(replay=log[:n] + log[n + 1:]))
    batch.run()
    assert isinstance(member.error, Divergence)


# -- an interrupt and the SENSE that answers it ---------------------------------------------------------------------

SENSES = """
    SENSE rFirst, USER_INPUT
    STREAM rFirst, SINK RAW NAME="GO"
    SENSE rText, USER_INPUT FORMAT=FORM
    HALT
"""


def test_a_sense_that_fails_leaves_item_and_interrupt():
    vm = machine(SENSES.replace("FORMAT=FORM", "AUDIO_PCM"))
    vm.set_sink("GO", lambda item: vm.push_input("text", interrupt=True))
    vm.push_input("first")
    with pytest.raises(Trap, match="not AUDIO_PCM"):
        vm.run()
    assert vm.main.interrupt and vm.main.cursors == {"USER_INPUT": 1}


def test_input_that_comes_while_the_one_before_is_read_interrupts(monkeypatch):
    vm = machine(SENSES.replace("FORMAT=FORM", ""))
    vm.set_sink("GO", lambda item: vm.push_input("text", interrupt=True))
    vm.push_input("first")
    sensed = type(vm.machine)._sensed

    def late(self, value, form, model):
        if value == "text":
            vm.push_input("more", interrupt=True)
        return sensed(self, value, form, model)
    monkeypatch.setattr(type(vm.machine), "_sensed", late)
    vm.run()
    assert vm.main.interrupt and vm.main.cursors == {"USER_INPUT": 2}
    monkeypatch.undo()
    vm = machine(SENSES.replace("FORMAT=FORM", ""))
    vm.set_sink("GO", lambda item: vm.push_input("text", interrupt=True))
    vm.push_input("first")
    vm.run()
    assert not vm.main.interrupt
