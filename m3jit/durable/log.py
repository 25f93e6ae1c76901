"""The write-ahead log of a store: which versions are committed, and where their blocks lie.

    bytes 0 .. 4095         header: magic, format, generation, checksum
    4096 .. , 8192 ..       two heads, written in turn: number of records, end of the log, chain, checksum
    12288 ..                records, each at a multiple of 512: length, number, payload, chain

The chain of a record is a hash of the chain before it, its head and its payload, so a record counts only behind the
very records it was written behind.  A record is committed when it is on the disk; the head, written and synced after
it, says so.  Hence a bad record before the head's end is damage, and one behind it is what a crash left of a commit
that was never acknowledged: it is ignored, and written over by the next one.  Records do not share a sector, so a write
that is torn cannot hurt the one before it.
"""
from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from m3jit.durable.errors import DamagedStore, StoreError
from m3jit.durable.files import File, Files, SyncFailed, syncing

FORMAT = 1
MAGIC = b"m3jitlog"
SECTOR = 512
HEADS = (4096, 8192)
FIRST = 12288
MAX_RECORD = 1 << 30

_header = struct.Struct("<8sIIQ")                      # magic, format, 0, generation
_head = struct.Struct("<QQ16s")                        # records, end, chain
_record = struct.Struct("<4sIQ")                       # magic, payload bytes, number (the first is 1)
_MARK = b"m3rc"
_REMEDY = "`m3jit store DIR --repair` keeps what lies before it"


def digest(*parts: bytes) -> bytes:
    """A checksum of 16 bytes."""
    h = hashlib.blake2b(digest_size=16, person=b"m3jit log")
    for part in parts:
        h.update(part)
    return h.digest()


