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
    Of two that are complete at the same character, the longer one counts."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.held = ""
        self.found: str | None = None                  # the stop string that ended the text

    def feed(self, piece: str) -> str:
        """What is certain now; nothing more once `found` is set."""
        if self.found is not None:
            return ""
        text = self.held + piece
        ends = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self.held = ""
            return text[:at]
        keep = max((n for stop in self.stops for n in range(min(len(stop) - 1, len(text)), 0, -1)
                    if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def flush(self) -> str:
        """What was held back, when the text ends otherwise."""
        rest, self.held = self.held, ""
        return rest
