"""Packed weights: what the cache file holds is the layout of the whole matrix, however many pieces it was written
in."""
from __future__ import annotations

import errno
import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from m3jit import cache_files
from m3jit.api.generation import load_model

from m3jit.frontend import assemble
from m3jit.isa.types import DTYPES, Tensor
from m3jit.kernels import layout
from m3jit.vm import regions, weights
from m3jit.vm.vm import VM
from m3jit.vm.weights import HEADER, WeightStore


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q3_K", "Q6_K"])
@pytest.mark.parametrize("rows", [1, 16, 33, 100])
def test_pieces_make_the_whole(tmp_path, monkeypatch, name, rows):
    dtype, cols = DTYPES[name], 512
    raw = np.random.default_rng(rows).integers(0, 60, (rows, dtype.row_bytes(cols)), np.uint8)    # scales stay finite
    whole = layout.repack(dtype, raw, rows, cols)
    monkeypatch.setattr(weights, "PIECE_BYTES", 20 * dtype.row_bytes(cols))     # 16 rows a piece
    store = WeightStore(tmp_path)
    tensor = Tensor.blocks(dtype, (rows, cols), raw)
    packed = store.array(tensor, "R16")
    assert packed.tobytes() == whole.tobytes() and store.mapped == len(whole) and store.in_memory == 0
    file, = (p for p in tmp_path.rglob("*.bin"))
    assert file.read_bytes()[HEADER:] == whole.tobytes()


