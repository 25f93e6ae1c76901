"""What the machine asks of a disk: checkpoints, versions that are written through a log (PERSIST), the WAL region.

`m3jit.Checkpoints` answers; a machine without it says so when a program needs it.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from m3jit.errors import OperandError
from m3jit.vm.context import Context
from m3jit.vm.snapshots import Snapshot, SnapshotHandle, new_snapshot
from m3jit.vm.values import Handle

SAVE, RESTORE, PERSIST, APPEND = "checkpoint", "checkpoint read", "persist", "append"     # what a recorded run logs


class Checkpoints(Protocol):
    """Writes and reads versions.  Errors are UserError."""

    def save(self, vm: Any, folder: Path, value: Any) -> int:
        """Write a `Snapshot`, a state or a tensor; bytes of blocks written."""

    def newest(self, folder: Path) -> str:
        """What identifies the value that was saved last."""

    def load(self, vm: Any, folder: Path, which: str) -> Any:
        """(what gives the stores that take the value, the value of that name: a `Snapshot`, a state or a tensor)."""

    def persist(self, vm: Any, snapshot: Snapshot) -> int:
        """Write a snapshot to the machine's own store; bytes of blocks written."""

    def append(self, vm: Any, offset: int, data: bytes, durable: bool) -> int:
        """Add to the log of the machine's own store; its length then.  durable: it is on the disk."""

    def ended(self) -> None:
        """The run came to its end, and everything it wrote is complete."""

    def close(self) -> None: ...


class NoCheckpoints:
    """The disk of a machine that was given none."""

    def _none(self, *_: Any) -> Any:
        raise OperandError("this machine writes no checkpoints; run it with `m3jit run`, or pass VM(checkpoints="
                           "m3jit.Checkpoints())")

    save = newest = load = persist = append = _none

    def ended(self) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        """Nothing is open."""


NO_CHECKPOINTS = NoCheckpoints()


class CheckpointsView:
    """The part of `Machine` that writes to and reads from a disk.

    A recorded run logs how much was written and what was read; its replay saves again, to files of its own, and reads
    what it saved."""
    vm: Any
    ctx: Context

    def save_checkpoint(self, what: Any, path: str | None) -> int:
        """CHECKPOINT_SAVE."""
        folder = self._folder(path, "write a checkpoint to")
        if what is None:
            value: Any = self._present()
        elif what.__class__ is SnapshotHandle:
            value = self.vm.snapshots.resolve(what)
        else:
            value = self.state(what) if what.__class__ is Handle else what     # type: ignore[attr-defined]
        written = self.vm.checkpoints.save(self.vm, folder, value)
        return self.observe(SAVE, lambda: written)     # type: ignore[attr-defined]

    def restore_checkpoint(self, path: str | None) -> Any:
        """CHECKPOINT_RESTORE."""
        folder = self._folder(path, "read a checkpoint from")
        disk, vm = self.vm.checkpoints, self.vm
        which = self.observe(RESTORE, lambda: disk.newest(folder))             # type: ignore[attr-defined]
        taking, value = disk.load(vm, folder, which)
        self.stores += taking()                        # type: ignore[attr-defined]
        if value.__class__ is Snapshot:
            return value.handle()
        elif hasattr(value, "kind_name"):
            value, stores = self.handle_for(self.ctx, value)                   # type: ignore[attr-defined]
            self.stores += stores                                              # type: ignore[attr-defined]
        return value

    def persist(self, snapshot: Snapshot) -> None:
        """FORK PERSIST, SNAPSHOT PERSIST: the snapshot is on the disk before the instruction has happened."""
        self.observe(PERSIST, lambda: self.vm.checkpoints.persist(self.vm, snapshot))     # type: ignore[attr-defined]

    def append_to_log(self, offset: int, data: bytes, durable: bool) -> None:
        """MEMCPY to the WAL region."""
        self.observe(APPEND, lambda: self.vm.checkpoints.append(                # type: ignore[attr-defined]
            self.vm, offset, data, durable))

    def _present(self) -> Snapshot:
        """The context as it is; it goes on behind the running instruction."""
        ctx, store = self.ctx, self.vm.snapshots
        return new_snapshot(store.new_id(), ctx.newest_snapshot or 0, ctx.capture(), ctx.index + 1, ctx.id, store)

    def _folder(self, path: str | None, action: str) -> Path:
        if path is None:
            raise OperandError('needs PATH="..."')
        return self.vm.file_path(path, action, folder=True)
