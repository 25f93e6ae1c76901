"""A whole machine put aside and put back: all contexts, turns, rings, snapshots, counters.

What a snapshot of a context is for a program, this is for the debugger: O(registers), nothing of the state is copied.
It also holds what programs cannot roll back, and keeps nothing alive that the machine has let go: snapshots are noted
by number and made anew, so that a handle which was released in the first run is released again in the second.
"""
from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import Any

from m3jit.isa.fields import GPR
from m3jit.vm.context import Context, Frame, Root
from m3jit.vm.snapshots import Snapshot, SnapshotHandle, new_snapshot
from m3jit.vm.waiting import Wait

_LISTS = ("R", "V", "S")
_SHARED = ("states", "memory")
_FORGOTTEN = ("ahead", "parked")                       # results that were computed early; they are computed again
_COPIES = ("cursors", "texts")
_PLAIN = tuple(s for s in Context.__slots__ if s not in (*_LISTS, *_SHARED, *_FORGOTTEN, *_COPIES, "frames"))
_COUNTERS = (("machine", "_handles"), ("", "_ids"), ("snapshots", "_ids"))


class _Name:
    """A snapshot handle without the snapshot."""
    __slots__ = ("id", "strong")

    def __init__(self, handle: SnapshotHandle):
        self.id, self.strong = handle.id, handle.strong is not None


class MachineState:
    """A machine as it is now.  `restore` may be called any number of times."""

    def __init__(self, vm: Any):
        self.retired: int = vm.retired
        self._contexts = [(ctx, self._context(ctx)) for ctx in {vm.main.id: vm.main, **vm.scheduler.contexts}.values()]
        scheduler = vm.scheduler
        self._scheduler = (list(scheduler.contexts), scheduler._order, scheduler._current, scheduler._used,
                           scheduler._alone, scheduler.turns)
        self._cut = vm._cut
        self._shared = vm.memory.shared.share()
        self._snapshots = [(s.id, s.parent, s.root, s.resume, s.context) for s in vm.snapshots.live()]
        self._recent = [s.id for s in vm.snapshots.recent]
        self._rings = [(ring, tuple(ring.items), ring.base, ring.taken, ring.dropped, ring.closed)
                       for ring in vm.rings.values()]
        self._counters = [_peek(getattr(vm, owner) if owner else vm, name) for owner, name in _COUNTERS]
        m = vm.machine
        self._machine = (dict(m._model_handles), dict(m._extension_handles), dict(m._windows), dict(m._until))
        self._vm = (vm._retired_before, vm._first_trap, vm.error, tuple(vm.events), len(vm.windows), vm.joined_launches)
        self._waits = vm.recorder.waits
        self._locks = (vm.locks.locks, vm.locks.granted)     # never changed, only replaced

    @staticmethod
    def _context(ctx: Context) -> dict[str, Any]:
        kept = {name: getattr(ctx, name) for name in _PLAIN}
        kept |= {name: dict(getattr(ctx, name)) for name in _COPIES}
        kept |= {name: _unnamed(getattr(ctx, name)) for name in _LISTS}
        kept |= {name: getattr(ctx, name).share() for name in _SHARED}
        kept["frames"] = _frames(ctx.frames, _unnamed)
        return kept

    def restore(self, vm: Any) -> None:
        """Make this the state of the machine it was taken of."""
        made = {number: new_snapshot(number, parent, root, resume, context, vm.snapshots)
                for number, parent, root, resume, context in self._snapshots}

        def named(values: list[Any]) -> list[Any]:
            return [_handle(v, made) if v.__class__ is _Name or v.__class__ is SnapshotHandle else v for v in values]
        for snapshot in made.values():
            snapshot.root = _root(snapshot.root, named)
        for ctx, kept in self._contexts:
            self._put_back(vm, ctx, kept, named)
        vm.snapshots.recent = tuple(made[number] for number in self._recent)
        vm.snapshots.know(made.values(), alone=True)
        scheduler = vm.scheduler
        (order, scheduler._order, scheduler._current, scheduler._used, scheduler._alone,
         scheduler.turns) = self._scheduler
        by_id = {ctx.id: ctx for ctx, _ in self._contexts}
        scheduler.contexts = {number: by_id[number] for number in order}
        vm._cut, vm._slicing = self._cut, None
        vm.memory.shared = self._shared.share()
        for ring in vm.rings.values():                 # one that was made later is as good as none while it is empty
            ring.items, ring.base, ring.taken, ring.dropped, ring.closed = deque(), 0, 0, 0, False
        for ring, items, base, taken, dropped, closed in self._rings:
            ring.items, ring.base, ring.taken, ring.dropped, ring.closed = deque(items), base, taken, dropped, closed
        for (owner, name), number in zip(_COUNTERS, self._counters):
            setattr(getattr(vm, owner) if owner else vm, name, itertools.count(number))
        m = vm.machine
        m._model_handles, m._extension_handles, m._windows, m._until = map(dict, self._machine)
        m.stores = []
        vm._retired_before, vm._first_trap, vm.error, events, windows, vm.joined_launches = self._vm
        vm.events = deque(events, vm.events.maxlen)
        del vm.windows[windows:]
        vm.recorder.waits = self._waits
        vm.locks.locks, vm.locks.granted = self._locks

    @staticmethod
    def _put_back(vm: Any, ctx: Context, kept: dict[str, Any], named: Any) -> None:
        for name in (*_PLAIN, *_COPIES):
            setattr(ctx, name, kept[name])
        for name in _LISTS:
            setattr(ctx, name, named(kept[name]))
        for name in _SHARED:
            setattr(ctx, name, kept[name].share())
        for name in _FORGOTTEN:
            setattr(ctx, name, None)
        ctx.frames = _frames(kept["frames"], named)
        waits = ctx.waiting_for
        if waits is not None and waits.external:       # the record says when it ends
            ctx.waiting_for = Wait(lambda: vm.recorder._due(ctx), waits.what, True)


