"""The command group: names, one line each, and the module that holds each command."""
from __future__ import annotations

import importlib
from typing import Any

import click

from m3jit.cli import EXIT_CODES

COMMANDS = {                                           # name -> (module, attribute), in the order of the help
    "run": ("run", "run"),
    "serve": ("serve", "serve"),
    "chat": ("chat", "chat"),
    "tokenize": ("tokenize", "tokenize"),
    "embed": ("embed", "embed"),
    "perplexity": ("perplexity", "perplexity"),
    "compile": ("compile", "compile_model"),
    "asm": ("programs", "asm"),
    "disasm": ("programs", "disasm"),
    "link": ("programs", "link"),
    "verify": ("programs", "verify"),
    "fmt": ("programs", "fmt"),
    "explain": ("explain", "explain"),
    "ops": ("ops", "ops"),
    "model": ("model", "model"),
    "quantize": ("quantize", "quantize"),
    "doctor": ("doctor", "doctor"),
    "bench": ("bench", "bench"),
    "version": ("programs", "version"),
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
        module, attribute = COMMANDS[name]
        return getattr(importlib.import_module(f"m3jit.cli.{module}"), attribute)

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

    Start with `m3jit run` (the embedded default model) or `m3jit run hello.m3asm`.
    """
