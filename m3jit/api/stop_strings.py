"""Stop strings: text up to the first of them, given out as soon as it is certain."""
from __future__ import annotations

from typing import Sequence

from m3jit.errors import UserError

MOST, LONGEST = 16, 1024            # stop strings of a request; characters of one


def check_stops(stops: str | Sequence[str] | None) -> tuple[str, ...]:
    """The stop strings as a tuple.  UserError: too many, an empty one, or one that is no text."""
    if not isinstance(stops, (str, list, tuple, type(None))):
        raise UserError(f"stop: a string or a list of strings is expected, got {stops!r:.60}")
    found = (stops,) if isinstance(stops, str) else tuple(stops or ())
    if len(found) > MOST:
        raise UserError(f"stop: {len(found)} strings; at most {MOST}")
    for text in found:
        if not isinstance(text, str) or not 0 < len(text) <= LONGEST:
            raise UserError(f"stop: strings of 1 to {LONGEST} characters are expected, got {text!r:.60}")
    return found


class StopStrings:
    """Cuts a text that comes in pieces at the stop string that is complete first.

    What could still become one is held back: no part of a stop string is ever given out, and nothing else is kept.
    Of two that are complete at the same character, the longer one counts.

    behind: the text that these pieces go on, and that was given out: a stop string may begin in it, but one that ends
    in it is none.  found: the stop string that ended the text; back: so many of its characters were given out
    before."""

    def __init__(self, stops: Sequence[str], behind: str = ""):
        self.stops = tuple(stops)
        self.held = self._begun(behind)
        self._given = len(self.held)                   # the first characters of it that were given out
        self.found: str | None = None
        self.back = 0

    def _begun(self, text: str) -> str:
        """The longest end of a text that may become a stop string."""
        keep = max((n for stop in self.stops for n in range(min(len(stop) - 1, len(text)), 0, -1)
                    if text.endswith(stop[:n])), default=0)
        return text[len(text) - keep:]

    def feed(self, piece: str) -> str:
        """What is certain now; nothing more once `found` is set."""
        if self.found is not None:
            return ""
        text, given = self.held + piece, self._given
        ends = [(at + len(stop), at, stop) for stop in self.stops
                if (at := text.find(stop, max(0, given - len(stop) + 1))) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self.held, self.back = "", max(0, given - at)
            return text[given:at]
        self.held = self._begun(text)
        certain = len(text) - len(self.held)
        self._given = max(0, given - certain)
        return text[given:certain]

    def flush(self) -> str:
        """What was held back, when the text ends otherwise."""
        rest, self.held, self._given = self.held[self._given:], "", 0
        return rest
