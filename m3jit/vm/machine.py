"""The machine as the bodies of machine and control instructions see it (`m`).

Bodies get operand values as arguments (destinations as registers), call methods here, and return the value of their
destination (or a tuple, in operand order), or the next pc for control instructions.  `m.ctx` is the running context.
"""
from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import numpy as np

from m3jit.errors import OperandError
from m3jit.isa.control import MAX_CALL_DEPTH
from m3jit.isa.fields import STATE, Reg
from m3jit.isa.memory import WHOLE
from m3jit.isa.table import Instruction
from m3jit.isa.types import NEW_STATE, Tensor
from m3jit.vm import binding
from m3jit.vm.checkpoints import CheckpointsView
from m3jit.vm.commit import Store, attribute, commit, item
from m3jit.vm.context import DONE, KILLED, PRIORITIES, Context, Frame
from m3jit.vm.interpreter import holds
from m3jit.vm.machine_io import StreamsView
from m3jit.vm.machine_models import ModelsView
from m3jit.vm.machine_signals import SignalsView
from m3jit.vm.machine_system import SystemView
from m3jit.vm.memory import NAMES, OFFSET_MASK, WAL
from m3jit.vm.snapshots import SnapshotHandle
from m3jit.vm.values import ContextRef, Handle

FLAG_WORDS = ("equal", "less", "greater", "unordered", "not compared")
SPECIAL_NAMES = ("PC", "SP", "FP", "CTX_ID", "NODE_ID", "LAMPORT", "DEADLINE", "STATUS", "DEVICE_ID", "DEVICE_AFFINITY",
                 "DEVICE_HEALTH", "NUMA_NODE", "POWER_BUDGET_MW", "THERMAL_HEADROOM_MC", "THROTTLE_STATE",
                 "DEADLINE_TREE_ID", "DEADLINE_TREE_MASK", "CLOCK_HEALTH", "CLOCK_OFFSET_NS")


