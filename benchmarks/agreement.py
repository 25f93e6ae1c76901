"""How near a model is to what an oracle stores of a peer: logits, perplexity over a text, and greedy tokens.

Logits behind the oracle's prompt: no further from the unrounded model than LUCK times the peer's, at most and on
average (rounding, and the order of sums, fall as they may), and on average no further from the peer than both errors
together are.  Real models are held to the same (benchmarks/accuracy.py): SmolLM2 over four prompts, its largest error
also with what all logits of a prompt have in common; Gemma 3, whose unrounded logits are not stored, by the distance
from what llama.cpp said, which may be LUCK times as far as llama.cpp at its other settings is.

The text is that of tools/oracle_text.py: prompts, and tokens behind each.  Its perplexity must be within PERPLEXITY of
the peer's.  Before each token the likeliest one is compared with the peer's, led along the same text, so that a
difference does not hide what comes behind it:

- "clear" are the positions where the margin between the peer's two largest logits is at least CLEAR times its mean
  error (and SMALLEST), and the peer's token is that of the unrounded model.  There all must be equal, and at least
  LEAST positions must be such;
- where the margin is at least SMALLEST, ours may differ from the unrounded model's as often as the peer's do, times
  LUCK, and FEW more.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from m3jit.frontend import assemble
from m3jit.models.adapters import Adapter
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm.vm import VM

LUCK, PERPLEXITY, SMALLEST, CLEAR, LEAST, FEW = 1.5, 0.01, 0.05, 10, 100, 5
SUMS = 3e-5                          # what logits may differ by where only the order of f32 sums does
F16_CACHE = 0.02                     # and where we round keys and values to F16 and the peer does not


def beyond_luck(ours: tuple[float, float], theirs: tuple[float, float], slack: float = 0.0) -> list[str]:
    """Which of our errors (max, mean) is more than LUCK times the peer's, in words.  slack: see `Errors`."""
    limits = max(LUCK * theirs[0], slack), max(LUCK * theirs[1], slack / 4)
    return [f"error of {what} {own:.3g}, expected at most {limit:.3g}"
            for what, own, limit in zip(("a logit", "logits on average"), ours, limits) if not own <= limit]


@dataclass(frozen=True)
class Errors:
    """Distances (max, mean) of our logits and of the peer's from the unrounded model, and of both from each other.
    slack: what ours may be away, on average a quarter of it, where the peer's error is smaller."""
    ours: tuple[float, float]
    theirs: tuple[float, float]
    apart: tuple[float, float]
    slack: float

    def missed(self) -> list[str]:
        """What is not met, in words; empty: nothing."""
        out = beyond_luck(self.ours, self.theirs, self.slack)
        most = max(2 * self.theirs[1], self.slack / 4)
        if not self.apart[1] <= most:
            out.append(f"distance from the peer on average {self.apart[1]:.3g}, expected at most {most:.3g}")
        return out

    def __str__(self) -> str:
        return (f"error max {self.ours[0]:.2g} mean {self.ours[1]:.2g}, peer's max {self.theirs[0]:.2g} mean "
                f"{self.theirs[1]:.2g}")


def errors(logits: np.ndarray, row: dict[str, Any], slack: float = 0.0) -> Errors:
    """Our logits behind the oracle's prompt.  The peer's error is the larger of that there and that over the prompt."""
    exact, peer = np.array(row["exact_logits"]), np.array(row["logits"])
    own, here, apart = np.abs(logits.ravel() - exact), np.abs(peer - exact), np.abs(logits.ravel() - peer)
    return Errors((float(own.max()), float(own.mean())),
                  (max(row["max_error"], float(here.max())), max(row["mean_error"], float(here.mean()))),
                  (float(apart.max()), float(apart.mean())), slack)


