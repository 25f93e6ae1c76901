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


def machine(source: str, **options: Any) -> Any:
    return m3jit.VM(m3jit.assemble(source, "test.m3asm"), backend="interpreter", **options)


def run_until(folder: Any, source: str, steps: int, setup: Any = lambda vm: None, **options: Any) -> Any:
    """A machine with a store of its own, after so many instructions; then it is lost."""
    with Store.open(folder) as store:
        vm = machine(source, checkpoints=Checkpoints(store), **options)
        vm.got = []
        vm.set_sink("OUTPUT", vm.got.append)
        setup(vm)
        vm.step(steps)
    return vm


def gone_on(folder: Any, source: str, setup: Any = lambda vm: None, **options: Any) -> Any:
    """Another machine that goes on at the store's last version, to its end."""
    with Store.open(folder) as store:
        vm = machine(source, checkpoints=Checkpoints(store), **options)
        vm.got = []
        vm.set_sink("OUTPUT", vm.got.append)
        setup(vm)
        assert vm.checkpoints.resume(vm) is not None
        vm.run()
        assert store.names() == []                     # `run` said that it ended
    return vm


# -- snapshots --------------------------------------------------------------------------------------------------------
CHAIN = """
    LOADI rN, 1
    FORK rFirst
    LOADI rN, 2
    FORK rSecond
    MOV rKept, rFirst
    LOADI rFirst, 0
    LOADI rN, 3
    FORK rThird {persist}
    STREAM rN
    ABORT rThird
    MOV rMine, rSecond
    ABORT rMine
    STREAM rN
    ABORT rFirst
    STREAM rN
    HALT
"""


def test_snapshots_that_a_persisted_one_names_come_back(tmp_path):
    """Also those that only they name: the first is named by the second alone when that is put back."""
    source = CHAIN.format(persist="PERSIST").replace("MOV rKept, rFirst", "NOP")
    straight = machine(source, checkpoints=Checkpoints(Store.open(tmp_path / "x")))
    said: list[str] = []
    straight.set_sink("OUTPUT", said.append)
    straight.run()
    assert said == ["3", "2", "1"]
    run_until(tmp_path / "s", source, 8)
    assert gone_on(tmp_path / "s", source).got == said


def test_a_checkpoint_holds_the_snapshots_that_the_context_names(tmp_path):
    source = CHAIN.format(persist="").replace("FORK rThird", 'CHECKPOINT_SAVE "ck"\nCHECKPOINT_RESTORE rThird, "ck"')
    for at in (0, 8):                                  # saved and restored by one machine, then restored by another
        vm = m3jit.VM(m3jit.assemble(source), backend="interpreter", checkpoints=Checkpoints(), files=tmp_path)
        said: list[str] = []
        vm.set_sink("OUTPUT", said.append)
        vm.main.index = at
        if at:
            vm.set("rN", 3)
        vm.run()
        assert said == ["3", "2", "1"]


def test_a_snapshot_that_was_released_stays_so(tmp_path):
    source = "FORK rS\nMOV rOld, rS\nFORK rS\nLOADI rOld, 0\nFORK rP PERSIST\nABORT rS\nABORT rOld\nHALT"
    vm = run_until(tmp_path / "s", source, 5, snapshot_window=0)
    assert vm.get("rS").get() is not None
    with pytest.raises(m3jit.Trap, match=r"test.m3asm:7: .*snapshot 1 was released"):
        gone_on(tmp_path / "s", source, snapshot_window=0)


# -- what contexts share ----------------------------------------------------------------------------------------------
SHARE = """
    LOADI rShared, 0x6000000000000000
    MEMCPY rShared, rBig
    MEMSET rShared, PATTERN=7 LEN=3
    FORK rC, child, GREEN
    FORK rS PERSIST
    SENSE rX, RING, NAME="back"
    STREAM rX
    HALT
child:
    TENSOR rY, SHAPE=[4] U8 FROM=rShared
    GETELEM rZ, rY, 2
    STREAM rZ, RING, NAME="back"
    HALT
"""


