"""Checkpoints of a session: states put aside while a text is generated, to go back to.

A model that only attends needs none: its keys and values are cut off at any token.  A recurrent state cannot be cut, so
a rollback goes to the newest checkpoint before its place, and what lies between is computed again; the bytes are the
same, because the chunks in which a text is computed do not change them.  A *policy* says when one is taken:

    EveryToken()        nothing but the token at the boundary is computed again
    EveryTokens(16)     at most 16 tokens are
    EverySentence()     at most a sentence is

A checkpoint is a reference.  Keys and values share their pages with it; a recurrent state costs its size, so policies
keep a bounded number: beyond `keep`, every second one of the older half is let go, and so on, so that the tokens to
compute again grow with the distance that is gone back.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Mapping, Protocol

from m3jit.errors import UserError, brief
from m3jit.isa.kv import KVStream

KEEP = 64                           # checkpoints of one session
INTERVAL = 16                       # tokens between two of them, for recurrent models that are given no policy
_CLOSING = "\"'”’»)]}*_ \t"         # may stand behind the end of a sentence


class Policy(Protocol):
    """When a session takes a checkpoint, and how many it keeps (None: all).

    One that has `reads_text` = False is given "" for text: no token is spelled out for it."""
    keep: int | None

    def due(self, since: int, text: str) -> bool:
        """Whether one is due.  since: tokens that have gone through the model since the last checkpoint, from 1; text:
        of the newest of them."""


def checked_policy(policy: Policy | None) -> Policy | None:
    """A policy, or None.  UserError: it is something else."""
    if isinstance(policy, type):
        raise UserError(f"checkpoints: a policy is expected, and {policy.__name__} is the class of such; make one, for "
                        f"example {policy.__name__}()")
    if policy is not None and not (hasattr(policy, "keep") and callable(getattr(policy, "due", None))):
        raise UserError(f"checkpoints: EveryToken, EveryTokens, EverySentence or another policy of "
                        f"m3jit.api.checkpoints is expected, or None, got {brief(repr(policy))}")
    return policy


def _check(name: str, value: Any, low: int, optional: bool = False) -> None:
    if not (value is None and optional) and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise UserError(f"{name}: a whole number from {low}{' or None' if optional else ''} is expected, got "
                        f"{brief(repr(value))}")


@dataclass(frozen=True)
class EveryTokens:
    """A checkpoint every n tokens.  UserError: n below 1, keep below 2."""
    reads_text: ClassVar[bool] = False
    n: int = INTERVAL
    keep: int | None = KEEP

    def __post_init__(self) -> None:
        _check("n", self.n, 1)
        _check("keep", self.keep, 2, optional=True)

    def due(self, since: int, text: str) -> bool:
        """After n tokens."""
        return since >= self.n


@dataclass(frozen=True)
class EveryToken:
    """A checkpoint at every token.  UserError: keep below 2."""
    reads_text: ClassVar[bool] = False
    keep: int | None = KEEP

    def __post_init__(self) -> None:
        _check("keep", self.keep, 2, optional=True)

    def due(self, since: int, text: str) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class EverySentence:
    """A checkpoint behind each sentence: behind a token that ends with . ! ? … or a line feed, quotation marks and
    brackets after it aside; and after `most` tokens without one.  UserError: keep below 2, most below 1."""
    keep: int | None = KEEP
    most: int = 128

    def __post_init__(self) -> None:
        _check("keep", self.keep, 2, optional=True)
        _check("most", self.most, 1)

    def due(self, since: int, text: str) -> bool:
        """Behind the end of a sentence, or after `most` tokens."""
        return since >= self.most or text.endswith("\n") or text.rstrip(_CLOSING).endswith((".", "!", "?", "…", "\n"))


@dataclass(frozen=True)
class Checkpoint:
    """States of a machine that hold the first `rows` tokens of a session.  logits: of the token behind them, or None.

    states: S register -> value, as `VM.states` gives them.  mark: what a log of the machine calls the states that
    these are a part of; None without one."""
    rows: int
    states: Mapping[str, Any]
    logits: Any = None
    mark: Any = field(default=None, compare=False)

    def cut(self, rows: int) -> "Checkpoint | None":
        """The same states with the first `rows` tokens alone; None where they cannot be had from these."""
        if rows == self.rows:
            return self
        if rows > self.rows or not self.shortens:
            return None
        return Checkpoint(rows, {name: state.truncate(rows) for name, state in self.states.items()}, mark=self.mark)

    @property
    def shortens(self) -> bool:
        """Whether earlier states can be had from these: all are key/value streams that have a row for each token."""
        return all(type(state) is KVStream and all(state.length(layer) == self.rows for layer in state.layers)
                   for state in self.states.values())


NOTHING = Checkpoint(0, {})         # a machine that has computed nothing


def thinned(points: list[Checkpoint], keep: int | None) -> list[Checkpoint]:
    """At most `keep` checkpoints: while there are more, every second one of the older half is left out."""
    while keep is not None and len(points) > keep:
        half = max(len(points) // 2, 2)
        points = points[:half:2] + points[half:]
    return points
