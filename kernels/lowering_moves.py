"""Lowerings of moves, sorting, argmax, block packing, convolution and reductions along inner axes (see `lowering`)."""
from __future__ import annotations

import functools
from typing import Any, Sequence

from m3jit.ir.loop import Kernel
from m3jit.ir.loop_builder import Builder
from m3jit.ir.plan import Scalar
from m3jit.ir.plan_writer import Memory, PlanWriter
from m3jit.ir.tensor import Dim, Node, dim_add, dim_mul
from m3jit.kernels import moves
from m3jit.kernels.fused import MEMORY_OF
from m3jit.kernels.lowering_table import fill_value, lowers, materialised

BITS_OF = {1: "u8", 2: "u16", 4: "i32", 8: "i64"}


def strides(shape: Sequence[Dim]) -> list[Dim]:
    """Row-major strides in elements."""
    return [dim_mul(*shape[i + 1:]) for i in range(len(shape))]


def copy(lw: PlanWriter, width: int, src: Memory, dst: Memory, dims: Sequence[Dim], steps: Sequence[Dim],
         targets: Sequence[Dim], src_offset: Dim = 0, dst_offset: Dim = 0, small: bool = False) -> None:
    """dst[dst_offset + i . targets] = src[src_offset + i . steps] for all i < dims; the innermost target stride is 1.
    small: as for `PlanWriter.launch`."""
    pad = moves.RANK - len(dims)
    d = [1] * pad + list(dims)
    s = [0] * pad + list(steps)
    t = [0] * pad + list(targets)
    scalars = [lw.dim(v) for v in (*d, *s, *t[:-1], src_offset, dst_offset)]
    lw.launch(moves.strided_copy(width), [src, dst, *scalars], [src], [dst], small=small)


@lowers("broadcast")
def lower_broadcast(lw: PlanWriter, n: Node) -> None:
    x = n.args[0]
    source, out = materialised(lw, x), lw.out(n)
    lead = len(n.shape) - x.rank
    steps = [0] * lead + [0 if d == 1 and n.shape[lead + i] != 1 else s
                          for i, (d, s) in enumerate(zip(x.shape, strides(x.shape)))]
    shape = n.shape or (1,)
    copy(lw, n.dtype.nbytes, source, out, shape, steps or [0], strides(shape))


@lowers("transpose")
def lower_transpose(lw: PlanWriter, n: Node) -> None:
    x, perm = n.args[0], n.attrs["perm"]
    source, out = lw.of(x), lw.out(n)
    s = strides(x.shape)
    shape = n.shape or (1,)
    copy(lw, n.dtype.nbytes, source, out, shape, [s[p] for p in perm] or [0], strides(shape))


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
        return lower_strided_slice(lw, n)
    row = dim_mul(*x.shape[1:])
    start = lw.scalar(n.args[1]) if a["start"] is None else lw.i64(a["start"])
    first = lw.emit(Scalar("mul", "i64", (start, lw.dim(row))))
    source, out = lw.of(x), lw.out(n)
    lw.launch(rows_kernel(BITS_OF[x.dtype.nbytes]), [source, out, first, lw.dim(n.type.count())], [source], [out])


def lower_strided_slice(lw: PlanWriter, n: Node) -> None:
    x, a = n.args[0], n.attrs
    source, out = lw.of(x), lw.out(n)
    s = strides(x.shape)
    steps = [dim_mul(v, a["step"]) if i == a["axis"] else v for i, v in enumerate(s)]
    copy(lw, n.dtype.nbytes, source, out, n.shape, steps, strides(n.shape), dim_mul(s[a["axis"]], a["start"]),
         small=True)


@lowers("concat")
def lower_concat(lw: PlanWriter, n: Node) -> None:
    at, out = n.attrs["axis"], lw.out(n)
    sources = [materialised(lw, x) for x in n.args]
    outer, row = dim_mul(*n.shape[:at]), dim_mul(*n.shape[at:])
    offset: Dim = 0
    for x, source in zip(n.args, sources):
        mine = dim_mul(*x.shape[at:])
        copy(lw, n.dtype.nbytes, source, out, (outer, mine), (mine, 1), (row, 1), 0, offset)
        offset = dim_add(offset, mine)


