"""Machines in a batch give what they give alone; they join, wait, fail and leave without harm to the others."""
from __future__ import annotations

import threading
import time

import pytest

import m3jit
from m3jit.errors import Interrupted, LimitError, Trap, UserError
from m3jit.models.provider import Models
from m3jit.vm.batch import Batch
from m3jit.vm.region_exits import Way

PROMPTS = ["It is a truth", "The carriage stopped at the door, and she", "No",
           "Emma Woodhouse, handsome, clever, and rich",
           "My dear Mr. Bennet, said his lady to him one day, have you heard that", "She had been"]


@pytest.fixture(scope="module")
def models():
    return Models()


def machine(models, prompt, seed=1, tokens=8, **more):
    """A machine of the default model and the list its text goes to."""
    from m3jit.models.program import Options
    model = models.load("default")
    program = models.__dict__.setdefault("_test_programs", {})
    if tokens not in program:
        program[tokens] = models.program(model, "default", Options(max_tokens=tokens, temperature=0.8))
    vm = m3jit.VM(program[tokens], models=models, seed=seed, threads=2, **more)
    text: list[str] = []
    vm.set_sink("OUTPUT", text.append)
    vm.push_input(prompt)
    return vm, text


def alone(models, prompt, seed=1, tokens=8):
    vm, text = machine(models, prompt, seed, tokens)
    vm.run()
    return text, state(vm)


def state(vm):
    """Registers and counters of the main context as comparable values."""
    return {k: v.data.tobytes() if hasattr(v, "data") else repr(v) for k, v in vm.registers.items()}, vm.retired, \
        vm.main.rng


def test_machines_give_what_they_give_alone(models):
    made = [machine(models, p, seed=i) for i, p in enumerate(PROMPTS)]
    batch = Batch()
    members = [batch.add(vm) for vm, _ in made]
    batch.run()
    assert [m.error for m in members] == [None] * len(members) and all(m.ended for m in members)
    stats = batch.stats                          # they really shared regions, and launches served several machines
    assert stats["shared_entries"] > 30 and stats["joined_launches"] > stats["launches"] > 0
    for i, (vm, text) in enumerate(made):
        assert (text, state(vm)) == alone(models, PROMPTS[i], i)


def test_machines_join_and_leave_at_any_round(models):
    batch, made = Batch(), []
    for i, p in enumerate(PROMPTS):
        vm, text = machine(models, p, i, tokens=4 + i)
        batch.add(vm)
        made.append((vm, text))
        batch.step()
        batch.step()
    batch.run()
    assert not batch.members and not batch.step()
    for i, (vm, text) in enumerate(made):
        assert (text, state(vm)) == alone(models, PROMPTS[i], i, 4 + i)


def test_a_machine_that_waits_for_input_is_not_waited_for(models):
    first, text = machine(models, PROMPTS[0])
    patient = m3jit.VM(m3jit.assemble("SENSE rX, USER_INPUT TEXT\nSTREAM rX\nHALT"), wait_input=True)
    said: list[str] = []
    patient.set_sink("OUTPUT", said.append)
    batch = Batch()
    batch.add(first)
    member = batch.add(patient)
    while len(batch.members) > 1:
        assert batch.step()
    assert text == alone(models, PROMPTS[0])[0] and not member.ended and not batch.step()
    patient.push_input("hello")
    batch.wait(10)
    batch.run()
    assert said == ["hello"] and member.ended and member.error is None


def test_errors_end_one_machine_alone(models):
    good, text = machine(models, PROMPTS[0])
    bad = m3jit.VM(m3jit.assemble('LOADI rX, 0\nASSERT rX CODE=3 MESSAGE="wrong"\nHALT'))
    stopped, _ = machine(models, PROMPTS[1])
    limited, _ = machine(models, PROMPTS[2], max_steps=300)
    ends: list[str] = []
    batch = Batch()
    for name, vm in (("good", good), ("bad", bad), ("stopped", stopped), ("limited", limited)):
        batch.add(vm, on_end=lambda m, name=name: ends.append(f"{name} {type(m.error).__name__}"))
    batch.step()
    stopped.stop()
    batch.run()
    assert sorted(ends) == ["bad Trap", "good NoneType", "limited LimitError", "stopped Interrupted"]
    assert text == alone(models, PROMPTS[0])[0]
    assert isinstance(bad.error, Trap) and isinstance(stopped.error, Interrupted)
    assert isinstance(limited.error, LimitError)


