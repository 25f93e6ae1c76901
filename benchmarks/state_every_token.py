"""Generation with a checkpoint at every token against none, SmolLM2 and a Mamba of 130M; going back with fewer of them.

One session takes a checkpoint at every token (`m3jit.EveryToken`, which keeps 64 of them), the other none; their
samples alternate, and a ratio is of neighbours.  The policy's cost for recurrent states: a rollback by 40 tokens under
a checkpoint every 16 tokens and under one at every token, to the next token.
"""
from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.state_setup import Setup
from benchmarks.table import Row

NAME = "generation with a checkpoint at every token"
TOKENS, PAIRS, TARGET = 128, 15, 0.98
NEVER = 1 << 30                         # tokens between checkpoints: none is taken
BACK, INTERVAL, TRIALS = 40, 16, 24


def begun(model: Any, policy: Any, tokens: int = 8) -> Any:
    """A session behind a few tokens, its threads awake."""
    import m3jit
    session = m3jit.Session(model, [5 + 7 * n for n in range(16)], temperature=0, checkpoints=policy)
    grow(session, tokens)
    return session


def grow(session: Any, tokens: int) -> float:
    """Seconds for so many more tokens.  ValueError when the model ended its text."""
    before, start = len(session.tokens), time.perf_counter()
    for _ in session.generate(tokens):
        pass
    taken = time.perf_counter() - start
    if len(session.tokens) - before != tokens:
        raise ValueError(f"the text ended behind {len(session.tokens) - before} of {tokens} tokens")
    return taken


def ratio(path: Path, name: str) -> Row:
    """Speed with a checkpoint at every token, of that without."""
    import m3jit
    model = m3jit.load_model(path, threads=2)
    made = {"every": begun(model, m3jit.EveryToken()), "none": begun(model, m3jit.EveryTokens(NEVER))}
    start = {key: session.snapshot() for key, session in made.items()}
    times: dict[str, list[float]] = {"every": [], "none": []}
    for number in range(PAIRS + 1):
        for key in ("every", "none") if number % 2 else ("none", "every"):
            made[key].restore(start[key])
            times[key].append(grow(made[key], TOKENS))
    ratios = [b / a for a, b in zip(times["every"][1:], times["none"][1:])]
    ratio, taken = statistics.median(ratios), statistics.median(times["none"][1:]) / TOKENS
    return Row(f"{NAME}: {name}, speed of that without", f">= {TARGET}",
               f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}; {1e3 * taken:.2f} ms a token)", ratio >= TARGET)


def going_back(path: Path) -> list[Row]:
    """A rollback to the next token, with few checkpoints and with one at every token."""
    import m3jit
    model = m3jit.load_model(path, threads=2)
    rows = []
    policies = {f"a checkpoint every {INTERVAL} tokens": m3jit.EveryTokens(INTERVAL),
                "one at every token": m3jit.EveryToken()}
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in policies}
    again: dict[str, list[int]] = {key: [] for key in policies}
    sessions = {key: begun(model, policy, 64) for key, policy in policies.items()}
    for number in range(TRIALS):
        for key, session in sessions.items():
            state = session.snapshot()
            start = time.perf_counter()
            session.rollback(to_token=len(session.tokens) - BACK - number % INTERVAL)
            back = time.perf_counter() - start
            again[key].append(session.waiting)
            start = time.perf_counter()
            next(session.generate())
            times[key].append((back, time.perf_counter() - start))
            session.restore(state)
    for key, found in times.items():
        back, on = (statistics.median(column) for column in zip(*found))
        most, allowed = max(again[key]), INTERVAL if "every 16" in key else 1
        rows.append(Row(f"rollback by {BACK} to {BACK + INTERVAL - 1} tokens, Mamba-130M, {key}: tokens computed again",
                        f"<= {allowed}", f"{most} at most, {statistics.mean(again[key]):.1f} in the mean; the rollback "
                        f"{1e6 * back:.0f} us, the next token after {1e3 * on:.1f} ms", most <= allowed))
    return rows


def measure(setup: Setup) -> list[Row]:
    mamba = setup.mamba()
    return [ratio(setup.smollm2, "SmolLM2"), ratio(mamba, "Mamba-130M"), *going_back(mamba)]
