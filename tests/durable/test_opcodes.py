"""CHECKPOINT_SAVE, CHECKPOINT_RESTORE, PERSIST and the WAL region in programs."""
from __future__ import annotations

import errno
import os
from typing import Any

import numpy as np
import pytest

import m3jit
from m3jit.durable import Checkpoints, Store
from m3jit.durable.files import Files
from m3jit.vm.vm import VM


def machine(source: str, folder: Any, store: Store | None = None, **options: Any) -> VM:
    options.setdefault("backend", "interpreter")
    vm = m3jit.VM(m3jit.assemble(source, "test.m3asm"), files=folder, checkpoints=Checkpoints(store), **options)
    vm.got = []                                        # type: ignore[attr-defined]
    vm.set_sink("OUTPUT", vm.got.append)               # type: ignore[attr-defined]
    return vm


def run(source: str, folder: Any, store: Store | None = None, **options: Any) -> VM:
    return machine(source, folder, store, **options).run()


# The second machine finds what the first one saved: it tries to restore first.
COUNTER = """
    LOADI rN, 0
    LOADI rSaved, 0
    COMPARE rAgain, 0
    IF_EQUAL fresh
    CHECKPOINT_RESTORE rS, "here/ck"
    ABORT rS RESUME
fresh:
    ADD rN, rN, 1
    RNG_UNIFORM rU
    MEMCPY rPlace, rX
    ATTN rA, rX, rX, rX, sKV HEADS=2 CAUSAL
    COMPARE rN, 3
    IF_NOT_EQUAL on
    CHECKPOINT_SAVE RD=rBytes "here/ck"
on:
    STREAM rN
    COMPARE rN, 5
    IF_LESS fresh
    RNG_UNIFORM rU
    HALT
"""


def counter(folder: Any, again: int, backend: str = "interpreter") -> VM:
    (folder / "here").mkdir(exist_ok=True)
    vm = machine(COUNTER, folder, backend=backend)
    vm.set("rX", np.arange(16, dtype=np.float32).reshape(2, 8))
    vm.set("rPlace", 3 << 60)
    vm.set("rAgain", again)
    return vm.run()


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_a_run_goes_on_behind_its_checkpoint(tmp_path, backend):
    first = counter(tmp_path, 0, backend)
    second = counter(tmp_path, 1, backend)
    assert first.got == ["1", "2", "3", "4", "5"] and second.got == ["3", "4", "5"]
    for name in ("rU", "rA"):
        a, b = first.get(name), second.get(name)
        assert (a.tobytes() if hasattr(a, "tobytes") else a) == (b.tobytes() if hasattr(b, "tobytes") else b)
    assert second.state("sKV").length(0) == 10
    assert second.main.memory.read(3 << 60, 64) == first.main.memory.read(3 << 60, 64)
    assert first.get("rBytes") > 0 and sorted(p.name for p in (tmp_path / "here" / "ck").iterdir())[0] == "lock"


def test_a_snapshot_a_state_and_a_tensor(tmp_path):
    vm = machine("""
        LOADI rN, 1
        ATTN rA, rX, rX, rX, sKV HEADS=2
        FORK rS
        LOADI rN, 2
        ATTN rB, rX, rX, rX, sKV HEADS=2
        CHECKPOINT_SAVE rS "snapshot"
        CHECKPOINT_SAVE sKV "stream"
        CHECKPOINT_SAVE rB "tensor"
        LOADI rN, 3
        CHECKPOINT_RESTORE S9, "stream"
        CHECKPOINT_RESTORE rT, "tensor"
        CHECKPOINT_RESTORE rBack, "snapshot"
        MOV rKept, rT
        MOV rHow, rN
        RESTORE rBack
        HALT
    """, tmp_path)
    vm.set("rX", np.arange(16, dtype=np.float32).reshape(2, 8))
    vm.step(13)
    assert vm.state("S9").length(0) == 4 and vm.get("S9") != vm.get("sKV")
    assert vm.get("rT").tobytes() == vm.get("rB").tobytes()
    vm.run()
    assert vm.get("rN") == 3 and vm.state("sKV").length(0) == 2      # RESTORE leaves the registers
    back = vm.get("rBack").get().root
    assert vm.snapshots.resolve(vm.get("rBack")).root.R[vm.register("rN").index] == 1
    # the snapshot that was saved names itself, and the name is the restored one's
    assert back.R[vm.register("rS").index].get() is vm.get("rBack").get()


