"""Contexts that meet: SIGNAL, LOCK and UNLOCK, WFI."""
from __future__ import annotations

import threading
import time

import pytest

from m3jit.errors import Deadlock, Trap
from m3jit.timetravel.machine_state import MachineState
from m3jit.vm.vm import VM
from tests.vm.programs import LONG, machine, outputs, run, wait_until


# -- SIGNAL ---------------------------------------------------------------------------------------------------------

def test_ping_finds_out_who_lives():
    vm = run("""
        FORK rC, child
        SIGNAL r1, KIND=PING CTX=rC
        SIGNAL r2, KIND=PING CTX=1
        YIELD
        SIGNAL r3, KIND=PING CTX=rC
        SIGNAL r4, KIND=PING CTX=99
        HALT
    child:
        HALT""")
    assert [vm.get(f"r{i}") for i in (1, 2, 3, 4)] == [0, 0, 2, 2]


def test_halt_ends_a_context_this_one_too():
    assert outputs("""
        FORK rC, child
        YIELD
        SIGNAL r1, KIND=HALT CTX=rC
        STREAM r1
        SIGNAL r2, KIND=HALT CTX=rC
        STREAM r2
        SIGNAL r3, KIND=HALT CTX=1
        STREAM r3
        HALT
    child:
        LOADI r9, 77
        STREAM r9
    loop:
        YIELD
        JUMP loop""") == ["77", "0", "2"]


def test_an_interrupt_is_seen_by_its_target_alone_and_ends_its_wait():
    source = """
        FORK rC, child
        YIELD
        SIGNAL r1, KIND=INTERRUPT CTX=rC
        PREEMPT_CHECK r2
        STREAM r2
        HALT
    child:
        WFI r5
        PREEMPT_CHECK r6
        STREAM r5
        STREAM r6
        IF_INTERRUPT seen
        HALT
    seen:
        LOADI r7, 70
        STREAM r7
        PREEMPT_CHECK r8
        STREAM r8
        HALT"""
    assert outputs(source) == outputs(source, backend="cpu") == ["0", "1", "1", "70", "0"]


ABORTED = """
        FORK rC, child
        YIELD
        SIGNAL r1, KIND=ABORT CTX=rC
        STREAM r1
        YIELD
        SIGNAL r2, KIND=ABORT CTX=1
        STREAM r2
        HALT
    child:
        LOADI r3, 1
        FORK rS
        LOADI r3, 2
        FORK rT
        LOADI r3, 3
        STREAM r3
        YIELD
        STREAM r3
        HALT"""


def test_abort_puts_the_newest_live_snapshot_of_the_target_back():
    """Registers go back, the pc does not; a context without a snapshot refuses."""
    assert outputs(ABORTED) == outputs(ABORTED, backend="cpu") == ["3", "0", "2", "3"]
    released = ABORTED.replace("LOADI r3, 3\n", "LOADI r3, 3\n        LOADI rT, 0\n")
    assert outputs(released, snapshot_window=0) == ["3", "0", "1", "3"]
    gone = released.replace("LOADI rT, 0\n", "LOADI rT, 0\n        LOADI rS, 0\n")
    assert outputs(gone, snapshot_window=0) == ["3", "3", "3", "3"]


def test_abort_of_a_context_that_waits_makes_it_ask_again():
    """It waited for item 1 of the input; what was put back has read none."""
    vm = machine("""
        FORK rC, child
        YIELD
        SIGNAL r1, KIND=ABORT CTX=rC
        HALT
    child:
        FORK rS
        SENSE r3, USER_INPUT
        SENSE r4, USER_INPUT
        STREAM r4, OUTPUT TEXT
        HALT""", wait_input=True)
    got: list = []
    vm.set_sink("OUTPUT", got.append)
    vm.push_input("again")
    vm.run()
    assert got == ["again"]


@pytest.mark.parametrize("line, message", [
    ("SIGNAL KIND=PING NODE=3 CTX=1",
     "NODE=3: this machine is no member of a cluster; SIGNAL reaches contexts of node 0"),
    ("SIGNAL KIND=FORK_REQ CTX=1", "KIND=FORK_REQ: a snapshot has no name outside the context that took it"),
    ("LOADI r1, 1.5\nSIGNAL KIND=PING CTX=r1", "holds a float, expected an integer or a context")])
