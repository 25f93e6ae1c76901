"""Integer dots of quantised activations with block weights: the stated order of every block type, in NumPy.

Sums of products of integers are exact; what follows is f32, block after block along the row from acc = +0 (dx: the
activation block's scale, c the codes, S = sum q, names as in `eager_blocks`):
    d c (32 elements)       acc = fma(d dx, f32(isum), acc)                                    isum = sum q c
    d c + m                 acc = fma(dx, fma(d, f32(isum), m f32(S)), acc)
    d c, (d s_j) c (256)    acc = fma(dx, d f32(isum), acc)                                    isum = sum_j s_j sum q c
    (d s_j) c - dmin m_j    acc = fma(dx, fma(d, f32(isum), -(dmin f32(msum))), acc)           msum = sum_j m_j sum q
"""
from __future__ import annotations

import numpy as np

from m3jit.ir import eager_blocks
from m3jit.ir.eager_math import fma32
from m3jit.isa.types import DType

WITHOUT_SCALES = 8                  # groups of 32 that a super-block without integer scales is summed in


def _group_dots(q: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Exact sums of q * w over groups: q [R, g, e], w [N, g, e] -> f64 [g, R, N].

    e <= 32 products of magnitude <= 128 * 128 stay below 2^24, so the f32 product of matrices is exact in any order."""
    return np.matmul(q.transpose(1, 0, 2).astype(np.float32),
                     w.transpose(1, 2, 0).astype(np.float32)).astype(np.float64)


def _weighted(scales: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """sum_j scales[n, b, j] * sums[b, j, R, N] as f32 [b, R, N]; the integer is exact in f64, rounded once."""
    return np.einsum("nbj,bjrn->brn", scales.astype(np.float64), sums).astype(np.float32)


def _by_block(scale: np.ndarray) -> np.ndarray:
    """[N, blocks, 1] -> [blocks, 1, N]."""
    return scale[..., 0].T[:, None, :]


def _small(f: eager_blocks.Format, q: np.ndarray, d: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """Blocks of 32.  q [R, blocks, 32], d [R, blocks], raw [N, blocks, bytes] -> [R, N]."""
    isum = _group_dots(q, f.codes(raw)).astype(np.float32)
    scale, dx = _by_block(f.scale(raw)), d.T[:, :, None]
    acc = np.zeros(isum.shape[1:], np.float32)
    if f.m is None:
        u = scale * dx
        for b in range(len(isum)):
            acc = fma32(u[b], isum[b], acc)
        return acc
    low = _by_block(eager_blocks.f16(raw, f.m))
    qsum = q.sum(axis=-1, dtype=np.int32).astype(np.float32).T[:, :, None]
    for b in range(len(isum)):
        acc = fma32(dx[b], fma32(scale[b], isum[b], low[b] * qsum[b]), acc)
    return acc


def _super(f: eager_blocks.Format, q: np.ndarray, d: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """Super-blocks of 256, shapes as `_small`."""
    rows, blocks = raw.shape[:2]
    scales = f.scales(raw) if f.scales else np.ones((rows, blocks, WITHOUT_SCALES), np.int8)
    groups = scales.shape[-1]
    by_group = q.reshape(len(q), blocks * groups, 256 // groups)
    sums = _group_dots(by_group, f.codes(raw).reshape(rows, blocks * groups, 256 // groups))
    isum = _weighted(scales, sums.reshape(blocks, groups, len(q), rows))
    scale = _by_block(f.scale(raw))
    acc = np.zeros(isum.shape[1:], np.float32)
    msum, d_min = None, None
    if f.mins is not None:
        q_sums = by_group.sum(axis=-1, dtype=np.int64).reshape(len(q), blocks, groups)
        msum = np.einsum("nbj,rbj->brn", f.mins(raw).astype(np.int64), q_sums).astype(np.float32)
        d_min = _by_block(eager_blocks.f16(raw, f.m))
    for b in range(blocks):
        u = scale[b] * isum[b] if msum is None else fma32(scale[b], isum[b], -(d_min[b] * msum[b]))
        acc = fma32(d.T[b][:, None], u, acc)
    return acc


def qdot(q: np.ndarray, d: np.ndarray, dtype: DType, data: np.ndarray) -> np.ndarray:
    """Quantised activations q int8 [R, K], d f32 [R, K / block] times packed rows [N, row bytes] -> f32 [R, N]."""
    raw = eager_blocks.split(dtype, data)
    blocks = q.reshape(len(q), raw.shape[1], dtype.block)
    with np.errstate(all="ignore"):
        return (_small if dtype.block == 32 else _super)(eager_blocks.FORMATS[dtype.name], blocks, d, raw)
