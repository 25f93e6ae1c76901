"""Transformer parts: ATTN FLASH_ATTN ATTN_SPARSE NORM FFN EMBED MATVEC ROPE CONV KV_TRUNCATE KV_COMPRESS.

Rows are tokens: activations are [T, features].  A KV stream is a state operand (an S register); a register that was
never written stands for a new, empty stream.
"""
from __future__ import annotations

import math
from typing import Any

from m3jit.isa.fields import (F32, STATE, BitsEnum, R, R1, R2, R3, R4, U16, U32, Enum, Flag, IntOrReg, PayloadFlag,
                              Precision, Rd)
from m3jit.isa.forms import ACTIVATIONS, FLOAT, INPLACE, WEIGHT, fused_act, in_f32, product, static, stored
from m3jit.isa.reduce import mean_last
from m3jit.isa.table import StateDoc, op
from m3jit.isa.types import F32 as F32_TYPE

KV_STATE = StateDoc("a KV stream value of the context root (region KV_CACHE)",
                    "O(1): pages are append-only and shared", "lengths and pages of the snapshot are put back")
CELL_STATE = StateDoc("a recurrent state value of the context root: h of SSM_SCAN and the window of CONV, by layer",
                      "O(1): the value is immutable and shared", "the value of the snapshot is put back")
KV_TYPE = BitsEnum(words=("F16", "BF16", "F32", "Q8_0"), numbers=(0, 1, 2, 3), bare=False, bit=1)
_HEAD_KEYS = {"KVHEADS": "kv_heads", "NHEADS": "heads", "HEAD_DIM": "hdim"}


def _geometry(xp: Any, q: Any, heads: int, kv_heads: int, hdim: int, vdim: int) -> dict[str, int]:
    heads = heads or 1
    if not q.shape:
        raise xp.error("needs queries [T, HEADS * HDIM], got a single number")
    head_dim = hdim or static(xp, q.shape[-1], "HDIM") // heads
    return {"heads": heads, "kv_heads": kv_heads or heads, "head_dim": head_dim, "value_dim": vdim or head_dim}


@op(0x02, "ATTN", shape="[T, HEADS * VDIM]", dtypes=FLOAT, state=KV_STATE, key_aliases=_HEAD_KEYS,
    source="Vaswani et al. 2017; grouped heads: Ainslie et al. 2023; latent rows: DeepSeek-V2, 2024")
def attn(xp, rd: Rd, q: R1, k: R2, v: R3 = None, state: R4("state", both=True, banks=(STATE,)) = None,
         heads: U16[0] = 1, kv_heads: U16[2] = 0, hdim: U16[4] = 0, layer: U16[6] = 0, window: U32[8] = 0,
         scale: F32[12] = 0.0, softcap: F32[16] = 0.0, causal: PayloadFlag(0)[20] = False,
         kv_type: KV_TYPE[20] = "F16", past: R("int")[21] = None, vdim: U16[22] = 0):
    """rd = softmax(SCALE q k^T) v for each head; query head h reads kv head h * KV_HEADS / HEADS.

    q [T, HEADS * HDIM], k [N, KV_HEADS * HDIM], v [N, KV_HEADS * VDIM].  Without v the values are the first VDIM
    features of each key (multi-head latent attention).  KV_HEADS 0: as HEADS; HDIM 0: from q; VDIM 0: as HDIM; SCALE 0:
    1 / sqrt(HDIM); SOFTCAP c > 0: scores become c tanh(s / c).  CAUSAL: the query at position p sees keys at positions
    <= p; WINDOW > 0: only keys with p - j < WINDOW.  Query row t has position PAST + t.  A query that sees no key
    gives 0.
    With a state operand k and v are first appended to (stream, LAYER), rounded once to the stream's type, and the
    queries, as its last rows, attend over all its rows.  Values that are part of the keys are not stored again.
    KV_TYPE is the type of a new stream; one that exists keeps its own.  Q8_0: int8 with an F16 scale per 32 features.
    Order of operations: keys in blocks of 64 by position, scores folded over HDIM, blocks combined in order.
    Traps: shapes that do not fit the geometry, a stream of another geometry, PAST beside a state, VDIM over HDIM
    without v."""
    g = _geometry(xp, q, heads, kv_heads, hdim, vdim)
    if state is None:
        return xp.attention(q, k, v, **g, scale=scale, causal=causal, window=window, softcap=softcap,
                            past=0 if past is None else past), None
    if past is not None:
        raise xp.error("ATTN takes PAST from the stream when it has a state operand")
    state = xp.kv_append(state, layer, k, v, kv_heads=g["kv_heads"], head_dim=g["head_dim"], value_dim=g["value_dim"],
                         dtype=kv_type)
    return xp.kv_attention(q, state, layer, **g, scale=scale, causal=causal, window=window, softcap=softcap), state


