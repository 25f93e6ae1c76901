"""Recurrences of the eager namespace: causal convolution and the state-space scan, over a `CellState`."""
from __future__ import annotations

from typing import Any

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir.eager_layout import check_range
from m3jit.ir.eager_math import exp32, fma32
from m3jit.ir.eager_values import describe, floats, narrow
from m3jit.isa.cells import SCAN, WINDOW, CellState, cell_of
from m3jit.isa.types import F32, NEW_STATE, Tensor


def scan_shape(channels: int, d_state: int, heads: int, groups: int) -> tuple[int, int, int]:
    """(runs, length, d_state) of h: a run of channels shares its rows of B and C, with heads also dt and A."""
    runs = heads or groups
    return runs, channels // runs, d_state


class Recurrent:
    """Mixin of `EagerXp`."""

    def causal_conv(self, state: Any, layer: int, x: Tensor, w: Tensor, bias: Tensor | None):
        """(y [T, C], state): y[t, c] folds fma(x, w) over the taps, the oldest row first, from the bias or +0."""
        state = self._cells(state)
        if x.rank != 2 or w.rank != 2 or w.shape[0] != x.shape[1] or not w.shape[1]:
            raise OperandError(f"CONV with a state needs rows x [T, C] and w [C, K], got {describe(x)} and "
                               f"{describe(w)}")
        if bias is not None and bias.size != x.shape[1]:
            raise OperandError(f"CONV needs {x.shape[1]} biases, got {describe(bias)}")
        count, channels = x.shape
        taps = w.shape[1]
        self.room((count + taps, channels), F32)
        rows = np.concatenate([state.read(layer, WINDOW, (taps - 1, channels)), x.data])
        y = np.zeros((count, channels), np.float32)
        if bias is not None:
            y += bias.data.reshape(-1)
        with np.errstate(all="ignore"):
            for k in range(taps):
                y = fma32(rows[k:k + count], w.data[:, k], y)
        return floats(y), state.with_cells({(layer, WINDOW): cell_of(WINDOW, rows[count:])})

    def scan(self, state: Any, layer: int, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, *,
             heads: int, groups: int):
        """(y [T, channels], state): u = dt x, h = fma(h, decay, u B), y = fold of fma(h, C), then fma(D, x, y).

        heads 0: decay = exp(dt a), a [channels, d_state] and dt [T, channels]; else dt and the decays a are [T, heads].
        """
        state = self._cells(state)
        d_state = self._scan_operands(x, dt, a, b, c, d, heads, groups)
        count, channels = x.shape
        shape = scan_shape(channels, d_state, heads, groups)
        self.room(shape, F32)
        h = state.read(layer, SCAN, shape).reshape(channels, d_state)
        y = np.empty((count, channels), np.float32)
        b_rows, c_rows = (np.repeat(v.data.reshape(count, groups, 1, d_state), channels // groups, axis=2)
                          .reshape(count, channels, d_state) for v in (b, c))
        size = channels // (heads or channels)
        steps = np.repeat(dt.data, size, axis=1)
        with np.errstate(all="ignore"):
            for t in range(count):
                decay = np.repeat(a.data[t], size)[:, None] if heads else exp32(steps[t][:, None] * a.data)
                u = steps[t] * x.data[t]
                h = fma32(h, decay, u[:, None] * b_rows[t])
                acc = np.zeros(channels, np.float32)
                for n in range(d_state):
                    acc = fma32(h[:, n], c_rows[t, :, n], acc)
                if d is not None:
                    acc = fma32(np.repeat(d.data.reshape(-1), channels // d.size), x.data[t], acc)
                y[t] = acc
        return floats(y), state.with_cells({(layer, SCAN): cell_of(SCAN, narrow(h, F32).reshape(shape))})

    def reset_cells(self, state: Any, layer: int) -> CellState:
        """`CellState.reset`."""
        return self._cells(state).reset(check_range("LAYER", layer, -1, 2 ** 16))

    # -- helpers ----------------------------------------------------------------------------------------------------
    def _scan_operands(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, heads: int,
                       groups: int) -> int:
        """Checks shapes; d_state."""
        count, channels = x.shape
        runs = heads or groups
        if not groups or not channels or channels % runs or runs % groups:
            raise OperandError(f"SSM_SCAN: {channels} channels do not divide into "
                               + (f"{heads} heads of {groups} groups" if heads else f"{groups} groups"))
        if b.rank != 2 or b.shape[0] != count or not b.shape[1] or b.shape[1] % groups or c.shape != b.shape:
            raise OperandError(f"SSM_SCAN: B and C must be [{count}, {groups} * d_state], got {describe(b)} and "
                               f"{describe(c)}")
        d_state = b.shape[1] // groups
        steps = (count, heads or channels)
        if dt.shape != steps:
            raise OperandError(f"SSM_SCAN: dt must be {list(steps)}, got {describe(dt)}")
        if a.shape != (steps if heads else (channels, d_state)):
            raise OperandError(f"SSM_SCAN: A must be [{channels}, {d_state}], got {describe(a)}")
        if d is not None and d.size not in (channels, heads or channels):
            raise OperandError(f"SSM_SCAN: D must have {channels} elements"
                               + (f" or {heads}" if heads else "") + f", got {describe(d)}")
        return d_state

    def _cells(self, state: Any) -> CellState:
        if state is NEW_STATE or state is None:
            return CellState()
        if state.__class__ is not CellState:
            raise OperandError(f"the state operand is not a recurrent state: it is a "
                               f"{getattr(state, 'kind_name', type(state).__name__)}")
        return state
