"""What decoder-only transformers share: sizes, the tensors of a layer, rotation, attention, the head."""
from __future__ import annotations

from m3jit.models.model_source import LAYER_PREFIX, Keys, Shapes, Source
from m3jit.models.program import Writer

MAX_HEAD_DIM = 256


class Decoder:
    """Sizes of a transformer that generates, from the metadata every such architecture has.

    An architecture names itself, may change the class attributes, and writes its layer."""
    name = ""                           # the architecture's name in files, and the prefix of its keys
    pairing = "NEOX"                    # rotary pairs of its GGUF files
    act = "SILU"

    def __init__(self, source: Source):
        self.source = source
        self.keys = Keys(source, self.name)
        need = self.keys.need
        self.layers, self.width, self.heads = self.read_sizes()
        self.kv_heads = need("attention.head_count_kv", int, default=self.heads)
        self.head_dim = need("attention.key_length", int, default=self.width // max(self.heads, 1))
        scaling = need("rope.scaling.type", str, default="none")
        factor = need("rope.scaling.factor", float, default=1.0)
        if scaling not in ("none", "linear"):
            raise self.keys.refuse("rope.scaling.type", f"is {scaling!r}", "none or linear")
        heads, kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        if heads <= 0 or kv_heads <= 0 or heads % kv_heads or head_dim <= 0 or head_dim > MAX_HEAD_DIM:
            raise self.keys.refuse("attention.head_count", f"{heads} heads, {kv_heads} kv heads of {head_dim}",
                                   "heads a multiple of kv heads, head dimension 1 to 256")
        self.title_name = source.value("general.name", str, default=f"{self.name} model")
        self.rotary = need("rope.dimension_count", int, default=head_dim)
        self.hidden, self.context = need("feed_forward_length", int), need("context_length", int)
        self.eps = need("attention.layer_norm_rms_epsilon", float)
        self.theta = need("rope.freq_base", float, default=10000.0)
        self.rope_scale = 1.0 / factor if scaling == "linear" else 1.0
        self.vocabulary = source.tensor("token_embd.weight").shape[0]

    def read_sizes(self) -> tuple[int, int, int]:
        """Layers, width, heads."""
        width, heads = self.keys.need("embedding_length", int), self.keys.need("attention.head_count", int)
        return self.keys.need("block_count", int), width, heads

    @property
    def title(self) -> str:
        return (f"{self.title_name}: {self.name}, {self.layers} layers, width {self.width}, {self.heads} heads "
                f"({self.kv_heads} kv) of {self.head_dim},\n"
                f"ffn {self.hidden}, vocabulary {self.vocabulary}, context {self.context}.  Written by m3jit compile.")

    # Tensors.

    def tensors(self) -> Shapes:
        """Name -> shape of every tensor the program names."""
        expected: Shapes = {"token_embd.weight": (self.vocabulary, self.width), "output_norm.weight": (self.width,)}
        if "output.weight" in self.source.tensors:
            expected["output.weight"] = (self.vocabulary, self.width)
        for i in range(self.layers):
            b = LAYER_PREFIX.format(i)
            expected |= {b + name: shape for name, shape in self.layer_tensors(i).items()}
        return expected

    def layer_tensors(self, i: int) -> Shapes:
        """The tensors of layer i, names without the layer's prefix."""
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

    def embed(self, w: Writer) -> None:
        w.weight("rW", "token_embd.weight")
        w("EMBED rX, rIds, rW")

    def layer(self, w: Writer, i: int) -> None:
        """x += attention(norm x); x += ffn(norm x)."""
        b = LAYER_PREFIX.format(i)
        w.norm("rH", "rX", b + "attn_norm.weight", self.eps)
        self.attention(w, i)
        w.residual()
        w.norm("rH", "rX", b + "ffn_norm.weight", self.eps)
        self.feed_forward(w, i)
        w.residual()

    def attention(self, w: Writer, i: int) -> None:
        """rH -> rH: products, rotation, attention over the KV stream, output product."""
        b = LAYER_PREFIX.format(i)
        self.rope_factors(w, i)
        w.product("rQ", "rH", b + "attn_q.weight")
        w.product("rK", "rH", b + "attn_k.weight")
        w.product("rV", "rH", b + "attn_v.weight")
        self.between(w, i)
        for r in ("rQ", "rK"):
            w(f"ROPE {r}, {r} POS=rPos {self.rope(w, i)}")
        w(f"ATTN rH, rQ, rK, rV, sKV HEADS={self.heads} KV_HEADS={self.kv_heads} HDIM={self.head_dim} LAYER={i} CAUSAL"
          + self.attention_extras(i))
        w.product("rH", "rH", b + "attn_output.weight")

    def rope_factors(self, w: Writer, i: int) -> None:
        """Loads what divides the frequencies into rF, where the source has it."""
        if w.has("rope_freqs.weight"):
            w.weight("rF", "rope_freqs.weight")

    def between(self, w: Writer, i: int) -> None:
        """What happens to rQ, rK and rV before the rotation."""

    def rope(self, w: Writer, i: int) -> str:
        """Options of the rotation."""
        pairing = getattr(self.source, "rope_pairing", None) or self.pairing
        return (f"HDIM={self.head_dim} {pairing} THETA={self.theta!r}"
                + (f" SCALE={self.rope_scale!r}" if self.rope_scale != 1 else "")
                + (" FACTORS=rF" if w.has("rope_freqs.weight") else ""))

    def attention_extras(self, i: int) -> str:
        """Further options of ATTN, each with a leading space."""
        return ""

    def feed_forward(self, w: Writer, i: int) -> None:
        w.ffn("rH", "rH", LAYER_PREFIX.format(i) + "ffn_", self.act)

    def head(self, w: Writer) -> None:
        w.norm("rX", "rX", "output_norm.weight", self.eps)
        w.product("rLogits", "rX", "output.weight" if w.has("output.weight") else "token_embd.weight")