def test_saving_again_writes_what_is_new(tmp_path):
    vm = machine("""
    go:
        ATTN rA, rX, rX, rX, sKV HEADS=2 CAUSAL
        CHECKPOINT_SAVE sKV RD=rBytes "ck"
        STREAM rBytes
        ADD rX, rX, rX
        ADD rN, rN, 1
        COMPARE rN, 9
        IF_LESS go
        HALT
    """, tmp_path)
    vm.set("rX", np.random.default_rng(1).standard_normal((64, 8)).astype(np.float32))
    vm.set("rN", 0)
    vm.run()
    sizes = list(map(int, vm.got))
    page = vm.state("sKV").page_bytes
    assert all(page < n < page + 1000 for n in sizes)


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source, message", [
    ('CHECKPOINT_SAVE "../out"\nHALT', r"CHECKPOINT_SAVE .*the program wants to write a checkpoint to '../out', "
                                       r"outside the directory .* it may use"),
    ('CHECKPOINT_SAVE "."\nHALT', "which is a directory; give the name"),
    ('CHECKPOINT_SAVE\nHALT', 'needs PATH="..."'),
    ('CHECKPOINT_RESTORE rX, "none"\nHALT', "none: no such folder; CHECKPOINT_SAVE makes one"),
    ('CHECKPOINT_SAVE "notes.txt"\nHALT', "notes.txt: is not a folder; a store is one"),
    ('CHECKPOINT_SAVE "mine"\nHALT', r"mine: is not a store and not empty \(it has a.txt\); name an empty"),
    ('CHECKPOINT_RESTORE rX, "empty"\nHALT', "empty: has no 'checkpoint'; names in it: none"),
    ('LOADI rX, 1\nCHECKPOINT_SAVE rX "ck"\nHALT', "a snapshot, a state handle or a tensor"),
    ("FORK rS PERSIST\nHALT", r"FORK .*: this machine has no store of its own; `m3jit run --store FOLDER` and "
                              r"VM\(checkpoints=m3jit.Checkpoints\(store\)\) give it one"),
    ("SNAPSHOT rS PERSIST\nHALT", "SNAPSHOT .*this machine has no store of its own"),
    ("LOADI rX, 0x7000000000000000\nMEMCPY rX, rT\nHALT", "this machine has no store of its own"),
    ("LOADI rX, 0x3000000000000000\nMEMCPY rX, rT PERSIST\nHALT",
     r"PERSIST copies to the log, region WAL; 0x3000000000000000 lies in ACTIVATION \(FORK PERSIST keeps"),
    ("LOADI rX, 0x7000000000000000\nMEMSET rX, LEN=3\nHALT", "WAL is a log; MEMCPY appends to it, and nothing else"),
    ("LOADI rX, 0x7000000000000000\nTENSOR rY, SHAPE=[3] U8 FROM=rX\nHALT", "WAL is a log; MEMCPY appends to it"),
])
def test_what_is_refused(tmp_path, source, message):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text("")
    (tmp_path / "empty").mkdir()
    vm = machine(source, tmp_path)
    if "rT" in source:
        vm.set("rT", b"abc")
    with pytest.raises(m3jit.Trap, match=message):
        vm.run()
    assert not (tmp_path.parent / "out").exists()


def test_a_machine_without_checkpoints(tmp_path):
    vm = m3jit.VM(m3jit.assemble('CHECKPOINT_SAVE "ck"\nHALT'), backend="interpreter", files=tmp_path)
    with pytest.raises(m3jit.Trap, match=r"this machine writes no checkpoints; run it with `m3jit run`, or pass "
                                         r"VM\(checkpoints=m3jit.Checkpoints\(\)\)"):
        vm.run()


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    run('LOADI rN, 1\nCHECKPOINT_SAVE "ck"\nHALT', tmp_path)
    with pytest.raises(m3jit.Trap, match="CHECKPOINT_RESTORE .*ck: 'checkpoint' version 1: was written by another"):
        run('CHECKPOINT_RESTORE rX, "ck"\nHALT', tmp_path)


