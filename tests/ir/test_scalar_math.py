"""The contract's scalar functions: errors in ulp against float64 libm and SciPy, special values, fma halfway cases."""
from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from m3jit.ir import eager_math, scalar_math
from m3jit.ir.loop_builder import Builder
from tests.exact import exact_f32

WITNESS = {"exp": np.exp, "log": np.log, "tanh": np.tanh, "erf": special.erf, "sin": np.sin, "cos": np.cos,
           "sigmoid": special.expit, "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))}
INF, NAN = np.inf, np.nan


def eager(name: str, x: np.ndarray) -> np.ndarray:
    return getattr(eager_math, name + "32")(x)


def check_ulp(name: str, bits: np.ndarray) -> float:
    """Largest error in ulp of f32 over the arguments with these bits; NaN and infinity must agree exactly."""
    x = bits.astype(np.uint32).view(np.float32)
    got = eager(name, x)
    with np.errstate(all="ignore"):
        want = WITNESS[name](x.astype(np.float64))
        want32 = want.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want32))
    infinite = np.isinf(got) | np.isinf(want32)
    np.testing.assert_array_equal(got[infinite], want32[infinite])
    finite = ~infinite & ~np.isnan(want32)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(want32[finite]))
    if not finite.any():
        return 0.0
    exponent = np.frexp(np.maximum(np.abs(want[finite]), 2.0 ** -126))[1] - 1
    return float((np.abs(got[finite].astype(np.float64) - want[finite]) / np.ldexp(1.0, exponent - 23)).max())


@pytest.mark.parametrize("name", WITNESS)
def test_error_over_a_sampled_sweep(name):
    worst = check_ulp(name, np.arange(0, 2 ** 32, 7919, dtype=np.uint64))
    assert worst <= scalar_math.MAX_ULP[name]
    assert worst > 0.45, "a function of f32 cannot be this exact: the measurement is broken"


@pytest.mark.parametrize("name", WITNESS)
def test_error_where_branches_and_reductions_meet(name):
    marks = np.array([0.625, 1.0, 4.0, 2.0 ** -126, 1e5, 2.0 ** 16, 88.72284, -103.97208, -87.33655, 0.6666667,
                      1.3333334,
                      *(np.arange(1, 400) * np.pi / 4), *(np.arange(63000, 63662) * np.pi / 2), 16367173.0 * 2.0 ** 72],
                     np.float32).view(np.uint32).astype(np.int64)
    bits = (marks[:, None] + np.arange(-40, 41)).ravel()
    bits = np.concatenate([bits, bits ^ 0x80000000])
    assert check_ulp(name, bits) <= scalar_math.MAX_ULP[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITNESS)
def test_error_over_every_argument(name):
    worst = max(check_ulp(name, np.arange(at, at + (1 << 24), dtype=np.uint64)) for at in range(0, 1 << 32, 1 << 24))
    print(f"{name}: {worst:.4f} ulp")
    assert worst <= scalar_math.MAX_ULP[name]


@pytest.mark.parametrize("name, pairs", [
    ("exp", [(INF, INF), (-INF, 0.0), (0.0, 1.0), (-0.0, 1.0), (-104.0, 0.0), (-103.9, 1e-45), (88.8, INF)]),
    ("log", [(0.0, -INF), (-0.0, -INF), (-1.0, NAN), (-INF, NAN), (INF, INF), (1.0, 0.0), (1e-45, np.log(2.0) * -149)]),
    ("tanh", [(INF, 1.0), (-INF, -1.0), (-0.0, -0.0), (0.0, 0.0), (1e-45, 1e-45)]),
    ("erf", [(INF, 1.0), (-INF, -1.0), (-0.0, -0.0), (1e-45, 1e-45), (5.0, 1.0)]),
    ("sin", [(INF, NAN), (-INF, NAN), (-0.0, -0.0), (0.0, 0.0), (1e-45, 1e-45)]),
    ("cos", [(INF, NAN), (-INF, NAN), (-0.0, 1.0)]),
    ("sigmoid", [(INF, 1.0), (-INF, 0.0), (-0.0, 0.5), (-103.9, 1e-45), (-105.0, 0.0)]),
    ("softplus", [(INF, INF), (-INF, 0.0), (-0.0, np.log(2.0)), (-103.9, 1e-45), (-105.0, 0.0), (100.0, 100.0)]),
])
def test_special_values(name, pairs):
    x, want = np.array(pairs, np.float32).T
    got = eager(name, x)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
    assert np.isnan(eager(name, np.array([NAN], np.float32))).all()


def test_small_angle_form_gives_the_same_bits():
    x = np.linspace(-99999, 99999, 50001).astype(np.float32)
    lanes = eager_math.Lanes(x, "f32")
    for full, small in zip(scalar_math.sincos(eager_math.MATH, lanes),
                           scalar_math.sincos_small(eager_math.MATH, lanes)):
        assert full.array.tobytes() == small.array.tobytes()


@pytest.mark.parametrize("name", WITNESS)
def test_the_same_text_builds_a_kernel(name):
    b = Builder(name)
    x, y = b.ptr("x", "r", "f32"), b.ptr("y", "w", "f32")
    b.set_grid(1)
    b.store_lanes("f32", y, 0, getattr(scalar_math, name)(b, b.load_lanes("f32", x, 0)))
    assert len(b.finish().body) > 10


# -- fma -----------------------------------------------------------------------------------------------------------

