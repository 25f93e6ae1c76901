"""Turns of contexts go on behind any FORK PERSIST as they would have, wherever in its slice it stands."""
from __future__ import annotations

import itertools
from typing import Any

import pytest

import m3jit
from m3jit.durable import Checkpoints, Store
from m3jit.vm import scheduler

SOURCE = """
    SPAWN_CONTEXT rOther, second, GREEN
    LOADI rN, 0
    LOADI rWho, 1
more:
    ADD rN, rN, 1
    STREAM rWho
    {idle}
    FORK rS PERSIST
    NOP
    COMPARE rN, 30
    IF_LESS more
    HALT
second:
    LOADI rN, 0
    LOADI rWho, 2
again:
    ADD rN, rN, 1
    STREAM rWho
    COMPARE rN, 60
    IF_LESS again
    HALT
"""


class Kept(Checkpoints):
    """Notes what had been said at each version, and ends no store."""

    def __init__(self, store: Store | None, said: list[str]):
        super().__init__(store)
        self.said, self.versions = said, []

    def persist(self, vm: Any, snapshot: Any) -> int:
        if self.store is None:
            return 0
        before, written = len(self.said), super().persist(vm, snapshot)
        self.versions.append((self.store.latest("run").number, before))
        return written

    def ended(self) -> None:
        """Nothing of it is asked here."""


def run(source: str, store: Store | None, restore: Any = lambda vm: None) -> tuple[list[str], Kept]:
    said: list[str] = []
    kept = Kept(store, said)
    vm = m3jit.VM(m3jit.assemble(source, "turns.m3asm"), backend="interpreter", checkpoints=kept)
    vm.set_sink("OUTPUT", lambda item: said.append(str(item)))
    restore(vm)
    vm.run()
    return said, kept


@pytest.mark.parametrize("idle", range(1, 13, 3))
def test_a_slice_that_ends_with_the_instruction_is_not_gone_on_with(tmp_path, monkeypatch, idle):
    monkeypatch.setattr(scheduler, "QUANTUM", 50)
    source = SOURCE.format(idle="\n    ".join(itertools.repeat("NOP", idle)))
    with Store.open(tmp_path / "store", keep=None) as store:
        straight, kept = run(source, store)
        assert straight.count("1") == 30 and len(kept.versions) == 30
        for number, before in kept.versions:
            after, _ = run(source, None, lambda vm: store.restore(vm, "run", number))
            assert straight[:before] + after == straight


@pytest.mark.parametrize("cut", [False, True])
def test_a_machine_that_is_stepped_accounts_for_the_instruction_too(tmp_path, monkeypatch, cut):
    """Virtual time, which the order of turns comes from, is the same behind it, where a run had begun the slice too."""
    monkeypatch.setattr(scheduler, "QUANTUM", 50)
    source = SOURCE.format(idle="NOP")

    def times(vm: m3jit.VM) -> list[tuple[int, int, int]]:
        return [(c.id, c.virtual_time, c.virtual_deadline) for c in vm.scheduler.contexts.values()]

    with Store.open(tmp_path / "store", keep=None) as store:
        kept = Kept(store, [])
        vm = m3jit.VM(m3jit.assemble(source, "turns.m3asm"), backend="interpreter", checkpoints=kept)
        vm.set_sink("OUTPUT", lambda item: None)
        if cut:
            vm.look_at = 5
            vm._loop(lambda: vm._cut is not None)
            vm.look_at = None
        seen = 0
        while not vm.finished:
            vm.step(1)
            if len(kept.versions) == seen:
                continue
            seen = len(kept.versions)
            expected = times(vm)
            other = m3jit.VM(m3jit.assemble(source, "turns.m3asm"), backend="interpreter",
                             checkpoints=Kept(None, []))
            store.restore(other, "run", kept.versions[-1][0])
            other.set_sink("OUTPUT", lambda item: None)
            other._turn()
            assert times(other) == expected and len(expected) >= 1
        assert seen == 30
