"""The slow path and the reference: executes a program one instruction at a time.

`handlers[i](ctx)` executes instruction i and returns the index of the next.  A handler that returns SLOW has done
nothing: the loop then brings the context's counters up to date and calls `slow[i](ctx)`, which is how machine and
control instructions and compiled regions are reached.

A slice ends at poll points only: where execution arrives at a loop head (`Image.loop_heads`) and after a slow
instruction.  There the loop looks at the budget and the stop word.  A handler whose successor is a loop head ahead
returns `-2 - successor`; a jump back shows by itself.  Instructions that work on tensors return the same when the stop
word is set.  The other way round for `slow`: what it returns is a poll point, unless it is `-2 - successor` (a compiled
region that left elsewhere, an instruction at a region's entry that was interpreted).
"""
from __future__ import annotations

import time
from typing import Any, Callable, Iterable, Protocol

from m3jit.errors import (Deadlock, Divergence, InternalError, Interrupted, LimitError, M3Error, NoRoom,
                          OperandError, SinkClosed, Trap, UnsupportedError, UserError, no_memory)
from m3jit.ir.eager_scalar import PREDICATES
from m3jit.isa.fields import Reg
from m3jit.vm import binding
from m3jit.vm.broken_off import broken_off
from m3jit.vm.commit import attribute, commit, commit_columns
from m3jit.vm.context import WAITING, Context
from m3jit.vm.image import Image, show
from m3jit.vm.stopping import StopWord
from m3jit.vm.values import WRITABLE
from m3jit.vm.waiting import Blocked

SLOW = -1
_SET = (setattr,) * 3
PARKED_HERE = -1                   # what `Regions.enter` gives for a context that is to wait at the region
ENDS_THE_RUN = (SinkClosed, LimitError, Interrupted, Deadlock, Divergence, UnsupportedError)   # no instruction's fault
Handler = binding.Handler


class Regions(Protocol):
    """Compiled code, seen from the interpreter.  `entries`: pcs where a region may begin."""
    entries: Any

    def enter(self, ctx: Context, pc: int) -> int | None:
        """Run compiled code from pc: write registers and state back, add to ctx.retired, give the pc to go on at.
        None: nothing was done.  ctx.budget holds the instructions left."""


