"""Order of contexts, priorities, fairness, spawning and killing, calls, interrupts."""
from __future__ import annotations

import numpy as np
import pytest

from m3jit.errors import Trap
from m3jit.vm.held import EVERY
from m3jit.vm.scheduler import QUANTUM
from m3jit.vm.vm import VM
from tests.vm.programs import ins, machine, outputs, run


def test_a_more_urgent_child_runs_at_once_and_an_equal_one_later():
    source = """
        LOADI r1, 1
        FORK rC, child, {priority}
        LOADI r2, 2
        STREAM r2
        HALT
    child:
        STREAM r1
        HALT"""
    assert outputs(source.format(priority="RED")) == ["1", "2"]
    assert outputs(source.format(priority="BLUE")) == ["1", "2"]
    assert outputs(source.format(priority="GREEN")) == ["2", "1"]


def test_contexts_of_one_priority_share_time_by_retired_instructions():
    got = outputs(f"""
        LOADI r9, 1
        FORK rC, work
        LOADI r9, 2
    work:
        LOADI r1, 0
    loop:
        ADDI r1, r1, 1
        MODI r2, r1, {QUANTUM // 2}
        COMPARE r2, 0
        IF_NOT_EQUAL loop
        STREAM r9
        COMPARE r1, {2 * QUANTUM}
        IF_LESS loop
        HALT""")
    assert sorted(got) == ["1"] * 4 + ["2"] * 4
    assert got[:4] != ["1"] * 4 and got[:4] != ["2"] * 4          # interleaved


def test_yield_lets_the_others_go_first():
    got = outputs("""
        LOADI r9, 1
        FORK rC, work
        LOADI r9, 2
    work:
        LOADI r1, 0
    loop:
        STREAM r9
        YIELD
        ADDI r1, r1, 1
        COMPARE r1, 3
        IF_LESS loop
        HALT""")
    assert got in (["1", "2"] * 3, ["2", "1"] * 3)


def test_the_order_is_the_same_every_time():
    source = """
        LOADI r1, 0
    spawn:
        FORK rC, work, GREEN
        ADDI r1, r1, 1
        COMPARE r1, 5
        IF_LESS spawn
        HALT
    work:
        LOADI r3, 0
    loop:
        ADDI r3, r3, 1
        MODI r4, r3, 977
        COMPARE r4, 0
        IF_NOT_EQUAL loop
        STREAM r1
        COMPARE r3, 20000
        IF_LESS loop
        HALT"""
    first = outputs(source)
    assert len(first) == 5 * 21 and all(outputs(source) == first for _ in range(2))


def test_priorities():
    vm = run("PRIORITY_GET r1\nPRIORITY_SET RED\nPRIORITY_GET r2\nLOADI r4, 1\nPRIORITY_SET r4\nPRIORITY_GET r3\nHALT")
    assert [vm.get(f"r{i}") for i in (1, 2, 3)] == [0, 2, 1]
    # a context that lowers itself lets the other one go first
    assert outputs("LOADI r1, 1\nPRIORITY_SET RED\nFORK rC, child, BLUE\nPRIORITY_SET GREEN\nSTREAM r1\nHALT\n"
                   "child: LOADI r1, 2\nSTREAM r1\nHALT") == ["2", "1"]


def test_children_are_isolated():
    vm = machine("""
        LOADI r1, 5
        COMPARE r1, 5
        FORK rC, child, RED
        IF_EQUAL same
        LOADI r2, 0
        HALT
    same:
        LOADI r2, 1
        HALT
    child:
        LOADI r1, 6
        COMPARE r1, 7
        MOV r3, SP3
        STREAM r3
        HALT""")
    got = []
    vm.set_sink("OUTPUT", got.append)
    vm.run()
    assert (vm.get("r1"), vm.get("r2"), got) == (5, 1, ["2"])
    assert vm.get("rC").id == 2


def test_a_child_does_not_see_its_own_name_and_keeps_the_calls():
    assert outputs("""
        LOADI r1, 3
        CALL f ARGS=[r1]
        STREAM r1
        HALT
    f:  FORK r5, g, RED
        ADDI r0, r0, 1
        RET
    g:  ADDI r0, r0, 100
        RET""") == ["103", "4"]


def test_spawned_contexts_start_empty():
    vm = machine("LOADI r1, 5\nSPAWN_CONTEXT rC, child, RED\nHALT\nchild: STREAM r1\nHALT")
    with pytest.raises(Trap, match="R1 .*never written"):
        vm.run()


def test_killing():
    assert outputs("LOADI r1, 1\nFORK rC, child\nKILL_CONTEXT rC\nSTREAM r1\nHALT\nchild: LOADI r1, 2\nSTREAM r1\n"
                   "HALT") == ["1"]
    with pytest.raises(Trap, match="context 2 has already ended"):
        run("FORK rC, child, RED\nKILL_CONTEXT rC\nHALT\nchild: HALT")


def test_calls_nest_and_give_back_arguments_only():
    vm = run("""
        LOADI r0, 1
        LOADI r7, 70
        LOADI r8, 80
        CALL f ARGS=[r7, r8]
        HALT
    f:  ADDS r2, r0, r1
        MOV r5, r2
        CALL g ARGS=[r2]
        MOV r1, r2
        RET
    g:  MULI r0, r0, 2
        RET""")
    assert {k: v for k, v in vm.registers.items()} == {"R0": 1, "R7": 70, "R8": 300}


