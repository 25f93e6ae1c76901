"""Bounds on what programs may keep: snapshots by count and bytes, contexts, their memory; and what cannot be gone back
to.  Every message says which bound it was, its value, and what to do."""
from __future__ import annotations

import gc

import numpy as np
import pytest

from m3jit.errors import OperandError, Trap, UserError
from m3jit.isa.types import Tensor
from m3jit.vm import held
from m3jit.vm.held import distinct
from m3jit.vm.memory import ACTIVATION
from tests.vm.programs import machine, run

A = ACTIVATION << 60
# Writes 64 KiB anew before each of five snapshots, which the registers r1 to r5 (or all r1) name.
WRITES = "LOADI rP, %d\n" % A + "".join(f"MEMSET rP, PATTERN={i}, LEN=65536\nFORK {{}}\n" for i in range(1, 6))


def test_a_released_snapshot_says_which_bound():
    with pytest.raises(Trap, match=r"ABORT.*snapshot 1 was released.*older than the newest 2 \(the window\).*"
                                   r"--snapshot-window, VM\(snapshot_window="):
        run("FORK r1\nFORK r2\nLOADI r1, 0\n" + "FORK r3\n" * 3 + "ABORT r2\nABORT r1\nHALT", snapshot_window=2)


def test_what_a_register_names_is_never_dropped():
    names = [f"r{i}" for i in range(1, 101)]
    vm = run("".join(f"FORK {n}\n" for n in names) + "LOADI r200, 1\nABORT r1\nHALT", snapshot_window=0)
    assert vm.get("r200") is None


def test_snapshots_that_hold_too_much_are_let_go_from_the_oldest_on():
    vm = machine(WRITES.format(*["r1"] * 5) + "HALT", snapshot_memory=200_000)
    vm.run()
    assert 1 <= len(vm.snapshots.live()) < 5
    assert vm.snapshots.bound.count(vm.snapshots.live()) <= 200_000
    assert vm.snapshots.let_go >= 1


def test_a_snapshot_that_went_for_want_of_memory_says_so():
    source = WRITES.format("r1", "r2\nLOADI r1, 0", "r3", "r3", "r3")          # snapshot 2 names snapshot 1
    with pytest.raises(Trap, match=r"ABORT R1.*snapshot 1 was released: no register held it and snapshots "
                                   r"held more than 200000 bytes that no running context had \(snapshot_memory\).*"
                                   r"--snapshot-memory"):
        run(source + "ABORT r2\nABORT r1\nHALT", snapshot_memory=200_000)


def test_a_program_that_keeps_too_many_snapshots_traps():
    with pytest.raises(Trap, match=r"FORK R\d.*snapshots hold \d+ bytes that no running context has, more than "
                                   r"the 150000 they may \(snapshot_memory\).*--snapshot-memory SIZE"):
        run(WRITES.format("r1", "r2", "r3", "r4", "r5") + "HALT", snapshot_memory=150_000)


def test_snapshots_of_a_large_state_cost_no_look_at_all_of_it(monkeypatch):
    """Above the bound with what runs alone, a snapshot looks at a constant number of objects, averaged over many."""
    looked, parts = [], held.parts

    def counted(*known):
        for found in parts(*known):
            looked.append(1)
            yield found
    monkeypatch.setattr(held, "parts", counted)
    for pages in (100, 1000):
        vm = machine(f"LOADI rP, {A}\nMEMSET rP, PATTERN=1, LEN={4096 * pages}\nHALT", snapshot_memory=100_000,
                     snapshot_window=3)
        vm.run()
        vm.fork()
        looked.clear()
        for _ in range(1000):
            vm.fork()
        assert pages < len(looked) < held.LOOKS * 1000 + 8 * pages, pages


