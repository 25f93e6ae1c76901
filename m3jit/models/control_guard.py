"""Control tokens that are written in messages, kept from being read as such."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from m3jit.models.tokenizer import beginnings


class ControlTexts:
    """The texts of a vocabulary's control tokens, and their beginnings and ends."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.singles = [text for text in texts if len(text) == 1]
        self.longer = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        self._started = [(text[:2], text) for text in self.longer]
        self.heads = {text[:size] for text in self.longer for size in range(1, len(text))}
        self.tails = {text[size:] for text in self.longer for size in range(1, len(text))}
        self.longest = len(self.longer[0]) if self.longer else 0

    def within(self, text: str) -> list[str]:
        """Those that `text` holds, longest first."""
        starts = beginnings(text)
        return [control for start, control in self._started if start in starts and control in text]

    def touches(self, text: str) -> tuple[bool, bool]:
        """Whether something before `text`, and something behind it, could make a control token of both."""
        sizes = range(1, min(self.longest, len(text) + 1))
        inside = len(text) < self.longest and any(text in control for control in self.longer)
        return (inside or any(text[:size] in self.tails for size in sizes),
                inside or any(text[-size:] in self.heads for size in sizes))


class ControlGuard:
    """Marks texts that go into a template.

    A mark, a private character that occurs nowhere, goes behind the first character of each control token's text, and
    between the ends of a message and the template where both together could spell one.  Marks travel through the
    template with the text and are taken out of the pieces between control tokens.  A control token of one character
    gets a private character in its place.  `used`: whether anything was marked."""

    def __init__(self, controls: ControlTexts, given: Any) -> None:
        """given: everything that the filled template may consist of."""
        self.used = False
        self._controls = controls
        whole = repr(given)                            # private characters are written \\ue000 there
        private = (chr(point) for point in range(0xE000, 0xF900) if f"\\u{point:x}" not in whole)
        self._mark = next(private)
        self._singles = {ord(text): next(private) for text in controls.singles}
        self._clear = {ord(new): chr(old) for old, new in self._singles.items()} | {ord(self._mark): ""}

    def mark(self, value: Any) -> Any:
        """`value` with every text in it marked; keys, roles and types only where they hold a whole control token."""
        if isinstance(value, str):
            return self._marked(value, ends=True)
        if isinstance(value, Mapping):
            names = ("role", "type")
            return {self._marked(str(key), ends=False): self._named(item) if key in names else self.mark(item)
                    for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _named(self, item: Any) -> Any:
        """A role or a type, which is a name."""
        return self._marked(item, ends=False) if isinstance(item, str) else self.mark(item)

    def _marked(self, text: str, ends: bool) -> str:
        made = text
        if found := self._controls.within(text):
            made = re.sub("|".join(map(re.escape, found)), lambda match: match[0][0] + self._mark + match[0][1:], text)
        if self._singles:
            made = made.translate(self._singles)
        if ends and text:
            before, after = self._controls.touches(text)
            made = self._mark * before + made + self._mark * after
        self.used = self.used or made != text
        return made

    def clear(self, text: str) -> str:
        """The text without marks."""
        return text.translate(self._clear)
