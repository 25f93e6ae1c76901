"""Constrained sampling: GRAMMAR, an extension that gives the mask of the tokens a grammar allows next (llguidance).

    GRAMMAR rMask, rToken           ; rToken: the token drawn last, below 0 before the first
    SAMPLE rToken, rLogits, MASK=rMask

The grammar's state is the extension's state, a root value of the context: FORK, ABORT and RESTORE carry it.
"""
from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np

from m3jit.errors import OperandError, UnsupportedError, UserError, brief, no_memory
from m3jit.isa.extension_rows import ROWS, add_row, make_row
from m3jit.vm.extensions import REGISTRY, Extension, Registry

NUMBER = 240                        # of the extension; programs of other people use small numbers
VERSION = (1, 0)
KINDS = ("json_schema", "json_object", "regex", "lark", "gbnf")
_ANY_OBJECT = {"type": "object"}
_LAYOUT = {"whitespace_flexible": False}   # else a model may write blanks for ever; "x-guidance" of a schema overrides
_MISSING = ("constrained generation needs llguidance, which turns grammars into token masks: "
            "pip install 'm3jit[grammar]'")


class GrammarError(UserError):
    """A grammar that allows no text at all, or that the library cannot follow any further."""


def declare() -> None:
    """Make the mnemonic GRAMMAR known to the assembler."""
    if "GRAMMAR" not in ROWS:
        add_row(make_row("GRAMMAR", NUMBER, VERSION, 1, [("token", False)], [], "The tokens a grammar allows next."))


