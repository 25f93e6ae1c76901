"""A disk that can lose power: a file layer for stores, in memory.

What was written and not synced may be there after a crash or not, in any mixture: of each sector of a file any state it
had since the last sync, the length likewise, and every change of a folder's names by itself.  Where a file grew and its
new bytes did not arrive there is garbage.
"""
from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any, Callable

SECTOR = 512


class PowerLoss(BaseException):
    """The moment the power goes."""


class Inode:
    """A file's bytes; `states`: those since the last sync, the oldest is on the disk.  forgotten: sectors that a sync
    failed to write and that count as written (offset -> what the disk has)."""

    def __init__(self, data: bytes = b""):
        self.states = [data]
        self.forgotten: dict[int, bytes] = {}

    @property
    def data(self) -> bytes:
        return self.states[-1]

    def forget(self) -> None:
        """A sync failed: the changed sectors are no longer to be written, and reading still shows them."""
        old, new = self.states[0], self.data
        for at in range(0, len(new), SECTOR):
            if old[at:at + SECTOR] != new[at:at + SECTOR]:
                self.forgotten.setdefault(at, old[at:at + SECTOR].ljust(SECTOR, b"\xee"))
        self.states = [new]

    def written(self, offset: int, size: int) -> None:
        """Sectors are to be written again."""
        for at in [at for at in self.forgotten if at < offset + size and at + SECTOR > offset]:
            del self.forgotten[at]

    def after_crash(self, rng: random.Random) -> bytes:
        found = bytearray(self._mixed(rng))
        for at, old in self.forgotten.items():
            found[at:at + SECTOR] = old[:max(len(found) - at, 0)]
        return bytes(found)

    def _mixed(self, rng: random.Random) -> bytes:
        if len(self.states) == 1:
            return self.data
        size = len(rng.choice(self.states))
        out = bytearray(rng.randbytes(size))
        for at in range(0, size, SECTOR):
            part = rng.choice(self.states)[at:at + SECTOR][:size - at]
            out[at:at + len(part)] = part
        return bytes(out)


class SimulatedDisk:
    """`m3jit.durable.files.Files` in memory.  fault(count, what, path) is called before every change and may raise."""

    def __init__(self, fault: Callable[[int, str, Path], None] = lambda count, what, path: None):
        self.fault, self.count = fault, 0
        self.names_now: dict[Path, Inode] = {}
        self.names_durable: dict[Path, Inode] = {}
        self.pending: list[list[tuple[Path, Inode | None]]] = []      # changes of names since the last sync of a folder
        self.folders: set[Path] = set()

    def change(self, what: str, path: Path) -> None:
        self.count += 1
        self.fault(self.count, what, path)

    def after_crash(self, seed: int) -> "SimulatedDisk":
        """What is found when the power is back."""
        rng = random.Random(seed)
        names = dict(self.names_durable)
        for steps in self.pending:
            if rng.random() < 0.5:
                for path, inode in steps:
                    if inode is None:
                        names.pop(path, None)
                    else:
                        names[path] = inode
        out = SimulatedDisk()
        kept: dict[int, Inode] = {}
        for path, inode in sorted(names.items()):
            found = kept.setdefault(id(inode), Inode(inode.after_crash(rng)))
            out.names_now[path] = out.names_durable[path] = found
            out.folders.add(path.parent)
        return out

    # -- Files ------------------------------------------------------------------------------------------------------
    def open(self, path: Path, write: bool = False, create: bool = False) -> "SimulatedFile":
        if create:
            self.change("create", path)
            if path in self.names_now:
                self.names_now[path].states.append(b"")
            else:
                self._rename([(path, Inode())])
        if path not in self.names_now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return SimulatedFile(self, path, self.names_now[path])

    def _rename(self, steps: list[tuple[Path, Inode | None]]) -> None:
        self.pending.append(steps)
        for path, inode in steps:
            if inode is None:
                self.names_now.pop(path)
            else:
                self.names_now[path] = inode

    def rename(self, old: Path, new: Path) -> None:
        self.change("rename", old)
        inode = self.names_now[old]
        self._rename([(old, None), (new, inode)])

    def remove(self, path: Path) -> None:
        self.change("remove", path)
        if path not in self.names_now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._rename([(path, None)])

    def make_folder(self, path: Path) -> None:
        self.folders.add(path)

    def names(self, folder: Path) -> list[str]:
        if folder not in self.folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        return sorted(p.name for p in self.names_now if p.parent == folder)

    def sync_folder(self, folder: Path) -> None:
        self.change("sync folder", folder)
        for steps in self.pending:
            for path, inode in steps:
                assert path.parent in self.folders
                if inode is None:
                    self.names_durable.pop(path, None)
                else:
                    self.names_durable[path] = inode
        self.pending = []

    def lock(self, path: Path, shared: bool) -> Any:
        return SimulatedFile(self, path, Inode())


class SimulatedFile:
    """An open file of a simulated disk."""

    def __init__(self, disk: SimulatedDisk, path: Path, inode: Inode):
        self.disk, self.path, self.inode = disk, path, inode

    def read(self, offset: int, size: int) -> bytes:
        return self.inode.data[offset:offset + size]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        if self.path.name != "lock":
            self.disk.change("write", self.path)
        old, new = self.inode.data, bytes(data)
        self.inode.written(offset, len(new))
        self.inode.states.append(old[:offset].ljust(offset, b"\0") + new + old[offset + len(new):])

    def sync(self) -> None:
        try:
            self.disk.change("sync", self.path)
        except OSError:
            self.inode.forget()
            raise
        self.inode.states = [self.inode.data]

    def size(self) -> int:
        return len(self.inode.data)

    def close(self) -> None:
        """Nothing is lost by closing, and nothing synced."""
