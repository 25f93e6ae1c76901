"""Text to token ids and back, from the vocabulary in a GGUF file.

For the tokeniser models "gpt2" (byte-level byte pairs; the pre-tokenisers of `pretokenizers.py`) and "llama"
(SentencePiece's byte pairs) it agrees token for token with llama.cpp on valid UTF-8; for "bert" (WordPiece) with the
tokenizers library (tests/models/test_tokenizer.py and test_word_pieces.py hold the evidence).
"""

import codecs
from collections.abc import Iterable
from functools import cached_property

from m3jit.models.byte_pairs import BytePairEncoder, decode_characters
from m3jit.models.gguf_file import GGUFFile
from m3jit.models.model_error import ModelFileError
from m3jit.models.pretokenizers import PRE_TOKENIZERS
from m3jit.models.scored_pairs import SPACE, ScoredPairEncoder
from m3jit.models.stream_decoder import LeadingSpace, StreamDecoder
from m3jit.models.vocabulary import WHOLE_TEXT_KINDS, TokenKind, Vocabulary
from m3jit.models.word_pieces import WordPieceEncoder, decode_piece

_KEY = "tokenizer.ggml."
_HIDDEN = (TokenKind.CONTROL, TokenKind.UNKNOWN)
_ASCII_SPACE = " \t\n\v\f\r"
_MODELS = ("gpt2", "llama", "bert")


def _valid_text(text: str | bytes) -> str:
    """Text as Unicode scalar values: a byte that is no UTF-8, or a lone surrogate, becomes U+FFFD each."""
    if isinstance(text, bytes):
        return text.decode("utf-8", "m3jit-each-byte")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


# Python's own "replace" gives one U+FFFD for a truncated sequence of several bytes, llama.cpp one for each byte.
codecs.register_error("m3jit-each-byte", lambda error: ("\ufffd" * (error.end - error.start), error.end))


def beginnings(text: str) -> set[str]:
    """Every character and pair of neighbours of a text: what lacks its beginning there is not in the text at all.  With
    thousands of special tokens this spares as many searches."""
    return {*text, *map("".join, zip(text, text[1:]))}