def test_a_callee_sees_nothing_of_its_caller():
    with pytest.raises(Trap, match="R3 .*never written"):
        run("LOADI r3, 1\nCALL f\nHALT\nf: ADDI r3, r3, 1\nRET")
    vm = VM([ins("MOV", rd="V1", src="R0"), ins("CALL", target=64), ins("HALT"), ins("MOV", rd="R0", src="V1"),
             ins("HALT")], backend="interpreter")
    import numpy as np
    vm.set("R0", np.zeros(8, np.float32))
    with pytest.raises(Trap, match="V1 .*never written"):
        vm.run()


def test_deep_recursion_and_states_across_calls():
    vm = run("""
        LOADI r0, 900
        CALL f ARGS=[r0]
        HALT
    f:  COMPARE r0, 0
        IF_EQUAL end
        SUBI r0, r0, 1
        CALL f ARGS=[r0]
    end:
        RET""")
    assert vm.get("r0") == 0


def test_interrupts():
    source = "LOADI r1, 0\nloop: ADDI r1, r1, 1\nIF_INTERRUPT rFlag, out\nJUMP loop\nout: PREEMPT_CHECK r2\nHALT"
    vm = machine(source)
    vm.interrupt()
    vm.run()
    assert vm.get("r1") == 1 and vm.get("r2") == 0
    vm = machine("PREEMPT_CHECK r2\nPREEMPT_CHECK r3\nIF_INTERRUPT next\nHALT\nnext: IF_INTERRUPT bad\nHALT\nbad: RET")
    vm.interrupt()
    vm.run()
    assert (vm.get("r2"), vm.get("r3")) == (1, 1)
    vm = machine("LOADI rFlag, 1\nIF_INTERRUPT rFlag, out\nRET\nout: HALT")
    vm.run()


def test_ctx_switch():
    vm = run("CTX_SWITCH rS, MAMBA, BLUE\nPRIORITY_GET r1\nLOADI r2, 9\nRESTORE rS\nHALT")
    assert vm.get("r1") == 1 and vm.main.pipeline == "MAMBA" and vm.get("r2") == 9


# -- rollback in programs -----------------------------------------------------------------------------------

def test_fork_and_abort_in_a_program():
    vm = run("""
        LOADI r1, 1
        FORK rS
        LOADI r1, 2
        COMPARE r1, 2
        ABORT rS
        MOV r2, r1
        IF_EQUAL bad
        ABORT rS
        HALT
    bad: RET""")
    assert vm.get("r1") == 1 and vm.get("r2") is None       # the second ABORT undid the MOV
    assert vm.get("rS") is not None


def test_resume_goes_back_to_just_behind_the_fork():
    vm = machine("""
        FORK rS
        SENSE rT, NAMED, NAME="clock"
        COMPARE rT, 3
        IF_GREATER_EQUAL done
        ABORT rS, RESUME
    done:
        HALT""")

    class Clock:                                       # outside the root: it goes on
        name, n = "clock", 0

        def read(self, position, count, blocking):
            self.n += 1
            return self.n, position
    vm.set_source("clock", Clock())
    assert vm.run().get("rT") == 3


def test_restore_keeps_registers():
    vm = run("""
        LOADI rA, 0x3000000000000000
        SNAPSHOT rS
        MEMSET rA, PATTERN=5, LEN=4
        LOADI r9, 33
        RESTORE rS
        HALT""")
    assert vm.get("r9") == 33 and vm.main.memory.read(0x3 << 60, 4) == bytes(4)


def test_snapshots_are_released_and_say_so():
    source = "FORK rOld\nMOV rKeep, rOld\n" + "FORK rS\n" * 5
    assert run(source + "ABORT rKeep\nHALT", snapshot_window=2).get("rOld").id == 1
    with pytest.raises(Trap, match="snapshot 1 was released.*newest 2"):
        # the newest snapshot names snapshot 1 weakly: once no register holds it, going back does not bring it back
        run(source + "LOADI rKeep, 0\nLOADI rOld, 0\nABORT rS\nABORT rOld\nHALT", snapshot_window=2)


def test_forking_every_turn_keeps_a_window_of_history():
    vm = run("LOADI r1, 0\nloop: FORK rS\nADDI r1, r1, 1\nCOMPARE r1, 2000\nIF_LESS loop\nHALT", snapshot_window=16)
    assert vm.stats["snapshots"] == 16


def test_host_fork_and_abort():
    vm = machine("LOADI r1, 1\nLOADI r1, 2\nLOADI r1, 3\nHALT")
    vm.step(1)
    snap = vm.fork()
    vm.step(2)
    assert vm.get("r1") == 3
    vm.abort(snap)
    assert vm.get("r1") == 1
    vm.abort(snap, resume=True)
    assert vm.step(1) == 1 and vm.get("r1") == 2


def test_a_switch_that_traps_has_switched_nothing():
    """There is no room for its snapshot: the priority and the pipeline stay as they were."""
    vm = machine("FORK rA\nADD rX, rX, rX\nCTX_SWITCH rB, AUDIO, PRIORITY=RED\nHALT", snapshot_memory=10_000)
    vm.set("rX", np.ones(100_000, np.float32))
    vm.snapshots.bound._since = EVERY                  # the bound is looked at now
    with pytest.raises(Trap, match="CTX_SWITCH .*: snapshots hold"):
        vm.run()
    assert (vm.main.priority, vm.main.pipeline, vm.get("rB")) == (0, "TRANSFORMER", None)
