"""Trees of plain values as bytes, with references to blocks.

A tree is None, a bool, an integer (signed 64-bit), a float (its bits), bytes, text, a list of trees, or a `Ref`.  One
tree has one encoding.  `unpack` reads bytes from a disk: it raises TreeError for everything `pack` does not write,
reads each byte once, and allocates no more than a small multiple of them.
"""
from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Iterator

MAX_DEPTH = 40
HASH = 16                          # bytes of a block's name
TREE = 2 ** 64 - 1                 # `Ref.item` of bytes that are a tree themselves

_NONE, _FALSE, _TRUE, _INT, _FLOAT, _BYTES, _TEXT, _LIST, _REF = range(9)
_i64, _f64, _u32, _ref = (struct.Struct(f) for f in ("<q", "<d", "<I", "<16sQQ"))


class TreeError(ValueError):
    """Bytes that are no tree.  offset: where that shows."""

    def __init__(self, offset: int, what: str):
        self.offset, self.what = offset, what
        super().__init__(f"{what} (at byte {offset} of it)")


@dataclass(frozen=True, slots=True)
class Ref:
    """Names bytes that lie in blocks.  item 0: `length` bytes; TREE: those of a tree, which may have references itself.
    Otherwise a table: length / 16 block names, each of `item` bytes, one behind the other."""
    hash: bytes
    length: int
    item: int = 0


def pack(tree: Any) -> bytes:
    """A tree's bytes.  TypeError for a value that no tree holds, ValueError for one that is too large or too deep."""
    out: list[bytes] = []
    _pack(tree, out, 0)
    return b"".join(out)


def _pack(v: Any, out: list[bytes], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} lists inside each other")
    kind = v.__class__
    if v is None:
        out.append(b"\x00")
    elif kind is bool:
        out.append(b"\x02" if v else b"\x01")
    elif kind is int:
        if not -2 ** 63 <= v < 2 ** 63:
            raise ValueError(f"the integer {v} has more than 64 bits")
        out.append(b"\x03" + _i64.pack(v))
    elif kind is float:
        out.append(b"\x04" + _f64.pack(v))
    elif kind is bytes:
        out += (b"\x05" + _u32.pack(len(v)), v)
    elif kind is str:
        raw = v.encode("utf-8")
        out += (b"\x06" + _u32.pack(len(raw)), raw)
    elif kind is list or kind is tuple:
        out.append(b"\x07" + _u32.pack(len(v)))
        for item in v:
            _pack(item, out, depth + 1)
    elif kind is Ref:
        out.append(b"\x08" + _ref.pack(v.hash, v.length, v.item))
    else:
        raise TypeError(f"a {kind.__name__} is no plain value")


def unpack(data: bytes) -> Any:
    """The tree of `pack`.  TreeError for any other bytes."""
    reader = _Reader(data)
    tree = reader.value(0)
    if reader.at != len(data):
        raise TreeError(reader.at, f"{len(data) - reader.at} bytes behind its end")
    return tree


class _Reader:
    __slots__ = ("data", "at")

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise TreeError(self.at, f"{n} bytes are said to follow, {len(self.data) - self.at} are left")
        self.at += n
        return self.data[self.at - n:self.at]

    def value(self, depth: int) -> Any:
        start = self.at
        tag = self.take(1)[0]
        if tag <= _TRUE:
            return (None, False, True)[tag]
        if tag == _INT:
            return _i64.unpack(self.take(8))[0]
        if tag == _FLOAT:
            return _f64.unpack(self.take(8))[0]
        if tag == _REF:
            return Ref(*_ref.unpack(self.take(32)))
        if tag > _REF:
            raise TreeError(start, f"no value begins with {tag}")
        count = _u32.unpack(self.take(4))[0]
        if count > len(self.data) - self.at:           # each item has a byte at least
            raise TreeError(start, f"{count} items or bytes are said to follow, {len(self.data) - self.at} bytes are "
                            f"left")
        if tag == _BYTES:
            return self.take(count)
        if tag == _TEXT:
            try:
                return self.take(count).decode("utf-8")
            except UnicodeDecodeError as e:
                raise TreeError(start, f"text that is not UTF-8: {e.reason}") from None
        if depth >= MAX_DEPTH:
            raise TreeError(start, f"more than {MAX_DEPTH} lists inside each other")
        return [self.value(depth + 1) for _ in range(count)]


def as_bytes(ref: Ref) -> Ref:
    """The reference to a tree as one to its bytes."""
    return Ref(ref.hash, ref.length)


def refs(tree: Any) -> Iterator[Ref]:
    """Every reference of a tree."""
    todo = [tree]
    while todo:
        v = todo.pop()
        if v.__class__ is Ref:
            yield v
        elif v.__class__ is list:
            todo += v
