"""Blocks whose bits are rearranged before they go into layout R16, so that kernels unpack them in one or two steps.

    Q5_0 Q5_1  the word of fifth bits is transposed: bit v of byte i is that of element 4v + i
    Q3_K       114 bytes: d, the 16 scales - 32 as signed bytes, hmask, qs
    IQ4_XS     138 bytes: d, the 8 scales - 32 as signed bytes, qs
    TQ1_0      66 bytes, the digits as TQ2_0 stores them
Every one can be undone (`decode`).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np

from m3jit.ir.eager_blocks import planes, scales_iq4, scales_q3, trits
from m3jit.ir.eager_encode import pack_planes, pack_trits


@dataclass(frozen=True)
class Code:
    """nbytes: size of a recoded block; encode, decode: file blocks [.., bytes] to recoded ones and back."""
    nbytes: int
    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray], np.ndarray]


def _transposed(raw: np.ndarray, at: int, rows: int) -> np.ndarray:
    """`raw` with the 32 bits from byte `at` on, a matrix of `rows` rows, transposed."""
    out = raw.copy()
    bits = np.unpackbits(raw[..., at:at + 4], axis=-1, bitorder="little").reshape(*raw.shape[:-1], rows, 32 // rows)
    turned = np.ascontiguousarray(np.swapaxes(bits, -1, -2)).reshape(*raw.shape[:-1], 32)
    out[..., at:at + 4] = np.packbits(turned, axis=-1, bitorder="little")
    return out


def _fifths(at: int, nbytes: int) -> Code:
    return Code(nbytes, lambda r: _transposed(r, at, 8), lambda r: _transposed(r, at, 4))


def _biased(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low four, high two) bits of scales + 32."""
    s = (scales.view(np.int8) + np.int8(32)).view(np.uint8)
    return s & 15, s >> 4


def _q3_encode(r: np.ndarray) -> np.ndarray:
    return np.concatenate([r[..., 108:110], scales_q3(r[..., 96:108]).view(np.uint8), r[..., 0:96]], axis=-1)


def _q3_decode(r: np.ndarray) -> np.ndarray:
    low, high = _biased(np.ascontiguousarray(r[..., 2:18]))
    return np.concatenate([r[..., 18:114], low[..., :8] | low[..., 8:] << 4, pack_planes(high, 4, 2), r[..., 0:2]],
                          axis=-1)


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
    "Q5_0": _fifths(2, 22), "Q5_1": _fifths(4, 24), "Q3_K": Code(114, _q3_encode, _q3_decode),
    "IQ4_XS": Code(138, _iq4_encode, _iq4_decode), "TQ1_0": Code(66, _ternary_encode, _ternary_decode),
}
