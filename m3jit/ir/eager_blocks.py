"""ggml's block formats over NumPy: what the integers and scales of a block are, and the values they stand for.

A block is d (one scale, f32), integer codes c, and, where the type has them, integer scales s_j and mins m_j of
sub-blocks:
    Q8_0 Q4_0 Q5_0 IQ4_NL MXFP4    d c
    Q4_1 Q5_1                      d c + m
    TQ1_0 TQ2_0                    d c                     c in -1..1 (TQ2_0 can also hold 2)
    Q3_K Q6_K IQ4_XS               (d s_j) c
    Q2_K Q4_K Q5_K                 (d s_j) c - dmin m_j
each operation rounded once to f32, as ggml does it (no fused multiply-add).  d, m and dmin are F16; MXFP4's d is
2^(e - 128) of its byte e, and the codes of IQ4_NL, IQ4_XS and MXFP4 are entries of a table of 16.

Layouts: ggml-common.h; raw bytes are [.., blocks, bytes of a block].  Encoders: `eager_encode`.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np

from m3jit.isa.types import DType

# the 16 values of a 4-bit code of IQ4_NL and IQ4_XS, and of MXFP4 (twice the numbers of the E2M1 float)
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def f16(raw: np.ndarray, at: int) -> np.ndarray:
    """The F16 at byte `at` of each block, as f32 [.., 1]."""
    return np.ascontiguousarray(raw[..., at:at + 2]).view("<f2").astype(np.float32)


def e8m0(raw: np.ndarray) -> np.ndarray:
    """2^(e - 128) of the bytes e: half of what the exponent byte of a microscaling block means, for doubled codes."""
    e = raw.astype(np.uint32)
    return np.where(e < 2, np.uint32(0x00200000) << (e & 1), (e - (e > 1)) << 23).astype(np.uint32).view(np.float32)


def nibbles(raw: np.ndarray) -> np.ndarray:
    """Low nibbles of all bytes, then high nibbles."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def nibbles_by(raw: np.ndarray, size: int) -> np.ndarray:
    """Per `size` bytes: their low nibbles, then their high ones -> [.., twice as many]."""
    b = raw.reshape(*raw.shape[:-1], raw.shape[-1] // size, 1, size)
    return np.concatenate([b & 15, b >> 4], axis=-2).reshape(*raw.shape[:-1], 2 * raw.shape[-1])


def fifth_bits(raw: np.ndarray) -> np.ndarray:
    """Q5_0, Q5_1: bit i of a 32-bit word is bit 4 of element i."""
    word = np.ascontiguousarray(raw).view("<u4")
    return (word >> np.arange(32, dtype=np.uint32) & 1).astype(np.uint8) << 4


def planes(raw: np.ndarray, size: int, bits: int) -> np.ndarray:
    """Per `size` bytes, their lowest `bits` bits, then the next ones, and so on: [.., elements]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    b = raw.reshape(*raw.shape[:-1], raw.shape[-1] // size, 1, size) >> shifts & ((1 << bits) - 1)
    return b.reshape(*raw.shape[:-1], raw.shape[-1] * (8 // bits))


def scales_k4(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q4_K, Q5_K: 8 six-bit scales and 8 six-bit mins in 12 bytes."""
    a, b, c = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scale = np.concatenate([a & 63, (c & 15) | (a >> 2 & 0x30)], axis=-1)
    low = np.concatenate([b & 63, (c >> 4) | (b >> 2 & 0x30)], axis=-1)
    return scale, low


def scales_q3(raw: np.ndarray) -> np.ndarray:
    """Q3_K: 16 six-bit scales in 12 bytes (four low bits in 8, two high ones in 4), minus 32."""
    low = nibbles(raw[..., 0:8])
    return (low | planes(raw[..., 8:12], 4, 2) << 4).astype(np.int8) - np.int8(32)


def scales_iq4(raw: np.ndarray) -> np.ndarray:
    """IQ4_XS: 8 six-bit scales (low bits in the nibbles of bytes 4..7, high ones in the word at byte 2), minus 32."""
    low = nibbles_by(raw[..., 4:8], 1)
    high = np.ascontiguousarray(raw[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)


def q6_integers(raw: np.ndarray) -> np.ndarray:
    """Q6_K: 4 low bits in 128 bytes, 2 high bits in 64, as 0..63 [.., 256]."""
    return nibbles_by(raw[..., 0:128], 64) | planes(raw[..., 128:192], 32, 2) << 4


def trits(raw: np.ndarray) -> np.ndarray:
    """TQ1_0: bytes hold five (the last four: four) base-3 digits as a fraction of 256; digits 0..2 [.., 256].

    Digit n of byte b is the integer part of 3 f, f = b 3^n / 256 without its own integer part."""
    out = []
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = np.array([1, 3, 9, 27, 81], np.uint8)[:digits].reshape(-1, 1)
        f = raw[..., None, start:stop] * powers
        size = (stop - start) * digits
        out.append((f.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*raw.shape[:-1], size))
    return np.concatenate(out, axis=-1)


@dataclass(frozen=True)
class Format:
    """How a block type is read.  `codes`: raw -> integers [.., block]; `scales`, `mins`: integers of the sub-blocks;
    `d`: where the F16 scale stands (None: the first byte is an exponent); `m`: where m or dmin does."""
    codes: Callable[[np.ndarray], np.ndarray]
    d: int | None = 0
    m: int | None = None
    scales: Callable[[np.ndarray], np.ndarray] | None = None
    mins: Callable[[np.ndarray], np.ndarray] | None = None

    def scale(self, raw: np.ndarray) -> np.ndarray:
        """d as f32 [.., 1]."""
        return e8m0(raw[..., 0:1]) if self.d is None else f16(raw, self.d)


def _less(codes: np.ndarray, bias: int) -> np.ndarray:
    return codes.astype(np.int8) - np.int8(bias)


def _looked_up(values: tuple[int, ...], codes: np.ndarray) -> np.ndarray:
    return np.array(values, np.int8)[codes]


def _fifths_k(r: np.ndarray) -> np.ndarray:
    return nibbles_by(r[..., 48:], 32) | planes(r[..., 16:48], 32, 1) << 4


def _q3_codes(r: np.ndarray) -> np.ndarray:
    return _less(planes(r[..., 32:96], 32, 2) | planes(r[..., 0:32], 32, 1) << 2, 4)


FORMATS: dict[str, Format] = {
    "Q8_0": Format(lambda r: r[..., 2:].view(np.int8)),
    "Q4_0": Format(lambda r: _less(nibbles(r[..., 2:]), 8)),
    "Q4_1": Format(lambda r: nibbles(r[..., 4:]), m=2),
    "Q5_0": Format(lambda r: _less(nibbles(r[..., 6:]) | fifth_bits(r[..., 2:6]), 16)),
    "Q5_1": Format(lambda r: nibbles(r[..., 8:]) | fifth_bits(r[..., 4:8]), m=2),
    "IQ4_NL": Format(lambda r: _looked_up(IQ4_VALUES, nibbles(r[..., 2:]))),
    "MXFP4": Format(lambda r: _looked_up(E2M1_VALUES, nibbles(r[..., 1:])), d=None),
    "Q2_K": Format(lambda r: planes(r[..., 16:80], 32, 2), 80, 82, lambda r: r[..., 0:16] & 15,
                   lambda r: r[..., 0:16] >> 4),
    "Q3_K": Format(_q3_codes, 108, None, lambda r: scales_q3(r[..., 96:108])),
    "Q4_K": Format(lambda r: nibbles_by(r[..., 16:], 32), 0, 2, lambda r: scales_k4(r[..., 4:16])[0],
                   lambda r: scales_k4(r[..., 4:16])[1]),
    "Q5_K": Format(_fifths_k, 0, 2, lambda r: scales_k4(r[..., 4:16])[0], lambda r: scales_k4(r[..., 4:16])[1]),
    "Q6_K": Format(lambda r: _less(q6_integers(r), 32), 208, None,
                   lambda r: np.ascontiguousarray(r[..., 192:208]).view(np.int8)),
    "IQ4_XS": Format(lambda r: _looked_up(IQ4_VALUES, nibbles_by(r[..., 8:], 16)), 0, None, scales_iq4),
    "TQ1_0": Format(lambda r: _less(trits(r), 1), 52),
    "TQ2_0": Format(lambda r: _less(planes(r[..., 0:64], 32, 2), 1), 64),
}


def split(dtype: DType, data: np.ndarray) -> np.ndarray:
    """Packed rows [.., row bytes] as [.., blocks, bytes of a block]."""
    return data.reshape(*data.shape[:-1], data.shape[-1] // dtype.nbytes, dtype.nbytes)


def _by_group(scale: np.ndarray, q: np.ndarray) -> np.ndarray:
    """scale [.., g] times q [.., n]: n / g consecutive elements share a scale."""
    return (scale[..., None] * q.reshape(*scale.shape, q.shape[-1] // scale.shape[-1])).reshape(q.shape)


def decode(dtype: DType, data: np.ndarray) -> np.ndarray:
    """Packed rows as f32 [.., columns]."""
    raw, f = split(dtype, data), FORMATS[dtype.name]
    with np.errstate(all="ignore"):
        d, codes = f.scale(raw), f.codes(raw).astype(np.float32)
        values = d * codes if f.scales is None else _by_group(d * f.scales(raw).astype(np.float32), codes)
        if f.mins is not None:
            lows = f16(raw, f.m) * f.mins(raw).astype(np.float32)
            values = values - np.repeat(lows, dtype.block // lows.shape[-1], axis=-1)
        elif f.m is not None:
            values = values + f16(raw, f.m)
    return values.reshape(*data.shape[:-1], values.shape[-2] * dtype.block)
