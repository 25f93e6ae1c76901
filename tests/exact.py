"""Exact rounding by rational arithmetic, for tests of what NumPy computes in bulk."""
from __future__ import annotations

from fractions import Fraction

import numpy as np


def exact_f32(value: Fraction) -> np.float32:
    """The f32 nearest to a fraction, ties to even, subnormals and overflow included; by integer arithmetic."""
    if value == 0:
        return np.float32(0)
    sign, v = (-1 if value < 0 else 1), abs(value)
    e = v.numerator.bit_length() - v.denominator.bit_length()
    e = e - 1 if v < Fraction(2) ** e else e
    unit = Fraction(2) ** (max(e, -126) - 23)
    n = v / unit
    whole = n.numerator // n.denominator
    rest = n - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1)
    result = whole * unit
    return np.float32(sign * np.inf) if result >= 2 ** 128 else np.float32(sign * float(result))


def fma(a: float, b: float, c: float) -> np.float32:
    """a * b + c of finite f32 values, rounded once."""
    product, addend = Fraction(float(a)) * Fraction(float(b)), Fraction(float(c))
    if product + addend == 0:                              # the sign of an exact zero is IEEE addition's
        with np.errstate(all="ignore"):
            return np.float32(np.float64(a) * np.float64(b) + np.float64(c))
    return exact_f32(product + addend)