class Interpreter:
    """Executes one program for one machine."""

    def __init__(self, image: Image, xp: Any, machine: Any, stop: StopWord, regions: Regions | None = None):
        self.image, self.xp, self.machine, self.stop, self.regions = image, xp, machine, stop, regions
        n = len(image.instructions)
        self.heads = frozenset(image.index_of[pc] for pc in image.loop_heads)
        self.slow: list[Handler] = [self._stub_slow(i) for i in range(n)] + [self._past_end]
        self.handlers: list[Handler] = [self._stub(i) for i in range(n)] + [_slow]
        self.counts: list[int] | None = None          # per instruction, while profiling
        self.times: list[int] | None = None
        # (context, index, began, ended ns) of slow instructions
        self.watch: Callable[[Context, int, int, int], None] | None = None
        self.plain: dict[int, Handler] = {}           # region entries: how the instruction itself is executed
        self._stops: tuple[int, ...] = ()             # instructions that somebody stops in front of
        self.looks = frozenset(i for i, ins in enumerate(image.instructions)
                               if ins.op.control == "interrupt" and ins.args.get("flag") is None)
        for pc in (regions.entries if regions is not None else ()):
            self.mark_entry(pc)

    # -- preparation ------------------------------------------------------------------------------------------------
    def _stub(self, i: int) -> Handler:
        def first(ctx: Context) -> int:
            self._prepare(i)
            return self.handlers[i](ctx)
        return first

    def _stub_slow(self, i: int) -> Handler:
        def first(ctx: Context) -> int:
            self._prepare(i)
            return self.slow[i](ctx)
        return first

    def _prepare(self, i: int) -> None:
        fast, slow = self._bind(i)
        self.handlers[i] = fast if fast is not None else _slow
        if slow is not None:
            self.slow[i] = slow

    def _bind(self, i: int) -> tuple[Handler | None, Handler | None]:
        """(fast handler or None, slow handler or None) of instruction i."""
        ins, nxt, pc = self.image.instructions[i], i + 1, self.image.pcs[i]
        onward, op = self._onward(i, nxt), ins.op
        if op.route == "value":
            if "constant" in op.reads:
                return self._constant(ins, onward), None
            return binding.value_handler(ins, pc, self.xp, onward, -2 - nxt, self.stop, self.machine), None
        if op.route == "control":
            if op.control == "next":
                return (lambda ctx: onward), None
            if op.control == "jump":
                target = self._onward(i, self.index(op.body(_Probe(pc, 0), **_plain_args(ins))))
                return (lambda ctx: target), None
            if op.control == "branch":
                return self._branch(i, ins, nxt), None
            control = self._control(i, ins, nxt)
            return None, control if i not in self.looks else \
                lambda ctx: nxt if self._sees_nothing(ctx, i) else control(ctx)
        if op.route == "machine":
            return None, self._machine(i, ins, nxt)
        return None, self._absent(ins)

    def _constant(self, ins: Any, nxt: int) -> Handler:
        m, rd, put = self.machine, ins.args.get("rd"), binding.put
        cache: list[Any] = []

        def load(ctx: Context) -> int:
            if not cache:
                cache.append(m.constant(ins))
            value = cache[0]
            if value.__class__ in WRITABLE:
                put(ctx, rd, value)                    # the last thing it does is to store
                return nxt
            handle, made = m.storing_handle_of(ctx, value)
            made = (*made, *binding.stores(ctx, rd, handle))
            commit(made)
            return nxt
        binding.STORING.add(load.__code__)
        return load

    def _branch(self, i: int, ins: Any, nxt: int) -> Handler:
        # The body is asked once for every value of the flags; the branch is then a table look-up.
        pc = self.image.pcs[i]
        args = _plain_args(ins)
        table = tuple(self._onward(i, nxt if (t := ins.op.body(_Probe(pc, code), **args)) is None else self.index(t))
                      for code in range(5))
        return lambda ctx: table[ctx.flags]

    def _onward(self, i: int, j: int) -> int:
        """What a handler of instruction i returns to go on at j."""
        return -2 - j if j > i and j in self.heads else j

    def index(self, pc: int) -> int:
        """Index of the instruction at pc, or of the place behind the last one, where going on traps."""
        return self.image.index_of.get(pc, len(self.image.pcs))

    def _control(self, i: int, ins: Any, nxt: int) -> Handler:
        ops = binding.operands(ins, False, self.machine, self.image.pcs[i])
        m, body, index_of, (same, arguments) = self.machine, ins.op.body, self.image.index_of, binding.arguments(ops)

        def run(ctx: Context) -> int:
            ctx.index, m.ctx, m.instruction = i, ctx, ins
            m.stores = stores = []
            pc = body(m, *(arguments(ctx) if same is None else same))
            to = nxt if pc is None else index_of.get(pc)
            if to is None:
                raise OperandError(f"the target 0x{pc:04x} is not the start of an instruction")
            stores += (attribute(ctx, "retired", ctx.retired + 1), attribute(ctx, "index", to))
            commit(stores)
            stores.clear()                # it holds what it has stored
            return to
        return run

    def _machine(self, i: int, ins: Any, nxt: int) -> Handler:
        ops = binding.operands(ins, False, self.machine, self.image.pcs[i])
        m, body, (same, arguments) = self.machine, ins.op.body, binding.arguments(ops)
        dests = [ins.args.get(o.name) for o in ops if o.writes and o.code != "h"]

        def run(ctx: Context) -> int:
            ctx.index, m.ctx, m.instruction = i, ctx, ins
            m.stores = stores = []
            before = ctx.retired
            result = body(m, *(arguments(ctx) if same is None else same))
            if result is not None and dests:
                results = (result,) if len(dests) == 1 else result
                if len(results) != len(dests):
                    binding.results_fault(results, len(dests))
                for reg, value in zip(dests, results):
                    stores += binding.stores(ctx, reg, value)
            if ctx.retired == before:     # else it has stored everything itself
                stores += (attribute(ctx, "retired", before + 1), attribute(ctx, "index", nxt))
                commit(stores)
                stores.clear()            # it holds what it has stored
            return nxt
        return run

    def _absent(self, ins: Any) -> Handler:
        def refuse(ctx: Context) -> int:
            raise OperandError(f"{ins.op.name} (0x{ins.op.code:02X}) is not implemented in this version; "
                               f"CAPABILITY_QUERY reports it absent")
        return refuse

    def _past_end(self, ctx: Context) -> int:
        raise OperandError("execution went past the last instruction, or to an address that starts none; "
                           "end the program with HALT")

    # -- regions ----------------------------------------------------------------------------------------------------
    def mark_entry(self, pc: int) -> None:
        """From now on ask `regions.enter` whenever execution arrives at pc."""
        i = self.image.index_of.get(pc)
        if i is None or i in self.plain:
            return
        fast, slow = self._bind(i)
        self.plain[i] = fast if fast is not None else slow
        regions, heads, index_of, end = self.regions, self.heads, self.image.index_of, len(self.image.pcs)
        plain, is_fast, looks = self.plain[i], fast is not None, self.looks

        def enter(ctx: Context) -> int:
            ctx.index, before = i, ctx.retired
            new = regions.enter(ctx, pc)
            if new is not None:
                if new == PARKED_HERE:        # ctx.leave is set: the slice ends before the region
                    return -2 - i
                j = index_of.get(new, end)   # past the last instruction: traps there
                if j in looks and ctx.retired - before < ctx.budget and self._sees_nothing(ctx, j):
                    return j + 1
                return j if j in heads else -2 - j
            nxt = plain(ctx)
            if not is_fast:
                return nxt
            ctx.retired += 1                 # as `_counted`; no call may come in between (`_failed`)
            j = nxt if nxt >= 0 else -2 - nxt
            ctx.index = j
            return j if j in heads else -2 - j
        self.handlers[i] = _slow
        self.slow[i] = enter

    def _sees_nothing(self, ctx: Context, i: int) -> bool:
        """Execute an IF_INTERRUPT, if there is no interrupt and nobody else looks at it; else nothing is done."""
        if ctx.raised is not False or self.stop.raised or i in self._stops or self.counts is not None or \
                self.watch is not None or not self.machine.vm.recorder.idle:
            return False
        done = ctx.retired + 1
        commit_columns(_SET, (ctx, ctx, ctx), ("retired", "index", "looked"), (done, i + 1, (done, i + 1)))
        return True

    def stop_in_front(self, indices: Iterable[int], arrived: Callable[[Context], bool]) -> None:
        """From now on ask `arrived` in front of these instructions: true, and it is not executed, the stop word being
        raised.  Those of the call before are as they were.  No region may begin there."""
        for i in self._stops:
            self._prepare(i)
        self._stops = tuple(indices)
        for i in self._stops:
            self.slow[i], self.handlers[i] = self._stopping(i, arrived), _slow

    def _stopping(self, i: int, arrived: Callable[[Context], bool]) -> Handler:
        fast, slow = self._bind(i)
        heads = self.heads

        def stop(ctx: Context) -> int:
            ctx.index = i
            if arrived(ctx):
                return -2 - i
            if fast is None:
                return slow(ctx)
            nxt = fast(ctx)
            ctx.retired += 1                 # no call may come in between (`_failed`)
            j = nxt if nxt >= 0 else -2 - nxt
            ctx.index = j
            return j if j in heads else -2 - j
        return stop

    def unmark_entry(self, pc: int) -> None:
        """Interpret the instruction at pc again without asking."""
        i = self.image.index_of.get(pc)
        if i is not None and self.plain.pop(i, None) is not None:
            self._prepare(i)

    # -- running ----------------------------------------------------------------------------------------------------
    def run(self, ctx: Context, budget: int) -> bool:
        """Execute until the budget is used up at a poll point, the stop word is set, or the context asks to leave.

        True: it ended at a poll point (which a raised stop word does not wait for).  Traps end the context
        (`ctx.trap`); other errors propagate.  ctx.index and ctx.retired are exact on return."""
        self.machine.ctx = ctx
        if self.counts is not None or self.watch is not None:
            return self._run_profiled(ctx, budget)
        handlers, slow, stop, heads = self.handlers, self.slow, self.stop, self.heads
        start, index, n = ctx.retired, ctx.index, 0
        ctx.leave = False
        in_slow = False
        try:
            while True:
                nxt = handlers[index](ctx)
                if nxt > index:
                    n += 1
                    index = nxt
                    continue
                if nxt == SLOW:
                    ctx.index, ctx.retired, ctx.budget = index, start + n, budget - n
                    in_slow = True
                    index = slow[index](ctx)
                    in_slow = False
                    n = ctx.retired - start
                    polls = index >= 0
                    if not polls:
                        index = -2 - index
                    if ctx.leave:
                        break
                    if not polls and not stop.raised:
                        continue
                else:
                    n += 1
                    index = nxt if nxt >= 0 else -2 - nxt
                    polls = index in heads
                if n >= budget or stop.raised:
                    break
        except BaseException as e:
            if not in_slow:                # before a call: Ctrl-C may come as it begins
                ctx.index, ctx.retired = index, start + n
            self._failed(ctx, index, e, start + n)
            return True
        ctx.index, ctx.retired = index, start + n
        return polls

    def run_exactly(self, ctx: Context, count: int, budget: int | None = None) -> bool:
        """Execute `count` instructions (fewer if the context ends, blocks or the stop word is set); no regions.

        budget: stop earlier, as `run` does, at the first poll point where so many are done.  True: it ended at one."""
        ctx.leave, self.machine.ctx = False, ctx
        polls: bool | None = True
        for done in range(1, count + 1):
            polls = self._one(ctx, ctx.index)
            if polls is None or ctx.leave or self.stop.raised or polls and budget is not None and done >= budget:
                break
        return polls is not False

    def _one(self, ctx: Context, i: int) -> bool | None:
        """Execute instruction i without entering a region: did it come to a poll point?  None when it failed."""
        before = ctx.retired
        ctx.budget = 1
        try:
            if i in self.plain:
                nxt = self.plain[i](ctx)
                slow = ctx.retired != before           # slow ones count themselves
            else:
                nxt = self.handlers[i](ctx)
                slow = nxt == SLOW
                if slow:
                    nxt = self.slow[i](ctx)
        except BaseException as e:
            self._failed(ctx, i, e, before)
            return None
        if slow and nxt == -2 - i and ctx.retired == before:
            return False                               # somebody stops in front of it
        ctx.retired = before + 1
        ctx.index = nxt if nxt >= 0 else -2 - nxt
        return nxt >= 0 if slow else nxt <= i and ctx.index in self.heads

    def _run_profiled(self, ctx: Context, budget: int) -> bool:
        """As `run`, counting instructions and nanoseconds per instruction, and telling `watch` of slow ones."""
        counts, times, clock = self.counts, self.times, time.perf_counter_ns
        start, known = ctx.retired, len(self.image.instructions)
        ctx.leave = False
        while True:
            i, before, timed, watching = ctx.index, ctx.retired, counts is None, False
            ctx.budget = budget - (before - start)
            try:
                began = clock()
                nxt = self.handlers[i](ctx)
                if nxt == SLOW:
                    nxt = self.slow[i](ctx)
                    polls = nxt >= 0
                else:
                    ctx.retired += 1
                    polls = (nxt if nxt >= 0 else -2 - nxt) in self.heads if nxt <= i else False
                ctx.index = nxt if nxt >= 0 else -2 - nxt
                ended = clock()
                if not timed and i < known:
                    counts[i], times[i], timed = counts[i] + 1, times[i] + ended - began, True
                if self.watch is not None and self.handlers[i] is _slow:
                    watching = True
                    self.watch(ctx, i, began, ended)
            except BaseException as e:
                if watching and isinstance(e, Exception):        # the watch's own: the instruction is done
                    raise
                if ctx.retired != before and not timed:          # Ctrl-C came when it was done
                    counts[i], times[i] = counts[i] + 1, times[i] + clock() - began
                self._failed(ctx, i, e, before)
                return True
            if ctx.leave or self.stop.raised or polls and ctx.retired - start >= budget:
                return polls

    def profile(self, on: bool) -> None:
        """Start or stop counting."""
        if on and self.counts is None:
            self.counts = [0] * len(self.image.instructions)
            self.times = [0] * len(self.image.instructions)
        elif not on:
            self.counts = self.times = None

    # -- failures ---------------------------------------------------------------------------------------------------
    def _failed(self, ctx: Context, index: int, error: BaseException, counted: int) -> None:
        """Turn an exception in instruction `index` into what the machine reports.  counted: instructions before it.

        Slow instructions and regions are counted by what stores their results.  A fast one is counted by the loop
        behind its call, and CPython hears no signal in between; only the call that stores several of its results may be
        left by one."""
        done = ctx.retired != counted
        if not done and not isinstance(error, Exception):
            behind = binding.stored(error)
            if behind is not None:
                ctx.index, ctx.retired, done = behind, counted + 1, True
        if not done:
            ctx.index = index
        self.machine.stores = []                       # what was not done holds nothing
        if isinstance(error, Blocked):
            ctx.waiting_for, ctx.status, ctx.leave = error.wait, WAITING, True
            return
        if isinstance(error, Trap):
            ctx.trap = error
            return
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            self.machine.vm.broken_off = found = broken_off(self.image, ctx, index, done)
            error.add_note(str(found))
            raise error
        if isinstance(error, OperandError):
            ctx.trap = self.trap(ctx, index, error.message, error.register)
            if isinstance(error, NoRoom):
                ctx.trap.__cause__ = error.with_traceback(None)
            return
        if isinstance(error, UserError) and not isinstance(error, ENDS_THE_RUN):
            ctx.trap = self.trap(ctx, index, str(error))
            ctx.trap.__cause__ = error
            return
        if isinstance(error, M3Error):
            raise error
        missing = no_memory(error)
        if missing is not None:
            ctx.trap = self.trap(ctx, index, f"out of memory: {missing}" if str(missing) else "out of memory")
            ctx.trap.__cause__ = MemoryError(str(missing))       # the frames of the others hold what took the memory
            return
        where = self.trap(ctx, index, f"{type(error).__name__}: {error}")
        raise InternalError(str(where)) from error

    def trap(self, ctx: Context, index: int, message: str, register: str | None = None,
             code: int | None = None) -> Trap:
        """A trap at an instruction of a context."""
        image = self.image
        if index < len(image.pcs):
            pc, text = image.pcs[index], show(image.instructions[index], image.program)
        else:                                          # behind the last instruction, whose line says where that is
            pc, text = -1, ""
        line = image.line(pc if pc >= 0 else image.pcs[-1]) if image.pcs else None
        return Trap(message, pc, line, text, register, ctx.id, ctx.retired, code)


class _Probe:
    """Stands for the machine where a branch body is asked for its target."""

    def __init__(self, pc: int, flags: int):
        self.pc, self.flags = pc, flags

    def flags_hold(self, predicate: int) -> bool:
        return holds(self.flags, predicate)


_HOLDS = tuple(PREDICATES.values())


def holds(flags: int, predicate: int) -> bool:
    """Is predicate 0..5 (EQUAL NOT_EQUAL LESS LESS_EQUAL GREATER GREATER_EQUAL) true of the flags?"""
    return flags in _HOLDS[predicate]


def _plain_args(ins: Any) -> dict[str, Any]:
    """Operands by name, registers as registers (jump and branch bodies do not read them)."""
    return {f.name: None if isinstance(v := ins.args.get(f.name, f.default), Reg) else v for f in ins.op.operands()}


def _slow(ctx: Context) -> int:
    return SLOW

