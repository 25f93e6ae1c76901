"""Merging by token score (tokeniser model "llama": SentencePiece's byte-pair models).

Spaces are written U+2581. While any two neighbouring symbols together spell a token, the pair whose token has the
highest score (the leftmost of equals) is joined; characters that end up as no token become byte tokens "<0xXX>".
"""

import re
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush

import numpy as np

from m3jit.models.model_error import ModelFileError
from m3jit.models.vocabulary import Vocabulary

SPACE = "\u2581"
_WORD_CACHE = 8192
_LONG_WORD = 256                    # words over so many characters are cut where no token reaches across
_LEFT, _LENGTH = 40, 24             # bits of a position and of a length in a queue's entry


class ScoredPairEncoder:
    """Encodes text without special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        # The rank of each token's score, the highest 0: whole numbers are quicker to compare.
        self._ranks: list[int] = np.unique(-vocabulary.scores(), return_inverse=True)[1].reshape(-1).tolist()
        self._bytes = self._byte_tokens(vocabulary)
        # No merge crosses the start of a word, but behind the characters that some token has before a space: so words
        # can be merged, and remembered, one by one.  Exact, and linear instead of n log n in the length of the text.
        before = {text[at - 1] for text in self._ids if SPACE in text[1:] for at in range(1, len(text))
                  if text[at] == SPACE}
        self._starts = re.compile(f"(?<=[^{re.escape(''.join(sorted(before | {SPACE})))}])(?={SPACE})")
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
        found: list[int] = []
        for word in self._starts.split(text.replace(" ", SPACE)):
            if len(word) <= _LONG_WORD:
                found += self._merge_word(word)
            else:
                for part in self._parts(word):
                    found += self._merge_word(part) if len(part) <= _LONG_WORD else self._merge(part)
        return found

    @cached_property
    def _neighbours(self) -> set[str]:
        """Every pair of neighbouring characters in tokens."""
        return {pair for text in self._ids for pair in map("".join, zip(text, text[1:]))}

    def _parts(self, word: str) -> list[str]:
        """A long word, cut between characters that are neighbours in no token: no merge joins them."""
        known, start, parts = self._neighbours, 0, []
        for at in range(1, len(word)):
            if word[at - 1:at + 1] not in known:
                parts.append(word[start:at])
                start = at
        return [*parts, word[start:]]

    def _merge(self, text: str) -> tuple[int, ...]:
        """Merge one text. Symbols are known by the index of their first character; `ends[i]` is 0 once merged away.

        An entry of the queue is (rank, left, length) of the pair text[left:left + length] in one number: best score
        first, then leftmost."""
        if not text or len(text) == 1 and text in self._ids:
            return (self._ids[text],) if text else ()
        ids, ranks, count = self._ids, self._ranks, len(text)
        ends = list(range(1, count + 1))
        before = list(range(-1, count - 1))
        queue = [(ranks[token] << _LEFT | left) << _LENGTH | 2 for left in range(count - 1)
                 if (token := ids.get(text[left:left + 2])) is not None]
        heapify(queue)

        def offer(left: int, right: int) -> None:
            token = ids.get(text[left:ends[right]])
            if token is not None:
                heappush(queue, (ranks[token] << _LEFT | left) << _LENGTH | ends[right] - left)

        last_left, last_length = (1 << _LEFT) - 1, (1 << _LENGTH) - 1
        while queue:
            entry = heappop(queue)
            left = entry >> _LENGTH & last_left
            right, end = ends[left], left + (entry & last_length)
            if not right or right >= count or ends[right] != end:
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
