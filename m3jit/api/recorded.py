"""Sessions and conversations whose whole course is recorded: messages, corrections, tokens, and where it was stopped.

    with m3jit.RecordedConversation("talk.log", "smollm2") as talk:
        for text in talk.say("Name three rivers."): ...
        talk.correct("the Loire", to_text="the Thames")
        for text in talk.resume(): ...

`m3jit replay talk.log` (m3jit.api.replayed) asks a new conversation for the same and compares all that comes of it;
`m3jit debug talk.log` goes through the machine's run.  In the log are, in order: calls of public methods ("call", and
"gave" with what came of each); what the host does to the machine ("host", m3jit.timetravel.hosting); and what the
machine itself sees and writes (m3jit.vm.recording), the place among them where `stop` took effect.

A session and its forks share one machine and one log.  Where another thread calls `stop` is part of the log; all other
methods are for one thread at a time.  Any thread may look at what there is; nothing is noted of that.
"""
from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

from m3jit.api.checkpoints import EverySentence, EveryToken, EveryTokens
from m3jit.api.conversation import Conversation
from m3jit.api.generated import GeneratedText, Piece
from m3jit.api.generation import LanguageModel, Prompt, load_model
from m3jit.api.session import Session
from m3jit.api.session_machine import SessionMachine
from m3jit.api.session_state import SessionState
from m3jit.errors import UserError, brief
from m3jit.timetravel.log_file import LogFailed
from m3jit.timetravel.record import Recording
from m3jit.timetravel.steering import Steering
from m3jit.timetravel.wire import WireError, put
from m3jit.vm.recording import Raised

POLICIES = {kind.__name__: kind for kind in (EveryToken, EveryTokens, EverySentence)}
NEXT, LEAVE, SHOW = "next", "leave", "show"            # calls that are no methods: of texts, and of what a host shows
AFTERWARDS = ("close", LEAVE, SHOW)                    # calls that a recording which ended early does not refuse
LOOKS = ("messages", "answer", "finish_reason")        # of a conversation, what the end of a text changes
PATIENCE = 10.0                                        # seconds that a call waits for the end of a text to be noted


class InUse(UserError):
    """A call that was refused, and is not in the log: another one is under way."""


class Course:
    """One machine, the sessions that share it, and how their calls are noted (here not at all).

    holder: the session whose text the machine is at; looping: the session that a loop goes over."""

    def __init__(self, recorder: Any):
        self.recorder = recorder
        self.machine: SessionMachine | None = None
        self.objects: list[Any] = []                   # sessions and conversations, by their numbers
        self.states: list[SessionState] = []           # what `snapshot` gave
        self.holder: Any = None
        self.looping: Any = None
        self.open = 0                                  # sessions that have not been closed
        self.ended = False

    def call(self, target: Any, name: str, arguments: tuple, named: dict[str, Any], do: Callable[[], Any]) -> Any:
        """Call a method; what it gave."""
        return do()

    def look(self) -> None:
        """Somebody looks at what there is: texts that were let go of end before."""

    def beside(self, name: str, do: Callable[[], Any]) -> Any:
        """What a method gives that needs the machine and is no part of the log."""
        return do()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes."""
        self.ended = True

    def add(self, made: Any) -> None:
        """Another session or conversation of this course."""
        self.objects.append(made)

    def kept(self, value: Any) -> Any:
        """What came of a call, as a log has it."""
        if value is None or isinstance(value, (bool, int, str, Raised)):
            return value
        if isinstance(value, Piece):
            return value.text, value.tokens, value.finish_reason, value.back
        if isinstance(value, SessionState):
            self.states.append(value)
            return {"state": len(self.states) - 1}
        return {"object": next(i for i, other in enumerate(self.objects) if other is value)}

    def take_over(self, session: Any) -> None:
        """The machine is to be this session's."""
        held, self.holder = self.holder, session
        if held not in (None, session) and held._now.generated is not None:
            held._now = held._settled()


