"""Drawing tokens: the kernel against the eager namespace, token and generator state, over many settings."""
import numpy as np
import pytest

from m3jit.errors import OperandError
from m3jit.ir.eager import EagerXp
from m3jit.isa.types import BF16, Tensor
from m3jit.kernels.sample import BAD_HISTORY, NOTHING_ALLOWED, OK, Operands, sample, work_bytes
from tests.kernels.executors import run

XP = EagerXp()
F16, F32 = np.float16, np.float32
SETTINGS = ({}, {"top_k": 1}, {"top_k": 5}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
            {"top_p": 0.5}, {"top_p": 0.0}, {"min_p": 0.3}, {"min_p": 1.0}, {"temperature": 0.0},
            {"temperature": 0.01, "top_k": 10 ** 9}, {"temperature": 100.0, "top_p": 0.999})


def draw(logits, rng, history=None, mask=None, window=0, penalty=1.0, evaluate=True, **options):
    o = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    out, work = np.full(3, -7, np.int64), np.zeros(work_bytes(logits.size), np.uint8)
    names = {"float32": "f32", "float16": "f16", "int64": "i64", "int32": "i32", "bool": "bool", "uint16": "bf16"}
    kernel = sample(Operands(names[logits.dtype.name], "" if history is None else names[history.dtype.name],
                             "" if mask is None else names[mask.dtype.name]))
    args = [logits, *([] if history is None else [history]), *([] if mask is None else [mask]), work, out, logits.size,
            *([] if history is None else [history.size, window]), rng, o["top_k"], o["temperature"],
            *([] if history is None else [penalty]), o["top_p"], o["min_p"]]
    assert len(args) == len(kernel.params)
    run(kernel, args, evaluate)
    return out


def check(logits, rng, history=None, mask=None, window=0, penalty=1.0, evaluate=True, dtype=None, **options):
    o = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    wrap = lambda a: None if a is None else Tensor.of(a)
    token, state = XP.sample(Tensor.of(logits, dtype), rng, history=wrap(history), mask=wrap(mask), window=window,
                             penalty=penalty, **o)
    assert draw(logits, rng, history, mask, window, penalty, evaluate, **options).tolist() == [token, state, OK]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_settings(options):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, 200).astype(F32)
    logits[[3, 70, 71]] = logits.max()                               # ties
    check(logits, 12345, **options)
    wide = rng.normal(0, 2, 5000).astype(F32)
    for seed in range(20):
        check(wide, seed * 0x9E3779B97F4A7C15 % (1 << 63), evaluate=False, **options)


@pytest.mark.parametrize("options", SETTINGS[3:6], ids=str)
def test_hard_logits(options):
    for values in ([np.nan, np.inf, np.inf, 1.0], [-np.inf, -np.inf], [-0.0, 0.0, -1.0], [np.nan, -np.inf, 5.0], [2.5],
                   [3.4e38, -3.4e38, 1e-45]):
        for seed in (1, 2, 3):
            check(np.array(values, F32), seed, **options)
    assert draw(np.full(70, np.nan, F32), 9, **options).tolist() == [0, 9, OK]


@pytest.mark.parametrize("logits_type", (F16, np.uint16))
def test_narrow_logits_history_and_mask(logits_type):
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, 150).astype(F32)
    dtype = None
    if logits_type is F16:
        logits = logits.astype(F16)
    else:
        logits, dtype = (logits.view(np.uint32) >> 16).astype(np.uint16), BF16
    history = rng.integers(0, 150, 90)
    mask = rng.integers(0, 3, 150).astype(bool)
    for window in (0, 8, 200):
        for h in (history, history.astype(np.int32)):
            check(logits, 7, h, window=window, penalty=1.3, dtype=dtype, top_k=20)
    check(logits, 7, history, mask, window=64, penalty=0.5, dtype=dtype, temperature=0.0)
    check(logits, 7, mask=mask, dtype=dtype, top_p=0.8)
    check(logits, 7, mask=mask.astype(np.int32), dtype=dtype, top_p=0.8)


def test_refusals_become_status():
    logits = np.arange(9, dtype=F32)
    assert draw(logits, 5, mask=np.zeros(9, bool)).tolist() == [0, 5, NOTHING_ALLOWED]
    with pytest.raises(OperandError):
        XP.sample(Tensor.of(logits), 5, mask=Tensor.of(np.zeros(9, bool)), temperature=1.0, top_k=0, top_p=1.0,
                  min_p=0.0, penalty=1.0)
    for bad in (-1, 9):
        assert draw(logits, 5, np.array([1, bad], np.int64), penalty=2.0)[2] == BAD_HISTORY


def test_a_whole_vocabulary():
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3.5, 49152).astype(F32)
    for seed, options in enumerate(SETTINGS):
        check(logits, seed + 1, evaluate=False, **options)