@pytest.mark.parametrize("code", ["HALT", 'LOADI rX, 0\nASSERT rX CODE=3 MESSAGE="wrong"'], ids=["good", "bad"])
def test_what_on_end_raises_leaves_the_round(models, code):
    """It is no error of a machine, and the others go on."""
    def on_end(member):
        raise KeyError("host")
    good, text = machine(models, PROMPTS[0])
    batch = Batch()
    batch.add(good)
    ended = batch.add(m3jit.VM(m3jit.assemble(code)), on_end)
    with pytest.raises(KeyError, match="host"):
        batch.run()
    assert ended.ended and type(ended.error) is (type(None) if code == "HALT" else Trap)
    assert [m.vm for m in batch.members] == [good]
    batch.run()
    assert text == alone(models, PROMPTS[0])[0]


def test_a_machine_is_added_once(models):
    vm, _ = machine(models, PROMPTS[0], tokens=1)
    batch = Batch()
    batch.add(vm)
    with pytest.raises(UserError, match="is in a batch already"):
        Batch().add(vm)
    batch.run()
    with pytest.raises(UserError, match="has ended already"):
        batch.add(vm)


def test_limits_of_one_machine(models):
    good, text = machine(models, PROMPTS[0])
    endless = m3jit.assemble("LOADI rX, 0\nloop:\nADD rX, rX, 1\nJUMP loop")
    slow, other = m3jit.VM(endless, timeout=0.3), m3jit.VM(endless, max_steps=50_000)
    batch = Batch()
    members = [batch.add(vm) for vm in (good, slow, other)]
    batch.run()
    assert text == alone(models, PROMPTS[0])[0] and members[0].error is None
    assert [type(m.error) for m in members[1:]] == [LimitError, LimitError]
    assert "not finished after 0.3 s" in str(members[1].error) and "max_steps = 50000" in str(members[2].error)


def test_machines_join_and_are_cancelled_from_other_threads(models):
    made = [machine(models, p, i) for i, p in enumerate(PROMPTS[:4])]
    endless = m3jit.VM(m3jit.assemble("LOADI rX, 0\nloop:\nADD rX, rX, 1\nJUMP loop"))
    batch, gone = Batch(), threading.Event()
    member = batch.add(endless, on_end=lambda m: gone.set())

    def others():
        for vm, _ in made:
            batch.add(vm)
        while len(batch.members) > 1:
            time.sleep(0.002)
        member.cancel()
    thread = threading.Thread(target=others)
    thread.start()
    batch.run()
    thread.join()
    assert gone.is_set() and isinstance(member.error, Interrupted)
    for i, (vm, text) in enumerate(made):
        assert (text, state(vm)) == alone(models, PROMPTS[i], i)


def test_a_machine_goes_back_in_time_between_rounds(models):
    """A snapshot of a machine in a batch is as good as one of a machine alone: the text behind it comes again."""
    (vm, text), (other, more) = machine(models, PROMPTS[0]), machine(models, PROMPTS[1])
    batch = Batch()
    batch.add(vm)
    batch.add(other)
    for _ in range(4):
        batch.step()
    said, snapshot = len(text), vm.fork()
    for _ in range(3):
        batch.step()
    vm.abort(snapshot, resume=True)
    batch.run()
    want = alone(models, PROMPTS[0])[0]
    assert "".join(text) == "".join(want[:said + 3]) + "".join(want[said:])
    assert more == alone(models, PROMPTS[1])[0]


