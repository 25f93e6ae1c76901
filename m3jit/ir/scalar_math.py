"""exp, log, tanh, erf, sin, cos, sigmoid, softplus on f32: the contract's own definitions, each written once.

Every function takes `m`, a namespace with the loop-IR builder's methods, and f32 values of that namespace: with a
`loop.Builder` the text builds a kernel, with `eager_math.NumpyMath` it computes.  Only correctly rounded operations
occur (+ - * / fma, conversions, integer operations, selects), so both give the same bits everywhere.

Bounds of the error in ulp of f32: `MAX_ULP` (tests/ir/test_scalar_math.py samples all arguments; its `slow` test
takes every one). Measured: exp 1.013 and sigmoid 2.402 over every f32 with |x| in 1e-8 .. 105, log 0.875 over every
positive one, tanh 1.510 and erf 1.079 over every one in 1e-4 .. 5, sin 1.577 over every one from 1e-4 up; softplus
1.892 over every 131st f32 with |x| in 1e-8 .. 105, cos 1.563 and all others over every 131st f32.  Subnormal results
and arguments are treated as such.  NaN gives NaN (any payload; the store makes it canonical).

    exp(-inf) = +0, overflow = +inf        log(+-0) = -inf, log(x < 0) = NaN, log(+inf) = +inf
    tanh, erf: odd, +-1 at +-inf           sin, cos: NaN at +-inf, -0 kept by sin; all finite arguments are reduced
    sigmoid(x) = 1 / (1 + e^-x): 0 at -inf, 1 at +inf, underflows through the subnormals
    softplus(x) = log(1 + e^x): 0 at -inf, +inf at +inf, underflows through the subnormals

Coefficients: tools/fit_polynomials.py.
"""
from __future__ import annotations

from typing import Any

MAX_ULP = {"exp": 1.1, "log": 1.1, "tanh": 2.0, "erf": 1.5, "sin": 2.0, "cos": 2.0, "sigmoid": 2.5, "softplus": 2.5}

Value = Any                                  # loop.Value or eager_math.Lanes


def _hex(text: str) -> tuple[float, ...]:
    return tuple(float.fromhex(word) for word in text.split())


INF, NAN = float("inf"), float("nan")
LOG2_E, TWO_OVER_PI = _hex("0x1.715476p+0 0x1.45f306p-1")
LN2_HI, LN2_LO = _hex("0x1.62e430p-1 -0x1.05c610p-29")
HALF_PI = _hex("0x1.921fb6p+0 -0x1.777a5cp-25 -0x1.ee59dap-50")
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000   # 1.5 * 2^23: adding it rounds to an integer, found in the low bits
SIGN = -0x80000000

EXP = _hex("0x1.fffffcp-2 0x1.555492p-3 0x1.5558b8p-5 0x1.1239aap-7 0x1.6a4508p-10")
LOG = _hex("0x1.555506p-2 -0x1.fffefap-3 0x1.99d05cp-3 -0x1.559c30p-3 0x1.1ed452p-3 -0x1.f33c0cp-4 0x1.1e72a0p-3 "
           "-0x1.07ab64p-3")
TANH = _hex("-0x1.555532p-2 0x1.1106fap-3 -0x1.b8368ep-5 0x1.5200cap-6 -0x1.7537fcp-8")
ERF_SMALL = _hex("0x1.06eba8p-3 -0x1.81273ep-2 0x1.ce2ce6p-4 -0x1.b7f71ap-6 0x1.53f224p-8 -0x1.a3515ep-11 "
                 "0x1.4771fep-14")
ERF_LARGE = _hex("-0x1.20e360p+0 -0x1.45abb4p-1 -0x1.aad4b4p-4 0x1.5cd00ep-6 -0x1.dd68dap-10 -0x1.094d0ap-11 "
                 "0x1.c3f1e8p-13 -0x1.1ca448p-15 0x1.1b9038p-19")
