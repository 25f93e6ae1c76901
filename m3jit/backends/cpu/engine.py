"""CPU engine: compiles kernels and plans to native code, keeps it in memory and on disk, runs it.

API (everything others call)
----------------------------
::

    engine = Engine("native")             # or "baseline", "avx2", "avx512", or a CpuTarget
    region = engine.region(plan)          # compiles what is not compiled or cached; the same plan object is kept
    exit = region.run(frame, nthreads=2)  # frame: C-contiguous np.int64 array of >= plan.words words, kept alive by the
                                          # caller; sets frame[RETIRED] and frame[EXIT]; returns the exit number
    call = region.bind(frame, nthreads=2) # the same launch prepared: `exit = call()` costs about 0.3 us
    region.address                        # void region(ptr frame, ptr pool): for native callers; with pool null it runs
                                          # on the calling thread alone
    region.call_address, call.argument    # i64 launch(ptr argument): the bound launch for native callers (uses workers)

    f = engine.kernel(kernel)             # for tests and tools: one kernel alone
    f(args, nthreads=1)                   # args: one entry per kernel parameter; NumPy arrays (written in place) for
                                          # ptr, Python numbers for scalars

    engine.supports(kernel)               # bool;  engine.refusal(kernel) -> str | None says why not
    engine.llvm_ir(kernel_or_plan)        # text
    engine.assembly(kernel_or_plan)       # text
    engine.statistics                     # .compiled .compile_ms .cached .cache_ms .reused; str() is readable
    engine.cache.reason                   # why the disk cache is off, or ""

A region whose plan has no parallel launch and no copy runs on the calling thread whatever nthreads says.  Calls release
the interpreter lock.  Regions may be run from several Python threads at once: one of them gets the worker threads, the
others run alone; results are the same bytes.  Engines may be used from several Python threads.
"""
from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Sequence

import numpy as np

from m3jit.backends.cpu import pool as worker_pool
from m3jit.backends.cpu import batch_region, render, runtime, runtime_batch
from m3jit.backends.cpu.cache import DiskCache
from m3jit.backends.cpu.region import SYMBOL, is_parallel, render_region
from m3jit.backends.cpu.runtime_jobs import ITEM_WORDS, MOST_ITEMS
from m3jit.backends.cpu.target import CpuTarget
from m3jit.ir.loop import Kernel
from m3jit.ir.plan import ABANDONED, Exit, FrameWord, Launch, Plan, PlanBlock, Scalar

_CALLED = ("m3_run", "m3_copy", "m3_copy_grid", *runtime_batch.SYMBOLS)       # by regions
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)


@dataclass
class Statistics:
    """What became of the units (kernels and regions) asked for."""
    compiled: int = 0          # by LLVM
    compile_ms: float = 0.0
    cached: int = 0            # object code found on disk
    cache_ms: float = 0.0
    reused: int = 0            # already loaded in this process

    def __str__(self) -> str:
        return (f"compiled {self.compiled} ({self.compile_ms:.1f} ms), cached {self.cached} ({self.cache_ms:.1f} ms), "
                f"reused {self.reused}")