def test_shared_memory_is_that_of_the_commit(tmp_path):
    big = np.arange(20000, dtype=np.uint8)
    source = SHARE.replace("GETELEM rZ, rY, 2", "MOV rZ, rY")

    def setup(vm: Any) -> None:
        vm.set("rBig", big)
    with Store.open(tmp_path / "s") as store:
        vm = machine(source, checkpoints=Checkpoints(store))
        setup(vm)
        vm.step(5)
        first = store.latest("run").bytes
        vm.memory.shared.write(8192, b"new")
        vm.checkpoints.commit(vm)
        assert 4096 < store.latest("run").bytes < first - 4096     # the page that changed, of five
    again = gone_on(tmp_path / "s", source)
    assert again.get("rX").tobytes() == b"\x07\x07\x07\x03" and again.memory.shared.read(8190, 6) == b"\xfe\xffnew\x03"


def test_a_context_alone_leaves_shared_memory_as_it_is(tmp_path):
    """As ABORT does: SHARED is outside of a context's version."""
    with Store.open(tmp_path / "s") as store:
        vm = team()
        vm.step(40)
        store.commit(vm, "a", context=vm.main)
        vm.memory.shared.write(0, b"later")
        store.restore(vm, "a")
        assert vm.memory.shared.read(0, 5) == b"later" and len(vm.scheduler.contexts) == 4


@pytest.mark.parametrize("wait", ["WFI rW TIMEOUT={}", "LOCK NUMBER=1 RD=rW TIMEOUT={}"])
def test_a_wait_with_a_time_goes_on_with_what_is_left(tmp_path, wait):
    source = f"LOCK NUMBER=1\nFORK rC, child, RED\nFORK rS PERSIST\nSENSE rX, RING, NAME=\"r\"\nSTREAM rX\nHALT\n" \
             f"child: {wait}\nSTREAM rW, RING, NAME=\"r\"\nHALT"
    hours = source.format(10 ** 13)
    vm = run_until(tmp_path / "hours", hours, 3)
    before = vm.scheduler.contexts[2].waiting_for
    with Store.open(tmp_path / "hours") as store:
        other = machine(hours)
        store.restore(other, "run")
        after = other.scheduler.contexts[2].waiting_for
        assert after.what == before.what and 0 < after.until - before.until < 5000
        known = other.machine._until[2][1] if wait.startswith("WFI") else other.locks.locks[1].waiting[0].until
        assert abs(known - after.until) < 1
    soon = source.format(10 ** 7)
    with Store.open(tmp_path / "soon") as store:
        vm = machine(soon, checkpoints=Checkpoints(store))
        while not store.names():
            vm.step(1)
    assert gone_on(tmp_path / "soon", soon).got == ["0"]


def test_a_trap_of_another_context_is_raised_at_the_end_all_the_same(tmp_path):
    source = "FORK rC, child, RED\nFORK rS PERSIST\nSTREAM rX\nHALT\nchild: ADD rX, rNone, 1\nHALT"
    vm = run_until(tmp_path / "s", source, 3, lambda vm: vm.set("rX", 5))
    with pytest.raises(m3jit.Trap) as straight:
        vm.checkpoints = m3jit.Checkpoints()
        vm.run()
    with pytest.raises(m3jit.Trap) as again:
        gone_on(tmp_path / "s", source)
    assert str(again.value) == str(straight.value) and "context 2" in str(again.value)
    assert (again.value.line, again.value.register) == (straight.value.line, straight.value.register)


def test_others_go_on_when_the_main_context_has_ended(tmp_path):
    source = "FORK rC, child, GREEN\nLOADI rN, 7\nHALT\nchild: YIELD\nLOADI rN, 8\nFORK rS PERSIST\nSTREAM rN\nHALT"
    vm = run_until(tmp_path / "s", source, 6)
    assert vm.main.status == "done" and vm.got == []
    again = gone_on(tmp_path / "s", source)
    assert again.got == ["8"] and again.main.status == "done" and again.get("rN") == 7


