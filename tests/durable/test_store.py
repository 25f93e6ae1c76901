"""A store: versions by name, what is written, locks, formats, damage."""
from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from m3jit.durable import DamagedStore, Store, StoreError, StoreInUse
from m3jit.durable import blocks as block_files
from m3jit.durable import log as log_file
from m3jit.durable.tree import MAX_DEPTH, Ref, TreeError, pack, unpack


def put(store: Store, name: str, *parts: bytes) -> Any:
    """A version of some blobs."""
    return store.put(name, lambda w: [w.blob(p) for p in parts])


def parts(store: Store, name: str, number: int | None = None) -> list[bytes]:
    return [store.bytes_of(ref, 1 << 30) for ref in store.read(store.latest(name, number))]


def filled(path: Path) -> Path:
    """A store with two names of two versions each."""
    with Store.open(path) as store:
        for number in range(2):
            for name in ("a", "b"):
                put(store, name, b"common" * 40, f"{name}{number}".encode() * 100)
    return path


@pytest.mark.parametrize("tree", [
    None, True, False, 0, -2 ** 63, 2 ** 63 - 1, 0.1, -0.0, float("inf"), b"", b"\0" * 300, "", "naïve ☃", [],
    [[], [None]], Ref(b"n" * 16, 2 ** 63, 9), [1, [2.5, "x", [b"y", Ref(b"0" * 16, 0)]]]])
def test_trees_are_read_as_they_were_written(tree):
    assert repr(unpack(pack(tree))) == repr(tree)


def test_what_is_no_tree_is_refused():
    deep: Any = None
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    for wrong, message in ((2 ** 63, "64 bits"), (deep, "40 lists"), ({}, "a dict is no plain value")):
        with pytest.raises((ValueError, TypeError), match=message):
            pack(wrong)
    for raw, message in ((b"", "1 bytes are said to follow, 0"), (b"\x09", "no value begins with 9"),
                         (b"\x00\x00", "1 bytes behind its end"), (b"\x07\xff\xff\xff\xff", "4294967295 items or"),
                         (b"\x06\x01\0\0\0\xff", "not UTF-8"), (b"\x07\x01\0\0\0" * 41 + b"\0", "40 lists")):
        with pytest.raises(TreeError, match=message):
            unpack(raw)


def test_versions_are_numbered_and_kept(tmp_path):
    with Store.open(filled(tmp_path / "s")) as store:
        assert store.names() == ["a", "b"] and store.latest("a").number == 2
        assert parts(store, "a", 1) == [b"common" * 40, b"a0" * 100]
        store.remove("a")
        with pytest.raises(StoreError, match=r"s: has no 'a'; names in it: 'b'$"):
            store.latest("a")
        with pytest.raises(StoreError, match="has no version 7 of 'b'"):
            store.latest("b", 7)
    with Store.open(tmp_path / "s", write=False) as store:
        assert store.names() == ["b"] and store.verify() == []


def test_a_block_that_is_there_is_not_written_again(tmp_path):
    with Store.open(tmp_path / "s") as store:
        first = put(store, "a", os.urandom(3 << 20))
        again = store.put("b", lambda w: store.read(first))
        assert first.bytes > 3 << 20 and again.bytes < 300
        assert parts(store, "b") == parts(store, "a")


@pytest.mark.parametrize("size", [0, 1, 2 ** 20 - 1, 2 ** 20, 2 ** 20 + 1, 5 * 2 ** 20])
def test_blobs_of_any_length(tmp_path, size):
    data = os.urandom(size)
    with Store.open(tmp_path / "s") as store:
        put(store, "a", data)
    with Store.open(tmp_path / "s", write=False) as store:
        assert parts(store, "a") == [data] and store.verify() == []


def test_segments_end_and_others_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(block_files, "SEGMENT_BYTES", 10_000)
    monkeypatch.setattr(block_files, "BUFFER", 2_000)
    data = [os.urandom(3000) for _ in range(20)]
    with Store.open(tmp_path / "s") as store:
        put(store, "a", *data)
    assert len(list((tmp_path / "s").glob("segment-*"))) > 4
    with Store.open(tmp_path / "s") as store:
        assert parts(store, "a") == data


def test_compaction_gives_back_what_nobody_needs(tmp_path):
    with Store.open(tmp_path / "s") as store:
        kept = os.urandom(50_000)
        for i in range(20):
            put(store, "a", kept, os.urandom(20_000))
        last = parts(store, "a")
        put(store, "b", b"small")
        size = sum(f.stat().st_size for f in (tmp_path / "s").iterdir())
        assert store.compact() > 350_000
        assert sum(f.stat().st_size for f in (tmp_path / "s").iterdir()) < size - 350_000
        assert parts(store, "a") == last and store.latest("a").number == 20 and store.verify() == []
        put(store, "a", kept, b"new")
    with Store.open(tmp_path / "s") as store:
        assert parts(store, "a") == [kept, b"new"] and parts(store, "b") == [b"small"]
        assert store.latest("a").number == 21
        assert store.compact(keep=2) >= 0 and parts(store, "a", 20) == last


