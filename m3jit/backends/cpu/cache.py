"""Disk cache of compiled code.

Where: $M3JIT_CACHE_DIR, else $XDG_CACHE_HOME/m3jit, else ~/.cache/m3jit; below it `cpu/`.  One file per object, named
by the hash of everything that can change it (the caller's key).  Files are written beside their place and renamed, so
that a reader sees a whole file or none, from any number of processes; each carries a checksum, and a file that
fails it is removed and compiled anew.  The least recently used files go when the total exceeds the limit
($M3JIT_CACHE_MB, default 512).  A directory that cannot be written (or M3JIT_CACHE_DIR set to the empty string) turns
the cache off: `reason` says why.
"""
from __future__ import annotations

import hashlib
import os
from pathlib import Path

from m3jit import cache_files
from m3jit.errors import UserError
from m3jit.new_file import NewFile
from m3jit.paths import cache_root

_MAGIC = b"m3jitobj1"
_DIGEST = 16
_DEFAULT_MB = 512


def default_directory() -> Path | None:
    """Where the cache lives, or None when it is turned off."""
    root = cache_root()
    return None if root is None else root / "cpu"


def _limit_bytes() -> int:
    """$M3JIT_CACHE_MB in bytes.  UserError when it is no number of megabytes."""
    text = os.environ.get("M3JIT_CACHE_MB", "") or _DEFAULT_MB
    try:
        limit = int(float(text) * (1 << 20))
    except (ValueError, OverflowError):
        limit = -1
    if limit < 0:
        raise UserError(f"M3JIT_CACHE_MB={text}: expected a number of megabytes, such as 512 (0: keep nothing)")
    return limit


class DiskCache:
    """Content-addressed store of byte strings."""

    def __init__(self, directory: Path | str | None = None, limit_bytes: int | None = None):
        self.directory = Path(directory) if directory is not None else default_directory()
        self.limit = limit_bytes if limit_bytes is not None else _limit_bytes()
        self.reason = "" if self.directory is not None else "M3JIT_CACHE_DIR is empty"
        self.corrupt = 0

    @classmethod
    def off(cls) -> "DiskCache":
        """A cache that holds nothing."""
        cache = cls(os.devnull)
        cache.directory, cache.reason = None, "turned off by the caller"
        return cache

    @property
    def enabled(self) -> bool:
        return not self.reason

    def _path(self, key: str) -> Path:
        return self.directory / key[:2] / key

    def load(self, key: str) -> bytes | None:
        """The bytes stored under `key` (a hex string), or None.  A damaged file is removed."""
        if self.directory is None:
            return None
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        head = len(_MAGIC) + _DIGEST
        body = data[head:]
        if data[:head] != _header(body):
            self.corrupt += 1
            _remove(path)
            return None
        try:
            os.utime(path)                 # age counts from the last use
        except OSError:                    # another user's file: it ages from when it was made
            pass
        return body

    def store(self, key: str, body: bytes) -> None:
        """Stores `body`; a failure turns the cache off for this process, with the reason, and is not an error."""
        if not self.enabled:
            return
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with NewFile(path, prefix=".new-", suffix="") as new:
                new.handle.write(_header(body) + body)
                new.commit(mode=0o600)
        except OSError as e:
            self.reason = f"{self.directory}: {e.strerror or e}"
            return
        if cache_files.look_now(key):
            self.trim()

    def entries(self) -> list[tuple[float, int, Path]]:
        """(time of last use, bytes, path) of every file; files that vanish meanwhile are left out."""
        if self.directory is None:
            return []
        return [(age, size, Path(path)) for age, size, path in cache_files.files_below(self.directory)]

    def trim(self) -> None:
        """Removes least recently used files until the total is below 7/8 of the limit, if it exceeds the limit."""
        if self.directory is not None:
            cache_files.trim(self.directory, self.limit)

    def clear(self) -> None:
        for _, _, path in self.entries():
            _remove(path)


def _header(body: bytes) -> bytes:
    return _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST).digest()


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:                        # gone already, or another user's: it is not used either way
        pass