def assert_fma32(a, b, c):
    a, b, c = (np.asarray(v, np.float32).ravel() for v in (a, b, c))
    got = eager_math.fma32(a, b, c)
    for x, y, z, g in zip(a, b, c, got):
        want = exact_f32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        assert g == want, (float(x).hex(), float(y).hex(), float(z).hex(), float(g).hex(), float(want).hex())


finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(finite32, finite32, finite32)
def test_fma32_is_correctly_rounded(a, b, c):
    assert_fma32(a, b, c)


def test_fma32_constructed_halfway_cases():
    """c sits exactly on, or a hair from, a midpoint of two f32 values; the product decides, far below f64's last
    bit."""
    rng = np.random.default_rng(1)
    cases = []
    for _ in range(400):
        c = float(np.float32(rng.integers(1 << 23, 1 << 24))) * 2.0 ** int(rng.integers(-100, 60))
        half = float(np.spacing(np.float32(c))) / 2
        a = float(np.float32(1 + rng.integers(0, 1 << 12) * 2.0 ** -12))
        for sign in (1, -1):
            for nudge in (0.0, 2.0 ** -23, -2.0 ** -24, 2.0 ** -22):
                cases.append((sign * float(np.float32((1 + nudge))), half, c))
                cases.append((sign * (1 + 2.0 ** -12), float(np.float32(half * (1 - 2.0 ** -12))), c))
                cases.append((sign * a, float(np.float32(half / a)), c))
    assert_fma32(*np.array(cases).T)


def test_fma32_double_rounding_is_really_repaired():
    """1 + 2^-24 + 2^-60: f64 drops the last term, the tie then goes to even; the right answer is the next f32."""
    a, b, c = np.float32(2.0 ** -24 + 2.0 ** -47), np.float32(1.0), np.float32(1.0)
    assert eager_math.fma32(a, b, c) == np.float32(1 + 2.0 ** -23)
    a, b = np.float32(1 + 2.0 ** -18), np.float32(2.0 ** -24 * (1 - 2.0 ** -18))        # a*b = 2^-24 (1 - 2^-36)
    big = np.float32(1 + 2.0 ** -23)
    assert eager_math.fma32(a, b, big) == big


def test_fma32_subnormal_and_overflow():
    tiny, top = np.float32(1e-45), np.finfo(np.float32).max
    half_ulp = 2.0 ** 103
    cases = [(2.0 ** -75, 2.0 ** -75, tiny), (-2.0 ** -75, 2.0 ** -75, tiny), (2.0 ** -75, 2.0 ** -76, tiny),
             (1.5 * 2.0 ** -75, 2.0 ** -75, 0), (2.0 ** -75, 2.0 ** -75, 0),
             (2.0 ** -75, 2.0 ** -75 * (1 + 2.0 ** -20), 0),
             (2.0 ** -63 * (1 - 2.0 ** -24), 2.0 ** -63, 2.0 ** -149), (half_ulp, 1, top),
             (half_ulp, 1 - 2.0 ** -24, top), (top, top, top), (top, -top, top), (-half_ulp, 1, -top)]
    assert_fma32(*np.array(cases, np.float64).T)
    rng = np.random.default_rng(2)
    a, b, c = (rng.integers(1, 1 << 24, 3000) * 2.0 ** rng.integers(-100, -60, 3000) for _ in range(3))
    assert_fma32(a, b, c * 2.0 ** -76)


def test_fma32_specials_and_signed_zero():
    f = eager_math.fma32
    assert np.isnan(f(INF, 0, 1)) and np.isnan(f(INF, 1, -INF)) and f(INF, 1, 1) == INF and np.isnan(f(NAN, 1, 1))
    assert not np.signbit(f(1, 1, -1)) and np.signbit(f(-0.0, 1, -0.0)) and not np.signbit(f(-0.0, 1, 0.0))


def test_fma32_broadcasts_and_writes_in_place():
    acc = np.zeros((3, 5), np.float32)
    got = eager_math.fma32(np.float32(2), np.arange(5, dtype=np.float32), acc, out=acc)
    assert got is acc and (acc == 2 * np.arange(5)).all()


@given(*[st.floats(allow_nan=False, allow_infinity=False)] * 3)
def test_fma64_is_correctly_rounded(a, b, c):
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        want = float(exact)
    except OverflowError:
        want = INF if exact > 0 else -INF
    assert float(eager_math.fma64(a, b, c)) == want


def test_fma64_constructed_halfway_cases():
    rng = np.random.default_rng(3)
    for _ in range(500):
        c = 1 + int(rng.integers(0, 1 << 52)) * 2.0 ** -52
        scale = 2.0 ** int(rng.integers(-1060, 900))
        for nudge in (1, 1 + 2.0 ** -52, 1 - 2.0 ** -53):
            a, b = 2.0 ** -53 * nudge, rng.choice([1.0, -1.0])
            want = Fraction(a) * Fraction(float(b)) * Fraction(scale) + Fraction(c) * Fraction(scale)
            if c * scale > 0:
                assert float(eager_math.fma64(a * scale, b, c * scale)) == float(
                    Fraction(a * scale) * Fraction(float(b)) + Fraction(c * scale)), (a, b, c, scale, want)
    assert np.isnan(eager_math.fma64(INF, 0.0, 1.0)) and eager_math.fma64(1.0, 1.0, -INF) == -INF
