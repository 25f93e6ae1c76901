"""bert (Devlin et al. 2018), an encoder: MiniLM, bge, e5 and other models of that form.

    x = layernorm(token(t) + type(0) + position(p))
    x = layernorm(x + Wo attention(Wq x, Wk x, Wv x))        every token sees every other
    x = layernorm(x + Wdown gelu(Wup x))

Every product has a bias. GELU is the exact one, as in the published models (llama.cpp computes its approximation by
tanh, which differs by up to 5e-4).
"""
from __future__ import annotations

from m3jit.models.model_error import ModelFileError
from m3jit.models.model_source import FLOAT_TYPES, LAYER_PREFIX, Keys, Shapes, Source
from m3jit.models.program import Options, Writer

MAX_HEAD_DIM = 256
TABLES = ("position_embd.weight", "token_types.weight")
NORMS = ("attn_output_norm", "layer_output_norm")


class Bert:
    name = "bert"

    def __init__(self, source: Source, options: Options):
        self.source = source
        keys = Keys(source, self.name)
        self.layers, self.width = keys.need("block_count", int), keys.need("embedding_length", int)
        self.heads, self.hidden = keys.need("attention.head_count", int), keys.need("feed_forward_length", int)
        trained = keys.need("context_length", int)
        self.context = trained if options.context is None else min(trained, options.context)
        self.eps = keys.need("attention.layer_norm_epsilon", float)
        if self.heads <= 0 or self.width % self.heads or self.width // self.heads > MAX_HEAD_DIM:
            raise keys.refuse("attention.head_count", f"{self.heads} heads of a width of {self.width}",
                              "a divisor of the width, heads of at most 256")
        self.vocabulary = source.tensor("token_embd.weight").shape[0]
        self.rows, self.types = (source.tensor(name).shape[0] for name in TABLES)
        if self.rows < trained:
            raise keys.refuse("context_length", f"is {trained}", f"at most {self.rows}, the rows of {TABLES[0]!r}")
        for name in TABLES:
            if source.tensor(name).ggml_type.name not in FLOAT_TYPES:
                raise ModelFileError(source.path, f"has type {source.tensor(name).ggml_type.name}",
                                     item=f"tensor {name!r}", expected="a float type")
        self.title_name = source.value("general.name", str, default="bert model")

    @property
    def title(self) -> str:
        return (f"{self.title_name}: bert, {self.layers} layers, width {self.width}, {self.heads} heads of "
                f"{self.width // self.heads},\n"
                f"ffn {self.hidden}, vocabulary {self.vocabulary}, context {self.context}.  Written by m3jit compile.")

    def tensors(self) -> Shapes:
        width = self.width
        expected: Shapes = {"token_embd.weight": (self.vocabulary, width), TABLES[0]: (self.rows, width),
                            TABLES[1]: (self.types, width)}
        norms = ["token_embd_norm"]
        for i in range(self.layers):
            b = LAYER_PREFIX.format(i)
            norms += [b + norm for norm in NORMS]
            for part, rows, columns in (("attn_q", width, width), ("attn_k", width, width), ("attn_v", width, width),
                                        ("attn_output", width, width), ("ffn_up", self.hidden, width),
                                        ("ffn_down", width, self.hidden)):
                expected |= {f"{b}{part}.weight": (rows, columns), f"{b}{part}.bias": (rows,)}
        return expected | {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}

    def positions(self, w: Writer) -> None:
        w.weight("rW", TABLES[0])
        w("SLICE rPlaces, rW, START=0 LEN=rCount")

    def embed(self, w: Writer) -> None:
        w.weight("rW", "token_embd.weight")
        w("EMBED rX, rIds, rW")
        w.weight("rW", TABLES[1])
        w("SLICE rW, rW, START=0 LEN=1", "every token is of the first type")
        w("ADD rX, rX, rW")
        w("ADD rX, rX, rPlaces")
        w.norm("rX", "rX", "token_embd_norm.weight", self.eps, "LAYER")

    def layer(self, w: Writer, i: int) -> None:
        b = LAYER_PREFIX.format(i)
        for register, name in (("rQ", "attn_q"), ("rK", "attn_k"), ("rV", "attn_v")):
            w.product(register, "rX", f"{b}{name}.weight")
        w(f"ATTN rH, rQ, rK, rV HEADS={self.heads} HDIM={self.width // self.heads}")
        w.product("rH", "rH", b + "attn_output.weight")
        w.residual()
        w.norm("rX", "rX", b + "attn_output_norm.weight", self.eps, "LAYER")
        w.ffn("rH", "rX", b + "ffn_", act="GELU", gated=False)
        w.residual()
        w.norm("rX", "rX", b + "layer_output_norm.weight", self.eps, "LAYER")
