"""Decides what to compile, keeps the compiled variants of every entry point, and moves contexts through them.

An entry point is the program's start, a branch target, or the instruction after a slow-path one; the instruction after
one at which a region was left, because it cannot be compiled for the types at hand, becomes one then.  At its first
visits it is interpreted; it is compiled when it holds enough work (large tensors, weights) or has been visited often.
Each entry keeps up to `MAX_VARIANTS` variants, one per set of live-in types.  What cannot be compiled is interpreted:
the bytes are the same.
"""
from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable

from m3jit.ir.lift import FULL, VARIANTS, Entry, Lifter
from m3jit.ir.lower import lower
from m3jit.ir.passes import PassLog, run_passes
from m3jit.ir.passes.fuse import Group
from m3jit.ir.region import Region
from m3jit.ir.tensor import Check, Function, Leave, Node, Retired, Sym, TensorType, eval_dim
from m3jit.isa.types import Tensor
from m3jit.vm.ahead import companions, run_with
from m3jit.vm.commit import commit_columns
from m3jit.vm.context import PARKED
from m3jit.vm.image import entry_points
from m3jit.vm.interpreter import PARKED_HERE
from m3jit.vm.native import NO_BUDGET, CompiledRegion, comes_again, fits, type_of_value

MAX_VARIANTS = 8
GONE = object()                 # what a register names that a restored snapshot does not have: the interpreter says so
HOT_VISITS = 64                 # visits of an entry after which anything is worth compiling
ENOUGH_BYTES = 1 << 15          # bytes touched by one pass over a region that are worth compiling at once
WORTH_ENTERING = 40             # scalar instructions without a loop cost less interpreted than entering a region does
LOOP_VISITS = 8                 # visits after which a region with a loop is compiled


@dataclass
class Point:
    """One entry point."""
    pc: int
    visits: int = 0
    variants: list[CompiledRegion] = field(default_factory=list)
    looked: bool = False
    dead: bool = False          # nothing at this pc can be compiled, or is worth it
    refused: bool = False       # the instruction itself cannot be compiled
    ends: tuple[tuple[int, str], ...] = ()           # pc, reason of the region's ends, from the last lifting
    weight: int = 0             # bytes one pass touches, from the first lifting
    lock: threading.Lock = field(default_factory=threading.Lock)


class Compiler:
    """Backend, kernel library and weights of one or more machines; makes regions out of entries."""

    def __init__(self, engine: Any, weights: Any, threads: int, log: PassLog | None = None, checked: bool = False,
                 name: str = "cpu"):
        self.engine, self.weights, self.threads, self.log, self.name = engine, weights, threads, log, name
        self.checked = checked
        self.lock = threading.Lock()
        self.timings: dict[str, float] = {}

    def compile(self, f: Function, name: str) -> tuple[Region, Any]:
        """Passes, lowering and code for a lifted function."""
        from m3jit.kernels.fused import build
        from m3jit.kernels.lowering import LIBRARY
        t0 = time.perf_counter()
        log = self.log or PassLog(check=self.checked)
        run_passes(f, log)
        t1 = time.perf_counter()
        region = lower(f, LIBRARY, build, name)
        t2 = time.perf_counter()
        native = self.engine.region(region.plan)
        t3 = time.perf_counter()
        for what, seconds in (("passes", t1 - t0), ("lowering", t2 - t1), ("code", t3 - t2)):
            self.timings[what] = self.timings.get(what, 0.0) + seconds
        return region, native


def touched_bytes(f: Function, syms: dict[Sym, int]) -> int:
    """Bytes of the tensors one pass over the region reads and writes (a rough measure of its work)."""
    total = 0
    for n in f.nodes():
        if isinstance(n.type, TensorType):
            if n.op == "weight":
                total += n.attrs["tensor"].nbytes
            elif n.op not in ("imm", "reshape"):
                total += eval_dim(n.type.nbytes(), syms)
    return total


def instructions(f: Function) -> int:
    """Instructions on all ways through the function."""
    return sum(s.count for b in f.blocks for s in b.body if isinstance(s, Retired))


