"""Float products in both orientations and every weight type, against the eager namespace, bytes equal."""
import numpy as np
import pytest

from m3jit.ir.eager import EagerXp
from m3jit.isa.types import BF16, DTYPES, Tensor
from m3jit.kernels import matmul
from tests.kernels import reference
from tests.kernels.executors import run

XP = EagerXp()


def weight(rng, name, rows, cols):
    if DTYPES[name].is_block:
        return Tensor.blocks(DTYPES[name], (rows, cols), reference.random_blocks(rng, DTYPES[name], rows, cols))
    w = rng.normal(0, 1, (rows, cols)).astype(np.float32)
    if name == "BF16":
        return Tensor.of((w.view(np.uint32) >> 16).astype(np.uint16), BF16)
    return Tensor.of(w.astype(DTYPES[name].numpy))


@pytest.mark.parametrize("tokens", (0, 1, 3, 9, 13))
@pytest.mark.parametrize("name, rows, cols", (("F32", 37, 200), ("F16", 21, 64), ("BF16", 5, 33), ("F32", 3, 1),
                                              ("Q8_0", 20, 96), ("Q4_0", 5, 32), ("Q4_1", 5, 160), ("Q4_K", 6, 512),
                                              ("Q6_K", 6, 256), ("Q5_0", 5, 32), ("Q5_K", 3, 256), ("TQ1_0", 3, 256),
                                              ("IQ4_NL", 5, 96)))
def test_rows(name, rows, cols, tokens):
    rng = np.random.default_rng(tokens)
    w, x = weight(rng, name, rows, cols), rng.normal(0, 1, (tokens, cols)).astype(np.float32)
    y = np.full((tokens, rows), 7, np.float32)
    run(matmul.matmul_rows(name), [x, w.data, y, tokens, cols, rows])
    assert y.tobytes() == XP.matmul(Tensor.of(x), w, transposed=True).tobytes()


@pytest.mark.parametrize("tokens", (0, 1, 3, 9))
@pytest.mark.parametrize("name, cols, outs", (("F32", 100, 37), ("F16", 64, 70), ("BF16", 3, 5), ("F32", 130, 1)))
def test_columns(name, cols, outs, tokens):
    rng = np.random.default_rng(tokens)
    w, x = weight(rng, name, cols, outs), rng.normal(0, 1, (tokens, cols)).astype(np.float32)
    y = np.full((tokens, outs), 7, np.float32)
    run(matmul.matmul_columns(name), [x, w.data, y, tokens, cols, outs])
    assert y.tobytes() == XP.matmul(Tensor.of(x), w).tobytes()


@pytest.mark.parametrize("tokens", (0, 1, 3, 9))
@pytest.mark.parametrize("name, rows, cols", (("F32", 37, 100), ("F16", 5, 64), ("Q8_0", 20, 96)))
def test_a_matrix_for_each_row(name, rows, cols, tokens):
    """Group g of a token has the bytes of its own product with matrix g."""
    rng, groups = np.random.default_rng(tokens), 3
    ws, x = [weight(rng, name, rows, cols) for _ in range(groups)], rng.normal(0, 1, (tokens, groups, cols)).astype(
        np.float32)
    data = np.stack([w.data for w in ws])
    want = np.stack([XP.matmul(Tensor.of(x[:, g]), w, transposed=True).data for g, w in enumerate(ws)], axis=1)
    y = np.full((tokens, groups, rows), 7, np.float32)
    run(matmul.matmul_rows(name, True), [x, data, y, tokens, cols, rows, groups])
    assert y.tobytes() == want.tobytes()
    assert XP.matmul(Tensor.of(x), Tensor(ws[0].dtype, (groups, rows, cols), data), transposed=True).data.tobytes() == \
        want.tobytes()
    if not ws[0].dtype.is_block:
        y[:] = 7
        run(matmul.matmul_columns(name, True), [x, np.ascontiguousarray(data.transpose(0, 2, 1)), y, tokens, cols, rows,
                                                groups])
        assert y.tobytes() == want.tobytes()


def test_padded_steps_are_performed():
    """A lane that holds -0 becomes +0 in its padded step; without the step the tree would give -0."""
    x, w = np.full((1, 96), -1e-30, np.float32), np.full((1, 96), 1e-30, np.float32)
    y = np.empty((1, 1), np.float32)
    run(matmul.matmul_rows("F32"), [x, w, y, 1, 96, 1])
    assert y.tobytes() == XP.matmul(Tensor.of(x), Tensor.of(w), transposed=True).tobytes()
    run(matmul.matmul_columns("F32"), [x, w.T.copy(), y, 1, 96, 1])
    assert y.tobytes() == XP.matmul(Tensor.of(x), Tensor.of(w), transposed=True).tobytes()


def test_not_finite():
    x = np.array([[np.inf, 1, np.nan], [1, -np.inf, 0]], np.float32)
    w = np.array([[0, 1, 0], [1, 1, 1]], np.float32)
    y = np.empty((2, 2), np.float32)
    run(matmul.matmul_rows("F32"), [x, w, y, 2, 3, 2])
    assert y.tobytes() == XP.matmul(Tensor.of(x), Tensor.of(w), transposed=True).tobytes()
