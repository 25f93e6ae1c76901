"""The prefix index: what it finds, what it drops, what its versions weigh; against a list of all that was added."""
from __future__ import annotations

import functools
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from m3jit.errors import UserError
from m3jit.isa.cells import CellState, cell_of
from m3jit.isa.kv import KVStream
from m3jit.isa.types import Tensor
from m3jit.models import prefix_index
from m3jit.models.prefix_index import Ledger, PrefixIndex
from tests.vm.state_model.faults import Interrupt


@dataclass(frozen=True, eq=False)
class Version:
    """As m3jit.api.checkpoints.Checkpoint."""
    rows: int
    states: dict[str, Any] = field(default_factory=dict)
    logits: Any = None
    cells: bool = False

    @property
    def shortens(self) -> bool:
        return not self.cells

    def cut(self, rows: int) -> "Version":
        assert rows == self.rows or (rows < self.rows and self.shortens)
        return self if rows == self.rows else Version(rows, {n: s.truncate(rows) for n, s in self.states.items()})


LOGITS = Tensor.of(np.zeros((1, 8), np.float32))
KEY = "model"


def stream(rows: int, layers: int = 2) -> KVStream:
    found = KVStream().with_geometry(1, 4)
    k = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    for layer in range(layers):
        found = found.append(layer, k, k)
    return found


def found(index: PrefixIndex, ids: list[int], key: str = KEY) -> int:
    version = index.find(key, ids)
    return version.rows if version is not None else 0


def test_the_longest_beginning_is_found():
    index = PrefixIndex(least=1)
    index.add(KEY, [1, 2, 3, 4, 5], Version(5))
    assert found(index, [1, 2, 3, 4, 5, 6]) == 5, "longer"
    assert found(index, [1, 2, 3, 4, 5]) == 4, "equal: one token is left for the logits"
    assert found(index, [1, 2, 3, 9]) == 3 and found(index, [1, 2]) == 1 and found(index, [1]) == 0
    assert found(index, [2, 3]) == 0 and found(index, []) == 0
    index.add(KEY, [1, 2, 3, 7, 8], Version(4))                # its states stand behind four of them
    assert found(index, [1, 2, 3, 7, 8]) == 4 and found(index, [1, 2, 3, 4, 5, 5]) == 5
    index.add(KEY, [1, 2, 3], Version(3, logits=LOGITS))
    assert found(index, [1, 2, 3]) == 3, "with the logits nothing is left to compute"
    assert found(index, [1, 2, 3, 5]) == 3 and index.find("other", [1, 2, 3]) is None


def test_states_that_cannot_be_cut_serve_where_they_stand():
    index = PrefixIndex(least=1)
    index.add(KEY, [1, 2, 3, 4, 5], Version(5, cells=True))
    assert found(index, [1, 2, 3, 4, 9]) == found(index, [1, 2, 3, 4, 5]) == 0
    index.add(KEY, [1, 2], Version(2, cells=True))
    assert found(index, [1, 2, 3, 4, 9]) == 2 and found(index, [1, 2, 3, 4, 5, 9]) == 5
    assert found(index, [1, 2, 3, 4, 5]) == 2 and found(index, [1, 2]) == 0
    index.add(KEY, [1, 2, 3, 4, 5], Version(5, cells=True, logits=LOGITS))
    assert found(index, [1, 2, 3, 4, 5]) == 5


def test_short_beginnings_are_not_worth_it():
    index = PrefixIndex(least=4)
    index.add(KEY, [1, 2, 3, 4, 5], Version(5))
    assert index.known(KEY, [1, 2, 3, 9]) == 0 and index.known(KEY, [1, 2, 3, 4, 9]) == 4, "without counting"
    assert found(index, [1, 2, 3, 9]) == 0 and found(index, [1, 2, 3, 4, 9]) == 4
    assert index.stats | {"bytes": 0} == {"searches": 2, "hits": 1, "tokens": 9, "reused_tokens": 4, "dropped": 0,
                                          "versions": 1, "bytes": 0}


