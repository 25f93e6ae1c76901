"""Tiny models against what a peer computed with them, and against themselves on other executors."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from benchmarks import agreement
from tests.models.test_llama import generate, register_of

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from make_tiny_models import sha256  # noqa: E402  (found through the path set above)


def near_the_peer(name: str, path: Path, row: dict[str, Any], prompt: list[int], slack: float = 0.0,
                  adapters: Sequence[Any] = ()) -> np.ndarray:
    """Logits, perplexity and greedy tokens as near to an oracle's as benchmarks/agreement.py says, and, token by token,
    the oracle's greedy tokens up to the first position where the peer's own margin is within its logit error; our
    logits behind the prompt.

    row: what the oracle holds of the model.  slack: see `agreement.Errors`."""
    if isinstance(row["sha256"], str):               # of adapters: a sum for each, which their test compares
        assert sha256(path) == row["sha256"], "the peer ran another file"
    text = agreement.over_text(path, row["text"], prompt, adapters=adapters)
    errors = agreement.errors(text.logits, row, slack)
    print(f"\n{name:20} {errors}; {text}")
    assert not errors.missed() + text.missed()
    tokens, registers, vm = generate(path, "cpu", prompt=prompt, tokens=len(row["tokens"]), adapters=tuple(adapters))
    most = max(errors.theirs[0], slack / agreement.LUCK)
    stop = next((i for i, margin in enumerate(row["margin"]) if margin <= most), len(row["margin"]))
    assert tokens[:stop] == row["tokens"][:stop]
    assert vm.regions.regions, "nothing was compiled"
    return text.logits


def same_bytes_everywhere(path: Path, prompt: list[int], executors: Sequence[tuple[str, int]], tokens: int = 2,
                          **options: Any) -> None:
    """On the interpreter and on `executors` (backend, threads): tokens and every register; with prompt chunks of 1, 7
    and all: tokens and logits."""
    logits = register_of(path, "rLogits")
    options |= {"prompt": prompt, "tokens": tokens}
    said, registers, _ = generate(path, "interpreter", **options)
    for backend, threads in executors:
        found, others, _ = generate(path, backend, threads=threads, **options)
        assert found == said and others == registers, (backend, threads)
    for chunk in (1, 7, len(prompt)):
        found, others, _ = generate(path, "cpu", chunk=chunk, **options)
        assert found == said and others[logits] == registers[logits], chunk
