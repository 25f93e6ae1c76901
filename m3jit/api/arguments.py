"""What a compiled program is called with and gives back: Python values to register values and back."""
from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from m3jit.errors import UserError
from m3jit.isa.types import BF16, Tensor, numpy_dtype
from m3jit.vm.values import INT_MAX, INT_MIN


def register_value(value: Any, name: str) -> Tensor | int | float:
    """A register value of an argument.

    Arrays, `m3jit.Tensor` and whatever has `__dlpack__` become tensors, without a copy where the memory is aligned and
    C-contiguous; float64 is rounded to F32 as everywhere in m3jit; ml_dtypes' bfloat16 becomes BF16.  Numbers become
    integers or floats.  UserError names the argument otherwise."""
    if isinstance(value, Tensor):
        try:
            return value.checked()
        except TypeError as e:
            raise UserError(f"{name}: {e}") from None
    if isinstance(value, np.ndarray):
        return tensor_of(value, name)
    if isinstance(value, (bool, np.bool_, numbers.Integral)):
        if not INT_MIN <= value <= INT_MAX:
            raise UserError(f"{name}: {value} does not fit a signed 64-bit integer")
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    if hasattr(value, "__dlpack__"):
        try:
            return tensor_of(np.from_dlpack(value), name)
        except (BufferError, RuntimeError, TypeError, ValueError) as e:
            kind = type(value).__name__
            raise UserError(f"{name}: this {kind} cannot be read as an array in host memory: {e}") from None
    if hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
        return tensor_of(np.asarray(value), name)
    raise UserError(f"{name}: a {type(value).__name__} is no argument; give a NumPy array, an object with __dlpack__, "
                    f"an m3jit.Tensor, or a number for a register that holds one")


def tensor_of(array: np.ndarray, name: str) -> Tensor:
    """A tensor over an array's memory, or over a copy when that is not aligned, contiguous and little-endian."""
    if array.dtype.name == "bfloat16":
        return Tensor.of(plain(array.view(np.uint16)), BF16)
    if array.dtype.name not in ("float64",) and numpy_dtype(array.dtype.name) is None:
        raise UserError(f"{name}: no tensor type for NumPy dtype {array.dtype}; use float32, float16, an integer of at "
                        f"most 64 bits that is signed (or uint8), bool, or an m3jit.Tensor")
    try:
        return Tensor.of(plain(np.asarray(array)))
    except TypeError as e:
        raise UserError(f"{name}: {e}") from None


def plain(array: np.ndarray) -> np.ndarray:
    """The array itself where it is contiguous and aligned, else a copy that is."""
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy("C")


def python_value(value: Any, name: str) -> Any:
    """A register's value for Python: a number, or an array of its own; BF16 and block types stay an `m3jit.Tensor`."""
    if value is None:
        raise UserError(f"{name} was never written when the program ended; it cannot be an output")
    if isinstance(value, Tensor):
        own = np.array(value.data, order="C")
        return own if value.dtype is not BF16 and not value.dtype.is_block else Tensor(value.dtype, value.shape, own)
    if isinstance(value, (int, float)):
        return value
    raise UserError(f"{name} holds {value!r} at the end; only numbers and tensors can be outputs (m3jit.VM gives full "
                    f"control)")


def into(out: Any, value: Any, name: str) -> Any:
    """Copy a result to a preallocated output; returns it."""
    array = value.data if isinstance(value, Tensor) else value
    if not isinstance(array, np.ndarray):
        raise UserError(f"out: {name} is a number, not an array; give None for it")
    check_out(out, array.dtype, array.shape, name)
    np.copyto(out, array)
    return out


def check_out(out: Any, dtype: np.dtype, shape: tuple[int, ...], name: str) -> None:
    """UserError unless `out` is an array that can take such a result."""
    if not isinstance(out, np.ndarray) or out.dtype != dtype or out.shape != shape or not out.flags.writeable:
        found = f"{out.dtype} {list(out.shape)}{'' if out.flags.writeable else ', read-only'}" \
            if isinstance(out, np.ndarray) else type(out).__name__
        raise UserError(f"out: {name} is {dtype} {list(shape)}; expected such a writeable array, got {found}")
