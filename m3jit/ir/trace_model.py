"""The tracer's matrix and model primitives (mixed into `TraceXp`)."""
from __future__ import annotations

from typing import Any

from m3jit.ir.tensor import B1T, F64T, I64T, Node, OpaqueType, TensorType
from m3jit.isa import types as T
from m3jit.isa.kv import KVGeometry


class KVRef:
    """A KV stream operand while tracing.  geometry, dtype: None until the first append fixes them (dtype: None only
    for a stream that is to be made).  lengths: layer -> i64 node of rows now."""
    __slots__ = ("key", "geometry", "dtype", "lengths")

    def __init__(self, key: Any, geometry: KVGeometry | None, dtype: str | None, lengths: dict[int, Node]):
        self.key, self.geometry, self.dtype, self.lengths = key, geometry, dtype, dict(lengths)

    @property
    def unused(self) -> bool:
        """Whether nothing says yet that the register names a KV stream."""
        return self.dtype is None and not self.lengths

    def copy(self) -> "KVRef":
        return KVRef(self.key, self.geometry, self.dtype, self.lengths)


def kv_type(geometry: KVGeometry | None, dtype: str) -> OpaqueType:
    """The compiler's type of a stream: streams of one type are interchangeable in compiled code."""
    g = geometry or KVGeometry(0, 0, 0)
    return OpaqueType(f"kv:{g.kv_heads},{g.head_dim},{g.value_dim},{int(g.shared)},{dtype}")


def kv_of_type(name: str) -> tuple[KVGeometry | None, str]:
    """Geometry and dtype of a stream, from the name of its `kv_type`."""
    *numbers, dtype = name[3:].split(",")
    heads, head_dim, value_dim, shared = map(int, numbers)
    return KVGeometry(heads, head_dim, value_dim, bool(shared)) if heads else None, dtype


