"""Language models on both sides: m3jit's rates as the peer's are taken, and the peer as a process that stays loaded."""
from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np

from benchmarks.peer_llama import GENERATED, PROMPT_LONG, PROMPT_SHORT, fixed_tokens

ROOT = Path(__file__).parent.parent


class Ours:
    """m3jit running a model file on token ids; what it generates is not made text."""

    def __init__(self, path: Path, threads: int = 2):
        from m3jit.models.provider import Models
        self.models, self.threads = Models(), threads
        self.model = self.models.load(str(path))
        self.programs: dict[int, Any] = {}
        self.machine: Any = None                 # of the last run

    def stamps(self, prompt: int, tokens: int, seen: Callable[[int], float] = lambda n: 0.0
               ) -> tuple[float, list[float]]:
        """(start, times of the tokens) of a run; ends of the text are ignored.

        seen(n), called after token n, may do other work; the seconds it returns are taken off the later stamps."""
        import m3jit
        from m3jit.models.program import Options
        from m3jit.vm.streams import CallbackSink
        if tokens not in self.programs:
            text = self.models.assembly(self.model, options=Options(max_tokens=tokens))
            self.programs[tokens] = m3jit.assemble(text.replace("IF_EQUAL done", "NOP ; go on"))
        vm = self.machine = m3jit.VM(self.programs[tokens], backend="cpu", threads=self.threads, models=self.models)
        found: list[float] = []
        away = 0.0

        def token(_: Any) -> None:
            nonlocal away
            found.append(time.perf_counter() - away)
            away += seen(len(found))
        vm.sinks["OUTPUT"] = CallbackSink("tokens", token)
        vm.push_input(np.array(fixed_tokens(prompt, self.model.info("vocab")), np.int64))
        start = time.perf_counter()
        vm.run()
        return start, found

    def generate(self) -> float:
        """Tokens/s after the first, behind a short prompt."""
        _, stamps = self.stamps(PROMPT_SHORT, GENERATED + 1)
        return GENERATED / (stamps[-1] - stamps[0])

    def prompt(self) -> float:
        """Tokens/s of a prompt, its first generated token included."""
        start, stamps = self.stamps(PROMPT_LONG, 1)
        return PROMPT_LONG / (stamps[0] - start)


class Peer:
    """benchmarks/peer_llama.py as a process; `absent` says why there is none."""

    def __init__(self, python: str, path: Path, threads: int = 2):
        self.threads, self.absent = threads, ""
        command = [python, str(ROOT / "benchmarks/peer_llama.py"), str(path), "--serve"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        about = self.process.stdout.readline()
        if not about:
            self.absent = self.process.stderr.read().strip()[-200:] or "the peer ended at once"
        self.about = json.loads(about or "{}")

    def ask(self, kind: str) -> dict[str, Any]:
        """One sample; RuntimeError with the peer's words when it refuses."""
        self.process.stdin.write(f"{kind} {self.threads}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(self.process.stderr.read().strip()[-300:])
        return json.loads(answer)

    def rate(self, kind: str) -> float:
        """Tokens/s."""
        return self.ask(kind)["tokens_per_second"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Reader:
    """The plain-read rate of the minute: a loop that sums every 32-bit word of a large buffer."""

    def __init__(self, threads: int = 2, nbytes: int = 512 << 20):
        from benchmarks.kernels import READ_PIECE, read_kernel
        from m3jit.backends.cpu.engine import Engine
        self.pieces = nbytes // READ_PIECE
        self.data = np.ones(nbytes // 4, np.int32)
        self.sums = np.empty(self.pieces * 64, np.int32)
        self.run, self.threads = Engine().kernel(read_kernel()), threads

    def rate(self, seconds: float = 0.0) -> float:
        """Bytes per second of as many passes as take at least `seconds`; one without."""
        start, passes = time.perf_counter(), 0
        while True:
            self.run([self.data, self.sums, self.pieces], self.threads)
            passes, spent = passes + 1, time.perf_counter() - start
            if spent >= seconds:
                return passes * self.data.nbytes / spent