def test_a_bound_is_passed_by_what_the_docs_say_at_most():
    """Every snapshot holds a page and its registers; of all that there is, pages of 1/`LOOKS` may come between
    counts."""
    pages, limit, page = 320, 600_000, 4096
    vm = machine(f"LOADI rP, {A}\nMEMSET rP, PATTERN=1, LEN={page * pages}\n"
                 + f"FORK r1\nMEMSET rP, PATTERN=3, LEN={page}\n" * 300 + "HALT", snapshot_memory=limit,
                 snapshot_window=300)
    vm.step(2)
    holds = []
    for _ in range(300):
        vm.step(2)
        seen: set[int] = set()
        running = distinct([vm.main], seen)
        live = vm.snapshots.live()
        holds.append(distinct((s.root for s in live), seen) + held.REGISTERS * len(live))
        del live                                       # or it would keep them
    assert running == page * pages
    between = (limit + running) // held.LOOKS          # of pages, and as much for the registers beside them
    assert limit - 2 * page < max(holds) <= limit + 2 * between + 4 * page
    assert min(holds[150:]) < limit, "the oldest went"


def test_what_a_running_context_lets_go_is_found_at_the_next_count():
    vm = machine(f"LOADI rP, {A}\nMEMSET rP, PATTERN=1, LEN=1310720\nFORK r1\nMEMSET rP, PATTERN=2, LEN=1310720\n"
                 "FORK r2\nHALT", snapshot_memory=600_000)
    with pytest.raises(Trap, match="snapshot_memory"):
        vm.run()                                       # snapshot 1 alone holds all of it: every page is new
    with pytest.raises(OperandError, match="snapshot_memory"):
        vm.fork()                                      # one that is refused is followed by a count


def test_a_fork_bomb_of_snapshots_in_calls_ends():
    with pytest.raises(Trap, match="snapshot_memory"):
        run("bomb: FORK r1\nFORK r2\nCALL bomb\nRET", snapshot_memory=1_000_000, snapshot_window=4)


def test_a_refused_snapshot_changes_nothing():
    vm = machine(WRITES.format("r1", "r2", "r3", "r4", "r5") + "HALT", snapshot_memory=150_000)
    with pytest.raises(Trap):
        vm.run()
    kept = [s.id for s in vm.snapshots.live()]
    assert vm.get("r4") is None and vm.main.newest_snapshot == kept[-1]
    with pytest.raises(OperandError, match="snapshot_memory"):
        vm.fork()
    assert [s.id for s in vm.snapshots.live()] == kept


@pytest.mark.parametrize("spawn", ["FORK rC, child", "SPAWN_CONTEXT rC, child"])
def test_a_program_that_starts_contexts_without_end_traps(spawn):
    with pytest.raises(Trap, match=r"5 contexts are live, all that this machine may have "
                                   r"\(context_limit\).*KILL_CONTEXT.*--context-limit N"):
        run(f"top: {spawn}\nJUMP top\nHALT\nchild: YIELD\nJUMP child", context_limit=5)


def test_a_context_that_ended_makes_room():
    vm = run("LOADI rN, 20\ntop: FORK rC, child\nKILL_CONTEXT rC\nSUB rN, rN, 1\nCOMPAREI rN, 0\nIF_GREATER top\nHALT\n"
             "child: HALT", context_limit=2)
    assert vm.get("rN") == 0


def test_children_share_the_limit_of_memory():
    source = f"""
        LOADI rP, {A}
        MEMSET rP, PATTERN=1, LEN=262144
        LOADI rN, 6
    top: FORK rC, child
        YIELD
        SUB rN, rN, 1
        COMPAREI rN, 0
        IF_GREATER top
        HALT
    child: MEMSET rP, PATTERN=2, LEN=262144
        LOADI rK, 20
    wait: YIELD
        SUB rK, rK, 1
        COMPAREI rK, 0
        IF_GREATER wait
        HALT
    """
    run(source.replace("child: MEMSET rP, PATTERN=2, LEN=262144", "child: NOP"), memory_limit=600_000)
    with pytest.raises(Trap, match=r"MEMSET.*with 262144 more bytes in region ACTIVATION the contexts of this "
                                   r"machine pass their common limit of 600000 bytes \(memory_limit\); end one with "
                                   r"KILL_CONTEXT"):
        run(source, memory_limit=600_000)              # two hold it twice, a third has no room


