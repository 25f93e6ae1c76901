"""Time to the first token of a request whose first 2,048 tokens an earlier one began with, against that one's, SmolLM2.

Through `LanguageModel.generate` and through the engine of the server, each with its own index.  Every round takes a
prefix that nobody has seen, and two requests that differ behind it in 16 tokens; the ratio is of a round, the figure
the median.  Once a round is compared with a model without an index: the same tokens.
"""
from __future__ import annotations

import queue
import statistics
import time
from typing import Any, Callable

import numpy as np

from benchmarks.state_setup import STATED, Setup
from benchmarks.table import Row

NAME = "second request sharing a 2k prefix"
PREFIX, REST, TOKENS, ROUNDS = 2048, 16, 4, 5
BOUND = 0.05
MEMORY = 1 << 30
LONGEST = 600.0                                        # seconds that one piece may take

Ask = Callable[[list[int]], tuple[float, list[int]]]   # seconds to the first token, all tokens


def through_model(model: Any) -> Ask:
    from m3jit.api.generation import Generation, Settings

    def ask(ids: list[int]) -> tuple[float, list[int]]:
        began = time.perf_counter()
        text = Generation(model.start(ids, Settings(max_tokens=TOKENS, temperature=0.0)))
        next(text)
        first = time.perf_counter() - began
        text.result()
        return first, text.tokens
    return ask


def next_of(events: queue.Queue[Any], ticket: Any) -> Any:
    """(text, error, whether it is over) of a text of the engine, when it comes.  TimeoutError: it does not."""
    try:
        return events.get(timeout=LONGEST)
    except queue.Empty:
        raise TimeoutError(f"{NAME}: waited {LONGEST:g} s for the next piece of a text, which is {ticket.state}, with "
                           f"{len(ticket.tokens)} tokens; the engine hangs, or the machine is too slow") from None


def through_engine(engine: Any) -> Ask:
    from m3jit.api.generation import Settings
    from m3jit.serve.engine import Job

    def ask(ids: list[int]) -> tuple[float, list[int]]:
        events: queue.Queue[Any] = queue.Queue()
        began = time.perf_counter()
        ticket, = engine.submit([Job(ids, Settings(max_tokens=TOKENS, temperature=0.0), lambda *e: events.put(e))])
        _, error, ended = next_of(events, ticket)
        first = time.perf_counter() - began
        while not ended and error is None:
            _, error, ended = next_of(events, ticket)
        if error is not None:
            raise error
        return first, ticket.tokens
    return ask


def rounds(ask: Ask, vocabulary: int, seed: int
           ) -> tuple[list[tuple[float, float, float]], list[tuple[list[int], list[int]]]]:
    """([(first, second, second again) in seconds], [(prompt, tokens) of the second requests])."""
    draw, times, texts = np.random.default_rng(seed), [], []
    for i in range(ROUNDS + 1):
        prefix, *rests = (draw.integers(1000, min(vocabulary, 40_000), n).tolist() for n in (PREFIX, REST, REST))
        first, _ = ask(prefix + rests[0])
        second, tokens = ask(prefix + rests[1])
        again, _ = ask(prefix + rests[1])
        if i:                                          # the first one compiles
            times.append((first, second, again))
        texts.append((prefix + rests[1], tokens))
    return times, texts


def measure(setup: Setup) -> list[Row]:
    """Two rows with the bound, one for each way, and for each the same prompt asked a third time."""
    from m3jit.api.generation import load_model
    from m3jit.serve.engine import Engine
    path, out = str(setup.smollm2), []
    plain = through_model(load_model(path))
    for seed, way in enumerate(("LanguageModel.generate", "the server's engine")):
        model = load_model(path, prefix_memory=MEMORY)
        engine = Engine(model) if seed else None
        try:
            times, texts = rounds(through_engine(engine) if engine else through_model(model), model.vocabulary, seed)
        finally:
            if engine:
                engine.close()
        if plain(texts[-1][0])[1] != texts[-1][1]:
            raise AssertionError(f"{way}: another text than computing everything gives")
        ratio = statistics.median(second / first for first, second, _ in times)
        first, second, again = (1e3 * statistics.median(column) for column in zip(*times))
        hits = model.prefixes.stats["hits"]
        out += [Row(f"{NAME}: {way}", f"time to first token <= {BOUND:.0%} of the first",
                    f"{ratio:.2%}: {first:.0f} ms, then {second:.1f} ms; {len(times)} prefixes, {hits} hits, the same "
                    "tokens as without", ratio <= BOUND),
                Row(f"the same prompt a third time: {way}", STATED, f"{again:.1f} ms", None)]
    return out