@pytest.mark.parametrize("names", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")])
@pytest.mark.parametrize("rows", [1, 16, 33, 100])
@pytest.mark.parametrize("on_disk", [True, False])
def test_tiles_of_two_matrices_alternate(tmp_path, monkeypatch, names, rows, on_disk):
    """In the file of both, tile by tile, however many pieces it was written in; each alone is a file of its own."""
    monkeypatch.setattr(weights, "PIECE_BYTES", 20 * 2 * DTYPES[names[0]].row_bytes(512))      # 16 rows a piece
    rng, both = np.random.default_rng(rows), []
    for name in names:
        raw = rng.integers(0, 60, (rows, DTYPES[name].row_bytes(512)), np.uint8)
        both.append(Tensor.blocks(DTYPES[name], (rows, 512), raw))
    store = WeightStore(tmp_path if on_disk else tmp_path / "no" / "folder")
    if not on_disk:
        (tmp_path / "no").touch()
    alone = [store.array(t, "R16") for t in both]
    together = store.array(tuple(both), "R16")
    tiles = [np.split(a, -(-rows // 16)) for a in alone]
    assert together.tobytes() == b"".join(part.tobytes() for pair in zip(*tiles) for part in pair)
    assert store.array(tuple(both), "R16") is together and store.array(both[0], "R16") is alone[0]
    assert store.array(tuple(reversed(both)), "R16").tobytes() != together.tobytes()
    nbytes = sum(a.nbytes for a in (*alone, together, together))
    assert (store.mapped, store.in_memory) == ((nbytes, 0) if on_disk else (0, nbytes))
    assert len([*tmp_path.rglob("*.bin")]) == (4 if on_disk else 0)


@pytest.mark.parametrize("nbytes", [0, 63, 64, 65, 1000, 64 * 7])
def test_a_file_is_written_at_multiples_of_a_piece(monkeypatch, nbytes):
    monkeypatch.setattr(weights, "PIECE_BYTES", 64)
    data, written = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8), []

    class File:
        def write(self, piece) -> None:
            written.append(bytes(piece))
    pieces = weights._Pieces(File())
    pieces.write(b"head")
    for at in range(0, nbytes, 100):
        pieces.write(data[at:at + 100])
    pieces.flush()
    assert b"".join(written) == b"head" + data.tobytes()
    assert [len(w) for w in written[:-1]] == [64] * (len(written) - 1)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system without large pages")
def test_files_are_asked_for_in_large_pages(tmp_path):
    dtype = DTYPES["Q8_0"]
    tensor = Tensor.blocks(dtype, (32, 64), np.zeros((32, dtype.row_bytes(64)), np.uint8))
    kept = WeightStore(tmp_path).array(tensor, "R16")
    about = Path("/proc/self/smaps").read_text().split(str(tmp_path), 1)[1]
    flags = next(line for line in about.splitlines() if line.startswith("VmFlags:"))
    assert "hg" in flags.split(), (flags, kept.size)


def test_the_oldest_files_go_when_there_are_too_many_bytes(tmp_path):
    (tmp_path / "ab").mkdir()
    for age in range(8):
        for ending in ("bin", "txt"):
            file = tmp_path / "ab" / f"{age}.{ending}"
            file.write_bytes(bytes(100))
            os.utime(file, (1000 - age, 1000 - age))
    store = WeightStore(tmp_path)
    assert store.trim(800) == 0 and store.trim(799) == 200      # to 7/8 of the limit
    assert sorted(f.stem for f in tmp_path.rglob("*.bin")) == ["0", "1", "2", "3", "4", "5"]
    assert len(list(tmp_path.rglob("*.txt"))) == 8, "what is not the cache's stays"


@pytest.mark.parametrize("how", ["raw", "R16"])
@pytest.mark.parametrize("on_disk", [True, False])
def test_a_layout_lives_as_long_as_its_tensor(tmp_path, monkeypatch, how, on_disk):
    store = WeightStore(tmp_path)
    monkeypatch.setattr(store, "root", tmp_path if on_disk else None)
    dtype = DTYPES["Q8_0"]
    tensor = Tensor.blocks(dtype, (32, 64), np.zeros((32, dtype.row_bytes(64)), np.uint8))
    array = weakref.ref(store.array(tensor, how))
    assert store.pointer(tensor, how) == array().ctypes.data
    assert (store.mapped, store.in_memory) == ((0, 0) if how == "raw" else (2176, 0) if on_disk else (0, 2176))
    del tensor
    assert array() is None and (store.mapped, store.in_memory) == (0, 0)


def test_a_model_that_is_gone_leaves_no_weights():
    """The store is the process's: whatever programs ran, it holds what live models have."""
    def held() -> int:
        gc.collect()
        return regions.weights().mapped + regions.weights().in_memory
    before = held()
    model = load_model("default", threads=1)
    model.generate("She had", max_tokens=2).result()
    assert held() > before
    del model
    assert held() <= before


def packed_by(store: WeightStore, seed: int) -> bytes:
    dtype = DTYPES["Q8_0"]
    raw = np.random.default_rng(seed).integers(0, 60, (32, dtype.row_bytes(64)), np.uint8)
    tensor = Tensor.blocks(dtype, (32, 64), raw)
    kept = store.array(tensor, "R16").tobytes()
    assert kept == layout.repack(dtype, raw, 32, 64).tobytes()
    store.tensors = [*getattr(store, "tensors", []), tensor]             # type: ignore[attr-defined]
    return kept


@pytest.mark.parametrize("spoil", [lambda b: b[:20] + bytes([b[20] ^ 1]) + b[21:], lambda b: b[:-1],
                                   lambda b: b + b"\0", lambda b: b[:40], lambda b: b""],
                         ids=["a bit of the header", "cut", "longer", "less than a header", "empty"])
def test_a_file_that_is_not_whole_is_made_again(tmp_path, spoil):
    wanted = packed_by(WeightStore(tmp_path), 1)
    file, = tmp_path.rglob("*.bin")
    good = file.read_bytes()
    file.unlink()                                      # a new file: the mapped one stays as it is
    file.write_bytes(spoil(good))
    store = WeightStore(tmp_path)
    assert packed_by(store, 1) == wanted and (store.reason, store.in_memory) == ("", 0)
    assert file.read_bytes() == good and list(tmp_path.rglob("*.bin")) == [file]


def test_another_version_of_the_layouts_has_files_of_its_own(tmp_path, monkeypatch):
    packed_by(WeightStore(tmp_path), 1)
    monkeypatch.setattr(layout, "VERSION", layout.VERSION + 1)
    packed_by(WeightStore(tmp_path), 1)
    assert len(list(tmp_path.rglob("*.bin"))) == 2


def test_why_weights_are_kept_in_memory(tmp_path, monkeypatch):
    """A disk that is full says so once; what is there already is still mapped."""
    before = WeightStore(tmp_path)
    size, tries = len(packed_by(before, 1)), []
    assert (before.reason, before.in_memory) == ("", 0)

    def full(fd: int) -> None:
        tries.append(fd)
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    store = WeightStore(tmp_path)
    for seed in (2, 3, 1):
        packed_by(store, seed)
    assert (store.in_memory, store.mapped, len(tries)) == (2 * size, size, 1)
    assert store.reason.startswith(str(tmp_path)) and store.reason.endswith(": No space left on device")
    assert not list(tmp_path.rglob(".part*"))
    assert WeightStore(None).reason == "" or os.environ.get("M3JIT_CACHE_DIR") == ""


@pytest.mark.parametrize("call", ["utime", "open"])
def test_a_cache_of_another_user(tmp_path, monkeypatch, call):
    """A file that may be read and not touched is mapped; one that may not be read is said."""
    size = len(packed_by(WeightStore(tmp_path), 1))

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")
    store = WeightStore(tmp_path)
    if call == "utime":
        monkeypatch.setattr(os, "utime", refused)
    else:
        monkeypatch.setattr(weights, "open", refused, raising=False)
    packed_by(store, 1)
    if call == "utime":
        assert (store.reason, store.mapped, store.in_memory) == ("", size, 0)
    else:
        assert store.reason.endswith(".bin: Operation not permitted") and store.in_memory == size


def test_a_file_that_is_replaced_is_no_reason(tmp_path, monkeypatch):
    """One that may not be read is written again, and then it is used."""
    size, refusals = len(packed_by(WeightStore(tmp_path), 1)), []

    def refused_once(*args: object, **how: object) -> object:
        if not refusals:
            refusals.append(args)
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return open(*args, **how)                      # type: ignore[call-overload]
    store = WeightStore(tmp_path)
    monkeypatch.setattr(weights, "open", refused_once, raising=False)
    packed_by(store, 1)
    assert refusals and (store.reason, store.mapped, store.in_memory) == ("", size, 0)


def test_what_cannot_be_removed_does_not_count_as_removed(tmp_path, monkeypatch):
    place = tmp_path / "ab"
    place.mkdir()
    for age, name in enumerate("abcd"):
        (place / name).write_bytes(bytes(100))
        os.utime(place / name, (age, age))
    unlink = os.unlink

    def kept(path: str) -> None:
        if path.endswith("a"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path)
    monkeypatch.setattr(cache_files.os, "unlink", kept)
    assert cache_files.trim(tmp_path, 300) == 200      # two others went in its place
    assert sorted(f.name for f in place.iterdir()) == ["a", "d"]


@pytest.mark.parametrize("full", [False, True])
def test_the_reason_is_in_the_statistics(tmp_path, full):
    from m3jit.cli.output import Output, statistics
    place = tmp_path / "file"
    if full:
        place.write_text("no folder")
    store = WeightStore(place)
    packed_by(store, 1)
    compiler = SimpleNamespace(timings={}, engine=None, weights=store)
    vm = VM(assemble("HALT", "stats.m3asm"), backend="interpreter")
    vm.regions = SimpleNamespace(regions=[SimpleNamespace(entries=1)], compiler=compiler, retired=0)
    row = next(line for line in statistics(vm, Output(), 1.0, 0.0).splitlines() if "repacked weights" in line)
    if full:
        assert "0.0 MB mapped from the cache" in row and row.endswith("Not a directory)") and f"({place}" in row
    else:
        assert row.endswith("0.0 MB in memory")
