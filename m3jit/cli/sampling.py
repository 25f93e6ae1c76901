"""How a model's text is generated: the options of `run`, `compile` and `explain` that end up in its program."""
from __future__ import annotations

import functools
import math
import os
from typing import Any, Callable

import click

from m3jit.cli.options import Finite, UsageError, Whole
from m3jit.cli.terminal import note

LARGEST_SCALE = 1e6                 # of an adapter: what it makes of weights stays a number
NAMES = ("max_tokens", "temp", "top_k", "top_p", "min_p", "repeat_penalty", "kv_type", "lora")
TEMPERATURE = 0.8
MAX_TOKENS, MAX_TOP_K = 2 ** 31 - 1, 2 ** 16 - 1
MAX_TEMPERATURE, MIN_PENALTY, MAX_PENALTY = 1e6, 1e-6, 1e6
_GIVEN = {"temp": "temperature"}


def adapter_option(function: Callable) -> Callable:
    """Adds `lora` (a tuple)."""
    return click.option("--lora", multiple=True, metavar="FILE[:SCALE]",
                        help="Apply a low-rank adapter, SCALE times [1]. Repeated: all of them.")(function)


def weights_options(function: Callable) -> Callable:
    """Adds the options of how a model computes: `kv_type` (None when not given) and `lora` (a tuple)."""
    function = adapter_option(function)
    return click.option("--kv-type", type=click.Choice(("f16", "bf16", "q8_0", "f32"), case_sensitive=False),
                        help="How keys and values of the text so far are stored [f16].")(function)


def sampling_options(function: Callable) -> Callable:
    """Adds the options; their values arrive as `sampling` (a dict of those that were given)."""
    @click.option("--max-tokens", "-n", type=Whole(1, MAX_TOKENS), metavar="N", help="Most tokens to generate [256].")
    @click.option("--temp", type=Finite(0, MAX_TEMPERATURE), metavar="T",
                  help=f"Temperature; 0 takes the likeliest token each time [{TEMPERATURE}].")
    @click.option("--top-k", type=Whole(0, MAX_TOP_K), metavar="K", help="Draw among the K likeliest; 0: all [40].")
    @click.option("--top-p", type=Finite(0, 1), metavar="P",
                  help="Draw among the likeliest whose probabilities reach P [0.95].")
    @click.option("--min-p", type=Finite(0, 1), metavar="P",
                  help="Drop tokens less likely than P times the likeliest [0.05].")
    @click.option("--repeat-penalty", type=Finite(MIN_PENALTY, MAX_PENALTY), metavar="X",
                  help="Weaken recent tokens by X; 1: not at all [1].")
    @weights_options
    @functools.wraps(function)
    def wrapped(**options: Any) -> Any:
        given = {name: options.pop(name) for name in NAMES}
        return function(sampling={name: value for name, value in given.items() if value not in (None, ())}, **options)
    return wrapped


def model_options(sampling: dict[str, Any], **more: Any) -> Any:
    """The `Options` of a model's program."""
    from m3jit.models.program import Options
    values = {_GIVEN.get(name, name): value for name, value in {"temp": TEMPERATURE, **sampling}.items()}
    if (kv_type := values.pop("kv_type", None)) is not None:
        values["kv_type"] = kv_type.upper()
    values["adapters"] = tuple(map(_adapter, values.pop("lora", ())))
    return Options(**values, **more)


def warn_of_context(asked: int | None, model: Any, name: str) -> None:
    """Say that a model has no context of as many tokens as --context asks for."""
    if asked is not None and asked > model.context:
        note(f"warning: context: {asked} tokens are asked for, {name} has {model.context}, which it gets")


def _adapter(text: str) -> Any:
    """The adapter that `--lora FILE[:SCALE]` means."""
    from m3jit.models.provider import Models
    file, colon, scale = text.rpartition(":")
    if not colon or os.path.exists(text):
        return Models().adapter(text)
    try:
        factor = float(scale)
    except ValueError:
        return Models().adapter(text)
    if not math.isfinite(factor) or abs(factor) > LARGEST_SCALE:
        what = "no finite number" if not math.isfinite(factor) else f"more than {LARGEST_SCALE:g}"
        raise UsageError(f"--lora {text}: {scale} is {what}; expected FILE or FILE:SCALE")
    return Models().adapter(file, factor)


def refuse_for_programs(sampling: dict[str, Any], name: str, others: dict[str, bool]) -> None:
    """These options are written into a model's program; an existing program has its own."""
    wrong = [f"--{n.replace('_', '-')}" for n in sampling] + [n for n, given in others.items() if given]
    if wrong:
        belong = "belongs" if len(wrong) == 1 else "belong"
        raise UsageError(f"{', '.join(wrong)}: {belong} to model files; {name} is a program already and does what it "
                        "says (compile the model anew, or set the program's registers with --bind)")
