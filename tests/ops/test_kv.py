"""Key/value streams as values: appending, sharing, claims of pages, shortening, what regions reserve."""
from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3jit.errors import InternalError, OperandError
from m3jit.isa.kv import PAGE, KVGeometry, KVStream
from m3jit.isa.types import BF16, F16, F32, I8, Q8_0

HEADS, DIM = 2, 3


def rows(n: int, seed: int) -> np.ndarray:
    """Rows that F16 stores exactly, all different."""
    return np.random.default_rng(seed).integers(-2000, 2000, (n, HEADS * DIM)).astype(np.float32)


def stream(*counts: int, layer: int = 0) -> tuple[KVStream, np.ndarray, np.ndarray]:
    out, k, v = KVStream().with_geometry(HEADS, DIM), rows(0, 0), rows(0, 0)
    for i, n in enumerate(counts):
        a, b = rows(n, 2 * i), rows(n, 2 * i + 1)
        out, k, v = out.append(layer, a, b), np.concatenate([k, a]), np.concatenate([v, b])
    return out, k, v


def holds(s: KVStream, k: np.ndarray, v: np.ndarray, layer: int = 0) -> None:
    assert s.length(layer) == len(k)
    for got, want in zip(s.rows(layer), (k, v)):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("counts", [(), (0,), (1,), (63, 1), (64,), (64, 1), (65,), (1,) * 130, (200, 3, 64)])
def test_rows_come_back_in_order(counts):
    holds(*stream(*counts))


def test_pages_have_the_documented_layout():
    s, k, v = stream(70)
    page = s.pages(0)[1].data.reshape(HEADS, 2 * PAGE * DIM)
    assert page.dtype == np.float16 and s.page_bytes == page.nbytes == HEADS * 2 * PAGE * DIM * 2
    for p, h, d in np.ndindex(6, HEADS, DIM):
        assert page[h, d * PAGE + p] == k[64 + p, h * DIM + d]
        assert page[h, PAGE * DIM + p * DIM + d] == v[64 + p, h * DIM + d]
    assert (page[:, 6:PAGE] == 0).all(), "new pages are filled with zeros"
    assert s.page_table(0).tolist() == [q.data.ctypes.data for q in s.pages(0)]


def test_pages_of_int8_rows_have_the_documented_layout():
    g, x = KVGeometry(2, 40, 33), np.random.default_rng(3)
    k, v = x.normal(size=(66, 80)).astype(np.float32), x.normal(size=(66, 66)).astype(np.float32)
    s = KVStream(dtype=Q8_0).with_geometry(2, 40, 33).append(0, k, v)
    raw = s.pages(0)[1].data.view(np.uint8)
    per_head = 64 * 40 + 2 * 64 * 2 + 64 * 33 + 2 * 64 * 2
    assert s.geometry == g and raw.size == s.page_bytes == 2 * per_head
    got_k, got_v = s.rows(0)
    for h, p in np.ndindex(2, 2):
        part = raw[h * per_head:]
        numbers, d = part[:2560].view(np.int8).reshape(40, 64), part[2560:2816].view(np.float16).reshape(2, 64)
        want = numbers[:, p] * np.repeat(d[:, p].astype(np.float32), 32)[:40]
        np.testing.assert_array_equal(got_k[64 + p, 40 * h:40 * h + 40], want)
        part = part[2816:]
        numbers, d = part[:2112].view(np.int8).reshape(64, 33), part[2112:2368].view(np.float16).reshape(64, 2)
        want = numbers[p] * np.repeat(d[p].astype(np.float32), 32)[:33]
        np.testing.assert_array_equal(got_v[64 + p, 33 * h:33 * h + 33], want)
    assert np.abs(got_k - k).max() < np.abs(k).max() / 250 and np.abs(got_v - v).max() < np.abs(v).max() / 250


