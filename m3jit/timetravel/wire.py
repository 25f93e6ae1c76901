"""Values as bytes: numbers of variable length, texts, arrays, tuples, and what a log holds besides.

A value is a tag byte and its content.  The reader believes nothing: every length is compared with the bytes that are
there before anything is made of it, so what it allocates is bounded by what it was given.
"""
from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from m3jit.errors import UserError
from m3jit.isa.types import BY_CODE, MAX_RANK, Tensor
from m3jit.vm.recording import Output, Raised
from m3jit.vm.sources import END, NOTHING

MAX_DEPTH = 16
(NONE, FALSE, TRUE, INT, FLOAT, TEXT, BYTES, TUPLE, DICT, ARRAY, TENSOR, AT_END, NOT_NOW, RAISED, OUTPUT) = range(15)
_ARRAYS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
           "float64")


class WireError(UserError):
    """Bytes that are no value, or a value that has no bytes."""


def put_varint(out: bytearray, n: int) -> None:
    """An integer from 0: seven bits a byte, the lowest first."""
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)


def put_int(out: bytearray, n: int) -> None:
    """A signed integer of 64 bits; small ones of either sign are short."""
    put_varint(out, n << 1 if n >= 0 else (-n << 1) - 1)


def put_bytes(out: bytearray, data: bytes | memoryview) -> None:
    """A length and that many bytes."""
    put_varint(out, len(data))
    out += data


def put(out: bytearray, value: Any) -> None:
    """Append a value.  WireError: one of a class that no log can hold; of a value inside others, with the keys and
    items (from 0) that lead there."""
    kind = value.__class__
    if value is None or kind is bool:
        out.append(NONE if value is None else TRUE if value else FALSE)
    elif kind is int or isinstance(value, np.integer):
        if not -2 ** 63 <= value < 2 ** 64:
            raise WireError(f"{value} does not fit 64 bits")
        out.append(INT)
        put_int(out, int(value))
    elif kind is float or isinstance(value, np.floating):
        out.append(FLOAT)
        out += struct.pack("<d", value)
    elif kind is str:
        out.append(TEXT)
        put_bytes(out, value.encode("utf-8", "surrogatepass"))
    elif kind in (bytes, bytearray):
        out.append(BYTES)
        put_bytes(out, bytes(value))
    elif value is END or value is NOTHING:
        out.append(AT_END if value is END else NOT_NOW)
    else:
        _put_compound(out, value)


def _put_compound(out: bytearray, value: Any) -> None:
    if isinstance(value, Raised):
        out.append(RAISED)
        _put_all(out, value)
    elif isinstance(value, Output):
        out.append(OUTPUT)
        put_bytes(out, value.sink.encode("utf-8", "surrogatepass"))
        put_bytes(out, value.form.encode())
        put_varint(out, value.size)
        out += struct.pack("<Q", value.digest)
        put_bytes(out, value.head)
    elif isinstance(value, (tuple, list)):
        out.append(TUPLE)
        put_varint(out, len(value))
        _put_all(out, value)
    elif isinstance(value, dict):
        out.append(DICT)
        put_varint(out, len(value))
        for key, item in value.items():
            try:
                put_bytes(out, key.encode("utf-8", "surrogatepass"))
                put(out, item)
            except WireError as e:
                raise WireError(f"{key}: {e}") from None
    elif isinstance(value, Tensor):
        out.append(TENSOR)
        put_varint(out, value.dtype.code)
        _put_shape(out, value.shape)
        put_bytes(out, value.tobytes())
    elif isinstance(value, (np.ndarray, np.bool_)) and value.dtype.name in _ARRAYS:
        a = np.ascontiguousarray(value) if value.ndim else np.asarray(value)
        out.append(ARRAY)
        put_varint(out, _ARRAYS.index(a.dtype.name))
        _put_shape(out, a.shape)
        put_bytes(out, a.astype(a.dtype.newbyteorder("<")).tobytes())
    else:
        raise WireError(f"a value of class {type(value).__name__} cannot be recorded; numbers, text, bytes "
                        "and arrays can")


def _put_all(out: bytearray, values: Any) -> None:
    number = 0
    try:
        for number, item in enumerate(values):
            put(out, item)
    except WireError as e:
        raise WireError(f"item {number}: {e}") from None


def _put_shape(out: bytearray, shape: tuple[int, ...]) -> None:
    put_varint(out, len(shape))
    for d in shape:
        put_varint(out, d)


