"""Lowerings of matrix products: floats, quantised weights, experts (see `lowering`)."""
from __future__ import annotations

from m3jit.ir.plan_writer import PlanWriter
from m3jit.ir.tensor import Node, dim_mul
from m3jit.kernels import qmatmul as qm
from m3jit.kernels import quantize as qa
from m3jit.kernels.lowering_table import lowers, rows_of


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
    tensors = [w.attrs["tensor"] for w in (gate, up)]
    one = len(qm.gated_weights(gate.dtype)) == 1
    weights = [lw.weight(tuple(tensors), "R16")] if one else [lw.weight(t, "R16") for t in tensors]
    lw.launch(qm.qmatmul_gated(gate.dtype.name, None if up.dtype is gate.dtype else up.dtype.name),
              [act, *weights, y, lw.dim(rows_of(n)), lw.i64(gate.shape[1]), lw.i64(gate.shape[0])], [act], [y],
              rows=len(weights) + 2, strides={0: _record_bytes(gate), len(weights) + 1: 4 * gate.shape[0]})


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
