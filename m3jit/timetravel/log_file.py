"""The file of a recorded run.

    magic "M3JITLOG", u32 format (all numbers little-endian); then records:
    u8 kind, u8 0, u16 check, u32 length, u32 xxh32 of the payload; payload

check is xxh32 of number, kind and length of the record, cut to 16 bits: it tells a damaged length from a file that ends
early.  Kinds: 1 what was run (the first record, a `wire` dictionary), 2 events, 3 how it ended (the last record).  An
event is its context, the instructions the context had completed since its event before, the number of its kind (0: a
text follows) and a value.

A recording that is killed leaves a file that ends early (`LogReader.torn`), which is readable up to its last whole
record.  Records are written at least every `PERIOD` seconds.  Anything else that is wrong is a `LogError`: all records
are checked when the file is opened, before anything is done with them.
"""
from __future__ import annotations

import atexit
import contextlib
import errno
import os
import struct
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Iterator

import xxhash

from m3jit.durable.files import Files, lock_holder
from m3jit.errors import Interrupted, UserError
from m3jit.timetravel import hosting
from m3jit.timetravel.wire import Reader, WireError, put, put_bytes, put_int, put_varint
from m3jit.vm.recording import Event, Output, Raised

MAGIC, FORMAT = b"M3JITLOG", 1
HEAD, EVENTS, END = 1, 2, 3
KINDS = ("", "clock", "time", "sense", "interrupt", "output", "failed", "block", "wake", "digest", "wfi", "lock",
         "said", "host", "call", "gave")
CHUNK = 1 << 15                    # bytes of events that are written at once
PERIOD = 0.05                      # seconds an event waits for others
PIECE = 1 << 20                    # bytes that are checked at once
_RECORD = struct.Struct("<BBHII")


class LogError(Interrupted):
    """A file that is no log, or a damaged one.  Where it is changed while it is replayed, the run ends: it is no
    trap."""
    exit_code = 1


class LogFailed(Interrupted):
    """The log cannot be written: the run ends."""
    exit_code = 1


class LogWriter:
    """Writes a log as the run goes on; `append` takes events.  `close` ends it with how the run ended.

    The file is new, empty, or no regular file (/dev/null, a pipe), and locked until it is closed.  UserError: another
    file is there, or somebody writes it.  LogFailed: the file cannot be written."""

    def __init__(self, path: str, head: dict[str, Any]):
        self.path, self.bytes = path, 0
        self._records, self._last = 0, {}              # type: ignore[var-annotated]
        self._buffer, self._lock, self._written = bytearray(), threading.Lock(), time.monotonic()
        self._error: OSError | None = None
        payload = bytearray()
        put(payload, head)                             # what it cannot hold is said before there is a file
        made = not os.path.lexists(path)
        try:
            self._file = _opened(path)
        except OSError as e:
            raise UserError(_not_opened(path, e)) from e
        self._write(MAGIC + struct.pack("<I", FORMAT))
        self._record(HEAD, payload)
        if self._error is not None:
            with self._file, contextlib.suppress(OSError):       # a device has no length
                self._file.truncate(0)                 # so that the same command can be given again
                if made:
                    os.unlink(path)                    # locked, so nobody else's
            raise LogFailed(f"{path}: cannot be written: {self._error.strerror or self._error}; nothing was recorded, "
                            f"and nothing ran. Make room there, or write the log to another place")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._flush_always, name="m3jit log", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        atexit.register(self._at_exit)

    def append(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            out = bytearray()                          # Ctrl-C may come anywhere: an event is added whole
            put_varint(out, event.context)
            put_int(out, event.retired - self._last.get(event.context, 0))
            kind = KINDS.index(event.what) if event.what in KINDS else 0
            out.append(kind)
            if not kind:
                put_bytes(out, event.what.encode())
            try:
                put(out, event.value)
            except WireError as e:
                raise WireError(f"{event.what} of context {event.context} after {event.retired} instructions: "
                                f"{e}") from None
            self._buffer += out
            self._last[event.context] = event.retired
            now = time.monotonic()
            if len(self._buffer) >= CHUNK or now - self._written >= PERIOD:
                self._flush(now)
        self._raise()

    def close(self, end: dict[str, Any]) -> None:
        """Write how the run ended, and close the file."""
        atexit.unregister(self._at_exit)
        self._closed.set()
        self._thread.join()
        with self._lock:
            self._flush(time.monotonic())
            payload = bytearray()
            put(payload, end)
            self._record(END, payload)
            try:
                os.fsync(self._file.fileno())
            except OSError as e:
                if e.errno not in (errno.EINVAL, errno.ENOTSUP):       # a pipe or a device cannot be synced
                    self._error = self._error or e
            self._file.close()
        self._raise()

    def _flush_always(self) -> None:
        while not self._closed.wait(2 * PERIOD):
            with self._lock:
                self._flush(time.monotonic())

    def _at_exit(self) -> None:
        """Nobody closed it, and the thread ends with the process: what is noted reaches the file."""
        if os.getpid() == self._process:               # not in a fork, which has the same file
            with self._lock:
                self._flush(time.monotonic())

    def _flush(self, now: float) -> None:
        self._written = now
        if self._buffer:
            self._record(EVENTS, self._buffer)
            self._buffer = bytearray()

    def _record(self, kind: int, payload: bytes | bytearray) -> None:
        self._write(_RECORD.pack(kind, 0, _check(self._records, kind, len(payload)), len(payload),
                                 xxhash.xxh32_intdigest(bytes(payload))) + payload)
        self._records += 1

    def _write(self, data: bytes) -> None:
        if self._error is not None:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view):]
            self.bytes += len(data)
        except OSError as e:
            self._error = e

    def _raise(self) -> None:
        if self._error is not None:
            why = self._error.strerror or self._error
            raise LogFailed(f"{self.path}: cannot be written: {why}; the run was stopped. What was recorded "
                            "before can be replayed; make room there, or write the log to another place")


