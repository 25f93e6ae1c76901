"""Witnesses of the transformer family: float64 formulas, SciPy's correlate, the gguf package's weights."""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import signal, special

from m3jit.isa.kv import DTYPES as KV_DTYPES
from m3jit.isa.kv import KVStream
from m3jit.isa.types import BF16, BLOCKS, F16, F32, I32, I64, NEW_STATE, Q4_0, Q4_1, Q4_K, Q5_0, Q6_K, Q8_0, Tensor
from tests.ops.witness_recurrent import conv_with_a_state
from tests.ops.cases import FLOATS, Case, close, noise, rounded, same, tensor, values, witness
from tests.ops.witness_layout import blocks, decoded

ACT = {"NONE": lambda x: x, "SILU": lambda x: x * special.expit(x), "RELU": lambda x: np.maximum(x, 0),
       "GELU": lambda x: 0.5 * x * (1 + special.erf(x / np.sqrt(2))), "RELU2": lambda x: np.maximum(x, 0) ** 2,
       "GELU_TANH": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))}
WEIGHTS = BLOCKS


# -- attention --------------------------------------------------------------------------------------------------------

def attention(q, k, v, heads, kv_heads, scale=0.0, causal=False, window=0, softcap=0.0, past=0) -> np.ndarray:
    """Textbook attention in float64."""
    t, n, dim, width = len(q), len(k), q.shape[1] // heads, v.shape[1] // kv_heads
    out = np.zeros((t, heads, width))
    for h in range(heads):
        group = h * kv_heads // heads
        columns = slice(group * width, (group + 1) * width)
        scores = q[:, h * dim:(h + 1) * dim] @ k[:, group * dim:(group + 1) * dim].T * (scale or 1 / math.sqrt(dim))
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        p, j = past + np.arange(t)[:, None], np.arange(n)[None, :]
        hidden = ((j > p) & causal) | ((p - j >= window) & (window > 0))
        for row in range(t):
            seen = ~hidden[row]
            if seen.any():
                out[row, h] = special.softmax(scores[row, seen]) @ v[seen, columns]
    return out.reshape(t, heads * width)


GEOMETRIES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 1, {}), (3, 7, {}), (2, 65, {"heads": 4, "kv_heads": 2}), (5, 130, {"heads": 2, "causal": True, "past": 125}),
    (7, 7, {"heads": 3, "kv_heads": 1, "causal": True}),
    (4, 200, {"heads": 2, "causal": True, "past": 196, "window": 70}),
    (3, 66, {"softcap": 2.0, "scale": 0.5}), (2, 9, {"causal": True, "past": 0, "window": 1}), (0, 3, {}), (2, 0, {}),
    (1, 129, {"heads": 2, "window": 3, "past": 300})]


def _attention_cases() -> Iterator[Case]:
    for i, (t, n, options) in enumerate(GEOMETRIES):
        heads, kv_heads = options.get("heads", 1), options.get("kv_heads", options.get("heads", 1))
        for dim in (1, 8, 33):
            q, k, v = (tensor(noise(rows, width * dim, seed=i + s)) for rows, width, s in
                       ((t, heads, 0), (n, kv_heads, 1), (n, kv_heads, 2)))
            named = {key: value for key, value in options.items() if key not in ("heads", "kv_heads")}
            want = attention(values(q), values(k), values(v), heads, kv_heads, **named)
            yield Case(f"T {t} N {n} dim {dim} {options}", {"q": q, "k": k, "v": v, **options},
                       close(want, F32, 40, np.maximum(np.abs(want), 1.0)), (t, heads * dim))
    for heads, kv_heads, dim, width in ((2, 1, 9, 5), (4, 2, 6, 11), (3, 1, 70, 65), (1, 1, 1, 1)):
        q, k, v = (tensor(noise(rows, n, seed=s)) for s, rows, n in
                   ((1, 3, heads * dim), (2, 67, kv_heads * dim), (3, 67, kv_heads * width)))
        operands = {"q": q, "k": k, "heads": heads, "kv_heads": kv_heads, "vdim": width}
        part = values(k).reshape(67, kv_heads, dim)[..., :width].reshape(67, -1)
        for label, given, used in (("apart", {"v": v}, values(v)), ("part of the keys", {}, part))[:1 + (width <= dim)]:
            want = attention(values(q), values(k), used, heads, kv_heads)
            yield Case(f"values of {width} beside keys of {dim}, {label}", {**operands, **given},
                       close(want, F32, 40, np.maximum(np.abs(want), 1.0)), (3, heads * width))
    for dtype in FLOATS:
        q, k, v = (tensor(noise(4, 8, seed=s), dtype) for s in (1, 2, 3))
        want = attention(values(q), values(k), values(v), 1, 1)
        yield Case(f"{dtype}", {"q": q, "k": k, "v": v}, close(want, F32, 40, 1.0))


