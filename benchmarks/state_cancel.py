"""A text of the server whose 2,000-token prompt is being computed is cancelled: time until it has ended, SmolLM2.

Alone, and beside other such prompts and texts that are generated (all in one batch).  The moments are spread over the
rounds of the batch.  The others go on.
"""
from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, Sequence

import numpy as np

from benchmarks.state_setup import STATED, Setup, p50_p99
from benchmarks.table import Row

if TYPE_CHECKING:
    from m3jit.serve.engine import Ticket

NAME = "cancel of a 2k prompt in the server"
PROMPT, TIMES = 2000, 20
LONGEST = 600.0                                        # seconds that one wait may take
BESIDE = ((0, 0), (0, 3), (1, 0), (3, 3))              # other prompts, texts that are generated


def seconds(engine: object, prompts: int, texts: int, wait: float, draw: np.random.Generator) -> float:
    """Time until one has ended, `wait` seconds after its prompt began to be computed."""
    from m3jit.api.generation import Settings
    from m3jit.serve.engine import Job, ignore

    def start(count: int, length: int, tokens: int) -> list:
        jobs = [Job(draw.integers(1000, 40_000, length).tolist(), Settings(max_tokens=tokens, temperature=0.0), ignore)
                for _ in range(count)]
        return engine.submit(jobs)                     # type: ignore[attr-defined]
    others = start(texts, 20, 1000)
    until(lambda: all(len(text.tokens) > 2 for text in others), f"{texts} texts beside it have three tokens each",
          others)
    first, *more = start(prompts + 1, PROMPT, 4)
    until(lambda: first.member is not None, "the engine begins with the prompt", [first])
    time.sleep(wait)
    began = time.perf_counter()
    first.cancel()
    ended(first, "the text that was cancelled")
    took = time.perf_counter() - began
    if first.tokens:
        raise AssertionError("the prompt was over already: the machine is too fast for this wait")
    for text in (*more, *others):
        text.cancel()
    for text in (*more, *others):
        ended(text, "a text beside it")
    return took


def until(there: Callable[[], bool], what: str, texts: Sequence[Ticket]) -> None:
    """Wait, `LONGEST` seconds at most.  TimeoutError names what did not come; RuntimeError: one of the texts ended
    before it could come."""
    late = time.monotonic() + LONGEST
    while not there():
        over = [text for text in texts if text.done.is_set()]
        if over and not there():
            raise RuntimeError(f"{NAME}: a text ended ({over[0].finish_reason or 'with an error'}, "
                               f"{len(over[0].tokens)} tokens) before {what}")
        if time.monotonic() > late:
            raise TimeoutError(f"{NAME}: waited {LONGEST:g} s until {what}; the engine hangs, or the machine is too "
                               "slow")
        time.sleep(0.001)


def ended(text: Ticket, what: str) -> None:
    """Wait for the end of a text, as `until`."""
    if not text.done.wait(LONGEST):
        raise TimeoutError(f"{NAME}: waited {LONGEST:g} s until {what} has ended; it is {text.state}, with "
                           f"{len(text.tokens)} tokens")


def measure(setup: Setup) -> list[Row]:
    """One row for each company."""
    from m3jit.api.generation import load_model
    from m3jit.serve.engine import Engine
    engine, draw, out = Engine(load_model(str(setup.smollm2))), np.random.default_rng(1), []
    try:
        for prompts, texts in BESIDE:
            seconds(engine, prompts, texts, 0.2, draw)                 # compiles
            p50, p99 = p50_p99([seconds(engine, prompts, texts, 0.1 + 0.017 * i, draw) for i in range(TIMES)])
            out.append(Row(f"{NAME}: beside {prompts} such prompts and {texts} texts", STATED,
                           f"p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms; {TIMES} times", None))
    finally:
        engine.close()
    return out
