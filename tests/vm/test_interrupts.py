"""Interrupts: who sees one and when, input that interrupts, programs of models that are interrupted in a prompt,
replay."""
from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import pytest

import m3jit
from m3jit.backends.cpu.engine import BoundBatch
from m3jit.cli import machine as cli_machine
from m3jit.errors import Interrupted
from m3jit.frontend import assemble
from m3jit.ir.plan import ABANDONED, FrameWord
from m3jit.models import hosted
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm.checked import Checker
from m3jit.vm.native import CompiledRegion
from m3jit.vm.stopping import SIGNAL
from m3jit.vm.vm import VM
from tests.vm.programs import LONG, machine, wait_until, wait_until_all_wait


# -- input that interrupts ------------------------------------------------------------------------------------------

READER = """
    SENSE rFirst, USER_INPUT
    STREAM rFirst, OUTPUT TEXT LINE
    LOADI rN, 0
loop:
    IF_INTERRUPT got
    ADD rN, rN, 1
    STREAM rN, TICK
    COMPARE rN, 400
    IF_LESS loop
    HALT
got:
    SENSE rText, rStatus, USER_INPUT NON_BLOCKING
    STREAM rText, OUTPUT TEXT LINE
    JUMP loop
""".replace("STREAM rN, TICK", 'STREAM rN, SINK RAW NAME="TICK"')


def pushed_from_another_thread(vm: VM, item: Any, **how: Any) -> None:
    thread = threading.Thread(target=vm.push_input, args=(item,), kwargs=how)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive()


def reader(tick: Any, **options: Any) -> tuple[VM, list]:
    vm, said = machine(READER, **options), []
    vm.set_sink("OUTPUT", lambda item: said.append(item.strip()))
    vm.set_sink("TICK", tick)
    vm.push_input("first")
    return vm, said


def number(item: bytes) -> int:
    return int.from_bytes(item, "little")


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_input_pushed_while_a_program_runs_interrupts_it(backend):
    def tick(item):
        if number(item) in (5, 100, 101, 300):
            pushed_from_another_thread(vm, f"at {number(item)}")
    vm, said = reader(tick, backend=backend)
    vm.run()
    assert said == ["first", "at 5", "at 100", "at 101", "at 300"]
    assert vm.get("rN") == 400 and not vm.main.interrupt


def test_input_pushed_before_a_run_or_by_its_own_thread_does_not_interrupt():
    vm, said = reader(lambda item: number(item) == 7 and vm.push_input("from inside"))
    vm.push_input("second")
    vm.run()
    assert said == ["first"]
    vm, said = reader(lambda item: number(item) == 7 and vm.push_input("from inside", interrupt=True))
    vm.run()
    assert said == ["first", "from inside"]
    vm, said = reader(lambda item: number(item) == 7 and pushed_from_another_thread(vm, "quiet", interrupt=False))
    vm.run()
    assert said == ["first"]


def test_input_somebody_waits_for_is_no_interrupt_and_what_was_read_ends_one():
    waits = """
        SENSE r1, USER_INPUT
        IF_INTERRUPT bad
        STREAM r1, SINK RAW NAME="ONE"
        PREEMPT_CHECK r2
        SENSE r3, USER_INPUT
        PREEMPT_CHECK r4
        HALT
    bad:
        ASSERT rNone
    """
    vm = machine(waits, wait_input=True)
    vm.set_sink("ONE", lambda item: pushed_from_another_thread(vm, "two"))
    runner = threading.Thread(target=vm.run)
    runner.start()
    wait_until_all_wait(vm)
    vm.push_input("one")
    runner.join(LONG)
    assert (vm.get("r2"), vm.get("r4"), vm.error) == (1, 0, None)
    assert not vm.main.interrupt


def test_an_interrupt_that_is_pending_is_not_raised_again():
    vm = machine("HALT")
    vm.interrupt()
    assert vm.stop_word.take() == "interrupt"
    vm.interrupt()
    vm.push_input("x", interrupt=True)
    assert vm.stop_word.take() == "attention" and vm.main.interrupt is True


