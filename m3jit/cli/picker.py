"""Picking a place in an answer and typing what goes there: what keys do, and what is shown.

The screen shows the end of the answer; the place is before a word, or at the end.  What is behind the place is dimmed,
what was typed stands out.
"""
from __future__ import annotations

import re
import shutil
import sys
import unicodedata

from m3jit.cli import keys

ACCEPT, CANCEL = "accept", "cancel"
ROWS = 8                            # lines of text shown
# What keys do, for terminals that are less and less wide.
HINTS = ("←/→ word   ↑/↓ sentence   type the correction   Enter: go on   Esc: end it here",
         "←/→ word  ↑/↓ sentence  type  Enter: go on  Esc: end here", "←→↑↓ type  Enter: on  Esc: end here",
         "Enter: on  Esc: end")
_WORD = re.compile(r"\S+")
_SENTENCE = re.compile(r"[.!?…][\"'”’»)\]]*\s+|\n+")
_DIM, _STRONG, _PLAIN = "\x1b[2m", "\x1b[1;4m", "\x1b[0m"


class Picker:
    """text: the answer.  `place`: the character before which it is cut; `typed`: what goes there."""

    def __init__(self, text: str):
        self.text, self.typed = text, ""
        self._words = [match.start() for match in _WORD.finditer(text)] + [len(text)]
        self._sentences = sorted({self._words[0], *(match.end() for match in _SENTENCE.finditer(text)), len(text)})
        self._at = len(self._words) - 1

    @property
    def place(self) -> int:
        return self._words[self._at]

    @property
    def moved(self) -> bool:
        """Whether something is taken back."""
        return self.place < len(self.text)

    def key(self, key: str) -> str | None:
        """ACCEPT or CANCEL when a key ends it.  Moving keeps what was typed."""
        if key in (keys.ESC, keys.INTERRUPT, keys.EOF):
            return CANCEL
        if key == keys.ENTER:
            return ACCEPT
        if key == keys.BACKSPACE:
            self.typed = self.typed[:-1]
        elif key in (keys.LEFT, keys.RIGHT):
            step = 1 if key == keys.RIGHT else -1
            self._at = min(max(self._at + step, 0), len(self._words) - 1)
        elif key in (keys.UP, keys.DOWN):
            self._sentence(key == keys.DOWN)
        elif key in (keys.HOME, keys.END):
            self._at = 0 if key == keys.HOME else len(self._words) - 1
        else:
            self.typed += key
        return None

    def _sentence(self, forward: bool) -> None:
        """To the beginning of the next sentence, or of this one, or of the one before."""
        starts = [i for i, at in enumerate(self._words) if at in self._sentences]
        others = [i for i in starts if (i > self._at if forward else i < self._at)]
        if others:
            self._at = others[0] if forward else others[-1]

    def lines(self, width: int, rows: int = ROWS) -> list[str]:
        """What is shown: at most `rows` lines of `width` columns around the place, and the keys' meanings."""
        runs = [(self.text[:self.place], ""), (self.typed or "▏", _STRONG),
                (self.text[self.place:], _DIM)]
        wrapped, where = wrap(runs, max(width, 20))
        first = max(0, min(where - rows // 2, len(wrapped) - rows))
        return [*wrapped[first:first + rows], _DIM + hint(max(width, 20) - 1) + _PLAIN]


def hint(width: int) -> str:
    """What keys do, as fully as `width` columns allow."""
    return next((text for text in HINTS if len(text) <= width), HINTS[-1])


def wrap(runs: list[tuple[str, str]], width: int) -> tuple[list[str], int]:
    """Texts with their styles as lines of at most `width` columns, and the line where the second one begins."""
    lines, column, where, current = [""], 0, 0, ""
    for number, (text, style) in enumerate(runs):
        if number == 1:
            where = len(lines) - 1
        current = style
        lines[-1] += style
        for character in text:
            size = columns(character)
            if character == "\n" or column + size > width - 1:
                lines[-1] += _PLAIN if current else ""
                lines.append(current)
                column = 0
                if character == "\n":
                    continue
            lines[-1] += character if character.isprintable() else " " if character == "\t" else "\ufffd"
            column += size
        lines[-1] += _PLAIN if current else ""
    return lines, where


def columns(character: str) -> int:
    """Columns of a character on a terminal."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


class Screen:
    """Lines on standard error that are drawn over each other."""

    def __init__(self) -> None:
        self.drawn = 0

    @property
    def width(self) -> int:
        return shutil.get_terminal_size().columns

    def draw(self, lines: list[str]) -> None:
        """Show these lines in place of those shown before."""
        self.clear()
        sys.stderr.write("".join(line + "\r\n" for line in lines))
        sys.stderr.flush()
        self.drawn = len(lines)

    def clear(self) -> None:
        if self.drawn:
            sys.stderr.write(f"\x1b[{self.drawn}A\r\x1b[J")
            sys.stderr.flush()
        self.drawn = 0
