"""Contexts of one machine that yield in front of a region: it is run once for all of them, and every item of every
stream, every register and every counter is as if each had run it in its turn."""
from __future__ import annotations

import numpy as np
import pytest

import m3jit
from m3jit.isa.types import Tensor
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm import ahead, jit
from tests.api.outcomes import exact

COLUMNS = 64
TENSORS = """
    .reg rX R1
    .reg rW R2
    .reg rG R3
    .reg rOwn R4
    .reg rI R5
    .reg rN R6
    .reg rE R7
    .reg rC R8
        LOADI rOwn, 1
        FORK rC, work
        LOADI rOwn, 2
        FORK rC, work
        LOADI rOwn, 3
        FORK rC, work
        LOADI rOwn, 4
    work:
        LOADI rI, 0
        ADD rN, rOwn, 3
        RNG_SEED rOwn
    loop:
        YIELD
        ADD rX, rX, rOwn
        MATVEC rX, rX, rW
        NORM rX, rX, rG RMS EPS=1e-5
        RNG_UNIFORM rE
        ADD rX, rX, rE
        GETELEM rE, rX, INDEX=5
        COMPARE rE, 0.0
        IF_LESS negative
        MATVEC rX, rX, rW
    negative:
        {middle}
        STREAM rOwn
        STREAM rE
        ADD rI, rI, 1
        COMPARE rI, rN
        IF_LESS loop
        HALT"""


def run(source: str, backend: str = "cpu", sink=None) -> tuple[m3jit.VM, list, dict]:
    """The machine after its run, the items it streamed, the registers of each context when it ended."""
    vm = m3jit.VM(m3jit.assemble(source), backend=backend, threads=2)
    g = np.random.default_rng(1)
    vm.set("rX", g.standard_normal((2, COLUMNS)).astype(np.float32))
    vm.set("rW", Tensor.of(g.standard_normal((COLUMNS, COLUMNS)).astype(np.float32)))
    vm.set("rG", np.ones(COLUMNS, np.float32))
    items: list = []
    ends: dict = {}
    vm.set_sink("OUTPUT", items.append if sink is None else lambda item: sink(vm, item))
    remove = vm.scheduler.remove

    def ended(ctx, more):
        registers = {str(k): exact(v) for k, v in ctx.live_registers().items() if k.index != 8}
        ends[ctx.id] = (registers, ctx.retired, ctx.rng, str(ctx.trap))
        remove(ctx, more)
    vm.scheduler.remove = ended
    try:
        vm.run()
    except m3jit.Trap:
        pass
    return vm, [exact(i) for i in items], ends


@pytest.fixture
def one_by_one(monkeypatch):
    """Switches sharing off."""
    return lambda: monkeypatch.setattr(jit, "companions", lambda *_: [])


@pytest.mark.parametrize("middle", ["NOP", "DIV rC, rN, rOwn", "PREEMPT_CHECK rC", "SUB rC, rI, 2\n DIV rC, rN, rC"])
def test_turns_and_results_stay_as_they_are(middle, one_by_one):
    """The last one traps in the middle, in a context's third round."""
    source = TENSORS.format(middle=middle)
    vm, items, ends = run(source)
    assert vm.stats["joined_launches"] > 10
    assert (items, ends) == run(source, "interpreter")[1:]
    one_by_one()
    alone, *rest = run(source)
    assert [items, ends] == rest and alone.stats["joined_launches"] == 0 and alone.retired == vm.retired


def test_what_changed_meanwhile_is_run_again(one_by_one, monkeypatch):
    """A context whose registers are no longer those that the result was made from enters by itself."""
    held, holds = [], ahead.Ahead.holds
    monkeypatch.setattr(ahead.Ahead, "holds", lambda *args: held.append(holds(*args)) or held[-1])

    def meddled():
        def told(vm, item):
            items.append(item)
            if len(items) in (3, 9, 17):                 # in the turn of one context
                for ctx in vm.scheduler.contexts.values():
                    if ctx is not vm.machine.ctx:
                        vm.set("rX", np.full((2, COLUMNS), 0.25, np.float32), ctx)
        items: list = []
        vm, _, _ = run(TENSORS.format(middle="NOP"), sink=told)
        return [exact(i) for i in items], vm.stats["joined_launches"]
    items, joined = meddled()
    assert held.count(False) >= 1 and held.count(True) > 3
    one_by_one()
    want, none = meddled()
    assert items == want and joined > none == 0


def test_a_model_in_several_contexts(one_by_one):
    models = Models()
    text = models.assembly(models.load("default"), "default", Options(max_tokens=10, temperature=0.9))
    forks = "".join(f"    LOADI rSeed, {i}\n    FORK rChild, own\n" for i in (11, 22, 33))
    text = text.replace("main:\n", f"main:\n{forks}    LOADI rSeed, 44\nown:\n    RNG_SEED rSeed\n")
    text = text.replace("    ADD rNext, rPos, rLen", "    YIELD\nafter_yield:\n    ADD rNext, rPos, rLen")

    def generated():
        vm = m3jit.VM(m3jit.assemble(text), models=models, threads=2)
        items: list = []
        vm.set_sink("OUTPUT", items.append)
        vm.push_input("It is a truth")
        vm.run()
        return items, vm.retired, vm.stats["joined_launches"]
    items, retired, joined = generated()
    one_by_one()
    want, steps, none = generated()
    assert (items, retired) == (want, steps) and len(items) > 30 and joined > 500 and none == 0
