"""Keys of a terminal, and what is pasted."""
from __future__ import annotations

import os

import pytest

from m3jit.cli import keys
from m3jit.cli.picker import Picker


def reader(data: bytes, ready: int | None = None) -> keys.KeyReader:
    """Keys of bytes that are there at once; `ready`: so many of them, the others later."""
    left = [data] if ready is None else [data[:ready], data[ready:]]
    return keys.KeyReader(0, lambda fd, size: left.pop(0) if left else b"",
                          lambda fd, seconds: bool(left) and ready is None)


def test_keys_are_read():
    sequences = b"a\r\x7f\x1b[D\x1b[C\x1b[A\x1b[B\x1b[1;5D\x1bOH\x1b[4~\x1b[3~\xc3\xa9\xf0\x9f\x98\x80\x03\x04\x07"
    found, made = [], reader(sequences)
    for _ in range(17):
        found.append(made.key())
    assert found == ["a", keys.ENTER, keys.BACKSPACE, keys.LEFT, keys.RIGHT, keys.UP, keys.DOWN, keys.LEFT, keys.HOME,
                     keys.END, "", "é", "😀", keys.INTERRUPT, keys.EOF, "", keys.EOF]


def test_esc_alone_is_told_from_what_begins_with_it():
    assert reader(b"\x1b").key() == keys.ESC
    made = reader(b"\x1b[D", ready=1)
    assert made.key() == keys.ESC and made.key() == "["
    assert reader(b"\xc3").key() == "" and reader(b"\xff").key() == "" and reader(b"\x1bx").key() == ""


def test_what_is_pasted_is_text():
    """Ends of lines and tabs are characters; other controls and sequences, but for the paste's end, are nothing."""
    made = reader(b"\x1b[200~one\rtwo\r\nthree\n\x03\x7f\x1b[A\tesc\xc3\xa9\x1b[201~\r\x1b[A")
    found = []
    while (key := made.key()) != keys.UP:
        found.append(key)
    assert [key for key in found if key] == [*"one\ntwo\nthree\n\tescé", keys.ENTER]
    picker = Picker("He came.")
    assert not any(picker.key(key) for key in found[:-1]) and picker.typed == "one\ntwo\nthree\n\tescé"
    assert picker.lines(40)[3].startswith("\x1b[1;4m escé")
    assert reader(b"\x1b[200~a\x1b", ready=6).key() == "" and reader(b"\x1b[201~a").key() == ""


@pytest.mark.parametrize("typed, before, left", [
    (b"\x1b[200~ab rest\r", ["", "a"], ""), (b"\x1b[200~a\rrest", ["", "a", "\n"], ""),
    (b"ab\x1b[200~rest\r", ["a"], "b")])
def test_ctrl_c_in_a_paste_drops_its_rest(typed, before, left):
    """The part of it, too, that was read and that no key was made of: it is not typed into what comes next."""
    wake, ring = os.pipe()
    source, keyboard = os.pipe()
    with open(wake), open(ring, "wb", buffering=0) as pressed, open(source), open(keyboard, "wb", buffering=0) as hand:
        hand.write(typed)
        made = keys.KeyReader(source, interrupted=wake)
        assert [made.key() for _ in before] == before and made.held
        pressed.write(b"x")
        assert made.key() == keys.INTERRUPT
        hand.write(b"x\r")
        assert [made.key() for _ in f"{left}x\r"] == [*left, "x", keys.ENTER]


def test_esc_alone_leaves_a_paste_that_has_no_end():
    made = reader(b"\x1b[200~\x1b")
    assert [made.key() for _ in range(2)] == ["", keys.ESC]
