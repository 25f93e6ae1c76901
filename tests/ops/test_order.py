"""The contract's order of operations, spelled out one number at a time and compared byte for byte.

What the eager namespace does with whole arrays is done here with scalar loops, f32 scalars and a rational fma, straight
from docs/dev/plan.md; and results must not depend on how many rows or tokens are computed at once.
"""
from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from m3jit.ir import eager_math
from m3jit.ir.eager_attention import default_scale
from m3jit.ir.rope_frequencies import rope_frequencies
from m3jit.isa.kv import KVStream
from m3jit.isa.types import BLOCKS, F16, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, Tensor
from tests.exact import exact_f32, fma
from tests.kernels import reference
from tests.ops.cases import XP, noise, tensor
from tests.ops.witness_layout import blocks

F = np.float32
ZERO = F(0)


def halving(lanes: list, combine) -> np.float32:
    n = len(lanes) // 2
    while n:
        lanes = [combine(lanes[i], lanes[i + n]) for i in range(n)]
        n //= 2
    return lanes[0]


def canonical(values: list, identity, combine) -> np.float32:
    lanes = [identity] * 64
    padded = list(values) + [identity] * (-len(values) % 64)
    for i, v in enumerate(padded):
        lanes[i % 64] = combine(lanes[i % 64], v)
    return halving(lanes, combine)


def larger(a, b):
    return a if b < a or b != b else b


def smaller(a, b):
    return a if a < b or b != b else b


def add(a, b):
    return F(a + b)


@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 129, 1000])
def test_reductions_fold_64_lanes_and_a_halving_tree(n):
    x = noise(n, seed=n, scale=3.0) * F(10) ** np.random.default_rng(n).integers(-3, 4, n).astype(F)
    t = tensor(x)
    with np.errstate(all="ignore"):
        assert XP.reduce(t, "SUM", 0).tobytes() == F(canonical(x, ZERO, add)).tobytes()
        assert XP.reduce(t, "PROD", 0).tobytes() == F(canonical(x, F(1), lambda a, b: F(a * b))).tobytes()
        if n:
            assert XP.reduce(t, "MAX", 0).tobytes() == F(canonical(x, F(np.nan), larger)).tobytes()
            assert XP.reduce(t, "MIN", 0).tobytes() == F(canonical(x, F(np.nan), smaller)).tobytes()


def test_a_sum_over_any_axis_has_the_bytes_of_the_lane_alone():
    x = noise(3, 130, 5, seed=1)
    for axis in range(3):
        whole = XP.reduce(tensor(x), "SUM", axis).data
        for i, j in np.ndindex(whole.shape):
            lane = np.moveaxis(x, axis, -1)[i, j]
            assert XP.reduce(tensor(lane), "SUM", 0).data == whole[i, j]


def test_signed_zeros_and_padding_are_as_defined():
    assert not np.signbit(XP.reduce(tensor([-0.0, -0.0]), "SUM", 0).data)          # from +0
    assert not np.signbit(XP.matmul(tensor([[-0.0]]), tensor([[1.0]])).data).any()
    assert np.signbit(XP.maximum(tensor([0.0]), tensor([-0.0])).data).all()        # equal values give b


def dot(x, w) -> np.float32:
    lanes = [ZERO] * 64
    for i in range(len(x) + -len(x) % 64):
        a, b = (x[i], w[i]) if i < len(x) else (ZERO, ZERO)
        lanes[i % 64] = fma(a, b, lanes[i % 64])
    return halving(lanes, add)


@pytest.mark.parametrize("k", [0, 1, 63, 65, 200])
def test_matmul_is_the_canonical_dot(k):
    x, w = noise(2, k, seed=k), noise(3, k, seed=k + 1)
    for got in (XP.matmul(tensor(x), tensor(w), True), XP.matmul(tensor(x), tensor(w.T), False)):
        assert got.tobytes() == np.array([[dot(r, c) for c in w] for r in x], F).reshape(2, 3).tobytes()


def test_matmul_with_block_weights_dequantises_first():
    for dtype in (Q8_0, Q4_K):
        w, x = blocks((5, 2 * dtype.block), dtype, 1), tensor(noise(3, 2 * dtype.block, seed=2))
        assert XP.matmul(x, w, True).tobytes() == XP.matmul(x, XP.dequantize(w), True).tobytes()


# -- integer dots -----------------------------------------------------------------------------------------------------

