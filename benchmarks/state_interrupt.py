"""From pushing input in one thread to compiled code being left in another: SmolLM2 and a model of 1.1B, generating and
in the middle of a prompt of 2,000 tokens.

The program is that of `m3jit run` but for what it does with an interrupt: it reads the input and goes on where it was.
Pushes come at random moments after one pass was completed undisturbed (a pass: a token, or a chunk of 64 tokens of the
prompt; within it the next push would not interrupt, by rule); one that does not find the machine inside compiled code is
not counted.  `left`: until the native call has returned to the
machine, with the interpreter lock; `read`: until SENSE has the text.
"""
from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from benchmarks.state_setup import STATED, Setup, micros, p50_p99
from benchmarks.table import Row

NAME = "input pushed -> native code left"
PROMPT, TOKENS = 2000, 400
BOUND_P50, BOUND_P99 = 217e-6, 2e-3
SMALL_EVENTS, LARGE_TOKENS, LARGE_CHUNKS = 1000, 300, 200
HEARD = """IF_INTERRUPT heard"""
HANDLER = """
heard:
    SENSE rHeard, USER_INPUT TEXT NON_BLOCKING
    JUMP forward
done:"""


@dataclass
class Watched:
    """When the machine was inside compiled code, and when it read what was pushed."""
    inside: bool = False
    left: float = 0.0                       # the first return from compiled code since it was set to 0
    read: float = 0.0
    heard: threading.Event = field(default_factory=threading.Event)
    passed: threading.Event = field(default_factory=threading.Event)       # a pass was completed since
    pass_seconds: float = 0.0


class Interrupted:
    """A model's machine that is interrupted again and again.  kind: "generating" or "prompt"."""

    def __init__(self, path: Path, kind: str, threads: int = 2):
        import m3jit
        from m3jit.models.program import Options
        from m3jit.models.provider import Models
        self.models, self.kind, self.threads = Models(), kind, threads
        model = self.models.load(str(path))
        tokens = TOKENS if kind == "generating" else 1
        text = self.models.assembly(model, options=Options(max_tokens=tokens)).replace("IF_EQUAL done", "NOP")
        text = text.replace("IF_INTERRUPT done", HEARD).replace("\ndone:", HANDLER)
        assert HANDLER in text and HEARD in text
        self.program = m3jit.assemble(text)
        length = 4 if kind == "generating" else PROMPT
        self.prompt = np.random.default_rng(1).integers(5, min(model.info("vocab"), 40_000), length).astype(np.int64)
        self.watched = Watched()

    def machine(self) -> Any:
        import m3jit
        vm = m3jit.VM(self.program, threads=self.threads, models=self.models)
        vm.set_sink("OUTPUT", lambda item: None)
        vm.push_input(self.prompt)
        source, read, watched = vm.sources["USER_INPUT"], vm.sources["USER_INPUT"].read, self.watched

        def noting(*args: Any) -> Any:
            value = read(*args)
            watched.read = time.perf_counter()
            if isinstance(value[0], str):
                watched.passed.clear()
                watched.heard.set()
            return value
        source.read = noting
        return vm

    def events(self, count: int) -> Iterator[tuple[float, float]]:
        """(left, read) in seconds of `count` pushes that found the machine inside compiled code."""
        from m3jit.backends.cpu.engine import BoundRegion
        from m3jit.ir.plan import ABANDONED
        watched, found, enter = self.watched, [], BoundRegion.__call__

        def entered(bound: Any) -> int:
            watched.inside = True
            number = enter(bound)
            watched.left = watched.left or time.perf_counter()
            watched.inside = False
            if number != ABANDONED and bound.region.parallel:
                watched.passed.set()
            return number
        BoundRegion.__call__ = entered                 # type: ignore[method-assign]
        try:
            self.machine().run()                       # compiles
            while len(found) < count:
                vm = self.machine()
                pusher = threading.Thread(target=self._push, args=(vm, found, count))
                began = time.perf_counter()
                pusher.start()
                vm.run()
                passes = TOKENS if self.kind == "generating" else -(-PROMPT // 64)
                if not watched.pass_seconds:
                    watched.pass_seconds = (time.perf_counter() - began) / passes
                pusher.join()
        finally:
            BoundRegion.__call__ = enter               # type: ignore[method-assign]
        return iter(found[:count])

    def _push(self, vm: Any, found: list, count: int) -> None:
        watched, draw = self.watched, random.Random(len(found))
        while not vm.finished and len(found) < count and watched.pass_seconds:
            while not watched.passed.wait(0.2):
                if vm.finished:
                    return
            time.sleep(watched.pass_seconds * draw.uniform(0, 2))
            if vm.finished:
                break
            watched.heard.clear()
            inside, watched.left, pushed = watched.inside, 0.0, time.perf_counter()
            vm.push_input("a word")
            while not watched.heard.wait(0.2):
                if vm.finished:
                    return
            if inside:
                found.append((watched.left - pushed, watched.read - pushed))


def measure(setup: Setup) -> list[Row]:
    """Two rows for each model and kind: until native code is left, until the text is read."""
    rows = []
    for name, path, counts in (("SmolLM2", setup.smollm2, (SMALL_EVENTS, SMALL_EVENTS)),
                               ("1.1B Q4_K_M", setup.llama(), (LARGE_TOKENS, LARGE_CHUNKS))):
        for kind, count in zip(("generating", "prompt"), counts):
            times = list(Interrupted(path, kind).events(count))
            left, read = p50_p99([t for t, _ in times]), p50_p99([t for _, t in times])
            what = "generating" if kind == "generating" else f"in a prompt of {PROMPT}"
            small = name == "SmolLM2"
            target = f"p50 <= {1e6 * BOUND_P50:.0f} us, p99 <= {1e3 * BOUND_P99:.0f} ms" if small else \
                f"p99 <= {1e3 * BOUND_P99:.0f} ms"
            rows.append(Row(f"{NAME}, {name} {what}", target,
                            f"p50 {micros(left[0])}, p99 {micros(left[1])}; {count} events",
                            left[1] <= BOUND_P99 and (not small or left[0] <= BOUND_P50)))
            rows.append(Row(f"the same until SENSE has the text, {name} {what}", STATED,
                            f"p50 {micros(read[0])}, p99 {micros(read[1])}", None))
    return rows
