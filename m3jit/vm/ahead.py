"""Contexts of one machine that stand at the same region: when the first enters it, it is run for all of them.

The turns stay as they are.  What the region gave for a context that is not running is put aside, registers and states
untouched; when its turn comes and it enters the region with the very values it had then, the result is written back as
if the region had been run now.  A region reads nothing but those values, so nobody can tell the difference.

This happens where contexts of one priority yield in front of a region (YIELD once per token, say).
"""
from __future__ import annotations

from typing import Any

from m3jit.vm.context import READY
from m3jit.vm.native import CompiledRegion
from m3jit.vm.native_batch import Outcome, batched, can_batch
from m3jit.vm.scheduler import QUANTUM


class Ahead:
    """What a region gave for a context that has not entered it yet."""
    __slots__ = ("region", "values", "outcome")

    def __init__(self, region: CompiledRegion, values: list[Any], outcome: Outcome):
        self.region, self.values, self.outcome = region, values, outcome

    def holds(self, region: CompiledRegion, regs: Any, budget: int) -> bool:
        """Would entering now give this?"""
        return region is self.region and (region.one_round or self.outcome.retired < budget) and \
            all(a is b for a, b in zip(self.values, live_ins(region, regs)))


def live_ins(region: CompiledRegion, regs: Any) -> list[Any]:
    """Everything a region reads of a context."""
    get = regs.get
    return [get(key) for key, _ in region.types] + [get(key) for key in (*region.streams.streams, *region.cells.states)]


def companions(jit: Any, ctx: Any, region: CompiledRegion, entry: Any) -> list[Any]:
    """Entries of the other contexts that will enter the region as soon as they run.  entry(context, symbols, budget)
    makes one."""
    contexts = jit.machine.vm.scheduler.contexts
    if len(contexts) < 2 or not region.region.has_launches or jit.machine.profile is not None or \
            jit.compiler.checked or not can_batch(region):
        return []
    found = []
    for c in contexts.values():
        if c is not ctx and c.index == ctx.index and c.status == READY and c.ahead is None and \
                c.urgency == ctx.urgency:
            made = entry(c, QUANTUM)
            syms = region.matches(made.regs)
            if syms is not None:
                made.syms = syms
                found.append(made)
    return found


def run_with(first: Any, others: list[Any]) -> tuple[Any, int] | None:
    """Enter the region of `first` for all; others' results are put aside.  (exit, retired) of the first; None: there is
    no room for it, nothing was done."""
    region, vm = first.region, first.jit.machine.vm
    together = batched(region)
    values = [live_ins(region, e.regs) for e in others]
    try:
        result, outcomes, joined = together.run_first([first, *others])
    except MemoryError:
        return None
    vm.joined_launches += joined
    if not vm.stop_word.raised:                          # it may have brought them out early
        for e, seen, outcome in zip(others, values, outcomes):
            if outcome.info is not None and (region.one_round or outcome.retired < QUANTUM):
                e.ctx.ahead = Ahead(region, seen, outcome)
    return result