def test_a_flood_of_input_does_not_keep_a_program_from_going_on():
    """Between two interrupts by input 64 instructions get done: the program ends while the flood goes on."""
    ended, started, flows = threading.Event(), threading.Event(), threading.Event()

    def flood():
        started.wait(LONG)
        while not ended.is_set():
            vm.push_input("x")
            flows.set()

    def tick(item):
        started.set()
        flows.wait(LONG)               # from here on there is input, and 400 rounds to see it
    vm, said = reader(tick, timeout=LONG)
    vm.set_sink("OUTPUT", said.append)
    pusher = threading.Thread(target=flood)
    pusher.start()
    try:
        vm.run()
    finally:
        ended.set()
        started.set()
        pusher.join(LONG)
    assert vm.get("rN") == 400
    assert len(said) > 1


def test_a_line_typed_while_a_program_works_interrupts_it(monkeypatch):
    """On a terminal; a pipe's lines are there all at once and interrupt nobody."""
    def tick(item):
        if number(item) == 5:
            chunks.put(b"typed\n")
            wait_until(lambda: vm.sources["USER_INPUT"].has(1) and (vm.main.interrupt or not terminal))
    for terminal in (True, False):
        chunks: queue.Queue = queue.Queue()
        monkeypatch.setattr(cli_machine.StandardInput, "_next_chunk", staticmethod(chunks.get))
        monkeypatch.setattr(cli_machine.os, "isatty", lambda descriptor: terminal)
        monkeypatch.setattr(cli_machine, "_open", lambda descriptor: True)
        vm, said = machine(READER), []
        vm.set_sink("OUTPUT", lambda item: said.append(item.strip()))
        vm.set_sink("TICK", tick)
        cli_machine.give_input(vm, [], lines=True)
        chunks.put(b"first\n")
        vm.run()
        chunks.put(b"")
        assert said == (["first", "typed"] if terminal else ["first"])


# -- replay ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_what_was_seen_is_seen_again_in_a_replay(backend):
    def tick(item):
        if number(item) in (3, 77, 78, 250):
            pushed_from_another_thread(vm, f"at {number(item)}")
    vm, said = reader(tick, record=True, backend="cpu")
    vm.run()
    seen = [e for e in vm.recorder.log if e.what == "interrupt"]
    assert [e.value for e in seen] == [True] * 4
    again, repeated = reader(lambda item: None, replay=vm.recorder.log, backend=backend)
    again.run()
    assert repeated == said and again.retired == vm.retired and len(said) == 5


def test_an_interrupt_from_outside_does_not_disturb_a_replay():
    vm, said = reader(lambda item: number(item) == 3 and vm.interrupt(), record=True)
    vm.run()
    again, repeated = reader(lambda item: number(item) % 10 == 0 and again.interrupt(), replay=vm.recorder.log,
                             backend="cpu")
    again.run()
    assert repeated == said == ["first", ""] and again.retired == vm.retired


# -- models ---------------------------------------------------------------------------------------------------------

PROMPT = np.random.default_rng(5).integers(5, 90, 27).astype(np.int64)
CHUNK = 8


def model_machine(kind: str, models: Models, **options: Any) -> tuple[VM, list]:
    made = Options(max_tokens=3, chunk=CHUNK, hosted=kind != "plain", conversation=kind == "conversation")
    programs = models.__dict__.setdefault("_programs_of_interrupts", {})          # machines of one share regions
    if kind not in programs:
        text = models.assembly(models.load("default"), "default", made)
        programs[kind] = assemble(text.replace("STREAM rToken, OUTPUT TEXT MODEL=rModel", "STREAM rToken, OUTPUT RAW"))
    vm = VM(programs[kind], models=models, threads=2, **options)
    tokens: list = []
    for name in ("TOKENS", "OUTPUT"):
        vm.set_sink(name, lambda item: tokens.append(int.from_bytes(item, "little", signed=True)))
    known = {"rTemp": 0.0, "rTopP": 1.0, "rMinP": 0.0, "rTopK": 0, "rMaxTokens": 3, "rContext": 100, "rWanted": -1,
             "rGuided": 0, "rStart": 0, "rMarks": 0, "rMade": 0, "rToken": -1}
    for name in hosted.REGISTERS if made.hosted else ():
        vm.set(name, known[name])
    vm.push_input(PROMPT)
    return vm, tokens


