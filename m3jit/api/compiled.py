"""`CompiledProgram`: a program as a Python function, with one native region per set of argument types.

How a call goes: the generated `fast` function (m3jit.api.call_code) looks up the arguments' dtypes and shapes; what it
finds has a frame with all dimensions filled in, so only pointers and numbers are stored before the region is entered.
A first call with new dimensions binds a frame; one with new types compiles a region.  What does not compile, and a
region that leaves before the program's end (it is about to trap, or meets an instruction of the slow path), runs from
the start on the interpreter, which gives the same bytes and the exact error.
"""
from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from m3jit.api import arguments
from m3jit.api.variants import Call, Variant
from m3jit.errors import M3Error, UserError
from m3jit.ir.plan import ABANDONED
from m3jit.ir.tensor import Function, Leave, Sym, TensorType, Type, dim_syms
from m3jit.isa.fields import BANK_LETTERS, Reg
from m3jit.isa.types import Tensor
from m3jit.vm import regions as region_factory
from m3jit.vm.native import type_of_value
from m3jit.vm.vm import VM

MAX_VARIANTS = 32               # compiled sets of types; the oldest goes
MAX_CALLS = 64                  # bound sets of dimensions; the oldest goes
MAX_ARENAS = 1 << 28            # bytes of temporaries that bound frames may keep together, beyond the newest
Key = tuple[str, int]


@dataclass(frozen=True)
class Interface:
    """Where the program starts and which registers are set before and read after a run."""
    start: int
    inputs: dict[str, Reg]
    outputs: dict[str, Reg]

    @property
    def input_keys(self) -> list[Key]:
        """The compiler's names of the inputs, in order."""
        return [key_of(r) for r in self.inputs.values()]

    @property
    def output_keys(self) -> list[Key]:
        """The compiler's names of the outputs, in order."""
        return [key_of(r) for r in self.outputs.values()]


def key_of(reg: Reg) -> Key:
    """The compiler's name of a register (m3jit.ir.lift)."""
    return BANK_LETTERS[reg.bank], reg.index


class View:
    """The program as lifting sees it, and what registers hold before a run."""

    def __init__(self, program: Any, models: Any):
        from m3jit.vm.jit import ContextRegisters
        self.vm = VM(program, backend="interpreter", models=models)
        self.loop_heads = self.vm.image.loop_heads
        self.at = self.vm.image.at
        self.constant = self.vm.machine.constant
        self.unwritten = ContextRegisters(self.vm.main, self.vm.machine)


class Registers:
    """Live-in values: the arguments, and what a fresh context holds."""

    def __init__(self, values: dict[Key, Any], view: View):
        self.values, self.view = values, view

    def get(self, key: Any) -> Any:
        """The value of a register; None: it was never written."""
        return self.values[key] if key in self.values else self.view.unwritten.get(key)

    def pick(self, guards: Any) -> list[Any]:
        """The values of guards.keys (m3jit.vm.native.Guards)."""
        return [self.get(key) for key in guards.keys]


