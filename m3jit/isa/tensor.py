"""Making and converting tensors: TENSOR CAST QUANTIZE DEQUANT."""
from __future__ import annotations

import struct
from dataclasses import dataclass

from m3jit.isa.fields import EncodingError, Enum, Number, R1, R2, Rd, Shape
from m3jit.isa.forms import ANY, FLOAT
from m3jit.isa.table import op
from m3jit.isa.types import DTYPES, PLAIN


@dataclass(frozen=True)
class ExactF16(Number):
    """An f16 immediate that refuses numbers f16 cannot hold exactly, instead of rounding them unseen."""
    fmt: str = "e"

    def encode(self, frame, base, value):
        try:
            exact = value != value or struct.unpack("<e", struct.pack("<e", value))[0] == value
        except (OverflowError, struct.error):
            exact = False
        if not exact:
            raise EncodingError(f"{self.name}: {value!r} is not an F16 number; load it into a register and give that")
        super().encode(frame, base, value)


def _dtype_field(names: list[str]) -> Enum:
    return Enum(" ".join(names), tuple(DTYPES[n].code for n in names))


PLAIN_TYPE = _dtype_field([d.name for d in PLAIN])
BLOCK_TYPE = _dtype_field(["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4", "Q4_K", "Q6_K"])


@op(0x01, "TENSOR", shape="SHAPE", dtypes=ANY, positional=("shape", "dtype"), reads=("memory",),
    key_aliases={"TYPE": "dtype"}, sample={"shape": (2, 3)})
def tensor(xp, rd: Rd, value: R1("int", "float") = None, from_: R2("int") = None, shape: Shape[0] = (),
           dtype: PLAIN_TYPE[21] = "F32", fill: ExactF16()[22] = 0.0):
    """rd = a tensor of SHAPE and DTYPE whose elements are all FILL, or the number in the register `value`.

    FROM=rAddr: the elements are read from memory at that address instead, row-major, little-endian.  SHAPE entries may
    be registers.  Traps: a negative dimension, more than 5; an address range that cannot be read; a FILL that is not an
    integer for an integer dtype."""
    if from_ is not None:
        return xp.read_block(from_, shape, DTYPES[dtype])
    return xp.full(shape, DTYPES[dtype], fill if value is None else value)


@op(0x67, "CAST", shape="that of x", dtypes=ANY, positional=("dtype",), key_aliases={"DST": "dtype", "TYPE": "dtype"},
    sample={"dtype": "F32"})
def cast(xp, rd: Rd, x: R1, dtype: PLAIN_TYPE[0]):
    """rd = x as DTYPE.  The same dtype copies.

    float -> integer: half to even, saturated, NaN -> 0.  integer -> integer wraps.  To BOOL: not zero (NaN is true).
    To F32, F16, BF16: nearest even, overflow to infinity; integers go through f32 on the way to F16 and BF16."""
    return xp.cast(x, DTYPES[dtype])


@op(0x68, "QUANTIZE", shape="that of x", dtypes=FLOAT, positional=("type",), key_aliases={"Q": "type", "DTYPE": "type"},
    source="ggml's reference quantisation", sample={"type": "Q8_0"})
def quantize(xp, rd: Rd, x: R1, type: BLOCK_TYPE[0]):
    """rd = x packed into blocks along its last axis (256 elements for TQ1_0 TQ2_0 Q4_K Q6_K, else 32), with the scales
    and roundings of ggml's reference.

    Q8_0: d = amax / 127, q = round(x / d), halves away from zero.  Q4_0 and Q5_0: d = (element of largest magnitude)
    / -8 or -16, q = trunc(x / d + 8.5 or 16.5), at most 15 or 31.  Q4_1 and Q5_1: d = (max - min) / 15 or 31, m = min,
    q = trunc((x - m) / d + 0.5).  TQ1_0 and TQ2_0: d = amax, q = round(x / d) in -1..1.  d and m are stored as F16; a
    block whose 1 / d overflows becomes zeros.  MXFP4: d = 2^(floor(log2(amax)) - 2), at least 2^-127 (log2 in f32), q
    the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, the smaller of two.  Q4_K and Q6_K: ggml's weighted
    least-squares searches over 21 and 19 candidates (m3jit/ir/eager_encode_k.py states them), folds in order.
    Traps: a last axis that is no multiple of the block; infinities or NaN; a scale beyond F16."""
    return xp.quantize(x, DTYPES[type])


@op(0x69, "DEQUANT", shape="that of x", dtypes="block types, F32 F16 BF16", source="ggml's block formats")
def dequant(xp, rd: Rd, x: R1):
    """rd = x as F32: d * q, then + m or - m, each rounded (no fused multiply-add), as ggml decodes its blocks."""
    return xp.dequantize(x)
