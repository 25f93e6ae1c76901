"""Architecture `llama` as bytecode: what `m3jit compile model.gguf` writes.

The program senses the prompt, runs it through the layers in chunks, then samples, streams and feeds back one token at a
time until the model ends the text, MAX_TOKENS are out, the context is full, or an interrupt is pending.
"""
from __future__ import annotations

from dataclasses import dataclass

from m3jit.models.gguf_file import GGUFFile
from m3jit.models.model_error import ModelFileError

CHUNK = 64                          # prompt tokens of one pass: bounds the time between two interruptible points
BLOCK_TYPES = {"Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"}
FLOAT_TYPES = {"F32", "F16", "BF16"}


@dataclass(frozen=True)
class Options:
    """What generation a compiled program does; values are written into the program."""
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int | None = None
    chunk: int = CHUNK


@dataclass(frozen=True)
class Hyper:
    """Sizes of a llama model, from the file's metadata."""
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    hidden: int
    context: int
    eps: float
    theta: float
    rope_scale: float
    vocabulary: int


def hyper(file: GGUFFile) -> Hyper:
    """Reads and checks the sizes; ModelFileError names the key and what was expected."""
    def need(key: str, kind: type, **default):
        return file.value(f"llama.{key}", kind, **default)
    width, heads = need("embedding_length", int), need("attention.head_count", int)
    kv_heads = need("attention.head_count_kv", int, default=heads)
    head_dim = need("attention.key_length", int, default=width // max(heads, 1))
    scaling = file.value("llama.rope.scaling.type", str, default="none")
    factor = file.value("llama.rope.scaling.factor", float, default=1.0)
    if scaling not in ("none", "linear"):
        raise ModelFileError(file.path, f"is {scaling!r}", item="metadata key 'llama.rope.scaling.type'",
                             expected="none or linear")
    if heads <= 0 or kv_heads <= 0 or heads % kv_heads or head_dim <= 0 or head_dim > 256:
        raise ModelFileError(file.path, f"{heads} heads, {kv_heads} kv heads of {head_dim}",
                             item="metadata key 'llama.attention.head_count'",
                             expected="heads a multiple of kv heads, head dimension 1 to 256")
    return Hyper(file.value("general.name", str, default="llama model"), need("block_count", int), width, heads,
                 kv_heads, head_dim, need("rope.dimension_count", int, default=head_dim),
                 need("feed_forward_length", int), need("context_length", int),
                 need("attention.layer_norm_rms_epsilon", float), file.value("llama.rope.freq_base", float,
                                                                             default=10000.0),
                 1.0 / factor if scaling == "linear" else 1.0, file.tensor("token_embd.weight").shape[0])


def check_tensors(file: GGUFFile, h: Hyper) -> None:
    """Every tensor the program names exists with the shape it needs and a type the kernels run."""
    q, kv = h.heads * h.head_dim, h.kv_heads * h.head_dim
    expected: dict[str, tuple[int, ...]] = {"token_embd.weight": (h.vocabulary, h.width),
                                            "output_norm.weight": (h.width,)}
    if "output.weight" in file.tensors:
        expected["output.weight"] = (h.vocabulary, h.width)
    for i in range(h.layers):
        b = f"blk.{i}."
        expected |= {b + "attn_norm.weight": (h.width,), b + "attn_q.weight": (q, h.width),
                     b + "attn_k.weight": (kv, h.width), b + "attn_v.weight": (kv, h.width),
                     b + "attn_output.weight": (h.width, q), b + "ffn_norm.weight": (h.width,),
                     b + "ffn_gate.weight": (h.hidden, h.width), b + "ffn_up.weight": (h.hidden, h.width),
                     b + "ffn_down.weight": (h.width, h.hidden)}
    for name, shape in expected.items():
        info = file.tensor(name)
        if tuple(info.shape) != shape:
            raise ModelFileError(file.path, f"has shape {list(info.shape)}", item=f"tensor {name!r}",
                                 expected=f"shape {list(shape)}")
        if info.ggml_type.name not in BLOCK_TYPES | FLOAT_TYPES:
            raise ModelFileError(file.path, f"has type {info.ggml_type.name}", item=f"tensor {name!r}",
                                 expected=f"one of {', '.join(sorted(BLOCK_TYPES | FLOAT_TYPES))}")
        if len(shape) == 1 and info.ggml_type.name not in FLOAT_TYPES:
            raise ModelFileError(file.path, f"has type {info.ggml_type.name}", item=f"tensor {name!r}",
                                 expected="a float type")


class _Writer:
    """Lines of the program."""

    def __init__(self, file: GGUFFile, h: Hyper, options: Options, ends: list[int]):
        self.file, self.h, self.o, self.ends = file, h, options, ends
        self.lines: list[str] = []
        self.penalised = options.repeat_penalty != 1.0

    def __call__(self, text: str = "", comment: str = "") -> None:
        line = f"    {text}" if text and not text.endswith(":") and not text.startswith((".", ";")) else text
        self.lines.append(f"{line:<58}; {comment}" if comment else line)

    def weight(self, register: str, name: str) -> None:
        self(f"LOADI {register}, @model:{name}")

    def precision(self, name: str) -> str:
        return "INT8" if self.file.tensor(name).ggml_type.name in BLOCK_TYPES else "FP32"

    def product(self, rd: str, x: str, name: str) -> None:
        """rd = x times the weight `name` (plus its bias, where the file has one)."""
        self.weight("rW", name)
        bias = name.replace(".weight", ".bias")
        extra = ""
        if bias in self.file.tensors:
            self.weight("rB", bias)
            extra = ", rB"
        self(f"MATVEC {rd}, {x}, rW{extra} TRANSPOSE {self.precision(name)}")

    def program(self, reference: str) -> str:
        h, o = self.h, self.o
        self(f"; {h.name}: llama, {h.layers} layers, width {h.width}, {h.heads} heads ({h.kv_heads} kv) of {h.head_dim},")
        self(f"; ffn {h.hidden}, vocabulary {h.vocabulary}, context {h.context}.  Written by m3jit compile.")
        self(f'.model model "{reference}"')
        self(f".equ MAX_TOKENS {o.max_tokens}")
        self(f".equ CONTEXT {h.context}")
        self(f".equ CHUNK {o.chunk}")
        for name, value in zip("EOS_0 EOS_1 EOS_2 EOS_3 EOS_4 EOS_5 EOS_6 EOS_7".split(), self.ends):
            self(f".equ {name} {value}")
        self()
        self(".text")
        self._main()
        for i in range(h.layers):
            self._layer(i)
        self._head()
        return "\n".join(self.lines) + "\n"

    def _main(self) -> None:
        self("main:")
        self("LOADI rModel, @model")
        if self.o.seed is not None:
            self(f"RNG_SEED {self.o.seed}")
        self("SENSE rPrompt, USER_INPUT TEXT MODEL=rModel", "token ids of the prompt")
        self("DIM rCount, rPrompt, 0")
        self("COMPARE rCount, 0")
        self("IF_EQUAL done", "an empty prompt generates nothing")
        if self.penalised:
            self("MOV rSeen, rPrompt", "tokens so far")
        self("LOADI rPos, 0", "position of the next token")
        self("LOADI rMade, 0", "tokens generated")
        self("LOADI rAt, 0", "prompt tokens done")
        self()
        self("prompt:", "one chunk of the prompt")
        self("SUB rLeft, rCount, rAt")
        self("MIN rLen, rLeft, CHUNK")
        self("SLICE rIds, rPrompt, START=rAt LEN=rLen")
        self("ADD rAt, rAt, rLen")
        self()
        self("forward:", "rIds [T] -> rX [T, width]")
        self("ADD rNext, rPos, rLen")
        self("COMPARE rNext, CONTEXT")
        self("IF_GREATER full")
        self.weight("rW", "token_embd.weight")
        self("EMBED rX, rIds, rW")

    def _layer(self, i: int) -> None:
        h, b = self.h, f"blk.{i}."
        rope = f"HDIM={h.head_dim} NORM THETA={h.theta!r}" + (f" SCALE={h.rope_scale!r}" if h.rope_scale != 1 else "")
        if "rope_freqs.weight" in self.file.tensors:
            self.weight("rF", "rope_freqs.weight")
            rope += " FACTORS=rF"
        self()
        self(f"layer_{i}:")
        self.weight("rW", b + "attn_norm.weight")
        self(f"NORM rH, rX, rW RMS EPS={h.eps!r}")
        self.product("rQ", "rH", b + "attn_q.weight")
        self.product("rK", "rH", b + "attn_k.weight")
        self.product("rV", "rH", b + "attn_v.weight")
        self(f"ROPE rQ, rQ POS=rPos {rope}")
        self(f"ROPE rK, rK POS=rPos {rope}")
        self(f"ATTN rH, rQ, rK, rV, sKV HEADS={h.heads} KV_HEADS={h.kv_heads} HDIM={h.head_dim} LAYER={i} CAUSAL")
        self.product("rH", "rH", b + "attn_output.weight")
        self("ADD rX, rX, rH")
        self.weight("rW", b + "ffn_norm.weight")
        self(f"NORM rH, rX, rW RMS EPS={h.eps!r}")
        names = [b + f"ffn_{n}.weight" for n in ("gate", "down", "up")]
        if len({self.precision(n) for n in names}) == 1:
            for register, name in zip(("rW", "rW2", "rW3"), names):
                self.weight(register, name)
            self(f"FFN rH, rH, rW, rW2, rW3 SILU TRANSPOSE {self.precision(names[0])}")
        else:
            self.product("rQ", "rH", names[0])
            self("SILU rQ, rQ")
            self.product("rK", "rH", names[2])
            self("MUL rQ, rQ, rK")
            self.product("rH", "rQ", names[1])
        self("ADD rX, rX, rH")

    def _head(self) -> None:
        h, o = self.h, self.o
        self()
        self("head:")
        self("MOV rPos, rNext")
        self("COMPARE rAt, rCount")
        self("IF_LESS prompt", "more of the prompt to come")
        self("SLICE rX, rX, START=-1 LEN=1", "the last token's row")
        self.weight("rW", "output_norm.weight")
        self(f"NORM rX, rX, rW RMS EPS={h.eps!r}")
        self.product("rLogits", "rX", "output.weight" if "output.weight" in self.file.tensors else "token_embd.weight")
        history = ", rSeen" if self.penalised else ""
        draw = "TEMP=0" if o.temperature == 0 else \
            f"TEMP={o.temperature!r} TOP_K={o.top_k} TOP_P={o.top_p!r} MIN_P={o.min_p!r}"
        self(f"SAMPLE rToken, rLogits{history} {draw}" + (f" PENALTY={o.repeat_penalty!r}" if history else ""))
        if self.penalised:
            self("TENSOR rLast, rToken SHAPE=[1] I64")
            self("CONCAT rSeen, rSeen, rLast", "the penalty looks at the last 64 of them")
        for i in range(min(len(self.ends), 8)):
            self(f"COMPARE rToken, EOS_{i}")
            self("IF_EQUAL done")
        self()
        self("emit:")
        self("STREAM rToken, OUTPUT TEXT MODEL=rModel")
        self("ADD rMade, rMade, 1")
        self("COMPARE rMade, MAX_TOKENS")
        self("IF_GREATER_EQUAL done")
        self("IF_INTERRUPT done")
        self("MOV rIds, rToken")
        self("LOADI rLen, 1")
        self("JUMP forward")
        self()
        self("full:")
        self("LOADI rFull, 0")
        self(f'ASSERT rFull CODE=1 MESSAGE="the text is longer than the model\'s context of {h.context} tokens"')
        self("done:")
        self("HALT")


def llama_program(file: GGUFFile, reference: str, options: Options, ends: list[int]) -> str:
    """Assembly text of a llama model.  reference: how the program names the model file."""
    h = hyper(file)
    check_tensors(file, h)
    return _Writer(file, h, options, ends).program(reference)
