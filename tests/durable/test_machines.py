"""Whole machines on a disk: contexts, rings, SHARED, locks, inputs and turns go on as if nothing had happened."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import m3jit
from m3jit.durable import Checkpoints, Store, StoreError
from tests.durable.programs import team, whole_state

WORDS = ("hello", "you")


def with_words(rounds: int = 6, **options: Any) -> Any:
    vm = team(rounds, **options)
    for word in WORDS:
        vm.push_input(word)
    return vm


def test_a_machine_goes_on_as_if_nothing_had_happened(tmp_path):
    """Committed at every few instructions, put into a new machine, and compared at every instruction after that."""
    straight, states, said = with_words(), [], []
    with Store.open(tmp_path / "store", keep=None) as store:
        while True:
            states.append(whole_state(straight))
            said.append(len(straight.said))
            if len(states) % 6 == 1:
                store.commit(straight, "a", [len(states) - 1])
            if not straight.step(1):
                break
        assert straight.finished and said[-1] == 12 and len(states) > 150
        waits = {s[key][-1] for s in states for key in s if key.startswith("context")}
        assert {"input on USER_INPUT", "an item in ring numbers", "space in ring numbers"} < waits and \
            any(w and w.startswith("lock 7, held by") for w in waits)
        for version in store.versions["a"]:
            vm = team()
            at = store.restore(vm, "a", version.number).notes[0]
            for expected in states[at:at + 20]:
                assert whole_state(vm) == expected
                vm.step(1)
        vm = team()
        store.restore(vm, "a", 1 + 60 // 6)
        vm.step(len(states) - 1 - 60)
        assert whole_state(vm) == states[-1] and vm.said == straight.said[said[60]:]


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_a_run_that_was_stopped_goes_on_in_the_same_turns(tmp_path, backend):
    """Stopped by a limit in the middle of somebody's slice, many times over."""
    straight = with_words(30, backend=backend)
    straight.run()
    said: list[Any] = []
    with Store.open(tmp_path / "store") as store:
        for _ in range(60):
            vm = team(30, backend=backend, max_steps=37, checkpoints=Checkpoints(store))
            if vm.checkpoints.resume(vm) is None:
                for word in WORDS:
                    vm.push_input(word)
            try:
                vm.run()
            except m3jit.LimitError:
                vm.checkpoints.commit(vm)
            said += vm.said
            if vm.error is None:
                break
        assert store.names() == [] and said == straight.said
    assert whole_state(vm)["context 1"][0] == whole_state(straight)["context 1"][0]