class TraceModel:
    """Mixin of `TraceXp`."""

    def matmul(self, x, w, transposed: bool = False):
        x, w = self.tensor(x), self.tensor(w)
        if x.rank < w.rank - 1 or w.rank not in (2, 3) or x.dtype not in T.FLOATS or \
                (w.dtype not in T.FLOATS and not w.dtype.is_block):
            raise self.error("matmul operands")
        x = self.cast(x, T.F32)
        n, k = w.shape[-2:] if transposed else w.shape[:-3:-1]
        if not self.same(x.shape[-1], k) or (w.dtype.is_block and not transposed) or \
                (w.rank == 3 and not self.same(x.shape[-2], w.shape[0])):
            raise self.error(f"matmul {x.shape} by {w.shape}")
        return self.node("matmul", TensorType(T.F32, (*x.shape[:-1], n)), x, w, transposed=transposed)

    def quantize_activation(self, x, block: int):
        x = self.tensor(x)
        k = x.shape[-1]
        if x.dtype is not T.F32 or not isinstance(k, int) or k % block:
            raise self.error("quantize_activation")
        return self.node("quantize_activation", OpaqueType(f"q8/{block}"), x, block=block)

    def qmatmul(self, x, w):
        x, w = self.tensor(x), self.tensor(w)
        if x.rank < 1 or w.rank != 2 or w.dtype.name not in T.ACTIVATION_BLOCK \
                or not self.same(x.shape[-1], w.shape[1]):
            raise self.error(f"qmatmul {x.type} by {w.type}")
        x = self.reshape(x, (*x.shape[:-1], w.shape[1]))         # the length is known now
        if w.op != "weight":
            raise self.error("qmatmul needs a weight that is known when the region is compiled")
        if x.dtype is not T.F32:
            x = self.cast(x, T.F32)
        q = self.quantize_activation(x, T.ACTIVATION_BLOCK[w.dtype.name])
        return self.node("qdot", TensorType(T.F32, (*x.shape[:-1], w.shape[0])), q, w)

    def embed(self, ids, table):
        table = self.tensor(table)
        if isinstance(ids, int) or (isinstance(ids, Node) and ids.is_scalar):
            ids = self.node("from_scalar", TensorType(T.I64, (1,)), self.as_scalar(ids))
        ids = self.tensor(ids)
        if ids.dtype not in (T.I32, T.I64) or table.rank != 2 or not isinstance(table.shape[1], int) or \
                table.dtype not in T.WEIGHTS:
            raise self.error("embed operands")
        ok = self.node("in_bounds", B1T, ids, limit=table.shape[0])
        self.r.check(ok, "token id outside the table")
        shape = (ids.type.count(), table.shape[1])
        return self.node("embed", TensorType(T.F32, shape), ids, table)

    def rope(self, x, pos, *, head_dim, theta, pairing, scale=1.0, factors=None):
        x = self.tensor(x)
        if x.rank != 2 or x.dtype is not T.F32 or not isinstance(x.shape[-1], int) or head_dim <= 0 or head_dim % 2 or \
                x.shape[-1] % head_dim or not 0 < theta < float("inf"):
            raise self.error("rope")
        args = [x, self.as_scalar(pos)]
        if factors is not None:
            factors = self.tensor(factors)
            if factors.dtype not in T.FLOATS or not self.same(factors.type.count(), head_dim // 2):
                raise self.error("rope factors")
            args.append(self.cast(factors, T.F32))
        return self.node("rope", x.type, *args, head_dim=head_dim, theta=theta, pairing=pairing, scale=scale)

    def _attention_shapes(self, q, heads, kv_heads, head_dim):
        if q.rank != 2 or q.dtype is not T.F32 or q.shape[1] != heads * head_dim or heads % kv_heads:
            raise self.error(f"attention query {q.type} with {heads} heads of {head_dim}")

    def _rows(self, k, v, g: KVGeometry) -> list[Node]:
        """Key rows, and value rows unless they are shared."""
        rows = [self.tensor(t) for t in (k, v) if t is not None]
        widths = (g.kv_heads * g.head_dim, g.kv_heads * g.value_dim)
        if any(t.dtype is not T.F32 or t.rank != 2 or t.shape[1] != n for t, n in zip(rows, widths)) or \
                not self.same(rows[0].shape[0], rows[-1].shape[0]) or g.shared and g.value_dim > g.head_dim:
            raise self.error("attention keys or values")
        return rows

    def attention(self, q, k, v, *, heads, kv_heads, head_dim, value_dim, scale, causal, window, softcap, past=0):
        q, g = self.tensor(q), KVGeometry(kv_heads, head_dim, value_dim, v is None)
        self._attention_shapes(q, heads, kv_heads, head_dim)
        return self.node("attention", TensorType(T.F32, (q.shape[0], heads * value_dim)), q, self.as_scalar(past),
                         *self._rows(k, v, g), heads=heads, geometry=g, scale=scale, causal=causal, window=window,
                         softcap=softcap)

    def kv_append(self, kv, layer: int, k, v, *, kv_heads, head_dim, value_dim, dtype):
        if not isinstance(kv, KVRef):
            raise self.error("the KV operand is not a stream in an S register")
        g = KVGeometry(kv_heads, head_dim, value_dim, v is None)
        rows = self._rows(k, v, g)
        kv.geometry, kv.dtype = kv.geometry or g, kv.dtype or dtype
        if kv.geometry != g or not self.r.same_stream(kv.key, g, kv.dtype, dtype):
            raise self.error("the stream has another geometry or type")
        past = kv.lengths.get(layer)
        if past is None:
            past = self.r.kv_length(kv, layer)
        out = kv.copy()
        out.lengths[layer] = self.node("kv_append", I64T, past, *rows, kv=kv.key, layer=layer, geometry=g,
                                       dtype=kv.dtype)
        return out

    def kv_attention(self, q, kv, layer: int, *, heads, kv_heads, head_dim, value_dim, scale, causal, window, softcap):
        q = self.tensor(q)
        if not isinstance(kv, KVRef) or layer not in kv.lengths:
            raise self.error("attention over a stream without rows appended in this region")
        self._attention_shapes(q, heads, kv_heads, head_dim)
        return self.node("kv_attention", TensorType(T.F32, (q.shape[0], heads * value_dim)), q, kv.lengths[layer],
                         kv=kv.key, layer=layer, heads=heads, geometry=kv.geometry, scale=scale, causal=causal,
                         window=window, softcap=softcap, dtype=kv.dtype)

    # -- drawing a token -----------------------------------------------------------------------------------------------
    def sample(self, logits, rng, *, temperature, top_k, top_p, min_p, penalty, history=None, window=0, mask=None):
        x, numbers = self.tensor(logits), (temperature, top_p, min_p, penalty)
        count = x.type.count()
        if x.dtype not in T.FLOATS or count == 0:
            raise self.error(f"sample of {x.type}")
        if history is not None and not isinstance(penalty, Node) and penalty == 1:
            history = None
        others = [self.tensor(t) for t in (history, mask) if t is not None]
        if any(t.dtype.kind not in ("int", "bool") for t in others) or \
                (history is not None and others[0].dtype.kind == "bool") or \
                (mask is not None and not self.same(others[-1].type.count(), count)):
            raise self.error("sample: history or mask")
        limits = ((0.0, float("inf")), (0.0, 1.0), (0.0, 1.0), (2.0 ** -126, float("inf")))
        scalars = [self._within(v, low, high) for v, (low, high) in zip(numbers, limits)]
        args = (x, self.as_scalar(rng), self.as_scalar(top_k), *scalars, *others)
        drawn = self.node("sample", OpaqueType("sample"), *args, window=window, history=history is not None,
                          mask=mask is not None)
        words = self.node("result", TensorType(T.I64, (3,)), drawn, index=0)
        token, state, status = (self.element(words, i) for i in range(3))
        self.r.check(self.node("eq", B1T, status, self.const(0)), "a draw the interpreter refuses")
        return token, state

    def _within(self, value: Any, low: float, high: float) -> Node:
        """A float scalar, checked to lie in low .. high."""
        v = self.as_scalar(float(value) if isinstance(value, int) else value)
        if v.type != F64T:
            raise self.error("sample: a setting that is no float")
        if v.op == "const":
            if not low <= v.attrs["value"] <= high:
                raise self.error("sample: a setting out of range")
            return v
        for a, b in ((self.const(low), v), (v, self.const(high))):
            self.r.check(self.node("fle", B1T, a, b), "sample: a setting out of range")
        return v
