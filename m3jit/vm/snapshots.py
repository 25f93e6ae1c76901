"""Snapshots: roots put aside, kept alive by registers and by a bounded window.

A snapshot is a node of a tree (its parent is the newest snapshot its context had taken or returned to).  Registers of
running contexts hold it; registers inside another snapshot name it weakly, so that a loop which forks every turn keeps
at most a window of history.  A handle whose snapshot is gone traps as "released".
"""
from __future__ import annotations

import itertools
import weakref
from typing import Any, Sequence

from m3jit.errors import OperandError
from m3jit.vm.commit import Store, attribute, commit, item
from m3jit.vm.held import DEFAULT_BOUND, Bound, count_of
from m3jit.vm.reclaim import DEFAULT_BACKLOG, Reclaimer, leavings

DEFAULT_WINDOW = 64
FRESH = 1000                       # new snapshots, live or not, until they are sorted in
_in_registers = False              # has a handle of this process ever been made that a register may hold?


class Snapshot:
    """A root and where it was taken.  `resume`: index of the instruction after the FORK or SNAPSHOT.  `store`: of the
    machine it belongs to."""
    __slots__ = ("id", "parent", "root", "resume", "context", "store", "__weakref__")

    def __init__(self, id: int, parent: int, root: Any, resume: int, context: int, store: "SnapshotStore"):
        self.id, self.parent, self.root, self.resume, self.context, self.store = id, parent, root, resume, context, store

    def __del__(self) -> None:
        root = getattr(self, "root", None)             # none where making it was interrupted
        if root is not None:
            self.store.reclaimer.give([root.R, *leavings(root)])           # registers name snapshots weakly


class SnapshotHandle:
    """A register's name for a snapshot: `strong` keeps it alive, `weak` only finds it."""
    __slots__ = ("id", "strong", "weak", "_softer")

    def __init__(self, snapshot: Snapshot | None, id: int, weak: Any = None):
        global _in_registers
        _in_registers = True
        self.id, self.strong, self._softer = id, snapshot, None
        self.weak = weak if weak is not None else weakref.ref(snapshot)

    @classmethod
    def of_host(cls, snapshot: Snapshot) -> "SnapshotHandle":
        """A handle that is no register's until it goes through `for_register`."""
        out = cls.__new__(cls)
        out.id, out.strong, out.weak, out._softer = snapshot.id, snapshot, weakref.ref(snapshot), None
        return out

    def get(self) -> Snapshot | None:
        return self.strong if self.strong is not None else self.weak()

    def weakened(self) -> "SnapshotHandle":
        """The same name, not keeping the snapshot alive."""
        if self.strong is None:
            return self
        if self._softer is None:
            self._softer = SnapshotHandle(None, self.id, self.weak)
        return self._softer

    def revived(self) -> "SnapshotHandle":
        """The same name, keeping the snapshot alive if it still is."""
        if self.strong is not None:
            return self
        found = self.weak()
        return self if found is None else SnapshotHandle(found, self.id, self.weak)

    def __eq__(self, other: Any) -> bool:
        return other.__class__ is SnapshotHandle and other.id == self.id

    def __hash__(self) -> int:
        return hash(("snapshot", self.id))

    def __repr__(self) -> str:
        return f"<snapshot {self.id}{'' if self.get() else ' (released)'}>"


