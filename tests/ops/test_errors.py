"""What the value opcodes refuse, and how they say it."""
from __future__ import annotations

import numpy as np
import pytest

from m3jit.errors import OperandError
from m3jit.isa.fields import EncodingError, Reg
from m3jit.isa.kv import KVStream
from m3jit.isa.table import BY_NAME, Instruction, decode, encode
from m3jit.isa.types import I32, I64, NEW_STATE, Q8_0, Tensor
from tests.ops.cases import execute, noise, tensor
from tests.ops.witness_layout import blocks

X, M, E = tensor(noise(5)), tensor(noise(2, 3)), tensor(noise(2, 3, 5))
Q8 = blocks((4, 64), Q8_0)
IDS = tensor([0, 1], I32)
FLAGS = Tensor.of(np.ones(5, bool))
KV = KVStream().with_geometry(1, 4).append(0, noise(3, 4), noise(3, 4))

REFUSED = [
    ("ADD", {"a": X, "b": M}, r"shapes do not broadcast: F32 \[5\], F32 \[2, 3\]"),
    ("ADD", {"a": X, "b": IDS}, r"different dtypes: F32 \[5\], I32 \[2\]; CAST converts"),
    ("ADD", {"a": FLAGS, "b": FLAGS}, "add needs numbers, got BOOL"),
    ("ADD", {"a": 1, "b": 1.0}, "different kinds: an integer, a float; CVT converts"),
    ("ADD", {"a": Q8, "b": Q8}, "Q8_0 is a weight type .* DEQUANT it first"),
    ("ADD", {"a": IDS, "b": 0.5}, "0.5 is not an integer; the tensor's dtype is I32"),
    ("MUL", {"a": X, "b": M}, "shapes do not broadcast"),
    ("SILU", {"x": IDS}, "sigmoid needs float tensors, got I32"),
    ("EXP", {"x": IDS}, "exp needs float tensors"),
    ("CLIP", {"x": X, "min": 2.0, "max": 1.0}, "finite MIN <= MAX, got 2.0 and 1.0"),
    ("CLIP", {"x": X, "min": float("nan"), "max": 1.0}, "finite MIN <= MAX"),
    ("CLIP", {"x": IDS, "min": 0.0, "max": 1.0}, "CLIP takes float tensors, got I32"),
    ("TENSOR", {"shape": (2, -1)}, "dimension -1 in shape"),
    ("TENSOR", {"shape": (1,) * 6}, "at most 5 dimensions"),
    ("TENSOR", {"shape": (2,), "dtype": "I32", "fill": 0.5}, "0.5 is not an integer"),
    ("CAST", {"x": Q8, "dtype": "F32"}, "DEQUANT it first"),
    ("QUANTIZE", {"x": X, "type": "Q8_0"}, r"packs 32 elements of the last axis, got F32 \[5\]"),
    ("QUANTIZE", {"x": tensor(np.full(32, np.nan)), "type": "Q8_0"}, "holds infinities or NaN; SANITY_CHECK"),
    ("QUANTIZE", {"x": tensor(np.full(32, 1e9)), "type": "Q4_0"}, "which F16 cannot hold"),
    ("RESHAPE", {"x": X, "shape": (2, 2)}, r"cannot reshape F32 \[5\] to \[2, 2\]: 5 elements"),
    ("RESHAPE", {"x": X, "shape": (-1, 2)}, "cannot infer -1"),
    ("RESHAPE", {"x": X, "shape": (-1, -1)}, "cannot infer -1"),
    ("RESHAPE", {"x": Q8, "shape": (8, 32)}, "packed in blocks; it must stay 64"),
    ("SLICE", {"x": X, "start": 6}, "start is 6; it must be an integer from -5 to 5"),
    ("SLICE", {"x": X, "start": 3, "len": 3}, "stop is 6"),
    ("SLICE", {"x": X, "start": -3, "len": 5}, "stop is 7"),
    ("SLICE", {"x": X, "len": -2}, "LEN from 0, or -1"),
    ("SLICE", {"x": X, "step": 0}, "step is 0; it must be an integer from 1"),
    ("SLICE", {"x": X, "axis": 1}, "axis 1 of a tensor with 1 dimension,"),
    ("SLICE", {"x": Q8, "axis": 1}, "packed in blocks"),
    ("CONCAT", {"a": X, "b": IDS}, "dtype and all other dimensions must agree"),
    ("CONCAT", {"a": M, "b": tensor(noise(2, 4))}, "cannot concatenate"),
    ("BROADCAST", {"x": X, "shape": (4,)}, r"cannot broadcast F32 \[5\] to \[4\]"),
    ("PAD", {"x": IDS, "before": 1, "value": 0.5}, "not an integer"),
    ("TILE", {"x": X, "reps": -1}, "reps is -1"),
    ("TRANSPOSE", {"x": M, "axes": (0, 0)}, "not a permutation"),
    ("GATHER", {"table": X, "index": tensor([0, 5], I64)}, "index 5 at position 1 is outside 0..4"),
    ("GATHER", {"table": X, "index": tensor([-1], I64)}, "index -1 at position 0"),
    ("GATHER", {"table": X, "index": X}, "indices must be integers"),
    ("GATHER", {"table": X, "index": IDS, "mode": "SCATTER_ADD"}, "needs the accumulator"),
    ("GATHER", {"table": X, "index": IDS, "acc": X, "mode": "SCATTER_ADD"}, r"needs values F32 \[2\]"),
    ("SORT", {"x": X, "axis": 2}, "axis 2 of a tensor"),
    ("TOPK", {"x": X, "k": 0}, "k is 0; it must be an integer from 1 to 5"),
    ("TOPK", {"x": X, "k": 6}, "k is 6"),
    ("ARGMAX", {"x": tensor(np.zeros(0))}, "it is empty"),
    ("REDUCE", {"x": tensor(np.zeros((2, 0))), "op": "MAX", "axis": 1}, "MAX over axis 1 of F32 .* it is empty"),
    ("REDUCE", {"x": FLAGS, "op": "SUM"}, "needs numbers, got BOOL"),
    ("SOFTMAX", {"x": X, "temp": 0.0}, "TEMP above 0, got 0.0"),
    ("SOFTMAX", {"x": X, "temp": float("nan")}, "TEMP above 0"),
    ("SANITY_CHECK", {"x": IDS}, "float tensors, got I32"),
    ("ATTN", {"q": M, "k": M, "v": M, "heads": 3, "kv_heads": 2, "hdim": 1},
     "HEADS a multiple of KV_HEADS, got 3 and 2"),
    ("ATTN", {"q": M, "k": M, "v": M, "heads": 2, "hdim": 3}, r"queries must be \[T, 2 \* 3\], got F32 \[2, 3\]"),
    ("ATTN", {"q": M, "k": M, "v": tensor(noise(1, 3))}, "differ in number"),
    ("ATTN", {"q": M, "k": tensor(noise(2, 4)), "v": M}, r"keys must be \[N, 1 \* 3\]"),
    ("ATTN", {"q": M, "k": M, "v": M, "state": KV}, "has 1 heads of 4; an append of 1 heads of 3"),
    ("ATTN", {"q": M, "k": M, "v": M, "state": NEW_STATE, "past": 1}, "PAST from the stream"),
    ("ATTN", {"q": tensor(noise(3, 3)), "k": M, "v": M, "state": NEW_STATE}, "3 query rows over a layer of 2 rows"),
    ("ATTN", {"q": M, "k": M, "v": M, "state": 7}, "the state operand is not a KV stream: an integer"),
    ("ATTN", {"q": M, "k": M, "vdim": 4}, "without values, VDIM is at most the 3 features of a key, got 4"),
    ("ATTN", {"q": M, "k": M, "v": M, "vdim": 2}, r"values must be \[N, 1 \* 2\], got F32 \[2, 3\]"),
    ("FLASH_ATTN", {"q": M, "k": M, "v": M, "past": -1}, "past is -1"),
    ("ATTN_SPARSE", {"q": M, "k": M, "v": M, "topk": 3}, "k is 3"),
    ("NORM", {"x": M, "eps": -1.0}, "EPS from 0"),
    ("NORM", {"x": X, "mode": "BATCH"}, "channels on axis 1"),
    ("NORM", {"x": M, "mode": "BATCH", "mean": X}, "MEAN and VAR together"),
    ("MATVEC", {"x": X, "w": M}, "inner lengths differ, 2 is needed"),
    ("MATVEC", {"x": X, "w": X}, "a weight is a float or block matrix"),
    ("MATVEC", {"x": tensor(noise(64)), "w": Q8}, "can only be multiplied transposed"),
    ("MATVEC", {"x": tensor(noise(64)), "w": Q8, "precision": "INT8"}, "set TRANSPOSE"),
    ("MATVEC", {"x": X, "w": E, "experts": tensor(np.array([0]), I64), "transpose": False}, "set TRANSPOSE"),
    ("MATVEC", {"x": X, "w": E, "experts": tensor(np.array([[0]]), I64), "transpose": True}, "where experts are"),
    ("MATVEC", {"x": X, "w": M, "experts": tensor(np.array([[0]]), I64), "transpose": True},
     r"tensor \[E, N, K\], got"),
    ("MATVEC", {"x": X, "w": E, "experts": tensor(np.array([0, 2]), I64), "transpose": True}, "expert 2 at position 1"),
    ("MATVEC", {"x": X, "w": M, "precision": "INT8"}, "INT8 multiplies block-quantised weights, got F32"),
    ("MATVEC", {"x": M, "w": tensor(noise(3, 2, 4))}, r"each of 3 matrices needs a row, x \[.., 3, K\]"),
    ("FFN", {"x": M, "w1": M, "w2": M}, "inner lengths differ"),
    ("FFN", {"x": M, "w1": tensor(noise(3, 4)), "w2": tensor(noise(4, 2)), "b3": X}, "B3 but no weight W3"),
    ("EMBED", {"ids": 2, "table": M}, "id 2 at position 0 is outside the table of 2 rows"),
    ("EMBED", {"ids": tensor([0, -3], I32), "table": M}, "id -3 at position 1"),
    ("EMBED", {"ids": X, "table": M}, "indices must be integers"),
    ("ROPE", {"x": M}, "even HDIM"),
    ("ROPE", {"x": M, "hdim": 2}, "even HDIM, got"),
    ("ROPE", {"x": tensor(noise(2, 4)), "hdim": 4, "factors": X}, r"needs 2 frequency factors, got F32 \[5\]"),
    ("ROPE", {"x": tensor(noise(2, 4)), "hdim": 4, "theta": 0.0}, "positive, finite THETA"),
    ("ROPE", {"x": tensor(noise(2, 4)), "hdim": 2, "heads": 3}, "3 heads of 2 needs rows of 6, got 4"),
    ("CONV", {"x": X, "w": X}, r"\[N, C, L\] or \[N, C, H, W\]"),
    ("CONV", {"x": tensor(noise(1, 3, 5)), "w": tensor(noise(2, 2, 3))},
     r"3 input and 2 output channels need w \[O, 3"),
    ("CONV", {"x": tensor(noise(1, 1, 2)), "w": tensor(noise(1, 1, 3))}, "larger than the padded input"),
    ("CONV", {"x": tensor(noise(1, 1, 2)), "w": tensor(noise(1, 1, 1)), "stride": 0}, "STRIDE is 0"),
    ("CONV", {"x": tensor(noise(1, 1, 2)), "w": tensor(noise(1, 1, 1)), "bias": X}, "needs 1 biases"),
    ("LORA_APPLY", {"x": X, "base": M, "a": M, "b": M}, r"base \[2, 3\], a \[2, 3\], b \[2, 3\]"),
    ("LORA_APPLY", {"x": X, "base": M, "a": tensor(noise(1, 3)), "b": tensor(noise(2, 1))}, "inner lengths differ"),
    ("LORA_APPLY", {"x": tensor(noise(3)), "base": M, "a": tensor(noise(1, 3)), "b": tensor(noise(2, 1)),
                    "precision": "INT8"}, "INT8 multiplies block-quantised weights, got F32"),
    ("LORA_MERGE", {"base": M, "a": tensor(noise(1, 3)), "b": tensor(noise(1, 1))}, r"a \[1, 3\], b \[1, 1\]"),
    ("LORA_MERGE", {"base": Q8, "a": M, "b": M}, "got Q8_0; DEQUANT it first, or use LORA_APPLY"),
    ("KV_TRUNCATE", {"state": KV, "length": -1}, "length is -1"),
    ("KV_COMPRESS", {"state": KV}, "not both 0"),
    ("RNG_NORMAL", {"rng": 0, "std": 0.0}, "positive, finite STD"),
    ("RNG_UNIFORM", {"rng": 0, "a": 1.0, "b": 1.0}, "finite A < B, got 1.0 and 1.0"),
    ("SAMPLE", {"logits": tensor(np.zeros(0)), "rng": 0}, "SAMPLE of an empty tensor"),
    ("SAMPLE", {"logits": X, "rng": 0, "temp": -1.0}, "TEMP is -1.0; it must lie in 0..inf"),
    ("SAMPLE", {"logits": X, "rng": 0, "topp": 1.5}, "TOPP is 1.5"),
    ("SAMPLE", {"logits": X, "rng": 0, "minp": float("nan")}, "MINP is nan"),
    ("SAMPLE", {"logits": X, "rng": 0, "penalty": 0.0}, "PENALTY is 0.0"),
    ("SAMPLE", {"logits": X, "rng": 0, "penalty": 2.0, "history": tensor([9], I32)},
     "the history holds token 9, outside 0..4"),
    ("SAMPLE", {"logits": X, "rng": 0, "mask": Tensor.of(np.zeros(5, bool))}, "the mask allows no token"),
    ("SAMPLE", {"logits": X, "rng": 0, "mask": X}, "BOOL or integer mask of 5 elements"),
]


