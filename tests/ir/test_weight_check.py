"""Weights that are not finite: found, named by place, and reported when they are about to be used."""
from __future__ import annotations

import warnings

import numpy as np
import pytest

from m3jit.ir import weight_check
from m3jit.ir.weight_check import WeightWarning, report
from m3jit.isa.types import BF16, BLOCKS, F16, F32, I8, MXFP4, Q4_1, Q6_K, Tensor
from m3jit.vm.weights import WeightStore
from tests.kernels import reference


@pytest.mark.parametrize("dtype, kind, nan, inf", ((F32, "<u4", 0x7FC00000, 0xFF800000), (F16, "<u2", 0x7E01, 0x7C00),
                                                   (BF16, "<u2", 0xFFC0, 0x7F80)))
def test_floats(dtype, kind, nan, inf):
    bits = np.zeros((3, 70), kind)
    t = Tensor(dtype, (3, 70), bits.view(dtype.numpy))
    assert report(t) == ""
    bits[1, 69] = inf
    assert report(t) == "an infinity at [1, 69]"
    bits[0, 5] = nan
    assert report(t) == "NaN at [0, 5], and 1 more place"
    assert report(Tensor(dtype, (210,), bits.reshape(-1).view(dtype.numpy))) == "NaN at 5, and 1 more place"
    bits[:] = inf
    assert report(t) == "an infinity at [0, 0], and 209 more places"


@pytest.mark.parametrize("dtype", BLOCKS, ids=str)
def test_block_scales(dtype):
    raw = reference.random_blocks(np.random.default_rng(0), dtype, 3, 512)
    t = Tensor.blocks(dtype, (3, 512), raw)
    assert report(t) == ""
    blocks = raw.reshape(3, -1, dtype.nbytes)
    last = blocks.shape[1] - 1
    if dtype is MXFP4:
        blocks[2, last, 0] = 255
    else:
        at = reference.SCALES[dtype.name][-1]
        blocks[2, last, at:at + 2] = np.array([0xFC00], "<u2").view(np.uint8)
    assert report(t).endswith(f"that is not finite in row 2, for its columns {last * dtype.block} to 511")
    if len(reference.SCALES[dtype.name]) == 2:
        assert report(t).startswith("a scale m ")


def test_long_lists_are_not_made(monkeypatch):
    monkeypatch.setattr(weight_check, "AT_ONCE", 100)
    t = Tensor.of(np.full(5000, np.nan, np.float32))
    assert report(t) == "NaN at 0, and at least 1000 more places"
    assert report(Tensor.of(np.zeros(3, np.int8), I8)) == ""


def test_a_weight_that_is_packed_or_small_is_looked_through(tmp_path):
    raw = reference.random_blocks(np.random.default_rng(0), Q6_K, 20, 256)
    raw.reshape(20, 1, 210)[17, 0, 208:] = (0x00, 0x7E)
    bad = Tensor.blocks(Q6_K, (20, 256), raw, "hash/blk.0.attn_q.weight")
    store = WeightStore(tmp_path)
    with pytest.warns(WeightWarning, match=r"tensor 'blk.0.attn_q.weight' \(Q6_K \[20, 256\]\) holds a scale d that is "
                                           r"not finite in row 17, for its columns 0 to 255; .*m3jit verify"):
        store.array(bad, "R16")
    with pytest.warns(WeightWarning, match="a weight .* holds NaN at 1"):
        store.array(Tensor.of(np.array([1, np.nan], np.float32)), "raw")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good = Tensor.blocks(Q4_1, (20, 32), reference.random_blocks(np.random.default_rng(0), Q4_1, 20, 32))
        store.array(good, "R16")
