"""Numbers of the assembly language: every literal form, rounded once to the width it is written for.

Integers: decimal, 0x, 0b, with `_` between digits and a sign.  Floats: decimal, hexadecimal (`0x1.8p-3`), `inf`, `nan`,
`nan:0xBITS` (exactly these bits of the field's own width).  Durations: a number with ns, us, ms, s, min or h gives
whole nanoseconds.
"""
from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from m3jit.isa.fields import RawF32

DURATIONS = {"ns": 1, "us": 10 ** 3, "\u00b5s": 10 ** 3, "ms": 10 ** 6, "s": 10 ** 9, "min": 60 * 10 ** 9,
             "h": 3600 * 10 ** 9}
MAX_DIGITS = 400                   # characters of one literal; nothing in the language needs more
_WIDTHS = {"e": (11, -14, 15), "f": (24, -126, 127), "d": (53, -1022, 1023), "b": (8, -126, 127)}   # b: bfloat16

PATTERN = r"""[+-]?(?:
    0[xX](?:[0-9a-fA-F]+\.[0-9a-fA-F]*|\.?[0-9a-fA-F]+)[pP][+-]?[0-9]+ |
    0[xX][0-9a-fA-F_]+ | 0[bB][01_]+ |
    (?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?:ns|us|\u00b5s|ms|s|min|h)? |
    nan:0[xX][0-9a-fA-F]+ | (?:inf|nan)(?![A-Za-z0-9_.]))"""
_FORM = re.compile(PATTERN + r"\Z", re.X)


class NumberError(ValueError):
    """A literal that means nothing, or not what its place needs."""


@dataclass(frozen=True)
class Literal:
    """A number as written.  exact: its value, unless `special` is "inf", "-inf", "nan" or "bits"."""
    text: str
    exact: Fraction = Fraction(0)
    whole: bool = False            # written as an integer or a duration
    special: str = ""
    bits: int = 0
    negative_zero: bool = False

    @property
    def integer(self) -> int:
        if not self.whole:
            raise NumberError(f"{self.text} is not an integer")
        return int(self.exact)

    def number(self, fmt: str) -> float:
        """The nearest value of struct format e, f, d (or b: bfloat16), ties to even; finite literals never overflow."""
        if self.special == "bits":
            return _from_bits(self, fmt)
        if self.special:
            return float(self.special)
        value = round_to(self.exact, fmt)
        if math.isinf(value):
            raise NumberError(f"{self.text} is too large for {describe(fmt)}")
        return -0.0 if self.negative_zero else value


def describe(fmt: str) -> str:
    """The type name of a float format."""
    return {"e": "f16", "f": "f32", "d": "f64", "b": "bf16"}[fmt]


def parse_number(text: str) -> Literal:
    """The number a token means; NumberError when it means none."""
    if len(text) > MAX_DIGITS:
        raise NumberError(f"a number of {len(text)} characters; {MAX_DIGITS} are allowed")
    if not _FORM.match(text):
        raise NumberError(f"{text} is not a number")
    low = text.lower()
    body = low.lstrip("+-")
    sign = -1 if low.startswith("-") else 1
    if body.startswith("nan:"):
        if low[0] in "+-":
            raise NumberError(f"{text}: a sign before nan:0x..; the bits hold it")
        return Literal(text, special="bits", bits=int(body[4:], 16))
    if body in ("inf", "nan"):
        return Literal(text, special=("-" if sign < 0 and body == "inf" else "") + body)
    if body.startswith("0x") and "p" in body:
        value = sign * _hex_float(body[2:], text)
        return Literal(text, value, negative_zero=value == 0 and sign < 0)
    if body[:2] in ("0x", "0b"):
        digits = body[2:].strip("_")
        if not digits:
            raise NumberError(f"{text} has no digits")
        return Literal(text, Fraction(sign * int(digits.replace("_", ""), 16 if body[1] == "x" else 2)), whole=True)
    return _decimal(text, body, sign)