def _peek(owner: Any, name: str) -> int:
    """The next number of an `itertools.count`, which stays the next."""
    number = next(getattr(owner, name))
    setattr(owner, name, itertools.count(number))
    return number


def _unnamed(values: list[Any]) -> list[Any]:
    """A copy of registers that keeps no snapshot alive."""
    return [_Name(v) if v.__class__ is SnapshotHandle else v for v in values]


def _handle(name: Any, made: dict[int, Snapshot]) -> SnapshotHandle:
    """The handle of a name, of the snapshot that was made anew; a released one where there is none."""
    strong = name.strong if name.__class__ is _Name else name.strong is not None
    found = made.get(name.id)
    if found is None:
        return SnapshotHandle(None, name.id, _gone)
    return found.handle() if strong else found.name


def _gone() -> None:
    return None


def _frames(frame: Frame | None, change: Any) -> Frame | None:
    """A chain of frames with the snapshots in their registers changed; frames that name none are shared."""
    if frame is None or not _names(frame):
        return frame
    return Frame(change(frame.R), frame.V, frame.back, frame.args, _frames(frame.parent, change))


def _names(frame: Frame | None) -> bool:
    while frame is not None:
        if any(v.__class__ is SnapshotHandle or v.__class__ is _Name for v in frame.R):
            return True
        frame = frame.parent
    return False


def _root(root: Root, named: Any) -> Root:
    """A snapshot's root whose handles find the snapshots that were made anew."""
    if not any(v.__class__ is SnapshotHandle for v in root.R) and not _names(root.frames):
        return root
    other = Root()
    for name in Root.__slots__:
        setattr(other, name, getattr(root, name))
    other.R, other.frames = named(root.R), _frames(root.frames, named)
    return other


assert GPR == 0                                        # snapshot handles are in general registers only
