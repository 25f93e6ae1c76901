"""`Store`: a folder that holds versions of programs' states, whole after a crash at any moment.

A commit writes the blocks that are not there yet, syncs them, appends a record to the write-ahead log, syncs that, then
notes the log's new end in its head.  So a record that can be read has all its blocks, and a commit that was
acknowledged stays.  One `Store` at a time may write to a folder.
"""
from __future__ import annotations

import bisect
import contextlib
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator

from m3jit.durable import compaction
from m3jit.durable.blocks import DATA, Blocks, Writer, pack_places, segment_number, unpack_places
from m3jit.durable.errors import DamagedStore, StoreError, StoreFull, StoreInUse
from m3jit.durable.files import Files, SyncFailed, syncing
from m3jit.durable.log import Damage, Log
from m3jit.durable.tree import TREE, Ref, TreeError, as_bytes, pack, refs, unpack
from m3jit.durable.version import Restored, Version, restore
from m3jit.durable.version import write as write_version
from m3jit.errors import brief

LOG, NEW_LOG, LOCK = "log", "log.new", "lock"
MAX_NAME = 200                     # bytes of a version's name
MAX_ROOT = 256 << 20               # bytes of a version without its blocks
TIDY_BYTES = 256 << 20             # blocks written since the last compaction, and as much again as that left: compact
TIDY_LOG = 16 << 20                # the same for the log


