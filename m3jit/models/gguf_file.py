"""A memory-mapped, lazily indexed reader of GGUF model files.

Opening reads the key and tensor tables only: metadata values are decoded when asked for, tensor data is never copied.
Every field is checked before it is used, so a damaged or hostile file is refused with a `ModelFileError` and can
neither crash the process nor make it hang, allocate beyond the file's own size, or read outside the map.
(One thing no reader of a mapped file survives: another process truncating the file while it is in use.)

Layout (little-endian; format description: ggml's docs/gguf.md, versions 2 and 3):
    u32 "GGUF" | u32 version | u64 tensor count | u64 metadata count
    metadata:  string key | u32 type | value           string = u64 length, bytes; array = u32 type, u64 count, items
    tensors:   string name | u32 rank | u64 dims[rank] | u32 ggml type | u64 offset from the start of the data
    padding to general.alignment | tensor data
"""

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from m3jit.models.ggml_types import GGML_TYPES_BY_NUMBER, GGMLType
from m3jit.models.gguf_strings import StringArray, index_strings
from m3jit.models.mapped_file import map_file
from m3jit.models.model_error import FETCH, POINTER, ModelFileError
from m3jit.models.model_source import ONE_OF_THE_TYPES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

# Limits on what a file may declare. Real files stay far below them; they bound time and memory for hostile ones.
MAX_METADATA = 1 << 16
MAX_TENSORS = 1 << 18
MAX_RANK = 4
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSOR_NAME_BYTES = 256
MAX_STRING_BYTES = 1 << 28
MAX_STRINGS_PER_FILE = 1 << 24
MAX_ARRAY_DEPTH = 4
MAX_NESTED_ARRAYS_PER_FILE = 1 << 16
MAX_ALIGNMENT = 1 << 16

_U8, _I8, _U16, _I16, _U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64, _F64 = range(13)
_SCALARS = {_U8: "<u1", _I8: "<i1", _U16: "<u2", _I16: "<i2", _U32: "<u4", _I32: "<i4", _F32: "<f4", _BOOL: "<u1",
            _U64: "<u8", _I64: "<i8", _F64: "<f8"}
_SCALAR_BYTES = {kind: np.dtype(code).itemsize for kind, code in _SCALARS.items()}
_TYPE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")

_DAMAGED = "The file is truncated or damaged: obtain or convert it again."
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place in the file. `shape` is in NumPy order, that is GGML's dimensions reversed: the last axis is
    contiguous and is the one quantised in blocks. `offset` counts bytes from the start of the file."""

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a metadata value lies: its type, its first and last byte, and for arrays of strings their index."""

    kind: int
    start: int
    stop: int
    strings: np.ndarray | None = None


class Metadata(Mapping[str, Any]):
    """Key to value, decoded on first access and kept.

    Values: int, float, bool, str; arrays of numbers and bools are read-only NumPy views of the map, arrays of strings
    are `StringArray`, nested arrays are lists.
    """

    def __init__(self, file: "GGUFFile", entries: dict[str, _Entry]) -> None:
        self._file, self._entries = file, entries
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            self._values[key] = self._file._decode(key, self._entries[key])
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def stored(self, key: str) -> tuple[int, bytes]:
        """(number of its type, its bytes as the file holds them): what a copy of the value needs."""
        entry = self._entries[key]
        return entry.kind, self._file._data[entry.start:entry.stop].tobytes()

    def type_name(self, key: str) -> str:
        """The stored type of a value, for example "u32" or "array"."""
        return _TYPE_NAMES[self._entries[key].kind]


