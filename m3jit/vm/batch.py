"""`Batch`: machines that run together, so that one pass over the weights serves all that are at the same place.

A round (`step`) brings every machine to its next compiled region, to a wait or to its end, one after another, and then
enters the regions: machines at the same region enter it as one.  Each machine's results are the bytes it gives alone,
whoever runs beside it.  A machine that waits for input is not waited for, and a machine alone enters at once.

Machines join and leave between rounds.  In a round a machine retires at most `ROUND` instructions outside of regions
and enters at most one region.  Entries that append few rows to key/value streams (a token) go first, then longer ones
(a chunk of a prompt), those that have waited longest before the others, until the round has `rows` rows: so many
prompts at once hold up generating machines by that much work and no more, and a prompt waits a bounded number of
rounds.  When one of those that entered together is interrupted or stopped, the region is given up for all (nobody's
work is dropped so twice in a row): the others enter it again in the next round.  Machines with several contexts,
profiled and checked ones take part too, but enter their regions alone.
"""
from __future__ import annotations

import threading
import time
from operator import methodcaller
from typing import Any, Callable

from m3jit.errors import Deadlock, UserError
from m3jit.vm.commit import attribute, commit
from m3jit.vm.context import PARKED, READY, Context
from m3jit.vm.entering import take
from m3jit.vm.native_batch import batched, can_batch
from m3jit.vm.scheduler import describe_waits
from m3jit.vm.stopping import TIMED_OUT, interruptible
from m3jit.vm.vm import VM

ROUND = 20_000                     # instructions a machine may retire in a round outside of shared regions
ROWS = 256                         # rows of all entries of a round: four chunks of prompts, say


class Member:
    """A machine of a batch.  `ended`: it has finished, failed or was cancelled; `error`: what ended it, or None."""

    def __init__(self, vm: VM, on_end: Callable[["Member"], Any] | None):
        self.vm, self.on_end = vm, on_end
        self.at: Context | None = None                  # the context that stands at a region
        self.waited = 0                                 # rounds it was put off
        self.dropped = False                            # what it computed last was dropped for another's sake
        self.ended = False
        self.error: BaseException | None = None
        self.deadline = None if vm.timeout is None else time.monotonic() + vm.timeout

    def cancel(self) -> None:
        """End this machine at its next poll point (`error` is then `Interrupted`); from any thread."""
        self.vm.stop()

    def advance(self) -> bool:
        """Run to a region that can be shared, a wait, the end, or `ROUND` instructions; whether anything ran."""
        vm, ran, left = self.vm, False, ROUND
        if self.at is not None:                         # Ctrl-C came in the round before
            self.put_off()
        if self.deadline is not None and time.monotonic() > self.deadline:
            vm.stop_word.set(TIMED_OUT)
        while left > 0:
            turn = vm._turn()
            if turn is None:
                break
            ctx, budget, done = turn
            ran, before = True, ctx.retired
            ctx.parks = len(vm.scheduler.contexts) == 1
            vm._slice(ctx, min(budget, done + left), done)
            left -= max(1, ctx.retired - before)
            if ctx.status == PARKED:
                self.at = ctx
                if ctx.parks:                           # the only one
                    return True
        waiting = vm.scheduler.waiting()
        if waiting and len(waiting) == len(vm.scheduler.contexts):
            if vm.stop_word.raised:
                vm._stopped(waiting[0])
            ready = any(c.waiting_for.ready() for c in waiting)
            if not ready:
                vm.recorder.check_sleep(waiting)
            if not ready and not any(c.waiting_for.external for c in waiting):
                raise Deadlock(f"{vm.image.name}: no context can go on: {describe_waits(waiting)}")
        return ran

    def put_off(self) -> None:
        """Do not enter in this round."""
        self.at.parked, self.at.status, self.at = None, READY, None
        self.waited += 1

    def enter_alone(self) -> None:
        """Run the region a context stands at, as the machine alone would."""
        self.leave(*self.at.parked.run())

    def leave(self, info: Any, retired: int) -> None:
        """Go on behind the region, which was left by exit `info` (None: it gave up, nothing was done)."""
        vm, ctx, entry = self.vm, self.at, self.at.parked.region.region.function.entry_pc
        self.at, ctx.parked, ctx.status, self.waited, self.dropped = None, None, READY, 0, False
        if retired:
            ctx.heard = frozenset()
        if info is not None and not (info.pc == entry and retired == 0):
            vm._after(ctx, retired)
        elif not vm.stop_word.raised:                   # the first instruction itself is the interpreter's
            before = ctx.retired
            vm.interpreter.run_exactly(ctx, 1)
            vm._after(ctx, ctx.retired - before)

    def finish(self) -> None:
        """Every context has ended: complete the files."""
        if self.vm._first_trap is not None:
            raise self.vm._first_trap
        self.vm.close(complete=True)

    def fail(self, error: BaseException) -> None:
        self.error = error                              # first: Ctrl-C may come out of the call
        self.vm._fail(error)