def test_alone_in_a_batch_a_machine_enters_at_once(models):
    vm, text = machine(models, PROMPTS[0])
    batch = Batch()
    batch.add(vm)
    batch.run()
    assert (text, state(vm)) == alone(models, PROMPTS[0])
    assert batch.stats["shared_entries"] == 0 and batch.stats["entries"] > 5


def test_prompts_take_turns_and_tokens_go_first(models):
    """With room for 40 rows a round and prompts of two chunks, one chunk goes on each round, in turn; the generating
    machine gets a token in every one."""
    (first, text), rest = machine(models, PROMPTS[0], tokens=30), [machine(models, "the " * 100, i) for i in range(3)]
    batch = Batch(rows=40)
    batch.add(first)
    batch.step()
    batch.step()
    for vm, _ in rest:
        batch.add(vm)
    for chunks in (1, 2, 3):
        before, entries = len(text), batch.stats["entries"]
        batch.step()
        assert len(text) == before + 1 and batch.stats["entries"] == entries + 2
        assert [vm.get("rPos") or 0 for vm, _ in rest].count(64) == chunks
    batch.run()
    assert text == alone(models, PROMPTS[0], tokens=30)[0]
    for i, (vm, said) in enumerate(rest):
        assert (said, state(vm)) == alone(models, "the " * 100, i)


@pytest.mark.parametrize("rows", [0, -1, True, 2.5, "8"])
def test_rows_of_a_round(rows):
    with pytest.raises(UserError, match="a number of rows from 1"):
        Batch(rows=rows)


def test_reading_the_output_of_a_machine_in_a_batch(models):
    """`output` waits for the batch instead of running the machine; running it by hand is refused."""
    vm, _ = machine(models, PROMPTS[0])
    pieces = vm.output()
    batch = Batch()
    batch.add(vm)
    batch.step()
    for run in (vm.run, vm.step):
        with pytest.raises(UserError, match="takes part in a batch, which runs it"):
            run()
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.extend(pieces))
    thread.start()
    while batch.members:
        if not batch.step():
            batch.wait(0.01)                             # the reader is behind
    thread.join()
    assert read == alone(models, PROMPTS[0])[0]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_ends_the_machines_it_hits(models, monkeypatch, kind):
    """Ctrl-C while machines leave a region they entered together: those are over, the others go on; the batch too."""
    hit = [machine(models, p, i) for i, p in enumerate(PROMPTS[:2])]
    other, text = machine(models, "No", 5)               # one token: a region of its own
    batch = Batch()
    members = [batch.add(vm) for vm, _ in hit]
    batch.add(other)
    batch.step()
    values, calls = Way.values, []

    def interrupted(*args):
        calls.extend(args[:1] if args[0].tensors else [])      # not those of scalar code in between
        if len(calls) == 2:
            raise kind("now")
        return values(*args)
    with monkeypatch.context() as m:
        m.setattr(Way, "values", interrupted)
        if kind is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                batch.step()
        else:
            batch.step()
    assert [type(m.error) for m in members] == [kind] * 2 and all(m.ended for m in members)
    batch.run()
    assert text == alone(models, "No", 5)[0]


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_machine_that_failed_has_its_error_whenever_ctrl_c_comes(monkeypatch, when):
    """It comes as the machine is ended; in the next round it is."""
    vm = m3jit.VM(m3jit.assemble("again: JUMP again"), backend="interpreter", max_steps=100)
    fail, ends, came = vm._fail, [], []

    def interrupted(error):
        if when == "behind" or came:
            fail(error)
        if not came:
            came.append(error)
            raise KeyboardInterrupt
    monkeypatch.setattr(vm, "_fail", interrupted)
    batch = Batch()
    member = batch.add(vm, on_end=lambda m: ends.append(type(m.error)))
    with pytest.raises(KeyboardInterrupt):
        batch.step()
    batch.run()
    assert ends == [LimitError] and isinstance(member.error, LimitError) and isinstance(vm.error, LimitError)
    assert vm._closed and not vm.scheduler.contexts
