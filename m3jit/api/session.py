"""A session: one text with a model that can be gone back in, corrected, forked and gone on with.

    session = m3jit.Session("smollm2", "The three largest cities of France are")
    for piece in session.generate(max_tokens=40):
        print(piece.text, end="", flush=True)
    session.rollback(to_text="London")      # back to before it; all before stays as it is
    session.inject("Lyon")
    for piece in session.generate(): ...    # goes on behind the correction

The state stays in one machine: keys and values, recurrent states, the random stream, the grammar, the tokens a
repetition penalty looks at.  Going back never computes anything, and generation resumes when the injected tokens and at
most the one before them have gone through the model; recurrent states go back to a checkpoint (m3jit.api.checkpoints)
and compute the tokens behind it again.  Going back and on without a change gives the same bytes.
"""
from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np

from m3jit.api.checkpoints import Checkpoint, EveryTokens, Policy, checked_policy, thinned
from m3jit.api.generated import FinishReason, GeneratedText, Piece
from m3jit.api.generation import LARGEST, LanguageModel, Prompt, Settings, load_model
from m3jit.api.places import TokenText
from m3jit.api.saved import SavedSession
from m3jit.api.session_machine import SessionMachine
from m3jit.api.session_state import Current, SessionState
from m3jit.api.spelling import spelled
from m3jit.api.stop_strings import check_stops
from m3jit.errors import OperandError, UserError, brief
from m3jit.models.grammar import Matcher
from m3jit.models.program import Options
from m3jit.vm.commit import Store as Stored
from m3jit.vm.commit import attribute, commit
from m3jit.vm.vm import VM

Beside = Callable[[Current], Iterable[Stored]]


class ContextFull(UserError):
    """A session or conversation has more tokens than the model's context."""


