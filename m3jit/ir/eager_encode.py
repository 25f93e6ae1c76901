"""ggml's reference quantisation over NumPy: f32 rows to packed blocks, the bytes the gguf package writes.

The formulas stand at QUANTIZE (`m3jit/isa/tensor.py`).  Q4_K and Q6_K, which the package has not: `eager_encode_k`.
"""
from __future__ import annotations

from typing import Callable

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir.eager_blocks import e8m0
from m3jit.ir.eager_encode_k import encode_q4_k, encode_q6_k
from m3jit.isa.types import DType

AT_ONCE = 1 << 18                            # elements packed together: what stays in a cache


def pack_planes(q: np.ndarray, size: int, bits: int) -> np.ndarray:
    """The inverse of `eager_blocks.planes`: [.., elements] as bytes whose lowest `bits` bits are the first `size`
    elements, the next ones the following `size`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    count = q.shape[-1] * bits // 8
    parts = q.astype(np.uint8).reshape(*q.shape[:-1], count // size, 8 // bits, size) << shifts
    return np.bitwise_or.reduce(parts, axis=-2).reshape(*q.shape[:-1], count)


def pack_trits(q: np.ndarray) -> np.ndarray:
    """TQ1_0: digits 0..2 [.., 256] in 52 bytes: five (the last four: four) base-3 digits n as ceil(256 n / 243)."""
    out = []
    for start, stop, size, digits in ((0, 160, 32, 5), (160, 240, 16, 5), (240, 256, 4, 4)):
        part = q[..., start:stop].astype(np.uint16).reshape(*q.shape[:-1], digits, size)
        powers = np.array([81, 27, 9, 3, 1], np.uint16)[:digits].reshape(-1, 1)
        out.append((part * powers).sum(axis=-2, dtype=np.uint16))
    number = np.concatenate(out, axis=-1)
    return ((number * 256 + 242) // 243).astype(np.uint8)


def _round_away(x: np.ndarray) -> np.ndarray:
    """C's roundf: halves away from zero."""
    a = np.abs(x)
    floor = np.floor(a)
    return np.copysign(floor + (a - floor >= np.float32(0.5)), x)


def _inverse(d: np.ndarray) -> np.ndarray:
    """1 / d, and 0 where that is not finite: a block whose scale is that small becomes zeros."""
    inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _half_bytes(d: np.ndarray) -> np.ndarray:
    half = d.astype("<f2")
    if np.isinf(half).any():
        raise OperandError(f"QUANTIZE: a block needs the scale {float(np.abs(d).max()):g}, which F16 cannot hold "
                           "(65504 at most)")
    return half.view(np.uint8)


def _signed_peak(x: np.ndarray) -> np.ndarray:
    """The element of largest magnitude (the first of equals), with its sign."""
    return np.take_along_axis(x, np.argmax(np.abs(x), axis=-1, keepdims=True), -1)


def _encode_q8_0(x):
    d = np.max(np.abs(x), axis=-1, keepdims=True) / np.float32(127)
    q = _round_away(x * _inverse(d)).astype(np.int8)
    return [_half_bytes(d), q.view(np.uint8)]


def _to_levels(x: np.ndarray, top: int) -> np.ndarray:
    return np.clip(np.trunc(x), 0, top).astype(np.uint8)


def _pair(q: np.ndarray) -> np.ndarray:
    return q[..., :16] | q[..., 16:] << 4


def _high_word(q: np.ndarray) -> np.ndarray:
    return np.packbits(q >> 4, axis=-1, bitorder="little")


def _encode_symmetric(bits: int) -> Callable[[np.ndarray], list[np.ndarray]]:
    half = 1 << bits - 1

    def encode_blocks(x):
        d = _signed_peak(x) / np.float32(-half)
        q = _to_levels(x * _inverse(d) + np.float32(half + 0.5), 2 * half - 1)
        return [_half_bytes(d), *([_high_word(q)] if bits == 5 else []), _pair(q & 15)]
    return encode_blocks


