"""Token ids that spell a text in the middle of another one."""
from __future__ import annotations

from typing import Any

from m3jit.errors import UserError, brief

_ANCHORS = ("\n", "a", ".")         # what may stand before a text whose beginning a tokeniser would change


def spelled(tokenizer: Any, text: Any) -> list[int]:
    """The tokens of a text that goes on where another ends: no start token, no space before it, and control tokens that
    are written in it stay characters.

    UserError: no text, an empty one, a lone surrogate, or characters that the vocabulary cannot spell (the tokens would
    stand for something else)."""
    if not isinstance(text, str):
        raise UserError(f"inject: a text is expected, got {type(text).__name__}")
    if not text:
        raise UserError("inject: the text is empty; generate() goes on without one")
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"inject: character {error.start} of the text is half of a surrogate pair "
                        f"(U+{ord(text[error.start]):04X}), which no tokeniser knows; give whole characters") from None
    ids = _encode(tokenizer, text)
    if _bytes(tokenizer, ids) == data:
        return ids
    for anchor in _ANCHORS:         # some put a space before a text; behind another one they do not
        before, whole = _encode(tokenizer, anchor), _encode(tokenizer, anchor + text)
        if whole[:len(before)] == before and _bytes(tokenizer, whole[len(before):]) == data:
            return whole[len(before):]
    read = _bytes(tokenizer, ids).decode("utf-8", "replace")
    raise UserError(f"inject: this model's vocabulary cannot spell {brief(repr(text))}; it would read "
                    f"{brief(repr(read))}; use other words")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, special=False, add_bos=False, add_eos=False))


def _bytes(tokenizer: Any, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.decode_bytes, ids))
