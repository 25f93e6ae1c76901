"""Packing into block formats against the eager namespace, and the kernel library's table."""
import numpy as np
import pytest

from m3jit.ir.eager import EagerXp
from m3jit.ir.loop import Kernel
from m3jit.isa.types import DTYPES, Tensor
from m3jit.kernels import attention, convert, registry
from m3jit.kernels.sample import Operands
from tests.kernels.executors import run


@pytest.mark.parametrize("name", convert.TYPES)
def test_quantize(name):
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (9, 64)).astype(np.float32)
    x[1], x[2, :32], x[3, 5] = 0, 1e-42, -7.5
    x[4] = np.tile([2.0, -2.0], 32)                          # peaks of equal magnitude
    x[5] = np.arange(64) * 0.5 - 16                          # exact halves
    x[6] = rng.normal(0, 1e-39, 64)
    x[7], x[8] = -0.0, np.float32(3.0)
    out, flags = np.empty((9, DTYPES[name].row_bytes(64)), np.uint8), np.full(18, 9, np.uint8)
    run(convert.quantize(name), [x, out, flags, 18])
    assert out.tobytes() == EagerXp().quantize(Tensor.of(x), DTYPES[name]).tobytes()
    assert not flags.any()


def test_quantize_flags_what_cannot_be_packed():
    x = np.ones((4, 32), np.float32)
    x[1, 3], x[2, 0], x[3, 9] = np.nan, np.inf, 1e30
    out, flags = np.empty((4, 20), np.uint8), np.empty(4, np.uint8)
    run(convert.quantize("Q4_1"), [x, out, flags, 4])
    assert flags.tolist() == [0, convert.NOT_FINITE, convert.NOT_FINITE, convert.SCALE_TOO_LARGE]


ARGUMENTS = {"quantize_activation": (32,), "quantize_rows": (32,), "qmatmul": ("Q4_0",), "qmatmul_gated": ("Q4_0",),
             "matmul_rows": ("F32",), "matmul_columns": ("F32",), "routed_qmatmul": ("Q8_0",),
             "routed_matmul": ("F32",), "embed": ("Q8_0",), "dequantize": ("Q8_0",),
             "quantize": ("Q8_0",), "rope": (64, "NORM"), "kv_append": (attention.Geometry(2, 2, 64),),
             "argmax_rows": ("f32",),
             "argmax_columns": ("f32",), "reduce_columns": ("f32", "SUM"), "sort_rows": ("f32",), "topk_rows": ("f32",),
             "strided_copy": (4,), "gather": (4,), "scatter": ("f32", "ADD"), "float_copy": ("f16", "f32"), "conv": (),
             "causal_conv": (4, True), "scan": (16, False, "channel"),
             "sample": (Operands(history="i64", mask="bool"),),
             **{n: (attention.Geometry(4, 2, 64),) for n in ("attn_blocks", "attn_combine", "attn_rows")}}


@pytest.mark.parametrize("primitive", registry.PRIMITIVES)
def test_every_registered_builder_builds_and_is_documented(primitive):
    for f in registry.builders(primitive):
        kernel = f(*ARGUMENTS[f.__name__])
        assert isinstance(kernel, Kernel)
        for p in kernel.params:
            assert p.name.rstrip("0123456789") in f.__doc__.replace("_", " ") or p.name in f.__doc__, \
                f"{f.__name__} does not document {p.name}"
