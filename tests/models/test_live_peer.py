"""Real models against llama.cpp as it runs now: logits, greedy tokens and perplexity (slow).

    M3JIT_TEST_PEER=/path/to/python M3JIT_TEST_GEMMA3=FILE pytest -m slow tests/models/test_live_peer.py

M3JIT_TEST_PEER is a Python that has llama-cpp-python (benchmarks/peer_llama.py says how to build it)."""
from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import m3jit
from benchmarks import agreement
from m3jit.cli.perplexity import cut
from tests.models.test_llama import smollm2

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from oracle_prompts import PROMPTS  # noqa: E402  (found through the path set above)

TOKENS, WINDOW, WINDOWS, CLEAR = 32, 256, 16, 0.5      # CLEAR: where llama.cpp agrees with itself (oracles/README.md)
FILES = {"SmolLM2": smollm2, "Gemma 3": lambda: os.environ.get("M3JIT_TEST_GEMMA3")}
OBTAINED = {"SmolLM2": "m3jit model get smollm2, or set M3JIT_TEST_SMOLLM2",
            "Gemma 3": "set M3JIT_TEST_GEMMA3 to the file of Gemma 3 270M"}


def file_of(model: str) -> Path:
    path = FILES[model]()
    if path is None:
        pytest.skip(f"{model} is not here: {OBTAINED[model]}")
    return Path(path)


def peer() -> str:
    found = os.environ.get("M3JIT_TEST_PEER")
    if not found:
        pytest.skip("set M3JIT_TEST_PEER to a Python that has llama-cpp-python")
    return found


def asked(python: str, path: Path, windows: list[list[int]], folder: Path) -> dict[str, np.ndarray]:
    """What llama.cpp says."""
    request, out = folder / "request.json", folder / "out.npz"
    request.write_text(json.dumps({"prompts": PROMPTS, "tokens": TOKENS, "windows": windows}))
    done = subprocess.run([python, str(ROOT / "benchmarks" / "peer_positions.py"), str(path), str(request), str(out),
                           "--threads", "1"], capture_output=True, text=True, timeout=3000)    # more would spin
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(out) as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_against_llama_cpp(name, tmp_path):
    """20 prompts, 32 tokens behind each, 16 windows of 256 tokens.

    llama.cpp is at another of its settings as far from itself as rounding takes it: our logits may be LUCK times as far
    from it on average and twice as far at most; our tokens along its text may differ LUCK times as often, and FEW more,
    where its margin is 0.05, and nowhere from a margin of 0.5."""
    path, python = file_of(name), peer()
    model = m3jit.load_model(path)
    windows = cut(model, (ROOT / "tests/oracles/perplexity_text.txt").read_text(), WINDOW)[:WINDOWS]
    assert len(windows) == WINDOWS
    theirs = asked(python, path, windows, tmp_path)
    prompts = [theirs[f"ids{i}"].tolist() for i in range(len(PROMPTS))]
    assert prompts == [model.prompt_tokens(text) for text in PROMPTS]
    ours, tokens = [], []
    for ids, text in zip(prompts, theirs["tokens"].tolist()):
        (rows,) = agreement.all_positions(path, [ids + text[:-1]], threads=2)
        ours.append(rows[len(ids) - 1].copy())
        tokens.append(rows[len(ids) - 1:].argmax(axis=1))
    apart = np.abs(np.array(ours) - theirs["logits"])
    spread = [np.abs(theirs[f"logits_{setting}"] - theirs["logits"]) for setting in ("flash", "f32")]
    print(f"\n{name}: logits apart max {apart.max():.3f} mean {apart.mean():.4f}; llama.cpp from itself: max "
          f"{max(s.max() for s in spread):.3f} mean {max(s.mean() for s in spread):.4f}")
    near, clear = theirs["margin"] >= agreement.SMALLEST, theirs["margin"] >= CLEAR
    differ = np.array(tokens) != theirs["tokens"]
    itself = max(int((theirs[f"tokens_{s}"] != theirs["tokens"])[near].sum()) for s in ("flash", "f32"))
    print(f"greedy: {int((~differ)[clear].sum())} of {clear.sum()} from a margin of {CLEAR}, "
          f"{int((~differ)[near].sum())} of {near.sum()} from {agreement.SMALLEST}; llama.cpp differs from itself "
          f"{itself} times")
    nll = -np.concatenate([model.score(window) for window in windows]).astype(np.float64).mean()
    ratio = math.exp(nll - theirs["nll"].mean())
    print(f"perplexity {math.exp(nll):.4f}, llama.cpp {math.exp(theirs['nll'].mean()):.4f}, ratio {ratio:.5f}")
    assert apart.mean() <= agreement.LUCK * max(s.mean() for s in spread)
    assert apart.max() <= 2 * max(s.max() for s in spread)
    assert clear.sum() >= agreement.LEAST and not differ[clear].any()
    assert differ[near].sum() <= agreement.LUCK * itself + agreement.FEW
    assert abs(ratio - 1) <= agreement.PERPLEXITY
