"""The tracer's products with chosen experts (mixed into `TraceXp`)."""
from __future__ import annotations

from m3jit.ir.tensor import B1T, TensorType
from m3jit.isa import types as T


class TraceRouted:
    """Mixin of `TraceXp`."""

    def routed(self, x, w, experts, integer: bool):
        x, w, experts = self.tensor(x), self.tensor(w), self.tensor(experts)
        if w.rank != 3 or experts.rank < 1 or experts.dtype.kind != "int" or x.dtype not in T.FLOATS or \
                (w.dtype not in T.FLOATS and not w.dtype.is_block) or \
                not all(isinstance(d, int) for d in (*w.shape, experts.shape[-1])):
            raise self.error(f"experts {w.type} for {x.type}")
        share = x.rank == experts.rank
        lead = experts.shape[:-1] if share else experts.shape
        if x.rank != len(lead) + 1 or not all(self.same(a, b) for a, b in zip(x.shape, (*lead, w.shape[2]))):
            raise self.error(f"experts {experts.type} for rows {x.type}")
        ok = self.node("in_bounds", B1T, experts, limit=w.shape[0])
        self.r.check(ok, "an expert outside the weight")
        x = self.cast(self.reshape(x, (*x.shape[:-1], w.shape[2])), T.F32)
        experts = self.cast(experts, T.I64)
        of = TensorType(T.F32, (*experts.shape, w.shape[1]))
        share = max(1, experts.shape[-1]) if share else 1
        if not integer:
            return self.node("routed_matmul", of, x, w, experts, share=share)
        if w.dtype.name not in T.ACTIVATION_BLOCK or w.op != "weight" or w.shape[1] % 16:
            raise self.error("experts in a layout that kernels do not read")
        q = self.quantize_activation(x, T.ACTIVATION_BLOCK[w.dtype.name])
        return self.node("routed_qdot", of, q, w, experts, share=share)
