"""Products with chosen experts, of the eager namespace."""
from __future__ import annotations

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir import eager_blocks
from m3jit.ir.eager_matrix import dot64, quantize_rows
from m3jit.ir.eager_qdot import qdot
from m3jit.ir.eager_values import describe, float_tensor, floats, index_tensor, tensor, widen
from m3jit.isa.types import ACTIVATION_BLOCK, FLOATS, Tensor


class Routed:
    """Mixin of `EagerXp`."""

    def routed(self, x, w, experts, integer: bool):
        """x [.., K] or [.., k, K] times w[e] transposed for each e of experts [.., k], w [E, N, K] -> F32 [.., k, N].

        integer: as `qmatmul`, else as `matmul`, for each expert's matrix alone."""
        x, w, chosen = float_tensor(x), tensor(w), index_tensor(experts)
        if w.rank != 3 or not (w.dtype.is_block or w.dtype in FLOATS):
            raise OperandError(f"experts are a float or block tensor [E, N, K], got {describe(w)}")
        if integer and w.dtype.name not in ACTIVATION_BLOCK:
            raise OperandError(f"an integer product needs weights of type {' '.join(ACTIVATION_BLOCK)}, got "
                               f"{describe(w)}")
        count, n, k = w.shape
        if not chosen.ndim or x.shape not in ((*chosen.shape[:-1], k), (*chosen.shape, k)):
            raise OperandError(f"{describe(x)} times {describe(w)} for experts {list(chosen.shape)}: rows are "
                               f"[.., {k}] or [.., k, {k}] where experts are [.., k]")
        bad = (chosen < 0) | (chosen >= count)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise OperandError(f"expert {int(chosen.ravel()[at])} at position {at} is outside the {count} experts")
        rows = np.ascontiguousarray(widen(x)).reshape(-1, k)
        flat = chosen.ravel()
        source = np.arange(flat.size) if x.rank > chosen.ndim else np.arange(flat.size) // max(1, chosen.shape[-1])
        out = np.empty((flat.size, n), np.float32)
        for e in np.unique(flat):
            here = np.flatnonzero(flat == e)
            out[here] = _product(rows[source[here]], w, int(e), integer)
        return floats(out.reshape(*chosen.shape, n))


def _product(rows: np.ndarray, w: Tensor, e: int, integer: bool) -> np.ndarray:
    """rows [R, K] times expert e's matrix transposed."""
    if integer:
        q, d = quantize_rows(rows, ACTIVATION_BLOCK[w.dtype.name])
        return qdot(q, d, w.dtype, w.data[e])
    if w.dtype.is_block:
        return dot64(rows, eager_blocks.decode(w.dtype, w.data[e]))
    return dot64(rows, widen(Tensor(w.dtype, w.shape[1:], w.data[e])))
