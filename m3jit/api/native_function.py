"""A compiled program as a C function pointer, for C, ctypes, cffi and `@numba.njit` code.

Signature, arguments in the order of the program's inputs, then of its outputs::

    int64_t f(const void *rX, int64_t rX_n,      a tensor whose first dimension is symbolic: address and that dimension
              const void *rY,                    a tensor whose dimensions are all given by its type
              int64_t rK, double rS,             integer and float registers
              void *rZ, int64_t *rN, double *rF) outputs: tensors into memory of the caller, numbers through pointers

Tensors are C-contiguous, elements aligned to their size; outputs overlap neither inputs nor each other.  It returns
0 done; 1 the program left compiled code (it would trap, or needs the machine: call it through Python); 2 dimensions
that do not fit; 3 out of memory.  Unless it is 0, outputs hold nothing of meaning.  Any thread may call it, no
interpreter lock is needed, and the bytes are those of every other way to run the program.
"""
from __future__ import annotations

import ctypes
import itertools
import re
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from m3jit.api import arguments
from m3jit.api.native_entry import LEFT, NO_MEMORY, UNFIT, Entry, has_length
from m3jit.errors import UnsupportedError, UserError, no_memory
from m3jit.ir.tensor import F64T, I64T, Dim, DimExpr, Sym, TensorType, Type
from m3jit.isa.types import BF16, DTYPES, F16
from m3jit.vm.native import name_of, type_of_value

MEANING = {LEFT: "the program left compiled code: it would trap, or needs the machine; call it through Python to see "
                 "why",
           UNFIT: "dimensions that the function was not made for", NO_MEMORY: "out of memory"}
MOST_LETTERS = 2                          # variants for dimensions of 0 and 1 are made for so many distinct symbols
_SPEC = re.compile(r"([a-z][a-z0-9_]*)\s*(?:\[(.*)\])?\Z", re.I)
_EXAMPLES = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)   # stand for symbolic dimensions while types are matched


@dataclass
class NativeFunction:
    """address: of the function; signature: its C prototype; inputs, outputs: types of the registers by name."""
    address: int
    signature: str
    inputs: dict[str, Type]
    outputs: dict[str, Type]
    keep: Any = None                      # the code; must stay alive as long as the address is in use

    @property
    def prototype(self) -> Any:
        """The ctypes function type: addresses and integers are 64-bit integers, floats are doubles."""
        kinds: list[Any] = []
        for t in self.inputs.values():
            kinds += [ctypes.c_double] if t == F64T else [ctypes.c_int64]
            if has_length(t):
                kinds.append(ctypes.c_int64)
        return ctypes.CFUNCTYPE(ctypes.c_int64, *kinds, *[ctypes.c_int64] * len(self.outputs))

    @property
    def function(self) -> Callable[..., int]:
        """The function through ctypes; calls release the interpreter lock."""
        return self.prototype(self.address)

    def __repr__(self) -> str:
        return f"<{self.signature}>"


# -- types ------------------------------------------------------------------------------------------------------------

def parse_type(spec: Any, key: Any, name: str, sizes: dict[str, int]) -> tuple[Type, int]:
    """Type of an input from text ("f32[n, 64]", "f32[]", "i64", "f64") or a sample value, and an example of its first
    dimension.  sizes: letter -> example, the same for equal letters."""
    if not isinstance(spec, str):
        value = arguments.register_value(spec, name)
        found = type_of_value(key, value)
        assert found is not None
        return found, value.shape[0] if has_length(found) else 0       # type: ignore[union-attr]
    m = _SPEC.match(spec.strip())
    if m and m[2] is None and m[1].lower() in ("i64", "f64"):
        return (I64T if m[1].lower() == "i64" else F64T), 0
    dtype = DTYPES.get(m[1].upper()) if m else None
    if dtype is None or m is None or m[2] is None:
        raise UserError(f"{name}: {spec!r} is no type; write i64, f64, or a dtype with dimensions: f32[n, 64], f32[3], "
                        f"f32[]")
    shape: list[Dim] = []
    example = 0
    for i, d in enumerate(p.strip() for p in m[2].split(",") if p.strip()):
        if not d.isdecimal() and (i or not d.isidentifier()):
            raise UserError(f"{name}: dimension {d!r} of {spec!r}: the first one may be a name, the others are numbers")
        if i or (d.isdecimal() and int(d) < 2):
            shape.append(int(d))
            continue
        if len(sizes) == len(_EXAMPLES) and d not in sizes:
            raise UserError(f"at most {len(_EXAMPLES)} different names of dimensions")
        example = int(d) if d.isdecimal() else sizes.setdefault(d, _EXAMPLES[len(sizes)])
        shape.append(Sym(f"n_{name_of(key)}"))
    return TensorType(dtype, tuple(shape)), example


