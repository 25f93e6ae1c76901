"""Witness rows: what a row is, how its cases run, and how results are compared and mutated.

A row is an opcode and a generator of cases; a case is the operands of one execution and a check of its result against a
witness, code or formulas outside m3jit.  Checks raise AssertionError.  The mutation test changes every part of every
result by 1 % (integers: by 1 % or 1, flags: flipped) and demands that the check of the same case fails.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from m3jit.ir.eager import EagerXp
from m3jit.isa import table
from m3jit.isa.fields import REQUIRED, Hidden
from m3jit.isa.cells import CellState, cell_of
from m3jit.isa.kv import KVStream
from m3jit.isa.table import load_table
from m3jit.isa.types import BF16, BOOL, F16, F32, DType, Tensor

load_table()
XP = EagerXp()
WITNESS: dict[str, Callable[[], Iterator["Case"]]] = {}
FLOATS = (F32, F16, BF16)


@dataclass
class Case:
    """label: for messages.  operands: by parameter name (the others take their defaults).  check: of the results, one
    argument each (destinations and states in operand order)."""
    label: str
    operands: dict[str, Any]
    check: Callable[..., None]
    shape: tuple[int, ...] | None = None          # expected shape of the first result
    results: tuple[Any, ...] = field(default=())


def witness(name: str) -> Callable:
    """Register a generator of cases as the witness row of an opcode."""
    def register(f: Callable[[], Iterator[Case]]) -> Callable:
        assert name not in WITNESS and name in table.BY_NAME, name
        WITNESS[name] = f
        return f
    return register


def execute(name: str, operands: dict[str, Any]) -> tuple[Any, ...]:
    """The results of an opcode's body."""
    row = table.BY_NAME[name]
    args = {}
    for f in row.fields:
        dest_only = getattr(f, "dest", False) and not getattr(f, "both", False)
        value = operands.get(f.name, None if dest_only or isinstance(f, Hidden) else f.default)
        assert value is not REQUIRED, f"{name}: the case lacks the operand {f.name}"
        args[f.name] = value
    unknown = set(operands) - set(args)
    assert not unknown, f"{name} has no operand {unknown}"
    result = row.body(XP, **args)
    return result if isinstance(result, tuple) else (result,)


# -- tensors and their values -----------------------------------------------------------------------------------------

def tensor(a: Any, dtype: DType = F32) -> Tensor:
    """A tensor of a dtype from float64 values (rounded by ml_dtypes and NumPy, not by m3jit)."""
    a = np.asarray(a)
    if dtype is BF16:
        return Tensor(BF16, a.shape, a.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16))
    if dtype is BOOL:
        return Tensor.of(a.astype(bool))
    return Tensor.of(a.astype(dtype.numpy), dtype)


def values(t: Any) -> np.ndarray:
    """What a tensor holds, as float64 (floats) or its own integers."""
    if not isinstance(t, Tensor):
        return np.asarray(t)
    with np.errstate(invalid="ignore"):                   # signalling NaN among random bits
        if t.dtype is BF16:
            return t.data.view(ml_dtypes.bfloat16).astype(np.float64)
        return t.data.astype(np.float64) if t.dtype.kind == "float" else t.data


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Normal numbers, f32, always the same for a seed."""
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


def rounded(a: np.ndarray, dtype: DType) -> np.ndarray:
    """float64 values as the dtype stores them."""
    with np.errstate(all="ignore"):
        return values(tensor(a, dtype))


# -- checks -----------------------------------------------------------------------------------------------------------

def same(want: Any) -> Callable[[Any], None]:
    """Exactly these values, this shape; NaN equals NaN, -0 differs from +0."""
    def check(got: Any) -> None:
        a, b = values(got), np.asarray(want)
        assert a.shape == b.shape, f"shape {a.shape}, expected {b.shape}"
        if a.dtype == bool:
            assert b.dtype == bool
            a, b = a.astype(np.int8), b.astype(np.int8)
        np.testing.assert_array_equal(a, b)
        if a.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(a[a == 0]), np.signbit(b.astype(np.float64)[a == 0]))
    return check


def close(want: np.ndarray, dtype: DType = F32, ulps: float = 4.0, size: np.ndarray | float | None = None) -> Callable:
    """Within `ulps` f32 ulp of `size` (default: each value's own magnitude; give the magnitude of what was added up
    where terms may cancel); F16 and BF16 results may be off by half an ulp of theirs on top.  NaN and infinities must
    agree."""
    want = np.asarray(want, np.float64)
    magnitude = np.abs(want) if size is None else np.abs(size)
    allowed = np.broadcast_to(ulps * 2.0 ** -23 * np.maximum(magnitude, 2.0 ** -126), want.shape)
    if dtype is not F32:
        unit, least = {"F16": (2.0 ** -11, 2.0 ** -14), "BF16": (2.0 ** -8, 2.0 ** -126)}[dtype.name]
        allowed = allowed + 1.001 * unit * np.maximum(np.abs(want), least)

    def check(got: Any) -> None:
        assert isinstance(got, (Tensor, float)), f"a {type(got).__name__}"
        assert not isinstance(got, Tensor) or got.dtype is dtype, f"dtype {got.dtype}, expected {dtype}"
        a = values(got)
        assert a.shape == want.shape, f"shape {a.shape}, expected {want.shape}"
        finite = np.isfinite(rounded(want, dtype))
        np.testing.assert_array_equal(a[~finite], rounded(want, dtype)[~finite])
        error, limit = np.abs(a[finite] - want[finite]), allowed[finite]
        assert (error <= limit).all(), f"error {error.max():.4g}, {limit.flat[error.argmax()]:.4g} is allowed"
    return check


# -- mutation ---------------------------------------------------------------------------------------------------------

def mutants(result: Any) -> Iterator[Any]:
    """The result changed by 1 % (integers: at least by 1), or nothing where it holds nothing to change."""
    if isinstance(result, (int, np.integer)):
        yield int(result) + max(1, abs(int(result)) // 100)
    elif isinstance(result, float):
        yield result * 1.01 if result else 0.01
    elif isinstance(result, KVStream):
        lengths = {layer: result.length(layer) for layer in result.layers if result.length(layer)}
        if lengths:
            yield result.with_lengths({layer: n - 1 for layer, n in lengths.items()})
            changed = KVStream(result.geometry, result.dtype)
            for layer in lengths:
                changed = changed.append(layer, *(a * np.float32(1.01) for a in result.rows(layer)))
            yield changed
    elif isinstance(result, CellState):
        for (layer, part), cell in result.cells.items():
            a = result.array(layer, part)
            if a.size:
                changed = a * np.float32(1.01) if a.any() else a + np.float32(0.01)
                yield result.with_cells({(layer, part): cell_of(part, changed)})
    elif isinstance(result, Tensor):
        changed = _mutate(result)
        if changed is not None and changed.tobytes() != result.tobytes():
            yield changed


def _mutate(t: Tensor) -> Tensor | None:
    if not t.size:
        return None
    if t.dtype.is_block:
        data = t.data.copy()
        data.flat[data.size // 2] ^= 1
        return Tensor(t.dtype, t.shape, data)
    if t.dtype.kind == "float":
        return tensor(values(t) * 1.01, t.dtype)
    if t.dtype is BOOL:
        return Tensor.of(~t.data)
    return Tensor(t.dtype, t.shape, t.data + np.maximum(1, np.abs(t.data.astype(np.int64)) // 100).astype(t.data.dtype))