class GGUFFile:
    """A GGUF file, mapped read-only. Use it as a context manager, or let the last view keep the map alive.

    Raises ModelFileError when the file cannot be opened or is not a well-formed little-endian GGUF 2 or 3.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._map, self.mtime_ns = map_file(self.path, 24, "the GGUF preamble", ".gguf model file", _DAMAGED)
        self.size = len(self._map)
        self._data = np.frombuffer(self._map, np.uint8)
        self._strings_left = MAX_STRINGS_PER_FILE
        self._nested_left = MAX_NESTED_ARRAYS_PER_FILE
        tensor_count, metadata_count = self._read_preamble()
        self.metadata, pos = self._read_metadata(24, metadata_count)
        self.alignment = self._read_alignment()
        self.tensors, self.data_start = self._read_tensors(pos, tensor_count)

    # The preamble and the two tables.

    def _fail(self, problem: str, offset: int | None = None, item: str | None = None, expected: str | None = None,
              remedy: str | None = _DAMAGED) -> ModelFileError:
        return ModelFileError(self.path, problem, offset=offset, item=item, expected=expected, remedy=remedy)

    def _read_preamble(self) -> tuple[int, int]:
        magic = self._map[:4]
        if magic != _MAGIC:
            raise self._fail(f"does not start as a GGUF file does (found {magic!r})", 0, None, f"{_MAGIC!r}",
                             FETCH if self._map[:len(POINTER)] == POINTER else "Give a .gguf model file.")
        self.version = self._u32(4, "version")
        if self.version not in _VERSIONS:
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            if swapped in (1, *_VERSIONS):
                raise self._fail(f"is a big-endian GGUF file (version {swapped})", 4, "version", "a little-endian one",
                                 "Convert it with gguf-py's gguf-convert-endian.")
            raise self._fail(f"has GGUF version {self.version}", 4, "version", "version 2 or 3",
                             "Convert the model again with a current converter.")
        counts = self._u64(8, "tensor count"), self._u64(16, "metadata count")
        # An entry of either table takes at least this many bytes, so the file's size bounds both counts.
        limits = (("tensor count", 8, MAX_TENSORS, 24), ("metadata count", 16, MAX_METADATA, 13))
        for count, (item, offset, declared_limit, least_bytes) in zip(counts, limits):
            limit = min(declared_limit, (self.size - 24) // least_bytes)
            if count > limit:
                raise self._fail(f"is {count}", offset, item, f"at most {limit} in a file of {self.size} bytes")
        return counts

    def _read_metadata(self, pos: int, count: int) -> tuple[Metadata, int]:
        entries: dict[str, _Entry] = {}
        for index in range(count):
            key_at = pos
            key, pos = self._name(pos, f"metadata key {index}", MAX_KEY_BYTES)
            if key in entries:
                raise self._fail("appears twice", key_at, f"metadata key {key!r}", "distinct keys")
            kind = self._u32(pos, f"type of {key}")
            pos += 4
            strings, stop = self._skip_value(key, kind, pos, 0)
            entries[key] = _Entry(kind, pos, stop, strings)
            pos = stop
        return Metadata(self, entries), pos

    def _skip_value(self, key: str, kind: int, pos: int, depth: int) -> tuple[np.ndarray | None, int]:
        """Check the extent of the value at `pos`: (offsets of its strings if it is an array of them, its end)."""
        if kind in _SCALAR_BYTES:
            return None, self._end(pos, _SCALAR_BYTES[kind], key)
        if kind == _STRING:
            return None, self._string_span(pos, key, MAX_STRING_BYTES)[1]
        if kind != _ARRAY:
            raise self._fail(f"has unknown type {kind}", pos - 4, key, "a type from 0 to 12")
        if depth == MAX_ARRAY_DEPTH:
            raise self._fail("nests arrays too deeply", pos, key, f"at most {MAX_ARRAY_DEPTH} levels")
        item_kind, count = self._u32(pos, f"item type of {key}"), self._u64(pos + 4, f"item count of {key}")
        pos += 12
        if item_kind in _SCALAR_BYTES:
            return None, self._end(pos, count * _SCALAR_BYTES[item_kind], key)
        if item_kind not in (_STRING, _ARRAY):
            raise self._fail(f"has items of unknown type {item_kind}", pos - 12, key, "a type from 0 to 12")
        # A string takes at least 8 bytes, an array 12: counts beyond that need not be walked to be refused.
        self._end(pos, count * (8 if item_kind == _STRING else 12), key)
        if item_kind == _STRING:
            self._strings_left -= count
            if self._strings_left < 0:
                raise self._fail(f"has {count} strings", pos - 8, key, f"at most {MAX_STRINGS_PER_FILE} in all arrays")
            return index_strings(self.path, key, self._data, pos, count)
        self._nested_left -= count
        if self._nested_left < 0:
            raise self._fail(f"has {count} arrays in it", pos - 8, key, f"at most {MAX_NESTED_ARRAYS_PER_FILE}")
        for _ in range(count):
            pos = self._skip_value(key, _ARRAY, pos, depth + 1)[1]
        return None, pos

    def _read_alignment(self) -> int:
        key = "general.alignment"
        if key not in self.metadata:
            return _DEFAULT_ALIGNMENT
        alignment, entry = self.metadata[key], self.metadata._entries[key]
        if entry.kind != _U32 or alignment & (alignment - 1) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise self._fail(f"is {alignment!r} ({_TYPE_NAMES[entry.kind]})", entry.start, key,
                             f"a u32 power of two from 1 to {MAX_ALIGNMENT}")
        return alignment

    def _read_tensors(self, pos: int, count: int) -> tuple[Mapping[str, TensorInfo], int]:
        found: dict[str, TensorInfo] = {}
        places: dict[str, int] = {}
        for index in range(count):
            name, after = self._name(pos, f"name of tensor {index}", MAX_TENSOR_NAME_BYTES)
            if name in found:
                raise self._fail("appears twice", pos, f"tensor {name!r}", "distinct names")
            places[name] = pos
            found[name], pos = self._read_tensor(name, after)
        data_start = -(-pos // self.alignment) * self.alignment
        placed = {name: self._place(tensor, data_start, places[name]) for name, tensor in found.items()}
        end, last = data_start, None
        for tensor in sorted(placed.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                raise self._fail(f"overlaps tensor {last!r}", places[tensor.name], f"tensor {tensor.name!r}",
                                 f"data from byte {end} on, found at {tensor.offset}")
            end, last = tensor.offset + tensor.nbytes, tensor.name
        return MappingProxyType(placed), data_start

    def _read_tensor(self, name: str, pos: int) -> tuple[TensorInfo, int]:
        """The table entry after the name; `offset` is still relative to the start of the data."""
        item = f"tensor {name!r}"
        rank = self._u32(pos, f"rank of {item}")
        if rank > MAX_RANK:
            raise self._fail(f"has rank {rank}", pos, item, f"at most {MAX_RANK}")
        self._end(pos + 4, 8 * rank + 12, item)
        *dims, number, offset = struct.unpack_from(f"<{rank}QIQ", self._map, pos + 4)
        kind = GGML_TYPES_BY_NUMBER.get(number)
        if kind is None:
            raise self._fail(f"has unknown ggml type {number}", pos + 4 + 8 * rank, item, ONE_OF_THE_TYPES,
                             "Quantise the model to one of them.")
        if not all(dims):
            raise self._fail(f"has a dimension of 0 in {tuple(dims)}", pos + 4, item, "dimensions of at least 1")
        if (dims[0] if dims else 1) % kind.block:
            raise self._fail(f"has rows of {dims[0] if dims else 1} elements", pos + 4, item,
                             f"a multiple of {kind.block}, the block of type {kind}")
        return TensorInfo(name, kind, tuple(reversed(dims)), offset, prod(dims) // kind.block * kind.nbytes), \
            pos + 4 + 8 * rank + 12

    def _place(self, tensor: TensorInfo, data_start: int, entry_at: int) -> TensorInfo:
        item = f"tensor {tensor.name!r}"
        if tensor.offset % self.alignment:
            raise self._fail(f"has offset {tensor.offset}", entry_at, item, f"a multiple of {self.alignment}")
        start = data_start + tensor.offset
        if start + tensor.nbytes > self.size:
            raise self._fail(f"has {tensor.nbytes} bytes from byte {start} on, beyond the end of the file", entry_at,
                             item, f"data within {self.size} bytes")
        return TensorInfo(tensor.name, tensor.ggml_type, tensor.shape, start, tensor.nbytes)

    # Checked primitives.

    def _end(self, pos: int, count: int, item: str) -> int:
        if count > self.size - pos:
            raise self._fail(f"needs {count} bytes, {max(self.size - pos, 0)} are left", pos, item)
        return pos + count

    def _u32(self, pos: int, item: str) -> int:
        return int.from_bytes(self._map[pos:self._end(pos, 4, item)], "little")

    def _u64(self, pos: int, item: str) -> int:
        return int.from_bytes(self._map[pos:self._end(pos, 8, item)], "little")

    def _string_span(self, pos: int, item: str, limit: int) -> tuple[int, int]:
        length = self._u64(pos, f"length of {item}")
        if length > limit:
            raise self._fail(f"has {length} bytes", pos, item, f"at most {limit}")
        return pos + 8, self._end(pos + 8, length, item)

    def _text(self, start: int, stop: int, item: str) -> str:
        try:
            return self._map[start:stop].decode()
        except UnicodeDecodeError as error:
            raise self._fail(f"is not valid UTF-8 ({error.reason})", start + error.start, item) from None

    def _name(self, pos: int, item: str, limit: int) -> tuple[str, int]:
        start, stop = self._string_span(pos, item, limit)
        if start == stop:
            raise self._fail("is empty", pos, item, "a name")
        return self._text(start, stop, item), stop

    # Values.

    def _decode(self, key: str, entry: _Entry) -> Any:
        if entry.kind == _STRING:
            return self._text(entry.start + 8, entry.stop, key)
        if entry.kind == _ARRAY:
            if entry.strings is not None:
                return StringArray(self.path, key, self._data, entry.strings, entry.stop)
            return self._decode_array(key, entry.start)[0]
        value = np.frombuffer(self._map, _SCALARS[entry.kind], 1, entry.start)
        return self._bools(key, value, entry.start)[0].item() if entry.kind == _BOOL else value[0].item()

    def _decode_array(self, key: str, pos: int) -> tuple[Any, int]:
        """The array whose item type stands at `pos`, already checked by `_skip_value`; and its end."""
        kind, count = struct.unpack_from("<IQ", self._map, pos)
        pos += 12
        if kind == _STRING:
            starts, stop = index_strings(self.path, key, self._data, pos, count)
            return StringArray(self.path, key, self._data, starts, stop), stop
        if kind == _ARRAY:
            items = []
            for _ in range(count):
                item, pos = self._decode_array(key, pos)
                items.append(item)
            return items, pos
        values = np.frombuffer(self._map, _SCALARS[kind], count, pos) if count else np.empty(0, _SCALARS[kind])
        return (self._bools(key, values, pos) if kind == _BOOL else values), pos + count * _SCALAR_BYTES[kind]

    def _bools(self, key: str, values: np.ndarray, pos: int) -> np.ndarray:
        if len(values) and values.max() > 1:
            at = int(np.argmax(values > 1))
            raise self._fail(f"holds {values[at]} as a bool", pos + at, key, "0 or 1")
        return values.view(np.bool_)

    def value(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """metadata[key] when it is of Python type `kind` (int, float, bool, str, list for any array).

        Absent: `default`, or ModelFileError when there is none. Of another type: ModelFileError. An int passes as a
        float.
        """
        if key not in self.metadata:
            if default is not _REQUIRED:
                return default
            raise self._fail("is missing", None, f"metadata key {key!r}", f"a value of type {kind.__name__}",
                             "The model file lacks what running it needs: convert the model again.")
        found = self.metadata[key]
        wanted: tuple[type, ...] = {float: (float, int), list: (list, np.ndarray, StringArray)}.get(kind, (kind,))
        if not isinstance(found, wanted) or (isinstance(found, bool) and kind is not bool):
            raise self._fail(f"is a {self.metadata.type_name(key)}", self.metadata._entries[key].start,
                             f"metadata key {key!r}", f"a value of type {kind.__name__}")
        return float(found) if kind is float else found

    def tensor(self, name: str) -> TensorInfo:
        """Where tensor `name` lies; ModelFileError with the nearest names when there is none."""
        if name in self.tensors:
            return self.tensors[name]
        import difflib

        near = difflib.get_close_matches(name, self.tensors, 3)
        raise self._fail("is missing", None, f"tensor {name!r}", None,
                         f"The nearest names are {', '.join(near)}." if near else "No tensor has a similar name.")

    def tensor_bytes(self, name: str) -> np.ndarray:
        """The tensor's stored bytes: a read-only uint8 view of the map, no copy."""
        info = self.tensor(name)
        return self._data[info.offset:info.offset + info.nbytes]

    # Identity.

    @property
    def content_hash(self) -> str:
        """Fast key for caches derived from this file: 32 hex digits, without reading the whole of it.

        xxh3-128 over size, modification time, everything before the tensor data, and 32 blocks of 4 KiB spread over
        the data. Header and size tell models apart; the samples tell apart fine-tunes with equal headers even when a
        packager has levelled the times; the time notices an edit between the samples. The price: a copied file that
        did not keep its time is a new file to the cache. Nothing here resists forgery: whoever can write the model can
        choose its hash, and a cache entry derived from it is only as trusted as the file. `full_hash` reads it all.
        """
        import xxhash

        digest = xxhash.xxh3_128(struct.pack("<8sQq", b"gguf-key", self.size, self.mtime_ns))
        digest.update(self._data[:self.data_start])
        spare = self.size - self.data_start
        for part in range(32 if spare > 0 else 0):
            at = self.data_start + spare * part // 32
            digest.update(self._data[at:at + 4096])
        return digest.hexdigest()

    def full_hash(self) -> str:
        """xxh3-128 of every byte of the file, 32 hex digits (SmolLM2's 98 MB: some 10 ms when in the page cache)."""
        import xxhash

        return xxhash.xxh3_128_hexdigest(self._data)

    def metadata_hash(self, prefix: str) -> str:
        """xxh3-128 over the keys starting with `prefix` and their stored values, 32 hex digits.

        Exact (no sampling) and independent of file name and time: the key for what depends on these values alone.
        """
        import xxhash

        digest = xxhash.xxh3_128(b"gguf-metadata")
        for key in sorted(key for key in self.metadata if key.startswith(prefix)):
            entry = self.metadata._entries[key]
            digest.update(struct.pack("<QIQ", len(key.encode()), entry.kind, entry.stop - entry.start))
            digest.update(key.encode())
            digest.update(self._data[entry.start:entry.stop])
        return digest.hexdigest()

    # Lifetime.

    def close(self) -> None:
        """Release the map now if no view of it is left; otherwise it goes with the last view."""
        self._data = np.empty(0, np.uint8)
        self.metadata._values.clear()
        try:
            self._map.close()
        except BufferError:
            pass  # a tensor view is alive and must stay readable

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFFile {self.path!r}: {len(self.tensors)} tensors, {len(self.metadata)} metadata keys>"
