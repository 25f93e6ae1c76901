"""Every file operation of a store, in one place, so that tests can put another layer under it.

A layer that follows this interface promises nothing about what a crash leaves of writes that were not followed by
`sync` of their file, nor of new names and renames that were not followed by `sync_folder`.
"""
from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any, Iterator, Protocol


class File(Protocol):
    """An open file.  Errors are OSError."""

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset` on; fewer where the file ends."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """All of `data` at `offset`; a gap before it reads as zeros."""

    def sync(self) -> None:
        """Return when everything written is on the disk."""

    def size(self) -> int: ...
    def close(self) -> None: ...


class SyncFailed(OSError):
    """A sync failed: what is on the disk is unknown until it is read again."""


@contextlib.contextmanager
def syncing() -> Iterator[None]:
    """Errors inside are those of a sync."""
    try:
        yield
    except OSError as e:
        raise SyncFailed(e.errno, e.strerror, e.filename) from e


class Files:
    """The operating system's files."""

    def open(self, path: Path, write: bool = False, create: bool = False) -> File:
        """A file for reading, and for writing when asked.  create: it becomes empty, or is made."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT | os.O_TRUNC if create else 0)
        return _OSFile(os.open(path, flags | os.O_CLOEXEC, 0o666))

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in place of one that has it."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        """A folder, if it is not there.  The one above it must be."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))

    def sync_folder(self, folder: Path) -> None:
        """Return when names made, changed and removed in a folder are on the disk."""
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def lock(self, path: Path, shared: bool) -> Any:
        """Hold a file's lock until `close` of what is returned, or the end of the process.  BlockingIOError when
        another holder is in the way.  A shared lock is held together with others of its kind."""
        import fcntl                                   # where there is none, a store is of no use and the rest still is
        try:
            handle = os.open(path, (os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT) | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return None                                # nobody has written here
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BaseException:
            os.close(handle)
            raise
        return _OSFile(handle)


def lock_holder(path: Path) -> str:
    """Who holds a file's lock, in words.  Where the system does not say (/proc/locks: numbers of devices and of
    processes may be those of another view of them), "another process"."""
    with contextlib.suppress(OSError, ValueError):
        wanted = os.stat(path)
        with open("/proc/locks", encoding="ascii") as table:
            for line in table:                         # 1: FLOCK  ADVISORY  WRITE 1234 08:01:131085 0 EOF
                fields = line.split()
                if len(fields) < 6 or fields[1] != "FLOCK" or not fields[4].isdigit() or int(fields[4]) == 0:
                    continue
                major, minor, number = fields[5].split(":")
                if (int(major, 16), int(minor, 16), int(number)) == (
                        os.major(wanted.st_dev), os.minor(wanted.st_dev), wanted.st_ino):
                    return f"process {fields[4]}"
    return "another process"


class _OSFile:
    """A file descriptor."""
    __slots__ = ("handle",)

    def __init__(self, handle: int):
        self.handle = handle

    def read(self, offset: int, size: int) -> bytes:
        parts = []
        while size > 0:
            part = os.pread(self.handle, min(size, 1 << 24), offset)
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view.nbytes:
            n = os.pwrite(self.handle, view, offset)
            if n <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset, view = offset + n, view[n:]

    def sync(self) -> None:
        os.fsync(self.handle)

    def size(self) -> int:
        return os.fstat(self.handle).st_size

    def close(self) -> None:
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)
