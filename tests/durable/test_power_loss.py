"""The power goes at every change a commit or a compaction makes to the disk: whatever was acknowledged is there, whole.

The disk of `simulated_disk` keeps, drops, reorders and tears what was not synced."""
from __future__ import annotations

import errno
import itertools
import os
import random
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest

from m3jit.durable import Store, StoreError, StoreFull
from m3jit.durable import blocks as block_files
from m3jit.durable.files import Files
from tests.durable.programs import every_kind, state, team, whole_state
from tests.durable.simulated_disk import PowerLoss, SimulatedDisk

FOLDER = Path("/disk/store")
SAID = bytes(range(256)) * 3       # what is appended to a log
MORE_SEEDS = 40                    # of the slow test


def contents(name: str, number: int) -> list[bytes]:
    """What version `number` of a name holds: something that stays, something new, something over several sectors."""
    rng = random.Random(f"{name}{number}")
    return [f"{name} stays".encode() * 30, rng.randbytes(40), rng.randbytes(1500)]


def put(store: Store, name: str) -> None:
    number = store.latest(name).number + 1 if name in store.names() else 1
    store.put(name, lambda w: [w.blob(part) for part in contents(name, number)])


def scenario(disk: Any, acknowledged: dict[str, int]) -> None:
    """Commits, a compaction, commits in new segments, another opening, a compaction, a commit."""
    def commit(store: Store, name: str) -> None:
        put(store, name)
        acknowledged[name] = store.latest(name).number

    def say(store: Store) -> None:
        acknowledged["log"] = store.append("log", store.length("log"), SAID[:700])
    store = Store.open(FOLDER, files=disk)
    for name in "aab":
        commit(store, name)
    say(store)
    store.compact()
    commit(store, "a")
    say(store)
    store.close()
    store = Store.open(FOLDER, files=disk)
    for name in "bca":
        commit(store, name)
    store.compact()
    commit(store, "b")
    store.close()


def check(disk: SimulatedDisk, acknowledged: dict[str, int]) -> None:
    """Every name has the last version that was acknowledged, or the one after it, whole; and the store goes on."""
    with Store.open(FOLDER, files=disk) as store:
        assert store.verify() == []
        said = b"".join(store.log_of("log"))
        assert said == (SAID[:700] * 3)[:len(said)] and len(said) - acknowledged.get("log", 0) in (0, 700)
        for name in sorted({*acknowledged, *store.names()} - {"log"}):
            newest = store.latest(name)
            assert newest.number - acknowledged.get(name, 0) in (0, 1)
            got = [store.bytes_of(ref, 1 << 20) for ref in store.read(newest)]
            assert got == contents(name, newest.number)
        put(store, "z")
    with Store.open(FOLDER, files=disk) as store:
        assert store.latest("z") and store.verify() == []


def power_losses(run: Callable[[Any, dict[str, int]], None], seeds: int,
                 every: int = 1) -> Iterator[tuple[int, SimulatedDisk, dict[str, int]]]:
    """(moment, disk when the power is back, what was acknowledged): every n-th moment, several outcomes of each."""
    for moment in itertools.count(1, every):

        def fault(count: int, what: str, path: Path) -> None:
            if count == moment:
                raise PowerLoss
        disk, acknowledged = SimulatedDisk(fault), {}
        try:
            run(disk, acknowledged)
        except PowerLoss:
            for seed in range(seeds):
                yield moment, disk.after_crash(seed), acknowledged
        else:
            return


def test_power_loss_at_every_change(monkeypatch):
    monkeypatch.setattr(block_files, "SEGMENT_BYTES", 6000)
    moments = set()
    for moment, disk, acknowledged in power_losses(scenario, 5):
        check(disk, acknowledged)
        moments.add(moment)
    assert len(moments) > 70