@op(0x3A, "FLASH_ATTN", shape="[T, HEADS * VDIM]", dtypes=FLOAT, key_aliases=_HEAD_KEYS, source="Dao et al. 2022")
def flash_attn(xp, rd: Rd, q: R1, k: R2, v: R3 = None, block: U16[0] = 0, heads: U16[2] = 1, kv_heads: U16[4] = 0,
               hdim: U16[6] = 0, window: U32[8] = 0, scale: F32[12] = 0.0, softcap: F32[16] = 0.0,
               causal: PayloadFlag(0)[20] = False, past: R("int")[21] = None, vdim: U16[22] = 0):
    """rd = ATTN without a stream, byte for byte: the machine always takes keys in blocks of 64.

    BLOCK is accepted for older programs and changes nothing."""
    return xp.attention(q, k, v, **_geometry(xp, q, heads, kv_heads, hdim, vdim), scale=scale, causal=causal,
                        window=window, softcap=softcap, past=0 if past is None else past)


@op(0x3B, "ATTN_SPARSE", shape="[rows of q, columns of v]", dtypes=FLOAT, positional=("topk",))
def attn_sparse(xp, rd: Rd, q: R1, k: R2, v: R3, topk: IntOrReg(fmt="i")[0, 4] = 0, metric: Enum("DOT")[5] = "DOT",
                scale: F32[8] = 0.0):
    """rd = for each query the softmax-weighted sum of v over its TOPK best keys (0: all), single head.

    score = SCALE (q . k), canonical dot; SCALE 0: 1 / sqrt(columns of q).  The kept keys come in descending order of
    score (NaN first, ties to the lower index); weights e^(s - max) / sum and the sum over v fold canonically over them.
    Traps: TOPK beyond the number of keys."""
    if len(q.shape) != 2 or len(k.shape) != 2 or len(v.shape) != 2:
        raise xp.error("ATTN_SPARSE needs q [M, D], k [N, D] and v [N, P]")
    q, k, v = (xp.cast(t, F32_TYPE) for t in (q, k, v))
    factor = scale or 1.0 / math.sqrt(max(1, static(xp, q.shape[-1], "SCALE")))
    scores = xp.mul(xp.matmul(q, k, True), factor)
    best, index = xp.topk(scores, xp.dim(k, 0) if type(topk) is int and topk == 0 else topk, -1, True, True)
    e = xp.exp(xp.sub(best, xp.reduce(best, "MAX", -1, True)))
    weights = xp.div(e, xp.reduce(e, "SUM", -1, True))
    picked = xp.gather(v, index, 0)
    return xp.reduce(xp.mul(xp.reshape(weights, (*weights.shape, 1)), picked), "SUM", 1, False)


@op(0x07, "NORM", shape="that of x", dtypes=FLOAT, positional=("mode",),
    source="RMS: Zhang and Sennrich 2019; LAYER: Ba, Kiros and Hinton 2016; BATCH: Ioffe and Szegedy 2015")
