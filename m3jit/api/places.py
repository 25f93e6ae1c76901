"""Places in a generated text: which tokens lie before one, and what is left of a token that it cuts."""
from __future__ import annotations

import bisect
import copy
from dataclasses import dataclass
from typing import Any, Sequence

from m3jit.errors import UserError, brief

NEIGHBOURS = 16                     # characters shown on either side of a place
MOST_SHOWN = 8                      # places an error lists


@dataclass(frozen=True)
class Place:
    """A place in a text.  tokens: how many tokens lie wholly before it; rest: the text between them and it."""
    tokens: int
    rest: str = ""


class TokenText:
    """The text of tokens, and where each one ends in it.  A byte that is part of no character counts as one."""

    def __init__(self, tokenizer: Any, tokens: Sequence[int]):
        pieces = [tokenizer.decode_bytes(token) for token in tokens]
        self.data = b"".join(pieces)
        self.text = self.data.decode("utf-8", "surrogateescape")
        self.seen = len(self.text)  # characters that `find` looks at
        self.ends: list[int] = []   # bytes before the end of each token
        at = 0
        for piece in pieces:
            at += len(piece)
            self.ends.append(at)

    @classmethod
    def of_text(cls, text: str) -> "TokenText":
        """A text without tokens, to find places in."""
        out = cls.__new__(cls)
        out.ends, out.data, out.text, out.seen = [], text.encode(), text, len(text)
        return out

    def shown(self, characters: int) -> "TokenText":
        """The same, of which somebody has seen so many characters, as the text without bytes of no character counts
        them: places behind are not found."""
        out = copy.copy(self)
        out.seen = bisect.bisect_left(range(len(self.text) + 1), characters, key=lambda n: len(self._said(n)))
        return out

    def _said(self, characters: int) -> str:
        """The first characters, as they are shown."""
        return self.text[:characters].encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def followed_by(self, text: str) -> "TokenText":
        """The same tokens, and text behind them that is of none."""
        out = copy.copy(self)
        out.data += text.encode()
        out.text = out.data.decode("utf-8", "surrogateescape")
        out.seen = len(out.text)
        return out

    def place(self, character: int) -> Place:
        """The place before a character.  Tokens without text that stand at it lie behind it."""
        byte = len(self.text[:character].encode("utf-8", "surrogateescape"))
        kept = 0
        for number, end in enumerate(self.ends, 1):
            if end > byte:
                break
            begins = self.ends[number - 2] if number > 1 else 0
            if end > begins and (end == byte or _begins_character(self.data, end)):
                kept = number
        done = self.ends[kept - 1] if kept else 0
        return Place(kept, self.data[done:byte].decode("utf-8", "replace"))

    def find(self, wanted: str, which: int | None = None, name: str = "to_text") -> int:
        """The character where `wanted` begins.  which: the how-manieth, from 1 or, from the end, -1.  name: how errors
        call it.

        UserError: it is not there, or more than once and `which` is not given; the places are listed."""
        if not isinstance(wanted, str) or not wanted:
            raise UserError(f"{name}: a text of the answer is expected, got {brief(repr(wanted))}")
        places, at = [], self.text.find(wanted, 0, self.seen)
        while at >= 0:
            places.append(at)
            at = self.text.find(wanted, at + 1, self.seen)
        if not places:
            raise UserError(f"{brief(repr(wanted))} is not in the text, which is {self._shown()}")
        if which is None and len(places) > 1:
            listed = "; ".join(f"{number}: {self._around(at, wanted)}"
                               for number, at in enumerate(places[:MOST_SHOWN], 1))
            more = f"; and {len(places) - MOST_SHOWN} more" if len(places) > MOST_SHOWN else ""
            raise UserError(f"{brief(repr(wanted))} is in the text {len(places)} times: {listed}{more}; give "
                            "more of the text, or say which of them (-1: the last)")
        number = 1 if which is None else which
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= abs(number) <= len(places):
            raise UserError(f"which: {brief(repr(number))}, but {brief(repr(wanted))} is in the text {len(places)} "
                            f"time{'s' * (len(places) != 1)}; give 1 to {len(places)}, or -1 for the last")
        return places[number - 1 if number > 0 else number]

    def _shown(self) -> str:
        text = self._said(self.seen)
        return repr(text) if len(text) <= 160 else f"{len(text)} characters, ending {text[-120:]!r}"

    def _around(self, at: int, wanted: str) -> str:
        before, behind = max(0, at - NEIGHBOURS), min(self.seen, at + len(wanted) + NEIGHBOURS)
        shown = repr(self.text[before:behind])      # writes bytes that are part of no character out
        return f"{'…' * (before > 0)}{shown}{'…' * (behind < self.seen)}"


def _begins_character(data: bytes, at: int) -> bool:
    """Whether a character begins at a byte, or the data ends there."""
    return at >= len(data) or data[at] & 0xC0 != 0x80
