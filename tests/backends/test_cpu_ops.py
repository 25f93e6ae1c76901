"""Every pure operation of the loop IR at every level, lane count and thread count, against NumPy lanes."""
from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from m3jit.ir.loop import MEMORY, PURE
from m3jit.ir.loop_builder import Builder
from tests.backends.cpu_engines import LEVELS, check, engine

SPECIAL = {
    "f32": np.array([0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, np.inf, -np.inf, np.nan, 1e-45,
                     -1e-45, 1.1754944e-38, 3.4028235e38, -3.4028235e38, 8388607.5, 8388608.0, -8388607.5, 4194303.75,
                     16777217.0, 3.1415927, 1e10, 65504.0], np.float32),
    "f64": np.array([0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999999999999994, np.inf, -np.inf,
                     np.nan, 5e-324, -5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 4503599627370495.5,
                     4503599627370496.0, -4503599627370495.5, 1.0000000596046448, 1.0000001788139343,
                     3.4028235677973366e38,
                     7.006492321624085e-46, 1e10], np.float64),
    "i32": np.array([0, 1, -1, 2, 127, 128, 255, 256, -128, 0x7FFFFFFF, -0x80000000, 0x80FF7F01 - (1 << 32), 16777217,
                     0x01020304, -2, 65535, 7], np.int32),
    "i64": np.array([0, 1, -1, 2, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63), (1 << 53) + 1, (1 << 24) + 1, -7,
                     (1 << 62) + (1 << 38) + 1, 1000003], np.int64),
}


def operands(type: str, seed: int) -> list[np.ndarray]:
    """Three operand arrays: all pairs of special values, then random ones."""
    s, rng = SPECIAL[type], np.random.default_rng(seed)
    pairs = np.array(list(itertools.product(range(len(s)), repeat=2)))
    n = 333
    if type[0] == "f":
        def random():
            return (rng.standard_normal(n) * 2.0 ** rng.integers(-12, 12, n)).astype(s.dtype)
    else:
        bits = 8 * s.itemsize

        def random():
            wide = rng.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1, n)
            return (wide >> rng.integers(0, bits, n)).astype(s.dtype)
    third = s[rng.integers(0, len(s), len(pairs))]
    return [np.concatenate([x, random()]) for x in (s[pairs[:, 0]], s[pairs[:, 1]], third)]


def every_operation(b: Builder, type: str, a, c, d) -> dict[str, object]:
    """name -> value, for each operation that takes this operand type."""
    out: dict[str, object] = {}
    two = {"add", "sub", "mul"} | ({"div"} if type[0] == "f" else {"imin", "imax", "and", "or", "xor"})
    for op in sorted(two):
        out[op] = b.pure(op, a, c)
    for op in ("lt", "le", "eq", "ne"):
        out[op] = b.cvt(b.pure(op, a, c), "i32")
    out["neg"], out["abs"], out["bits"] = b.pure("neg", a), b.abs(a), b.bits(a)
    out["select"] = b.select(b.pure("lt", a, c), c, d)
    out["logic"] = b.cvt(b.logical_not((a < c) & (c < d) | b.pure("eq", a, d)), "i64")
    if type[0] == "f":
        out["sqrt"], out["floor"], out["rint"] = b.sqrt(a), b.floor(a), b.rint(a)
        out["fma"] = b.fma(a, c, d)
        out["fmin"], out["fmax"] = b.fmin(a, c), b.fmax(a, c)
        out["other"] = b.cvt(a, "f64" if type == "f32" else "f32")
        small = b.select(b.abs(a) < 1e6, a, b.const(type, 0.0))
        out["to_i32"], out["to_i64"] = b.cvt(small, "i32"), b.cvt(small, "i64")
    else:
        width = 31 if type == "i32" else 63
        for op in ("shl", "lshr", "ashr"):
            out[op] = b.pure(op, a, c & width)
        out["to_f32"], out["to_f64"] = b.cvt(a, "f32"), b.cvt(a, "f64")
        out["other"] = b.cvt(a, "i64" if type == "i32" else "i32")
        if type == "i32":
            out["zext"], out["dot4"] = b.zext(a), b.dot4(d, a, c)
            out["lookup"] = b.lookup(a & 0x0F0F0F0F, [0x03020100, -1, 0x7F00FF80, -0x78563412])
    return out


