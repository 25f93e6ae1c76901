"""Interrupts, signals between contexts, locks and waiting, as the machine's instructions see them."""
from __future__ import annotations

import time
from typing import Any

from m3jit.errors import OperandError
from m3jit.vm.commit import Store, attribute, commit
from m3jit.vm.context import QUIET, READY, WAITING, Context
from m3jit.vm.snapshots import Snapshot
from m3jit.vm.sources import QueueSource
from m3jit.vm.values import ContextRef
from m3jit.vm.waiting import Blocked, Wait

SENT, NO_SUCH, REFUSED = 0, 2, 3                  # status of SIGNAL
INTERRUPTED, INPUT, TIME_IS_UP = 1, 2, 0          # what WFI says


class SignalsView:
    """The part of `Machine` where contexts meet."""
    vm: Any
    ctx: Context
    stores: list[Store]
    _until: dict[int, tuple[int, float | None]]

    # -- interrupts -------------------------------------------------------------------------------------------------
    def interrupt_pending(self) -> bool:
        """Is an interrupt to be seen here?  What was seen is part of the record of a run."""
        ctx, recorder = self.ctx, self.vm.recorder
        seen = ctx.raised is not False and ctx.sees_interrupt()
        return seen if recorder.idle else recorder.glimpse(ctx, "interrupt", seen)

    def clear_interrupt(self) -> None:
        """The branch of IF_INTERRUPT is taken."""
        ctx, pending = self.ctx, self.ctx.interrupt
        if pending is True:
            self.stores.append(attribute(ctx, "raised", False))
        elif pending:                                  # input that comes before it is stored is another interrupt
            self.stores += (attribute(ctx, "quiet_until", ctx.retired + QUIET), attribute(ctx, "answered", pending))

    def no_interrupt(self) -> None:
        """IF_INTERRUPT goes on: if nothing else happens before compiled code is given up, it looks again."""
        self.ctx.looked = (self.ctx.retired + 1, self.ctx.index + 1)

    def wait_for_interrupt(self, timeout: int) -> int:
        """WFI."""
        value = self.vm.observe(self.ctx, "wfi", lambda: self._look_for_interrupt(timeout))
        self._until.pop(self.ctx.id, None)
        return value

    def _look_for_interrupt(self, timeout: int) -> int:
        ctx = self.ctx
        ctx.quiet_until = 0                            # it has nothing else to do
        if ctx.interrupt:
            return INTERRUPTED
        if self._input_is_there(ctx):
            return INPUT
        until, expired = self._deadline(timeout)
        if expired:
            return TIME_IS_UP
        raise Blocked(self.wait_of_wfi(ctx, until))

    def wait_of_wfi(self, ctx: Context, until: float | None) -> Wait:
        """What a context waits for in WFI."""
        return Wait(lambda: bool(ctx.interrupt) or self._input_is_there(ctx) or _is_over(until), "an interrupt", True,
                    None, until, ("interrupt",))

    def _input_is_there(self, ctx: Context) -> bool:
        source = self.vm.sources.get("USER_INPUT")
        return isinstance(source, QueueSource) and source.has(ctx.cursors.get("USER_INPUT", 0))

    def _deadline(self, timeout: int) -> tuple[float | None, bool]:
        """(when the running instruction stops waiting, whether that is over): TIMEOUT from its first attempt on."""
        if timeout <= 0:
            return None, timeout == 0
        at, until = self._until.get(self.ctx.id, (-1, None))
        if at != self.ctx.retired:
            until = time.monotonic() + timeout / 1e9
            self._until[self.ctx.id] = self.ctx.retired, until
            return until, False
        return until, _is_over(until)

    # -- signals ----------------------------------------------------------------------------------------------------
    def signal(self, kind: str, node: int, target: Any) -> int:
        """SIGNAL to a context of this machine: 0 done, 2 no such context, 3 refused."""
        if node:
            raise OperandError(f"NODE={node}: this machine is no member of a cluster; SIGNAL reaches "
                               "contexts of node 0")
        if kind == "FORK_REQ":
            raise OperandError("KIND=FORK_REQ: a snapshot has no name outside the context that took it; the "
                               "target has to execute FORK")
        number = target.id if isinstance(target, ContextRef) else target
        found = self.vm.scheduler.contexts.get(number)
        if found is None or found.status not in (READY, WAITING):
            return NO_SUCH
        self.ctx.leave = True                          # the scheduler decides who is next
        if kind == "HALT":
            self.kill(ContextRef(number))              # type: ignore[attr-defined]
        elif kind == "INTERRUPT":
            self.stores.append(attribute(found, "raised", True))
        elif kind == "ABORT":
            return self._abort_other(found)
        return SENT

    def _abort_other(self, target: Context) -> int:
        snap = self._newest_snapshot(target)
        if snap is None:
            return REFUSED
        self.vm.snapshots.reclaimer.give(target.replaced())
        self.stores += [*target.restoring(snap.root), attribute(target, "newest_snapshot", snap.id)]
        if target.status == WAITING:                   # what it waited for was asked for with other registers
            self.stores += [*self.vm.locks.withdrawing(target), *self.vm.scheduler.resuming(target)]
        return SENT

    def _newest_snapshot(self, target: Context) -> Snapshot | None:
        """The newest live snapshot that a context took; None when there is none."""
        return next((s for s in reversed(self.vm.snapshots.live()) if s.context == target.id), None)

    # -- locks ------------------------------------------------------------------------------------------------------
    def lock(self, key: int, timeout: int) -> int:
        """LOCK: 1 taken, 0 not in time."""
        ctx, table = self.ctx, self.vm.locks
        commit(table.withdrawing(ctx, but=key))        # a rollback brought it here from another LOCK
        wait, got = table.wait_of(ctx, key), table.taking(ctx, key)
        if wait is None and not table.was_granted(ctx, key):           # the first attempt
            if got is not None or timeout == 0:
                self.stores += got or ()
                return int(got is not None)
            until = None if timeout < 0 else time.monotonic() + timeout / 1e9
            commit(table.waiting(ctx, key, until))     # it is in the queue before it sleeps
            wait = table.wait_of(ctx, key)
            if until is not None:                      # how a timed wait ends is part of the record of a run
                self.vm.observe(ctx, "lock", lambda: self._wait_for_lock(key, until))
        if timeout >= 0:
            until = wait.until if wait is not None else None
            if not self.vm.observe(ctx, "lock", lambda: 1 if got is not None else 0 if _is_over(until) else
                                   self._wait_for_lock(key, until)):
                self.stores += table.withdrawing(ctx)
                return 0
        if got is None:
            self._wait_for_lock(key, None)
        self.stores += got or ()
        return 1

    def _wait_for_lock(self, key: int, until: float | None) -> int:
        raise Blocked(self.wait_of_lock(self.ctx, key, until, f"held by context {self.vm.locks.holder(key).id}"))

    def wait_of_lock(self, ctx: Context, key: int, until: float | None, why: str) -> Wait:
        """What a context waits for that is in the queue of a lock."""
        table = self.vm.locks
        return Wait(lambda: table.holder(key) is ctx or _is_over(until), f"lock {key}, {why}", until is not None, None,
                    until, ("lock", key, why))

    def unlock(self, key: int) -> None:
        """UNLOCK."""
        self.stores += self.vm.locks.giving(self.ctx, key)
        self.ctx.leave = True                          # whoever gets it may be more urgent


def _is_over(until: float | None) -> bool:
    return until is not None and time.monotonic() >= until
