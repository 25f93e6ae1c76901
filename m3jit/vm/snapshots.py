"""Snapshots: roots put aside, kept alive by registers and by a bounded window.

A snapshot is a node of a tree (its parent is the newest snapshot its context had taken or returned to).  Registers of
running contexts hold it; registers inside another snapshot name it weakly, so that a loop which forks every turn keeps
at most a window of history.  A handle whose snapshot is gone traps as "released".  Which registers may hold a handle at
all is known of a program (`naming`, see m3jit.vm.register_use), so that a capture looks at no others.
"""
from __future__ import annotations

import itertools
import weakref
from operator import setitem
from sys import getrefcount
from typing import Any, Callable, Iterable, Sequence

from m3jit.errors import OperandError
from m3jit.vm import reclaim
from m3jit.vm.commit import Store, attribute, commit, commit_columns
from m3jit.vm.held import DEFAULT_BOUND, Bound, count_of
from m3jit.vm.reclaim import DEFAULT_BACKLOG, OURS, Reclaimer, leavings
from m3jit.vm.register_use import RegisterUse

DEFAULT_WINDOW = 64
FRESH = 1000                       # names of snapshots, live or not, that are kept before the dead ones are sorted out
_new = object.__new__
_HOST = setattr, setitem, setattr                      # stores of `SnapshotStore.take`
_INSTRUCTION = *_HOST, setitem, setattr, setattr       # .. and of `fork`


class Snapshot:
    """A root and where it was taken.  `resume`: index of the instruction after the FORK or SNAPSHOT.  `store`: of the
    machine it belongs to.  `name`: its weak handle."""
    __slots__ = ("id", "parent", "root", "resume", "context", "store", "name", "__weakref__")

    def handle(self) -> "SnapshotHandle":
        """A handle that keeps it alive."""
        out = _new(SnapshotHandle)
        out.id, out.strong, out.weak = self.id, self, self.name.weak
        return out

    def __del__(self) -> None:
        try:
            root = self.root
        except AttributeError:                         # making it was interrupted
            return
        if root is None:
            return
        things = [root.R]                              # registers name snapshots weakly
        if root.memory.pages or getrefcount(root.states.root) < OURS:
            things += leavings(root)
        self.store.reclaimer.give(things)


def new_snapshot(id: int, parent: int, root: Any, resume: int, context: int, store: "SnapshotStore") -> Snapshot:
    """A snapshot (an `__init__`, which CPython calls from C, would take twice the time)."""
    out, name = _new(Snapshot), _new(SnapshotHandle)
    out.id, out.parent, out.resume, out.context, out.store, out.name, out.root = \
        id, parent, resume, context, store, name, root               # the root last: `__del__` looks whether it is
    name.id, name.strong, name.weak = id, None, weakref.ref(out)
    return out