def _opened(path: str) -> BinaryIO:
    """A file to write a log into.  OSError: there is none; UserError: it is somebody's already."""
    if os.path.exists(path) and not os.path.isfile(path):
        return open(path, "wb", buffering=0)           # a device or a pipe: it keeps nothing, and belongs to nobody
    try:
        lock = Files().lock(Path(path), shared=False)
    except BlockingIOError:
        raise UserError(f"{path}: is in use by {lock_holder(Path(path))}, which records into it; give this log another "
                        "name") from None
    except ImportError:                                # a system without such locks
        return open(path, "xb", buffering=0)
    if lock is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if lock.size():
        lock.close()
        raise UserError(f"{path}: is there already, and a log is not written over another file; give the log another "
                        "name, or remove the file first")
    return open(lock.handle, "wb", buffering=0)


def _not_opened(path: str, error: OSError) -> str:
    """Why a log cannot be begun, and what to do."""
    if not str(path):
        return "'': is no name of a log; give the name of a file"
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        return f"{path}: is a folder, and a log is a file; give the name of a file in it"
    if not os.path.isdir(folder):
        return f"{path}: cannot be written: there is no folder {folder}; make it, or write the log to another place"
    return f"{path}: cannot be written: {error.strerror or error}; write the log to another place"


def _fits(what: str, value: Any) -> bool:
    """Is the value one that an event of this kind has?"""
    if isinstance(value, Raised):
        return what not in ("output", "said", "block", "wake", "digest", "interrupt")
    if what in ("clock", "time", "wfi", "lock"):
        return type(value) is int and -2 ** 63 <= value < 2 ** 63
    if what == "sense":
        return type(value) is tuple and len(value) == 2 and type(value[1]) is int
    if what == "host":
        return hosting.fits(value)
    if what == "call":
        return type(value) is tuple and len(value) == 4 and tuple(map(type, value)) == (int, str, tuple, dict)
    if what == "wake":
        return type(value) is tuple and len(value) == 3 and all(type(n) is int for n in value)
    kind = {"output": Output, "said": Output, "failed": Raised, "block": str, "digest": str,
            "interrupt": bool}.get(what, object)
    return isinstance(value, kind)


def _check(number: int, kind: int, length: int) -> int:
    return xxhash.xxh32_intdigest(struct.pack("<QBI", number, kind, length)) & 0xFFFF