@lowers("pad")
def lower_pad(lw: PlanWriter, n: Node) -> None:
    x, a = n.args[0], n.attrs
    source, out = lw.of(x), lw.out(n)
    fill_value(lw, out, n.dtype, lw.dim(n.type.count()), a["value"])
    at = a["axis"]
    inner = dim_mul(*x.shape[at + 1:])
    mine, row = dim_mul(*x.shape[at:]), dim_mul(*n.shape[at:])
    copy(lw, n.dtype.nbytes, source, out, (dim_mul(*x.shape[:at]), mine), (mine, 1), (row, 1), 0,
         dim_mul(inner, a["before"]))


@lowers("tile")
def lower_tile(lw: PlanWriter, n: Node) -> None:
    x, at = n.args[0], n.attrs["axis"]
    source, out = lw.of(x), lw.out(n)
    mine = dim_mul(*x.shape[at:])
    dims = (dim_mul(*x.shape[:at]), n.attrs["reps"], mine)
    copy(lw, n.dtype.nbytes, source, out, dims, (mine, 0, 1), strides(dims))


@lowers("gather")
def lower_gather(lw: PlanWriter, n: Node) -> None:
    x, index = n.args
    at = n.attrs["axis"]
    source, i, out = lw.of(x), materialised(lw, index), lw.out(n)
    sizes = (dim_mul(*x.shape[:at]), x.shape[at], index.type.count(), dim_mul(*x.shape[at + 1:]))
    lw.launch(moves.gather(x.dtype.nbytes, MEMORY_OF[index.dtype.name]),
              [source, i, out, *(lw.dim(d) for d in sizes)], [source, i], [out])


@lowers("scatter")
def lower_scatter(lw: PlanWriter, n: Node) -> None:
    acc, index, values = n.args
    at = n.attrs["axis"]
    start, i, v, out = lw.of(acc), materialised(lw, index), lw.of(values), lw.out(n)
    copy(lw, n.dtype.nbytes, start, out, (n.type.count(),), (1,), (1,))
    sizes = (dim_mul(*acc.shape[:at]), acc.shape[at], index.type.count(), dim_mul(*acc.shape[at + 1:]))
    lw.launch(moves.scatter(MEMORY_OF[acc.dtype.name], n.attrs["mode"], MEMORY_OF[index.dtype.name]),
              [out, i, v, *(lw.dim(d) for d in sizes)], [i, v, out], [out])


# -- order ------------------------------------------------------------------------------------------------------------

@lowers("result")
def lower_result(lw: PlanWriter, n: Node) -> None:
    """One result of an operation with several: its memory was made with the operation."""
    pair, part = n.args[0], ("values", "indices")[n.attrs["index"]]
    lw.adopt(n, pair, part)


@lowers("sort", "topk")
def lower_sort(lw: PlanWriter, n: Node) -> None:
    from m3jit.kernels import sort
    x, a = n.args[0], n.attrs
    memory = MEMORY_OF[x.dtype.name]
    rows, length = dim_mul(*x.shape[:-1]), x.shape[-1]
    k = a.get("k", length)
    source = lw.of(x)
    values = lw.out(n, "values", dim_mul(rows, k, x.dtype.nbytes))
    indices = lw.out(n, "indices", dim_mul(rows, k, 8))
    work = lw.scratch(dim_mul(rows, length, 2 * (sort.KEY_BYTES[memory] + 4)))
    args: list[Any] = [source, values, indices, work, lw.dim(rows), lw.dim(length)]
    if n.op == "topk":
        kernel = sort.topk_rows(memory, bool(a["largest"]), bool(a["sorted"]))
        args.append(lw.i64(k))
    else:
        kernel = sort.sort_rows(memory, bool(a["descending"]))
    lw.launch(kernel, args, [source], [values, indices, work])