class SnapshotHandle:
    """A register's name for a snapshot: `strong` keeps it alive, `weak` only finds it."""
    __slots__ = ("id", "strong", "weak")

    def __init__(self, snapshot: Snapshot | None, id: int, weak: Callable[[], Snapshot | None]):
        self.id, self.strong, self.weak = id, snapshot, weak

    def get(self) -> Snapshot | None:
        return self.strong if self.strong is not None else self.weak()

    def weakened(self) -> "SnapshotHandle":
        """The same name, not keeping the snapshot alive."""
        return self if self.strong is None else self.strong.name

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
    """The snapshots of a machine; keeps the newest `window` of them alive.  backlog: see `Reclaimer`.  memory: bytes
    that snapshots alone may hold (m3jit.vm.held)."""

    def __init__(self, window: int = DEFAULT_WINDOW, backlog: int = DEFAULT_BACKLOG, memory: int = DEFAULT_BOUND):
        self.window, self.reclaimer = count_of("snapshot_window", window, 0), Reclaimer(backlog)
        self.bound = Bound(count_of("snapshot_memory", memory, 1))
        self.let_go = 0                                        # snapshots up to this one went for want of memory
        self._ring: list[Snapshot | None] = []                 # the window; as long as was needed so far
        self._at = 0                                           # where the next snapshot goes
        self._ids = itertools.count(1)
        self._names: list[SnapshotHandle] = []                 # weak handles of all live snapshots, and some dead ones
        # Names that there may be until the dead ones are left out.
        self._tidy = FRESH

    def new_id(self) -> int:
        return next(self._ids)

    def take(self, ctx: Any) -> SnapshotHandle:
        """A snapshot of a context for the host: the newest of the window and of the context.  All or nothing.
        OperandError: snapshots hold too much."""
        snapshot = new_snapshot(next(self._ids), ctx.newest_snapshot or 0, ctx.capture(), ctx.index, ctx.id, self)
        handle = snapshot.handle()
        ring, at, following = self._place(snapshot)
        commit_columns(_HOST, (ctx, ring, self), ("newest_snapshot", at, "_at"), (snapshot.id, snapshot, following))
        return handle

    def fork(self, ctx: Any, register: int | None, before: Callable[[Snapshot], None] | None,
             more: Sequence[Store] = ()) -> None:
        """A snapshot as an instruction of the context takes it: with the instruction done, and the handle in a general
        register (inside the snapshot that names it weakly, so that it still does after ABORT; None: nowhere).  All or
        nothing.

        before: called with the snapshot when nothing is stored yet.  more: what else is stored with it.  OperandError:
        snapshots hold too much."""
        root, R, resume = ctx.capture(), ctx.R, ctx.index + 1
        snapshot = new_snapshot(next(self._ids), ctx.newest_snapshot or 0, root, resume, ctx.id, self)
        if register is None:
            R, register = [None], 0
        else:
            root.R[register] = snapshot.name
        ring, at, following = self._place(snapshot)
        if before is not None:
            before(snapshot)
        columns = (_INSTRUCTION, (ctx, ring, self, R, ctx, ctx),
                   ("newest_snapshot", at, "_at", register, "retired", "index"),
                   (snapshot.id, snapshot, following, snapshot.handle(), ctx.retired + 1, resume))
        if more:
            columns = tuple((*own, *others) for own, others in zip(columns, zip(*more)))
        commit_columns(*columns)

    def keep(self, snapshots: Sequence[Snapshot]) -> list[Store]:
        """The stores (m3jit.vm.commit) that make these, in order, the newest of the window.  OperandError: snapshots
        hold too much."""
        self.know(snapshots)                           # weak: nothing happened yet
        if any([self.bound.may_be_passed() for _ in snapshots]):
            self._make_room()
        reclaim.start()
        ring = [*self._ring[self._at:], *self._ring[:self._at], *snapshots]
        ring = ring[max(len(ring) - self.window, 0):]
        return [attribute(self, "_ring", ring), attribute(self, "_at", len(ring) % max(self.window, 1))]

    def _place(self, snapshot: Snapshot) -> tuple[list[Snapshot | None], int, int]:
        """(list, index) where the newest of the window is to be stored, and `_at` behind it.  OperandError: snapshots
        hold too much."""
        if self.bound.may_be_passed():
            self._make_room()
        names, ring, at = self._names, self._ring, self._at
        names.append(snapshot.name)                    # weak: nothing happened yet
        if len(names) > self._tidy:
            self._leave_out_dead()
        if reclaim.thread is None:
            reclaim.start()
        if at == len(ring):
            if self.window < 1:
                return [None], 0, 0
            ring.append(None)
        return ring, at, at + 1 if at + 1 < self.window else 0

    def _leave_out_dead(self) -> None:
        self._names = [name for name in self._names if name.weak() is not None]
        self._tidy = max(FRESH, 2 * len(self._names))

    def know(self, snapshots: Iterable[Snapshot], alone: bool = False) -> None:
        """These live ones, too, belong to the machine.  alone: and no others."""
        names = [s.name for s in snapshots]
        self._names = names if alone else self._names + names

    def _make_room(self) -> None:
        """Let the oldest of the window go, until what snapshots alone hold fits its bound.  OperandError: it does not,
        registers name too many."""
        while (held := self.bound.count(self.live())) > self.bound.limit:
            recent = self.recent
            if not recent:
                raise OperandError(
                    f"snapshots hold {held} bytes that no running context has, more than the "
                    f"{self.bound.limit} they may (snapshot_memory); overwrite registers that name snapshots no longer "
                    "needed, or raise the bound: m3jit run --snapshot-memory SIZE, VM(snapshot_memory=...)")
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
        found = {s.id: s for name in self._names if (s := name.weak()) is not None}
        return [found[number] for number in sorted(found)]

    def resolve(self, handle: SnapshotHandle) -> Snapshot:
        """The snapshot a handle names; OperandError if it was released, or belongs to another machine."""
        found = handle.get()
        if found is None:
            why = f"it is older than the newest {self.window} (the window)" if handle.id > self.let_go else \
                f"snapshots held more than {self.bound.limit} bytes that no running context had (snapshot_memory)"
            option = "window" if handle.id > self.let_go else "memory"
            raise OperandError(f"snapshot {handle.id} was released: no register held it and {why}; take it "
                               f"again, keep it in a register, or raise the bound (m3jit run --snapshot-{option}, "
                               f"VM(snapshot_{option}=...))")
        if found.store is not self:
            raise OperandError(f"snapshot {handle.id} was taken by another machine; a machine goes back to its own "
                               f"snapshots only")
        return found


def without_handles(registers: list[Any], used: RegisterUse) -> list[Any]:
    """Registers that may be kept longer than the program does, without a snapshot living longer."""
    out = registers
    for n in used.naming:
        if registers[n].__class__ is SnapshotHandle:
            if out is registers:
                out = registers[:used.R]
            out[n] = None
    return out


def weaken(registers: list[Any], naming: Iterable[int]) -> None:
    """Replace snapshot handles in captured registers by weak ones.  naming: those that may hold one."""
    for n in naming:
        if registers[n].__class__ is SnapshotHandle:
            registers[n] = registers[n].weakened()


def revive(registers: list[Any], naming: Iterable[int]) -> None:
    """The opposite, when captured registers become a running context's."""
    for n in naming:
        if registers[n].__class__ is SnapshotHandle:
            registers[n] = registers[n].revived()
