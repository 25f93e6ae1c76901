"""Witnesses of the tensor and layout families: NumPy moves compared by their bits, ml_dtypes, the gguf package."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import gguf
import ml_dtypes
import numpy as np
from gguf import quants

from m3jit.isa.types import (BF16, BOOL, DTYPES, F16, F32, I8, I16, I32, I64, PLAIN, Q4_1, Q6_K, Q8_0, U8, DType,
                             Tensor)
from tests.ops import quantisers
from tests.ops.cases import FLOATS, Case, noise, rounded, same, tensor, values, witness


def bits(want: np.ndarray) -> Callable:
    """Exactly these stored bits and this shape."""
    want = np.asarray(want)

    def check(got: Tensor) -> None:
        assert got.data.shape == want.shape, f"shape {got.data.shape}, expected {want.shape}"
        assert got.data.dtype == want.dtype and got.data.tobytes() == want.tobytes(), "the bits differ"
    return check


def raw(shape: tuple[int, ...], dtype: DType, seed: int = 0) -> Tensor:
    """Random bits of a dtype: floats include NaN with payloads, which moves must keep."""
    count = int(np.prod(shape)) * dtype.nbytes
    data = np.random.default_rng([seed, count]).integers(0, 256, count, dtype=np.uint8)
    if dtype is BOOL:
        data &= 1
    return Tensor(dtype, shape, data.view(dtype.numpy).reshape(shape))


def blocks(shape: tuple[int, ...], dtype: DType, seed: int = 0) -> Tensor:
    """Random packed rows whose scales are ordinary numbers."""
    rows = np.random.default_rng([seed, 7]).integers(0, 256, (*shape[:-1], shape[-1] // dtype.block, dtype.nbytes),
                                                     dtype=np.uint8)
    places = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82),
              "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (),
              "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    scale = np.random.default_rng([seed, 8]).uniform(0.001, 0.02, rows.shape[:-1]).astype("<f2")
    if dtype.name == "MXFP4":                            # an exponent in place of a scale
        rows[..., 0] = 118 + rows[..., 0] % 6
    for at in places[dtype.name]:
        rows[..., at:at + 2] = scale[..., None].view(np.uint8)
    return Tensor.blocks(dtype, shape, rows)


def decoded(t: Tensor) -> np.ndarray:
    """The gguf package's values of a block tensor."""
    return quants.dequantize(t.data, gguf.GGMLQuantizationType[t.dtype.name])


@witness("TENSOR")
def make() -> Iterator[Case]:
    for dtype in PLAIN:
        for i, shape in enumerate([(), (0,), (1,), (5, 3), (1, 2, 3, 4, 5), (70,)]):
            yield Case(f"{dtype} {shape}", {"shape": shape, "dtype": dtype.name, "fill": 1.0},
                       same(np.full(shape, True if dtype is BOOL else 1)), shape)
    yield Case("a float register", {"shape": (3,), "value": 0.1}, same(np.full(3, float(np.float32(0.1)))))
    yield Case("an integer register wraps", {"shape": (2,), "dtype": "U8", "value": 300},
               same(np.full(2, 44, np.uint8)))
    yield Case("BF16 rounds", {"shape": (2,), "dtype": "BF16", "value": 0.1},
               same(np.full(2, float(ml_dtypes.bfloat16(0.1)))))


