"""Going back is exact: every time of a run has one state, however it is reached, on every backend."""
from __future__ import annotations

import random
from typing import Any

import pytest

from m3jit.frontend.assembler import assemble
from m3jit.timetravel import engine as engines
from m3jit.timetravel.engine import Engine
from m3jit.timetravel.history import History, Watcher
from m3jit.vm.digest import digest
from m3jit.vm.vm import VM

CONTEXTS = """
.data
table: .f32 [1, 2, 3, 4]
.text
    FORK rChild, child, GREEN
    LOADI rN, 0
    LOADI rA, 0x3000000000000000
again:
    LOADI rX, @table
    MUL rX, rX, rX
    REDUCE rS, rX, SUM
    GETELEM rS, rS
    CYCLES_COUNT rT
    SNAPSHOT rSnap
    MEMSET rA, PATTERN=9, LEN=8, OFFSET=rN
    FORK rBack
    ADD rN, rN, 1
    SENSE rItem, rStatus, RING, NAME="r"
    STREAM rItem, LINE
    COMPARE rN, 12
    IF_LESS again
    KILL_CONTEXT rChild
    HALT
child:
    LOADI rK, 0
more:
    SENSE rText, rStatus, USER_INPUT
    STREAM rStatus, LINE
    ADD rK, rK, 1
    STREAM rK, RING, TENSOR, NAME="r"
    JUMP more
"""
LOOPS = """
.data
v: .f32 [[1, 2], [3, 4]]
.text
    LOADI rV, @v
    LOADI rSum, @v
    LOADI rI, 0
outer:
    LOADI rJ, 0
inner:
    MUL rSum, rSum, rV
    ADD rJ, rJ, 1
    COMPARE rJ, 5
    IF_LESS inner
    FORK rBefore
    COMPARE rI, 3
    IF_NOT_EQUAL on
    LOADI rI, 4
    ABORT rBefore
on:
    CALL square, [rI]
    STREAM rI, LINE
    SENSE rWhen, TIME
    ADD rI, rI, 1
    COMPARE rI, 9
    IF_LESS outer
    HALT
.func square(rN)
    MUL rN, rN, 1
    RET
"""


def make(source: str, backend: str = "interpreter", inputs: tuple = (), **options: Any) -> Engine:
    watcher = Watcher(History(), live=True)
    vm = VM(assemble(source, "prog.m3asm") if isinstance(source, str) else source, backend, record=watcher, **options)
    vm.set_sink("OUTPUT", lambda item: None)
    for item in inputs:
        vm.push_input(item)
    return Engine(vm, watcher)


def state(engine: Engine) -> tuple:
    """Everything that a program can tell times apart by."""
    return engine.time, [(c.id, c.index, c.retired, c.status, digest(c)) for c in engine.contexts], \
        [s.id for s in engine.vm.snapshots.live()], \
        {n: (r.base, r.taken, len(r.items)) for n, r in engine.vm.rings.items() if r.end}


@pytest.fixture(autouse=True)
def _close_checkpoints(monkeypatch):
    """Checkpoints so close that small programs need many."""
    monkeypatch.setattr(engines, "FIRST_DISTANCE", 7)
    monkeypatch.setattr(engines, "KEPT", 4)
    monkeypatch.setattr(engines, "NEAR", 2)
    monkeypatch.setattr(engines, "NEAR_KEPT", 6)


@pytest.mark.parametrize("source", [CONTEXTS, LOOPS], ids=["contexts", "loops"])
@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_stepping_back_goes_through_the_same_states(source, backend):
    engine = make(source, backend, ("a", "b"))
    states = [state(engine)]
    while engine.ended is None:
        engine.step()
        states.append(state(engine))
    assert len(states) > 80
    for expected in reversed(states[:-1]):
        engine.back()
        if engine.time != expected[0]:                 # the last step may have retired nothing
            continue
        assert state(engine) == expected
    assert engine.time == 0
    rng = random.Random(4)
    by_time = {s[0]: s for s in states[:-1]}
    for _ in range(40):
        time = rng.choice(list(by_time))
        engine.go(time)
        assert state(engine) == by_time[time]


def test_the_run_is_that_of_a_machine_that_nobody_looks_at():
    engine = make(CONTEXTS, inputs=("a", "b"))
    while not engine.step(3) < 3:
        engine.back(2)
    looked = [e.value for e in engine.history.events if e.what == "output"]
    vm = VM(assemble(CONTEXTS, "prog.m3asm"), "interpreter", record=True)
    vm.set_sink("OUTPUT", lambda item: None)
    for item in ("a", "b"):
        vm.push_input(item)
    vm.run()
    assert looked == [e.value for e in vm.recorder.log if e.what == "output"] and vm.retired == engine.time


