"""Lowerings of recurrences (see `lowering`).  The node is the new cell of the state; its result 0 are the rows."""
from __future__ import annotations

from typing import Any

from m3jit.ir.eager_recurrent import scan_shape
from m3jit.ir.plan_writer import PlanWriter
from m3jit.ir.tensor import Node
from m3jit.kernels import recurrent
from m3jit.kernels.lowering_table import lowers


@lowers("causal_conv")
def lower_causal_conv(lw: PlanWriter, n: Node) -> None:
    x, w, *bias, old = n.args
    reads = [lw.of(a) for a in (x, w, *bias, old)]
    rows, after = lw.out(n, "values", x.type.nbytes()), lw.out(n)
    lw.launch(recurrent.causal_conv(w.shape[1], bool(bias)),
              [*reads, rows, after, lw.dim(x.shape[0]), lw.dim(x.shape[1])], reads, [rows, after])


@lowers("scan")
def lower_scan(lw: PlanWriter, n: Node) -> None:
    x, dt, a, b, c, *d, old = n.args
    at = n.attrs
    runs, length, _ = scan_shape(x.shape[1], at["d_state"], at["heads"], at["groups"])
    packed = a.op == "weight" and not at["heads"]
    exponents = lw.weight(a.attrs["tensor"], f"tiles{runs}") if packed else lw.of(a)
    reads: list[Any] = [lw.of(old), lw.of(x), lw.of(dt), exponents, lw.of(b), lw.of(c), *(lw.of(v) for v in d)]
    rows, after = lw.out(n, "values", x.type.nbytes()), lw.out(n)
    lw.launch(recurrent.scan(at["d_state"], bool(at["heads"]), at["skip"], packed),
              [*reads, rows, after, lw.dim(x.shape[0]), *map(lw.i64, (runs, length, at["groups"]))],
              reads, [rows, after])
