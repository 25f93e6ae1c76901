"""Pages of key/value streams: geometry, layout, and how rows are stored in each type.

A page holds PAGE = 64 positions of one layer: for each kv head the keys as [head_dim][64], then the values as
[64][value_dim].  Where the values are `shared` they are the first value_dim features of the keys, and only the keys are
there (the latent rows of multi-head latent attention).

F32, F16, BF16: each number rounded once.  Q8_0: int8 numbers, and behind those of the keys (and of the values) their
scales in F16, one per 32 features of a row (the last one of a row for what is left): keys [blocks][64], values
[64][blocks].
    d = f16(max|x| / 127);  q = rint(x (127 / max|x|)), 0 where that is NaN or 127 / max|x| is not finite;
    read as f32(d) q.  An infinity or NaN among the 32 makes all of them NaN.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from m3jit.isa.types import BF16, F16, F32, Q8_0, DType

PAGE = 64
FAN = 16                            # pages of a leaf of a page table (m3jit.isa.kv_pages)
BLOCK = 32                          # features that share a scale
DTYPES = {"F16": F16, "BF16": BF16, "F32": F32, "Q8_0": Q8_0}
_NAN = {"F16": np.uint16(0x7E00), "BF16": np.uint16(0x7FC0), "F32": np.uint32(0x7FC00000)}


def scales(dim: int) -> int:
    """Scales of a row of `dim` features."""
    return -(-dim // BLOCK)


def plain_bytes(dtype: DType, dim: int) -> int:
    """Bytes of 64 rows of `dim` features without their scales."""
    return PAGE * dim * (1 if dtype.is_block else dtype.nbytes)


def part_bytes(dtype: DType, dim: int) -> int:
    """Bytes of 64 rows of `dim` features."""
    return plain_bytes(dtype, dim) + (2 * PAGE * scales(dim) if dtype.is_block else 0)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What one row of a stream is: kv_heads keys of head_dim features, and as many values of value_dim."""
    kv_heads: int
    head_dim: int
    value_dim: int
    shared: bool = False

    def head_bytes(self, dtype: DType) -> int:
        return part_bytes(dtype, self.head_dim) + (0 if self.shared else part_bytes(dtype, self.value_dim))

    def page_bytes(self, dtype: DType) -> int:
        return self.kv_heads * self.head_bytes(dtype)

    def __str__(self) -> str:
        values = "" if self.value_dim == self.head_dim else f" with values of {self.value_dim}"
        return f"{self.kv_heads} heads of {self.head_dim}{values}{' (part of the keys)' if self.shared else ''}"


@functools.lru_cache(maxsize=256)
def one_of(geometry: KVGeometry) -> KVGeometry:
    """The same object for equal geometries (of the last 256): those that meet often are compared by identity first."""
    return geometry


def storage(dtype: DType) -> np.dtype:
    """Type of the array a page is seen as (Q8_0: int8)."""
    return np.dtype(np.int8) if dtype.is_block else np.dtype(dtype.numpy)


def _split(data: np.ndarray, g: KVGeometry, dtype: DType) -> tuple[np.ndarray, np.ndarray | None]:
    """The bytes of the keys and of the values, [heads, bytes], of a page."""
    heads = data.view(np.uint8).reshape(g.kv_heads, g.head_bytes(dtype))
    cut = part_bytes(dtype, g.head_dim)
    return heads[:, :cut], None if g.shared else heads[:, cut:]


def _numbers(part: np.ndarray, dtype: DType, dim: int, keys: bool) -> np.ndarray:
    """The stored numbers [heads, dim, 64] (keys) or [heads, 64, dim] of a part, as a view."""
    raw = part[:, :plain_bytes(dtype, dim)].view(np.int8 if dtype.is_block else dtype.numpy)
    return raw.reshape(len(part), *((dim, PAGE) if keys else (PAGE, dim)))


def _scales(part: np.ndarray, dtype: DType, dim: int, keys: bool) -> np.ndarray:
    raw = part[:, plain_bytes(dtype, dim):].view(np.float16)
    return raw.reshape(len(part), *((scales(dim), PAGE) if keys else (PAGE, scales(dim))))


