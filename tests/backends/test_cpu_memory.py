"""Loads, stores, gathers, scatters, masks, scratch, and operations across lanes, against NumPy lanes."""
from __future__ import annotations

import numpy as np
import pytest

from m3jit.ir.loop import MEMORY
from m3jit.ir.loop_builder import Builder
from tests.backends.cpu_engines import LEVELS, check, engine
from tests.loop_eval import STORAGE, bf16_bits

LANES = (1, 8, 16, 32, 64)


def source(dtype: str, n: int, seed: int = 0) -> np.ndarray:
    """Random elements, every bit pattern possible (floats: no NaN)."""
    rng = np.random.default_rng(seed)
    if dtype == "bf16":
        return bf16_bits(rng.standard_normal(n).astype(np.float32))
    if dtype in ("f16", "f32", "f64"):
        return (rng.standard_normal(n) * 2.0 ** rng.integers(-9, 9, n)).astype(STORAGE[dtype])
    return rng.integers(0, 256, n * MEMORY[dtype][0], dtype=np.uint8).view(STORAGE[dtype])


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", MEMORY)
def test_contiguous(dtype, lanes):
    """y[i] = x[i + 3] with a tail mask, and unmasked into a second output."""
    b = Builder("copy", lanes)
    x, y, z = b.ptr("x", "r", dtype), b.ptr("y", "w", dtype), b.ptr("z", "w", dtype)
    n = b.scalar("n")
    b.set_grid((n + (lanes - 1)) // lanes)
    base = b.group * lanes
    inside = b.in_range(base, n)
    v = b.load_lanes(dtype, x.at(3 * MEMORY[dtype][0]), base, mask=inside)
    b.store_lanes(dtype, y, base, v, mask=inside)
    b.store_lanes(dtype, z, base, b.load_lanes(dtype, x, base))
    kernel = b.finish()
    for n in (0, 1, lanes, lanes + 5, 3 * lanes - 1):
        size = -(-n // lanes) * lanes
        check(kernel, [source(dtype, size + 3), source(dtype, n + 2, 1), source(dtype, size, 2), n])


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", MEMORY)
def test_arbitrary_masks(dtype, lanes):
    """Contiguous accesses under a mask that is no prefix; sentinels stay."""
    b = Builder("masked", lanes)
    m, x, y = b.ptr("m", "r", "u8"), b.ptr("x", "r", dtype), b.ptr("y", "rw", dtype)
    b.set_grid(b.scalar("groups"))
    base = b.group * lanes
    on = b.pure("ne", b.load_lanes("u8", m, base), b.i32(0))
    b.store_lanes(dtype, y, base, b.load_lanes(dtype, x, base, mask=on), mask=on)
    other = b.logical_not(on)
    b.store_lanes(dtype, y.at(lanes * 4 * MEMORY[dtype][0]), base, b.load_lanes(dtype, x, base, mask=on), mask=other)
    kernel = b.finish()
    rng = np.random.default_rng(3)
    for density in (0.0, 0.5, 1.0):
        mask = (rng.random(4 * lanes) < density).astype(np.uint8)
        check(kernel, [mask, source(dtype, 4 * lanes), source(dtype, 8 * lanes, 1), 4])


@pytest.mark.parametrize("index", ("i32", "i64"))
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", MEMORY)
def test_gather_and_scatter(dtype, lanes, index):
    """y[p[i]] = x[q[i]], unmasked and masked; the masked-off indices point far outside."""
    b = Builder("permute", lanes)
    p, q, m = b.ptr("p", "r", index), b.ptr("q", "r", index), b.ptr("m", "r", "u8")
    x, y, z = b.ptr("x", "r", dtype), b.ptr("y", "rw", dtype), b.ptr("z", "rw", dtype)
    b.set_grid(b.scalar("groups"))
    base = b.group * lanes
    to, fro = b.load_lanes(index, p, base), b.load_lanes(index, q, base)
    b.store(dtype, y, to, b.load(dtype, x, fro))
    on = b.pure("ne", b.load_lanes("u8", m, base), b.i32(0))
    far = b.const(index, 1 << 30)
    v = b.load(dtype, x, b.select(on, fro, far), mask=on)
    b.store(dtype, z, b.select(on, to, far), v, mask=on)
    kernel = b.finish()
    rng, n = np.random.default_rng(5), 3 * lanes
    t = np.int32 if index == "i32" else np.int64
    check(kernel, [rng.permutation(n).astype(t), rng.integers(0, n, n).astype(t),
                   (rng.random(n) < 0.6).astype(np.uint8), source(dtype, n), source(dtype, n, 1), source(dtype, n, 2),
                   3])


@pytest.mark.parametrize("lanes", (16, 64))
def test_affine_indices(lanes):
    """Strided, reversed and shifted indices made from the lane number."""
    b = Builder("affine", lanes)
    x, y = b.ptr("x", "r", "i32"), b.ptr("y", "w", "i32")
    b.set_grid(b.scalar("groups"))
    wide = b.cvt(b.lane, "i64")
    base = b.group * lanes
    total = b.load("i32", x, base * 3 + wide * 3)
    total = total + b.load("i32", x, b.i64(lanes - 1) - wide + base)
    total = total + b.load("i32", x, base + (wide << b.i64(1)) - wide + 2)
    total = total + (b.lane * 5 + 7) + b.lane
    b.store("i32", y, base + wide, total)
    kernel = b.finish()
    check(kernel, [source("i32", 9 * lanes + 3), np.zeros(3 * lanes, np.int32), 3])


@pytest.mark.parametrize("dtype", MEMORY)
def test_uniform_accesses_with_a_mask(dtype):
    b = Builder("uniform", 16)
    x, y = b.ptr("x", "r", dtype), b.ptr("y", "rw", dtype)
    b.set_grid(4)
    on = b.pure("eq", b.group % 2, b.i64(1))
    v = b.load(dtype, x, b.select(on, b.group, b.i64(1 << 40)), mask=on)
    b.store(dtype, y, b.select(on, b.group, b.i64(1 << 40)), v, mask=on)
    b.store(dtype, y.at(4 * MEMORY[dtype][0]), b.group, v)
    check(b.finish(), [source(dtype, 4), source(dtype, 8, 1)])


def test_masks_that_wrap_or_lie_far_away():
    """base + lane < n near the ends of the i64 range, from parameters and from memory."""
    b = Builder("wrap", 64)
    m, o = b.ptr("m", "r", "i64"), b.ptr("o", "w", "i32")
    low, n = b.scalar("low"), b.scalar("n")
    b.set_grid(1)
    wide = b.cvt(b.lane, "i64")
    loaded = b.load("i64", m, 0)
    b.store_lanes("i32", o, 0, b.cvt(wide + loaded < n, "i32"))
    b.store_lanes("i32", o, 64, b.cvt(b.in_range(low, n), "i32"))
    b.store_lanes("i32", o, 128, b.cvt(b.in_range(low, loaded), "i32"))
    b.store_lanes("i32", o, 192, b.cvt(b.pure("le", wide + low, n), "i32"))
    kernel = b.finish()
    far = [0, 1, -1, 63, 64, -64, -(1 << 63), (1 << 63) - 1, 1 << 40]
    for loaded in far:
        for low in far[:7]:
            for n in far:
                check(kernel, [np.array([loaded], np.int64), np.zeros(256, np.int32), low, n], threads=(1,))


def all_halves() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def conversion_kernel(dtype: str, load: bool):
    b = Builder(f"{dtype}_{'load' if load else 'store'}", 64)
    x, y = b.ptr("x", "r", dtype), b.ptr("y", "w", "f32")
    b.set_grid(b.scalar("groups"))
    at = b.group * 64
    if load:
        b.store_lanes("f32", y, at, b.load_lanes(dtype, x, at))
    else:
        b.store_lanes(dtype, y, at, b.load_lanes("f32", x, at))
    return b.finish()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ("f16", "bf16"))
def test_every_16_bit_float_decodes(dtype, level):
    halves, out = all_halves(), np.zeros(1 << 16, np.float32)
    engine(level).kernel(conversion_kernel(dtype, True))([halves, out, 1 << 10])
    if dtype == "f16":
        expected = halves.view(np.float16).astype(np.float32).view(np.uint32)
        expected = np.where(np.isnan(expected.view(np.float32)), expected | 0x400000, expected)     # made quiet
    else:
        expected = halves.astype(np.uint32) << 16
    assert (out.view(np.uint32) == expected).all()


def conversion_inputs() -> np.ndarray:
    """Around every f16 and bf16 value: itself, the halfway point to the next and both neighbours of that; NaNs."""
    halves = all_halves()
    f16 = halves.view(np.float16).astype(np.float64)
    middles = []
    for grid in (f16[:0x7C00], np.append(f16[:0x7C00], 65536.0)):
        middle = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)          # exact: one more bit than f16
        middles += [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    bf = ((halves.astype(np.uint32) << 16) | 0x8000)
    bits = np.concatenate([bf, bf - 1, bf + 1, np.array([0x7F800001, 0x7FC00000, 0xFFC12345, 0x7FBFFFFF, 0xFF80FFFF,
                                                         0x7F7FFFFF, 0xFF7FFFFF], np.uint32)])
    values = np.concatenate([*middles, *(-m for m in middles), bits.view(np.float32)])
    return np.concatenate([values, np.zeros(-len(values) % 64, np.float32)])


@pytest.mark.parametrize("level", LEVELS)
def test_f16_encodes_to_nearest_even(level):
    x = conversion_inputs()
    out = np.zeros(len(x), np.uint16)
    engine(level).kernel(conversion_kernel("f16", False))([x, out, len(x) // 64])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32)
    payload = ((bits >> 16) & 0x8000 | 0x7E00 | (bits >> 13) & 0x3FF).astype(np.uint16)
    assert (out == np.where(np.isnan(x), payload, expected)).all()


@pytest.mark.parametrize("level", LEVELS)
def test_bf16_encodes_to_nearest_even(level):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = conversion_inputs()
    out = np.zeros(len(x), np.uint16)
    engine(level).kernel(conversion_kernel("bf16", False))([x, out, len(x) // 64])
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    quiet = ((x.view(np.uint32) >> 16) | 0x40).astype(np.uint16)
    assert (out == np.where(np.isnan(x), quiet, expected)).all()


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("type", ("f32", "f64", "i32", "i64"))
def test_across_lanes(type, lanes):
    b = Builder("across", lanes)
    x, y, s = b.ptr("x", "r", type), b.ptr("y", "w", type), b.ptr("s", "w", type)
    b.set_grid(3)
    at = b.group * lanes
    v = b.load_lanes(type, x, at)
    ops = ["add", "mul"] + (["fmin", "fmax"] if type[0] == "f" else ["imin", "imax", "and", "or"])
    for i, op in enumerate(ops):
        b.store(type, s, b.group * 16 + i, b.fold(v, op))
    b.store(type, s, b.group * 16 + 8, b.first(v))
    pair = b.fold_pairs([v, v + v], lambda own, other: [own[0] + other[0], own[1] * other[0]])
    b.store(type, s, b.group * 16 + 9, pair[0])
    b.store(type, s, b.group * 16 + 10, pair[1])
    b.store(type, s, b.group * 16 + 11, b.fold(b.first(v), "add"))
    for i, by in enumerate((1, lanes // 2, 3, lanes - 1, 24, 40)):
        shifted = b.shuffle_down(v, by) if 0 < by < lanes else v
        b.store_lanes(type, y, at * 6 + i * lanes, shifted)
    kernel = b.finish()
    special = source(type, 3 * lanes)
    if type[0] == "f":
        special[::7] = np.nan
        special[lanes:lanes + 3] = [-0.0, 0.0, np.inf][:min(3, lanes)] if lanes >= 3 else 0.0
    check(kernel, [special, np.zeros(18 * lanes, special.dtype), np.zeros(48, special.dtype)])


@pytest.mark.parametrize("lanes", (16, 64))
def test_scratch_loops_and_branches(lanes):
    """Reverses a block through scratch, folds in a loop with variables, and branches on uniform values."""
    b = Builder("control", lanes)
    x, y, s = b.ptr("x", "r", "f32"), b.ptr("y", "w", "f32"), b.ptr("s", "w", "f64")
    n = b.scalar("n")
    b.set_grid(2)
    box = b.scratch("box", "f32", lanes)
    wide = b.cvt(b.lane, "i64")
    total, count = b.var("f32", 0.0), b.var("i64", 0, varying=False)
    with b.loop(0, n, lanes) as i:
        inside = b.in_range(i, n)
        v = b.load_lanes("f32", x, i, mask=inside)
        b.store("f32", box, b.i64(lanes - 1) - wide, v)
        b.sync()
        total.set(b.fma(b.load_lanes("f32", box, 0), v, total.get()))
        b.sync()
        with b.if_(b.pure("eq", (i // lanes) % 2, b.group)):
            count.set(count.get() + 1)
            with b.loop(0, 3) as j:
                count.set(count.get() + j)
        with b.else_():
            total.set(-total.get())
    b.store_lanes("f32", y, b.group * lanes, total.get())
    b.store("f64", s, b.group, b.cvt(b.fold(total.get(), "add"), "f64") + b.cvt(count.get(), "f64"))
    kernel = b.finish()
    for n in (0, 1, 5 * lanes, 5 * lanes + 3):
        check(kernel, [source("f32", n), np.zeros(2 * lanes, np.float32), np.zeros(2), n])


def test_in_place():
    b = Builder("inplace", 64)
    x, n = b.ptr("x", "rw", "f32"), b.scalar("n")
    b.set_grid((n + 63) // 64)
    base = b.group * 64
    inside = b.in_range(base, n)
    v = b.load_lanes("f32", x, base, mask=inside)
    w = b.load_lanes("f32", x, base, mask=inside)
    b.store_lanes("f32", x, base, v * w, mask=inside)
    check(b.finish(), [source("f32", 1000), 1000])
