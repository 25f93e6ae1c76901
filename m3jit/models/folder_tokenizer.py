"""The tokeniser of a Hugging Face folder: `tokenizer.json`, read by the tokenizers library.

Same members as `tokenizer.Tokenizer`, which reads GGUF files.
"""
from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from m3jit.models.byte_pairs import decode_characters
from m3jit.models.model_error import ModelFileError
from m3jit.models.safetensors_file import read_json
from m3jit.models.stream_decoder import LeadingSpace
from m3jit.models.tokenizer import _valid_text
from m3jit.models.vocabulary import ends_by_name
from m3jit.models.word_pieces import WORD_START, decode_piece

FILE_NAME = "tokenizer.json"
MAX_FILE_BYTES = 1 << 28
MAX_TOKENS = 1 << 22
_SPACE = "\u2581"


@dataclass(frozen=True)
class FolderVocabulary:
    """Token texts by id, and ids by text."""
    texts: list[str]
    ids: dict[str, int]


class FolderTokenizer:
    """The tokeniser of the folder `path`.  ModelFileError when a file is missing, damaged or of an unknown kind.

    Special ids as in `tokenizer.Tokenizer`: `bos`, `eos`, `end_of_turn`, `padding`, `ends`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = Path(path)
        self.path = os.fspath(folder / FILE_NAME)
        self._lock = threading.Lock()
        if not (folder / FILE_NAME).exists():
            remedy = ("Other forms of tokenisers (tokenizer.model, vocab.txt) are not read: load the folder with "
                      "transformers' AutoTokenizer and save it.")
            raise ModelFileError(folder, f"holds no {FILE_NAME}", remedy=remedy)
        self.json = read_json(folder / FILE_NAME, MAX_FILE_BYTES)
        self._config = read_json(folder / "tokenizer_config.json") \
            if (folder / "tokenizer_config.json").is_file() else {}
        self._model = _model_config(folder)
        kind = self.json.get("model")
        self.model = str(kind.get("type")) if isinstance(kind, dict) else "none"
        if self.model not in ("BPE", "WordPiece", "Unigram", "WordLevel"):
            raise ModelFileError(self.path, f"is {self.model!r}, which is not supported", item="model.type",
                                 expected="BPE, WordPiece, Unigram or WordLevel")
        self.bos, self.eos = self._special("bos"), self._special("eos")
        self.padding = self._special("pad")
        self.end_of_turn, named = ends_by_name({self.vocabulary.texts[token]: token for token in self._hidden})
        found = [self.eos, *self._model_ends, *named]
        self.ends = frozenset(token for token in found if token is not None)
        self.adds_bos = self.bos is not None and self.bos in self._encode("", True)
        self.adds_eos = self.eos is not None and self.eos in self._encode("", True)
        self.chat_template = self._template(folder)

    def __len__(self) -> int:
        return len(self.vocabulary.texts)

    def __repr__(self) -> str:
        return f"<FolderTokenizer {self.model!r} of {len(self)} tokens from {self.path!r}>"

    # What the files say.

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer
        try:
            found = Tokenizer.from_file(self.path)
        except Exception as error:                     # the library raises plain Exception
            raise ModelFileError(self.path, f"cannot be read ({error})", expected="a file of the tokenizers library",
                                 remedy="The file is damaged, or newer than the installed tokenizers package.") \
                from None
        found.no_truncation()
        found.no_padding()
        return found

    @cached_property
    def vocabulary(self) -> FolderVocabulary:
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        last = max(ids.values(), default=-1)
        if last >= MAX_TOKENS:
            raise ModelFileError(self.path, f"has a token of id {last}", item="model.vocab",
                                 expected=f"ids below {MAX_TOKENS}")
        texts = [""] * (last + 1)
        for text, token in ids.items():
            texts[token] = text
        return FolderVocabulary(texts, ids)

    @cached_property
    def _added(self) -> dict[int, Any]:
        return self._tokenizer.get_added_tokens_decoder()

    @cached_property
    def _hidden(self) -> frozenset[int]:
        """Special tokens: they stand for no text."""
        return frozenset(token for token, added in self._added.items() if added.special)

    def _special(self, name: str) -> int | None:
        """The id of a special token: as tokenizer_config.json names it, else as config.json numbers it."""
        text = self._config.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str) and text in self.vocabulary.ids:
            return self.vocabulary.ids[text]
        number = self._model.get(f"{name}_token_id")
        return number if type(number) is int and 0 <= number < len(self) else None

    @property
    def _model_ends(self) -> list[int]:
        found = self._model.get("eos_token_id")
        found = found if isinstance(found, list) else [found]
        return [token for token in found if type(token) is int and 0 <= token < len(self)]

    def _template(self, folder: Path) -> str | None:
        try:
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            found = self._config.get("chat_template")
        if isinstance(found, list):                    # several, named
            found = next((row.get("template") for row in found if isinstance(row, dict)
                          and row.get("name") == "default"), None)
        return found if isinstance(found, str) else None

    def id_of(self, text: str) -> int | None:
        """The id of the token stored as exactly `text`; None when there is none."""
        return self.vocabulary.ids.get(text)

    # Encoding and decoding.

    def _encode(self, text: str, frame: bool, special: bool = False) -> list[int]:
        with self._lock:                               # the setting is the library object's, not the call's
            self._tokenizer.encode_special_tokens = not special
            return self._tokenizer.encode(text, add_special_tokens=frame).ids

    def control_texts(self) -> list[str]:
        """The texts of the tokens that plain text never becomes."""
        return [self.vocabulary.texts[token] for token in self._hidden]

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        texts = sorted(filter(None, self.control_texts()), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, texts)) or '(?!)'})")

    def split_control(self, text: str) -> list[str | int]:
        """The text cut at control tokens: their ids, and the pieces between them."""
        pieces = self._controls.split(text)
        return [self.vocabulary.ids[piece] if number % 2 else piece for number, piece in enumerate(pieces) if piece]

    def encode(self, text: str | bytes, special: bool = False, add_bos: bool | None = None,
               add_eos: bool | None = None) -> list[int]:
        """Token ids of `text`, as `Tokenizer.encode`.  None twice: framed as the file says ([CLS] text [SEP])."""
        text = _valid_text(text)
        if add_bos is None and add_eos is None:
            return self._encode(text, True, special)
        ids = self._encode(text, False, special)
        for name, asked, usual, token in (("begin", add_bos, self.adds_bos, self.bos),
                                          ("end", add_eos, self.adds_eos, self.eos)):
            if usual if asked is None else asked:
                if token is None:
                    raise ValueError(f"{self.path}: the vocabulary has no {name}-of-text token to add")
                ids = [token, *ids] if name == "begin" else [*ids, token]
        return ids

    def decode_bytes(self, token: int, special: bool = False) -> bytes:
        """The bytes of a token: empty for special tokens unless `special`.  IndexError outside the vocabulary."""
        if not 0 <= token < len(self):
            raise IndexError(f"{self.path}: token id {token} outside the vocabulary of {len(self)}")
        text = self.vocabulary.texts[token]
        if token in self._hidden:
            return text.encode() if special else b""
        if token in self._added:
            return text.encode()
        if self.model == "WordPiece":
            prefix = self.json["model"].get("continuing_subword_prefix", "##")
            return text.removeprefix(prefix).encode() if text.startswith(prefix) else \
                decode_piece(WORD_START + text) if self._decoder.get("cleanup", True) else b" " + text.encode()
        if self._byte_level:
            return decode_characters(text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes.fromhex(text[3:5])
            except ValueError:                         # no hexadecimal digits: the token is these six characters
                pass
        return text.replace(_SPACE, " ").encode()

    @property
    def _decoder(self) -> dict[str, Any]:
        found = self.json.get("decoder")
        return found if isinstance(found, dict) else {}

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        """The steps of decoding, those of a sequence one by one."""
        rows = self._decoder.get("decoders") if self._decoder.get("type") == "Sequence" else [self._decoder]
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    @cached_property
    def _byte_level(self) -> bool:
        """Whether tokens are spelled in the byte alphabet of GPT-2."""
        return any(row.get("type") == "ByteLevel" for row in self._decoders)

    @cached_property
    def leading_space(self) -> LeadingSpace:
        """Whether decoding takes a space from the front of a text (see `stream_decoder`)."""
        takes = any(row.get("type") == "Metaspace" and row.get("prepend_scheme", "always") != "never" or
                    row.get("type") == "Strip" and row.get("content") == " " and row.get("start") == 1 or
                    row.get("type") == "WordPiece" for row in self._decoders)
        return "first" if takes else "never"

    def is_whole_text(self, token: int) -> bool:
        """Whether `token` is looked for in raw text as a whole: an added token."""
        return token in self._added

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`, as the tokenizers library writes it."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=not special)


def _model_config(folder: Path) -> dict[str, Any]:
    """config.json with what generation_config.json puts in its place; empty where neither is there."""
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            found |= {key: value for key, value in read_json(folder / name).items() if value is not None}
    return found
