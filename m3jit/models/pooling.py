"""Vectors of whole texts as programs: what `m3jit embed` and `m3jit.load_embedder` run.

An encoder's program senses one text after another and streams each text's vector; one that generates text streams the
vector of one text, from its last normalised hidden states.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Protocol, Sequence

from m3jit.models.model_error import ModelFileError
from m3jit.models.model_source import Shapes, Source, check_tensors
from m3jit.models.program import Compiler, Options, Writer

# Values of the key `<architecture>.pooling_type`.
POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3}
NORMALIZE_KEY = "m3jit.embedding.normalize"
SMALLEST = 1e-24                    # added to the mean square a vector is divided by: one of zeros stays zeros


@dataclass(frozen=True)
class Pooling:
    """How rows of tokens [T, width] become one vector [width]: "mean" of all, the first ("cls") or the "last"; "none"
    keeps them all.  normalize: divide by the vector's length."""
    kind: str
    normalize: bool

    @classmethod
    def of(cls, source: Source, architecture: str, kind: str | None = None, normalize: bool | None = None) -> "Pooling":
        """What is asked for, else what the model's files say, else the mean, of length 1."""
        number = source.value(f"{architecture}.pooling_type", int, POOLINGS["mean"])
        stated = {number: name for name, number in POOLINGS.items()}.get(number)
        if kind is None and stated is None:
            raise ModelFileError(source.path, f"is {number}", item=f"metadata key '{architecture}.pooling_type'",
                                 expected=", ".join(f"{n} ({name})" for name, n in POOLINGS.items()))
        if normalize is None:
            normalize = source.value(NORMALIZE_KEY, bool, True)
        return cls(kind or stated or "mean", normalize)


class Encoder(Protocol):
    """What a program of vectors asks of a model that does not generate."""
    title: str
    layers: int
    width: int
    context: int

    def tensors(self) -> Shapes: ...
    def positions(self, w: Writer) -> None: ...         # -> rPlaces [rCount, width], what depends on the length alone
    def embed(self, w: Writer) -> None: ...             # rIds [rCount] -> rX [rCount, width]
    def layer(self, w: Writer, i: int) -> None: ...     # rX -> rX, each row after having seen all


Embedder = Callable[[Source, str, Options, Pooling], str]
"""(source, how the program names the model, options, pooling) -> assembly."""


def encoding(make: Callable[[Source, Options], Encoder]) -> Embedder:
    """The compiler of an encoder's vectors."""
    def embedder(source: Source, reference: str, options: Options, pooling: Pooling) -> str:
        model = make(source, options)
        check_tensors(source, model.tensors())
        w = Writer(source, options)
        _opening(w, model, reference)
        w("main:", "one text")
        w("SENSE rIds, rStatus, USER_INPUT TEXT MODEL=rModel", "token ids")
        w("COMPARE rStatus, 1")
        w("IF_NOT_EQUAL done")
        w("DIM rCount, rIds, 0")
        w("COMPARE rCount, 0")
        w("IF_EQUAL empty")
        w("COMPARE rCount, CONTEXT")
        w("IF_GREATER full")
        model.positions(w)
        _layers(w, model)
        _pool(w, "rX", model.width, pooling)
        w("JUMP main")
        _endings(w, model.context)
        w.adapted.check_used()
        return w.text()
    return embedder


