"""What can be wrong with a store.  Each message names the file, the place in it, and what to do."""
from __future__ import annotations

from pathlib import Path

from m3jit.errors import UserError


class StoreError(UserError):
    """A store cannot be opened, read or written, or does not hold what was asked for."""


class StoreInUse(StoreError):
    """Another process, or another `Store` of this one, has it open."""


class StoreFull(StoreError):
    """The disk has no room for a commit.  The versions committed before are intact, and the store goes on."""


class DamagedStore(StoreError):
    """Bytes of a store are not those that were written.

    path, offset: the file and the place in it."""

    def __init__(self, path: str | Path, offset: int, what: str, remedy: str = ""):
        self.path, self.offset, self.what = Path(path), offset, what
        super().__init__(f"{path}: damaged at byte {offset}: {what}" + (f"; {remedy}" if remedy else ""))