@witness("FLASH_ATTN")
def flash_attn() -> Iterator[Case]:
    return _attention_cases()


def _only_first(check):
    return lambda got, state: (check(got), _assert(state is None))[0]


def _assert(holds: bool) -> None:
    assert holds


@witness("ATTN")
def attn() -> Iterator[Case]:
    for case in _attention_cases():
        yield Case(case.label, case.operands, _only_first(case.check), case.shape)
    for rows, more, window in ((0, 1, 0), (0, 67, 0), (3, 1, 0), (63, 2, 0), (64, 1, 0), (100, 130, 90)):
        yield _stream_case(rows, more, window)
    for kv_type in ("F16", "BF16", "F32", "Q8_0"):
        for rows, more in ((0, 3), (63, 2), (70, 1)):
            for width, shared in ((6, False), (35, False), (3, True)):
                yield _stream_case(rows, more, 0, kv_type, width, shared)


def _as_stored(x: np.ndarray, kv_type: str, heads: int) -> np.ndarray:
    """Rows as a stream of that type gives them back."""
    if kv_type != "Q8_0":
        return rounded(x.astype(np.float64), {"F16": F16, "BF16": BF16, "F32": F32}[kv_type])
    rows = x.reshape(len(x), heads, -1)
    out = np.zeros(rows.shape)
    for at in range(0, rows.shape[2], 32):
        part = rows[:, :, at:at + 32]
        top = np.abs(part).max(axis=2, keepdims=True)
        d = (top / np.float32(127)).astype(np.float16).astype(np.float64)
        out[:, :, at:at + 32] = d * np.rint(part * (np.float32(127) / top))
    return out.reshape(x.shape)


def _stream_case(rows: int, more: int, window: int, kv_type: str = "F16", width: int = 6, shared: bool = False) -> Case:
    heads, kv_heads, dim = 4, 2, 6
    k, v = (noise(rows + more, kv_heads * n, seed=s + rows) for s, n in ((1, dim), (2, width)))
    q = noise(more, heads * dim, seed=3 + rows)
    state: Any = NEW_STATE
    if rows:
        empty = KVStream(dtype=KV_DTYPES[kv_type]).with_geometry(kv_heads, dim, width, shared)
        state = empty.append(5, k[:rows], v[:rows])
    stored = [_as_stored(a, kv_type, kv_heads) for a in (k, v)]
    if shared:
        stored[1] = stored[0].reshape(-1, kv_heads, dim)[..., :width].reshape(-1, kv_heads * width)
    want = attention(q.astype(np.float64), *stored, heads, kv_heads, causal=True, window=window, past=rows)

    def check(got: Tensor, stream: KVStream) -> None:
        close(want, F32, 40, np.maximum(np.abs(want), 1.0))(got)
        assert stream.length(5) == rows + more and stream.length(0) == 0
        assert stream.dtype.name == kv_type
        for part, expected in zip(stream.rows(5), stored):
            np.testing.assert_array_equal(part, expected)
    return Case(f"stream of {rows} and {more} more, window {window}, {kv_type}, values of {width}, shared {shared}",
                {"q": tensor(q), "k": tensor(k[rows:]), "v": None if shared else tensor(v[rows:]), "state": state,
                 "heads": heads, "kv_heads": kv_heads, "layer": 5, "causal": True, "window": window, "kv_type": kv_type,
                 "vdim": width}, check, (more, heads * width))


