"""ggml's block formats over NumPy: splitting blocks into integers and scales, decoding, encoding.

`parts(dtype, raw)` gives what an integer dot needs; `decode` the values as f32, each with ggml's own roundings
(d * q, then + m or - m: no fused multiply-add); `encode` ggml's reference quantisation (Q8_0 Q4_0 Q4_1 Q5_0 Q5_1; it
has no K-quant encoder here, because ggml's search is a heuristic that no definition pins down).

Layouts: ggml-common.h; raw bytes are [rows, blocks, bytes of a block].
"""
from __future__ import annotations

from typing import Callable

import numpy as np

from m3jit.errors import OperandError
from m3jit.isa.types import DType


def f16(raw: np.ndarray, at: int) -> np.ndarray:
    """The F16 at byte `at` of each block, as f32 [.., 1]."""
    return np.ascontiguousarray(raw[..., at:at + 2]).view("<f2").astype(np.float32)


def nibbles(raw: np.ndarray) -> np.ndarray:
    """Low nibbles of all bytes, then high nibbles."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def nibbles_by_32(raw: np.ndarray) -> np.ndarray:
    """K-quants: per 32 bytes, 32 low nibbles then 32 high ones -> [.., 256]."""
    b = raw.reshape(*raw.shape[:-1], 4, 1, 32)
    return np.concatenate([b & 15, b >> 4], axis=-2).reshape(*raw.shape[:-1], 256)


def fifth_bits(raw: np.ndarray) -> np.ndarray:
    """Q5_0, Q5_1: bit i of a 32-bit word is bit 4 of element i."""
    word = np.ascontiguousarray(raw).view("<u4")
    return (word >> np.arange(32, dtype=np.uint32) & 1).astype(np.uint8) << 4


def scales_k4(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q4_K, Q5_K: 8 six-bit scales and 8 six-bit mins in 12 bytes."""
    a, b, c = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scale = np.concatenate([a & 63, (c & 15) | (a >> 2 & 0x30)], axis=-1)
    low = np.concatenate([b & 63, (c >> 4) | (b >> 2 & 0x30)], axis=-1)
    return scale, low


def q6_integers(raw: np.ndarray) -> np.ndarray:
    """Q6_K: 4 low bits in 128 bytes, 2 high bits in 64, as 0..63 [.., 256]."""
    low = raw[..., 0:128].reshape(*raw.shape[:-1], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*raw.shape[:-1], 2, 128)
    high = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32)
    high = (high >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3).reshape(*raw.shape[:-1], 2, 128)
    return (low | high << 4).reshape(*raw.shape[:-1], 256)


# -- decoding to f32 ------------------------------------------------------------------------------------------------

def _by_group(scale: np.ndarray, q: np.ndarray) -> np.ndarray:
    """scale [.., g] times q [.., n]: n / g consecutive elements share a scale."""
    return (scale[..., None] * q.reshape(*scale.shape, q.shape[-1] // scale.shape[-1])).reshape(q.shape)


def _q4_0(r): return f16(r, 0) * (nibbles(r[..., 2:]).astype(np.float32) - np.float32(8))
def _q4_1(r): return f16(r, 0) * nibbles(r[..., 4:]).astype(np.float32) + f16(r, 2)
def _q8_0(r): return f16(r, 0) * r[..., 2:].view(np.int8).astype(np.float32)


def _q5_0(r):
    return f16(r, 0) * ((nibbles(r[..., 6:]) | fifth_bits(r[..., 2:6])).astype(np.float32) - np.float32(16))


def _q5_1(r):
    return f16(r, 0) * (nibbles(r[..., 8:]) | fifth_bits(r[..., 4:8])).astype(np.float32) + f16(r, 2)


def _q2_bits(raw: np.ndarray) -> np.ndarray:
    """Q2_K, Q3_K: 64 bytes of 2-bit elements: per 32 bytes four planes of 32."""
    b = raw.reshape(*raw.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    return b.reshape(*raw.shape[:-1], 256)


def _q2_k(r):
    scales = r[..., 0:16]
    d, low = f16(r, 80), f16(r, 82)
    main = _by_group(d * (scales & 15).astype(np.float32), _q2_bits(r[..., 16:80]).astype(np.float32))
    return main - np.repeat(low * (scales >> 4).astype(np.float32), 16, axis=-1)


def _q3_k(r):
    high = r[..., 0:32].reshape(*r.shape[:-1], 1, 32) >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1
    q = _q2_bits(r[..., 32:96]).astype(np.int8) - ((high ^ 1) << 2).reshape(*r.shape[:-1], 256).astype(np.int8)
    packed = r[..., 96:108]
    low = np.concatenate([packed[..., 0:8] & 15, packed[..., 0:8] >> 4], axis=-1)
    top = (packed[..., 8:12].reshape(*r.shape[:-1], 1, 4) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & 3
    scales = (low | top.reshape(*r.shape[:-1], 16) << 4).astype(np.int8) - np.int8(32)
    return _by_group(f16(r, 108) * scales.astype(np.float32), q.astype(np.float32))


def _q4_k(r):
    scale, low = scales_k4(r[..., 4:16])
    main = _by_group(f16(r, 0) * scale.astype(np.float32), nibbles_by_32(r[..., 16:]).astype(np.float32))
    return main - np.repeat(f16(r, 2) * low.astype(np.float32), 32, axis=-1)


def _q5_k(r):
    scale, low = scales_k4(r[..., 4:16])
    high = (r[..., 16:48].reshape(*r.shape[:-1], 1, 32) >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1) << 4
    q = nibbles_by_32(r[..., 48:]) | high.reshape(*r.shape[:-1], 256)
    main = _by_group(f16(r, 0) * scale.astype(np.float32), q.astype(np.float32))
    return main - np.repeat(f16(r, 2) * low.astype(np.float32), 32, axis=-1)


def _q6_k(r):
    scales = np.ascontiguousarray(r[..., 192:208]).view(np.int8).astype(np.float32)
    return _by_group(f16(r, 208) * scales, q6_integers(r).astype(np.float32) - np.float32(32))


_DECODE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}


def split(dtype: DType, data: np.ndarray) -> np.ndarray:
    """Packed rows [.., row bytes] as [.., blocks, bytes of a block]."""
    return data.reshape(*data.shape[:-1], data.shape[-1] // dtype.nbytes, dtype.nbytes)


def decode(dtype: DType, data: np.ndarray) -> np.ndarray:
    """Packed rows as f32 [.., columns]."""
    with np.errstate(all="ignore"):
        values = _DECODE[dtype.name](split(dtype, data))
    return values.reshape(*data.shape[:-1], values.shape[-2] * dtype.block)


# -- encoding: ggml's reference quantisation --------------------------------------------------------------------------

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