def test_shared_memory_counts_once():
    """Versions of one text share its pages; the one that was not used for the longest time goes first."""
    whole = stream(200)                                        # 4 pages in each of 2 layers
    page = whole.page_bytes
    index = PrefixIndex(memory=20 * page, least=1)
    index.add(KEY, list(range(200)), Version(200, {"S0": whole}))
    index.add(KEY, list(range(130)), Version(130, {"S0": whole.truncate(130)}))
    index.add(KEY, list(range(64)), Version(64, {"S0": whole.truncate(64)}, LOGITS))
    assert index.stats["bytes"] == 8 * page + LOGITS.data.nbytes
    longer = whole.truncate(130).append(0, np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32))
    index.add(KEY, [*range(130), 7], Version(131, {"S0": longer}))      # copies the page in which they part
    assert index.stats["bytes"] == 9 * page + LOGITS.data.nbytes
    other = stream(300)                                        # 5 pages in each of 2 layers
    index.add(KEY, list(range(1000, 1300)), Version(300, {"S0": other}))
    assert index.stats["bytes"] == 19 * page + LOGITS.data.nbytes
    assert found(index, list(range(201))) == 200               # used
    index.add(KEY, list(range(2000, 2100)), Version(100, {"S0": stream(100)}))
    assert found(index, list(range(201))) == 200 and found(index, list(range(2000, 2101))) == 100
    assert index.stats["dropped"] and index.stats["bytes"] <= 20 * page
    before = index.stats
    index.add(KEY, list(range(5000, 5900)), Version(900, {"S0": stream(900)}))
    assert index.stats == before | {"dropped": before["dropped"] + 1}, "what does not fit alone takes no other's place"
    assert found(index, list(range(2000, 2101))) == 100 and found(index, list(range(5000, 5901))) == 0
    index.clear()
    assert index.stats["bytes"] == index.stats["versions"] == 0 and found(index, [1, 2, 3]) == 0


def test_cells_count_by_their_memory():
    ledger = Ledger()
    first, second = cell_of("window", np.zeros((3, 8), np.float32)), cell_of("window", np.zeros((3, 8), np.float32))
    one = Version(1, {"S0": CellState({(0, "window"): first, (1, "window"): second})})
    two = Version(2, {"S0": CellState({(0, "window"): first})})
    ledger.add(one)
    ledger.add(two)
    assert ledger.bytes == first.memory.data.nbytes + second.memory.data.nbytes
    ledger.take_off(one)
    assert ledger.bytes == first.memory.data.nbytes
    ledger.take_off(two)
    assert ledger.bytes == 0


def test_bounds_are_checked():
    for wrong in (-1, 1.5, True, "1M"):
        with pytest.raises(UserError, match="prefix memory: a number of bytes from 0 is expected"):
            PrefixIndex(wrong)
    index = PrefixIndex(0)
    index.add(KEY, [1, 2], Version(2))
    assert index.stats["versions"] == 0
    with pytest.raises(ValueError, match="a version of 3 tokens, but 2 tokens"):
        PrefixIndex().add(KEY, [1, 2], Version(3))


def expected(added: list[tuple[tuple[int, ...], Version]], ids: tuple[int, ...]) -> int:
    """What a list of everything says."""
    best = 0
    for tokens, version in added:
        same = next((i for i, (a, b) in enumerate(zip(tokens, ids)) if a != b), min(len(tokens), len(ids)))
        if version.shortens:
            best = max(best, min(same, len(ids) - 1))
        if same == version.rows and (same < len(ids) or version.logits is not None):
            best = max(best, same)
    return best


@pytest.mark.parametrize("seed", range(4))
def test_random_trees(seed):
    """Texts over three tokens, so that they part everywhere; some versions are dropped on the way."""
    r, index = random.Random(seed), PrefixIndex(memory=60 * stream(1, 1).page_bytes, least=1)
    for _ in range(800):
        ids, key = tuple(r.choices((1, 2, 3), k=r.randint(1, 12))), r.choice(("streams", "cells"))
        if r.random() < 0.5:
            logits = LOGITS if r.random() < 0.3 else None
            index.add(key, ids, Version(len(ids), {"S0": stream(len(ids), 1)}, logits, cells=key == "cells"))
            assert index.stats["bytes"] <= index.memory
        else:
            kept = [(tuple(path(node)), node.version) for node in index._recent if root(node) is index._roots.get(key)]
            assert found(index, list(ids), key) == expected(kept, ids), ids
        check_tree(index)
    assert index.stats["dropped"] > 50


