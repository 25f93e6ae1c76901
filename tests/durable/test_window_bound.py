"""Snapshots of a restored machine keep its bound (snapshot_memory), counted as the machine that runs counts."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import m3jit
from m3jit.durable import Store, StoreError
from m3jit.vm.context import DONE
from m3jit.vm.digest import digest
from tests.durable.programs import state


def test_the_bound_is_that_of_snapshots_which_are_kept(tmp_path):
    """Those in registers and given to the host; not what running contexts have as well.  The oldest of the window go
    first."""
    program = m3jit.assemble("ADD rX, rX, rX\nFORK rS\nMOV rOld, rS\nADD rX, rX, rX\nFORK rS\nLOADI rOld, 0\n"
                             "ADD rX, rX, rX\nHALT", "kept.m3asm")
    size = 400_000

    def made(**options: Any) -> Any:
        return m3jit.VM(program, backend="interpreter", **options)
    with Store.open(tmp_path / "s") as store:
        vm = made()
        vm.set("rX", np.ones(size // 4, np.float32))
        for steps in (6, 1):
            vm.step(steps)
            store.commit(vm, f"after {steps}")
        # Behind the second FORK the newest snapshot's tensor is the running context's too.
        for name, window, tensors in (("after 6", 64, 1), ("after 6", 0, 0), ("after 1", 64, 2), ("after 1", 0, 1)):
            tight = made(snapshot_memory=tensors * size + 1, snapshot_window=window)
            if window:
                store.restore(tight, name)
                assert len(tight.snapshots.recent) < 2 and tight.snapshots.let_go == 1
            else:
                with pytest.raises(StoreError, match="snapshot_memory"):
                    store.restore(tight, name)
            other = made(snapshot_memory=tensors * size + 3 * 4096, snapshot_window=window)
            store.restore(other, name)
            assert len(other.snapshots.recent) == min(window, 2) and other.snapshots.let_go == 0
            other.run()
            assert other.get("rX").data[0] == 8.0


def test_the_bound_where_the_main_context_has_ended(tmp_path):
    """What it has is no snapshot's alone; what its registers name is kept."""
    code = (".reg rX R50\nSPAWN_CONTEXT rC, other\nFORK rS\n{}HALT\nother:\nLOADI rN, 0\nmore:\nADD rN, rN, 1\n"
            "COMPARE rN, 50\nIF_LESS more\nHALT")
    program, changed = (m3jit.assemble(code.format(then)) for then in ("", "ADD rX, rX, rX\n"))
    size = 400_000

    def made(program: Any, **options: Any) -> Any:
        return m3jit.VM(program, backend="interpreter", **options)
    with Store.open(tmp_path / "s") as store:
        for name, one in ("same", program), ("changed", changed):
            vm = made(one, snapshot_memory=size + 20_000)
            vm.set("rX", np.ones(size // 4, np.float32))
            while vm.main.status != DONE:
                vm.step(1)
            assert not vm.finished
            store.commit(vm, name)
        other = made(program, snapshot_memory=size // 4)
        store.restore(other, "same")
        assert len(other.snapshots.recent) == 1
        other.run()
        with pytest.raises(StoreError, match="snapshot_memory"):
            store.restore(made(changed, snapshot_memory=size // 4, snapshot_window=0), "changed")
        other = made(changed, snapshot_memory=size + 20_000, snapshot_window=0)
        store.restore(other, "changed")
        assert [s.id for s in other.snapshots.live()] == [1]


def test_a_window_of_streams_comes_back_within_the_bound(tmp_path):
    """Snapshots share the page they end in, as on the machine that took them; where the bound is less, the newest that
    fit come back."""
    program = m3jit.assemble("LOADI rS, 0\nmore:\nATTN rA, rX, rX, rX, sKV HEADS=2 CAUSAL\nADD rX, rX, rStep\n"
                             "MOV rOld, rS\nFORK rS\nADD rN, rN, 1\nCOMPARE rN, 90\nIF_LESS more\nHALT")

    def made(bound: int) -> Any:
        vm = m3jit.VM(program, backend="interpreter", snapshot_memory=bound)
        vm.set("rX", np.random.default_rng(8).standard_normal((1, 256)).astype(np.float32))
        vm.set("rStep", np.full((1, 256), 0.25, np.float32))
        vm.set("rN", 0)
        return vm
    bound = 500_000
    straight = made(bound)
    straight.run()
    vm = made(bound)
    vm.step(1 + 7 * 80)
    ids = [s.id for s in vm.snapshots.recent]
    held = vm.snapshots.bound.count(vm.snapshots.live())
    assert len(ids) == 64 and vm.snapshots.let_go == 0 and vm.state("sKV").page_bytes * 16 > bound
    with Store.open(tmp_path / "s") as store:
        store.commit(vm, "run")
        for limit in (bound, held, held // 2):
            other = made(limit)
            store.restore(other, "run")
            kept = [s.id for s in other.snapshots.recent]
            assert kept == ids[-len(kept):] and other.snapshots.let_go == (0 if kept == ids else kept[0] - 1)
            assert (len(kept) == 64) is (limit >= held) and kept
            assert other.snapshots.bound.count(other.snapshots.live()) <= limit
            for mine, theirs in zip(vm.snapshots.recent[-len(kept):], other.snapshots.recent):
                assert digest(mine.root) == digest(theirs.root)
            other.run()
            assert state(other) == state(straight)
        other = made(bound)                            # rows behind a snapshot's are another's, and stay
        store.restore(other, "run")
    points = [s.handle() for s in other.snapshots.recent]
    before = [digest(p.get().root) for p in points]
    for point in points[10], points[-1], points[30]:
        other.abort(point)
        other.set("rX", np.zeros((1, 256), np.float32))
        other.step(7 * 3)
        assert [digest(p.get().root) for p in points] == before
