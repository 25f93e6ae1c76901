"""The reclaimer: what a rollback replaced is freed by its thread; what a program's way depends on is let go at once."""
from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

import m3jit
from m3jit.isa import spare
from m3jit.isa.kv import KVStream
from m3jit.isa.types import Tensor
from m3jit.vm import reclaim

PROGRAM = "LOADI rA, 1\nHALT\n"
LAYERS = (0, 1)


def machine(**options) -> m3jit.VM:
    return m3jit.VM(m3jit.assemble(PROGRAM), backend="interpreter", **options)


def rows(n: int) -> np.ndarray:
    return np.ones((n, 4), np.float32)


def grown(stream: KVStream, n: int) -> KVStream:
    for layer in LAYERS:
        stream = stream.append(layer, rows(n), rows(n))
    return stream


def empty() -> KVStream:
    return KVStream().with_geometry(1, 4)


@pytest.fixture
def freed_by(monkeypatch) -> dict[int, int]:
    """Address of a page whose memory was given back -> the thread that did it."""
    found: dict[int, int] = {}
    give = spare.give

    def noted(block):
        found[block.address] = threading.get_ident()
        give(block)
    monkeypatch.setattr(spare, "give", noted)
    return found


def addresses(vm: m3jit.VM) -> set[int]:
    stream = vm.machine.state_of(vm.main, 0)
    return {page.address for layer in LAYERS for page in stream.pages(layer)}


def behind(vm: m3jit.VM, n: int) -> None:
    vm.machine.set_state_of(vm.main, 0, grown(vm.machine.state_of(vm.main, 0) or empty(), n))


@pytest.mark.parametrize("pages", [3, 300])
def test_pages_that_a_rollback_replaced_are_freed_by_the_thread(freed_by, pages):
    vm = machine()
    behind(vm, 70)
    snapshot = vm.fork()
    before = addresses(vm)
    behind(vm, 64 * pages)
    new = addresses(vm) - before
    assert len(new) == len(LAYERS) * pages
    freed_by.clear()
    vm.abort(snapshot)
    assert reclaim.drain()
    assert threading.get_ident() not in [freed_by[address] for address in new]
    assert vm.stats["reclaimer"]["handed_over"] >= 1 and vm.stats["reclaimer"]["freed_inline"] == 0


def test_at_the_bound_the_program_frees_its_own(freed_by):
    vm = machine(reclaim_backlog=0)
    behind(vm, 70)
    snapshot, before = vm.fork(), addresses(vm)
    behind(vm, 128)
    new = addresses(vm) - before
    freed_by.clear()
    vm.abort(snapshot)
    assert [freed_by[address] for address in new] == [threading.get_ident()] * 4
    assert vm.stats["reclaimer"]["freed_inline"] == 1 and vm.stats["reclaimer"]["handed_over"] == 0


def test_released_snapshots_are_freed_by_the_thread(freed_by):
    vm = machine(snapshot_window=1)
    behind(vm, 200)
    old = addresses(vm)
    vm.fork()                                              # nobody holds it but the window
    vm.machine.set_state_of(vm.main, 0, grown(empty(), 10))
    freed_by.clear()
    vm.fork()
    assert reclaim.drain()
    assert threading.get_ident() not in [freed_by[address] for address in old]


def test_claims_do_not_wait_for_the_thread(monkeypatch):
    """Behind a rollback over the end of a page the next append writes in place, whenever the thread gets there."""
    # the thread never gets there
    monkeypatch.setattr(reclaim.Reclaimer, "give", lambda self, things, kept=[]: kept.append(things))
    vm = machine()
    behind(vm, 60)
    snapshot = vm.fork()
    page = vm.machine.state_of(vm.main, 0).pages(0)[0]
    behind(vm, 30)
    vm.abort(snapshot)
    assert page.claimed == 60
    behind(vm, 1)
    assert vm.machine.state_of(vm.main, 0).pages(0)[0] is page


def test_snapshots_do_not_wait_for_the_thread(monkeypatch):
    """A register's handle is let go by the rollback that replaces it, wherever its other contents are."""
    monkeypatch.setattr(reclaim.Reclaimer, "give", lambda self, things, kept=[]: kept.append(things))
    vm = machine(snapshot_window=0)
    vm.set("R7", Tensor.of(rows(3)))
    first = vm.fork()
    second = vm.fork()
    vm.set("R5", second)
    number, handles = second.id, [second]
    del second
    assert [s.id for s in vm.snapshots.live()] == [first.id, number]
    handles.clear()
    assert [s.id for s in vm.snapshots.live()] == [first.id, number], "the register holds it"
    vm.abort(first)
    assert [s.id for s in vm.snapshots.live()] == [first.id]


def test_other_versions_keep_their_pages(freed_by):
    vm = machine()
    behind(vm, 70)
    first = vm.fork()
    behind(vm, 200)
    kept, old = vm.machine.state_of(vm.main, 0), addresses(vm)
    freed_by.clear()
    vm.abort(first)
    assert reclaim.drain() and not old & freed_by.keys()
    assert len(kept.rows(1)[0]) == 270 and kept.rows(1)[0].all()


def test_a_forked_process_has_a_thread_of_its_own():
    code = f"""
import os, m3jit
from m3jit.vm import reclaim
vm = m3jit.VM(m3jit.assemble({PROGRAM!r}), backend="interpreter")
vm.abort(vm.fork())
assert reclaim.drain()
child = os.fork()
assert reclaim.drain()
if not child:
    assert reclaim.thread is None
    vm.abort(vm.fork())
    os._exit(0 if reclaim.drain() and reclaim.thread.is_alive() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize("window", [0, 1, 3, 1 << 60])
def test_the_window_is_the_newest_snapshots(window):
    vm = machine(snapshot_window=window)
    made = []
    for _ in range(7):
        made.append(vm.fork().id)
        assert [s.id for s in vm.snapshots.recent] == made[max(len(made) - window, 0):]
        assert [s.id for s in vm.snapshots.live()] == made[max(len(made) - window, 0):]
    kept = vm.snapshots.recent
    vm.fork()
    vm.snapshots.recent = kept
    vm.fork()
    assert [s.id for s in vm.snapshots.recent] == ([*(s.id for s in kept), 9][-window:] if window else [])
