"""bitnet (BitNet b1.58 and BitNet-b1.58-2B4T; Ma et al. 2024 and 2025): a llama of ternary weights with two more norms.

    x += Wo rmsnorm(attention(rope(Wq n), rope(Wk n), Wv n)) * g_a,   n = rmsnorm(x) * g1
    x += Wdown rmsnorm(act(Wgate n) * (Wup n)) * g_f,                 n = rmsnorm(x) * g2

act is SiLU, or max(x, 0)^2 where the key "hidden_activation" says "relu2" (2B4T; the llama.cpp that the oracles come
from reads no such key and always computes SiLU).  Matrices may have a scale of their own, a tensor `.scale` of one
element, by which their products are multiplied.  The embeddings are also the output matrix.
"""
from __future__ import annotations

from m3jit.models.architectures.decoder import Decoder
from m3jit.models.model_source import LAYER_PREFIX, Shapes
from m3jit.models.program import Writer

ACTIVATIONS = {"silu": ("SILU",), "relu2": ("RELU", "MUL"), "relu_sqr": ("RELU", "MUL")}


class BitNet(Decoder):
    name = "bitnet"

    def read(self) -> None:
        found = self.keys.need("hidden_activation", str, default="silu")
        if found not in ACTIVATIONS:
            raise self.keys.refuse("hidden_activation", f"is {found!r}", "one of " + ", ".join(ACTIVATIONS))
        self.activation = ACTIVATIONS[found]

    def layer_tensors(self, i: int) -> Shapes:
        shapes = super().layer_tensors(i) | {"attn_sub_norm.weight": (self.heads * self.head_dim,),
                                             "ffn_sub_norm.weight": (self.hidden,)}
        scales = (name.replace(".weight", ".scale") for name, shape in shapes.items() if len(shape) == 2)
        return shapes | {name: (1,) for name in scales if LAYER_PREFIX.format(i) + name in self.source.tensors}

    def attention_output(self, w: Writer, i: int) -> None:
        b = LAYER_PREFIX.format(i)
        w.norm("rH", "rH", b + "attn_sub_norm.weight", self.eps)
        w.product("rH", "rH", b + "attn_output.weight")

    def feed_forward(self, w: Writer, i: int) -> None:
        b = LAYER_PREFIX.format(i)
        w.product("rQ", "rH", b + "ffn_gate.weight")
        for step in self.activation:
            w(f"{step} rQ, rQ" + (", rQ" if step == "MUL" else ""))
        w.product("rK", "rH", b + "ffn_up.weight")
        w("MUL rQ, rQ, rK")
        w.norm("rQ", "rQ", b + "ffn_sub_norm.weight", self.eps)
        w.product("rH", "rQ", b + "ffn_down.weight")
