"""Blocks named by their content, in segment files.

    segment:  magic, format, number, checksum in 512 bytes; then blocks
    block:    head of 32 bytes (magic, kind, length, name, CRC-32 of what is before it), then the bytes

A block is DATA (at most CHUNK bytes) or LIST, the names of DATA blocks that make a longer whole.  Its name is a hash of
kind and bytes, so a block that is there already is not written again.  Where blocks lie is in the log: whatever a
segment holds beyond is garbage of a commit that did not happen, and is written over.
"""
from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path
from typing import Any, Iterable, Iterator, NamedTuple

from m3jit.durable.errors import DamagedStore
from m3jit.durable.files import File, Files, syncing
from m3jit.durable.log import SECTOR, aligned
from m3jit.durable.tree import HASH, TREE, Ref, pack

CHUNK = 1 << 20                    # bytes of a DATA block at most
TABLE_CHUNK = 4096                 # bytes of a DATA block of a table: a long table shares most of them with the last
SEGMENT_BYTES = 256 << 20          # a segment that has them gets no more commits
BUFFER = 4 << 20                   # bytes written at once
DATA, LIST = 1, 2

_segment = struct.Struct("<8sIII")                     # magic, format, number, CRC-32
_block = struct.Struct("<4sII16sI")                    # magic, kind, length, name, CRC-32
_place = struct.Struct("<16sBIIQ")                     # as it stands in the log
_MAGIC, _MARK, _FORMAT = b"m3jitseg", b"m3bk", 1
PLACE_BYTES = _place.size


class Place(NamedTuple):
    """Where a block lies.  offset: of its head."""
    kind: int
    length: int
    segment: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + _block.size + self.length


def name_of(kind: int, data: bytes | memoryview) -> bytes:
    """The name of a block."""
    return hashlib.blake2b(data, digest_size=HASH, person=b"m3jit list" if kind == LIST else b"m3jit data").digest()


def segment_name(number: int) -> str:
    return f"segment-{number:08d}"


def segment_number(name: str) -> int | None:
    """The number in a segment's file name, None for another file."""
    head, _, digits = name.partition("-")
    return int(digits) if head == "segment" and len(digits) == 8 and digits.isascii() and digits.isdigit() else None


def pack_places(places: Iterable[tuple[bytes, Place]]) -> bytes:
    return b"".join(_place.pack(name, *place) for name, place in places)


def unpack_places(raw: bytes) -> Iterator[tuple[bytes, Place]]:
    """ValueError for bytes that are none."""
    if len(raw) % PLACE_BYTES:
        raise ValueError("a list of places is cut off")
    for name, *rest in _place.iter_unpack(raw):
        place = Place(*rest)
        if place.kind not in (DATA, LIST) or place.length > CHUNK or place.offset < SECTOR or place.offset > 1 << 48:
            raise ValueError(f"block {name.hex()} cannot lie at {place}")
        yield name, place