SIN = _hex("-0x1.555556p-3 0x1.111174p-7 -0x1.a0595ep-13 0x1.7c3276p-19")
COS = _hex("0x1.555556p-5 -0x1.6c175ep-10 0x1.a071bap-16 -0x1.361662p-22")
# 2/pi as bits after the binary point, 32 a word, behind one word of zeros (Payne-Hanek reduction)
TWO_OVER_PI_BITS = (0, 0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB)
SMALL_ANGLE = 1e5                            # up to here three parts of pi/2 and fma reduce an angle


def horner(m, x: Value, coefficients: tuple[float, ...]) -> Value:
    """c0 + c1 x + c2 x^2 + ..., folded from the highest with fma."""
    acc: Any = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        acc = m.fma(x, acc, c)
    return acc


def exp(m, x: Value) -> Value:
    """e^x.  x = k ln2 + r, |r| <= ln2/2; e^r by a polynomial; 2^k as two factors, so that a subnormal is rounded
    once."""
    x = m.select(x < -104.0, -104.0, x)      # e^-104 rounds to 0; a NaN passes both selects
    x = m.select(m.f32(89.0) < x, 89.0, x)
    shifted = m.fma(x, LOG2_E, MAGIC)
    k = shifted - MAGIC
    r = m.fma(k, -LN2_LO, m.fma(k, -LN2_HI, x))
    e = m.fma(r * r, horner(m, r, EXP), r) + 1.0
    n = m.bits(shifted) - MAGIC_BITS
    half = n >> 1
    return e * _power_of_two(m, half) * _power_of_two(m, n - half)


def _power_of_two(m, n: Value) -> Value:
    """2^n for -126 <= n <= 127."""
    return m.bits((n + 127) << 23)


def log(m, x: Value) -> Value:
    """Natural logarithm.  x = 2^e (1 + f), 2/3 <= 1 + f < 4/3; log(1 + f) by a polynomial."""
    tiny = x < 2.0 ** -126
    scaled = m.select(tiny, x * 8388608.0, x)
    i = m.bits(scaled)
    e = (i - 0x3F2AAAAB) >> 23
    f = m.bits(i - (e << 23)) - 1.0
    e = m.cvt(m.select(tiny, e - 23, e), "f32")
    square = f * f
    tail = m.fma(square, -0.5, square * f * horner(m, f, LOG))
    y = m.fma(e, LN2_HI, m.fma(e, LN2_LO, tail) + f)
    y = m.select(x < INF, y, x)              # +inf and NaN stay
    return m.select(x.equals(0.0), -INF, m.select(x < 0.0, NAN, y))


def tanh(m, x: Value) -> Value:
    """(1 - e^-2|x|) / (1 + e^-2|x|) with x's sign; a polynomial below 0.625, where that would cancel."""
    a = m.abs(x)
    square = a * a
    near = m.fma(a, square * horner(m, square, TANH), a)
    e = exp(m, a * -2.0)
    far = (1.0 - e) / (1.0 + e)
    return _with_sign(m, m.select(a < 0.625, near, far), x)


def erf(m, x: Value) -> Value:
    """2/sqrt(pi) * integral of e^(-t^2) from 0 to x; beyond 1 as 1 - e^(x q(x)), from 4 on exactly 1."""
    a = m.abs(x)
    near = m.fma(a, horner(m, a * a, ERF_SMALL), a)
    b = m.select(m.f32(4.0) < a, 4.0, a)
    far = 1.0 - exp(m, b * horner(m, b, ERF_LARGE))
    return _with_sign(m, m.select(a < 1.0, near, far), x)


def sigmoid(m, x: Value) -> Value:
    """1 / (1 + e^-x); for x < 0 as e^x / (1 + e^x), which underflows gradually."""
    e = exp(m, -m.abs(x))
    return m.select(x < 0.0, e, 1.0) / (e + 1.0)


def softplus(m, x: Value) -> Value:
    """log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|.  1 + u loses low bits of u: w = 1 + u is rounded, so
    log(1 + u) = log(w) + (u - (w - 1)) / w, where the numerator is exact."""
    u = exp(m, -m.abs(x))
    w = u + 1.0
    near = log(m, w) + (u - (w - 1.0)) / w
    return m.select(x < 0.0, near, x + near)