def test_a_store_tidies_itself(tmp_path, monkeypatch):
    from m3jit.durable import store as stores
    monkeypatch.setattr(stores, "TIDY_BYTES", 100_000)
    with Store.open(tmp_path / "s") as store:
        for _ in range(30):
            put(store, "a", os.urandom(20_000))
        assert sum(f.stat().st_size for f in (tmp_path / "s").iterdir()) < 250_000
        assert len(parts(store, "a")[0]) == 20_000


def test_appending_does_not_look_at_what_was_appended(tmp_path):
    """The work of an append does not grow with the log: pieces that stay are not touched."""
    class Counted(list):
        looks = 0

        def __iter__(self):
            Counted.looks += len(self)
            return super().__iter__()
    with Store.open(tmp_path / "s") as store:
        store.append("log", 0, b"x")
        pieces = store.appended["log"] = Counted(store.appended["log"])
        for at in range(1, 50):
            assert store.append("log", at, b"x") == at + 1
        assert store.appended["log"] is pieces and len(pieces) == 50 and Counted.looks == 0
        assert store.append("log", 20, b"yz") == 22 and len(pieces) == 21 and Counted.looks == 0
    with Store.open(tmp_path / "s") as store:
        assert b"".join(store.log_of("log")) == b"x" * 20 + b"yz"
        store.append("log", 21, b"")
        store.append("log", 0, b"")
        assert store.length("log") == 0 and list(store.log_of("log")) == []


def test_a_log_cut_inside_a_piece(tmp_path):
    with Store.open(tmp_path / "s") as store:
        store.append("log", 0, b"abcdef")
        store.append("log", 6, b"ghi")
        store.append("log", 4, b"")
        assert list(store.log_of("log")) == [b"abcd"]
        store.append("log", 4, b"EF")
        store.append("log", 3, b"D")
        for _ in range(2):
            assert b"".join(store.log_of("log")) == b"abcD" and store.length("log") == 4
            store.compact()
            assert len(store.appended["log"]) == 1         # small pieces are put together


def test_others_use_a_store_while_its_log_is_read(tmp_path):
    """Reading a log holds nothing between two pieces; it ends where it ended when it began."""
    with Store.open(tmp_path / "s") as store:
        for at, data in enumerate((b"a", b"b", b"c")):
            store.append("log", at, data)
        reading = store.log_of("log")
        assert next(reading) == b"a"
        other = threading.Thread(target=lambda: (store.append("log", 3, b"d"), store.compact()), daemon=True)
        other.start()
        other.join(180)
        assert not other.is_alive() and b"".join(reading) == b"bc"
        reading = store.log_of("log")
        assert next(reading) == b"abcd"
        store.append("log", 4, b"efg")
        reading = store.log_of("log")
        assert next(reading) == b"abcd"
        store.append("log", 2, b"")
        assert list(reading) == [] and b"".join(store.log_of("log")) == b"ab"
        reading = store.log_of("log")
    with pytest.raises(StoreError, match="the store was closed; open it again"):
        next(reading)


def size_of(path: Path) -> int:
    return sum(f.stat().st_size for f in path.iterdir())


@pytest.mark.parametrize("reopened", [False, True])
def test_a_store_whose_log_grows_tidies_itself(tmp_path, monkeypatch, reopened):
    """Commits of what is there already, and appends, write records alone."""
    from m3jit.durable import store as stores
    monkeypatch.setattr(stores, "TIDY_LOG", 20_000)
    store = Store.open(tmp_path / "s")
    for i in range(100):
        put(store, "a", b"the same")
        store.append("log", i, b"x")
        if reopened:
            store.close()
            store = Store.open(tmp_path / "s")
        assert size_of(tmp_path / "s") < 2 * log_file.FIRST + 20_000 + 10_000
    assert store.latest("a").number == 100 and len(store.versions["a"]) < 30
    assert b"".join(store.log_of("log")) == b"x" * 100 and store.verify() == []
    store.close()


