"""Files that appear under their name only when they are complete."""
from __future__ import annotations

import contextlib
import os
import secrets
import stat
import weakref
from pathlib import Path
from typing import BinaryIO


class NewFile:
    """A file under a temporary name beside `path`, open for reading and writing; `commit` gives it its name.

    One that is not committed is removed by `discard`, else when the object goes away or the process ends, whatever
    exception (Ctrl-C included) came at whatever moment: the name is registered for removal before the file exists.
    prefix, suffix: of the temporary name.  OSError when it cannot be created."""

    def __init__(self, path: Path, prefix: str = ".m3jit.", suffix: str = ".part"):
        self.path = path
        self.name = os.path.join(path.parent, f"{prefix}{secrets.token_hex(6)}{suffix}")
        self._removal = weakref.finalize(self, _remove, self.name, os.getpid())
        self.handle: BinaryIO = open(self.name, "x+b", opener=_private)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()

    def commit(self, mode: int | None = None) -> None:
        """Close it and give it its name, in place of a file that has it.  mode: its permissions (None: those of the
        file it replaces, else what a new file gets).  OSError when that fails; it is removed then."""
        try:
            self.handle.close()
            os.chmod(self.name, self._permissions() if mode is None else mode)
            os.replace(self.name, self.path)
        except BaseException:
            self.discard()
            raise
        self._removal.detach()

    def discard(self) -> None:
        """Close and remove it.  Does nothing after `commit`; the end of a `with` block does the same."""
        with contextlib.suppress(OSError):                 # what is still buffered may find the disk full
            self.handle.close()
        self._removal()

    def _permissions(self) -> int:
        with contextlib.suppress(OSError):
            return stat.S_IMODE(os.stat(self.path).st_mode)
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _remove(name: str, process: int) -> None:
    if os.getpid() == process:                             # a forked child holds a copy of the object, not the file
        with contextlib.suppress(OSError):
            os.unlink(name)