class Tokenizer:
    """The tokeniser of one model file.

    Cheap to make (the token table is read); the encoder is built on the first `encode`, decoding needs none.
    Special ids: `bos`, `eos`, `end_of_turn`, `padding` (None when there is none); `ends`: every id that ends
    generation. `adds_bos`, `adds_eos`: what the file asks for. Raises ModelFileError for unsupported kinds.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self.model = file.value(_KEY + "model", str)
        self.leading_space: LeadingSpace = "never"
        adds_eos = False
        if self.model == "gpt2":
            name = file.value(_KEY + "pre", str, "default")
            if name not in PRE_TOKENIZERS:
                raise ModelFileError(file.path, f"names pre-tokeniser {name!r}, which is not supported",
                                     item=_KEY + "pre", expected="one of " + ", ".join(sorted(PRE_TOKENIZERS)))
            self._pre = PRE_TOKENIZERS[name]
            adds_bos = self._pre.add_bos
            self.vocabulary = Vocabulary(file)
            if _KEY + "merges" not in file.metadata:
                file.value(_KEY + "merges", list)  # raises, naming the key
        elif self.model == "llama":
            adds_bos = True
            self.vocabulary = Vocabulary(file, bos=1, eos=2, unknown=0)
        elif self.model == "bert":
            adds_bos, adds_eos, self.leading_space = True, True, "first"
            self.vocabulary = Vocabulary(file, bos=101, unknown=100, separator=102)
        else:
            raise ModelFileError(file.path, f"is {self.model!r}, which is not supported", item=_KEY + "model",
                                 expected=f"one of {', '.join(_MODELS)}")
        self.adds_space = file.value(_KEY + "add_space_prefix", bool, True) and self.model == "llama"
        if self.adds_space:
            self.leading_space = "after special"
        self.adds_bos = file.value(_KEY + "add_bos_token", bool, adds_bos)
        self.adds_eos = file.value(_KEY + "add_eos_token", bool, adds_eos)
        self.bos, self.eos = self.vocabulary.bos, self.vocabulary.eos
        self._last = self.vocabulary.separator if self.model == "bert" else self.eos
        self.end_of_turn, self.padding = self.vocabulary.end_of_turn, self.vocabulary.padding
        self._eats_before, self._eats_after = self.vocabulary.greedy_tokens()
        self.ends = self.vocabulary.ends
        lowercase = file.value(_KEY + "normalizer.lowercase", bool, True)
        self._normalisation = lowercase, file.value(_KEY + "normalizer.strip_accents", bool, lowercase)
        self.chat_template: str | None = file.value("tokenizer.chat_template", str, None)

    def __len__(self) -> int:
        return len(self.vocabulary)

    def __repr__(self) -> str:
        return f"<Tokenizer {self.model!r} of {len(self)} tokens from {self.path!r}>"

    def id_of(self, text: str) -> int | None:
        """The id of the token stored as exactly `text`, for example "<|im_end|>"; None when there is none."""
        return self.vocabulary.ids.get(text)

    # Encoding.

    @cached_property
    def _encoder(self) -> BytePairEncoder | ScoredPairEncoder | WordPieceEncoder:
        if self.model == "gpt2":
            return BytePairEncoder(self.vocabulary, self._pre)
        if self.model == "bert":
            return WordPieceEncoder(self.vocabulary, *self._normalisation)
        return ScoredPairEncoder(self.vocabulary)

    @cached_property
    def _partition(self) -> list[tuple[str, str, int, bool]]:
        """Tokens to look for in raw text: (first two characters, text, id, only when `special`)."""
        kinds = self.vocabulary.kinds
        return [(text[:2], text, token, int(kinds[token]) in _HIDDEN)
                for text, token in self.vocabulary.partition_order()]

    def control_texts(self) -> list[str]:
        """The texts of the tokens that plain text never becomes."""
        return [text for _, text, _, hidden in self._partition if hidden]

    def split_control(self, text: str) -> list[str | int]:
        """The text cut at control and user-defined tokens: their ids, and the pieces between them."""
        return self._split(text, True)

    def _split(self, text: str, special: bool) -> list[str | int]:
        """Cut whole-text tokens out: the longest such token first, everywhere, then the next in what is left."""
        pieces: list[str | int] = [text] if text else []
        starts = beginnings(text)
        for start, token_text, token, hidden in self._partition:
            if start not in starts or (hidden and not special) or token_text not in text:
                continue
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, int):
                    cut.append(piece)
                    continue
                first, *rest = self._parts(piece, token_text, token)
                cut.extend([first] if first else [])
                for part in rest:
                    cut.extend([token, part] if part else [token])
            pieces = cut
        return pieces

    def _parts(self, piece: str, token_text: str, token: int) -> list[str]:
        """What lies between the occurrences of a token, less the white space it takes along."""
        if token not in self._eats_after:
            parts = piece.split(token_text)
        else:
            parts = [piece]
            while token_text in parts[-1]:             # white space it takes may hold the next occurrence
                before, _, after = parts[-1].partition(token_text)
                parts[-1:] = [before, after.lstrip(_ASCII_SPACE)]
        if token in self._eats_before:
            parts[:-1] = [part.rstrip(_ASCII_SPACE) for part in parts[:-1]]
        return parts

    def encode(self, text: str | bytes, special: bool = False, add_bos: bool | None = None,
               add_eos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        special: control tokens written out in the text ("<|im_start|>") become those tokens; otherwise they are
        ordinary characters, as text from outside should be. User-defined tokens are always recognised.
        add_bos, add_eos: add the begin or end token (of "bert" models the classifier and separator tokens); None: as
        the file says. ValueError when the file has no such token but one was asked for. Invalid UTF-8 bytes and lone
        surrogates count as U+FFFD.
        """
        ids = self._wanted("begin", add_bos, self.adds_bos, self.bos)
        after_special = True
        for piece in self._split(_valid_text(text), special):
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
                continue
            ids += self._encoder.encode(" " + piece if self.adds_space and after_special else piece)
            after_special = False
        return ids + self._wanted("end", add_eos, self.adds_eos, self._last)

    def _wanted(self, name: str, asked: bool | None, usual: bool, token: int | None) -> list[int]:
        if not (usual if asked is None else asked):
            return []
        if token is None:
            raise ValueError(f"{self.path}: the vocabulary has no {name}-of-text token to add; "
                             f"pass add_{'bos' if name == 'begin' else 'eos'}=False")
        return [token]

    # Decoding.

    def decode_bytes(self, token: int, special: bool = False) -> bytes:
        """The bytes a token stands for: empty for control and unknown tokens unless `special`, and for unused ones.

        IndexError when the id is outside the vocabulary.
        """
        if not 0 <= token < len(self.vocabulary):
            raise IndexError(f"{self.path}: token id {token} outside the vocabulary of {len(self)}")
        kind = int(self.vocabulary.kinds[token])
        text = self.vocabulary.texts[token]
        if kind in _HIDDEN:
            return (text or f"[EMPTY_{token}]").encode() if special else b""
        if kind == TokenKind.USER_DEFINED:
            return text.encode()
        if kind == TokenKind.BYTE:
            return self._byte(token, text)
        if kind != TokenKind.NORMAL:
            return b""
        if self.model == "bert":
            return decode_piece(text)
        return decode_characters(text) if self.model == "gpt2" else text.replace(SPACE, " ").encode()

    def is_whole_text(self, token: int) -> bool:
        """Whether `token` is looked for in raw text as a whole: a control, unknown or user-defined token."""
        return int(self.vocabulary.kinds[token]) in WHOLE_TEXT_KINDS

    def _byte(self, token: int, text: str) -> bytes:
        try:
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                return bytes.fromhex(text[3:5])
        except ValueError:                             # refused below, as every other spelling is
            pass
        raise ModelFileError(self.path, f"is a byte token spelled {text!r}", item=f"{_KEY}tokens[{token}]",
                             expected='"<0x00>" to "<0xFF>"', remedy="The vocabulary is damaged: convert it again.")

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`; bytes that form no UTF-8 become U+FFFD. special: write control tokens out.

        Where encoding puts a space before text ("llama" models, at the start and after special tokens), it is taken
        away again, so that decode(encode(text)) == text.  WordPiece loses case and the spaces around punctuation.
        """
        stream = StreamDecoder(self, special, strip_space=True)
        return "".join([stream.feed(token) for token in ids]) + stream.flush()
