"""Helpers of rendered kernels in plain Python: `namespace(lanes)` gives what their text calls.

Uniform floats are np.float32 and np.float64, uniform integers Python ints (wrapped by `i32` and `i64` where the text
says so), vectors NumPy arrays of `lanes` elements that nothing changes in place; pointers are addresses.
"""
from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, Callable

import numpy as np

from m3jit.ir.eager_math import fma32, fma64
from m3jit.ir.loop import MEMORY

TYPES = {"b1": np.bool_, "i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64}
_STORED = {
    "i8": "<i1",
    "u8": "<u1",
    "i16": "<i2",
    "u16": "<u2",
    "i32": "<i4",
    "i64": "<i8",
    "f16": "<f2",
    "bf16": "<u2",
    "f32": "<f4",
    "f64": "<f8",
    "bool": "<u1",
}
_RANGE = {"i32": (-2.0 ** 31, 2.0 ** 31), "i64": (-2.0 ** 63, 2.0 ** 63)}


def i32(x: Any) -> int: return (int(x) + 2 ** 31) % 2 ** 32 - 2 ** 31
def i64(x: Any) -> int: return (int(x) + 2 ** 63) % 2 ** 64 - 2 ** 63


class Scratch(int):
    """The address of memory that lives as long as this number."""


def scratch(nbytes: int) -> Scratch:
    memory = np.full(nbytes + 64, 0xA5, np.uint8)
    address = Scratch(-(-memory.ctypes.data // 64) * 64)
    address.memory = memory
    return address


def _uniform(x: Any, kind: str) -> Any:
    """A NumPy scalar as uniform values are kept."""
    return int(x) if kind in ("i32", "i64") else bool(x) if kind == "b1" else TYPES[kind](x)


def _kind(*values: Any) -> type | None:
    """dtype of the vectors, else of the NumPy scalars among the operands."""
    return next((v.dtype for v in values if isinstance(v, np.ndarray)), None) or \
        next((v.dtype for v in values if isinstance(v, np.generic)), None)


# -- memory ---------------------------------------------------------------------------------------------------------

def _decode(raw: bytes, dtype: str) -> np.ndarray:
    a = np.frombuffer(raw, _STORED[dtype])
    if dtype == "bf16":
        return (a.astype(np.uint32) << 16).view(np.float32)
    out = a.astype(TYPES[MEMORY[dtype][1]])
    if dtype == "f16":
        out.view(np.uint32)[np.isnan(out)] |= 0x00400000                # NumPy leaves signalling NaNs as they are
    return out


def _encode(v: Any, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        bits = np.asarray(v, np.float32).view(np.uint32)
        rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(v), bits >> 16 | 0x40, rounded).astype(np.uint16)
    if dtype == "f16":
        v = np.asarray(v, np.float32)
        bits = v.view(np.uint32)
        nan = bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF
        return np.where(np.isnan(v), nan, v.astype(np.float16).view(np.uint16)).astype(np.uint16)
    if dtype in ("f32", "f64"):
        return np.asarray(v, TYPES[dtype])
    return np.asarray(v, np.int64).astype(_STORED[dtype])


def _load(dtype: str, p: int, i: int) -> Any:
    size, kind = MEMORY[dtype]
    return _uniform(_decode(ctypes.string_at(int(p) + int(i) * size, size), dtype)[0], kind)


def _store(dtype: str, p: int, i: int, v: Any) -> None:
    size = MEMORY[dtype][0]
    ctypes.memmove(int(p) + int(i) * size, _encode(v, dtype).tobytes(), size)


def _gather(lanes: int, dtype: str, p: int, index: np.ndarray, mask: Any = True) -> np.ndarray:
    size = MEMORY[dtype][0]
    on, zero = np.broadcast_to(mask, lanes).tolist(), bytes(size)
    return _decode(b"".join(ctypes.string_at(int(p) + i * size, size) if m else zero
                            for i, m in zip(np.broadcast_to(index, lanes).tolist(), on)), dtype)


def _scatter(lanes: int, dtype: str, p: int, index: np.ndarray, v: Any, mask: Any = True) -> None:
    size, raw = MEMORY[dtype][0], _encode(np.broadcast_to(v, lanes), dtype).tobytes()
    for lane, (i, m) in enumerate(zip(index.tolist(), np.broadcast_to(mask, lanes).tolist())):
        if m:
            ctypes.memmove(int(p) + i * size, raw[lane * size:lane * size + size], size)


def _load_lanes(lanes: int, dtype: str, p: int, base: int, mask: Any = True) -> np.ndarray:
    size = MEMORY[dtype][0]
    if mask is True or np.all(mask):
        return _decode(ctypes.string_at(int(p) + int(base) * size, lanes * size), dtype)
    return _gather(lanes, dtype, p, int(base) + np.arange(lanes), mask)


def _store_lanes(lanes: int, dtype: str, p: int, base: int, v: Any, mask: Any = True) -> None:
    size = MEMORY[dtype][0]
    if mask is True or np.all(mask):
        ctypes.memmove(int(p) + int(base) * size, _encode(np.broadcast_to(v, lanes), dtype).tobytes(), lanes * size)
    else:
        _scatter(lanes, dtype, p, int(base) + np.arange(lanes), v, mask)


# -- arithmetic -----------------------------------------------------------------------------------------------------

def fma(a: Any, b: Any, c: Any) -> Any:
    kind = _kind(a, b, c)
    out = (fma32 if kind == np.float32 else fma64)(a, b, c)
    return out if out.ndim else out[()]


def _unsigned(v: Any, bits: int) -> Any:
    return v.view(f"u{bits // 8}") if isinstance(v, np.ndarray) else int(v) % 2 ** bits


def _lshr(bits: int, a: Any, n: Any) -> Any:
    if isinstance(a, np.ndarray) or isinstance(n, np.ndarray):
        kind = f"u{bits // 8}"
        a = a.view(kind) if isinstance(a, np.ndarray) else np.asarray(_unsigned(a, bits), kind)
        return (a >> np.asarray(n).astype(kind)).view(f"i{bits // 8}")
    return (i32 if bits == 32 else i64)(_unsigned(a, bits) >> int(n))


def idiv(a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        q = np.abs(a) // b
        return np.where(a < 0, -q, q)
    return a // b if a >= 0 else -(-a // b)


def irem(a: Any, b: Any) -> Any: return a - idiv(a, b) * b
def sqrt(a: Any) -> Any: return np.sqrt(a)
def floor(a: Any) -> Any: return np.floor(a)
def rint(a: Any) -> Any: return np.rint(a)
def canonical(a: Any) -> Any: return np.where(a == a, a, a.dtype.type(math.nan))[()]
def negative(a: Any) -> Any: return -a
def absolute(a: Any) -> Any: return np.abs(a) if _kind(a) is not None else abs(a)
def minimum(a: Any, b: Any) -> Any: return np.minimum(a, b)
def maximum(a: Any, b: Any) -> Any: return np.maximum(a, b)
def zext(a: np.ndarray) -> np.ndarray: return a.view(np.uint32).astype(np.int64)
def first(v: np.ndarray) -> Any: return v[0] if v.dtype.kind == "f" else v[0].item()


def dot4(acc: Any, u: Any, s: Any) -> Any:
    """acc + sum over the four bytes of u (unsigned) times s (signed), wrapping at 32 bits."""
    total = np.asarray(acc, np.int64)
    u, s = np.asarray(u, np.int64), np.asarray(s, np.int64)
    for shift in (0, 8, 16, 24):
        total = total + (u >> shift & 255) * ((s >> shift & 255 ^ 128) - 128)
    return total.astype(np.int32) if total.ndim else i32(total[()])


def lookup(x: Any, *words: Any) -> Any:
    """Each byte of x (0..15) replaced by that byte of the table of 16 in four words."""
    table = np.array(words, np.int32).view(np.uint8)
    out = table[np.ascontiguousarray(np.atleast_1d(np.asarray(x, np.int32))).view(np.uint8) & 15].view(np.int32)
    return out if np.ndim(x) else i32(out[0])


def where(c: Any, a: Any, b: Any) -> np.ndarray:
    kind = _kind(a, b)
    return np.where(c, np.asarray(a, kind), np.asarray(b, kind))


def _where_typed(kind: str, c: Any, a: Any, b: Any) -> np.ndarray:
    return np.where(c, TYPES[kind](a), TYPES[kind](b))


def _to(kind: str, x: Any) -> Any:
    """Conversion: int to float rounds to nearest even, float to int truncates (0 where that is out of range)."""
    vector = isinstance(x, np.ndarray)
    if kind == "i32" and isinstance(x, int):
        return i32(x)
    a = np.asarray(x)
    if kind in _RANGE and a.dtype.kind == "f":
        low, high = _RANGE[kind]
        whole = np.trunc(a.astype(np.float64))
        a = np.where((whole >= low) & (whole < high), whole, 0.0)
    out = a.astype(TYPES[kind])
    return out if vector else _uniform(out[()], kind)


def _as(kind: str, x: Any) -> Any:
    """The same bits as another type."""
    if isinstance(x, np.ndarray):
        return x.view(TYPES[kind])
    if kind in ("f32", "f64"):
        bits = 32 if kind == "f32" else 64
        return np.array(_unsigned(x, bits), f"u{bits // 8}").view(TYPES[kind])[()]
    return int(np.array(x, np.float32 if kind == "i32" else np.float64).view(TYPES[kind]))


# -- across lanes ---------------------------------------------------------------------------------------------------

_COMBINE: dict[str, Callable] = {
    "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "imin": np.minimum, "imax": np.maximum,
    "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "fmin": lambda a, b: np.where((a < b) | (b != b), a, b), "fmax": lambda a, b: np.where((b < a) | (b != b), a, b)}


def _fold(op: str, v: np.ndarray) -> Any:
    """Halving tree: lane l combines with lane l + n/2, then n/4, ... 1."""
    while len(v) > 1:
        half = len(v) // 2
        v = _COMBINE[op](v[:half], v[half:])
    return first(v)


def shuffle_down(v: np.ndarray, by: int) -> np.ndarray:
    return np.concatenate([v[by:], v[len(v) - by:]])


def _splat(lanes: int, kind: str, x: Any) -> np.ndarray:
    return np.full(lanes, x, TYPES[kind])


@functools.cache
def namespace(lanes: int) -> dict[str, Any]:
    """Every name a rendered kernel of this many lanes may use."""
    names: dict[str, Any] = {k: globals()[k] for k in (
        "i32", "i64", "scratch", "fma", "idiv", "irem", "sqrt", "floor", "rint", "negative", "absolute",
        "canonical",
        "minimum", "maximum", "zext", "first", "dot4", "lookup", "where", "shuffle_down")}
    part = functools.partial
    names |= {
        "inf": math.inf,
        "nan": math.nan,
        "f32": np.float32,
        "f64": np.float64,
        "lane_numbers": part(np.arange, lanes, dtype=np.int32),
        "lshr_i32": part(_lshr, 32),
        "lshr_i64": part(_lshr, 64),
    }
    for t in MEMORY:
        names |= {f"load_{t}": part(_load, t), f"store_{t}": part(_store, t),
                  f"load_lanes_{t}": part(_load_lanes, lanes, t), f"store_lanes_{t}": part(_store_lanes, lanes, t),
                  f"gather_{t}": part(_gather, lanes, t), f"scatter_{t}": part(_scatter, lanes, t)}
    for kind in TYPES:
        names |= {
            f"splat_{kind}": part(_splat, lanes, kind),
            f"to_{kind}": part(_to, kind),
            f"as_{kind}": part(_as, kind),
            f"where_{kind}": part(_where_typed, kind),
        }
    return names | {f"fold_{op}": part(_fold, op) for op in _COMBINE}
