"""The integer matmuls against their definition, bytes equal, for odd sizes and every token tile."""
import numpy as np
import pytest

from m3jit.isa.types import DTYPES
from m3jit.kernels import layout, qmatmul, quantize
from tests.kernels import reference
from tests.kernels.executors import run

TYPES = [d.name for d in layout.PACKED]


def activations(rng, rows, cols, block):
    x = rng.normal(0, 1, (rows, cols)).astype(np.float32)
    x[0, :block] = 0                                     # a block of zeros
    if cols > block:
        x[-1, block:2 * block] = 1e-38                   # 127 / amax overflows
    return x


def records(x, block):
    out = np.zeros(quantize.activation_bytes(*x.shape, block), np.uint8)
    run(quantize.quantize_activation(block), [x, out, x.size // block])
    return out


@pytest.mark.parametrize("block", (32, 256))
def test_quantize_activation_records(block):
    rng = np.random.default_rng(1)
    x = activations(rng, 3, 3 * block, block)
    x[1, 5], x[2, 7] = np.nan, np.inf
    q, d = reference.quantize(x, block)
    got = records(x, block).reshape(-1, quantize.RECORD_BYTES[block])
    assert got[:, :block].tobytes() == q.tobytes()
    words = got.view(np.int32)
    s = q.reshape(-1, block).astype(np.int64)
    if block == 32:
        assert words[:, 8].tobytes() == d.reshape(-1).tobytes()
        assert (words[:, 9] == -128 * s.sum(1)).all() and (words[:, 10] == -8 * s.sum(1)).all()
        assert (got.view(np.float32)[:, 11] == s.sum(1)).all()
    else:
        assert words[:, 64].tobytes() == d.reshape(-1).tobytes()
        sub = s.reshape(-1, 8, 32).sum(2)
        low, high = (got[:, at:at + 8].view(np.int8).astype(np.int64) for at in (260, 268))
        assert (128 * high + low == sub).all()
        assert (words[:, 69:85] == -32 * s.reshape(-1, 16, 16).sum(2)).all()
        assert (words[:, 85] == -s.sum(1)).all()
    q_out, d_out = np.empty_like(q), np.empty_like(d)
    run(quantize.quantize_rows(block), [x, q_out, d_out, x.size // block])
    assert q_out.tobytes() == q.tobytes() and d_out.tobytes() == d.tobytes()


@pytest.mark.parametrize("name", TYPES)
def test_extreme_sums_are_exact(name):
    """All codes and activations at their limits: sums of +-127 stay exact in the signed halves and in int32."""
    dtype = DTYPES[name]
    cols = dtype.block
    raw = reference.random_blocks(np.random.default_rng(5), dtype, 16, cols)
    kept = {at + i for at in reference.SCALES[name] for i in range(2)} | ({0} if name == "MXFP4" else set())
    raw[:, [i for i in range(dtype.nbytes) if i not in kept]] = 0xFF
    for sign in (1, -1):
        x = np.full((1, cols), sign, np.float32)
        y = np.empty((1, 16), np.float32)
        run(qmatmul.qmatmul(name), [records(x, dtype.block), layout.repack(dtype, raw, 16, cols), y, 1, cols, 16])
        assert y.tobytes() == reference.qmatmul(x, raw, dtype).tobytes()


ALL_TILES = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_NL")


@pytest.mark.parametrize("name, tokens", [(n, t) for n in TYPES for t in (0, 1, 3, 8, 9, 13)
                                          if n in ALL_TILES or t in (1, 13)])
def test_qmatmul(name, tokens):
    dtype = DTYPES[name]
    rows, cols = (50, 3 * dtype.block) if dtype.block == 32 else (39, 2 * dtype.block)
    rng = np.random.default_rng(tokens)
    raw = reference.random_blocks(rng, dtype, rows, cols)
    x = activations(rng, max(tokens, 1), cols, dtype.block)[:tokens]
    w = layout.repack(dtype, raw, rows, cols)
    y = np.full((tokens, rows), 7, np.float32)
    args = [records(x, dtype.block), w, y]
    run(qmatmul.qmatmul(name), [*args, tokens, cols, rows])
    expected = reference.qmatmul(x, raw, dtype)
    assert y.tobytes() == expected.tobytes()
    bias, res = (rng.normal(0, 1, s).astype(np.float32) for s in (rows, (tokens, rows)))
    run(qmatmul.qmatmul(name, bias=True, residual=True), [*args, bias, res, tokens, cols, rows])
    assert y.tobytes() == ((expected + bias) + res).tobytes()


@pytest.mark.parametrize("rows", (1, 16, 17, 32, 33))
def test_qmatmul_row_tiles(rows):
    dtype = DTYPES["Q4_1"]
    rng = np.random.default_rng(rows)
    raw, x = reference.random_blocks(rng, dtype, rows, 64), activations(rng, 1, 64, 32)
    y = np.empty((1, rows), np.float32)
    run(qmatmul.qmatmul("Q4_1"), [records(x, 32), layout.repack(dtype, raw, rows, 64), y, 1, 64, rows])
    assert y.tobytes() == reference.qmatmul(x, raw, dtype).tobytes()


@pytest.mark.parametrize("tokens", (1, 5, 13))
@pytest.mark.parametrize("gate, up", (("Q4_1", "Q4_1"), ("Q8_0", "Q5_0"), ("Q4_K", "Q4_K"), ("Q5_K", "Q5_K"),
                                      ("Q4_K", "Q6_K")))
def test_qmatmul_gated(gate, up, tokens):
    rows, cols = 21, 512
    rng = np.random.default_rng(7)
    raws = [reference.random_blocks(rng, DTYPES[n], rows, cols) for n in (gate, up)]
    x = activations(rng, tokens, cols, DTYPES[gate].block)
    packed = [layout.repack(DTYPES[n], raw, rows, cols) for n, raw in zip((gate, up), raws)]
    if len(qmatmul.gated_weights(DTYPES[gate])) == 1:
        packed = [layout.alternate(packed, rows)]
    y = np.empty((tokens, rows), np.float32)
    run(qmatmul.qmatmul_gated(gate, up), [records(x, DTYPES[gate].block), *packed, y, tokens, cols, rows])
    g, u = (reference.qmatmul(x, raw, DTYPES[n]) for n, raw in zip((gate, up), raws))
    assert y.tobytes() == (reference.silu(g) * u).tobytes()
