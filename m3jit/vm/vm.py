"""`VM`: a program, its contexts and everything they share; the host's view of a run."""
from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable

import numpy as np

from m3jit.errors import Trap, UserError
from m3jit.isa.fields import BANK_LETTERS, BANK_SIZES, SPECIAL, Reg
from m3jit.isa.types import Tensor
from m3jit.vm import binding, regions as region_factory
from m3jit.vm.checkpoints import NO_CHECKPOINTS, Checkpoints
from m3jit.vm.commit import attribute, commit
from m3jit.vm.context import DEFAULT_SEED, DONE, READY, TRAPPED, WAITING, Context
from m3jit.vm.entering import Entered, Timed
from m3jit.vm.held import DEFAULT_BOUND, DEFAULT_CONTEXTS, count_of
from m3jit.vm.host_states import HostStates
from m3jit.vm.host_streams import HostStreams
from m3jit.vm.image import Image
from m3jit.vm.interpreter import Interpreter
from m3jit.vm.locks import LockTable
from m3jit.vm.machine import Machine
from m3jit.vm.machine_io import text_bytes
from m3jit.vm.memory import DEFAULT_LIMIT, ContextMemory, MachineMemory, Pages, WeightMap
from m3jit.vm.models import NO_MODELS, ModelProvider
from m3jit.vm.recording import Recorder
from m3jit.vm.reclaim import DEFAULT_BACKLOG
from m3jit.vm.scheduler import Scheduler
from m3jit.vm.snapshots import DEFAULT_WINDOW, SnapshotHandle, SnapshotStore
from m3jit.vm.sources import Source
from m3jit.vm.stopping import ATTENTION, INTERRUPT, STOPPED, StopWord, interruptible
from m3jit.vm.streams import DEFAULT_CAPACITY, Ring, Sink, StandardSink
from m3jit.vm.turns import Turns
from m3jit.vm.waiting import Signal

MAIN = 1                                               # number of the first context


