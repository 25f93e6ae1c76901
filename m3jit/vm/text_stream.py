"""UTF-8 that arrives in pieces of any length, as text of whole code points."""
from __future__ import annotations

import codecs
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextStream:
    """What has arrived of an unfinished code point: an immutable value, so that a rollback takes it back too.

    However the bytes of a text are cut, the texts of `feed` and the last `end` joined are the text, and none of them
    holds a part of a code point.  Bytes that can be no UTF-8 become U+FFFD, one for each longest beginning of a code
    point (as Python and browsers count them); an unfinished one at the end becomes one U+FFFD.
    """
    held: bytes = b""               # at most three bytes

    def feed(self, data: bytes) -> tuple[str, "TextStream"]:
        """(the text that `data` completes, the stream after it)."""
        whole = self.held + data if self.held else data
        text, used = codecs.utf_8_decode(whole, "replace", False)
        rest = whole[used:]
        return text, self if rest == self.held else TextStream(rest)

    def end(self) -> str:
        """What is left when nothing follows."""
        return self.held.decode("utf-8", "replace")