def make(program: Any, types: tuple, threads: int | None) -> NativeFunction:
    """The C function of a compiled program for arguments of these types; UnsupportedError when there is none."""
    if program._compiler is None or not program.backend.startswith("cpu"):
        raise UnsupportedError(f"backend {program.backend} makes no native functions; compile with backend=\"cpu\"")
    if len(types) != len(program.inputs):
        raise UserError(f"native: one type for each of {', '.join(program.inputs) or 'no inputs'}; got {len(types)}")
    sizes: dict[str, int] = {}
    parsed = [parse_type(t, k, n, sizes) for t, k, n in zip(types, program._in_keys, program.inputs)]
    given = tuple(t for t, _ in parsed)
    main, why = _variant(program, given, [n for _, n in parsed])
    if main is None:
        raise UnsupportedError(f"{program.program.name}: no native function for {', '.join(map(str, given))}: {why}")
    variants = [main, *_small(program, given, [n for _, n in parsed])]
    inputs = dict(zip(program.inputs, given))
    outputs = _output_types(program, main)
    entry = Entry(program, inputs, outputs, threads or program.threads)
    unit = program._compiler.engine.function(entry.text(variants), entry.symbol, entry.imports)
    text = prototype_text(program, inputs, outputs)
    return NativeFunction(unit.address, text, inputs, outputs, (unit, variants, program))


def _variant(program: Any, types: tuple[Type, ...], examples: list[int]) -> tuple[Any, str]:
    actual = {t.shape[0]: n for t, n in zip(types, examples) if has_length(t)}     # type: ignore[union-attr]
    with program._lock:
        return program._compile(types, actual)


def _small(program: Any, types: tuple[Type, ...], examples: list[int]) -> list[Any]:
    """Variants where symbolic dimensions are 0 or 1 instead, which broadcast and fold differently."""
    symbols = list(dict.fromkeys(n for t, n in zip(types, examples) if has_length(t)))
    if not symbols or len(symbols) > MOST_LETTERS:
        return []
    out = []
    for choice in itertools.product((None, 1, 0), repeat=len(symbols)):
        sizes = dict(zip(symbols, choice))
        if all(v is None for v in choice):
            continue
        fixed = tuple(TensorType(t.dtype, (sizes[n], *t.shape[1:])) if has_length(t) and sizes[n] is not None else t
                      for t, n in zip(types, examples))
        variant, _ = _variant(program, fixed, examples)
        if variant is not None:
            out.append(variant)
    return out


def _output_types(program: Any, variant: Any) -> dict[str, Type]:
    """Types of the outputs at the program's end."""
    found: dict[str, Type] = {}
    given = dict(zip(program._in_keys, variant.types))
    for number in variant.done:
        stores = {s.key: s for s in variant.region.exits[number].stores}
        for name, key in zip(program.outputs, program._out_keys):
            if key in stores:
                s = stores[key]
                t: Type | None = s.type if s.type is not None else I64T if s.how == "i64" else F64T
            else:
                t = given.get(key)
            if t is None:
                raise UnsupportedError(f"{name} is not written on every way to the end; it cannot be an output here")
            if found.setdefault(name, t) != t:
                raise UnsupportedError(f"{name} is {found[name]} or {t}, depending on the way the program takes")
    return found


def prototype_text(program: Any, inputs: dict[str, Type], outputs: dict[str, Type]) -> str:
    """The C declaration."""
    args = []
    for name, t in inputs.items():
        args.append(f"const void *{name}" if isinstance(t, TensorType) else
                    f"{'double' if t == F64T else 'int64_t'} {name}")
        if has_length(t):
            args.append(f"int64_t {name}_n")
    for name, t in outputs.items():
        args.append(f"{'void' if isinstance(t, TensorType) else 'double' if t == F64T else 'int64_t'} *{name}_out")
    return f"int64_t program({', '.join(args)})"


