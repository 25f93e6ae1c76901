"""`m3jit asm`, `disasm`, `link`, `verify`, `fmt`, `version`."""
from __future__ import annotations

import os
from typing import Any

import click

from m3jit.cli.options import UsageError
from m3jit.cli.terminal import keep_inputs, note, write_file
from m3jit.errors import UserError

SEARCH = click.option("--search", "-I", multiple=True, metavar="FOLDER", help="Look here too for FILE= and .import.")
UNDEFINED = click.option("--allow-undefined", is_flag=True,
                         help="Names nobody defines stay open, for a later link.")


def standard_input() -> bytes:
    """As `machine.standard_input`, which is imported when it is needed."""
    from m3jit.cli import machine
    return machine.standard_input()


def _with_suffix(path: str, suffix: str) -> str:
    return os.path.splitext(path)[0] + suffix


def _assembled(path: str, search: tuple[str, ...], allow_undefined: bool) -> Any:
    from m3jit import frontend
    from m3jit.cli.what import warn
    if path == "-":
        program = frontend.assemble(_decoded(standard_input(), "<stdin>"), "<stdin>", search, allow_undefined)
    else:
        program = frontend.assemble_file(path, search, allow_undefined)
    warn(program)
    return program


@click.command()
@click.argument("source")
@click.option("--output", "-o", metavar="FILE", help="The program [SOURCE with .m3b].")
@SEARCH
@UNDEFINED
def asm(source: str, output: str | None, search: tuple[str, ...], allow_undefined: bool) -> int:
    """Assemble SOURCE (.m3asm, or - for standard input) to a program. All errors are listed in one run."""
    if output is None and source == "-":
        raise UsageError("asm -: give the program's name with -o")
    output = output if output is not None else _with_suffix(source, ".m3b")
    keep_inputs(output, source)
    program = _assembled(source, search, allow_undefined)
    keep_inputs(output, *program.files)
    write_file(output, program.to_bytes())
    return 0


@click.command()
@click.argument("program")
@click.option("--output", "-o", metavar="FILE", default="-", help="The text [standard output].")
@click.option("--strip", is_flag=True, help="Leave out the source map (.loc lines).")
@click.option("--offsets", is_flag=True, help="Each instruction's pc in a comment.")
def disasm(program: str, output: str, strip: bool, offsets: bool) -> int:
    """Write PROGRAM (.m3b) as source that assembles to the same bytes."""
    from m3jit import frontend
    from m3jit.cli.what import find
    what = find(program)
    if what.kind == "model":
        raise UserError(f"{program}: is a model; `m3jit compile {program} -o NAME.m3asm` writes its program")
    keep_inputs(output, program)
    text = frontend.disassemble(frontend.load(program), strip, offsets)
    write_file(output, text.encode())
    return 0


@click.command()
@click.argument("programs", nargs=-1, required=True)
@click.option("--output", "-o", metavar="FILE", required=True, help="The linked program (.m3b).")
@SEARCH
@UNDEFINED
def link(programs: tuple[str, ...], output: str, search: tuple[str, ...], allow_undefined: bool) -> int:
    """Link PROGRAMS (.m3b or .m3asm) and what they import to one program; the first one's entry starts it."""
    from m3jit import frontend
    from m3jit.cli.what import find
    keep_inputs(output, *programs)
    parts = []
    for path in programs:
        what = find(path)
        if what.kind == "model":
            raise UserError(f"{path}: is a model; compile it to a program first")
        parts.append(frontend.load(path) if what.kind == "program" else _assembled(path, search, True))
    linked = frontend.link(parts, search, allow_undefined)
    keep_inputs(output, *linked.files)
    write_file(output, linked.to_bytes())
    return 0


@click.command()
@click.argument("programs", nargs=-1, required=True)
def verify(programs: tuple[str, ...]) -> int:
    """Check PROGRAMS (.m3b, .m3asm) and model files; list everything that is wrong. Silent when all is well."""
    from m3jit.errors import M3Error
    worst = 0
    for path in programs:
        try:
            _verify_one(path)
        except M3Error as error:
            for finding in getattr(error, "findings", [])[1:]:
                note(f"{path}: {finding}")
            note(str(error))
            worst = max(worst, error.exit_code)
    return worst


def _verify_one(path: str) -> None:
    from m3jit import frontend
    from m3jit.cli.what import find
    what = find(path)
    if what.kind == "program":
        frontend.load(path)
    elif what.kind == "source":
        program = _assembled(path, (), True)
        for finding in frontend.verify(program):
            raise UserError(f"{path}: {finding}")
    else:
        from m3jit.models.provider import Models
        models = Models()
        model = models.load(what.reference)
        models.compiler(model)
        wrong = _weights_not_finite(model)
        if wrong:
            error = UserError(f"{model.file.path}: {wrong[0]}")
            error.findings = wrong
            raise error
        model.tokenizer.encode("text")
        models.program(model, what.reference)


def _weights_not_finite(model: Any) -> list[str]:
    """A sentence for each tensor of a model file that holds a NaN, an infinity or such a scale.  Reads all of it."""
    from m3jit.ir.weight_check import report
    wrong = [(name, report(model.tensor(name))) for name in model.file.tensors]
    return [f"tensor {name!r}: holds {text}; expected finite weights. Obtain or convert the model again."
            for name, text in wrong if text]


@click.command()
@click.argument("sources", nargs=-1, required=True)
@click.option("--check", is_flag=True, help="Change nothing; exit code 1 if a file is not in canonical form.")
def fmt(sources: tuple[str, ...], check: bool) -> int:
    """Bring SOURCES (.m3asm) into the canonical layout, in place; - formats standard input to standard output."""
    from m3jit.frontend import format_source
    different = False
    for path in sources:
        text = _decoded(standard_input(), "<stdin>") if path == "-" else _source_text(path)
        new = format_source(text, "<stdin>" if path == "-" else path)
        if path == "-" and not check:
            write_file("-", new.encode())
        elif new != text:
            different = True
            note(f"{path}: {'is not formatted' if check else 'formatted'}")
            if not check:
                write_file(path, new.encode())
    return 1 if check and different else 0


def _source_text(path: str) -> str:
    with open(path, "rb") as file:
        raw = file.read()
    if raw[:4] == b"\x89M3B":
        raise UserError(f"{path}: is a program, not a source; `m3jit disasm` writes its source")
    return _decoded(raw, path)


def _decoded(raw: bytes, path: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None


@click.command()
def version() -> int:
    """Print the version."""
    import m3jit
    click.echo(f"m3jit {m3jit.__version__}")
    return 0