def test_how_many_versions_stay(tmp_path, monkeypatch):
    from m3jit.durable import store as stores
    monkeypatch.setattr(stores, "TIDY_LOG", 0)
    for keep in (1, 3, None):
        with Store.open(tmp_path / str(keep), keep=keep) as store:
            compacted = [len(store.versions["a"]) for _ in range(40) if put(store, "a", b"x")]
            numbers = [v.number for v in store.versions["a"]]
            assert numbers[-1] == 40 and numbers == list(range(41 - len(numbers), 41))
            assert min(compacted[5:]) >= (keep or 6) and (len(numbers) == 40) == (keep is None)
            left = [(keep or 40) if n == 40 else 0 for n in numbers[-1:]]
            store.compact(keep)
            assert [len(store.versions["a"])] == left
    for wrong in (0, -1):
        with pytest.raises(StoreError, match="keep = .*: at least one version of a name stays; None keeps all"):
            Store.open(tmp_path / "1", keep=wrong)
        with Store.open(tmp_path / "1") as store, pytest.raises(StoreError, match="at least one version"):
            store.compact(wrong)


def test_a_compaction_that_fails_is_not_tried_with_every_commit(tmp_path, monkeypatch):
    from m3jit.durable import compaction
    from m3jit.durable import store as stores
    monkeypatch.setattr(stores, "TIDY_LOG", 5_000)
    tried = []

    def fails(*_: Any) -> Any:
        tried.append(1)
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(compaction, "compact", fails)
    with Store.open(tmp_path / "s") as store:
        for i in range(150):
            assert put(store, "a", b"x").number == i + 1
    assert 2 <= len(tried) < 6


def test_a_record_of_a_removal_as_it_was_written_first(tmp_path):
    with Store.open(tmp_path / "s") as store:
        put(store, "a", b"x")
        store.append("a", 0, b"said")
        store.log.append(pack(["remove", "a"]))
    with Store.open(tmp_path / "s") as store:
        assert store.names() == [] and store.ended == {"a": 4}


# -- who may open it --------------------------------------------------------------------------------------------------
def test_one_writer_at_a_time(tmp_path):
    path = filled(tmp_path / "s")
    with Store.open(path):
        for write in (True, False):
            with pytest.raises(StoreInUse, match=rf"s: is in use by process {os.getpid()}; close it there, or use"):
                Store.open(path, write)
        code = f"from m3jit.durable import Store\nStore.open({str(path)!r})"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert other.returncode and f"StoreInUse: {path}: is in use by process {os.getpid()};" in other.stderr
    with Store.open(path, write=False), Store.open(path, write=False):
        with pytest.raises(StoreInUse):
            Store.open(path)
    Store.open(path).close()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    path = filled(tmp_path / "s")
    code = f"import os\nfrom m3jit.durable import Store\ns = Store.open({str(path)!r})\nos._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with Store.open(path) as store:
        assert store.names() == ["a", "b"]


def test_folders_that_are_no_stores(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"is not a store and not empty \(it has notes.txt\); name an empty or new"):
        Store.open(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(StoreError, match=r"missing: no such file or folder; name the folder of a store"):
        Store.open(tmp_path / "missing", write=False)
    with pytest.raises(StoreError, match="notes.txt: is not a folder; a store is one"):
        Store.open(tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="is not a store: it has no log; name the folder of one"):
        Store.open(tmp_path / "empty", write=False)


def test_a_name_has_a_length(tmp_path):
    with Store.open(tmp_path / "s") as store:
        for name in ("", "x" * 201):
            with pytest.raises(StoreError, match="a version's name has 1 to 200 bytes"):
                put(store, name)


def test_a_closed_or_read_only_store_is_not_written(tmp_path):
    path = filled(tmp_path / "s")
    with Store.open(path, write=False) as store:
        with pytest.raises(StoreError, match="was opened for reading only; open it with write=True"):
            put(store, "a", b"")
    with pytest.raises(StoreError, match="the store was closed; open it again"):
        put(store, "a", b"")


# -- damage -----------------------------------------------------------------------------------------------------------
def damage(path: Path, offset: int, bit: int = 0) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)


def test_a_newer_format_is_named(tmp_path):
    path = filled(tmp_path / "s") / "log"
    raw = bytearray(path.read_bytes())
    raw[8:12] = struct.pack("<I", log_file.FORMAT + 1)
    raw[24:40] = log_file.digest(bytes(raw[:24]))
    path.write_bytes(raw)
    with pytest.raises(StoreError, match=r"log: has format 2; this version of m3jit reads formats up to 1; use the"):
        Store.open(tmp_path / "s")


