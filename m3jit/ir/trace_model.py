"""The tracer's matrix and model primitives (mixed into `TraceXp`)."""
from __future__ import annotations

from typing import Any

from m3jit.ir.tensor import B1T, F64T, I64T, Node, OpaqueType, TensorType
from m3jit.isa import types as T


class KVRef:
    """A KV stream operand while tracing.  `lengths`: layer -> i64 node of rows now; geometry is set at creation."""
    __slots__ = ("key", "heads", "head_dim", "dtype", "lengths", "recorder")

    def __init__(self, key, heads, head_dim, dtype, lengths):
        self.key, self.heads, self.head_dim, self.dtype, self.lengths = key, heads, head_dim, dtype, dict(lengths)

    def copy(self) -> "KVRef":
        return KVRef(self.key, self.heads, self.head_dim, self.dtype, self.lengths)


class TraceModel:
    """Mixin of `TraceXp`."""

    def matmul(self, x, w, transposed: bool = False):
        x, w = self.tensor(x), self.tensor(w)
        if x.rank < 1 or w.rank != 2 or x.dtype not in T.FLOATS or (w.dtype not in T.FLOATS and not w.dtype.is_block):
            raise self.error("matmul operands")
        x = self.cast(x, T.F32)
        n, k = (w.shape[0], w.shape[1]) if transposed else (w.shape[1], w.shape[0])
        if not self.same(x.shape[-1], k) or (w.dtype.is_block and not transposed):
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
        if x.rank < 1 or w.rank != 2 or w.dtype.name not in T.ACTIVATION_BLOCK or not self.same(x.shape[-1], w.shape[1]):
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

    def attention(self, q, k, v, *, heads, kv_heads, head_dim, scale, causal, window, softcap, past=0):
        q, k, v = map(self.tensor, (q, k, v))
        self._attention_shapes(q, heads, kv_heads, head_dim)
        if any(t.dtype is not T.F32 or t.rank != 2 or t.shape[1] != kv_heads * head_dim for t in (k, v)):
            raise self.error("attention keys or values")
        if not self.same(k.shape[0], v.shape[0]):
            raise self.error("attention: keys and values differ in number")
        return self.node("attention", q.type, q, k, v, self.as_scalar(past), heads=heads, kv_heads=kv_heads,
                         head_dim=head_dim, scale=scale, causal=causal, window=window, softcap=softcap)

    def kv_append(self, kv, layer: int, k, v, *, kv_heads, head_dim):
        if not isinstance(kv, KVRef):
            raise self.error("the KV operand is not a stream in an S register")
        k, v = self.tensor(k), self.tensor(v)
        if any(t.dtype is not T.F32 or t.rank != 2 or t.shape[1] != kv_heads * head_dim for t in (k, v)) or \
                not self.same(k.shape[0], v.shape[0]):
            raise self.error("kv_append operands")
        if kv.heads is None:
            kv.heads, kv.head_dim = kv_heads, head_dim
        if (kv.heads, kv.head_dim) != (kv_heads, head_dim):
            raise self.error("the stream has another geometry")
        past = kv.lengths.get(layer)
        if past is None:
            past = self.r.kv_length(kv, layer)
        if k.shape[0] != 1:
            self.r.abandon_point()
        out = kv.copy()
        out.lengths[layer] = self.node("kv_append", I64T, k, v, past, kv=kv.key, layer=layer, kv_heads=kv_heads,
                                       head_dim=head_dim, dtype=kv.dtype)
        return out

    def kv_attention(self, q, kv, layer: int, *, heads, kv_heads, head_dim, scale, causal, window, softcap):
        q = self.tensor(q)
        if not isinstance(kv, KVRef) or layer not in kv.lengths:
            raise self.error("attention over a stream without rows appended in this region")
        self._attention_shapes(q, heads, kv_heads, head_dim)
        return self.node("kv_attention", q.type, q, kv.lengths[layer], kv=kv.key, layer=layer, heads=heads,
                         kv_heads=kv_heads, head_dim=head_dim, scale=scale, causal=causal, window=window,
                         softcap=softcap, dtype=kv.dtype)

    # -- drawing a token ------------------------------------------------------------------------------------------------
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
        drawn = self.node("sample", OpaqueType("sample"), x, self.as_scalar(rng), self.as_scalar(top_k), *scalars, *others,
                          window=window, history=history is not None, mask=mask is not None)
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
