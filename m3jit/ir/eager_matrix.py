"""Matrix products, quantisation, embeddings and rotary positions of the eager namespace."""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir import eager_blocks, eager_encode, eager_math, scalar_math
from m3jit.ir.eager_layout import check_range
from m3jit.ir.eager_math import fma32
from m3jit.ir.eager_qdot import qdot
from m3jit.ir.eager_reduce import LANES, tree
from m3jit.ir.eager_values import describe, float_tensor, floats, index_tensor, make, tensor, to_f32, widen
from m3jit.ir.rope_frequencies import rope_frequencies
from m3jit.isa.types import ACTIVATION_BLOCK, F32, FLOATS, I8, DType, Tensor

UNPACKED = 1 << 20                  # weight elements widened at a time


def rows_of(w: Tensor, low: int, high: int) -> np.ndarray:
    """Rows low..high of a float or block matrix as f32."""
    if w.dtype.is_block:
        return eager_blocks.decode(w.dtype, w.data[low:high])
    return widen(Tensor(w.dtype, (high - low, *w.shape[1:]), w.data[low:high]))


def dot64(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Canonical dots: x [R, K] with w [N, K] -> [R, N], both f32.  Lane l folds fma over l, l + 64, ... from +0."""
    k = x.shape[1]
    if k % LANES:
        pad = ((0, 0), (0, LANES - k % LANES))
        x, w = np.pad(x, pad), np.pad(w, pad)
    out = np.empty((len(x), len(w)), np.float32)
    chunk = max(1, eager_math.CHUNK // LANES)
    with np.errstate(all="ignore"):
        for r, row in enumerate(x):
            for at in range(0, len(w), chunk):
                part = w[at:at + chunk]
                acc = np.zeros((len(part), LANES), np.float32)
                for step in range(0, x.shape[1], LANES):
                    fma32(row[step:step + LANES], part[:, step:step + LANES], acc, out=acc)
                out[r, at:at + chunk] = tree(acc, np.add)
    return out


def quantize_rows(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """(q int8 [.., K], d f32 [.., K / block]).  amax = max |x| (a NaN loses); q = rint(x (127 / amax)), NaN -> 0;
    d = amax / 127; where amax is 0 or 127 / amax overflows: zeros."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    with np.errstate(all="ignore"):
        magnitude = np.abs(blocks)
        amax = np.max(np.where(magnitude == magnitude, magnitude, np.float32(0)), axis=-1)
        reciprocal = np.float32(127) / amax
        usable = (amax > 0) & (reciprocal < np.inf)
        t = blocks * reciprocal[..., None]
        q = np.rint(np.where(usable[..., None] & (t == t), t, np.float32(0))).astype(np.int8)
        return q.reshape(x.shape), np.where(usable, amax / np.float32(127), np.float32(0))


class Matrix:
    """Mixin of `EagerXp`."""

    def matmul(self, x, w, transposed: bool = False):
        """x [.., K] times w [K, N], or w [N, K] transposed -> F32 [.., N]; weights dequantised exactly, in canonical
        dots.  w of three axes: x [.., G, K] -> [.., G, N], row g by matrix g."""
        x, w = float_tensor(x), tensor(w)
        if w.rank == 3:
            return self._grouped(x, w, transposed)
        w = self._weight(w)
        if w.dtype.is_block and not transposed:
            raise OperandError(f"{describe(w)} is packed along its rows: it can only be multiplied transposed, "
                               "x times W^T")
        k, n = (w.shape[1], w.shape[0]) if transposed else w.shape
        self._inner(x, k, w)
        rows = np.ascontiguousarray(widen(x)).reshape(_rows(x), k)
        out = np.empty((len(rows), n), np.float32)
        step = max(1, UNPACKED // max(k, 1))
        dense = None if transposed else np.ascontiguousarray(rows_of(w, 0, k).T)
        for at in range(0, n, step):
            out[:, at:at + step] = dot64(rows, rows_of(w, at, min(at + step, n)) if transposed else dense[at:at + step])
        return floats(out.reshape(*x.shape[:-1], n))

    def quantize_activation(self, x, block: int):
        """(q I8 [.., K], d F32 [.., K / block]); see `quantize_rows`."""
        x = self._f32(x)
        if block not in (32, 256) or not x.rank or x.shape[-1] % block:
            raise OperandError(f"activations are quantised in blocks of 32 or 256 along the last axis, got "
                               f"{describe(x)} in blocks of {block}")
        q, d = quantize_rows(x.data, block)
        return make(q, I8), floats(d)

    def qmatmul(self, x, w):
        """x [.., K], quantised to int8 blocks, times block-quantised w [N, K] -> F32 [.., N]; integer dots."""
        x, w = float_tensor(x), self._weight(w)
        if w.dtype.name not in ACTIVATION_BLOCK:
            raise OperandError(f"an integer product needs weights of type {' '.join(ACTIVATION_BLOCK)}, got "
                               f"{describe(w)}")
        n, k = w.shape
        self._inner(x, k, w)
        rows = np.ascontiguousarray(widen(x)).reshape(_rows(x), k)
        q, d = quantize_rows(rows, ACTIVATION_BLOCK[w.dtype.name])
        out = np.empty((len(rows), n), np.float32)
        step = max(1, UNPACKED // max(k, 1))
        for at in range(0, n, step):
            out[:, at:at + step] = qdot(q, d, w.dtype, w.data[at:at + step])
        return floats(out.reshape(*x.shape[:-1], n))

    def quantize(self, x, dtype: DType):
        """x packed into blocks along its last axis (ggml's reference quantisation); finite values only."""
        x = float_tensor(x)
        if not dtype.is_block:
            raise OperandError(f"QUANTIZE makes block types, not {dtype.name}; CAST converts")
        if not x.rank or x.shape[-1] % dtype.block:
            raise OperandError(f"{dtype.name} packs {dtype.block} elements of the last axis, got {describe(x)}")
        v = widen(x)
        if not np.isfinite(v).all():
            raise OperandError(f"QUANTIZE: {describe(x)} holds infinities or NaN; SANITY_CHECK replaces them")
        return Tensor(dtype, x.shape, eager_encode.encode(dtype, v))

    def dequantize(self, x):
        """A block tensor's values as F32."""
        x = tensor(x)
        if not x.dtype.is_block:
            return self.cast(x, F32)
        return floats(eager_blocks.decode(x.dtype, x.data))

    def canonical_bytes(self, x: Any) -> bytes:
        """Float and block tensors as F32 little-endian, others as stored; row-major."""
        x = tensor(x)
        return (self.dequantize(x) if x.dtype.is_block or x.dtype in FLOATS else x).tobytes()

    def embed(self, ids, table):
        """Rows of table [V, D] at integer ids (flattened; a single integer: one row) -> F32 [count, D]."""
        table = self._weight(table)
        i = np.asarray([ids], np.int64) if isinstance(ids, int) else index_tensor(ids).ravel()
        bad = (i < 0) | (i >= table.shape[0])
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise OperandError(f"id {int(i[at])} at position {at} is outside the table of {table.shape[0]} rows")
        picked = table.data[i]
        return floats(eager_blocks.decode(table.dtype, picked) if table.dtype.is_block else
                      widen(Tensor(table.dtype, picked.shape, picked)))

    def rope(self, x, pos, *, head_dim: int, theta: float, pairing: str, scale: float = 1.0, factors=None):
        """Rotary positions: row t of x [T, heads * head_dim] (last two axes) is rotated to position pos + t.

        freq_i = f32(theta^(-2i/d)) * scale / factors_i; angle = f32(pos + t) * freq_i;
        a' = fma(a, cos, -(b sin)), b' = fma(a, sin, b cos) for pairs (2i, 2i+1) NORM or (i, i + d/2) NEOX."""
        x = self._f32(x)
        if head_dim <= 0 or head_dim % 2 or x.rank < 2 or x.shape[-1] % head_dim:
            raise OperandError(f"ROPE needs [.., T, heads * HDIM] with an even HDIM, got {describe(x)} and HDIM "
                               f"{head_dim}")
        with np.errstate(all="ignore"):
            freq = rope_frequencies(theta, head_dim) * to_f32(float(scale))
            if factors is not None:
                f = self._f32(factors)
                if f.size != head_dim // 2:
                    raise OperandError(f"ROPE needs {head_dim // 2} frequency factors, got {describe(f)}")
                freq = freq / f.data.ravel()
            position = np.arange(x.shape[-2], dtype=np.int64) + check_range("position", pos, -2 ** 62, 2 ** 62)
            angle = (position.astype(np.float32)[:, None] * freq)[:, None, :]
            lanes = eager_math.Lanes(np.ascontiguousarray(angle), "f32")
            sin, cos = (v.array for v in scalar_math.sincos(eager_math.MATH, lanes))
            v = x.data.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)
            half = head_dim // 2
            first, second = (slice(0, half), slice(half, None)) if pairing == "NEOX" else \
                (slice(0, None, 2), slice(1, None, 2))
            out = np.empty_like(v)
            a, b = v[..., first], v[..., second]
            out[..., first] = fma32(a, cos, -(b * sin))
            out[..., second] = fma32(a, sin, b * cos)
        return floats(out.reshape(x.shape))

    def _f32(self, v: Any) -> Tensor:
        x = float_tensor(v)
        return x if x.dtype is F32 else self.cast(x, F32)

    def _grouped(self, x: Tensor, w: Tensor, transposed: bool) -> Tensor:
        if x.rank < 2 or x.shape[-2] != w.shape[0]:
            raise OperandError(f"{describe(x)} times {describe(w)}: each of {w.shape[0]} matrices needs a row, x "
                               f"[.., {w.shape[0]}, K]")
        parts = [self.matmul(Tensor(x.dtype, (*x.shape[:-2], x.shape[-1]), np.ascontiguousarray(x.data[..., g, :])),
                             Tensor(w.dtype, w.shape[1:], w.data[g]), transposed) for g in range(w.shape[0])]
        n = w.shape[1 if transposed else 2]
        return floats(np.stack([p.data for p in parts], axis=-2) if parts else
                      np.zeros((*x.shape[:-1], n), np.float32))

    def _weight(self, w: Any) -> Tensor:
        w = tensor(w)
        if w.rank != 2 or not (w.dtype.is_block or w.dtype in FLOATS):
            raise OperandError(f"a weight is a float or block matrix, got {describe(w)}")
        return w

    def _inner(self, x: Tensor, k: int, w: Tensor) -> None:
        if not x.rank or x.shape[-1] != k:
            raise OperandError(f"{describe(x)} times {describe(w)}: the inner lengths differ, {k} is needed")


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])
