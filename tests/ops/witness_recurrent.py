"""Witnesses of the recurrences: float64 scans row by row, SciPy's filters for the causal convolution."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy import signal, special

from m3jit.isa.cells import SCAN, WINDOW, CellState, cell_of
from m3jit.isa.types import F32, NEW_STATE
from tests.ops.cases import FLOATS, Case, close, noise, tensor, values, witness


def state(cells: dict[tuple[int, str], np.ndarray]) -> CellState:
    return CellState().with_cells({key: cell_of(key[1], a) for key, a in cells.items()})


def holds(want: dict[tuple[int, str], tuple[np.ndarray, float, Any]]) -> Callable[[CellState], None]:
    """Exactly these cells, each within (values, ulps, size)."""
    def check(got: CellState) -> None:
        assert set(got.cells) == set(want)
        for (layer, part), (a, ulps, size) in want.items():
            close(a, F32, ulps, size)(tensor(got.array(layer, part)))
    return check


# -- scan -------------------------------------------------------------------------------------------------------------

def scanned(h: np.ndarray, x, dt, a, b, c, d, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """float64: h [channels, N]; dt and a [T, channels] and [channels, N]; b, c [T, groups N]; d [channels]."""
    channels, n = h.shape
    y = np.zeros(x.shape)
    for t in range(len(x)):
        rows = [np.repeat(v[t].reshape(groups, n), channels // groups, axis=0) for v in (b, c)]
        h = h * np.exp(dt[t][:, None] * a) + (dt[t] * x[t])[:, None] * rows[0]
        y[t] = (h * rows[1]).sum(1) + d * x[t]
    return y, h


SCANS = (   # T, channels, d_state, heads, groups, D, softplus, rows before, dtype of x
    (1, 1, 1, 0, 1, "", False, False, 0), (5, 7, 3, 0, 1, "channel", True, False, 0),
    (3, 40, 16, 0, 2, "channel", True, True, 0), (0, 4, 3, 0, 1, "channel", False, True, 0),
    (4, 66, 20, 6, 3, "head", True, True, 0), (2, 24, 33, 2, 1, "channel", False, False, 0),
    (9, 16, 16, 16, 4, "", True, True, 0), (2, 18, 5, 0, 1, "channel", True, True, 1),
    (2, 18, 4, 3, 1, "head", True, False, 2))


@witness("SSM_SCAN")
def ssm_scan() -> Iterator[Case]:
    for i, (count, channels, n, heads, groups, skip, softplus, before, kind) in enumerate(SCANS):
        steps = heads or channels
        x, dt = tensor(noise(count, channels, seed=i), FLOATS[kind]), tensor(noise(count, steps, seed=i + 20) * 0.5)
        a = tensor(-np.exp(noise(*((heads,) if heads else (channels, n)), seed=i + 30)))
        b, c = (tensor(noise(count, groups * n, seed=i + s)) for s in (40, 50))
        d = tensor(noise(heads if skip == "head" else channels, seed=i + 60)) if skip else None
        bias = tensor(noise(steps, seed=i + 70)) if softplus else None
        shape = (heads or groups, channels // (heads or groups), n)
        h = noise(*shape, seed=i + 80) if before else np.zeros(shape, np.float32)
        other = noise(2, 3, seed=i)
        step = values(dt) + (values(bias) if softplus else 0)
        step = np.repeat(np.logaddexp(0, step) if softplus else step, channels // steps, axis=1)
        decay = np.repeat(values(a)[:, None], channels // heads, axis=0) * np.ones(n) if heads else values(a)
        through = np.repeat(values(d), channels // d.size) if skip else np.zeros(channels)
        operands = [h.reshape(channels, n).astype(np.float64), values(x), step, decay, values(b), values(c), through]
        y, after = scanned(*operands, groups)
        sizes = scanned(np.abs(operands[0]), *map(np.abs, operands[1:3]), decay, *map(np.abs, operands[4:]), groups)
        cells = {(7, WINDOW): other} | ({(2, SCAN): h} if before else {})
        wanted = holds({(7, WINDOW): (other, 0, 1), (2, SCAN): (after.reshape(shape), 64, sizes[1].reshape(shape))})
        yield Case(f"{count} rows of {channels}, {n} states, {heads} heads, {groups} groups, D {skip}",
                   {"x": x, "h": state(cells), "dt": dt, "a": a, "b": b, "c": c, "d": d, "dt_bias": bias,
                    "softplus": softplus, "layer": 2, "heads": heads, "groups": groups},
                   _both(close(y, FLOATS[kind], 64, sizes[0]), wanted), (count, channels))
    x = tensor(noise(3, 2, seed=90))
    one = tensor(np.ones((3, 2)))
    yield Case("a new state; A = 0, B = C = dt = 1 and one state: running sums",
               {"x": x, "h": NEW_STATE, "dt": one, "a": tensor(np.zeros((2, 1))), "b": tensor(np.ones((3, 1))),
                "c": tensor(np.ones((3, 1)))},
               _both(close(np.cumsum(values(x), 0), F32, 4, np.cumsum(np.abs(values(x)), 0)),
                     holds({(0, SCAN): (values(x).sum(0).reshape(1, 2, 1), 4, 4)})), (3, 2))


def _both(first: Callable, second: Callable) -> Callable:
    def check(got: Any, after: CellState) -> None:
        first(got)
        second(after)
    return check


@witness("SSM_RESET")
def ssm_reset() -> Iterator[Case]:
    cells = {(0, SCAN): noise(2, 3, 5), (0, WINDOW): noise(3, 70), (3, SCAN): noise(1, 1, 1), (4, WINDOW): noise(0, 9)}
    for layer in (-1, 0, 3, 9):
        want = {k: (a * (layer not in (-1, k[0])), 0, 1) for k, a in cells.items()}
        yield Case(f"layer {layer}", {"h": state(cells), "layer": layer}, holds(want))
    for shape in ((1, 1), (0, 4), (3, 3), (2, 50)):
        yield Case(f"{shape}", {"h": state({(1, WINDOW): noise(*shape)})},
                   holds({(1, WINDOW): (np.zeros(shape), 0, 1)}))
    yield Case("a new state", {"h": NEW_STATE}, holds({}))


# -- convolution with a window ----------------------------------------------------------------------------------------

def conv_with_a_state() -> Iterator[Case]:
    """Cases of CONV that have a state operand."""
    act = {"NONE": lambda y: y, "SILU": lambda y: y * special.expit(y), "RELU": lambda y: np.maximum(y, 0)}
    for i, (count, channels, taps, before, word, kind) in enumerate([
            (1, 1, 1, False, "NONE", 0), (5, 7, 4, False, "SILU", 0), (3, 70, 4, True, "RELU", 0),
            (2, 17, 16, True, "SILU", 0), (0, 5, 3, True, "NONE", 0), (90, 3, 2, True, "SILU", 0),
            (4, 6, 4, True, "SILU", 1), (4, 6, 4, False, "NONE", 2), (2, 3, 20, True, "NONE", 0)]):
        x, w = tensor(noise(count, channels, seed=i), FLOATS[kind]), noise(channels, taps, seed=i + 20)
        bias = noise(channels, seed=i + 30) if i % 3 else None
        window = noise(taps - 1, channels, seed=i + 40) if before else np.zeros((taps - 1, channels), np.float32)
        rows = np.concatenate([window.astype(np.float64), values(x)])
        y, size = (np.stack([signal.lfilter(f(w[c, ::-1].astype(np.float64)), [1.0], f(rows[:, c]))[taps - 1:]
                             for c in range(channels)], 1) for f in (lambda v: v, np.abs))
        if bias is not None:
            y, size = y + bias, size + np.abs(bias)
        yield Case(f"state, {count} rows of {channels}, {taps} taps, {word}",
                   {"x": x, "w": tensor(w), "bias": None if bias is None else tensor(bias), "layer": 1, "act": word,
                    "state": state({(1, WINDOW): window}) if before else NEW_STATE},
                   _both(close(act[word](y), FLOATS[kind], 8 + taps, size),
                         holds({(1, WINDOW): (rows[count:], 0, 1)})), (count, channels))
