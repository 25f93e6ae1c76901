"""Data types, tensor values and the kinds a register can hold."""
from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """An element or block type.  `code` is the number written in bytecode: the ggml number where one exists."""
    name: str
    code: int
    kind: str                   # "float", "int", "bool" or "block"
    nbytes: int                 # bytes per element, or per block
    block: int = 1              # elements per block
    storage: str = "u1"         # NumPy dtype of the stored array (block types: bytes)

    @property
    def is_block(self) -> bool:
        return self.kind == "block"

    @property
    def numpy(self) -> np.dtype:
        return np.dtype(self.storage)

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of `columns` elements (a multiple of `block`)."""
        return columns // self.block * self.nbytes

    def __repr__(self) -> str:
        return self.name


F32 = DType("F32", 0, "float", 4, storage="<f4")
F16 = DType("F16", 1, "float", 2, storage="<f2")
BF16 = DType("BF16", 30, "float", 2, storage="<u2")      # NumPy has no bfloat16: the bits are stored
I8 = DType("I8", 24, "int", 1, storage="i1")
I16 = DType("I16", 25, "int", 2, storage="<i2")
I32 = DType("I32", 26, "int", 4, storage="<i4")
I64 = DType("I64", 27, "int", 8, storage="<i8")
U8 = DType("U8", 128, "int", 1, storage="u1")
BOOL = DType("BOOL", 129, "bool", 1, storage="?")
Q4_0 = DType("Q4_0", 2, "block", 18, 32)
Q4_1 = DType("Q4_1", 3, "block", 20, 32)
Q5_0 = DType("Q5_0", 6, "block", 22, 32)
Q5_1 = DType("Q5_1", 7, "block", 24, 32)
Q8_0 = DType("Q8_0", 8, "block", 34, 32)
Q2_K = DType("Q2_K", 10, "block", 84, 256)
Q3_K = DType("Q3_K", 11, "block", 110, 256)
Q4_K = DType("Q4_K", 12, "block", 144, 256)
Q5_K = DType("Q5_K", 13, "block", 176, 256)
Q6_K = DType("Q6_K", 14, "block", 210, 256)
IQ4_NL = DType("IQ4_NL", 20, "block", 18, 32)
IQ4_XS = DType("IQ4_XS", 23, "block", 136, 256)
TQ1_0 = DType("TQ1_0", 34, "block", 54, 256)
TQ2_0 = DType("TQ2_0", 35, "block", 66, 256)
MXFP4 = DType("MXFP4", 39, "block", 17, 32)

BLOCKS = (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, TQ1_0, TQ2_0)
DTYPES: dict[str, DType] = {d.name: d for d in (F32, F16, BF16, I8, U8, I16, I32, I64, BOOL, *BLOCKS)}
BY_CODE: dict[int, DType] = {d.code: d for d in DTYPES.values()}
FLOATS = (F32, F16, BF16)
INTS = (I8, U8, I16, I32, I64)
PLAIN = FLOATS + INTS + (BOOL,)
WEIGHTS = (*FLOATS, *BLOCKS)                             # what a weight matrix may be
# block types with an integer dot product -> elements of a block of quantised activations
ACTIVATION_BLOCK = {d.name: d.block for d in BLOCKS}
MAX_RANK = 5

_FROM_NUMPY = {"float32": F32, "float16": F16, "int8": I8, "uint8": U8, "int16": I16, "int32": I32, "int64": I64,
               "bool": BOOL}


class Kind(enum.Enum):
    """What a register holds at run time."""
    NULL = "null"               # never written; reads as absent
    INT = "integer"             # signed 64-bit
    FLOAT = "float"             # f64
    TENSOR = "tensor"
    STATE = "state handle"      # KV stream, RNG stream, sink, source, ring, model, ...
    SNAPSHOT = "snapshot"
    CONTEXT = "context"
    EVENT = "event"
    VECTOR = "vector"           # V registers: 8 x f32


class NewState:
    """What an instruction gets for a state operand whose register was never written (None: the operand is absent).

    The instruction makes a new state of the kind it needs."""

    def __repr__(self) -> str:
        return "<new state>"


NEW_STATE = NewState()


class Tensor:
    """An immutable tensor value.

    data: a C-contiguous NumPy array of `dtype.numpy` with `shape`; block types: uint8 of shape
    (*shape[:-1], row_bytes).  Nobody may write to `data` while another holder exists.
    key: identity of the content for layout caches ("<file hash>/<tensor name>"), or None.
    """
    __slots__ = ("dtype", "shape", "data", "key", "__weakref__")

    def __init__(self, dtype: DType, shape: tuple[int, ...], data: np.ndarray, key: str | None = None):
        self.dtype, self.shape, self.data, self.key = dtype, tuple(int(d) for d in shape), data, key

    @classmethod
    def made(cls, dtype: DType, shape: tuple[int, ...], data: np.ndarray) -> "Tensor":
        """A tensor whose shape is known to be a tuple of Python integers."""
        t = cls.__new__(cls)
        t.dtype, t.shape, t.data, t.key = dtype, shape, data, None
        return t

    @classmethod
    def of(cls, array: Any, dtype: DType | None = None) -> "Tensor":
        """From a NumPy array (or anything `np.asarray` takes); copies only when not C-contiguous.

        float64 becomes F32; uint16 needs dtype=BF16."""
        a = np.ascontiguousarray(array) if np.ndim(array) else np.asarray(array)
        if dtype is None:
            if a.dtype.name == "float64":
                a = a.astype(np.float32)
            if a.dtype.name not in _FROM_NUMPY:
                raise TypeError(f"no tensor type for NumPy dtype {a.dtype}; use one of {', '.join(_FROM_NUMPY)}")
            dtype = _FROM_NUMPY[a.dtype.name]
        a = a.astype(dtype.numpy, copy=False)
        if a.ndim > MAX_RANK:
            raise TypeError(f"a tensor has at most {MAX_RANK} dimensions, got shape {a.shape}")
        return cls(dtype, a.shape, a)

    @classmethod
    def blocks(cls, dtype: DType, shape: tuple[int, ...], raw: np.ndarray, key: str | None = None) -> "Tensor":
        """A block-quantised tensor over its packed bytes (no copy)."""
        if shape[-1] % dtype.block:
            raise TypeError(f"{dtype.name} needs a row length that is a multiple of {dtype.block}, got shape {shape}")
        return cls(dtype, shape, raw.reshape(*shape[:-1], dtype.row_bytes(shape[-1])), key)

    def checked(self) -> "Tensor":
        """This tensor, for one that comes from outside: over a copy when its array is not aligned and C-contiguous.

        TypeError when the array is not what dtype and shape say; compiled code reads as many bytes as they promise."""
        packed = self.dtype.is_block and bool(self.shape)
        rows = (*self.shape[:-1], self.dtype.row_bytes(self.shape[-1])) if packed else self.shape
        data = np.asarray(self.data)
        if data.dtype != self.dtype.numpy or data.shape != rows or len(self.shape) > MAX_RANK or \
                (self.dtype.is_block and (not self.shape or self.shape[-1] % self.dtype.block)):
            raise TypeError(f"{self!r} over an array {data.dtype} {list(data.shape)}; its array must be "
                            f"{self.dtype.numpy} {list(rows)}")
        if data is self.data and data.flags.c_contiguous and data.flags.aligned and data.dtype.isnative:
            return self
        return Tensor(self.dtype, self.shape, np.array(data, self.dtype.numpy, order="C"), self.key)

    @property
    def size(self) -> int:
        """Elements: the product of `shape`."""
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        """How many dimensions: 0 to 5."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of `data`; of block types, of the packed blocks."""
        return self.data.nbytes

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array without copying; BF16 and block types as their stored bits."""
        return self.data

    def tobytes(self) -> bytes:
        """The bytes of `data` in row-major order."""
        return self.data.tobytes()

    def __repr__(self) -> str:
        return f"Tensor({self.dtype.name} {'x'.join(map(str, self.shape)) or 'scalar'})"


def numpy_dtype(name: str) -> DType | None:
    """The tensor type of a NumPy dtype name, or None."""
    return _FROM_NUMPY.get(name)
