"""The tracer's recurrences: causal convolution and the state-space scan over a recurrent state (mixed into `TraceXp`).

A cell of the state is a tensor of the region like any other: it comes in as an input, and what the region leaves behind
is a new one.  Its key names state register, layer, part and shape: ("cell", ("S", 0), layer, part, shape).
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping

from m3jit.ir.eager_recurrent import scan_shape
from m3jit.ir.tensor import Node, OpaqueType, TensorType
from m3jit.ir.trace_model import KVRef
from m3jit.isa import types as T
from m3jit.isa.cells import SCAN, WINDOW, stored_shape

MAX_TAPS = 16                                 # of a causal convolution in compiled code (all are kept in registers)
CellKey = tuple[str, Any, int, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class CellsType(OpaqueType):
    """The compiler's type of a recurrent state; the shapes its cells have today are not part of it."""
    shapes: Mapping[tuple[int, str], tuple[int, ...]] = field(default_factory=dict, compare=False)


class CellRef:
    """A recurrent state while tracing.  cells: what the region has put in place of the state's own cells."""
    __slots__ = ("key", "cells")

    def __init__(self, key: Any, cells: dict[CellKey, Node]):
        self.key, self.cells = key, dict(cells)


def is_cell(key: Any) -> bool:
    """Whether an environment key names a cell."""
    return isinstance(key, tuple) and key[0] == "cell"


def cell_type(key: CellKey) -> TensorType:
    """Type of a cell's memory."""
    return TensorType(T.F32, stored_shape(key[3], key[4]))


class TraceRecurrent:
    """Mixin of `TraceXp`."""

    def causal_conv(self, state, layer: int, x, w, bias):
        ref = self._cells(state)
        x, w = self.tensor(x), self.tensor(w)
        if x.rank != 2 or w.rank != 2 or not self.same(w.shape[0], x.shape[1]) or \
                not all(isinstance(d, int) for d in (x.shape[1], w.shape[1])) or not 1 <= w.shape[1] <= MAX_TAPS:
            raise self.error("causal_conv operands")
        args = [x, w]
        if bias is not None:
            args.append(self.tensor(bias))
            if not self.same(args[2].type.count(), x.shape[1]):
                raise self.error("causal_conv bias")
        key = ("cell", ref.key, layer, WINDOW, (w.shape[1] - 1, x.shape[1]))
        return self._step(ref, key, "causal_conv", x.type, args, bias=bias is not None)

    def scan(self, state, layer: int, x, dt, a, b, c, d, *, heads: int, groups: int):
        ref = self._cells(state)
        x, dt, a, b, c = map(self.tensor, (x, dt, a, b, c))
        runs = heads or groups
        count, channels = x.shape
        matrices = all(t.rank == 2 for t in (dt, a, b, c))
        if not matrices or not all(isinstance(d, int) and d for d in (channels, b.shape[1])) or \
                not groups or channels % runs or runs % groups or b.shape[1] % groups:
            raise self.error("scan operands")
        d_state = b.shape[1] // groups
        wanted = [(dt, (count, heads or channels)), (a, (count, heads) if heads else (channels, d_state)),
                  (b, (count, groups * d_state)), (c, (count, groups * d_state))]
        if not all(self.same(have, want) for t, shape in wanted for have, want in zip(t.shape, shape)):
            raise self.error("scan operands of other sizes")
        args = [x, dt, a, b, c]
        skip = ""
        if d is not None:
            args.append(self.tensor(d))
            skip = "channel" if self._counts(d, channels) else "head"
            if skip == "head" and not (heads and self._counts(d, heads)):
                raise self.error("scan D")
        key = ("cell", ref.key, layer, SCAN, scan_shape(channels, d_state, heads, groups))
        return self._step(ref, key, "scan", x.type, args, heads=heads, groups=groups, d_state=d_state, skip=skip)

    def _counts(self, t: Node, n: int) -> bool:
        """Whether t has n elements (today, where that is not fixed)."""
        count = t.type.count()
        return count == n if isinstance(count, int) else self.r.today(count) == n and self.same(count, n)

    def _step(self, ref: CellRef, key: CellKey, op: str, result: TensorType, args: list[Node], **attrs: Any):
        """(rows, state): the node itself is the new cell, its result 0 are the rows."""
        old = self.r.cell(ref, key)
        new = self.node(op, cell_type(key), *args, old, **attrs)
        rows = self.node("result", result, new, index=0)
        return rows, CellRef(ref.key, {**ref.cells, key: new})

    def _cells(self, state: Any) -> CellRef:
        if isinstance(state, KVRef) and state.unused:          # a register nobody has written: a new state of any kind
            return CellRef(state.key, {})
        if not isinstance(state, CellRef):
            raise self.error("the state operand is not a recurrent state in an S register")
        return state
