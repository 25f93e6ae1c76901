"""Writing GGUF files (version 3, little-endian; the layout stands in `gguf_file`)."""
from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

from m3jit.models.ggml_types import GGMLType

ALIGNMENT = 32
U32 = 4                                      # number of a metadata type


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written: shape in NumPy order, rows of whole blocks."""
    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.ggml_type.block * self.ggml_type.nbytes


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def write_gguf(out: BinaryIO, metadata: Sequence[tuple[str, int, bytes]], tensors: Sequence[NewTensor],
               data: Callable[[NewTensor], Iterable[bytes]], alignment: int = ALIGNMENT) -> int:
    """Writes a file; its size.

    metadata: (key, number of its type, stored bytes); data(tensor): its bytes in pieces, asked for in order.
    ValueError when a tensor's pieces are not as long as its shape and type say."""
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    head += [_text(key) + struct.pack("<I", kind) + raw for key, kind, raw in metadata]
    at = 0
    for t in tensors:
        dims = t.shape[::-1]
        head.append(_text(t.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, t.ggml_type.number, at))
        at += _padded(t.nbytes, alignment)
    raw = b"".join(head)
    out.write(raw + bytes(_padded(len(raw), alignment) - len(raw)))
    for t in tensors:
        written = 0
        for piece in data(t):
            out.write(piece)
            written += len(piece)
        if written != t.nbytes:
            raise ValueError(f"tensor {t.name!r} ({t.ggml_type} {list(t.shape)}) got {written} bytes, not {t.nbytes}")
        out.write(bytes(_padded(written, alignment) - written))
    return _padded(len(raw), alignment) + at


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
