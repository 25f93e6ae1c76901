"""A program that scores a text instead of continuing it: what `m3jit perplexity` runs.

The same layers as a generating program.  It senses token ids, and for each token streams the log-probability of the one
behind it (F32, natural logarithm), chunk by chunk, to the sink SCORES; behind the last token it takes token 0.
"""
from __future__ import annotations

from typing import Any, Callable

from m3jit.models.hosted import write_chunk


def write_prompt(w: Any, vocabulary: int) -> None:
    """From the entry to the first layer: rIds holds the next chunk of the text.  Opens the sections .data and .text."""
    w(".data")
    w.lines.append(f"ramp: .i64 {[row * vocabulary for row in range(w.options.chunk)]}")
    w()
    w(".text")
    w("main:")
    w("LOADI rModel, @model")
    w("LOADI rRamp, @ramp", "where each row of a chunk's logits begins")
    w("LOADI rMinus, -1.0")
    w("SENSE rPrompt, USER_INPUT TEXT MODEL=rModel", "token ids of the text")
    w("DIM rCount, rPrompt, 0")
    w("COMPARE rCount, 0")
    w("IF_EQUAL done")
    w("TENSOR rNothing SHAPE=[1] I64")
    w("CONCAT rBehind, rPrompt, rNothing")
    w("SLICE rBehind, rBehind, START=1 LEN=rCount", "the token behind each one")
    w("LOADI rPos, 0", "position of the chunk's first token")

    def places() -> None:
        w("LOADI rLogits, 0")
        w("SLICE rPlace, rBehind, START=rAt LEN=rLen")
        w("SLICE rRow, rRamp, START=0 LEN=rLen")
        w("ADD rPlace, rPlace, rRow", "where the logits of the tokens behind are, in all of a chunk")
    write_chunk(w, "CONTEXT", None, beside=places)


def write_scores(w: Any, head: Callable[[], None], context: int) -> None:
    """From the last layer to the end.  head: writes rX [T, width] -> rLogits [T, vocabulary]."""
    w()
    w("head:")
    w("MOV rPos, rNext")
    head()
    w("REDUCE rMost, rLogits, MAX AXIS=1 KEEPDIMS")
    w("MUL rMost, rMost, rMinus")
    w("ADD rLogits, rLogits, rMost")
    w("EXP rSum, rLogits")
    w("REDUCE rSum, rSum, SUM AXIS=1")
    w("LOG rSum, rSum")
    w("MUL rSum, rSum, rMinus", "log p = x - max - log(sum(exp(x - max)))")
    w("RESHAPE rLogits, rLogits SHAPE=[-1]")
    w("GATHER rScores, rLogits, rPlace", "x of the token behind each row's")
    w("ADD rScores, rScores, rSum")
    w('STREAM rScores, SINK TENSOR NAME="SCORES"')
    w("COMPARE rAt, rCount")
    w("IF_LESS prompt")
    w("JUMP done")
    w()
    w("full:")
    w("LOADI rFull, 0")
    w(f'ASSERT rFull CODE=1 MESSAGE="the text is longer than the model\'s context of {context} tokens"')
    w("done:")
    w("HALT")