@pytest.mark.parametrize("dtype", [F16, BF16, F32, Q8_0])
@pytest.mark.parametrize("shared", [False, True])
def test_kept_rows_keep_their_bytes(dtype, shared):
    """KV_COMPRESS stores rows again that were rounded before."""
    x = np.random.default_rng(5).normal(size=(100, 36)).astype(np.float32) * np.float32(3e-3)
    x[7, 2], x[9, 3], x[97] = np.nan, np.inf, 0
    s = KVStream(dtype=dtype).with_geometry(1, 36, 34, shared).append(0, x, x[:, :34])
    before, after = s.rows(0), s.compress(20, 30).rows(0)
    for a, b in zip(before, after):
        assert np.concatenate([a[:20], a[70:]]).tobytes() == b.tobytes()
    assert np.isnan(before[0][7, 2]) and (dtype is not Q8_0 or np.isnan(before[0][7, :32]).all())
    if shared:
        assert before[1].tobytes() == np.ascontiguousarray(before[0][:, :34]).tobytes()
        assert s.page_bytes == KVGeometry(1, 36, 0, True).page_bytes(dtype)


def test_a_stream_of_another_shape_is_refused():
    s = KVStream().with_geometry(1, 8, 6, shared=True)
    with pytest.raises(OperandError, match=r"has 1 heads of 8 with values of 6 \(part of the keys\); an append of 1 "
                                           "heads of 8 with values of 6 does not fit"):
        s.with_geometry(1, 8, 6)
    with pytest.raises(OperandError, match="at most their 8 features, not 9"):
        KVStream().with_geometry(1, 8, 9, shared=True)


def test_values_are_immutable_and_layers_apart():
    a, k, v = stream(5)
    b = a.append(7, rows(2, 50), rows(2, 51))
    assert a.length(7) == 0 and b.length(0) == 5 and b.length(7) == 2
    holds(a, k, v)
    holds(b, k, v)


def test_rows_are_rounded_once_to_the_stream_dtype():
    x = np.full((1, 6), 1 + 2.0 ** -11 + 2.0 ** -20, np.float32)
    assert KVStream().with_geometry(HEADS, DIM).append(0, x, x).rows(0)[0][0, 0] == np.float16(x[0, 0])
    assert KVStream(dtype=F32).with_geometry(HEADS, DIM).append(0, x, x).rows(0)[0][0, 0] == x[0, 0]
    with pytest.raises(OperandError, match="stores F16, BF16, F32, Q8_0, not I8"):
        KVStream(dtype=I8)


def test_the_first_append_writes_in_place_and_the_second_copies_one_page():
    base, k, v = stream(130)
    a = base.append(0, rows(1, 60), rows(1, 61))
    b = base.append(0, rows(1, 62), rows(1, 63))
    assert a.pages(0)[2] is base.pages(0)[2], "the first claimant writes in place"
    assert b.pages(0)[2] is not base.pages(0)[2] and list(b.pages(0))[:2] == list(base.pages(0))[:2]
    holds(base, k, v)
    holds(a, np.concatenate([k, rows(1, 60)]), np.concatenate([v, rows(1, 61)]))
    holds(b, np.concatenate([k, rows(1, 62)]), np.concatenate([v, rows(1, 63)]))


def test_a_truncated_stream_never_overwrites_what_others_hold():
    base, k, v = stream(100)
    short = base.truncate(70)
    longer = short.append(0, rows(40, 70), rows(40, 71))
    holds(base, k, v)
    holds(short, k[:70], v[:70])
    holds(longer, np.concatenate([k[:70], rows(40, 70)]), np.concatenate([v[:70], rows(40, 71)]))
    assert len(base.truncate(64).pages(0)) == 1 and len(base.truncate(0).pages(0)) == 0
    holds(base.truncate(1000), k, v)


def test_a_fork_per_token_costs_no_copy():
    """Forking before every token shares all pages: 128 appends allocate two pages."""
    s, kept = KVStream().with_geometry(HEADS, DIM), []
    for i in range(128):
        kept.append(s)
        s = s.append(0, rows(1, i), rows(1, i))
    pages = {id(p) for value in kept for p in value.pages(0)}
    assert len(pages) == 2


def test_snapshots_are_constant_time():
    s, _, _ = stream(6400)
    before = time.process_time()                       # the machine may be busy with something else
    for _ in range(1000):
        s.truncate(6400)
    assert time.process_time() - before < 1.0 and sys.getsizeof(s) < 500


