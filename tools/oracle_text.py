"""The texts over which a stored oracle has perplexity and greedy tokens of a tiny model.

A random model finds any text that it did not write about as unlikely as any other; so each model gets a text that is
drawn from its own unrounded distribution, as a real model's text is near to what it would write.  There are PROMPTS
prompts: that of the oracle, and others of its length drawn at random; behind each of them DRAWN tokens of the model.

All random numbers come from SplitMix64 (`make_tiny_models.uniform`), so a text is a pure function of the logits.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from make_tiny_models import integers, uniform

SEED, PROMPTS, DRAWN = 6174, 20, 32
CENTS = 100                          # margins are stored in hundredths, rounded down
LARGEST = 999                        # of them


def prompts(first: Sequence[int], vocabulary: int) -> list[list[int]]:
    """PROMPTS prompts of one length."""
    others = integers(SEED, f"prompts/{vocabulary}", (PROMPTS - 1) * len(first), 0, vocabulary - 1)
    return [list(first), *others.reshape(PROMPTS - 1, -1).tolist()]


def drawn(first: Sequence[int], vocabulary: int, after: Callable[[list[int]], np.ndarray],
          behind: list[list[int]] | None = None) -> list[list[int]]:
    """Prompts (all, or those of `behind`, the first ones), each with the DRAWN tokens behind it.  after(ids): the
    unrounded model's logits [vocabulary] behind ids; it is called with a prompt, then with one token more each time."""
    out = []
    for number, ids in enumerate(behind or prompts(first, vocabulary)):
        noise = 0.5 + 0.5 * uniform(SEED, f"drawn/{number}", DRAWN * vocabulary).reshape(DRAWN, vocabulary)
        for step in noise:           # argmax(logits + Gumbel noise) is a draw from softmax(logits)
            ids = [*ids, int((after(ids) - np.log(-np.log(step + 2.0**-54))).argmax())]
        out.append(ids)
    return out


def log_likelihood(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The negative log-likelihood in nats of each token: logits [.., vocabulary], ids [..]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1)
    chosen = np.take_along_axis(wide, ids[..., None], axis=-1)[..., 0]
    return top + np.log(np.exp(wide - top[..., None]).sum(axis=-1)) - chosen


def behind_prompts(positions: np.ndarray, prompt: int) -> np.ndarray:
    """Of the logits of all positions of a sequence, those from which the DRAWN tokens behind a prompt are taken."""
    return positions[prompt - 1:prompt - 1 + DRAWN]


def row(sequences: list[list[int]], exact: np.ndarray, peer: np.ndarray) -> dict[str, Any]:
    """What an oracle stores of a text.  exact, peer [PROMPTS, DRAWN, vocabulary]: logits before each drawn token.

    `vocabulary`: its size; `drawn`: the tokens behind each prompt; `nll`, `exact_nll`: mean negative log-likelihood of
    them at the peer and at the unrounded model; `best`: the peer's likeliest token before each, with the `margin` of
    its two largest logits in hundredths; `exact_best`: [position among all, token] where the unrounded model's is
    another; `max_error`, `mean_error`: of the peer's logits at these positions."""
    ids = np.array(sequences)[:, -DRAWN:]
    two = np.sort(peer, axis=-1)[..., -2:].astype(np.float64)
    margin = np.minimum(np.floor((two[..., 1] - two[..., 0]) * CENTS), LARGEST).astype(int)
    best, exact_best = peer.argmax(axis=-1), exact.argmax(axis=-1)
    other = np.flatnonzero(best != exact_best)
    error = np.abs(peer.astype(np.float64) - exact)
    return {"vocabulary": peer.shape[-1], "drawn": ids.tolist(),
            "nll": round(float(log_likelihood(peer, ids).mean()), 7),
            "exact_nll": round(float(log_likelihood(exact, ids).mean()), 7), "best": best.tolist(),
            "margin": margin.tolist(),
            "exact_best": [[int(at), int(exact_best.ravel()[at])] for at in other],
            "max_error": round(float(error.max()), 7), "mean_error": round(float(error.mean()), 7)}
