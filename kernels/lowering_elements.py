"""Lowerings of checks, single elements, rows of a table and rotary positions (see `lowering`)."""
from __future__ import annotations

import functools

import numpy as np

from m3jit.ir.loop import Kernel
from m3jit.ir.loop_builder import Builder
from m3jit.ir.plan import Scalar
from m3jit.ir.plan_writer import PlanWriter
from m3jit.ir.rope_frequencies import rope_frequencies
from m3jit.ir.tensor import Node
from m3jit.isa import types as T
from m3jit.kernels.fused import MEMORY_OF
from m3jit.kernels.lowering_table import lowers, materialised, rows_of


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
