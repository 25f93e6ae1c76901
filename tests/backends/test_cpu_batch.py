"""Plans for several contexts at once: each context gets what the plan gives it alone, whatever way the others take."""
from __future__ import annotations

import random

import numpy as np
import pytest

from m3jit.backends.cpu.batch_region import chains
from m3jit.backends.cpu.cache import DiskCache
from m3jit.backends.cpu.engine import Engine
from m3jit.backends.cpu.runtime import URGENT
from m3jit.ir.loop_builder import Builder
from m3jit.ir.plan import (ABANDONED, Barrier, Branch, Copy, Exit, FrameWord, Jump, Launch, Plan, PlanBlock, Poll,
                           Retire, Scalar, StoreFrame)
from tests.backends.cpu_engines import LEVELS, engine

FREE = int(FrameWord.FIRST_FREE)
HUGE = (1 << 63) - 1
ROWS, COLUMNS = 4, 5                          # most rows of a context; i64 elements of a row
BUFFERS = 3
IN, SHARED = FREE, FREE + 3                   # words: three scalars; a pointer to a row that all share
BUFFER = FREE + 4                             # pointers to the buffers
OUT = BUFFER + BUFFERS                        # words that exits write
PLAN_WORDS = OUT + 3


def const(value, type: str = "i64") -> Scalar:
    return Scalar("const", type, attrs={"value": value})


def rows_kernel():
    """out[r, c] = 3 x[r, c] + row[c] + s, one group per row."""
    b = Builder("batch_rows", 64)
    x, row, out = b.ptr("x", "r", "i64"), b.ptr("row", "r", "i64"), b.ptr("out", "w", "i64")
    rows, columns, s = b.scalar("rows"), b.scalar("columns"), b.scalar("s")
    b.set_grid(rows)
    inside = b.in_range(b.i64(0), columns)
    at = b.group * columns
    v = b.load_lanes("i64", x, at, inside) * 3 + b.load_lanes("i64", row, b.i64(0), inside) + s
    b.store_lanes("i64", out, at, v, inside)
    return b.finish()


KERNEL = rows_kernel()


