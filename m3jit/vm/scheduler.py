"""Which context runs next: priority, then deadline in virtual time, then age.

Virtual time is counted in retired instructions, so the order is a function of the program alone.  A context's virtual
deadline is its virtual time plus one quantum; one that becomes ready starts no earlier than the others are.  A context
keeps its turn until it has used a quantum, yields, waits or ends, or a more urgent one is ready.
"""
from __future__ import annotations

from typing import Callable, Iterable

from m3jit.vm.commit import Store, attribute, commit
from m3jit.vm.context import READY, WAITING, Context

QUANTUM = 10_000                   # instructions of a slice while several contexts are ready
UNLIMITED = 1 << 62


class Scheduler:
    """Holds the live contexts of a machine in the order of their ids."""

    def __init__(self) -> None:
        self.contexts: dict[int, Context] = {}
        self._order = 0
        self._current: Context | None = None           # whose turn it is
        self._used = 0                                 # instructions of the turn since it has competitors
        self._alone = True
        self.turns = 0                                 # how often a turn went to somebody
        self.woken: Callable[[Context], None] | None = None      # told when a wait for the host ends

    def add(self, ctx: Context, virtual_time: int = 0) -> None:
        """A new context; it competes from `virtual_time` on."""
        commit(self.adding(ctx, virtual_time))

    def adding(self, ctx: Context, virtual_time: int) -> list[Store]:
        """The stores (m3jit.vm.commit) of `add`."""
        order = self._order + 1
        return [attribute(self, "contexts", {**self.contexts, ctx.id: ctx}), attribute(self, "_order", order),
                attribute(ctx, "virtual_time", virtual_time), attribute(ctx, "order", order),
                attribute(ctx, "virtual_deadline", virtual_time + QUANTUM)]

    def remove(self, ctx: Context, more: Iterable[Store] = ()) -> None:
        """It is no longer one of them; more: what is stored with that."""
        # what it got ahead leads back to it, and what its registers name would live on
        commit([self.removing(ctx), attribute(ctx, "ahead", None), *more])

    def removing(self, ctx: Context) -> Store:
        """The store of `remove`."""
        return attribute(self, "contexts", {k: c for k, c in self.contexts.items() if c is not ctx})

    def enqueue(self, ctx: Context) -> None:
        """(Re)start the context's claim: its deadline is one quantum from its virtual time."""
        self._order += 1
        ctx.order = self._order
        ctx.virtual_deadline = ctx.virtual_time + QUANTUM

    def charging(self, ctx: Context, retired: int) -> list[Store]:
        """The stores (m3jit.vm.commit) that account for a slice."""
        now, order = ctx.virtual_time + retired, self._order + 1
        return [attribute(self, "_used", self._used + retired), attribute(self, "_order", order),
                attribute(ctx, "order", order), attribute(ctx, "virtual_time", now),
                attribute(ctx, "virtual_deadline", now + QUANTUM)]         # as `enqueue`

    def yielding(self, ctx: Context) -> list[Store]:
        """The stores (m3jit.vm.commit) that let every ready context of the same priority go first."""
        peers = [c.virtual_time for c in self._going() if c.urgency == ctx.urgency]
        now, order = max(peers, default=ctx.virtual_time), self._order + 1
        return [attribute(self, "_current", None), attribute(self, "_order", order), attribute(ctx, "order", order),
                attribute(ctx, "virtual_time", now), attribute(ctx, "virtual_deadline", now + QUANTUM)]

    def ready(self) -> list[Context]:
        """Contexts that can run, waking those whose wait is over."""
        for ctx in self.contexts.values():
            if ctx.status == WAITING and ctx.waiting_for.ready():
                self.wake(ctx)
        return [c for c in self.contexts.values() if c.status == READY]

    def wake(self, ctx: Context) -> None:
        """End a wait; the context gets no credit for the time it slept."""
        if self.woken is not None and ctx.waiting_for.external:
            self.woken(ctx)
        stores = [*self.resuming(ctx), attribute(ctx, "quiet_until", 0)]
        if self._current is ctx:                       # whether everybody slept meanwhile makes no difference
            stores.append(attribute(self, "_current", None))
        commit(stores)

    def resuming(self, ctx: Context) -> list[Store]:
        """The stores (m3jit.vm.commit) that end a wait."""
        others = [c.virtual_time for c in self.contexts.values() if c.status == READY and c is not ctx]
        now, order = max(ctx.virtual_time, min(others, default=0)), self._order + 1
        return [attribute(ctx, "status", READY), attribute(ctx, "waiting_for", None),
                attribute(ctx, "virtual_time", now), attribute(self, "_order", order), attribute(ctx, "order", order),
                attribute(ctx, "virtual_deadline", now + QUANTUM)]

    def pick(self) -> tuple[Context | None, int]:
        """(the context to run, instructions of its slice); None when none is ready."""
        if self._current is not None and self._alone and len(self.contexts) == 1 and self._current.status == READY and \
                self._current.id in self.contexts:
            return self._current, UNLIMITED            # as the last time
        ready = self.ready()
        if not ready:
            self._current = None
            return None, 0
        if len(ready) == 1:
            self.turns += self._current is not ready[0]
            self._current, self._alone = ready[0], True
            return ready[0], UNLIMITED
        if self._alone:
            self._alone, self._used = False, 0
        current = self._current
        if current is None or current.status != READY or self._used >= QUANTUM or \
                current.id not in self.contexts or any(c.urgency > current.urgency for c in ready):
            current, self._used = min(ready, key=_urgency), 0
            self._current = current
            self.turns += 1
        return current, QUANTUM - self._used

    def waiting(self) -> list[Context]:
        return [c for c in self.contexts.values() if c.status == WAITING]

    def more_urgent_than(self, ctx: Context) -> bool:
        """Is a context of higher priority ready?"""
        return any(c.urgency > ctx.urgency for c in self._going() if c is not ctx)

    def _going(self) -> list[Context]:
        """Those that can run, as of the last turn: a running instruction ends nobody's wait."""
        return [c for c in self.contexts.values() if c.status == READY]


def _urgency(ctx: Context) -> tuple[int, int, int]:
    return -ctx.urgency, ctx.virtual_deadline, ctx.order


def describe_waits(contexts: Iterable[Context]) -> str:
    """Who waits for what, for a deadlock message."""
    return "; ".join(f"context {c.id} waits for {c.waiting_for.what}" for c in contexts)
