"""`.data`: typed values of any rank, from literals or a NumPy file, to bytes; and back to text.

    name: .f32 1.5                       a scalar (rank 0)
    name: .f32 [[1, 2], [3, 4]]          shape from the nesting
    name: .f32 [2, 3] [1, 2, 3, 4, 5, 6] shape, then the values in row-major order
    name: .f32 SHAPE=[64] FILL=0.5
    name: .f32 FILE="weights.npy"        shape from the file; its dtype must be the declared one
    name: .str "text"                    a string (u32 length, UTF-8 bytes)
Block types (`.q8_0 [64] [bytes...]`) are given as their packed bytes.
"""
from __future__ import annotations

import math
import os
from typing import Any, Callable, Sequence

import numpy as np

from m3jit.frontend.npy import read_npy
from m3jit.frontend.numbers import NumberError, format_float
from m3jit.frontend.operand_text import Scope, TextError, literal
from m3jit.frontend.syntax import Statement, Value
from m3jit.isa.fields import RawF32
from m3jit.isa.types import BF16, BOOL, DTYPES, I64, MAX_RANK, DType, numpy_dtype

TYPES: dict[str, DType] = {"." + name.lower(): d for name, d in DTYPES.items()}
MAX_BLOB = 1 << 28                 # bytes of one value; of a source's DATA too (weights belong in model files)


def alignment(dtype: DType, nbytes: int) -> int:
    """Where a value may start: at its element size, large ones at a cache line."""
    return 64 if nbytes >= 64 else 1 if dtype.is_block else dtype.nbytes


def parse_blob(dtype: DType, statement: Statement, scope: Scope, find: Callable[[str], str | None],
               address: Callable[[Value, int], int]) -> tuple[tuple[int, ...], bytes]:
    """Shape and bytes of a typed `.data` line.  `find` locates a file; `address(value, offset)` notes a relocation."""
    keys = {o.key.text.upper(): o.value for o in statement.operands if o.key}
    plain = [o.value for o in statement.operands if not o.key]
    for o in statement.operands:
        if o.key and o.key.text.upper() not in ("FILE", "SHAPE", "FILL"):
            raise TextError(Value("word", o.key), f"data has no option {o.key.text}; it has FILE, SHAPE and FILL")
    where = Value("word", statement.head)
    if "FILE" in keys:
        if plain or len(keys) > 1:
            raise TextError(where, "FILE= gives shape and values; nothing else may stand beside it")
        return _from_file(dtype, keys["FILE"], find)
    if "FILL" in keys or "SHAPE" in keys:
        if plain or len(keys) != 2:
            raise TextError(where, "a filled value needs SHAPE= and FILL= and nothing else")
        shape = _shape(keys["SHAPE"], scope)
        one = _element(dtype, keys["FILL"], scope, None, 0)
        return shape, one * _count(dtype, shape, keys["SHAPE"])
    if len(plain) == 2 and plain[0].kind in ("list", "shape") and plain[1].kind == "list":
        shape, values = _shape(plain[0], scope), _flatten(plain[1])
    elif len(plain) == 1 and plain[0].kind == "list":
        shape, values = _nesting(plain[0])
    elif len(plain) == 1:
        shape, values = (), plain
    else:
        raise TextError(where, f"{statement.head.text} takes a value, a list, or a shape and a list")
    want = _count(dtype, shape, plain[0])
    if len(values) != want:
        what = "packed bytes" if dtype.is_block else "values"
        raise TextError(plain[-1], f"shape {list(shape)} needs {want} {what}, found {len(values)}")
    width = 1 if dtype.is_block else dtype.nbytes
    return shape, b"".join(_element(dtype, v, scope, address, i * width) for i, v in enumerate(values))


def _count(dtype: DType, shape: tuple[int, ...], where: Value) -> int:
    """Literals a value of that shape has (block types: bytes)."""
    if dtype.is_block and (not shape or shape[-1] % dtype.block):
        raise TextError(where, f"rows of {dtype.name} are multiples of {dtype.block}, the shape is {list(shape)}")
    count = math.prod(shape)
    nbytes = count // dtype.block * dtype.nbytes
    if nbytes > MAX_BLOB:
        raise TextError(where, f"a value of {nbytes} bytes; {MAX_BLOB} are allowed")
    return nbytes if dtype.is_block else count


def _shape(value: Value, scope: Scope) -> tuple[int, ...]:
    if value.kind == "shape":
        items = [Value("number", value.token._replace(text=p)) for p in value.text.lower().split("x")]
    else:
        items = value.items if value.kind == "list" else [value]
    if len(items) > MAX_RANK:
        raise TextError(value, f"a tensor has at most {MAX_RANK} dimensions, found {len(items)}")
    out = []
    for v in items:
        try:
            n = literal(v, scope).integer
        except NumberError as e:
            raise TextError(v, str(e)) from None
        if not 0 <= n < 2 ** 31:
            raise TextError(v, f"dimension {v.text} is outside 0..{2 ** 31 - 1}")
        out.append(n)
    return tuple(out)


