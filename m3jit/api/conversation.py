"""A conversation with a model: messages in its chat template, over a session (m3jit.api.session).

    talk = m3jit.Conversation("smollm2", system="Be brief.")
    for text in talk.say("Name three rivers."):
        print(text, end="", flush=True)
    talk.correct("the Loire", to_text="the Thames")
    for text in talk.resume(): ...

Only what is new is computed: keys, values and recurrent states of what was said are there already.  A template that
rewrites the past (some leave out earlier thoughts) is met by going back to where the texts part.
"""
from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Callable, Iterator

from m3jit.api.checkpoints import Policy
from m3jit.api.generated import FinishReason
from m3jit.api.generation import LanguageModel
from m3jit.api.session import ContextFull, Session, SessionState
from m3jit.api.session_state import Current
from m3jit.errors import UserError, brief
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm.commit import Store as Stored
from m3jit.vm.commit import attribute, commit, item
from m3jit.vm.vm import VM

__all__ = ["ContextFull", "Conversation"]

KEPT = 64                           # states before messages that a conversation holds
PLACES = ("to_token", "to_text", "after_text", "which")                    # what says where a correction begins


@dataclass(frozen=True)
class _Point:
    """A state to go back to: how many messages there were, and the last answer as it was generated (None: its tokens
    are not what the message says)."""
    state: SessionState
    messages: int
    spoken: str | None