class Session(SavedSession):
    """A text with a model: made from a model's name or file, or a `LanguageModel`.

    prompt: as `append` takes it (None: nothing yet).  checkpoints: a policy of `m3jit.api.checkpoints`; None: none for
    models that only attend, every 16 tokens for recurrent ones.  settings: the fields of `Settings`; max_tokens, by
    default None, bounds the text behind the last prompt.  options, backend, threads: as `Conversation`.
    Raises UserError or ModelFileError: no such model, a bad setting, a prompt that does not fit.

    Methods are for one thread at a time, `stop` for any; in a loop over `generate` the session may be changed, which
    ends that loop.  A method that raises, KeyboardInterrupt too, leaves the session as it was, or as it is
    afterwards."""

    def __init__(self, model: LanguageModel | str = "default", prompt: Prompt | None = None, *,
                 checkpoints: Policy | None = None, options: Options | None = None, backend: str | None = None,
                 threads: int | None = None, **settings: Any):
        self.model = model if isinstance(model, LanguageModel) else load_model(model, backend=backend or "auto")
        unknown = [name for name in settings if name not in Settings.__dataclass_fields__]
        if unknown:
            raise UserError(f"no setting {unknown[0]!r}; there are {', '.join(Settings.__dataclass_fields__)}")
        self.settings, self.context, self._matcher = self.model.check(0, Settings(**{"max_tokens": None, **settings}))
        self.checkpoints = checked_policy(checkpoints)
        self._backend, self._threads, self._options = backend, threads, options
        self._program = self.model.program(options, conversation=True, repeat_penalty=self.settings.repeat_penalty)
        self._key = self.model.key_of(options)         # of its states in the model's prefix index
        self._now, self._closed = Current(), False     # what changes is replaced with it, as a whole
        self._stopped = False                          # since `generate` was called, or a conversation's `say`
        self._recurrent: bool | None = None            # whether states cannot be cut; None: not known yet
        self._lock = threading.Lock()
        self._start()
        if prompt is not None:
            self.append(prompt)

    def another_machine(self) -> SessionMachine:
        """A machine with this session's program and settings that has computed nothing."""
        return SessionMachine(self.model.machine(self._program, self.settings, self.context, self._matcher,
                                                 backend=self._backend, threads=self._threads))

    def _start(self) -> None:
        """A fresh machine."""
        machine = self.another_machine()
        machine.vm.set_sink("LOGPROBS", lambda item: self._now.generated and self._now.generated.take_logprobs(item))
        self._machine = machine

    # What is there.

    @property
    def machine(self) -> VM:
        """The machine that holds the session."""
        return self._machine.vm

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids: of prompts, generated and injected ones."""
        return tuple(self._now.tokens)

    @property
    def start(self) -> int:
        """Where the text begins in `tokens`: behind the last prompt."""
        return self._now.start

    @property
    def text(self) -> str:
        """The text behind the last prompt; a stop string that ended it, and what its tokens say behind that, is part of
        it."""
        return self._said(self._now)

    @property
    def evaluated(self) -> int:
        """Tokens that went through the model since the session was made or forked."""
        return self._now.evaluated + (self._machine.evaluated if self._now.generated is not None else 0)

    @property
    def waiting(self) -> int:
        """Tokens that `generate` evaluates before it draws the next one."""
        now = self._settled(share=False, marked=False)
        total = len(now.tokens) + len(self._left(now))
        return total - now.usable(total).rows

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why generation last ended; None while it can simply go on."""
        return self._now.finish_reason

    @property
    def closed(self) -> bool:
        """Whether `close` was called: the machine is gone."""
        return self._closed

    # Going on.

    def append(self, prompt: Prompt) -> None:
        """Text from outside, behind which a new text begins: a text or token ids, at the beginning also chat messages.
        Corrections before it can no longer be undone.

        UserError: an empty prompt, ids outside the vocabulary, text that `inject` would refuse.  ContextFull."""
        with self._exclusive():
            now = self._settled()
            first = not now.tokens and not now.rest
            if first or not isinstance(prompt, str):
                ids = [*self._left(now), *self.model.prompt_tokens(prompt, messages=first)]
            else:
                ids = self._spell(prompt, now.rest)
            self._room(len(now.tokens) + len(ids))
            self._now = now.prompted().extended(ids, self._machine.seed).begun()

    def inject(self, text: str | Sequence[int]) -> None:
        """Go on with this text, as if the model had written it.  It is evaluated when `generate` goes on.

        A text is spelled in tokens of its own, together with what a rollback left of a token; control tokens written in
        it stay characters.  Token ids are taken as they are.  UserError: an empty text, one that the vocabulary cannot
        spell, ids outside it, a text that the grammar does not allow; ContextFull: there is no room for it.  Nothing
        changes then."""
        with self._exclusive():
            self._now = self._injected(self._settled(), text)

    def _injected(self, now: Current, text: str | Sequence[int]) -> Current:
        ids = self._spell(text, now.rest) if isinstance(text, str) else \
            [*self._left(now), *self.model.prompt_tokens(text, "inject", False)]
        self._room(len(now.tokens) + len(ids))
        self._allowed([*now.tokens[now.start:], *ids])
        return (now if now.correcting else now.remembered()).extended(ids, self._machine.seed)

    def _spell(self, text: str, rest: str) -> list[int]:
        if not text and not rest:
            return spelled(self.model.model.tokenizer, text)                # says what is wrong
        if text:
            spelled(self.model.model.tokenizer, text)
        return spelled(self.model.model.tokenizer, rest + text)

    def _left(self, now: Current) -> list[int]:
        """What is left of a token that a place cut, spelled by itself."""
        return self._spell("", now.rest) if now.rest else []

    def _room(self, tokens: int) -> None:
        if tokens > self.context:
            raise ContextFull(f"the session would have {tokens} tokens, the context holds {self.context}; go "
                              "back, shorten the text, or allow more context")

    def generate(self, max_tokens: int | None = None) -> Iterator[Piece]:
        """Go on: an iterator of `Piece`.  It runs the machine while it is asked for the next piece; leaving the loop,
        or changing the session, ends it where it is.  max_tokens: at most so many more.

        UserError: there is nothing to go on from, or the session is closed.  ContextFull."""
        self._stopped = False
        return self._going_on(max_tokens)

    def _going_on(self, max_tokens: int | None = None) -> Iterator[Piece]:
        Settings(max_tokens=max_tokens).checked()
        self._check_open()
        if not self._now.tokens and not self._now.rest:
            raise UserError("generate: the session is empty; append a prompt first")
        return self._generate(max_tokens)

    def __iter__(self) -> Iterator[Piece]:
        return self.generate()

    def _generate(self, max_tokens: int | None) -> Iterator[Piece]:
        with self._exclusive():
            made = self._begin(max_tokens)
        if made is None:
            yield Piece("", finish_reason=self._now.finish_reason)
            return
        if self._stopped:                              # before the machine stood there, which forgets interrupts
            self.stop()
        while self._now.generated is made:
            with self._exclusive():
                if self._now.generated is not made:    # another thread changed the session
                    return
                self._step(made)
            while made.ready:
                yield made.ready.popleft()

    def _begin(self, max_tokens: int | None) -> GeneratedText | None:
        """Put the machine where the tokens end; None when nothing may follow them."""
        now = self._now = self._settled()              # the machine is free: its states are in it
        if now.rest:
            ids = self._left(now)
            self._room(len(now.tokens) + len(ids))
            now = now.extended(ids, self._machine.seed)
        text = now.tokens[now.start:]
        made, most = len(text), LARGEST if self.settings.max_tokens is None else self.settings.max_tokens
        if now.finish_reason == "stop" or made >= most:
            self._now = replace(now, finish_reason=now.finish_reason if now.finish_reason == "stop" else "length",
                                correcting=False)
            return None
        if not self._machine.whole:
            self._start()
        point = self._known(now.usable(len(now.tokens)), now.tokens)
        registers = {"rMade": made, "rMaxTokens": min(most, LARGEST if max_tokens is None else made + max_tokens)}
        guided = (self._after(text[:-1]), text[-1]) if self._matcher is not None and text else None
        self._machine.enter(point, now.tokens, now.random[len(now.tokens) - 1], registers, guided)
        wanted = -1 if self.settings.logprobs is None else int(self.settings.logprobs)
        generated = GeneratedText(self.machine, self.model.model, now.tokens, check_stops(self.settings.stop), wanted,
                                  behind=text)
        self._now = replace(now, latest=point, valid=point.rows, last_point=point.rows, finish_reason=None,
                            correcting=False, generated=generated)
        return generated

    def _step(self, made: GeneratedText) -> None:
        """One token, or the end."""
        try:
            item = self._machine.step()
        except BaseException:                          # the machine is of no use any more; the tokens are
            self._now = replace(self._now, generated=None, evaluated=self.evaluated)
            self._start()
            raise
        token = int.from_bytes(item, "little", signed=True)
        if token < 0:
            made.finish()
            self._now = replace(self._settled(), finish_reason=made.finish_reason, ended_at=made.ended_at)
            return
        self._now.drawn(token, self.machine.main.rng)
        made.take_token(item)
        if made.ended_at is not None:                  # also for whoever leaves the loop at this piece
            self._now = replace(self._now, finish_reason="stop", ended_at=made.ended_at)
        self._note()

    def _note(self) -> None:
        """A checkpoint of the tokens before the one that was just drawn, if one is due."""
        now = self._now
        rows = len(now.tokens) - 1
        if rows == now.start and self.model.prefixes is not None:
            self._share(self._machine.here(logits=True))
        if self._recurrent is None:
            self._recurrent = not self._machine.here(logits=False).shortens
        policy = self.checkpoints or (EveryTokens() if self._recurrent else None)
        if policy is None or rows <= now.last_point:
            return
        text = self._piece(now.tokens[rows - 1]) if getattr(policy, "reads_text", True) else ""
        if rows == now.start or policy.due(rows - now.last_point, text):
            # At the beginning of a text also what follows, so that it can begin again without computing anything.
            points = thinned([*now.points, self._machine.here(logits=rows == now.start)], policy.keep)
            self._now = now.noted(points, rows)

    def stop(self) -> None:
        """End generation before its next token, from any thread or a signal handler."""
        self._stopped = True
        self._machine.vm.interrupt()

    # Going back.

    def rollback(self, to_token: int | None = None, *, to_text: str | None = None, after_text: str | None = None,
                 which: int | None = None) -> int:
        """Take back what comes behind a place; how many tokens that were.  Exactly one place is given:

        to_token: the first token that is taken back, an index into `tokens` (its length: none).  Tokens of a prompt may
        be taken back too; the text then begins there.
        to_text: where this text begins in `text` (a stop string that ended it is part of that); after_text: where it
        ends.  Where it occurs more than once, `which` says the how-manieth: 1 the first, -1 the last.  A token that the
        place cuts is taken back, and what lies before the place of it becomes part of what is injected next, or is
        injected when `generate` goes on.

        UserError: a place that is not there, with the places that are; nothing changes then."""
        with self._exclusive():
            self._now, taken = self._gone_back(self._settled(), to_token, to_text, after_text, which)
            return taken

    def _gone_back(self, now: Current, to_token: int | None = None, to_text: str | None = None,
                   after_text: str | None = None, which: int | None = None, seen: int | None = None
                   ) -> tuple[Current, int]:
        """(the session where `rollback` puts it, how many tokens that takes back).  seen: characters of the text in
        which texts are looked for (None: all)."""
        if [to_token, to_text, after_text].count(None) != 2:
            given = [n for n, v in (("to_token", to_token), ("to_text", to_text), ("after_text", after_text))
                     if v is not None]
            raise UserError("rollback: give one of to_token, to_text and after_text, not "
                            f"{' and '.join(given) or 'none'}")
        if isinstance(to_token, str):
            raise UserError(f"rollback: {brief(repr(to_token))} is a text, to_token is a number; to go back to a text "
                            f"write rollback(to_text={brief(repr(to_token))})")
        if to_token is not None:
            if isinstance(to_token, bool) or not isinstance(to_token, (int, np.integer)) or \
                    not 0 <= to_token <= len(now.tokens):
                raise UserError(f"to_token: {brief(repr(to_token))} is no token of the session; it has "
                                f"{len(now.tokens)}, give 0 to {len(now.tokens)} (the text begins at {now.start})")
            kept, rest = int(to_token), ""
        else:
            kept, rest = self._find(now, to_text, after_text, which, seen)
        return replace(now.remembered().cut(kept), rest=rest, finish_reason=None), len(now.tokens) - kept

    def _find(self, now: Current, to_text: str | None, after_text: str | None, which: int | None,
              seen: int | None) -> tuple[int, str]:
        """(tokens to keep, what is left of the next one)."""
        found = self._text_of(now)
        if now.rest:
            found = found.followed_by(now.rest)
        if seen is not None:
            found = found.shown(seen)
        wanted = to_text if to_text is not None else after_text
        at = found.find(wanted, which, "to_text" if to_text is not None else "after_text")
        place = found.place(at if to_text is not None else at + len(wanted))
        return now.start + place.tokens, place.rest

    def _correct(self, place: dict[str, Any], text: str | Sequence[int] | None, beside: Beside,
                 seen: int | None = None) -> int:
        """`rollback`, where there is a place, and `inject`, where there is a text, in one; tokens that were taken back.
        beside: what else is stored with the session, for what it is then; seen: as `_gone_back`."""
        with self._exclusive():
            now, taken = self._settled(), 0
            if place:
                now, taken = self._gone_back(now, **place, seen=seen)
            if text is not None:
                now = self._injected(now, text)
            self._put(now, beside(now))
            return taken

    def become(self, tokens: Sequence[int]) -> None:
        """Make these the session's tokens, all of them a prompt; states of the tokens they begin alike with are kept.

        UserError: ids outside the vocabulary, or none; ContextFull."""
        self._become(tokens)

    def _become(self, tokens: Sequence[int], beside: Iterable[Stored] = ()) -> None:
        """`become`.  beside: what else is stored with it."""
        with self._exclusive():
            ids = self.model.prompt_tokens(tokens, messages=False)
            self._room(len(ids))
            now = self._settled()
            same = next((i for i, (a, b) in enumerate(zip(now.tokens, ids)) if a != b), min(len(now.tokens), len(ids)))
            self._put(now.prompted().cut(same).extended(ids[same:], self._machine.seed).begun(), beside)

    def undo(self) -> bool:
        """Take the last correction back (a rollback and what was injected behind it, or an injection alone) with all
        that came after; False when there is none.  Generation then goes on where it was."""
        return self._undo(lambda now: ())

    def _undo(self, beside: Beside) -> bool:
        """`undo`.  beside: as `_correct` has it."""
        with self._exclusive():
            now = self._settled()
            if not now.history:
                return False
            now = now.at(now.history[-1], now.history[:-1])
            self._put(now, beside(now))
            return True

    # Whole states.

    def snapshot(self) -> SessionState:
        """All of the session as it is now: a value that `restore` puts back, here or in a fork."""
        with self._exclusive():
            return self._settled(share=False).state

    def restore(self, state: SessionState) -> None:
        """Make a snapshot the session's state; corrections before it can no longer be undone."""
        if not isinstance(state, SessionState):
            raise UserError(f"restore: what snapshot() gave is expected, got {type(state).__name__}")
        self._restore(state)

    def _restore(self, state: SessionState, beside: Iterable[Stored] = ()) -> None:
        """`restore`.  beside: what else is stored with it."""
        with self._exclusive():
            self._put(self._settled().at(state), beside)

    def fork(self) -> "Session":
        """Another session that is as this one is now, and goes its own way.  States are shared, nothing is computed;
        its machine is new.  UserError: the session is closed, or is generating in another thread."""
        with self._exclusive():
            other = Session.__new__(Session)
            other.__dict__.update(self.__dict__)
            now = self._settled(share=False)
            other._now = replace(now.at(now.state, now.history), correcting=now.correcting, evaluated=0)
            other._lock = threading.Lock()
            other._start()
            return other

    def close(self) -> None:
        """End the machine.  UserError: it is generating in another thread."""
        if not self._closed:
            with self._exclusive():
                self._now = self._settled()
                self._closed = True
        self._machine.close()                          # also where the last call was interrupted before it

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the others are made of.

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One thread at a time, and only before `close`."""
        held: list[bool] = []
        try:
            held.extend(map(self._lock.acquire, (False,)))                  # in one call: no interrupt between the two
            if not held[0]:
                raise UserError("the session is generating in another thread: call stop(), wait for it, and try again")
            self._check_open()
            yield
        finally:
            if held and held[0]:
                self._lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("the session is closed; fork it before closing it, or make another one")

    def _put(self, now: Current, beside: Iterable[Stored]) -> None:
        """Make it the session's state, and do other stores, in one."""
        commit([attribute(self, "_now", now), *beside])

    def _settled(self, share: bool = True, marked: bool = True) -> Current:
        """The session with what its machine has computed, as a value: once it is stored, the machine may be put
        somewhere else, and loops over `generate` end.  share: other texts may begin behind it; marked: as
        `SessionMachine.here`."""
        now = self._now
        if now.generated is None:
            return now
        if not self._machine.whole:                    # it was interrupted, and that again
            return replace(now, generated=None)
        point = self._machine.here(logits=True, marked=marked)
        if share:
            self._share(point)
        return replace(now, evaluated=now.evaluated + self._machine.evaluated, latest=point, valid=point.rows,
                       generated=None)

    def _share(self, point: Checkpoint) -> None:
        """Let other texts of the model begin behind these states, if it has a prefix index."""
        if self.model.prefixes is not None:
            self.model.prefixes.add(self._key, self._now.tokens, point)

    def _known(self, point: Checkpoint, tokens: list[int]) -> Checkpoint:
        """`point`, or what the prefix index has for the tokens where that is more."""
        index = self.model.prefixes
        found = index.find(self._key, tokens) if index is not None and point.rows < len(tokens) - 1 else None
        return point if found is None or found.rows <= point.rows else found

    def _text_of(self, now: Current) -> TokenText:
        return TokenText(self.model.model.tokenizer, now.tokens[now.start:])

    def _said(self, now: Current) -> str:
        """The text behind the last prompt."""
        return self._text_of(now).data.decode("utf-8", "replace") + now.rest

    def _piece(self, token: int) -> str:
        return self.model.model.tokenizer.decode_bytes(token).decode("utf-8", "replace")

    def _after(self, tokens: Sequence[int]) -> Matcher:
        """The grammar behind these tokens of a text."""
        return self._matcher.after_all(tokens)

    def _allowed(self, text: Sequence[int]) -> None:
        """UserError unless the grammar allows these tokens."""
        if self._matcher is not None:
            try:
                self._after(text)
            except OperandError as error:
                raise UserError(f"inject: {error}") from None
