"""A recorded session or conversation, repeated: asked for the same, on any backend and thread count, and compared.

Everything is computed again: messages become tokens by the chat template, tokens go through the model, text is made of
them, stop strings and corrections are found.  Compared are every call's result and every piece, what the host did to
the machine, every token and the state now and then.
"""
from __future__ import annotations

import copy
from datetime import datetime
from typing import Any, Callable, Iterator

from m3jit.api.generated import Piece
from m3jit.api.generation import LanguageModel
from m3jit.api.recorded import LEAVE, NEXT, POLICIES, SHOW, Course, RecordedConversation, RecordedSession
from m3jit.errors import Divergence, InternalError, M3Error, UserError, brief
from m3jit.models.grammar import Grammar
from m3jit.timetravel.hosting import KEEP
from m3jit.timetravel.log_file import LogError, LogReader
from m3jit.timetravel.replay import STOPPED, KnownModels, Report, check_version, events_of, program_of
from m3jit.timetravel.steering import Steering
from m3jit.vm.digest import digest
from m3jit.vm.recording import Event, Raised, RecordEnds, Recorder, Tape
from m3jit.vm.regions import check as check_backend

CALLS = {"append", "rollback", "inject", "become", "undo", "snapshot", "restore", "generate", "say", "resume",
         "correct", "undo_correction", "reset", "system", "fork", "close", NEXT, LEAVE, SHOW}
_TALK = {"reference": str, "limit": (int, type(None)), "settings": dict, "shown": bool, "policy": (tuple, type(None)),
         "conversation": dict}
Heard = Callable[[str, tuple, dict], None]


class _FromLog(LanguageModel):
    """A model whose program is the one in a log."""
    recorded: Any = None

    def program(self, options: Any = None, **changed: Any) -> Any:
        return self.recorded