@pytest.mark.parametrize("name, operands, message", REFUSED, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(REFUSED)])
def test_refusals_name_what_is_wrong(name, operands, message):
    with pytest.raises(OperandError, match=message):
        execute(name, operands)


def test_no_refused_operand_was_changed():
    assert X.tobytes() == tensor(noise(5)).tobytes() and KV.length(0) == 3


def fields(name: str, **args) -> Instruction:
    row = BY_NAME[name]
    regs = {f.name: Reg(f.banks[0], 1 + i) for i, f in enumerate(row.operands()) if hasattr(f, "banks")}
    return Instruction(row, {**regs, **args})


@pytest.mark.parametrize("name, args", [
    ("TENSOR", {"shape": (2, Reg(0, 7), 5), "dtype": "BF16", "fill": -0.5}), ("TRANSPOSE", {"axes": (4, 3, 2, 1, 0)}),
    ("SLICE", {"start": -3, "len": Reg(0, 9), "step": 2, "axis": -1}),
    ("PAD", {"value": 1.5, "before": 3, "after": 2 ** 31}),
    ("ATTN", {"heads": 32, "kv_heads": 8, "hdim": 128, "layer": 65535, "window": 2 ** 31, "scale": 0.5, "softcap": 50.0,
              "causal": True, "past": Reg(0, 254)}),
    ("ATTN", {"v": None, "hdim": 576, "vdim": 512, "kv_type": "Q8_0"}),
    ("ATTN", {"causal": True, "vdim": 65535, "kv_type": "F32"}),
    ("SAMPLE", {"temp": Reg(0, 3), "topk": 40, "topp": 0.5, "minp": Reg(0, 4), "window": 0, "penalty": Reg(0, 250)}),
    ("SAMPLE", {"temp": 0.0, "topk": Reg(0, 1), "topp": Reg(0, 2), "minp": 0.25, "window": 65535, "penalty": 1.5}),
    ("MATVEC", {"transpose": True, "precision": "INT8", "act": "GELU"}),
    ("CONV", {"stride": 2, "act": "SILU", "groups": 3}),
    ("FFN", {"b1": Reg(0, 9), "act": "RELU2", "transpose": True}), ("KV_TRUNCATE", {"length": 2 ** 62}),
    ("ROPE", {"pos": -1, "pairing": "NORM", "factors": Reg(0, 200), "heads": 32}), ("RNG_SEED", {"seed": -2 ** 63}),
    ("TOPK", {"k": 7, "smallest": True, "unsorted": True}), ("REDUCE", {"op": "PROD", "axis": -1, "keepdims": True})])
def test_operands_survive_their_frame(name, args):
    ins = fields(name, **args)
    back = decode(encode(ins))
    assert len(encode(ins)) == 32 and back == ins
    for key, value in args.items():
        assert back.args[key] == value


def test_a_fill_that_f16_cannot_hold_is_refused():
    with pytest.raises(EncodingError, match="fill: 0.1 is not an F16 number; load it into a register"):
        encode(fields("TENSOR", shape=(1,), fill=0.1))
    with pytest.raises(EncodingError, match="70000"):
        encode(fields("TENSOR", shape=(1,), fill=70000.0))