class CompiledProgram:
    """A program as a function; made by `m3jit.compile`.

    f(*arrays_and_numbers, out=None): arguments in the order of `inputs`, or by register name; gives the value of the
    one output, or a tuple.  out: an array, or a sequence with one array (or None) for each output, that takes the
    results.  Outputs are the caller's own; BF16 and block-quantised ones come as `m3jit.Tensor`.  May be called from
    any number of threads at once; native code runs without the interpreter lock."""

    def __init__(self, program: Any, interface: Interface, *, threads: int | None, backend: str, models: Any = None):
        self.program, self.backend, self.models = program, backend, models
        self.threads = threads or len(os.sched_getaffinity(0))
        if not 1 <= self.threads <= 256:
            raise UserError(f"threads: 1 to 256, got {threads}")
        self.inputs, self.outputs = tuple(interface.inputs), tuple(interface.outputs)
        self._interface = interface
        self._in_keys, self._out_keys = interface.input_keys, interface.output_keys
        self._view = View(program, models)
        self._compiler = self._make_compiler()
        self._lock = threading.RLock()
        self._variants: OrderedDict[tuple, list[Variant]] = OrderedDict()
        self._tables: dict[str, dict[tuple, Callable]] = {}
        self._calls: OrderedDict[tuple, Call] = OrderedDict()
        self._fast_of: dict[str, Callable] = {}
        self._fast: Callable[..., Any] = self._slow

    def _make_compiler(self) -> Any:
        if self.backend == region_factory.INTERPRETER:
            return None
        known = [b for b in region_factory.BACKENDS if b != "auto"]
        if self.backend not in known:
            raise UserError(f"no backend {self.backend!r} to compile with; available: {', '.join(known)}")
        from m3jit.vm.jit import Compiler
        return Compiler(region_factory.engine(self.backend), region_factory.weights(), self.threads, name=self.backend)

    # -- calling ----------------------------------------------------------------------------------------------------
    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any:
        if named or len(args) != len(self.inputs):
            args = self._ordered(args, named)
        return self._fast(*args, out)

    def _ordered(self, args: tuple, named: dict[str, Any]) -> tuple:
        """Arguments in the order of `inputs`."""
        rest = self.inputs[len(args):]
        unknown = [n for n in named if n not in rest]
        missing = [n for n in rest if n not in named]
        if len(args) > len(self.inputs) or unknown or missing:
            problem = f"{', '.join(unknown)} not expected" if unknown else \
                f"{', '.join(missing)} not given" if missing else f"{len(args)} arguments"
            raise UserError(f"{self.program.name}: takes {', '.join(self.inputs) or 'no arguments'}; {problem}")
        return (*args, *(named[n] for n in rest))

    def _slow(self, *args_and_out: Any) -> Any:
        """A call that the fast path does not know: convert the arguments, bind or compile, go."""
        *args, out = args_and_out
        values = [arguments.register_value(a, n) for a, n in zip(args, self.inputs)]
        if out is not None:
            out = self._outs(out)
        kinds = "".join("t" if isinstance(v, Tensor) else "i" if isinstance(v, int) else "f" for v in values)
        key = tuple(x for v in values if isinstance(v, Tensor)
                    for x in (v.dtype if v.dtype.is_block or v.dtype.name == "BF16" else v.dtype.numpy, v.shape))
        run = self._table(kinds).get(key) or self._bind(kinds, key, values)
        return run(*(v.data if isinstance(v, Tensor) else v for v in values), out)

    def _outs(self, out: Any) -> tuple:
        outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if len(outs) != len(self.outputs):
            raise UserError(f"out: expected {len(self.outputs)} arrays (None for a number), got {len(outs)}")
        return outs

    def _table(self, kinds: str) -> dict[tuple, Callable]:
        """Calls by dtypes and shapes for arguments of these kinds; also makes that kind's fast path the current one."""
        table = self._tables.get(kinds)
        if table is None:
            from m3jit.api.call_code import fast_path
            with self._lock:
                table = self._tables.setdefault(kinds, {})
                self._fast_of.setdefault(kinds, fast_path(kinds, self.inputs, table.get, self._slow, self._outs))
        self._fast = self._fast_of[kinds]
        return table

    # -- binding ----------------------------------------------------------------------------------------------------
    def _bind(self, kinds: str, key: tuple, values: list[Any]) -> Callable:
        with self._lock:
            table = self._table(kinds)
            if key in table:
                return table[key]
            found, why = self._variant(values)
            call = self._interpreted(values, why) if found is None else self._native(*found)
            self._calls[kinds, key] = call
            table[key] = call.run
            while len(self._calls) > MAX_CALLS or \
                    (len(self._calls) > 1 and sum(c.arena for c in self._calls.values()) > MAX_ARENAS + call.arena):
                (old_kinds, old_key), _ = self._calls.popitem(last=False)
                self._tables[old_kinds].pop(old_key, None)
            return call.run

    def _interpreted(self, values: list[Any], why: str) -> Call:
        types = [(v.dtype, v.shape) if isinstance(v, Tensor) else None for v in values]

        def run(*args_and_out: Any) -> Any:
            *args, out = args_and_out
            return self._interpret([Tensor(*t, a) if t else a for t, a in zip(types, args)], out)
        return Call(run, f"interpreted: {why}")

    def _interpret(self, values: list[Any], out: tuple | None) -> Any:
        """One run on a machine of its own, on the interpreter."""
        vm = VM(self.program, backend="interpreter", models=self.models)
        for reg, v in zip(self._interface.inputs.values(), values):
            vm.set(reg, Tensor(v.dtype, v.shape, np.array(v.data)) if isinstance(v, Tensor) else v)
        vm.run()
        results = [arguments.python_value(vm.get(r), n) for n, r in self._interface.outputs.items()]
        if out is not None:
            results = [r if o is None else arguments.into(o, r, n) for o, r, n in zip(out, results, self.outputs)]
        return results[0] if len(results) == 1 else tuple(results)

    # -- compiling --------------------------------------------------------------------------------------------------
    def _variant(self, values: list[Any]) -> tuple[tuple[Variant, dict[Sym, int]] | None, str]:
        """A variant that fits, with its symbols' values; or why there is none."""
        if self._compiler is None:
            return None, "the interpreter was asked for"
        regs = Registers(dict(zip(self._in_keys, values)), self._view)
        types = tuple(type_of_value(k, v) for k, v in zip(self._in_keys, values))
        for variant in self._variants.get(types, ()):
            syms = variant.compiled(self.threads).matches(regs)
            if syms is not None:
                return (variant, syms), ""
        actual = {t.shape[0]: v.shape[0] for t, v in zip(types, values)
                  if isinstance(t, TensorType) and t.shape and isinstance(t.shape[0], Sym)}
        variant, why = self._compile(types, actual)
        if variant is None:
            return None, why
        syms = variant.compiled(self.threads).matches(regs)
        if syms is None:
            return None, "its own guards do not hold"
        self._variants.setdefault(types, []).append(variant)
        while sum(map(len, self._variants.values())) > MAX_VARIANTS:
            self._drop_oldest()
        return (variant, syms), ""

    def _drop_oldest(self) -> None:
        first = next(iter(self._variants))
        self._variants[first].pop(0)
        if not self._variants[first]:
            del self._variants[first]

    def _lift(self, types: tuple[Type | None, ...], actual: dict[Sym, int]) -> tuple[Function | None, str]:
        from m3jit.ir.lift import Entry, Lifter
        given = dict(zip(self._in_keys, types))

        def type_of(key: Any) -> Type | None:
            return given[key] if key in given else type_of_value(key, self._view.unwritten.get(key))
        entry = Entry(self._interface.start, type_of, actual, live_out=frozenset(self._out_keys))
        lifter = Lifter(self._view, entry)
        try:
            f = lifter.lift("program")
        except M3Error as e:
            return None, str(e)                  # a constant that cannot be had: the machine traps there
        ends = [b.end for b in lifter.blocks if isinstance(b.end, Leave)]
        if f is None or not any(self._is_end(lv) for lv in ends):
            return None, next((f"{lv.reason} (pc 0x{lv.pc:04x})" for lv in ends), "it never ends")
        return f, ""

    def _is_end(self, leave: Leave) -> bool:
        ins = self._view.at(leave.pc)
        return ins is not None and ins.op.control in ("halt", "ret")

    def _compile(self, types: tuple[Type | None, ...], actual: dict[Sym, int]) -> tuple[Variant | None, str]:
        f, why = self._lift(types, actual)
        if f is None:
            return None, why
        work = [n.type.nbytes() for n in (*f.nodes(), *f.inputs.values())
                if n.is_tensor and n.op not in ("imm", "reshape")]
        loop = any(b.poll for b in f.blocks)
        with self._compiler.lock:
            region, native = self._compiler.compile(f, "program")
        if region.kv:
            return None, "it keeps a key/value stream"
        if region.cells_in:
            return None, "it keeps a recurrent state"
        known = {s for n in f.inputs.values() if n.is_tensor for d in n.type.shape for s in dim_syms(d)}
        work = [d for d in work if known.issuperset(dim_syms(d))]         # inputs that nobody reads are gone
        done = [i for i, e in enumerate(region.exits) if self._ends_at(e.pc)]
        polls = {i for i, e in enumerate(region.exits) if e.reason == "poll"} | {ABANDONED} if loop else set()
        return Variant(types, f, region, native, self._compiler.weights.pointer, work, done, polls), ""

    def _ends_at(self, pc: int) -> bool:
        ins = self._view.at(pc)
        return ins is not None and ins.op.control in ("halt", "ret")

    def _native(self, variant: Variant, syms: dict[Sym, int]) -> Call:
        from m3jit.api.call_code import bound_call
        return bound_call(self, variant, syms)

    # -- for native callers -----------------------------------------------------------------------------------------
    def native(self, *types: Any, threads: int | None = None) -> Any:
        """A C function for arguments of the given types: see `m3jit.api.native_function.NativeFunction`.

        types: one for each input: text such as "f32[n]", "f32[n, 64]", "i64", "f64", or a sample value.
        UnsupportedError when the program has no native form for them."""
        from m3jit.api.native_function import make
        return make(self, types, threads)

    def numba(self, *types: Any, threads: int | None = None) -> Callable[..., Any]:
        """The program as a function that `@numba.njit` code can call, for arguments of the given types (`native`)."""
        from m3jit.api.native_function import numba_function
        return numba_function(self.native(*types, threads=threads))

    # -- looking at it ----------------------------------------------------------------------------------------------
    def report(self) -> str:
        """One line for each set of dtypes and shapes seen: how it runs, and why when that is the interpreter."""
        with self._lock:
            return "\n".join(f"{self._say(kinds, key)}: {call.note}" +
                             (f"; left {call.left} times for the interpreter" if call.left else "")
                             for (kinds, key), call in self._calls.items())

    @staticmethod
    def _say(kinds: str, key: tuple) -> str:
        parts, i = [], 0
        for k in kinds:
            if k == "t":
                parts.append(f"{key[i]}[{', '.join(map(str, key[i + 1]))}]")
                i += 2
            else:
                parts.append({"i": "integer", "f": "float"}[k])
        return ", ".join(parts) or "no arguments"

    def __repr__(self) -> str:
        return f"<m3jit.CompiledProgram {self.program.name}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}>"
