"""Texts that the command line steers token by token: stop strings, log-probabilities, grammars.

A compiled program says all of its sampling itself; for these options `m3jit run` runs the hosted form of the model's
program (m3jit.models.hosted) and looks at each token.
"""
from __future__ import annotations

import os
from typing import Any, Callable

import click

from m3jit.cli.options import UsageError, Whole
from m3jit.cli.terminal import note
from m3jit.errors import Interrupted, UserError

NAMES = ("stops", "logprobs", "json_schema", "grammar", "regex")


def steering_options(function: Callable) -> Callable:
    """Adds --stop, --logprobs, --json-schema, --grammar and --regex."""
    for option in (
            click.option("--regex", metavar="PATTERN", help="Write only what the pattern matches."),
            click.option("--grammar", metavar="FILE",
                         help="Write only what a grammar allows: .gbnf (llama.cpp's form) or llguidance's own "
                         "(.lark)."),
            click.option("--json-schema", metavar="FILE", help="Write JSON that the schema allows."),
            click.option("--logprobs", type=Whole(0, 20), metavar="N",
                         help="Print each token's log-probability, and the N likeliest, on standard error."),
            click.option("--stop", "stops", multiple=True, metavar="TEXT",
                         help="End the text before this text. Repeated: any of them.")):
        function = option(function)
    return function


def given(options: dict[str, Any]) -> list[str]:
    """The options of this kind that were given, as they are written."""
    return ["--" + name.rstrip("s").replace("_", "-") if name == "stops" else "--" + name.replace("_", "-")
            for name in NAMES if options[name] not in (None, ())]


def settings(sampling: dict[str, Any], options: dict[str, Any]) -> Any:
    """The `Settings` of a steered text.  UsageError: more than one grammar."""
    from m3jit.api.generation import Settings
    from m3jit.cli.sampling import TEMPERATURE
    values = {name: value for name, value in sampling.items() if name not in ("temp", "kv_type", "lora")}
    return Settings(**values, temperature=sampling.get("temp", TEMPERATURE), seed=options["seed"],
                    stop=options["stops"], logprobs=options["logprobs"], context=options["context"],
                    grammar=_grammar(options))


def _grammar(options: dict[str, Any]) -> Any:
    from m3jit.models.grammar import Grammar
    chosen = [name for name in ("json_schema", "grammar", "regex") if options[name] is not None]
    if len(chosen) > 1:
        raise UsageError("--json-schema, --grammar, --regex: give one of them")
    if not chosen:
        return None
    if chosen == ["regex"]:
        return Grammar("regex", options["regex"])
    path = options[chosen[0]]
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    if chosen == ["json_schema"]:
        try:
            return Grammar.of_schema(text)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    return Grammar("gbnf" if os.path.splitext(path)[1].lower() == ".gbnf" else "lark", text)


def again(replay: Any, models: Any, quiet: bool) -> None:
    """Steer a replay as the recorded run was, if it was: the text is made of the tokens again, and compared."""
    kept, vm = replay.steering, replay.vm
    if kept is None:
        return
    from m3jit.api.generated import GeneratedText
    text = GeneratedText(vm, models.load(kept.model), (), kept.stop, -1 if kept.logprobs is None else kept.logprobs)
    vm.set_sink("LOGPROBS", text.take_logprobs)
    replay.recorder.derives = replay.recorder.echo = True
    replay.finish = Steered(text, quiet).finish


class Steered:
    """Joins a `GeneratedText` with the machine's standard output.  quiet: log-probabilities are not shown."""

    def __init__(self, text: Any, quiet: bool = False):
        self.text, self.vm, self.quiet = text, text.vm, quiet
        self.vm.set_sink("TOKENS", self._take)

    def _take(self, item: bytes) -> None:
        self.text.take_token(item)
        self._write()

    def finish(self, stopped: Interrupted | None = None) -> None:
        """The machine has ended well, or was stopped."""
        self.text.finish(stopped)
        self._write()

    def _write(self) -> None:
        from m3jit.vm.streams import Item
        while self.text.ready:
            piece = self.text.ready.popleft()
            if piece.text:
                item = Item("TEXT", piece.text.encode())
                self.vm.recorder.said(self.vm.main, "OUTPUT", item)
                self.vm.sinks["OUTPUT"].write(item, True)
            if piece.logprobs and not self.quiet:
                found = piece.logprobs
                others = "".join(f"  {c.logprob:9.4f} {c.text!r}" for c in found.top)
                note(f"{found.chosen.logprob:9.4f} {found.chosen.text!r}" + (f"  |{others}" if others else ""))