class At:
    """Interrupts a machine as it enters its n-th region with kernels, so that the region is given up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, vm: VM, at: int):
        run, self.entered, self.given_up = CompiledRegion.run, 0, 0

        def interrupted(region: CompiledRegion, *args: Any) -> tuple:
            self.entered += region.region.has_launches
            if region.region.has_launches and self.entered == at:
                vm.interrupt()
            left = run(region, *args)
            self.given_up += left[0] is None
            return left
        monkeypatch.setattr(CompiledRegion, "run", interrupted)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.mark.parametrize("at", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("kind", ["plain", "hosted", "conversation"])
def test_programs_of_models_are_interrupted_in_the_middle_of_a_prompt(kind, at, models, monkeypatch):
    """Chunks 1 to 4 are the prompt, then there are tokens: the program goes where it ends a text, with rPos tokens in
    the state, those of whole passes."""
    vm, tokens = model_machine(kind, models, backend="cpu")
    with monkeypatch.context() as patch:
        seen = At(patch, vm, at)
        vm.run()
    whole = min(CHUNK * (at - 1), len(PROMPT)) + max(0, at - 5)
    assert seen.given_up == 1 and vm.get("rPos") == whole
    drawn = tokens[:-1] if kind == "conversation" else tokens
    assert len(drawn) == max(0, at - 4)
    if kind != "plain":
        assert vm.get("rFinish") == hosted.INTERRUPTED
    if kind == "conversation":
        assert tokens[-1] == -hosted.INTERRUPTED
    streams = [s for h in vm.main.S if h is not None and hasattr(s := vm.main.states.get(h.id), "length")]
    assert [s.length(0) for s in streams] == ([whole] if whole else [])


def test_a_program_that_handles_an_interrupt_goes_on_with_the_same_tokens(models, monkeypatch):
    """Interrupted in every region once, the plain program answers `still here` and generates what it would have."""
    def run(at: int | None) -> tuple[list, VM]:
        vm, tokens = model_machine("plain", models, backend="cpu")
        text = models.assembly(models.load("default"), "default", Options(max_tokens=3, chunk=CHUNK))
        text = text.replace("STREAM rToken, OUTPUT TEXT MODEL=rModel", "STREAM rToken, OUTPUT RAW")
        text = text.replace("IF_INTERRUPT done", "IF_INTERRUPT heard").replace(
            "done:", "heard:\n    ADD rHeard, rHeard, 1\n    JUMP forward\ndone:")
        vm = VM(assemble(text), models=models, threads=2, backend="cpu")
        vm.set("rHeard", 0)
        vm.set_sink("OUTPUT", tokens.append)
        vm.push_input(PROMPT)
        if at is None:
            return tokens, vm.run()
        with monkeypatch.context() as patch:
            At(patch, vm, at)
            return tokens, vm.run()
    tokens, vm = run(None)
    for at in range(1, 7):
        again, other = run(at)
        assert again == tokens and other.get("rHeard") == 1
        assert all(a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b
                   for n, a in vm.registers.items() if n[0] != "S" and n != str(vm.register("rHeard"))
                   for b in [other.registers[n]])


def test_checked_mode_takes_interrupts(models, monkeypatch):
    vm, tokens = model_machine("hosted", models, backend="cpu")
    checker = Checker(vm)
    with monkeypatch.context() as patch:
        At(patch, vm, 2)
        vm.run()
    assert (vm.get("rPos"), tokens, checker.entries > 0) == (CHUNK, [], True)


def test_a_recorded_interruption_of_a_prompt_is_replayed_anywhere(models, monkeypatch):
    vm, tokens = model_machine("conversation", models, backend="cpu", record=True)
    with monkeypatch.context() as patch:
        At(patch, vm, 3)
        vm.run()
    again, repeated = model_machine("conversation", models, backend="interpreter", replay=vm.recorder.log)
    again.run()
    assert repeated == tokens == [-hosted.INTERRUPTED]
    assert again.retired == vm.retired and again.get("rPos") == 2 * CHUNK


def test_a_machine_alone_in_a_batch_is_interrupted_in_the_middle(models, monkeypatch):
    vm, tokens = model_machine("hosted", models, backend="cpu")
    batch = m3jit.Batch()
    batch.add(vm)
    with monkeypatch.context() as patch:
        seen = At(patch, vm, 3)
        batch.run()
    assert (seen.given_up, tokens, vm.get("rFinish"), vm.get("rPos")) == (1, [], hosted.INTERRUPTED, 2 * CHUNK)


# -- several machines in one region ---------------------------------------------------------------------------------

class Together:
    """Calls act(entry) as a region is entered for several contexts, for the n-th time.  given_up: entries that were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Any):
        run, self.entered, self.given_up = BoundBatch.__call__, 0, 0

        def interrupted(bound: BoundBatch) -> None:
            self.entered += 1
            act(self.entered)
            run(bound)
            self.given_up += bool((bound.frames[:, FrameWord.EXIT] == ABANDONED).any())
        monkeypatch.setattr(BoundBatch, "__call__", interrupted)


