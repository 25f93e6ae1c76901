"""Pages of key/value streams: tables of two levels, and claims against a model that looks at every living value."""
from __future__ import annotations

import gc
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3jit.isa import kv_pages, spare
from m3jit.isa.kv import KVStream, Layer
from m3jit.isa.kv_layout import FAN, PAGE
from m3jit.isa.kv_pages import NO_PAGES, Mark, Page, PageTable

LAYERS = (0, 1, 2)
DIM = 2


def page(mark: Mark | None = None) -> Page:
    return Page.zeros(64, np.dtype(np.float16), mark or Mark())


def listed(table: PageTable) -> list[int]:
    """The addresses that a kernel finds."""
    top = np.frombuffer(table.top, np.int64) if len(table.leaves) else np.zeros(0, np.int64)
    leaves = {leaf.address: leaf.table for leaf in table.leaves}
    return [leaves[top[i // FAN]][i % FAN] for i in range(len(table))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * FAN), st.integers(0, FAN + 3)), max_size=8))
def test_tables_are_lists(steps):
    """Appending, replacing the last page, cutting; older tables stay as they were."""
    made: list[tuple[PageTable, list[Page]]] = [(NO_PAGES, [])]
    for which, keep, more in steps:
        table, pages = made[-1 - which % len(made)]
        keep = min(keep, len(pages))
        new = [page() for _ in range(more)]
        made.append((table.spliced(keep, new), pages[:keep] + new))
    for table, pages in made:
        assert list(table) == pages and len(table) == len(pages)
        assert [table[i] for i in range(len(pages))] == pages
        assert listed(table) == [p.address for p in pages] == table.addresses().tolist()
        assert table.address == table.top.buffer_info()[0]
        assert all(len(leaf.pages) == FAN for leaf in table.leaves[:-1])
    with pytest.raises(IndexError):
        made[-1][0][len(made[-1][1])]


def test_a_long_table_shares_its_leaves():
    pages = [page()] * (5 * FAN)
    table = NO_PAGES.spliced(0, pages)
    longer = table.spliced(len(pages), [page()])
    assert longer.leaves[:5] == table.leaves and len(longer.leaves) == 6
    assert isinstance(longer.top, array) and len(longer.top) == 6


def test_marks_fall_when_claims_die():
    mark = Mark()
    a = mark.take(0, 10)
    b = mark.take(10, 30)
    assert mark.take(10, 12) is None and mark.position() == 30
    low = mark.hold(5)
    assert mark.hold(5) is low and mark.hold(10) is a and mark.hold(30) is b
    del a
    assert mark.position() == 30, "the furthest living claim counts"
    del b
    assert mark.position() == 5
    c = mark.take(5, 6)
    assert c is not None and c.stop == 6


def test_marks_forget_dead_claims():
    mark = Mark()
    keep = [mark.take(0, 1)]
    for _ in range(1000):
        last = mark.take(mark.position(), 2)
        del last
    kept = [mark.hold(1 + i) for i in range(60)]
    for _ in range(100):
        claim = mark.take(mark.position(), 63)
        del claim
    for _ in range(1000):
        claim = mark.hold(40)
        del kept[39:40], claim                          # dead ones in the middle
    assert len(mark.claims) <= 2 * 61 and keep and kept


def test_holding_leaves_no_dead_claims_on_its_way():
    """An instruction that is broken off again and again must not take longer each time."""
    mark = Mark()
    low = mark.take(0, 1)
    for stop in (30, 20, 10, 2) * 3:
        claim = mark.hold(stop)
        del claim
    assert mark.hold(1) is low and mark.claims == [(1, mark.claims[0][1])] and mark.position() == 1


def test_a_page_that_leaves_takes_its_claims_along():
    mark = Mark(2)
    a, b = page(mark), page(mark)
    held = mark.take(0, 7)
    (claim,) = kv_pages.take_all([a], 7, 9)
    assert claim is not None and a.mark is not b.mark is mark and mark.broken
    assert (a.claimed, b.claimed) == (9, 7) and held
    joined = kv_pages.common_mark([a, b])
    assert a.mark is b.mark is joined and a.claimed == 9, "as one, the furthest claim counts"
    assert kv_pages.common_mark([a, b]) is joined
    del claim
    assert a.claimed == 7
    assert len({c.stop for c in kv_pages.take_all([a, b], 7, 8)}) == 1 and joined.members == 2


def test_page_memory_is_used_again():
    first = Page.zeros(4096 + 64, np.dtype(np.int8), Mark())
    address, _ = first.address, first.data.fill(7)
    assert first.address % spare.ALIGN == 0
    copy = first.copied(Mark())
    assert (copy.data == 7).all() and copy.address != address
    del first
    again = Page.zeros(4096 + 64, np.dtype(np.int8), Mark())
    assert again.address == address and not again.data.any(), "zeros, whatever lay there"


def test_memory_that_is_kept_has_a_limit(monkeypatch):
    for name, value in (("LIMIT", 2 * 64 * 1013 + 100), ("_kept", 0), ("_free", {}), ("_taken", {})):
        monkeypatch.setattr(spare, name, value)
    blocks = [spare.take(64 * 1013) for _ in range(3)]
    for block in blocks:
        spare.give(block)
    assert spare.free_bytes() == 2 * 64 * 1013
    with pytest.raises(MemoryError):
        spare.take(2 ** 63)


def test_memory_of_former_sizes_makes_room(monkeypatch):
    for name, value in (("LIMIT", 64 * 100), ("_kept", 0), ("_free", {}), ("_taken", {})):
        monkeypatch.setattr(spare, name, value)
    former = [spare.take(640) for _ in range(10)]
    other = spare.take(1280)
    for block in former:
        spare.give(block)
    assert spare.free_bytes() == spare.LIMIT
    spare.give(spare.take(64))                         # newer: one of the others goes
    assert {size: len(blocks) for size, blocks in spare._free.items()} == {640: 9, 64: 1}
    spare.give(other)                                  # newer than the 640s as well
    assert {size: len(blocks) for size, blocks in spare._free.items()} == {640: 7, 64: 1, 1280: 1}
    spare.give(spare.take(64 * 101))                   # never fits, and takes no other's place
    assert {size: len(blocks) for size, blocks in spare._free.items()} == {640: 7, 64: 1, 1280: 1}
    more = [spare.take(1280) for _ in range(5)]
    for block in (*more, *former):                     # the 640s are the oldest: they do not come back
        spare.give(block)
    assert {size: len(blocks) for size, blocks in spare._free.items()} == {640: 0, 64: 0, 1280: 5}


# -- values against a model -------------------------------------------------------------------------------------------

def rows(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-600, 600, (n, DIM)).astype(np.float32)


def empty() -> KVStream:
    return KVStream().with_geometry(1, DIM)


def append(s: KVStream, new: np.ndarray, layers: tuple[int, ...] = LAYERS) -> KVStream:
    """As a compiled region does it: all layers together."""
    reserved = s.reserve_all(layers, [len(new)] * len(layers))
    for layer in layers:
        fill(reserved, layer, s.length(layer), new * (layer + 1))
    return reserved.with_all_lengths(layers, [s.length(layer) + len(new) for layer in layers])


def fill(reserved: KVStream, layer: int, start: int, new: np.ndarray) -> None:
    for i, row in enumerate(new):
        data, slot = reserved.pages(layer)[(start + i) // PAGE].data, (start + i) % PAGE
        data[slot:DIM * PAGE:PAGE] = row
        data[DIM * PAGE + slot * DIM:][:DIM] = -row


def holds(s: KVStream, model: dict[int, np.ndarray]) -> None:
    for layer in LAYERS:
        k, v = s.rows(layer)
        want = model.get(layer, rows(0, 0)) * (layer + 1)
        assert s.length(layer) == len(want)
        np.testing.assert_array_equal(k, want)
        np.testing.assert_array_equal(v, -want)


def audit(values: list[KVStream]) -> None:
    """No claim is missing: every page says that the rows some living value has in it are taken."""
    reach: dict[Page, int] = {}
    for s in values:
        for layer in s.layers.values():
            for i, p in enumerate(layer.pages):
                reach[p] = max(reach.get(p, 0), min(PAGE, layer.length - i * PAGE))
            held, chain = layer.held, []
            while held:
                held, chain = held[1], [held[0], *chain]
            assert [c.stop for c in chain] == [PAGE] * (len(layer.pages) - 1)
    for p, n in reach.items():
        assert p.claimed >= n


OPERATIONS = st.lists(st.tuples(st.sampled_from(["all", "all", "one", "two", "truncate", "compress", "abandon", "drop",
                                                 "partly"]),
                                st.integers(0, 70), st.integers(0, 1000)), max_size=25)


@settings(max_examples=250, deadline=None)
@given(OPERATIONS)
def test_values_with_siblings_equal_plain_lists(steps):
    """Appending to all layers at once, to some, truncating, giving reservations up, and dropping values, so that claims
    fall: every value that is alive holds its own rows."""
    made: list[tuple[KVStream, dict[int, np.ndarray]]] = [(empty(), {})]
    for i, (what, n, which) in enumerate(steps):
        s, model = made[which % len(made)]
        at = {layer: model.get(layer, rows(0, 0)) for layer in LAYERS}
        if what in ("all", "one", "two"):
            layers = {"all": LAYERS, "one": (1,), "two": (0, 2)}[what]
            n, new = (1 + n % 3 if which % 2 else n), rows(70, i)
            made.append((append(s, new[:n], layers),
                         {k: np.concatenate([a, new[:n]]) if k in layers else a for k, a in at.items()}))
        elif what == "truncate":
            made.append((s.truncate(n), {k: a[:n] for k, a in at.items()}))
        elif what == "compress" and n:
            made.append((s.compress(1, n), {k: a if len(a) <= n + 1 else np.concatenate([a[:1], a[len(a) - n:]])
                                            for k, a in at.items()}))
        elif what == "abandon":
            made.append((s.reserve_all(LAYERS, [n] * 3), at))
        elif what == "partly":                           # some layers leave with what was reserved, others with less
            reserved, new = s.reserve_all(LAYERS, [n] * 3), rows(n, i)
            for layer in LAYERS:
                fill(reserved, layer, len(at[layer]), new * (layer + 1))
            taken = [n, n // 2, 0]
            made.append((reserved.with_all_lengths(LAYERS, [len(at[k]) + t for k, t in zip(LAYERS, taken)]),
                         {k: np.concatenate([at[k], new[:t]]) for k, t in zip(LAYERS, taken)}))
        elif what == "drop" and len(made) > 1:
            del made[which % len(made)]
        del s
    audit([s for s, _ in made])
    for s, model in made:
        holds(s, model)


def taken(s: KVStream) -> list[int]:
    """Claimed positions of the last page of every layer."""
    return [s.pages(k)[-1].claimed if len(s.pages(k)) else 0 for k in LAYERS]


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.integers(0, 12))
def test_an_append_without_memory_changes_nothing(steps, fails):
    """The memory ends at every allocation of an append in turn: all values keep their rows, and the append that is
    tried again writes where it would have written."""
    made: list[tuple[KVStream, np.ndarray]] = [(empty(), rows(0, 0))]
    for i, (_, n, which) in enumerate(steps):
        s, model = made[which % len(made)]
        before, new = taken(s), rows(n, i)
        real, left, done = spare.take, iter(range(fails)), None

        def take(nbytes):
            if next(left, None) is None:
                raise MemoryError("no room")
            return real(nbytes)
        spare.take = take
        try:
            done = append(s, new)
        except MemoryError:
            pass
        finally:
            spare.take = real
        if done is None:
            assert taken(s) == before, "no claim is left"
            done = append(s, new)
        made.append((done, np.concatenate([model, new])))
    audit([s for s, _ in made])
    for s, model in made:
        holds(s, {layer: model for layer in LAYERS})


@pytest.mark.parametrize("length", [100, 60])
@pytest.mark.parametrize("further", [3, 60])
def test_a_rollback_writes_in_place(length, further):
    """Behind a snapshot that is the only one left the rows of a dropped successor are written over, without a copy."""
    snapshot = append(empty(), rows(length, 1))
    later = snapshot
    for i in range(further):
        later = append(later, rows(1, 50 + i))
    last = snapshot.pages(1)[-1]
    beside = append(snapshot, rows(1, 3))
    assert beside.pages(1)[-1] is not last, "the rows behind it belong to a living value"
    del later
    gc.collect()
    again = append(snapshot, rows(1, 4))
    assert again.pages(1)[-1] is last, "and now to nobody"
    holds(beside, {k: np.concatenate([rows(length, 1), rows(1, 3)]) for k in LAYERS})
    holds(again, {k: np.concatenate([rows(length, 1), rows(1, 4)]) for k in LAYERS})


def test_truncation_and_rollback_by_one_layer_at_a_time():
    base = empty().append(0, rows(100, 1), -rows(100, 1))
    short = base.truncate(70)
    copied = short.append(0, rows(1, 2), -rows(1, 2))
    assert copied.pages(0)[1] is not base.pages(0)[1]
    place = base.pages(0)[1]
    del base, copied
    assert place.claimed == 70 - PAGE
    assert short.append(0, rows(1, 2), -rows(1, 2)).pages(0)[1] is place


@pytest.mark.parametrize("shared", [1, 2])
def test_layers_that_have_one_page_do_not_write_to_it_both(shared):
    """As when equal pages are stored once."""
    s = append(empty(), rows(PAGE, 1))
    first, mark = s.pages(0)[0], Mark(shared)
    first.mark = mark
    claim = mark.take(0, PAGE)
    whole = KVStream(s.geometry, s.dtype, {k: Layer.of([first], PAGE, [claim]) for k in LAYERS})
    del s, claim
    short = whole.truncate(30)
    del whole
    for layers in (LAYERS, (0, 1)):
        new = rows(3, 2)
        longer = append(short, new, layers)
        longer = append(longer, new, layers)
        for k in layers:
            np.testing.assert_array_equal(longer.rows(k)[0], np.concatenate([rows(PAGE, 1)[:30]] + 2 * [new * (k + 1)]))
        del longer


def test_a_reservation_stays_when_its_value_is_reserved_again():
    s = append(empty(), rows(60, 1))
    reserved = s.reserve_all(LAYERS, [10] * 3)
    reserved.reserve_all(LAYERS, [2] * 3)
    assert reserved.with_all_lengths(LAYERS, [70] * 3).lengths(LAYERS) == [70] * 3


def test_layers_of_one_append_share_a_mark():
    s = append(append(empty(), rows(64, 1)), rows(5, 2))
    assert len({p.mark for layer in LAYERS for p in [s.pages(layer)[-1]]}) == 1
    assert s.table_addresses(LAYERS).tolist() == [s.pages(k).address for k in LAYERS]
    assert isinstance(s.layers[0], Layer) and s.lengths(LAYERS) == [69, 69, 69]
