"""A generation program that its host steers: what a server and `m3jit.load_model` run.

The same prompt loop and layers as the program of `m3jit compile`, with settings in registers instead of constants, so
that one compiled program serves every request, and token ids instead of text for output.

Registers the host sets before the run: rTemp, rTopP, rMinP (floats), rTopK, rMaxTokens, rContext (positions that may be
used), rWanted (log-probabilities: -1 none, else how many the host looks at), rGuided (1: a grammar masks the draw),
rPenalty (a float; in programs that keep the tokens so far for it alone, `Options.repeat_penalty` other than 1),
rMade (tokens of the text that are in the prompt already), rToken (the one drawn last, for the grammar; below 0: none),
rStart and rMarks.  rStart: so many tokens at the beginning of the prompt have gone through the model already; the host
has given the S registers their state (`VM.set_state`), and when they are all of the prompt, rLogits what follows them.
rMarks 1: the program says after each chunk of the prompt how many tokens the state holds.
Sinks it attaches: TOKENS gets each token id (8 bytes), LOGPROBS before it, when asked for, the chosen token's
log-probability (8 bytes, a float), the `BEST` largest ones (F32) and their tokens (I64).  GRAMMAR
(m3jit.models.grammar) keeps the grammar's state in the context root.  MARKS gets rPos (8 bytes) where rMarks asks.
rFinish says at the end why the text ended.

The program of a conversation (`Options.conversation`) does not end with a text: it hands out the negative of rFinish in
place of a token and waits for the next prompt, which holds everything from the beginning; the host puts rStart, rMade
and rToken in place for it.  At the end of its input it halts.
"""
from __future__ import annotations

from typing import Callable, Sequence

from m3jit.models import grammar

BEST = 20                           # alternatives a program hands out for one token
RUNNING, STOP, LENGTH, CONTEXT, INTERRUPTED = range(5)         # rFinish
REGISTERS = ("rTemp", "rTopP", "rMinP", "rTopK", "rMaxTokens", "rContext", "rWanted", "rGuided", "rStart", "rMarks",
             "rMade", "rToken")

Line = Callable[..., None]          # a program.Writer


def write_prompt(w: Line, seen: bool, conversation: bool = False) -> None:
    """From the entry to the first layer: rIds holds the next chunk of the prompt, or the token just drawn.

    seen: keep the tokens so far in rSeen, for a repetition penalty."""
    w("main:")
    w("LOADI rModel, @model")
    w("LOADI rMinus, -1.0")
    if conversation:
        w()
        w("turn:")
    w("SENSE rPrompt, USER_INPUT TEXT MODEL=rModel", "token ids of the prompt")
    w("DIM rCount, rPrompt, 0")
    w("COMPARE rCount, 0")
    if conversation:
        w("IF_EQUAL goodbye", "nothing more is said")
    else:
        w("IF_EQUAL stop", "an empty prompt generates nothing")
    w(f"LOADI rFinish, {RUNNING}")
    if seen:
        w("MOV rSeen, rPrompt", "tokens so far")
    w("LOADI rPos, 0", "position of the next token")
    write_chunk(w, "rContext", "interrupted", steered=True)


def write_chunk(w: Line, context: str, interrupted: str | None, steered: bool = False,
                beside: Callable[[], None] = lambda: None) -> None:
    """From the prompt, rPrompt [rCount], to the first layer: chunk after chunk in rIds.  context: the positions there
    are; beyond them the program goes on at `full`.  A token just drawn enters at `forward`, in rIds with rLen 1.
    interrupted: where the program goes on when it is interrupted, rPos tokens in the states; None: it is not asked.
    beside: writes what else a chunk needs, between rIds and rAt.
    steered: the first rStart tokens are skipped; when these are all, the program goes on at `sample`."""
    w("LOADI rNext, 0", "the one behind the chunk")
    if steered:
        w("MOV rAt, rStart", "prompt tokens done: the states hold them")
        w("ADD rPos, rPos, rStart")
        w("LOADI rStart, 0", "of this prompt alone")
        w("COMPARE rAt, rCount")
        w("IF_GREATER_EQUAL sample")
    else:
        w("LOADI rAt, 0", "prompt tokens done")
    w()
    w("prompt:", "one chunk of the prompt")
    w("LOADI rX, 0", "what the last chunk left: code is compiled for the kinds registers hold")
    w("SUB rLeft, rCount, rAt")
    w("MIN rLen, rLeft, CHUNK")
    w("SLICE rIds, rPrompt, START=rAt LEN=rLen")
    beside()
    w("ADD rAt, rAt, rLen")
    w()
    w("forward:", "rIds [T] -> rX [T, width]")
    if interrupted is not None:
        looks = "looks again when the layers are interrupted; rPos tokens are in the states then"
        w(f"IF_INTERRUPT {interrupted}", looks)
    w("ADD rNext, rPos, rLen")
    w(f"COMPARE rNext, {context}")
    w("IF_GREATER full")


