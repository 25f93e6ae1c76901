"""`m3jit compile`: a model file to a program."""
from __future__ import annotations

import os
from typing import Any

import click

from m3jit.cli.sampling import model_options, sampling_options
from m3jit.cli.options import UsageError, Whole
from m3jit.cli.terminal import keep_inputs, write_file
from m3jit.errors import UserError


@click.command("compile")
@click.argument("model")
@click.option("--output", "-o", metavar="FILE", required=True, help="A program (.m3b), or its source (.m3asm).")
@sampling_options
@click.option("--seed", type=Whole(-2 ** 63, 2 ** 64 - 1), metavar="N",
              help="Seed written into the program [none: the machine's].")
@click.option("--checkpoint-every", type=Whole(1, 2 ** 31 - 1), metavar="N",
              help="The program puts a version on the disk of its machine (m3jit run --store) every N tokens [never].")
@click.option("--reference", metavar="TEXT",
              help="How the program names its weights: a file, a model's name [MODEL; files by their full path].")
def compile_model(model: str, output: str, sampling: dict[str, Any], seed: int | None, reference: str | None,
                  checkpoint_every: int | None) -> int:
    """Compile MODEL (.gguf, a folder, a model's name, or "default") to bytecode that senses a prompt and streams text.

    The weights stay in the model file; the program names it.
    """
    from m3jit.cli.what import find, nameable
    from m3jit.models.provider import Models
    what = find(model)
    if what.kind != "model":
        raise UserError(f"{model}: is no model file; `m3jit asm` assembles sources")
    if os.path.splitext(output)[1].lower() not in (".m3b", ".m3asm") and output != "-":
        raise UsageError(f"{output}: give the output a name that ends in .m3b (program) or .m3asm (source)")
    keep_inputs(output, what.reference)
    if reference:
        named = nameable(reference, "--reference")
    else:
        named = os.path.abspath(what.reference) if os.path.exists(what.reference) else what.reference
    models = Models()
    loaded = models.load(what.reference)
    seed = None if seed is None else (seed + 2 ** 63) % 2 ** 64 - 2 ** 63
    options = model_options(sampling, seed=seed, checkpoint_every=checkpoint_every or 0)
    if output.lower().endswith(".m3b"):
        write_file(output, models.program(loaded, named, options).to_bytes())
    else:
        write_file(output, models.assembly(loaded, named, options).encode())
    return 0