def test_signals_that_trap(line, message):
    with pytest.raises(Trap, match=message):
        run(line + "\nHALT")


# -- LOCK, UNLOCK ---------------------------------------------------------------------------------------------------

def test_a_lock_is_taken_as_often_as_it_is_given_back():
    vm = run("LOADI rL, 0x3000000000000010\nLOCK rL, r1\nLOCK rL, r2 TIMEOUT=0\nUNLOCK rL\nUNLOCK rL\nHALT")
    assert (vm.get("r1"), vm.get("r2"), vm.locks.locks) == (1, 1, {})
    with pytest.raises(Trap, match="lock 5 is not taken; context 1 cannot give it back"):
        run("LOCK NUMBER=5\nUNLOCK NUMBER=5\nUNLOCK NUMBER=5\nHALT")
    with pytest.raises(Trap, match="lock 5 is held by context 2; context 1 cannot give it back"):
        run("FORK rC, child, RED\nUNLOCK NUMBER=5\nHALT\nchild: LOCK NUMBER=5\nPRIORITY_SET GREEN\nloop: YIELD\n"
            "JUMP loop")


WORKERS = """
        LOADI rI, 0
        LOADI r9, 1
        FORK rC, work
        LOADI r9, 2
        FORK rC, work
        LOADI r9, 3
    work:
        LOCK NUMBER=7
        STREAM r9
        YIELD
        STREAM r9
        UNLOCK NUMBER=7
        ADD rI, rI, 1
        COMPARE rI, 3
        IF_LESS work
        HALT"""


def test_one_at_a_time_in_the_order_they_came():
    got = outputs(WORKERS)
    assert got == outputs(WORKERS, backend="cpu") and len(got) == 18
    assert got[::2] == got[1::2] and got[:6:2] == got[6:12:2] == got[12::2] and len(set(got[:6:2])) == 3


def test_the_most_urgent_waiter_gets_the_lock():
    assert outputs("""
        LOCK NUMBER=1
        LOADI r9, 1
        FORK rC, work, GREEN
        LOADI r9, 2
        FORK rC, work, GREEN
        LOADI r9, 3
        FORK rC, work, RED
        YIELD
        UNLOCK NUMBER=1
        HALT
    work:
        LOCK NUMBER=1
        STREAM r9
        UNLOCK NUMBER=1
        HALT""") == ["3", "1", "2"]


INVERSION = """
        FORK rC, low, GREEN
        YIELD
        FORK rD, high, RED
        FORK rE, middle, BLUE
        HALT
    low:
        LOCK NUMBER=1
        YIELD
        LOADI r9, 1
        STREAM r9
        PRIORITY_GET r8
        STREAM r8
        UNLOCK NUMBER=1
        LOADI r9, 4
        STREAM r9
        HALT
    middle:
        LOADI r9, 3
        STREAM r9
        HALT
    high:
        LOCK NUMBER=1 {timeout}
        LOADI r9, 2
        STREAM r9
        UNLOCK NUMBER=1
        HALT"""


@pytest.mark.parametrize("timeout", ["", "TIMEOUT=1000000000000"])
def test_a_holder_inherits_the_priority_of_who_waits(timeout):
    """Without it `middle` would run before `low` and so hold `high` up; its own priority stays what it was."""
    assert outputs(INVERSION.format(timeout=timeout)) == ["1", "0", "2", "3", "4"]


def test_priority_is_inherited_along_a_chain():
    """high waits for lock 2 of mid, who waits for lock 1 of low."""
    assert outputs("""
        FORK rC, low, GREEN
        FORK rD, mid, GREEN
        YIELD
        YIELD
        FORK rE, high, RED
        FORK rF, other, BLUE
        HALT
    low:
        LOCK NUMBER=1
        YIELD
        YIELD
        LOADI r9, 1
        STREAM r9
        UNLOCK NUMBER=1
        HALT
    mid:
        LOCK NUMBER=2
        LOCK NUMBER=1
        LOADI r9, 2
        STREAM r9
        UNLOCK NUMBER=1
        UNLOCK NUMBER=2
        HALT
    high:
        LOCK NUMBER=2
        LOADI r9, 3
        STREAM r9
        HALT
    other:
        LOADI r9, 4
        STREAM r9
        HALT""") == ["1", "2", "3", "4"]