def test_a_torn_log_is_as_it_was_before_the_torn_commit(tmp_path):
    path = filled(tmp_path / "s")
    with Store.open(path) as store:
        end = store.log.end
        put(store, "a", b"never acknowledged")
    log = path / "log"
    raw = bytearray(log.read_bytes())
    raw[log_file.HEADS[1]:log_file.HEADS[1] + 64] = bytes(64)       # the head that was not written yet
    record = raw[end:].rstrip(b"\0")                  # what follows it fills the sector
    for cut in range(end, end + len(record), 7):
        log.write_bytes(raw[:cut])
        with Store.open(path) as store:
            assert store.latest("a").number == 2 and parts(store, "a")[1] == b"a1" * 100
    with Store.open(path) as store:
        put(store, "a", b"next")
    with Store.open(path) as store:
        assert parts(store, "a") == [b"next"] and store.latest("a").number == 3


def test_an_acknowledged_commit_that_is_cut_off_is_damage(tmp_path):
    path = filled(tmp_path / "s")
    log = path / "log"
    raw = log.read_bytes()
    for cut in (len(raw) - 500, len(raw) - 512, len(raw) - 1500):
        log.write_bytes(raw[:cut])
        with pytest.raises(DamagedStore, match=r"log: damaged at byte \d+: record \d of 4: .*; `m3jit store DIR --rep"):
            Store.open(path)
    with Store.open(path, repair=True) as store:
        assert store.damage is not None and store.latest("a").number == 1 or store.latest("a").number == 2
        assert store.verify() == []
    with Store.open(path) as store:
        assert store.names() and store.damage is None


def test_a_bit_anywhere_in_the_log_is_noticed_or_does_not_matter(tmp_path):
    """Every byte of the header, the heads and the records; the gaps between them mean nothing."""
    path = filled(tmp_path / "s")
    log = path / "log"
    whole = log.read_bytes()
    with Store.open(path, write=False) as store:
        good = {(n, k): parts(store, n, k) for n in "ab" for k in (1, 2)}
    noticed = 0
    for offset in [*range(0, 44), *range(4096, 4150), *range(8192, 8246), *range(log_file.FIRST, len(whole), 5)]:
        log.write_bytes(whole)
        damage(log, offset, offset % 8)
        try:
            with Store.open(path, write=False) as store:
                assert {(n, k): parts(store, n, k) for n in "ab" for k in (1, 2)} == good, offset
        except StoreError as e:
            assert str(log) in str(e)
            noticed += 1
    assert noticed > 150


def test_a_bit_anywhere_in_a_block_is_noticed(tmp_path):
    path = filled(tmp_path / "s")
    segment = path / "segment-00000001"
    whole = segment.read_bytes()
    with Store.open(path, write=False) as store:
        used = [(p.offset, p.end) for p in store.blocks.index.values()]
        good = parts(store, "b")
    wrong: set[str] = set()
    for first, last in used:
        for offset in range(first, last, 9):
            segment.write_bytes(whole)
            damage(segment, offset, offset % 8)
            with Store.open(path) as store:
                found = store.verify()
                assert found and all(f"{segment}: damaged at byte {first}: block" in line for line in found), offset
                wrong.update(line.partition(":")[0] for line in found)
                if not any(line.startswith("b version 2") for line in found):
                    assert parts(store, "b") == good
    assert wrong == {f"{n} version {k}" for n in "ab" for k in (1, 2)}


def test_repair_drops_versions_that_are_not_whole(tmp_path):
    path = filled(tmp_path / "s")
    with Store.open(path, write=False) as store:
        ref = store.read(store.latest("a"))[1]
        place = store.blocks.index[ref.hash]
    damage(path / "segment-00000001", place.offset + 40)
    with Store.open(path) as store:
        assert len(store.verify()) == 1
        with pytest.raises(DamagedStore, match="does not match its checksum; versions that hold it cannot be restored"):
            parts(store, "a")
        assert parts(store, "a", 1) and parts(store, "b")
    with Store.open(path, repair=True) as store:
        assert store.latest("a").number == 1 and store.latest("b").number == 2 and store.verify() == []


def test_a_missing_segment_is_named(tmp_path, monkeypatch):
    path = filled(tmp_path / "s")
    monkeypatch.setattr(block_files, "SEGMENT_BYTES", 600)
    with Store.open(path) as store:
        put(store, "c", b"elsewhere" * 100)
    (path / "segment-00000001").unlink()
    with Store.open(path) as store:
        assert parts(store, "c") == [b"elsewhere" * 100]
        with pytest.raises(DamagedStore, match="segment-00000001: damaged at byte 0: the file is missing, and "
                                               "committed versions need it; restore it from a copy; versions that"):
            parts(store, "a")
        assert len(store.verify()) == 4
    (path / "log").unlink()
    with pytest.raises(DamagedStore, match="log: damaged at byte 0: the log is missing, and the folder has blocks"):
        Store.open(path)
