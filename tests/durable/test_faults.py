"""A commit that fails at any of its file operations, and then a crash at any operation of the next one.

What a commit that failed had written may not come back: its blocks are written over by the next commit, so a record of
it that is found at the next opening would name bytes that are not there any more."""
from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Callable

import pytest

from m3jit.durable import Store, StoreError
from m3jit.durable import blocks as block_files
from m3jit.durable.blocks import Writer
from tests.durable.simulated_disk import PowerLoss, SimulatedDisk
from tests.durable.test_power_loss import FOLDER, SAID, contents, put

ACTIONS: dict[str, Callable[[Store], Any]] = {
    "commit": lambda store: put(store, "a"),
    "append": lambda store: store.append("log", store.length("log"), SAID[:700]),
    "remove": lambda store: store.remove("b"),
    "compact": lambda store: store.compact()}


class TornDisk(SimulatedDisk):
    """One whose failing writes have written all but the last byte."""

    def open(self, path: Path, write: bool = False, create: bool = False) -> Any:
        file = super().open(path, write, create)
        whole = file.write

        def torn(offset: int, data: Any) -> None:
            try:
                whole(offset, data)
            except OSError:
                count, fault, self.fault = self.count, self.fault, lambda *_: None
                whole(offset, bytes(data)[:-1])
                self.count, self.fault = count, fault
                raise
        file.write = torn                              # type: ignore[method-assign]
        return file


def at_count(moment: int, error: Callable[[], BaseException]) -> Callable[[int, str, Path], None]:
    def fault(count: int, what: str, path: Path) -> None:
        if count == moment:
            raise error()
    return fault


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


FAULTS = {"full": (SimulatedDisk, full), "full after most of it": (TornDisk, full), "broken": (SimulatedDisk, broken),
          "Ctrl-C": (SimulatedDisk, KeyboardInterrupt)}


def whole(disk: SimulatedDisk, action: str) -> None:
    """The store opens, each version has its own bytes, and new commits of the same bytes do too."""
    with Store.open(FOLDER, files=disk) as store:
        assert store.verify() == []
        for name in store.names():
            if name in "abc":
                newest = store.latest(name)
                assert [store.bytes_of(r, 1 << 20) for r in store.read(newest)] == contents(name, newest.number)
        assert store.latest("a").number in ((2, 3) if action == "commit" else (2,))
        assert ("b" in store.names()) or action == "remove"
        said = b"".join(store.log_of("log"))
        assert len(said) in ((700, 1400) if action == "append" else (700,)) and (SAID[:700] * 2).startswith(said)
        for number in (3, 4):                          # what a dead commit wrote is taken for nothing's bytes
            store.put("again", lambda w: [w.blob(part) for part in contents("a", number)])
        assert store.verify() == []


def after_fault(disk_class: Any, error: Callable[[], BaseException], action: str, moment: int) -> tuple[Any, Any, bool]:
    """(disk, store, did it fail) after an action with a fault at its moment-th file operation."""
    disk = disk_class()
    store = Store.open(FOLDER, files=disk)
    for name in "aab":
        put(store, name)
    store.append("log", 0, SAID[:700])
    disk.fault = at_count(disk.count + moment, error)
    try:
        ACTIONS[action](store)
    except (StoreError, KeyboardInterrupt):
        failed = True
    else:
        failed = False
    disk.fault = lambda *_: None
    return disk, store, failed


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_crash_in_the_commit_after_one_that_failed(monkeypatch, action, kind):
    monkeypatch.setattr(block_files, "SEGMENT_BYTES", 4000)
    refused = 0
    for moment in range(1, 60):
        for crash in range(1, 30):
            disk, store, failed = after_fault(*FAULTS[kind], action, moment)
            disk.fault = at_count(disk.count + crash, PowerLoss)
            end = False
            try:
                put(store, "c")                        # not the bytes of the one that failed
                end = True
            except PowerLoss:
                pass
            except StoreError as e:
                assert "close the store and open it again" in str(e) and failed
                end, refused = True, refused + 1
            disk.fault = lambda *_: None
            outcomes = [disk.after_crash(seed) for seed in range(2)]
            for outcome in (disk, *outcomes):          # the first: only the process was killed
                whole(outcome, action)
            if end:
                break
        else:
            pytest.fail("the next commit has no end")
        if not failed:
            assert moment > 3
            break
    else:
        pytest.fail("it always failed")
    assert (refused > 0) == (kind != "Ctrl-C" or action == "compact"), refused      # after a sync that failed


@pytest.mark.parametrize("action, where", [("commit", (Writer, "committed")), ("append", (Store, "_note_append"))])
def test_ctrl_c_between_the_disk_and_what_is_noted_of_it(monkeypatch, action, where):
    """The record is on the disk and memory does not know: nothing more is written until the store is opened again."""
    disk = SimulatedDisk()
    store = Store.open(FOLDER, files=disk)
    for name in "aab":
        put(store, name)
    store.append("log", 0, SAID[:700])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*where, at_count_of_calls)
        ACTIONS[action](store)
    for again in ACTIONS.values():
        with pytest.raises(StoreError, match="writing was cut short, and it is not known whether the disk has what was "
                                             "written; close the store and open it again"):
            again(store)
    whole(disk, action)


def at_count_of_calls(*_: Any) -> None:
    raise KeyboardInterrupt
