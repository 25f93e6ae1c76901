"""ggml's reference quantisation over NumPy: f32 rows to packed blocks, the bytes the gguf package writes.

The formulas stand at QUANTIZE (`m3jit/isa/tensor.py`).
"""
from __future__ import annotations

from typing import Callable

import numpy as np

from m3jit.errors import OperandError
from m3jit.isa.types import DType

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


_ENCODE: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "Q8_0": _encode_q8_0, "Q4_0": _encode_symmetric(4), "Q5_0": _encode_symmetric(5), "Q4_1": _encode_affine(4),
    "Q5_1": _encode_affine(5),
}


def encode(dtype: DType, x: np.ndarray) -> np.ndarray:
    """f32 [.., columns] (finite, whole blocks) packed to [.., row bytes]."""
    if dtype.name not in _ENCODE:
        raise OperandError(f"QUANTIZE makes {', '.join(sorted(_ENCODE))}; {dtype.name} tensors come from model files")
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // dtype.block, dtype.block)
    with np.errstate(all="ignore"):
        raw = np.concatenate(_ENCODE[dtype.name](blocks), axis=-1)
    return raw.reshape(*x.shape[:-1], dtype.row_bytes(x.shape[-1]))