def test_a_snapshot_of_another_machine_is_refused():
    a, b = machine("FORK r1\nHALT").run(), machine("ABORT r1\nHALT")
    with pytest.raises(OperandError, match="snapshot 1 was taken by another machine"):
        b.abort(a.get("r1"))
    b.set("r1", a.get("r1"))
    with pytest.raises(Trap, match="ABORT R.*snapshot 1 was taken by another machine; a machine goes back to its own"):
        b.run()


def test_resuming_behind_the_last_instruction_changes_nothing():
    vm = machine("JUMP start\nback: LOADI r1, 2\nABORT rS, RESUME\nHALT\nstart: LOADI r1, 1\nFORK_LAST: FORK rS")
    vm.set("r2", 0)
    vm.step(3)
    vm.main.index = vm.image.index_of[vm.image.program.symbol("back").value]
    with pytest.raises(Trap, match="the FORK was the last instruction"):
        vm.step(2)
    assert vm.get("r1") == 2 and vm.main.trap is not None


def test_going_back_while_it_waits_ends_the_wait():
    vm = machine("FORK rS\nSENSE r1, USER_INPUT\nHALT", wait_input=True)
    vm.step(1)
    snapshot = vm.get("rS")
    vm.interpreter.run_exactly(vm.main, 1)
    assert vm.main.status == "waiting"
    vm.abort(snapshot, resume=True)
    assert vm.main.status == "ready" and vm.main.waiting_for is None
    vm.push_input("x")
    vm.run()
    assert vm.get("r1").tobytes() == b"x"


@pytest.mark.parametrize("options", [{"snapshot_window": -1}, {"snapshot_memory": 0}, {"context_limit": 0},
                                     {"snapshot_window": True}, {"snapshot_memory": "1G"}])
def test_options_are_checked(options):
    name = next(iter(options))
    with pytest.raises(UserError, match=f"{name}=.*; a whole number"):
        machine("HALT", **options)


def test_an_extension_that_gives_too_much_leaves_its_state():
    from m3jit.vm.extensions import Extension, Registry
    registry = Registry()
    registry.add(Extension("pair", 9, (1, 0), lambda held, immediate=b"": ((1, 2), (held or 0) + 1), state=True))
    vm = machine('ESCAPE EXT=9, VERSION=1, PAYLOAD="010000"\nHALT', extensions=registry)
    with pytest.raises(Trap, match="gave 2 results for 1 destinations"):
        vm.run()
    assert list(vm.main.states.items()) == []


def test_bytes_are_counted_once():
    vm = machine(f"LOADI rP, {A}\nMEMSET rP, LEN=8192, PATTERN=1\nFORK r1\nFORK r2\nMEMSET rP, LEN=1, PATTERN=2\nHALT")
    vm.set("r9", Tensor.of(np.zeros(1000, np.float32)))
    vm.run()
    assert distinct([vm.main], set()) == 4000 + 2 * 4096
    assert vm.snapshots.bound.count(vm.snapshots.live()) == 4096 + 2 * 4096         # the old first page, two registers



def test_a_context_that_was_killed_lets_go_of_what_it_names():
    vm = machine("top: FORK rC, child\nYIELD\nKILL_CONTEXT rC\nHALT\nchild: FORK r9\nwait: YIELD\nJUMP wait",
                 snapshot_window=0)
    vm.step(4)
    child = next(c for c in vm.scheduler.contexts.values() if c is not vm.main)
    assert [s.context for s in vm.snapshots.live()] == [child.id]
    child.ahead = [child]                              # what a region gave for it leads back to it
    del child
    vm.run()
    assert vm.snapshots.live() == []                   # at once, not when the garbage collector comes by


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_looking_at_code_to_compile_it_keeps_no_context(backend):
    vm = machine("FORK rC, child\nLOADI rN, 0\ntop: ADD rN, rN, 1\nYIELD\nCOMPARE rN, 100\nIF_LESS top\n"
                 "KILL_CONTEXT rC\nHALT\n"
                 "child: FORK r9\nLOADI rK, 0\nagain: ADD rK, rK, 1\nYIELD\nJUMP again",
                 snapshot_window=0, backend=backend)
    collecting = gc.isenabled()
    gc.disable()
    try:
        vm.run()
        assert vm.snapshots.live() == []
    finally:
        if collecting:
            gc.enable()
