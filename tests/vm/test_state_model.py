"""Versioned state against a model that copies everything: random programs, and faults at every point of an operation.

`python -m tests.vm.state_model --programs 100000 --jobs 2` is the long run; with `-m slow` it is done in shards.
"""
from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any, Callable

import pytest

from tests.vm.state_model import faults
from tests.vm.state_model.apart import run_apart
from tests.vm.state_model.machine import Driven
from tests.vm.state_model.oracle import Oracle
from tests.vm.state_model.play import WINDOW
from tests.vm.state_model.programs import ACT, tensors
from tests.vm.state_model.run import play_chunk, report

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")   # faults in finalisers
SHARD = 1000
NEVER = 1 << 30                    # a point that no operation reaches
LONGEST = 20_000                   # bytecodes of an operation
T = tensors(random.Random(1), 2)


def of(*names: str) -> dict[str, Any]:
    return {n: T[n] for n in names}


ATTEND = ("attend", 0, 0), of("q", "k", "v")
SCAN = ("scan", 0), of("x", "dt", "a", "b", "g")
# A state of every kind, a snapshot of it in R0, and after that all of it changed; then the host's snapshot.
BEFORE = [ATTEND, SCAN, (("conv", 0), of("x", "w")), (("load", 3), {}), (("stream", 3), {"token": 1}),
          (("sense", 4), {}),
          (("ext", 4), {"value": 5}), (("memset", 90), {"address": ACT, "size": 200}), (("alloc", 4), {"size": 40}),
          (("call", (1, 3)), {}), (("fork", 0), {}), ATTEND, SCAN, (("draw", 4), {}), (("stream", 1), {"token": 1}),
          (("set", 2), {"value": 3}), (("cmp", 2), {}), (("child", 4), {}),
          (("memset", 0), {"address": ACT, "size": 4100}), (("host_fork",), {})]
OPERATIONS = {
    "fork": (("fork", 3), {}), "snapshot": (("snapshot", 0), {}), "switch": (("switch", 3), {}),
    "abort": (("abort", 0), {}), "resume": (("resume", 0), {}), "restore": (("restore", 0), {}),
    "host fork": (("host_fork",), {}), "host abort": (("host_abort",), {"resume": True, "place": 0}),
    "call": (("call", (4, 0, 2)), {}), "ret": (("ret",), {}), "child": (("child", 3), {}), "spawn": (("spawn", 3), {}),
    "memset": (("memset", 90), {"address": ACT + 4000, "size": 4100}), "alloc": (("alloc", 3), {"size": 40}),
    "sense": (("sense", 3), {}), "load": (("load", 3), {}), "ext": (("ext", 3), {"value": 9}), "attend": ATTEND,
    "scan": SCAN, "sample": (("sample", 3), of("logits")), "truncate": (("truncate", 0), {"length": 1}),
    "compress": (("compress", 0), {"sink": 1, "window": 1}), "reset": (("reset",), {}),
}


def test_random_programs_agree_with_the_model():
    seen = Counter(run_apart(play_chunk, 0, 300))
    assert seen["programs"] == 300 and seen["operations"] > 30 * 300
    assert seen["fault interrupt"] > 150 and seen["fault block"] > 3
    assert faults._testcapi is None or seen["fault allocation"] > 60
    print(report(seen))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(100))
def test_many_random_programs(shard):
    """Shard n plays the seeds from 1000 n on."""
    run_apart(play_chunk, int(os.environ.get("M3JIT_FIRST_SEED", 0)) + shard * SHARD, SHARD)


def _prepared(backend: str) -> tuple[Driven, Oracle]:
    driven, oracle = Driven(backend, WINDOW), Oracle(WINDOW)
    for op, params in BEFORE:
        driven.execute(0, op, params)
        driven.settle()
        oracle.apply(0, op, params)
    assert driven.difference(oracle) == ""
    return driven, oracle


def at_every_point(backend: str, name: str, make: Callable[[int], Any], first: int, stride: int) -> int:
    """An operation under a fault at point first, first + stride, ... until it is not reached; how often it was.

    Interrupts come in two rounds: the operation's handler is made in the first one, and takes more points than the
    operation then has left."""
    driven, oracle = _prepared(backend)
    # CPython's compiler, which makes the handlers, does not survive failed allocations: once without a fault.
    whole = (NEVER,) if make is faults.Allocation else ()
    hits = 0
    for points in [(*whole, *range(first, LONGEST, stride))] * (1 if make is faults.Allocation else 2):
        for point in points:
            hit, oracle = _under(driven, oracle, name, make(point))
            hits += hit
            if not hit and 30 < point < NEVER:
                break
        else:
            raise AssertionError(f"{name} never ended: it has {LONGEST} bytecodes, or more of them each time")
    return hits


def _under(driven: Driven, oracle: Oracle, name: str, fault: Any) -> tuple[bool, Oracle]:
    """An operation under a fault: whether that was reached, and the state.  The host's snapshot is put back then, so
    every point meets the same one."""
    back = ("host_abort",), {"resume": False, "place": 0}
    op, params = OPERATIONS[name]
    after = oracle.clone()
    after.apply(0, op, params)
    names = driven.vm.snapshots
    names._leave_out_dead()                            # each attempt leaves one: there would be more and more,
    names._tidy = 0                                    # and the operation leaves them out, too
    outcome = fault.run(lambda: driven.execute(0, op, params))
    outcome = outcome if outcome is not None else driven.contexts[0].trap
    driven.settle()
    driven.lost_references |= fault.kind == "allocation"
    hit = fault.hit(outcome)
    steps = [after, oracle]
    if op[0] == "host_fork":
        steps.append(after.untold(oracle))
    found = [driven.difference(step) for step in (steps if hit else steps[:1])]
    assert "" in found, (name, fault.said, found)
    oracle = steps[found.index("")]
    for i in range(2, len(driven.contexts)):           # what it started
        if driven.contexts[i] is not None:
            driven.vm.scheduler.remove(driven.contexts[i])
            driven.contexts[i] = oracle.contexts[i] = None
    oracle.collect()
    if op[0] != "host_fork":                           # (that would move the host's own)
        driven.execute(0, *back)
        oracle.apply(0, *back)
    return hit, oracle


# Of the bytecodes of an operation one in 61 is tried by default; all of them with -m slow.
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_any_moment_leaves_the_state_before_or_after(name):
    assert at_every_point("interpreter", name, faults.Interrupt, 1 + 2 * list(OPERATIONS).index(name), 61) > 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_every_bytecode(name, backend):
    assert at_every_point(backend, name, faults.Interrupt, 1, 1) > 50


def failing(backend: str, names: list[str], stride: int) -> list[int]:
    """How often allocations of these operations failed; every stride-th of them does."""
    return [at_every_point(backend, name, faults.Allocation, list(OPERATIONS).index(name) % stride, stride)
            for name in names]


needs_failing = pytest.mark.skipif(
    faults._testcapi is None, reason="this Python has no _testcapi, whose allocator fails on demand")


@needs_failing
@pytest.mark.parametrize("part", range(2))
def test_a_failed_allocation_leaves_the_state_before(part):
    assert min(run_apart(failing, "interpreter", list(OPERATIONS)[part::2], 13)) >= 1


@pytest.mark.slow
@needs_failing
@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_allocation_failing(name, backend):
    assert run_apart(failing, backend, [name], 1)[0] >= 3