class Store:
    """Versions by name.  `Store.open` makes one; every method may be called from any thread.

    damage: what `repair` cut off."""

    def __init__(self, path: Path, files: Files, write: bool, lock: Any):
        self.path, self.files, self.write, self._lock = path, files, write, lock
        self.blocks = Blocks(files, path, write)
        self.versions: dict[str, list[Version]] = {}
        self.appended: dict[str, list[tuple[int, int, int]]] = {}      # name -> (place of the record, from, bytes)
        self.ended: dict[str, int] = {}                # name -> bytes of its log that are complete
        self.log: Log = None                           # type: ignore[assignment]
        self.damage: Damage | None = None
        self._mutex = threading.RLock()
        self._failed = ""                              # why nothing can be written any more
        self._closed = False
        self.keep: int | None = 1
        self._tidy = (0, 0)                            # bytes of blocks and of the log after the last compaction

    @classmethod
    def open(cls, path: str | Path, write: bool = True, files: Files | None = None, repair: bool = False,
             keep: int | None = 1, make: bool = True) -> "Store":
        """The store in a folder.  write: hold it for writing, and make it if it is not there, unless `make` is false;
        otherwise it is only read.  repair: keep what lies before damage of the log (`damage` says what was cut off).
        keep: versions of a name that stay when the store compacts itself, which it does when its blocks or its log have
        grown to twice what the last compaction left and TIDY_BYTES or TIDY_LOG more (None: all stay; until then all do
        in any case).

        StoreInUse, DamagedStore, StoreError (no such folder, another kind of folder, a newer format, no permission)."""
        path, files = Path(path), files or Files()
        _check_keep(path, keep)
        with _said(path, "open"):
            if write and make:
                files.make_folder(path)
            _check_folder(path, files.names(path), write and make)
            lock = _locked(files, path, write)
            store = cls(path, files, write, lock)
            store.keep = keep
            try:
                store._load(repair)
            except BaseException:
                store.close()
                raise
        return store

    def _load(self, repair: bool) -> None:
        names = self.files.names(self.path)
        if LOG not in names:
            self._begin()
        if self.log is None:
            self.log, self.damage = Log.open(self.files, self.path / LOG, self.write, self._replayed, repair)
        if repair and self.write:
            self.versions = {n: [v for v in vs if not self._wrong(v, set())] for n, vs in self.versions.items()}
            self.compact(keep=None)                    # what is damaged goes with the old log
        elif self.write:
            if self.log.sure[0] < self.log.records:
                self.log.confirm()                     # nobody was told of what lies behind the head, but it stands
            self._sweep(names)

    def _begin(self) -> None:
        """A folder without a log becomes a new store."""
        log = Log.create(self.files, self.path / NEW_LOG, 1)
        try:
            log.sync()
            self.files.rename(self.path / NEW_LOG, self.path / LOG)
            self.files.sync_folder(self.path)
            self.files.sync_folder(self.path.resolve().parent)
        except BaseException:
            log.close()
            raise
        log.path, self.log = self.path / LOG, log

    def _sweep(self, names: list[str]) -> None:
        """Remove what a crash left: a log nobody finished, segments no version needs."""
        left = [n for n in names if n == NEW_LOG or (segment_number(n) or 0) not in {0, *self.blocks.ends}]
        if left:
            with syncing():                            # the log's name must be sure before what another log needs goes
                self.files.sync_folder(self.path)
        for name in left:
            with contextlib.suppress(OSError):             # left for the next opening: nothing refers to it
                self.files.remove(self.path / name)

    def _replayed(self, payload: bytes, offset: int) -> None:
        """Note a record of the log."""
        try:
            what, *rest = unpack(payload)
            if what == "commit":
                name, number, root, when, nbytes, places = rest
                if not (isinstance(name, str) and isinstance(number, int) and isinstance(root, Ref) and
                        isinstance(when, int) and isinstance(nbytes, int) and not root.item):
                    raise ValueError("its fields have the wrong kinds")
                self.blocks.add(unpack_places(places))
                self.versions.setdefault(name, []).append(Version(name, number, root, when, nbytes))
            elif what == "blocks":
                self.blocks.add(unpack_places(rest[0]))
            elif what == "remove":
                name, ended = rest if len(rest) == 2 else (rest[0], self.length(rest[0]))     # as it was written first
                if not (isinstance(name, str) and ended.__class__ is int and 0 <= ended <= self.length(name)):
                    raise ValueError("it removes no name")
                self.versions.pop(name, None)
                self.ended[name] = ended
            elif what == "append":
                name, at, data = rest
                if not (isinstance(name, str) and at.__class__ is int and 0 <= at <= self.length(name) and
                        isinstance(data, bytes)):
                    raise ValueError("it adds to no log")
                self._note_append(name, offset, at, len(data))
            elif what == "compacted":
                self._tidy = (self._bytes(), offset)
            else:
                raise ValueError(f"it is a {brief(repr(what))}")
        except (TreeError, ValueError, TypeError, IndexError) as e:
            raise DamagedStore(self.path / LOG, offset, f"a record that this version of m3jit cannot read: {e}",
                               "use the version that wrote it") from None

    # -- what is there ----------------------------------------------------------------------------------------------
    def names(self) -> list[str]:
        """Names that have a version, sorted."""
        with self._mutex:
            return sorted(n for n, v in self.versions.items() if v)

    def latest(self, name: str, number: int | None = None) -> Version:
        """A name's newest version, or the one of that number.  StoreError when there is none."""
        with self._mutex:
            found = [v for v in self.versions.get(name, []) if number in (None, v.number)]
        if not found:
            have = ", ".join(map(repr, self.names()[:10])) or "none"
            which = f"version {number} of " if number is not None else ""
            raise StoreError(f"{self.path}: has no {which}{brief(repr(name))}; names in it: {have}")
        return found[-1]

    def read(self, version: Version) -> Any:
        """The tree that `put` stored.  DamagedStore when its bytes are not those that were written."""
        with self._mutex, _said(self.path, "read"):
            return self._tree(version, version.root)

    def _tree(self, version: Version, ref: Ref) -> Any:
        """A tree that a version holds."""
        try:
            return unpack(self.bytes_of(as_bytes(ref), MAX_ROOT))
        except TreeError as e:
            raise DamagedStore(self.path / LOG, 0, f"{version.name} version {version.number} is no tree: {e}",
                               "an earlier version may be whole") from None

    def bytes_of(self, ref: Ref, limit: int) -> bytes:
        """The bytes a reference names.  StoreError beyond `limit`."""
        if ref.length > limit:
            raise StoreError(f"{self.path}: {ref.length} bytes in one piece; this machine takes {limit}")
        with self._mutex:
            return b"".join(self.blocks.pieces(ref))

    # -- committing -------------------------------------------------------------------------------------------------
    def put(self, name: str, build: Callable[[Writer], Any]) -> Version:
        """Commit what `build(writer)` gives, a tree (`m3jit.durable.tree`), as the next version of a name.

        It is on the disk when this returns.  StoreFull: the disk has no room; nothing changed.  StoreError: it cannot
        be written."""
        if not name or len(name.encode("utf-8", "replace")) > MAX_NAME:
            raise StoreError(f"{self.path}: a version's name has 1 to {MAX_NAME} bytes, not {brief(repr(name))}")
        with self._mutex:
            self._may_write()
            with self._writing("commit"):
                writer = Writer(self.blocks)
                root = writer.blob(pack(build(writer)))
                number = self.versions[name][-1].number + 1 if self.versions.get(name) else 1
                version = Version(name, number, root, time.time_ns(), writer.bytes)
                record = pack(["commit", *version.fields(), pack_places(writer.new.items())])
                writer.sync()
                self.log.append(record)
                writer.committed()
                self.versions.setdefault(name, []).append(version)
                self.log.unsure = False
            self._tidied()
            return version

    def _tidied(self) -> None:
        """Compact a store that has grown.  What was committed stands, whatever becomes of this."""
        blocks, log = self._tidy
        if self._bytes() > 2 * blocks + TIDY_BYTES or self.log.end > 2 * log + TIDY_LOG:
            self._tidy = (self._bytes(), self.log.end)           # one that fails is not tried again at once
            with contextlib.suppress(StoreError):          # the commit stands; `compact` by itself says what is wrong
                self.compact(self.keep)

    def append(self, name: str, at: int, data: bytes) -> int:
        """Add bytes to the log of a name, behind its first `at` bytes (what was behind those goes); its length then.

        They are on the disk when this returns.  StoreError: the log has fewer bytes."""
        with self._mutex:
            self._may_write()
            if not 0 <= at <= self.length(name):
                raise StoreError(f"{self.path}: the log {brief(repr(name))} has {self.length(name)} bytes; nothing can "
                                 f"be added behind {at}")
            with self._writing("append"):
                where = self.log.end
                self.log.append(pack(["append", name, at, data]))
                self._note_append(name, where, at, len(data))
                self.log.unsure = False
            self._tidied()
            return at + len(data)

    def _note_append(self, name: str, where: int, at: int, count: int) -> None:
        """Note a piece behind the first `at` bytes of a log; work in proportion to the pieces that it takes away."""
        self.ended[name] = min(self.ended.get(name, 0), at)
        pieces = self.appended.setdefault(name, [])
        while pieces and pieces[-1][1] >= at:
            pieces.pop()
        if pieces and sum(pieces[-1][1:]) > at:
            pieces[-1] = (*pieces[-1][:2], at - pieces[-1][1])
        if count:
            pieces.append((where, at, count))

    def length(self, name: str) -> int:
        """Bytes of a log."""
        with self._mutex:
            pieces = self.appended.get(name)
            return sum(pieces[-1][1:]) if pieces else 0

    def log_of(self, name: str) -> Iterator[bytes]:
        """The bytes that were added to the log of a name, piece by piece, up to its length at the beginning.

        Others may use the store meanwhile; a log that gets shorter ends there.  DamagedStore."""
        at, end = 0, self.length(name)
        while at < end:
            with self._mutex, _said(self.path, "read"):
                if self._closed:
                    raise StoreError(f"{self.path}: the store was closed; open it again")
                pieces = self.appended.get(name, [])
                where, start, count = pieces[bisect.bisect_right(pieces, at, key=_start) - 1] if pieces else (0, 0, 0)
                if at >= start + count:
                    return
                piece = unpack(self.log.payload(where))[3][at - start:min(count, end - start)]
            yield piece
            at += len(piece)

    def remove(self, name: str) -> None:
        """Forget all versions of a name.  `compact` gives their space back."""
        with self._mutex:
            self.latest(name)
            self._remove(name, self.ended.get(name, 0))

    def end(self, name: str) -> None:
        """Forget all versions of a name, and note that what its log has now is complete (`ended`)."""
        with self._mutex:
            if self.versions.get(name) or self.length(name) != self.ended.get(name, 0):
                self._remove(name, self.length(name))

    def _remove(self, name: str, ended: int) -> None:
        self._may_write()
        with self._writing("write"):
            self.log.append(pack(["remove", name, ended]))
            self.versions.pop(name, None)
            self.ended[name] = ended
            self.log.unsure = False

    def compact(self, keep: int | None = 1) -> int:
        """Give back the space of versions that are not among the newest `keep` of their name (None: all stay), and of
        what a crash left.  The bytes that were freed."""
        with self._mutex:
            self._may_write()
            _check_keep(self.path, keep)
            before = self._bytes() + self.log.end
            kept = {n: list(v) if keep is None else v[-keep:] for n, v in self.versions.items() if v}
            with self._writing("compact"):
                log, self.blocks, self.appended = compaction.compact(self, kept)
                self.versions, self.log = kept, log    # the old log stays unsure: the new one comes last
                log.unsure = False
            self._tidy = (self._bytes(), self.log.end)
            return max(0, before - sum(self._tidy))

    def verify(self) -> list[str]:
        """Read every version completely; what is wrong, one line a version (empty: all are whole)."""
        return [f"{v.name} version {v.number}: {wrong}" for v, wrong in self.damaged()]

    def damaged(self) -> list[tuple[Version, str]]:
        """Read every version completely; those that are not whole, and why."""
        good: set[bytes] = set()
        with self._mutex:
            found = [(v, self._wrong(v, good)) for vs in self.versions.values() for v in vs]
        return [(v, wrong) for v, wrong in found if wrong]

    def _wrong(self, version: Version, good: set[bytes]) -> str:
        """What is wrong with a version ("": nothing).  good: blocks that were read before."""
        try:
            with _said(self.path, "read"):
                for name in self.needs(version):
                    if name not in good:
                        place = self.blocks.index.get(name)
                        self.blocks.read(name, place.kind if place else DATA)
                        good.add(name)
        except StoreError as e:
            return str(e)
        return ""

    def needs(self, version: Version) -> Iterator[bytes]:
        """Names of all blocks a version needs."""
        seen: set[tuple[bytes, int, bool]] = set()
        trees, todo = {version.root}, [version.root]
        while todo:
            at = todo.pop()
            yield from self.blocks.reachable(as_bytes(at), seen)
            for ref in refs(self._tree(version, at)):
                if ref.item != TREE:
                    yield from self.blocks.reachable(ref, seen)
                elif ref not in trees:
                    trees.add(ref)
                    todo.append(ref)

    def _bytes(self) -> int:
        return sum(self.blocks.ends.values())

    def _may_write(self) -> None:
        if self._closed:
            raise StoreError(f"{self.path}: the store was closed; open it again")
        if not self.write:
            raise StoreError(f"{self.path}: was opened for reading only; open it with write=True")
        if self.log.unsure and not self._failed:
            self._failed = "writing was cut short, and it is not known whether the disk has what was written"
        if self._failed:
            raise StoreError(f"{self.path}: {self._failed}; close the store and open it again")

    @contextlib.contextmanager
    def _writing(self, action: str) -> Iterator[None]:
        """Errors of the disk as ours.  After a sync that failed nothing may be written until the store is opened again:
        the operating system may have dropped what was not on the disk."""
        try:
            with _said(self.path, action):
                yield
        except StoreError as e:
            if isinstance(e.__cause__, SyncFailed):
                self._failed = f"a sync failed ({e.__cause__.strerror})"
            raise

    # -- versions of machines ---------------------------------------------------------------------------------------
    def commit(self, vm: Any, name: str, notes: Any = None, snapshots: Any = (), context: Any = None) -> Version:
        """Commit the version a `VM` has now, with all its contexts and what they share; context: of that one alone.

        notes: a tree of plain values (None, bool, int, float, str, bytes, list) kept with it.  snapshots: handles of
        `VM.fork` that are stored too.  StoreError: a register holds what cannot be stored (it says which)."""
        with vm._entered():
            found = [vm.snapshots.resolve(h) for h in snapshots]
            return write_version(self, vm, context or vm.main, name, notes, found, whole=context is None)

    def restore(self, vm: Any, name: str, number: int | None = None,
                accept: Callable[[Any], None] | None = None) -> Restored:
        """Put a committed version into a `VM` of the same program: registers, memory, states, place in the program; one
        of a whole machine takes the place of all its contexts, one of a context that of the main one.

        All of it is read and checked before anything of the machine changes; accept: called with its notes then, it
        may raise.  StoreError: another program or model; DamagedStore."""
        return restore(self, vm, self.latest(name, number), accept)

    def close(self) -> None:
        """Close the files and let others open the store."""
        with self._mutex:
            self._closed = True
            if self.log is not None:
                self.log.close()
            self.blocks.close()
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start(piece: tuple[int, int, int]) -> int:
    """Where a piece of a log begins."""
    return piece[1]