@witness("ATTN_SPARSE")
def attn_sparse() -> Iterator[Case]:
    for i, (m, n, d, p, top) in enumerate([(1, 1, 1, 1, 0), (3, 7, 5, 4, 3), (2, 70, 8, 3, 65), (0, 3, 2, 2, 2),
                                           (5, 66, 9, 1, 0)]):
        q, k, v = (noise(*s, seed=i + 20) for s in ((m, d), (n, d), (n, p)))
        scores = q.astype(np.float64) @ k.T.astype(np.float64) / math.sqrt(d)
        want = np.zeros((m, p))
        for row in range(m):
            best = np.argsort(-scores[row], kind="stable")[:top or n]
            want[row] = special.softmax(scores[row, best]) @ v[best]
        yield Case(f"{m} {n} {d} {p} TOPK {top}", {"q": tensor(q), "k": tensor(k), "v": tensor(v), "topk": top},
                   close(want, F32, 40, np.maximum(np.abs(want), 1.0)), (m, p))


# -- streams ----------------------------------------------------------------------------------------------------------

def _streams() -> Iterator[tuple[KVStream, dict[int, np.ndarray]]]:
    for lengths in ({}, {0: 1}, {0: 7, 3: 7}, {0: 64, 1: 65}, {2: 200}):
        stream, rows = KVStream().with_geometry(1, 2), {}
        for layer, n in lengths.items():
            k = np.stack([np.arange(n) + 1, np.full(n, layer + 1)], 1).astype(np.float32)
            stream, rows[layer] = stream.append(layer, k, -k), k
        yield stream, rows


def _holds(want: dict[int, np.ndarray]):
    def check(stream: KVStream) -> None:
        for layer, k in want.items():
            assert stream.length(layer) == len(k)
            got_k, got_v = stream.rows(layer)
            np.testing.assert_array_equal(got_k, k)
            np.testing.assert_array_equal(got_v, -k)
    return check


@witness("KV_TRUNCATE")
def kv_truncate() -> Iterator[Case]:
    for stream, rows in _streams():
        for n in (0, 1, 5, 64, 1000):
            yield Case(f"{stream} to {n}", {"state": stream, "length": n}, _holds({k: v[:n] for k, v in rows.items()}))


@witness("KV_COMPRESS")
def kv_compress() -> Iterator[Case]:
    for stream, rows in _streams():
        for sink, window in ((1, 2), (4, 61), (0, 3), (2, 0), (500, 500)):
            want = {k: v if len(v) <= sink + window else np.array([*v[:sink], *v[len(v) - window:]])
                    for k, v in rows.items()}
            yield Case(f"{stream} to {sink}+{window}", {"state": stream, "sink": sink, "window": window}, _holds(want))


# -- norms ------------------------------------------------------------------------------------------------------------

def _normal(x: np.ndarray, axes: tuple[int, ...], eps: float, centre: bool) -> np.ndarray:
    mean = x.mean(axes, keepdims=True) if centre else 0.0
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + eps)