@dataclass(frozen=True)
class Agreement:
    """A text.  perplexity, peer: of ours and the peer's; clear, near: (equal, compared) tokens; limit: the margin of
    the clear ones; astray: how often ours and the peer's token differ from the unrounded model's; logits: ours behind
    the first prompt."""
    tokens: int
    perplexity: float
    peer: float
    clear: tuple[int, int]
    limit: float
    near: tuple[int, int]
    astray: tuple[int, int]
    logits: np.ndarray

    @property
    def ratio(self) -> float:
        return self.perplexity / self.peer

    def missed(self) -> list[str]:
        """What is not met, in words; empty: nothing."""
        out = []
        if not abs(self.ratio - 1) <= PERPLEXITY:
            out.append(f"perplexity {self.perplexity:.4f}, the peer's {self.peer:.4f}")
        if self.clear[1] < LEAST:
            out.append(f"only {self.clear[1]} tokens have a margin of {self.limit:.2f}, expected {LEAST}")
        if self.clear[0] != self.clear[1]:
            out.append(f"{self.clear[1] - self.clear[0]} of {self.clear[1]} clear tokens differ")
        if self.astray[0] > LUCK * self.astray[1] + FEW:
            out.append(f"{self.astray[0]} tokens are not the unrounded model's, of the peer's {self.astray[1]}")
        return out

    def __str__(self) -> str:
        return (f"perplexity {self.perplexity:.4g}, peer's {self.peer:.4g}, ratio {self.ratio:.4f} over {self.tokens} "
                f"tokens; greedy {self.clear[0]} of {self.clear[1]} at margins from {self.limit:.2f}, "
                f"{self.near[0]} of {self.near[1]} from {SMALLEST}; astray {self.astray[0]}, "
                f"the peer's {self.astray[1]}")


def unchanged(program: str) -> str:
    return program


def without_cache(program: str) -> str:
    """A program that attends to the prompt's own keys and values, which no cache rounds."""
    return program.replace(", sKV ", " ")


def all_positions(path: Path, sequences: Sequence[Sequence[int]], change: Callable[[str], str] = unchanged,
                  adapters: Sequence[Adapter] = (), threads: int = 1) -> list[np.ndarray]:
    """The logits [tokens, vocabulary] of every position of each sequence, which is one chunk of a prompt: the program
    of `m3jit compile` with the head over all rows, without the draw.  change: edits its text."""
    models = Models()
    model = models.load(str(path))
    options = Options(chunk=max(map(len, sequences)), adapters=tuple(adapters))
    lines = change(models.assembly(model, options=options)).splitlines()
    draw = next(i for i, line in enumerate(lines) if line.strip().startswith("SAMPLE"))
    lines[draw] = "    HALT"
    last = [i for i, line in enumerate(lines) if "START=-1 LEN=1" in line]
    if len(last) != 1:
        raise ValueError(f"the program takes the last row at {len(last)} places; expected one")
    lines[last[0]] = "    NOP"
    program, out = assemble("\n".join(lines)), []
    for ids in sequences:
        vm = VM(program, backend="cpu", threads=threads, models=models)
        vm.push_input(np.array(ids, np.int64))
        vm.run()
        if not vm.regions.regions:
            raise ValueError("nothing was compiled")
        out.append(np.array(vm.get("rLogits").data))
    return out


def over_text(path: Path, text: dict[str, Any], prompt: Sequence[int], **run: Any) -> Agreement:
    """A model against an oracle's text, whose first prompt is `prompt`.  run: further arguments of `all_positions`."""
    import oracle_text               # of tools/, which the caller has put on the path

    drawn = np.array(text["drawn"])
    prompts = oracle_text.prompts(prompt, text["vocabulary"])
    found = all_positions(path, [[*ids, *more] for ids, more in zip(prompts, drawn.tolist())], **run)
    logits = np.array([oracle_text.behind_prompts(rows, len(prompt)) for rows in found])
    return judged(text, float(oracle_text.log_likelihood(logits, drawn).mean()), logits)


def judged(text: dict[str, Any], nll: float, logits: np.ndarray) -> Agreement:
    """Our mean negative log-likelihood and logits [prompts, drawn, vocabulary] beside an oracle's text."""
    best, theirs = logits.argmax(axis=-1), np.array(text["best"])
    exact = theirs.copy()
    for at, token in text["exact_best"]:
        exact.ravel()[at] = token
    margin = np.array(text["margin"]) / 100
    limit = max(SMALLEST, math.ceil(100 * CLEAR * text["mean_error"]) / 100)
    near, clear, same = margin >= SMALLEST, (margin >= limit) & (theirs == exact), best == theirs
    return Agreement(best.size, math.exp(nll), math.exp(text["nll"]), (int(same[clear].sum()), int(clear.sum())), limit,
                     (int(same[near].sum()), int(near.sum())),
                     (int((best != exact)[near].sum()), int((theirs != exact)[near].sum())), logits[0, 0])
