"""Python backend: kernels as rendered Python (plain or under numba), plans walked by Python.

Two uses: reading and stepping through what a kernel does, and an executor that shares no code generator with LLVM's.
`PythonEngine("plain")` needs nothing more; `PythonEngine("numba")` needs the `numba` extra.
"""
from __future__ import annotations

import ctypes
import struct
from typing import Any, Callable

import numpy as np

from m3jit.backends.python import runtime_plain
from m3jit.backends.python.control_word import default_rounding
from m3jit.backends.python.render import identifier, render_python
from m3jit.errors import needs_library
from m3jit.ir.loop import Kernel
from m3jit.ir.plan import (ABANDONED, Barrier, Branch, Copy, Exit, FrameWord, Jump, Launch, Plan, Poll, Retire,
                           Scalar, StoreFrame)

_M64 = 1 << 64
URGENT = 2                                       # a stop word from this on: leave between two kernels


def wrap(v: int) -> int:
    return (v + 2 ** 63) % _M64 - 2 ** 63


def _div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return wrap(q if (a < 0) == (b < 0) else -q)


def _f2i(a: float) -> int:
    if a != a:
        return 0
    return int(max(min(a, 2.0 ** 63), -2.0 ** 63)) if abs(a) < 2.0 ** 63 else (2 ** 63 - 1 if a > 0 else -2 ** 63)


def _float(f: Callable) -> Callable:
    """f on np.float64, for IEEE division and no Python exceptions."""
    return lambda *args: float(f(*map(np.float64, args)))


SCALARS: dict[str, Callable] = {
    "add": lambda a, b: wrap(a + b), "sub": lambda a, b: wrap(a - b), "mul": lambda a, b: wrap(a * b),
    "div": _div, "mod": lambda a, b: wrap(a - _div(a, b) * b),
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: wrap(a << (b & 63)), "shr": lambda a, b: wrap((a % _M64) >> (b & 63)),
    "sar": lambda a, b: a >> (b & 63), "neg": lambda a: wrap(-a), "min": min, "max": max,
    "fadd": _float(np.add), "fsub": _float(np.subtract), "fmul": _float(np.multiply), "fdiv": _float(np.divide),
    "fneg": _float(np.negative), "fsqrt": _float(np.sqrt),
    "fmin": lambda a, b: a if a < b else b, "fmax": lambda a, b: a if a > b else b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "feq": lambda a, b: a == b, "fne": lambda a, b: a != b, "flt": lambda a, b: a < b, "fle": lambda a, b: a <= b,
    "bool_and": lambda a, b: a and b, "bool_or": lambda a, b: a or b, "bool_not": lambda a: not a,
    "select": lambda c, a, b: a if c else b, "i2f": float, "f2i": _f2i, "f2f32": lambda a: np.float32(a),
}
_ELEMENT = {"i8": ctypes.c_int8, "u8": ctypes.c_uint8, "i16": ctypes.c_int16, "u16": ctypes.c_uint16,
            "i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float, "f64": ctypes.c_double,
            "bool": ctypes.c_uint8}


def _element(dtype: str, base: int, index: int) -> Any:
    """Element `index` of an array in memory as a Python number."""
    if dtype in ("f16", "bf16"):
        bits = ctypes.c_uint16.from_address(base + 2 * index).value
        wide = np.uint16(bits).view(np.float16) if dtype == "f16" else np.uint32(bits << 16).view(np.float32)
        return float(wide)
    ctype = _ELEMENT[dtype]
    return ctype.from_address(base + index * ctypes.sizeof(ctype)).value


_ARGUMENT: dict[str, Callable] = {"ptr": int, "i64": int, "i32": int, "f32": np.float32, "f64": np.float64}


