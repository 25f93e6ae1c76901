"""What a run got from outside and what left it: recorded, answered from a record, verified against one.

Everything a run depends on is a function of its program but for what `observe` sees: clocks, SENSE, interrupts.  With
several contexts it also depends on when a wait for the outside ended, which is noted as the number of instructions all
contexts had completed by then.  So a run repeats exactly, on any backend, when these events are answered from a record.

An event belongs to a context and the number of instructions that context had completed:

    clock time sense interrupt ..   what an instruction saw (`value`; `Raised`: it failed)
    output                          what STREAM handed to a sink (`Output`)
    said                            what the host made of the items before, and wrote (`Output`)
    host                            what the host did to the machine here (m3jit.timetravel.hosting)
    call gave                       what the host was asked for, and what came of it (m3jit.api.recorded)
    failed                          a sink refused an item (`Raised`)
    block                           the context began to wait for the outside (what it waits for)
    wake                            the wait ended: (instructions of all contexts by then, how many others were begun
                                    and not completed, because they waited or trapped, turns that were given)
    digest                          the context's version (m3jit.vm.digest) in front of this output
"""
from __future__ import annotations

from functools import partial
from operator import call
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Protocol

from m3jit.errors import Deadlock, Divergence, Interrupted, LimitError, OperandError, SinkClosed, StreamError, \
    UnsupportedError, UserError, brief
from m3jit.isa.types import Tensor
from m3jit.vm.context import WAITING, Context
from m3jit.vm.scheduler import describe_waits
from m3jit.vm.stopping import ATTENTION
from m3jit.vm.waiting import Blocked, Wait

HEAD = 48                          # bytes of an item that an event keeps as they are
_ENDS_THE_RUN = (SinkClosed, LimitError, Interrupted, Deadlock, UnsupportedError, Divergence)


class Event(NamedTuple):
    """One observation: by which context, after how many of its instructions, of what, and what it was."""
    context: int
    retired: int
    what: str
    value: Any


class Raised(NamedTuple):
    """An observation that failed: the class of the error and its message."""
    kind: str
    message: str

    def error(self) -> UserError:
        """The error again."""
        return StreamError(self.message) if self.kind == "StreamError" else OperandError(self.message)


class Output(NamedTuple):
    """An item that left the machine.  digest: of form, rate and all bytes; head: its first bytes (none of a tensor)."""
    sink: str
    form: str
    size: int
    digest: int
    head: bytes

    @classmethod
    def of(cls, sink: str, item: Any) -> "Output":
        """An item (`streams.Item`) for a sink."""
        import xxhash
        data = item.data
        if item.form in ("TEXT", "RAW"):
            label, raw = "", bytes(data)
        elif isinstance(data, Tensor):
            label, raw = f"{data.dtype.name}{list(data.shape)}", data.tobytes()
        else:
            label, raw = f"{data.dtype}{list(data.shape)}", data.tobytes()
        digest = xxhash.xxh3_64_intdigest(f"{item.form} {item.rate} {label}\n".encode() + raw)
        return cls(sink, item.form, len(raw), digest, raw[:HEAD] if item.form in ("TEXT", "RAW") else b"")

    def __str__(self) -> str:
        if self.form not in ("TEXT", "RAW"):
            return f"{self.size} bytes {self.form} to {self.sink} ({self.digest:016x})"
        shown = repr(self.head.decode("utf-8", "replace")) if self.form == "TEXT" else self.head.hex(" ")
        rest = self.size - len(self.head)
        more = f" and {rest} more bytes ({self.digest:016x})" if rest > 0 else ""
        return f"{brief(shown)}{more} to {self.sink}"


class RecordEnds(Interrupted):
    """A replay has done all that its log holds."""
    exit_code = 1


class Log(Protocol):
    """Where events go: a list, or a file being written."""
    def append(self, event: Event) -> Any: ...


class Tape:
    """Events in order, one at a time.  `taken`: how many are behind."""

    def __init__(self, events: Iterable[Event]):
        self._events: Iterator[Event] = iter(events)
        self._next: Event | None = next(self._events, None)
        self.taken = 0

    def peek(self) -> Event | None:
        return self._next

    def take(self) -> None:
        self._next = next(self._events, None)
        self.taken += 1


