"""The frequency table of rotary positions, the same for every executor."""
from __future__ import annotations

import functools
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import numpy as np

from m3jit.errors import OperandError


def nearest_f32(value: Fraction) -> np.float32:
    """The f32 nearest to a positive rational number."""
    near = np.float32(float(value))
    around = [near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))]
    return min((c for c in around if np.isfinite(c)), key=lambda c: abs(Fraction(float(c)) - value))


@functools.lru_cache(maxsize=64)
def rope_frequencies(theta: float, head_dim: int) -> np.ndarray:
    """f32(theta^(-2i / head_dim)) for i in 0 .. head_dim/2 - 1, correctly rounded (60 decimal digits on the way).

    The array is shared and read-only."""
    if not 0 < theta < float("inf"):
        raise OperandError(f"ROPE needs a positive, finite THETA, got {theta!r}")
    with localcontext(Context(prec=60)):
        log = Decimal(theta).ln()
        table = np.array([nearest_f32(Fraction((log * (-2 * i) / head_dim).exp())) for i in range(head_dim // 2)],
                         np.float32)
    table.setflags(write=False)
    return table