def test_turns_are_those_of_a_run(monkeypatch):
    """Two contexts that compute and share memory: who is at what when does not depend on the steps."""
    from m3jit.vm import scheduler
    monkeypatch.setattr(scheduler, "QUANTUM", 10)
    source = """
    FORK rC, other, GREEN
    LOADI rA, 0x6000000000000000
    LOADI rN, 0
mine:
    ADD rN, rN, 1
    MUL rM, rN, 3
    ADD rM, rM, 1
    MEMSET rA, PATTERN=1, LEN=1
    COMPARE rN, 40
    IF_LESS mine
    STREAM rN, LINE
    HALT
other:
    LOADI rB, 0x6000000000000000
    LOADI rK, 0
his:
    ADD rK, rK, 1
    MEMSET rB, PATTERN=2, LEN=1
    COMPARE rK, 60
    IF_LESS his
    STREAM rK, LINE
    HALT
"""
    plain = make(source)
    plain.go(10 ** 6)
    order = [(e.context, e.retired) for e in plain.history.events]
    stepped = make(source)
    while stepped.ended is None:
        stepped.step()
    assert [(e.context, e.retired) for e in stepped.history.events] == order
    for backend in ("cpu", "interpreter"):
        jumped = make(source, backend)
        for time in (33, 7, 90, 250, 100, 10 ** 6):
            jumped.go(time)
        assert [(e.context, e.retired) for e in jumped.history.events] == order


def test_a_released_snapshot_is_released_again():
    """Checkpoints keep no snapshot alive that the program had let go."""
    source = """
    FORK rOld
    MOV rKept, rOld
    LOADI rOld, 0
    FORK rA
    FORK rB
    LOADI rKept, 0
    FORK rC
    ABORT rA
    HALT
"""
    engine = make(source, snapshot_window=2)
    lives = []
    while engine.ended is None:
        lives.append([s.id for s in engine.vm.snapshots.live()])
        engine.step()
    assert [1, 2, 3] in lives and [2, 3, 4] in lives
    for expected in reversed(lives):
        engine.back()
        assert [s.id for s in engine.vm.snapshots.live()] == expected
    engine.go(10 ** 6)
    assert engine.ended == "the program has ended"


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_outputs_and_places(backend):
    engine = make(LOOPS, backend)
    program = engine.vm.image.program
    inner = program.symbol("inner").value
    times = []
    while engine.to_output():
        times.append(engine.time)
    assert len(times) == 9 and engine.ended is not None
    engine.go(0)
    seen = []
    while engine.run_to(frozenset({inner})):
        assert engine.vm.image.pcs[engine.upcoming.index] == inner
        seen.append(engine.time)
    assert len(seen) == 45 and seen[0] == 4
    def stands():
        return engine.vm.image.pcs[engine.upcoming.index] == inner
    for expected in reversed(seen):
        assert engine.last_before(lambda end: engine.run_to(frozenset({inner}), end), stands)
        assert engine.time == expected
    engine.go(10 ** 6)
    assert engine.last_before(lambda end: engine.to_output(end)) and engine.time == times[-1]
    assert engine.last_before(lambda end: engine.to_output(end)) and engine.time == times[-2]
    engine.go(seen[3])
    assert engine.last_before(lambda end: engine.to_output(end)) is False and engine.time == 0


def test_a_trap_is_a_place_one_can_go_back_from():
    engine = make("LOADI r1, 5\nGETELEM r2, r1\nHALT")
    engine.go(100)
    assert engine.time == 1 and "GETELEM" in str(engine.ended)
    engine.back()
    assert engine.time == 1 and engine.ended is None and engine.upcoming.index == 1
    engine.back()
    assert engine.time == 0
    engine.go(50)
    assert "GETELEM" in str(engine.ended)


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_ctrl_c_leaves_a_whole_state(backend):
    """An endless run is stopped by hand; one can go on and back from there."""
    import _thread
    import threading
    engine = make("LOADI r1, 0\nloop: ADD r1, r1, 1\nJUMP loop", backend)
    timer = threading.Timer(0.3, _thread.interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        engine.run()
        while True:                                    # should it come late
            pass
    timer.join()
    here = engine.time
    value = engine.vm.get("r1") or 0
    assert here in (2 * value, 2 * value + 1)
    engine.step(7)
    engine.back(7)
    assert engine.time == here and (engine.vm.get("r1") or 0) == value


@pytest.mark.parametrize("seed", range(12))
def test_random_walks_on_random_programs(seed):
    from tests.timetravel.random_programs import random_program
    program = random_program(seed)
    engine = make(program, "interpreter", tuple("abc"))
    rng = random.Random(seed)
    by_time = {0: state(engine)}
    while engine.ended is None and engine.time < 300:
        if engine.step():
            by_time[engine.time] = state(engine)
    if engine.ended is not None:
        by_time.pop(engine.time, None)
    for _ in range(30):
        time = rng.choice(list(by_time))
        engine.go(time)
        assert state(engine) == by_time[time]


@pytest.mark.slow
def test_random_walks_on_many_random_programs():
    """pytest -m slow tests/timetravel: some minutes."""
    for seed in range(100, 500):
        test_random_walks_on_random_programs(seed)
