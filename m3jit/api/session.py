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
from typing import Any, Iterator, Sequence

import numpy as np

from m3jit.api.checkpoints import Checkpoint, EveryTokens, Policy, thinned
from m3jit.api.generated import FinishReason, GeneratedText, Piece
from m3jit.api.generation import LARGEST, LanguageModel, Prompt, Settings, load_model
from m3jit.api.places import TokenText
from m3jit.api.prefixes import unfinished
from m3jit.api.saved import SavedSession
from m3jit.api.session_machine import SessionMachine
from m3jit.api.session_state import SessionState
from m3jit.api.spelling import spelled
from m3jit.api.stop_strings import check_stops
from m3jit.errors import OperandError, UserError, brief
from m3jit.models.grammar import Matcher
from m3jit.models.program import Options
from m3jit.vm.vm import VM

KEPT = 64                           # corrections that can be undone, and prompts whose beginnings are kept


class ContextFull(UserError):
    """A session or conversation has more tokens than the model's context."""


class Session(SavedSession):
    """A text with a model: made from a model's name or file, or a `LanguageModel`.

    prompt: as `append` takes it (None: nothing yet).  checkpoints: a policy of `m3jit.api.checkpoints`; None: none for
    models that only attend, every 16 tokens for recurrent ones.  settings: the fields of `Settings`; max_tokens, by
    default None, bounds the text behind the last prompt.  options, backend, threads: as `Conversation`.
    Raises UserError or ModelFileError: no such model, a bad setting, a prompt that does not fit.

    Methods are for one thread at a time, `stop` for any; in a loop over `generate` the session may be changed, which
    ends that loop."""

    def __init__(self, model: LanguageModel | str = "default", prompt: Prompt | None = None, *,
                 checkpoints: Policy | None = None, options: Options | None = None, backend: str | None = None,
                 threads: int | None = None, **settings: Any):
        self.model = model if isinstance(model, LanguageModel) else load_model(model)
        unknown = [name for name in settings if name not in Settings.__dataclass_fields__]
        if unknown:
            raise UserError(f"no setting {unknown[0]!r}; there are {', '.join(Settings.__dataclass_fields__)}")
        self.settings, self.context, self._matcher = self.model.check(0, Settings(**{"max_tokens": None, **settings}))
        self.checkpoints = checkpoints
        self._backend, self._threads, self._options = backend, threads, options
        self._program = self.model.program(options, conversation=True, repeat_penalty=self.settings.repeat_penalty)
        self._key = self.model.key_of(options)         # of its states in the model's prefix index
        self._history: list[SessionState] = []
        self._evaluated, self._closed, self._correcting = 0, False, False
        self._recurrent: bool | None = None            # whether states cannot be cut; None: not known yet
        self._lock = threading.Lock()
        self._start()
        self._take(SessionState())
        if prompt is not None:
            self.append(prompt)

    def another_machine(self) -> SessionMachine:
        """A machine with this session's program and settings that has computed nothing."""
        return SessionMachine(self.model.machine(self._program, self.settings, self.context, self._matcher,
                                                 backend=self._backend, threads=self._threads))

    def _start(self) -> None:
        """A fresh machine."""
        self._machine = self.another_machine()
        self._machine.vm.set_sink("LOGPROBS", lambda item: self._generated and self._generated.take_logprobs(item))
        self._generated: GeneratedText | None = None   # what the machine is at; None: it stands somewhere else
        self._last_point = 0

    # What is there.

    @property
    def machine(self) -> VM:
        """The machine that holds the session."""
        return self._machine.vm

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids: of prompts, generated and injected ones."""
        return tuple(self._tokens)

    @property
    def start(self) -> int:
        """Where the text begins in `tokens`: behind the last prompt."""
        return self._first

    @property
    def text(self) -> str:
        """The text behind the last prompt."""
        return self._text_of().data.decode("utf-8", "replace") + self._rest

    @property
    def evaluated(self) -> int:
        """Tokens that went through the model since the session was made or forked."""
        return self._evaluated + (self._machine.evaluated if self._generated is not None else 0)

    @property
    def waiting(self) -> int:
        """Tokens that `generate` evaluates before it draws the next one."""
        total = len(self._tokens) + (len(self._spell("")) if self._rest else 0)
        return total - self._usable(total).rows

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why generation last ended; None while it can simply go on."""
        return self._finish

    @property
    def closed(self) -> bool:
        return self._closed

    # Going on.

    def append(self, prompt: Prompt) -> None:
        """Text from outside, behind which a new text begins: a text or token ids, at the beginning also chat messages.
        Corrections before it can no longer be undone.

        UserError: an empty prompt, ids outside the vocabulary, text that `inject` would refuse.  ContextFull."""
        with self._exclusive():
            first = not self._tokens and not self._rest
            ids = self.model.prompt_tokens(prompt) if first or not isinstance(prompt, str) else self._spell(prompt)
            self._room(len(self._tokens) + len(ids))
            self._checkpoint_prompt()
            self._extend(ids)
            self._first = len(self._tokens)
            self._history.clear()

    def _checkpoint_prompt(self) -> None:
        """Keep where a prompt begins, for models whose states cannot be cut."""
        here = self._usable(len(self._tokens) + 1)
        if here.rows and not here.shortens:
            self._prompt_points = [*self._prompt_points, here][-KEPT:]

    def inject(self, text: str | Sequence[int]) -> None:
        """Go on with this text, as if the model had written it.  It is evaluated when `generate` goes on.

        A text is spelled in tokens of its own, together with what a rollback left of a token; control tokens written in
        it stay characters.  Token ids are taken as they are.  UserError: an empty text, one that the vocabulary cannot
        spell, ids outside it, a text that the grammar does not allow; ContextFull: there is no room for it.  Nothing
        changes then."""
        with self._exclusive():
            ids = self._spell(text) if isinstance(text, str) else self.model.prompt_tokens(text)
            self._room(len(self._tokens) + len(ids))
            self._allowed([*self._tokens[self._first:], *ids])
            self._remember()
            self._extend(ids)

    def _spell(self, text: str) -> list[int]:
        if not text and not self._rest:
            return spelled(self.model.model.tokenizer, text)                # says what is wrong
        if text:
            spelled(self.model.model.tokenizer, text)
        return spelled(self.model.model.tokenizer, self._rest + text)

    def _extend(self, ids: Sequence[int]) -> None:
        self._settle()
        known = self._random[-1] if self._random else self._machine.seed
        self._tokens += ids
        self._random += [known] * len(ids)
        self._rest, self._finish = "", None

    def _room(self, tokens: int) -> None:
        if tokens > self.context:
            raise ContextFull(f"the session would have {tokens} tokens, the context holds {self.context}; go back, shorten "
                              "the text, or allow more context")

    def generate(self, max_tokens: int | None = None) -> Iterator[Piece]:
        """Go on: an iterator of `Piece`.  It runs the machine while it is asked for the next piece; leaving the loop, or
        changing the session, ends it where it is.  max_tokens: at most so many more.

        UserError: there is nothing to go on from, or the session is closed.  ContextFull."""
        Settings(max_tokens=max_tokens).checked()
        self._check_open()
        if not self._tokens and not self._rest:
            raise UserError("generate: the session is empty; append a prompt first")
        return self._generate(max_tokens)

    def __iter__(self) -> Iterator[Piece]:
        return self.generate()

    def _generate(self, max_tokens: int | None) -> Iterator[Piece]:
        with self._exclusive():
            made = self._begin(max_tokens)
        if made is None:
            yield Piece("", finish_reason=self._finish)
            return
        while self._generated is made:
            with self._exclusive():
                if self._generated is not made:        # another thread changed the session
                    return
                self._step(made)
            while made.ready:
                yield made.ready.popleft()

    def _begin(self, max_tokens: int | None) -> GeneratedText | None:
        """Put the machine where the tokens end; None when nothing may follow them."""
        if self._rest:
            ids = self._spell("")
            self._room(len(self._tokens) + len(ids))
            self._extend(ids)
        self._settle()
        self._correcting = False
        made = len(self._tokens) - self._first
        most = LARGEST if self.settings.max_tokens is None else self.settings.max_tokens
        if made >= most:
            self._finish = "length"
        if self._finish == "stop" or made >= most:
            return None
        point = self._known(self._usable(len(self._tokens)))
        registers = {"rMade": made, "rMaxTokens": min(most, LARGEST if max_tokens is None else made + max_tokens)}
        text = self._tokens[self._first:]
        guided = (self._after(text[:-1]), text[-1]) if self._matcher is not None and text else None
        self._machine.enter(point, self._tokens, self._random[-1], registers, guided)
        self._latest, self._valid, self._last_point, self._finish = point, point.rows, point.rows, None
        wanted = -1 if self.settings.logprobs is None else int(self.settings.logprobs)
        self._generated = GeneratedText(self.machine, self.model.model, self._tokens, check_stops(self.settings.stop),
                                        wanted, behind=unfinished(self.model.model.tokenizer, text))
        return self._generated

    def _step(self, made: GeneratedText) -> None:
        """One token, or the end."""
        try:
            item = self._machine.step()
        except BaseException:                          # the machine is of no use any more; the tokens are
            self._evaluated += max(0, self._machine.evaluated)
            self._start()
            raise
        token = int.from_bytes(item, "little", signed=True)
        if token < 0:
            made.finish()
            self._finish = made.finish_reason
            self._settle()
            return
        self._tokens.append(token)
        self._random.append(self.machine.main.rng)
        made.take_token(item)
        self._note()

    def _note(self) -> None:
        """A checkpoint of the tokens before the one that was just drawn, if one is due."""
        rows = len(self._tokens) - 1
        if rows == self._first and self.model.prefixes is not None:
            self._share(self._machine.here(logits=True))
        if self._recurrent is None:
            self._recurrent = not self._machine.here(logits=False).shortens
        policy = self.checkpoints or (EveryTokens() if self._recurrent else None)
        if policy is None or rows <= self._last_point:
            return
        if rows == self._first or policy.due(rows - self._last_point, self._piece(self._tokens[rows - 1])):
            # At the beginning of a text also what follows, so that it can begin again without computing anything.
            self._points = thinned([*self._points, self._machine.here(logits=rows == self._first)], policy.keep)
            self._last_point = rows

    def stop(self) -> None:
        """End generation before its next token, from any thread or a signal handler."""
        self._machine.vm.interrupt()

    # Going back.

    def rollback(self, to_token: int | None = None, *, to_text: str | None = None, after_text: str | None = None,
                 which: int | None = None) -> int:
        """Take back what comes behind a place; how many tokens that were.  Exactly one place is given:

        to_token: the first token that is taken back, an index into `tokens` (its length: none).  Tokens of a prompt may
        be taken back too; the text then begins there.
        to_text: where this text begins in `text`; after_text: where it ends.  Where it occurs more than once, `which`
        says the how-manieth: 1 the first, -1 the last.  A token that the place cuts is taken back, and what lies before
        the place of it becomes part of what is injected next, or is injected when `generate` goes on.

        UserError: a place that is not there, with the places that are; nothing changes then."""
        with self._exclusive():
            if [to_token, to_text, after_text].count(None) != 2:
                raise UserError("rollback: give one of to_token, to_text and after_text")
            if to_token is not None:
                if isinstance(to_token, bool) or not isinstance(to_token, (int, np.integer)) or \
                        not 0 <= to_token <= len(self._tokens):
                    raise UserError(f"to_token: {brief(repr(to_token))} is no token of the session; it has "
                                    f"{len(self._tokens)}, give 0 to {len(self._tokens)} (the text begins at "
                                    f"{self._first})")
                kept, rest = int(to_token), ""
            else:
                kept, rest = self._find(to_text, after_text, which)
            self._correcting = False
            self._remember()
            taken = len(self._tokens) - kept
            self._cut(kept)
            self._rest, self._finish = rest, None
            return taken

    def _find(self, to_text: str | None, after_text: str | None, which: int | None) -> tuple[int, str]:
        """(tokens to keep, what is left of the next one)."""
        found = self._text_of()
        if self._rest:
            found = found.followed_by(self._rest)
        wanted = to_text if to_text is not None else after_text
        at = found.find(wanted, which)
        place = found.place(at if to_text is not None else at + len(wanted))
        return self._first + place.tokens, place.rest

    def _cut(self, kept: int) -> None:
        self._settle()
        del self._tokens[kept:], self._random[kept:]
        self._valid = min(self._valid, kept)
        self._points = [p for p in self._points if p.rows <= kept]
        self._prompt_points = [p for p in self._prompt_points if p.rows <= kept]
        self._first = min(self._first, kept)

    def become(self, tokens: Sequence[int]) -> None:
        """Make these the session's tokens, all of them a prompt; states of the tokens they begin alike with are kept.

        UserError: ids outside the vocabulary, or none; ContextFull."""
        with self._exclusive():
            ids = self.model.prompt_tokens(tokens)
            self._room(len(ids))
            same = next((i for i, (a, b) in enumerate(zip(self._tokens, ids)) if a != b),
                        min(len(self._tokens), len(ids)))
            self._checkpoint_prompt()
            self._cut(same)
            self._extend(ids[same:])
            self._first = len(ids)
            self._history.clear()

    def undo(self) -> bool:
        """Take the last correction back (a rollback and what was injected behind it, or an injection alone) with all that
        came after; False when there is none.  Generation then goes on where it was."""
        with self._exclusive():
            if not self._history:
                return False
            self._take(self._history.pop())
            self._correcting = False
            return True

    def _remember(self) -> None:
        """What `undo` goes back to, when a correction begins."""
        if not self._correcting:
            self._history = [*self._history, self._state()][-KEPT:]
            self._correcting = True

    # Whole states.

    def snapshot(self) -> SessionState:
        """All of the session as it is now: a value that `restore` puts back, here or in a fork."""
        with self._exclusive():
            return self._state()

    def restore(self, state: SessionState) -> None:
        """Make a snapshot the session's state; corrections before it can no longer be undone."""
        if not isinstance(state, SessionState):
            raise UserError(f"restore: what snapshot() gave is expected, got {type(state).__name__}")
        with self._exclusive():
            self._take(state)
            self._history.clear()

    def fork(self) -> "Session":
        """Another session that is as this one is now, and goes its own way.  States are shared, nothing is computed; its
        machine is new.  UserError: the session is closed, or is generating in another thread."""
        with self._exclusive():
            other = Session.__new__(Session)
            other.__dict__.update(self.__dict__)
            other._evaluated, other._history = 0, list(self._history)
            other._lock = threading.Lock()
            other._start()
            other._take(self._state())
            return other

    def close(self) -> None:
        """End the machine.  UserError: it is generating in another thread."""
        if not self._closed:
            with self._exclusive():
                self._settle()
                self._closed = True
                self._machine.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the others are made of.

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One thread at a time, and only before `close`."""
        if not self._lock.acquire(blocking=False):
            raise UserError("the session is generating in another thread: call stop(), wait for it, and try again")
        try:
            self._check_open()
            yield
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("the session is closed; fork it before closing it, or make another one")

    def _state(self) -> SessionState:
        latest, valid = self._latest, self._valid
        if self._generated is not None:
            latest = self._machine.here(logits=True)
            valid = latest.rows
        return SessionState(tuple(self._tokens), self._first, self._rest, self._finish, tuple(self._random), latest,
                            valid, tuple(self._points), tuple(self._prompt_points))

    def _take(self, state: SessionState) -> None:
        self._settle()
        self._tokens, self._random = list(state.tokens), list(state.random)
        self._first, self._rest, self._finish = state.start, state.rest, state.finish_reason
        self._latest, self._valid = state.latest, state.valid
        self._points, self._prompt_points = list(state.points), list(state.prompts)

    def _settle(self) -> None:
        """Take over what the machine has computed: it may be put somewhere else now.  Loops over `generate` end."""
        if self._generated is not None:
            self._evaluated += self._machine.evaluated
            self._latest = self._machine.here(logits=True)
            self._valid, self._generated = self._latest.rows, None
            self._share(self._latest)

    def _share(self, point: Checkpoint) -> None:
        """Let other texts of the model begin behind these states, if it has a prefix index."""
        if self.model.prefixes is not None:
            self.model.prefixes.add(self._key, self._tokens, point)

    def _known(self, point: Checkpoint) -> Checkpoint:
        """`point`, or what the prefix index has for the tokens where that is more."""
        index = self.model.prefixes
        found = index.find(self._key, self._tokens) if index is not None and point.rows < len(self._tokens) - 1 else None
        return point if found is None or found.rows <= point.rows else found

    def _usable(self, total: int) -> Checkpoint:
        """`SessionState.usable` of the state as it is."""
        return self._state().usable(total)

    def _text_of(self) -> TokenText:
        return TokenText(self.model.model.tokenizer, self._tokens[self._first:])

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
