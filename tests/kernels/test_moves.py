"""Strided copies, gather, scatter, reductions along inner axes, sorting and convolution against the eager namespace."""
import numpy as np
import pytest

from m3jit.ir.eager import EagerXp
from m3jit.isa.types import BF16, F16, F32, Tensor
from m3jit.kernels import conv, moves, reduce, sort
from tests.kernels.executors import run
from tests.kernels.test_rows import hard_values

XP = EagerXp()


def pad5(values, fill):
    return [fill] * (5 - len(values)) + list(values)


def copy(src, dst, shape, strides, targets, src_at=0, dst_at=0):
    """strided_copy with strides in elements."""
    targets = pad5(targets, 0)
    assert targets[4] == 1
    run(moves.strided_copy(src.itemsize), [src, dst, *pad5(shape, 1), *pad5(strides, 0), *targets[:4], src_at, dst_at])


def elements(a):
    return [s // a.itemsize for s in a.strides]


@pytest.mark.parametrize("dtype", (np.uint8, np.float16, np.int32, np.int64))
def test_strided_copy(dtype):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 200, (2, 3, 5, 7, 4)).astype(dtype)
    t = x.transpose(3, 1, 4, 0, 2)
    out = np.empty(t.shape, dtype)
    copy(x, out, t.shape, elements(t), elements(out))
    assert np.array_equal(out, t)
    m = rng.integers(0, 200, (70, 130)).astype(dtype)
    out = np.empty((130, 70), dtype)
    copy(m, out, out.shape, elements(m.T), elements(out))
    assert np.array_equal(out, m.T)
    part = m[3:60:4, 1:120:3]                                        # slice with steps
    out = np.empty(part.shape, dtype)
    copy(m, out, part.shape, elements(part), elements(out), src_at=3 * 130 + 1)
    assert np.array_equal(out, part)
    out = np.zeros((70, 140), dtype)                                 # into the middle of wider rows
    copy(m, out, m.shape, elements(m), elements(out), dst_at=10)
    assert np.array_equal(out[:, 10:], m) and not out[:, :10].any()
    out = np.empty((3, 1500), dtype)                                 # repeats
    copy(m, out, out.shape, (1, 0), elements(out), src_at=5)
    assert np.array_equal(out, np.repeat(m[0, 5:8, None], 1500, 1))
    copy(m, out, (0, 1500), (1, 0), (1500, 1))


@pytest.mark.parametrize("inner", (1, 3, 70))
@pytest.mark.parametrize("dtype", (np.uint8, np.float32, np.int64))
def test_gather(dtype, inner):
    rng = np.random.default_rng(1)
    x, i = rng.integers(0, 99, (2, 9, inner)).astype(dtype), rng.integers(0, 9, 67)
    out = np.empty((2, 67, inner), dtype)
    for index_type, index in (("i64", i), ("i32", i.astype(np.int32))):
        out[:] = 0
        run(moves.gather(x.itemsize, index_type), [x, index, out, 2, 9, 67, inner])
        assert np.array_equal(out, np.take(x, i, axis=1))


@pytest.mark.parametrize("mode", ("ADD", "MAX"))
@pytest.mark.parametrize("dtype, memory", ((np.float32, "f32"), (np.int8, "i8"), (np.int64, "i64")))
def test_scatter(dtype, memory, mode):
    rng = np.random.default_rng(2)
    acc, values = hard_values(rng, (2, 5, 70), dtype), hard_values(rng, (2, 11, 70), dtype)
    index = rng.integers(0, 5, 11)
    expected = XP.scatter(Tensor.of(acc), Tensor.of(index), Tensor.of(values), 1, mode)
    out = acc.copy()
    if memory == "f32":
        run(moves.float_copy("f32", "f32"), [acc, out, out.size])
    run(moves.scatter(memory, mode), [out, index, values, 2, 5, 11, 70])
    assert out.tobytes() == expected.tobytes()


def test_float_copy():
    x = np.array([1.0, -0.0, np.inf, 65520.0, 1e-8, 2049.0, 1.00390625, 3.4e38], np.float32)
    x = np.concatenate([x, np.array([0xFFC12345, 0x7F800001], np.uint32).view(np.float32), np.zeros(60, np.float32)])
    for target, dtype in (("f16", F16), ("bf16", BF16)):
        narrow, back = np.empty(70, dtype.numpy), np.empty(70, np.float32)
        run(moves.float_copy("f32", target), [x, narrow, 70])
        assert narrow.tobytes() == XP.cast(Tensor.of(x), dtype).tobytes()
        run(moves.float_copy(target, "f32"), [narrow, back, 70])
        assert back.tobytes() == XP.cast(Tensor(dtype, (70,), narrow), F32).tobytes()
        assert (back.view(np.uint32)[8:10] == 0x7FC00000).all()


