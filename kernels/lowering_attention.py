"""Lowerings of attention: over a key/value stream, and over the keys of one chunk (see `lowering`)."""
from __future__ import annotations

from typing import Any

import numpy as np

from m3jit.ir.plan import Scalar
from m3jit.ir.plan_writer import Memory, PlanWriter
from m3jit.ir.tensor import Dim, Node, Sym, dim_ceildiv, dim_mul
from m3jit.isa.kv import KVGeometry
from m3jit.kernels import attention as attn
from m3jit.kernels.lowering_table import lowers

KV_BLOCKS = Sym("kv_blocks")              # blocks of 64 keys the longest stream of the region may reach


def _geometry(n: Node, dense: bool) -> attn.Geometry:
    a = n.attrs
    g = a["geometry"]
    return attn.Geometry(a["heads"], g.kv_heads, g.head_dim, "F32" if dense else a["dtype"], bool(a["causal"]),
                         bool(a["softcap"]), dense, g.value_dim, g.shared)


def _scale(a: dict[str, Any]) -> float:
    """Default scale 1 / sqrt(head_dim), rounded to f32."""
    return float(np.float32(a["scale"] or 1.0 / a["geometry"].head_dim ** 0.5))


@lowers("kv_append")
def lower_kv_append(lw: PlanWriter, n: Node) -> None:
    past, *parts = n.args
    a, count = n.attrs, parts[0].shape[0]
    table = lw.kv_use(a["kv"], a["layer"], a["geometry"], a["dtype"], count)
    rows, start = lw.dim(count), lw.scalar(past)
    memory = [lw.of(t) for t in parts]
    lw.launch(attn.kv_append(_stored(a["geometry"], a["dtype"])), [*memory, lw.null(), table, rows, start], memory,
              [table], small=count == 1)
    lw.scalar_of[n] = lw.emit(Scalar("add", "i64", (start, lw.dim(count))))


def _stored(g: KVGeometry, dtype: str, dense: bool = False) -> attn.Geometry:
    """The geometry of appending, which knows no query heads."""
    return attn.Geometry(g.kv_heads, g.kv_heads, g.head_dim, dtype, dense=dense, value_dim=g.value_dim, shared=g.shared)


def _attend(lw: PlanWriter, n: Node, pages: list[Any], table: Memory, past: Scalar, keys: Scalar, blocks: Dim,
            dense: bool) -> None:
    q, a = n.args[0], n.attrs
    g = _geometry(n, dense)
    window = lw.i64(a["window"] or attn.NO_WINDOW)
    tail: list[Any] = [past, keys, window, lw.f32(_scale(a))]
    if a["softcap"]:
        tail.append(lw.f32(a["softcap"]))
    qm_, out, tokens = lw.of(q), lw.out(n), lw.dim(q.shape[0])
    if q.shape[0] == 1:
        partial = lw.scratch(dim_mul(blocks, g.heads * (g.value_dim + attn.HEADER) * 4))
        lw.launch(attn.attn_blocks(g), [qm_, *pages, partial, tokens, *tail], [qm_, table], [partial])
        lw.launch(attn.attn_combine(g), [partial, out, tokens, past, keys, window], [partial], [out],
                  small=True)
    else:
        lw.launch(attn.attn_rows(g), [qm_, *pages, out, tokens, *tail], [qm_, table], [out])


@lowers("kv_attention")
def lower_kv_attention(lw: PlanWriter, n: Node) -> None:
    q, length = n.args
    a = n.attrs
    table = lw.kv_use(a["kv"], a["layer"], a["geometry"], a["dtype"])
    keys = lw.scalar(length)
    past = lw.emit(Scalar("sub", "i64", (keys, lw.dim(q.shape[0]))))
    _attend(lw, n, [lw.null(), table], table, past, keys, KV_BLOCKS, False)


@lowers("attention")
def lower_attention(lw: PlanWriter, n: Node) -> None:
    q, past, *parts = n.args
    g = _stored(n.attrs["geometry"], "F32", dense=True)
    blocks = dim_ceildiv(parts[0].shape[0], 64)
    pages = lw.scratch(dim_mul(blocks, g.page_bytes))
    memory, keys = [lw.of(t) for t in parts], lw.dim(parts[0].shape[0])
    lw.launch(attn.kv_append(g), [*memory, pages, keys, lw.i64(0)], memory, [pages])
    _attend(lw, n, [pages], pages, lw.scalar(past), keys, blocks, True)