class Conversation:
    """Messages with a model: made from a model's name or file, or a `LanguageModel`.

    settings: the fields of `Settings` (max_tokens None by default: answers may fill the context; a grammar holds for
    each answer).  options: what the program is compiled with besides.  chat_template: jinja2 text in place of the
    model's.  backend, threads: as `m3jit.VM`.  Each of these, where it is not given, is what a `LanguageModel` was
    loaded with.  now: the time that templates see, the same throughout.  checkpoints: as `Session`.  Raises UserError
    or ModelFileError: no such model, no chat template, a bad setting, logprobs (`LanguageModel.generate` gives
    them)."""

    _sessions: Callable[..., Session] = Session         # what makes its session

    def __init__(self, model: LanguageModel | str = "default", system: str | None = None, *,
                 options: Options | None = None, chat_template: str | None = None, now: datetime | None = None,
                 backend: str | None = None, threads: int | None = None, checkpoints: Policy | None = None,
                 **settings: Any):
        self.model = model if isinstance(model, LanguageModel) else \
            LanguageModel(model, Models(), backend or "auto")
        if settings.get("logprobs") is not None:
            raise UserError("logprobs: a conversation gives text alone; m3jit.load_model(..).generate gives them")
        if now is not None and not isinstance(now, datetime):
            raise UserError(f"now: a datetime is expected, got {brief(repr(now))}")
        self.template = self.model.template(chat_template)
        self.session: Session = self._sessions(self.model, checkpoints=checkpoints, options=options, backend=backend,
                                               threads=threads, **settings)
        self.messages: list[dict[str, str]] = []
        self.finish_reason: FinishReason | None = None         # of the last answer
        self._system, self._now = system, now or datetime.now()
        self._spoken: str | None = None                # the last answer as it was generated
        self._points = [_Point(self.session.snapshot(), 0, None)]

    # What is said.

    @property
    def system(self) -> str | None:
        """The system message; setting it changes how the whole conversation is read at the next message."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system, self._spoken = text or None, None
        self._points = [_Point(p.state, p.messages, None) for p in self._points]

    @property
    def machine(self) -> VM:
        """The machine that holds the conversation."""
        return self.session.machine

    @property
    def context(self) -> int:
        """Tokens the conversation may have."""
        return self.session.context

    @property
    def used(self) -> int:
        """Positions of the context that are taken."""
        return len(self.session.tokens)

    @property
    def answer(self) -> str:
        """The last answer as it was generated, up to a stop string that ended it."""
        return self._answer_of(self.session._now)

    def transcript(self) -> list[dict[str, str]]:
        """All messages, the system message first."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return system + [dict(m) for m in self.messages]

    def say(self, text: str) -> Iterator[str]:
        """The answer to a message, as it comes.  Leaving the loop early, or `stop`, ends it and keeps what was said; an
        answer that was stopped before its first token takes the message back.

        ContextFull: the conversation no longer fits; the message is not taken.  UserError: the template refuses it."""
        if not isinstance(text, str):
            raise UserError(f"say: a text is expected, got {brief(repr(text))}")
        self.session._stopped = False                  # `stop` counts from here on, also before the first token
        tokens = self._read([*self.transcript(), {"role": "user", "content": text}])
        if not tokens:
            raise UserError(f"{self.model.model.path}: the chat template makes nothing of the message")
        if len(tokens) >= self.context:
            raise ContextFull(f"the conversation would have {len(tokens)} tokens, the context holds "
                              f"{self.context}; take messages back, start afresh, or allow more context")
        return self._answer(text, tokens)

    def _read(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of the whole conversation, its last message not answered yet."""
        if self._spoken is not None:
            following = self.template.continuation(messages, self._spoken, now=self._now)
            if following is not None:
                return [*self.session.tokens, *self.session._left(self.session._now), *following]
        return list(self.template.tokens(messages, now=self._now))

    def _answer(self, text: str, tokens: list[int]) -> Iterator[str]:
        before, points = _Point(self.session.snapshot(), len(self.messages), self._spoken), self._points
        answer = {"role": "assistant", "content": ""}
        self.session._become(tokens, self._stores(
            [*self.messages, {"role": "user", "content": text}, answer],
            [points[0], *[*points[1:], before][-KEPT:]], self._spoken))     # further back, `undo` computes again
        try:
            yield from self._resume()
        except GeneratorExit:
            self._begun(before, points, answer)
            raise
        except BaseException:
            commit(self._stores(self.messages[:before.messages], points, None))
            raise
        self._begun(before, points, answer)

    def _begun(self, before: _Point, points: list[_Point], answer: dict[str, str]) -> None:
        """Take a message back whose answer was stopped before it began."""
        if self.finish_reason == "cancelled" and len(self.session.tokens) == self.session.start and \
                self.messages and self.messages[-1] is answer:
            self.session._restore(before.state, self._stores(self.messages[:before.messages], points, before.spoken))

    def resume(self) -> Iterator[str]:
        """The rest of the last answer, as it comes: after a correction, or after it was stopped.  What the answer has
        already is not repeated.  UserError: nothing was said yet."""
        if not self.messages:
            raise UserError("resume: nothing has been said yet")
        self.session._stopped = False
        return self._resume()

    def _resume(self) -> Iterator[str]:
        session, answer = self.session, self.messages[-1]
        try:
            for piece in session._going_on():
                if piece.text:
                    yield piece.text
            self.finish_reason = session.finish_reason
        except GeneratorExit:                          # whoever listened left
            self.finish_reason = session.finish_reason or "cancelled"
            raise
        finally:
            if self.messages and self.messages[-1] is answer:              # else it was taken back meanwhile
                self._note()

    def _note(self) -> None:
        """What the last answer says now."""
        commit(self._noted(self.session._now))

    def _noted(self, now: Current) -> list[Stored]:
        """What is stored for the last answer, when the session is this."""
        whole, text = self.session._said(now), self._answer_of(now)
        spoken = whole if text == whole else None      # else its tokens hold what the message does not
        return [attribute(self, "_spoken", spoken), item(self.messages[-1], "content", text.strip())]

    def _answer_of(self, now: Current) -> str:
        """`answer`, when the session is this."""
        return self.session._said(now)[:now.ended_at if now.finish_reason == "stop" else None]

    def stop(self) -> None:
        """End the answer before its next token, from any thread or a signal handler."""
        self.session.stop()

    # Corrections.

    def correct(self, text: str | None = None, **place: Any) -> int:
        """Go back in the last answer to a place, and go on from it with a text (None: with none); how many tokens were
        taken back.  place: as `Session.rollback` takes it, texts looked for in `answer`; none: the end of `answer`.
        `resume` gives what follows.

        UserError: nothing was said, the place is before the answer or not there, a text that `Session.inject` refuses;
        nothing changes then."""
        session = self.session
        if not self.messages:
            raise UserError("correct: nothing has been said yet")
        unknown = [name for name in place if name not in PLACES]
        if unknown:
            raise UserError(f"correct: no place {brief(repr(unknown[0]))}; there are {', '.join(PLACES)}")
        token = place.get("to_token")
        if isinstance(token, int) and token < session.start:
            raise UserError(f"to_token: {token} is before the answer, which begins at {session.start}; undo() "
                            "takes whole messages back")
        if not place and text is not None and self.answer != session.text:             # a stop string goes
            place = {"after_text": self.answer, "which": 1} if self.answer else {"to_token": session.start}
        shown = self.answer
        return session._correct(place, text, self._changed, len(shown) if shown != session.text else None)

    def undo_correction(self) -> bool:
        """Take the last correction of the last answer back, with what came after it; False when there is none."""
        return self.session._undo(self._changed)

    def _changed(self, now: Current) -> list[Stored]:
        """What is stored with a correction of the last answer."""
        return [*self._noted(now), attribute(self, "finish_reason", now.finish_reason)]

    def fork(self) -> "Conversation":
        """Another conversation that is as this one is now, and goes its own way; states are shared."""
        other = copy.copy(self)
        other.session = self.session.fork()
        other.messages, other._points = [dict(m) for m in self.messages], list(self._points)
        return other

    def undo(self) -> bool:
        """Take the last message and its answer back; False when there is none."""
        if not self.messages:
            return False
        messages, points = self.messages[:-2], list(self._points)
        while len(points) > 1 and points[-1].messages > len(messages):
            points.pop()
        point = points[-1]
        if point.messages == len(messages):
            self.session._restore(point.state, self._stores(messages, points[:-1] or points, point.spoken))
        else:                                          # the session holds more than the messages
            commit(self._stores(messages, points, None))
        return True

    def reset(self) -> None:
        """Forget all messages but the system message."""
        first = self._points[0]
        self.session._restore(first.state, self._stores([], [first], first.spoken))

    # On disk.

    def save(self, store: Any, name: str = "conversation") -> Any:
        """Save the conversation, as `Session.save`; the committed version."""
        talk = {"system": self._system, "messages": self.messages, "spoken": self._spoken, "finish": self.finish_reason}
        return self.session.save(store, name, ["conversation", json.dumps(talk)])

    def load(self, store: Any, name: str = "conversation", number: int | None = None) -> None:
        """Go on from a saved conversation, as `Session.load`.  Messages before it can be taken back, and are then
        computed again from where the texts part."""
        def talk(notes: Any) -> list[Stored]:
            if not (isinstance(notes, list) and len(notes) == 2 and notes[0] == "conversation"):
                raise UserError(f"{name}: is a saved session, not a conversation; m3jit.Session reads it")
            system, messages, spoken, finish = _read_notes(name, notes[1])
            return [*self._stores(messages, self._points[:1], spoken), attribute(self, "_system", system),
                    attribute(self, "finish_reason", finish)]
        self.session._load(store, name, number, talk)

    def close(self) -> None:
        """End the machine."""
        self.session.close()

    def _stores(self, messages: list[dict[str, str]], points: list[_Point], spoken: str | None) -> list[Stored]:
        """What is stored together with a state of the session."""
        return [attribute(self, "messages", messages), attribute(self, "_points", points),
                attribute(self, "_spoken", spoken)]


def _read_notes(name: str, text: Any) -> tuple[str | None, list[dict[str, str]], str | None, FinishReason | None]:
    """What `Conversation.save` noted: the system message, the messages, the last answer as it was generated, how it
    ended.  UserError: it is something else."""
    try:
        talk = json.loads(text)
        system, messages, spoken, finish = (talk[key] for key in ("system", "messages", "spoken", "finish"))
        good = all(isinstance(s, str | None) for s in (system, spoken, finish)) and isinstance(messages, list) and \
            all(isinstance(m[key], str) for m in messages for key in ("role", "content"))
    except (TypeError, ValueError, KeyError):
        good = False
    if not good:
        raise UserError(f"{name}: its notes are not those of a conversation; load it with the version of m3jit "
                        "that saved it")
    return system, messages, spoken, finish
