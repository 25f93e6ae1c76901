"""Total tokens/s of 8 contexts that generate together, beside llama.cpp with 8 sequences in one batch and beside our
own prompt rate in the same minutes.

    python -m benchmarks.batch MODEL.gguf --peer-python PYTHON [--threads 2] [--pairs 7]

Both sides: 48 greedy tokens of each of 8 contexts behind different prompts of 16 tokens, which are not timed; ends of
the text are ignored.  Ours is timed from the first token of the last context to the last token of the first to finish.
Targets: 1.5 of llama.cpp, 0.5 of the prompt rate (which computes one row of logits for 128 tokens, where generating
computes one for every token).
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.generation import Ours, Peer
from benchmarks.peer_llama import GENERATED, PROMPT_SHORT, SEQUENCES, fixed_tokens
from benchmarks.table import Row, machine


class OursTogether(Ours):
    """m3jit running 8 machines of a model file in a batch."""

    def together(self) -> float:
        """Tokens/s of all machines, from the round in which each has its first token."""
        import m3jit
        from m3jit.models.program import Options
        from m3jit.vm.streams import CallbackSink
        if -1 not in self.programs:
            text = self.models.assembly(self.model, options=Options(max_tokens=GENERATED + 1))
            self.programs[-1] = m3jit.assemble(text.replace("IF_EQUAL done", "NOP ; go on"))
        made = [0]
        batch = m3jit.Batch()
        for i in range(SEQUENCES):
            vm = m3jit.VM(self.programs[-1], threads=self.threads, models=self.models)

            def token(_: Any) -> None:
                made[0] += 1
            vm.sinks["OUTPUT"] = CallbackSink("tokens", token)
            prompt = fixed_tokens(PROMPT_SHORT + i, self.model.info("vocab"))[i:]
            vm.push_input(np.array(prompt, np.int64))
            batch.add(vm)
        while made[0] < SEQUENCES:
            batch.step()
        before, start = made[0], time.perf_counter()
        while len(batch.members) == SEQUENCES:
            batch.step()
        rate = (made[0] - before) / (time.perf_counter() - start)
        batch.run()
        if batch.stats["joined_launches"] == 0:
            raise RuntimeError("the machines did not share a single launch")
        return rate


def rows(path: Path, python: str, threads: int, pairs: int) -> list[Row]:
    """Both comparisons; alternating samples, medians of the ratios."""
    ours, out = OursTogether(path, threads), []
    with Peer(python, path, threads) as peer:
        sides = [("our prompt rate", 0.5, ours.prompt)]
        if peer.absent:
            out.append(Row("8 contexts against llama.cpp", ">= 1.5", f"no peer: {peer.absent}", None))
        else:
            sides.insert(0, ("llama.cpp, 8 sequences in one batch", 1.5, lambda: peer.rate("batch")))
        for name, target, other in sides:
            ours.together(), other()
            found = [(ours.together(), other()) for _ in range(pairs)]
            ratios = sorted(a / b for a, b in found)
            ratio = statistics.median(ratios)
            out.append(Row(f"8 contexts, {threads} thread(s), against {name}", f">= {target}",
                           f"{ratio:.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f} "
                           f"({statistics.median(a for a, _ in found):.0f} against "
                           f"{statistics.median(b for _, b in found):.0f} tokens/s)", ratio >= target))
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args(argv)
    print(machine())
    for row in rows(args.model, args.peer_python, args.threads, args.pairs):
        verdict = {True: "met", False: "NOT met", None: "no verdict"}[row.met]
        print(f"{row.name:60} {row.target:8} {row.seen}  {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