def activations(x: np.ndarray, block: int) -> tuple[list, list]:
    """(int8 values, scales) of one row."""
    q, scales = [], []
    for at in range(0, len(x), block):
        amax = F(np.abs(x[at:at + block]).max())
        r = F(127) / amax
        q += [round(float(F(v * r))) for v in x[at:at + block]]
        scales.append(F(amax / F(127)))
    return q, scales


def half(raw: np.ndarray, at: int) -> np.float32:
    return F(raw[at:at + 2].copy().view(np.float16)[0])


def qdot_32(name: str, raw: np.ndarray, q: list, dx: list) -> np.float32:
    acc = ZERO
    for b, block in enumerate(raw.reshape(len(dx), -1)):
        part = q[32 * b:32 * b + 32]
        start = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}[name]
        body = block[start:]
        if name == "Q8_0":
            w = [int(v) - 256 * (v > 127) for v in body]
        else:
            w = [int(v) & 15 for v in body] + [int(v) >> 4 for v in body]
            w = [v - 8 for v in w] if name == "Q4_0" else w
        isum, dw = F(sum(a * c for a, c in zip(part, w))), half(block, 0)
        if name == "Q4_1":
            acc = fma(dx[b], fma(dw, isum, F(half(block, 2) * F(sum(part)))), acc)
        else:
            acc = fma(F(dw * dx[b]), isum, acc)
    return acc


def k4_pairs(s: np.ndarray) -> list[tuple[int, int]]:
    """(scale, min) of the 8 sub-blocks of a Q4_K block, as ggml's get_scale_min_k4 describes them."""
    out = []
    for j in range(8):
        if j < 4:
            out.append((int(s[j]) & 63, int(s[j + 4]) & 63))
        else:
            out.append(((int(s[j + 4]) & 15) | (int(s[j - 4]) >> 6) << 4, (int(s[j + 4]) >> 4) | (int(s[j]) >> 6) << 4))
    return out