@witness("NORM")
def norm() -> Iterator[Case]:
    eps = float(np.float32(1e-5))
    for dtype in FLOATS:
        for mode in ("RMS", "LAYER"):
            for i, shape in enumerate([(1,), (7,), (3, 5), (2, 67), (2, 3, 130), (0, 4), (2, 576)]):
                x = tensor(noise(*shape, seed=i, scale=3.0) + 1, dtype)
                gamma, beta = (tensor(noise(shape[-1], seed=s)) for s in (11, 12))
                y = _normal(values(x), (-1,), eps, mode == "LAYER")
                scale = np.abs(y) + 1
                yield Case(f"{mode} {dtype} {shape}", {"x": x, "mode": mode}, close(y, dtype, 20, scale), shape)
                yield Case(f"{mode} {dtype} {shape} affine", {"x": x, "mode": mode, "gamma": gamma, "beta": beta},
                           close(y * values(gamma) + values(beta), dtype, 20,
                                 scale * (np.abs(values(gamma)) + 1) + 3), shape)
    for i, shape in enumerate([(2, 3), (1, 1, 5), (3, 2, 7), (2, 3, 4, 17)]):
        yield from _batch_norm(shape, i, eps)
    yield Case("EPS", {"x": tensor([[3.0, 4.0]]), "eps": 12.5}, close(np.array([[0.6, 0.8]]), F32, 4))


def _batch_norm(shape: tuple[int, ...], i: int, eps: float) -> Iterator[Case]:
    x, column = noise(*shape, seed=i), (-1, *[1] * (len(shape) - 2))
    mean, gamma = (noise(shape[1], seed=s) for s in (1, 2))
    var = np.abs(noise(shape[1], seed=3)) + np.float32(0.5)
    y = (x.astype(np.float64) - mean.reshape(column)) / np.sqrt(var.astype(np.float64).reshape(column) + eps)
    yield Case(f"BATCH {shape}", {"x": tensor(x), "mode": "BATCH", "mean": tensor(mean), "var": tensor(var)},
               close(y, F32, 20, np.abs(y) + 3), shape)
    own = _normal(x.astype(np.float64), (0, *range(2, len(shape))), eps, True) * gamma.reshape(column)
    yield Case(f"BATCH {shape} own statistics", {"x": tensor(x), "mode": "BATCH", "gamma": tensor(gamma)},
               close(own, F32, 100, np.abs(own) + 1), shape)


# -- products with weights --------------------------------------------------------------------------------------------

def _weights() -> Iterator[tuple[str, Tensor, np.ndarray, bool]]:
    """(label, weight, its values as [N, K], TRANSPOSE)."""
    for dtype in FLOATS:
        for n, k in ((1, 1), (7, 5), (3, 67), (70, 130), (5, 576)):
            w = noise(n, k, seed=31, scale=0.5)
            yield f"{dtype} {n} {k}", tensor(w, dtype), values(tensor(w, dtype)), True
            yield f"{dtype} {k} {n} as columns", tensor(w.T, dtype), values(tensor(w, dtype)), False
    for dtype in WEIGHTS:
        for n, m in ((1, 1), (7, 3), (67, 2)):
            w = blocks((n, m * dtype.block), dtype, n)
            yield f"{dtype} {w.shape}", w, decoded(w).astype(np.float64), True


