"""Witnesses of the reduce family: Python's sorted and math.fsum, SciPy's softmax."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
from scipy import special

from m3jit.isa.reduce import ALL
from m3jit.isa.types import BF16, F16, F32, I8, I32, I64, U8, DType, Tensor
from tests.ops.cases import FLOATS, Case, close, noise, rounded, same, tensor, values, witness

SHAPES = [((7,), 0), ((1,), 0), ((67,), -1), ((3, 5), 0), ((3, 130), 1), ((2, 3, 4), 1), ((2, 0), 0), ((4097,), 0)]


def _sorted_lane(lane: list, descending: bool) -> list[int]:
    """Indices in order: NaN above everything, -0 = +0, ties by the lower index."""
    def compare(i: int, j: int) -> int:
        a, b = lane[i], lane[j]
        if a != a or b != b:
            sign = int(a != a) - int(b != b)
        else:
            sign = int(a > b) - int(a < b)
        return (-sign if descending else sign) or i - j
    return sorted(range(len(lane)), key=functools.cmp_to_key(compare))


def _along(x: np.ndarray, axis: int, f: Callable[[list], list]) -> np.ndarray:
    """f over each lane, as an array."""
    moved = np.moveaxis(x, axis, -1)
    out = [f(list(lane)) for lane in moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])]
    width = len(out[0]) if out else len(f(list(np.zeros(moved.shape[-1]))))
    return np.moveaxis(np.array(out).reshape(*moved.shape[:-1], width), -1, axis)


def _orderable() -> Iterator[tuple[str, Tensor, int]]:
    for dtype in (F32, F16, BF16, I8, U8, I64):
        for i, (shape, axis) in enumerate(SHAPES[:-1]):
            v = np.rint(noise(*shape, seed=i) * 4)                # many ties
            yield f"{dtype} {shape} axis {axis}", tensor(np.abs(v) if dtype is U8 else v, dtype), axis
    yield "special values", tensor([np.nan, -0.0, 1.0, np.inf, 0.0, np.nan, -np.inf, 1.0, -0.0]), 0
    yield "only NaN", tensor([np.nan, np.nan]), 0


@witness("SORT")
def sort() -> Iterator[Case]:
    for label, x, axis in _orderable():
        for order in ("ASC", "DESC"):
            i = _along(values(x), axis, lambda lane: _sorted_lane(lane, order == "DESC")).astype(np.int64)
            want = np.take_along_axis(values(x), i, axis)

            def check(got, indices, want=want, i=i):
                same(want)(got)
                same(i)(indices)
            yield Case(f"{order} {label}", {"x": x, "axis": axis, "order": order}, check, x.shape)


@witness("TOPK")
def topk() -> Iterator[Case]:
    for label, x, axis in _orderable():
        for k in sorted({1, min(3, x.shape[axis]), x.shape[axis]}):
            for smallest, unsorted in ((False, False), (True, False), (False, True)):
                def pick(lane: list) -> list[int]:
                    best = _sorted_lane(lane, not smallest)[:k]
                    return sorted(best) if unsorted else best
                i = _along(values(x), axis, pick).astype(np.int64)
                want = np.take_along_axis(values(x), i, axis)

                def check(got, indices, want=want, i=i):
                    same(want)(got)
                    same(i)(indices)
                yield Case(f"k {k} {smallest} {unsorted} {label}", {"x": x, "axis": axis, "k": k, "smallest": smallest,
                                                                    "unsorted": unsorted}, check, want.shape)


@witness("ARGMAX")
def argmax() -> Iterator[Case]:
    def first(lane: list) -> list[int]:
        best = 0
        for i, v in enumerate(lane):
            if v == v and (lane[best] != lane[best] or v > lane[best]):
                best = i
        return [best]
    for label, x, axis in _orderable():
        want = _along(values(x), axis, first).astype(np.int64)
        yield Case(label, {"x": x, "axis": axis}, same(want), want.shape)
    x = tensor([np.nan, -np.inf, -np.inf])
    yield Case("-inf after NaN", {"x": x}, same(np.array([1])))


def _fold(op: str, lane: list) -> float:
    numbers = [v for v in lane if v == v]
    if op in ("SUM", "MEAN"):
        total = math.fsum(lane) if len(numbers) == len(lane) else math.nan
        return total if op == "SUM" else total / len(lane) if lane else math.nan
    if op == "PROD":
        return math.prod(lane)
    return (max if op == "MAX" else min)(numbers) if numbers else math.nan


@witness("REDUCE")
def reduce() -> Iterator[Case]:
    for op in ("SUM", "MEAN", "MAX", "MIN", "PROD"):
        for dtype in FLOATS:
            for i, (shape, axis) in enumerate(SHAPES):
                if shape[axis] == 0:
                    continue
                x = tensor(1 + noise(*shape, seed=i) * (0.05 if op == "PROD" else 1), dtype)
                yield from _float_cases(op, dtype, x, axis)
        yield from _special_cases(op)
        yield from _integer_cases(op)


def _float_cases(op: str, dtype: DType, x: Tensor, axis: int) -> Iterator[Case]:
    v = values(x)
    n = v.shape[axis]
    magnitude = {"SUM": np.abs(v).sum(axis), "MEAN": np.abs(v).mean(axis)}.get(op)
    want = _along(v, axis, lambda lane: [_fold(op, lane)]).squeeze(axis)
    # PROD: every multiplication rounds; sums: 64 short lanes and a tree
    allowed = 0.0 if op in ("MAX", "MIN") else n + 4 if op == "PROD" else 4 + n / 64
    yield Case(f"{op} {dtype} {x.shape} axis {axis}", {"x": x, "op": op, "axis": axis},
               close(want, dtype, allowed, magnitude), want.shape)
    kept = np.expand_dims(want, axis)
    yield Case(f"{op} KEEPDIMS {x.shape}", {"x": x, "op": op, "axis": axis, "keepdims": True},
               close(kept, dtype, allowed, None if magnitude is None else np.expand_dims(magnitude, axis)), kept.shape)
    if x.rank > 1 and x.size:
        total = np.array(_fold(op, list(v.ravel())))
        size = {"SUM": np.abs(v).sum(), "MEAN": np.abs(v).mean()}.get(op)
        yield Case(f"{op} of all {x.shape}", {"x": x, "op": op, "axis": ALL},
                   close(total, dtype, 4 + x.size / (1 if op == "PROD" else 64), size), ())


def _special_cases(op: str) -> Iterator[Case]:
    x = tensor([[np.nan, 1.0, 2.0], [np.nan, np.nan, np.nan], [np.inf, 1.0, 2.0], [-np.inf, np.inf, 0.0]])
    with np.errstate(all="ignore"):
        want = {"SUM": [np.nan, np.nan, np.inf, np.nan], "MEAN": [np.nan, np.nan, np.inf, np.nan],
                "PROD": [np.nan, np.nan, np.inf, np.nan], "MAX": [2.0, np.nan, np.inf, np.inf],
                "MIN": [1.0, np.nan, 1.0, -np.inf]}[op]
    yield Case(f"{op} special values", {"x": x, "op": op, "axis": -1}, same(np.array(want)))
    if op in ("SUM", "PROD", "MEAN"):
        empty = {"SUM": 0.0, "PROD": 1.0, "MEAN": np.nan}[op]
        yield Case(f"{op} of nothing", {"x": tensor(np.zeros((2, 0))), "op": op, "axis": 1}, same(np.full(2, empty)))


def _integer_cases(op: str) -> Iterator[Case]:
    for dtype in (I8, U8, I32, I64):
        raw = np.random.default_rng(3).integers(1, 100, (3, 67)).astype(dtype.numpy)
        x = Tensor(dtype, raw.shape, raw)
        lanes = [[int(v) for v in row] for row in raw]
        if op == "MEAN":
            want = np.array([math.fsum(row) / len(row) for row in lanes])
            yield Case(f"MEAN {dtype}", {"x": x, "op": op, "axis": 1}, close(want, F32, 2.0))
            continue
        exact = [{"SUM": sum, "PROD": math.prod, "MAX": max, "MIN": min}[op](row) for row in lanes]
        if op in ("SUM", "PROD"):
            exact = [(v + 2 ** 63) % 2 ** 64 - 2 ** 63 for v in exact]
        yield Case(f"{op} {dtype}", {"x": x, "op": op, "axis": 1}, same(np.array(exact)))


@witness("SOFTMAX")
def softmax() -> Iterator[Case]:
    for dtype in FLOATS:
        for i, (shape, axis) in enumerate(SHAPES):
            for temp in (1.0, 0.5):
                if shape[axis] == 0:
                    continue
                x = tensor(noise(*shape, seed=i, scale=2.0), dtype)
                want = special.softmax(values(x) / temp, axis=axis)
                yield Case(f"{dtype} {shape} axis {axis} TEMP {temp}", {"x": x, "axis": axis, "temp": temp},
                           close(want, dtype, 8 + 20 / temp), shape)
    x = tensor([[1000.0, 1000.0], [-1000.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]])
    want = np.array([[0.5, 0.5], [0.0, 1.0], [np.nan, np.nan], [np.nan, np.nan], [np.nan, np.nan]])
    yield Case("special values", {"x": x}, same(want))
    yield Case("TEMP=inf", {"x": tensor([1.0, 2.0, -7.0, 0.0]), "temp": np.inf}, same(np.full(4, 0.25)))
    yield Case("empty rows", {"x": tensor(np.zeros((0, 3)))}, same(np.zeros((0, 3))), (0, 3))


@witness("SANITY_CHECK")
def sanity_check() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape in ((0,), (), (1,), (7,), (3, 67)):
            v = noise(*shape, seed=2).astype(np.float64)
            if v.size > 3:
                v.flat[::3], v.flat[1], v.flat[2] = np.nan, np.inf, -np.inf
            x = tensor(v, dtype)
            v = values(x)
            bad = int((~np.isfinite(v)).sum())

            def check(got, count, v=v, bad=bad):
                same(np.nan_to_num(v, nan=0.0, posinf=0.0, neginf=0.0))(got)
                assert count == bad and type(count) is int
            yield Case(f"{dtype} {shape}", {"x": x}, check, shape)
    assert rounded(np.array([70000.0]), F16)[0] == np.inf
    x = tensor([70000.0, 1.0], F16)

    def overflowed(got, count):
        same(np.array([0.0, 1.0]))(got)
        assert count == 1
    yield Case("an overflow", {"x": x}, overflowed)
