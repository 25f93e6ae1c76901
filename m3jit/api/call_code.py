"""Generated Python for the calls of a compiled program: no lookups or objects but the ones that differ per call.

Two functions are written.  `fast(args.., out)`: the table of bound calls by dtypes and shapes.  `run(args.., out)`: one
frame of a region, with every word filled in except the addresses of this call's arrays and its numbers.

The address of an array's first element is read from the array object (m3jit.vm.array_address).
"""
from __future__ import annotations

import ctypes
from typing import Any, Callable

import numpy as np

from m3jit.api import arguments
from m3jit.api.variants import Call
from m3jit.ir.plan import FrameWord
from m3jit.ir.tensor import Sym, TensorType, eval_dim
from m3jit.isa.types import BF16, Tensor
from m3jit.vm import array_address
from m3jit.vm.native import NO_BUDGET

def _address(name: str) -> str:
    return f"slot(id({name}) + {array_address.HEADER}).value" if array_address.IN_HEADER else \
        f"{name}.__array_interface__['data'][0]"


def fast_path(kinds: str, names: tuple[str, ...], get: Callable, slow: Callable, outs: Callable) -> Callable:
    """The function that calls what `get` has for these dtypes and shapes, else `slow`."""
    args = [f"a{i}" for i in range(len(kinds))]
    tests = [f"{a}.__class__ is {'nd' if k == 't' else 'int' if k == 'i' else 'float'}" for a, k in zip(args, kinds)]
    key = ", ".join(f"{a}.dtype, {a}.shape" for a, k in zip(args, kinds) if k == "t")
    arrays = f"({key},)" if key else "()"
    lines = [f"def fast({', '.join([*args, 'out'])}):",
             f"    if {' and '.join(tests) or 'True'}:",
             f"        run = get({arrays})",
             "        if run is not None:",
             "            if out is not None:",
             "                out = outs(out)",
             f"            return run({', '.join([*args, 'out'])})",
             f"    return slow({', '.join([*args, 'out'])})"]
    env = {"nd": np.ndarray, "get": get, "slow": slow, "outs": outs}
    exec("\n".join(lines), env)
    return env["fast"]


def bound_call(program: Any, variant: Any, syms: dict[Sym, int]) -> Any:
    """The call of a variant with these dimensions.  It keeps as many frames as threads have been in it at once."""
    threads = variant.threads_for(syms, program.threads)
    writer = _Writer(program, variant, syms)
    make = writer.function()
    compiled = variant.compiled(threads)
    free: list[Callable] = []
    pop, push = free.pop, free.append

    def new() -> Callable:
        layout = compiled._new_layout(syms)
        return make(layout, writer.prepared(layout))
    first = new()
    push(first)
    arena = first.layout.arena.nbytes                # type: ignore[attr-defined]

    args = ", ".join([*(f"a{i}" for i in range(len(variant.types))), "out"])
    env = {"pop": pop, "push": push, "new": new}
    exec(_CALL.format(args=args), env)
    writer.call = Call(env["call"], f"compiled, {threads} thread{'s' if threads > 1 else ''}", arena)
    return writer.call


_CALL = """
def call({args}):
    try:
        run = pop()
    except IndexError:
        run = new()
    try:
        return run({args})
    finally:
        push(run)
"""


