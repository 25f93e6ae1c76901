"""Packing into Q4_K and Q6_K: the searches for scales that llama.cpp makes, in a fixed order of operations.

What a block's scales should be is not defined by its format; ggml searches.  The same candidates and the same
criteria are used here, all in f32, sums folded over a sub-block's elements in order, divisions and products rounded on
their own, integers rounded half to even: so results do not depend on the machine, and are as good as llama.cpp's (whose
sums depend on its build: single codes differ).

Q4_K, per sub-block of 32 (x; weights w = |x| + sqrt(mean x^2)): start from min = min(x, 0), scale = (max - min) / 15.
Then for 21 inverse scales i = (14 + 0.1 step) / (max - min), with the min found so far: codes l = rint(i (x - min)) in
0..15, and the scale and min that fit them best in the weighted squares (min 0 where it would be positive); kept where
the weighted squared error gets smaller.  Scales and mins of the 8 sub-blocks are then stored as 6-bit multiples of
d = max scale / 63 and dmin = max(-min) / 63 (F16), and the codes are made again with those.

Q6_K, per sub-block of 16 (w = x^2): for 19 inverse scales i = -(32 + 0.1 step) / peak, step -9..9, 0 first: codes
l = rint(i x) in -32..31, scale sum w x l / sum w l^2; kept where (sum w x l)^2 / sum w l^2 grows.  Scales are stored as
8-bit multiples of d = (scale of largest magnitude) / -128 (F16), and the codes are made again with those.
"""
from __future__ import annotations

import numpy as np

from m3jit.errors import OperandError

F = np.float32
STEPS_Q4, STEPS_Q6 = 21, (0, *range(-9, 0), *range(1, 10))
LARGEST = 1e10                               # beyond 65504 * 128 * 32, what the largest scales reach
TINY = F(1e-15)                              # a Q6_K block whose scales are all smaller is zeros


def _fold(terms: np.ndarray) -> np.ndarray:
    """Sum over the first axis, element after element."""
    total = terms[0].copy()
    for term in terms[1:]:
        total += term
    return total


def _check_size(x: np.ndarray) -> None:
    """Refuses what no F16 scale can stand for, and what would overflow in the search's squares and cubes."""
    peak = float(np.abs(x).max(initial=0))
    if peak > LARGEST:
        raise OperandError(f"QUANTIZE: a block with a value of {peak:g} needs a scale that F16 cannot hold (65504 at "
                           "most)")


def _half(v: np.ndarray, name: str) -> np.ndarray:
    half = v.astype("<f2")
    if np.isinf(half).any():
        raise OperandError(f"QUANTIZE: a block needs the {name} {float(np.abs(v).max()):g}, which F16 cannot hold "
                           "(65504 at most)")
    return half


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, and 0 where b is 0."""
    return np.where(b == 0, F(0), a / np.where(b == 0, F(1), b))


# -- Q4_K --------------------------------------------------------------------------------------------------------------

def _scale_and_min(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Best (scale, -min) of sub-blocks x [32, n]."""
    w = np.abs(x) + np.sqrt(_fold(x * x) / F(32))
    low, high = np.minimum(x.min(axis=0), F(0)), x.max(axis=0)
    varied = high > low
    sum_w, sum_x = _fold(w), _fold(w * x)
    scale = (high - low) / F(15)

    def error(codes: np.ndarray, s: np.ndarray, m: np.ndarray) -> np.ndarray:
        apart = s * codes + m - x
        return _fold(w * (apart * apart))

    def codes_for(top: float) -> np.ndarray:
        inverse = _divided(np.broadcast_to(F(top), low.shape), high - low)
        return np.clip(np.rint(inverse * (x - low)), F(0), F(15))

    best = error(codes_for(15), scale, low)
    for step in range(STEPS_Q4):
        codes = codes_for(14 + 0.1 * step)
        wl = w * codes
        sum_l, sum_l2, sum_xl = _fold(wl), _fold(wl * codes), _fold(wl * x)
        det = sum_w * sum_l2 - sum_l * sum_l
        s = _divided(sum_w * sum_xl - sum_x * sum_l, det)
        m = _divided(sum_l2 * sum_x - sum_l * sum_xl, det)
        above = m > 0
        s, m = np.where(above, _divided(sum_xl, sum_l2), s), np.where(above, F(0), m)
        found = error(codes, s, m)
        better = (det > 0) & (found < best) & varied
        best, scale, low = np.where(better, found, best), np.where(better, s, scale), np.where(better, m, low)
    return scale, -low