def _check_keep(path: Path, keep: int | None) -> None:
    if keep is not None and keep < 1:
        raise StoreError(f"{path}: keep = {keep}: at least one version of a name stays; None keeps all")


def _check_folder(path: Path, names: list[str], write: bool) -> None:
    """StoreError, DamagedStore for a folder that is no store and cannot become one."""
    if LOG in names:
        return
    if any(segment_number(n) is not None for n in names):
        raise DamagedStore(path / LOG, 0, "the log is missing, and the folder has blocks",
                           "restore the log from a copy, or begin a new store in another folder")
    if not write:
        raise StoreError(f"{path}: is not a store: it has no log; name the folder of one")
    others = sorted(set(names) - {LOCK, NEW_LOG})
    if others:
        raise StoreError(f"{path}: is not a store and not empty (it has {brief(others[0])}); name an empty or new "
                         f"folder")


def _locked(files: Files, path: Path, write: bool) -> Any:
    """The lock of a folder.  StoreInUse says who has it."""
    try:
        lock = files.lock(path / LOCK, shared=not write)
    except BlockingIOError as e:
        raise StoreInUse(f"{path}: is in use by {_owner(files, path)}; close it there, or use another folder") from e
    if write:
        try:
            lock.write(0, f"{os.getpid()}\n".encode().ljust(32))
        except OSError:
            pass                                       # a full disk: the lock holds, its note is missing
    return lock