def aligned(offset: int) -> int:
    """The next multiple of a sector."""
    return -(-offset // SECTOR) * SECTOR


@dataclass
class Damage:
    """Where reading a log had to stop, and why."""
    offset: int
    what: str


class Log:
    """An open log.  `end`: where the next record goes; `records`: how many there are; `sure`: (records, end) that the
    head names, so that all before was acknowledged; `unsure`: see `append`."""

    def __init__(self, path: Path, file: File, generation: int, records: int, end: int, chain: bytes):
        self.path, self.file, self.generation = path, file, generation
        self.records, self.end, self.chain, self.sure = records, end, chain, (records, end)
        self.unsure = False

    @classmethod
    def create(cls, files: Files, path: Path, generation: int) -> "Log":
        """A new, empty log, not synced."""
        file = files.open(path, write=True, create=True)
        try:
            head = _header.pack(MAGIC, FORMAT, 0, generation)
            chain = digest(head)
            file.write(0, head + chain)
            log = cls(path, file, generation, 0, FIRST, chain)
            log._write_head(0, FIRST, chain)
            file.write(FIRST - 1, b"\0")
        except BaseException:
            file.close()
            raise
        return log

    @classmethod
    def open(cls, files: Files, path: Path, write: bool, each: Callable[[bytes, int], None],
             repair: bool = False) -> tuple["Log", Damage | None]:
        """An existing log, after `each(payload, offset)` for every committed record.

        DamagedStore where a committed record, the header or both heads are not what was written.  repair: what lies
        before the damage is the log, and the damage is given back.  `each` may raise Unreadable."""
        file = files.open(path, write=write)
        try:
            log, sure, damage = cls._opened(path, file)
            log._replay(sure, each)
        except DamagedStore as e:
            if not repair or e.offset < HEADS[0]:
                file.close()
                raise
            return log, Damage(e.offset, e.what)
        except BaseException:
            file.close()
            raise
        if damage is not None and not repair:
            file.close()
            raise DamagedStore(path, damage.offset, damage.what, _REMEDY)
        return log, damage

    @classmethod
    def _opened(cls, path: Path, file: File) -> tuple["Log", tuple[int, int, bytes], Damage | None]:
        """(the log before its first record, the newest good head, damage)."""
        raw = file.read(0, _header.size + 16)
        if len(raw) < _header.size + 16 or raw[:8] != MAGIC:
            what = "this is not the log of a store" if raw[:8] != MAGIC else "it ends in its header"
            raise DamagedStore(path, 0, what, "restore the file from a copy, or begin a new store")
        _, version, _, generation = _header.unpack(raw[:_header.size])
        if version > FORMAT and digest(raw[:_header.size]) == raw[-16:]:
            raise StoreError(f"{path}: has format {version}; this version of m3jit reads formats up to {FORMAT}; use "
                             f"the version that wrote it")
        if digest(raw[:_header.size]) != raw[-16:] or version != FORMAT:
            raise DamagedStore(path, 0, "its header does not match its checksum",
                               "restore the file from a copy, or begin a new store")
        heads = [h for h in (_read_head(file, at) for at in HEADS) if h is not None]
        log = cls(path, file, generation, 0, FIRST, raw[-16:])
        if not heads:
            return log, (0, 0, b""), Damage(HEADS[0], "both heads do not match their checksums")
        return log, max(heads), None

    def _replay(self, sure: tuple[int, int, bytes], each: Callable[[bytes, int], None]) -> None:
        size = self.file.size()
        count, end, chain = sure
        self.sure = (count, end)
        while True:
            found = self._read_record(size)
            if isinstance(found, str):
                break
            payload, after, chained = found
            each(payload, self.end)
            self.records, self.end, self.chain = self.records + 1, after, chained
        if self.records < count:
            raise DamagedStore(self.path, self.end, f"record {self.records + 1} of {count}: {found}", _REMEDY)
        if self.records == count and (self.end, self.chain) != (end, chain):
            raise DamagedStore(self.path, HEADS[count % 2], "the head belongs to another log", _REMEDY)

    def _read_record(self, size: int) -> tuple[bytes, int, bytes] | str:
        """(payload, end, chain) of the record at `end`, or what is wrong with it."""
        head = self.file.read(self.end, _record.size)
        if len(head) < _record.size:
            return "the file ends before it"
        mark, length, number = _record.unpack(head)
        if mark != _MARK or number != self.records + 1:
            return "its head was overwritten"
        if length > min(MAX_RECORD, size - self.end):
            return f"it claims {length} bytes, {size - self.end} are left"
        rest = self.file.read(self.end + _record.size, length + 16)
        if len(rest) < length + 16:
            return "the file ends inside it"
        chain = digest(self.chain, head, rest[:length])
        if chain != rest[length:]:
            return "it does not match its checksum"
        return rest[:length], aligned(self.end + _record.size + length + 16), chain

    def payload(self, at: int) -> bytes:
        """The payload of the record at a place where `open` found one.  DamagedStore when it is no longer that."""
        head = self.file.read(at, _record.size)
        if len(head) == _record.size:
            mark, length, _ = _record.unpack(head)
            if mark == _MARK and length <= min(MAX_RECORD, self.file.size() - at):
                return self.file.read(at + _record.size, length)
        raise DamagedStore(self.path, at, "a record was overwritten while the store was open")

    # -- writing ----------------------------------------------------------------------------------------------------
    def append(self, payload: bytes, sync: bool = True) -> None:
        """Commit a record: it is on the disk when this returns.  sync False: only written (for a log nobody sees yet).

        Whatever is raised: it is not committed, and the log's own numbers did not change.  `unsure` is set before the
        first byte is written; it is taken back by the caller, when what the record says is noted in memory too, or
        here, when the record of a commit that failed was made void.  As long as it is set the disk may have a record
        that memory knows nothing of, and whoever wrote blocks then would write over those that the record names."""
        if len(payload) > MAX_RECORD:
            raise StoreError(f"{self.path}: a commit of {len(payload)} bytes; at most {MAX_RECORD}")
        head = _record.pack(_MARK, len(payload), self.records + 1)
        chain = digest(self.chain, head, payload)
        record = head + payload + chain
        after = aligned(self.end + len(record))
        self.unsure = True
        try:
            self.file.write(self.end, record + bytes(after - self.end - len(record)))
            if sync:
                self.sync()
            self._write_head(self.records + 1, after, chain)
            if sync:
                self.sync()
        except SyncFailed:                             # what the disk has is unknown until it is read again
            raise
        except BaseException:
            if sync:
                self._void()
            raise
        self.records, self.end, self.chain = self.records + 1, after, chain

    def _void(self) -> None:
        """Make sure that no opening finds the record behind the last one.  Where that fails `unsure` stays.

        The head that names the record goes first: a head without its record would be damage."""
        try:
            self.file.write(HEADS[(self.records + 1) % 2], bytes(SECTOR))
            self.sync()
            there = min(self.file.size() - self.end, SECTOR)
            if there > 0:
                self.file.write(self.end, bytes(there))
                self.sync()
        except OSError:
            return
        self.unsure = False

    def confirm(self) -> None:
        """Write and sync again what lies behind the head: an earlier sync of it may have failed."""
        self.file.write(self.sure[1], self.file.read(self.sure[1], self.end - self.sure[1]))
        self.sync()
        self._write_head(self.records, self.end, self.chain)
        self.sync()
        self.sure = (self.records, self.end)

    def _write_head(self, records: int, end: int, chain: bytes) -> None:
        body = _head.pack(records, end, chain)
        self.file.write(HEADS[records % 2], body + digest(b"head", body))

    def sync(self) -> None:
        with syncing():
            self.file.sync()

    def close(self) -> None:
        self.file.close()


def _read_head(file: File, at: int) -> tuple[int, int, bytes] | None:
    raw = file.read(at, _head.size + 16)
    if len(raw) < _head.size + 16 or digest(b"head", raw[:_head.size]) != raw[_head.size:]:
        return None
    return _head.unpack(raw[:_head.size])