def write_next_token(w: Line, head: Callable[[], None], ends: Sequence[int], vocabulary: int, penalty: float,
                     conversation: bool = False) -> None:
    """From the last layer to the end: draw, hand out, go round.

    head: writes rX [1, width] -> rLogits.  ends: the tokens that end a text (constants EOS_0 .. of the program)."""
    grammar.declare()
    w()
    w("head:")
    w("MOV rPos, rNext")
    w("COMPARE rAt, rCount")
    w("IF_LESS more", "of the prompt to come")
    w("SLICE rX, rX, START=-1 LEN=1", "the last token's row")
    head()
    _write_draw(w, penalty)
    for i in range(len(ends)):
        w(f"COMPARE rToken, EOS_{i}")
        w("IF_EQUAL stop")
    w("ADD rMade, rMade, 1")
    w("MOV rIds, rToken")
    w("LOADI rLen, 1")
    w("COMPARE rWanted, 0")
    w("IF_LESS emit")
    _write_logprobs(w, min(BEST, vocabulary))
    w()
    w("emit:")
    w("COMPARE rMade, rMaxTokens", "before STREAM, in compiled code: what stands behind it is interpreted")
    w('STREAM rToken, SINK RAW NAME="TOKENS"')
    w("IF_LESS forward")
    w("JUMP length")
    w()
    w("more:")
    w("COMPARE rMarks, 0")
    w("IF_EQUAL prompt")
    w('STREAM rPos, SINK RAW NAME="MARKS"')
    w("JUMP prompt")
    _write_endings(w, conversation)


def _write_draw(w: Line, penalty: float) -> None:
    """rLogits -> rToken, with the grammar where there is one, and the history where there is a penalty."""
    w()
    w("sample:")
    history = ", rSeen" if penalty != 1.0 else ""
    settings = "TEMP=rTemp TOP_K=rTopK TOP_P=rTopP MIN_P=rMinP" + (" PENALTY=rPenalty" if history else "")
    w("COMPARE rGuided, 0")
    w("IF_EQUAL free")
    w("GRAMMAR rMask, rToken", "the tokens that may follow")
    w(f"SAMPLE rToken, rLogits{history} MASK=rMask {settings}")
    w("JUMP drawn")
    w("free:")
    w(f"SAMPLE rToken, rLogits{history} {settings}")
    w("drawn:")
    if history:
        w("TENSOR rLast, rToken SHAPE=[1] I64")
        w("CONCAT rSeen, rSeen, rLast", "the penalty looks at the last 64 of them")


def _write_endings(w: Line, conversation: bool) -> None:
    """Where a text ends, by its reason; a conversation goes on with the next turn."""
    for label, value in (("stop", STOP), ("length", LENGTH), ("full", CONTEXT), ("interrupted", INTERRUPTED)):
        w()
        w(f"{label}:")
        w(f"LOADI rFinish, {value}")
        if conversation:
            w(f"LOADI rToken, -{value}")
            w('STREAM rToken, SINK RAW NAME="TOKENS"')
            w("JUMP turn")
        else:
            w("HALT")
    if conversation:
        w()
        w("goodbye:")
        w("HALT")


def _write_logprobs(w: Line, best: int) -> None:
    """log softmax of rLogits: x - max - log(sum(exp(x - max))), in the logits' own arithmetic."""
    w()
    w("logprobs:", "log softmax of the logits that were drawn from")
    w("REDUCE rMost, rLogits, MAX")
    w("GETELEM rMost, rMost")
    w("MUL rMost, rMost, rMinus")
    w("ADD rLog, rLogits, rMost")
    w("EXP rSum, rLog")
    w("REDUCE rSum, rSum, SUM")
    w("LOG rSum, rSum")
    w("GETELEM rSum, rSum")
    w("MUL rSum, rSum, rMinus")
    w("ADD rLog, rLog, rSum")
    w("GETELEM rChosen, rLog, INDEX=rToken")
    w(f"TOPK rBest, rLog, rBestIds K={best} AXIS=-1")
    w('STREAM rChosen, SINK RAW NAME="LOGPROBS"')
    w('STREAM rBest, SINK TENSOR NAME="LOGPROBS"')
    w('STREAM rBestIds, SINK TENSOR NAME="LOGPROBS"')