def _owner(files: Files, path: Path) -> str:
    try:
        file = files.open(path / LOCK)
        try:
            number = file.read(0, 32).split(b"\n")[0]
        finally:
            file.close()
    except OSError:
        number = b""
    return f"process {number.decode()}" if number.isdigit() and len(number) < 12 else "another process"


@contextlib.contextmanager
def _said(path: Path, action: str) -> Iterator[None]:
    """OSError as StoreError with the folder and what to do."""
    try:
        yield
    except OSError as e:
        where = e.filename or path
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"{where}: cannot {action}: {e.strerror}; the versions committed before are intact; make "
                            f"room and try again") from e
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreError(f"{where}: cannot {action}: {e.strerror}; a store that may not be written can be read "
                             f"with Store.open(..., write=False)") from e
        if e.errno == errno.ENOENT and not (folder := Path(where).absolute().parent).is_dir():
            raise StoreError(f"{where}: there is no folder {folder}; make it, or name another place") from e
        if e.errno == errno.ENOENT:
            raise StoreError(f"{where}: no such file or folder; name the folder of a store") from e
        if e.errno == errno.ENOTDIR:
            raise StoreError(f"{where}: is not a folder; a store is one") from e
        raise StoreError(f"{where}: cannot {action}: {e.strerror or e}") from e