def _six_bits(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(v's 8 values in units of their maximum / 63 as 0..63 [n, 8], that unit [n, 1])."""
    top = v.max(axis=-1, keepdims=True)
    return np.minimum(np.rint(_divided(np.broadcast_to(F(63), top.shape), top) * v), F(63)), top / F(63)


def encode_q4_k(x: np.ndarray) -> list[np.ndarray]:
    """x f32 [n, 256] -> the parts of Q4_K blocks, [n, bytes] each."""
    _check_size(x)
    sub = np.ascontiguousarray(x.reshape(-1, 32).T)
    scales, lows = (v.reshape(-1, 8) for v in _scale_and_min(sub))
    (sc, d), (m, dmin) = _six_bits(scales), _six_bits(np.maximum(lows, F(0)))
    d, dmin = _half(d, "scale"), _half(dmin, "minimum")
    step = (d.astype(F) * sc).reshape(-1, 8, 1)
    shifted = x.reshape(-1, 8, 32) + (dmin.astype(F) * m).reshape(-1, 8, 1)
    q = np.clip(np.rint(_divided(shifted, np.broadcast_to(step, shifted.shape))), F(0), F(15)).astype(np.uint8)
    sc, m = sc.astype(np.uint8), m.astype(np.uint8)
    packed = np.concatenate([sc[:, :4] | (sc[:, 4:] >> 4) << 6, m[:, :4] | (m[:, 4:] >> 4) << 6,
                             (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4], axis=-1)
    pairs = q.reshape(-1, 4, 2, 32)
    return [d.view(np.uint8), dmin.view(np.uint8), packed, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)]


# -- Q6_K --------------------------------------------------------------------------------------------------------------

def _signed_scale(x: np.ndarray) -> np.ndarray:
    """Best scale of sub-blocks x [16, n] with codes -32..31."""
    peak = np.take_along_axis(x, np.argmax(np.abs(x), axis=0)[None], 0)[0]
    w = x * x
    scale, best = np.zeros_like(peak), np.zeros_like(peak)
    for step in STEPS_Q6:
        inverse = _divided(np.broadcast_to(F(-(32 + 0.1 * step)), peak.shape), peak)
        codes = np.clip(np.rint(inverse * x), F(-32), F(31))
        wl = w * codes
        sum_xl, sum_l2 = _fold(wl * x), _fold(wl * codes)
        better = (sum_l2 > 0) & ((sum_xl * sum_xl > best * sum_l2) if step else True)
        s = _divided(sum_xl, sum_l2)
        scale, best = np.where(better, s, scale), np.where(better, s * sum_xl, best)
    return scale


def encode_q6_k(x: np.ndarray) -> list[np.ndarray]:
    """x f32 [n, 256] -> the parts of Q6_K blocks, [n, bytes] each."""
    _check_size(x)
    scales = _signed_scale(np.ascontiguousarray(x.reshape(-1, 16).T)).reshape(-1, 16)
    top = np.take_along_axis(scales, np.argmax(np.abs(scales), axis=-1)[:, None], -1)
    top = np.where(np.abs(top) < TINY, F(0), top)
    inverse = _divided(np.broadcast_to(F(-128), top.shape), top)
    d = _half(_divided(np.ones_like(inverse), inverse), "scale")
    sc = np.clip(np.rint(inverse * scales), F(-128), F(127))
    step = np.broadcast_to((d.astype(F) * sc)[..., None], (*sc.shape, 16))
    codes = np.clip(np.rint(_divided(x.reshape(-1, 16, 16), step)), F(-32), F(31))
    q = (codes.astype(np.int8) + np.int8(32)).view(np.uint8).reshape(-1, 2, 4, 32)
    low, high = q & 15, q >> 4
    ql = np.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return [ql.reshape(-1, 128), qh.reshape(-1, 64), sc.astype(np.int8).view(np.uint8), d.view(np.uint8)]
