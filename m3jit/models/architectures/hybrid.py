"""Hybrids: some layers scan (`mamba.py`), the others attend; a feed-forward part behind each.

    x += scale * mixer(rmsnorm(x)),  x += scale * ffn(rmsnorm(x))

A layer attends where the key "attention.head_count_kv", one number for each layer, is not 0.

jamba (Lieber et al. 2024): Mamba layers, attention without positions.
granitehybrid (Granite 4.0): Mamba-2 layers, attention with a rotation unless "rope.scaling.finetuned" is false; the
embedding, each branch, the scores and the logits are scaled by constants of the file.

Layers with a mixture of experts are refused.
"""
from __future__ import annotations

from m3jit.models.architectures.decoder import Decoder
from m3jit.models.architectures.mamba import HeadMixer, Mixer, SelectiveMixer
from m3jit.models.architectures.rotation import Rotation
from m3jit.models.model_source import LAYER_PREFIX, Keys, Shapes, Source
from m3jit.models.program import Options, Writer


class Hybrid(Decoder):
    """Sizes and layers of both kinds."""
    mixer_type: type[Mixer] = SelectiveMixer

    def __init__(self, source: Source, options: Options):
        self.source, self.options = source, options
        self.keys = Keys(source, self.name)
        need = self.keys.need
        self.layers, self.width = need("block_count", int), need("embedding_length", int)
        self.attends = self.keys.per_layer("attention.head_count_kv", self.layers)
        self.heads = max(self.keys.per_layer("attention.head_count", self.layers), default=0)
        self.kv_heads = max(self.attends, default=0)
        if set(self.attends) - {0, self.kv_heads}:
            raise self.keys.refuse("attention.head_count_kv", f"is {self.attends}",
                                   "0 or one other number in every layer")
        if self.kv_heads:
            self.head_dim = need("attention.key_length", int, default=self.width // max(self.heads, 1))
            self._check_heads()
        else:
            self.head_dim = 2
        self.title_name = source.value("general.name", str, default=f"{self.name} model")
        self.hidden = need("feed_forward_length", int)
        trained = need("context_length", int)
        self.context = trained if options.context is None else min(trained, options.context)
        self.eps = need("attention.layer_norm_rms_epsilon", float)
        self.vocabulary = source.tensor("token_embd.weight").shape[0]
        self.windows, self.softcap = [0] * self.layers, 0.0
        self.score_scale = need("attention.scale", float, default=0.0)
        self.rotation = Rotation(self.keys, self.head_dim, self.context)
        self.mixer = self.mixer_type(self.keys, self.width, self.eps)
        if need("expert_count", int, default=0):
            raise self.keys.refuse("expert_count", f"is {need('expert_count', int)}",
                                   f"0: a {self.name} model without experts")
        self.read()

    @property
    def title(self) -> str:
        scans = self.attends.count(0)
        return super().title.replace(f"{self.layers} layers", f"{self.layers} layers ({scans} that scan)", 1)

    def layer_tensors(self, i: int) -> Shapes:
        part = self.attention_tensors() if self.attends[i] else self.mixer.tensors(i)
        return {"attn_norm.weight": (self.width,), **part, "ffn_norm.weight": (self.width,), **self.ffn_tensors()}

    def attention(self, w: Writer, i: int, x: str = "rH") -> None:
        if self.attends[i]:
            super().attention(w, i, x)
        else:
            self.mixer.write(w, i)


class Jamba(Hybrid):
    name = "jamba"

    def rotate(self, w: Writer, register: str, heads: int, i: int, factors: str) -> None:
        """No positions: the scans know the order."""


class GraniteHybrid(Hybrid):
    name = "granitehybrid"
    pairing = "NORM"
    mixer_type = HeadMixer

    def read(self) -> None:
        need = self.keys.need
        self.rotates = need("rope.scaling.finetuned", bool, default=True)
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
