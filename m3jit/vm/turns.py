"""Running a machine: contexts take their turns, slices are cut where somebody wants to look, waits for the outside."""
from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Callable

from m3jit.errors import Deadlock, Interrupted, LimitError, Trap
from m3jit.vm.broken_off import BrokenOff
from m3jit.vm.commit import attribute, commit
from m3jit.vm.context import DONE, KILLED, PARKED, READY, TRAPPED, WAITING, Context
from m3jit.vm.entering import Entered, Timed, without
from m3jit.vm.scheduler import UNLIMITED, describe_waits
from m3jit.vm.stopping import STOPPED, TIMED_OUT
from m3jit.vm.waiting import patience


class Turns:
    """The part of `VM` that gives contexts their turns."""
    if TYPE_CHECKING:
        image: Any
        main: Context
        scheduler: Any
        recorder: Any
        interpreter: Any
        stop_word: Any
        signal: Any
        locks: Any
        max_steps: int | None
        timeout: float | None
        retired: int

    def _nothing_has_run(self) -> None:
        """What a machine knows of its runs, before the first one."""
        self.horizon: int | None = None                # instructions of all contexts at which a slice ends exactly
        self.look_at: int | None = None                # .. and after which one is cut at the next poll point
        self.pausing = False                           # (with a raised stop word) cut the slice where it is
        # A slice that was cut, its budget (0: it ends there), what of it was done.
        self._cut: tuple[Context, int, int] | None = None
        self._slicing: tuple[Context, int, int] | None = None  # the slice that runs, its budget, `retired` at its start
        self.stopped: tuple[Context, ...] = ()         # contexts that had not ended when the run failed
        self.rings_closed: frozenset[str] = frozenset()        # rings that were closed before the machine was
        self._lock = threading.RLock()
        self._gate = Entered(self)
        self._runner: int | None = None                # the thread that is in a run
        self._timed: Timed | None = None               # .. whose time is measured
        self._wanting = 0                              # threads that want the lock while a run holds it
        self._retired_before = 0                       # of contexts that ended
        self._first_trap: Trap | None = None
        self.error: BaseException | None = None        # what ended the run
        self.broken_off: BrokenOff | None = None       # where Ctrl-C did
        self.batch: Any = None                         # the `Batch` it takes part in
        self.joined_launches = 0                       # launches that also did the work of another context's
        self.seconds = 0.0

    def _loop(self, until: Callable[[], bool]) -> None:
        self._take_up()
        while not until():
            turn = self._turn()
            if turn is not None:
                self._slice(*turn)
            elif self.scheduler.waiting():
                self._wait()
            else:
                return

    def _turn(self) -> tuple[Context, int, int] | None:
        """The context whose turn it is, the budget of its slice, what of that is done; None: no context can go on."""
        if self._cut is not None:
            ctx, budget, done = self._taken_cut()
            if budget and ctx.status == READY and ctx.id in self.scheduler.contexts and not self.recorder.wakes_now:
                return ctx, budget, done
            self._after(ctx, done - self.looks_again(ctx))
        found, budget = self.scheduler.pick()
        return None if found is None else (found, budget, 0)

    def _taken_cut(self) -> tuple[Context, int, int]:
        """The slice that was cut; it runs from now on (no call comes in between)."""
        (ctx, budget, done), self._cut = self._cut, None         # type: ignore[misc]
        self._slicing = ctx, budget, ctx.retired - done
        return ctx, budget, done

    def _see_ends(self) -> None:
        """Let go of a context that had just ended when Ctrl-C came."""
        for ended in [c for c in self.scheduler.contexts.values() if c.status in (DONE, KILLED)]:
            self._after(ended, 0)

    def _take_up(self) -> None:
        """Go on where Ctrl-C came: the slice that ran goes on, or what follows its end is done."""
        if self._cut is None and self._slicing is not None:
            ctx, budget, before = self._slicing
            done = ctx.retired - before
            if ctx.status == READY and ctx.trap is None:
                over = (ctx.leave or done >= budget) and not self._broken_within()
                self._cut = (ctx, 0 if over else budget, done)
            elif ctx.id in self.scheduler.contexts:
                self._after(ctx, done)
        self._see_ends()
        self.broken_off = None

    def _broken_within(self) -> bool:
        """Did Ctrl-C come between two poll points, where no slice ends?"""
        found = self.broken_off
        if found is None or not found.done:
            return found is not None
        ctx = self._slicing[0]                         # type: ignore[index]
        if ctx.looked == (ctx.retired, ctx.index):     # behind an IF_INTERRUPT, also one in compiled code's wake
            return False
        behind, op = self.image.index_of.get(found.goes_on), self.image.instructions[self.image.index_of[found.pc]].op
        fast = op.route == "value" or op.control in ("next", "jump", "branch")     # compiled code may begin there too
        return fast and behind not in self.interpreter.heads

    def _slice(self, ctx: Context, budget: int, done: int = 0) -> None:
        """Run one context until its slice is used up; the run pauses inside for threads that want the lock.

        A slice that is cut, by the horizon or because somebody wants to look, is gone on with afterwards: where it ends
        is a function of the program, and of when a wait for the outside ends.  done: instructions before it was cut."""
        while True:
            before, self.stop_word.running, ctx.leave = ctx.retired, ctx, False
            self._slicing = ctx, budget, before - done
            left = budget - done
            room = self._room()
            if room <= 0:
                if self.recorder.at_horizon(ctx):
                    self._cut = (ctx, budget, done)
                    return
                break
            reserve = len(self.image.instructions)     # a slice may pass its budget by less than one program length
            if room <= reserve:
                polls = self.interpreter.run_exactly(ctx, room, left)
            else:
                polls = self.interpreter.run(ctx, min(left, room - reserve, self._until_look()))
            done += ctx.retired - before
            if ctx.heard and ctx.retired > before:
                ctx.heard = frozenset()
            if ctx.leave or ctx.trap is not None or ctx.status != READY or polls and done >= budget:
                break
            if self.stop_word.raised and (self._stopped(ctx) or self.pausing) or self._until_look() <= 0:
                self.pausing, self._cut = False, (ctx, budget, done)
                return
        self.pausing = False
        self._after(ctx, done)

    def _until_look(self) -> int:
        """Instructions until somebody wants to look, at the next poll point."""
        return UNLIMITED if self.look_at is None else self.look_at - self.retired

    def _room(self) -> int:
        """Instructions until a limit, the horizon, or an event of a replay.  LimitError: none until the limit."""
        if self.max_steps is None and self.horizon is None and self.recorder.horizon is None:
            return UNLIMITED
        horizons = [h for h in (self.max_steps, self.horizon, self.recorder.horizon) if h is not None]
        retired = self.retired
        if self.max_steps is not None and retired >= self.max_steps:
            raise LimitError(f"{self.image.name}: {retired} instructions without an end (max_steps = {self.max_steps})")
        return min(horizons) - retired

    def _stopped(self, ctx: Context) -> bool:
        """React to the stop word; True ends the slice."""
        reason = self.stop_word.take()
        if reason == TIMED_OUT:
            raise LimitError(f"{self.image.name}: not finished after {self.timeout} s (timeout); {self._position(ctx)}")
        if reason == STOPPED:
            raise Interrupted(f"{self.image.name}: stopped; {self._position(ctx)}")
        self._let_others_in()
        return bool(self.scheduler.waiting())

    def looks_again(self, ctx: Context) -> bool:
        """`Context.looks_again`, where the outside is looked at."""
        return bool(ctx.raised) and not self.recorder.replaying and ctx.looks_again()

    def _position(self, ctx: Context) -> str:
        trap = self.interpreter.trap(ctx, ctx.index, "")
        where = f" ({trap.line[0]}:{trap.line[1]})" if trap.line else ""
        return f"context {ctx.id} was at pc 0x{max(trap.pc, 0):04x}{where} after {ctx.retired} instructions"

    def _let_others_in(self) -> None:
        if self._wanting:
            without(self._lock, self._others_turn)

    def _others_turn(self) -> None:
        deadline = time.monotonic() + 0.05
        while self._wanting and time.monotonic() < deadline:
            time.sleep(0)

    def slice_so_far(self) -> tuple[Context, int, int] | None:
        """The slice that is going on: its context, its budget, instructions done of it."""
        if self._cut is not None or self._slicing is None:
            return self._cut
        ctx, budget, before = self._slicing
        return ctx, budget, ctx.retired - before

    def _after(self, ctx: Context, retired: int) -> None:
        """A slice has ended, `retired` instructions of which are not accounted for yet.  Ctrl-C may come at any place:
        `_take_up` does the rest."""
        commit([*self.scheduler.charging(ctx, retired), attribute(self, "_slicing", (ctx, 0, ctx.retired))])
        if ctx.status != PARKED:
            ctx.looked = None                          # others may come in between
        if ctx.trap is None and ctx.status in (READY, PARKED):
            self._slicing = None
            return
        if ctx.status == WAITING or ctx.trap is not None:
            self.recorder.stumbled(ctx)
        if ctx.trap is not None:
            ctx.status = TRAPPED
            self._first_trap = self._first_trap or ctx.trap
        if ctx.status in (DONE, TRAPPED, KILLED):
            before = 0 if ctx is self.main else ctx.retired
            self.scheduler.remove(ctx, [*self.locks.ending(ctx), attribute(self, "_slicing", None),
                                        attribute(self, "_retired_before", self._retired_before + before)])
        self._slicing = None
        if ctx is self.main and ctx.trap is not None:
            raise ctx.trap

    def _wait(self) -> None:
        """Every live context waits: sleep until the host provides something, or report the deadlock."""
        waiting = self.scheduler.waiting()
        external = any(c.waiting_for.external for c in waiting)
        if external or not self.recorder.exhausted:
            self.recorder.check_sleep(waiting)
        if not external:
            raise Deadlock(f"{self.image.name}: no context can go on: {describe_waits(waiting)}")
        without(self._lock, lambda: self._sleep(waiting))
        if self.stop_word.raised:
            self._stopped(waiting[0])

    def _sleep(self, waiting: list[Context]) -> None:
        with self.signal:
            if not self.stop_word.raised and not any(c.waiting_for.ready() for c in waiting):
                self.signal.wait(patience(c.waiting_for for c in waiting))
