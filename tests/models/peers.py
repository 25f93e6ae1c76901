"""Tiny models against what a peer computed with them, and against themselves on other executors."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from tests.models.test_llama import generate, register_of

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from make_tiny_models import sha256  # noqa: E402  (found through the path set above)


def near_the_peer(name: str, path: Path, row: dict[str, Any], prompt: list[int], cache: float = 0.0) -> int:
    """As near to the unrounded model as the peer is, as near to the peer as the two errors allow, and the same greedy
    tokens up to the first position where the peer's own margin is within its logit error; the number of those tokens.

    row: what the oracle holds of the model.  The peer's error is the larger of that at the compared position and that
    over all 24; two roundings of one model may differ in luck: hence the factor 1.5.  cache: how far the F16 cache of
    ours may move a logit where the peer's is exact; means are not compared then."""
    assert sha256(path) == row["sha256"], "the peer ran another file"
    tokens, _, vm = generate(path, "cpu", prompt=prompt, tokens=len(row["tokens"]))
    _, _, first = generate(path, "cpu", prompt=prompt, tokens=1)
    logits = first.get("rLogits").data.ravel()
    own = np.abs(logits - np.array(row["exact_logits"]))
    apart = np.abs(logits - np.array(row["logits"]))
    here = np.abs(np.array(row["logits"]) - np.array(row["exact_logits"]))
    most = max(row["max_error"], here.max(), cache / 1.5)
    print(f"\n{name:20} error against the unrounded model: max {own.max():.4f} mean {own.mean():.4f}; the peer's: "
          f"max {most:.4f} mean {here.mean():.4f}; apart: max {apart.max():.4f} mean {apart.mean():.4f}")
    assert own.max() <= 1.5 * most and apart.max() <= own.max() + most
    if not cache:
        mean = max(row["mean_error"], here.mean())
        assert own.mean() <= 1.5 * mean and apart.mean() <= 2 * mean
    stop = next((i for i, margin in enumerate(row["margin"]) if margin <= most), len(row["margin"]))
    assert tokens[:stop] == row["tokens"][:stop]
    assert vm.regions.regions, "nothing was compiled"
    return stop


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
