"""qwen2 (Qwen 2 and 2.5; Yang et al. 2024), qwen3 and qwen3moe (Yang et al. 2025).

Layers as llama's.  qwen2: Wq, Wk and Wv have biases.  qwen3: none, but queries and keys are normalised per head before
the rotation, by gains that all heads share.  qwen3moe: as qwen3, with experts for feed-forward layers.
"""
from __future__ import annotations

from m3jit.models.architectures.decoder import Decoder
from m3jit.models.architectures.experts import Experts
from m3jit.models.model_source import LAYER_PREFIX, Shapes
from m3jit.models.program import Writer


class HeadNorms(Decoder):
    """A decoder whose queries and keys are normalised per head."""

    def attention_tensors(self) -> Shapes:
        return super().attention_tensors() | {"attn_q_norm.weight": (self.head_dim,),
                                              "attn_k_norm.weight": (self.head_dim,)}

    def norm_queries_keys(self, w: Writer, i: int) -> None:
        b = LAYER_PREFIX.format(i)
        w.norm_heads("rQ", "rQ", b + "attn_q_norm.weight", self.eps, self.heads, self.head_dim)
        w.norm_heads("rK", "rK", b + "attn_k_norm.weight", self.eps, self.kv_heads, self.head_dim)


class Qwen2(Decoder):
    name = "qwen2"

    def attention_tensors(self) -> Shapes:
        shapes = super().attention_tensors()
        return shapes | {n.replace(".weight", ".bias"): shape[:1] for n, shape in shapes.items() if "output" not in n}


class Qwen3(HeadNorms):
    name = "qwen3"


class Qwen3Moe(Experts, HeadNorms):
    name = "qwen3moe"

    def read(self) -> None:
        self.read_experts(self.hidden // max(1, self.keys.need("expert_used_count", int)))