def check_limits(max_steps: int | None, timeout: float | None) -> None:
    """UserError unless the limits of a run are positive and finite (None: no limit)."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or
                                not 0 < timeout <= threading.TIMEOUT_MAX):
        raise UserError(f"timeout={timeout!r}; seconds, over 0 and at most {threading.TIMEOUT_MAX:.0f}, or None")
    if max_steps is not None and (isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 0):
        raise UserError(f"max_steps={max_steps!r}; a number of instructions, or None")


class VM(Turns, HostStreams, HostStates):
    """Runs one program.  Every method may be called from any thread; a run lets others in between two slices.

    program: a `frontend.Program`, or a list of instructions.  backend: "auto", "interpreter" or the name of a compiled
    one.  max_steps, timeout (seconds): limits of the whole run (`LimitError`).  models: a `ModelProvider`.  files: the
    directory the program may read and write (None: no files).  wait_input: SENSE of an empty input waits for
    `push_input` instead of reporting its end.  seed: of every new context's random stream.  record: keep a log of what
    came from outside and left (a `Recorder`: use it); replay: such a log, to run again without the outside.
    memory_limit: bytes of addressed memory its contexts may write; tensor_limit: bytes of the largest tensor (half of
    the machine's memory).  snapshot_window: snapshots that are kept though no register holds them; snapshot_memory:
    bytes that snapshots alone may hold (m3jit.vm.held); context_limit: contexts at one time; reclaim_backlog: replaced
    states that may wait to be freed (m3jit.vm.reclaim).  checkpoints: what CHECKPOINT_SAVE, PERSIST and the WAL region
    write to (`m3jit.Checkpoints`).
    """

    def __init__(self, program: Any, backend: str = "auto", threads: int | None = None, max_steps: int | None = None, *,
                 timeout: float | None = None, models: ModelProvider | None = None, files: str | Path | None = ".",
                 wait_input: bool = False, seed: int = DEFAULT_SEED, snapshot_window: int = DEFAULT_WINDOW,
                 reclaim_backlog: int = DEFAULT_BACKLOG, snapshot_memory: int = DEFAULT_BOUND,
                 context_limit: int = DEFAULT_CONTEXTS,
                 memory_limit: int = DEFAULT_LIMIT, tensor_limit: int | None = None,
                 ring_capacity: int = DEFAULT_CAPACITY, profile: bool = False,
                 record: bool | Recorder = False, replay: list | None = None, xp: Any = None, regions: Any = None,
                 extensions: Any = None, checkpoints: Checkpoints | None = None):
        check_limits(max_steps, timeout)
        if isinstance(program, (str, bytes)):
            raise UserError("VM takes a program, not text: m3jit.assemble makes one of assembly text, "
                            "m3jit.load of a file")
        if threads is not None and not 1 <= threads <= 256:
            raise UserError(f"threads: 1 to 256, got {threads}")
        self.image = Image(program)
        self.backend, self.threads, self.max_steps, self.timeout = backend, threads, max_steps, timeout
        self.models, self.wait_input, self.seed = models or NO_MODELS, wait_input, seed
        self.ring_capacity, self.checkpoints = ring_capacity, checkpoints or NO_CHECKPOINTS
        self.files = Path(files) if files is not None else None
        self.signal, self.stop_word = Signal(), StopWord()
        self.memory = MachineMemory(self.image.text, self.image.data, WeightMap(), Pages(), memory_limit)
        self.snapshots, self.scheduler = SnapshotStore(snapshot_window, reclaim_backlog, snapshot_memory), Scheduler()
        self.context_limit = count_of("context_limit", context_limit, 1)
        self.memory.contexts = self.snapshots.bound.contexts = lambda: {self.main, *self.scheduler.contexts.values()}
        self._nothing_has_run()
        self.recorder = record if isinstance(record, Recorder) else Recorder(record, replay)
        self.recorder.attach(self)
        self.scheduler.woken = None if self.recorder.idle else self.recorder.woken
        if extensions is None:
            from m3jit.vm.extensions import REGISTRY as extensions
        self.extensions = extensions
        self.machine = Machine(self)
        self.xp = xp if xp is not None else region_factory.eager_namespace(self.machine)
        if tensor_limit is not None:
            self.xp.limit_bytes = tensor_limit
        self.regions = regions if regions is not None else region_factory.make(self, backend, threads)
        self.interpreter = Interpreter(self.image, self.xp, self.machine, self.stop_word, self.regions)
        self.interpreter.profile(profile)
        if self.regions is not None:
            self.regions.interpreter = self.interpreter
        self.sinks: dict[str, Sink] = {"OUTPUT": StandardSink("standard output", "stdout"),
                                       "ERROR": StandardSink("standard error", "stderr")}
        self.sources: dict[str, Source] = {}
        self.rings: dict[str, Ring] = {}
        self.events: deque[tuple[int, int, int, int]] = deque(maxlen=1024)       # (context, retired, event, data)
        self.windows: list[tuple[str, int, int, int]] = []       # profiling: (tag, context, instructions, ns)
        self.trace: Callable[[str, dict], None] | None = None    # called with (kind, facts), for trace files
        self._models: dict[str, Any] = {}
        self._ids = itertools.count(MAIN)
        self.locks = LockTable()
        self._closed = False
        self.main = self.new_context()
        if self.image.instructions:
            self.main.index = self.image.index_of[self.image.entry_pc]
            self.scheduler.add(self.main)
        else:
            self.main.status = DONE

    # -- contexts and registers -------------------------------------------------------------------------------------
    def new_context(self) -> Context:
        """A context that is not scheduled yet."""
        return Context(next(self._ids), ContextMemory(self.memory), self.image.registers, self.seed)

    def register(self, name: str | Reg) -> Reg:
        """The register of a name: R7, V3, S0, or a name the program declares."""
        if isinstance(name, Reg):
            return name
        if self.image.program is not None:
            try:
                return self.image.program.register(name)
            except KeyError as e:
                raise UserError(str(e.args[0])) from None
        for bank, letter in enumerate(BANK_LETTERS[:SPECIAL]):
            if name[:1].upper() == letter and name[1:].isdecimal() and int(name[1:]) < BANK_SIZES[bank]:
                return Reg(bank, int(name[1:]))
        raise UserError(f"no register {name!r}; R0-R254, V0-V31 and S0-S63 exist")

    @property
    def registers(self) -> dict[str, Any]:
        """Every written register of the main context."""
        with self._entered():
            return {str(r): v for r, v in self.main.live_registers().items()}

    def get(self, name: str | Reg, context: Context | None = None) -> Any:
        """A register's value: int, float, Tensor, handle, or None when it was never written."""
        with self._entered():
            return (context or self.main).read(self.register(name))

    def set(self, name: str | Reg, value: Any, context: Context | None = None) -> None:
        """Write a register: a number, a Tensor, a NumPy array (copied), text (its UTF-8 bytes), a handle, or None."""
        if isinstance(value, np.ndarray):
            value = Tensor.of(np.array(value))
        elif isinstance(value, (str, bytes)):
            raw = text_bytes(value) if isinstance(value, str) else value
            value = Tensor.of(np.frombuffer(raw, np.uint8))
        elif isinstance(value, Tensor):
            try:
                value = value.checked()
            except TypeError as e:
                raise UserError(f"{name}: {e}") from None
        reg = self.register(name)
        if reg.bank == SPECIAL or reg.index >= BANK_SIZES[reg.bank] or reg == Reg(0, 255):
            raise UserError(f"{reg} cannot be written")
        with self._entered():
            self.image.registers.cover(reg)
            if value.__class__ is SnapshotHandle:
                self.image.registers.may_name_snapshots(reg.index)
            binding.put(context or self.main, reg, value)

    # -- running ----------------------------------------------------------------------------------------------------
    @property
    def finished(self) -> bool:
        """Has every context ended?"""
        return not self.scheduler.contexts

    def run(self) -> "VM":
        """Run until every context has ended; files are completed then.

        Raises `Trap` (the main context's at once, another's when all others have ended), `LimitError`, `Deadlock`,
        `Interrupted`, `SinkClosed`, `StreamError`; partial files are removed in that case."""
        self._not_in_a_batch()
        with self._lock:
            try:
                with Timed(self), interruptible(self.stop_word):
                    self._run()
            finally:
                self._runner = self._timed = None
        return self

    def _run(self) -> None:
        try:
            self._loop(lambda: False)
            if self._first_trap is not None:
                raise self._first_trap
        except BaseException as e:
            self._fail(e)
            raise
        self.close(complete=True)

    def _not_in_a_batch(self) -> None:
        if self.batch is not None:
            raise UserError(f"{self.image.name}: takes part in a batch, which runs it (Batch.step, Batch.run)")

    def _fail(self, error: BaseException) -> None:
        """The run is over: no context goes on, partial files are removed; registers stay readable."""
        self.error = self.error or error
        self._see_ends()
        self._retired_before += sum(c.retired for c in self.scheduler.contexts.values() if c is not self.main)
        self.stopped = tuple(self.scheduler.contexts.values()) or self.stopped
        self.scheduler.contexts.clear()
        self.close(complete=False)

    async def run_async(self) -> "VM":
        """`run` in a thread of its own; cancelling stops the program."""
        import asyncio

        task = asyncio.ensure_future(asyncio.to_thread(self.run))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.stop()
            try:
                await task
            except (UserError, asyncio.CancelledError):    # its end does not matter: what was asked for is to cancel
                pass
            raise

    def step(self, count: int = 1) -> int:
        """Execute `count` instructions, one at a time; how many were executed (fewer when the program ended)."""
        self._not_in_a_batch()
        done = 0
        with self._lock:
            self._take_up()
            while done < count:
                if self._cut is not None:              # what a run began of a slice: it ends here
                    cut, _, so_far = self._taken_cut()
                    self._after(cut, so_far - self.looks_again(cut))
                ctx, _ = self.scheduler.pick()
                if ctx is None:
                    if not self.scheduler.waiting():
                        break
                    self._wait()
                    continue
                before = ctx.retired
                self._slicing = ctx, 1, before         # each is a slice of its own
                self.interpreter.run_exactly(ctx, 1)
                done += ctx.retired - before
                self._after(ctx, ctx.retired - before)
        return done

    def stop(self) -> None:
        """End the run at its next poll point (`Interrupted`); from any thread or a signal handler."""
        self.stop_word.set(STOPPED)
        self._wake()

    def interrupt(self, context: Context | None = None) -> None:
        """Raise the interrupt flag that IF_INTERRUPT and PREEMPT_CHECK see; from any thread or a signal handler.

        Compiled code that runs for the context is left between two pieces of a kernel.  One that is pending already is
        not raised again."""
        ctx = context or self.main
        before, ctx.interrupt = ctx.interrupt, True
        if not before:
            self._urge(ctx)

    def _urge(self, ctx: Context) -> None:
        """An interrupt became pending: bring the context out of compiled code, or out of a wait."""
        self.stop_word.set(INTERRUPT if self.machine.ctx in (ctx, None) else ATTENTION)
        if ctx.status == WAITING:
            self._wake()

    def _wake(self) -> None:
        with self.signal:
            self.signal.notify()

    def _entered(self) -> Entered:
        return self._gate

    def close(self, complete: bool = True) -> None:
        """Close every sink; complete False removes files that were being written, and so does Ctrl-C meanwhile."""
        if self._closed:
            return
        left = [*self.sinks.values(), *self.rings.values()]
        closed_before = frozenset(r.name for r in self.rings.values() if r.closed)
        self._closed, self.rings_closed = True, closed_before      # no call may come in between
        try:
            self._close(left, complete)
        finally:
            for sink in left:                          # Ctrl-C came before they were closed, or meanwhile
                with contextlib.suppress(Exception):
                    sink.close(False)

    def _close(self, left: list[Any], complete: bool) -> None:
        """Close these sinks, in order; those that are closed are taken off the list."""
        error: Exception | None = None
        try:
            self.checkpoints.close()
        except Exception as e:
            error = e
        for prepare in [s.prepare for s in left if complete and hasattr(s, "prepare")]:
            try:                                       # all files are complete before the first gets its name
                prepare()
            except Exception as e:
                error = error or e
        while left:
            try:
                left[0].close(complete and error is None)
            except Exception as e:
                error = error or e
            del left[0]
        if complete and error is None and self.finished:
            self.checkpoints.ended()                   # what it wrote is complete: there is nothing to go on with
        if error is not None and complete:
            raise error

    # -- snapshots --------------------------------------------------------------------------------------------------
    def fork(self) -> SnapshotHandle:
        """A snapshot of the main context."""
        with self._entered():
            return self.snapshots.take(self.main)

    def abort(self, snapshot: SnapshotHandle, resume: bool = False) -> None:
        """Put a snapshot back; resume: execution also goes back to where it was taken.  All of it or nothing."""
        if not isinstance(snapshot, SnapshotHandle):
            raise UserError(f"abort takes a snapshot that fork gave, not {type(snapshot).__name__}")
        with self._entered():
            main, found = self.main, self.snapshots.resolve(snapshot)
            more = [attribute(main, "newest_snapshot", found.id)]
            if resume:
                more += [attribute(main, "index", found.resume), *self.locks.withdrawing(main)]
                if main.status == WAITING:             # for what the instruction there wanted
                    more += [attribute(main, "status", READY), attribute(main, "waiting_for", None)]
                elif main.status in (DONE, TRAPPED) and not self._closed:
                    more += [attribute(main, "status", READY), attribute(main, "trap", None),
                             attribute(self, "_first_trap", None), *self.scheduler.adding(main, main.virtual_time)]
            replaced = main.replaced()
            main.restore(found.root, more=more)
            self.snapshots.reclaimer.give(replaced)

    # -- models -----------------------------------------------------------------------------------------------------
    def load_model(self, reference: str, quant: str = "") -> Any:
        """A model from the provider; one object per reference."""
        key = f"{reference}\0{quant}"
        if key not in self._models:
            self._models[key] = self.models.load(reference, quant)
        return self._models[key]

    def named_model(self, name: str) -> Any:
        """The model of a `.model` line."""
        known = self.image.program.models if self.image.program is not None else {}
        if name not in known:
            raise UserError(f"{self.image.name}: no .model line names {name!r}")
        return self.load_model(known[name])

    # -- notes ------------------------------------------------------------------------------------------------------
    def add_trace(self, ctx: Context, event: int, data: int) -> None:
        """A TRACE_EVENT."""
        self.events.append((ctx.id, ctx.retired, event, data))
        if self.trace is not None:
            self.trace("event", {"context": ctx.id, "retired": ctx.retired, "event": event, "data": data})

    def observe(self, ctx: Context, what: str, look: Callable[[], Any]) -> Any:
        """A value from outside, through the log of the run."""
        return self.recorder.observe(ctx, what, look)

    @property
    def retired(self) -> int:
        """Instructions completed by all contexts."""
        live = sum(c.retired for c in self.scheduler.contexts.values() if c is not self.main)
        return self.main.retired + live + self._retired_before

    @property
    def stats(self) -> dict[str, Any]:
        """Counters of the run so far."""
        with self._entered():
            return {"instructions": self.retired, "seconds": self.seconds, "contexts": len(self.scheduler.contexts),
                    "snapshots": len(self.snapshots.live()), "reclaimer": self.snapshots.reclaimer.stats,
                    "joined_launches": self.joined_launches,
                    "dropped": {r.name: r.dropped for r in [*self.rings.values(), *self.sinks.values()]
                                if isinstance(r, Ring) and r.dropped},
                    "memory_pages": sum(p.count for p in self.main.memory.pages.values()) + self.memory.shared.count}

    def profile(self) -> list[tuple[str, int, int, int]]:
        """(mnemonic, pc, times executed, nanoseconds) of every instruction executed while profiling."""
        counts, times = self.interpreter.counts, self.interpreter.times
        if counts is None:
            return []
        return [(ins.op.name, pc, n, t) for ins, pc, n, t in
                zip(self.image.instructions, self.image.pcs, counts, times) if n]