# -- inputs -----------------------------------------------------------------------------------------------------------
READS = """
go:
    SENSE rX, rHow, {source}
    COMPARE rHow, 0
    IF_LESS done
    STREAM rX, SINK, NAME="said"
    FORK rS PERSIST
    JUMP go
done:
    HALT
"""


def reads(folder: Any, source: str, steps: int, setup: Any, said: list[Any], **options: Any) -> None:
    """A machine goes on where the one before was lost, for so many instructions (0: to the end)."""
    with Store.open(folder) as store:
        vm = machine(READS.format(source=source), checkpoints=Checkpoints(store), **options)
        vm.set_sink("said", said.append)
        setup(vm, vm.checkpoints.resume)
        if steps:
            vm.step(steps)
        else:
            vm.run()


ITEMS = ["text", b"\xff\x00", 7, np.float32(0.5), np.arange(6, dtype=np.int16).reshape(2, 3),
         np.zeros(3000, np.float32)]


def shown(items: list[Any]) -> list[Any]:
    return [i if isinstance(i, (int, float, str, bytes)) else (i.dtype.str, i.shape, i.tobytes()) for i in items]


def test_items_that_were_pushed_come_back_and_new_ones_go_behind(tmp_path):
    straight: list[Any] = []
    said: list[Any] = []

    def push(vm: Any, resume: Any) -> None:
        for item in (*ITEMS, "last"):
            vm.push_input(item)
        vm.close_input()
    reads(tmp_path / "x", "USER_INPUT", 0, push, straight, wait_input=True)

    def first(vm: Any, resume: Any) -> None:
        assert resume(vm) is None
        for item in ITEMS:
            vm.push_input(item)
    reads(tmp_path / "s", "USER_INPUT", 6 + 5, first, said, wait_input=True)

    def later(vm: Any, resume: Any) -> None:
        resume(vm)
        vm.push_input("last")
        vm.close_input()
    reads(tmp_path / "s", "USER_INPUT", 0, later, said, wait_input=True)
    assert shown(said) == shown(straight) and len(said) == 7


def test_input_that_is_given_again_is_not_read_again(tmp_path):
    """What was attached or pushed before the machine is restored counts from the beginning."""
    for source, give in (("USER_INPUT", lambda vm: [vm.push_input(f"{i}") for i in range(5)]),
                         ("words", lambda vm: vm.set_source("words", (f"{i}" for i in range(5)))),
                         ("rows", lambda vm: vm.set_source("rows", np.arange(5)))):
        said: list[Any] = []
        where = source if source == "USER_INPUT" else f'NAMED, NAME="{source}", COUNT=1'

        def setup(vm: Any, resume: Any) -> None:
            give(vm)
            resume(vm)
        reads(tmp_path / source, where, 17, setup, said)
        assert len(said) == 3
        reads(tmp_path / source, where, 0, setup, said)
        assert len(said) == 5 and len({str(s) for s in said}) == 5


def sound(vm: Any, rate: int = 1000, seconds: float = 10.0, channels: int = 1) -> Any:
    return vm.audio_input("AUDIO_PCM", rate, seconds, channels)