@witness("CAST")
def cast() -> Iterator[Case]:
    special = np.array([0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 127.5, 128.5, -128.5, 255.5, 1e10, -1e10, 3e38, -3e38,
                        65519.9,
                        65520.0, np.inf, -np.inf, np.nan, 1e-45, 2.0 ** 31, 2.0 ** 63, -2.0 ** 63, 1 + 2.0 ** -8,
                        1 + 3 * 2.0 ** -8, 1 + 2.0 ** -11, 1 + 3 * 2.0 ** -11], np.float32)
    floats = np.concatenate([special, noise(131, seed=1, scale=200)])
    for source in FLOATS:
        x = tensor(floats, source)
        for target in PLAIN:
            yield Case(f"{source} to {target}", {"x": x, "dtype": target.name}, same(_cast_float(values(x), target)),
                       floats.shape)
    for source in (I8, U8, I16, I32, I64):
        x = raw((71,), source, 3)
        for target in PLAIN:
            if target in FLOATS:
                want = rounded(x.data.astype(np.float32).astype(np.float64), target)
            else:
                want = np.array([_wrap(int(v), target) for v in x.data])
            yield Case(f"{source} to {target}", {"x": x, "dtype": target.name}, same(want), (71,))
    flags = Tensor.of(np.array([True, False, True]))
    for target in PLAIN:
        yield Case(f"BOOL to {target}", {"x": flags, "dtype": target.name},
                   same(np.array([True, False, True] if target is BOOL else [1, 0, 1])))
    for shape in [(0,), (), (1,), (3, 5)]:
        x = tensor(noise(*shape))
        yield Case(f"shape {shape}", {"x": x, "dtype": "F16"}, same(rounded(values(x), F16)), shape)


def _wrap(v: int, target: DType) -> int:
    if target is BOOL:
        return v != 0
    n = 8 * target.nbytes
    v %= 2 ** n
    return v if target is U8 or v < 2 ** (n - 1) else v - 2 ** n


def _cast_float(v: np.ndarray, target: DType) -> np.ndarray:
    if target in FLOATS:
        return rounded(v, target)
    if target is BOOL:
        return np.array([x != 0 for x in v])
    n = 8 * target.nbytes
    low, high = (0, 2 ** n - 1) if target is U8 else (-2 ** (n - 1), 2 ** (n - 1) - 1)

    def one(x: float) -> int:
        if np.isnan(x):
            return 0
        return high if x >= high else low if x <= low else min(max(round(x), low), high)
    return np.array([one(float(x)) for x in v])


@witness("QUANTIZE")
def quantize() -> Iterator[Case]:
    for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "TQ1_0", "TQ2_0"):
        times = DTYPES[name].block // 32
        for i, shape in enumerate([(0, 32), (32,), (1, 32), (3, 96), (2, 3, 64)]):
            shape = (*shape[:-1], shape[-1] * times)
            x = noise(*shape, seed=i)
            if x.size:
                x[..., :32] = np.rint(x[..., :32] * 4)            # exact halves and equal magnitudes
            want = quants.quantize(x, gguf.GGMLQuantizationType[name]) if x.size else np.zeros(
                (0, DTYPES[name].nbytes), np.uint8)
            yield Case(f"{name} {shape}", {"x": tensor(x), "type": name}, bits(want))
        half = tensor(noise(3, 64 * times, seed=9), F16)
        yield Case(f"{name} of F16", {"x": half, "type": name},
                   bits(quants.quantize(values(half).astype(np.float32), gguf.GGMLQuantizationType[name])))
        zero = np.zeros((1, 32 * times), np.float32)
        yield Case(f"{name} of zeros", {"x": tensor(zero), "type": name},
                   bits(quants.quantize(zero, gguf.GGMLQuantizationType[name])))
    for name, search in (("Q4_K", quantisers.q4_k), ("Q6_K", quantisers.q6_k)):
        x = noise(3, 256, seed=2)
        x[1, :64], x[2] = 0, np.abs(x[2]) + np.float32(0.5)
        yield Case(name, {"x": tensor(x), "type": name}, bits(np.array([search(row) for row in x])))
        yield Case(f"{name}, no rows", {"x": tensor(noise(0, 256)), "type": name},
                   bits(np.zeros((0, DTYPES[name].nbytes), np.uint8)))


@witness("DEQUANT")
def dequant() -> Iterator[Case]:
    for dtype in DTYPES.values():
        if dtype.is_block:
            for i, shape in enumerate([(dtype.block,), (3, dtype.block * 2), (2, 2, dtype.block)]):
                x = blocks(shape, dtype, i)
                yield Case(f"{dtype} {shape}", {"x": x}, same(decoded(x).astype(np.float64)), shape)
    for dtype in FLOATS:
        for shape in [(0,), (1,), (5,)]:
            x = tensor(noise(*shape), dtype)
            yield Case(f"{dtype}", {"x": x}, same(values(x)), shape)