@dataclass(frozen=True)
class Grammar:
    """What a text must look like.  kind: json_schema (text: the schema), json_object (any object), regex, lark
    (llguidance's grammar language) or gbnf (llama.cpp's)."""
    kind: str
    text: str = ""

    @classmethod
    def of_schema(cls, schema: Any) -> "Grammar":
        """From a JSON schema: a dict or bool, or its text.  UserError: it is no JSON."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise UserError(f"JSON schema: is no JSON: {error}") from None
        if not isinstance(schema, (dict, bool)):
            raise UserError(f"JSON schema: an object was expected, got {brief(repr(schema))}")
        return cls("json_schema", json.dumps(schema))


class TokenGrammars:
    """The grammars of one tokeniser.  vocabulary: how many logits the model gives."""

    def __init__(self, tokenizer: Any, vocabulary: int):
        if not tokenizer.ends:
            raise UserError("constrained generation: this model has no token that ends a text")
        self.vocabulary = vocabulary
        self._library = library()
        self._tokenizer = _library_tokenizer(self._library, tokenizer, vocabulary)
        self.matcher = functools.lru_cache(maxsize=64)(self._matcher)

    def _matcher(self, grammar: Grammar) -> "Matcher":
        """The grammar at its start.  UserError says what is wrong with it."""
        text = self._source(grammar)
        wrong = self._library.LLMatcher.validate_grammar(text, self._tokenizer)
        if wrong:
            raise UserError(f"{grammar.kind}: {wrong.strip()}")
        start = Matcher(self._library.LLMatcher(self._tokenizer, text, log_level=0), self.vocabulary, grammar.kind,
                        hashlib.blake2b(text.encode(), digest_size=16).digest())
        if not start.mask().any():
            raise GrammarError(f"{grammar.kind}: no text is allowed by it")
        return start

    def _source(self, grammar: Grammar) -> str:
        compile_ = self._library.LLMatcher
        try:
            if grammar.kind in ("json_schema", "json_object"):
                schema = grammar.text if grammar.kind == "json_schema" else json.dumps(_ANY_OBJECT)
                return compile_.grammar_from_json_schema(schema, defaults=_LAYOUT)
            if grammar.kind == "regex":
                return compile_.grammar_from_regex(grammar.text)
            if grammar.kind == "lark":
                return compile_.grammar_from_lark(grammar.text)
            if grammar.kind == "gbnf":
                return compile_.grammar_from_lark(_from_gbnf(grammar.text))
        except Exception as error:                     # the library raises many kinds
            raise UserError(f"{grammar.kind}: {error}") from None
        raise UserError(f"no kind of grammar {grammar.kind!r}; there are {', '.join(KINDS)}")


class Matcher:
    """A grammar after some tokens: an immutable value.

    source: a hash of the grammar.  past: (what was before the last token, the last token), None at the start."""
    __slots__ = ("_matcher", "_vocabulary", "_kind", "source", "_past")

    def __init__(self, matcher: Any, vocabulary: int, kind: str, source: bytes, past: tuple | None = None):
        self._matcher, self._vocabulary, self._kind, self.source, self._past = matcher, vocabulary, kind, source, past

    def copy(self) -> "Matcher":
        """The same grammar for another thread: the library's objects serve one at a time."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary, self._kind, self.source, self._past)

    def tokens(self) -> list[int]:
        """The tokens so far."""
        out, past = [], self._past
        while past is not None:
            past, token = past
            out.append(token)
        return out[::-1]

    def __repr__(self) -> str:
        return f"<{self._kind} {self.source.hex()} after {self.tokens()}>"

    def after(self, token: int) -> "Matcher":
        """The grammar one token later.  OperandError: it does not allow the token; GrammarError: see `mask`."""
        following = self._matcher.deep_copy()
        if not following.consume_token(token):
            mask = self.mask()
            if 0 <= token < len(mask) and mask[token]:     # allowed, so it is the library that gives up
                raise self._given_up(following)
            raise OperandError(f"the grammar does not allow token {token} here: {_said(following)}")
        return Matcher(following, self._vocabulary, self._kind, self.source, (self._past, token))

    def after_all(self, tokens: Sequence[int]) -> "Matcher":
        """The grammar behind several tokens.  Raises as `after`."""
        now = self
        for token in tokens:
            now = now.after(token)
        return now

    def mask(self) -> np.ndarray:
        """BOOL [vocabulary]: the tokens that may follow; a token that ends the text among them when it may end.

        GrammarError: the grammar allows no text, or has more possibilities here than the library follows."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._given_up(self._matcher)
        return np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(bool)

    def _given_up(self, matcher: Any) -> GrammarError:
        said = _said(matcher)
        if said == "NoExtensionBias":                      # not at an end, and nothing may follow
            return GrammarError(f"{self._kind}: no text is allowed by it; look for a rule that only leads to itself")
        return GrammarError(f"{self._kind}: llguidance cannot follow it any further: {said}; make it simpler")


def _said(matcher: Any) -> str:
    """What the library says is wrong, without the dump of its state that follows."""
    return matcher.get_error().partition("<state>")[0].strip()


def extension(start: Matcher | None) -> Extension:
    """GRAMMAR for a machine whose text begins at `start` (None: it has no grammar, and GRAMMAR traps)."""
    first = start.copy() if start is not None else None

    def grammar(state: Matcher | None, token: int, *, immediate: bytes) -> tuple[np.ndarray, Matcher]:
        if first is None:
            raise OperandError("GRAMMAR: the host gave this machine no grammar")
        now = first if state is None or token < 0 else state.after(token)
        return now.mask(), now

    def pack(state: Matcher) -> list[Any]:
        return [state.source, state.tokens()]

    def unpack(tree: Any) -> Matcher:
        source, tokens = tree
        if first is None or source != first.source:
            raise OperandError("a text was written under a grammar that is not this machine's; give it the same one")
        if not all(type(token) is int for token in tokens):
            raise ValueError("tokens that are no integers")
        return first.after_all(tokens)
    return Extension("GRAMMAR", NUMBER, VERSION, grammar, state=True, pack=pack, unpack=unpack)


def registry(start: Matcher | None) -> Registry:
    """This process's extensions, and GRAMMAR."""
    known = Registry()
    for other in REGISTRY:
        if (other.number, other.version[0]) != (NUMBER, VERSION[0]):
            known.add(other)
    known.add(extension(start))
    return known


def library() -> Any:
    """The module llguidance.  UnsupportedError says how to install it."""
    try:
        import llguidance
    except ImportError as error:
        if no_memory(error):
            raise
        raise UnsupportedError(_MISSING) from None
    return llguidance


def installed() -> bool:
    """Is the library there?"""
    from importlib.util import find_spec
    return find_spec("llguidance") is not None


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark
    return gbnf_to_lark(text)


def _library_tokenizer(module: Any, tokenizer: Any, vocabulary: int) -> Any:
    texts = [tokenizer.decode_bytes(i, special=True) for i in range(len(tokenizer))]
    hidden = [i for i, text in enumerate(texts) if text and not tokenizer.decode_bytes(i)]

    class Tokens:
        """What llguidance asks of a tokeniser."""
        eos_token_id = sorted(tokenizer.ends)[0]
        bos_token_id = tokenizer.bos
        tokens = texts
        special_token_ids = sorted({*hidden, *tokenizer.ends})

        def __call__(self, text: str | bytes) -> list[int]:
            return tokenizer.encode(text, add_bos=False, add_eos=False)
    return module.LLTokenizer(module.TokenizerWrapper(Tokens()), n_vocab=max(vocabulary, len(tokenizer)),
                              eos_token=sorted(tokenizer.ends))
