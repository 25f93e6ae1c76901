"""The events of a run that is looked at: a record that can be wound back and goes on where it ends."""
from __future__ import annotations

from typing import Any, Iterable, NamedTuple

from m3jit.errors import brief
from m3jit.timetravel.steering import SINKS, TOKENS
from m3jit.vm.recording import Event, Output, Recorder
from m3jit.vm.streams import Item


class Call(NamedTuple):
    """What the host was asked for, among the outputs."""
    text: str
    form: str = ""

    def __str__(self) -> str:
        return self.text


FEW = 8                            # token ids that are shown one by one


def call_text(arguments: tuple, named: dict[str, Any]) -> str:
    """The arguments of a call in a few words."""
    def said(value: Any) -> str:
        if type(value) is tuple and len(value) > FEW and all(type(n) is int for n in value):
            return f"<{len(value)} tokens>"
        return brief(repr(value))
    return ", ".join([*map(said, arguments), *(f"{key}={said(value)}" for key, value in named.items())])


def heard(event: Event) -> Event:
    """An event, for somebody who looks on: calls of the host, and the text that they gave, are what it said."""
    if event.what == "call":
        _, name, arguments, named = event.value
        shown = f"{name}({call_text(arguments, named)})" if name not in ("next", "show") else ""
        return event._replace(what="said", value=Call(shown))
    if event.what == "gave":
        text = event.value[0] if type(event.value) is tuple and event.value else event.value
        item = Item("TEXT", text.encode("utf-8", "replace")) if type(text) is str and text else None
        return event._replace(what="said", value=Output.of("OUTPUT", item) if item is not None else Call(""))
    return event


class History:
    """Events in order and a place among them: a `Tape` and a `Log` at once.

    at: how many events are behind the machine; fresh: was the last one met for the first time?  steered: the host makes
    text of the program's tokens, which is what is of interest."""

    def __init__(self, events: Iterable[Event] = ()):
        self.events: list[Event] = list(events)
        self.at = self.seen = 0
        self.steered = False
        self.fresh = True

    @property
    def taken(self) -> int:
        return self.at

    def peek(self) -> Event | None:
        return self.events[self.at] if self.at < len(self.events) else None

    def take(self) -> None:
        self.fresh = self.at >= self.seen
        self.at += 1
        self.seen = max(self.seen, self.at)

    def append(self, event: Event) -> None:
        """What happened at the end of the history."""
        self.events.append(event)
        self.take()

    def outputs(self, since: int) -> list[Output | Call]:
        """What was written between an earlier place and this one, and what the host was asked for."""
        return [e.value for e in self.events[since:self.at] if e.what == "said" and str(e.value) or
                e.what == "output" and not (self.steered and e.value.sink in SINKS)]


class Watcher(Recorder):
    """The recorder of a machine that is looked at: what it does again is answered from the history and not written
    twice.

    live: behind the end of the history the outside is looked at."""

    def __init__(self, history: History, live: bool):
        super().__init__(record=history, replay=history, goes_on=live)
        self.on_output: Any = None                     # called after every item that leaves the machine

    @property
    def echo(self) -> bool:                            # type: ignore[override]
        return self.tape.fresh

    @echo.setter
    def echo(self, value: bool) -> None:
        """What is written follows from the history alone."""

    def leave(self, ctx: Any, sink: str, item: Any, write: Any) -> None:
        super().leave(ctx, sink, item, write)
        if self.on_output is not None and not (self.tape.steered and sink in SINKS and sink != TOKENS):
            self.on_output(ctx)