MOVED = (F32, BF16, I8, I64, BOOL)


@witness("RESHAPE")
def reshape() -> Iterator[Case]:
    for dtype in MOVED:
        for shape, to, want in [((6,), (2, 3), (2, 3)), ((2, 3), (-1,), (6,)), ((0, 3), (3, 0), (3, 0)),
                                ((), (1, 1), (1, 1)),
                                ((1,), (), ()), ((7, 11), (11, -1), (11, 7)), ((2, 3, 4), (4, -1, 1, 3), (4, 2, 1, 3))]:
            x = raw(shape, dtype)
            yield Case(f"{dtype} {shape} to {to}", {"x": x, "shape": to}, bits(x.data.reshape(want)), want)
    x = blocks((4, 64), Q8_0)
    yield Case("Q8_0 rows", {"x": x, "shape": (2, 2, 64)}, bits(x.data.reshape(2, 2, -1)), (2, 2, 64))


@witness("SLICE")
def slice_() -> Iterator[Case]:
    for dtype in MOVED:
        x, m = raw((131,), dtype), raw((3, 7, 5), dtype, 1)
        yield Case(f"{dtype} window", {"x": x, "start": 3, "len": 65}, bits(x.data[3:68]), (65,))
        yield Case(f"{dtype} rest", {"x": x, "start": 130}, bits(x.data[130:]), (1,))
        yield Case(f"{dtype} step", {"x": x, "start": 1, "len": 100, "step": 7}, bits(x.data[1:101:7]))
        yield Case(f"{dtype} axis", {"x": m, "start": -4, "len": 4, "axis": 1}, bits(m.data[:, -4:]))
        yield Case(f"{dtype} last axis", {"x": m, "start": 1, "len": 3, "step": 2, "axis": -1},
                   bits(m.data[..., 1:4:2]))
        yield Case(f"{dtype} nothing", {"x": x, "start": 5, "len": 0}, bits(x.data[:0]), (0,))
    for shape in ((0,), (1,)):
        x = raw(shape, F32)
        yield Case(f"{shape}", {"x": x}, bits(x.data), shape)
    w = blocks((5, 64), Q4_1)
    yield Case("rows of blocks", {"x": w, "start": 1, "len": 2}, bits(w.data[1:3]), None)


@witness("CONCAT")
def concat() -> Iterator[Case]:
    for dtype in MOVED:
        for shapes, axis in [(((3,), (5,)), 0), (((0,), (1,)), 0), (((2, 3), (2, 65)), 1), (((2, 3), (4, 3)), -2),
                             (((1, 2), (1, 2), (3, 2)), 0), (((2, 1), (2, 2), (2, 0), (2, 3)), 1)]:
            parts = [raw(s, dtype, i) for i, s in enumerate(shapes)]
            yield Case(f"{dtype} {shapes}", {**dict(zip("abcd", parts)), "axis": axis},
                       bits(np.concatenate([p.data for p in parts], axis)))


@witness("BROADCAST")
def broadcast() -> Iterator[Case]:
    for dtype in MOVED:
        for shape, to in [((), (2, 2)), ((1,), (65,)), ((3, 1), (3, 5)), ((5,), (3, 5)), ((0,), (2, 0)),
                          ((2, 1, 3), (2, 4, 3)),
                          ((70,), (70,))]:
            x = raw(shape, dtype)
            yield Case(f"{dtype} {shape} to {to}", {"x": x, "shape": to}, bits(np.broadcast_to(x.data, to).copy()), to)