def norm(xp, rd: Rd, x: R1, gamma: R2 = None, beta: R3 = None, mode: Enum("RMS LAYER BATCH")[0] = "RMS",
         eps: F32[4] = 1e-5, mean: R[8] = None, var: R[9] = None, inplace: INPLACE = False):
    """rd = x / sqrt(mean(x^2) + EPS) (RMS), or (x - mean) / sqrt(variance + EPS) (LAYER), along the last axis.

    BATCH: as LAYER along axis 1 (channels), with MEAN and VAR [channels], or the statistics of the batch itself where
    they are absent.  Then times gamma and plus beta where given (BATCH: per channel, else broadcast).  The quotient
    is a product with 1 / sqrt(..).  Variance = mean of squared deviations.  Computed in f32.  Traps: EPS < 0."""
    if not eps >= 0:
        raise xp.error(f"NORM needs EPS from 0, got {eps!r}")

    def compute(v: Any) -> Any:
        if mode == "BATCH":
            return _batch_norm(xp, v, gamma, beta, eps, mean, var)
        if mode == "LAYER":
            v = xp.sub(v, mean_last(xp, v))
        return _affine(xp, xp.mul(v, _rsqrt(xp, mean_last(xp, xp.mul(v, v)), eps)), gamma, beta)
    return in_f32(xp, x, compute)


def _rsqrt(xp: Any, v: Any, eps: float) -> Any:
    return xp.div(1.0, xp.sqrt(xp.add(v, eps)))


def _affine(xp: Any, v: Any, gamma: Any, beta: Any) -> Any:
    v = v if gamma is None else xp.mul(v, gamma)
    return v if beta is None else xp.add(v, beta)


def _batch_norm(xp: Any, x: Any, gamma: Any, beta: Any, eps: float, mean: Any, var: Any) -> Any:
    if len(x.shape) < 2:
        raise xp.error("NORM MODE=BATCH needs channels on axis 1")
    column = (-1, *[1] * (len(x.shape) - 2))
    if (mean is None) != (var is None):
        raise xp.error("NORM MODE=BATCH takes MEAN and VAR together or neither")
    if mean is None:
        order = (1, 0, *range(2, len(x.shape)))
        rows = xp.reshape(xp.transpose(x, order), (x.shape[1], -1))
        mean = mean_last(xp, rows)
        apart = xp.sub(rows, mean)
        var = mean_last(xp, xp.mul(apart, apart))
    gamma, beta = (None if t is None else xp.reshape(t, column) for t in (gamma, beta))
    centred = xp.sub(x, xp.reshape(mean, column))
    return _affine(xp, xp.mul(centred, _rsqrt(xp, xp.reshape(var, column), eps)), gamma, beta)


@op(0x10, "MATVEC", shape="[.., N]; with experts [.., k, N]", dtypes=FLOAT, key_aliases={"B": "bias"},
    source="block formats: ggml; experts: Shazeer et al. 2017")
def matvec(xp, rd: Rd, x: R1, w: R2, bias: R3 = None, experts: R4("tensor") = None, transpose: Flag(4) = False,
           precision: Precision = "FP32", act: fused_act()[0] = None):
    """rd = x W (+ bias), x [.., K], W [K, N]; TRANSPOSE: W is stored [N, K], as model files store it.  Then ACT.

    W of three axes is a matrix for each row: x [.., G, K] and W [G, K, N] (TRANSPOSE: [G, N, K]) give [.., G, N].
    FP32: canonical float dots (64 lanes) with the weights' exact values.  INT8: x is quantised to int8 in blocks of the
    weights' length (32 or 256), block dots are exact integers, their combination folds over the blocks; W must be
    block-quantised [N, K].  BF16, FP16: as FP32, the result stored in that type.  Otherwise the result is F32.
    EXPERTS [.., k], integers: W is [E, N, K], and the row of x, one for the k of them [.., K] or one for each
    [.., k, K], is multiplied with W[e] for each e, byte for byte as with that matrix alone; bias is [E, N].
    Traps: inner lengths that differ; INT8 with another weight type or without TRANSPOSE; experts without TRANSPOSE, an
    expert outside 0 .. E - 1."""
    if experts is None:
        y = product(xp, x, w, transpose, precision)
    elif transpose:
        y = xp.routed(x, w, experts, precision == "INT8")
    else:
        raise xp.error("experts are stored [E, N, K]: set TRANSPOSE")
    if bias is not None:
        y = xp.add(y, bias if experts is None else xp.gather(bias, experts, 0))
    return stored(xp, ACTIVATIONS[act or "NONE"](xp, y), precision)