def test_a_folder_in_use(tmp_path):
    with Store.open(tmp_path / "ck"):
        with pytest.raises(m3jit.Trap, match=r"CHECKPOINT_SAVE .*ck: is in use by process \d+; close it there"):
            run('CHECKPOINT_SAVE "ck"\nHALT', tmp_path)


def test_a_flipped_bit_traps_and_names_the_place(tmp_path):
    source = 'CHECKPOINT_SAVE rT "ck"\nCHECKPOINT_RESTORE rY, "ck"\nHALT'
    vm = machine(source, tmp_path)
    vm.set("rT", np.arange(1000, dtype=np.float32))
    vm.run()
    segment = tmp_path / "ck" / "segment-00000001"
    raw = bytearray(segment.read_bytes())
    raw[2000] ^= 4
    segment.write_bytes(raw)
    vm = machine(source, tmp_path)
    with pytest.raises(m3jit.Trap, match=r"segment-00000001: damaged at byte 512: block \w+ does not match"):
        vm.main.index = 1
        vm.run()


# -- PERSIST ----------------------------------------------------------------------------------------------------------
LOOP = """
    LOADI rN, 0
go:
    ADD rN, rN, 1
    MEMCPY rLog, rT
    FORK rS PERSIST
    STREAM rN
    COMPARE rN, 6
    IF_LESS go
    HALT
"""


def loop(folder: Any, store: Store, max_steps: int | None = None) -> VM:
    vm = machine(LOOP, folder, store, max_steps=max_steps)
    vm.set("rT", b"x")
    vm.set("rLog", 7 << 60)
    return vm


def test_a_run_is_taken_up_at_its_last_persist(tmp_path):
    with Store.open(tmp_path / "s") as store:
        vm = loop(tmp_path, store, 22)
        with pytest.raises(m3jit.LimitError):
            vm.run()
        assert vm.got == ["1", "2", "3"] and store.names() == ["run"] and store.latest("run").number == 4
    with Store.open(tmp_path / "s") as store:
        vm = loop(tmp_path, store)
        assert vm.checkpoints.resume(vm) is not None and vm.get("rN") == 4
        vm.run()
        assert vm.got == ["4", "5", "6"]               # the fourth was persisted and not said yet
        assert b"".join(store.log_of("run")) == b"xxxxxx"
        assert vm.get("rS").get() is not None
    assert loop(tmp_path, Store.open(tmp_path / "other")).checkpoints.resume(vm) is None


def test_the_log_is_appended_to_and_not_rolled_back(tmp_path):
    source = """
        FORK rS PERSIST
        MEMCPY rLog, rT
        MEMCPY rLog, rT LEN=2 SRC_OFFSET=1 DST_OFFSET=3 PERSIST
        ABORT rS
        MEMCPY rLog, rT LEN=1
        MEMCPY rLog, rT DST_OFFSET=9
        HALT
    """
    with Store.open(tmp_path / "s") as store:
        vm = machine(source, tmp_path, store)
        vm.set("rT", b"abc")
        vm.set("rLog", 7 << 60)
        vm.step(3)
        assert b"".join(store.log_of("run")) == b"abcbc"
        with pytest.raises(m3jit.Trap, match="WAL is a log of 6 bytes: copy to its first address or to offset 0x6"):
            vm.run()
        assert b"".join(store.log_of("run")) == b"abcbca"
        store.compact()
        assert b"".join(store.log_of("run")) == b"abcbca" and store.length("run") == 6
    with Store.open(tmp_path / "s") as store:          # at the FORK nothing had been appended
        again = machine(source, tmp_path, store)
        again.checkpoints.resume(again)
        assert b"".join(store.log_of("run")) == b""


def test_a_child_persists_the_whole_machine(tmp_path):
    """What any context persists is where all of them go on."""
    source = ("FORK rC, child, RED\nADD rN, rN, 1\nSTREAM rN\nHALT\n"
              "child: ADD rN, rN, 10\nFORK rS PERSIST\nSTREAM rN\nHALT")
    with Store.open(tmp_path / "s") as store:
        vm = machine(source, tmp_path, store)
        vm.set("rN", 0)
        vm.step(3)
        assert store.names() == ["run"] and vm.got == []
    with Store.open(tmp_path / "s") as store:
        again = machine(source, tmp_path, store)
        again.checkpoints.resume(again)
        again.run()
        assert again.got == ["10", "1"] and store.names() == []       # it ended: there is nothing to go on from


