"""The storage types of GGUF tensors: number, block length and block size.

A quantised type stores `block` consecutive elements of a row in `nbytes` bytes; plain types have blocks of one.
Size of a tensor with n elements: n / block * nbytes, and its rows must be whole blocks.
Numbers and sizes are those of ggml (ggml.h, ggml-common.h); numbers missing here (4, 5, 31-33, 36-38) were
withdrawn by ggml and are refused.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One storage type. `number` is written in files, `block` counts elements, `nbytes` is the size of a block."""

    name: str
    number: int
    block: int
    nbytes: int

    @property
    def bits_per_element(self) -> float:
        return 8 * self.nbytes / self.block

    def __str__(self) -> str:
        return self.name


# Block sizes are spelled as sums in the order of the block's fields: scales first, then (or after) the codes.
_TABLE = (
    ("F32", 0, 1, 4),
    ("F16", 1, 1, 2),
    ("Q4_0", 2, 32, 2 + 16),
    ("Q4_1", 3, 32, 2 + 2 + 16),
    ("Q5_0", 6, 32, 2 + 4 + 16),
    ("Q5_1", 7, 32, 2 + 2 + 4 + 16),
    ("Q8_0", 8, 32, 2 + 32),
    ("Q8_1", 9, 32, 2 + 2 + 32),
    ("Q2_K", 10, 256, 16 + 64 + 2 + 2),
    ("Q3_K", 11, 256, 32 + 64 + 12 + 2),
    ("Q4_K", 12, 256, 2 + 2 + 12 + 128),
    ("Q5_K", 13, 256, 2 + 2 + 12 + 32 + 128),
    ("Q6_K", 14, 256, 128 + 64 + 16 + 2),
    ("Q8_K", 15, 256, 4 + 256 + 32),
    ("IQ2_XXS", 16, 256, 2 + 64),
    ("IQ2_XS", 17, 256, 2 + 64 + 8),
    ("IQ3_XXS", 18, 256, 2 + 64 + 32),
    ("IQ1_S", 19, 256, 2 + 32 + 16),
    ("IQ4_NL", 20, 32, 2 + 16),
    ("IQ3_S", 21, 256, 2 + 64 + 8 + 32 + 4),
    ("IQ2_S", 22, 256, 2 + 64 + 8 + 8),
    ("IQ4_XS", 23, 256, 2 + 2 + 4 + 128),
    ("I8", 24, 1, 1),
    ("I16", 25, 1, 2),
    ("I32", 26, 1, 4),
    ("I64", 27, 1, 8),
    ("F64", 28, 1, 8),
    ("IQ1_M", 29, 256, 32 + 16 + 8),
    ("BF16", 30, 1, 2),
    ("TQ1_0", 34, 256, 48 + 4 + 2),
    ("TQ2_0", 35, 256, 64 + 2),
    ("MXFP4", 39, 32, 1 + 16),
    ("NVFP4", 40, 64, 4 + 32),
    ("Q1_0", 41, 128, 2 + 16),
)

GGML_TYPES: dict[str, GGMLType] = {row[0]: GGMLType(*row) for row in _TABLE}
GGML_TYPES_BY_NUMBER: dict[int, GGMLType] = {kind.number: kind for kind in GGML_TYPES.values()}
