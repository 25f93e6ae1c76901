"""Assembly of models: the lines architectures are made of, and the generation program around their layers.

The generation program senses the prompt, runs it through the layers in chunks, then samples, streams and feeds back one
token at a time until the model ends the text, MAX_TOKENS are out, the context is full, or an interrupt is pending.

Registers: rX [T, width] the residual stream, rH the branch being computed, rQ rK rV what attention reads, rW rW2 rW3 rB
weights, rPos the position of the first row, rIds the tokens of the chunk; state in S registers (sKV: the KV stream).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Protocol, Sequence

import numpy as np

from m3jit.models import hosted, scoring
from m3jit.models.adapters import Adapted, Adapter
from m3jit.models.model_source import BLOCK_TYPES, Shapes, Source, check_nothing_is_left, check_tensors

CHUNK = 64                          # prompt tokens of one pass: bounds the time between two interruptible points
END_TOKENS = 8                      # tokens that end a text which a program tests for


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
    context: int | None = None      # positions the program allows; None: as many as the model was trained for
    kv_type: str = "F16"            # how the KV stream stores keys and values: F16, BF16, F32 or Q8_0
    adapters: tuple[Adapter, ...] = ()
    hosted: bool = False            # settings in registers, token ids out (m3jit.models.hosted)
    conversation: bool = False      # hosted: wait for the next prompt instead of ending
    checkpoint_every: int = 0       # tokens between two versions that the program puts on a disk; 0: none.  Not hosted
    scoring: bool = False           # log-probabilities of the prompt's tokens, nothing generated (m3jit.models.scoring)


class Writer:
    """Lines of a program, and the instructions that architectures share."""

    def __init__(self, source: Source, options: Options):
        self.source, self.options = source, options
        self.lines: list[str] = []
        self.named: set[str] = set()            # weights of the model that the program names
        self.constants: dict[str, list[float]] = {}
        self.adapted = Adapted(options.adapters, source)

    def __call__(self, text: str = "", comment: str = "") -> None:
        line = f"    {text}" if text and not text.endswith(":") and not text.startswith((".", ";")) else text
        self.lines.append(f"{line:<58}; {comment}" if comment else line)

    def text(self) -> str:
        data = [f"{name}: .f32 [{', '.join(map(repr, values))}]" for name, values in self.constants.items()]
        return "\n".join(self.lines + (["", ".data", *data] if data else [])) + "\n"

    def has(self, name: str) -> bool:
        return name in self.source.tensors

    def weight(self, register: str, name: str) -> None:
        self.named.add(name)
        self(f"LOADI {register}, @model:{name}")

    def constant(self, register: str, name: str, values: Sequence[float]) -> None:
        """register = an F32 vector that is written into the program's data as `name`."""
        self.constants[name] = [float(np.float32(v)) for v in values]
        self(f"LOADI {register}, @{name}")

    def embedding(self, rd: str) -> None:
        """rd = the rows of token_embd.weight for rIds."""
        self.weight("rW", "token_embd.weight")
        self(f"EMBED {rd}, rIds, rW")
        self.adapted.embedding(self, rd)

    def precision(self, name: str) -> str:
        """How products with the weight `name` compute."""
        return "INT8" if self.source.tensor(name).ggml_type.name in BLOCK_TYPES else "FP32"

    def is_plain(self, name: str) -> bool:
        """Whether products with the weight `name` are that and a bias, without adapters or a scale."""
        return not self.adapted.of(name) and not self.has(name.replace(".weight", ".scale"))

    def product(self, rd: str, x: str, name: str) -> None:
        """rd = x times the weight `name` [N, K], plus what adapters add to it, times its scale (a tensor of one
        number), plus its bias, where there are any."""
        self.weight("rW", name)
        bias = name.replace(".weight", ".bias")
        if not self.is_plain(name):
            if self.adapted.of(name):
                self.adapted.product(self, rd, x, name)
            else:
                self(f"MATVEC {rd}, {x}, rW TRANSPOSE {self.precision(name)}")
            for other, word in ((name.replace(".weight", ".scale"), "MUL"), (bias, "ADD")):
                if self.has(other):
                    self.weight("rB", other)
                    self(f"{word} {rd}, {rd}, rB")
            return
        extra = ""
        if self.has(bias):
            self.weight("rB", bias)
            extra = ", rB"
        self(f"MATVEC {rd}, {x}, rW{extra} TRANSPOSE {self.precision(name)}")

    def routed(self, rd: str, x: str, name: str, experts: str) -> None:
        """rd [T, k, N] = x, [T, K] or [T, k, K], times the matrices of `name` [E, N, K] that `experts` [T, k] names."""
        self.weight("rW", name)
        self(f"MATVEC {rd}, {x}, rW EXPERTS={experts} TRANSPOSE {self.precision(name)}")

    def norm(self, rd: str, x: str, name: str, eps: float, mode: str = "RMS") -> None:
        """rd = x normalised along its last axis, times the gain `name`, plus its bias, where the source has one."""
        self.weight("rW", name)
        bias = name.replace(".weight", ".bias")
        extra = ""
        if self.has(bias):
            self.weight("rB", bias)
            extra = ", rB"
        self(f"NORM {rd}, {x}, rW{extra} {mode} EPS={eps!r}")

    def norm_heads(self, rd: str, x: str, name: str, eps: float, heads: int, head_dim: int) -> None:
        """rd = x [T, heads * head_dim] with each head normalised for itself by the gain `name` [head_dim]."""
        self(f"RESHAPE {rd}, {x} SHAPE=[-1, {heads}, {head_dim}]")
        self.norm(rd, rd, name, eps)
        self(f"RESHAPE {rd}, {rd} SHAPE=[-1, {heads * head_dim}]")

    def residual(self, x: str = "rX", h: str = "rH") -> None:
        self(f"ADD {x}, {x}, {h}")

    def cap(self, register: str, limit: float) -> None:
        """register = limit * tanh(register / limit); a limit of 0 caps nothing."""
        if limit:
            self(f"LOADI rCap, {1.0 / limit!r}")
            self(f"MUL {register}, {register}, rCap")
            self(f"TANH {register}, {register}")
            self(f"LOADI rCap, {float(limit)!r}")
            self(f"MUL {register}, {register}, rCap")

    def ffn(self, rd: str, x: str, prefix: str, act: str = "SILU", gated: bool = True) -> None:
        """rd = down(ACT(gate x) * up x), ungated: down(ACT(up x)), of the weights `prefix`gate, `prefix`up,
        `prefix`down; one instruction where all of them compute alike.  Uses rQ and rK."""
        names = [prefix + n + ".weight" for n in (("gate", "down", "up") if gated else ("up", "down"))]
        biases = [n.replace(".weight", ".bias") for n in names]
        if len({self.precision(n) for n in names}) == 1 and all(map(self.is_plain, names)):
            registers = ("rW", "rW2", "rW3")[:len(names)]
            for register, name in zip(registers, names):
                self.weight(register, name)
            extra = ""
            for i, bias in enumerate(biases, 1):
                if self.has(bias):
                    self.weight(f"rB{i}", bias)
                    extra += f" B{i}=rB{i}"
            self(f"FFN {rd}, {x}, {', '.join(registers)}{extra} {act} TRANSPOSE {self.precision(names[0])}")
            return
        self.product("rQ", x, names[0])
        self(f"{_ACTIVATION[act]} rQ, rQ" + (" TANH" if act == "GELU_TANH" else ""))
        if gated:
            self.product("rK", x, names[2])
            self("MUL rQ, rQ, rK")
        self.product(rd, "rQ", names[1])


