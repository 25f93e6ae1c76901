"""The tracer's moves, sorting, block packing and convolution (mixed into `TraceXp`)."""
from __future__ import annotations

from typing import Any, Sequence

from m3jit.ir.tensor import B1T, Dim, Node, OpaqueType, TensorType, dim_add, dim_mul
from m3jit.isa import types as T
from m3jit.isa.types import DType


class TraceLayout:
    """Mixin of `TraceXp`: primitives that move, order or pack elements."""

    def concat(self, tensors: Sequence[Any], axis: int):
        parts = [self.tensor(t) for t in tensors]
        first = parts[0]
        at = self.axis(first, axis)
        total: Dim = first.shape[at]
        for t in parts[1:]:
            if t.dtype is not first.dtype or t.rank != first.rank or not all(
                    i == at or self.same(a, b) for i, (a, b) in enumerate(zip(t.shape, first.shape))):
                raise self.error("concat of tensors that do not fit")
            total = dim_add(total, t.shape[at])
        if first.dtype.is_block:
            raise self.error("concat of a block type")
        shape = tuple(total if i == at else d for i, d in enumerate(first.shape))
        return self.node("concat", TensorType(first.dtype, shape), *parts, axis=at)

    def pad(self, x, axis: int, before: int, after: int, value: int | float = 0):
        x = self.tensor(x)
        at = self.axis(x, axis)
        if x.dtype.is_block or isinstance(value, Node):
            raise self.error("pad")
        if x.dtype.kind != "float" and (value != int(value) or not self._fits(x.dtype, int(value))):
            raise self.error("pad value does not fit the dtype")
        shape = tuple(dim_add(d, before + after) if i == at else d for i, d in enumerate(x.shape))
        return self.node("pad", TensorType(x.dtype, shape), x, axis=at, before=before, value=value)

    @staticmethod
    def _fits(dtype: DType, v: int) -> bool:
        if dtype.kind == "bool":
            return v in (0, 1)
        bits = 8 * dtype.nbytes
        return 0 <= v < 2 ** bits if dtype is T.U8 else -2 ** (bits - 1) <= v < 2 ** (bits - 1)

    def tile(self, x, axis: int, reps: int):
        x = self.tensor(x)
        at = self.axis(x, axis)
        if x.dtype.is_block or not isinstance(reps, int) or reps < 1:
            raise self.error("tile")
        shape = tuple(dim_mul(d, reps) if i == at else d for i, d in enumerate(x.shape))
        return self.node("tile", TensorType(x.dtype, shape), x, axis=at, reps=reps)

    def _index(self, index: Any, limit: Dim, what: str) -> Node:
        """An integer index tensor; leaves the region where an index is outside 0 .. limit - 1."""
        i = self.tensor(index)
        if i.dtype not in (T.I32, T.I64):
            i = self.cast(i, T.I64) if i.dtype.kind == "int" else None
        if i is None:
            raise self.error(f"{what}: index dtype")
        self.r.check(self.node("in_bounds", B1T, i, limit=limit), f"{what}: index outside the axis")
        return i

    def gather(self, table, index, axis: int):
        x = self.tensor(table)
        at = self.axis(x, axis)
        i = self._index(index, x.shape[at], "gather")
        if x.dtype.is_block or x.rank - 1 + i.rank > T.MAX_RANK:
            raise self.error("gather")
        shape = (*x.shape[:at], *i.shape, *x.shape[at + 1:])
        return self.node("gather", TensorType(x.dtype, shape), x, i, axis=at)

    def scatter(self, acc, index, values, axis: int, mode: str):
        acc, values = self.tensor(acc), self.tensor(values)
        at = self.axis(acc, axis)
        i = self._index(index, acc.shape[at], "scatter")
        want = (*acc.shape[:at], *i.shape, *acc.shape[at + 1:])
        if acc.dtype is not values.dtype or acc.dtype.is_block or acc.dtype.kind == "bool" or \
                len(want) != values.rank or not all(self.same(a, b) for a, b in zip(want, values.shape)):
            raise self.error("scatter operands")
        if acc.dtype.kind == "float" and acc.dtype is not T.F32:
            wide = self.scatter(self.cast(acc, T.F32), i, self.cast(values, T.F32), axis, mode)
            return self.cast(wide, acc.dtype)
        return self.node("scatter", acc.type, acc, i, values, axis=at, mode=mode)

    # -- order --------------------------------------------------------------------------------------------------------
    def _last(self, x: Node, at: int) -> tuple[Node, tuple[int, ...] | None]:
        """x with axis `at` moved last, and the permutation that moves it back."""
        if at == x.rank - 1:
            return x, None
        perm = tuple(i for i in range(x.rank) if i != at) + (at,)
        back = tuple(perm.index(i) for i in range(x.rank))
        return self.transpose(x, perm), back

    def _ordered(self, op: str, x: Any, axis: int, count: Dim | None, **attrs: Any):
        x = self.tensor(x)
        at = self.axis(x, axis)
        if x.dtype.is_block or x.dtype.kind == "bool" or x.shape[at] == 0:
            raise self.error(f"{op} of {x.dtype.name}")
        moved, back = self._last(x, at)
        shape = (*moved.shape[:-1], moved.shape[-1] if count is None else count)
        pair = self.node(op, OpaqueType(op), moved, **attrs)
        values = self.node("result", TensorType(x.dtype, shape), pair, index=0)
        indices = self.node("result", TensorType(T.I64, shape), pair, index=1)
        return (values, indices) if back is None else (self.transpose(values, back), self.transpose(indices, back))

    def sort(self, x, axis: int, descending: bool = False):
        return self._ordered("sort", x, axis, None, descending=descending)

    def topk(self, x, k: int, axis: int, largest: bool = True, sorted: bool = True):
        x = self.tensor(x)
        if isinstance(k, Node) and k.op == "const":
            k = k.attrs["value"]
        n = x.shape[self.axis(x, axis)]
        if not isinstance(k, int) or k < 1 or (isinstance(n, int) and k > n):
            raise self.error("topk needs a fixed k within the axis")
        if not isinstance(n, int):
            self.r.check(self.node("le", B1T, self.const(k), self.dim(x, axis)), "k beyond the axis")
        return self._ordered("topk", x, axis, k, k=k, largest=largest, sorted=sorted)

    # -- blocks -------------------------------------------------------------------------------------------------------
    def dequantize(self, x):
        x = self.tensor(x)
        if not x.dtype.is_block:
            return self.cast(x, T.F32)
        if x.dtype not in T.WEIGHTS or not isinstance(x.shape[-1], int):
            raise self.error(f"no kernel decodes {x.dtype.name}")
        return self.node("dequantize", TensorType(T.F32, x.shape), x)

    def quantize(self, x, dtype: DType):
        x = self.tensor(x)
        if dtype.name not in ("Q8_0", "Q4_0", "Q4_1") or x.dtype not in T.FLOATS or not x.rank or \
                not isinstance(x.shape[-1], int) or x.shape[-1] % dtype.block:
            raise self.error("quantize")
        x = self.cast(x, T.F32)
        packed = self.node("quantize", OpaqueType("quantize"), x, dtype=dtype.name)
        flags = self.node("result", TensorType(T.U8, (dim_mul(*x.shape[:-1], x.shape[-1] // dtype.block),)), packed,
                          index=1)
        self.r.check(self.node("in_bounds", B1T, flags, limit=1), "a value or scale that cannot be packed")
        return self.node("result", TensorType(dtype, x.shape), packed, index=0)

    def conv(self, x, w, bias=None, *, stride=1, pad=0, dilation=1, groups=1):
        operands = [self.tensor(t) for t in (x, w, bias) if t is not None]
        if any(t.dtype not in T.FLOATS for t in operands):
            raise self.error("conv of tensors that are not floats")
        x, w = self.cast(x, T.F32), self.cast(w, T.F32)
        known = (*x.shape[1:], *(w.shape[1:] if groups == 1 else w.shape))
        fixed = x.rank in (3, 4) and w.rank == x.rank and all(isinstance(d, int) for d in known)
        if not fixed or min(stride, dilation, groups) < 1 or pad < 0:
            raise self.error("conv shapes")
        channels, (outputs, inner) = x.shape[1], w.shape[:2]
        if channels % groups or (groups > 1 and outputs % groups) or inner != channels // groups \
                or min(w.shape[2:]) < 1:
            raise self.error("conv groups")
        spans = [dilation * (k - 1) + 1 for k in w.shape[2:]]
        if any(d + 2 * pad < s for d, s in zip(x.shape[2:], spans)):
            raise self.error("conv kernel larger than its input")
        sizes = [(d + 2 * pad - s) // stride + 1 for d, s in zip(x.shape[2:], spans)]
        args = [x, w]
        if bias is not None:
            b = self.cast(bias, T.F32)
            if not self.same(b.type.count(), outputs):
                raise self.error("conv bias")
            args.append(b)
        return self.node("conv", TensorType(T.F32, (x.shape[0], outputs, *sizes)), *args, stride=stride, pad=pad,
                         dilation=dilation, groups=groups)
