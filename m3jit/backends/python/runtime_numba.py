"""The same helpers as `runtime_plain`, for kernels compiled by numba: loads and stores are LLVM loads and stores, fma is
the fused operation, everything else is one IEEE operation (numba does not contract)."""
from __future__ import annotations

import math

import numba as nb
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

inf, nan = math.inf, math.nan
np_float32 = np.float32
f32, f64 = np.float32, np.float64
_inline = njit(inline="never", error_model="numpy")


@njit
def i32(x): return np.int32(x)


@njit
def i64(x): return np.int64(x)


@njit
def address_of(a): return np.int64(a.ctypes.data)


def _loader(memory: types.Type):
    @intrinsic
    def load(typingctx, p):
        def codegen(context, builder, signature, args):
            address = builder.sext(args[0], ir.IntType(64)) if args[0].type.width < 64 else args[0]
            pointer = builder.inttoptr(address, context.get_value_type(memory).as_pointer())
            out = builder.load(pointer)
            out.align = 1
            return out
        return memory(p), codegen
    return load


def _storer(memory: types.Type):
    @intrinsic
    def store(typingctx, p, v):
        def codegen(context, builder, signature, args):
            address = builder.sext(args[0], ir.IntType(64)) if args[0].type.width < 64 else args[0]
            pointer = builder.inttoptr(address, context.get_value_type(memory).as_pointer())
            s = builder.store(args[1], pointer)
            s.align = 1
            return context.get_dummy_value()
        return types.void(p, memory), codegen
    return store


_l8, _lu8, _l16, _lu16 = map(_loader, (types.int8, types.uint8, types.int16, types.uint16))
_l32, _l64, _lf32, _lf64 = map(_loader, (types.int32, types.int64, types.float32, types.float64))
_s8, _s16, _s32, _s64, _sf32, _sf64 = map(_storer, (types.int8, types.int16, types.int32, types.int64, types.float32,
                                                    types.float64))


@njit
def load_i8(p): return np.int32(_l8(p))
@njit
def load_u8(p): return np.int32(_lu8(p))
@njit
def load_bool(p): return np.int32(_lu8(p))
@njit
def load_i16(p): return np.int32(_l16(p))
@njit
def load_u16(p): return np.int32(_lu16(p))
@njit
def load_i32(p): return _l32(p)
@njit
def load_i64(p): return _l64(p)
@njit
def load_f32(p): return _lf32(p)
@njit
def load_f64(p): return _lf64(p)
@njit
def store_i8(p, v): _s8(p, np.int8(v))
@njit
def store_u8(p, v): _s8(p, np.int8(v))
@njit
def store_bool(p, v): _s8(p, np.int8(v))
@njit
def store_i16(p, v): _s16(p, np.int16(v))
@njit
def store_u16(p, v): _s16(p, np.int16(v))
@njit
def store_i32(p, v): _s32(p, np.int32(v))
@njit
def store_i64(p, v): _s64(p, np.int64(v))
@njit
def store_f32(p, v): _sf32(p, v)
@njit
def store_f64(p, v): _sf64(p, v)


def _bitcast(source: types.Type, target: types.Type):
    @intrinsic
    def cast(typingctx, v):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], context.get_value_type(target))
        return target(source), codegen
    return cast


_i2f, _f2i = _bitcast(types.int32, types.float32), _bitcast(types.float32, types.int32)
_l2d, _d2l = _bitcast(types.int64, types.float64), _bitcast(types.float64, types.int64)


@njit
def bits_i32(a): return _i2f(np.int32(a))
@njit
def bits_f32(a): return _f2i(a)
@njit
def bits_i64(a): return _l2d(np.int64(a))
@njit
def bits_f64(a): return _d2l(a)


def _llvm_call(name: str, count: int, kind: types.Type):
    def codegen(context, builder, signature, args):
        t = context.get_value_type(kind)
        fn = cgutils.get_or_insert_function(builder.module, ir.FunctionType(t, [t] * count),
                                            f"llvm.{name}.{'f32' if kind == types.float32 else 'f64'}")
        return builder.call(fn, args)
    if count == 3:
        @intrinsic
        def call(typingctx, a, b, c):
            return kind(kind, kind, kind), codegen
    else:
        @intrinsic
        def call(typingctx, a):
            return kind(kind), codegen
    return call


fma_f32, fma_f64 = _llvm_call("fma", 3, types.float32), _llvm_call("fma", 3, types.float64)
sqrt_f32, sqrt_f64 = _llvm_call("sqrt", 1, types.float32), _llvm_call("sqrt", 1, types.float64)
floor_f32, floor_f64 = _llvm_call("floor", 1, types.float32), _llvm_call("floor", 1, types.float64)
rint_f32, rint_f64 = _llvm_call("rint", 1, types.float32), _llvm_call("rint", 1, types.float64)


