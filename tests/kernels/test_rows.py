"""Embedding, dequantisation, rotary positions, argmax: bytes equal to the eager namespace."""
import numpy as np
import pytest

from m3jit.ir.eager import EagerXp
from m3jit.ir.rope_frequencies import rope_frequencies
from m3jit.isa.types import DTYPES, WEIGHTS, Tensor
from m3jit.kernels import argmax, embed, rope
from tests.kernels.executors import run
from tests.kernels.test_matmul import weight

XP = EagerXp()
TYPES = tuple(d.name for d in WEIGHTS)


@pytest.mark.parametrize("name", TYPES)
def test_embed(name):
    rng = np.random.default_rng(0)
    cols = 1280 if DTYPES[name].is_block else 1100
    table = weight(rng, name, 7, cols)
    if name == "F32":
        table.data[3, 5] = np.nan
    ids = np.array([6, 0, 3, 3], np.int64)
    y = np.empty((4, cols), np.float32)
    run(embed.embed(name), [ids, table.data, y, 4, cols])
    expected = XP.embed(Tensor.of(ids), table).tobytes()
    assert y.tobytes() == expected
    y[:] = 0
    run(embed.embed(name, "i32"), [ids.astype(np.int32), table.data, y, 4, cols])
    assert y.tobytes() == expected


@pytest.mark.parametrize("name", TYPES[3:])
def test_dequantize(name):
    x = weight(np.random.default_rng(0), name, 5, 1024)
    y = np.empty((5, 1024), np.float32)
    run(embed.dequantize(name), [x.data, y, y.size])
    assert y.tobytes() == XP.dequantize(x).tobytes()


@pytest.mark.parametrize("pairing", ("NORM", "NEOX"))
@pytest.mark.parametrize("dim, heads, pos", ((64, 3, 5), (2, 2, 0), (6, 1, 1000), (80, 2, 131071), (128, 1, 7),
                                             (24, 5, 10 ** 9)))
def test_rope(dim, heads, pos, pairing):
    rng = np.random.default_rng(dim)
    x = rng.normal(0, 1, (3, heads * dim)).astype(np.float32)
    x[0, 0], x[1, -1] = np.inf, np.nan
    freq = rope_frequencies(10000.0, dim)
    y = np.empty_like(x)
    run(rope.rope(dim, pairing), [x, freq, y, 3, heads, pos])
    assert y.tobytes() == XP.rope(Tensor.of(x), pos, head_dim=dim, theta=10000.0, pairing=pairing).tobytes()
    factors = rng.uniform(0.5, 8, dim // 2).astype(np.float32)
    scaled = (rope_frequencies(5e5, dim) * np.float32(0.25)).astype(np.float32)
    run(rope.rope(dim, pairing, factors=True), [x, scaled, factors, y, 3, heads, pos])
    assert y.tobytes() == XP.rope(Tensor.of(x), pos, head_dim=dim, theta=5e5, pairing=pairing, scale=0.25,
                                  factors=Tensor.of(factors)).tobytes()


def hard_values(rng, shape, dtype):
    x = rng.integers(-4, 4, shape).astype(dtype)
    if x.dtype.kind == "f" and x.size:
        flat = x.reshape(-1)
        flat[::3], flat[::5], flat[1::7] = np.nan, -0.0, -np.inf
    return x


@pytest.mark.parametrize("dtype, memory", ((np.float32, "f32"), (np.float16, "f16"), (np.int8, "i8"), (np.uint8, "u8"),
                                           (np.int32, "i32"), (np.int64, "i64")))
@pytest.mark.parametrize("shape", ((3, 1, 1), (2, 200, 1), (2, 9, 70), (1, 3, 5), (1, 64, 1)))
def test_argmax(dtype, memory, shape):
    rng = np.random.default_rng(3)
    for kind in range(3):
        x = hard_values(rng, shape, dtype)
        if kind and x.dtype.kind == "f":
            x[:] = np.nan
            if kind == 2:
                x[:, -1] = -np.inf
        elif kind:
            x[:] = np.iinfo(dtype).min
        out = np.empty((shape[0], 1, shape[2]), np.int64)
        expected = XP.argmax(Tensor.of(x), 1).tobytes()
        run(argmax.argmax_columns(memory), [x, out, shape[0], shape[1], shape[2]])
        assert out.tobytes() == expected
        if shape[2] == 1:
            run(argmax.argmax_rows(memory), [x, out, shape[0], shape[1]])
            assert out.tobytes() == expected