class Jit:
    """The `regions` of an interpreter (m3jit.vm.interpreter.Regions)."""

    def __init__(self, image: Any, machine: Any, compiler: Compiler, stop_word: Any, eager: bool = False,
                 points: dict[int, Point] | None = None):
        self.image, self.machine, self.compiler, self.eager = image, machine, compiler, eager
        self.stop_address = stop_word.word.ctypes.data
        self.urgent_address = self.stop_address + stop_word.word.itemsize
        self.points = points if points is not None else new_points(image)
        self.entries: Iterable[int] = tuple(pc for pc, point in list(self.points.items()) if not point.dead)
        self.stop_at: frozenset[int] = frozenset()       # code is left in front of these
        self._every_points = {self.stop_at: self.points}
        self.interpreter: Any = None             # set by the machine: asked to stop asking about dead points
        self.log: list[str] = []
        self.regions: list[CompiledRegion] = []  # those this machine has entered, in order of first use
        self.used: set[CompiledRegion] = set()
        self.retired = 0                         # instructions of this machine that were done in regions
        self.passed: set[int] = set()            # pcs behind which this machine goes on in compiled code, if it can

    # -- program view for lifting -----------------------------------------------------------------------------------
    @property
    def loop_heads(self) -> frozenset[int]:
        return self.image.loop_heads

    def at(self, pc: int) -> Any:
        return self.image.at(pc)

    def constant(self, ins: Any) -> Any:
        return self.machine.constant(ins)

    def leave_at(self, pcs: frozenset[int]) -> None:
        """From now on compiled code is left in front of the instructions at `pcs`, which are interpreted, and entered
        again behind them.  The machine must not be running."""
        behind = {pc + self.image.at(pc).size for pc in pcs} - pcs
        for pc in list(self.points):                     # some were found while the program ran
            self.interpreter.unmark_entry(pc)
        if pcs not in self._every_points:
            self._every_points[pcs] = new_points(self.image) | {pc: Point(pc) for pc in behind if self.image.at(pc)}
        self.stop_at, self.points, self.passed = pcs, self._every_points[pcs], set()
        for pc in pcs:
            self.interpreter.unmark_entry(pc)
        for pc in set(self.points) - pcs:
            self.interpreter.mark_entry(pc)

    # -- entering ---------------------------------------------------------------------------------------------------
    def enter(self, ctx: Any, pc: int) -> int | None:
        point = self.points[pc]
        if point.dead:
            self._give_up(point)                 # another machine of the program found out
            if point.refused:
                self._pass(pc, "")
            return None
        if ctx.raised and self.machine.vm.looks_again(ctx):
            return self.image.pcs[ctx.index]
        regs = ContextRegisters(ctx, self.machine)
        for region in point.variants:
            syms = region.matches(regs)
            if syms is not None:
                if region is not point.variants[0] and region.entries > point.variants[0].entries:
                    self._ask_first(point, region)
                return self._run(ctx, regs, region, syms)
        point.visits += 1
        region = self._consider(ctx, regs, point)
        if region is None:
            return None
        syms = region.matches(regs)
        return self._run(ctx, regs, region, syms) if syms is not None else None

    def _ask_first(self, point: Point, region: CompiledRegion) -> None:
        """The variant that is entered most is asked first."""
        with point.lock:
            point.variants = [region, *(r for r in point.variants if r is not region)]

    def _run(self, ctx: Any, regs: "ContextRegisters", region: CompiledRegion, syms: dict[Sym, int]) -> int | None:
        if ctx.parks and region.region.has_launches and not (
                self.machine.stop.raised or self.machine.profile is not None or self.compiler.checked):
            ctx.parked = Parked(self, ctx, regs, region, syms)
            ctx.status, ctx.leave = PARKED, True
            return PARKED_HERE
        ahead, ctx.ahead = ctx.ahead, None
        if ahead is not None and ahead.holds(region, regs, ctx.budget):
            info, retired = ahead.outcome.leave()
        elif self.machine.vm.interpreter.counts is not None:           # profiling
            start = time.perf_counter()
            info, retired = region.run(regs, syms, self.stop_address, ctx.budget)
            region.seconds += time.perf_counter() - start
        else:
            info, retired = self._enter(ctx, regs, region, syms)
        if not retired and _nowhere(region, info, 0) and self.machine.stop.raised:
            info, retired = region.run(regs, syms, self.urgent_address, 1)   # SOON is behind one round, not before it
        self.left(region, info, retired)
        if info is None or not retired and _nowhere(region, info, 0):
            if self.machine.stop.raised:         # now: behind a wait that ends the slice it would be too late
                again = self.machine.vm.looks_again(ctx)
                return self.image.pcs[ctx.index] if again else region.region.function.entry_pc
            return None                          # the first instruction itself is the interpreter's
        return info.pc

    def _enter(self, ctx: Any, regs: "ContextRegisters", region: CompiledRegion,
               syms: dict[Sym, int]) -> tuple[Any, int]:
        """(exit or None, retired instructions); contexts that stand at the region too are served by the way."""
        if len(self.machine.vm.scheduler.contexts) > 1:
            left = self._enter_with_others(ctx, region, syms)
            if left is not None:
                return left
        return region.run(regs, syms, self.stop_address, ctx.budget)

    def _enter_with_others(self, ctx: Any, region: CompiledRegion, syms: dict[Sym, int]) -> tuple[Any, int] | None:
        """`_enter` for several contexts; None: none of the others stands there, or there is no room for them."""
        def entry(c: Any, budget: int) -> Parked:
            made = Parked(self, c, ContextRegisters(c, self.machine), region, {})
            made.budget = budget
            return made
        others = companions(self, ctx, region, entry)
        if not others:
            return None
        first = entry(ctx, ctx.budget)
        first.syms = syms
        return run_with(first, others)

    def left(self, region: CompiledRegion, info: Any, retired: int) -> None:
        """Note that this machine has entered a region and left it by exit `info` (None: it gave up)."""
        if region not in self.used:
            self.used.add(region)
            self.regions.append(region)
        region.entries += 1
        region.retired += retired
        self.retired += retired
        if info is not None and info.pc not in self.passed:
            self._pass(info.pc, info.reason)

    def _pass_ends(self, point: Point) -> None:
        """`_pass` the ends of a region that may be interpreted for now: what follows need not be."""
        for pc, reason in point.ends:
            self._pass(pc, reason)

    def _pass(self, pc: int, reason: str) -> None:
        """A region ends before pc: let what follows be an entry point, or it is interpreted up to the next branch."""
        if pc in self.passed or reason == "poll":
            return
        self.passed.add(pc)
        ins = self.image.at(pc)
        if ins is None:
            return
        behind = pc if reason in (FULL, VARIANTS) else pc + ins.size
        if self.image.at(behind) is None or behind in self.stop_at:
            return
        point = self.points.setdefault(behind, Point(behind))
        if point.refused:
            self._pass(behind, "")
        elif not point.dead and self.interpreter is not None:
            self.interpreter.mark_entry(behind)

    # -- compiling --------------------------------------------------------------------------------------------------
    def _consider(self, ctx: Any, regs: "ContextRegisters", point: Point) -> CompiledRegion | None:
        self._pass_ends(point)
        if len(point.variants) >= MAX_VARIANTS:
            return None
        if not self.eager and point.looked and not point.variants and point.weight < ENOUGH_BYTES and \
                point.visits not in (LOOP_VISITS, HOT_VISITS):
            return None
        lifted = self._lift(regs, point.pc)
        if lifted is None:
            if not point.looked:
                point.refused = True
                self._give_up(point)
            self._pass(point.pc, "")
            return None
        f, syms = lifted
        point.ends = tuple((b.end.pc, b.end.reason) for b in f.blocks if isinstance(b.end, Leave))
        self._pass_ends(point)
        point.looked = True
        point.weight = touched_bytes(f, syms)
        loop = any(b.poll and comes_again(b) for b in f.blocks)
        small = not self.eager and not point.weight and point.visits >= HOT_VISITS and \
            instructions(f) < WORTH_ENTERING
        if not loop and (small or not point.variants and self._only_branches(f)):
            self._give_up(point)
            return None
        if not (self.eager or point.weight >= ENOUGH_BYTES or point.visits >= HOT_VISITS or
                (loop and point.visits >= LOOP_VISITS) or point.variants):
            return None
        with point.lock:
            for made in point.variants:              # by another machine of the same program, meanwhile
                if made.matches(regs) is not None:
                    return made
            region, native = self.compiler.compile(f, f"r{point.pc:x}")
            compiled = CompiledRegion(region, native, self.compiler.weights.pointer, self.compiler.threads)
            point.variants.append(compiled)
        if len(point.variants) > 3:
            self.log.append(f"region at {point.pc:#x} has {len(point.variants)} variants")
        return compiled

    def _only_branches(self, f: Function) -> bool:
        """Whether nothing is done but to find out where to go on, and whatever kinds registers hold: no register is
        written on any way, and each ends before an instruction that is never compiled."""
        leaves = [b.end for b in f.blocks if isinstance(b.end, Leave)]
        leaves += [s.leave for b in f.blocks for s in b.body if isinstance(s, Check)]
        ends = [self.image.at(leave.pc) for leave in leaves]
        return not any(leave.env for leave in leaves) and all(i is None or i.op.route != "value" for i in ends)

    def _give_up(self, point: Point) -> None:
        """Nothing at this point is worth compiling: interpret it without asking."""
        point.dead = True
        if self.interpreter is not None:
            self.interpreter.unmark_entry(point.pc)

    def _lift(self, regs: "ContextRegisters", pc: int) -> tuple[Function, dict[Sym, int]] | None:
        syms: dict[Sym, int] = {}

        def type_of(key: Any) -> Any:
            value = regs.get(key)
            t = type_of_value(key, value)
            if isinstance(t, TensorType) and t.shape and isinstance(t.shape[0], Sym):
                syms[t.shape[0]] = value.shape[0]
            return t
        f = Lifter(self, Entry(pc, type_of, syms, self.stop_at)).lift(f"r{pc:x}")
        return None if f is None else (f, syms)