class Journal(Course):
    """A course into a log."""

    def __init__(self, path: str | Path, shown: bool = False):
        if not isinstance(path, (str, os.PathLike)):
            raise UserError(f"log: the name of a file is expected, got {brief(repr(path))}")
        self.recording = Recording(os.fspath(path))
        super().__init__(self.recording.recorder)
        self._shown, self._texts = shown, 0
        self._inside: int | None = None                # the thread that is in a call, whose own calls are not noted
        self._turn = threading.Lock()                  # held from before a call is noted until what it gave is
        self._turn_of: tuple[int, bool] | None = None  # the thread that holds it, and whether it calls a method
        self._thread = threading.get_ident()           # of the last call
        self._left: deque[tuple[int, Any]] = deque()   # texts whose end is not noted yet
        self._at_exit = functools.partial(_end_at_exit, weakref.ref(self), os.getpid())

    def begin(self, session: "RecordedSession", talk: dict[str, Any]) -> None:
        """Write the log's head.  talk: what makes it a conversation; {}: a session."""
        s, model = session.settings, session.model
        policy = session.checkpoints
        if policy is not None and type(policy).__name__ not in POLICIES:
            raise UserError(f"checkpoints: a log knows {', '.join(POLICIES)}, not {type(policy).__name__}")
        values = {name: value for name, value in vars(s).items() if name != "grammar"}
        self.recording.steering = Steering.made(model.reference, s)
        self.recording.more = {"talk": {
            "reference": model.reference, "limit": model.limit, "settings": values, "shown": self._shown,
            "policy": (type(policy).__name__, asdict(policy)) if policy is not None else None, "conversation": talk}}
        self.recording.begin(session.machine, " ".join(map(str, sys.argv)) if self._shown else "")
        atexit.register(self._at_exit)                 # the writer registered before, and is asked afterwards

    def end(self, error: BaseException | None = None) -> None:
        if not self.ended:
            self.ended = True
            atexit.unregister(self._at_exit)
            self.recording.end(error, self.open if error is None else 0)

    def end_now(self) -> None:
        """End the log between two calls, of sessions that nobody closed; in the middle of a call of another thread
        nothing is done, and the log has no end."""
        with self._turned() as mine:
            if mine:
                self.end()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Calls inside are not noted, nor those of what it decorates."""
        before, self._inside = self._inside, threading.get_ident()
        try:
            yield
        finally:
            self._inside = before

    @contextlib.contextmanager
    def _turned(self, calling: bool = False) -> Iterator[bool]:
        """Whether nothing else is noted inside; False: another call is under way.

        calling: a method is to be called inside, which waits for another thread that notes no more than the end of
        texts."""
        held: list[bool] = []
        me, late = threading.get_ident(), time.monotonic() + PATIENCE
        try:
            held.extend(map(self._turn.acquire, (False,)))                  # in one call: no interrupt between the two
            while calling and not held[-1] and time.monotonic() < late:
                holder = self._turn_of                 # None: it has just taken the turn, or just gives it back
                if holder is not None and (holder[1] or holder[0] == me):
                    break
                time.sleep(0.001)
                held.extend(map(self._turn.acquire, (False,)))
            if held[-1]:
                self._turn_of = me, calling
            yield held[-1]
        finally:
            if held and held[-1]:
                self._turn_of = None
                self._turn.release()

    def call(self, target: Any, name: str, arguments: tuple, named: dict[str, Any], do: Callable[[], Any]) -> Any:
        return self._in_turn(name, lambda: self._do(target, name, arguments, named, do), do)

    def beside(self, name: str, do: Callable[[], Any]) -> Any:
        return self._in_turn(name, self.quiet()(do), do)

    def _in_turn(self, name: str, do: Callable[[], Any], inside: Callable[[], Any]) -> Any:
        """What `do` gives while nothing else is noted; `inside`, where it is a part of another call.  InUse."""
        if self._inside == threading.get_ident():
            return inside()
        with self._turned(calling=True) as mine:
            if not mine:
                holder = self._turn_of
                other = " in another thread" * (holder is not None and holder[0] != threading.get_ident())
                raise InUse(f"{name}: the session is in use{other}: call stop(), wait for it, and try again")
            self._thread = threading.get_ident()
            self._end_left()
            found = do()
        self._leave()
        return found

    def look(self) -> None:
        if self._inside != threading.get_ident():
            self._leave(anywhere=True)

    def _do(self, target: Any, name: str, arguments: tuple, named: dict[str, Any], do: Callable[[], Any]) -> Any:
        if self.ended:
            if self.open and name not in AFTERWARDS:
                raise UserError("the recording of this session has ended with an error; make another session")
            return self.quiet()(do)()
        try:
            return self._called(target, name, arguments, named, do)
        except BaseException as error:
            if isinstance(error, LogFailed) or not isinstance(error, UserError):      # who knows how far it came
                with contextlib.suppress(LogFailed):
                    self.end(error)
            raise

    def _leave(self, anywhere: bool = False) -> None:
        """End the texts that were let go of, if this is the thread that makes the calls and no call is under way.

        The collector may let go of one anywhere: in the middle of a call, whose place in the log is taken, or in a
        thread that holds the log.  Then it ends behind that call, or before the next call or look.  anywhere: the
        collector has nothing to do with it, and any thread will do."""
        while self._left and (anywhere or threading.get_ident() == self._thread):
            with self._turned() as mine:
                if not mine:
                    return
                self._end_left()

    def _end_left(self) -> None:
        while self._left:
            number, text = self._left[0]
            try:
                self._do(self.objects[0], LEAVE, (number,), {}, text.close)
            except UserError:
                self._left.popleft()
                raise
            self._left.popleft()                       # behind it: Ctrl-C before that leaves a text to end

    def _called(self, target: Any, name: str, arguments: tuple, named: dict[str, Any], do: Callable[[], Any]) -> Any:
        number = next(i for i, other in enumerate(self.objects) if other is target)
        kept = self._given(arguments), {key: self._given(value) for key, value in named.items()}
        try:
            self.recorder.note("call", (number, name, *kept))
        except WireError:
            _check_arguments(name, *kept)              # says which one
            raise
        try:
            with self.quiet():
                found = do()
        except UserError as error:
            self._gave(Raised(type(error).__name__, str(error)))
            raise
        if isinstance(found, Iterator):
            self._texts += 1
            self._gave({"text": self._texts - 1})
            return self._pieces(self._texts - 1, found)
        self._gave(self.kept(found))
        if not self.open:
            self.end()
        return found

    def _gave(self, value: Any) -> None:
        if not self.ended:                             # a machine that failed has ended it
            self.recorder.note("gave", value)

    def _pieces(self, number: int, text: Iterator[Any]) -> Iterator[Any]:
        """A text whose pieces are noted as they are asked for."""
        over = False
        try:
            while True:
                piece = self.call(self.objects[0], NEXT, (number,), {}, lambda: next(text, None))
                if piece is None:
                    over = True
                    return
                yield piece
        except UserError as error:
            over = not isinstance(error, InUse)        # that one is not the text's own, which stands where it did
            raise
        finally:
            if not over:
                self._left.append((number, text))
                self._leave()

    def show(self, conversation: Any, text: str | None) -> None:
        """The host wrote this text beside the pieces; None: the answer so far."""
        self.call(conversation, SHOW, (text,), {}, lambda: None)

    def _given(self, value: Any) -> Any:
        """An argument, as a log has it.  UserError: a snapshot that is not of this course."""
        if isinstance(value, SessionState):
            for number, state in enumerate(self.states):
                if state is value:
                    return {"state": number}
            raise UserError("restore: a recorded session takes snapshots of its own and of its forks; the log would "
                            "not have another one")
        if isinstance(value, Mapping):
            return {str(key): self._given(item) for key, item in value.items()}
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return tuple(map(self._given, value))
        return value


def _check_arguments(name: str, arguments: tuple, named: dict[str, Any]) -> None:
    """WireError: one of the arguments of a call is nothing that a log can hold; which one, and what."""
    for where, value in (*enumerate(arguments, 1), *named.items()):
        try:
            put(bytearray(), value)
        except WireError as error:
            raise WireError(f"{name}: {f'argument {where}' if isinstance(where, int) else where}: {error}") from None


def _end_at_exit(journal: "weakref.ref[Journal]", process: int) -> None:
    """The process ends, and nobody closed the sessions of a log: it ends here, and can be compared to its end."""
    found = journal()
    if found is not None and not found.ended and os.getpid() == process:           # a forked process has the same file
        with contextlib.suppress(LogFailed):           # then it has no end, and a replay says so
            found.end_now()


def _noted(base: type, *names: str) -> Iterator[Callable]:
    """Methods of the class that another one is made of, through the course."""
    for name in names:
        yield _through_course(base, name)


def _through_course(base: type, name: str) -> Callable:
    @functools.wraps(getattr(base, name))
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.course.call(self, name, arguments, named, lambda: getattr(base, name)(self, *arguments, **named))
    return method


class RecordedSession(Session):
    """A `Session` that is recorded: its log (the name of a new file), then the arguments of `Session`.

    A machine that fails ends the log, and the session cannot go on; nor does it load what was saved.  The prefix index
    of its model is left alone.  UserError: the log cannot be written, a policy of one's own."""
    course: Course
    append, rollback, inject, become, undo, snapshot, restore, generate = _noted(
        Session, "append", "rollback", "inject", "become", "undo", "snapshot", "restore", "generate")

    def __init__(self, log: str | Path | Course, model: LanguageModel | str = "default", prompt: Prompt | None = None,
                 *, _part: bool = False, **given: Any):
        self.course = log if isinstance(log, Course) else Journal(log)
        language = copy.copy(model if isinstance(model, LanguageModel) else load_model(model))
        language.prefixes = None                       # states of other texts are not in the log
        super().__init__(language, None, **given)
        self.course.add(self)
        self.course.open += 1
        if isinstance(self.course, Journal) and not _part:
            self.course.begin(self, {})
        if prompt is not None:
            self.append(prompt)

    def _start(self) -> None:
        course = self.course
        if course.machine is None:
            vm = self.model.machine(self._program, self.settings, self.context, self._matcher, backend=self._backend,
                                    threads=self._threads, record=course.recorder)

            def logprobs(item: Any) -> None:
                made: GeneratedText | None = course.holder._now.generated
                if made is not None:
                    made.take_logprobs(item)
            vm.set_sink("LOGPROBS", logprobs)
            self._machine = course.machine = SessionMachine(vm)
        elif not course.ended:                         # its machine has failed
            course.end(sys.exc_info()[1])
        else:
            raise UserError("the recording of this session has ended with its machine; make another session")

    def save(self, *arguments: Any, **named: Any) -> Any:
        """As `Session.save`; no part of the log."""
        return self.course.beside("save", lambda: super(RecordedSession, self).save(*arguments, **named))

    def _begin(self, max_tokens: int | None) -> GeneratedText | None:
        self.course.take_over(self)
        return super()._begin(max_tokens)

    def _generate(self, max_tokens: int | None) -> Iterator[Piece]:
        before = self.course.looping
        if before not in (None, self):
            raise UserError("generate: a recorded session and its forks share one machine, and a loop goes over the "
                            "text of another one: leave it first")
        self.course.looping = self
        try:
            yield from super()._generate(max_tokens)
        finally:
            self.course.looping = before

    def fork(self) -> "RecordedSession":
        """As `Session.fork`; the fork is part of the log, and shares the machine: one of them generates at a time.

        UserError: the session is closed or in use, or the recording has ended."""
        return self.course.call(self, "fork", (), {}, self._fork)

    def _fork(self) -> "RecordedSession":
        with self._exclusive():
            other = type(self).__new__(type(self))
            other.__dict__.update(self.__dict__)       # its lock too: one of them at a time
            now = self._settled(share=False)
            other._now = replace(now.at(now.state, now.history), correcting=now.correcting, evaluated=0)
            self.course.add(other)
            self.course.open += 1
            return other

    def close(self) -> None:
        """End it; with the last one of a log, the machine and the log.  A log whose sessions are never all closed ends
        with the process, where one of them is still there then; where Python's collector took them all, it has no end.
        LogFailed: the rest of the log cannot be written."""
        if not self._closed:
            self.course.call(self, "close", (), {}, self._close)

    def _close(self) -> None:
        with self._exclusive():
            self._now = self._settled()
            self._closed = True
        self.course.open -= 1
        if not self.course.open:
            self._machine.close()

    def load(self, *_: Any, **__: Any) -> Any:
        """UserError: states on a disk are not in the log."""
        raise UserError("load: a recorded session begins with nothing, since its log has no states of others; do not "
                        "record it, or begin in an empty folder")

    _load = load