class PythonEngine:
    """engine.kernel(kernel)(args), engine.region(plan).run(frame, nthreads); the same interface as the CPU engine."""

    def __init__(self, mode: str = "plain"):
        if mode not in ("plain", "numba"):
            raise ValueError(f"the Python backend runs plain or numba, not {mode!r}")
        if mode == "numba":
            needs_library("numba", "numba", "backend numba")
        self.mode = mode
        self.compiled: dict[str, Callable] = {}      # by digest
        self.launches: dict[str, int] = {}           # kernel name -> times run

    def source(self, kernel: Kernel) -> str:
        return render_python(kernel)

    def function(self, kernel: Kernel) -> Callable:
        """The Python function of a kernel: f(thread, threads, *parameters), pointers as addresses."""
        digest = kernel.digest()
        if digest not in self.compiled:
            self.compiled[digest] = self._compile(kernel)
        return self.compiled[digest]

    def _compile(self, kernel: Kernel) -> Callable:
        if self.mode == "numba":
            from m3jit.backends.python.source_cache import compiled_function
            return compiled_function(kernel)
        names = dict(runtime_plain.namespace(kernel.lanes))
        exec(compile(render_python(kernel), f"<kernel {kernel.name}>", "exec"), names)
        return names[identifier(kernel.name)]

    def kernel(self, kernel: Kernel) -> Callable:
        f = self.function(kernel)

        def call(args: list[Any], nthreads: int = 1) -> None:
            if len(args) != len(kernel.params):
                raise ValueError(f"kernel {kernel.name} takes {len(kernel.params)} arguments, got {len(args)}")
            plain = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
            with default_rounding(), np.errstate(all="ignore"):
                self._launch(f, kernel, plain, nthreads)
        return call

    def _launch(self, f: Callable, kernel: Kernel, args: list[Any], nthreads: int) -> None:
        """Runs the threads' shares one after the other."""
        typed = [_ARGUMENT[p.kind](a) for p, a in zip(kernel.params, args)]
        for t in range(nthreads):
            f(t, nthreads, *typed)
        self.launches[kernel.name] = self.launches.get(kernel.name, 0) + 1

    def region(self, plan: Plan) -> "PythonRegion":
        return PythonRegion(self, plan)


class PythonRegion:
    """Walks a plan; threads of a launch run one after the other."""

    def __init__(self, engine: PythonEngine, plan: Plan):
        self.engine, self.plan = engine, plan

    def bind(self, frame: np.ndarray, nthreads: int = 1) -> Callable[[], int]:
        return lambda: self.run(frame, nthreads)

    def run(self, frame: np.ndarray, nthreads: int = 1) -> int:
        """Sets RETIRED, EXIT and the exit's words; returns the exit number."""
        if frame.size < self.plan.words:
            raise ValueError(
                f"region {self.plan.name}: the frame has {frame.size} words, the plan needs {self.plan.words}"
            )
        with default_rounding(), np.errstate(all="ignore"):
            return self._walk(frame, nthreads)

    def _walk(self, frame: np.ndarray, nthreads: int) -> int:
        retired, block, values, rounds = 0, self.plan.blocks[0], {}, 0
        word = int(frame[FrameWord.STOP])              # 0: nobody can ask to stop
        stop = ctypes.c_int32.from_address(word) if word else ctypes.c_int32(0)

        def value(s: Scalar) -> Any:
            if s.op == "const":
                return s.attrs["value"]
            return values[s]

        def leave(number: int, stores: list[StoreFrame]) -> int:
            for st in stores:
                put(st)
            frame[FrameWord.RETIRED], frame[FrameWord.EXIT] = retired, number
            return number

        def put(st: StoreFrame) -> None:
            v = value(st.value)
            frame[st.word] = struct.unpack("<q", struct.pack("<d", v))[0] if st.value.type in ("f32", "f64") else int(v)

        while True:
            for s in block.body:
                match s:
                    case Scalar(op="const"):
                        pass                           # read where it is used
                    case Scalar():
                        values[s] = self._scalar(s, [value(a) for a in s.args], frame)
                    case Launch():
                        if stop.value >= URGENT and rounds < 2:       # as the CPU backend: not in a later round
                            retired = 0
                            return leave(ABANDONED, [])
                        shared = nthreads if s.parallel and not s.replicated else 1
                        self.engine._launch(
                            self.engine.function(s.kernel), s.kernel, [value(a) for a in s.args], shared
                        )
                    case Copy():
                        ctypes.memmove(value(s.dst), value(s.src), value(s.nbytes))
                    case StoreFrame():
                        put(s)
                    case Retire():
                        retired += s.count
                    case Poll():
                        if stop.value > 0 or retired >= frame[FrameWord.BUDGET]:
                            return leave(s.exit, s.stores)
                        rounds += 1
                    case Barrier():
                        pass                           # launches are done one after the other here
            match block.end:
                case Jump():
                    block = self._enter(block.end.target, block.end.args, value, values)
                case Branch():
                    e = block.end
                    block = self._enter(e.then, e.then_args, value, values) if value(e.cond) else \
                        self._enter(e.other, e.other_args, value, values)
                case Exit():
                    return leave(block.end.exit, block.end.stores)

    @staticmethod
    def _enter(target, args, value, values):
        new = [value(a) for a in args]
        for p, v in zip(target.params, new):
            values[p] = v
        return target

    @staticmethod
    def _scalar(s: Scalar, args: list[Any], frame: np.ndarray) -> Any:
        if s.op == "frame":
            w = int(frame[s.attrs["word"]])
            return struct.unpack("<d", struct.pack("<q", w))[0] if s.type == "f64" else w
        if s.op == "element":
            return _element(s.attrs["dtype"], args[0], args[1])
        return SCALARS[s.op](*args)
