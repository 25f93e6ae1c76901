"""olmo2 (OLMo 2 and 3; OLMo Team 2024).

    x += rmsnorm(Wo attention(rope(rmsnorm(Wq x) * gq), rope(rmsnorm(Wk x) * gk), Wv x)) * g1
    x += rmsnorm(Wdown (silu(Wgate x) * (Wup x))) * g2

No norm before a branch; queries and keys are normalised over all heads together.  OLMo 3: of four layers three see a
window, and these rotate without scaling.
"""
from __future__ import annotations

from m3jit.models.architectures.decoder import Decoder
from m3jit.models.model_source import LAYER_PREFIX, Shapes
from m3jit.models.program import Writer


class Olmo2(Decoder):
    name = "olmo2"

    def read(self) -> None:
        self.read_windows(period=4)
        if any(self.windows) and self.rotation.kind == "yarn":
            raise self.keys.refuse("rope.scaling.type", "is 'yarn' beside a sliding window", "none or linear there")

    def layer_tensors(self, i: int) -> Shapes:
        return {**self.attention_tensors(), **self.ffn_tensors(), "post_attention_norm.weight": (self.width,),
                "post_ffw_norm.weight": (self.width,), "attn_q_norm.weight": (self.heads * self.head_dim,),
                "attn_k_norm.weight": (self.kv_heads * self.head_dim,)}

    def layer(self, w: Writer, i: int) -> None:
        b = LAYER_PREFIX.format(i)
        self.attention(w, i, "rX")
        w.norm("rH", "rH", b + "post_attention_norm.weight", self.eps)
        w.residual()
        w.ffn("rH", "rX", b + "ffn_", self.act)
        w.norm("rH", "rH", b + "post_ffw_norm.weight", self.eps)
        w.residual()

    def norm_queries_keys(self, w: Writer, i: int) -> None:
        b = LAYER_PREFIX.format(i)
        w.norm("rQ", "rQ", b + "attn_q_norm.weight", self.eps)
        w.norm("rK", "rK", b + "attn_k_norm.weight", self.eps)

    def frequencies(self, i: int) -> tuple[float, float]:
        return (self.rotation.theta, 1.0) if self.windows[i] else super().frequencies(i)