def _encode_affine(bits: int) -> Callable[[np.ndarray], list[np.ndarray]]:
    top = (1 << bits) - 1

    def encode_blocks(x):
        low, high = np.min(x, axis=-1, keepdims=True), np.max(x, axis=-1, keepdims=True)
        d = (high - low) / np.float32(top)
        q = _to_levels((x - low) * _inverse(d) + np.float32(0.5), top)
        return [_half_bytes(d), _half_bytes(low), *([_high_word(q)] if bits == 5 else []), _pair(q & 15)]
    return encode_blocks


def _ternary(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(digits 0..2, d): x / max |x| rounded, + 1."""
    d = np.max(np.abs(x), axis=-1, keepdims=True)
    return (_round_away(x * _inverse(d)).astype(np.int8) + np.int8(1)).view(np.uint8), d


def _encode_tq1_0(x):
    digits, d = _ternary(x)
    return [pack_trits(digits), _half_bytes(d)]


def _encode_tq2_0(x):
    digits, d = _ternary(x)
    return [pack_planes(digits, 32, 2), _half_bytes(d)]


def _floor_log2(x):
    """floor(log2(x)) of f32 values x > 0 in f64, log2 rounded to f32 first: just below a power of two it is that
    power's.

    No logarithm is taken, so no library's last bit matters: log2 of a mantissa near 1 is (mantissa - 1) / ln 2, and
    the others are far from a whole number."""
    mantissa, exponent = np.frexp(x)                                  # mantissa in [0.5, 1)
    near = (exponent + (mantissa - 1) * 1.4426950408889634).astype(np.float32) == exponent
    return np.where(near, exponent, exponent - 1)


# halfway points of the magnitudes 0 1 2 3 4 6 8 12; a value on one takes the smaller
_E2M1_LIMITS = np.array([0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0])


def _encode_mxfp4(x):
    """e = floor(log2(max |x|)) - 2 + 127, at least 0 (log2 rounded to f32, as ggml has it); codes: nearest values."""
    peak = np.max(np.abs(x), axis=-1, keepdims=True).astype(np.float64)
    e = np.where(peak > 0, np.maximum(_floor_log2(peak) + 125, 0), 0).astype(np.uint8)
    magnitude = np.abs(x) / e8m0(e).astype(np.float64)                # exact: a division by a power of two
    code = (magnitude[..., None] > _E2M1_LIMITS).sum(axis=-1, dtype=np.uint8)
    return [e, _pair(code | ((x < 0) & (code > 0)).astype(np.uint8) << 3)]


_ENCODE: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "Q8_0": _encode_q8_0, "Q4_0": _encode_symmetric(4), "Q5_0": _encode_symmetric(5), "Q4_1": _encode_affine(4),
    "Q5_1": _encode_affine(5), "TQ1_0": _encode_tq1_0, "TQ2_0": _encode_tq2_0, "MXFP4": _encode_mxfp4,
    "Q4_K": encode_q4_k, "Q6_K": encode_q6_k,
}
TYPES = tuple(_ENCODE)


def encode(dtype: DType, x: np.ndarray) -> np.ndarray:
    """f32 [.., columns] (finite, whole blocks) packed to [.., row bytes]."""
    if dtype.name not in _ENCODE:
        raise OperandError(f"QUANTIZE makes {', '.join(sorted(_ENCODE))}; {dtype.name} tensors come from model files")
    blocks = x.reshape(x.size // dtype.block, dtype.block)
    out = np.empty((len(blocks), dtype.nbytes), np.uint8)
    step = AT_ONCE // dtype.block
    with np.errstate(all="ignore"):
        for at in range(0, len(blocks), step):
            out[at:at + step] = np.concatenate(_ENCODE[dtype.name](blocks[at:at + step]), axis=-1)
    return out.reshape(*x.shape[:-1], dtype.row_bytes(x.shape[-1]))