_ACTIVATION = {"SILU": "SILU", "GELU": "GELU", "GELU_TANH": "GELU", "RELU": "RELU"}


class Architecture(Protocol):
    """What the generation program asks of a model that generates: sizes, tensors, and its layers as lines."""
    name: str                           # in files
    title: str                          # comment lines that open the program, without the leading "; "
    layers: int
    context: int                        # positions the program allows

    def tensors(self) -> Shapes: ...
    def embed(self, w: Writer) -> None: ...             # rIds [T] -> rX [T, width]
    def layer(self, w: Writer, i: int) -> None: ...     # rX -> rX
    def head(self, w: Writer) -> None: ...              # rX [1, width] -> rLogits [1, vocabulary]


Compiler = Callable[[Any, str, Options, Sequence[int]], str]
"""(source, how the program names the model, options, tokens that end a text) -> assembly."""


def generation(make: Callable[[Source, Options], Architecture]) -> Compiler:
    """The compiler of an architecture that generates text: `make(source, options)` reads and checks its metadata."""
    def compiler(source: Source, reference: str, options: Options, ends: Sequence[int]) -> str:
        model = make(source, options)
        expected = model.tensors()
        check_tensors(source, expected)
        w = Writer(source, options)
        text = generation_program(model, w, reference, list(ends)[:END_TOKENS])
        check_nothing_is_left(source, w.named.union(expected), model.name)
        return text
    return compiler


