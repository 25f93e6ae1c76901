"""The vocabulary of a GGUF file: token texts, kinds, scores, and the tokens with a meaning of their own."""

import warnings
from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property

import numpy as np

from m3jit.models.gguf_file import GGUFFile
from m3jit.models.gguf_strings import StringArray
from m3jit.models.model_error import ModelFileError

_PREFIX = "tokenizer.ggml."


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`. Control and unknown tokens never come out of plain text, user-defined
    ones do, before anything else; a byte token stands for one byte; the last two have no text."""

    UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)


# Kinds looked for in raw text as a whole, before it is cut into words.
WHOLE_TEXT_KINDS = (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)

# Files rarely say which tokens end a turn, so programs go by name. The first name present is the end-of-turn token;
# all of them, and the fill-in-the-middle separators, end generation. The lists are those llama.cpp recognises.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
                "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>")
_ENDS = (*_END_OF_TURN, "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[EOS]", "<eos>",
         "<turn|>", "<|tool_response>", "[e~[")
_FILL_IN_ENDS = {"fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
                 "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
                 "fim_sep": ("<|file_sep|>",)}
_FILL_IN_OTHERS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>", "<|middle|>")}
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


def ends_by_name(ids: Mapping[str, int]) -> tuple[int | None, set[int]]:
    """(the token that ends a turn, every token that ends generation) among special tokens, by their texts."""
    turn = next((ids[name] for name in _END_OF_TURN if name in ids), None)
    ends = {ids[name] for name in _ENDS if name in ids} - {ids.get(name) for name in _not_ends(ids)}
    return turn, ends


def _not_ends(ids: Mapping[str, int]) -> set[str]:
    """In vocabularies with these pairs "<|end|>" only ends a channel, and "</s>" is an HTML tag."""
    channels = {"<|return|>", "<|call|>"} <= ids.keys() or {"<|calls|>", "<|flush|>"} <= ids.keys()
    return ({"<|end|>"} if channels else set()) | ({"</s>"} if {"</s>", "<|tool_response>"} <= ids.keys() else set())


class Vocabulary:
    """Tokens of a file of tokeniser model `model` ("gpt2", "llama" or "bert").

    `kinds` (uint8) and `ids` (text to id; of equal texts the last wins) hold for every token. Special tokens are ids
    or None: `bos` (or the classifier), `eos`, `unknown`, `padding`, `separator`, `end_of_turn`; `ends` are all ids that
    end generation.
    Raises ModelFileError when the lists are missing, of the wrong type, or too short.
    """

    def __init__(self, file: GGUFFile, bos: int | None = None, eos: int | None = None, unknown: int | None = None,
                 separator: int | None = None) -> None:
        """The arguments are the ids a file of this tokeniser model means when it does not say."""
        self._file, self.path = file, file.path
        self.texts: StringArray = self._strings("tokens")
        if not len(self.texts):
            raise ModelFileError(self.path, "is empty", item=_PREFIX + "tokens", expected="at least one token",
                                 remedy="The model file has no vocabulary: convert the model again.")
        self.kinds = self._kinds()
        self.bos = self._special("bos", self._special("cls", bos))
        self.eos, self.unknown = self._special("eos", eos), self._special("unknown", unknown)
        self.padding = self._special("padding", None)
        self.separator = self._special("seperator", separator)         # the key is spelled so
        self._find_named_tokens()

    def __len__(self) -> int:
        return len(self.texts)

    def _strings(self, name: str) -> StringArray:
        value = self._file.value(_PREFIX + name, list)
        if len(value) == 0:  # writers give empty arrays any item type; a vocabulary of bytes alone has no merges
            return StringArray(self.path, _PREFIX + name, np.empty(0, np.uint8), np.empty(0, np.int64), 0)
        if not isinstance(value, StringArray):
            raise ModelFileError(self.path, "is not an array of strings", item=_PREFIX + name,
                                 remedy="The model file is damaged: convert the model again.")
        return value

    def _numbers(self, name: str, kinds: str) -> np.ndarray | None:
        value = self._file.value(_PREFIX + name, list, None)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) < len(self.texts):
            raise ModelFileError(self.path, "is not a number for every token", item=_PREFIX + name,
                                 expected=f"an array of {len(self.texts)}",
                                 remedy="The model file is damaged: convert the model again.")
        return value[:len(self.texts)]

    def _kinds(self) -> np.ndarray:
        stored = self._numbers("token_type", "iu")
        if stored is None:
            return np.full(len(self.texts), TokenKind.NORMAL, np.uint8)
        known = (stored >= 0) & (stored <= max(TokenKind))
        return np.where(known, stored, TokenKind.UNDEFINED).astype(np.uint8)

    def scores(self) -> np.ndarray:
        """One f32 a token, 0 when the file has none. NaN is refused: it has no place in an order."""
        stored = self._numbers("scores", "iuf")
        scores = np.zeros(len(self.texts), np.float32) if stored is None else stored.astype(np.float32)
        if np.isnan(scores).any():
            raise ModelFileError(self.path, "is NaN", item=f"{_PREFIX}scores[{int(np.isnan(scores).argmax())}]",
                                 expected="a number", remedy="The model file is damaged: convert the model again.")
        return scores

    def merges(self) -> StringArray:
        """Byte-pair merges in order of rank, each "left right"."""
        return self._strings("merges")

    @cached_property
    def ids(self) -> dict[str, int]:
        texts = self.texts.tolist()
        if "" in (ids := dict(zip(texts, range(len(texts))))):
            # An empty text would match everywhere; llama.cpp gives such tokens a name instead.
            ids = {text or f"[EMPTY_{index}]": index for index, text in enumerate(texts)}
        return ids

    def _special(self, name: str, default: int | None) -> int | None:
        key = f"{_PREFIX}{name}_token_id"
        stored = self._file.value(key, int, None)
        if stored is not None and not 0 <= stored < len(self):
            warnings.warn(f"{self.path}: {key} is {stored}, outside the vocabulary of {len(self)}; ignored",
                          stacklevel=4)
            stored = None
        if stored is None:
            return default if default is not None and default < len(self) else None
        return stored

    def _named(self, key: str, names: tuple[str, ...]) -> int | None:
        """The special token `key` of the file, or else the first of `names` that exists, which becomes control."""
        stored = self._special(key, None)
        if stored is not None:
            return stored
        found = next((self.ids[name] for name in names if name in self.ids), None)
        if found is not None and self.kinds[found] != TokenKind.UNKNOWN:
            self.kinds[found] = TokenKind.CONTROL
        return found

    def _find_named_tokens(self) -> None:
        self.end_of_turn = self._named("eot", _END_OF_TURN)
        end_of_message = self._named("eom", ("<|eom_id|>",))
        for key, names in _FILL_IN_OTHERS.items():
            self._named(key, names)
        ends = {self._named(key, names) for key, names in _FILL_IN_ENDS.items()}
        for name in _ENDS:
            if name in self.ids:
                ends.add(self.ids[name])
                if self.kinds[self.ids[name]] != TokenKind.UNKNOWN:
                    self.kinds[self.ids[name]] = TokenKind.CONTROL
        for name in _ALWAYS_SHOWN:
            if name in self.ids:
                self.kinds[self.ids[name]] = TokenKind.USER_DEFINED
        ends |= {self.eos, self.end_of_turn, end_of_message}
        wrong = _not_ends(self.ids)
        ends -= {self.ids.get(name) for name in wrong}
        if "</s>" in wrong:
            self.kinds[self.ids["</s>"]] = TokenKind.NORMAL
        self.ends = frozenset(ends - {None})

    def greedy_tokens(self) -> tuple[frozenset[int], frozenset[int]]:
        """Tokens that take the white space before them, and behind them, along.  Files do not say which: as in
        llama.cpp, it is known by the names of models and pre-tokenisers."""
        name = self._file.value("general.name", str, "").lower()
        pre = self._file.value(_PREFIX + "pre", str, "")
        architecture = self._file.value("general.architecture", str, "")
        if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or \
                any(part in architecture for part in ("nomic-bert-moe", "jina-bert-v3")):
            return frozenset({self.ids["<mask>"]} if "<mask>" in self.ids else ()), frozenset()
        if "phi-3" in name or "phi3" in name:
            plain = {self.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
            whole = {int(token) for token in np.flatnonzero(np.isin(self.kinds, WHOLE_TEXT_KINDS))}
            return frozenset(), frozenset(whole - plain)
        if "modern-bert" in name and "[MASK]" in self.ids:
            return frozenset({self.ids["[MASK]"]}), frozenset()
        return frozenset(), frozenset()

    def partition_order(self) -> list[tuple[str, int]]:
        """Tokens looked for in raw text before anything else, (text, id): longest first, as UTF-8; equals by id."""
        wanted = np.isin(self.kinds, WHOLE_TEXT_KINDS)
        found = [(self.texts[int(index)] or f"[EMPTY_{index}]", int(index)) for index in np.flatnonzero(wanted)]
        return sorted(found, key=lambda item: -len(item[0].encode()))
