"""Native code that is left in the middle: whoever is interrupted at any look at the stop word, changes nothing, and
gives the same bytes when the region is entered again.

The word is raised at look n, for every n: with code whose looks count (`Engine(counted=True)`), and in the Python
backend before launch n."""
from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3jit.backends.cpu.cache import DiskCache
from m3jit.backends.cpu.engine import Engine
from m3jit.backends.cpu.runtime import URGENT
from m3jit.backends.python.engine import PythonEngine
from m3jit.frontend import assemble
from m3jit.ir.plan import ABANDONED, FrameWord
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm import stopping
from m3jit.vm.checked import comparable
from m3jit.vm.jit import Compiler, Jit
from m3jit.vm.regions import weights
from m3jit.vm.vm import VM
from tests.backends.cpu_engines import engine

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_tiny_architectures as tiny_models  # noqa: E402  (found through the path set above)
import make_tiny_recurrent as tiny_recurrent  # noqa: E402

ROUND = """
    LOADI rI, 0
again:
    MATVEC rH, rX, rW TRANSPOSE
    TANH rX, rH
    REDUCE rS, rX, SUM AXIS=1
    SORT rOrder, rX AXIS=1
    ADD rI, rI, 1
    COMPARE rI, 3
    IF_LESS again
    HALT
"""
LAYER = """
    NORM rH, rX, rG
    ATTN rA, rH, rH, rH, sKV HEADS=2 LAYER=0 CAUSAL
    MATVEC rY, rA, rW TRANSPOSE
    ADD rX, rX, rY
    ATTN rA, rX, rX, rX, sKV HEADS=2 LAYER=1 CAUSAL
    SOFTMAX rP, rA
    SAMPLE rToken, rP TEMP=0.9 TOP_K=0 TOP_P=1 MIN_P=0
    HALT
"""


@pytest.fixture(scope="module")
def counted() -> Engine:
    return Engine("native", cache=DiskCache.off(), counted=True)


class Interrupted(Jit):
    """Regions that are entered again and again, the stop word raised after 0, 1, 2, ... looks until one entry gets
    through.  stride: how many looks later each time."""
    stride = 1

    def _enter(self, ctx: Any, regs: Any, region: Any, syms: dict) -> tuple[Any, int]:
        word = self.machine.stop.word
        before = state(self.machine.vm)
        looks = 0
        while True:
            word[0] = URGENT - 2 * looks
            left = region.run(regs, syms, self.stop_address, ctx.budget)
            reached, word[0] = int(word[0]), 0
            self.entries_made = getattr(self, "entries_made", 0) + 1
            if left[0] is not None and not (left[0].reason == "poll" and left[1] == 0):      # urgent at a loop head
                return left
            assert left[1] == 0
            after = state(self.machine.vm)
            assert before.keys() == after.keys() and all(before[k] is after[k] for k in before)
            # Workers may run another engine's code, whose looks do not count: then the region got into its second
            # round, where looks count on a word of its own.  One look less ends it at the loop head.
            looks += self.stride if reached >= URGENT else -1


def state(vm: VM) -> dict:
    """Every value of the context by where it is, to be compared by identity."""
    ctx = vm.main
    found = {f"R{i}": v for i, v in enumerate(ctx.R)} | {f"S{i}": ctx.states.get(h.id) if h else None
                                                         for i, h in enumerate(ctx.S)}
    return found | {"rng": ctx.rng, "flags": ctx.flags}


def outcome(vm: VM) -> tuple:
    """Registers, states and the random stream, by bytes."""
    states = [comparable(vm.main.states.get(h.id)) for h in vm.main.S if h is not None]
    registers = {n: v.tobytes() if hasattr(v, "tobytes") else repr(v) for n, v in vm.registers.items()
                 if not n.startswith("S")}
    return registers, states, vm.main.rng, vm.retired


def with_regions(program: Any, code: Any, threads: int, kind: type[Jit], models: Any = None, **options: Any) -> VM:
    """A machine that compiles everything for the engine `code`."""
    vm = VM(program, backend="interpreter", models=models, **options)
    vm.regions = kind(vm.image, vm.machine, Compiler(code, weights(), threads), vm.stop_word, eager=True)
    vm.interpreter.regions = vm.regions.interpreter = vm.interpreter
    vm.interpreter.regions = vm.regions
    for pc in vm.regions.entries:
        vm.interpreter.mark_entry(pc)
    return vm


def small(source: str, code: Any, threads: int, kind: type[Jit], rows: int = 70) -> VM:
    vm = with_regions(assemble(source, "interrupted.m3asm"), code, threads, kind)
    rng = np.random.default_rng(3)
    for name, shape in (("rX", (rows, 32)), ("rW", (32, 32)), ("rG", (32,))):
        if name in source:
            vm.set(name, rng.standard_normal(shape).astype(np.float32))
    return vm


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("source", [LAYER, ROUND])
def test_every_look_of_a_region(source, threads, counted):
    wanted = outcome(small(source, engine("native"), threads, Jit).run())
    vm = small(source, counted, threads, Interrupted)
    assert outcome(vm.run()) == wanted
    assert vm.regions.entries_made > 10