def _float_div(kind: types.Type):
    @intrinsic
    def div(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return builder.fdiv(args[0], args[1])
        return kind(kind, kind), codegen
    return div


div_f32, div_f64 = _float_div(types.float32), _float_div(types.float64)


@njit
def load_f16(p):
    h = np.int32(_lu16(p))
    sign, exponent, fraction = (h & 0x8000) << 16, h >> 10 & 31, h & 0x3FF
    if exponent == 31:
        return bits_i32(np.int32(sign | 0x7F800000 | fraction << 13))
    if exponent == 0:
        value = np.float32(fraction) * np.float32(5.960464477539063e-08)
        return bits_i32(np.int32(sign | bits_f32(value)))
    return bits_i32(np.int32(sign | (exponent + 112) << 23 | fraction << 13))


@njit
def load_bf16(p): return bits_i32(np.int32(np.int64(_lu16(p)) << 16))


@njit
def store_bf16(p, v):
    bits = np.int64(bits_f32(v)) & 0xFFFFFFFF
    if bits & 0x7FFFFFFF > 0x7F800000:
        r = bits >> 16 | 0x40
    else:
        r = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    _s16(p, np.int16(r & 0xFFFF))


@njit
def store_f16(p, v):
    bits = np.int64(bits_f32(v)) & 0xFFFFFFFF
    sign, a = bits >> 16 & 0x8000, bits & 0x7FFFFFFF
    if a > 0x7F800000:
        h = 0x7E00 | a >> 13 & 0x3FF
    elif a >= 0x47800000:                      # 65536 and more
        h = 0x7C00
    elif a >= 0x38800000:                      # normal: 2^-14 and more; a carry into infinity is right
        r = a - 0x38000000
        h = (r + 0xFFF + (r >> 13 & 1)) >> 13
    else:                                      # subnormal: units of 2^-24, to nearest even
        x = bits_i32(np.int32(a))
        h = np.int64(rint_f32(x * np.float32(16777216.0)))
    _s16(p, np.int16(sign | h))


@njit
def neg_f32(a): return bits_i32(np.int32(bits_f32(a) ^ -2147483648))
@njit
def neg_f64(a): return -a
@njit
def neg_i32(a): return np.int32(-np.int64(a))
@njit
def neg_i64(a): return -a
@njit
def abs_f32(a): return bits_i32(np.int32(bits_f32(a) & 0x7FFFFFFF))
@njit
def abs_f64(a): return abs(a)
@njit
def abs_i32(a): return np.int32(abs(np.int64(a)))
@njit
def abs_i64(a): return abs(a)
@njit
def idiv(a, b): return a // b if a >= 0 else -((-a) // b)
@njit
def irem(a, b): return a - idiv(a, b) * b
@njit
def lshr_i32(a, n): return np.int32((np.int64(a) & 0xFFFFFFFF) >> np.int64(n))
@njit
def lshr_i64(a, n): return np.int64(np.uint64(a) >> np.uint64(n))
@njit
def fmin(a, b): return a if (a < b) or (b != b) else b
@njit
def fmax(a, b): return a if (b < a) or (b != b) else b


@njit
def dot4(acc, u, s):
    total = np.int64(acc)
    for i in range(4):
        w, x = np.int64(u) >> 8 * i & 255, np.int64(s) >> 8 * i & 255
        total += w * (x - 256 if x > 127 else x)
    return np.int32(total)


@njit
def f32_from_i32(a): return np.float32(np.int32(a))
@njit
def f32_from_i64(a): return np.float32(a)
@njit
def f64_from_i32(a): return np.float64(a)
@njit
def f64_from_i64(a): return np.float64(a)
@njit
def f64_from_f32(a): return np.float64(a)
@njit
def f32_from_f64(a): return np.float32(a)
@njit
def f32_from_f32(a): return a
@njit
def i32_from_f32(a): return np.int32(a)
@njit
def i64_from_f32(a): return np.int64(a)
@njit
def i32_from_f64(a): return np.int32(a)
@njit
def i64_from_f64(a): return np.int64(a)
@njit
def i64_from_i32(a): return np.int64(a)
@njit
def i32_from_i64(a): return np.int32(a)
@njit
def i32_from_b1(a): return np.int32(1) if a else np.int32(0)
@njit
def i64_from_b1(a): return np.int64(1) if a else np.int64(0)
@njit
def f32_from_b1(a): return np.float32(1.0) if a else np.float32(0.0)
@njit
def i32_from_i32(a): return a
@njit
def i64_from_i64(a): return a
