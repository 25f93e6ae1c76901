"""Byte-level byte-pair encoding (tokeniser model "gpt2"), on the `tokenizers` library.

Text is cut into words by the file's pre-tokeniser; a word's UTF-8 bytes are written as one printable character each;
then, while any two neighbours form a listed merge, the pair of the lowest rank (the leftmost of equals) is joined.
"""

import re
from functools import cache
from itertools import chain
from typing import Any

from m3jit.models.model_error import ModelFileError
from m3jit.models.pretokenizers import PreTokenizer
from m3jit.models.vocabulary import Vocabulary


def _byte_characters() -> list[str]:
    """The character standing for each byte: itself when printable Latin-1, else U+0100, U+0101, … in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


def decode_characters(text: str) -> bytes:
    """The bytes a token's text stands for; a character that stands for no byte gives its own UTF-8."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, text))
    except KeyError:
        return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in text)


@cache
def _compiled(pre: PreTokenizer) -> tuple[Any, ...]:
    """The library's regular expressions of a pre-tokeniser: a few milliseconds."""
    from tokenizers import Regex
    return tuple(Regex(pattern) for pattern in pre.expanded())


class BytePairEncoder:
    """Encodes text without special tokens. Building takes some 40 ms for 50 000 tokens and merges.

    No built table is kept on disk: rebuilding from the mapped file is faster than the library's own serialised form
    (SmolLM2: 40 ms against 60 ms for `Tokenizer.from_buffer`), and cannot be stale or corrupt.
    """

    def __init__(self, vocabulary: Vocabulary, pre: PreTokenizer) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        self._limit = len(vocabulary)
        self._stand_ins: dict[int, list[int]] = {}
        missing = dict.fromkeys(character for character in BYTE_CHARACTERS if character not in vocabulary.ids)
        lines = vocabulary.merges().tolist()
        if len(set(lines)) != len(lines):
            lines = list(dict.fromkeys(lines))  # the first rank of a merge counts
        try:
            merges = [tuple(line.split(" ")) for line in lines]
            model = models.BPE(vocab=self._with_stand_ins(vocabulary, missing), merges=merges,
                               ignore_merges=pre.whole_words)
        except Exception:  # of the library's own type; the irregular cases below are rare and slower to look for
            merges = self._irregular_merges(lines)
            missing |= self._strange_texts(vocabulary, merges, pre)
            model = models.BPE(vocab=self._with_stand_ins(vocabulary, missing), merges=merges,
                               ignore_merges=pre.whole_words)
        self._tokenizer = Tokenizer(model)
        steps = [pre_tokenizers.Split(pattern, "isolated") for pattern in _compiled(pre)]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)

    @staticmethod
    def _irregular_merges(lines: list[str]) -> list[tuple[str, str]]:
        """"left right" to pairs when some have more spaces or none: the first space after the first character
        divides, and a line without one merges nothing."""
        found = [re.fullmatch("(?s)(.[^ ]*) (.*)", line) for line in lines]
        return [(pair[1], pair[2]) for pair in found if pair]

    def _with_stand_ins(self, vocabulary: Vocabulary, missing: dict[str, None]) -> dict[str, int]:
        """Text to id for the library: the vocabulary, and `missing` texts under ids beyond it that `encode` removes
        again. Without them the library would drop an unknown character and then join its neighbours."""
        ids = vocabulary.ids | {text: self._limit + index for index, text in enumerate(missing)}
        # llama.cpp spells a symbol that is no token by its UTF-8 bytes, those that are tokens by themselves:
        # ASCII characters only, since a token's text is never a lone byte above 0x7F.
        self._stand_ins = {ids[text]: [ids[c] for c in text if c.isascii() and c in vocabulary.ids] for text in missing}
        return ids

    @staticmethod
    def _strange_texts(vocabulary: Vocabulary, merges: list[tuple[str, str]], pre: PreTokenizer) -> dict[str, None]:
        """Parts and results of merges that are no tokens: legal, if useless, in llama.cpp."""
        met = {*chain.from_iterable(merges), *(left + right for left, right in merges)}
        strange = sorted(met - vocabulary.ids.keys() - set(BYTE_CHARACTERS))
        if pre.whole_words and strange:
            raise ModelFileError(vocabulary.path, f"names {strange[0]!r}, which is no token",
                                 item="tokenizer.ggml.merges", expected="merges of tokens into tokens",
                                 remedy="The vocabulary is damaged: convert the model again.")
        return dict.fromkeys(strange)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, in which nothing is special. Bytes the vocabulary cannot express leave no token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._stand_ins and ids and max(ids) >= self._limit:
            ids = list(chain.from_iterable(self._stand_ins.get(token, (token,)) for token in ids))
        return ids
