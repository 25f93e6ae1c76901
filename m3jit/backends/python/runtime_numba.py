"""The helpers of rendered kernels for numba: `namespace(lanes)` offers the names of `runtime_plain`.

Each emits a few LLVM instructions on scalars or vectors (see `lane_vectors`): one IEEE operation
where the loop IR says one, `llvm.fma` where it says fma, nothing that could be contracted or approximated.
"""
from __future__ import annotations

import functools
import math
from typing import Any, Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import lower_builtin

from m3jit.backends.python.lane_vectors import ELEMENTS, KIND, LLVM, Lanes, common, splat
from m3jit.ir.loop import MEMORY

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
_RAW = {"i8": I8, "u8": I8, "bool": I8, "i16": I16, "u16": I16, "i32": I32, "i64": I64, "f16": I16, "bf16": I16,
        "f32": LLVM["f32"], "f64": LLVM["f64"]}
_FLOATS = ("f32", "f64")


def kind_of(t: types.Type) -> str:
    """Loop-IR type of a numba type; other widths count as the one the text means (an int literal is i64)."""
    if isinstance(t, Lanes):
        return t.kind
    if isinstance(t, types.Literal):
        t = t.literal_type
    return KIND.get(t, "i64" if isinstance(t, types.Integer) else "f64")


def of_kind(kind: str, count: int | None) -> types.Type:
    """Scalar (count None) or vector type."""
    return ELEMENTS[kind] if count is None else Lanes(ELEMENTS[kind], count)


def _count(*args: types.Type) -> int | None:
    return next((a.count for a in args if isinstance(a, Lanes)), None)


def _like(x: ir.Value, element: ir.Type) -> ir.Type:
    """`element`, as a vector if x is one."""
    return ir.VectorType(element, x.type.count) if isinstance(x.type, ir.VectorType) else element


def _k(x: ir.Value, element: ir.Type, value: Any) -> ir.Constant:
    """A constant shaped like x."""
    t = _like(x, element)
    return ir.Constant(t, [value] * t.count if isinstance(t, ir.VectorType) else value)


def _element(x: ir.Value) -> ir.Type:
    return x.type.element if isinstance(x.type, ir.VectorType) else x.type


def _llvm(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """Calls llvm.<name> on values of one type, which is also the result's."""
    t = args[0].type
    short = {"float": "f32", "double": "f64", "i32": "i32", "i64": "i64"}[str(_element(args[0]))]
    suffix = f"v{t.count}{short}" if isinstance(t, ir.VectorType) else short
    f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(t, [t] * len(args)), f"llvm.{name}.{suffix}")
    return builder.call(f, args)


# -- arithmetic -----------------------------------------------------------------------------------------------------

def _helper(name: str, typer: Callable) -> Callable:
    """A function `name` for compiled code: typer(operand types) -> (signature, codegen).  The operands are converted to
    the signature's types, for which typer must give the same signature again."""
    def stub(*args):
        raise TypeError(f"{name} exists in code compiled by numba only")
    stub.__name__ = stub.__qualname__ = name

    class Template(AbstractTemplate):
        key = stub
        prefer_literal = True

        def generic(self, args, kws):
            return typer(args)[0]
    infer_global(stub, types.Function(Template))

    @lower_builtin(stub, types.VarArg(types.Any))
    def lower(context, builder, sig, args):
        return typer(sig.args)[1](context, builder, sig, args)
    return stub


def _operation(name: str, emit: Callable, kinds: Callable[[list[str]], tuple[str, list[str]]]) -> Any:
    """A helper over scalars or vectors: kinds(operand kinds) -> (result kind, operand kinds to convert to)."""
    def typer(args: tuple[types.Type, ...]):
        count = _count(*args)
        vectors = [kind_of(a) for a in args if isinstance(a, Lanes)]
        result, wanted = kinds(vectors or [kind_of(a) for a in args])
        sig = of_kind(result, count)(*(of_kind(wanted[min(i, len(wanted) - 1)], count) for i in range(len(args))))
        return sig, lambda context, builder, signature, values: emit(builder, *values)
    return _helper(name, typer)


def _same(kinds: list[str]) -> tuple[str, list[str]]:
    return kinds[0], kinds[:1]


def _fixed(result: str, *operands: str) -> Callable:
    return lambda kinds: (result, list(operands))


def _negative(b: ir.IRBuilder, a: ir.Value) -> ir.Value:
    return b.fneg(a) if _element(a) in (LLVM["f32"], LLVM["f64"]) else b.neg(a)