def _with_sign(m, magnitude: Value, x: Value) -> Value:
    """magnitude >= 0 with the sign bit of x."""
    return m.bits(m.bits(magnitude) | (m.bits(x) & SIGN))


def sin(m, x: Value) -> Value:
    """Sine of x radians, any finite x."""
    return sincos(m, x)[0]


def cos(m, x: Value) -> Value:
    """Cosine of x radians, any finite x."""
    return sincos(m, x)[1]


def sincos(m, x: Value) -> tuple[Value, Value]:
    """(sin x, cos x), one reduction for both."""
    a = m.abs(x)
    k, r = _reduce_small(m, a)
    k_large, r_large = _reduce_large(m, a)
    small = a < SMALL_ANGLE
    s, c = _octants(m, m.select(small, k, k_large), m.select(small, r, r_large), x)
    finite = a < INF
    return m.select(finite, s, NAN), m.select(finite, c, NAN)


def sincos_small(m, x: Value) -> tuple[Value, Value]:
    """The same bits as `sincos`, for callers who know that |x| < SMALL_ANGLE: without the large reduction."""
    k, r = _reduce_small(m, m.abs(x))
    return _octants(m, k, r, x)


def _octants(m, k: Value, r: Value, x: Value) -> tuple[Value, Value]:
    """sin and cos of k pi/2 + r, |r| <= pi/4; sine gets the sign of x."""
    square = r * r
    s = m.fma(r, square * horner(m, square, SIN), r)
    c = m.fma(square * square, horner(m, square, COS), m.fma(square, -0.5, 1.0))
    odd = (k & 1).equals(1)
    sine, cosine = m.bits(m.select(odd, c, s)), m.bits(m.select(odd, s, c))
    sine = sine ^ ((k & 2) << 30) ^ (m.bits(x) & SIGN)
    return m.bits(sine), m.bits(cosine ^ (((k + 1) & 2) << 30))


def _reduce_small(m, a: Value) -> tuple[Value, Value]:
    """(k, r): a = k pi/2 + r, for 0 <= a < SMALL_ANGLE.  The first fma is exact, the others round r itself."""
    shifted = m.fma(a, TWO_OVER_PI, MAGIC)
    k = shifted - MAGIC
    r = a
    for part in HALF_PI:
        r = m.fma(k, -part, r)
    return m.bits(shifted) - MAGIC_BITS, r


def _reduce_large(m, a: Value) -> tuple[Value, Value]:
    """(k mod 4, r) for a >= 2^16, exact to 2^-70: a = M 2^E times a window of 96 bits of 2/pi, modulo 4.

    The window starts at the bit of weight 2^(1 - E): what stands before it gives multiples of 4."""
    i = m.bits(a)
    mantissa = m.zext((i & 0x7FFFFF) | 0x800000)
    offset = (i >> 23) - 120                 # E + 30, the window's first bit counted from the first word
    word, shift = offset >> 5, m.zext(offset & 31)
    words = []
    for t in range(4):
        w: Any = m.i64(TWO_OVER_PI_BITS[t])
        for n in range(1, 5):
            w = m.select(word.equals(n), m.i64(TWO_OVER_PI_BITS[n + t]), w)
        words.append(w)
    high, mid, low = (m.lshr(((x << 32) | y) << shift, 32) for x, y in zip(words, words[1:]))
    product = ((mantissa * high) << 32) + mantissa * mid + m.lshr(mantissa * low, 32)     # 2 bits . 62 bits
    k = m.lshr(product + (1 << 61), 62)
    fraction = product - (k << 62)
    head = m.cvt(fraction, "f32")
    tail = m.cvt(fraction - m.cvt(head, "i64"), "f32")
    hi, lo = HALF_PI[0] * 2.0 ** -62, HALF_PI[1] * 2.0 ** -62
    return m.cvt(k, "i32"), m.fma(head, hi, m.fma(head, lo, tail * hi))
