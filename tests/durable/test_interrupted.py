"""Ctrl-C, and other threads, between two steps of what stores and restores machines."""
from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import m3jit
from m3jit.durable import Store, contexts, version
from m3jit.durable.roots import Unpacking
from m3jit.vm.context import DONE
from m3jit.vm.turns import Turns
from m3jit.vm.vm import VM
from tests.durable.programs import every_kind, state, whole_state


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("run", [VM.run, lambda vm: vm.step(20)], ids=["run", "step"])
def test_a_context_that_had_ended_when_ctrl_c_came_is_not_stored_as_one_that_goes_on(tmp_path, monkeypatch, run,
                                                                                     context):
    source = "FORK rC, child, GREEN\nYIELD\nHALT\nchild: LOCK NUMBER=5\nYIELD\nYIELD\nHALT"
    program = m3jit.assemble(source, "ends.m3asm")
    vm, after = VM(program, backend="interpreter"), Turns._after

    def interrupted(vm: Any, ctx: Any, retired: int) -> None:
        if ctx.status == DONE and ctx.id == context:
            monkeypatch.undo()
            raise KeyboardInterrupt
        after(vm, ctx, retired)
    monkeypatch.setattr(Turns, "_after", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(vm)
    with Store.open(tmp_path / "s") as store:
        store.commit(vm, "a")
        again = VM(program, backend="interpreter")
        store.restore(again, "a")
    assert list(again.scheduler.contexts) == [2] * (context == 1) and len(again.locks.locks) == (context == 1)
    for machine in (vm, again):
        while machine.step(1):
            pass
        assert machine.finished and machine.main.status == DONE


@pytest.mark.parametrize("owner, name", [(Unpacking, "settle"), (version, "commit")])
@pytest.mark.parametrize("whole", [False, True])
def test_a_restore_that_is_broken_off_leaves_the_machine_as_it_was(tmp_path, monkeypatch, owner, name, whole):
    vm = every_kind()
    vm.step(25)
    with Store.open(tmp_path / "s") as store:
        store.commit(vm, "a", context=None if whole else vm.main)
        other, straight = every_kind(rounds=5), every_kind(rounds=5)
        for machine in (other, straight):
            machine.step(12)
        before = whole_state(other)

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(owner, name, interrupted)
            store.restore(other, "a")
        assert whole_state(other) == before
        for machine in (other, straight):
            machine.run()
        for name in ("rN", "rU", "rFloat"):
            assert other.get(name) == straight.get(name)
        assert other.get("rV").tobytes() == straight.get("rV").tobytes()
        again = every_kind()
        store.restore(again, "a")
        again.run()
        vm.run()
        assert state(again) == state(vm)


def test_what_is_pushed_while_a_machine_is_restored_goes_behind_what_comes_back(tmp_path, monkeypatch):
    program = m3jit.assemble("SENSE rText, USER_INPUT\nSENSE rMore, USER_INPUT\nSENSE rSound, AUDIO_PCM COUNT=3\nHALT",
                             "hears.m3asm")
    vm = VM(program, backend="interpreter", wait_input=True)
    vm.audio_input(seconds=1.0).push(np.float32([0.25]))
    vm.push_input("one")
    other = VM(program, backend="interpreter", wait_input=True)
    ring = other.audio_input(seconds=1.0)

    def push() -> None:
        other.push_input("two")
        ring.push(np.float32([0.5, 0.75]))
    pushing = threading.Thread(target=push)
    window = contexts.Whole._window

    def slowly(whole: Any, *arguments: Any) -> Any:    # the inputs have been read, and nothing is stored yet
        pushing.start()
        pushing.join(0.05)
        return window(whole, *arguments)
    with Store.open(tmp_path / "s") as store:
        store.commit(vm, "a")
        monkeypatch.setattr(contexts.Whole, "_window", slowly)
        store.restore(other, "a")
    pushing.join()
    ring.close()
    other.run()
    assert [other.get(name).tobytes() for name in ("rText", "rMore")] == [b"one", b"two"]
    assert other.get("rSound").data.ravel().tolist() == [0.25, 0.5, 0.75]
