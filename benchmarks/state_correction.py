"""A correction at token 100 of a 300-token answer of SmolLM2: how long until it goes on, and until the answer is
complete.

m3jit goes back, injects the correction and goes on; beside it stand stopping and starting over, in m3jit and in
llama.cpp (with a prompt of all that is kept), llama.cpp's removal of positions (llama_memory_seq_rm), and its state of
the sequence, saved while token 100 was generated and put back.  The correction begins at a token of its own, so that
all of them evaluate the same tokens; each ends with 200 more.  Samples of all ways alternate.
"""
from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from typing import Any, Callable

from benchmarks.state_setup import STATED, Setup
from benchmarks.table import ROOT, Row

NAME = "correction at token 100 of a 300-token answer, SmolLM2"
PROMPT = "The history of the river begins in the mountains, where"
CORRECTION = " In truth, it begins in the plains."
AT, ANSWER, AFTER, PAIRS, THREADS = 100, 300, 200, 5, 2
LONGEST = 900.0                                        # seconds that one answer of the peer may take
PEER = {"seq_rm": "llama.cpp, positions removed", "restore": "llama.cpp, saved state put back",
        "restart": "llama.cpp, started over"}


class Ours:
    """The two ways of m3jit, each on an answer of its own."""

    def __init__(self, path: Any):
        import m3jit
        self.model = m3jit.load_model(path, threads=THREADS)
        self.evaluated: set[int] = set()
        self.prompt = self.model.encode(PROMPT)
        self.correction = self.model.model.tokenizer.encode(CORRECTION, add_bos=False)

    def answer(self) -> Any:
        """A session that has given its answer.  ValueError when the model ended it."""
        import m3jit
        session = m3jit.Session(self.model, self.prompt, temperature=0)
        for _ in session.generate(ANSWER):
            pass
        if len(session.tokens) != len(self.prompt) + ANSWER:
            raise ValueError(f"the answer ended behind {len(session.tokens) - len(self.prompt)} tokens")
        return session

    def rollback(self) -> tuple[float, float]:
        """Seconds to the first token behind the correction, and to the 200th."""
        session = self.answer()
        before, start = session.evaluated, time.perf_counter()
        session.rollback(to_token=session.start + AT)
        session.inject(CORRECTION)
        pieces = session.generate(AFTER)
        next(pieces)
        first = time.perf_counter() - start
        self.evaluated.add(session.evaluated - before)
        for _ in pieces:
            pass
        return first, time.perf_counter() - start

    def restart(self) -> tuple[float, float]:
        session = self.answer()
        start = time.perf_counter()
        kept = [*session.tokens[:session.start + AT], *self.correction]
        pieces = self.model.generate(kept, temperature=0, max_tokens=AFTER)
        next(pieces)
        first = time.perf_counter() - start
        for _ in pieces:
            pass
        return first, time.perf_counter() - start


class Peer:
    """llama.cpp in a process of its own (benchmarks/peer_correction.py)."""

    def __init__(self, setup: Setup, prompt: list[int], correction: list[int]):
        self.saving = 0.0                               # seconds that saving the state took, at most
        script = ROOT / "benchmarks" / "peer_correction.py"
        self.process = subprocess.Popen([setup.peer_python, str(script), str(setup.smollm2)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self._ask({"prompt": prompt, "correction": correction, "at": AT, "answer": ANSWER, "after": AFTER,
                   "threads": THREADS})

    def _ask(self, question: Any) -> Any:
        late = threading.Event()
        timer = threading.Timer(LONGEST, lambda: (late.set(), self.process.kill()))    # which ends what it writes
        timer.start()
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:                        # it has ended
            line = ""
        finally:
            timer.cancel()
        if not line and late.is_set():
            self.process.wait()
            asked = question if isinstance(question, str) else "which setting is fastest"
            raise TimeoutError(f"{NAME}: waited {LONGEST:g} s for the peer's answer ({asked}) and ended it; it hangs, "
                               "or the machine is too slow")
        if not line:
            raise RuntimeError(f"the peer ended with {self.process.wait()}; --peer-python takes a Python that has "
                               "llama-cpp-python")
        return json.loads(line)

    def sample(self, kind: str) -> tuple[float, float]:
        found = self._ask(kind)
        self.saving = max(self.saving, found["save"])
        return found["first"], found["whole"]

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:              # it has nothing more to do
            self.process.kill()
            self.process.wait()


def measure(setup: Setup) -> list[Row]:
    ours = Ours(setup.smollm2)
    ways: dict[str, Callable[[], tuple[float, float]]] = {"m3jit, rolled back": ours.rollback,
                                                          "m3jit, started over": ours.restart}
    absent, peer = "", None
    try:
        peer = Peer(setup, ours.prompt, ours.correction)
        ways |= {name: lambda kind=kind: peer.sample(kind) for kind, name in PEER.items()}
    except (OSError, RuntimeError) as error:
        absent = str(error)
    for way in ways.values():
        way()
    ours.evaluated.clear()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(PAIRS):
        for name, way in ways.items():
            found[name].append(way())
    if peer is not None:
        peer.close()
    injected = len(ours.correction)
    again = {name: AT + len(ours.prompt) + injected if "over" in name else injected for name in ways}
    rows = [Row(f"{NAME}: tokens evaluated before it goes on ({injected} are injected)", f"<= {injected} + 1",
                f"{max(ours.evaluated)}", max(ours.evaluated) <= injected + 1)]
    mine = found["m3jit, rolled back"]
    for name, times in found.items():
        first, whole = (statistics.median(column) for column in zip(*times))
        ratios = [a[0] / b[0] for a, b in zip(times, mine)]
        rows.append(Row(f"{NAME}: {name}", STATED,
                        f"next token after {1e3 * first:.1f} ms ({statistics.median(ratios):.2f} x m3jit rolled back, "
                        f"{min(ratios):.2f} to {max(ratios):.2f}), {AFTER} tokens after {whole:.2f} s, "
                        f"{again[name]} tokens evaluated" +
                        (f"; saving took {1e3 * peer.saving:.1f} ms" if "saved" in name else ""), None))
    if absent:
        rows.append(Row(f"{NAME}: llama.cpp", STATED, f"no peer: {absent}", None))
    return rows
