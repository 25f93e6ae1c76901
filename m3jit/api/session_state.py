"""The state of a session as one value: a snapshot of it, and the one it has now."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Iterable, Sequence

from m3jit.api.checkpoints import NOTHING, Checkpoint
from m3jit.api.generated import FinishReason, GeneratedText

KEPT = 64                           # corrections that can be undone, and prompts whose beginnings are kept


@dataclass(frozen=True)
class SessionState:
    """All of a session at one moment, to go back to with `Session.restore`; nothing in it is a copy of states.

    start: the first token of the text, behind the last prompt.  rest: text that is part of it, but of no token yet.
    valid: so many tokens are those that `latest` was computed with.  random: the random stream behind each token.
    points, prompts: checkpoints of a policy, and where prompts begin.  ended_at: where the finish reason is "stop",
    the characters of the text in front of the stop string (None: the model ended it)."""
    tokens: tuple[int, ...] = ()
    start: int = 0
    rest: str = ""
    finish_reason: FinishReason | None = None
    random: tuple[int, ...] = ()
    latest: Checkpoint = NOTHING
    valid: int = 0
    points: tuple[Checkpoint, ...] = ()
    prompts: tuple[Checkpoint, ...] = ()
    ended_at: int | None = None


@dataclass(frozen=True)
class Current:
    """What a session is now: the fields of `SessionState`, and what belongs to them.

    A session replaces it as a whole, by one store, so that an interrupt (Ctrl-C) finds the session as it was before an
    operation or as it is afterwards.  Methods give another value; `drawn` alone changes its lists.

    random: may be longer than `tokens`; what is beyond counts for nothing.  history: what `undo` goes back to, the
    newest last.  correcting: a correction has begun, and is that newest one.  evaluated: tokens that went through
    machines before `generated`.  generated: the text that the machine is at; None: it stands somewhere else.
    last_point: where the last checkpoint of a policy was taken."""
    tokens: list[int] = field(default_factory=list)
    start: int = 0
    rest: str = ""
    finish_reason: FinishReason | None = None
    random: list[int] = field(default_factory=list)
    latest: Checkpoint = NOTHING
    valid: int = 0
    points: tuple[Checkpoint, ...] = ()
    prompts: tuple[Checkpoint, ...] = ()
    history: tuple[SessionState, ...] = ()
    correcting: bool = False
    evaluated: int = 0
    generated: GeneratedText | None = None
    last_point: int = 0
    ended_at: int | None = None

    def drawn(self, token: int, random: int) -> None:
        """Add the token that the machine drew, and the random stream behind it."""
        self.random[len(self.tokens):] = [random]
        self.tokens.append(token)                      # by this both are there

    def noted(self, points: Iterable[Checkpoint], rows: int) -> "Current":
        """With these checkpoints of a policy, the last of them at so many tokens."""
        out = object.__new__(Current)                  # as `replace`, in a fifth of its time: a token may need it
        out.__dict__.update(self.__dict__, points=tuple(points), last_point=rows)
        return out

    @property
    def state(self) -> SessionState:
        """The value that `snapshot` gives, of a session whose machine stands somewhere else."""
        return SessionState(tuple(self.tokens), self.start, self.rest, self.finish_reason,
                            tuple(self.random[:len(self.tokens)]), self.latest, self.valid, self.points, self.prompts,
                            self.ended_at)

    def at(self, state: SessionState, history: Iterable[SessionState] = ()) -> "Current":
        """As a snapshot has it; history: corrections that can still be undone."""
        return Current(list(state.tokens), state.start, state.rest, state.finish_reason, list(state.random),
                       state.latest, state.valid, state.points, state.prompts, tuple(history), evaluated=self.evaluated,
                       ended_at=state.ended_at)

    def extended(self, ids: Sequence[int], seed: int) -> "Current":
        """With more tokens from outside.  seed: the random stream before the first draw."""
        known = self.random[len(self.tokens) - 1] if self.tokens else seed
        return replace(self, tokens=[*self.tokens, *ids], rest="", finish_reason=None,
                       random=[*self.random[:len(self.tokens)], *[known] * len(ids)])

    def cut(self, kept: int) -> "Current":
        """With the first tokens alone."""
        return replace(self, tokens=self.tokens[:kept], random=self.random[:kept], valid=min(self.valid, kept),
                       points=tuple(p for p in self.points if p.rows <= kept),
                       prompts=tuple(p for p in self.prompts if p.rows <= kept), start=min(self.start, kept))

    def remembered(self) -> "Current":
        """With this state to go back to by `undo`: a correction begins."""
        return replace(self, history=(*self.history, self.state)[-KEPT:], correcting=True)

    def prompted(self) -> "Current":
        """With a checkpoint where a prompt begins, for models whose states cannot be cut."""
        here = self.usable(len(self.tokens) + 1)
        if not here.rows or here.shortens:
            return self
        return replace(self, prompts=(*self.prompts, here)[-KEPT:])

    def begun(self) -> "Current":
        """With a new text that begins behind all tokens; corrections before it can no longer be undone."""
        return replace(self, start=len(self.tokens), history=(), correcting=False)

    def usable(self, total: int) -> Checkpoint:
        """The states that hold most of the tokens, where there are `total` to compute: all of them only where what
        follows is known too."""
        rows = min(self.valid, self.latest.rows)
        found = [*self.points, *self.prompts, self.latest.cut(rows), self.latest.cut(min(rows, total - 1))]
        fits = [p for p in found if p is not None and (p.rows < total or p.rows == total and p.logits is not None)]
        return max(fits, key=lambda p: p.rows, default=NOTHING)
