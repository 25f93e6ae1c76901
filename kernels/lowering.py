"""How each tensor-IR primitive becomes kernel launches: `LIBRARY[op](lowering, node)`.

`lowering` is an `m3jit.ir.plan_writer.PlanWriter`: it hands out memory (`of`, `out`, `scratch`), dimensions and
scalars, and `launch` records a kernel with what it reads and writes.
"""
from __future__ import annotations

import functools
from typing import Any, Callable

from m3jit.ir.loop import Kernel
from m3jit.ir.loop_builder import Builder
from m3jit.ir.plan_writer import Memory, PlanWriter
from m3jit.ir.plan import Scalar
from m3jit.ir.tensor import Dim, Node, Sym, dim_mul
from m3jit.isa import types as T
from m3jit.isa.kv import KVGeometry
from m3jit.kernels import attention as attn
from m3jit.kernels import qmatmul as qm
from m3jit.kernels import quantize as qa
from m3jit.kernels.fused import MEMORY_OF

LIBRARY: dict[str, Callable[[PlanWriter, Node], None]] = {}
KV_BLOCKS = Sym("kv_blocks")              # blocks of 64 keys the longest stream of the region may reach


def lowers(*ops: str):
    def put(f):
        for op in ops:
            LIBRARY[op] = f
        return f
    return put


def rows_of(n: Node) -> Dim:
    """Product of all dimensions but the last."""
    return dim_mul(*n.shape[:-1])


# -- filling --------------------------------------------------------------------------------------------------------

