"""Attention of the eager namespace, dense and over a KV stream, in the contract's order of operations."""
from __future__ import annotations

from typing import Any

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir.eager_elementwise import maximum
from m3jit.ir.eager_layout import check_range
from m3jit.ir.eager_math import exp32, fma32, tanh32
from m3jit.ir.eager_reduce import LANES, tree
from m3jit.ir.eager_values import describe, floats, to_f32
from m3jit.isa.kv import KVStream
from m3jit.isa.types import NEW_STATE, Tensor

QUERY_CHUNK = 1 << 22               # elements of scores held at a time


def default_scale(head_dim: int) -> np.float32:
    """f32(1 / sqrt(head_dim))."""
    return np.float32(1.0 / np.sqrt(np.float64(head_dim)))


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: np.float32, softcap: np.float32,
           visible: np.ndarray) -> np.ndarray:
    """q [T, H, D], k and v [N, H, D] (one kv head per query head), visible [T, N] -> [T, H, D]; all f32.

    Keys in blocks of 64 by position: a block gives its maximum m, w = exp(s - m), l = halving tree of w, and mix = fold
    of fma(w, v) over its visible keys; blocks combine in order, rescaled by e = exp(m - M) to the greatest M."""
    t, heads, dim = q.shape
    n = len(k)
    blocks = -(-n // LANES)
    pad = blocks * LANES - n
    k, v = (np.pad(a, ((0, pad), (0, 0), (0, 0))).transpose(1, 0, 2) for a in (k, v))        # [H, N, D]
    seen = np.pad(visible, ((0, 0), (0, pad)))[:, None, :]
    score = np.zeros((t, heads, blocks * LANES), np.float32)
    for d in range(dim):
        score = fma32(q[:, :, d, None], k[None, :, :, d], score)
    score = score * scale
    if softcap:
        score = softcap * tanh32(score / softcap)
    shape = (t, heads, blocks, LANES)
    score = score.reshape(shape)
    seen = np.broadcast_to(seen, (t, heads, blocks * LANES)).reshape(shape)
    masked = np.where(seen & (score == score), score, np.float32(-np.inf))
    m = np.max(masked, axis=-1) if blocks else np.zeros((t, heads, 0), np.float32)
    w = np.where(seen, exp32(score - m[..., None]), np.float32(0))
    l = tree(w, np.add)
    v = v.reshape(heads, blocks, LANES, dim)
    mix = np.zeros((t, heads, blocks, dim), np.float32)
    for j in range(LANES):
        step = fma32(w[..., j, None], v[None, :, :, j, :], mix)
        mix = np.where(seen[..., j, None], step, mix)
    return _combine(m, l, mix, seen.any(axis=-1))


def _combine(m: np.ndarray, l: np.ndarray, mix: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Blocks [T, H, B] joined in order; those without a visible key are skipped; none at all gives 0."""
    top = np.full(m.shape[:2], -np.inf, np.float32)
    for b in range(m.shape[2]):
        top = np.where(used[..., b], maximum(top, m[..., b]), top)
    e = exp32(m - top[..., None])
    total = np.zeros(m.shape[:2], np.float32)
    out = np.zeros((*m.shape[:2], mix.shape[-1]), np.float32)
    for b in range(m.shape[2]):
        total = np.where(used[..., b], fma32(l[..., b], e[..., b], total), total)
        out = np.where(used[..., b, None], fma32(mix[..., b, :], e[..., b, None], out), out)
    return np.where(used.any(axis=-1)[..., None], out / total[..., None], np.float32(0))


class Attention:
    """Mixin of `EagerXp`."""

    def attention(self, q, k, v, *, heads: int, kv_heads: int, head_dim: int, scale: float = 0.0, causal: bool = False,
                  window: int = 0, softcap: float = 0.0, past: int = 0):
        """Query rows [T, heads * head_dim] at positions past, past + 1, ... over key and value rows [N, kv_heads *
        head_dim] at positions 0 .. N-1.  scale 0: 1 / sqrt(head_dim); window 0 and softcap 0: none."""
        q = self._query(q, heads, kv_heads, head_dim)
        k, v = self._rows(k, "keys", kv_heads, head_dim), self._rows(v, "values", kv_heads, head_dim)
        if k.shape != v.shape:
            raise OperandError(f"keys {describe(k)} and values {describe(v)} differ in number")
        return self._attend(q, k.data, v.data, heads, kv_heads, head_dim, scale, causal, window, softcap,
                            check_range("past", past, 0, 2 ** 62))

    def kv_append(self, kv: KVStream | None, layer: int, k, v, *, kv_heads: int, head_dim: int) -> KVStream:
        """The stream with key and value rows appended to a layer, rounded once.  None and NEW_STATE: a new stream."""
        k, v = self._rows(k, "keys", kv_heads, head_dim), self._rows(v, "values", kv_heads, head_dim)
        if k.shape != v.shape:
            raise OperandError(f"keys {describe(k)} and values {describe(v)} differ in number")
        return self._stream(kv, new=True).with_geometry(kv_heads, head_dim).append(layer, k.data, v.data)

    def kv_attention(self, q, kv: KVStream, layer: int, *, heads: int, kv_heads: int, head_dim: int, scale: float = 0.0,
                     causal: bool = True, window: int = 0, softcap: float = 0.0):
        """`attention` over the rows of a stream's layer; the query rows are the last ones (past = rows - T)."""
        q = self._query(q, heads, kv_heads, head_dim)
        kv = self._stream(kv).with_geometry(kv_heads, head_dim)
        k, v = kv.rows(layer)
        past = len(k) - q.shape[0]
        if past < 0:
            raise OperandError(f"{q.shape[0]} query rows over a layer of {len(k)} rows: append their keys first")
        return self._attend(q, k, v, heads, kv_heads, head_dim, scale, causal, window, softcap, past)

    def kv_truncate(self, kv: KVStream | None, length: int) -> KVStream:
        """`KVStream.truncate`."""
        return self._stream(kv, new=True).truncate(check_range("length", length, 0, 2 ** 62))

    def kv_compress(self, kv: KVStream | None, sink: int, window: int) -> KVStream:
        """`KVStream.compress`."""
        return self._stream(kv, new=True).compress(check_range("sink", sink, 0, 2 ** 62),
                                                   check_range("window", window, 0, 2 ** 62))

    # -- helpers ----------------------------------------------------------------------------------------------------
    def _attend(self, q: Tensor, k: np.ndarray, v: np.ndarray, heads: int, kv_heads: int, head_dim: int, scale: float,
                causal: bool, window: int, softcap: float, past: int) -> Tensor:
        if window < 0 or softcap < 0 or softcap != softcap:
            raise OperandError(f"WINDOW and SOFTCAP must not be negative, got {window} and {softcap}")
        n, t = len(k), q.shape[0]
        factor = default_scale(head_dim) if scale == 0 else to_f32(float(scale))[()]
        queries = q.data.reshape(t, heads, head_dim)
        keys, values = (np.repeat(a.reshape(n, kv_heads, head_dim), heads // kv_heads, axis=1) for a in (k, v))
        out = np.empty((t, heads, head_dim), np.float32)
        step = max(1, QUERY_CHUNK // max(1, heads * (n + LANES)))
        for at in range(0, t, step):
            p = past + np.arange(at, min(at + step, t))[:, None]
            j = np.arange(n)[None, :]
            visible = np.ones((len(p), n), bool)
            if causal:
                visible &= j <= p
            if window:
                visible &= p - j < window
            with np.errstate(all="ignore"):
                out[at:at + step] = attend(queries[at:at + step], keys, values, factor, to_f32(float(softcap))[()],
                                           visible)
        return floats(out.reshape(q.shape))

    def _query(self, q: Any, heads: int, kv_heads: int, head_dim: int) -> Tensor:
        q = self._f32(q)
        if heads <= 0 or kv_heads <= 0 or head_dim <= 0 or heads % kv_heads:
            raise OperandError(f"attention needs HEADS a multiple of KV_HEADS, got {heads} and {kv_heads} heads of "
                               f"{head_dim}")
        if q.rank != 2 or q.shape[1] != heads * head_dim:
            raise OperandError(f"attention queries must be [T, {heads} * {head_dim}], got {describe(q)}")
        return q

    def _rows(self, x: Any, what: str, kv_heads: int, head_dim: int) -> Tensor:
        x = self._f32(x)
        if x.rank != 2 or x.shape[1] != kv_heads * head_dim:
            raise OperandError(f"attention {what} must be [N, {kv_heads} * {head_dim}], got {describe(x)}")
        return x

    def _stream(self, kv: Any, new: bool = False) -> KVStream:
        if new and (kv is None or kv is NEW_STATE):
            return KVStream()
        if kv.__class__ is not KVStream:
            raise OperandError(f"the state operand is not a KV stream: {describe(kv)}")
        return kv