def quantised(x: np.ndarray, block: int) -> np.ndarray:
    """Activations after int8 quantisation, by blocks, in plain Python numbers."""
    out = np.zeros(x.shape)
    for at in np.ndindex(*x.shape[:-1], x.shape[-1] // block):
        part = x[at[:-1]][at[-1] * block:(at[-1] + 1) * block]
        amax = np.float32(np.abs(part).max())
        if amax > 0:
            r = np.float32(127) / amax
            q = [round(float(np.float32(v) * r)) for v in part]
            out[at[:-1]][at[-1] * block:(at[-1] + 1) * block] = np.array(q) * float(amax / np.float32(127))
    return out


@witness("MATVEC")
def matvec() -> Iterator[Case]:
    for label, w, dense, transpose in _weights():
        n, k = dense.shape
        for rows in ((), (1,), (3,), (2, 2), (0,)):
            x = noise(*rows, k, seed=41)
            x64 = x.astype(np.float64)
            size = np.abs(x64) @ np.abs(dense).T
            operands = {"x": tensor(x), "w": w, "transpose": transpose}
            yield Case(f"{label} {rows}", operands, close(x64 @ dense.T, F32, 2 + k / 64, size), (*rows, n))
            if w.dtype.is_block:
                y = quantised(x64, w.dtype.block) @ dense.T
                yield Case(f"INT8 {label} {rows}", {**operands, "precision": "INT8"}, close(y, F32, 12, size),
                           (*rows, n))
    for dtype in (*FLOATS, Q8_0):
        for rows, g, n, k in (((), 1, 1, 32), ((3,), 3, 7, 64), ((1,), 5, 20, 32), ((0,), 2, 3, 32),
                              ((2, 2), 2, 33, 96)):
            w = blocks((g, n, k), dtype, n) if dtype is Q8_0 else tensor(noise(g, n, k, seed=31), dtype)
            dense, x = decoded(w) if dtype is Q8_0 else values(w), noise(*rows, g, k, seed=41)
            y = np.einsum("...gk,gnk->...gn", x.astype(np.float64), dense.astype(np.float64))
            size = np.einsum("...gk,gnk->...gn", np.abs(x), np.abs(dense))
            check = close(y, F32, 2 + k / 64, size)
            yield Case(f"{dtype} {rows} {g} matrices", {"x": tensor(x), "w": w, "transpose": True}, check,
                       (*rows, g, n))
            if dtype is not Q8_0:
                columns = tensor(values(w).transpose(0, 2, 1), dtype)
                yield Case(f"{dtype} {rows} {g} matrices of columns", {"x": tensor(x), "w": columns}, check,
                           (*rows, g, n))
    x, w, bias = noise(3, 9, seed=1), noise(4, 9, seed=2), noise(4, seed=3)
    y = x.astype(np.float64) @ w.T.astype(np.float64) + bias
    for act in (None, "NONE", "SILU", "RELU", "GELU"):
        yield Case(f"bias, {act}",
                   {"x": tensor(x), "w": tensor(w), "bias": tensor(bias), "transpose": True, "act": act},
                   close(ACT[act or "NONE"](y), F32, 8, np.abs(x) @ np.abs(w).T + np.abs(bias)))
    for precision, dtype in (("FP16", F16), ("BF16", FLOATS[2])):
        yield Case(precision, {"x": tensor(x), "w": tensor(w.T), "precision": precision},
                   close(x.astype(np.float64) @ w.T.astype(np.float64), dtype, 8, np.abs(x) @ np.abs(w).T))
    yield from _experts()


def _experts() -> Iterator[Case]:
    """Rows that are multiplied with chosen matrices: each product by itself, in float64."""
    for i, dtype in enumerate((None, *WEIGHTS)):
        block = dtype.block if dtype else 1
        count, n, k = 3, 16 if i % 2 else 5, 2 * block if dtype else 70
        w = blocks((count, n, k), dtype, i) if dtype else tensor(noise(count, n, k, seed=i))
        dense = (decoded(w) if dtype else w.data).astype(np.float64)
        for rows, chosen in (((), (2,)), ((3,), (2,)), ((2, 2), (2,)), ((0,), (4,)), ((3,), (1,))):
            ids = np.random.default_rng(i).integers(0, count, (*rows, *chosen))
            for shared in (True, False):
                x = noise(*rows, *(() if shared else chosen), k, seed=i + 1)
                each = np.broadcast_to(x[..., None, :], (*ids.shape, k)) if shared else x
                operands = {"x": tensor(x), "w": w, "experts": tensor(ids, I64), "transpose": True}
                label = f"experts {w.dtype} {rows} {chosen} {shared}"
                size = np.einsum("...k,...nk->...n", np.abs(each.astype(np.float64)), np.abs(dense[ids]))
                if shared or dtype is None:
                    y = np.einsum("...k,...nk->...n", each.astype(np.float64), dense[ids])
                    yield Case(label, operands, close(y, F32, 2 + k / 64, size), (*ids.shape, n))
                if dtype:
                    y = np.einsum("...k,...nk->...n", quantised(each.astype(np.float64), block), dense[ids])
                    yield Case(f"INT8 {label}", {**operands, "precision": "INT8"}, close(y, F32, 12, size),
                               (*ids.shape, n))
    x, w, bias, ids = noise(2, 9, seed=1), noise(3, 4, 9, seed=2), noise(3, 4, seed=3), np.array([[2, 0], [1, 1]])
    y = np.einsum("tk,tjnk->tjn", x.astype(np.float64), w[ids].astype(np.float64)) + bias[ids]
    yield Case("experts, bias", {"x": tensor(x), "w": tensor(w), "bias": tensor(bias), "experts": tensor(ids, I64),
                                 "transpose": True, "act": "SILU"},
               close(ACT["SILU"](y), F32, 8, np.abs(y) + 5))


@witness("FFN")
def ffn() -> Iterator[Case]:
    for i, (rows, d, h, o) in enumerate([((1,), 1, 1, 1), ((3,), 5, 7, 3), ((2,), 67, 130, 65), ((0,), 4, 6, 4),
                                         ((2, 2), 8, 9, 8)]):
        x = noise(*rows, d, seed=i)
        w1, w3 = (noise(h, d, seed=s, scale=d ** -0.5) for s in (5, 7))
        w2 = noise(o, h, seed=6, scale=h ** -0.5)
        b1, b2, b3 = noise(h, seed=8), noise(o, seed=9), noise(h, seed=10)
        for act in ("SILU", "GELU", "GELU_TANH", "RELU", "RELU2"):
            x64 = x.astype(np.float64)
            hidden = ACT[act](x64 @ w1.T)
            y = hidden @ w2.T
            size = np.abs(hidden) @ np.abs(w2).T + np.abs(y) + 1
            operands = {"x": tensor(x), "w1": tensor(w1), "w2": tensor(w2), "act": act, "transpose": True}
            yield Case(f"{act} {rows} {d} {h} {o}", operands, close(y, F32, 30, size), (*rows, o))
            gated = ACT[act](x64 @ w1.T + b1) * (x64 @ w3.T + b3)
            y = gated @ w2.T + b2
            size = np.abs(gated) @ np.abs(w2).T + np.abs(y) + 1
            yield Case(f"gated {act} {rows}",
                       {"x": tensor(x), "w1": tensor(w1.T), "w2": tensor(w2.T), "w3": tensor(w3.T),
                        "b1": tensor(b1), "b2": tensor(b2), "b3": tensor(b3), "act": act},
                       close(y, F32, 30, size), (*rows, o))
    yield from _block_ffn()
    yield from _mixed_ffn()


def _block_ffn() -> Iterator[Case]:
    w1, w2, w3 = blocks((96, 64), Q8_0, 1), blocks((5, 96), Q4_0, 2), blocks((96, 64), Q4_1, 3)
    x = noise(2, 64, seed=4)
    d1, d2, d3 = (decoded(w).astype(np.float64) for w in (w1, w2, w3))
    q = quantised(x.astype(np.float64), 32)
    hidden = ACT["SILU"](q @ d1.T) * (q @ d3.T)
    size = np.abs(hidden) @ np.abs(d2).T
    # the hidden row is quantised again; in this case no element is near a rounding limit
    yield Case("INT8 blocks", {"x": tensor(x), "w1": w1, "w2": w2, "w3": w3, "transpose": True, "precision": "INT8"},
               close(quantised(hidden, 32) @ d2.T, F32, 200, size))
    y = (ACT["SILU"](x @ d1.T) * (x @ d3.T)) @ d2.T
    yield Case("FP32 blocks", {"x": tensor(x), "w1": w1, "w2": w2, "w3": w3, "transpose": True},
               close(y, F32, 40, np.abs(ACT["SILU"](x @ d1.T) * (x @ d3.T)) @ np.abs(d2).T))


def _mixed_ffn() -> Iterator[Case]:
    """Gate, up and down of different types, with activation blocks of 32 and 256: as in the Q4_K_M mixes."""
    x = noise(2, 256, seed=4)
    for gate, up, down in ((Q5_0, Q4_K, Q6_K), (Q4_K, Q4_K, Q5_0), (Q4_K, Q6_K, Q8_0)):
        w1, w2, w3 = blocks((256, 256), gate, 1), blocks((5, 256), down, 2), blocks((256, 256), up, 3)
        d1, d2, d3 = (decoded(w).astype(np.float64) for w in (w1, w2, w3))
        q1, q3 = (quantised(x.astype(np.float64), w.dtype.block) for w in (w1, w3))
        hidden = ACT["SILU"](q1 @ d1.T) * (q3 @ d3.T)
        size = np.abs(hidden) @ np.abs(d2).T             # no hidden element is near a rounding limit in these cases
        yield Case(f"INT8 {gate} {up} {down}",
                   {"x": tensor(x), "w1": w1, "w2": w2, "w3": w3, "transpose": True, "precision": "INT8"},
                   close(quantised(hidden, w2.dtype.block) @ d2.T, F32, 200, size))


@witness("EMBED")
def embed() -> Iterator[Case]:
    for dtype in FLOATS:
        table = tensor(noise(67, 5, seed=1), dtype)
        for ids in ([], [66], [0, 3, 3], [[1, 2], [3, 4]], list(range(67))):
            i = np.array(ids, np.int64)
            yield Case(f"{dtype} {i.shape}", {"ids": tensor(i, I64 if i.ndim == 1 else I32), "table": table},
                       same(values(table)[i.ravel()]), (i.size, 5))
        yield Case(f"{dtype} a register", {"ids": 7, "table": table}, same(values(table)[[7]]), (1, 5))
    for dtype in WEIGHTS:
        table = blocks((9, 2 * dtype.block), dtype, 3)
        yield Case(f"{dtype}", {"ids": tensor([8, 0, 8], I32), "table": table},
                   same(decoded(table)[[8, 0, 8]].astype(np.float64)))


@witness("ROPE")
def rope() -> Iterator[Case]:
    for i, (shape, hdim, pos) in enumerate([((8,), 8, 3), ((1, 2), 2, 1), ((3, 12), 4, 0), ((2, 3, 64), 64, 1000),
                                            ((67, 18), 6, 5), ((0, 4), 4, 2), ((1, 130), 130, 99)]):
        for pairing in ("NEOX", "NORM"):
            for options in ({}, {"theta": 500000.0, "scale": 0.25}, {"factors": True}):
                x = noise(*shape, seed=i)
                named = dict(options)
                divisor = np.ones(hdim // 2)
                if named.pop("factors", False):
                    factors = np.abs(noise(hdim // 2, seed=5)) + np.float32(0.5)
                    named["factors"], divisor = tensor(factors), factors.astype(np.float64)
                want = _rotate(x.astype(np.float64), hdim, pos, pairing, options.get("theta", 10000.0),
                               options.get("scale", 1.0), divisor)
                # an angle of p radians carries p / 2^24 of rounding
                yield Case(f"{shape} {pairing} {options}",
                           {"x": tensor(x), "pos": pos, "hdim": hdim, "pairing": pairing, **named},
                           close(want, F32, 6 + 3.0 * (pos + 70), 1.0), shape)
    half = tensor(noise(2, 8, seed=8), F16)
    yield Case("F16", {"x": half, "pos": 2, "hdim": 4},
               close(_rotate(values(half), 4, 2, "NEOX", 10000.0, 1.0, np.ones(2)), F16, 10, 1.0))


def _rotate(x, hdim, pos, pairing, theta, scale, divisor) -> np.ndarray:
    """Pairs as complex numbers times e^(i angle)."""
    rows = x.reshape(-1, x.shape[-1]) if x.ndim == 1 else x
    v = rows.reshape(*rows.shape[:-1], rows.shape[-1] // hdim, hdim)
    freq = theta ** (-2.0 * np.arange(hdim // 2) / hdim) * scale / divisor
    turn = np.exp(1j * (pos + np.arange(rows.shape[-2]))[:, None] * freq)[:, None, :]
    out = np.empty_like(v)
    if pairing == "NEOX":
        z = (v[..., :hdim // 2] + 1j * v[..., hdim // 2:]) * turn
        out[..., :hdim // 2], out[..., hdim // 2:] = z.real, z.imag
    else:
        z = (v[..., 0::2] + 1j * v[..., 1::2]) * turn
        out[..., 0::2], out[..., 1::2] = z.real, z.imag
    return out.reshape(x.shape)


@witness("CONV")
def conv() -> Iterator[Case]:
    for i, (x_shape, w_shape, options) in enumerate([
            ((1, 1, 1), (1, 1, 1), {}), ((2, 3, 67), (4, 3, 5), {"pad": 2}), ((1, 4, 9), (2, 4, 3), {"stride": 2}),
            ((1, 2, 12), (2, 2, 3), {"dilation": 3}), ((2, 4, 7), (6, 2, 3), {"groups": 2, "pad": 1}),
            ((1, 2, 5, 7), (3, 2, 3, 3), {"pad": 1}), ((2, 3, 9, 8), (3, 1, 2, 3), {"groups": 3, "stride": 2}),
            ((5, 7), (3, 3), {}), ((1, 1, 9), (3,), {"pad": 1}), ((0, 2, 5), (2, 2, 3), {})]):
        x, w = noise(*x_shape, seed=i), noise(*w_shape, seed=i + 50)
        full = x.reshape((1, 1, *x.shape)) if x.ndim == 2 else x
        kernel = w.reshape((1, 1, *w.shape)) if w.ndim == full.ndim - 2 else w
        bias = noise(len(kernel), seed=60)
        y = _correlate(full.astype(np.float64), kernel.astype(np.float64), **options)
        size = _correlate(np.abs(full).astype(np.float64), np.abs(kernel).astype(np.float64), **options)
        column = bias.reshape(-1, *[1] * (y.ndim - 2)).astype(np.float64)
        n = kernel[0].size
        yield Case(f"{x_shape} {w_shape} {options}", {"x": tensor(x), "w": tensor(w), **options},
                   _only_first(close(y, F32, 1 + n, size)), y.shape)
        for act in ("SILU", "RELU", "GELU"):
            yield Case(f"{x_shape} {w_shape} {options} bias {act}",
                       {"x": tensor(x), "w": tensor(w), "bias": tensor(bias), "act": act, **options},
                       _only_first(close(ACT[act](y + column), F32, 8 + n, size + np.abs(column))), y.shape)
    yield from conv_with_a_state()


def _correlate(x, w, stride=1, pad=0, dilation=1, groups=1) -> np.ndarray:
    """Sums of SciPy's correlations of single channels, then every stride-th position."""
    spread = np.zeros((*w.shape[:2], *((k - 1) * dilation + 1 for k in w.shape[2:])))
    spread[(..., *[slice(None, None, dilation)] * (w.ndim - 2))] = w
    padded = np.pad(x, [(0, 0), (0, 0)] + [(pad, pad)] * (x.ndim - 2))
    sizes = [(a - b) // stride + 1 for a, b in zip(padded.shape[2:], spread.shape[2:])]
    out = np.zeros((len(x), len(w), *sizes))
    per = len(w) // groups
    for n, o in np.ndindex(len(x), len(w)):
        for c in range(w.shape[1]):
            channel = padded[n, o // per * w.shape[1] + c]
            full = signal.correlate(channel, spread[o, c], mode="valid", method="direct")
            out[n, o] += full[tuple([slice(None, None, stride)] * (w.ndim - 2))]
    return out