@op(0x08, "FFN", shape="[.., O]", dtypes=FLOAT, key_aliases={"UP": "w3"},
    source="Vaswani et al. 2017; gated: Shazeer 2020")
def ffn(xp, rd: Rd, x: R1, w1: R2, w2: R3, w3: R4("tensor") = None, b1: R[0] = None, b2: R[1] = None, b3: R[2] = None,
        act: Enum("SILU GELU GELU_TANH RELU RELU2")[3] = "SILU", transpose: Flag(4) = False,
        precision: Precision = "FP32"):
    """rd = (ACT(x W1 + b1) * (x W3 + b3)) W2 + b2; without W3 the middle factor is absent (ungated).

    W1 and W3 [D, H], W2 [H, O]; TRANSPOSE: [H, D] and [O, H].  Biases are absent where not given.  RELU2 = max(x, 0)^2.
    PRECISION as MATVEC's, for all products.  Traps: B3 without W3, shapes that do not fit."""
    hidden = _biased(xp, product(xp, x, w1, transpose, precision), b1)
    hidden = ACTIVATIONS[act](xp, hidden)
    if w3 is not None:
        hidden = xp.mul(hidden, _biased(xp, product(xp, x, w3, transpose, precision), b3))
    elif b3 is not None:
        raise xp.error("FFN has a bias B3 but no weight W3")
    return stored(xp, _biased(xp, product(xp, hidden, w2, transpose, precision), b2), precision)


def _biased(xp: Any, y: Any, bias: Any) -> Any:
    return y if bias is None else xp.add(y, bias)


@op(0x09, "EMBED", shape="[count of ids, columns of table]", dtypes="ids I32 I64, table " + WEIGHT)
def embed(xp, rd: Rd, ids: R1("tensor", "int"), table: R2):
    """rd = rows of the table [V, D] at the ids (a number: one row), as F32, exactly dequantised.

    Traps: an id outside 0 .. V - 1, named with its position."""
    return xp.embed(ids, table)


@op(0x19, "ROPE", shape="that of x", dtypes=FLOAT, key_aliases={"NHEADS": "heads", "HEAD_DIM": "hdim"},
    source="Su et al. 2021")
def rope(xp, rd: Rd, x: R1, pos: IntOrReg(fmt="i")[0, 4] = 0, hdim: U16[5] = 0,
         pairing: Enum("NEOX NORM")[7] = "NEOX", theta: F32[8] = 10000.0, scale: F32[12] = 1.0, factors: R[16] = None,
         heads: U16[17] = 0, inplace: INPLACE = False):
    """rd = x with the pairs of each head rotated: row t by the angles (POS + t) * freq_i.

    x [.., T, heads * HDIM] (rank 1: one row); HDIM 0: last axis / HEADS (HEADS 0: 1).  freq_i = THETA^(-2i / HDIM) *
    SCALE / FACTORS[i]; pairs are (i, i + HDIM/2) with NEOX, (2i, 2i + 1) with NORM.  a' = a cos - b sin,
    b' = a sin + b cos.  Position 0 changes nothing.  Traps: an odd HDIM, a last axis that is no multiple of it, FACTORS
    of another length than HDIM / 2."""
    if not x.shape:
        raise xp.error("ROPE needs rows [.., T, heads * HDIM], got a single number")
    head_dim = hdim or static(xp, x.shape[-1], "HDIM") // (heads or 1)
    if heads and x.shape[-1] != heads * head_dim:
        raise xp.error(f"ROPE with {heads} heads of {head_dim} needs rows of {heads * head_dim}, got {x.shape[-1]}")

    def compute(v: Any) -> Any:
        flat = len(v.shape) == 1
        rows = xp.reshape(v, (1, v.shape[0])) if flat else v
        rows = xp.rope(rows, pos, head_dim=head_dim, theta=theta, pairing=pairing, scale=scale, factors=factors)
        return xp.reshape(rows, v.shape) if flat else rows
    return in_f32(xp, x, compute)