def hidden_states(make: Callable[[Source, Options], Any]) -> Embedder:
    """The compiler of vectors from a model that generates: its rows after the last norm, causal as always.

    make: its instances have `last_norm(w)`, rX -> rX, beside what `program.Architecture` names."""
    def embedder(source: Source, reference: str, options: Options, pooling: Pooling) -> str:
        model = make(source, options)
        check_tensors(source, {name: shape for name, shape in model.tensors().items() if name != "output.weight"})
        w = Writer(source, options)
        _opening(w, model, reference)
        w("main:")
        w("SENSE rPrompt, USER_INPUT TEXT MODEL=rModel", "token ids of the text")
        w("DIM rCount, rPrompt, 0")
        w("COMPARE rCount, 0")
        w("IF_EQUAL empty")
        w("COMPARE rCount, CONTEXT")
        w("IF_GREATER full")
        w("LOADI rPos, 0", "tokens done")
        w()
        w("chunk:", "one chunk of the text")
        w("SUB rLen, rCount, rPos")
        w(f"MIN rLen, rLen, {options.chunk}")
        w("SLICE rIds, rPrompt, START=rPos LEN=rLen")
        _layers(w, model)
        w()
        w("rows:")
        model.last_norm(w)
        _collect(w, pooling)
        w("ADD rPos, rPos, rLen")
        w("COMPARE rPos, rCount")
        w("IF_LESS chunk")
        _pool(w, "rRows", model.width, pooling)
        w("HALT")
        _endings(w, model.context)
        w.adapted.check_used(but=("output.weight",))
        return w.text()
    return embedder


def as_stated(architecture: str, embedder: Embedder) -> Compiler:
    """The compiler of a model that gives nothing but vectors: pooled as its files say."""
    def compiler(source: Source, reference: str, options: Options, ends: Sequence[int]) -> str:
        return embedder(source, reference, options, Pooling.of(source, architecture))
    return compiler


def _opening(w: Writer, model: Any, reference: str) -> None:
    for line in model.title.splitlines():
        w(f"; {line}")
    w(f'.model model "{reference}"')
    w.adapted.declare(w)
    w(f".equ CONTEXT {model.context}")
    w()
    w(".text")
    w("LOADI rModel, @model")


def _layers(w: Writer, model: Any) -> None:
    w()
    w("embed:", "rIds -> rX [T, width]")
    model.embed(w)
    for i in range(model.layers):
        w()
        w(f"layer_{i}:")
        model.layer(w, i)


def _collect(w: Writer, pooling: Pooling) -> None:
    """rRows = the rows that pooling looks at, of all chunks so far: all at once, so that chunks change no byte."""
    if pooling.kind == "last":
        w("SLICE rRows, rX, START=-1 LEN=1")
        return
    w("COMPARE rPos, 0")
    w("IF_EQUAL first")
    if pooling.kind != "cls":
        w("CONCAT rRows, rRows, rX AXIS=0")
    w("JUMP next")
    w("first:")
    w("SLICE rRows, rX, START=0 LEN=1" if pooling.kind == "cls" else "MOV rRows, rX")
    w("next:")


def _pool(w: Writer, rows: str, width: int, pooling: Pooling) -> None:
    """Streams the vector of the rows."""
    w()
    w("pool:")
    if pooling.kind == "mean":
        w(f"REDUCE rVector, {rows}, MEAN AXIS=0 KEEPDIMS")
    elif pooling.kind == "none":
        w(f"MOV rVector, {rows}")
    else:
        w(f"SLICE rVector, {rows}, START={-1 if pooling.kind == 'last' else 0} LEN=1")
    if pooling.normalize:
        w(f"NORM rVector, rVector RMS EPS={SMALLEST!r}", "x / sqrt(mean(x^2))")
        w(f"LOADI rScale, {width ** -0.5!r}", "1 / sqrt(width)")
        w("MUL rVector, rVector, rScale", "of length 1")
    w("STREAM rVector, OUTPUT TENSOR", "[1, width]" if pooling.kind != "none" else "[T, width]")


def _endings(w: Writer, context: int) -> None:
    w()
    w("empty:")
    w("LOADI rNot, 0")
    w('ASSERT rNot CODE=2 MESSAGE="the text has no tokens, so it has no vector"')
    w("full:")
    w("LOADI rNot, 0")
    w(f'ASSERT rNot CODE=1 MESSAGE="the text is longer than the model\'s context of {context} tokens"')
    w("done:")
    w("HALT")