def ops_kernel(type: str, lanes: int):
    b = Builder(f"ops_{type}", lanes)
    inputs = [b.ptr(x, "r", type) for x in "abc"]
    n = b.scalar("n")
    sinks: dict[str, object] = {}
    b.set_grid((n + (lanes - 1)) // lanes)
    base = b.group * lanes
    inside = b.in_range(base, n)
    values = [b.load_lanes(type, x, base, mask=inside) for x in inputs]
    results = every_operation(b, type, *values)
    for name, v in results.items():
        sinks[name] = b.ptr(name, "w", v.type)
        b.store_lanes(v.type, sinks[name], base, v, mask=inside)
    return b.finish(), {name: v.type for name, v in results.items()}


def outputs(types: dict[str, str], n: int) -> list[np.ndarray]:
    return [np.full(n, 77, {"i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64}[t])
            for t in types.values()]


@pytest.mark.parametrize("lanes", (1, 8, 16, 32, 64))
@pytest.mark.parametrize("type", SPECIAL)
def test_every_operation(type, lanes):
    kernel, types = ops_kernel(type, lanes)
    a, c, d = operands(type, lanes)
    check(kernel, [a, c, d, len(a), *outputs(types, len(a))], threads=(1, 2))


def test_every_operation_is_covered():
    covered = set()
    for type in SPECIAL:
        kernel, _ = ops_kernel(type, 64)
        covered |= {v.op for v in [*kernel.prologue, *kernel.body]}
    elsewhere = {"idiv", "irem", "shuffle_down", "first", "fold", "lane", "group"}   # uniform or across lanes
    assert set(PURE) - covered - elsewhere == set()


@pytest.mark.parametrize("n", (0, 1, 63, 64, 65, 129))
def test_lengths_around_the_lane_count(n):
    kernel, types = ops_kernel("f32", 64)
    a, c, d = (x[:n] for x in operands("f32", 5))
    check(kernel, [a, c, d, n, *outputs(types, n)])


@pytest.mark.parametrize("type", SPECIAL)
def test_uniform_operations(type):
    """The scalar forms: operands loaded with a uniform index, one result per group."""
    b = Builder(f"uniform_{type}", 16)
    inputs = [b.ptr(x, "r", type) for x in "abc"]
    n = b.scalar("n")
    b.set_grid(n)
    results = every_operation(b, type, *(b.load(type, x, b.group) for x in inputs))
    if type[0] == "i":
        positive = b.imax(b.load(type, inputs[1], b.group), 1)
        top = b.load(type, inputs[0], b.group)
        results["idiv"], results["irem"] = top // positive, top % positive
    for name, v in results.items():
        b.store(v.type, b.ptr(name, "w", v.type), b.group, v)
    kernel = b.finish()
    a, c, d = operands(type, 3)
    check(kernel, [a, c, d, len(a), *outputs({k: v.type for k, v in results.items()}, len(a))], threads=(1, 2))


def exact_fma(a: float, b: float, c: float) -> np.float32:
    """a * b + c rounded once to f32, nearest even, by rational arithmetic."""
    from fractions import Fraction
    x = Fraction(a) * Fraction(b) + Fraction(c)
    if x == 0:
        return np.float32(a * b + c)
    e = max(abs(x).numerator.bit_length() - abs(x).denominator.bit_length(), -126) + 1
    while Fraction(2) ** e > abs(x) and e > -126:
        e -= 1
    unit = Fraction(2) ** (e - 23)
    nearest = float(round(x / unit) * unit)             # round() of a Fraction is to nearest even
    return np.float32(math.copysign(nearest, -1.0 if x < 0 else 1.0))


def halfway_fmas(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operands whose product lies on, or a hair beside, the middle between two floats after adding c."""
    rng = np.random.default_rng(seed)
    a = (1 + rng.integers(0, 1 << 12, n) * 2.0 ** -12).astype(np.float32)
    b = (1 + rng.integers(0, 1 << 11, n) * 2.0 ** -11).astype(np.float32)
    product = a.astype(np.float64) * b.astype(np.float64)
    scale = 2.0 ** rng.integers(0, 30, n)
    c = (np.round(product * scale) + 0.5 - product * scale) * 2.0 ** rng.integers(-26, 27, n)
    nudge = rng.choice([0.0, 2.0 ** -40, -2.0 ** -40, 2.0 ** -60], n)
    c = (c + nudge).astype(np.float32)
    return a, (b * scale).astype(np.float32), c


def test_fma_halfway_cases():
    b = Builder("fma", 16)
    x, y, z, o = b.ptr("x", "r", "f32"), b.ptr("y", "r", "f32"), b.ptr("z", "r", "f32"), b.ptr("o", "w", "f32")
    n = b.scalar("n")
    b.set_grid(n // 16)
    at = b.group * 16
    b.store_lanes("f32", o, at, b.fma(*(b.load_lanes("f32", p, at) for p in (x, y, z))))
    kernel = b.finish()
    rng = np.random.default_rng(1)
    h = halfway_fmas(40_000, 7)
    tiny = [(rng.standard_normal(20_000) * 2.0 ** rng.integers(-80, -50, 20_000)).astype(np.float32) for _ in range(2)]
    args = [np.concatenate([h[0], tiny[0]]), np.concatenate([h[1], tiny[1]]),
            np.concatenate([h[2], (rng.integers(-9, 9, 20_000) * 1e-45).astype(np.float32)])]
    size = len(args[0]) // 16 * 16
    args = [a[:size] for a in args]
    check(kernel, [*args, np.zeros(size, np.float32), size], threads=(1,))
    got = np.zeros(size, np.float32)
    engine("baseline").kernel(kernel)([*args, got, size])
    some = rng.integers(0, size, 1500)
    expected = [exact_fma(float(args[0][i]), float(args[1][i]), float(args[2][i])) for i in some]
    assert got[some].tobytes() == np.array(expected, np.float32).tobytes()


@pytest.mark.parametrize("mask", (-1, 0x7F7F7F7F, 0x0F0F0F0F))
@pytest.mark.parametrize("lanes", (16, 64))
def test_dot4_extremes(lanes, mask):
    """All pairs of extreme bytes, with weights of 8, 7 and 4 bits: 255 * -128 four times would saturate pmaddubsw."""
    b = Builder("dot4", lanes)
    p, q, o = b.ptr("p", "r", "i32"), b.ptr("q", "r", "i32"), b.ptr("o", "w", "i32")
    b.set_grid(b.scalar("groups"))
    at = b.group * lanes
    u, s = b.load_lanes("i32", p, at), b.load_lanes("i32", q, at)
    part = (u & mask) | (b.lshr(u, 4) & (mask & 0x0F0F0F0F))
    b.store_lanes("i32", o, at, b.dot4(b.dot4(b.lane, u & mask, s), part, s))
    kernel = b.finish()
    bytes_ = np.array([0, 1, 127, 128, 129, 255], np.uint8)
    pairs = np.array(list(itertools.product(bytes_, bytes_)))
    rng = np.random.default_rng(0)
    u = np.concatenate([np.repeat(pairs[:, 0], 4), rng.choice(bytes_, 4 * 28)]).view(np.int32)
    s = np.concatenate([np.repeat(pairs[:, 1], 4), rng.choice(bytes_, 4 * 28)]).view(np.int32)
    check(kernel, [u, s, np.zeros(64, np.int32), 64 // lanes])
    signed = s.view(np.int8).astype(np.int64).reshape(-1, 4)
    first = ((u & mask).view(np.uint8).astype(np.int64).reshape(-1, 4) * signed).sum(1)
    joined = (u & mask) | ((u.view(np.uint32) >> 4).view(np.int32) & (mask & 0x0F0F0F0F))
    expected = np.arange(64) % lanes + first + (joined.view(np.uint8).astype(np.int64).reshape(-1, 4) * signed).sum(1)
    for level in LEVELS:
        out = np.zeros(64, np.int32)
        engine(level).kernel(kernel)([u, s, out, 64 // lanes])
        assert (out == expected).all(), level


def test_memory_types_are_all_known():
    assert set(MEMORY) == {"i8", "u8", "i16", "u16", "i32", "i64", "f16", "bf16", "f32", "f64", "bool"}