# -- blocks -----------------------------------------------------------------------------------------------------------

@lowers("dequantize")
def lower_dequantize(lw: PlanWriter, n: Node) -> None:
    from m3jit.kernels.embed import dequantize
    x = n.args[0]
    source, out = lw.of(x), lw.out(n)
    lw.launch(dequantize(x.dtype.name), [source, out, lw.dim(n.type.count())], [source], [out])


@lowers("quantize")
def lower_quantize_blocks(lw: PlanWriter, n: Node) -> None:
    from m3jit.isa.types import DTYPES
    from m3jit.kernels.convert import quantize
    x, dtype = n.args[0], DTYPES[n.attrs["dtype"]]
    blocks = dim_mul(*x.shape[:-1], x.shape[-1] // dtype.block)
    source = lw.of(x)
    packed, flags = lw.out(n, "values", dim_mul(blocks, dtype.nbytes)), lw.out(n, "indices", blocks)
    lw.launch(quantize(dtype.name), [source, packed, flags, lw.dim(blocks)], [source], [packed, flags])


@lowers("conv")
def lower_conv(lw: PlanWriter, n: Node) -> None:
    from m3jit.kernels.conv import conv
    x, w, *bias = n.args
    a = n.attrs
    ins = [lw.of(t) for t in n.args]
    out = lw.out(n)
    flat = x.rank == 3
    h, kh, oh = (1, 1, 1) if flat else (x.shape[2], w.shape[2], n.shape[2])
    pads = (0 if flat else a["pad"], a["pad"])
    sizes = (x.shape[0], x.shape[1], h, x.shape[-1], w.shape[0], kh, w.shape[-1], oh, n.shape[-1], a["stride"],
             a["stride"], *pads, a["dilation"], a["dilation"], a["groups"])
    lw.launch(conv(bool(bias)), [*ins, out, *(lw.dim(d) for d in sizes)], ins, [out])


@lowers("reduce")
def lower_reduce(lw: PlanWriter, n: Node) -> None:
    """Along an axis that is not the last one."""
    from m3jit.kernels.reduce import reduce_columns
    x, axis = n.args[0], n.attrs["axis"]
    source, out = lw.of(x), lw.out(n)
    sizes = (dim_mul(*x.shape[:axis]), x.shape[axis], dim_mul(*x.shape[axis + 1:]))
    lw.launch(reduce_columns(MEMORY_OF[x.dtype.name], n.attrs["op"]), [source, out, *(lw.dim(d) for d in sizes)],
              [source], [out])


# -- drawing a token --------------------------------------------------------------------------------------------------

@lowers("sample")
def lower_sample(lw: PlanWriter, n: Node) -> None:
    from m3jit.kernels import sample as sm
    x, rng, top_k, temperature, top_p, min_p, penalty, *others = n.args
    a = n.attrs
    history = others[0] if a["history"] else None
    mask = others[-1] if a["mask"] else None
    kernel = sm.sample(sm.Operands(*(MEMORY_OF[t.dtype.name] if t is not None else "" for t in (x, history, mask))))
    count = x.type.count()
    sources = [lw.of(t) for t in (x, history, mask) if t is not None]
    out, work = lw.out(n, "values", 64), lw.scratch(dim_mul(dim_add(count, sm.LANES), sm.BYTES_PER_LOGIT))

    def narrow(v: Node) -> Scalar:
        return lw.emit(Scalar("f2f32", "f32", (lw.scalar(v),)))
    args: list[Any] = [*sources, work, out, lw.dim(count)]
    if history is not None:
        args += [lw.dim(history.type.count()), lw.i64(a["window"])]
    args += [lw.scalar(rng), lw.scalar(top_k), narrow(temperature)]
    if history is not None:
        args.append(narrow(penalty))
    lw.launch(kernel, [*args, lw.scalar(top_p), lw.scalar(min_p)], sources, [out, work])


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
