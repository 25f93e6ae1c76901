"""Derives the polynomial coefficients of m3jit/ir/scalar_math.py: near-minimax fits, rounded to f32 one by one.

    python tools/fit_polynomials.py

For each function the residual q in f(x) = known part + x^m q(z) is fitted on Chebyshev nodes by Lawson's iteratively
re-weighted least squares in float64, so that the *relative* error of f is level; then the lowest coefficient is rounded
to f32, fixed, and the others are fitted again, until all are f32.  Prints each list as hexadecimal floats (lowest
degree first) with the relative error bound of the rounded polynomial.  Needs SciPy (erf, erfc, log1p, expm1 parts).
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import special

NODES = 4000


def fit(target: np.ndarray, z: np.ndarray, weight: np.ndarray, count: int) -> list[float]:
    """f32 coefficients c of sum c_i z^i ~ target, minimising max |weight * (target - sum)|."""
    fixed: list[float] = []
    while len(fixed) < count:
        rest = target - sum(c * z ** i for i, c in enumerate(fixed))
        powers = np.stack([z ** i for i in range(len(fixed), count)], axis=1)
        free = lawson(powers, rest, weight)
        fixed.append(float(np.float32(free[0])))
    return fixed


def lawson(a: np.ndarray, b: np.ndarray, weight: np.ndarray, rounds: int = 60) -> np.ndarray:
    """Chebyshev solution of weight * (a x - b) by iteratively re-weighted least squares."""
    scale = np.abs(a).max(axis=0)
    w = np.full(len(b), 1.0 / len(b))
    best, best_error = np.zeros(a.shape[1]), np.inf
    for _ in range(rounds):
        root = np.sqrt(w) * weight
        x = np.linalg.lstsq(a / scale * root[:, None], b * root, rcond=None)[0] / scale
        error = np.abs(weight * (a @ x - b))
        if error.max() < best_error:
            best, best_error = x, error.max()
        w = w * (error + 1e-300)
        w /= w.sum()
    return best


def nodes(lo: float, hi: float) -> np.ndarray:
    """Chebyshev nodes of an interval, zero excluded."""
    x = (lo + hi) / 2 + (hi - lo) / 2 * np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
    return x[np.abs(x) > 1e-4 * (hi - lo)]


def show(name: str, f: np.ndarray, known: np.ndarray, factor: np.ndarray, z: np.ndarray, count: int,
         weight: np.ndarray | None = None) -> None:
    """Fit f = known + factor * q(z) and print q; weight: how an absolute error of f counts (default 1 / f)."""
    weight = 1 / np.abs(f) if weight is None else weight
    c = fit((f - known) / factor, z, weight * np.abs(factor), count)
    error = np.abs(weight * (known + factor * sum(k * z ** i for i, k in enumerate(c)) - f)).max()
    print(f"{name}: error 2^{np.log2(error):.1f}")
    print("   ", ", ".join(f'"{x.hex()}"' for x in c))


def series(x: np.ndarray, term: Callable[[int], float], first: int, step: int) -> np.ndarray:
    """sum of term(n) x^(n - first) for n = first, first + step, ...: the tails whose direct difference cancels."""
    return sum(term(n) * x ** (n - first) for n in range(first, first + 40 * step, step))


def factorial(n: int) -> float:
    return float(special.factorial(n, exact=True))


def main() -> None:
    x = nodes(-0.3470, 0.3470)
    show("exp: e^r = 1 + r + r^2 q(r)", np.exp(x), 1 + x, x * x, x, 5)
    x = nodes(-1 / 3, 1 / 3)
    tail = series(x, lambda n: (-1) ** (n + 1) / n, 3, 1)
    show("log: log(1+f) = f - f^2/2 + f^3 q(f)", x - x * x / 2 + x ** 3 * tail, x - x * x / 2, x ** 3, x, 8)
    x = nodes(1e-3, 0.626)
    show("tanh: x + x^3 q(x^2)", np.tanh(x), x, x ** 3, x * x, 5)
    x = nodes(1e-3, 1.0)
    show("erf small: x + x q(x^2)", special.erf(x), x, x, x * x, 7)
    x = nodes(0.95, 4.0)
    show("erf large: log erfc(x) = x q(x)", np.log(special.erfc(x)), 0 * x, x, x, 9,
         special.erfc(x) / special.erf(x))
    x = nodes(1e-3, 0.7860)
    sine = series(x, lambda n: (-1) ** (n // 2) / factorial(n), 3, 2)
    show("sin: x + x^3 q(x^2)", x + x ** 3 * sine, x, x ** 3, x * x, 4)
    cosine = series(x, lambda n: (-1) ** (n // 2) / factorial(n), 4, 2)
    show("cos: 1 - x^2/2 + x^4 q(x^2)", 1 - x * x / 2 + x ** 4 * cosine, 1 - x * x / 2, x ** 4, x * x, 4)
    for name, value in (("log2(e)", 1 / np.log(2)), ("2/pi", 2 / np.pi)):
        print(f"{name}: {float(np.float32(value)).hex()}")
    print("bits of 2/pi after the binary point (for the large-argument reduction), 32 a word, from Machin's formula:")
    print("   ", ", ".join(f"0x{w:08x}" for w in two_over_pi_words(7)))
    print("three f32 parts of pi/2:", ", ".join(p.hex() for p in split_f32(pi_scaled(200), 201, 3)))
    print("f32 parts of ln 2:", ", ".join(p.hex() for p in split_f32(ln2_scaled(200), 200, 3)))


def arctan_inverse(n: int, bits: int) -> int:
    """floor-ish 2^bits * arctan(1/n), by Taylor's series on integers."""
    total, power, k = 0, (1 << bits) // n, 1
    while power:
        total += power // k if k % 4 == 1 else -(power // k)
        power //= n * n
        k += 2
    return total


def pi_scaled(bits: int) -> int:
    """2^bits * pi (Machin), exact to a few units."""
    guard = 32
    return (16 * arctan_inverse(5, bits + guard) - 4 * arctan_inverse(239, bits + guard)) >> guard


def ln2_scaled(bits: int) -> int:
    """2^bits * ln 2 = 2 artanh(1/3)."""
    guard = 32
    total, power, k = 0, (1 << bits + guard) // 3, 1
    while power:
        total += power // k
        power //= 9
        k += 2
    return 2 * total >> guard


def two_over_pi_words(count: int) -> list[int]:
    bits = 32 * count
    value = (1 << 2 * bits + 65) // pi_scaled(bits + 64)
    return [value >> bits - 32 * (i + 1) & 0xFFFFFFFF for i in range(count)]


def split_f32(scaled: int, bits: int, parts: int) -> list[float]:
    """scaled / 2^bits as a sum of f32 values, each the nearest to what is left."""
    from fractions import Fraction
    left, out = Fraction(scaled, 1 << bits), []
    for _ in range(parts):
        out.append(float(np.float32(float(left))))
        left -= Fraction(out[-1])
    return out


if __name__ == "__main__":
    main()