class RecordedConversation(Conversation):
    """A `Conversation` that is recorded: its log, then the arguments of `Conversation`.  As `RecordedSession`.

    shown: the log also has what a command showed beside the pieces (`Journal.show`)."""
    course: Course
    say, resume, correct, undo_correction, undo, reset = _noted(
        Conversation, "say", "resume", "correct", "undo_correction", "undo", "reset")

    def __init__(self, log: str | Path | Course, model: LanguageModel | str = "default", system: str | None = None, *,
                 shown: bool = False, **given: Any):
        self.course = log if isinstance(log, Course) else Journal(log, shown)
        self._sessions = functools.partial(RecordedSession, self.course, _part=True)
        quiet = self.course.quiet() if isinstance(self.course, Journal) else contextlib.nullcontext()
        with quiet:
            super().__init__(model, system, **given)
        self.course.add(self)
        if isinstance(self.course, Journal):
            self.course.begin(self.session, {                                        # type: ignore[arg-type]
                "system": system, "now": self._now.isoformat(), "template": self.template.source})

    def __getattribute__(self, name: str) -> Any:
        if name in LOOKS:                              # no properties: these are stored in C, all of a change at once
            object.__getattribute__(self, "course").look()
        return object.__getattribute__(self, name)

    def save(self, *arguments: Any, **named: Any) -> Any:
        """As `Conversation.save`; no part of the log."""
        return self.course.beside("save", lambda: super(RecordedConversation, self).save(*arguments, **named))

    @property
    def system(self) -> str | None:
        """As `Conversation.system`; setting it is part of the log."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self.course.call(self, "system", (text,), {}, lambda: Conversation.system.fset(self, text))       # type: ignore

    def fork(self) -> "RecordedConversation":
        """As `Conversation.fork`; the fork is part of the log, and shares the machine, as `RecordedSession.fork`."""
        return self.course.call(self, "fork", (), {}, self._fork)

    def _fork(self) -> "RecordedConversation":
        other = super().fork()
        self.course.add(other)
        return other                                   # type: ignore[return-value]

    def load(self, *_: Any, **__: Any) -> None:
        """UserError: states on a disk are not in the log."""
        self.session.load()

    def __enter__(self) -> "RecordedConversation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