def _decimal(text: str, body: str, sign: int) -> Literal:
    m = re.match(r"([0-9._]*)(?:e([+-]?[0-9]+))?(.*)\Z", body)
    assert m
    digits, suffix = m[1].replace("_", ""), m[3]
    exponent = _exponent(m[2], text)
    value = sign * Fraction(digits + "0" if digits.endswith(".") else digits) * Fraction(10) ** exponent
    if suffix:
        value *= DURATIONS[suffix]
        if value.denominator != 1:
            raise NumberError(f"{text} is not a whole number of nanoseconds")
        if abs(value) >= 2 ** 64:
            raise NumberError(f"{text} is more than 2**64 nanoseconds (584 years)")
        return Literal(text, value, whole=True)
    whole = m[2] is None and "." not in digits
    return Literal(text, value, whole=whole, negative_zero=value == 0 and sign < 0 and not whole)


def _hex_float(body: str, text: str) -> Fraction:
    mantissa, _, exp = body.partition("p")
    left, _, right = mantissa.partition(".")
    if not left + right:
        raise NumberError(f"{text} has no digits")
    return Fraction(int(left + right, 16), 16 ** len(right)) * Fraction(2) ** _exponent(exp, text)


def _exponent(digits: str | None, text: str) -> int:
    n = int(digits or 0)
    if abs(n) > 5000:
        raise NumberError(f"{text}: the exponent is out of range")
    return n


def round_to(x: Fraction, fmt: str) -> float:
    """x rounded once, half to even, to a float format; infinity when it is beyond the largest value."""
    precision, low, high = _WIDTHS[fmt]
    if not x:
        return 0.0
    a = abs(x)
    e = max(a.numerator.bit_length() - a.denominator.bit_length() - 1, low)
    while a >= Fraction(2) ** (e + 1):
        e += 1
    step = Fraction(2) ** (e - precision + 1)
    n = a / step
    q, rest = divmod(n.numerator, n.denominator)
    if 2 * rest > n.denominator or 2 * rest == n.denominator and q & 1:
        q += 1
    value = q * step
    if value >= Fraction(2) ** (high + 1):
        return math.inf if x > 0 else -math.inf         # x itself may be beyond any float
    return float(value) if x > 0 else -float(value)


def _from_bits(lit: Literal, fmt: str) -> float:
    size = {"e": 2, "f": 4, "d": 8, "b": 2}[fmt]
    exponent, mantissa = {"e": (0x7C00, 0x3FF), "f": (0x7F800000, 0x7FFFFF), "b": (0x7F80, 0x7F),
                          "d": (0x7FF << 52, (1 << 52) - 1)}[fmt]
    if lit.bits >> 8 * size:
        raise NumberError(f"{lit.text}: an {describe(fmt)} has {8 * size} bits")
    if lit.bits & exponent != exponent or not lit.bits & mantissa:
        raise NumberError(f"{lit.text}: these bits are not a NaN of {describe(fmt)}")
    if fmt == "f":
        return RawF32(lit.bits)
    if fmt == "b":
        return RawF32(lit.bits << 16)
    return struct.unpack("<" + fmt, lit.bits.to_bytes(size, "little"))[0]


def format_float(value: float, fmt: str) -> str:
    """The shortest text that gives exactly this value back; NaNs with their bits."""
    if math.isnan(value):
        bits = value.bits if isinstance(value, RawF32) else \
            int.from_bytes(struct.pack("<" + ("f" if fmt == "b" else fmt), value), "little")
        if fmt == "b":
            bits >>= 16
        return f"nan:0x{bits:0{ {'e': 4, 'b': 4, 'f': 8, 'd': 16}[fmt]}x}"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if fmt == "d" or fmt == "b":
        return repr(float(value))
    text = str((np.float32 if fmt == "f" else np.float16)(value))
    return text if any(c in text for c in ".en") else text + ".0"
