"""GGUF models split over several files: NAME-00001-of-00003.gguf and so on, as gguf-split and converters write them.

Each file is a GGUF file of its own with `split.no` (from 0), `split.count` and `split.tensors.count` (of all files
together); the model's metadata stand in the first.  Opening any of them opens all.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from m3jit.models.gguf_file import GGUFFile, Metadata, TensorInfo
from m3jit.models.model_error import ModelFileError

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_SHARDS = 4096
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile | GGUFShards:
    """A GGUF file; with all other files of its model where it is one of several.

    ModelFileError: not such a file; a file of the model is missing, is another model's or stands under a wrong name; a
    tensor is in two files; the files do not hold as many tensors as they say."""
    file = GGUFFile(path)
    count = file.value(COUNT, int, default=1)
    return file if count <= 1 else GGUFShards(file, count)


def shard_path(path: str, number: int) -> str:
    """The path of file `number` (from 0) of the model that the file at `path` belongs to."""
    found = _NAME.fullmatch(path)
    return f"{found[1]}-{number + 1:05}-of-{found[3]}.gguf" if found else path


class GGUFShards:
    """The files of one model together, with the members of a `GGUFFile`."""

    def __init__(self, opened: GGUFFile, count: int) -> None:
        """opened: any of the `count` files; the others are looked for beside it."""
        found = _NAME.fullmatch(opened.path)
        number = opened.value(NUMBER, int)
        if count > MAX_SHARDS or not 0 <= number < count:
            raise ModelFileError(opened.path, f"is {number} of {count}", item=f"metadata key {NUMBER!r}",
                                 expected=f"a number below {COUNT}, which is at most {MAX_SHARDS}")
        if not found or (int(found[2]), int(found[3])) != (number + 1, count):
            raise ModelFileError(opened.path, f"is part {number + 1} of {count} by its metadata, but not by its name",
                                 expected=f"a name that ends in -{number + 1:05}-of-{count:05}.gguf",
                                 remedy="Give all files of the model the names they were published with.")
        self.files = [opened if i == number else self._open(opened, i, count) for i in range(count)]
        self.path = self.files[0].path
        self.metadata: Metadata = self.files[0].metadata
        self.home: dict[str, GGUFFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self.home:
                    raise ModelFileError(file.path, f"is also in {self.home[name].path}", item=f"tensor {name!r}",
                                         expected="each tensor in one of the files",
                                         remedy="Obtain the files again, all from one place.")
                self.home[name] = file
        self._check_count()
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: file.tensors[name] for name, file in self.home.items()})

    @staticmethod
    def _open(opened: GGUFFile, number: int, count: int) -> GGUFFile:
        path = shard_path(opened.path, number)
        if not os.path.exists(path):
            raise ModelFileError(path, f"part {number + 1} of {count} of the model is missing",
                                 expected=f"it beside {opened.path}", remedy="Obtain all files of the model.")
        file = GGUFFile(path)
        said = file.value(NUMBER, int), file.value(COUNT, int)
        if said != (number, count):
            raise ModelFileError(path, f"is part {said[0] + 1} of {said[1]} by its metadata",
                                 item="metadata key 'split.no'",
                                 expected=f"part {number + 1} of {count}, as its name says",
                                 remedy="Obtain the files again, all from one place.")
        return file

    def _check_count(self) -> None:
        for file in self.files:
            said = file.value(TENSORS, int, default=len(self.home))
            if said != len(self.home):
                raise ModelFileError(file.path, f"is {said}", item=f"metadata key {TENSORS!r}",
                                     expected=f"{len(self.home)}, the tensors in the {len(self.files)} files",
                                     remedy="Obtain the files again, all from one place.")

    # What the first file answers for all of them.

    def value(self, key: str, kind: type, *default: Any, **named: Any) -> Any:
        """As GGUFFile.value, of the first file."""
        return self.files[0].value(key, kind, *default, **named)

    def metadata_hash(self, prefix: str) -> str:
        """As GGUFFile.metadata_hash, of the first file."""
        return self.files[0].metadata_hash(prefix)

    # Tensors.

    def tensor(self, name: str) -> TensorInfo:
        """Where tensor `name` lies in its file; ModelFileError with the nearest names when there is none."""
        if name in self.tensors:
            return self.tensors[name]
        import difflib

        near = difflib.get_close_matches(name, self.tensors, 3)
        raise ModelFileError(self.path, f"is in none of the {len(self.files)} files", item=f"tensor {name!r}",
                             remedy=f"The nearest names are {', '.join(near)}." if near else
                             "No tensor has a similar name.")

    def tensor_bytes(self, name: str) -> np.ndarray:
        """As GGUFFile.tensor_bytes."""
        self.tensor(name)
        return self.home[name].tensor_bytes(name)

    # Identity and lifetime.

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def content_hash(self) -> str:
        """As GGUFFile.content_hash, of all files in order."""
        return self._together([file.content_hash for file in self.files])

    def full_hash(self) -> str:
        """As GGUFFile.full_hash, of all files in order."""
        return self._together([file.full_hash() for file in self.files])

    @staticmethod
    def _together(hashes: list[str]) -> str:
        import xxhash

        return xxhash.xxh3_128_hexdigest("\n".join(hashes).encode())

    def close(self) -> None:
        """Release the maps that no view uses."""
        for file in self.files:
            file.close()

    def __enter__(self) -> GGUFShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GGUFShards {self.path!r}: {len(self.files)} files, {len(self.tensors)} tensors>"