@pytest.mark.slow
def test_power_loss_at_every_change_with_many_outcomes(monkeypatch):
    monkeypatch.setattr(block_files, "SEGMENT_BYTES", 6000)
    for _, disk, acknowledged in power_losses(scenario, MORE_SEEDS):
        check(disk, acknowledged)


def test_power_loss_again_while_a_store_recovers(monkeypatch):
    """A crash in the first commit after a crash."""
    monkeypatch.setattr(block_files, "SEGMENT_BYTES", 6000)
    for moment, disk, acknowledged in power_losses(scenario, 1):
        if moment % 6 == 0:
            def again(_: Any, __: Any, disk: SimulatedDisk = disk) -> None:
                with Store.open(FOLDER, files=disk) as store:
                    store.compact()
            limit = disk.count + 1 + moment // 6 % 9

            def fault(count: int, what: str, path: Path, limit: int = limit) -> None:
                if count == limit:
                    raise PowerLoss
            disk.fault = fault
            try:
                again(None, None)
            except PowerLoss:
                pass
            check(disk.after_crash(moment), acknowledged)


def test_the_simulated_disk_finds_a_missing_sync(monkeypatch):
    """Without the sync of the blocks, or of the log, or of the folder, some outcome is not whole."""
    monkeypatch.setattr(block_files, "SEGMENT_BYTES", 6000)
    for forgotten in ("seg", "log", "sync folder"):
        found = False
        for moment in range(1, 90):
            def fault(count: int, what: str, path: Path) -> None:
                if count == moment:
                    raise PowerLoss
            disk, acknowledged = LazyDisk(fault, forgotten), {}
            with pytest.raises(PowerLoss):
                scenario(disk, acknowledged)
                raise PowerLoss
            for seed in range(3):
                try:
                    check(disk.after_crash(seed), acknowledged)
                except (AssertionError, StoreError):
                    found = True
            if found:
                break
        assert found, forgotten


class LazyDisk(SimulatedDisk):
    """One that does not do one kind of sync."""

    def __init__(self, fault: Any, forgotten: str):
        super().__init__(fault)
        self.forgotten = forgotten

    def open(self, path: Path, write: bool = False, create: bool = False) -> Any:
        file = super().open(path, write, create)
        if path.name.startswith(self.forgotten):
            file.sync = lambda: None                   # type: ignore[method-assign]
        return file

    def sync_folder(self, folder: Path) -> None:
        if self.forgotten != "sync folder":
            super().sync_folder(folder)


def contexts_and_rings() -> Any:
    """A machine with several contexts, a ring, words and sound."""
    vm = team()
    vm.push_input("words")
    vm.audio_input("AUDIO_PCM", 1000, 1.0).push(np.arange(1200) / 1200)
    return vm


@pytest.mark.parametrize("make, fresh, seen", [(lambda: every_kind(rounds=99), every_kind, state),
                                               (contexts_and_rings, team, whole_state)])
def test_versions_of_a_machine_after_power_loss(make, fresh, seen):
    digests: dict[int, Any] = {}

    def run(disk: Any, acknowledged: dict[str, int]) -> None:
        vm = make()
        with Store.open(FOLDER, files=disk) as store:
            for number in (1, 2, 3):
                vm.step(35)
                digests[number] = seen(vm)
                store.commit(vm, "vm")
                acknowledged["vm"] = number
            store.compact()
    moments = 0
    for _, disk, acknowledged in power_losses(run, 1, every=3):
        moments += 1
        with Store.open(FOLDER, files=disk) as store:
            newest = store.latest("vm").number if "vm" in store.names() else 0
            assert newest - acknowledged.get("vm", 0) in (0, 1)
            if newest:
                vm = fresh()
                store.restore(vm, "vm")
                assert seen(vm) == digests[newest]
    assert moments > 8


# -- a full disk, a failing one ---------------------------------------------------------------------------------------
def full(at: int, code: int = errno.ENOSPC,
         what: tuple[str, ...] = ("write", "create")) -> Callable[[int, str, Path], None]:
    """A fault at the at-th change of these kinds, once."""
    seen = 0

    def fault(count: int, kind: str, path: Path) -> None:
        nonlocal seen
        if kind in what:
            seen += 1
            if seen == at:
                raise OSError(code, os.strerror(code), str(path))
    return fault


