"""Going forward and backward through a run.

Time is the number of instructions that all contexts have completed.  Now and then the whole machine is put aside
(`MachineState`, O(registers)); going back means putting the nearest one before back and running from there, with what
came from outside answered from the history.  So every time is reached exactly, as often as one likes.

The checkpoints lie over the whole run: when there are too many, every other one is dropped and the distance between new
ones doubles, so going back costs at most a fixed part of the run.  Near where one is there are more.
"""
from __future__ import annotations

import bisect
import threading
from typing import Any, Callable

from m3jit.errors import Divergence, InternalError, M3Error, UserError
from m3jit.timetravel.history import History, Watcher
from m3jit.timetravel.hosting import Host
from m3jit.timetravel.machine_state import MachineState
from m3jit.vm.context import READY, Context
from m3jit.vm.stopping import ATTENTION, INTERRUPT, interruptible

KEPT = 64                          # checkpoints over the run
FIRST_DISTANCE = 1000              # instructions between them, at first
NEAR, NEAR_KEPT = 16, 256          # the same, just before where one is


class Paused(Exception):
    """Somebody asked for a pause (`Engine.pause`): what was going on ended where the machine stands now."""


class Engine:
    """A machine and its history.  `vm` must be made with `watcher` and stand before its first instruction.

    host: does again what the recorded host did between two instructions (None: it did nothing), as soon as the machine
    stands there.
    ended: what ended the run, once the machine has come there; None while it can go on."""

    def __init__(self, vm: Any, watcher: Watcher, host: Host | None = None):
        self.vm, self.watcher, self.host = vm, watcher, host
        self.history: History = watcher.tape
        self.ended: BaseException | str | None = None
        self.distance = FIRST_DISTANCE
        self._pause = self._searching = False
        self._asked = threading.Event()                # for a pause, from outside
        self._kept: list[tuple[int, int, MachineState]] = []         # (time, place in the history, state), ascending
        self._near: list[tuple[int, int, MachineState]] = []
        self._stop_pcs: frozenset[int] = frozenset()
        watcher.on_output = self._after_output
        self._pause_at_output = False
        self._keep(self._kept)
        self._do_as_host()

    # -- where we are -----------------------------------------------------------------------------------------------
    @property
    def time(self) -> int:
        """Instructions of all contexts so far."""
        return self.vm.retired

    @property
    def upcoming(self) -> Context | None:
        """The context whose instruction is next; None when none can go on."""
        vm, scheduler = self.vm, self.vm.scheduler
        if self.ended is not None:
            return None
        if vm._cut is not None and vm._cut[0].status == READY:
            return vm._cut[0]
        ready = [c for c in scheduler.contexts.values() if c.status == READY]
        current = scheduler._current
        if current in ready and not any(c.priority > current.priority for c in ready):
            return current
        return min(ready, key=lambda c: (-c.priority, c.virtual_deadline, c.order), default=None)

    @property
    def contexts(self) -> list[Context]:
        """The main context and all that live."""
        return list({self.vm.main.id: self.vm.main, **self.vm.scheduler.contexts}.values())

    # -- going ------------------------------------------------------------------------------------------------------
    def go(self, time: int) -> None:
        """To a time: forward at full speed, or back.  Stops earlier where the run ends."""
        time = max(time, 0)
        if time < self.time or time == self.time and self.ended is not None:
            self._back_to(time)
        if self.time < time and self.ended is None:
            self._run(time)

    def pause(self) -> None:
        """End whatever goes on, and what is begun until `resume`, with `Paused`; from any thread."""
        self._asked.set()
        self.vm.pausing = True
        self.vm.stop_word.set(INTERRUPT)               # in this order: a slice lowers the word, then looks at `pausing`
        self.vm._wake()

    def resume(self) -> None:
        """Going on is allowed again."""
        self._asked.clear()

    def run(self, end: int | None = None) -> bool:
        """Forward to the end of the run, or to a time; False."""
        return self._run(end)

    def step(self, count: int = 1) -> int:
        """`count` instructions forward; how many there were."""
        before = self.time
        self.go(before + count)
        if self.time == before and self.ended is None and count:
            self._run(before + 1)
        return self.time - before

    def back(self, count: int = 1) -> int:
        """`count` instructions back (from a trap: first to the instruction that trapped); how many there were."""
        before = self.time
        if self.ended is not None and isinstance(self.ended, BaseException):
            count -= 1                                 # what ended the run is a step of its own
        self.go(max(before - count, 0))
        return before - self.time

    def to_output(self, end: int | None = None) -> bool:
        """Forward until something has been written; False when the run ends, or `end` comes, before."""
        self._pause_at_output = True
        try:
            return self._run(end)
        finally:
            self._pause_at_output = False

    def run_to(self, pcs: frozenset[int], end: int | None = None) -> bool:
        """Forward until the next instruction is one of these, at full speed; False when there is none before the end.

        The instruction one stands at does not count."""
        self._set_stops(pcs)
        self._passing = (self.time, self.upcoming)
        try:
            return self._run(end)
        finally:
            self._set_stops(frozenset())

    def run_while(self, test: Callable[[], bool], end: int | None = None) -> bool:
        """Forward, one instruction after the other, until `test` is true after one; False when the run ends before."""
        while self.ended is None and (end is None or self.time < end):
            if not self.step():
                break
            if test():
                return True
        return False

    def last_before(self, forward: Callable[[int], bool], stands: Callable[[], bool] = lambda: False,
                    begin: Callable[[], None] = lambda: None, count: int = 1) -> bool:
        """Back to the last place before this one where `forward` stops, or to the `count`-th such place before; False
        when there are fewer: to the beginning then.

        The way back is run once, from one checkpoint to another at a time, and the places are counted; so many of them
        cost about what one of them costs that is as far away.  Each piece has twice the checkpoints of the one before:
        at its ends it is interpreted, in between it goes at full speed.  Places at the same time are one.
        forward(end): goes forward, True when it stopped at a place before `end`, or behind an instruction at it.
        stands: is the place where the machine stands one?  begin: called where going forward begins."""
        self._searching = True
        try:
            return self._last_before(forward, stands, begin, count)
        finally:
            self._searching = False

    def _last_before(self, forward: Callable[[int], bool], stands: Callable[[], bool], begin: Callable[[], None],
                     count: int) -> bool:
        unseen = end = self.time                       # places from `unseen` on are counted
        starts, piece = [t for t, _, _ in self._kept if t < end], 1
        while starts:
            start = starts[-min(piece, len(starts))]
            del starts[-piece:]
            self._back_to(start)
            begin()
            stops, places = 0, {start: 0} if stands() else {}      # how many stops from the start on each place is
            while self.ended is None and self.time < end and forward(end):
                stops += 1
                if self.time < unseen:
                    places[self.time] = stops
            if len(places) >= count:
                self._back_to(start)
                begin()
                for _ in range(sorted(places.values())[-count]):
                    forward(end)
                return True
            count, unseen, end = count - len(places), min(places, default=unseen), start
            piece *= 2
        self.go(0)
        return False

    # -- inside -----------------------------------------------------------------------------------------------------
    def _run(self, until: int | None) -> bool:
        """Forward to a time (None: the end), or until something pauses the run: True then.

        `Paused`: somebody outside asked for that."""
        vm = self.vm
        self._pause = False
        self._check_pause()
        while self.ended is None and (until is None or self.time < until):
            look = max((self._kept[-1][0] if self._kept else 0), self.time) + self.distance
            vm.horizon, vm.look_at = min(until, self.time + NEAR) if self._is_near(until) else until, look
            target = min(look, vm.horizon) if vm.horizon is not None else look
            try:
                with vm._entered(), interruptible(vm.stop_word):
                    vm._loop(lambda: self._pause or self._asked.is_set() or vm.retired >= target or
                             self._host_is_due())
                    if vm.finished:
                        self._end("the program has ended")
            except (Divergence, InternalError):
                raise
            except M3Error as error:
                self._end(error)
            except KeyboardInterrupt:                  # in the middle of anything: the state put aside last is whole
                self._back_to(self.time)
                raise
            finally:
                vm.horizon = vm.look_at = None
            self._do_as_host()
            if self.ended is None:
                self._check_pause()
            if self.ended is None:
                self._keep_here(until)
            if self._pause:
                return True
        return False

    def _host_is_due(self) -> bool:
        """Is the next event something that the host did here?"""
        event = self.history.peek()
        return event is not None and event.what == "host" and event.retired == self.vm.main.retired

    def _do_as_host(self) -> None:
        """What the recorded host did, and said, where the machine stands."""
        while self.host is not None and self.ended is None and (event := self.history.peek()) is not None and \
                event.what in ("host", "said") and event.retired == self.vm.main.retired:
            self.history.take()
            if event.what == "host":
                self.host.apply(event.value)

    def _check_pause(self) -> None:
        if self._asked.is_set():
            raise Paused

    def _end(self, why: BaseException | str) -> None:
        self.ended = why

    def _keep_here(self, until: int | None) -> None:
        if self._searching:                            # the checkpoints that it goes along stay as they are
            return
        if self.time >= (self._kept[-1][0] if self._kept else 0) + self.distance:
            self._keep(self._kept)
            if len(self._kept) > KEPT:
                self._kept[1:] = self._kept[2::2]
                self.distance *= 2
        elif self._is_near(until):
            self._keep(self._near)
            if len(self._near) > NEAR_KEPT:
                del self._near[0]

    def _is_near(self, until: int | None) -> bool:
        """Is the way so short that it is interpreted anyway?  Not that of a search, which passes many such ends."""
        return until is not None and not self._searching and \
            until - self.time <= min(NEAR_KEPT * NEAR, len(self.vm.image.instructions))

    def _keep(self, where: list) -> None:
        times = [t for t, _, _ in where]
        at = bisect.bisect_left(times, self.time)
        if at == len(times) or times[at] != self.time:
            where.insert(at, (self.time, self.history.at, MachineState(self.vm)))

    def _back_to(self, time: int) -> None:
        """Put the newest state at or before a time back."""
        best = None
        for found in (self._kept, self._near):
            at = bisect.bisect_right([t for t, _, _ in found], time) - 1
            if at >= 0 and (best is None or found[at][0] > best[0]):
                best = found[at]
        if best is None:
            raise InternalError("there is no state to go back to")
        with self.vm._entered():
            best[2].restore(self.vm)
        self.history.at = best[1]
        self.ended = None
        self._do_as_host()

    def _after_output(self, ctx: Context) -> None:
        if self._pause_at_output:
            self._hold(ctx)

    def _hold(self, ctx: Context) -> None:
        """Come out of the run behind this instruction (or before it, where it has not been executed)."""
        self._pause = self.vm.pausing = True
        self.vm.stop_word.set(ATTENTION)

    # -- places to stop at ------------------------------------------------------------------------------------------
    def _set_stops(self, pcs: frozenset[int]) -> None:
        """From now on the run pauses in front of these instructions; compiled code ends there."""
        if pcs == self._stop_pcs:
            return
        interpreter, regions = self.vm.interpreter, self.vm.regions
        interpreter.stop_in_front((), self._arrived)
        if regions is not None:
            regions.leave_at(pcs)
        interpreter.stop_in_front([self.vm.image.index_of[pc] for pc in pcs], self._arrived)
        self._stop_pcs = pcs

    def _arrived(self, ctx: Context) -> bool:
        """The machine stands in front of such an instruction: does it pause?"""
        if self._passing == (self.vm.retired, ctx):
            return False
        self._hold(ctx)
        return True


def check_time(text: str) -> int:
    """A time that someone typed.  UserError: no number from 0."""
    try:
        number = int(text.removeprefix("@").replace(",", "").replace("_", ""))
    except ValueError:
        number = -1
    if number < 0:
        raise UserError(f"{text!r} is no time; a number of instructions from 0 is")
    return number
