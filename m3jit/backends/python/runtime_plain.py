"""Helpers of rendered kernels in plain Python: f32 values are np.float32, integers Python ints, pointers addresses."""
from __future__ import annotations

import ctypes
import math

import numpy as np

from m3jit.ir.eager_math import fma32, fma64

inf, nan = math.inf, math.nan
f32, f64 = np.float32, np.float64
_M32, _M64 = 1 << 32, 1 << 64


def i32(x): return (int(x) + 2 ** 31) % _M32 - 2 ** 31
def i64(x): return (int(x) + 2 ** 63) % _M64 - 2 ** 63


def address_of(a): return a.__array_interface__["data"][0]


def _reader(ctype, wrap):
    return lambda p: wrap(ctype.from_address(int(p)).value)


def _writer(ctype, wrap):
    def write(p, v):
        ctype.from_address(int(p)).value = wrap(v)
    return write


load_i8, load_u8 = _reader(ctypes.c_int8, int), _reader(ctypes.c_uint8, int)
load_i16, load_u16 = _reader(ctypes.c_int16, int), _reader(ctypes.c_uint16, int)
load_i32, load_i64 = _reader(ctypes.c_int32, int), _reader(ctypes.c_int64, int)
load_bool = load_u8
store_i8, store_u8 = _writer(ctypes.c_int8, int), _writer(ctypes.c_uint8, int)
store_i16, store_u16 = _writer(ctypes.c_int16, int), _writer(ctypes.c_uint16, int)
store_i32, store_i64 = _writer(ctypes.c_int32, int), _writer(ctypes.c_int64, int)
store_bool = store_u8


def load_f32(p): return np.uint32(ctypes.c_uint32.from_address(int(p)).value).view(np.float32)
def load_f64(p): return np.float64(ctypes.c_double.from_address(int(p)).value)
def load_f16(p): return np.float32(np.uint16(ctypes.c_uint16.from_address(int(p)).value).view(np.float16))
def load_bf16(p): return np.uint32(ctypes.c_uint16.from_address(int(p)).value << 16).view(np.float32)


def store_f32(p, v): ctypes.c_uint32.from_address(int(p)).value = int(np.float32(v).view(np.uint32))
def store_f64(p, v): ctypes.c_double.from_address(int(p)).value = float(v)
def store_f16(p, v): ctypes.c_uint16.from_address(int(p)).value = int(np.float32(v).astype(np.float16).view(np.uint16))


def store_bf16(p, v):
    bits = int(np.float32(v).view(np.uint32))
    rounded = bits >> 16 | 0x40 if bits & 0x7FFFFFFF > 0x7F800000 else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    ctypes.c_uint16.from_address(int(p)).value = rounded & 0xFFFF


def fma_f32(a, b, c):
    return np.float32(fma32(np.float32(a), np.float32(b), np.float32(c)))


def fma_f64(a, b, c):
    return np.float64(fma64(np.float64(a), np.float64(b), np.float64(c)))


def sqrt_f32(a): return np.sqrt(np.float32(a))
def sqrt_f64(a): return np.sqrt(np.float64(a))
def div_f32(a, b): return np.divide(np.float32(a), np.float32(b))
def div_f64(a, b): return np.divide(np.float64(a), np.float64(b))
def floor_f32(a): return np.floor(np.float32(a))
def floor_f64(a): return np.floor(np.float64(a))
def rint_f32(a): return np.rint(np.float32(a))
def rint_f64(a): return np.rint(np.float64(a))
def neg_f32(a): return -np.float32(a)
def neg_f64(a): return -np.float64(a)
def neg_i32(a): return i32(-int(a))
def neg_i64(a): return i64(-int(a))
def abs_f32(a): return np.abs(np.float32(a))
def abs_f64(a): return np.abs(np.float64(a))
def abs_i32(a): return i32(abs(int(a)))
def abs_i64(a): return i64(abs(int(a)))
def idiv(a, b): return int(a) // int(b) if a >= 0 else -(-int(a) // int(b))
def irem(a, b): return int(a) - idiv(a, b) * int(b)
def lshr_i32(a, n): return i32((int(a) % _M32) >> int(n))
def lshr_i64(a, n): return i64((int(a) % _M64) >> int(n))
def bits_i32(a): return np.uint32(int(a) % _M32).view(np.float32)
def bits_f32(a): return int(np.float32(a).view(np.int32))
def bits_i64(a): return np.uint64(int(a) % _M64).view(np.float64)
def bits_f64(a): return int(np.float64(a).view(np.int64))
def fmin(a, b): return a if (a < b) or (b != b) else b
def fmax(a, b): return a if (b < a) or (b != b) else b


def dot4(acc, u, s):
    total = int(acc)
    for i in range(4):
        w, x = int(u) >> 8 * i & 255, int(s) >> 8 * i & 255
        total += w * (x - 256 if x > 127 else x)
    return i32(total)


def f32_from_i32(a): return np.float32(int(a))
def f32_from_i64(a): return np.float32(int(a)) if abs(int(a)) < 2 ** 53 else np.int64(int(a)).astype(np.float32)
def f64_from_i32(a): return np.float64(int(a))
def f64_from_i64(a): return np.int64(int(a)).astype(np.float64)
def f64_from_f32(a): return np.float64(a)
def f32_from_f64(a): return np.float32(a)
def f32_from_f32(a): return a
def i32_from_f32(a): return int(a)
def i64_from_f32(a): return int(a)
def i32_from_f64(a): return int(a)
def i64_from_f64(a): return int(a)
def i64_from_i32(a): return int(a)
def i32_from_i64(a): return i32(a)
def i32_from_b1(a): return 1 if a else 0
def i64_from_b1(a): return 1 if a else 0
def f32_from_b1(a): return np.float32(1 if a else 0)
def i32_from_i32(a): return a
def i64_from_i64(a): return a
