"""A memory-mapped reader of .safetensors files, single or split over several.

Opening reads the header only; tensor data is never copied. The header is checked in full before any of it is used, so
a damaged or hostile file is refused with a `ModelFileError` that names the tensor, and can neither crash the process
nor make it hang, allocate much beyond the header's own size, or read outside the map.

Layout (little-endian; format description: the safetensors project's README):
    u64 length of the header | header, JSON in UTF-8, may end in spaces | tensor data
    header: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {text: text}}
    offsets count from the start of the data; tensors do not overlap.
"""

import json
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from m3jit.models.mapped_file import map_file
from m3jit.models.model_error import FETCH, POINTER, ModelFileError

# Limits on what a file may declare. Real files stay far below them; they bound time and memory for hostile ones.
MAX_HEADER_BYTES = 1 << 24
MAX_TENSORS = 1 << 18
MAX_RANK = 8
MAX_NAME_BYTES = 512
MAX_INDEX_BYTES = 1 << 26
MAX_SHARDS = 4096

# Bits of one element, by the format's names of types.
DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
              "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4,
              "F6_E2M3": 6, "F6_E3M2": 6}
METADATA = "__metadata__"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DAMAGED = "The file is truncated or damaged: obtain or convert it again."
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place in its file. `offset` counts bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """A .safetensors file, mapped read-only; the last view keeps the map alive.

    Raises ModelFileError when the file cannot be opened or is not well formed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._map, self.mtime_ns = map_file(self.path, 10, "the shortest header", ".safetensors file", _DAMAGED)
        self.size = len(self._map)
        self._data = np.frombuffer(self._map, np.uint8)
        (length,) = struct.unpack_from("<Q", self._map)
        limit = min(MAX_HEADER_BYTES, self.size - 8)
        if length > limit:
            if self._map[:len(POINTER)] == POINTER:
                raise self._fail("is no safetensors file", remedy=FETCH)
            raise self._fail(f"is {length} bytes long", 0, "header", f"at most {limit} in a file of {self.size} bytes")
        self.data_start = 8 + length
        header = self._parse(self._map[8:self.data_start])
        self.metadata = self._texts(header.pop(METADATA, {}))
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(self._places(header))

    def _fail(self, problem: str, offset: int | None = None, item: str | None = None, expected: str | None = None,
              remedy: str | None = _DAMAGED) -> ModelFileError:
        return ModelFileError(self.path, problem, offset=offset, item=item, expected=expected, remedy=remedy)

    def _parse(self, raw: bytes) -> dict[str, Any]:
        if not raw.startswith(b"{"):
            raise self._fail(f"starts with {raw[:4]!r}", 8, "header", "a JSON object",
                             "Give a .safetensors file.")
        # Bounds what JSON of this size can become in memory: an entry has one object, two lists, a few strings.
        if raw.count(b"{") + raw.count(b"[") > 3 * MAX_TENSORS + 16:
            raise self._fail("has too many objects and lists", 8, "header", f"at most {MAX_TENSORS} tensors")
        return parse_json(self.path, raw, "header", 8)

    def _texts(self, found: Any) -> Mapping[str, str]:
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise self._fail("is not an object of texts", 8, f"header key {METADATA!r}", 'values such as "pt"')
        return MappingProxyType(found)

    def _places(self, header: dict[str, Any]) -> dict[str, StoredTensor]:
        if len(header) > MAX_TENSORS:
            raise self._fail(f"has {len(header)} tensors", 8, "header", f"at most {MAX_TENSORS}")
        found = {name: self._place(name, entry) for name, entry in header.items()}
        end, last = self.data_start, None
        for tensor in sorted(found.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
            if tensor.offset < end:
                raise self._fail(f"overlaps tensor {last!r}", 8, f"tensor {tensor.name!r}",
                                 f"data from byte {end} on, found at {tensor.offset}")
            end, last = tensor.offset + tensor.nbytes, tensor.name
        return found

    def _place(self, name: str, entry: Any) -> StoredTensor:
        item = f"tensor {name[:MAX_NAME_BYTES]!r}"
        if not name or len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
            raise self._fail("has a name of wrong length", 8, item, f"1 to {MAX_NAME_BYTES} bytes")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._fail("is not described as tensors are", 8, item, "the keys dtype, shape and data_offsets")
        dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise self._fail(f"has unknown dtype {str(dtype)[:40]!r}", 8, item, "one of " + ", ".join(DTYPE_BITS))
        if not _sizes(shape) or len(shape) > MAX_RANK:
            raise self._fail(f"has shape {str(shape)[:80]}", 8, item,
                             f"at most {MAX_RANK} whole numbers from 0 on")
        if not _sizes(span) or len(span) != 2 or span[0] > span[1]:
            raise self._fail(f"has data_offsets {str(span)[:80]}", 8, item, "[begin, end] with begin <= end")
        bits = prod(shape) * DTYPE_BITS[dtype]
        if bits != 8 * (span[1] - span[0]):
            raise self._fail(f"has {span[1] - span[0]} bytes of data", 8, item,
                             f"{-(-bits // 8)} for {dtype} {shape}")
        if span[1] > self.size - self.data_start:
            raise self._fail(f"has data up to byte {self.data_start + span[1]}, beyond the end of the file", 8, item,
                             f"data within {self.size} bytes")
        return StoredTensor(name, dtype, tuple(shape), self.data_start + span[0], span[1] - span[0])

    def tensor_bytes(self, name: str) -> np.ndarray:
        """The tensor's stored bytes, read-only uint8: a view of the map; a copy where elements are not aligned in it.

        KeyError when there is no tensor of that name."""
        place = self.tensors[name]
        raw = self._data[place.offset:place.offset + place.nbytes]
        if place.offset % max(1, DTYPE_BITS[place.dtype] // 8):
            raw = raw.copy()
            raw.setflags(write=False)
        return raw

    def feed_key(self, digest: Any) -> None:
        """Add to a digest what tells this file from others: as GGUFFile.content_hash (header, time and samples)."""
        digest.update(struct.pack("<8sQq", b"safe-key", self.size, self.mtime_ns))
        digest.update(self._data[:self.data_start])
        spare = self.size - self.data_start
        for part in range(32 if spare > 0 else 0):
            at = self.data_start + spare * part // 32
            digest.update(self._data[at:at + 4096])

    def feed_content(self, digest: Any) -> None:
        """Add every byte of the file to a digest."""
        digest.update(struct.pack("<8sQ", b"safe-all", self.size))
        digest.update(self._data)

    def close(self) -> None:
        """Release the map now if no view of it is left; otherwise it goes with the last view."""
        self._data = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:
            pass  # a tensor view is alive and must stay readable

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SafetensorsFile {self.path!r}: {len(self.tensors)} tensors>"


class SafetensorsSet:
    """The tensors of a folder: `model.safetensors`, or the files `model.safetensors.index.json` names.

    `tensors` maps a name to its place, `home` to the file it lies in. Raises ModelFileError when neither file is
    there, when the index is not well formed or leads out of the folder, or when a file lacks a tensor it should hold.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = os.fspath(folder)
        index, single = Path(folder) / INDEX_NAME, Path(folder) / SINGLE_NAME
        if index.is_file():
            where = _read_index(index)
            self.files = {part: SafetensorsFile(Path(folder) / part) for part in sorted(set(where.values()))}
        elif single.is_file():
            self.files = {SINGLE_NAME: SafetensorsFile(single)}
            where = dict.fromkeys(self.files[SINGLE_NAME].tensors, SINGLE_NAME)
        else:
            raise ModelFileError(self.path, "holds no weights", expected=f"{SINGLE_NAME} or {INDEX_NAME}",
                                 remedy="Other formats of weights (.bin, .pt, .h5) are not read: save the model as "
                                        "safetensors.")
        for name, part in where.items():
            if name not in self.files[part].tensors:
                raise ModelFileError(str(Path(folder) / part), "is missing", item=f"tensor {name!r}",
                                     expected=f"the tensors {INDEX_NAME} says the file holds", remedy=_DAMAGED)
        self.home = {name: self.files[part] for name, part in where.items()}
        self.tensors = {name: file.tensors[name] for name, file in self.home.items()}

    def tensor_bytes(self, name: str) -> np.ndarray:
        """As SafetensorsFile.tensor_bytes."""
        return self.home[name].tensor_bytes(name)

    def feed_key(self, digest: Any) -> None:
        """Add to a digest what tells these files from others."""
        for part, file in self.files.items():
            digest.update(part.encode())
            file.feed_key(digest)

    def feed_content(self, digest: Any) -> None:
        """Add every byte of these files to a digest."""
        for part, file in self.files.items():
            digest.update(part.encode())
            file.feed_content(digest)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def parse_json(path: str, raw: bytes, item: str, offset: int | None = None) -> dict[str, Any]:
    """A JSON object whose keys are distinct; ModelFileError says what is wrong with it and at which byte."""
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ModelFileError(path, "appears twice", offset=offset, item=f"{item} key {twice[:MAX_NAME_BYTES]!r}",
                                 expected="distinct keys", remedy=_DAMAGED)
        return found

    def fail(problem: str, at: int) -> ModelFileError:
        return ModelFileError(path, problem, offset=(offset or 0) + at, item=item, expected="a JSON object",
                              remedy=_DAMAGED)
    try:
        found = json.loads(raw.decode(), object_pairs_hook=distinct)
    except UnicodeDecodeError as error:
        raise fail(f"is not valid UTF-8 ({error.reason})", error.start) from None
    except json.JSONDecodeError as error:
        raise fail(f"is not valid JSON ({error.msg})", error.pos) from None
    except RecursionError:
        raise fail("is nested too deeply", 0) from None
    except ValueError as error:                        # a number of thousands of digits
        raise fail(f"is not valid JSON ({str(error).partition(';')[0]})", 0) from None
    if not isinstance(found, dict):
        raise fail(f"is a {type(found).__name__}", 0)
    return found


