"""Replaying a recorded run against the run itself, SmolLM2; also what recording costs, and the size of a log.

Speed is tokens per second after the first one, the medians of alternating runs of 200 tokens; the replay compares every
output and, once a second, the whole state.
"""
from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.state_setup import STATED, Setup
from benchmarks.table import Row

NAME = "replay of a recorded run"
BOUND, TOKENS, RUNS = 0.9, 200, 7


class Clock:
    """A sink that notes when the first and the last token came."""
    name = "standard output"

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.count = 0

    def write(self, item: Any, blocking: bool) -> bool:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.count += 1
        return True

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self, complete: bool) -> None:
        """Nothing to close."""

    @property
    def speed(self) -> float:
        return (self.count - 1) / (self.last - self.first)


def conversation(setup: Setup) -> list[Row]:
    """Two rows: a conversation repeated, and recorded, against one that is not: an answer's tokens behind the first."""
    from m3jit.api.conversation import Conversation
    from m3jit.api.generation import LanguageModel
    from m3jit.api.recorded import RecordedConversation
    from m3jit.api.replayed import TalkReplay
    from m3jit.models.provider import Models
    models = Models()
    model = LanguageModel(str(setup.smollm2), models)

    def said(talk: Conversation) -> float:
        clock = Clock()
        for piece in talk.say("Tell me about a river that rises in the mountains."):
            clock.write(piece, True)
        talk.close()
        return clock.speed

    def repeated(path: Path) -> float:
        clock = Clock()
        TalkReplay(str(path), models, write=lambda text: text != "\n" and clock.write(text, True)).run()
        return clock.speed

    def recorded(path: Path) -> Conversation:
        path.unlink(missing_ok=True)                   # a log is a new file
        return RecordedConversation(path, model, **settings)

    settings: dict[str, Any] = {"max_tokens": TOKENS, "seed": 1}
    with tempfile.TemporaryDirectory(prefix="m3jit-replay-") as folder:
        log = Path(folder) / "talk.log"
        found = [(said(Conversation(model, **settings)), said(recorded(log)), repeated(log))
                 for _ in range(RUNS + 1)][1:]
    by_replay = statistics.median(c / a for a, _, c in found)
    by_recording = statistics.median(b / a for a, b, _ in found)
    return [Row("replay of a recorded conversation", f">= {BOUND} of its speed", f"{by_replay:.3f}",
                by_replay >= BOUND),
            Row("recording a conversation", STATED, f"{by_recording:.3f} of the speed without", None)]


def measure(setup: Setup) -> list[Row]:
    """Five rows: replay against run, recording against run, bytes of the log for each token; and of a conversation."""
    from m3jit.models.program import Options
    from m3jit.models.provider import Models
    from m3jit.timetravel.record import Recording
    from m3jit.timetravel.replay import Replay
    from m3jit.vm.vm import VM
    models = Models()
    reference = str(setup.smollm2)
    model = models.load(reference)
    program = models.program(model, reference, Options(max_tokens=TOKENS, temperature=0.8))
    prompt = np.array(model.encode("The river rises in the mountains, and"), np.int64)

    def run(path: Path | None) -> float:
        clock = Clock()
        if path is not None:
            path.unlink(missing_ok=True)               # a log is a new file
        recording = Recording(str(path)) if path is not None else None
        vm = VM(program, models=models, record=recording.recorder if recording is not None else False)
        vm.set_sink("OUTPUT", clock)
        vm.push_input(prompt)
        vm.run() if recording is None else recording.run(vm)
        return clock.speed

    def replay(path: Path) -> float:
        clock = Clock()
        again = Replay(str(path), models, program=program)
        again.vm.set_sink("OUTPUT", clock)
        again.run()
        return clock.speed

    with tempfile.TemporaryDirectory(prefix="m3jit-replay-") as folder:
        log = Path(folder) / "run.log"
        found = [(run(None), run(log), replay(log)) for _ in range(RUNS + 1)][1:]          # the first ones compile
        plain, recorded, repeated = (statistics.median(column) for column in zip(*found))
        by_replay = statistics.median(c / a for a, _, c in found)
        by_recording = statistics.median(b / a for a, b, _ in found)
        size = log.stat().st_size / TOKENS
    return [Row(NAME, f">= {BOUND} of the run's speed",
                f"{by_replay:.3f} ({repeated:.0f} against {plain:.0f} tokens/s)", by_replay >= BOUND),
            Row("recording a run", STATED, f"{by_recording:.3f} of the speed without ({recorded:.0f} tokens/s)", None),
            Row("a log", STATED, f"{size:.0f} bytes for each token, the program included", None), *conversation(setup)]
