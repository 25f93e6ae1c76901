"""Attention kernels against the plan's definition: both schedules, masks, pages, head sizes; bytes equal."""
import ml_dtypes
import numpy as np
import pytest

from m3jit.ir import scalar_math
from m3jit.kernels import attention as A
from tests.kernels import reference
from tests.kernels.executors import run
from tests.loop_eval import fma32

f32 = np.float32


def q8_0(x):
    """Rows [.., dim] as int8 with a scale per 32, in plain loops."""
    out = np.empty_like(x)
    for row, new in zip(x.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1])):
        for at in range(0, row.size, 32):
            part = row[at:at + 32]
            top = np.abs(part).max()
            d = np.float16(top / f32(127))
            q = [round(float(v * (f32(127) / top))) if top > 0 else 0 for v in part]
            new[at:at + 32] = f32(d) * np.array(q, f32)
    return out


STORE = {"F16": lambda x: x.astype(np.float16).astype(f32), "F32": lambda x: x, "Q8_0": q8_0,
         "BF16": lambda x: x.astype(ml_dtypes.bfloat16).astype(f32)}


def fold_scores(q, k):
    s = np.zeros(len(k), f32)
    for d in range(q.size):
        s = fma32(q[d], k[:, d], s)
    return s


def halving(w):
    while w.size > 1:
        w = w[:w.size // 2] + w[w.size // 2:]
    return w[0]


def attend(q, k, v, lo, hi, scale, cap):
    """One query row over keys lo .. hi, as the plan defines it."""
    parts = []
    for start in range(lo // 64 * 64, hi, 64):
        a, e = max(start, lo), min(start + 64, hi)
        s = (fold_scores(q, k[a:e]) * f32(scale)).astype(f32)
        if cap:
            s = f32(cap) * reference.apply(scalar_math.tanh, s / f32(cap))
        m = np.fmax.reduce(s)
        w = np.zeros(64, f32)
        w[a - start:e - start] = reference.apply(scalar_math.exp, s - m)
        mix = np.zeros(v.shape[1], f32)
        for j in range(a, e):
            mix = fma32(w[j - start], v[j], mix)
        parts.append((m, halving(w), mix))
    out, total = np.zeros(v.shape[1], f32), f32(0)
    if not parts:
        return out
    top = np.fmax.reduce([p[0] for p in parts])
    for m, l, mix in parts:
        e = reference.apply(scalar_math.exp, np.array([m - top], f32))[0]
        total, out = fma32(l, e, total), fma32(mix, e, out)
    return reference.canonical(out / total)


def expected(q, k, v, g, past, keys, window, scale, cap):
    tokens, d, p = len(q), g.head_dim, g.value_dim
    out = np.empty((tokens, g.heads * p), f32)
    for t in range(tokens):
        lo, hi = max(past + t - window + 1, 0), min(past + t + 1, keys) if g.causal else keys
        for h in range(g.heads):
            n = h // g.group_heads
            keys_of = k[:, n * d:(n + 1) * d]
            values_of = keys_of[:, :p] if g.shared else v[:, n * p:(n + 1) * p]
            out[t, h * p:(h + 1) * p] = attend(q[t, h * d:(h + 1) * d], keys_of, values_of, lo, max(hi, lo), scale, cap)
    return out


def filled_pages(rng, g, k, v):
    """Pages in a shuffled pool, filled by kv_append in two steps; the leaves of their table; its top, of byte
    offsets."""
    count = -(-len(k) // 64)
    used, room = g.page_bytes * (count + 1), -g.page_bytes * (count + 1) % 8
    pool = np.full(used + room + 8 * count, 0x7E, np.uint8)      # unused slots hold NaN: nothing may leak from them
    leaves, top = A.leaf_tables(rng.permutation(count + 1)[:count] * g.page_bytes, used + room)
    pool[used + room:] = leaves.view(np.uint8)
    pages = [pool] if g.dense else [pool, top]
    cut = len(k) // 3
    for lo, hi in ((0, cut), (cut, len(k))):
        rows = [k[lo:hi]] if g.shared else [k[lo:hi], v[lo:hi]]
        run(A.kv_append(g), [*rows, *pages, hi - lo, lo])
    return pages


def check(g, tokens, past, keys=None, window=A.NO_WINDOW, scale=0.3, cap=0.0, seed=0, edit=None):
    rng = np.random.default_rng(seed)
    keys = past + tokens if keys is None else keys
    q = rng.normal(0, 2, (tokens, g.heads * g.head_dim)).astype(f32)
    k, v = (rng.normal(0, 1, (keys, g.kv_heads * dim)).astype(f32) for dim in (g.head_dim, g.value_dim))
    if edit:
        edit(q, k, v)
    pages = filled_pages(rng, g, k, v)
    k, v = (STORE[g.dtype](x.reshape(-1, x.shape[1] // g.kv_heads)).reshape(x.shape) for x in (k, v))
    want = expected(q, k, v, g, past, keys, window, scale, cap)
    tail = [scale] + ([cap] if g.softcap else [])
    out = np.full((tokens, g.heads * g.value_dim), 7, f32)
    partial = np.full(max(A.partial_floats(tokens, keys, g.heads, g.value_dim), 1), np.nan, f32)
    run(A.attn_blocks(g), [q, *pages, partial, tokens, past, keys, window, *tail])
    run(A.attn_combine(g), [partial, out, tokens, past, keys, window])
    if tokens <= A.FEW_TOKENS:
        assert out.tobytes() == want.tobytes()
        few, A.FEW_TOKENS = A.FEW_TOKENS, 0              # the other schedule must give the same bytes
        try:
            A.attn_rows.cache_clear()
            out[:] = 7
            run(A.attn_rows(g), [q, *pages, out, tokens, past, keys, window, *tail])
        finally:
            A.FEW_TOKENS = few
            A.attn_rows.cache_clear()
    else:
        run(A.attn_rows(g), [q, *pages, out, tokens, past, keys, window, *tail])
    assert out.tobytes() == want.tobytes()


@pytest.mark.parametrize("heads, kv_heads, dim", ((6, 2, 64), (5, 1, 8), (2, 2, 24), (2, 1, 80), (3, 1, 1)))
@pytest.mark.parametrize("tokens, past", ((1, 0), (1, 63), (1, 130), (3, 64), (6, 60)))
def test_causal_stream(heads, kv_heads, dim, tokens, past):
    check(A.Geometry(heads, kv_heads, dim), tokens, past, seed=tokens + past)


@pytest.mark.parametrize("tokens, past, window", ((1, 150, 70), (5, 126, 3), (6, 60, 64), (2, 10, 1)))
def test_window(tokens, past, window):
    check(A.Geometry(3, 1, 8), tokens, past, window=window)


def test_softcap_free_and_unseen_keys():
    check(A.Geometry(2, 1, 8, softcap=True), 1, 70, cap=5.0)
    check(A.Geometry(2, 1, 8, softcap=True), 4, 70, cap=5.0)
    check(A.Geometry(2, 1, 8, causal=False), 3, 0, keys=100)
    check(A.Geometry(2, 1, 8, causal=False), 1, 0, keys=65)
    check(A.Geometry(2, 1, 8, causal=False), 2, 0, keys=0)
    check(A.Geometry(2, 1, 8), 0, 5)


@pytest.mark.parametrize("tokens", (1, 6))
def test_dense(tokens):
    check(A.Geometry(4, 2, 20, dtype="F32", dense=True), tokens, 70)


@pytest.mark.parametrize("tokens", (1, 3))
def test_not_finite_values(tokens):
    def edit(q, k, v):
        k[3], v[5, 0], v[66, 1], k[65, 0] = np.nan, np.inf, -np.inf, np.inf
        q[-1, 2] = np.inf
    check(A.Geometry(2, 1, 8), tokens, 70, edit=edit)


def test_minus_zero_survives():
    """A sum that is -0 must not be turned into +0 by keys that are not seen."""
    def edit(q, k, v):
        v[:] = -1e-40
        q[:] = 0
    check(A.Geometry(1, 1, 4, dtype="F32", dense=True), 3, 62, scale=1.0, edit=edit)


def test_group_of_many_rows():
    check(A.Geometry(6, 2, 4), 13, 50)


@pytest.mark.parametrize("window", (A.NO_WINDOW, 100))
def test_scores_not_kept_are_computed_again(monkeypatch, window):
    monkeypatch.setattr(A, "KEPT_BLOCKS", 1)
    A.attn_rows.cache_clear()
    check(A.Geometry(2, 1, 8), 5, 190, window=window)
    A.attn_rows.cache_clear()


@pytest.mark.parametrize("dtype", ("BF16", "Q8_0"))
@pytest.mark.parametrize("dim, value_dim", ((8, 8), (72, 40), (33, 66)))
@pytest.mark.parametrize("tokens, past", ((1, 66), (3, 62)))
def test_stored_types(dtype, dim, value_dim, tokens, past):
    check(A.Geometry(4, 2, dim, dtype, value_dim=value_dim), tokens, past)


@pytest.mark.parametrize("dtype", ("F16", "Q8_0"))
@pytest.mark.parametrize("heads, dim, value_dim", ((5, 72, 64), (2, 9, 9), (3, 40, 1), (4, 80, 66)))
@pytest.mark.parametrize("tokens, past", ((1, 130), (3, 62), (9, 0)))
def test_values_that_are_part_of_the_keys(dtype, heads, dim, value_dim, tokens, past):
    check(A.Geometry(heads, 1, dim, dtype, value_dim=value_dim, shared=True), tokens, past)


@pytest.mark.parametrize("tokens", (1, 3))
def test_shared_values_of_two_heads_dense_and_with_a_window(tokens):
    check(A.Geometry(4, 2, 12, "F32", dense=True, value_dim=7, shared=True), tokens, 70)
    check(A.Geometry(4, 2, 12, value_dim=7, shared=True), tokens, 150, window=70)


def test_impossible_geometry_is_refused():
    with pytest.raises(ValueError, match="heads a multiple of kv_heads"):
        A.Geometry(5, 2, 64)
    with pytest.raises(ValueError, match="F16, BF16, F32, Q8_0, not Q4_0"):
        A.Geometry(4, 2, 64, dtype="Q4_0")
    with pytest.raises(ValueError, match="at most as wide as the keys"):
        A.Geometry(4, 2, 64, value_dim=65, shared=True)
    with pytest.raises(ValueError, match="1 <= head_dim <= 1024"):
        A.Geometry(4, 2, 1025)