class Recorder:
    """Logs events, or answers observations from a tape and compares outputs with it.

    record: keep a log in memory (a `Log`: there).  replay: events to answer from; behind their end the run is an error,
    unless `goes_on`: then it looks at the outside again (and logs).  echo: what is verified is also written."""

    def __init__(self, record: bool | Log = False, replay: Iterable[Event] | Tape | None = None, goes_on: bool = False,
                 echo: bool = True):
        self.log: Any = [] if record is True else record if record is not False else None
        self.tape: Any = replay if replay is None or hasattr(replay, "peek") else Tape(replay)
        self.goes_on, self.echo = goes_on, echo
        self.idle = self.log is None and self.tape is None
        self.waits = 0                                 # instructions so far that were begun and not completed
        self._stumbled: Any = None                     # the wait or trap of the newest of them
        self._over: Any = None                         # the wait that ended last
        self._append: Callable[[Event], Any] = self.log.append if self.log is not None else lambda event: None
        self.end: int | None = None                    # instructions of all contexts after which the recorded run ended
        self.ended_by_itself = False                   # .. and whether nothing from outside did it
        self.wants_digest: Callable[[], bool] | None = None     # recording: asked before each output
        self.digest: Callable[[Context], str] | None = None
        self.verified = 0                              # outputs and digests that agreed
        self.derives = False                           # replaying: the host makes of items again what it made of them
        self._held: list[Event] | None = None          # said while an item leaves, whose event comes first
        self.vm: Any = None

    def attach(self, vm: Any) -> None:
        """The machine whose events these are."""
        self.vm = vm

    @property
    def replaying(self) -> bool:
        """Does the tape answer the next observation?"""
        return self.tape is not None and (self.tape.peek() is not None or not self.goes_on)

    # -- what comes in ----------------------------------------------------------------------------------------------
    def observe(self, ctx: Context, what: str, look: Callable[[], Any]) -> Any:
        """What `look` sees, through the record."""
        if self.idle:
            return look()
        if self.replaying:
            return self._answer(ctx, what)
        try:
            value = look()
        except _ENDS_THE_RUN:
            raise
        except UserError as e:
            self._note(ctx, what, Raised(type(e).__name__, getattr(e, "message", str(e))))
            raise
        self._note(ctx, what, value)
        return value

    def glimpse(self, ctx: Context, what: str, seen: bool) -> bool:
        """Is there what may come at any time, as `seen` says?  Only that it was there is part of the record."""
        if not self.replaying:
            if seen:
                self._note(ctx, what, True)
            return seen
        event = self.tape.peek()
        if event is None or event[:3] != (ctx.id, ctx.retired, what):
            return False
        return self._answer(ctx, what)

    def _answer(self, ctx: Context, what: str) -> Any:
        event = self._expected(ctx, what)
        self._taken(ctx)
        if isinstance(event.value, Raised):
            raise event.value.error()
        return event.value

    def _expected(self, ctx: Context, what: str) -> Event:
        """The next event of the tape, which must be this one.  `Blocked` where the context waited here."""
        event = self.tape.peek()
        if event is None and not self.ended_by_itself and self.end is not None and self.vm.retired >= self.end:
            raise self.ended("the recorded run was ended in the middle of an instruction")
        if event is None:
            raise self._diverged(ctx, f"asks for {what}, but the log has nothing more: it ended before this run did "
                                      f"(another program, or other inputs?)")
        if event.context == ctx.id and event.retired == ctx.retired and event.what == "block":
            raise Blocked(Wait(lambda: self._due(ctx), event.value, True))
        if event[:3] != (ctx.id, ctx.retired, what):
            raise self._diverged(ctx, f"comes to {what}, but event {self.tape.taken} of the log is {event.what} of "
                                      f"context {event.context} after {event.retired} instructions: the log belongs to "
                                      f"another program, version or input")
        return event

    def _diverged(self, ctx: Context, what: str) -> Divergence:
        line = self.vm.image.line(self.vm.image.pcs[ctx.index]) if self.vm is not None else None
        where = f" ({line[0]}:{line[1]})" if line else ""
        return Divergence(f"replay: context {ctx.id} after {ctx.retired} instructions{where} {what}")

    def _taken(self, ctx: Context) -> None:
        """An event is behind.  The slice is cut where what follows must happen at a place of its own: `horizon` is
        that."""
        self.tape.take()
        self._look_up()

    def _look_up(self) -> None:
        following = self.tape.peek()
        if following is None or following.what in ("wake", "host"):
            self.vm.pausing = True
            self.vm.stop_word.set(ATTENTION)

    def _note(self, ctx: Context, what: str, value: Any) -> None:
        if self.log is not None:
            self.log.append(Event(ctx.id, ctx.retired, what, value))

    def host(self, value: tuple) -> None:
        """What the host does to the machine between two instructions: in a replay the same as in the recorded run."""
        if self.idle:
            return
        ctx = self.vm.main
        if not self.replaying:
            self._note(ctx, "host", value)
            return
        event = self._expected(ctx, "host")
        if event.value != value:
            raise self._diverged(ctx, f"is put by its host to {brief(repr(value))}; the log has "
                                      f"{brief(repr(event.value))}")
        self._taken(ctx)
        self.verified += 1

    def note(self, what: str, value: Any) -> None:
        """Log something else of the host, at the place of the main context."""
        self._note(self.vm.main, what, value)

    # -- waits ------------------------------------------------------------------------------------------------------
    def stumbled(self, ctx: Context) -> None:
        """An instruction was begun and not completed: the context waits, or it trapped.  Called again for the same wait
        or trap (Ctrl-C came before) it does what is left."""
        why = ctx.trap or ctx.waiting_for
        if self.idle or why is self._stumbled:
            return
        steps: list[Callable[[], Any]] = [partial(setattr, self, "waits", self.waits + 1),
                                          partial(setattr, self, "_stumbled", why)]
        if external(ctx):
            if not self.replaying:
                steps.insert(0, partial(self._append, Event(ctx.id, ctx.retired, "block", why.what)))
            else:
                event = self.tape.peek()
                if event is None or event[:3] != (ctx.id, ctx.retired, "block"):
                    raise self._diverged(ctx, f"waits for {ctx.waiting_for.what}, where the recorded run did not")
                steps.append(self.tape.take)
        list(map(call, steps))                         # in one call into C, but for a log or tape in Python

    def woken(self, ctx: Context) -> None:
        """A wait for the outside ended.  Called again for the same wait (Ctrl-C came before) it does nothing."""
        if self.idle or ctx.waiting_for is self._over:
            return
        if self.replaying:
            step: Callable[[], Any] = self.tape.take   # `_due` looked at it
        else:
            step = partial(self._append, Event(ctx.id, ctx.retired, "wake", self._moment))
        list(map(call, (step, partial(setattr, self, "_over", ctx.waiting_for))))

    def _due(self, ctx: Context) -> bool:
        """Did the wait end here in the recorded run?"""
        event = self.tape.peek()
        if event is None:
            return self.goes_on                        # from here on the outside decides: the instruction looks again
        return event.what == "wake" and event.context == ctx.id and self._moment >= tuple(event.value)

    @property
    def _moment(self) -> tuple[int, int, int]:
        """A place between two instructions of a run, exactly: where a wait may end."""
        return self.vm.retired, self.waits, self.vm.scheduler.turns

    @property
    def wakes_now(self) -> bool:
        """Does a wait for the outside end at this very instruction?"""
        if self.replaying:
            event = self.tape.peek()
            return event is not None and event.what == "wake" and self._moment >= tuple(event.value)
        return any(external(c) and c.waiting_for.ready() for c in self.vm.scheduler.contexts.values())

    @property
    def horizon(self) -> int | None:
        """Instructions of all contexts at which the run has to look up, in a replay."""
        if self.tape is None:
            return None
        event = self.tape.peek()
        if event is None:
            return self.end
        return event.value[0] if event.what == "wake" else None

    def at_horizon(self, ctx: Context) -> bool:
        """The run has come to where it has to look up.  True: it does.  False: a replay has come to an event that
        nothing of the run itself brings about, and the context began to wait, as it must.

        `RecordEnds`: the recorded run was ended here from outside; `Divergence`: the context does something else."""
        own = self.horizon
        if own is None or self.vm.retired < own or self.wakes_now:
            return True
        if self.exhausted and not self.ended_by_itself:
            raise self.ended("the recorded run was ended here")
        before = ctx.retired
        self.vm.interpreter.run_exactly(ctx, 1)
        if ctx.retired != before:
            event = self.tape.peek()
            what = f"context {event.context} stopped waiting" if event is not None else "everything ended"
            raise self._diverged(ctx, f"goes on, where {what} in the recorded run")
        return False

    def ended(self, why: str) -> "RecordEnds":
        """What is raised where the record has nothing more."""
        return RecordEnds(f"replay: the log ends after {self.vm.retired} instructions: {why}")

    @property
    def exhausted(self) -> bool:
        """Replaying, and the log has nothing more: whoever waits now waited when the recording ended."""
        return self.tape is not None and not self.goes_on and self.tape.peek() is None

    def check_sleep(self, waiting: list[Context]) -> None:
        """Every context waits, and none of the waits is over.  In a replay the outside cannot end one:

        `RecordEnds`: the recorded run was ended here from outside; `Divergence`: it went on."""
        if not self.replaying:
            return
        waits, event = describe_waits(waiting), self.tape.peek()
        if event is None and not self.ended_by_itself:
            raise self.ended(waits)
        there = "ended" if event is None else f"went on with {event.what} of context {event.context} after " \
            f"{event.retired} instructions (event {self.tape.taken} of the log)"
        raise Divergence(f"replay: after {self.vm.retired} instructions no context can go on ({waits}), where "
                         f"the recorded run {there}: the log belongs to another program, version or input")

    # -- what goes out ----------------------------------------------------------------------------------------------
    def leave(self, ctx: Context, sink: str, item: Any, write: Callable[[], Any]) -> None:
        """Hand an item to a sink, through the record."""
        if self.idle:
            write()
        elif self.replaying:
            self._verify(ctx, sink, item, write)
        else:
            if self.wants_digest is not None and self.wants_digest():
                self._note(ctx, "digest", self.digest(ctx))
            self._held = []
            try:
                self.attempt(ctx, write)
                self._note(ctx, "output", Output.of(sink, item))
                said = self._held
            finally:
                self._held = None
            if self.log is not None:
                for event in said:
                    self.log.append(event)

    def said(self, ctx: Context, sink: str, item: Any) -> None:
        """The host makes something of items that have left (text of tokens), and writes it: a part of the record."""
        if self.idle:
            return
        found = Output.of(sink, item)
        if not self.replaying:
            if self._held is not None:
                self._held.append(Event(ctx.id, ctx.retired, "said", found))
            else:
                self._note(ctx, "said", found)
        elif self.derives:
            event = self._expected(ctx, "said")
            if event.value != found:
                raise self._diverged(ctx, f"makes {found} of it; the log has {event.value}")
            self._taken(ctx)
            self.verified += 1

    def pass_said(self) -> None:
        """Leave behind what the recorded host said, where nobody makes it again."""
        while not self.derives and self.tape is not None and (event := self.tape.peek()) and event.what == "said":
            self._taken(self.vm.main)

    def attempt(self, ctx: Context, action: Callable[[], Any]) -> Any:
        """Do something outside that may fail; that it failed is part of the record."""
        if self.idle:
            return action()
        if self.replaying:
            event = self.tape.peek()
            if event is not None and event[:3] == (ctx.id, ctx.retired, "failed"):
                self._answer(ctx, "failed")
            return action()
        try:
            return action()
        except _ENDS_THE_RUN:
            raise
        except UserError as e:
            self._note(ctx, "failed", Raised(type(e).__name__, getattr(e, "message", str(e))))
            raise

    def _verify(self, ctx: Context, sink: str, item: Any, write: Callable[[], Any]) -> None:
        event = self.tape.peek()
        if event is not None and event[:3] == (ctx.id, ctx.retired, "digest"):
            self._verify_digest(ctx, event.value)
            event = self.tape.peek()
        if event is not None and event[:3] == (ctx.id, ctx.retired, "failed"):
            self._answer(ctx, "failed")
        found = Output.of(sink, item)
        event = self._expected(ctx, "output")
        if event.value != found:
            raise self._diverged(ctx, f"writes {found}; the log has {event.value}")
        self._taken(ctx)
        self.verified += 1
        if self.echo:
            write()
        self.pass_said()

    def _verify_digest(self, ctx: Context, expected: str) -> None:
        if self.digest is not None:
            found = self.digest(ctx)
            if found != expected:
                raise self._diverged(ctx, f"has the state {found}; the log has {expected}: registers, states or memory "
                                          f"differ though all outputs so far agree")
            self.verified += 1
        self.tape.take()


def external(ctx: Context) -> bool:
    """Does the context wait for something that the host provides?"""
    return ctx.status == WAITING and ctx.waiting_for.external