CYCLE = """
        FORK rC, other
        LOCK NUMBER=1
        YIELD
        LOCK NUMBER=2 {timeout}
        UNLOCK NUMBER=1
        HALT
    other:
        LOCK NUMBER=2
        LOCK NUMBER=1 {timeout}
        UNLOCK NUMBER=2
        HALT"""


def test_a_cycle_of_waits_is_named():
    with pytest.raises(Trap, match="deadlock: context 1 would wait for lock 2, held by context 2, which waits "
                                   "for lock 1, held by context 1; take locks in one order everywhere, or wait with "
                                   "TIMEOUT"):
        run(CYCLE.format(timeout=""))


def test_waits_with_a_timeout_end():
    longer = CYCLE.replace("LOCK NUMBER=2 {timeout}", "LOCK _, r5 NUMBER=2 TIMEOUT=3600000000000")
    vm = run(longer.format(timeout="TIMEOUT=2000000"))
    assert vm.get("r5") == 1 and vm.locks.locks == {}
    vm = run("FORK rC, child, RED\nLOCK _, r1 NUMBER=4 TIMEOUT=0\nLOCK _, r2 NUMBER=4 TIMEOUT=1000000\n"
             "KILL_CONTEXT rC\n"
             "LOCK _, r3 NUMBER=4 TIMEOUT=0\nHALT\nchild: LOCK NUMBER=4\nPRIORITY_SET GREEN\nWFI", record=True)
    assert [vm.get(f"r{i}") for i in (1, 2, 3)] == [0, 0, 1]
    again = VM(vm.image.program, backend="interpreter", replay=vm.recorder.log)
    again.run()
    assert [again.get(f"r{i}") for i in (1, 2, 3)] == [0, 0, 1]


@pytest.mark.parametrize("end", ["HALT", "LOADI r1, 0\nASSERT r1", "SIGNAL KIND=HALT CTX=rMe", "YIELD\nWFI"])
def test_the_locks_of_a_context_that_ends_are_given_on(end):
    source = f"""
        FORK rC, child, RED
        YIELD
        COMPARE r0, r0
        {'SIGNAL KIND=HALT CTX=rC' if 'WFI' in end else 'NOP'}
        LOCK _, r5 NUMBER=3
        STREAM r5
        HALT
    child:
        MOV rMe, SP3
        LOCK NUMBER=3
        LOCK NUMBER=3
        PRIORITY_SET GREEN
        {end}"""
    vm = machine(source.replace("COMPARE r0, r0", "NOP"))
    got: list = []
    vm.set_sink("OUTPUT", got.append)
    if "ASSERT" in end:
        with pytest.raises(Trap, match="assertion"):
            vm.run()
    else:
        vm.run()
    assert got == ["1"]


def test_a_rollback_does_not_give_a_lock_back():
    vm = run("FORK rS\nLOCK NUMBER=2\nLOADI r1, 5\nABORT rS\nUNLOCK NUMBER=2\nHALT")
    assert vm.locks.locks == {} and vm.get("r1") is None


def test_a_context_that_is_rolled_back_while_it_waits_leaves_the_queue():
    """It waited for lock 1 with the number in a register; what is put back names lock 2."""
    assert outputs("""
        LOCK NUMBER=1
        FORK rC, child
        YIELD
        SIGNAL r1, KIND=ABORT CTX=rC
        YIELD
        UNLOCK NUMBER=1
        LOCK NUMBER=1
        STREAM r1
        HALT
    child:
        LOADI rL, 2
        FORK rS
        LOADI rL, 1
        LOCK rL
        STREAM rL
        HALT""") == ["2", "0"]


def test_everybody_waiting_for_locks_is_a_deadlock_of_the_machine():
    with pytest.raises(Deadlock, match="context 1 waits for lock 1, held by context 2; context 2 waits for an item"):
        run('FORK rC, child, RED\nLOCK NUMBER=1\nHALT\nchild: LOCK NUMBER=1\nSENSE r1, RING NAME="nothing"\nHALT')


