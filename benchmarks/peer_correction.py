"""llama.cpp as a peer for corrections: an answer, then a correction at one of its tokens, by each of its ways.

    python benchmarks/peer_correction.py MODEL.gguf

Reads JSON lines.  The first one: {"prompt": ids, "correction": ids, "at": n, "answer": n, "after": n, "threads": n};
the answer names the setting that was fastest in a trial.  Each further one names a way: "seq_rm" removes the positions
behind `at`, "restore" puts the sequence's state back that was saved there, "restart" begins again with all that is kept
as its prompt.
The answer: {"first": seconds until the first token behind the correction is known, "whole": until `after` are, "save":
seconds the state took to save}.  Imports nothing of m3jit.
"""
from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peer_llama import EXIT_NO_PEER, LlamaPeer, PeerContext, PeerError, lc  # noqa: E402  (path set above)

CONTEXT, TRIAL = 1024, 24
SETTINGS = [(False, "f16"), (True, "f16"), (False, "f32"), (True, "f32")]


class Answers:
    """Corrections of one answer."""

    def __init__(self, context: PeerContext, asked: dict[str, Any]):
        self.context, self.prompt, self.correction = context, asked["prompt"], asked["correction"]
        self.at, self.answer, self.after = asked["at"], asked["answer"], asked["after"]
        self.memory = lc.llama_get_memory(context.handle)

    def generate(self, logits: Any, count: int) -> tuple[list[int], Any]:
        """`count` greedy tokens, all of them but the last evaluated, and the logits behind those."""
        tokens = []
        for _ in range(count):
            if tokens:
                logits = self.context.decode(tokens[-1:])
            tokens.append(int(logits.argmax()))
        return tokens, logits

    def sample(self, kind: str) -> dict[str, float]:
        self.context.clear()
        saved, size, save = None, 0, 0.0
        tokens, _ = self.generate(self.context.decode(self.prompt), self.at)
        logits = self.context.decode(tokens[-1:])      # token `at` is in the state too
        if kind == "restore":
            start = time.perf_counter()
            size = lc.llama_state_seq_get_size(self.context.handle, 0)
            saved = (ctypes.c_uint8 * size)()
            if lc.llama_state_seq_get_data(self.context.handle, saved, size, 0) != size:
                raise PeerError("llama_state_seq_get_data gave less than its size")
            save = time.perf_counter() - start
        self.generate(logits, self.answer - self.at)
        start = time.perf_counter()
        if kind == "seq_rm":
            lc.llama_memory_seq_rm(self.memory, -1, len(self.prompt) + self.at, -1)
            logits = self.context.decode(self.correction)
        elif kind == "restore":
            self.context.clear()
            if lc.llama_state_seq_set_data(self.context.handle, saved, size, 0) == 0:
                raise PeerError("llama_state_seq_set_data failed")
            logits = self.context.decode(self.correction)
        else:
            self.context.clear()
            logits = self.context.decode([*self.prompt, *tokens, *self.correction])
        int(logits.argmax())
        first = time.perf_counter() - start
        self.generate(logits, self.after)
        return {"first": first, "whole": time.perf_counter() - start, "save": save}


def fastest(peer: LlamaPeer, prompt: list[int], threads: int) -> tuple[bool, str]:
    """The setting that generates fastest."""
    times = {}
    for flash, kind in SETTINGS:
        with peer.context(threads, CONTEXT, flash, kv_type=kind) as context:
            for _ in range(2):                         # the first one wakes the threads
                context.clear()
                logits = context.decode(prompt)
                start = time.perf_counter()
                for _ in range(TRIAL):
                    logits = context.decode((int(logits.argmax()),))
                times[flash, kind] = time.perf_counter() - start
    return min(times, key=times.__getitem__)


def main() -> int:
    try:
        peer = LlamaPeer(sys.argv[1])
    except PeerError as error:
        print(f"peer_correction: {error}", file=sys.stderr)
        return EXIT_NO_PEER
    asked = json.loads(sys.stdin.readline())
    flash, kind = fastest(peer, asked["prompt"], asked["threads"])
    with peer.context(asked["threads"], CONTEXT, flash, kv_type=kind) as context:
        print(json.dumps({"flash": flash, "kv_type": kind, "load": os.getloadavg()[0]}), flush=True)
        answers = Answers(context, asked)
        for line in sys.stdin:
            print(json.dumps(answers.sample(json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
