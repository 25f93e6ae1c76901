"""Hybrids: some layers scan (`mamba.py`), the others attend; a feed-forward part behind each.

    x += scale * mixer(rmsnorm(x)),  x += scale * ffn(rmsnorm(x))

A layer attends where the key "attention.head_count_kv", one number for each layer, is not 0.  A layer with a router has
experts for its ffn (`experts.py`).

jamba (Lieber et al. 2024): Mamba layers, attention without positions; an expert counts by its share among all experts.
granitehybrid (Granite 4.0): Mamba-2 layers, attention with a rotation unless "rope.scaling.finetuned" is false; the
embedding, each branch, the scores and the logits are scaled by constants of the file; shared experts are added.
"""
from __future__ import annotations

from m3jit.models.architectures.decoder import Decoder
from m3jit.models.architectures.experts import Experts
from m3jit.models.architectures.mamba import HeadMixer, Mixer, SelectiveMixer
from m3jit.models.model_source import LAYER_PREFIX, Shapes
from m3jit.models.program import Writer


class Hybrid(Experts):
    """Sizes and layers of both kinds."""
    mixer_type: type[Mixer] = SelectiveMixer

    def read_heads(self) -> None:
        self.attends = self.keys.per_layer("attention.head_count_kv", self.layers)
        self.heads = max(self.keys.per_layer("attention.head_count", self.layers), default=0)
        self.kv_heads = max(self.attends, default=0)
        if set(self.attends) - {0, self.kv_heads}:
            raise self.keys.refuse("attention.head_count_kv", f"is {self.attends}",
                                   "0 or one other number in every layer")
        if self.kv_heads:
            self.head_dim = self.keys.need("attention.key_length", int, default=self.width // max(self.heads, 1))
            self._check_heads()
        else:
            self.head_dim = 2                           # no layer attends: a rotation nobody asks for

    def read(self) -> None:
        self.mixer = self.mixer_type(self.keys, self.width, self.eps)
        if self.keys.need("expert_count", int, default=0):
            self.read_experts(self.hidden)

    @property
    def title(self) -> str:
        scans = self.attends.count(0)
        return super().title.replace(f"{self.layers} layers", f"{self.layers} layers ({scans} that scan)", 1)

    def layer_tensors(self, i: int) -> Shapes:
        part = self.attention_tensors() if self.attends[i] else self.mixer.tensors(i)
        return {"attn_norm.weight": (self.width,), **part, "ffn_norm.weight": (self.width,),
                **(self.ffn_tensors() if self.routes(i) else Decoder.ffn_tensors(self))}

    def routes(self, i: int) -> bool:
        """Whether layer i has experts."""
        return bool(self.experts) and LAYER_PREFIX.format(i) + "ffn_gate_inp.weight" in self.source.tensors

    def feed_forward(self, w: Writer, i: int) -> None:
        if self.routes(i):
            super().feed_forward(w, i)
        else:
            Decoder.feed_forward(self, w, i)

    def attention(self, w: Writer, i: int, x: str = "rH") -> None:
        if self.attends[i]:
            super().attention(w, i, x)
        else:
            self.mixer.write(w, i)


class Jamba(Hybrid):
    name = "jamba"

    def rotate(self, w: Writer, register: str, heads: int, i: int, factors: str) -> None:
        """No positions: the scans know the order."""

    def choose(self, w: Writer, b: str) -> None:
        w.product("rQ", "rH", b + "ffn_gate_inp.weight")
        w("SOFTMAX rQ, rQ")
        w(f"TOPK rP, rQ, rExperts K={self.used} AXIS=1", "the experts of each token [T, used]")


class GraniteHybrid(Hybrid):
    name = "granitehybrid"
    pairing = "NORM"
    mixer_type = HeadMixer

    def read(self) -> None:
        super().read()
        need = self.keys.need
        self.rotates = need("rope.scaling.finetuned", bool, default=True)
        self.shared = need("expert_shared_feed_forward_length", int, default=0) if self.experts else 0
        self.scale = 1.0                               # of experts: the format has none
        self.scales = {key: need(f"{key}_scale", float, default=0.0) for key in ("embedding", "residual", "logit")}

    def rotate(self, w: Writer, register: str, heads: int, i: int, factors: str) -> None:
        if self.rotates:
            super().rotate(w, register, heads, i, factors)

    def scaled(self, w: Writer, register: str, factor: float) -> None:
        """register *= factor; 0 stands for no scaling."""
        if factor:
            w(f"LOADI rScale, {factor!r}")
            w(f"MUL {register}, {register}, rScale")

    def embed(self, w: Writer) -> None:
        super().embed(w)
        self.scaled(w, "rX", self.scales["embedding"])

    def layer(self, w: Writer, i: int) -> None:
        b = LAYER_PREFIX.format(i)
        for gain, part in ((b + "attn_norm.weight", self.attention), (b + "ffn_norm.weight", self.feed_forward)):
            w.norm("rH", "rX", gain, self.eps)
            part(w, i)
            self.scaled(w, "rH", self.scales["residual"])
            w.residual()

    def head(self, w: Writer) -> None:
        super().head(w)
        self.scaled(w, "rLogits", 1.0 / self.scales["logit"] if self.scales["logit"] else 0.0)