@pytest.mark.parametrize("action", ["commit", "compact"])
def test_a_full_disk_at_every_write(monkeypatch, action):
    """The commit or compaction says so and leaves everything as it was; the same store goes on when there is room."""
    monkeypatch.setattr(block_files, "SEGMENT_BYTES", 4000)
    for at in range(1, 100):
        disk = SimulatedDisk()
        store = Store.open(FOLDER, files=disk)
        for name in "aaab":
            put(store, name)
        disk.fault = full(at)
        failed = False
        try:
            put(store, "a") if action == "commit" else store.compact()
        except StoreFull as e:
            failed = True
            assert str(e).startswith(str(FOLDER)) and str(e).endswith(
                f"cannot {action}: No space left on device; the versions committed before are intact; make room and "
                f"try again")
        disk.fault = lambda *_: None
        assert store.latest("a").number == 4 - (failed or action == "compact") and store.verify() == []
        if action == "commit":
            check(disk.after_crash(at), {"a": store.latest("a").number, "b": 1})
        put(store, "b")
        store.close()
        check(disk, {"a": store.latest("a").number, "b": 2})
        if not failed:
            assert at > 3
            return
    pytest.fail("it always failed")


def test_a_full_disk_while_a_store_is_made():
    for at in range(1, 100):
        disk = SimulatedDisk(full(at))
        try:
            Store.open(FOLDER, files=disk).close()
        except StoreFull as e:
            assert "cannot open: No space left on device" in str(e)
            disk.fault = lambda *_: None
            check(disk, {})
        else:
            assert at > 3
            return
    pytest.fail("it always failed")


def test_after_a_sync_that_failed_a_store_is_opened_again():
    for at in range(1, 4):
        disk = SimulatedDisk()
        store = Store.open(FOLDER, files=disk)
        put(store, "a")
        disk.fault = full(at, errno.EIO, ("sync",))
        with pytest.raises(StoreError, match="/disk/store[^:]*: cannot commit: Input/output error"):
            put(store, "a")
        disk.fault = lambda *_: None
        with pytest.raises(StoreError, match=r"a sync failed \(Input/output error\); close the store and open it"):
            put(store, "a")
        assert store.verify() == [] and store.latest("a").number == 1
        store.close()
        for seed in range(5):
            check(disk.after_crash(seed), {"a": 1})
        check(disk, {"a": 1})


def test_a_read_only_folder(tmp_path):
    class ReadOnly(Files):
        def lock(self, path: Path, shared: bool) -> Any:
            if not shared:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return super().lock(path, shared)
    Store.open(tmp_path / "s").close()
    with Store.open(tmp_path / "s", write=False, files=ReadOnly()) as store:
        assert store.names() == []
    with pytest.raises(StoreError, match=r"s/lock: cannot open: Read-only file system; a store that may not be written "
                                         r"can be read with Store.open\(..., write=False\)"):
        Store.open(tmp_path / "s", files=ReadOnly())


def test_a_commit_that_was_not_acknowledged_is_made_sure_of_before_the_next():
    """After a failed sync the operating system may show what the disk does not have: what an opening finds behind the
    log's head is written and synced again before anything is put behind it."""
    for at in (1, 2, 3):
        disk = SimulatedDisk()
        store = Store.open(FOLDER, files=disk)
        put(store, "a")
        disk.fault = full(at, errno.EIO, ("sync",))
        with pytest.raises(StoreError):
            put(store, "a")
        disk.fault = lambda *_: None
        store.close()
        store = Store.open(FOLDER, files=disk)
        number = store.latest("a").number
        put(store, "a")
        store.close()
        for seed in range(4):
            check(disk.after_crash(seed), {"a": number + 1})
