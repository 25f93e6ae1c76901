"""What decoder-only transformers share: heads, the tensors of a layer, rotation, attention."""
from __future__ import annotations

import math

import numpy as np

from m3jit.models.architectures.language_model import LanguageModel
from m3jit.models.architectures.rotation import Rotation
from m3jit.models.model_source import LAYER_PREFIX, Shapes, Source
from m3jit.models.program import Options, Writer

MAX_HEAD_DIM = 256


class Decoder(LanguageModel):
    """Heads and the feed-forward part of a transformer, from the metadata every such architecture has.

    An architecture names itself, may change the class attributes, and overrides the parts of a layer that differ."""
    pairing = "NEOX"                    # rotary pairs of its GGUF files
    act = "SILU"

    def __init__(self, source: Source, options: Options):
        super().__init__(source, options)
        need = self.keys.need
        self.read_heads()
        self.hidden = need("feed_forward_length", int)
        self.rotation = Rotation(self.keys, self.head_dim, self.context)
        self.windows = [0] * self.layers                # keys a layer's queries see at most; 0: all
        self.softcap = 0.0                              # of attention scores
        self.score_scale = need("attention.scale", float, default=0.0)      # 0: 1 / sqrt(head dimension)
        self.read()

    def read(self) -> None:
        """Reads the metadata only this architecture has."""

    def read_heads(self) -> None:
        """How many heads of queries and of keys, and the elements of one."""
        need = self.keys.need
        self.heads = need("attention.head_count", int)
        self.kv_heads = need("attention.head_count_kv", int, default=self.heads)
        self.head_dim = need("attention.key_length", int, default=self.width // max(self.heads, 1))
        self._check_heads()

    def _check_heads(self) -> None:
        heads, kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        if heads <= 0 or kv_heads <= 0 or heads % kv_heads or head_dim <= 0 or head_dim > MAX_HEAD_DIM:
            raise self.keys.refuse("attention.head_count", f"{heads} heads, {kv_heads} kv heads of {head_dim}",
                                   "heads a multiple of kv heads, head dimension 1 to 256")
        values = self.keys.need("attention.value_length", int, default=head_dim)
        if values != head_dim:
            raise self.keys.refuse("attention.value_length", f"is {values}", f"the length of keys, {head_dim}")

    def read_windows(self, period: int, default: int = 0) -> None:
        """Windows from the key "attention.sliding_window": for all but every `period`-th layer, or for those that
        "attention.sliding_window_pattern" says (another period, or a flag for each layer)."""
        window = self.keys.need("attention.sliding_window", int, default=default)
        if not window:
            return
        pattern = self.source.metadata.get(f"{self.name}.attention.sliding_window_pattern", period)
        if isinstance(pattern, np.ndarray):
            if len(pattern) != self.layers:
                raise self.keys.refuse("attention.sliding_window_pattern", f"has {len(pattern)} values",
                                       f"{self.layers}, one for each layer")
            local = [bool(flag) for flag in pattern]
        else:
            local = [pattern <= 0 or i % pattern < pattern - 1 for i in range(self.layers)]
        self.windows = [window if here else 0 for here in local]

    @property
    def title(self) -> str:
        return (f"{self.title_name}: {self.name}, {self.layers} layers, width {self.width}, {self.heads} heads "
                f"({self.kv_heads} kv) of {self.head_dim},\n"
                f"ffn {self.hidden}, vocabulary {self.vocabulary}, context {self.context}.  Written by m3jit compile.")

    # Tensors.

    def tensors_of_all_layers(self) -> Shapes:
        return self.rotation.tensors()

    def layer_tensors(self, i: int) -> Shapes:
        return {"attn_norm.weight": (self.width,), **self.attention_tensors(), "ffn_norm.weight": (self.width,),
                **self.ffn_tensors()}

    def attention_tensors(self) -> Shapes:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {"attn_q.weight": (q, self.width), "attn_k.weight": (kv, self.width), "attn_v.weight": (kv, self.width),
                "attn_output.weight": (self.width, q)}

    def ffn_tensors(self) -> Shapes:
        return {"ffn_gate.weight": (self.hidden, self.width), "ffn_up.weight": (self.hidden, self.width),
                "ffn_down.weight": (self.width, self.hidden)}

    # Lines.

    def layer(self, w: Writer, i: int) -> None:
        """x += attention(norm x); x += ffn(norm x)."""
        b = LAYER_PREFIX.format(i)
        w.norm("rH", "rX", b + "attn_norm.weight", self.eps)
        self.attention(w, i)
        w.residual()
        w.norm("rH", "rX", b + "ffn_norm.weight", self.eps)
        self.feed_forward(w, i)
        w.residual()

    def attention(self, w: Writer, i: int, x: str = "rH") -> None:
        """x -> rH: products, rotation, attention over the KV stream, output product."""
        factors = self.rotation.load_factors(w)
        self.queries_keys_values(w, i, x)
        self.norm_queries_keys(w, i)
        self.rotate(w, "rQ", self.heads, i, factors)
        self.rotate(w, "rK", self.kv_heads, i, factors)
        options = ["CAUSAL"] + ([f"KV_TYPE={w.options.kv_type}"] if w.options.kv_type != "F16" else [])
        scale = self.score_scale
        if self.rotation.magnitude != 1 and self.rotation.rotary == self.head_dim:
            scale = (scale or 1 / math.sqrt(self.head_dim)) * self.rotation.magnitude**2
        options += [f"{key}={value!r}" for key, value in
                    (("SCALE", scale), ("SOFTCAP", self.softcap), ("WINDOW", self.windows[i])) if value]
        w(f"ATTN rH, rQ, rK, rV, sKV HEADS={self.heads} KV_HEADS={self.kv_heads} HDIM={self.head_dim} LAYER={i} "
          + " ".join(options))
        self.attention_output(w, i)

    def attention_output(self, w: Writer, i: int) -> None:
        """rH, the heads' mixes, -> rH."""
        w.product("rH", "rH", LAYER_PREFIX.format(i) + "attn_output.weight")

    def queries_keys_values(self, w: Writer, i: int, x: str) -> None:
        """x [T, width] -> rQ, rK, rV."""
        for register, name in (("rQ", "attn_q"), ("rK", "attn_k"), ("rV", "attn_v")):
            w.product(register, x, f"{LAYER_PREFIX.format(i)}{name}.weight")

    def norm_queries_keys(self, w: Writer, i: int) -> None:
        """What happens to rQ and rK before the rotation: nothing, unless an architecture says so."""

    def rotate(self, w: Writer, register: str, heads: int, i: int, factors: str) -> None:
        """The register's heads rotated by the positions; the first `rotary` elements of each, where that is fewer.

        Then the rotation's magnitude is applied here, to what is rotated alone (else it is part of ATTN's SCALE)."""
        r = self.rotation
        pairing = getattr(self.source, "rope_pairing", None) or self.pairing
        theta, scale = self.frequencies(i)
        options = f"HDIM={r.rotary} {pairing} THETA={theta!r}" + (f" SCALE={scale!r}" if scale != 1 else "") + factors
        if r.rotary == self.head_dim:
            w(f"ROPE {register}, {register} POS=rPos {options}")
            return
        w(f"RESHAPE {register}, {register} SHAPE=[-1, {heads}, {self.head_dim}]")
        w(f"SLICE rTail, {register} AXIS=2 START={r.rotary}", "what is not rotated")
        w(f"SLICE {register}, {register} AXIS=2 START=0 LEN={r.rotary}")
        w(f"RESHAPE {register}, {register} SHAPE=[-1, {heads * r.rotary}]")
        w(f"ROPE {register}, {register} POS=rPos {options}")
        if r.magnitude != 1:
            w(f"LOADI rScale, {r.magnitude!r}")
            w(f"MUL {register}, {register}, rScale")
        w(f"RESHAPE {register}, {register} SHAPE=[-1, {heads}, {r.rotary}]")
        w(f"CONCAT {register}, {register}, rTail AXIS=2")
        w(f"RESHAPE {register}, {register} SHAPE=[-1, {heads * self.head_dim}]")

    def frequencies(self, i: int) -> tuple[float, float]:
        """Base and scale of layer i's rotary frequencies."""
        return self.rotation.theta, self.rotation.scale

    def feed_forward(self, w: Writer, i: int) -> None:
        w.ffn("rH", "rH", LAYER_PREFIX.format(i) + "ffn_", self.act)
