"""The command group: names, one line each, and the module that holds each command."""
from __future__ import annotations

import importlib
from typing import Any

import click

from m3jit.cli.exit_codes import EXIT_CODES

COMMANDS = {                                           # name -> (module, attribute, line of the help), in its order
    "run": ("run", "run", "Run a program or a model (a file, a folder or a name)."),
    "record": ("record", "record", "Run something as `run` does, and keep a log that repeats the run."),
    "replay": ("replay", "replay", "Repeat a recorded run, on any backend, and compare it with its log."),
    "debug": ("debugging", "debug", "Go through a run forward and backward."),
    "serve": ("serve", "serve", "Serve a model over HTTP, as OpenAI's clients expect it."),
    "chat": ("chat", "chat", "Talk with a model."),
    "tokenize": ("tokenize", "tokenize", "Show how a model reads a text: its token ids."),
    "embed": ("embed", "embed", "Turn texts into vectors."),
    "perplexity": ("perplexity", "perplexity", "Say how well a model foretells a text."),
    "compile": ("compile", "compile_model", "Compile a model to bytecode, as a program or its source."),
    "asm": ("programs", "asm", "Assemble a source (.m3asm) to a program (.m3b)."),
    "disasm": ("programs", "disasm", "Write a program as source that assembles to the same bytes."),
    "link": ("programs", "link", "Link programs and what they import to one."),
    "verify": ("programs", "verify", "Check programs, sources and model files."),
    "fmt": ("programs", "fmt", "Bring sources into the canonical layout."),
    "explain": ("explain", "explain", "Show a program at every stage between bytecode and code."),
    "ops": ("ops", "ops", "List all opcodes, or explain some."),
    "model": ("model", "model", "Obtain, list, find and remove models known by name."),
    "store": ("store", "store", "List, check and tidy the versions that runs keep on a disk."),
    "quantize": ("quantize", "quantize", "Write a model file with its matrices in another type."),
    "doctor": ("doctor", "doctor", "Report what this machine offers, and what is missing."),
    "bench": ("bench", "bench", "Measure m3jit and its peers (in a checkout)."),
    "version": ("programs", "version", "Print the version."),
}

ENVIRONMENT = [("M3_DEBUG=1", "show tracebacks"),
               ("M3JIT_CACHE_DIR", "where compiled code and repacked weights are kept (empty: nowhere)"),
               ("M3JIT_API_KEY", "the key that clients of `m3jit serve` must have"),
               ("M3JIT_CPU", "instruction set level of the cpu backend: baseline, avx2, avx512, native")]


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        return getattr(importlib.import_module(f"m3jit.cli.{module}"), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            from m3jit.frontend.errors import suggest
            hint = suggest(name, COMMANDS)
            raise click.UsageError(f"no command {name!r}" + (f"; {hint}" if hint else ""), ctx)
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES])
        with formatter.section("Environment"):
            formatter.write_dl(ENVIRONMENT)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="m3jit", prog_name="m3jit", message="%(prog)s %(version)s")
def group() -> None:
    """m3jit runs M3-AVM bytecode: models of every kind as instructions, compiled to native code.

    Start with `m3jit run` (the embedded default model), `m3jit run model.gguf -p "A prompt"` or `m3jit run
    hello.m3asm`.
    """
