"""Merging by token score (tokeniser model "llama": SentencePiece's byte-pair models).

Spaces are written U+2581. While any two neighbouring symbols together spell a token, the pair whose token has the
highest score (the leftmost of equals) is joined; characters that end up as no token become byte tokens "<0xXX>".
"""

import re
from functools import lru_cache
from heapq import heapify, heappop, heappush

from m3jit.models.model_error import ModelFileError
from m3jit.models.vocabulary import Vocabulary

SPACE = "\u2581"
_WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
_WORD_CACHE = 8192


class ScoredPairEncoder:
    """Encodes text without special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._scores: list[float] = vocabulary.scores().tolist()
        self._bytes = self._byte_tokens(vocabulary)
        # No token with a space after another character: no merge ever crosses the start of a word, so words can be
        # merged, and remembered, one by one. Exact, and linear instead of n log n in the length of the text.
        self._by_word = not any(re.search(f"[^{SPACE}]{SPACE}", text) for text in self._ids if SPACE in text[1:])
        self._merge_word = lru_cache(_WORD_CACHE)(self._merge)

    @staticmethod
    def _byte_tokens(vocabulary: Vocabulary) -> list[int]:
        """The token of each byte: "<0xXX>", or the character itself when it is ASCII, or the unknown token."""
        found = []
        for byte in range(256):
            token = vocabulary.ids.get(f"<0x{byte:02X}>")
            if token is None and byte < 128:
                token = vocabulary.ids.get(chr(byte))
            if token is None:
                token = vocabulary.unknown
            if token is None:
                raise ModelFileError(vocabulary.path, f"has no token for byte 0x{byte:02X}",
                                     item="tokenizer.ggml.tokens", expected=f'"<0x{byte:02X}>" or an unknown token',
                                     remedy="The vocabulary is incomplete: convert the model again.")
            found.append(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, in which nothing is special."""
        text = text.replace(" ", SPACE)
        if not self._by_word:
            return list(self._merge(text))
        return [token for word in _WORDS.findall(text) for token in self._merge_word(word)]

    def _merge(self, text: str) -> tuple[int, ...]:
        """Merge one text. Symbols are known by the index of their first character; `ends[i]` is 0 once merged away."""
        if text in self._ids and len(text) == 1:
            return (self._ids[text],)
        ids, scores, count = self._ids, self._scores, len(text)
        ends = list(range(1, count + 1))
        before = list(range(-1, count - 1))
        # Best score first, then leftmost. (-score, left, right, end) of the pair text[left:end] split at right.
        queue = [(-scores[token], left, left + 1, left + 2) for left in range(count - 1)
                 if (token := ids.get(text[left:left + 2])) is not None]
        heapify(queue)

        def offer(left: int, right: int) -> None:
            token = ids.get(text[left:ends[right]])
            if token is not None:
                heappush(queue, (-scores[token], left, right, ends[right]))

        while queue:
            _, left, right, end = heappop(queue)
            if ends[left] != right or ends[right] != end:
                continue  # one of the two has changed since the pair was queued
            ends[left], ends[right] = end, 0
            if end < count:
                before[end] = left
                offer(left, end)
            if before[left] >= 0:
                offer(before[left], left)
        return self._spell(text, ends)

    def _spell(self, text: str, ends: list[int]) -> tuple[int, ...]:
        found: list[int] = []
        start = 0
        while start < len(text):
            symbol = text[start:ends[start]]
            token = self._ids.get(symbol)
            found.extend([token] if token is not None else [self._bytes[byte] for byte in symbol.encode()])
            start = ends[start]
        return tuple(found)