def test_a_recorded_run_repeats_its_checkpoints_and_leaves_the_files_alone(tmp_path, capfd, monkeypatch):
    from m3jit.cli import main
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.m3asm").write_text('LOADI rN, 5\nFORK rS\nLOADI rN, 6\nCHECKPOINT_SAVE RD=rB rS "ck"\n'
                                        'CHECKPOINT_RESTORE rQ, "ck"\nSTREAM rB\nABORT rQ\nSTREAM rN\nHALT\n')
    assert main(["record", "run.m3asm", "-o", "log"]) == 0
    before = {p: p.read_bytes() for p in (tmp_path / "ck").iterdir()}
    assert main(["replay", "log"]) == 0
    assert "agrees" in capfd.readouterr().err
    assert {p: p.read_bytes() for p in (tmp_path / "ck").iterdir()} == before
    (tmp_path / "write.m3asm").write_text('CHECKPOINT_SAVE "other"\nCHECKPOINT_RESTORE rQ, "other"\nHALT')
    assert main(["record", "write.m3asm", "-o", "1.log"]) == 0 and main(["record", "write.m3asm", "-o", "2.log"]) == 0
    assert main(["replay", "2.log"]) == 0              # the second version there, the first one here


class Filling(Files):
    """A disk that has room for some bytes."""
    left = 1 << 40

    def open(self, path: Any, write: bool = False, create: bool = False) -> Any:
        file, disk = super().open(path, write, create), self

        class Limited:
            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def write(self, offset: int, data: Any) -> None:
                disk.left -= len(data)
                if disk.left < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                file.write(offset, data)
        return Limited()


def test_a_full_disk_traps_and_the_last_version_is_whole(tmp_path):
    disk = Filling()
    with Store.open(tmp_path / "s", files=disk) as store:
        vm = loop(tmp_path, store)
        vm.step(1 + 2 * 6)
        disk.left = 1000
        with pytest.raises(m3jit.Trap, match=r"test.m3asm:6: .*FORK R\d, PERSIST.*: /.*: cannot (commit|append): No "
                                             r"space left on device; the versions committed before are intact; make"):
            vm.run()
        assert store.latest("run").number == vm.get("rN") - 1 and store.verify() == []
        disk.left = 1 << 40
    with Store.open(tmp_path / "s") as store:
        again = loop(tmp_path, store)
        assert again.checkpoints.resume(again) is not None
        again.run()
        assert again.got[-1] == "6" and b"".join(store.log_of("run")) == b"xxxxxx"


# -- the log of runs that ended, and of runs that did not -------------------------------------------------------------
SAYS = """
    MEMCPY rLog, rT PERSIST
    MEMCPY rLog, rT
    LOADI rN, 1
    FORK rS PERSIST
    MEMCPY rLog, rT PERSIST
    HALT
"""


def say(folder: Any, store: Store, text: bytes, steps: int) -> bytes:
    """The log after a run of so many steps, which is taken up where the last one was left."""
    vm = machine(SAYS, folder, store)
    vm.set("rT", text)
    vm.set("rLog", 7 << 60)
    vm.checkpoints.resume(vm)
    vm.step(steps)
    if vm.finished:
        vm.checkpoints.ended()
    return b"".join(store.log_of("run"))


def test_what_a_run_that_began_again_had_appended_is_dropped(tmp_path):
    """A run that was killed before its first version begins at the beginning and appends everything again; what a run
    that ended has appended stays."""
    log = []
    for text, steps in ((b"a", 1), (b"b", 2), (b"c", 5), (b"-", 9), (b"d", 1), (b"e", 3), (b"f", 9), (b"g", 0)):
        with Store.open(tmp_path / "s") as store:
            log.append(say(tmp_path, store, text, steps))
            store.compact()
    # "-" was taken up behind two of "c"; "d" and "e" had no version; "b" and "e" were killed with one not written yet
    assert log == [b"a", b"b", b"ccc", b"ccc", b"cccd", b"ccce", b"cccfff", b"cccfff"]
    with Store.open(tmp_path / "s") as store:
        say(tmp_path, store, b"h", 5)
        store.remove("run")                            # the run did not end
    with Store.open(tmp_path / "s") as store:
        assert store.ended == {"run": 6} and say(tmp_path, store, b"i", 1) == b"cccfffi"
        store.append("run", 2, b"")
        assert store.ended == {"run": 2}
    with Store.open(tmp_path / "s") as store:
        assert store.ended == {"run": 2} and say(tmp_path, store, b"j", 1) == b"ccj"