def _canonical(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """x, or the one quiet NaN.  LLVM thinks all NaNs alike and drops the choice (`x < 0 ? NaN : sqrt(x)` becomes sqrt);
    an empty instruction hides from it that the constant is one."""
    integer, bits = (I32, 0x7FC00000) if _element(x) == LLVM["f32"] else (I64, 0x7FF8000000000000)
    hidden = b.asm(ir.FunctionType(integer, [integer]), "", "=r,0", [ir.Constant(integer, bits)], side_effect=False)
    nan = b.bitcast(hidden, _element(x))
    return b.select(b.fcmp_ordered("==", x, x), x, splat(b, nan, x.type.count) if nan.type != x.type else nan)


def _absolute(b: ir.IRBuilder, a: ir.Value) -> ir.Value:
    if _element(a) in (LLVM["f32"], LLVM["f64"]):
        return _llvm(b, "fabs", a)
    return b.select(b.icmp_signed("<", a, _k(a, _element(a), 0)), b.neg(a), a)


def _dot4(b: ir.IRBuilder, acc: ir.Value, u: ir.Value, s: ir.Value) -> ir.Value:
    for shift in (0, 8, 16, 24):
        w = b.and_(b.lshr(u, _k(u, I32, shift)), _k(u, I32, 255))
        x = b.ashr(b.shl(s, _k(s, I32, 24 - shift)), _k(s, I32, 24))
        acc = b.add(acc, b.mul(w, x))
    return acc


def _lookup(b: ir.IRBuilder, x: ir.Value, *words: ir.Value) -> ir.Value:
    """Four selections of a word by bits 2 and 3 of each byte, then of a byte by bits 0 and 1."""
    out = _k(x, I32, 0)
    for shift in (0, 8, 16, 24):
        code = b.and_(b.lshr(x, _k(x, I32, shift)), _k(x, I32, 15))
        high = [b.icmp_signed("!=", b.and_(code, _k(x, I32, bit)), _k(x, I32, 0)) for bit in (4, 8)]
        word = b.select(high[1], b.select(high[0], words[3], words[2]), b.select(high[0], words[1], words[0]))
        byte = b.lshr(word, b.shl(b.and_(code, _k(x, I32, 3)), _k(x, I32, 3)))
        out = b.or_(out, b.shl(b.and_(byte, _k(x, I32, 255)), _k(x, I32, shift)))
    return out


def _pick(symbol: str) -> Callable:
    return lambda b, x, y: b.select(b.icmp_signed(symbol, x, y), x, y)


def _where(kind: str, lanes: int) -> Any:
    """c ? a : b; kind "" takes the type of the vector among a and b."""
    def typer(args: tuple[types.Type, ...]):
        c, *values = args
        v = of_kind(kind, lanes) if kind else common(*(x for x in values if isinstance(x, Lanes)))
        condition = Lanes(types.boolean, v.count) if isinstance(c, Lanes) else types.boolean
        return v(condition, v, v), lambda context, builder, sig, operands: builder.select(*operands)
    return _helper(f"where_{kind}", typer)


# -- conversions ----------------------------------------------------------------------------------------------------

def _to(kind: str) -> Any:
    def typer(args: tuple[types.Type, ...]):
        count, source = _count(*args), kind_of(args[0])
        sig = of_kind(kind, count)(of_kind(source, count))
        return sig, lambda context, builder, signature, values: _convert(builder, source, kind, values[0])
    return _helper(f"to_{kind}", typer)


def _convert(b: ir.IRBuilder, source: str, target: str, x: ir.Value) -> ir.Value:
    t = _like(x, LLVM[target])
    if source == target:
        return x
    if source == "b1":
        return b.uitofp(x, t) if target in _FLOATS else b.zext(x, t)
    if source in _FLOATS:
        if target in _FLOATS:
            return b.fpext(x, t) if target == "f64" else b.fptrunc(x, t)
        return b.fptosi(x, t)
    if target in _FLOATS:
        return b.sitofp(x, t)
    return b.sext(x, t) if target == "i64" else b.trunc(x, t)


def _as(kind: str) -> Any:
    source = {"i32": "f32", "f32": "i32", "i64": "f64", "f64": "i64"}[kind]
    return _operation(f"as_{kind}", lambda b, x: b.bitcast(x, _like(x, LLVM[kind])), _fixed(kind, source))


# -- memory ---------------------------------------------------------------------------------------------------------

def _decode(b: ir.IRBuilder, dtype: str, x: ir.Value) -> ir.Value:
    """Memory element(s) -> value(s)."""
    if dtype in ("i8", "i16"):
        return b.sext(x, _like(x, I32))
    if dtype in ("u8", "u16", "bool"):
        return b.zext(x, _like(x, I32))
    if dtype == "bf16":
        return b.bitcast(b.shl(b.zext(x, _like(x, I32)), _k(x, I32, 16)), _like(x, LLVM["f32"]))
    return _f32_from_f16(b, x) if dtype == "f16" else x


def _f32_from_f16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """By integers: shift the fraction up and rebias the exponent; subnormals are fraction * 2^-24, exactly."""
    def k(value):
        return _k(x, I32, value)
    f32, i32 = _like(x, LLVM["f32"]), _like(x, I32)
    h = b.zext(x, i32)
    sign, magnitude = b.shl(b.and_(h, k(0x8000)), k(16)), b.and_(h, k(0x7FFF))
    moved = b.shl(magnitude, k(13))
    quiet = b.select(b.icmp_unsigned(">", magnitude, k(0x7C00)), k(0x00400000), k(0))
    infinite = b.or_(b.or_(moved, k(0x7F800000)), quiet)
    tiny = b.bitcast(b.fmul(b.sitofp(magnitude, f32), _k(x, LLVM["f32"], 2.0 ** -24)), i32)
    out = b.add(moved, k(112 << 23))
    out = b.select(b.icmp_unsigned(">=", magnitude, k(0x7C00)), infinite, out)
    out = b.select(b.icmp_unsigned("<", magnitude, k(0x0400)), tiny, out)
    return b.bitcast(b.or_(out, sign), f32)


def _encode(b: ir.IRBuilder, dtype: str, x: ir.Value) -> ir.Value:
    """Value(s) -> memory element(s): integers wrap, f32 rounds to nearest even."""
    if dtype in ("i8", "u8", "bool", "i16", "u16"):
        return b.trunc(x, _like(x, _RAW[dtype]))
    if dtype == "f16":
        return _f16_from_f32(b, x)
    if dtype != "bf16":
        return x
    bits = b.bitcast(x, _like(x, I32))
    top = b.lshr(bits, _k(x, I32, 16))
    rounded = b.lshr(b.add(b.add(bits, _k(x, I32, 0x7FFF)), b.and_(top, _k(x, I32, 1))), _k(x, I32, 16))
    out = b.select(b.fcmp_unordered("uno", x, x), b.or_(top, _k(x, I32, 0x40)), rounded)
    return b.trunc(out, _like(x, I16))


def _f16_from_f32(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """By integers; a result below 2^-14 is a whole number of 2^-24, which adding 0.5 rounds to."""
    def k(value):
        return _k(x, I32, value)
    f32, i32 = _like(x, LLVM["f32"]), _like(x, I32)
    bits = b.bitcast(x, i32)
    sign, magnitude = b.and_(b.lshr(bits, k(16)), k(0x8000)), b.and_(bits, k(0x7FFFFFFF))
    rebiased = b.sub(magnitude, k(112 << 23))
    odd = b.and_(b.lshr(rebiased, k(13)), k(1))
    normal = b.lshr(b.add(b.add(rebiased, k(0xFFF)), odd), k(13))
    half = b.fadd(b.bitcast(magnitude, f32), _k(x, LLVM["f32"], 0.5))
    tiny = b.sub(b.bitcast(half, i32), k(0x3F000000))
    nan = b.or_(b.and_(b.lshr(magnitude, k(13)), k(0x3FF)), k(0x7E00))
    out = b.select(b.icmp_unsigned("<", magnitude, k(0x38800000)), tiny, normal)
    out = b.select(b.icmp_unsigned(">=", magnitude, k(0x477FF000)), k(0x7C00), out)
    out = b.select(b.icmp_unsigned(">", magnitude, k(0x7F800000)), nan, out)
    return b.trunc(b.or_(out, sign), _like(x, I16))


def _pointer(b: ir.IRBuilder, dtype: str, p: ir.Value, i: ir.Value) -> ir.Value:
    """Pointer(s) to element i (scalar or vector) at address p."""
    if isinstance(i.type, ir.VectorType):
        p = splat(b, p, i.type.count)
    address = b.add(p, b.mul(i, _k(i, I64, MEMORY[dtype][0])))
    return b.inttoptr(address, _like(i, _RAW[dtype].as_pointer()))


def _index_type(form: str, lanes: int) -> types.Type:
    return Lanes(types.int64, lanes) if form == "gather" else types.int64


def _read(name: str, dtype: str, lanes: int | None, form: str) -> Any:
    """One element (lanes None), contiguous ones (form "load") or gathered ones, perhaps with a mask."""
    value = of_kind(MEMORY[dtype][1], lanes)

    def codegen(context, b: ir.IRBuilder, sig, args):
        at = _pointer(b, dtype, args[0], args[1])
        if form == "load" and len(args) == 2:
            t = _RAW[dtype] if lanes is None else ir.VectorType(_RAW[dtype], lanes)
            raw = b.load(b.bitcast(at, t.as_pointer()), align=1)
            return _decode(b, dtype, raw)
        vector = ir.VectorType(_RAW[dtype], lanes)
        mask = args[2] if len(args) == 3 else _k(args[1], I1, 1)
        zero = ir.Constant(vector, [0.0 if dtype in _FLOATS else 0] * lanes)
        return _decode(b, dtype, _masked(b, form, dtype, lanes, vector, [at, ir.Constant(I32, 1), mask, zero]))

    def typer(args: tuple[types.Type, ...]):
        masks = [Lanes(types.boolean, lanes)] * (len(args) - 2)
        return value(types.int64, _index_type(form, lanes), *masks), codegen
    return _helper(name, typer)


def _write(name: str, dtype: str, lanes: int | None, form: str) -> Any:
    value = of_kind(MEMORY[dtype][1], lanes)

    def codegen(context, b: ir.IRBuilder, sig, args):
        at, raw = _pointer(b, dtype, args[0], args[1]), _encode(b, dtype, args[2])
        if form == "store" and len(args) == 3:
            b.store(raw, b.bitcast(at, raw.type.as_pointer()), align=1)
        else:
            mask = args[3] if len(args) == 4 else _k(args[1], I1, 1)
            _masked(b, form, dtype, lanes, ir.VoidType(), [raw, at, ir.Constant(I32, 1), mask])
        return context.get_dummy_value()

    def typer(args: tuple[types.Type, ...]):
        masks = [Lanes(types.boolean, lanes)] * (len(args) - 3)
        index = _index_type("gather" if form == "scatter" else form, lanes)
        return types.void(types.int64, index, value, *masks), codegen
    return _helper(name, typer)


def _masked(b: ir.IRBuilder, form: str, dtype: str, lanes: int, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    """llvm.masked.load, gather, store or scatter."""
    short = {"float": "f32", "double": "f64"}.get(str(_RAW[dtype]), str(_RAW[dtype]))
    pointer = "p0" if form in ("load", "store") else f"v{lanes}p0"
    f = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in args]),
                                       f"llvm.masked.{form}.v{lanes}{short}.{pointer}")
    return b.call(f, args)