def test_going_back_in_time_takes_locks_along():
    vm = machine("LOCK NUMBER=1\nLOCK NUMBER=1\nUNLOCK NUMBER=1\nUNLOCK NUMBER=1\nHALT")
    vm.step(2)
    state = MachineState(vm)
    vm.step(2)
    assert vm.locks.locks == {}
    state.restore(vm)
    assert vm.locks.locks[1].holder is vm.main and vm.locks.locks[1].count == 2


def test_the_host_takes_a_context_out_of_a_queue():
    """`abort` with `resume` of a context that waits for a lock: it is not given the lock afterwards."""
    vm = machine("FORK rC, child, RED\nLOADI r1, 1\nYIELD\nLOCK NUMBER=1\nHALT\n"
                 "child: LOCK NUMBER=1\nPRIORITY_SET GREEN\nloop: YIELD\nJUMP loop")
    vm.step(1)
    snapshot = vm.fork()
    while not vm.locks.locks or not vm.locks.locks[1].waiting:
        assert vm.step(1)
    vm.abort(snapshot, resume=True)
    assert vm.locks.locks[1].waiting == () and vm.locks.locks[1].holder is not vm.main


# -- WFI ------------------------------------------------------------------------------------------------------------

def test_wfi_sleeps_until_its_time_is_up():
    began = time.monotonic()
    vm = run("WFI r1 TIMEOUT=30000000\nWFI r2 TIMEOUT=0\nHALT")
    assert (vm.get("r1"), vm.get("r2")) == (0, 0) and time.monotonic() - began >= 0.03


@pytest.mark.parametrize("what, value", [("interrupt", 1), ("push", 2), ("stop", None)])
def test_the_host_ends_a_sleep(what, value):
    vm = machine("SENSE r3, USER_INPUT\nWFI r1\nHALT", wait_input=True)
    errors: list = []

    def go() -> None:
        try:
            vm.run()
        except Exception as e:
            errors.append(str(e))
    runner = threading.Thread(target=go)
    vm.push_input("first")
    runner.start()
    wait_until(lambda: (wait := vm.main.waiting_for) is not None and "interrupt" in wait.what)
    if what == "push":
        vm.push_input("second", interrupt=False)
    else:
        getattr(vm, what)()
    runner.join(LONG)
    assert not runner.is_alive()
    assert vm.get("r1") == value and len(errors) == (what == "stop")
    assert vm.main.interrupt is (what == "interrupt")


def test_a_sleep_is_replayed_without_waiting():
    vm = run("FORK rC, busy\nWFI r1 TIMEOUT=5000000\nWFI r2 TIMEOUT=5000000\nHALT\nbusy: LOADI r5, 0\n"
             "loop: ADDI r5, r5, 1\nCOMPARE r5, 3000\nIF_LESS loop\nHALT", record=True)
    log = vm.recorder.log
    assert [e.value for e in log if e.what == "wfi"] == [0, 0]
    hour = vm.image.program
    again = VM(hour, backend="cpu", replay=log)
    again.run()
    assert (again.get("r1"), again.retired) == (0, vm.retired)


def test_other_contexts_run_while_one_sleeps():
    assert outputs("""
        FORK rC, child
        WFI r1
        STREAM r1
        IF_INTERRUPT out
    out:
        HALT
    child:
        LOADI r9, 5
        STREAM r9
        SIGNAL KIND=INTERRUPT CTX=1
        STREAM r9
        HALT""")[0] == "5"


def test_they_are_reported_as_present():
    vm = run("CAPABILITY_QUERY r1, KIND=OPCODE NUMBER=0x1B\nCAPABILITY_QUERY r2, KIND=OPCODE NUMBER=0x75\n"
             "CAPABILITY_QUERY r3, KIND=OPCODE NUMBER=0x76\n"
             "CAPABILITY_QUERY r4, KIND=OPCODE NUMBER=0x99\nCAPABILITY_QUERY r5, KIND=OPCODE NUMBER=0x81\nHALT")
    assert [vm.get(f"r{i}") for i in range(1, 6)] == [1, 1, 1, 1, 0]
