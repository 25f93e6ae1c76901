"""Play many random programs and print what they covered.

    python -m tests.vm.state_model --programs 100000 --jobs 2

The seeds are --first, --first + 1, ...: any part of a run can be done alone, or again.  Every sixth program is compiled
(backend cpu), the others are interpreted.  A difference is printed with its seed and counted, and the run goes on with
the next program.  Exit status 1: there were some.
"""
from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from contextlib import contextmanager
from typing import Iterator

from m3jit.isa.table import BY_NAME, load_table
from tests.vm.state_model.arithmetic import remembered
from tests.vm.state_model.machine import Audit, Difference
from tests.vm.state_model.play import play
from tests.vm.state_model.programs import program

CHUNK = 50                         # programs of which every page must be gone before the next are played
CHUNKS = 20                        # of one process: CPython loses machines where allocations fail, and the heap grows


def backend_of(seed: int) -> str:
    return "cpu" if seed % 6 == 0 else "interpreter"


def play_chunk(first: int, count: int = CHUNK, fault_share: float = 0.1, backend: str | None = None,
               differences: list[str] | None = None) -> Counter:
    """Programs first .. first + count - 1; what they covered.  Difference: with the seed; where there is a list, it is
    noted there and the next program is played."""
    seen: Counter = Counter()
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: seen.update(["fault in a finaliser"])
    try:
        with remembered(), Audit() as audit:
            for seed in range(first, first + count):
                before = seen["lost references"]
                with noting(differences):
                    play(seed, backend or backend_of(seed), fault_share, audit, seen)
                if seen["lost references"] > before:
                    audit.forget()
            with noting(differences):
                audit.check_gone()
    finally:
        sys.unraisablehook = hook
    return seen


@contextmanager
def noting(differences: list[str] | None) -> Iterator[None]:
    """Put a Difference into the list, if there is one."""
    try:
        yield
    except Difference as e:
        if differences is None:
            raise
        differences.append(str(e))


def _chunk(job: tuple[int, int, float]) -> tuple[int, Counter, list[str]]:
    differences: list[str] = []
    return job[0], play_chunk(*job, differences=differences), differences


def opcodes() -> int:
    """Different instructions in the blocks."""
    load_table()
    return len({ins.op.code for _, ins in program()[0].instructions if ins.op.name in BY_NAME})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vm.state_model", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--faults", type=float, default=0.1, help="share of operations under a fault")
    args = parser.parse_args()
    began, seen, failed = time.monotonic(), Counter(), 0
    chunks = [(first, min(CHUNK, args.first + args.programs - first), args.faults)
              for first in range(args.first, args.first + args.programs, CHUNK)]
    print(f"seeds {args.first} to {args.first + args.programs - 1}, {args.jobs} jobs", flush=True)
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=CHUNKS) as pool:
        for first, found, differences in pool.imap_unordered(_chunk, chunks):
            for said in differences:
                print(f"DIFFERENCE in seeds from {first}: {said}", flush=True)
            failed += len(differences)
            before = seen["programs"]
            seen += found
            if before // 5000 != seen["programs"] // 5000:
                print(f"{seen['programs']} programs, {seen['operations']} operations, "
                      f"{time.monotonic() - began:.0f} s", flush=True)
    print(report(seen), flush=True)
    print(f"{failed} differences; {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def report(seen: Counter) -> str:
    """The coverage as lines of text."""
    programs = max(seen["programs"], 1)
    lines = [f"{seen['programs']} programs, {seen['operations']} operations, {seen['operations'] / programs:.1f} each, "
             f"{seen['traps']} of them traps, of {opcodes()} instructions; {seen['cut short']} programs cut short, as "
             "CPython lost a reference to a snapshot where an allocation failed"]
    for title, prefix in (("operations", "op "), ("faults", "fault "), ("failed allocations", "allocation in "),
                          ("refused blocks", "block in "), ("interrupts", "interrupt in ")):
        found = {k.removeprefix(prefix): n for k, n in sorted(seen.items()) if k.startswith(prefix)}
        lines.append(f"{title}: {sum(found.values())}: " + ", ".join(f"{k} {n}" for k, n in found.items()))
    return "\n".join(lines)
