"""`m3jit tokenize`."""
from __future__ import annotations

import os
import re
import sys
from typing import Any

import click

from m3jit.cli.options import UsageError
from m3jit.errors import UserError, brief, printable


@click.command(epilog="Without TEXT, or with -, the text is standard input, as it is.")
@click.argument("model")
@click.argument("text", required=False)
@click.option("--pieces", is_flag=True, help="A line for each token: its id, what it stands for, its kind.")
@click.option("--decode", is_flag=True, help="TEXT is token ids; print the text they stand for.")
@click.option("--special", is_flag=True,
              help="Control tokens written in the text are tokens; --decode writes them out.")
@click.option("--bare", is_flag=True, help="Leave out the start and end tokens that the model's file asks for.")
def tokenize(model: str, text: str | None, pieces: bool, decode: bool, special: bool, bare: bool) -> int:
    """Print the token ids of TEXT by the tokeniser of MODEL (a file, a folder, a model's name, or "default")."""
    from m3jit.cli.machine import standard_input
    from m3jit.cli.what import find
    from m3jit.models.provider import Models
    if decode and (pieces or bare):
        raise UsageError(f"--decode: prints a text; --{'pieces' if pieces else 'bare'} is about tokens of a text")
    what = find(model)
    if what.kind != "model":
        raise UserError(f"{model}: is no model file, so it has no tokeniser")
    tokenizer = Models().load(what.reference).tokenizer
    raw = standard_input() if text is None or text == "-" else os.fsencode(text)
    if decode:
        _write(tokenizer.decode(_ids(raw.decode("utf-8", "replace"), len(tokenizer)), special))
        return 0
    frame = False if bare else None
    ids = tokenizer.encode(raw, special=special, add_bos=frame, add_eos=frame)
    if pieces:
        for token in ids:
            click.echo(_piece(tokenizer, token))
    else:
        click.echo(" ".join(map(str, ids)))
    return 0


def _ids(text: str, vocabulary: int) -> list[int]:
    """Token ids in a text, between white space, commas or brackets.  UsageError names the first that is none."""
    found = [word for word in re.split(r"[\s,\[\]()]+", text) if word]
    for word in found:
        if not re.fullmatch("[0-9]{1,9}", word):
            raise UsageError(f"--decode: {brief(printable(word))} is no token id; ids are whole numbers, such as 1 2 3")
        if int(word) >= vocabulary:
            raise UserError(f"token {word} is outside the vocabulary of {vocabulary}")
    return [int(word) for word in found]


def _write(text: str) -> None:
    """The decoded text itself, and a line feed on a terminal."""
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    if sys.stdout.isatty() and not text.endswith("\n"):
        sys.stdout.buffer.write(b"\n")
    sys.stdout.flush()


def _piece(tokenizer: Any, token: int) -> str:
    """A token's line: id, text in quotes (bytes where it is a part of a character), "control" for control tokens."""
    raw = tokenizer.decode_bytes(token)
    kind = "" if raw else "  control"
    raw = raw or tokenizer.decode_bytes(token, special=True)
    try:
        shown = repr(raw.decode("utf-8"))
    except UnicodeDecodeError:
        shown = repr(raw)
    return f"{token:>7}  {shown}{kind}"
