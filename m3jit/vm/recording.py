"""The log of what came from outside: clocks, SENSE, random seeds of the host.  Replaying it repeats the run exactly."""
from __future__ import annotations

from typing import Any, Callable, NamedTuple

from m3jit.errors import UserError
from m3jit.vm.context import Context


class Event(NamedTuple):
    """One observation: by which context, after how many of its instructions, of what, and what it was."""
    context: int
    retired: int
    what: str
    value: Any


class Recorder:
    """Logs observations, or answers them from a log."""

    def __init__(self, record: bool = False, replay: list[Event] | None = None):
        self.log: list[Event] | None = [] if record else None
        self._replay = list(replay) if replay is not None else None
        self._next = 0

    def observe(self, ctx: Context, what: str, look: Callable[[], Any]) -> Any:
        if self._replay is not None:
            return self._from_log(ctx, what)
        value = look()
        if self.log is not None:
            self.log.append(Event(ctx.id, ctx.retired, what, value))
        return value

    def _from_log(self, ctx: Context, what: str) -> Any:
        if self._next >= len(self._replay):
            raise UserError(f"replay: the log has no {what} for context {ctx.id} after {ctx.retired} instructions; it "
                            f"ended before this run did (another program, or other inputs?)")
        event = self._replay[self._next]
        if event[:3] != (ctx.id, ctx.retired, what):
            raise UserError(f"replay: event {self._next} of the log is {event.what} of context {event.context} after "
                            f"{event.retired} instructions, but context {ctx.id} asks for {what} after {ctx.retired}: "
                            f"the log belongs to another program or version")
        self._next += 1
        return event.value
