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
from m3jit.isa.kv import DTYPES, KVStream
from m3jit.isa.types import NEW_STATE, Tensor

QUERY_CHUNK = 1 << 22               # elements of scores held at a time


def default_scale(head_dim: int) -> np.float32:
    """f32(1 / sqrt(head_dim))."""
    return np.float32(1.0 / np.sqrt(np.float64(head_dim)))


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: np.float32, softcap: np.float32,
           visible: np.ndarray) -> np.ndarray:
    """q [T, H, D], k [N, H, D], v [N, H, P] (one kv head per query head), visible [T, N] -> [T, H, P]; all f32.

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
    width = v.shape[-1]
    v = v.reshape(heads, blocks, LANES, width)
    mix = np.zeros((t, heads, blocks, width), np.float32)
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

    def attention(self, q, k, v, *, heads: int, kv_heads: int, head_dim: int, value_dim: int = 0, scale: float = 0.0,
                  causal: bool = False, window: int = 0, softcap: float = 0.0, past: int = 0):
        """Query rows [T, heads * head_dim] at positions past, past + 1, ... over key rows [N, kv_heads * head_dim] and
        value rows [N, kv_heads * value_dim] at positions 0 .. N-1 -> [T, heads * value_dim].

        value_dim 0: as head_dim.  v None: the first value_dim features of each key.  scale 0: 1 / sqrt(head_dim);
        window 0 and softcap 0: none."""
        q = self._query(q, heads, kv_heads, head_dim)
        k, v = self._keys_and_values(k, v, kv_heads, head_dim, value_dim)
        return self._attend(q, k.data, None if v is None else v.data, heads, kv_heads, head_dim, value_dim or head_dim,
                            scale, causal, window, softcap, check_range("past", past, 0, 2 ** 62))

    def kv_append(self, kv: KVStream | None, layer: int, k, v, *, kv_heads: int, head_dim: int, value_dim: int = 0,
                  dtype: str = "F16") -> KVStream:
        """The stream with key and value rows appended to a layer, rounded once.  None and NEW_STATE: a new stream,
        which stores `dtype`.  v None: the values are part of the keys."""
        k, v = self._keys_and_values(k, v, kv_heads, head_dim, value_dim)
        stream = self._stream(kv, dtype).with_geometry(kv_heads, head_dim, value_dim, v is None)
        return stream.append(layer, k.data, None if v is None else v.data)

    def kv_attention(self, q, kv: KVStream, layer: int, *, heads: int, kv_heads: int, head_dim: int, value_dim: int = 0,
                     scale: float = 0.0, causal: bool = True, window: int = 0, softcap: float = 0.0):
        """`attention` over the rows of a stream's layer; the query rows are the last ones (past = rows - T)."""
        q = self._query(q, heads, kv_heads, head_dim)
        kv = self._stream(kv)
        kv = kv.with_geometry(kv_heads, head_dim, value_dim, kv.geometry is not None and kv.geometry.shared)
        k, v = kv.rows(layer)
        past = len(k) - q.shape[0]
        if past < 0:
            raise OperandError(f"{q.shape[0]} query rows over a layer of {len(k)} rows: append their keys first")
        return self._attend(q, k, v, heads, kv_heads, head_dim, value_dim or head_dim, scale, causal, window, softcap,
                            past)

    def kv_truncate(self, kv: KVStream | None, length: int) -> KVStream:
        """`KVStream.truncate`."""
        return self._stream(kv, "F16").truncate(check_range("length", length, 0, 2 ** 62))

    def kv_compress(self, kv: KVStream | None, sink: int, window: int) -> KVStream:
        """`KVStream.compress`."""
        return self._stream(kv, "F16").compress(check_range("sink", sink, 0, 2 ** 62),
                                                   check_range("window", window, 0, 2 ** 62))

    # -- helpers ----------------------------------------------------------------------------------------------------
    def _attend(self, q: Tensor, k: np.ndarray, v: np.ndarray | None, heads: int, kv_heads: int, head_dim: int,
                value_dim: int, scale: float, causal: bool, window: int, softcap: float, past: int) -> Tensor:
        if window < 0 or softcap < 0 or softcap != softcap:
            raise OperandError(f"WINDOW and SOFTCAP must not be negative, got {window} and {softcap}")
        n, t = len(k), q.shape[0]
        factor = default_scale(head_dim) if scale == 0 else to_f32(float(scale))[()]
        queries = q.data.reshape(t, heads, head_dim)
        keys = k.reshape(n, kv_heads, head_dim)
        values = keys[..., :value_dim] if v is None else v.reshape(n, kv_heads, value_dim)
        keys, values = (np.repeat(a, heads // kv_heads, axis=1) for a in (keys, values))
        out = np.empty((t, heads, value_dim), np.float32)
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
        return floats(out.reshape(t, heads * value_dim))

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

    def _keys_and_values(self, k: Any, v: Any, kv_heads: int, head_dim: int, value_dim: int) -> tuple[Any, Any]:
        """Checked rows; v None where the values are part of the keys."""
        k = self._rows(k, "keys", kv_heads, head_dim)
        if v is None:
            if value_dim > head_dim:
                raise OperandError(f"without values, VDIM is at most the {head_dim} features of a key, got {value_dim}")
            return k, None
        v = self._rows(v, "values", kv_heads, value_dim or head_dim)
        if k.shape[0] != v.shape[0]:
            raise OperandError(f"keys {describe(k)} and values {describe(v)} differ in number")
        return k, v

    def _stream(self, kv: Any, new: str = "") -> KVStream:
        """The stream; with `new`, a new one of that type where there is none yet."""
        if new and (kv is None or kv is NEW_STATE):
            return KVStream(dtype=DTYPES[new])
        if kv.__class__ is not KVStream:
            raise OperandError(f"the state operand is not a KV stream: {describe(kv)}")
        return kv