class LogReader:
    """Reads a log: `head` at once, `events` as they are asked for; then `end` (None: it has none) and `torn`.

    LogError: no log, a newer format, or damage, with the place; of every record before the first event is given, and
    again when it is read, as the file may be changed meanwhile."""

    def __init__(self, path: str):
        self.path, self.torn, self.end = path, False, None            # type: ignore[var-annotated]
        self._number, self._last = 0, {}               # type: ignore[var-annotated]
        try:
            self._file: BinaryIO = open(path, "rb")
            self.size = os.fstat(self._file.fileno()).st_size
            start = self._file.read(len(MAGIC) + 4)
        except OSError as e:
            raise LogError(f"{path}: {e.strerror or e}") from e
        if start[:len(MAGIC)] != MAGIC[:len(start)] or not start:
            raise LogError(f"{path}: is no log of a run; `m3jit record` makes one")
        if len(start) < len(MAGIC) + 4:
            raise LogError(f"{path}: ends in its first {len(start)} bytes; the recording was killed as it began")
        version = struct.unpack("<I", start[len(MAGIC):])[0]
        if version != FORMAT:
            raise LogError(f"{path}: is a log of format {version}; this version of m3jit reads format {FORMAT}. "
                           f"{'Update m3jit' if version > FORMAT else 'Record the run again'}")
        self._check_records()
        found = self._next()
        if found is None:
            raise LogError(f"{path}: ends before it says what was run; the recording was killed as it began")
        self.head: dict[str, Any] = self._decoded(found[1], dict)

    def events(self) -> Iterator[Event]:
        """All events in order."""
        while (found := self._next()) is not None:
            kind, payload = found
            if kind == END:
                self.end = self._decoded(payload, dict)
                return
            reader = Reader(payload)
            while reader.left:
                try:
                    event = self._event(reader)
                except WireError as e:
                    raise self._damaged(str(e)) from None
                yield event

    def _event(self, reader: Reader) -> Event:
        context = reader.varint()
        retired = self._last.get(context, 0) + reader.int()
        kind = reader.take(1)[0]
        if kind >= len(KINDS):
            raise WireError(f"event kind {kind} is not known")
        what = KINDS[kind] or reader.text()
        if not 0 <= retired < 2 ** 63 or len(self._last) > 1 << 20:
            raise WireError(f"{retired} instructions of context {context}")
        self._last[context] = retired
        value = reader.value()
        if not _fits(what, value):
            raise WireError(f"an event {what} with a value that is none")
        return Event(context, retired, what, value)

    def _decoded(self, payload: bytes, kind: type) -> Any:
        reader = Reader(payload)
        try:
            value = reader.value()
        except WireError as e:
            raise self._damaged(str(e)) from None
        if not isinstance(value, kind) or reader.left:
            raise self._damaged("holds something else there")
        return value

    def _check_records(self) -> None:
        """Read the whole file once, a piece at a time.  LogError: a record is damaged, or where none belongs."""
        begin = self._file.tell()
        while (found := self._header()) is not None:
            kind, length, digest = found
            hashed = xxhash.xxh32()
            while length and (piece := self._read(min(length, PIECE))):
                hashed.update(piece)
                length -= len(piece)
            if length:                                 # it shrank meanwhile
                break
            self._checked(kind, hashed.intdigest(), digest)
            if kind == END:
                break
        self._file.seek(begin)
        self._number, self.torn = 0, False

    def _next(self) -> tuple[int, bytes] | None:
        """Kind and payload of the next record; None where the file ends (`torn`: inside a record, or without an
        end)."""
        found = self._header()
        if found is None:
            return None
        kind, length, digest = found
        payload = self._read(length)
        if len(payload) < length:                      # it shrank meanwhile
            self.torn = True
            return None
        self._checked(kind, xxhash.xxh32_intdigest(payload), digest)
        return kind, payload

    def _header(self) -> tuple[int, int, int] | None:
        """Kind, length and hash of the next record; None where the file ends."""
        self.at = self._file.tell()
        head = self._read(_RECORD.size)
        if len(head) < _RECORD.size:
            self.torn = True
            return None
        kind, _, check, length, digest = _RECORD.unpack(head)
        if check != _check(self._number, kind, length):
            raise self._damaged("is damaged")
        if length > self.size - self._file.tell():
            self.torn = True
            return None
        return kind, length, digest

    def _checked(self, kind: int, found: int, expected: int) -> None:
        """A record has been read.  LogError: its payload is damaged, or it stands where another kind belongs."""
        if found != expected:
            raise self._damaged("is damaged")
        if (kind == HEAD) != (self._number == 0):
            raise self._damaged("does not begin with what was run" if not self._number else "begins another log")
        if kind not in (HEAD, EVENTS, END):
            raise self._damaged(f"holds a record of kind {kind} among the events")
        if kind == END and self._read(1):
            raise self._damaged("goes on behind its end")
        self._number += 1

    def _read(self, count: int) -> bytes:
        try:
            return self._file.read(count)
        except OSError as e:
            raise LogError(f"{self.path}: cannot be read at byte {self.at}: {e.strerror or e}") from e

    def _damaged(self, what: str) -> LogError:
        return LogError(f"{self.path}: record {self._number} (byte {self.at}) {what}; the file was changed "
                        "after it was written. Copy it again, or record the run again")

    def close(self) -> None:
        self._file.close()