def generation_program(model: Architecture, w: Writer, reference: str, ends: Sequence[int]) -> str:
    """Assembly text of a model that generates.  reference: how the program names the model file."""
    o = w.options
    for line in model.title.splitlines():
        w(f"; {line}")
    w(f'.model model "{reference}"')
    w.adapted.declare(w)
    if not o.hosted:
        w(f".equ MAX_TOKENS {o.max_tokens}")
        w(f".equ CONTEXT {model.context}")
    w(f".equ CHUNK {o.chunk}")
    for i, token in enumerate(ends):
        w(f".equ EOS_{i} {token}")
    vocabulary = w.source.tensor("token_embd.weight").shape[0]
    w()
    if not o.scoring:
        w(".text")
    if o.scoring:
        scoring.write_prompt(w, vocabulary)
    elif o.hosted:
        hosted.write_prompt(w, o.repeat_penalty != 1.0, o.conversation)
    else:
        _prompt(w)
    model.embed(w)
    for i in range(model.layers):
        w()
        w(f"layer_{i}:")
        model.layer(w, i)
    if o.scoring:
        scoring.write_scores(w, lambda: model.head(w), model.context)
    elif o.hosted:
        hosted.write_next_token(w, lambda: model.head(w), ends, vocabulary, o.repeat_penalty, o.conversation)
    else:
        _next_token(model, w, len(ends))
    w.adapted.check_used()
    return w.text()


def _prompt(w: Writer) -> None:
    o = w.options
    w("main:")
    w("LOADI rModel, @model")
    if o.seed is not None:
        w(f"RNG_SEED {o.seed}")
    w("SENSE rPrompt, USER_INPUT TEXT MODEL=rModel", "token ids of the prompt")
    w("DIM rCount, rPrompt, 0")
    w("COMPARE rCount, 0")
    w("IF_EQUAL done", "an empty prompt generates nothing")
    if o.repeat_penalty != 1.0:
        w("MOV rSeen, rPrompt", "tokens so far")
    w("LOADI rPos, 0", "position of the next token")
    w("LOADI rMade, 0", "tokens generated")
    if o.checkpoint_every:
        w("LOADI rUntil, 1", "tokens until a version is put on the disk; the first is behind the prompt")
    hosted.write_chunk(w, "CONTEXT", "done")


def _next_token(model: Architecture, w: Writer, ends: int) -> None:
    o = w.options
    penalised = o.repeat_penalty != 1.0
    w()
    w("head:")
    w("MOV rPos, rNext")
    w("COMPARE rAt, rCount")
    w("IF_LESS prompt", "more of the prompt to come")
    w("SLICE rX, rX, START=-1 LEN=1", "the last token's row")
    model.head(w)
    history = ", rSeen" if penalised else ""
    draw = "TEMP=0" if o.temperature == 0 else \
        f"TEMP={o.temperature!r} TOP_K={o.top_k} TOP_P={o.top_p!r} MIN_P={o.min_p!r}"
    w(f"SAMPLE rToken, rLogits{history} {draw}" + (f" PENALTY={o.repeat_penalty!r}" if history else ""))
    if penalised:
        w("TENSOR rLast, rToken SHAPE=[1] I64")
        w("CONCAT rSeen, rSeen, rLast", "the penalty looks at the last 64 of them")
    for i in range(ends):
        w(f"COMPARE rToken, EOS_{i}")
        w("IF_EQUAL done")
    w("MOV rIds, rToken")
    w("LOADI rLen, 1")
    w("ADD rMade, rMade, 1")
    w("COMPARE rMade, MAX_TOKENS", "before STREAM, in compiled code: what stands behind it is interpreted")
    w()
    w("emit:")
    w("STREAM rToken, OUTPUT TEXT MODEL=rModel")
    if o.checkpoint_every:
        w("IF_GREATER_EQUAL done")
        w("SUB rUntil, rUntil, 1")
        w("COMPARE rUntil, 0")
        w("IF_GREATER forward")
        w(f"LOADI rUntil, {o.checkpoint_every}")
        w("FORK rKept, PERSIST", "a run that is killed goes on here")
        w("JUMP forward")
    else:
        w("IF_LESS forward")
        w("JUMP done")
    w()
    w("full:")
    w("LOADI rFull, 0")
    w(f'ASSERT rFull CODE=1 MESSAGE="the text is longer than the model\'s context of {model.context} tokens"')
    w("done:")
    w("HALT")