@functools.cache
def _renderer_version() -> str:
    """Hash of this package's sources and of LLVM's version: code made by another renderer is never loaded."""
    import llvmlite
    import llvmlite.binding as llvm
    h = hashlib.blake2b(f"{llvmlite.__version__} {llvm.llvm_version_info}".encode(), digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        h.update(path.read_bytes())
    return h.hexdigest()


class BoundRegion:
    """A region with its frame: `call()` launches it and returns the exit number."""

    __slots__ = ("region", "frame", "_words", "argument", "_launch")

    def __init__(self, region: "NativeRegion", frame: np.ndarray, nthreads: int):
        self.region, self.frame = region, frame
        pool = region.engine._pool(nthreads) if nthreads > 1 else None
        self._words = (ctypes.c_int64 * 4)(pool.address if pool else 0, region.address, _frame_address(frame, region),
                                           nthreads)
        self.argument = ctypes.addressof(self._words)
        self._launch = region.engine._launch

    def __call__(self) -> int:
        return self._launch(self.argument)


class NativeRegion:
    """A compiled plan."""

    def __init__(self, engine: "Engine", plan: Plan, unit: "_Unit", kernels: list["_Unit"]):
        self.engine, self.plan = engine, plan
        self.address = unit.address
        self.call_address = engine._launch_address
        self.parallel = is_parallel(plan)
        self._keep = (unit, kernels)
        self._bound: tuple[np.ndarray, int, int, BoundRegion] | None = None

    def bind(self, frame: np.ndarray, nthreads: int = 1) -> BoundRegion:
        """Prepares launches with this frame, whose memory must not move.  ValueError: wrong dtype, layout or length.

        After a fork the child may go on using it, on one thread; bind again for more."""
        return BoundRegion(self, frame, nthreads if self.parallel else 1)

    def run(self, frame: np.ndarray, nthreads: int = 1) -> int:
        """Launches the region; returns the exit number."""
        b = self._bound
        generation = self.engine._generation[0]
        if b is None or b[0] is not frame or b[1] != nthreads or b[2] != generation:
            bound = self.bind(frame, nthreads)
            self._bound = (frame, nthreads, generation, bound)
            return bound()
        return b[3]()


class NativeBatch:
    """A plan compiled for several contexts at once (batch_region.py)."""

    def __init__(self, engine: "Engine", plan: Plan, unit: "_Unit", kernels: list["_Unit"]):
        self.engine, self.plan, self.address = engine, plan, unit.address
        self.words, self.room = batch_region.frame_words(plan), batch_region.room(plan)
        self._keep = (unit, kernels)

    def bind(self, frames: np.ndarray, nthreads: int = 1) -> "BoundBatch":
        """Prepares launches with `frames`, int64 [contexts, self.words], C-contiguous; its memory must not move."""
        return BoundBatch(self, frames, nthreads)


class BoundBatch:
    """A plan with the frames of its contexts: `call()` runs all of them; each frame then says where it left, ABANDONED
    where it did not.  stop: an int32 that others may make URGENT meanwhile; it is lowered by the caller."""

    def __init__(self, native: NativeBatch, frames: np.ndarray, nthreads: int):
        if frames.dtype != np.int64 or not frames.flags.c_contiguous or frames.shape[1:] != (native.words,):
            raise ValueError(f"batch {native.plan.name}: frames must be C-contiguous int64 [contexts, {native.words}], "
                             f"got {frames.dtype} {list(frames.shape)}")
        W, n = runtime_batch.Work, len(frames)
        pool = native.engine._pool(nthreads) if nthreads > 1 else None
        self.native, self.frames = native, frames
        self._state, listed = np.zeros(n, np.int64), np.zeros(n, np.int64)
        arguments, links, linked = native.room
        items = np.zeros(max(MOST_ITEMS, n * links) * ITEM_WORDS, np.int64)
        room = np.zeros(max(MOST_ITEMS * arguments, n * linked), np.int64)
        work = self.work = np.zeros(W.WORDS, np.int64)
        work[W.CONTEXTS], work[W.FRAMES], work[W.STRIDE] = n, frames.ctypes.data, 8 * native.words
        work[W.GROUPS], work[W.LIMIT] = 1, MOST_ITEMS
        halt = self._halt = np.zeros(3, np.int64)      # (runtime.py) pointer, skipped, the word
        self.stop = halt[2:].view(np.int32)            # URGENT: everybody who has not left gives up
        for word, array in ((W.ITEMS, items), (W.SLOTS, room), (W.LIST, listed), (W.STATE, self._state),
                            (W.HALT, halt)):
            work[word] = array.ctypes.data
        self._keep = (items, room, listed, halt)
        self._words = (ctypes.c_int64 * 4)(pool.address if pool else 0, native.address, work.ctypes.data, nthreads)
        self._argument, self._launch = ctypes.addressof(self._words), native.engine._launch

    def __call__(self) -> None:
        self._state[:] = 0
        self._halt[:2] = self.stop.ctypes.data, 0
        self.frames[:, FrameWord.RETIRED], self.frames[:, FrameWord.EXIT] = 0, ABANDONED
        self._launch(self._argument)

    @property
    def launches(self) -> tuple[int, int]:
        """(items executed, launches that were joined to another context's) since it was bound."""
        return int(self.work[runtime_batch.Work.LAUNCHED]), int(self.work[runtime_batch.Work.JOINED])


def _frame_address(frame: np.ndarray, region: NativeRegion) -> int:
    if not isinstance(frame, np.ndarray) or frame.dtype != np.int64 or not frame.flags.c_contiguous:
        raise ValueError(f"region {region.plan.name}: the frame must be a C-contiguous int64 array, got "
                         f"{getattr(frame, 'dtype', type(frame).__name__)}")
    if frame.size < region.plan.words:
        raise ValueError(f"region {region.plan.name}: the frame has {frame.size} words, the plan needs "
                         f"{region.plan.words}")
    return frame.ctypes.data


class _Unit:
    """Loaded code: the linker's handle and the address of its function."""
    __slots__ = ("tracker", "address")

    def __init__(self, tracker, symbol: str):
        self.tracker, self.address = tracker, tracker[symbol]


class Engine:
    """Compiles for one target.  TargetError: the host cannot run the level.

    counted: for tests of interrupts; every look at a stop word within a launch adds two to it (`runtime.look`)."""

    def __init__(self, target: CpuTarget | str = "native", cache: DiskCache | None = None, counted: bool = False):
        import llvmlite.binding as llvm
        self._llvm, self.counted = llvm, counted
        self.target = CpuTarget.for_level(target) if isinstance(target, str) else target
        self.cache = cache if cache is not None else DiskCache()
        self.statistics = Statistics()
        self._lock = threading.RLock()
        self._machine = self.target.machine()
        self._layout = str(self._machine.target_data)
        self._units: dict[str, _Unit] = {}
        # by id of plan
        self._regions: weakref.WeakValueDictionary[int, NativeRegion] = weakref.WeakValueDictionary()
        self._names = 0
        if self.target.runnable:
            # The older linker ends the process where the address space has no room near by for all parts of an object.
            self._jit = llvm.create_lljit_compiler(self.target.machine(jit=True), use_jit_link=True)
            self._imports = runtime.imports()
            self._runtime = self._unit("runtime", lambda: runtime.runtime_text(self.target, counted), "m3_launch",
                                       (*_CALLED, "m3_worker", "m3_stop"))
            for name in _CALLED:
                self._imports[name] = self._runtime.tracker[name]
            self._launch_address = self._runtime.address
            self._launch = _LAUNCH(self._launch_address)
            self.statistics = Statistics()
        self._generation = worker_pool.generation

    # -- what others call -------------------------------------------------------------------------------------
    def region(self, plan: Plan) -> NativeRegion:
        """Native code of a plan; the caller keeps it."""
        with self._lock:
            kept = self._regions.get(id(plan))         # it has the plan: no other can have its id meanwhile
            if kept is not None:
                self.statistics.reused += 1
                return kept
            native = NativeRegion(self, plan, *self._region_unit(plan, render_region(plan, self.target, Kernel.digest)))
            self._regions[id(plan)] = native
            return native

    def batch(self, plan: Plan) -> NativeBatch:
        """Native code of a plan for several contexts at once; the caller keeps it."""
        with self._lock:
            text = batch_region.render_batch_region(plan, self.target, Kernel.digest)
            return NativeBatch(self, plan, *self._region_unit(plan, text))

    def _region_unit(self, plan: Plan, text: str) -> tuple["_Unit", list["_Unit"]]:
        """Code of a region's text, and of the kernels it calls."""
        kernels: dict[str, Kernel] = {}
        for block in plan.blocks:
            for s in block.body:
                if isinstance(s, Launch):
                    kernels.setdefault(s.kernel.digest(), s.kernel)
        units = {d: self._kernel_unit(d, k) for d, k in kernels.items()}
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        imports = {s(d): u.tracker[s(d)] for d, u in units.items()
                   for s in (render.kernel_symbol, render.run_symbol, render.grid_symbol)}
        return self._unit("region " + key, lambda: text, SYMBOL, imports=imports), list(units.values())

    def function(self, text: str, symbol: str, imports: dict[str, int]) -> "_Unit":
        """Native code of a function in LLVM IR that calls `imports` (name -> address), for entries from other
        languages; `.address` is valid as long as the result is kept.  Not cached: such text holds addresses of this
        process."""
        with self._lock:
            return self._link(self._machine.emit_object(self._optimised(text)), symbol, (), imports)

    def kernel(self, kernel: Kernel) -> Callable[[Sequence, int], None]:
        """A function of (list of NumPy arrays and numbers in parameter order, nthreads) that runs the kernel."""
        region = self.region(_single_launch(kernel))
        first = int(FrameWord.FIRST_FREE)

        def call(args: Sequence, nthreads: int = 1) -> None:
            if len(args) != len(kernel.params):
                raise ValueError(f"kernel {kernel.name} takes {len(kernel.params)} arguments, got {len(args)}")
            frame = np.zeros(region.plan.words, np.int64)
            frame[FrameWord.BUDGET] = np.iinfo(np.int64).max
            for i, (p, a) in enumerate(zip(kernel.params, args)):
                if p.kind == "ptr":
                    if not a.flags.c_contiguous:
                        raise ValueError(f"kernel {kernel.name}: argument {p.name} must be C-contiguous")
                    frame[first + i] = a.ctypes.data
                elif p.kind in ("f32", "f64"):
                    frame[first + i:first + i + 1].view(np.float64)[0] = a
                else:
                    frame[first + i] = int(a)
            region.run(frame, nthreads)

        call.region = region
        return call

    def refusal(self, kernel: Kernel) -> str | None:
        """Why the kernel cannot be compiled here, or None."""
        return render.unsupported(kernel)

    def supports(self, kernel: Kernel) -> bool:
        return self.refusal(kernel) is None

    def llvm_ir(self, what: Kernel | Plan) -> str:
        """LLVM IR text as rendered, before any pass."""
        if isinstance(what, Plan):
            return render_region(what, self.target, Kernel.digest)
        return render.render_kernel(what, self.target, what.digest())

    def assembly(self, what: Kernel | Plan) -> str:
        """Assembly text of the code that would run."""
        with self._lock:
            return self._machine.emit_assembly(self._optimised(self.llvm_ir(what)))

    # -- compiling --------------------------------------------------------------------------------------------
    def _kernel_unit(self, digest: str, kernel: Kernel) -> _Unit:
        return self._unit("kernel " + digest, lambda: render.render_kernel(kernel, self.target, digest, self.counted),
                          render.kernel_symbol(digest), (render.run_symbol(digest), render.grid_symbol(digest)))

    def _unit(self, name: str, text: Callable[[], str], symbol: str, more: Sequence[str] = (),
              imports: dict[str, int] | None = None) -> _Unit:
        """Loaded code of `name` (unique for its content): from this process, the disk, or LLVM."""
        unit = self._units.get(name)
        if unit is not None:
            self.statistics.reused += 1
            return unit
        start = time.perf_counter()
        kind = f"{name}{'|counted' if self.counted else ''}"
        key = hashlib.blake2b(f"{kind}|{self.target.key}|{_renderer_version()}".encode(), digest_size=20).hexdigest()
        image = self.cache.load(key)
        fresh = image is None
        if fresh:
            image = self._machine.emit_object(self._optimised(text()))
        unit = self._units[name] = self._link(image, symbol, more, imports or {})
        ms = (time.perf_counter() - start) * 1e3
        if fresh:
            self.statistics.compiled += 1
            self.statistics.compile_ms += ms
            self.cache.store(key, image)
        else:
            self.statistics.cached += 1
            self.statistics.cache_ms += ms
        return unit

    def _optimised(self, text: str):
        llvm = self._llvm
        module = llvm.parse_assembly(
            f'target triple = "{self.target.triple}"\ntarget datalayout = "{self._layout}"\n{text}')
        module.verify()
        builder = llvm.create_pass_builder(self._machine, llvm.create_pipeline_tuning_options(speed_level=2))
        passes = llvm.create_new_module_pass_manager()
        passes.add_sroa_pass()
        passes.run(module, builder)
        return module

    def _link(self, image: bytes, symbol: str, more: Sequence[str], imports: dict[str, int]) -> _Unit:
        library = self._llvm.JITLibraryBuilder().add_object_img(image).export_symbol(symbol)
        for name in more:
            library.export_symbol(name)
        for name, address in {**self._imports, **imports}.items():
            library.import_symbol(name, address)
        self._names += 1
        return _Unit(library.link(self._jit, f"unit{self._names}"), symbol)

    # -- threads ----------------------------------------------------------------------------------------------
    def _pool(self, nthreads: int) -> worker_pool.Pool:
        pool = worker_pool.shared(self._runtime.tracker["m3_worker"], self._runtime.tracker["m3_stop"],
                                  (self._jit, self._runtime))
        pool.grow(nthreads)
        return pool


def _single_launch(kernel: Kernel) -> Plan:
    """A plan that runs one kernel with its arguments in the frame words from FIRST_FREE on."""
    body: list = []
    args = []
    for i, p in enumerate(kernel.params):
        word = int(FrameWord.FIRST_FREE) + i
        value = Scalar("frame", "i64" if p.kind == "i32" else p.kind, attrs={"word": word})
        body.append(value)
        args.append(value)
    body.append(Launch(kernel, args, label=kernel.name))
    block = PlanBlock("entry", body=body, end=Exit(0, []))
    return Plan(f"launch_{kernel.name}", int(FrameWord.FIRST_FREE) + len(kernel.params), [block])