def root(node: Any) -> Any:
    return node if node.parent is None else root(node.parent)


def path(node: Any) -> list[int]:
    return [] if node.parent is None else path(node.parent) + node.tokens.tolist()


def check_tree(index: PrefixIndex) -> None:
    """Every leaf has a version, no node could be left out, and the ledger is that of the versions."""
    ledger, seen = Ledger(), 0
    todo = list(index._roots.values())
    while todo:
        node = todo.pop()
        if node.version is not None:
            ledger.add(node.version)
            seen += 1
            assert node in index._recent and node.version.rows == node.position
        assert node.version is not None or len(node.children) > 1 or (node.parent is None and node.children)
        for first, child in node.children.items():
            assert child.parent is node and int(child.tokens[0]) == first
            assert child.position == node.position + len(child.tokens)
            todo.append(child)
    assert (seen, ledger.bytes) == (len(index._recent), index.stats["bytes"])


def kept(index: PrefixIndex) -> list[tuple[list[int], Version]]:
    """What it holds, least used first."""
    return [(path(node), node.version) for node in index._recent]


@functools.cache
def short(rows: int, logits: bool = False) -> Version:
    return Version(rows, {"S0": stream(rows, 1)}, LOGITS if logits else None)


CHANGES = {
    "a new text": lambda index: index.add(KEY, [7, 7], short(2)),
    "one that parts": lambda index: index.add(KEY, [1, 2, 3, 9], short(4)),
    "a beginning": lambda index: index.add(KEY, [1, 2], short(2)),
    "logits": lambda index: index.add(KEY, [1, 2, 3, 4], short(4, True)),
    "another key": lambda index: index.add("other", [1, 2, 3], short(3)),
    "too large": lambda index: index.add(KEY, range(2000), short(2000)),
    "clear": lambda index: index.clear(), "find": lambda index: index.find(KEY, [1, 2, 3, 4, 5])}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_an_interrupt_at_any_moment(name, full):
    """What it holds is what it held, less what made room, or what it would; never more memory than it may have; and all
    the rest is in order at the next call."""
    page = stream(1, 1).page_bytes

    def begun() -> PrefixIndex:
        index = PrefixIndex(memory=(3 if full else 20) * page, least=1)
        for ids in ([1, 2, 3, 4], [1, 2, 3, 5], [6, 6]):
            index.add(KEY, ids, short(len(ids)))
        return index
    before, after = begun(), begun()
    CHANGES[name](after)
    shape = lambda index: [(ids, version.rows, version.logits is None) for ids, version in kept(index)]   # noqa: E731
    moment, came, found = 0, True, set()
    while came:
        moment += 1
        index, interrupt = begun(), Interrupt(moment, watched={prefix_index.__file__})
        outcome = interrupt.run(lambda: CHANGES[name](index))
        came = interrupt.hit(outcome)
        assert not index._lock.locked(), interrupt.where
        assert index.stats["bytes"] <= index.memory, interrupt.where
        check_tree(index)
        held = shape(index)
        partly = all(one in shape(before) for one in held) and (full or len(held) == 3)
        assert held == shape(after) or partly, interrupt.where
        found.add(held == shape(after))
        CHANGES[name](index)
        check_tree(index)
        assert found_all(index, shape(after)), interrupt.where
    assert moment > 20 and True in found


def found_all(index: PrefixIndex, texts: list[tuple[list[int], int, bool]]) -> bool:
    """Does it hold these, whatever else?"""
    return all(any(ids == path(node) and (node.version.logits is None) == bare for node in index._recent)
               for ids, _, bare in texts)


def test_many_threads():
    index, errors = PrefixIndex(memory=40 * stream(1, 1).page_bytes, least=1), []

    def work(seed: int) -> None:
        r = random.Random(seed)
        try:
            for _ in range(150):
                ids = r.choices((1, 2), k=r.randint(1, 9))
                index.add(KEY, ids, Version(len(ids), {"S0": stream(len(ids), 1)}))
                version = index.find(KEY, ids)
                assert version is None or version.rows < len(ids)
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    check_tree(index)