@functools.cache
def fill_kernel(memory: str) -> Kernel:
    """out w [n], n i64, value (f32 for float memory types, else i64): every element = value."""
    b = Builder(f"fill_{memory}", 64)
    out, n = b.ptr("out", "w", memory), b.scalar("n")
    floating = memory in ("f32", "f16", "bf16")
    value = b.scalar("value", "f32" if floating else "i64")
    b.set_grid((n + 4095) // 4096)
    if not floating and memory != "i64":
        value = b.cvt(value, "i32")
    end = b.imin(b.group * 4096 + 4096, n)
    with b.loop(b.group * 4096, end, 64) as at:
        b.store_lanes(memory, out, at, value, mask=b.in_range(at, end))
    return b.finish()


def fill_value(lw: PlanWriter, out: Memory, dtype: T.DType, count: Scalar, v: int | float) -> None:
    """Every element = v."""
    _fill(lw, out, dtype, count, lw.f32(float(v)) if dtype.kind == "float" else lw.i64(int(v)))


def _fill(lw: PlanWriter, out: Memory, dtype: T.DType, count: Scalar, value: Scalar) -> None:
    lw.launch(fill_kernel(MEMORY_OF[dtype.name]), [out, count, value], [], [out], rows=1, strides={0: dtype.nbytes})


@lowers("full")
def lower_full(lw: PlanWriter, n: Node) -> None:
    count = lw.dim(n.type.count())
    if not n.args:
        return fill_value(lw, lw.out(n), n.dtype, count, n.attrs["value"])
    value = lw.scalar(n.args[0])
    if n.dtype.kind == "float":
        value = lw.emit(Scalar("f2f32", "f32", (value,)))
    _fill(lw, lw.out(n), n.dtype, count, value)


def materialised(lw: PlanWriter, n: Node) -> Memory:
    """Memory of a tensor operand; a scalar made a tensor or an immediate gets memory of its own."""
    if n.op not in ("from_scalar", "imm"):
        return lw.of(n)
    m = lw.scratch(n.type.nbytes())
    if n.op == "imm":
        v = n.attrs["value"]
        value = lw.f32(float(v)) if n.dtype.kind == "float" else lw.i64(int(v))
    else:
        value = lw.scalar(n.args[0])
        if n.dtype.kind == "float":
            value = lw.emit(Scalar("f2f32", "f32", (value,)))
    _fill(lw, m, n.dtype, lw.i64(1), value)
    return m


# -- moves ------------------------------------------------------------------------------------------------------------

BITS_OF = {1: "u8", 2: "u16", 4: "i32", 8: "i64"}


@functools.cache
def rows_kernel(memory: str) -> Kernel:
    """x r, out w, first i64, count i64: out[i] = x[first + i] for i < count (elements; bits unchanged)."""
    b = Builder(f"rows_{memory}", 64)
    x, out = b.ptr("x", "r", memory), b.ptr("out", "w", memory)
    first, count = b.scalar("first"), b.scalar("count")
    b.set_grid((count + 4095) // 4096)
    end = b.imin(b.group * 4096 + 4096, count)
    with b.loop(b.group * 4096, end, 64) as at:
        inside = b.in_range(at, end)
        b.store_lanes(memory, out, at, b.load_lanes(memory, x, first + at, mask=inside), mask=inside)
    return b.finish()


@lowers("slice")
def lower_slice(lw: PlanWriter, n: Node) -> None:
    x, a = n.args[0], n.attrs
    if a["axis"] != 0 or a["step"] != 1:
        from m3jit.kernels.lowering_moves import lower_strided_slice
        return lower_strided_slice(lw, n)
    row = dim_mul(*x.shape[1:])
    start = lw.scalar(n.args[1]) if a["start"] is None else lw.i64(a["start"])
    first = lw.emit(Scalar("mul", "i64", (start, lw.dim(row))))
    source, out = lw.of(x), lw.out(n)
    lw.launch(rows_kernel(BITS_OF[x.dtype.nbytes]), [source, out, first, lw.dim(n.type.count())], [source], [out])


# -- checks and elements ----------------------------------------------------------------------------------------------

@functools.cache
def in_bounds_kernel(memory: str) -> Kernel:
    """ids r [n], out w i32 [1], n, limit i64: out = 1 if all 0 <= id < limit else 0."""
    b = Builder(f"in_bounds_{memory}", 64)
    ids, out = b.ptr("ids", "r", memory), b.ptr("out", "w", "i32")
    n, limit = b.scalar("n"), b.scalar("limit")
    b.set_grid(1)
    bad = b.var("i32", 0)
    with b.loop(0, n, 64) as at:
        inside = b.in_range(at, n)
        v = b.cvt(b.load_lanes(memory, ids, at, mask=inside), "i64")
        wrong = (v < 0) | b.logical_not(v < limit)
        bad.set(b.select(wrong & inside, b.i32(1), bad.get()))
    b.store("i32", out, 0, b.fold(bad.get(), "or") ^ 1)
    return b.finish()


@lowers("in_bounds")
def lower_in_bounds(lw: PlanWriter, n: Node) -> None:
    ids, limit = n.args[0], n.attrs["limit"]
    if ids.op == "from_scalar":
        v = lw.scalar(ids.args[0])
        low = lw.emit(Scalar("le", "b1", (lw.i64(0), v)))
        high = lw.emit(Scalar("lt", "b1", (v, lw.dim(limit))))
        lw.scalar_of[n] = lw.emit(Scalar("bool_and", "b1", (low, high)))
        return
    flag = lw.scratch(64)
    source = lw.of(ids)
    lw.launch(in_bounds_kernel(MEMORY_OF[ids.dtype.name]),
              [source, flag, lw.dim(ids.type.count()), lw.dim(limit)], [source], [flag])
    ok = lw.element(flag, "i32", lw.i64(0), "i64")
    lw.scalar_of[n] = lw.emit(Scalar("ne", "b1", (ok, lw.i64(0))))


@lowers("element")
def lower_element(lw: PlanWriter, n: Node) -> None:
    x = n.args[0]
    if x.op == "from_scalar":
        lw.scalar_of[n] = lw.scalar(x.args[0])
        return
    index = lw.scalar(n.args[1]) if n.attrs["index"] is None else lw.i64(n.attrs["index"])
    lw.scalar_of[n] = lw.element(lw.of(x), MEMORY_OF[x.dtype.name], index, n.type.name)


# -- quantised matrices ------------------------------------------------------------------------------------------------

@lowers("quantize_activation")
def lower_quantize(lw: PlanWriter, n: Node) -> None:
    x, block = n.args[0], n.attrs["block"]
    rows, cols = rows_of(x), x.shape[-1]
    per_row = cols // block
    out = lw.out(n, "act", dim_mul(rows, per_row, qa.RECORD_BYTES[block]))
    source = lw.of(x)
    lw.launch(qa.quantize_activation(block), [source, out, lw.dim(dim_mul(rows, per_row))], [source], [out],
              small=True, rows=2, strides={0: block * x.dtype.nbytes, 1: qa.RECORD_BYTES[block]})


@lowers("qdot")
def lower_qdot(lw: PlanWriter, n: Node) -> None:
    q, w = n.args
    act, weight, y = lw.of(q, "act"), lw.weight(w.attrs["tensor"], "R16"), lw.out(n)
    lw.launch(qm.qmatmul(w.dtype.name),
              [act, weight, y, lw.dim(rows_of(n)), lw.i64(w.shape[1]), lw.i64(w.shape[0])], [act], [y],
              rows=3, strides={0: _record_bytes(w), 2: 4 * w.shape[0]})


def _record_bytes(w: Node) -> int:
    """Bytes of one row of activations quantised for the weights w."""
    block = w.dtype.block
    return w.shape[1] // block * qa.RECORD_BYTES[block]


@lowers("qdot_gated")
def lower_qdot_gated(lw: PlanWriter, n: Node) -> None:
    q, gate, up = n.args
    act, y = lw.of(q, "act"), lw.out(n)
    wg, wu = (lw.weight(w.attrs["tensor"], "R16") for w in (gate, up))
    lw.launch(qm.qmatmul_gated(gate.dtype.name, None if up.dtype is gate.dtype else up.dtype.name),
              [act, wg, wu, y, lw.dim(rows_of(n)), lw.i64(gate.shape[1]), lw.i64(gate.shape[0])], [act], [y],
              rows=4, strides={0: _record_bytes(gate), 3: 4 * gate.shape[0]})


@lowers("routed_qdot")
def lower_routed_qdot(lw: PlanWriter, n: Node) -> None:
    from m3jit.kernels.routed import routed_qmatmul
    q, w, experts = n.args
    act, weight, y, chosen = lw.of(q, "act"), lw.weight(w.attrs["tensor"], "R16"), lw.out(n), lw.of(experts)
    lw.launch(routed_qmatmul(w.dtype.name), [act, weight, y, lw.dim(rows_of(n)), lw.i64(w.shape[2]),
                                             lw.i64(w.shape[1]), chosen, lw.i64(n.attrs["share"])], [act, chosen], [y])


@lowers("routed_matmul")
def lower_routed_matmul(lw: PlanWriter, n: Node) -> None:
    from m3jit.kernels.routed import routed_matmul
    x, w, experts = n.args
    source, weights, y, chosen = lw.of(x), lw.of(w), lw.out(n), lw.of(experts)
    lw.launch(routed_matmul(w.dtype.name), [source, weights, y, lw.dim(rows_of(n)), lw.dim(w.shape[2]),
                                            lw.dim(w.shape[1]), chosen, lw.i64(n.attrs["share"])],
              [source, weights, chosen], [y])


# -- attention ---------------------------------------------------------------------------------------------------------

def _geometry(n: Node, dense: bool) -> attn.Geometry:
    a = n.attrs
    g = a["geometry"]
    return attn.Geometry(a["heads"], g.kv_heads, g.head_dim, "F32" if dense else a["dtype"], bool(a["causal"]),
                         bool(a["softcap"]), dense, g.value_dim, g.shared)


def _scale(a: dict[str, Any]) -> float:
    """Default scale 1 / sqrt(head_dim), rounded to f32."""
    import numpy as np
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
    from m3jit.ir.tensor import dim_ceildiv
    q, past, *parts = n.args
    g = _stored(n.attrs["geometry"], "F32", dense=True)
    blocks = dim_ceildiv(parts[0].shape[0], 64)
    pages = lw.scratch(dim_mul(blocks, g.page_bytes))
    memory, keys = [lw.of(t) for t in parts], lw.dim(parts[0].shape[0])
    lw.launch(attn.kv_append(g), [*memory, pages, keys, lw.i64(0)], memory, [pages])
    _attend(lw, n, [pages], pages, lw.scalar(past), keys, blocks, True)


# -- tables, rotations, dots -------------------------------------------------------------------------------------------

@lowers("embed")
def lower_embed(lw: PlanWriter, n: Node) -> None:
    from m3jit.kernels.embed import embed
    ids, table = n.args
    source, weights, out = materialised(lw, ids), lw.of(table), lw.out(n)
    lw.launch(embed(table.dtype.name, MEMORY_OF[ids.dtype.name]),
              [source, weights, out, lw.dim(ids.type.count()), lw.i64(table.shape[1])], [source], [out],
              rows=3, strides={0: ids.dtype.nbytes, 2: 4 * table.shape[1]})


@functools.cache
def _frequencies(theta: float, head_dim: int, scale: float) -> T.Tensor:
    """Frequencies times the position scale, as the primitive rounds them."""
    import numpy as np
    from m3jit.ir.rope_frequencies import rope_frequencies
    return T.Tensor.of(rope_frequencies(theta, head_dim) * np.float32(scale))


@lowers("rope")
def lower_rope(lw: PlanWriter, n: Node) -> None:
    from m3jit.kernels.rope import rope
    x, pos, *factors = n.args
    a = n.attrs
    freq = lw.weight(_frequencies(a["theta"], a["head_dim"], a["scale"]), "raw")
    source, out = lw.of(x), lw.out(n)
    extra = [lw.of(f) for f in factors]
    heads = x.shape[-1] // a["head_dim"]
    lw.launch(rope(a["head_dim"], a["pairing"], bool(factors)),
              [source, freq, *extra, out, lw.dim(rows_of(x)), lw.i64(heads), lw.scalar(pos)], [source, *extra], [out],
              small=True)


@lowers("matmul")
def lower_matmul(lw: PlanWriter, n: Node) -> None:
    from m3jit.kernels.matmul import matmul_columns, matmul_rows
    x, w = n.args
    source, weights, out = lw.of(x), lw.of(w), lw.out(n)
    k, cols = x.shape[-1], n.shape[-1]
    groups = w.shape[0] if len(w.shape) == 3 else 1          # a row is what one token has for all of them
    tokens = dim_mul(*n.shape[:-2]) if len(w.shape) == 3 else rows_of(n)
    kernel = (matmul_rows if n.attrs["transposed"] else matmul_columns)(w.dtype.name, len(w.shape) == 3)
    lw.launch(kernel, [source, weights, out, lw.dim(tokens), lw.dim(k), lw.dim(cols),
                       *([lw.dim(groups)] if len(w.shape) == 3 else [])], [source, weights], [out],
              rows=3, strides={0: dim_mul(groups, k, x.dtype.nbytes), 2: dim_mul(groups, cols, 4)})


@lowers("argmax")
def lower_argmax(lw: PlanWriter, n: Node) -> None:
    from m3jit.kernels.argmax import argmax_columns, argmax_rows
    x, axis = n.args[0], n.attrs["axis"]
    source, out = lw.of(x), lw.out(n)
    memory = MEMORY_OF[x.dtype.name]
    inner = dim_mul(*x.shape[axis + 1:])
    outer = dim_mul(*x.shape[:axis])
    if inner == 1:
        lw.launch(argmax_rows(memory), [source, out, lw.dim(outer), lw.dim(x.shape[axis])], [source], [out],
                  rows=2, strides={0: dim_mul(x.shape[axis], x.dtype.nbytes), 1: 8})
    else:
        lw.launch(argmax_columns(memory), [source, out, lw.dim(outer), lw.dim(x.shape[axis]), lw.dim(inner)],
                  [source], [out])


from m3jit.kernels import lowering_moves, lowering_recurrent  # noqa: E402,F401  (they register their lowerings)
