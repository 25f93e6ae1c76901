"""From pushing input in one thread to compiled code being left in another: SmolLM2 and a model of 1.1B, generating and
in the middle of a prompt of 2,000 tokens.

The program is that of `m3jit run` but for what it does with an interrupt: it reads the input and goes on where it was.
Pushes come at random moments of a pass behind one that was completed undisturbed (a pass: a token, or a chunk of 64
tokens of the prompt; within the first one the push would not interrupt, by rule); one that does not find the machine
inside compiled code is not counted.  `left`: until the native call has returned to the machine, with the interpreter
lock; `read`: until SENSE has the text.

The pushing thread takes a CPU from the machine while it pushes, so `left` begins with that.  Where the machine's thread
is ready and another program has its CPU, `left` lasts until the scheduler gives it one: on a busy machine that is the
99th percentile.  Linux counts these waits (schedstat); a row says in how many events they were longer than `WAITED`,
which no push takes, and what the others need.  Its verdict is about all events.
"""
from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.state_setup import STATED, Setup, micros, p50_p99
from benchmarks.table import Row

NAME = "input pushed -> native code left"
PROMPT, TOKENS = 2000, 100
BOUND_P50, BOUND_P99 = 217e-6, 2e-3
WAITED = 0.5e-3                         # seconds without a CPU: more than a thread of this program takes from another
SMALL_EVENTS, LARGE_EVENTS = {"generating": 1000, "prompt": 500}, {"generating": 300, "prompt": 300}
HEARD = """IF_INTERRUPT heard"""
HANDLER = """
heard:
    SENSE rHeard, USER_INPUT TEXT NON_BLOCKING
    JUMP forward
done:"""


@dataclass(frozen=True)
class Event:
    """A push: seconds until compiled code was left, until the text was read, and of the first the ones the machine's
    thread was ready and had no CPU."""
    left: float
    read: float
    waited: float


@dataclass
class Watched:
    """When the machine was inside compiled code, and when it read what was pushed."""
    inside: bool = False
    left: float = 0.0                       # the first return from compiled code since it was set to 0
    ready: float = 0.0                      # `Queue.seconds` then
    read: float = 0.0
    heard: threading.Event = field(default_factory=threading.Event)
    passed: threading.Event = field(default_factory=threading.Event)       # a pass was completed since
    pass_seconds: float = 0.0               # the last one's


class Queue:
    """How long the thread that made it has been ready to run and waited for a CPU; always 0 where the system does not
    tell (it does so under Linux)."""

    def __init__(self) -> None:
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._file = os.open(path, os.O_RDONLY) if os.path.exists(path) else -1

    def seconds(self) -> float:
        """From any thread; a wait counts when it is over."""
        return int(os.pread(self._file, 100, 0).split()[1]) * 1e-9 if self._file >= 0 else 0.0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


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

    def events(self, count: int) -> list[Event]:
        """So many pushes that found the machine inside compiled code."""
        from m3jit.backends.cpu.engine import BoundRegion
        from m3jit.ir.plan import ABANDONED
        watched, queue, enter = self.watched, Queue(), BoundRegion.__call__
        found: list[Event] = []

        def entered(bound: Any) -> int:
            watched.inside, began = True, time.perf_counter()
            number = enter(bound)
            now = time.perf_counter()
            if not watched.left:
                watched.ready, watched.left = queue.seconds(), now
            watched.inside = False
            if number != ABANDONED and bound.region.parallel:
                watched.pass_seconds = now - began
                watched.passed.set()
            return number
        BoundRegion.__call__ = entered                 # type: ignore[method-assign]
        try:
            self.machine().run()                       # compiles
            while len(found) < count:
                vm = self.machine()
                watched.passed.clear()
                pusher = threading.Thread(target=self._push, args=(vm, queue, found, count))
                pusher.start()
                vm.run()
                pusher.join()
        finally:
            BoundRegion.__call__ = enter               # type: ignore[method-assign]
            queue.close()
        return found

    def _push(self, vm: Any, queue: Queue, found: list[Event], count: int) -> None:
        watched, draw = self.watched, random.Random(len(found))
        while not vm.finished and len(found) < count:
            while not watched.passed.wait(0.2):
                if vm.finished:
                    return
            time.sleep(watched.pass_seconds * draw.random())
            if vm.finished:
                break
            watched.heard.clear()
            ready = queue.seconds()
            inside, watched.left, pushed = watched.inside, 0.0, time.perf_counter()
            vm.push_input("a word")
            while not watched.heard.wait(0.2):
                if vm.finished:
                    return
            left = watched.left - pushed
            if inside and left > 0:
                found.append(Event(left, watched.read - pushed, min(watched.ready - ready, left)))


def seen(events: list[Event]) -> str:
    """The percentiles of a row, and what they are without events that other programs prolonged."""
    p50, p99 = p50_p99([e.left for e in events])
    own = [e.left for e in events if e.waited <= WAITED]
    text = f"p50 {micros(p50)}, p99 {micros(p99)}; {len(events)} events"
    if len(own) == len(events):
        return text
    rest = f"p99 of the others {micros(p50_p99(own)[1])}" if own else "there are no others"
    return f"{text}, {len(events) - len(own)} of them without a CPU for over {1e3 * WAITED:.1f} ms, {rest}"


def measure(setup: Setup) -> list[Row]:
    """Two rows for each model and kind: until native code is left, until the text is read."""
    rows = []
    for name, path, counts in (("SmolLM2", setup.smollm2, SMALL_EVENTS), ("1.1B Q4_K_M", setup.llama(), LARGE_EVENTS)):
        for kind, count in counts.items():
            events = Interrupted(path, kind).events(count)
            left, read = p50_p99([e.left for e in events]), p50_p99([e.read for e in events])
            what = "generating" if kind == "generating" else f"in a prompt of {PROMPT}"
            small = name == "SmolLM2"
            target = f"p50 <= {1e6 * BOUND_P50:.0f} us, p99 <= {1e3 * BOUND_P99:.0f} ms" if small else \
                f"p99 <= {1e3 * BOUND_P99:.0f} ms"
            rows.append(Row(f"{NAME}, {name} {what}", target, seen(events),
                            left[1] <= BOUND_P99 and (not small or left[0] <= BOUND_P50)))
            rows.append(Row(f"the same until SENSE has the text, {name} {what}", STATED,
                            f"p50 {micros(read[0])}, p99 {micros(read[1])}", None))
    return rows