def _nesting(value: Value) -> tuple[tuple[int, ...], list[Value]]:
    """Shape and leaves of nested lists; all lists of one depth must be equally long."""
    shape: list[int] = []
    level = [value]
    while level and level[0].kind == "list":
        n = len(level[0].items)
        if len(shape) == MAX_RANK:
            raise TextError(value, f"a tensor has at most {MAX_RANK} dimensions")
        for v in level:
            if v.kind != "list" or len(v.items) != n:
                raise TextError(v, f"a list of {len(v.items) if v.kind == 'list' else 0} entries among lists of {n}")
        shape.append(n)
        level = [item for v in level for item in v.items]
    for v in level:
        if v.kind == "list":
            raise TextError(v, "a list among numbers")
    return tuple(shape), level


def _flatten(value: Value) -> list[Value]:
    return [v for item in value.items for v in _flatten(item)] if value.kind == "list" else [value]


def _element(dtype: DType, value: Value, scope: Scope, address: Callable[[Value, int], int] | None,
             offset: int) -> bytes:
    if value.kind == "address" and dtype is I64 and address is not None:
        return address(value, offset).to_bytes(8, "little")
    if dtype is BOOL and value.kind == "word" and value.text.upper() in ("TRUE", "FALSE"):
        return bytes([value.text.upper() == "TRUE"])
    try:
        lit = literal(value, scope)
        if dtype.kind == "float":
            x = lit.number({"F32": "f", "F16": "e", "BF16": "b"}[dtype.name])
            if lit.special == "bits":
                return lit.bits.to_bytes(dtype.nbytes, "little")
            if dtype is BF16:
                return (int(np.float32(x).view(np.uint32)) >> 16).to_bytes(2, "little")
            return np.array(x, dtype.numpy).tobytes()
        n = lit.integer
    except NumberError as e:
        raise TextError(value, str(e)) from None
    info = (0, 1) if dtype is BOOL else (0, 255) if dtype.is_block else \
        (int(np.iinfo(dtype.numpy).min), int(np.iinfo(dtype.numpy).max))
    if not info[0] <= n <= info[1]:
        raise TextError(value, f"{value.text} is outside {info[0]}..{info[1]}, the range of {dtype.name}")
    return np.array(n, np.uint8 if dtype.is_block else dtype.numpy).tobytes()


def _from_file(dtype: DType, value: Value, find: Callable[[str], str | None]) -> tuple[tuple[int, ...], bytes]:
    from m3jit.frontend.lexer import unquote
    if value.kind != "string":
        raise TextError(value, 'FILE= takes a "file name"')
    try:
        name = unquote(value.token.text)
    except ValueError as e:
        raise TextError(value, str(e)) from None
    path = find(name)
    if path is None:
        raise TextError(value, f"no file {name} beside the source or in the search folders")
    try:
        if os.path.getsize(path) > MAX_BLOB:
            raise TextError(value, f"{name} has {os.path.getsize(path)} bytes; {MAX_BLOB} are allowed")
        array = read_npy(path, mapped=True)
    except OSError as e:
        raise TextError(value, f"cannot read {name}: {e.strerror or e}") from e
    except ValueError as e:
        raise TextError(value, f"{name} {e}") from None
    stored = numpy_dtype(array.dtype.name)
    if dtype is BF16 and array.dtype.name == "uint16":
        stored = BF16
    if stored is not dtype:
        raise TextError(value, f"{name} holds {array.dtype.name}, the value is declared {dtype.name}")
    if array.ndim > MAX_RANK:
        raise TextError(value, f"{name} has {array.ndim} dimensions; a tensor has at most {MAX_RANK}")
    return tuple(array.shape), np.ascontiguousarray(array, dtype.numpy).tobytes()


def format_blob(dtype: DType, shape: Sequence[int], raw: bytes, addresses: dict[int, str]) -> list[str]:
    """The operands of a `.data` line, cut into physical lines; `addresses` maps offsets to `&name` texts."""
    values = _format_values(dtype, raw, addresses)
    if not len(shape) and not dtype.is_block:
        return values
    head = "[" + ", ".join(str(d) for d in shape) + "]"
    per_line = 16
    rows = [", ".join(values[i:i + per_line]) for i in range(0, len(values), per_line)]
    if len(rows) <= 1:
        return [f"{head} [{rows[0] if rows else ''}]"]
    return [f"{head} [{rows[0]},", *(r + "," for r in rows[1:-1]), rows[-1] + "]"]


def _format_values(dtype: DType, raw: bytes, addresses: dict[int, str]) -> list[str]:
    if dtype.is_block or dtype is BOOL:
        return [str(b) for b in raw]
    array: Any = np.frombuffer(raw, dtype.numpy)
    if dtype.kind == "int":
        return [addresses.get(i * dtype.nbytes, str(v)) for i, v in enumerate(array.tolist())]
    if dtype is BF16:
        wide = array.astype(np.uint32) << 16
        return [_format_bits(int(b), "b") for b in wide]
    if dtype.nbytes == 4:
        return [_format_bits(int(b), "f") for b in array.view(np.uint32)]
    return [f"nan:0x{int(b):04x}" if v != v else format_float(float(v), "e")
            for v, b in zip(array, array.view(np.uint16))]


def _format_bits(bits: int, fmt: str) -> str:
    x = RawF32(bits) if bits & 0x7FFFFFFF > 0x7F800000 else float(np.uint32(bits).view(np.float32))
    return format_float(x, fmt)