def _nowhere(region: CompiledRegion, info: Any, retired: int) -> bool:
    """Was a region left where it was entered, by an exit?"""
    return info is not None and retired == 0 and info.pc == region.region.function.entry_pc


class Parked:
    """A context that stands at a compiled region it is about to enter."""
    __slots__ = ("jit", "ctx", "regs", "region", "syms", "budget")

    def __init__(self, jit: Jit, ctx: Any, regs: "ContextRegisters", region: CompiledRegion, syms: dict[Sym, int]):
        self.jit, self.ctx, self.regs, self.region, self.syms, self.budget = jit, ctx, regs, region, syms, ctx.budget

    def run(self) -> tuple[Any, int]:
        """Enter it alone: (exit or None, retired instructions)."""
        info, retired = self.region.run(self.regs, self.syms, self.jit.stop_address, self.budget)
        self.jit.left(self.region, info, retired)
        return info, retired


class ContextRegisters:
    """A context's registers and state by the compiler's keys."""
    __slots__ = ("ctx", "machine")

    def __init__(self, ctx: Any, machine: Any):
        self.ctx, self.machine = ctx, machine

    def get(self, key: Any) -> Any:
        if key.__class__ is tuple:
            bank = key[0]
            if bank == "R":
                return self.ctx.R[key[1]]
            if bank == "S":
                handle = self.ctx.S[key[1]]
                return None if handle is None else self.ctx.states.get(handle.id, GONE)
            return self.ctx.V[key[1]]
        return self.ctx.flags if key == "flags" else self.ctx.rng

    def pick(self, guards: Any) -> Any:
        """The values of guards.keys (m3jit.vm.native.Guards)."""
        return guards.pick(self.ctx.R) if guards.pick is not None else [self.get(key) for key in guards.keys]

    def write(self, way: Any, values: list[Any], states: list[tuple[Any, Any]], retired: int) -> None:
        """The registers of an exit (m3jit.vm.region_exits.Way), the states of S registers, the instructions done and
        where they end, all at once."""
        ctx = self.ctx
        if way.index < 0:
            way.index = self.machine.vm.interpreter.index(way.info.pc)
        calls, targets, names = way.calls, way.targets((ctx.R, ctx.V, ctx)), way.names
        values = [*(values if way.kept is None else way.kept(values)), ctx.retired + retired, way.index]
        for key, state in states:
            for call, target, name, value in self.machine.storing_state_of(ctx, key[1], state):
                calls, targets, names = (*calls, call), (*targets, target), (*names, name)
                values.append(value)
        commit_columns(calls, targets, names, values)


def new_points(image: Any) -> dict[int, Point]:
    """The entry points of a program, nothing compiled yet."""
    return {pc: Point(pc) for pc in entry_points(image)}


def shared_points(image: Any, models: Any, backend: str, threads: int) -> dict[int, Point]:
    """The entry points that all machines of one program share, with what any of them compiled.

    Weights are part of compiled regions, so machines share only when they have the same model provider."""
    if image.program is None:
        return new_points(image)
    store = image.program.__dict__.setdefault("_compiled_regions", {})
    provider, points = store.get((backend, threads), (None, None))
    if points is None or provider is not models:
        points = new_points(image)
        store[(backend, threads)] = (models, points)
    return points
