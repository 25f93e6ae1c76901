"""`m3jit perplexity`."""
from __future__ import annotations

import math
from typing import Any

import click

from m3jit.cli.options import UsageError, Whole
from m3jit.cli.sampling import weights_options
from m3jit.errors import UserError

WINDOW = 512


@click.command(epilog="Perplexity = e^(mean of -log p) over all scored tokens. The text is cut into windows of N "
                      "tokens, each read from an empty context; its first token is not scored. Tokens after the last "
                      "whole window are left out.")
@click.argument("model")
@click.argument("file")
@click.option("--window", "-w", type=Whole(2), metavar="N",
              help=f"Tokens of a window [{WINDOW}, or the model's context].")
@click.option("--max-windows", type=Whole(1), metavar="N", help="Score the first N windows [all].")
@weights_options
@click.option("--threads", "-t", type=Whole(1, 256), metavar="N", help="Threads [all CPUs it may use].")
@click.option("--backend", metavar="NAME", default="auto", show_default=True, help="As m3jit run.")
def perplexity(model: str, file: str, window: int | None, max_windows: int | None, kv_type: str | None,
               lora: tuple[str, ...], threads: int | None, backend: str) -> int:
    """How well MODEL foretells the text in FILE (- is standard input); less is better."""
    from m3jit.api.generation import LanguageModel
    from m3jit.cli.machine import limit_memory, read_text
    from m3jit.cli.sampling import model_options
    from m3jit.cli.terminal import Progress
    from m3jit.cli.what import LazyModels, find
    found = find(model)
    if found.kind != "model":
        raise UserError(f"{model}: is no model; give a folder, a .gguf file or the name of a model")
    limit_memory(None)
    options = model_options({"kv_type": kv_type, "lora": lora})
    language = LanguageModel(found.reference, LazyModels().models, backend, threads, options=options)
    size = window or min(WINDOW, language.context)
    if size > language.context:
        raise UsageError(f"--window {size}: the model's context is {language.context}")
    windows = cut(language, read_text(file), size)[:max_windows]
    if not windows:
        raise UserError(f"{file}: has fewer than {size} tokens; give a longer text, or a smaller --window")
    progress, total, count = Progress(), 0.0, 0
    try:
        for number, ids in enumerate(windows, 1):
            scores = language.score(ids)
            total, count = total - float(scores.sum(dtype="float64")), count + len(scores)
            progress.step(f"perplexity {math.exp(min(700.0, total / count)):.4f}", number, len(windows))
    finally:
        progress.step("", 1, 1)
    mean = total / count
    read = f"{len(windows)} window{'s' * (len(windows) > 1)} of {size}"
    click.echo(f"perplexity {math.exp(min(700.0, mean)):.4f}: {count} tokens in {read}, {mean:.6f} nats each")
    return 0


def cut(language: Any, text: str, size: int) -> list[list[int]]:
    """Windows of `size` tokens; each begins with the start token where the model's file asks for one."""
    tokenizer = language.model.tokenizer
    start = [tokenizer.bos] if tokenizer.adds_bos and tokenizer.bos is not None else []
    ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    step = size - len(start)
    return [start + ids[at:at + step] for at in range(0, len(ids) - step + 1, step)]