@pytest.mark.parametrize("persist", [True, False])
def test_an_append_that_fails_leaves_nothing(tmp_path, monkeypatch, persist):
    """Not in the store, and not in what is still to be written; what was appended before stays."""
    from m3jit.durable import checkpoints
    monkeypatch.setattr(checkpoints, "PENDING", 1 << 20 if persist else 5)
    disk = Filling()
    source = f"MEMCPY rLog, rT\nMEMCPY rLog, rU{' PERSIST' if persist else ''}\nHALT"
    with Store.open(tmp_path / "s", files=disk) as store:
        vm = machine(source, tmp_path, store)
        for name, value in (("rT", b"abc"), ("rU", b"defg"), ("rLog", 7 << 60)):
            vm.set(name, value)
        vm.step(1)
        disk.left = 100
        with pytest.raises(m3jit.Trap, match=r"test.m3asm:2: .*MEMCPY .*cannot append: No space left on device"):
            vm.step(1)
        disk.left = 1 << 40
        assert store.length("run") == 0
        with pytest.raises(m3jit.StoreError, match="close the store and open it again"):
            vm.checkpoints.flush()                     # the disk had no room to take the append back
    disk.left = 1 << 40
    with Store.open(tmp_path / "s", files=disk) as store:
        disks = Checkpoints(store)
        disks.append(None, 0, b"abc", False)

        def no_room(*_: Any) -> None:
            raise m3jit.StoreError("no room")
        with monkeypatch.context() as patch, pytest.raises(m3jit.StoreError, match="no room"):
            patch.setattr(store, "append", no_room)
            disks.append(None, 3, b"defg", persist)
        assert disks.append(None, 3, b"hi", False) == 5
        disks.close()
        assert b"".join(store.log_of("run")) == b"abchi"


def test_what_is_appended_and_not_on_the_disk_has_a_bound(tmp_path):
    from m3jit.durable.checkpoints import PENDING
    with Store.open(tmp_path / "s") as store:
        disk, piece, end = Checkpoints(store), bytes(PENDING // 4 + 1), 0
        for times in range(1, 12):
            end = disk.append(None, end, piece, False)
            assert end == times * len(piece) and end - store.length("run") <= PENDING
        assert 0 < store.length("run") < end
        disk.append(None, end, bytes(3 * PENDING), False)
        assert store.length("run") == end + 3 * PENDING
        disk.close()


def test_contexts_of_another_run_get_numbers_of_their_own(tmp_path):
    """Not those of contexts here, and no two the same; snapshots that they took are nobody's here."""
    source = """
        COMPARE rAgain, 1
        IF_EQUAL again
        SPAWN_CONTEXT rA, ends, GREEN
        SPAWN_CONTEXT rB, ends, GREEN
        FORK rS
        CHECKPOINT_SAVE "ck"
        HALT
    again:
        SPAWN_CONTEXT rMine, ends, GREEN
        CHECKPOINT_RESTORE rQ, "ck"
        MOV rHere, rMine
        ABORT rQ
        SPAWN_CONTEXT rNext, ends, GREEN
        HALT
    ends:
        YIELD
        JUMP ends
    """
    def made(again: int) -> VM:
        vm = machine(source, tmp_path)
        vm.set("rAgain", again)
        return vm
    first = made(0)
    first.step(40)
    assert (first.get("rA").id, first.get("rB").id) == (2, 3) and len(first.scheduler.contexts) == 2
    first.checkpoints.close()
    other = made(1)
    while other.main.index < other.image.index_of[other.image.pcs[-3]]:
        other.step(1)
    numbers = [other.get(name).id for name in ("rA", "rB")]
    live = set(other.scheduler.contexts)
    assert live == {1, 2, 6} and numbers == [4, 5] and other.get("rNext").id == 6
    assert not {s.context for s in other.snapshots.live()} & live
