"""`m3jit embed`: vectors of texts."""
from __future__ import annotations

import io
import os
from typing import Any

import click

from m3jit.cli.options import UsageError, Whole
from m3jit.cli.sampling import adapter_option
from m3jit.cli.terminal import Progress, keep_inputs, write_file
from m3jit.errors import UserError


@click.command()
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT ... | -]")
@click.option("--output", "-o", metavar="FILE", default="-",
              help="An array (.npy) or JSON (.json) [JSON on standard output, a line for each text].")
@click.option("--pooling", type=click.Choice(["mean", "cls", "last"]),
              help="How tokens become one vector [as the model says, else mean].")
@click.option("--normalize/--raw", default=None,
              help="Vectors of length 1, or as they come [as the model says, else of length 1].")
@adapter_option
@click.option("--threads", "-t", type=Whole(1, 256), metavar="N", help="Threads [all CPUs it may use].")
@click.option("--backend", metavar="NAME", default="auto", show_default=True, help="As of `m3jit run`.")
def embed(model: str, texts: tuple[str, ...], output: str, lora: tuple[str, ...], **options: Any) -> int:
    """Turn texts into vectors with MODEL: a folder, a .gguf file or the name of a model.

    Without TEXT, or with -, each line of standard input is a text. Encoders (bert) look at a whole text; models that
    generate give their last hidden states.
    """
    from m3jit.api.embedding import load_embedder
    from m3jit.cli.sampling import model_options
    from m3jit.cli.what import find
    suffix = os.path.splitext(output)[1].lower()
    if output != "-" and suffix not in (".npy", ".json"):
        raise UsageError(f"{output}: give the output a name that ends in .npy (array) or .json")
    what = find(model)
    if what.kind != "model":
        raise UserError(f"{model}: is no model; give a folder, a .gguf file or the name of a model")
    keep_inputs(output, what.reference)
    asked = list(_texts(texts))
    embedder = load_embedder(what.reference, options=model_options({"lora": lora}), **options)
    progress, rows = Progress(), []
    try:
        for number, text in enumerate(asked, 1):
            rows.append(embedder.embed_one(text, number))
            progress.step("embedding", number, len(asked))
    finally:
        progress.step("", 1, 1)
    import numpy as np
    found = np.stack(rows)
    if suffix == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, found, allow_pickle=False)
        write_file(output, buffer.getvalue())
    else:
        lines = ["[" + ", ".join(map(str, row)) + "]" for row in found]
        write_file(output, ("\n".join(lines) + "\n" if output == "-" else "[" + ",\n".join(lines) + "]\n").encode())
    return 0


def _texts(given: tuple[str, ...]) -> list[str]:
    """The texts of the command line, or the lines of standard input."""
    if given and given != ("-",):
        return [os.fsencode(text).decode("utf-8", "replace") for text in given]
    from m3jit.cli.machine import standard_input
    lines = standard_input().decode("utf-8", "replace").splitlines()
    if not lines:
        raise UserError("no texts: give them on the command line, or one a line on standard input")
    return lines