MODELS = [(tiny_models, "qwen2"), (tiny_recurrent, "mamba"), (tiny_recurrent, "granitehybrid")]


def model_machine(path: str, code: Any, threads: int, kind: type[Jit]) -> VM:
    models = Models()
    text = models.assembly(models.load(path), path, Options(max_tokens=2, chunk=16, temperature=0.8))
    program = assemble(text.replace("STREAM rToken, OUTPUT TEXT MODEL=rModel", "STREAM rToken, OUTPUT TEXT LINE"))
    vm = with_regions(program, code, threads, kind, models=models)
    vm.set_sink("OUTPUT", lambda item: None)
    vm.push_input(np.random.default_rng(1).integers(5, 60, 21).astype(np.int64))
    return vm


@pytest.mark.parametrize("stride", [127, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tool, family", MODELS, ids=lambda x: x if isinstance(x, str) else "")
def test_models(tool, family, stride, counted, tmp_path):
    """Prompt and tokens of whole models, each region left at every `stride`-th look."""
    name = next(n for n in tool.names() if n.split("/")[0].startswith(family))
    path = str(tool.build(tmp_path, name))
    wanted = outcome(model_machine(path, engine("native"), 1, Jit).run())
    vm = model_machine(path, counted, 2, type("Interrupted", (Interrupted,), {"stride": stride}))
    assert outcome(vm.run()) == wanted
    assert vm.regions.entries_made > len(vm.regions.regions) + 5


class _Raises(PythonEngine):
    """Raises a word before launch number `at`."""
    word: np.ndarray
    given_up = 0

    def _launch(self, f: Any, kernel: Any, args: list, nthreads: int) -> None:
        super()._launch(f, kernel, args, nthreads)
        self.made += 1
        if self.made == self.at:
            self.word[0] = URGENT


@pytest.mark.parametrize("source", [LAYER, ROUND])
def test_the_python_backend_between_launches(source):
    class Counting(Jit):
        def _enter(self, ctx, regs, region, syms):
            code.at = 0
            while True:
                code.at, code.made, code.word = code.at + 1, 0, self.machine.stop.word
                left = region.run(regs, syms, self.stop_address, ctx.budget)
                raised, self.machine.stop.word[0] = int(self.machine.stop.word[0]), 0
                if left[0] is not None:
                    return left
                code.given_up += 1
                assert left == (None, 0) and raised == URGENT
    code = _Raises("plain")
    smaller = source.replace("SORT rOrder, rX AXIS=1", "NOP")
    wanted = outcome(small(smaller, engine("native"), 1, Jit, 3).run())
    assert outcome(small(smaller, code, 1, Counting, 3).run()) == wanted
    assert code.given_up


def test_a_region_that_goes_round_is_left_at_its_loop_head(counted):
    """What it did in earlier rounds is not lost."""
    endless = ROUND.replace("COMPARE rI, 3", "COMPARE rI, 1000000")
    vm = small(endless, engine("native"), 2, Jit)
    halves: list[tuple] = []

    class Once(Jit):
        def _enter(self, ctx, regs, region, syms):
            timer = threading.Timer(0.05, vm.stop_word.set, (stopping.INTERRUPT,))
            timer.start()
            left = region.run(regs, syms, self.stop_address, ctx.budget)
            halves.append((left[0] is not None and left[0].reason, left[1]))
            vm.stop()
            return left
    vm = small(endless, engine("native"), 2, Once)
    with pytest.raises(Exception, match="stopped"):
        vm.run()
    reason, retired = halves[0]
    assert reason == "poll" and retired >= 7 or halves[0] == (False, 0)     # in the first round it is given up
    assert vm.get("rI") == (retired + 1) // 7 or vm.get("rI") == 0


def test_an_exit_number_of_its_own():
    """A word that is urgent from the beginning: no launch is made, the frame says ABANDONED and nothing retired."""
    vm = small(LAYER, engine("native"), 2, Jit)
    vm.run()
    region = vm.regions.regions[0]
    frame = np.zeros(region.region.plan.words, np.int64)
    word = np.array([URGENT], np.int32)
    frame[FrameWord.STOP], frame[FrameWord.BUDGET] = word.ctypes.data, 1 << 40
    frame[FrameWord.RETIRED] = 77
    assert region.native.run(frame, 2) == ABANDONED
    assert (frame[FrameWord.EXIT], frame[FrameWord.RETIRED]) == (ABANDONED, 0)
