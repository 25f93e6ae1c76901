"""STREAM TEXT and `StreamDecoder` give the same text for the same tokens, whole characters at a time."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3jit.errors import Trap
from m3jit.frontend import assemble
from m3jit.models.provider import Models
from m3jit.models.stream_decoder import StreamDecoder
from m3jit.vm.vm import VM

PROGRAM = assemble('''.model model "default"
LOADI rModel, @model
next:
SENSE rToken, rLeft, USER_INPUT
COMPARE rLeft, 0
IF_LESS out
STREAM rToken, OUTPUT TEXT MODEL=rModel
JUMP next
out: HALT
''', "stream.m3asm")
MODELS = Models()
TOKENIZER = MODELS.load("default").tokenizer
PARTS = [token for token in range(len(TOKENIZER)) if not TOKENIZER.decode_bytes(token).isascii()]
TEXT = TOKENIZER.encode("naïve 😀 日本, é")


def streamed(tokens: list[int]) -> list[str]:
    """What the machine writes, item by item."""
    items: list[str] = []
    vm = VM(PROGRAM, "interpreter", models=MODELS)
    vm.set_sink("OUTPUT", items.append)
    for token in tokens:
        vm.push_input(np.array([token], np.int64))
    vm.run()
    return items


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.one_of(st.sampled_from(PARTS), st.sampled_from(TEXT), st.integers(0, 2047)), max_size=12))
def test_any_tokens(tokens):
    decoder = StreamDecoder(TOKENIZER)
    pieces = [decoder.feed(token) for token in tokens] + [decoder.flush()]
    assert streamed(tokens) == [piece for piece in pieces if piece]
    raw = b"".join(map(TOKENIZER.decode_bytes, tokens))
    assert "".join(pieces) == raw.decode("utf-8", "replace")


def test_a_text_comes_whole():
    assert "".join(streamed(TEXT)) == "naïve 😀 日本, é" and "\ufffd" not in "".join(streamed(TEXT))
    emoji = TOKENIZER.encode("😀")
    assert streamed(emoji) == ["😀"] and streamed(emoji[:-1]) == ["\ufffd"]


@pytest.mark.parametrize("token", [-1, 2048, 2 ** 40])
def test_a_token_outside_the_vocabulary(token):
    with pytest.raises(Trap, match=f"token {token} is outside the vocabulary of"):
        streamed([TEXT[0], token])
