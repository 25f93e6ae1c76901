"""`--bind rX=VALUE`: register values on the command line.

VALUE is an integer (5, 0x1F), a float (0.5, 1e-3, inf, nan), a text in quotes ("abc"), a tensor as nested lists
([[1, 2], [3, 4]]: I64 when every element is an integer, else F32), the same with a type in front (f16:[1, 2]), a type
with dimensions, which is a tensor of zeros (f32[4, 8]; f32[] has no dimensions), or @FILE.npy.
"""
from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from m3jit.cli.options import UsageError, register_of
from m3jit.errors import UserError, brief

_TYPE = re.compile(r"([A-Za-z][A-Za-z0-9_]*)\[([0-9,\s]*)\]\Z")
_TYPED = re.compile(r"([A-Za-z][A-Za-z0-9_]*):\s*(\[.*)\Z", re.S)
_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|[0-9]+)\Z")
EXPECTED = ('an integer, a float, "text", [lists], TYPE[DIMENSIONS] for zeros (f32[4, 8]), TYPE:[lists] (f16:[1, 2]) '
            "or @FILE.npy")


def bind(vm: Any, bindings: tuple[str, ...]) -> None:
    """Set what `--bind` options say.  UsageError names the option: no such register, or a value it cannot hold."""
    for text in bindings:
        name, value = parse_binding(text)
        register = register_of(vm, "--bind", name)
        try:
            vm.set(register, value)
        except UserError as error:
            raise UsageError(f"--bind {brief(text)}: {error}") from None


def parse_binding(text: str) -> tuple[str, Any]:
    """(register name, value: int, float, str or Tensor) of NAME=VALUE.  UsageError names the text and what it lacks."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise UsageError(f"--bind {brief(text)}: expected REGISTER=VALUE, for example --bind rX=0.5")
    try:
        return name.strip(), parse_value(value.strip())
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"--bind {brief(text)}: {error}; expected {EXPECTED}") from None


def parse_value(text: str) -> Any:
    """The value of a text; ValueError or TypeError says what is wrong."""
    if _INTEGER.match(text):
        number = int(text, 0) if not text.lstrip("+-").isdigit() else int(text)
        if not -2 ** 63 <= number < 2 ** 63:
            raise ValueError(f"{text} does not fit a signed 64-bit integer")
        return number
    if text.startswith("@"):
        return _from_file(text[1:])
    if text[0] in "\"'":
        if len(text) < 2 or text[-1] != text[0]:
            raise ValueError("the text has no closing quote")
        return _encodable(json.loads(text) if text[0] == '"' else text[1:-1])
    if text[0] == "[":
        return _lists(text, None)
    typed, shaped = _TYPED.match(text), _TYPE.match(text)
    if typed:
        return _lists(typed[2], _dtype(typed[1]))
    if shaped:
        return _zeros(_dtype(shaped[1]), [int(d) for d in shaped[2].replace(" ", "").split(",") if d])
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no value") from None


def _dtype(name: str) -> Any:
    from m3jit.isa.types import DTYPES
    found = DTYPES.get(name.upper())
    if found is None:
        raise ValueError(f"no type {name!r} (there are {', '.join(d.lower() for d in DTYPES)})")
    return found


def _encodable(text: str) -> str:
    """The text, unless it has no UTF-8 form (half a surrogate pair, bytes of another encoding)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the text is not Unicode: it has half a surrogate pair, or bytes that are not UTF-8") from None
    return text


def _zeros(dtype: Any, shape: list[int]) -> Any:
    from m3jit.isa.types import MAX_RANK, Tensor
    if len(shape) > MAX_RANK:
        raise ValueError(f"{len(shape)} dimensions; a tensor has at most {MAX_RANK}")
    if dtype.is_block:
        if not shape or shape[-1] % dtype.block:
            raise ValueError(f"rows of {dtype.name} are multiples of {dtype.block} elements")
        return Tensor.blocks(dtype, tuple(shape), np.zeros([*shape[:-1], dtype.row_bytes(shape[-1])], np.uint8))
    return Tensor(dtype, tuple(shape), np.zeros(shape, dtype.numpy))


def _lists(text: str, dtype: Any) -> Any:
    from m3jit.isa.types import BF16, Tensor
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the lists cannot be read: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("the lists nest too deep") from None
    array = np.array(values)                           # ValueError: rows of different lengths
    if array.dtype.kind not in "iufb":
        raise ValueError("the lists hold something other than numbers")
    if dtype is BF16:
        with np.errstate(over="ignore"):
            bits = array.astype(np.float32).view(np.uint32)
        return Tensor(BF16, array.shape, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))
    if dtype is not None and dtype.is_block:
        raise ValueError(f"{dtype.name} is packed; bind zeros ({dtype.name.lower()}[...]) or QUANT a float tensor")
    if dtype is not None and dtype.kind == "int" and array.size:
        low, high = np.iinfo(dtype.numpy).min, np.iinfo(dtype.numpy).max
        if array.min() < low or array.max() > high or (array != np.rint(array)).any():
            raise ValueError(f"{dtype.name} holds the integers {low} to {high}")
    with np.errstate(over="ignore"):                   # beyond the type's range: infinity, as CAST gives
        return Tensor.of(array, dtype)


def _from_file(path: str) -> Any:
    from m3jit.frontend.npy import read_npy
    from m3jit.isa.types import Tensor
    try:
        return Tensor.of(read_npy(path))
    except OSError as error:
        raise ValueError(f"cannot read {path or repr(path)}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
