"""WordPiece (tokeniser model "bert"), on the `tokenizers` library: what BERT and its descendants were trained with.

Text is cleaned (control characters go, white space becomes a space, every CJK ideograph stands alone), decomposed
without its accents and lower-cased as the file says, and cut at white space and punctuation.  Each word becomes the
longest token that starts it, then the longest that continues it, and so on; a word that cannot be spelled, or is
longer than 100 characters, becomes the unknown token.

GGUF files write the start of a word as U+2581 and continue words without a mark; the library wants it the other way
round.  llama.cpp, whose tables decompose each character to one, spells some scripts (Hangul syllables among them)
otherwise.
"""
from __future__ import annotations

from m3jit.models.model_error import ModelFileError
from m3jit.models.vocabulary import TokenKind, Vocabulary

WORD_START = "\u2581"
CONTINUES = "##"
LONGEST_WORD = 100
# What the library's decoder writes otherwise than as a space and the token.
_CLEANED = {" .": ".", " ?": "?", " !": "!", " ,": ",", " n't": "n't", " 'm": "'m", " 's": "'s", " 've": "'ve",
            " 're": "'re"}


def decode_piece(text: str) -> bytes:
    """The text of a token behind others: a space before words, none before what ends a sentence or a contraction."""
    if not text.startswith(WORD_START):
        return text.encode()
    written = " " + text[1:]
    return _CLEANED.get(written, written).encode()


class WordPieceEncoder:
    """Encodes text without special tokens."""

    def __init__(self, vocabulary: Vocabulary, lowercase: bool, strip_accents: bool) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        unknown = vocabulary.unknown
        if unknown is None:
            raise ModelFileError(vocabulary.path, "has no unknown token", item="tokenizer.ggml.unknown_token_id",
                                 expected="the id of one", remedy="The vocabulary is incomplete: convert it again.")
        words = {self._written(text, int(vocabulary.kinds[token])): token for text, token in vocabulary.ids.items()}
        name = next(text for text, token in words.items() if token == unknown)
        self._tokenizer = Tokenizer(models.WordPiece(words, unk_token=name, max_input_chars_per_word=LONGEST_WORD,
                                                     continuing_subword_prefix=CONTINUES))
        self._tokenizer.normalizer = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True,
                                                                strip_accents=strip_accents, lowercase=lowercase)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    @staticmethod
    def _written(text: str, kind: int) -> str:
        """A token as the library spells it; control and unknown tokens, which are matched as a whole, stay."""
        if kind != TokenKind.NORMAL:
            return text
        return text[1:] if text.startswith(WORD_START) else CONTINUES + text

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, in which nothing is special."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids
