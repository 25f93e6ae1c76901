"""Random tensor programs of 30 and more value instructions: compiled calls, fused or not, on every CPU level and thread
count, and the machine's mixed runs give the interpreter's bytes.

M3JIT_RANDOM_PROGRAMS=500 in the environment makes a longer run; the opcodes that ran natively are printed (pytest -s).
"""
from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from m3jit.api import variants
from m3jit.backends.cpu.target import CpuTarget, TargetError
from m3jit.isa.table import OPS
from tests.api.outcomes import called, differences, machine
from tests.api.random_programs import generate

COUNT = int(os.environ.get("M3JIT_RANDOM_PROGRAMS", "24"))
native: Counter = Counter()
seen: Counter = Counter()


def levels() -> list[str]:
    """CPU levels this machine can run."""
    out = []
    for level in ("native", "avx512", "avx2", "baseline"):
        try:
            if CpuTarget.for_level(level).runnable:
                out.append(level)
        except TargetError:
            pass
    return out


LEVELS = levels()


@pytest.mark.parametrize("seed", range(COUNT))
def test_same_bytes(seed, monkeypatch):
    monkeypatch.setattr(variants, "SMALL_BYTES", 0)            # threads share the work however small it is
    rng = random.Random(seed)
    p = generate(seed, length=rng.choice((30, 40, 60)), zero=seed % 4 == 3, mixed=seed % 4 == 2)
    assert len(p.opcodes) >= 30
    want, _ = called(p, p.items, "interpreter")
    for threads, level in ((1, "native"), (2, rng.choice(LEVELS)), (3, rng.choice(LEVELS))):
        got, f = called(p, p.items, f"cpu:{level}", threads)
        assert got == want, differences(p, want, got, p.items)
    seen.update(set(p.opcodes))
    if ": compiled" in f.report() and "left" not in f.report():
        native.update(set(p.opcodes))
    few = rng.sample(p.items, 2)                               # fewer outputs: more is fused
    got, _ = called(p, few, "cpu", 2)
    alone = [want[p.items.index(i)] for i in few]
    assert got == alone, differences(p, alone, got, few)
    if seed % 4 == 2:                                          # regions, and the interpreter in between
        assert machine(p, "cpu", 2) == machine(p, "interpreter")


@pytest.mark.parametrize("seed", range(1000, 1003))
def test_readable_python_gives_the_same_bytes(seed):
    p = generate(seed, length=30)
    want, _ = called(p, p.items, "interpreter")
    got, _ = called(p, p.items, "python", 2)
    assert got == want, differences(p, want, got, p.items)


def test_coverage_of_opcodes():
    """What the programs above reach; a random choice that silently narrowed would show here."""
    for seed in range(COUNT):
        seen.update(set(generate(seed, length=30).opcodes))
    values = {row.name for row in OPS if row.route == "value" and row.executable}
    print(f"\nnative in {sum(native.values())} uses of {len(native)} opcodes; "
          f"value rows never drawn: {', '.join(sorted(values - set(seen)))}")
    assert len(seen) >= 40