@pytest.mark.parametrize("op", reduce.OPS)
@pytest.mark.parametrize("dtype, memory", ((np.float32, "f32"), (np.float16, "f16"), (np.int8, "i8"),
                                           (np.uint8, "u8"), (np.int32, "i32"), (np.int64, "i64")))
def test_reduce_columns(dtype, memory, op):
    rng = np.random.default_rng(4)
    for shape in ((2, 1, 3), (1, 130, 20), (2, 64, 16), (0, 3, 2)):
        for x in (hard_values(rng, shape, dtype), rng.normal(0, 9, shape).astype(dtype)):
            expected = XP.reduce(Tensor.of(x), op, 1)
            out = np.empty((shape[0], shape[2]), expected.data.dtype)
            run(reduce.reduce_columns(memory, op), [x, out, *shape])
            assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype, memory", ((np.float32, "f32"), (np.float16, "f16"), (np.int8, "i8"), (np.uint8, "u8"),
                                           (np.int16, "i16"), (np.int32, "i32"), (np.int64, "i64")))
def test_sort_and_topk(dtype, memory):
    rng = np.random.default_rng(6)
    wide = rng.normal(0, 1000, (2, 300)).astype(dtype)
    for x in (hard_values(rng, (2, 9), dtype), wide, wide[:, :1].copy()):
        rows, n = x.shape
        slow = n > 100                               # too long for the evaluator
        for descending in (False, True):
            values, indices = np.empty_like(x), np.empty(x.shape, np.int64)
            work = np.empty(sort.work_bytes(memory, rows, n), np.uint8)
            run(sort.sort_rows(memory, descending), [x, values, indices, work, rows, n], not slow)
            v, i = XP.sort(Tensor.of(x), 1, descending)
            assert indices.tobytes() == i.tobytes() and values.tobytes() == v.tobytes()
            for ordered in (True, False):
                for k in {1, (n + 1) // 2, n}:
                    values, indices = np.empty((rows, k), dtype), np.empty((rows, k), np.int64)
                    run(sort.topk_rows(memory, descending, ordered), [x, values, indices, work, rows, n, k],
                        evaluate=not slow and k == n)
                    v, i = XP.topk(Tensor.of(x), k, 1, descending, ordered)
                    assert indices.tobytes() == i.tobytes() and values.tobytes() == v.tobytes()


@pytest.mark.parametrize("x_shape, w_shape, options", (
    ((2, 3, 10), (5, 3, 3), {}), ((1, 4, 200), (6, 2, 5), {"groups": 2, "pad": 3, "stride": 2}),
    ((1, 2, 9, 8), (3, 2, 3, 2), {"pad": 2, "dilation": 2}), ((2, 4, 7, 70), (4, 1, 3, 3), {"groups": 4, "stride": 3}),
    ((1, 1, 1), (1, 1, 1), {})))
def test_conv(x_shape, w_shape, options):
    rng = np.random.default_rng(8)
    x, w = (rng.normal(0, 1, s).astype(np.float32) for s in (x_shape, w_shape))
    bias = rng.normal(0, 1, w_shape[0]).astype(np.float32)
    x.reshape(-1)[0] = np.inf
    o = {"stride": 1, "pad": 0, "dilation": 1, "groups": 1, **options}
    one = len(x_shape) == 3
    for with_bias in (False, True):
        expected = XP.conv(Tensor.of(x), Tensor.of(w), Tensor.of(bias) if with_bias else None, **options)
        y = np.empty(expected.shape, np.float32)
        n, c, *size = x_shape
        kernel, out = list(w_shape[2:]), list(y.shape[2:])
        if one:
            size, kernel, out = [1, *size], [1, *kernel], [1, *out]
        args = [n, c, *size, w_shape[0], *kernel, *out, o["stride"], o["stride"], 0 if one else o["pad"], o["pad"],
                o["dilation"], o["dilation"], o["groups"]]
        run(conv.conv(with_bias), [x, w, *([bias] if with_bias else []), y, *args])
        assert y.tobytes() == expected.tobytes()