@op(0x1E, "CONV", shape="[N, O, ..]: (size + 2 PAD - DILATION (K - 1) - 1) / STRIDE + 1; with a state that of x",
    dtypes=FLOAT, state=CELL_STATE)
def conv(xp, rd: Rd, x: R1, w: R2, bias: R3 = None, state: R4("state", both=True, banks=(STATE,)) = None,
         stride: U16[0] = 1, pad: U16[2] = 0, dilation: U16[4] = 1, groups: U16[6] = 1, act: fused_act()[8] = None,
         layer: U16[10] = 0):
    """rd = cross-correlation of x with w, plus bias [O], then ACT; one and two dimensions.

    x [N, C, L] or [N, C, H, W]; [H, W] is one image with one channel.  w [O, C / GROUPS, K..], or the kernel alone
    ([K], [KH, KW]) for one channel.  Zero padding.  Each output folds from its bias over channels, then kernel
    positions.
    With a state operand the convolution is causal, one row after the other, each channel by itself: x [T, C], w [C, K],
    rd[t, c] = bias[c] + sum_k w[c, k] x[t + k - K + 1, c], where rows before the first are the K - 1 last ones the
    state has seen at LAYER (at first: zeros).  It then holds the last K - 1 of those and x.
    Traps: sizes and groups that do not fit; a kernel larger than the padded input; STRIDE, PAD, DILATION or GROUPS
    beside a state; a layer whose window has another shape."""
    if state is not None:
        if (stride, pad, dilation, groups) != (1, 0, 1, 1):
            raise xp.error("CONV with a state is causal and by channel: it takes no STRIDE, PAD, DILATION or GROUPS")
        y, state = xp.causal_conv(state, layer, *(v if v is None else xp.cast(v, F32_TYPE) for v in (x, w, bias)))
        return xp.cast(ACTIVATIONS[act or "NONE"](xp, y), x.dtype), state
    if len(x.shape) == 2:
        x = xp.reshape(x, (1, 1, *x.shape))
    if len(w.shape) == len(x.shape) - 2:
        w = xp.reshape(w, (1, 1, *w.shape))
    y = xp.conv(x, w, bias, stride=stride, pad=pad, dilation=dilation, groups=groups)
    return ACTIVATIONS[act or "NONE"](xp, y), None


@op(0x38, "KV_TRUNCATE", state=KV_STATE, positional=("length",), sample={"length": 0})
def kv_truncate(xp, state: R1("state", both=True), length: IntOrReg(fmt="q")[0, 8]):
    """state = the first min(rows, LENGTH) rows of every layer.  Traps: LENGTH < 0."""
    return xp.kv_truncate(state, length)


@op(0x39, "KV_COMPRESS", state=KV_STATE, source="attention sinks: Xiao et al. 2023")
def kv_compress(xp, state: R1("state", both=True), sink: IntOrReg(fmt="i")[0, 4] = 0,
                window: IntOrReg(fmt="i")[5, 9] = 0, mode: Enum("SINK_WINDOW")[10] = "SINK_WINDOW"):
    """state = the first SINK and the last WINDOW rows of every layer that has more than SINK + WINDOW.

    Rows keep the rotation of the position they were made at.  Traps: both 0, or a negative one."""
    return xp.kv_compress(state, sink, window)
