"""The table of lowerings, `LIBRARY`, and what they share: operands that need memory, memory that is filled."""
from __future__ import annotations

import functools
from typing import Callable

from m3jit.ir.loop import Kernel
from m3jit.ir.loop_builder import Builder
from m3jit.ir.plan import Scalar
from m3jit.ir.plan_writer import Memory, PlanWriter
from m3jit.ir.tensor import Dim, Node, dim_mul
from m3jit.isa import types as T
from m3jit.kernels.fused import MEMORY_OF

LIBRARY: dict[str, Callable[[PlanWriter, Node], None]] = {}


def lowers(*ops: str):
    """Enters a lowering under these primitives."""
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