def test_sound_comes_back_and_the_device_goes_on(tmp_path):
    """Also into a ring that the host attached and that has sound since, and into one that keeps less."""
    samples = np.random.default_rng(1).standard_normal(12000).astype(np.float32)
    said: list[Any] = []

    def first(vm: Any, resume: Any) -> None:
        resume(vm)
        ring = sound(vm)
        for part in np.split(samples[:9000], 9):
            ring.push(part)
    reads(tmp_path / "s", "AUDIO_PCM, COUNT=1000", 6 + 5, first, said)
    assert len(said) == 2
    for attached in (False, True):
        with Store.open(tmp_path / "s", write=False) as store:
            vm = machine(READS.format(source="AUDIO_PCM, COUNT=1000"))
            ring = None
            if attached:
                ring = sound(vm, seconds=9.0)
                ring.push(samples[9000:])
            store.restore(vm, "run")
            if not attached:
                ring = vm.sources["AUDIO_PCM"]
                ring.push(samples[9000:])
            assert (ring.rate, ring.channels, ring.frames) == (1000, 1, 9000 if attached else 10000)
            ring.close()
            got: list[Any] = []
            vm.checkpoints = m3jit.Checkpoints(Store.open(tmp_path / f"other{attached}"))
            vm.set_sink("said", got.append)
            if attached:                               # the oldest made room, and the program had not read them
                vm.skip_input("AUDIO_PCM", "oldest")
                said = said[:1] + [samples[1000:2000], samples[2000:3000]]
            vm.run()
            assert np.concatenate([a.ravel() for a in (*said, *got)]).tobytes() == samples.tobytes()
            said = said[:2]


def test_sound_of_another_run_is_not_taken_for_that_of_this_one(tmp_path):
    """A machine that has read from its ring goes back to versions of its own, and to no others that have sound."""
    source = "go: SENSE rX, AUDIO_PCM, COUNT=10\nJUMP go"
    own, other = machine(source), machine(source)
    with Store.open(tmp_path / "s") as store:
        for vm, name, loud in ((own, "own", 0.25), (other, "other", 0.5)):
            sound(vm).push(np.full(40, loud, np.float32))
            vm.step(1)
            store.commit(vm, name)
            vm.step(4)
        with pytest.raises(StoreError, match="its sound AUDIO_PCM is not what the ring attached here has had"):
            store.restore(own, "other")
        assert own.main.cursors["AUDIO_PCM"] == 30
        store.restore(own, "own")
        assert own.main.cursors["AUDIO_PCM"] == 10


def test_only_new_items_and_new_sound_are_written(tmp_path):
    with Store.open(tmp_path / "s") as store:
        vm = team()
        ring = vm.audio_input("AUDIO_PCM", 24000, 2.0)
        ring.push(np.random.default_rng(1).standard_normal(48000).astype(np.float32))
        for i in range(1000):
            vm.push_input(f"{i} {'x' * 200}")
        vm.step(30)
        first = store.commit(vm, "a").bytes
        assert first > 192_000 + 200_000
        assert store.commit(vm, "a").bytes < 12_000
        ring.push(np.ones(480, np.float32))
        vm.push_input("another")
        assert store.commit(vm, "a").bytes < 12_000 + 2 * 16_384 + 16_000      # pieces and groups at both ends
        vm.step(1)
        assert store.commit(vm, "a").bytes < 16_000


# -- what is refused --------------------------------------------------------------------------------------------------
def test_what_has_no_form_on_a_disk_is_named(tmp_path):
    vm = team()
    vm.push_input("good")
    vm.push_input({1, 2})
    with Store.open(tmp_path / "s") as store, pytest.raises(
            StoreError, match=r"'a': cannot be stored: input USER_INPUT: item 1, a set, has no form on a disk \(.*\); "
                              r"text, bytes, numbers, arrays and tensors have one"):
        store.commit(vm, "a")
    assert store.names() == []


