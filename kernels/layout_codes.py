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

import functools
import math
from dataclasses import dataclass
from typing import Callable

import numpy as np

from m3jit.ir.eager_blocks import planes, scales_iq4, scales_q3, trits
from m3jit.ir.eager_encode import pack_planes, pack_trits


@dataclass(frozen=True)
class Code:
    """nbytes: size of a recoded block; encode, decode: file blocks [.., 16 rows, blocks, bytes] to recoded ones and
    back."""
    nbytes: int
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray], np.ndarray]


def _replaced(raw: np.ndarray, at: int, part: np.ndarray) -> np.ndarray:
    """A copy of the blocks with other bytes from `at` on."""
    out = raw.copy()
    out[..., at:at + part.shape[-1]] = part
    return out


def _words(raw: np.ndarray, *shape: int) -> np.ndarray:
    """Bytes [.., 4 n] as words [.., *shape].  (Long arrays of words: NumPy is slow where the last axis is short.)"""
    return np.ascontiguousarray(raw).view("<u4").reshape(*raw.shape[:-1], *shape)


def _bytes(words: np.ndarray, axes: int) -> np.ndarray:
    """The inverse: words with so many last axes as bytes."""
    size = 4 * math.prod(words.shape[-axes:])
    return np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape[:-axes], size)


def _swapped(words: np.ndarray, bits: int) -> np.ndarray:
    """words [k, ..], each byte k groups of `bits` bits: group y of word x becomes group x of word y.  Its own
    inverse."""
    mask = np.uint32(0x01010101 * (2 ** bits - 1))
    return np.stack([functools.reduce(np.bitwise_or, ((w >> bits * y & mask) << bits * x
                                                      for x, w in enumerate(words))) for y in range(len(words))])


def _fifths(at: int, nbytes: int) -> Code:
    """Code of blocks with a word of fifth bits at byte `at`."""
    nibble, ones = np.uint32(15), np.uint32(0x01010101)

    def encode(r: np.ndarray) -> np.ndarray:
        word = _words(r[..., at:at + 4], 1)
        return _replaced(r, at, _bytes(functools.reduce(np.bitwise_or, (     # four bits to the ends of four bytes
            ((word >> 4 * v & nibble) * np.uint32(0x00204081) & ones) << v for v in range(8))), 1))

    def decode(r: np.ndarray) -> np.ndarray:
        word = _words(r[..., at:at + 4], 1)
        return _replaced(r, at, _bytes(functools.reduce(np.bitwise_or, (     # and back, to bits 24 to 27
            ((word >> v & ones) * np.uint32(0x01020408) >> 24 & nibble) << 4 * v for v in range(8))), 1))
    return Code(nbytes, encode, decode)


SIX, TWO, FOUR, HALF = (np.uint32(n) for n in (0x3F3F3F3F, 0x03030303, 0x0F0F0F0F, 0xFFFF))


def _floats_to_lanes(d: np.ndarray) -> np.ndarray:
    """d | dmin << 16 of 16 rows [.., 16, blocks] -> the words that hold d of all rows, then dmin, two to a word."""
    even, odd = d[..., 0::2, :], d[..., 1::2, :]
    return np.concatenate([even & HALF | odd << 16, even >> 16 | odd & ~HALF], axis=-2)


def _lanes_to_floats(lanes: np.ndarray) -> np.ndarray:
    """The inverse."""
    d, dmin = lanes[..., :8, :], lanes[..., 8:, :]
    pairs = np.stack([d & HALF | dmin << 16, d >> 16 | dmin & ~HALF], axis=-2)
    return pairs.reshape(lanes.shape)


def _heads(r: np.ndarray) -> np.ndarray:
    """The four heads, 16 bytes, of the 16 with which a file block of Q4_K or Q5_K begins."""
    d, a, b, c = np.moveaxis(_words(r, 4), -1, 0)
    lanes = _floats_to_lanes(d)
    early, low = a & SIX, b & SIX                                     # scales and mins of the sub-blocks 0..3, 4..7
    late, high = c & FOUR | a >> 2 & ~FOUR & SIX, c >> 4 & FOUR | b >> 2 & ~FOUR & SIX
    heads = [low & HALF | early << 16, low >> 16 | early & ~HALF,
             high & HALF | late << 16, high >> 16 | late & ~HALF]
    return _bytes(np.stack([head | (lanes >> 2 * i & TWO) << 6 for i, head in enumerate(heads)], -1), 1)


def _unheads(r: np.ndarray) -> np.ndarray:
    """The inverse of `_heads`."""
    heads = np.moveaxis(_words(r, 4), -1, 0)
    lanes = functools.reduce(np.bitwise_or, ((h >> 6 & TWO) << 2 * i for i, h in enumerate(heads)))
    low, high = (h & SIX & HALF | (g & SIX) << 16 for h, g in (heads[:2], heads[2:]))
    early, late = ((h & SIX) >> 16 | g & SIX & ~HALF for h, g in (heads[:2], heads[2:]))
    words = [_lanes_to_floats(lanes), early | (late & ~FOUR) << 2, low | (high & ~FOUR) << 2,
             late & FOUR | (high & FOUR) << 4]
    return _bytes(np.stack(words, -1), 1)


def _q4_encode(r: np.ndarray) -> np.ndarray:
    return _replaced(r, 0, _heads(r[..., 0:16]))


def _q4_decode(r: np.ndarray) -> np.ndarray:
    return _replaced(r, 0, _unheads(r[..., 0:16]))


def _q5_encode(r: np.ndarray) -> np.ndarray:
    out, words = _q4_encode(r), np.moveaxis(_words(r[..., 16:48], 2, 4), -1, 0)
    out[..., 16:48] = _bytes(np.moveaxis(_swapped(words, 2), 0, -2), 2)
    return out


def _q5_decode(r: np.ndarray) -> np.ndarray:
    out, words = _q4_decode(r), np.moveaxis(_words(r[..., 16:48], 4, 2), -2, 0)
    out[..., 16:48] = _bytes(np.moveaxis(_swapped(words, 2), 0, -1), 2)
    return out


def _biased(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low four, high two) bits of scales + 32."""
    s = (scales.view(np.int8) + np.int8(32)).view(np.uint8)
    return s & 15, s >> 4


def _q3_encode(r: np.ndarray) -> np.ndarray:
    words = np.moveaxis(_words(r[..., 0:32], 2, 2, 2), -1, 0)
    thirds = _bytes(np.moveaxis(_swapped(words, 4), 0, -3), 3)
    return np.concatenate([r[..., 108:110], scales_q3(r[..., 96:108]).view(np.uint8), thirds, r[..., 32:96]], axis=-1)


def _q3_decode(r: np.ndarray) -> np.ndarray:
    low, high = _biased(np.ascontiguousarray(r[..., 2:18]))
    words = np.moveaxis(_words(r[..., 18:50], 2, 2, 2), -3, 0)
    thirds = _bytes(np.moveaxis(_swapped(words, 4), 0, -1), 3)
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