class Blocks:
    """The blocks of a store.  `index`: name -> place of every committed block."""

    def __init__(self, files: Files, folder: Path, write: bool):
        self.files, self.folder, self.write = files, folder, write
        self.index: dict[bytes, Place] = {}
        self.ends: dict[int, int] = {}                 # segment -> end of its committed blocks
        self._open: dict[int, File] = {}

    def add(self, places: Iterable[tuple[bytes, Place]]) -> None:
        """Note blocks that are committed."""
        for name, place in places:
            self.index[name] = place
            self.ends[place.segment] = max(self.ends.get(place.segment, SECTOR), place.end)

    # -- reading ----------------------------------------------------------------------------------------------------
    def path(self, segment: int) -> Path:
        return self.folder / segment_name(segment)

    def file(self, segment: int) -> File:
        """An open segment, its header checked.  DamagedStore when it is not there."""
        found = self._open.get(segment)
        if found is None:
            path = self.path(segment)
            try:
                found = self.files.open(path, write=self.write)
            except FileNotFoundError:
                raise DamagedStore(path, 0, "the file is missing, and committed versions need it", "restore it from a "
                                   "copy; versions that do not need it can still be restored") from None
            head = found.read(0, _segment.size)
            if head != _header(segment):
                found.close()
                raise DamagedStore(path, 0, "its header is not that of this segment", "restore it from a copy")
            self._open[segment] = found
        return found

    def read(self, name: bytes, kind: int, length: int = -1) -> bytes:
        """A block's bytes, checked against its name.  length: what it must have (-1: any)."""
        place = self.index.get(name)
        if place is None:
            raise DamagedStore(self.folder, 0, f"block {name.hex()} is named by a version and is not in the log",
                               "this version cannot be restored; an earlier one may")
        if place.kind != kind or length not in (-1, place.length):
            raise DamagedStore(self.path(place.segment), place.offset, f"block {name.hex()} has {place.length} bytes "
                               f"of kind {place.kind}, not {length} of kind {kind}", "this version cannot be restored; "
                               "an earlier one may")
        raw = self.file(place.segment).read(place.offset, _block.size + place.length)
        data = raw[_block.size:]
        if raw[:_block.size] != _block_head(kind, place.length, name) or len(data) != place.length or \
                name_of(kind, data) != name:
            raise DamagedStore(self.path(place.segment), place.offset, f"block {name.hex()} does not match its "
                               "checksum", "versions that hold it cannot be restored, others can; `m3jit store DIR "
                               "--verify` lists them, --repair drops them")
        return data

    def pieces(self, ref: Ref) -> Iterator[bytes]:
        """The bytes of a reference (of a table: the names), block after block.  DamagedStore."""
        chunk = TABLE_CHUNK if ref.item else CHUNK
        if ref.length <= chunk:
            yield self.read(ref.hash, DATA, ref.length)
            return
        names = self.read(ref.hash, LIST, -(-ref.length // chunk) * HASH)
        for i in range(0, len(names), HASH):
            yield self.read(names[i:i + HASH], DATA, min(chunk, ref.length - i // HASH * chunk))

    def reachable(self, ref: Ref, seen: set[tuple[bytes, int, bool]]) -> Iterator[bytes]:
        """Names of all blocks that a reference needs, lists and tables resolved.  seen: what was resolved before, which
        is not resolved again, so that the work is that of the blocks there are."""
        chunk = TABLE_CHUNK if ref.item else CHUNK
        key = (ref.hash, ref.item, ref.length > chunk)
        if key in seen:
            return
        seen.add(key)
        yield ref.hash
        tables = [ref.hash]
        if ref.length > chunk:
            names = self.read(ref.hash, LIST, -(-ref.length // chunk) * HASH)
            tables = [names[i:i + HASH] for i in range(0, len(names), HASH)]
            yield from tables
        for table in dict.fromkeys(tables) if ref.item else ():
            names = self.read(table, DATA)
            for i in range(0, len(names), HASH):
                yield from self.reachable(Ref(names[i:i + HASH], ref.item), seen)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


def _header(segment: int) -> bytes:
    head = _segment.pack(_MAGIC, _FORMAT, segment, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def _block_head(kind: int, length: int, name: bytes) -> bytes:
    head = _block.pack(_MARK, kind, length, name, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


class Writer:
    """Writes the new blocks of one commit behind the committed ones.  Nothing counts before the log says so.

    fresh: begin a new segment, whatever room others have."""

    def __init__(self, blocks: Blocks, fresh: bool = False):
        self.blocks = blocks
        self.new: dict[bytes, Place] = {}
        self.bytes = 0                                 # of data, written by this commit
        self._ends: dict[int, int] = {}
        self._segment, self._at = self._start(fresh)
        self._buffer: list[bytes | memoryview] = []
        self._held = 0
        self._made: set[int] = set()

    def _start(self, fresh: bool) -> tuple[int, int]:
        newest = max(self.blocks.ends, default=0)
        if fresh or not newest or self.blocks.ends[newest] >= SEGMENT_BYTES:
            return newest + 1, SECTOR
        return newest, aligned(self.blocks.ends[newest])

    def has(self, name: bytes) -> bool:
        return name in self.blocks.index or name in self.new

    def block(self, kind: int, data: bytes | memoryview, name: bytes | None = None) -> bytes:
        """Write a block unless it is there; its name.  name: what it is known to be."""
        name = name or name_of(kind, data)
        if not self.has(name):
            if self._at >= SEGMENT_BYTES:
                self._flush()
                self._segment, self._at = self._segment + 1, SECTOR
            place = Place(kind, len(data), self._segment, self._at + self._held)
            self._buffer += (_block_head(kind, len(data), name), data)
            self._held += _block.size + len(data)
            self.bytes += len(data)
            self.new[name] = place
            if self._held >= BUFFER:
                self._flush()
        return name

    def blob(self, data: bytes | memoryview) -> Ref:
        """Bytes of any number, as a reference."""
        return self._chunked(data, CHUNK, 0)

    def tree(self, tree: Any) -> Ref:
        """A tree in blocks of its own, which a version of which it did not change shares with the one before."""
        ref = self.blob(pack(tree))
        return Ref(ref.hash, ref.length, TREE)

    def item(self, data: bytes | memoryview) -> bytes:
        """The name of a table's item."""
        return self.blob(data).hash

    def table(self, names: bytes, item: int) -> Ref:
        """Items of a table, their names one behind the other, each of `item` bytes."""
        return self._chunked(names, TABLE_CHUNK, item)

    def _chunked(self, data: bytes | memoryview, chunk: int, item: int) -> Ref:
        view = memoryview(data)
        if len(view) <= chunk:
            return Ref(self.block(DATA, view), len(view), item)
        if -(-len(view) // chunk) * HASH > CHUNK:
            raise ValueError(f"{len(view)} bytes in one piece; at most {CHUNK // HASH * chunk} can be stored")
        names = [self.block(DATA, view[i:i + chunk]) for i in range(0, len(view), chunk)]
        return Ref(self.block(LIST, b"".join(names)), len(view), item)

    def _flush(self) -> None:
        if not self._buffer:
            return
        blocks, segment = self.blocks, self._segment
        if segment not in blocks.ends and segment not in self._made:
            old = blocks._open.pop(segment, None)
            if old is not None:
                old.close()
            file = blocks.files.open(blocks.path(segment), write=True, create=True)
            blocks._open[segment] = file
            self._made.add(segment)
            file.write(0, _header(segment).ljust(SECTOR, b"\0"))
        else:
            file = blocks._open.get(segment) or blocks.file(segment)
        data = b"".join(self._buffer)
        file.write(self._at, data)
        self._ends[segment] = self._at + len(data)
        self._at += len(data)
        self._buffer, self._held = [], 0

    def sync(self) -> None:
        """Every new block is on the disk when this returns, and the names of new segments."""
        self._flush()
        with syncing():
            for segment in self._ends:
                self.blocks._open[segment].sync()
            if self._made:
                self.blocks.files.sync_folder(self.blocks.folder)

    def committed(self) -> None:
        """The log has the new blocks: they count."""
        self.blocks.add(self.new.items())
