"""What llama.cpp computes with a model, for comparisons with the real ones; runs where llama-cpp-python is installed.

    python benchmarks/peer_positions.py MODEL.gguf REQUEST.json OUT.npz [--threads 1]

The request has `prompts` (texts), `tokens` (how many greedy ones behind each) and `windows` (lists of token ids).
Written are, flash attention off and an f16 cache: `ids<i>` of prompt i, `tokens` and `margin` [prompts, tokens] with
the distance of the two largest logits, `logits` [prompts, vocabulary] behind the prompts, `nll` [windows], the mean
negative log-likelihood in nats of the tokens of each window but the first.  And how far llama.cpp is from itself: with
each of the OTHER settings `logits_<name>`, and `tokens_<name>`, the likeliest tokens along the same text.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from peer_llama import EXIT_NO_PEER, LlamaPeer, PeerContext, PeerError  # noqa: E402  (found through the path set above)

OTHER: dict[str, dict[str, Any]] = {"flash": {"flash": True}, "f32": {"kv_type": "f32"}}


def along(context: PeerContext, ids: list[int], text: list[int]) -> tuple[np.ndarray, list[int]]:
    """The logits behind a prompt, and the likeliest token before each of a text that goes on behind it."""
    context.clear()
    logits = context.decode(ids).copy()
    return logits, [int(logits.argmax()), *(int(context.decode([token]).argmax()) for token in text[:-1])]


def greedy(context: PeerContext, ids: list[int], count: int) -> tuple[np.ndarray, list[int], list[float]]:
    """The logits behind a prompt, the greedy tokens behind it, and the margin of each."""
    context.clear()
    logits = context.decode(ids)
    first, tokens, margins = logits.copy(), [], []
    for _ in range(count):
        runner_up, best = np.partition(logits, -2)[-2:]
        tokens.append(int(logits.argmax()))
        margins.append(float(best) - float(runner_up))
        logits = context.decode(tokens[-1:])
    return first, tokens, margins


def log_likelihood(context: PeerContext, ids: list[int]) -> float:
    context.clear()
    logits = context.decode_all(ids)
    lost = 0.0
    for row, token in zip(logits, ids[1:]):                # row by row: a vocabulary can be large
        wide = row.astype(np.float64)
        lost += float(wide.max() + np.log(np.exp(wide - wide.max()).sum()) - wide[token])
    return lost / (len(ids) - 1)


def derive(peer: LlamaPeer, request: dict[str, Any], threads: int) -> dict[str, np.ndarray]:
    prompts = [peer.tokenize(text, add_special=True) for text in request["prompts"]]
    size = max(max(map(len, prompts)) + request["tokens"], *map(len, request["windows"])) + 8
    with peer.context(threads, size) as context:
        runs = [greedy(context, ids, request["tokens"]) for ids in prompts]
        nll = [log_likelihood(context, window) for window in request["windows"]]
    out = {f"ids{i}": np.array(ids) for i, ids in enumerate(prompts)}
    out |= {"logits": np.array([r[0] for r in runs]), "tokens": np.array([r[1] for r in runs]),
            "margin": np.array([r[2] for r in runs]), "nll": np.array(nll)}
    for name, setting in OTHER.items():
        with peer.context(threads, size, **setting) as context:
            found = [along(context, ids, run[1]) for ids, run in zip(prompts, runs)]
        out |= {f"logits_{name}": np.array([f[0] for f in found]), f"tokens_{name}": np.array([f[1] for f in found])}
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("request", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    try:
        found = derive(LlamaPeer(options.model), json.loads(options.request.read_text()), options.threads)
    except PeerError as error:
        print(f"peer_positions: {error}", file=sys.stderr)
        return EXIT_NO_PEER
    np.savez(options.out, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
