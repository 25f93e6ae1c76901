"""`m3jit run --profile`: where a run's time goes, by opcode and by region.

Interpreted instructions are timed one by one.  A compiled region that launches kernels is walked launch by launch with
the same native kernels, so that each opcode's share shows; this costs some microseconds per launch, listed as the time
between launches: a run with --profile is slower than one without.  Regions of scalar code alone run as they are and are
timed as a whole.
"""
from __future__ import annotations

import time
from typing import Any

import numpy as np

from m3jit.cli.terminal import table
from m3jit.ir.plan import FrameWord, Launch, Plan

BETWEEN = "(between launches)"


class Labelled:
    """A kernel with the label of its launch; stands for it in a plan."""
    __slots__ = ("kernel", "label")

    def __init__(self, kernel: Any, label: str):
        self.kernel, self.label = kernel, label


class LaunchTimes:
    """An engine that times every launch of the engine it wraps.  times: opcode -> [launches, nanoseconds]."""

    def __init__(self, engine: Any):
        self._engine = engine
        self.times: dict[str, list[int]] = {}
        self._regions: dict[int, tuple[Any, np.ndarray]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def region(self, plan: Plan) -> Any:
        """The region of a plan, walked when it has launches."""
        launches = [s for block in plan.blocks for s in block.body if isinstance(s, Launch)]
        if not launches:
            return self._engine.region(plan)
        from m3jit.backends.python.engine import PythonRegion
        for s in launches:
            s.kernel = Labelled(s.kernel, s.label)
            self.function(s.kernel)                    # compiled here, not in the first measured launch
        return PythonRegion(self, plan)                # type: ignore[arg-type]

    # -- what a walked region asks for ------------------------------------------------------------------------------
    def function(self, labelled: Labelled) -> tuple[Any, np.ndarray]:
        """Native code of one kernel and a frame for its arguments."""
        found = self._regions.get(id(labelled.kernel))
        if found is None:
            region = self._engine.kernel(labelled.kernel).region
            frame = np.zeros(region.plan.words, np.int64)
            frame[FrameWord.BUDGET] = np.iinfo(np.int64).max
            found = self._regions[id(labelled.kernel)] = (region, frame)
        return found

    def _launch(self, native: tuple[Any, np.ndarray], labelled: Labelled, args: list[Any], nthreads: int) -> None:
        region, frame = native
        first = int(FrameWord.FIRST_FREE)
        for i, (parameter, value) in enumerate(zip(labelled.kernel.params, args)):
            if parameter.kind in ("f32", "f64"):
                frame[first + i:first + i + 1].view(np.float64)[0] = value
            else:
                frame[first + i] = int(value)
        began = time.perf_counter_ns()
        region.run(frame, nthreads)
        took = time.perf_counter_ns() - began
        row = self.times.setdefault(labelled.label.partition(" ")[0] or labelled.kernel.name, [0, 0])
        row[0] += 1
        row[1] += took


def time_launches(vm: Any) -> None:
    """Make the regions of a machine count their launches (native backends only; others are timed as a whole)."""
    if vm.regions is not None and vm.regions.compiler.name not in ("python", "numba"):
        vm.regions.compiler.engine = LaunchTimes(vm.regions.compiler.engine)


def profile_text(vm: Any) -> str:
    """The two tables of a finished run."""
    by_opcode: dict[tuple[str, str], list[int]] = {}
    entries = dict(vm.interpreter.plain) if vm.regions is not None else {}
    total = vm.seconds * 1e9 or 1.0
    for name, pc, count, ns in vm.profile():
        compiled = vm.image.index_of[pc] in entries    # the time of an entry point is its region's
        row = by_opcode.setdefault((name, "interpreted"), [0, 0])
        row[0] += count
        row[1] += 0 if compiled else ns
    launched = 0
    for name, (count, ns) in getattr(_engine(vm), "times", {}).items():
        by_opcode[name, "compiled"] = [count, ns]
        launched += ns
    regions = list(vm.regions.regions) if vm.regions is not None else []
    inside = round(1e9 * sum(r.seconds for r in regions))
    if regions:
        by_opcode[BETWEEN, "compiled"] = [sum(r.entries for r in regions), max(inside - launched, 0)]
    rows = [(name, how, f"{count:,}", f"{ns / 1e6:.2f}", f"{100 * ns / total:.1f}")
            for (name, how), (count, ns) in sorted(by_opcode.items(), key=lambda item: -item[1][1])]
    text = "by opcode\n" + table(("opcode", "how", "times", "ms", "% of run"), rows, "234")
    if regions:
        from m3jit.cli.machine import place
        rows = [(place(vm, r.region.function.entry_pc), f"{r.entries:,}", f"{r.retired:,}", f"{1e3 * r.seconds:.2f}",
                 f"{100e9 * r.seconds / total:.1f}") for r in sorted(regions, key=lambda r: -r.seconds)]
        text += "\n\nby region\n" + table(("begins at", "entered", "instructions", "ms", "% of run"), rows, "1234")
        text += "\n" + "the rest: compiling " + ", ".join(
            f"{what} {1e3 * s:.0f} ms" for what, s in vm.regions.compiler.timings.items())
    return text


def _engine(vm: Any) -> Any:
    return vm.regions.compiler.engine if vm.regions is not None else None
