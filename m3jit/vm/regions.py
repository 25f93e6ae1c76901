"""Where the interpreter meets compiled code and the eager namespace; both come on first use."""
from __future__ import annotations

import functools
import os
from typing import Any

from m3jit.errors import UnsupportedError

INTERPRETER = "interpreter"
CPU_LEVELS = ("native", "avx512", "avx2", "baseline")
BACKENDS = ("auto", INTERPRETER, "cpu", *(f"cpu:{level}" for level in CPU_LEVELS), "python", "numba")
CPU_LEVEL = "M3JIT_CPU"                    # the environment's level where the backend names none
_PARTIAL = ("opencl", "cuda")


def make(vm: Any, backend: str, threads: int | None) -> Any:
    """The compiled regions of a machine, None for the interpreter alone.

    "auto" compiles for this CPU what is worth it; "cpu" (or cpu:LEVEL), "python" and "numba" compile everything that
    can be compiled, at once."""
    check(backend)
    if backend == INTERPRETER:
        return None
    if backend == "auto":
        return DeferredRegions(vm, threads)
    return _jit(vm, backend, threads)


def check(backend: str) -> None:
    """UnsupportedError: there is no such backend, it runs no programs, what it needs is not installed, or this CPU is
    not of its level."""
    if backend in _PARTIAL:
        raise UnsupportedError(f"backend {backend}: runs single kernels only in this version, not whole programs; "
                               f"use --backend cpu")
    if backend not in BACKENDS:
        raise UnsupportedError(f"no backend {backend!r}; available: {', '.join(BACKENDS)}")
    if backend not in ("auto", INTERPRETER) or backend == "auto" and CPU_LEVEL in os.environ:
        engine(backend)                                # it is wanted as soon as there is a machine


def _jit(vm: Any, backend: str, threads: int | None) -> Any:
    from m3jit.vm.jit import Compiler, Jit, shared_points
    n = threads or len(os.sched_getaffinity(0))
    # A named backend that cannot run says so now.
    code = LazyEngine(backend) if backend == "auto" else engine(backend)
    compiler = Compiler(code, weights(), n, name=backend)
    points = shared_points(vm.image, vm.models, backend, n)
    return Jit(vm.image, vm.machine, compiler, vm.stop_word, eager=backend != "auto", points=points)


class DeferredRegions:
    """Compiled regions of "auto" that load the compiler at the first sign of work for it: an instruction on tensors at
    an entry point's reach, or an entry point that is visited again and again.  A short program never pays for it."""
    VISITS = 8

    def __init__(self, vm: Any, threads: int | None):
        from m3jit.vm.image import entry_points
        self._vm, self._threads, self._real, self._interpreter = vm, threads, None, None
        self.entries = tuple(entry_points(vm.image))
        self._visits = dict.fromkeys(self.entries, 0)
        self._busy = any(ins.op.route == "value" and ins.op.code not in _SCALAR_CODES for ins in vm.image.instructions)

    def enter(self, ctx: Any, pc: int) -> int | None:
        if self._real is None:
            self._visits[pc] += 1
            if not self._busy and self._visits[pc] < self.VISITS:
                return None
        return self.real.enter(ctx, pc)

    @property
    def real(self) -> Any:
        """The compiler's side; made on first use."""
        if self._real is None:
            self._real = _jit(self._vm, "auto", self._threads)
            self.__dict__.setdefault("enter", self._real.enter)      # from now on without this object in between
            self._real.interpreter = self._interpreter
            if self._interpreter is not None:
                for pc in self._real.entries:        # other machines of the program may have found more
                    self._interpreter.mark_entry(pc)
        return self._real

    @property
    def interpreter(self) -> Any:
        return self._interpreter

    @interpreter.setter
    def interpreter(self, value: Any) -> None:
        self._interpreter = value
        if self._real is not None:
            self._real.interpreter = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


_SCALAR_CODES = (0x7C, 0x0C)               # ALU and COMPARE: numbers, not tensors


class LazyEngine:
    """A code generator that is loaded when the first region is compiled: short programs never need it."""

    def __init__(self, backend: str):
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(engine(self._backend), name)


@functools.cache
def engine(backend: str) -> Any:
    """The code generator of a backend; one for the process, with what it has compiled."""
    if backend in ("python", "numba"):
        from m3jit.backends.python.engine import PythonEngine
        return PythonEngine("plain" if backend == "python" else "numba")
    from m3jit.backends.cpu.engine import Engine
    return Engine(backend.partition(":")[2] or os.environ.get(CPU_LEVEL, "native"))


@functools.cache
def weights() -> Any:
    """The process's store of repacked weights."""
    from m3jit.vm.weights import WeightStore
    return WeightStore()


def eager_namespace(machine: Any) -> Any:
    """An `EagerXp` whose memory reads go to the machine's running context."""
    from m3jit.ir.eager import EagerXp

    class MachineXp(EagerXp):
        """The eager namespace with the machine behind it."""

        def read_block(self, address: int, shape: tuple[int, ...], dtype: Any) -> Any:
            """A block of addressed memory as a tensor."""
            if any(d < 0 for d in shape):
                raise self.error(f"shape {list(shape)} of a block in memory; every dimension must be given")
            return machine.ctx.memory.read_tensor(address, dtype, shape)
    return MachineXp()
