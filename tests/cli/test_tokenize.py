"""`m3jit tokenize`."""
from __future__ import annotations

import pytest

from m3jit.models.provider import DEFAULT_MODEL
from tests.cli.command import EXAMPLES, call, process

TEXT = "It is a truth naïve 😀"


def test_ids_come_out_and_go_back(capfd):
    ids = call(capfd, "tokenize", "default", TEXT)
    assert ids.code == 0 and ids.out.split()[:4] == ["1028", "364", "259", "1925"] and ids.err == ""
    assert call(capfd, "tokenize", DEFAULT_MODEL, TEXT).out == ids.out
    for written in (ids.out, ids.out.replace(" ", ", "), f"[{ids.out}]"):
        assert call(capfd, "tokenize", "default", "--decode", written).out == TEXT
    assert call(capfd, "tokenize", "default", "").out == "\n"


def test_standard_input_is_taken_as_it_is():
    whole = process("tokenize", "default", stdin=b"a b\n\n")
    assert whole == process("tokenize", "default", "-", stdin=b"a b\n\n") and whole.code == 0
    assert process("tokenize", "default", "--decode", stdin=whole.out.encode()).out == "a b\n\n"


def test_pieces(capfd):
    lines = call(capfd, "tokenize", "default", "--pieces", "--special", "is é<|endoftext|>").out.splitlines()
    assert lines[0].split(None, 1)[1].startswith("'") and any("b'\\xc3'" in line for line in lines)
    assert lines[-1] == "      0  '<|endoftext|>'  control"
    assert "control" not in call(capfd, "tokenize", "default", "--pieces", "<|endoftext|>").out
    assert call(capfd, "tokenize", "default", "--decode", "0").out == ""
    assert call(capfd, "tokenize", "default", "--decode", "--special", "0").out == "<|endoftext|>"


@pytest.mark.parametrize("arguments, code, said", [
    (["default", "--decode", "12 x3"], 2, "x3 is no token id"),
    (["default", "--decode", "1 -1"], 2, "-1 is no token id"),
    (["default", "--decode", "2048"], 1, "token 2048 is outside the vocabulary of 2048"),
    (["default", "--decode", "--pieces", "1"], 2, "--pieces"), (["default", "--decode", "--bare", "1"], 2, "--bare"),
    ([EXAMPLES / "hello.m3asm", "x"], 1, "has no tokeniser"), (["nothing.gguf", "x"], 1, "no such file"),
    ([], 2, "MODEL")])
def test_wrong_usage(capfd, arguments, code, said):
    got = call(capfd, "tokenize", *arguments)
    assert got.code == code and got.out == "" and said in got.err, got