def qdot_q4_k(raw: np.ndarray, q: list, dx: list) -> np.float32:
    acc = ZERO
    for b, block in enumerate(raw.reshape(len(dx), 144)):
        isum = msum = 0
        for j, (scale, low) in enumerate(k4_pairs(block[4:16])):
            part = q[256 * b + 32 * j:256 * b + 32 * j + 32]
            nibbles = block[16 + 32 * (j // 2):48 + 32 * (j // 2)]
            w = [int(v) >> 4 if j & 1 else int(v) & 15 for v in nibbles]
            isum += scale * sum(a * c for a, c in zip(part, w))
            msum += low * sum(part)
        u = fma(half(block, 0), F(isum), -F(half(block, 2) * F(msum)))
        acc = fma(dx[b], u, acc)
    return acc


def qdot_q6_k(raw: np.ndarray, q: list, dx: list) -> np.float32:
    acc = ZERO
    for b, block in enumerate(raw.reshape(len(dx), 210)):
        isum = 0
        for i in range(256):
            n, l = i // 128, i % 32
            part = i % 128 // 32
            low = int(block[64 * n + l + 32 * (part & 1)])
            low = low >> 4 if part >= 2 else low & 15
            high = int(block[128 + 32 * n + l]) >> 2 * part & 3
            scale = int(block[192 + i // 16])
            isum += (scale - 256 * (scale > 127)) * q[256 * b + i] * ((low | high << 4) - 32)
        acc = fma(dx[b], F(half(block, 208) * F(isum)), acc)
    return acc


@pytest.mark.parametrize("dtype", [Q8_0, Q4_0, Q4_1, Q4_K, Q6_K], ids=str)
def test_integer_products_follow_the_formula_of_each_block_type(dtype):
    k = 3 * dtype.block
    w, x = blocks((5, k), dtype, 11), noise(2, k, seed=12)
    got = XP.qmatmul(tensor(x), w).data
    for r in range(2):
        q, dx = activations(x[r], dtype.block)
        for n in range(5):
            want = qdot_q4_k(w.data[n], q, dx) if dtype is Q4_K else qdot_q6_k(w.data[n], q, dx) if dtype is Q6_K else \
                qdot_32(dtype.name, w.data[n], q, dx)
            assert got[r, n].tobytes() == F(want).tobytes()


@pytest.mark.parametrize("dtype", BLOCKS, ids=str)
def test_integer_products_of_all_block_types(dtype):
    w, x = blocks((5, 3 * dtype.block), dtype, 13), noise(2, 3 * dtype.block, seed=14)
    assert XP.qmatmul(tensor(x), w).tobytes() == reference.qmatmul(x, w.data, dtype).tobytes()


def test_activation_quantisation_edges():
    x = np.zeros((5, 32), F)
    x[1, :3] = [1e-40, -1e-45, 0]                        # 127 / amax overflows
    x[2, :3] = [np.nan, 2.0, -1.0]                       # a NaN loses and becomes 0
    x[3, :4] = [127.0, 0.5, 1.5, -2.5]                   # halves go to even
    x[4, :2] = [np.inf, 1.0]
    q, d = XP.quantize_activation(tensor(x), 32)
    assert (q.data[:2] == 0).all() and (d.data[:2] == 0).all()
    assert q.data[2, :3].tolist() == [0, 127, -64] and d.data[2, 0] == F(2) / F(127)
    assert q.data[3, :4].tolist() == [127, 0, 2, -2]
    assert (q.data[4] == 0).all()                        # 127 / inf = 0; inf * 0 is NaN


@pytest.mark.parametrize("dtype", [Q8_0, Q4_1, Q4_K, Q6_K], ids=str)
def test_rows_do_not_influence_each_other(dtype):
    w, x = blocks((70, 2 * dtype.block), dtype, 3), noise(7, 2 * dtype.block, seed=4)
    for f in (XP.qmatmul, lambda a, b: XP.matmul(a, b, True)):
        whole = f(tensor(x), w).data
        for r in range(7):
            assert f(tensor(x[r:r + 1]), w).tobytes() == whole[r:r + 1].tobytes()


# -- attention --------------------------------------------------------------------------------------------------------

def attend_one(q, k, v, visible: list[int], scale, softcap) -> list:
    """One query and head, key by key."""
    tops, sums, mixes = [], [], []
    for block in range(0, max(visible, default=-1) + 1, 64):
        seen = [j for j in visible if block <= j < block + 64]
        if not seen:
            continue
        scores = {}
        for j in seen:
            s = ZERO
            for d in range(len(q)):
                s = fma(q[d], k[j][d], s)
            s = F(s * scale)
            if softcap:
                s = F(softcap * eager_math.tanh32(np.array([F(s / softcap)]))[0])
            scores[j] = s
        top = F(-np.inf)
        for j in seen:
            top = larger(top, scores[j])
        w = {j: eager_math.exp32(np.array([F(scores[j] - top)]))[0] for j in seen}
        sums.append(halving([w.get(block + lane, ZERO) for lane in range(64)], add))
        mix = [ZERO] * len(v[0])
        for j in seen:
            mix = [fma(w[j], v[j][d], m) for d, m in enumerate(mix)]
        mixes.append(mix)
        tops.append(top)
    if not tops:
        return [ZERO] * len(v[0])
    top = F(-np.inf)
    for m in tops:
        top = larger(top, m)
    total, out = ZERO, [ZERO] * len(mixes[0])
    for m, s, mix in zip(tops, sums, mixes):
        e = eager_math.exp32(np.array([F(m - top)]))[0]
        total = fma(s, e, total)
        out = [fma(x, e, o) for x, o in zip(mix, out)]
    return [F(o / total) for o in out]


@pytest.mark.parametrize("t, n, causal, window, softcap, past", [
    (2, 3, False, 0, 0.0, 0), (3, 130, True, 0, 0.0, 127), (2, 150, True, 70, 2.0, 148), (1, 65, True, 1, 0.0, 64),
    (2, 66, False, 3, 0.0, 200)])
def test_attention_key_by_key(t, n, causal, window, softcap, past):
    heads, kv_heads, dim = 2, 1, 3
    q, k, v = noise(t, heads * dim, seed=1), noise(n, dim, seed=2), noise(n, dim, seed=3)
    got = XP.attention(tensor(q), tensor(k), tensor(v), heads=heads, kv_heads=kv_heads, head_dim=dim, causal=causal,
                       window=window, softcap=softcap, past=past).data.reshape(t, heads, dim)
    for row in range(t):
        p = past + row
        visible = [j for j in range(n) if (not causal or j <= p) and (not window or p - j < window)]
        for h in range(heads):
            want = attend_one(q[row, h * dim:(h + 1) * dim], k, v, visible, default_scale(dim), F(softcap))
            assert got[row, h].tobytes() == np.array(want, F).tobytes()


def test_a_prompt_in_any_chunks_gives_the_same_bytes():
    heads, kv_heads, dim, n = 4, 2, 8, 150
    q, k, v = noise(n, heads * dim, seed=5), noise(n, kv_heads * dim, seed=6), noise(n, kv_heads * dim, seed=7)
    geometry = {"kv_heads": kv_heads, "head_dim": dim}

    def run(sizes: list[int]) -> bytes:
        kv, at, out = None, 0, []
        for size in sizes:
            rows = slice(at, at + size)
            kv = XP.kv_append(kv, 0, tensor(k[rows]), tensor(v[rows]), **geometry)
            out.append(XP.kv_attention(tensor(q[rows]), kv, 0, heads=heads, causal=True, **geometry).data)
            at += size
        assert at == n
        return np.concatenate(out).tobytes()
    whole = run([n])
    assert run([1] * n) == whole and run([63, 1, 1, 64, 21]) == whole and run([100, 50]) == whole
    stored = [tensor(a, F16) for a in (k, v)]
    dense = XP.attention(tensor(q), *stored, heads=heads, causal=True, **geometry)
    assert dense.tobytes() == whole, "a stream holds F16 rows, otherwise nothing differs from dense attention"


def test_an_f32_stream_attends_like_dense_keys():
    q, k, v = (noise(70, 6, seed=s) for s in (1, 2, 3))
    kv = KVStream(dtype=tensor(k).dtype).with_geometry(1, 6).append(0, k, v)
    got = XP.kv_attention(tensor(q), kv, 0, heads=1, kv_heads=1, head_dim=6, causal=True)
    assert got.tobytes() == XP.attention(tensor(q), tensor(k), tensor(v), heads=1, kv_heads=1, head_dim=6,
                                         causal=True).tobytes()


# -- tables and moves -------------------------------------------------------------------------------------------------

def test_convolution_folds_over_channels_then_taps():
    x, w, bias = noise(1, 2, 6, seed=1), noise(2, 2, 3, seed=2), noise(2, seed=3)
    got = XP.conv(tensor(x), tensor(w), tensor(bias), pad=1, stride=2).data
    for o, place in np.ndindex(2, 3):
        acc = bias[o]
        for c, tap in np.ndindex(2, 3):
            i = place * 2 + tap - 1
            acc = fma(x[0, c, i] if 0 <= i < 6 else ZERO, w[o, c, tap], acc)
        assert got[0, o, place].tobytes() == F(acc).tobytes()


@pytest.mark.parametrize("theta, dim", [(10000.0, 64), (500000.0, 128), (1e6, 96), (2.5, 2)])
def test_rope_frequencies_are_correctly_rounded(theta, dim):
    table = rope_frequencies(theta, dim)
    with localcontext() as context:
        context.prec = 80
        for i, got in enumerate(table):
            assert got == exact_f32(Fraction(Decimal(theta) ** (Decimal(-2 * i) / dim)))


def test_the_default_scale_is_correctly_rounded():
    with localcontext() as context:
        context.prec = 40
        for d in [*range(1, 300), 576, 1023, 65535]:
            assert default_scale(d) == exact_f32(Fraction(1 / Decimal(d).sqrt()))


def test_rope_rotates_a_row_alike_alone_and_among_others():
    x = noise(9, 32, seed=1)
    whole = XP.rope(tensor(x), 100, head_dim=16, theta=10000.0, pairing="NORM").data
    for t in range(9):
        one = XP.rope(tensor(x[t:t + 1]), 100 + t, head_dim=16, theta=10000.0, pairing="NORM")
        assert one.tobytes() == whole[t:t + 1].tobytes()


def test_a_stored_nan_is_canonical_and_a_moved_one_is_not():
    odd = Tensor.of(np.array([0x7F800001, 0xFFC12345], np.uint32).view(F))
    assert XP.add(odd, 0.0).data.view(np.uint32).tolist() == [0x7FC00000] * 2
    assert XP.reshape(odd, (2, 1)).data.view(np.uint32).ravel().tolist() == [0x7F800001, 0xFFC12345]
    assert XP.cast(odd, F16).data.view(np.uint16).tolist() == [0x7E00] * 2
    assert math.isnan(XP.element(odd, 0))
