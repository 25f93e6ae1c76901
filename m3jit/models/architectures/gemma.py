"""gemma2 (Gemma Team 2024) and gemma3 (Gemma Team 2025).

    x = embed(t) * sqrt(width)
    x += rmsnorm(Wo attention(..)) * g2,                                 n = rmsnorm(x) * g1
    x += rmsnorm(Wdown (gelu_tanh(Wgate n) * (Wup n))) * g4,             n = rmsnorm(x) * g3

gemma2: scores and logits are capped, c tanh(s / c); every other layer, from the first, sees a window of 4096.
gemma3: no caps (logits are, where a file says so), queries and keys are normalised per head; of six layers five see a
window, and these rotate by a base of their own (10000) without scaling.
Gains are stored as what multiplies (converters add the 1 of the published weights).
"""
from __future__ import annotations

import math

import numpy as np

from m3jit.models.architectures.decoder import Decoder
from m3jit.models.architectures.qwen import HeadNorms
from m3jit.models.model_source import LAYER_PREFIX, Shapes
from m3jit.models.program import Writer


class Gemma2(Decoder):
    name = "gemma2"
    act = "GELU_TANH"
    largest = 46                        # layers of the model whose queries are scaled by 1 / sqrt(width / heads)

    def read(self) -> None:
        self.read_windows(period=2, default=4096)
        self.softcap = self.keys.need("attn_logit_softcapping", float, default=50.0)
        self.logit_cap = self.keys.need("final_logit_softcapping", float, default=30.0)
        self.read_scale()

    def read_scale(self) -> None:
        if self.layers == self.largest and not self.score_scale:
            self.score_scale = 1 / math.sqrt(self.width // self.heads)

    def layer_tensors(self, i: int) -> Shapes:
        return super().layer_tensors(i) | {"post_attention_norm.weight": (self.width,),
                                           "post_ffw_norm.weight": (self.width,)}

    def embed(self, w: Writer) -> None:
        super().embed(w)
        w(f"LOADI rScale, {float(np.float32(math.sqrt(self.width)))!r}")
        w("MUL rX, rX, rScale")

    def layer(self, w: Writer, i: int) -> None:
        b = LAYER_PREFIX.format(i)
        w.norm("rH", "rX", b + "attn_norm.weight", self.eps)
        self.attention(w, i)
        w.norm("rH", "rH", b + "post_attention_norm.weight", self.eps)
        w.residual()
        w.norm("rH", "rX", b + "ffn_norm.weight", self.eps)
        self.feed_forward(w, i)
        w.norm("rH", "rH", b + "post_ffw_norm.weight", self.eps)
        w.residual()

    def head(self, w: Writer) -> None:
        super().head(w)
        w.cap("rLogits", self.logit_cap)


class Gemma3(Gemma2, HeadNorms):
    name = "gemma3"
    largest = 62
    local_theta = 10000.0

    def read(self) -> None:
        self.read_windows(period=6)
        self.local_theta = self.keys.need("rope.freq_base_swa", float, default=10000.0)
        self.logit_cap = self.keys.need("final_logit_softcapping", float, default=0.0)
        self.read_scale()

    def frequencies(self, i: int) -> tuple[float, float]:
        return (self.local_theta, 1.0) if self.windows[i] else super().frequencies(i)