class Batch:
    """Machines that run together.  `add` and `cancel` may be called from any thread, `step` and `run` from one at a
    time.  rows: about how many rows (tokens of all machines) a round may compute.

    >>> batch = Batch(); batch.add(vm_1); batch.add(vm_2); batch.run()
    """

    def __init__(self, rows: int = ROWS) -> None:
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise UserError(f"rows={rows!r}; a number of rows from 1, the work of one round")
        self.rows = rows
        self._members: list[Member] = []
        self._lock = threading.Lock()                   # of the list
        self._stepping = threading.Lock()
        self._news = threading.Event()                  # somebody joined, or a waiting machine may go on
        self.rounds = self.entries = self.shared_entries = self.launches = self.joined = 0

    @property
    def members(self) -> list[Member]:
        """The machines that have not ended."""
        with self._lock:
            return list(self._members)

    def add(self, vm: VM, on_end: Callable[[Member], Any] | None = None) -> Member:
        """Let a machine take part from the next round on.  on_end(member) is called by `step` when it has ended; what
        it raises leaves `step`.

        UserError: it has ended already, or is in a batch."""
        if vm.finished:
            raise UserError(f"{vm.image.name}: has ended already; a batch runs machines that have not")
        with self._lock:
            if vm.batch is not None:
                raise UserError(f"{vm.image.name}: is in a batch already; a machine is added once")
            member = Member(vm, on_end)
            commit([attribute(vm, "batch", self), attribute(self, "_members", [*self._members, member]),
                    attribute(vm.signal, "listeners", [*vm.signal.listeners, self._news.set])])
        self._news.set()
        return member

    def step(self) -> bool:
        """One round; False when no machine could go on (all wait for input, or there is none).

        A machine's error ends that machine alone: it is kept in `Member.error`."""
        with self._stepping, interruptible(self):
            self._news.clear()
            members, parked, locks, ran = self.members, [], [], False
            releasing = map(methodcaller("release"), locks)      # it looks at the list only then
            try:                                       # with locks: nobody changes what a region was chosen by
                try:
                    for m in members:
                        ran |= self._guarded(m, self._advance, m, parked, locks)
                    self._enter(self._chosen(parked))
                finally:                                # interrupted: nobody stays at a region without its lock
                    for m in parked:
                        if m.at is not None and not m.ended:
                            m.put_off()
            finally:
                any(releasing)                          # all of them in one call into C
            self.rounds += ran
            return ran

    def run(self) -> None:
        """Rounds until every machine has ended.  Errors stay in `Member.error`."""
        while self.members:
            if not self.step():
                self.wait()

    def wait(self, seconds: float | None = None) -> None:
        """Sleep until a machine joins or a waiting one may go on, or its time is up."""
        now = time.monotonic()
        ends = [m.deadline - now for m in self.members if m.deadline is not None]
        ends += [c.waiting_for.until - now for m in self.members for c in m.vm.scheduler.waiting()
                 if c.waiting_for.until is not None]
        limits = [max(0.0, t) for t in [*ends, *([] if seconds is None else [seconds])]]
        self._news.wait(min(limits, default=0.25))

    def heard(self, number: int) -> None:
        """A signal came (m3jit.vm.stopping): whoever is in compiled code comes out of it."""
        for m in self.members:
            m.vm.stop_word.heard(number)

    @property
    def stats(self) -> dict[str, int]:
        """Counters: rounds; region entries of machines, and those of them made together with others; of these the
        kernel launches made, and the launches saved because another machine's did their work too."""
        return {"rounds": self.rounds, "entries": self.entries, "shared_entries": self.shared_entries,
                "launches": self.launches, "joined_launches": self.joined}

    # -- a round ----------------------------------------------------------------------------------------------------
    def _advance(self, m: Member, parked: list[Member], locks: list[Any]) -> bool:
        if m.error is not None:                         # Ctrl-C came as it failed
            raise m.error
        ran = m.advance()
        if m.vm.finished:
            m.finish()
            self._remove(m)
        elif m.at is not None:
            take(m.vm._lock, locks)
            parked.append(m)
        return ran

    def _chosen(self, parked: list[Member]) -> list[Member]:
        """Who enters in this round, in the order of `add`; the others are put off."""
        sizes = {m: m.at.parked.region.rows(m.at.parked.syms) for m in parked}
        if sum(sizes.values()) <= self.rows:
            return parked
        left, first = self.rows, True
        for m in sorted(parked, key=lambda m: (sizes[m] > 1, -m.waited)):      # sorted keeps the order of equals
            if first or sizes[m] == 1 or sizes[m] <= left:
                left -= sizes[m]
            else:
                m.put_off()
            first = first and sizes[m] == 1                                    # one of the long ones always goes on
        return [m for m in parked if m.at is not None]

    def _enter(self, parked: list[Member]) -> None:
        """Enter the regions that machines stand at, those at the same one together."""
        groups: dict[Any, list[Member]] = {}
        for m in parked:
            groups.setdefault(m.at.parked.region, []).append(m)
        self.entries += len(parked)
        for region, members in groups.items():
            if len(members) > 1 and can_batch(region) and self._enter_together(region, members):
                continue
            for m in members:
                self._guarded(m, m.enter_alone)

    def _enter_together(self, region: Any, members: list[Member]) -> bool:
        """False when there is no room for it; nothing was done then."""
        together = batched(region)
        began, before = time.perf_counter(), (together.items, together.joined)
        try:                                            # nobody's work is dropped twice in a row
            left = together.run([m.at.parked for m in members], whole=any(m.dropped for m in members))
        except MemoryError:
            return False
        except BaseException as error:                  # Ctrl-C in between: some were left, others not
            for m in members:
                m.at = None
                m.fail(error)
                self._remove(m)
            if not isinstance(error, Exception):
                raise
            return True
        share = (time.perf_counter() - began) / len(members)
        self.shared_entries += len(members)
        self.launches += together.items - before[0]
        self.joined += together.joined - before[1]
        for m, (info, retired) in zip(members, left):
            m.vm.seconds += share
            if info is None and not m.vm.stop_word.raised:
                m.dropped = True
                m.put_off()
                continue
            m.at.parked.jit.left(region, info, retired)
            self._guarded(m, m.leave, info, retired)
        return True

    def _guarded(self, m: Member, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do it under the machine's lock; an error ends the machine."""
        with m.vm._lock:
            began = time.perf_counter()
            try:
                return work(*arguments)
            except BaseException as error:
                if m.ended:                             # not the machine's: `on_end` raised it
                    raise
                m.fail(error)
                if not isinstance(error, Exception):
                    self._remove(m)
                    raise
            finally:
                m.vm.seconds += time.perf_counter() - began
        self._remove(m)
        return True

    def _remove(self, m: Member) -> None:
        with self._lock:
            listeners = [tell for tell in m.vm.signal.listeners if tell != self._news.set]
            commit([attribute(self, "_members", [other for other in self._members if other is not m]),
                    attribute(m.vm, "batch", None), attribute(m.vm.signal, "listeners", listeners),
                    attribute(m, "ended", True)])
        if m.on_end is not None:
            m.on_end(m)
