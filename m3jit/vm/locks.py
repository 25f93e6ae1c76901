"""The lock table of a machine: who holds which lock, who waits for it, and the priority a holder inherits.

It lies outside the roots of contexts: a rollback neither takes nor gives back a lock.  The table is replaced, never
changed: each operation gives the stores (m3jit.vm.commit) that make it happen.
"""
from __future__ import annotations

from typing import NamedTuple

from m3jit.errors import OperandError
from m3jit.vm.commit import Store, attribute
from m3jit.vm.context import Context


class Waiting(NamedTuple):
    """A context that waits for a lock.  until: when it gives up (`time.monotonic`), None: never."""
    context: Context
    until: float | None


class Lock(NamedTuple):
    """A lock that is held.  count: how many times the holder took it; waiting: in order of arrival."""
    holder: Context
    count: int = 1
    waiting: tuple[Waiting, ...] = ()


class LockTable:
    """Locks by number.  `granted`: contexts that waited and got the lock, and have not gone on yet."""

    def __init__(self) -> None:
        self.locks: dict[int, Lock] = {}
        self.granted: frozenset[tuple[int, int]] = frozenset()          # (context, lock)

    def holder(self, key: int) -> Context | None:
        found = self.locks.get(key)
        return None if found is None else found.holder

    def was_granted(self, ctx: Context, key: int) -> bool:
        """Did the context get the lock while it waited, and has not gone on yet?"""
        return (ctx.id, key) in self.granted

    def wait_of(self, ctx: Context, key: int) -> Waiting | None:
        """How a context waits for a lock."""
        found = self.locks.get(key)
        return None if found is None else next((w for w in found.waiting if w.context is ctx), None)

    # -- operations -------------------------------------------------------------------------------------------------
    def taking(self, ctx: Context, key: int) -> list[Store] | None:
        """The context takes the lock, or notices that it got it; None: another one holds it."""
        found = self.locks.get(key)
        if found is None:
            return self._becoming({**self.locks, key: Lock(ctx)})
        if found.holder is not ctx:
            return None
        if self.was_granted(ctx, key):
            return [attribute(self, "granted", self.granted - {(ctx.id, key)})]
        return self._becoming({**self.locks, key: found._replace(count=found.count + 1)})

    def waiting(self, ctx: Context, key: int, until: float | None) -> list[Store]:
        """The context queues up for a lock that another one holds.  OperandError: nobody would ever get on."""
        found = self.locks[key]
        if until is None:
            self._check_cycle(ctx, key)
        return self._becoming({**self.locks, key: found._replace(waiting=(*found.waiting, Waiting(ctx, until)))})

    def giving(self, ctx: Context, key: int) -> list[Store]:
        """The context gives the lock back once.  OperandError: it does not hold it."""
        found = self.locks.get(key)
        if found is None or found.holder is not ctx:
            raise OperandError(f"lock {key} is " + ("not taken" if found is None else f"held by context "
                                                    f"{found.holder.id}") + f"; context {ctx.id} cannot give it back")
        if found.count > 1:
            return self._becoming({**self.locks, key: found._replace(count=found.count - 1)})
        return self._becoming(*_passed_on(self.locks, self.granted, key))

    def withdrawing(self, ctx: Context, but: int | None = None) -> list[Store]:
        """The context no longer waits for any lock (but that one); what it was given meanwhile is given on."""
        locks, granted = self.locks, self.granted
        for key, found in self.locks.items():
            if key == but:
                continue
            if (ctx.id, key) in granted:
                locks, granted = _passed_on(locks, granted - {(ctx.id, key)}, key)
            elif any(w.context is ctx for w in found.waiting):
                locks = {**locks, key: found._replace(waiting=tuple(w for w in found.waiting if w.context is not ctx))}
        return [] if locks is self.locks else self._becoming(locks, granted)

    def ending(self, ctx: Context) -> list[Store]:
        """The context ends: what it holds goes to who waits for it."""
        locks, granted = self.locks, self.granted
        for key, found in self.locks.items():
            left = tuple(w for w in found.waiting if w.context is not ctx)
            if len(left) != len(found.waiting):
                locks = {**locks, key: found._replace(waiting=left)}
            if found.holder is ctx:
                locks, granted = _passed_on(locks, granted - {(ctx.id, key)}, key)
        return [] if locks is self.locks else self._becoming(locks, granted)

    # -- what follows from them ---------------------------------------------------------------------------------------
    def _becoming(self, locks: dict[int, Lock], granted: frozenset | None = None) -> list[Store]:
        """The stores that make `locks` the table, with the priorities holders then inherit."""
        stores = [attribute(self, "locks", locks)]
        if granted is not None:
            stores.append(attribute(self, "granted", granted))
        lent = {found.holder: -1 for table in (self.locks, locks) for found in table.values()}
        changed = True
        while changed:                                 # along chains of holders that wait themselves
            changed = False
            for found in locks.values():
                for w in found.waiting:
                    urgency = max(w.context.priority, lent.get(w.context, -1))
                    if urgency > lent[found.holder]:
                        lent[found.holder], changed = urgency, True
        return stores + [attribute(ctx, "lent", value) for ctx, value in lent.items() if ctx.lent != value]

    def _check_cycle(self, ctx: Context, key: int) -> None:
        """OperandError when the holder waits, over whatever chain, for the context itself."""
        steps, at = [f"context {ctx.id} would wait for lock {key}"], key
        while True:
            holder = self.locks[at].holder
            if holder is ctx:
                raise OperandError("deadlock: " + ", ".join(steps) + f", held by context {ctx.id}; take locks in one "
                                   f"order everywhere, or wait with TIMEOUT")
            found = next(((k, w) for k, lock in self.locks.items() for w in lock.waiting
                          if w.context is holder and w.until is None), None)
            if found is None or len(steps) > len(self.locks):
                return
            at = found[0]
            steps.append(f"held by context {holder.id}, which waits for lock {at}")


def _passed_on(locks: dict[int, Lock], granted: frozenset[tuple[int, int]],
               key: int) -> tuple[dict[int, Lock], frozenset[tuple[int, int]]]:
    """The table when the holder of a lock has given it up: the longest waiter of the highest priority holds it."""
    found = locks[key]
    if not found.waiting:
        return {k: v for k, v in locks.items() if k != key}, granted
    best = max(found.waiting, key=lambda w: w.context.urgency)
    rest = tuple(w for w in found.waiting if w is not best)
    return {**locks, key: Lock(best.context, 1, rest)}, granted | {(best.context.id, key)}