def test_compress_keeps_sinks_and_window():
    s, k, v = stream(150)
    holds(s.compress(4, 60), np.concatenate([k[:4], k[90:]]), np.concatenate([v[:4], v[90:]]))
    holds(s, k, v)
    assert s.compress(100, 50) is s
    for sink, window in ((0, 0), (-1, 3)):
        with pytest.raises(OperandError, match="not both 0"):
            s.compress(sink, window)


def test_reserve_and_commit_are_an_append():
    s, k, v = stream(62)
    r = s.reserve(0, 5)
    assert r.length(0) == 62 and len(r.pages(0)) == 2 and s.length(0) == 62
    again = s.append(0, rows(1, 80), rows(1, 80))
    assert again.pages(0)[0] is not s.pages(0)[0], "reserved positions are claimed"
    new_k, new_v = rows(5, 81), rows(5, 82)
    for i in range(5):
        page = r.pages(0)[(62 + i) // PAGE].data.reshape(HEADS, 2, PAGE * DIM)
        for h, d in np.ndindex(HEADS, DIM):
            page[h, 0, d * PAGE + (62 + i) % PAGE] = new_k[i, h * DIM + d]
            page[h, 1, (62 + i) % PAGE * DIM + d] = new_v[i, h * DIM + d]
    holds(r.with_lengths({0: 67}), np.concatenate([k, new_k]), np.concatenate([v, new_v]))
    holds(again, np.concatenate([k, rows(1, 80)]), np.concatenate([v, rows(1, 80)]))
    holds(s, k, v)
    with pytest.raises(OperandError, match="has pages for 128 rows, not 129"):
        r.with_lengths({0: 129})
    with pytest.raises(InternalError, match="rows up to 68 of layer 0 of the KV stream were not reserved"):
        r.with_lengths({0: 68})


def test_an_abandoned_reservation_changes_nothing():
    s, k, v = stream(10)
    r = s.reserve(0, 100)
    for page in r.pages(0):
        page.data.reshape(HEADS, 2, PAGE * DIM)[:, 1, 10 * DIM:] = 9        # values of positions from 10 on
    holds(s, k, v)
    holds(s.append(0, rows(1, 5), rows(1, 6)), np.concatenate([k, rows(1, 5)]), np.concatenate([v, rows(1, 6)]))


def test_another_geometry_is_refused():
    s, _, _ = stream(1)
    with pytest.raises(OperandError, match="has 2 heads of 3; an append of 1 heads of 3 does not fit"):
        s.with_geometry(1, 3)
    with pytest.raises(OperandError, match="at least one head"):
        KVStream().with_geometry(0, 3)
    with pytest.raises(OperandError, match="without geometry"):
        KVStream().reserve(0, 1)


def test_claims_are_safe_between_threads():
    """Many threads append to the same value: one writes in place, the others copy; nobody's rows are damaged."""
    base, k, v = stream(130)
    results: list[KVStream] = [base] * 8
    start = threading.Barrier(8)

    def work(i: int) -> None:
        start.wait()
        s = base
        for step in range(20):
            s = s.append(0, rows(1, 1000 * i + step), rows(1, 1000 * i + step))
        results[i] = s
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(180)
    for i, s in enumerate(results):
        mine = np.concatenate([rows(1, 1000 * i + step) for step in range(20)])
        holds(s, np.concatenate([k, mine]), np.concatenate([v, mine]))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["append", "truncate", "compress", "abandon"]), st.integers(0, 90),
                          st.integers(0, 1000)), max_size=12))
def test_any_history_of_values_equals_plain_lists(steps):
    """Each step works on any value made so far; every value must still hold its own rows at the end."""
    made = [(KVStream().with_geometry(HEADS, DIM), rows(0, 0))]
    for i, (what, n, which) in enumerate(steps):
        s, k = made[which % len(made)]
        if what == "append":
            new = rows(n, i)
            made.append((s.append(0, new, -new), np.concatenate([k, new])))
        elif what == "truncate":
            made.append((s.truncate(n), k[:n]))
        elif what == "compress" and n:
            keep = k if len(k) <= n + 3 else np.concatenate([k[:3], k[len(k) - n:]])
            made.append((s.compress(3, n), keep))
        else:
            made.append((s.reserve(0, n), k))
    for s, k in made:
        holds(s, k, -k)