class Reader:
    """Reads values from bytes; WireError where there is none."""

    def __init__(self, data: bytes | memoryview):
        self.data, self.at = memoryview(data), 0

    @property
    def left(self) -> int:
        """Bytes that follow."""
        return len(self.data) - self.at

    def take(self, n: int) -> memoryview:
        """The next n bytes."""
        if n > self.left:
            raise WireError(f"{n} bytes are announced where {self.left} follow")
        self.at += n
        return self.data[self.at - n:self.at]

    def varint(self) -> int:
        """A number from 0 to 2^70 - 1."""
        n = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            n |= (byte & 127) << shift
            if byte < 128:
                return n
        raise WireError("a number has more than ten bytes")

    def int(self) -> int:
        n = self.varint()
        return n >> 1 if not n & 1 else -(n + 1 >> 1)

    def bytes(self) -> memoryview:
        return self.take(self.varint())

    def text(self) -> str:
        try:
            return bytes(self.bytes()).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise WireError("a text is not UTF-8") from None

    def count(self, what: str) -> int:
        """How many items follow, each of at least one byte."""
        n = self.varint()
        if n > self.left:
            raise WireError(f"{n} {what} are announced where {self.left} bytes follow")
        return n

    def value(self, depth: int = 0) -> Any:
        """The next value."""
        if depth > MAX_DEPTH:
            raise WireError(f"values are nested more than {MAX_DEPTH} deep")
        tag = self.take(1)[0]
        if tag <= TRUE:
            return (None, False, True)[tag]
        if tag == INT:
            return self.int()
        if tag == FLOAT:
            return struct.unpack("<d", self.take(8))[0]
        if tag == TEXT:
            return self.text()
        if tag == BYTES:
            return bytes(self.bytes())
        if tag in (AT_END, NOT_NOW):
            return END if tag == AT_END else NOTHING
        if tag == TUPLE:
            return tuple([self.value(depth + 1) for _ in range(self.count("items"))])
        if tag == DICT:
            return {self.text(): self.value(depth + 1) for _ in range(self.count("entries"))}
        return self._compound(tag, depth)

    def _compound(self, tag: int, depth: int) -> Any:
        if tag == RAISED:
            kind, message = self.value(depth + 1), self.value(depth + 1)
            if not isinstance(kind, str) or not isinstance(message, str):
                raise WireError("an error is no two texts")
            return Raised(kind, message)
        if tag == OUTPUT:
            return Output(self.text(), self.text(), self.varint(), struct.unpack("<Q", self.take(8))[0],
                          bytes(self.bytes()))
        if tag == ARRAY:
            number = self.varint()
            if number >= len(_ARRAYS):
                raise WireError(f"array type {number} is not known")
            dtype, shape = np.dtype(_ARRAYS[number]), self._shape()
            raw = self._sized(math.prod(shape) * dtype.itemsize)
            return np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
        if tag == TENSOR:
            return self._tensor()
        raise WireError(f"tag {tag} is not known")

    def _shape(self) -> tuple[int, ...]:
        rank = self.varint()
        if rank > 32:
            raise WireError(f"an array of {rank} dimensions")
        return tuple(self.varint() for _ in range(rank))

    def _sized(self, n: int) -> bytes:
        raw = self.bytes()
        if len(raw) != n:
            raise WireError(f"an array has {len(raw)} bytes, its shape needs {n}")
        return bytes(raw)

    def _tensor(self) -> Tensor:
        dtype, shape = BY_CODE.get(self.varint()), self._shape()
        if dtype is None or len(shape) > MAX_RANK:
            raise WireError("a tensor of an unknown type or of too many dimensions")
        if dtype.is_block:
            if not shape or shape[-1] % dtype.block:
                raise WireError(f"rows of {dtype.name} are multiples of {dtype.block} elements")
            raw = self._sized(math.prod(shape[:-1]) * dtype.row_bytes(shape[-1]))
            return Tensor.blocks(dtype, shape, np.frombuffer(raw, np.uint8))
        raw = self._sized(math.prod(shape) * dtype.nbytes)
        array = np.frombuffer(raw, dtype.numpy)
        if dtype.kind == "bool":
            array = np.frombuffer(raw, np.uint8) != 0
        return Tensor(dtype, shape, array.reshape(shape).copy())
