"""Blocks whose bits are rearranged before they go into layout R16, so that kernels unpack them in one or two steps.

    Q5_0 Q5_1  the word of fifth bits is transposed: bit v of byte i is that of element 4v + i
    Q4_K       four heads of 4 bytes, one for each 64 elements c (sub-blocks 2c, 2c + 1); qs.  The six low bits of a
               head are the two mins and the two scales; bits 6 and 7 of byte i those from 2c on of byte 4r + i of the
               d of all 16 rows, then the dmin of all, for row r
    Q5_K       the heads; the fifth bits, 8 bytes for each 64 elements: bit 2q + h of byte 4w + i is that of element
               64c + 32h + 16w + 4q + i; qs
    Q3_K       114 bytes: d, the 16 scales - 32 as signed bytes, the third bits, qs.  Third bits: 8 bytes for each g =
               2h + s: bit 4u + p of byte 4w + i is that of element 128h + 32p + 16s + 8w + 4u + i
    IQ4_XS     138 bytes: d, the 8 scales - 32 as signed bytes, qs
    TQ1_0      66 bytes, the digits as TQ2_0 stores them
Every one can be undone (`decode`).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np

from m3jit.ir.eager_blocks import planes, scales_iq4, scales_k4, scales_q3, trits
from m3jit.ir.eager_encode import pack_planes, pack_trits
from m3jit.ir.eager_encode_k import pack_scales_k4


@dataclass(frozen=True)
class Code:
    """nbytes: size of a recoded block; encode, decode: file blocks [.., 16 rows, blocks, bytes] to recoded ones and
    back."""
    nbytes: int
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray], np.ndarray]


def _bits_moved(raw: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """The bits of the bytes of each block, lowest first, seen as a tensor of this shape and transposed."""
    bits = np.unpackbits(raw, axis=-1, bitorder="little").reshape(-1, *shape)
    turned = bits.transpose(0, *(1 + a for a in axes)).reshape(*raw.shape[:-1], 8 * raw.shape[-1])
    return np.packbits(turned, axis=-1, bitorder="little")


def _replaced(raw: np.ndarray, at: int, part: np.ndarray) -> np.ndarray:
    """A copy of the blocks with other bytes from `at` on."""
    out = raw.copy()
    out[..., at:at + part.shape[-1]] = part
    return out


def _fifths(at: int, nbytes: int) -> Code:
    def transposed(r: np.ndarray, rows: int) -> np.ndarray:
        return _replaced(r, at, _bits_moved(r[..., at:at + 4], (rows, 32 // rows), (1, 0)))
    return Code(nbytes, lambda r: transposed(r, 8), lambda r: transposed(r, 4))


TWO_BITS = np.arange(0, 8, 2, dtype=np.uint8).reshape(-1, 1)


def _heads(r: np.ndarray) -> np.ndarray:
    """The four heads, 16 bytes, of the 16 with which a file block of Q4_K or Q5_K begins."""
    scales, mins = scales_k4(r[..., 4:16])
    pairs = np.moveaxis(np.ascontiguousarray(r[..., 0:4]).view("<u2"), -3, -1)           # [.., blocks, 2, rows]
    floats = np.ascontiguousarray(pairs).view(np.uint8).reshape(*pairs.shape[:-2], 16, 4)
    bits = np.moveaxis(floats, -2, -3)[..., None, :] >> TWO_BITS & 3
    six = np.stack([mins[..., 0::2], mins[..., 1::2], scales[..., 0::2], scales[..., 1::2]], axis=-1)
    return (six | bits << 6).reshape(*r.shape[:-1], 16)


def _unheads(r: np.ndarray) -> np.ndarray:
    """The inverse of `_heads`."""
    heads = r.reshape(*r.shape[:-1], 4, 4)
    mins, scales = ((heads[..., i:i + 2] & 63).reshape(*r.shape[:-1], 8) for i in (0, 2))
    floats = np.ascontiguousarray(np.moveaxis(np.bitwise_or.reduce(heads >> 6 << TWO_BITS, axis=-2), -3, -2))
    pairs = np.moveaxis(floats.reshape(*floats.shape[:-2], 64).view("<u2").reshape(*floats.shape[:-2], 2, 16), -1, -3)
    return np.concatenate([np.ascontiguousarray(pairs).view(np.uint8), pack_scales_k4(scales, mins)], axis=-1)


def _q4_encode(r: np.ndarray) -> np.ndarray:
    return _replaced(r, 0, _heads(r[..., 0:16]))


def _q4_decode(r: np.ndarray) -> np.ndarray:
    return _replaced(r, 0, _unheads(np.ascontiguousarray(r[..., 0:16])))


def _q5_encode(r: np.ndarray) -> np.ndarray:
    return _replaced(_q4_encode(r), 16, _bits_moved(r[..., 16:48], (2, 4, 4, 4, 2), (3, 0, 2, 1, 4)))


def _q5_decode(r: np.ndarray) -> np.ndarray:
    return _replaced(_q4_decode(r), 16, _bits_moved(r[..., 16:48], (4, 2, 4, 4, 2), (1, 3, 2, 0, 4)))


def _biased(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low four, high two) bits of scales + 32."""
    s = (scales.view(np.int8) + np.int8(32)).view(np.uint8)
    return s & 15, s >> 4


def _q3_encode(r: np.ndarray) -> np.ndarray:
    thirds = _bits_moved(r[..., 0:32], (2, 2, 2, 4, 2, 4), (4, 0, 1, 3, 2, 5))
    return np.concatenate([r[..., 108:110], scales_q3(r[..., 96:108]).view(np.uint8), thirds, r[..., 32:96]], axis=-1)


def _q3_decode(r: np.ndarray) -> np.ndarray:
    low, high = _biased(np.ascontiguousarray(r[..., 2:18]))
    thirds = _bits_moved(r[..., 18:50], (2, 2, 2, 4, 2, 4), (1, 2, 4, 3, 0, 5))
    return np.concatenate([thirds, r[..., 50:114], low[..., :8] | low[..., 8:] << 4, pack_planes(high, 4, 2),
                           r[..., 0:2]], axis=-1)


def _iq4_encode(r: np.ndarray) -> np.ndarray:
    return np.concatenate([r[..., 0:2], scales_iq4(r).view(np.uint8), r[..., 8:]], axis=-1)


def _iq4_decode(r: np.ndarray) -> np.ndarray:
    low, high = _biased(np.ascontiguousarray(r[..., 2:10]))
    top = pack_planes(high, 1, 2)
    return np.concatenate([r[..., 0:2], top, low[..., 0::2] | low[..., 1::2] << 4, r[..., 10:]], axis=-1)


def _ternary_encode(r: np.ndarray) -> np.ndarray:
    return np.concatenate([pack_planes(trits(r), 32, 2), r[..., 52:54]], axis=-1)


def _ternary_decode(r: np.ndarray) -> np.ndarray:
    return np.concatenate([pack_trits(planes(r[..., 0:64], 32, 2)), r[..., 64:66]], axis=-1)


RECODED: dict[str, Code] = {
    "Q5_0": _fifths(2, 22), "Q5_1": _fifths(4, 24), "Q4_K": Code(144, _q4_encode, _q4_decode),
    "Q5_K": Code(176, _q5_encode, _q5_decode), "Q3_K": Code(114, _q3_encode, _q3_decode),
    "IQ4_XS": Code(138, _iq4_encode, _iq4_decode), "TQ1_0": Code(66, _ternary_encode, _ternary_decode),
}