# -- numba -----------------------------------------------------------------------------------------------------------

def numba_function(native: NativeFunction) -> Callable[..., Any]:
    """An njit function over arrays and numbers that calls the native one and returns its outputs.

    Arrays must be C-contiguous and of the declared dtypes and static dimensions.  RuntimeError inside the compiled code
    when the program leaves it (NativeFunction)."""
    try:
        import numba
    except ImportError as error:
        if no_memory(error):
            raise
        raise UnsupportedError("numba is not installed; pip install 'm3jit[numba]'") from None
    source, env = _wrapper(native)
    exec(compile(source, "<m3jit numba call>", "exec"), env)
    call = env["call"]
    call.__doc__ = f"{native.signature}, with arrays in and out."
    return numba.njit(_signatures(native), nogil=True)(call)


def _wrapper(native: NativeFunction) -> tuple[str, dict[str, Any]]:
    lines, call, results = [f"def call({', '.join(native.inputs)}):"], [], []
    symbols: dict[Sym, str] = {}
    for name, t in native.inputs.items():
        if not isinstance(t, TensorType):
            call.append(name)
            continue
        call.append(f"{name}.ctypes.data")
        for axis, d in enumerate(t.shape):
            if isinstance(d, int):
                lines += [f"    if {name}.shape[{axis}] != {d}:",
                          f"        raise ValueError('{name} has another size on axis {axis} than {d}')"]
            else:
                symbols[d] = f"{name}.shape[{axis}]"               # type: ignore[index]
                call.append(f"{name}.shape[{axis}]")
    env: dict[str, Any] = {"np": np, "native": native.function, "keep": native}      # the code lives as long as this
    for i, (name, t) in enumerate(native.outputs.items()):
        if isinstance(t, TensorType):
            shape = "".join(f"{_dim_text(d, symbols)}, " for d in t.shape)
            lines.append(f"    o{i} = np.empty(({shape}), np.{_numpy_name(t)})")
            results.append(f"o{i}")
        else:
            lines.append(f"    o{i} = np.empty(1, np.{'float64' if t == F64T else 'int64'})")
            results.append(f"o{i}[0]")
        call.append(f"o{i}.ctypes.data")
    lines.append(f"    code = native({', '.join(call)})")
    for code, text in MEANING.items():
        lines += [f"    if code == {code}:", f"        raise RuntimeError({('m3jit: ' + text)!r})"]
    lines.append(f"    return {results[0] if len(results) == 1 else ', '.join(results)}")
    return "\n".join(lines), env


def _numpy_name(t: TensorType) -> str:
    if t.dtype.is_block or t.dtype in (BF16, F16):
        raise UnsupportedError(f"numba has no arrays of {t.dtype.name}; CAST it to F32, or use native()")
    return "bool_" if t.dtype.kind == "bool" else t.dtype.numpy.name


def _dim_text(d: Dim, symbols: dict[Sym, str]) -> str:
    if isinstance(d, int):
        return str(d)
    if isinstance(d, DimExpr):
        a, b = _dim_text(d.a, symbols), _dim_text(d.b, symbols)
        return {"add": f"({a} + {b})", "mul": f"({a} * {b})", "ceildiv": f"(({a} + {b} - 1) // {b})"}[d.op]
    return symbols[d]


def _signatures(native: NativeFunction) -> list[Any]:
    """Argument types: arrays that may be written or not, in every combination for a few of them."""
    from numba import types
    choices: list[list[Any]] = []
    tensors = sum(isinstance(t, TensorType) for t in native.inputs.values())
    for t in native.inputs.values():
        if isinstance(t, TensorType):
            element = getattr(types, _numpy_name(t))
            kinds = (False, True) if tensors <= 3 else (False,)
            choices.append([types.Array(element, t.rank, "C", readonly=r) for r in kinds])
        else:
            choices.append([types.float64 if t == F64T else types.int64])
    return [c for c in itertools.product(*choices)]
