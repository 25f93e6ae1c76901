"""`m3jit quantize`: a model file with its matrices in another type."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from m3jit.cli.options import UsageError, Whole
from m3jit.cli.terminal import Progress, keep_inputs, note
from m3jit.errors import UserError


def _type(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    from m3jit.models.quantize import TYPES
    if value is not None and value.upper() not in TYPES:
        name = parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.human_readable_name
        raise UsageError(f"{name}: no type {value!r}; expected one of {' '.join(TYPES)}")
    return value and value.upper()


@click.command(epilog="Types: F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q6_K TQ1_0 TQ2_0 MXFP4.  The output matrix "
                      "gets Q6_K (Q8_0) unless TYPE is larger; norms and other small tensors stay as they are.")
@click.argument("model")
@click.argument("output")
@click.argument("type", callback=_type)
@click.option("--output-type", metavar="TYPE", callback=_type, help="Type of the output matrix.")
@click.option("--embedding-type", metavar="TYPE", callback=_type, help="Type of the token table.")
@click.option("--requantize", is_flag=True, help="Pack matrices again that are in blocks already, at a loss.")
@click.option("--threads", type=Whole(1), metavar="N", help="Threads [all cores].")
def quantize(model: str, output: str, type: str, output_type: str | None, embedding_type: str | None, requantize: bool,
             threads: int | None) -> int:
    """Write MODEL (a GGUF file, or one of the files it is split over) to OUTPUT with its matrices in TYPE."""
    from m3jit.cli.what import find
    from m3jit.models.provider import Models
    from m3jit.models.quantize import Choice
    what = find(model)
    if what.kind != "model" or os.path.isdir(model):
        raise UserError(f"{model}: is no GGUF file; only GGUF models can be quantised")
    source = Models().load(what.reference).file
    keep_inputs(output, *[file.path for file in getattr(source, "files", [source])], remedy="give another OUTPUT")
    if os.path.exists(output) and not os.path.isfile(output):
        raise UsageError(f"{output}: is no regular file; give another OUTPUT")
    choice = Choice(type, output_type, embedding_type, requantize)
    summary = _written(source, choice, Path(os.path.realpath(output)), threads or os.cpu_count() or 1)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.types.items()))
    note(f"{output}: {summary.after / 1e6:.1f} MB of weights, from {summary.before / 1e6:.1f} MB; tensors: {counts}")
    if summary.fallbacks:
        kinds = ", ".join(sorted(set(summary.fallbacks.values())))
        first = next(iter(summary.fallbacks))
        note(f"{len(summary.fallbacks)} matrices became {kinds} because their rows are no whole {type} blocks, "
             f"{first!r} the first of them")
    return 0


def _written(source: Any, choice: Any, path: Path, threads: int) -> Any:
    """The file at `path`, complete or not at all; what was done."""
    from m3jit.models.quantize import quantize as write
    from m3jit.new_file import NewFile
    progress = Progress()

    def step(done: int, total: int) -> None:
        progress.step("packing", done, total)
    try:
        with NewFile(path) as file:
            summary = write(source, choice, file.handle, threads, step)
            file.commit()
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        progress.step("", 1, 1)
    return summary