def three(models: Models) -> tuple[list, m3jit.Batch, list]:
    made = [model_machine("hosted", models, backend="cpu") for _ in range(3)]
    batch = m3jit.Batch()
    return made, batch, [batch.add(vm) for vm, _ in made]


def seen(vm: VM) -> tuple:
    return ({n: v.tobytes() if hasattr(v, "tobytes") else repr(v) for n, v in vm.registers.items() if n[0] != "S"},
            vm.main.rng, vm.retired)


@pytest.mark.parametrize("at", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("how", ["interrupt", "input", "cancel"])
def test_one_of_a_batch_is_interrupted_in_the_middle(how, at, models, monkeypatch):
    """It has the tokens of whole passes; the others enter the region again and give what they give alone."""
    made, batch, members = three(models)
    (vm, tokens), *others = made
    acts = {"interrupt": vm.interrupt, "input": lambda: vm.push_input(PROMPT), "cancel": members[0].cancel}
    alone, said = model_machine("hosted", models, backend="cpu")
    alone.run()
    with monkeypatch.context() as patch:
        together = Together(patch, lambda n: acts[how]() if n == at else None)
        batch.run()
    whole = min(CHUNK * (at - 1), len(PROMPT)) + max(0, at - 5)
    assert together.given_up == 1 and (vm.get("rPos") or 0) == whole and len(tokens) == max(0, at - 4)
    assert isinstance(members[0].error, Interrupted) if how == "cancel" else vm.get("rFinish") == hosted.INTERRUPTED
    for other, more in others:
        assert more == said and seen(other) == seen(alone)


def test_nobody_s_work_is_dropped_twice_in_a_row(models, monkeypatch):
    """However often somebody is interrupted."""
    made, batch, members = three(models)
    alone, said = model_machine("hosted", models, backend="cpu")
    alone.run()
    with monkeypatch.context() as patch:               # as a signal does, at every entry
        together = Together(patch, lambda n: made[0][0].stop_word.set(SIGNAL))
        batch.run()
    assert together.given_up > 4 and together.entered <= 3 * 6
    assert all(m.error is None for m in members)
    for vm, tokens in made:
        assert tokens == said and seen(vm) == seen(alone)


def test_contexts_that_stand_at_one_region_are_interrupted_together(monkeypatch):
    """Of one machine: nothing is put aside for those whose turn has not come, and all go on as they would have."""
    source = """
        LOADI rOwn, 1
        FORK rC, work
        LOADI rOwn, 2
        FORK rC, work
        LOADI rOwn, 3
    work:
        LOADI rI, 0
    loop:
        YIELD
        ADD rX, rX, rOwn
        MATVEC rX, rX, rW
        SOFTMAX rX, rX
        ADD rI, rI, 1
        STREAM rX, SINK, TENSOR, NAME="DONE"
        COMPARE rI, 4
        IF_LESS loop
        HALT"""

    def run(at: int) -> tuple[list, int]:
        vm, items = VM(assemble(source), backend="cpu", threads=2), []
        vm.set("rX", np.ones((2, 64), np.float32))
        vm.set("rW", np.random.default_rng(1).random((64, 64)).astype(np.float32))
        vm.set_sink("DONE", lambda item: items.append(item.tobytes()))
        with monkeypatch.context() as patch:
            together = Together(patch, lambda n: vm.stop_word.set(SIGNAL) if n == at else None)
            vm.run()
        return items, together.given_up
    plain, given_up = run(0)
    assert len(plain) == 12 and given_up == 0
    for at in (1, 2, 3):
        assert run(at) == (plain, 1)