class TalkReplay:
    """A recorded session or conversation, ready to be repeated.

    models: a provider (m3jit.models.provider.Models).  write: gets the text that the recorded one showed, as it comes;
    heard: each call (method, arguments, named ones) before it is made.  The rest as
    `m3jit.timetravel.replay.Replay`.  LogError, UserError: the log is damaged, or of something else."""

    def __init__(self, path: str, models: Any, backend: str = "auto", threads: int | None = None, *,
                 any_version: bool = False, moved: tuple[str, ...] = (),
                 write: Callable[[str], None] = lambda text: None,
                 heard: Heard = lambda name, arguments, named: None):
        check_backend(backend)                         # before models are loaded
        self.path, self.reader, self.write, self.heard = path, LogReader(path), write, heard
        self.head = head = self.reader.head
        check_version(head, path, any_version)
        self.talk = talk = talk_of(head, path)
        program = program_of(head, path)
        known = KnownModels(models, head["models"], path, moved)
        for reference in head["models"]:
            known.load(reference)
        steering = Steering.of(head, path)
        if steering is None:
            raise _other(path)
        steering.check_library(path, any_version)
        self.recorder = Recorder(replay=())
        self.recorder.tape = Tape(self._events())
        self.recorder.digest = digest
        self.course = Course(self.recorder)
        language = _FromLog(talk["reference"], known, backend, threads, talk["limit"])
        language.recorded = program
        try:
            self._make(language, talk, steering)
        except (TypeError, ValueError, KeyError) as error:
            raise LogError(f"{path}: {_other(path)} ({error})") from None
        self._texts: list[Iterator[Any]] = []
        self._pieces = 0

    def _make(self, language: LanguageModel, talk: dict[str, Any], steering: Steering) -> None:
        policy, told = talk["policy"], talk["conversation"]
        given = dict(talk["settings"], grammar=Grammar(*steering.grammar) if steering.grammar[0] else None,
                     checkpoints=POLICIES[policy[0]](**policy[1]) if policy is not None else None)
        if told:
            RecordedConversation(self.course, language, told["system"], chat_template=told["template"],
                                 now=datetime.fromisoformat(told["now"]), **given)
        else:
            RecordedSession(self.course, language, **given)
        assert self.course.machine is not None
        self.vm = self.course.machine.vm

    def _events(self) -> Iterator[Event]:
        for event in events_of(self.reader, self.recorder):
            if not (event.what == "host" and event.value[0] == KEEP):      # of no consequence here
                yield event
        self.recorder.ended_by_itself = False          # the host ended it, whatever the program would have done

    def run(self) -> Report:
        """Repeat it.  Divergence: it did something else than the log says, where and what."""
        error: BaseException | None = None
        try:
            while (event := self.recorder.tape.peek()) is not None:
                if event.what != "call":
                    raise self._diverged(f"has {event.what} where the next call is expected")
                self.recorder.tape.take()
                self._obey(*event.value)
        except RecordEnds as ended:
            error = ended
        except (Divergence, LogError, InternalError):
            raise
        except M3Error as failed:                      # the machine failed, and that ended the recording
            error = failed
        self._compare(error)
        ended = None if isinstance(error, RecordEnds) and self.reader.end is not None else error
        left = (self.reader.end or {}).get("unclosed")
        return Report(self.recorder.verified, self.recorder.tape.taken, self.vm.retired, ended, self.reader.end is None,
                      left if type(left) is int else 0)

    # One call.

    def _obey(self, number: int, name: str, arguments: tuple, named: dict[str, Any]) -> None:
        if name not in CALLS or not 0 <= number < len(self.course.objects):
            raise self._diverged(f"has a call {brief(name)} of object {number}, which is none")
        target = self.course.objects[number]
        self.heard(name, arguments, named)
        try:
            found: Any = self._called(target, name, self._given(arguments), self._given(named))
        except (RecordEnds, Divergence, LogError, InternalError):
            raise
        except UserError as error:
            if self.recorder.tape.peek() is None:
                raise
            found = Raised(type(error).__name__, str(error))
        except (TypeError, AttributeError, IndexError) as error:
            raise self._diverged(f"has a call of {brief(name)} that cannot be made: {error}") from None
        if isinstance(found, Iterator):
            self._texts.append(found)
            found = {"text": len(self._texts) - 1}
        else:
            found = self.course.kept(found)
        event = self.recorder.tape.peek()
        if event is None:
            raise self.recorder.ended("the recording ended in the middle of a call")
        if event.what != "gave" or event.value != found:
            there = brief(repr(event.value)) if event.what == "gave" else event.what
            raise self._diverged(f"{name} gives {brief(repr(found))}; the log has {there}")
        self.recorder.tape.take()
        self.recorder.verified += 1

    def _called(self, target: Any, name: str, arguments: list, named: dict[str, Any]) -> Any:
        if name == NEXT:
            piece = next(self._texts[arguments[0]], None)
            self._say(piece)
            return piece
        if name == LEAVE:
            self._texts[arguments[0]].close()          # type: ignore[attr-defined]
            return self._line()
        if name == SHOW:
            return self.write(target.answer if arguments[0] is None else arguments[0])
        if name == "system":
            target.system = arguments[0]
            return None
        return getattr(target, name)(*arguments, **named)

    def _say(self, piece: Any) -> None:
        """Show a piece; where no command did it, a line for each text."""
        if piece is None:
            self._line()
        else:
            self.write(piece.text if isinstance(piece, Piece) else piece)

    def _line(self) -> None:
        if not self.talk["shown"]:
            self.write("\n")

    def _given(self, value: Any) -> Any:
        if isinstance(value, dict):
            number = value.get("state")
            if len(value) == 1 and type(number) is int and 0 <= number < len(self.course.states):
                return self.course.states[number]
            return {key: self._given(item) for key, item in value.items()}
        return [self._given(item) for item in value] if isinstance(value, tuple) else value

    # The end.

    def _compare(self, error: BaseException | None) -> None:
        end, left = self.reader.end, self.recorder.tape.peek()
        if end is None:
            if error is not None and not isinstance(error, RecordEnds):
                raise self._diverged(f"fails ({error}), where the recorded one went on")
            return
        if left is not None:
            raise self._diverged(f"ends ({error}), but the log goes on with {left.what}")
        if not isinstance(error, RecordEnds) and end["status"] not in STOPPED:
            found = "done" if error is None else type(error).__name__
            if found != end["status"] or str(error or "") != end["message"]:
                raise self._diverged(f"ended with: {error or 'done'}; the recorded one with: "
                                     f"{end['message'] or end['status']}")
        if end["exact"]:
            if self.vm.retired != end["retired"]:
                raise self._diverged(f"completed {self.vm.retired} instructions, the recorded one {end['retired']}")
            state = digest(self.vm.main)
            if state != end["digest"]:
                raise self._diverged(f"has the state {state} at the end, the log has {end['digest']}; all that was "
                                     f"said agrees")
            self.recorder.verified += 1

    def _diverged(self, what: str) -> Divergence:
        return Divergence(f"replay: {self.path}: after {self.vm.retired} instructions, event "
                          f"{self.recorder.tape.taken}: the session {what}")


def talk_of(head: dict[str, Any], path: str) -> dict[str, Any]:
    """What a log's head says about a session.  LogError: it is a log of something else, or says something else."""
    talk = head.get("talk")
    if not isinstance(talk, dict):
        raise LogError(f"{path}: is no log of a session; `m3jit chat --record` and m3jit.RecordedSession make one")
    if not all(isinstance(talk.get(name), kind) for name, kind in _TALK.items()):
        raise _other(path)
    return copy.deepcopy(talk)


def _other(path: str) -> LogError:
    return LogError(f"{path}: does not say what session it is of; another program made the file, or it is damaged")