class _Random:
    """A plan of a few blocks: scalar code, launches by row and not, copies, reads, branches, a loop, polls."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.blocks = [PlanBlock(f"b{i}") for i in range(self.rng.randint(3, 6))]

    def plan(self) -> Plan:
        for i, b in enumerate(self.blocks[1:]):
            b.params = [Scalar("param", "i64") for _ in range(self.rng.randint(0, 2))]
        last = len(self.blocks) - 1
        early: list[Scalar] = []
        for i, b in enumerate(self.blocks):
            self.values = [*b.params, *early, const(self.rng.randint(-3, 9))]
            self.body(b)
            early = early if i else self.values            # the first block's are known everywhere
            if i == last:
                b.end = Exit(1, self.stores(b, OUT))
                continue
            b.body.append(Barrier())
            self.end(b, i, last)
        return Plan("random", PLAN_WORDS, self.blocks)

    def end(self, b: PlanBlock, i: int, last: int) -> None:
        ahead = self.blocks[self.rng.randint(i + 1, last)]
        other = self.blocks[self.rng.randint(max(i - 1, 1), last)]         # perhaps a way back
        if i and self.rng.random() < 0.2:
            b.end = Exit(2 + i, self.stores(b, OUT))
        elif self.rng.random() < 0.3:
            b.end = Jump(ahead, self.arguments(ahead))
        else:
            left = self.add(b, Scalar("frame", "i64", attrs={"word": IN + self.rng.randrange(3)}))
            cond = self.add(b, Scalar(self.rng.choice(["lt", "le", "eq"]), "b1", (left, self.value())), False)
            b.end = Branch(cond, ahead, self.arguments(ahead), other, self.arguments(other))

    def arguments(self, target: PlanBlock) -> list[Scalar]:
        return [self.value() for _ in target.params]

    def stores(self, b: PlanBlock, at: int) -> list[StoreFrame]:
        return [StoreFrame(at + k, self.value()) for k in range(self.rng.randint(1, 3))]

    def value(self) -> Scalar:
        return self.rng.choice(self.values)

    def add(self, b: PlanBlock, s: Scalar, keep: bool = True) -> Scalar:
        b.body.append(s)
        if keep:
            self.values.append(s)
        return s

    def body(self, b: PlanBlock) -> None:
        if b is not self.blocks[0]:                    # every way back meets one: nothing runs for ever
            b.body.append(Poll(0, self.stores(b, OUT)))
        for _ in range(self.rng.randint(1, 6)):
            self.statement(b, self.rng.randrange(7))
        b.body.append(Retire(self.rng.randint(1, 3)))

    def statement(self, b: PlanBlock, kind: int) -> None:
        r = self.rng
        pointer = [self.add(b, Scalar("frame", "ptr", attrs={"word": BUFFER + k}), False)
                   for k in r.sample(range(BUFFERS), 2)]
        if kind == 0:
            self.add(b, Scalar("frame", "i64", attrs={"word": IN + r.randrange(3)}))
        elif kind <= 2:
            self.add(b, Scalar(r.choice(["add", "sub", "mul", "xor", "min"]), "i64", (self.value(), self.value())))
        elif kind == 3:
            b.body.append(Barrier())
            self.add(b, Scalar("element", "i64", (pointer[0], const(r.randrange(ROWS * COLUMNS))), {"dtype": "i64"}))
        elif kind == 4:
            b.body += [Barrier(), Copy(pointer[0], pointer[1], const(8 * COLUMNS)), Barrier()]
        else:
            row = self.add(b, Scalar("frame", "ptr", attrs={"word": SHARED}), False)
            rows = self.add(b, Scalar("frame", "i64", attrs={"word": IN}), False)
            by_row = {} if kind == 5 else {0: const(8 * COLUMNS), 2: const(8 * COLUMNS)}
            b.body += [Barrier(), Launch(KERNEL, [pointer[0], row, pointer[1], rows, const(COLUMNS), self.value()], "",
                                         r.random() < 0.9, r.random() < 0.3, 3 if by_row else -1, by_row), Barrier()]


class _Contexts:
    """Frames of some contexts over buffers that lie context by context without gaps."""

    def __init__(self, n: int, words: int, seed: int):
        rng = np.random.default_rng(seed)
        self.frames = np.zeros((n, words), np.int64)
        self.shared = rng.integers(-9, 9, COLUMNS)
        self.frames[:, IN:IN + 3] = rng.integers(0, 6, (n, 3))
        self.frames[:, IN] = rng.integers(0, ROWS + 1, n)                  # rows of each context
        self.frames[:, SHARED] = self.shared.ctypes.data
        self.frames[:, FrameWord.BUDGET] = rng.choice([3, 20, 50, 50], n)
        ends = np.concatenate([[0], np.cumsum(self.frames[:, IN])])
        # one row behind every context's, because plans also touch fixed elements
        self.buffers = [rng.integers(-100, 100, (int(ends[-1]) + ROWS) * COLUMNS) for _ in range(BUFFERS)]
        for k, a in enumerate(self.buffers):
            self.frames[:, BUFFER + k] = a.ctypes.data + 8 * COLUMNS * ends[:-1]

    def spread(self) -> None:
        """Give every context buffers of its own: no two touch the same element."""
        n = len(self.frames)
        self.buffers = [np.concatenate([a[:ROWS * COLUMNS]] * n) + np.arange(n * ROWS * COLUMNS) for a in self.buffers]
        self.frames[:, IN] = ROWS
        for k, a in enumerate(self.buffers):
            self.frames[:, BUFFER + k] = a.ctypes.data + 8 * COLUMNS * ROWS * np.arange(n)

    def outcome(self, i: int):
        f = self.frames[i]
        return (f[[FrameWord.RETIRED, FrameWord.EXIT, OUT, OUT + 1, OUT + 2]].tolist(),
                [a[i * ROWS * COLUMNS:(i + 1) * ROWS * COLUMNS].tolist() for a in self.buffers])


@pytest.mark.parametrize("part, level", list(enumerate(LEVELS)))
def test_random_plans_give_each_context_what_it_gets_alone(part, level):
    e, joined, ways = engine(level), 0, set()
    for seed in range(part * 15, part * 15 + 15):
        plan = _Random(seed).plan()
        region, native = e.region(plan), e.batch(plan)
        n = 2 + seed % 5
        alone, together = (_Contexts(n, native.words, seed) for _ in range(2))
        alone.spread()
        together.spread()
        for i in range(n):
            region.run(alone.frames[i], 1)
        bound = native.bind(together.frames, 1 + seed % 3)
        bound()
        for i in range(n):
            assert together.outcome(i) == alone.outcome(i), (seed, i, str(plan))
            ways.add((seed, *alone.outcome(i)[0][1:2]))
        joined += bound.launches[1]
    assert joined > 10 and len(ways) > 15            # launches were joined, and contexts left by different exits


def test_everybody_who_has_not_left_gives_up_when_the_entry_is_stopped():
    """The word is raised after 0, 1, 2, ... looks: a context has left, as it does alone, or is marked."""
    e, alone_with, kept, lost = Engine("native", cache=DiskCache.off(), counted=True), engine("native"), 0, 0
    for seed in range(12):
        plan = _Random(seed).plan()
        region, native, n = alone_with.region(plan), e.batch(plan), 2 + seed % 4
        alone = _Contexts(n, native.words, seed)
        alone.spread()
        for i in range(n):
            region.run(alone.frames[i], 1)
        for looks in range(25):
            together = _Contexts(n, native.words, seed)
            together.spread()
            bound = native.bind(together.frames, 1 + looks % 2)
            bound.stop[0] = URGENT - 2 * looks
            bound()
            left = [i for i in range(n) if together.frames[i, FrameWord.EXIT] != ABANDONED]
            for i in left:
                assert together.outcome(i) == alone.outcome(i), (seed, looks, i, str(plan))
            kept, lost = kept + len(left), lost + n - len(left)
            bound.stop[0] = URGENT
            bound()                                    # nothing is left pending, and the word is looked at afresh
            bound.stop[0] = 0
    assert kept > 100 and lost > 100


def launch_plan(replicated: bool) -> Plan:
    """One launch by row."""
    words = {w: Scalar("frame", "i64" if w == IN else "ptr", attrs={"word": w})
             for w in (BUFFER, SHARED, BUFFER + 1, IN)}
    launch = Launch(KERNEL, [words[BUFFER], words[SHARED], words[BUFFER + 1], words[IN], const(COLUMNS), const(7)], "",
                    True, replicated, 3, {0: const(8 * COLUMNS), 2: const(8 * COLUMNS)})
    return Plan("rows", PLAN_WORDS, [PlanBlock("entry", body=[*words.values(), launch], end=Exit(0, []))])


@pytest.mark.parametrize("replicated", [False, True])
def test_rows_of_different_numbers_become_one_launch(replicated):
    e = engine("native")
    native = e.batch(launch_plan(replicated))
    c = _Contexts(6, native.words, 1)
    x, row, total = c.buffers[0].copy(), c.shared, int(c.frames[:, IN].sum())
    bound = native.bind(c.frames, 2)
    bound()
    assert bound.launches == (1, 5)
    want = x.reshape(-1, COLUMNS)[:total] * 3 + row + 7
    assert (c.buffers[1].reshape(-1, COLUMNS)[:total] == want).all()


def test_gaps_and_other_arguments_keep_launches_apart():
    e = engine("native")
    native = e.batch(launch_plan(False))
    c = _Contexts(4, native.words, 2)
    c.spread()
    other = c.shared + 1
    c.frames[2, SHARED] = other.ctypes.data            # 0, 1 | 2 | 3
    bound = native.bind(c.frames, 2)
    bound()
    assert bound.launches == (3, 1)


def chain_plan() -> Plan:
    """Three launches that a context does in order: tiny ones by row, and between them one for each context by
    itself."""
    words = {w: Scalar("frame", "i64" if w == IN else "ptr", attrs={"word": w})
             for w in (SHARED, IN, BUFFER, BUFFER + 1, BUFFER + 2)}

    def launch(x: int, out: int, s: int, tiny: bool) -> Launch:
        by_row = {0: const(8 * COLUMNS), 2: const(8 * COLUMNS)} if tiny else {}
        return Launch(KERNEL, [words[BUFFER + x], words[SHARED], words[BUFFER + out], words[IN], const(COLUMNS),
                               const(s)],
                      "", True, tiny, 3 if tiny else -1, by_row)
    body = [*words.values(), launch(0, 1, 7, True), Barrier(), launch(1, 2, -5, False), Barrier(),
            launch(2, 0, 2, True)]
    return Plan("chain", PLAN_WORDS, [PlanBlock("entry", body=body, end=Exit(0, []))])


@pytest.mark.parametrize("n, threads", [(1, 2), (2, 2), (5, 3), (7, 2), (40, 2), (40, 1)])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_chain_gives_each_context_what_it_gets_alone(n, threads, uneven):
    plan = chain_plan()
    assert chains(plan.blocks[0].body) == [slice(5, 10)]
    region, native = engine("native").region(plan), engine("native").batch(plan)
    alone, together = (_Contexts(n, native.words, n) for _ in range(2))
    for c in (alone, together):
        c.spread()
        c.frames[:, IN] = np.where(np.arange(n) < n // 2, ROWS, 0) if uneven else np.arange(n) % ROWS + 1
    for i in range(n):
        region.run(alone.frames[i], 1)
    bound = native.bind(together.frames, threads)
    for _ in range(3):                                 # the second time over the first one's results
        bound()
    for _ in range(2):
        for i in range(n):
            region.run(alone.frames[i], 1)
    assert [together.outcome(i) for i in range(n)] == [alone.outcome(i) for i in range(n)]
    assert bound.launches == (3 * n, 0)                # tiny launches of a chain are not counted


@pytest.mark.parametrize("n", [3, 12])
def test_a_chain_is_left_by_all_when_the_entry_is_stopped(n):
    plan, seen = chain_plan(), set()
    region, native = engine("native").region(plan), Engine("native", cache=DiskCache.off(), counted=True).batch(plan)
    alone = _Contexts(n, native.words, n)
    alone.spread()
    alone.frames[:, IN] = np.where(np.arange(n) < n // 2, ROWS, 0)             # uneven where there are many
    rows = alone.frames[:, IN].copy()
    for i in range(n):
        region.run(alone.frames[i], 1)
    wanted = [alone.outcome(i) for i in range(n)]
    for looks in range(0, 60, 3 if n > 5 else 1):
        together = _Contexts(n, native.words, n)
        together.spread()
        together.frames[:, IN] = rows
        bound = native.bind(together.frames, 1 + looks % 2)
        bound.stop[0] = URGENT - 2 * looks
        bound()
        if (together.frames[:, FrameWord.EXIT] == ABANDONED).all():
            seen.add("given up")
            continue
        seen.add("done")
        assert [together.outcome(i) for i in range(n)] == wanted
    assert seen == {"given up", "done"}


def test_what_makes_a_chain():
    tiny, own, shared = (Launch(KERNEL, [], "", True, replicated, rows) for replicated, rows in
                         ((True, 3), (False, -1), (False, 3)))
    alone = Launch(KERNEL, [], "", False, True)        # executed by one thread
    element = Scalar("element", "i64", (), {})
    copy = Copy(const(0, "ptr"), const(0, "ptr"), const(0))
    between = [Barrier(), const(1), Retire(1)]
    assert chains([own, tiny, *between, own, *between, tiny, own]) == [slice(1, 10)]
    assert chains([tiny, tiny, shared, tiny, *between, tiny]) == [slice(0, 2), slice(3, 8)]
    for other in (shared, alone, element, copy, Poll(0, [])):
        assert chains([tiny, other, tiny]) == []
    assert chains([own, own]) == chains([tiny]) == chains([]) == []


def test_more_contexts_than_a_job_has_items():
    native = engine("native").batch(launch_plan(False))
    c = _Contexts(100, native.words, 3)
    c.spread()
    c.frames[:, BUFFER] = np.random.default_rng(0).permutation(c.frames[:, BUFFER])
    x = {int(p): c.buffers[0][i * ROWS * COLUMNS:(i + 1) * ROWS * COLUMNS] for i, p in
         enumerate(np.sort(c.frames[:, BUFFER]))}
    native.bind(c.frames, 2)()
    got = c.buffers[1].reshape(100, ROWS, COLUMNS)
    for i in range(100):
        assert (got[i] == x[int(c.frames[i, BUFFER])].reshape(ROWS, COLUMNS) * 3 + c.shared + 7).all()