class Machine(StreamsView, ModelsView, SignalsView, SystemView, CheckpointsView):
    """One per VM; single-threaded like the interpreter."""

    def __init__(self, vm: Any):
        self.vm = vm
        self.ctx: Context = None                       # type: ignore[assignment]
        self.instruction: Instruction = None           # type: ignore[assignment]
        self.stores: list[Store] = []                  # what the running instruction changes, once all of it is made
        self._handles = itertools.count(1)
        self._model_handles: dict[int, Handle] = {}
        self._extension_handles: dict[tuple[int, int], Handle] = {}
        self._windows: dict[tuple[int, str], tuple[int, int]] = {}
        self._until: dict[int, tuple[int, float | None]] = {}        # context -> (instructions, when its wait is over)
        self._first_reads: dict[tuple[int, str, int], int] = {}      # context, source -> where it began with its sound

    # -- position and flow ------------------------------------------------------------------------------------------
    @property
    def pc(self) -> int:
        """Byte offset of the running instruction."""
        return self.vm.image.pcs[self.ctx.index]

    @property
    def next_pc(self) -> int:
        """Byte offset behind the running instruction."""
        return self.pc + self.instruction.size

    def flags_hold(self, predicate: int) -> bool:
        return holds(self.ctx.flags, predicate)

    def halt(self) -> None:
        """End the running context."""
        self.finish_texts(self.ctx)
        self.stores.append(attribute(self.ctx, "status", DONE))
        self.ctx.leave = True

    def call(self, target: int, args: tuple[Reg, ...]) -> int:
        ctx = self.ctx
        if ctx.depth >= MAX_CALL_DEPTH:
            raise OperandError(f"calls are {ctx.depth} deep; {MAX_CALL_DEPTH} is the limit (does the recursion end?)")
        numbers = tuple(r.index for r in args)
        frame = Frame(ctx.R, ctx.V, ctx.index + 1, numbers, ctx.frames)
        R: list[Any] = [ctx.R[n] for n in numbers]
        pc = self.pc + target
        self.stores += (attribute(ctx, "frames", frame), attribute(ctx, "R", R + [None] * (256 - len(R))),
                        attribute(ctx, "V", [None] * 32))
        return pc

    def ret(self) -> int | None:
        ctx = self.ctx
        frame = ctx.frames
        if frame is None:
            raise OperandError("no CALL to return from")
        if frame.back >= len(self.vm.image.pcs):
            raise OperandError("the CALL was the last instruction; there is nothing to return to")
        R = list(frame.R)                              # the frame may be shared with a snapshot or another context
        for i, n in enumerate(frame.args):
            R[n] = ctx.R[i]
        self.stores += (attribute(ctx, "R", R), attribute(ctx, "V", list(frame.V)),
                        attribute(ctx, "frames", frame.parent))
        return self.vm.image.pcs[frame.back]

    # -- registers and states ---------------------------------------------------------------------------------------
    def write(self, reg: Reg | None, value: Any) -> None:
        """Write a register with what else the instruction changes (None: discard)."""
        self.stores += binding.stores(self.ctx, reg, value)

    def read_special(self, ctx: Context, n: int) -> int:
        """A special register other than SP0, the pc, which is a constant of the instruction that reads it."""
        known = {1: lambda: ctx.depth, 3: lambda: ctx.id, 4: lambda: 0,
                 5: lambda: 0, 6: lambda: ctx.deadline, 7: lambda: 0, 8: lambda: 0, 9: lambda: 1, 10: lambda: 1}
        if n not in known:
            raise OperandError(f"special register SP{n} ({SPECIAL_NAMES[n]}) is not available on this machine")
        return known[n]()

    def state_in(self, ctx: Context, operand: Any, handle: Handle | None) -> Any:
        """The state a handle names; NEW_STATE where the register was never written."""
        if handle is None:
            return NEW_STATE
        state = ctx.states.get(handle.id)
        if state is None:
            raise OperandError(f"{operand.register} ({operand.name}) names {handle.what} #{handle.id}, which does not "
                               f"exist here: it was made after the snapshot that was restored, or was unloaded")
        return state

    def state_out(self, ctx: Context, operand: Any, handle: Handle | None, state: Any) -> list[Store]:
        """The stores of a state's new value; a register that held nothing gets a new handle."""
        if state is None or state is NEW_STATE:
            return []
        if handle is not None:
            return [item(*ctx.states.place(handle.id), state)]
        handle, stores = self.handle_for(ctx, state)
        return [*stores, item(getattr(ctx, operand.bank), operand.index, handle)]

    def state_of(self, ctx: Context, n: int) -> Any:
        """The state S register n names, None when it names none (for compiled code)."""
        handle = ctx.S[n]
        return None if handle is None else ctx.states.get(handle.id)

    def set_state_of(self, ctx: Context, n: int, state: Any) -> None:
        """The new value of the state S register n names; an unwritten register gets a new handle."""
        commit(self.storing_state_of(ctx, n, state))

    def storing_state_of(self, ctx: Context, n: int, state: Any) -> list[Store]:
        """The stores of `set_state_of`."""
        if ctx.S[n] is not None:
            return [item(*ctx.states.place(ctx.S[n].id), state)]
        self.vm.image.registers.cover(Reg(STATE, n))
        handle, stores = self.handle_for(ctx, state)
        return [*stores, item(ctx.S, n, handle)]

    @property
    def stop(self) -> Any:
        """The stop word."""
        return self.vm.stop_word

    @property
    def profile(self) -> Any:
        """Execution counts per instruction while profiling, else None."""
        return self.vm.interpreter.counts

    def handle_for(self, ctx: Context, state: Any) -> tuple[Handle, list[Store]]:
        """(a handle, the stores that make `state` a state of the context under it).  Numbers are never used twice."""
        handle = Handle(next(self._handles), getattr(state, "kind_name", type(state).__name__))
        return handle, [item(*ctx.states.place(handle.id), state)]

    def state(self, handle: Handle, what: type | None = None, said_as: str = "") -> Any:
        """The state of a handle, of class `what`."""
        found = self.ctx.states.get(handle.id)
        if found is None:
            raise OperandError(f"{handle.what} #{handle.id} does not exist here: it was made after the snapshot that "
                               f"was restored, or was unloaded")
        if what is not None and not isinstance(found, what):
            raise OperandError(f"expected {said_as or what.__name__}, got a {handle.what} handle")
        return found

    def constant(self, ins: Instruction) -> Any:
        """The value of a row that reads "constant"."""
        return self.vm.image.constant(ins, self, self.vm.memory.weights)

    # -- memory -----------------------------------------------------------------------------------------------------
    def arena_alloc(self, number: int, size: int, align: int) -> int:
        """ARENA_ALLOC: the address."""
        address, store = self.ctx.memory.arena_alloc(number, size, align)
        self.stores.append(store)
        return address

    def arena_reset(self, number: int) -> None:
        """ARENA_RESET."""
        self.stores.append(self.ctx.memory.arena_reset(number))

    def copy(self, dst: int, src: Any, offset: int, size: int, persist: bool = False) -> None:
        """MEMCPY: `size` bytes (-1: the rest of a tensor) of an address or tensor to an address, or to the end of the
        log (persist: they are on the disk then)."""
        memory = self.ctx.memory
        to_log = (dst & 2 ** 64 - 1) >> 60 == WAL
        if persist and not to_log:
            raise OperandError(f"PERSIST copies to the log, region WAL; 0x{dst & 2 ** 64 - 1:016x} lies in "
                               f"{NAMES[(dst & 2 ** 64 - 1) >> 60]} (FORK PERSIST keeps the whole state)")
        if to_log:
            if src.__class__ is int and size < 0:
                raise OperandError("copying from an address needs LEN")
            data = memory.read(src + offset, size) if src.__class__ is int else self._tensor_bytes(src, offset, size)
            self.append_to_log(dst & OFFSET_MASK, bytes(data), persist)
            return
        if src.__class__ is int:
            if size < 0:
                raise OperandError("copying from an address needs LEN")
            memory.check(dst, size, write=True)
            self.stores += memory.writing(dst, memory.read(src + offset, size))
        else:
            self.stores += memory.writing(dst, self._tensor_bytes(src, offset, size))

    def fill(self, dst: int, byte: int, size: int) -> None:
        """MEMSET: `size` times the same byte at an address."""
        self.stores += self.ctx.memory.filling(dst, byte, size)

    def _tensor_bytes(self, src: Tensor, offset: int, size: int) -> memoryview:
        size = src.nbytes - offset if size == WHOLE else size
        if offset < 0 or size < 0 or offset + size > src.nbytes:
            raise OperandError(f"bytes {offset} to {offset + size} of {src!r}, which has {src.nbytes}")
        return memoryview(np.ascontiguousarray(src.data).reshape(-1).view(np.uint8))[offset:offset + size]

    def prefetch(self, src: Any, offset: int, size: int) -> None:
        """PREFETCH: check that the range can be read."""
        if src.__class__ is int:
            self.ctx.memory.check(src + offset, 1 if size == WHOLE else size)
        else:
            self._tensor_bytes(src, offset, size)

    # -- snapshots --------------------------------------------------------------------------------------------------
    def snapshot(self, rd: Reg | None, persist: bool = False) -> None:
        """Capture the context with a snapshot handle in rd (so that the snapshot's rd names itself); rd holds it then.
        All of it or nothing, at once, with what else the instruction changes: the last thing it does.  persist: it is
        on the disk by then."""
        self.vm.snapshots.fork(self.ctx, None if rd is None else rd.index, self.persist if persist else None,
                               self.stores)

    def abort(self, handle: SnapshotHandle | None, resume: bool) -> int | None:
        """Put a snapshot's root back; None handle: nothing.  The pc to go on at when `resume`.  Everything is checked
        before anything changes."""
        if handle is None:
            return None
        snap, pcs = self.vm.snapshots.resolve(handle), self.vm.image.pcs
        if resume and snap.resume >= len(pcs):
            raise OperandError("the FORK was the last instruction; there is nothing to resume at")
        self.vm.snapshots.reclaimer.give(self.ctx.replaced())
        self.stores += [*self.ctx.restoring(snap.root), attribute(self.ctx, "newest_snapshot", snap.id)]
        return pcs[snap.resume] if resume else None

    def restore(self, handle: SnapshotHandle) -> None:
        """Memory and state of a snapshot; registers stay."""
        snap = self.vm.snapshots.resolve(handle)
        self.vm.snapshots.reclaimer.give(self.ctx.replaced(False))
        self.stores += [*self.ctx.restoring(snap.root, False), attribute(self.ctx, "newest_snapshot", snap.id)]

    # -- contexts ---------------------------------------------------------------------------------------------------
    def fork_context(self, target: int, priority: str | None) -> ContextRef:
        """A child that shares everything with this context, copy on write, and starts at pc + target."""
        child = self._new_context(target, priority)
        child.restore(self.ctx.capture())
        return self._start(child)

    def spawn_context(self, target: int, priority: str | None, model: Handle | None) -> ContextRef:
        """A context with empty registers, memory and state."""
        child = self._new_context(target, priority)
        if model is not None:
            child.states.set(model.id, self.state(model))
            child.model = model
        return self._start(child)

    def _new_context(self, target: int, priority: str | None) -> Context:
        pc = self.pc + target
        if pc not in self.vm.image.index_of:
            raise OperandError(f"the target 0x{pc:04x} is not the start of an instruction")
        live, limit = len(self.vm.scheduler.contexts), self.vm.context_limit
        if live >= limit:
            raise OperandError(f"{live} contexts are live, all that this machine may have (context_limit); "
                               "end one with KILL_CONTEXT or let it HALT, or raise the limit: m3jit run "
                               "--context-limit N, VM(context_limit=...)")
        child = self.vm.new_context()
        child.index = self.vm.image.index_of[pc]
        child.priority = PRIORITIES.index(priority or "GREEN")
        return child

    def _start(self, child: Context) -> ContextRef:
        self.stores += self.vm.scheduler.adding(child, self.ctx.virtual_time)
        self.ctx.leave = True                          # the scheduler decides who is next
        return ContextRef(child.id)

    def find_context(self, ref: ContextRef) -> Context | None:
        """The context a register names, None when it has ended."""
        return self.vm.scheduler.contexts.get(ref.id)

    def kill(self, ref: ContextRef) -> None:
        victim = self.find_context(ref)
        if victim is None:
            raise OperandError(f"context {ref.id} has already ended")
        self.stores.append(attribute(victim, "status", KILLED))
        if victim is self.ctx:
            self.ctx.leave = True
        else:
            self.stores += [self.vm.scheduler.removing(victim), attribute(victim, "ahead", None),   # (see `remove`)
                            *self.vm.locks.ending(victim)]
            if victim is not self.vm.main:
                self.stores.append(attribute(self.vm, "_retired_before", self.vm._retired_before + victim.retired))

    def set_priority(self, ctx: Context, priority: int) -> None:
        self.stores.append(attribute(ctx, "priority", priority))
        self.ctx.leave = True

    def switch_pipeline(self, pipeline: str) -> None:
        """The context runs a pipeline of that name from now on."""
        self.stores.append(attribute(self.ctx, "pipeline", pipeline))
        self.ctx.leave = True

    def priority_level(self, level: int | None, word: str | None) -> int:
        """A priority given as a number or a word."""
        if word is not None:
            return PRIORITIES.index(word)
        if level is None or not 0 <= level < len(PRIORITIES):
            raise OperandError(f"priority {level}; it is 0 GREEN, 1 BLUE or 2 RED" if level is not None else
                               "needs a priority: a register, GREEN, BLUE or RED")
        return level

    def yield_turn(self) -> None:
        """Let the other ready contexts of this priority run first."""
        self.stores += self.vm.scheduler.yielding(self.ctx)
        self.ctx.leave = True

    # -- clock, trace, notes ----------------------------------------------------------------------------------------
    def observe(self, what: str, look: Any) -> Any:
        """Something from outside the program: taken from the log of a recorded run, or looked at (and logged)."""
        return self.vm.observe(self.ctx, what, look)

    def clock_ns(self) -> int:
        return self.observe("clock", time.monotonic_ns)

    def wall_ns(self) -> int:
        return self.observe("time", time.time_ns)

    def trap_with_code(self, message: str, code: int) -> None:
        """End the context with a numbered trap."""
        raise self.vm.interpreter.trap(self.ctx, self.ctx.index, message, code=code)

    def trace_event(self, event: int, data: int) -> None:
        """Keep an event in the machine's trace."""
        self.vm.add_trace(self.ctx, event, data)

    def dump(self) -> None:
        """Print the running context on standard error."""
        ctx = self.ctx
        line = self.vm.image.line(self.pc)
        where = f" {line[0]}:{line[1]}" if line else ""
        print(f"context {ctx.id}: pc 0x{self.pc:04x}{where}, {PRIORITIES[ctx.priority]}, {ctx.retired} instructions, "
              f"flags {FLAG_WORDS[ctx.flags]}, call depth {ctx.depth}", file=sys.stderr)
        for reg, value in ctx.live_registers().items():
            print(f"  {reg} = {value!r}", file=sys.stderr)