class SnapshotStore:
    """The snapshots of a machine; keeps the newest `window` of them alive.  backlog: see `Reclaimer`.  memory: bytes that
    snapshots alone may hold (m3jit.vm.held)."""

    def __init__(self, window: int = DEFAULT_WINDOW, backlog: int = DEFAULT_BACKLOG, memory: int = DEFAULT_BOUND):
        self.window, self.reclaimer = count_of("snapshot_window", window, 0), Reclaimer(backlog)
        self.bound = Bound(count_of("snapshot_memory", memory, 1))
        self.let_go = 0                                        # snapshots up to this one went for want of memory
        self._ring: list[Snapshot | None] = []                 # the window; as long as was needed so far
        self._at = 0                                           # where the next snapshot goes
        self._ids = itertools.count(1)
        self._known: "weakref.WeakValueDictionary[int, Snapshot]" = weakref.WeakValueDictionary()
        self._fresh: list[weakref.ref] = []                    # snapshots that are not among the known ones yet

    @property
    def _live(self) -> "weakref.WeakValueDictionary[int, Snapshot]":
        """All live snapshots by number."""
        self._sort_in()
        return self._known

    @_live.setter
    def _live(self, snapshots: "weakref.WeakValueDictionary[int, Snapshot]") -> None:
        self._known, self._fresh = snapshots, []

    def _sort_in(self) -> None:
        for ref in self._fresh:                        # an interrupt in between: they are looked at again
            snapshot = ref()
            if snapshot is not None:
                self._known[snapshot.id] = snapshot
        self._fresh = []

    def new_id(self) -> int:
        return next(self._ids)

    def keep(self, snapshot: Snapshot) -> list[Store]:
        """The stores (m3jit.vm.commit) that make it the newest of the window.  OperandError: snapshots hold too much."""
        if self.bound.may_be_passed():
            self._make_room()
        self._fresh.append(weakref.ref(snapshot))      # weak: nothing happened yet
        if len(self._fresh) > FRESH:
            self._sort_in()
        self.reclaimer.start()
        if self.window < 1:
            return []
        at = self._at
        if at == len(self._ring):
            self._ring.append(None)
        return [item(self._ring, at, snapshot), attribute(self, "_at", (at + 1) % self.window)]

    def _make_room(self) -> None:
        """Let the oldest of the window go, until what snapshots alone hold fits its bound.  OperandError: it does not,
        registers name too many."""
        while (held := self.bound.count(self.live())) > self.bound.limit:
            recent = self.recent
            if not recent:
                raise OperandError(
                    f"snapshots hold {held} bytes that no running context has, more than the {self.bound.limit} they may "
                    f"(snapshot_memory); overwrite registers that name snapshots no longer needed, or raise the bound: "
                    f"m3jit run --snapshot-memory SIZE, VM(snapshot_memory=...)")
            kept = recent[(len(recent) + 1) // 2:]
            commit((attribute(self, "_ring", list(kept)), attribute(self, "_at", len(kept) % max(self.window, 1)),
                    attribute(self, "let_go", max(self.let_go, recent[len(recent) - len(kept) - 1].id))))

    @property
    def recent(self) -> tuple[Snapshot, ...]:
        """The window, oldest first."""
        return tuple(s for s in self._ring[self._at:] + self._ring[:self._at] if s is not None)

    @recent.setter
    def recent(self, snapshots: Sequence[Snapshot]) -> None:
        newest = list(snapshots)[max(len(snapshots) - self.window, 0):]
        self._ring, self._at = newest, len(newest) % max(self.window, 1)         # type: ignore[assignment]

    def live(self) -> list[Snapshot]:
        """All live snapshots, oldest first."""
        return sorted(self._live.values(), key=lambda s: s.id)

    def resolve(self, handle: SnapshotHandle) -> Snapshot:
        """The snapshot a handle names; OperandError if it was released, or belongs to another machine."""
        found = handle.get()
        if found is None:
            why = f"it is older than the newest {self.window} (the window)" if handle.id > self.let_go else \
                f"snapshots held more than {self.bound.limit} bytes that no running context had (snapshot_memory)"
            option = "window" if handle.id > self.let_go else "memory"
            raise OperandError(f"snapshot {handle.id} was released: no register held it and {why}; take it again, keep it "
                               f"in a register, or raise the bound (m3jit run --snapshot-{option}, "
                               f"VM(snapshot_{option}=...))")
        if found.store is not self:
            raise OperandError(f"snapshot {handle.id} was taken by another machine; a machine goes back to its own "
                               f"snapshots only")
        return found


def for_register(value: Any) -> Any:
    """The value, which the host puts into a register."""
    global _in_registers
    _in_registers = _in_registers or value.__class__ is SnapshotHandle
    return value


def without_handles(registers: list[Any], used: int) -> list[Any]:
    """Registers that may be kept longer than the program does, without a snapshot living longer."""
    return [v for v in registers[:used] if v.__class__ is not SnapshotHandle] if _in_registers else registers


def weaken(registers: list[Any], used: int) -> None:
    """Replace snapshot handles among the first `used` of captured registers by weak ones."""
    if not _in_registers:
        return
    for i, v in enumerate(registers[:used]):
        if v.__class__ is SnapshotHandle:
            registers[i] = v.weakened()


def revive(registers: list[Any], used: int) -> None:
    """The opposite, when captured registers become a running context's."""
    if not _in_registers:
        return
    for i, v in enumerate(registers[:used]):
        if v.__class__ is SnapshotHandle:
            registers[i] = v.revived()