def stored_shape(dtype: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the array that holds a tensor: rows of packed bytes for block types."""
    return (*shape[:-1], dtype.row_bytes(shape[-1])) if dtype.is_block else shape


def over(dtype: Any, array: np.ndarray) -> Tensor:
    """The tensor an array of stored values holds."""
    shape = (*array.shape[:-1], array.shape[-1] // dtype.nbytes * dtype.block) if dtype.is_block else array.shape
    return Tensor(dtype, shape, array)


class _Writer:
    """Writes `run` for one variant and one set of dimensions."""

    def __init__(self, program: Any, variant: Any, syms: dict[Sym, int]):
        self.program, self.variant, self.region, self.syms = program, variant, variant.region, syms
        self.index = {k: i for i, k in enumerate(program._in_keys)}
        self.tensor = [isinstance(t, TensorType) for t in variant.types]
        self.env: dict[str, Any] = {"slot": array_address.slot, "empty": np.empty, "plain": arguments.plain,
                                    "Tensor": Tensor, "over": over, "interpret": self._interpret, "take": self._take}
        self.given = variant.given(program._out_keys)
        self.call: Any = None

    def _interpret(self, args: tuple, out: Any) -> Any:
        """The region left before the program's end: run it from the start on the interpreter."""
        self.call.left += 1
        values = [Tensor(t.dtype, a.shape, a) if isinstance(t, TensorType) else a
                  for t, a in zip(self.variant.types, args)]
        return self.program._interpret(values, out)

    def _take(self, out: Any, i: int, shape: tuple, dtype: np.dtype, args: tuple) -> np.ndarray:
        """The array that output i is computed into: the caller's, or a fresh one where that overlaps an argument."""
        if out is None or out[i] is None:
            return np.empty(shape, dtype)
        o = out[i]
        arguments.check_out(o, dtype, self.shape_of[i], self.program.outputs[i])
        apart = not any(isinstance(a, np.ndarray) and np.may_share_memory(o, a) for a in (*args, *out[:i]))
        return o if apart and o.flags.c_contiguous and o.flags.aligned else np.empty(shape, dtype)

    # -- frames -----------------------------------------------------------------------------------------------------
    def prepared(self, layout: Any) -> dict[str, Any]:
        """Fill in what is the same in every call; what `make` needs of a frame."""
        from m3jit.vm.stopping import StopWord
        frame, stop = layout.frame, StopWord()
        # `make` keeps it for loops only.
        frame[FrameWord.STOP] = stop.word.ctypes.data if self.variant.polls else 0
        frame[FrameWord.BUDGET] = NO_BUDGET
        words = memoryview(frame).cast("B").cast("q")
        for key, word, how in self.region.scalars:
            if key not in self.index:                  # the random stream, the flags
                words[word] = self.program._view.unwritten.get(key)
        launch, argument = layout.call, None
        if hasattr(layout.call, "argument"):
            launch = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_size_t)(self.variant.native.call_address)
            argument = layout.call.argument
        return {"w": words, "d": memoryview(frame).cast("B").cast("d"), "launch": launch, "argument": argument,
                "stop": stop}

    # -- source -----------------------------------------------------------------------------------------------------
    def function(self) -> Callable:
        """make(layout, prepared) -> run."""
        args = [f"a{i}" for i in range(len(self.tensor))]
        body = self._arguments(args) + self._outputs(args) + self._launch(args) + self._results(args)
        lines = ["def make(layout, p):",
                 "    w, d, launch, argument, stop = p['w'], p['d'], p['launch'], p['argument'], p['stop']",
                 f"    def run({', '.join([*args, 'out'])}):",
                 *("        " + line for line in body),
                 "    run.layout = layout",
                 "    return run"]
        self.source = "\n".join(lines)
        exec(compile(self.source, f"<call of {self.program.program.name}>", "exec"), self.env)
        return self.env["make"]

    def _arguments(self, args: list[str]) -> list[str]:
        out = []
        for a, t in zip(args, self.tensor):
            if t:
                out += [f"f = {a}.flags", f"if not (f.c_contiguous and f.aligned): {a} = plain({a})"]
        for key, word in self.region.pointers:
            out.append(f"w[{word}] = {_address(args[self.index[key]])}")
        for key, word, how in self.region.scalars:
            if key in self.index:
                a = args[self.index[key]]
                if how == "i64":
                    out.append(f"if not {-2 ** 63} <= {a} <= {2 ** 63 - 1}: return slow({', '.join(args)}, out)")
                out.append(f"{'w' if how == 'i64' else 'd'}[{word}] = {a}")
        self.env["slow"] = self.program._slow
        return out

    def _outputs(self, args: list[str]) -> list[str]:
        out = []
        self.shape_of: dict[int, tuple] = {}
        for word, t in self.region.outputs:
            shape = stored_shape(t.dtype, tuple(eval_dim(dim, self.syms) for dim in t.shape))
            self.env[f"s{word}"], self.env[f"t{word}"] = shape, t.dtype.numpy
            fresh = f"o{word} = empty(s{word}, t{word})"
            i = self.given.get(word)
            if i is None or t.dtype.is_block:
                out.append(fresh)
            else:
                store = next(s for s in self.region.exits[self.variant.done[0]].stores if s.word == word and
                             s.key == self.program._out_keys[i])
                self.shape_of[i] = tuple(eval_dim(dim, self.syms) for dim in store.type.shape)
                out += [f"if out is None: {fresh}", "else:", *("    " + x for x in self._given_output(word, i, args))]
            out.append(f"w[{word}] = {_address(f'o{word}')}")
        return out

    def _given_output(self, word: int, i: int, args: list[str]) -> list[str]:
        """The caller's array where it can take the result as it is; `take` for everything unusual about it."""
        o = f"o{word}"
        self.env.update({"nd": np.ndarray, f"g{word}": self.shape_of[i]})
        at = dict((self.index[k], w) for k, w in self.region.pointers)
        ranges = [(f"w[{at[k]}]" if k in at else _address(a), f"{a}.nbytes")
                  for k, a in enumerate(args) if self.tensor[k]]
        earlier = [w for w, _ in self.region.outputs]
        ranges += [(f"w[{w}]", f"o{w}.nbytes") for w in earlier[:earlier.index(word)]]
        overlap = " or ".join(f"(p < {a} + {n} and {a} < p + {o}.nbytes)" for a, n in ranges) or "False"
        return [f"{o} = out[{i}]",
                f"if {o}.__class__ is nd and {o}.dtype is t{word} and {o}.shape == g{word} and {o}.flags.carray:",
                f"    p = {_address(o)}",
                f"    if {overlap}: {o} = empty(s{word}, t{word})",
                f"else: {o} = take(out, {i}, s{word}, t{word}, ({''.join(a + ', ' for a in args)}))"]

    def _launch(self, args: list[str]) -> list[str]:
        call = "launch(argument)" if hasattr(self.variant.native, "call_address") else "launch()"
        if not self.variant.polls:
            return [f"n = {call}"]
        from m3jit.vm.stopping import interruptible
        self.env["interruptible"], self.env["polls"] = interruptible, frozenset(self.variant.polls)
        return ["with interruptible(stop):",           # Ctrl-C raises here, another signal starts the region again
                f"    n = {call}",
                "    while n in polls:",
                "        stop.take()",
                f"        n = {call}"]

    def _results(self, args: list[str]) -> list[str]:
        out = []
        for number in self.variant.done:
            values = [self._value(i, number, args) for i in range(len(self.program._out_keys))]
            result = values[0] if len(values) == 1 else f"({', '.join(values)})"
            out += [f"if n == {number}:", f"    if out is None: return {result}",
                    f"    return finish(out, ({', '.join(values)},))"]
        self.env["finish"] = self._finish
        return out + [f"return interpret(({''.join(a + ', ' for a in args)}), out)"]

    def _finish(self, out: tuple, values: tuple) -> Any:
        """Results into the caller's arrays, where they are not there already."""
        done = []
        for o, v, name in zip(out, values, self.program.outputs):
            array = v.data if isinstance(v, Tensor) else v
            done.append(v if o is None else o if array is o or getattr(array, "base", None) is o else
                        arguments.into(o, v, name))
        return done[0] if len(done) == 1 else tuple(done)

    def _value(self, i: int, number: int, args: list[str]) -> str:
        """An expression for output i after an exit."""
        key = self.program._out_keys[i]
        store = next((s for s in self.region.exits[number].stores if s.key == key), None)
        if store is None:                              # unchanged since the start
            if key not in self.index:
                self.env[f"never{i}"] = self._never
                return f"never{i}({self.program.outputs[i]!r})"
            t, a = self.variant.types[self.index[key]], args[self.index[key]]
            if not isinstance(t, TensorType):
                return a
            special = t.dtype.is_block or t.dtype is BF16
            return f"over({self._named(t.dtype)}, {a}.copy())" if special else f"{a}.copy()"
        if store.how in ("i64", "f64"):
            return f"{'w' if store.how == 'i64' else 'd'}[{store.word}]"
        if store.how == "weight":
            self.env[f"c{i}"] = store.source.data
            return self._copied(f"c{i}", store.type)
        if store.how == "input":
            return self._copied(args[self.index[store.source]], store.type)
        first = self._first_use(i, number)
        return self._shaped(f"o{store.word}" if first else f"o{store.word}.copy()", store.type,
                            dict(self.region.outputs).get(store.word))

    def _first_use(self, i: int, number: int) -> bool:
        stores = {s.key: s for s in self.region.exits[number].stores}
        word = stores[self.program._out_keys[i]].word
        return not any(k in stores and stores[k].how == "tensor" and stores[k].word == word
                       for k in self.program._out_keys[:i])

    @staticmethod
    def _never(name: str) -> Any:
        return arguments.python_value(None, name)

    def _copied(self, a: str, t: Any) -> str:
        if not isinstance(t, TensorType):
            return a
        return self._shaped(f"{a}.copy()", t, None)

    def _shaped(self, array: str, t: TensorType, stored: TensorType | None) -> str:
        """The array as the register's type says (a reshape renames it only)."""
        shape = tuple(eval_dim(d, self.syms) for d in t.shape)
        if t.dtype.is_block:
            return f"Tensor({self._named(t.dtype)}, {shape}, {array}.reshape({stored_shape(t.dtype, shape)}))"
        if stored is None or tuple(eval_dim(d, self.syms) for d in stored.shape) != shape:
            array = f"{array}.reshape({shape})"
        return f"Tensor({self._named(BF16)}, {shape}, {array})" if t.dtype is BF16 else array

    def _named(self, dtype: Any) -> str:
        self.env[f"D_{dtype.name}"] = dtype
        return f"D_{dtype.name}"