def read_json(path: Path, limit: int = MAX_INDEX_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes; ModelFileError otherwise."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelFileError(path, "is not a regular file")
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise ModelFileError(path, f"cannot be opened ({error.strerror})",
                             remedy="Check the path and its permissions.") from error
    if len(raw) > limit:
        raise ModelFileError(path, f"has more than {limit} bytes", expected="a small JSON file")
    return parse_json(os.fspath(path), raw, "text")


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from an index whose file names stay inside its folder."""
    where = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(part, str) for part in where.values()):
        raise ModelFileError(path, "is missing or not an object of file names", item="key 'weight_map'",
                             expected='{"tensor": "file.safetensors"}', remedy=_DAMAGED)
    parts = set(where.values())
    for part in parts:
        if part in ("", ".", "..") or "/" in part or "\\" in part or "\0" in part:
            raise ModelFileError(path, f"names the file {part!r}", item="key 'weight_map'",
                                 expected="names of files in the same folder")
    if len(parts) > MAX_SHARDS:
        raise ModelFileError(path, f"names {len(parts)} files", item="key 'weight_map'",
                             expected=f"at most {MAX_SHARDS}")
    return where


def _sizes(found: Any) -> bool:
    """Whether a value of the header is a list of whole numbers from 0 to 2^63 - 1 (bools are none)."""
    return isinstance(found, list) and all(type(n) is int and 0 <= n <= _LARGEST for n in found)