@witness("PAD")
def pad() -> Iterator[Case]:
    for dtype in MOVED:
        for shape, axis, before, after in [((3,), 0, 1, 2), ((0,), 0, 1, 0), ((1,), 0, 0, 0), ((2, 65), 1, 3, 0),
                                           ((2, 3, 4), -2, 1, 1)]:
            x = raw(shape, dtype)
            width = [(0, 0)] * len(shape)
            width[axis] = (before, after)
            fill = tensor([1.0], dtype).data[0]
            yield Case(f"{dtype} {shape}", {"x": x, "axis": axis, "before": before, "after": after, "value": 1.0},
                       bits(np.pad(x.data, width, constant_values=fill)))


@witness("TILE")
def tile() -> Iterator[Case]:
    for dtype in MOVED:
        for shape, axis, reps in [((3,), 0, 2), ((0,), 0, 3), ((1,), 0, 65), ((2, 65), 1, 2), ((2, 3), -2, 3),
                                  ((3,), 0, 0)]:
            x = raw(shape, dtype)
            counts = [1] * len(shape)
            counts[axis] = reps
            yield Case(f"{dtype} {shape}", {"x": x, "axis": axis, "reps": reps}, bits(np.tile(x.data, counts)))


@witness("TRANSPOSE")
def transpose() -> Iterator[Case]:
    for dtype in MOVED:
        for shape, axes in [((2, 3), ()), ((2, 3), (1, 0)), ((0, 3), (1, 0)), ((1,), (0,)), ((3, 5, 7), (2, 0, 1)),
                            ((1, 2, 3, 4, 5), (4, 2, 0, 1, 3)), ((), ())]:
            x = raw(shape, dtype)
            yield Case(f"{dtype} {shape} {axes}", {"x": x, "axes": axes},
                       bits(np.transpose(x.data, axes or None).copy()))


@witness("GATHER")
def gather() -> Iterator[Case]:
    rng = np.random.default_rng(5)
    for dtype in MOVED:
        for shape, axis, index in [((5,), 0, (3,)), ((5, 3), 0, (67,)), ((2, 9), 1, (2, 3)), ((5,), 0, (0,)),
                                   ((5, 2), -1, ()),
                                   ((1,), 0, (1,))]:
            x = raw(shape, dtype)
            i = rng.integers(0, shape[axis], index)
            yield Case(f"{dtype} {shape} {index}", {"table": x, "index": tensor(i, I32), "axis": axis},
                       bits(np.take(x.data, i, axis)))
    w = blocks((5, 256), Q6_K)
    yield Case("rows of blocks", {"table": w, "index": tensor([4, 0], I64)}, bits(w.data[[4, 0]]))
    yield from _scatter(rng)


def _scatter(rng: np.random.Generator) -> Iterator[Case]:
    for n in (0, 1, 7, 100):
        acc, new, i = noise(5, 3, seed=1), noise(n, 3, seed=2), rng.integers(0, 5, n)
        added, greatest = acc.copy(), acc.copy()
        for at, row in zip(i, new):
            for c in range(3):
                added[at, c] = np.float32(float(added[at, c]) + float(row[c]))
                greatest[at, c] = max(greatest[at, c], row[c])
        common = {"table": tensor(new), "index": tensor(i, I64), "acc": tensor(acc)}
        yield Case(f"SCATTER_ADD {n}", {**common, "mode": "SCATTER_ADD"}, bits(added))
        yield Case(f"SCATTER_MAX {n}", {**common, "mode": "SCATTER_MAX"}, bits(greatest))
    acc, new = tensor([[1, 2, 3]], I32), tensor([[10, 20]], I32)
    yield Case("axis 1", {"table": new, "index": tensor([2, 2], I32), "acc": acc, "axis": 1, "mode": "SCATTER_ADD"},
               same(np.array([[1, 2, 33]], np.int32)))
    nan = tensor([np.nan, 1.0, np.nan])
    yield Case("MAX ignores NaN", {"table": nan, "index": tensor([0, 0, 1], I32), "acc": tensor([0.5, 2.0]),
                                   "mode": "SCATTER_MAX"}, same(np.array([1.0, 2.0])))