def test_versions_that_do_not_fit_the_machine_are_refused(tmp_path):
    def committed(name: str, setup: Any) -> None:
        vm = team()
        setup(vm)
        vm.step(25)
        with Store.open(tmp_path / "s") as store:
            store.commit(vm, name)

    def refused(name: str, message: str, setup: Any = lambda vm: None, **options: Any) -> None:
        vm = team(**options)
        setup(vm)
        before = whole_state(vm)
        with Store.open(tmp_path / "s") as store, pytest.raises(StoreError, match=message):
            store.restore(vm, name)
        assert whole_state(vm) == before
    committed("plain", lambda vm: None)
    refused("plain", r"'plain' version 1: cannot be restored: it has 4 contexts, more than this machine may have \(2, "
                     r"context_limit\); raise the limit: m3jit run --context-limit N, VM\(context_limit=...\)",
            context_limit=2)
    refused("plain", r"'plain' version 1: cannot be restored: its snapshots hold \d+ bytes that no running context "
                     r"has, more than the 100 they may \(snapshot_memory\); raise the bound: m3jit run "
                     r"--snapshot-memory SIZE, VM\(snapshot_memory=...\)", snapshot_memory=100)
    committed("sound", lambda vm: sound(vm).push(np.ones(5)))
    refused("sound", "its sound AUDIO_PCM has 1 channels at 1000 Hz, and the ring attached here 2 at 8000; attach one "
                     r"of the same kind \(VM.audio_input\)", lambda vm: sound(vm, 8000, 1.0, 2))

    def drawn(vm: Any) -> None:
        vm.set_source("USER_INPUT", iter("abc"))
        vm.sources["USER_INPUT"].read(0, 0, False)
    committed("drawn", drawn)
    refused("drawn", "its input USER_INPUT was drawn from an iterator of the host, which is not here; attach it again, "
                     r"from its beginning, before you restore \(VM.set_source\)")


def test_a_machine_that_another_thread_runs_is_not_replaced(tmp_path):
    vm = team()
    vm.step(25)
    with Store.open(tmp_path / "s") as store:
        store.commit(vm, "a")
        vm._runner = -1
        before = whole_state(vm)
        with pytest.raises(StoreError, match="another thread runs this machine; restore it before, or when it has st"):
            store.restore(vm, "a")
        assert whole_state(vm) == before


POSITION = """
    FORK rC, child, RED
    SENSE rX, RING, NAME="r"
    CHECKPOINT_SAVE "ck"
    KILL_CONTEXT rC
    CHECKPOINT_RESTORE rBack, "ck"
    RESTORE rBack
    SENSE rY, RING, NAME="r"
    HALT
child: LOADI rK, 5
more: STREAM rK, RING, NAME="r"
    ADD rK, rK, 1
    JUMP more
"""


def test_a_position_in_a_ring_of_another_run_is_refused(tmp_path):
    """In the run that saved it the ring is there; in another one its next item would be a wrong one."""
    vm = machine(POSITION, checkpoints=Checkpoints(), files=tmp_path)
    vm.run()
    assert (vm.get("rX").tobytes(), vm.get("rY").tobytes()) == (b"5", b"6")
    other = machine(POSITION, checkpoints=Checkpoints(), files=tmp_path)
    other.main.index = 4
    message = r"CHECKPOINT_RESTORE .*ck: 'checkpoint' version 1: cannot be restored: it stands at item 1 of RING:r, " \
              r"which has had 0 on this machine; what rings hold is kept with a whole machine \(FORK PERSIST, " \
              r"Store.commit without `context`\), not with one context: restore it in the run that wrote it"
    with pytest.raises(m3jit.Trap, match=message):
        other.run()


def test_contexts_of_another_run_are_not_taken_for_those_of_this_one(tmp_path):
    source = """
        FORK rC, child, RED
        CHECKPOINT_SAVE "ck"
        CHECKPOINT_RESTORE rBack, "ck"
        ABORT rBack
        KILL_CONTEXT rC
        HALT
    child: WFI rW
        JUMP child
    """
    machine(source, checkpoints=Checkpoints(), files=tmp_path).run()   # its own child
    other = machine(source, checkpoints=Checkpoints(), files=tmp_path)
    other.step(1)                                      # it has a context 2 as well
    other.main.index = 2
    with pytest.raises(m3jit.Trap, match=r"KILL_CONTEXT .*: context \d+ has already ended"):
        other.run()
