"""What changes a session happens as a whole: with an interrupt (Ctrl-C) at any of its bytecodes, and where it fails."""
from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Callable

import pytest

from m3jit.api import conversation, saved, session, session_machine, session_state
from m3jit.api.conversation import Conversation
from m3jit.api.generation import LanguageModel, load_model
from m3jit.api.session import Session
from m3jit.durable import Store
from m3jit.errors import UserError

WATCHED = {module.__file__ for module in (conversation, saved, session, session_machine, session_state)}
SAMPLED = {"temperature": 1.0, "seed": 7}
PROMPT = list(range(3, 30))


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model("default", threads=1)


class Interrupt:
    """KeyboardInterrupt at the n-th bytecode of the watched files.  releasing: it came where a lock is given back,
    between bytecodes where no signal handler runs (those run behind calls); the lock is then given back here."""

    def __init__(self, n: int):
        self.left, self.came, self.releasing, self.where = n, False, False, ""

    def run(self, action: Callable[[], Any]) -> bool:
        """Whether it came to that."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            action()
        except KeyboardInterrupt:                      # the forced one; what it left is compared by the caller
            pass
        finally:
            sys.settrace(before)
        return self.came

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.came:
            self.left -= 1
            if self.left == 0:
                self.came, self.where = True, f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                self.releasing = frame.f_code.co_name == "_exclusive"
                raise KeyboardInterrupt
        return self._trace


def seen(made: Session) -> Any:
    """All of a session that can be seen, but for how far states go."""
    state = made.snapshot()
    return (state.tokens, state.start, state.rest, state.finish_reason, state.random, len(made._now.history),
            made._now.correcting)


def following(made: Session, count: int = 3) -> list[int]:
    return [token for piece in made.generate(count) for token in piece.tokens]


def begun(model: LanguageModel) -> Session:
    """A session with a correction, in a loop over `generate`."""
    made = Session(model, PROMPT, **SAMPLED)
    following(made, 4)
    made.rollback(to_token=made.start + 2)
    made.inject([40, 41])
    made._loop = made.generate(6)                      # keeps it where it is
    next(made._loop)
    return made


OPERATIONS: dict[str, Callable[[Session], Any]] = {
    "append": lambda made: made.append([5, 6, 7]), "inject": lambda made: made.inject([5, 6]),
    "rollback": lambda made: made.rollback(to_token=made.start + 1),
    "rollback to a text": lambda made: made.rollback(to_text=made.text[-2:], which=-1),
    "become": lambda made: made.become([*PROMPT[:9], 8, 9]), "undo": lambda made: made.undo(),
    "restore": lambda made: made.restore(session_state.SessionState(tuple(PROMPT), 3, random=(1,) * len(PROMPT))),
    "fork": lambda made: made.fork(), "snapshot": lambda made: made.snapshot(), "waiting": lambda made: made.waiting}


def released(made: Session, interrupt: Interrupt) -> None:
    """Give the lock back where the interrupt kept the session from it."""
    if made._lock.locked():
        assert interrupt.releasing, interrupt.where
        made._lock.release()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_any_moment_of_an_operation(model, name):
    operation, made = OPERATIONS[name], begun(model)
    origin = made.snapshot()
    states: list[Any] = []
    expected: list[Any] = []

    def begin() -> None:
        """A correction, one text behind it, and the machine in the middle of that."""
        made._now = made._now.at(origin)
        made.rollback(to_token=made.start + 3)
        made.inject([50])
        following(made, 2)
        made.rollback(to_token=made.start + 4)
        made._loop = made.generate(6)
        next(made._loop)
    for action in (lambda: None, lambda: operation(made)):
        begin()
        action()
        states.append(seen(made))
        expected.append(following(made))
    found, moment, came = set(), 0, True
    while came:
        moment += 1
        begin()
        interrupt = Interrupt(moment)
        came = interrupt.run(lambda: operation(made))
        released(made, interrupt)
        assert seen(made) in states, (moment, interrupt.where)
        which = states.index(seen(made))
        if which not in found or moment % 8 == 0:
            assert following(made) == expected[which], (moment, interrupt.where)
        found.add(which)
    assert moment > 20 and found == set(map(states.index, states))


def test_an_interrupt_at_any_moment_of_generating(model):
    """What was drawn stays, and the text goes on as it would have."""
    made = Session(model, PROMPT, **SAMPLED)
    following(made, 2)
    made.rollback(to_text=made.text[-1:], which=-1)     # a part of a token is left, which is spelled again
    straight = made.fork()
    following(straight, 6)
    there, tokens, random = made.snapshot(), straight.tokens, straight.snapshot().random
    moment, came, kept = 0, True, set()
    while came:
        moment += 3                                    # a failed step costs a machine: every third one
        made.restore(there)
        interrupt = Interrupt(moment)
        came = interrupt.run(lambda: following(made, 3))
        released(made, interrupt)
        size, now = len(made.tokens), made.snapshot()
        kept.add(size)
        if (made.tokens, now.rest) != (there.tokens, there.rest):
            assert made.tokens == tokens[:size] and now.random == random[:size], (moment, interrupt.where)
        following(made, 2)
        assert made.tokens[:len(tokens)] == tokens[:len(made.tokens)], (moment, interrupt.where)
    assert len(kept) == 4


# Loading.

def talk_of(model: LanguageModel) -> Conversation:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    return Conversation(model, chat_template=template, max_tokens=4, temperature=0)


def said(talk: Conversation) -> Any:
    return (seen(talk.session), talk.transcript(), talk._spoken, list(talk._points), talk.finish_reason)


@pytest.mark.parametrize("notes, words", [
    (None, "is a saved session, not a conversation"), (["conversation"], "is a saved session, not a conversation"),
    (["conversation", "{"], "its notes are not those of a conversation"),
    (["conversation", "[]"], "its notes are not those"), (["conversation", 3], "its notes are not those"),
    (["conversation", '{"system": null, "messages": [3], "spoken": null, "finish": null}'], "its notes are not those")])
def test_a_conversation_stays_where_what_is_loaded_is_none(model, tmp_path, notes, words):
    made = Session(model, [5, 6, 7], temperature=0)
    following(made)
    made.save(tmp_path / "store", "x", notes)
    talk, other = talk_of(model), talk_of(model)
    for each in (talk, other):
        list(each.say("hello"))
    before = said(talk)
    with pytest.raises(UserError, match=words):
        talk.load(tmp_path / "store", "x")
    assert said(talk) == before
    assert list(talk.say("and")) == list(other.say("and"))


CHANGES: dict[str, Callable[[Conversation, Any], Any]] = {
    "load": lambda talk, store: talk.load(store), "undo": lambda talk, store: talk.undo(),
    "reset": lambda talk, store: talk.reset(),
    "correct": lambda talk, store: talk.correct("Emma", to_token=talk.session.start + 1),
    "undo a correction": lambda talk, store: talk.undo_correction()}


@pytest.mark.parametrize("name", CHANGES)
def test_an_interrupt_at_any_moment_leaves_a_conversation_whole(model, tmp_path, name):
    change, talk = CHANGES[name], talk_of(model)
    list(talk.say("hello"))
    with Store.open(tmp_path / "store") as store:
        talk.save(store)
        list(talk.say("and"))
        talk.correct("He", to_token=talk.session.start + 2)
        list(talk.resume())
        whole, after = talk.fork(), talk.fork()
        change(after, store)
        states, found, moment, came = [said(whole), said(after)], set(), 0, True
        while came:
            moment += 3 if name == "load" else 1       # that reads files each time
            talk.messages, talk._points = [dict(m) for m in whole.messages], list(whole._points)
            talk._spoken, talk.finish_reason = whole._spoken, whole.finish_reason
            talk.session._now = whole.session._now
            interrupt = Interrupt(moment)
            came = interrupt.run(lambda: change(talk, store))
            released(talk.session, interrupt)
            assert said(talk) in states, (moment, interrupt.where)
            found.add(states.index(said(talk)))
    assert moment > 20 and found == {0, 1}


def test_a_correction_behind_a_new_prompt_can_be_undone(model):
    made = Session(model, PROMPT, **SAMPLED)
    following(made, 4)
    made.inject([40])
    made.append([41, 42])
    tokens = made.tokens
    assert not made.undo()
    made.inject([43])
    assert made.undo() and made.tokens == tokens and not made.undo()
