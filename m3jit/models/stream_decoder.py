"""Token ids in, text out, as soon as it is certain."""
from __future__ import annotations

from typing import Literal, Protocol

from m3jit.vm.text_stream import TextStream

# Spaces that decoding writes and no text had: before the first token ("first"), before the first and behind control
# and user-defined tokens ("after special"), none ("never").
LeadingSpace = Literal["never", "first", "after special"]


class DecodingTokenizer(Protocol):
    """What decoding needs of a tokeniser (`Tokenizer`, `FolderTokenizer`)."""
    leading_space: LeadingSpace

    def decode_bytes(self, token: int, special: bool = False) -> bytes: ...
    def is_whole_text(self, token: int) -> bool: ...


class StreamDecoder:
    """The text of tokens, one at a time: a code point spread over several tokens comes out whole.

    strip_space: drop the spaces that decoding puts before a text (`leading_space`); leave it False when the tokens
    continue a prompt.  The pieces joined, with `flush`, are what `Tokenizer.decode` gives for all ids at once.
    """

    def __init__(self, tokenizer: DecodingTokenizer, special: bool = False, strip_space: bool = False) -> None:
        self._tokenizer, self._special, self._strip = tokenizer, special, strip_space
        self._stream, self._fresh = TextStream(), True

    def feed(self, token: int) -> str:
        """The text that `token` completes; "" while a code point is unfinished.

        IndexError: the id is outside the vocabulary."""
        raw = self._tokenizer.decode_bytes(token, self._special)
        if self._strip:
            raw = self._stripped(token, raw)
        text, self._stream = self._stream.feed(raw)
        return text

    def _stripped(self, token: int, raw: bytes) -> bytes:
        kind = self._tokenizer.leading_space
        if self._tokenizer.is_whole_text(token):
            self._fresh = self._fresh and not raw or kind == "after special"
            return raw
        fresh, self._fresh = self._fresh, self._fresh and not raw and kind == "first"
        return raw[1:] if fresh and kind != "never" and raw.startswith(b" ") else raw

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished code point, else "".  The decoder goes on afresh, but
        for the space before a text."""
        rest, self._stream = self._stream.end(), TextStream()
        return rest