# -- across lanes ---------------------------------------------------------------------------------------------------

def _keep(symbol: str) -> Callable:
    """fmin, fmax: a NaN operand loses; of equal ones the second stays."""
    def combine(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        better = b.fcmp_ordered("<", x, y) if symbol == "<" else b.fcmp_ordered("<", y, x)
        return b.select(b.or_(better, b.fcmp_unordered("uno", y, y)), x, y)
    return combine


def _add(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.fadd(x, y) if _element(x) in (LLVM["f32"], LLVM["f64"]) else b.add(x, y)


def _mul(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.fmul(x, y) if _element(x) in (LLVM["f32"], LLVM["f64"]) else b.mul(x, y)


_COMBINE = {"add": _add, "mul": _mul, "fmin": _keep("<"), "fmax": _keep(">"), "imin": _pick("<"), "imax": _pick(">"),
            "and": lambda b, x, y: b.and_(x, y), "or": lambda b, x, y: b.or_(x, y)}


def _shuffle(b: ir.IRBuilder, x: ir.Value, lanes: list[int]) -> ir.Value:
    """The vector x[lanes[0]], x[lanes[1]], ..."""
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), mask)


def _first(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.extract_element(x, ir.Constant(I32, 0))


def _fold(op: str) -> Any:
    """Halving tree: lane l combines with lane l + n/2, then n/4, ... 1."""
    def typer(args: tuple[types.Type, ...]):
        v, = args

        def codegen(context, b: ir.IRBuilder, sig, values):
            x, n = values[0], v.count
            while n > 1:
                n //= 2
                x = _COMBINE[op](b, _shuffle(b, x, list(range(n))), _shuffle(b, x, list(range(n, 2 * n))))
            return _first(b, x)
        return v.element(v), codegen
    return _helper(f"fold_{op}", typer)


def _typed_first(args: tuple[types.Type, ...]):
    return args[0].element(args[0]), lambda context, builder, sig, values: _first(builder, values[0])


def _typed_shuffle(args: tuple[types.Type, ...]):
    """Lane l receives lane l + by; the last lanes keep their own."""
    v, by = args
    step = by.literal_value
    order = [n + step if n + step < v.count else n for n in range(v.count)]
    return v(v, by), lambda context, builder, sig, values: _shuffle(builder, values[0], order)


def _splat(kind: str, lanes: int) -> Any:
    v = of_kind(kind, lanes)                           # the conversion of the argument does it
    return _helper(f"splat_{kind}", lambda args: (v(v), lambda context, builder, sig, values: values[0]))


# -- names ----------------------------------------------------------------------------------------------------------

def _typed_scratch(args: tuple[types.Type, ...]):
    """The address of a 64-byte aligned array on the function's stack."""
    size, = args

    def codegen(context, builder, sig, values):
        with builder.goto_entry_block():               # numba's own helper would also clear it, byte by byte
            memory = builder.alloca(ir.ArrayType(I8, size.literal_value))
        memory.align = 64
        return builder.ptrtoint(memory, I64)
    return types.int64(size), codegen


scratch = _helper("scratch", _typed_scratch)
first, shuffle_down = _helper("first", _typed_first), _helper("shuffle_down", _typed_shuffle)
fma = _operation("fma", lambda b, *v: _llvm(b, "fma", *v), _same)
sqrt, floor, rint = (_operation(n, lambda b, v, n=n: _llvm(b, n, v), _same) for n in ("sqrt", "floor", "rint"))
canonical = _operation("canonical", _canonical, _same)
negative, absolute = _operation("negative", _negative, _same), _operation("absolute", _absolute, _same)
minimum, maximum = _operation("minimum", _pick("<"), _same), _operation("maximum", _pick(">"), _same)
lshr_i32 = _operation("lshr_i32", lambda b, a, n: b.lshr(a, n), _fixed("i32", "i32"))
lshr_i64 = _operation("lshr_i64", lambda b, a, n: b.lshr(a, n), _fixed("i64", "i64"))
idiv = _operation("idiv", lambda b, x, y: b.sdiv(x, y), _same)
irem = _operation("irem", lambda b, x, y: b.srem(x, y), _same)
dot4 = _operation("dot4", _dot4, _fixed("i32", "i32"))
lookup = _operation("lookup", _lookup, _fixed("i32", "i32"))
zext = _operation("zext", lambda b, x: b.zext(x, _like(x, I64)), _fixed("i64", "i32"))


@functools.cache
def namespace(lanes: int) -> dict[str, Any]:
    """Every name a rendered kernel of this many lanes may use."""
    names: dict[str, Any] = {k: globals()[k] for k in (
        "scratch", "fma", "idiv", "irem", "sqrt", "floor", "rint", "negative", "absolute", "canonical", "minimum",
        "maximum",
        "zext", "first", "dot4", "lookup", "shuffle_down", "lshr_i32", "lshr_i64")}
    names |= {"inf": math.inf, "nan": math.nan, "i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64,
              "where": _where("", lanes), "lane_numbers": lane_numbers(lanes)}
    for t in MEMORY:
        for form, kind in (("load", _read), ("store", _write)):
            names |= {f"{form}_{t}": kind(f"{form}_{t}", t, None, form),
                      f"{form}_lanes_{t}": kind(f"{form}_lanes_{t}", t, lanes, form)}
        names |= {f"gather_{t}": _read(f"gather_{t}", t, lanes, "gather"),
                  f"scatter_{t}": _write(f"scatter_{t}", t, lanes, "scatter")}
    for kind in ELEMENTS:
        names |= {f"splat_{kind}": _splat(kind, lanes), f"to_{kind}": _to(kind), f"where_{kind}": _where(kind, lanes)}
    names |= {f"as_{kind}": _as(kind) for kind in ELEMENTS if kind != "b1"}
    return names | {f"fold_{op}": _fold(op) for op in _COMBINE}


def lane_numbers(lanes: int) -> Any:
    """0, 1, ... as an i32 vector."""
    vector = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
    sig = of_kind("i32", lanes)()
    return _helper("lane_numbers", lambda args: (sig, lambda context, builder, signature, values: vector))