def write(data: np.ndarray, g: KVGeometry, dtype: DType, slot: int, keys: np.ndarray,
          values: np.ndarray | None) -> None:
    """Stores f32 rows keys [n, heads, head_dim] (and values) at positions slot .. of a page."""
    stop, dims = slot + len(keys), (g.head_dim, g.value_dim)
    for part, rows, dim, is_key in zip(_split(data, g, dtype), (keys, values), dims, (True, False)):
        if part is None or rows is None:
            continue
        numbers, d = encode(rows, dtype)
        for view, new in ((_numbers(part, dtype, dim, is_key), numbers),
                          (None if d is None else _scales(part, dtype, dim, is_key), d)):
            if view is None:
                continue
            if is_key:
                view[:, :, slot:stop] = new.transpose(1, 2, 0)
            else:
                view[:, slot:stop] = new.transpose(1, 0, 2)


def read(data: np.ndarray, g: KVGeometry, dtype: DType, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` rows of a page as f32: keys [count, heads, head_dim], values [count, heads, value_dim]."""
    key_part, value_part = _split(data, g, dtype)

    def rows(part: np.ndarray, dim: int, is_key: bool) -> np.ndarray:
        def turned(view: np.ndarray) -> np.ndarray:
            return view[:, :, :count].transpose(2, 0, 1) if is_key else view[:, :count].transpose(1, 0, 2)
        d = turned(_scales(part, dtype, dim, is_key)) if dtype.is_block else None
        return decode(turned(_numbers(part, dtype, dim, is_key)), d, dtype)
    keys = rows(key_part, g.head_dim, True)
    return keys, keys[..., :g.value_dim] if value_part is None else rows(value_part, g.value_dim, False)


def rows_of(data: np.ndarray, g: KVGeometry, dtype: DType, count: int) -> np.ndarray:
    """A copy of a page that has its first `count` rows and zeros behind them."""
    out = np.zeros_like(data)
    kinds = ((g.head_dim, True), (g.value_dim, False))
    for new, old, (dim, is_key) in zip(_split(out, g, dtype), _split(data, g, dtype), kinds):
        if old is None:
            continue
        for view in (_numbers, _scales) if dtype.is_block else (_numbers,):
            to, of = view(new, dtype, dim, is_key), view(old, dtype, dim, is_key)
            if is_key:
                to[:, :, :count] = of[:, :, :count]
            else:
                to[:, :count] = of[:, :count]
    return out


def encode(x: np.ndarray, dtype: DType) -> tuple[np.ndarray, np.ndarray | None]:
    """f32 rows [.., dim] as stored: (numbers, scales or None)."""
    with np.errstate(all="ignore"):
        if dtype.is_block:
            return _encode_q8(x)
        if dtype is BF16:
            bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
            out = ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype(np.uint16)
        else:
            out = x.astype(dtype.numpy)
        out[np.isnan(x)] = _NAN[dtype.name].view(dtype.numpy)
        return out, None


def _encode_q8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    dim = x.shape[-1]
    blocks = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -dim % BLOCK)]).reshape(*x.shape[:-1], scales(dim), BLOCK)
    top = np.max(np.abs(blocks), axis=-1)                               # NaN wins
    reciprocal = np.float32(127) / top
    t = blocks * reciprocal[..., None]
    q = np.rint(np.where((reciprocal < np.inf)[..., None] & (t == t), t, np.float32(0))).astype(np.int8)
    d = (top / np.float32(127)).astype(np.float16)
    d[np.isnan(d)] = _NAN["F16"].view(np.float16)
    return q.reshape(*x.shape[:-1], -1)[..., :dim], d


def decode(numbers: np.ndarray, d: np.ndarray | None, dtype: DType) -> np.ndarray:
    """Stored numbers [.., dim] as f32, NaN canonical."""
    if dtype is BF16:
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    out = numbers.astype(np.float32)
    if d is not None:
        with np.errstate(all="ignore"):
            out = np.repeat(d.astype(np.float32), BLOCK, axis=-1)[..., :out.shape[-1]] * out
        out[np.isnan(out)] = _NAN["F32"].view(np.float32)
    return out
