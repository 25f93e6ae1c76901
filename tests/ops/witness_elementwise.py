"""Witnesses of the elementwise family: float64 arithmetic of NumPy and SciPy, rounded once."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from scipy import special

from m3jit.isa.types import BF16, F16, F32, I8, I16, I32, I64, U8
from tests.ops.cases import FLOATS, Case, close, noise, rounded, same, tensor, values, witness

SHAPES = [(0,), (), (1,), (7,), (8,), (3, 5), (2, 1, 67), (4097,), (1, 2, 3, 4, 5)]
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-38, 3e38, -3e38, 65504.0, 1.0, -1.0, 100.0,
                    -100.0, 88.0, -88.0, 0.625, -0.625], np.float64)
PAIRS = [((0,), (0,)), ((0, 3), (1, 3)), ((), ()), ((1,), (1,)), ((7,), (7,)), ((3, 1), (1, 5)), ((2, 1, 67), (67,)),
         ((4097,), ()), ((4097,), (4097,)), ((2, 1, 3, 1, 2), (4, 1, 5, 1))]


def _binary(f: Callable) -> Iterator[Case]:
    for dtype in FLOATS:
        for i, (sa, sb) in enumerate(PAIRS):
            a, b = tensor(noise(*sa, seed=i), dtype), tensor(noise(*sb, seed=i + 100), dtype)
            yield Case(f"{dtype} {sa} {sb}", {"a": a, "b": b}, same(rounded(f(values(a), values(b)), dtype)),
                       np.broadcast_shapes(sa, sb))
    a, b = (tensor(x.ravel()) for x in np.meshgrid(SPECIAL, SPECIAL))
    with np.errstate(all="ignore"):
        yield Case("special values", {"a": a, "b": b}, same(rounded(f(values(a), values(b)), F32)))
    half, bfloat = tensor(noise(9, seed=1), F16), tensor(noise(9, seed=2), BF16)
    yield Case("F16 with BF16", {"a": half, "b": bfloat}, same(rounded(f(values(half), values(bfloat)), F32)))
    for dtype in (I8, U8, I16, I32, I64):
        bits = 8 * dtype.nbytes
        raw = np.random.default_rng(bits).integers(0, 256, (2, 70 * dtype.nbytes), dtype=np.uint8)
        a, b = (tensor(r.view(dtype.numpy), dtype) for r in raw)
        wrapped = [f(int(x), int(y)) % 2 ** bits for x, y in zip(a.data, b.data)]
        want = np.array(wrapped, np.uint64).astype(dtype.numpy)
        yield Case(f"{dtype} wraps", {"a": a, "b": b}, same(want), (70,))
    x = tensor(noise(5, seed=3))
    yield Case("a float register", {"a": x, "b": 0.1}, same(rounded(f(values(x), float(np.float32(0.1))), F32)))
    yield Case("an integer register", {"a": 3, "b": x}, same(rounded(f(3.0, values(x)), F32)))
    yield Case("two integers", {"a": 2 ** 62, "b": 5}, same((f(2 ** 62, 5) + 2 ** 63) % 2 ** 64 - 2 ** 63))
    yield Case("two floats", {"a": 1.5, "b": -0.3}, same(f(1.5, -0.3)))
    lanes = noise(8, seed=4)
    yield Case("a V register", {"a": tensor(lanes), "b": tensor(lanes[::-1])},
               same(rounded(f(lanes.astype(np.float64), lanes[::-1].astype(np.float64)), F32)))


@witness("ADD")
def add() -> Iterator[Case]:
    return _binary(lambda a, b: a + b)


@witness("MUL")
def mul() -> Iterator[Case]:
    return _binary(lambda a, b: a * b)


def _unary(f: Callable, ulps: float, scale: float = 1.0, shift: float = 0.0, size: Callable | None = None,
           **options) -> Iterator[Case]:
    """size: magnitude the error is relative to, where the formula cancels."""
    for dtype in FLOATS:
        for i, s in enumerate(SHAPES):
            x = tensor(noise(*s, seed=i, scale=scale) + shift, dtype)
            v = values(x)
            with np.errstate(all="ignore"):
                want = f(v)
            yield Case(f"{dtype} {s}", {"x": x, **options},
                       close(want, dtype, ulps, None if size is None else size(v, want)), s)
    x = tensor(SPECIAL)
    with np.errstate(all="ignore"):
        want = f(values(x))
    yield Case("special values", {"x": x, **options}, close(want, F32, ulps, None if size is None else
                                                            np.where(np.isfinite(want), size(values(x), want), 1)))


@witness("EXP")
def exp() -> Iterator[Case]:
    return _unary(np.exp, 1.1, 5.0)


@witness("LOG")
def log() -> Iterator[Case]:
    def f(x):
        return np.where(x < 0, np.nan, np.log(np.abs(x)))
    return _unary(f, 1.1, 2.0, 3.0)


@witness("TANH")
def tanh() -> Iterator[Case]:
    return _unary(np.tanh, 2.0, 2.0)


@witness("SIGMOID")
def sigmoid() -> Iterator[Case]:
    return _unary(special.expit, 2.5, 3.0)


@witness("SILU")
def silu() -> Iterator[Case]:
    def size(x, want):                     # a subnormal sigmoid has few bits left
        return np.maximum(np.abs(want), np.abs(x) * 2.0 ** -126)
    return _unary(lambda x: x * special.expit(x), 4.0, 3.0, size=size)


@witness("GELU")
def gelu() -> Iterator[Case]:
    def size(x, want):                     # 1 + erf cancels below 0: the error is relative to x
        return np.maximum(np.abs(want), np.abs(x) * 0.5)
    yield from _unary(lambda x: 0.5 * x * (1 + special.erf(x / np.sqrt(2))), 4.0, 0.5, 0.5, size=size)
    yield from _unary(lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3))), 6.0, 0.5, 0.5,
                      size=size, approx="TANH")


@witness("RELU")
def relu() -> Iterator[Case]:
    def f(x):
        return np.where(x > 0, x, 0.0)
    for dtype in FLOATS:
        for i, s in enumerate(SHAPES):
            x = tensor(noise(*s, seed=i), dtype)
            yield Case(f"{dtype} {s}", {"x": x}, same(f(values(x))), s)
    yield Case("special values", {"x": tensor(SPECIAL)}, same(f(values(tensor(SPECIAL)))))
    for dtype in (I8, U8, I32, I64):
        x = tensor(np.arange(-5, 6) if dtype is not U8 else np.arange(11), dtype)
        yield Case(f"{dtype}", {"x": x}, same(np.where(x.data > 0, x.data, 0).astype(dtype.numpy)))


@witness("CLIP")
def clip() -> Iterator[Case]:
    for dtype in FLOATS:
        for i, s in enumerate(SHAPES):
            x = tensor(noise(*s, seed=i), dtype)
            want = rounded(np.clip(values(x), -0.3125, 0.75), dtype)
            yield Case(f"{dtype} {s}", {"x": x, "min": -0.3125, "max": 0.75}, same(want), s)
    x = tensor(SPECIAL)
    yield Case("special values", {"x": x, "min": -2.0, "max": 2.0}, same(np.clip(values(x), -2, 2)))
    yield Case("one point", {"x": x, "min": 1.5, "max": 1.5}, same(np.where(np.isnan(SPECIAL), np.nan, 1.5)))
