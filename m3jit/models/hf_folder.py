"""A Hugging Face folder (config.json, safetensors, tokenizer.json) as a source of architectures.

It answers with the keys and tensor names that GGUF uses (`hf_families.py`), and with the tensors GGUF files hold:
- gains stored as w but meaning 1 + w (gemma) are read as the sum, rounded once to F32, and the like
  (`hf_transforms.py`);
- factors of the rotation that follow from config.json appear as tensors, as converters write them.
One thing differs: rows of the query and key matrices are in the original order, so rotary pairs are (i, i + d/2), which
is said by `rope_pairing`. F32, F16 and BF16 weights are used as they are stored.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from m3jit.models.ggml_types import GGML_TYPES, GGMLType
from m3jit.models.hf_config import Config
from m3jit.models.hf_families import FAMILIES, Family
from m3jit.models.hf_pooling import pooling_keys
from m3jit.models.hf_transforms import AS_STORED, ONE_PLUS, Transform
from m3jit.models.model_error import ModelFileError
from m3jit.models.safetensors_file import SafetensorsSet, StoredTensor

READ_DTYPES = ("F32", "F16", "BF16")
MAX_LAYERS, MAX_CONTEXT, MAX_SIZE = 4096, 1 << 31, 1 << 24
_REQUIRED = object()
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """A tensor under its GGUF name; `stored` are its names in the files, none when it follows from config.json."""

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    stored: tuple[str, ...]
    how: Transform = AS_STORED

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.ggml_type.nbytes


class HFFolder:
    """The model in a folder.  ModelFileError names what is missing, damaged or not supported."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        folder = Path(path)
        self.config = Config.read(folder)
        self.family = self._family()
        self.rope_pairing = self.family.rope_pairing
        self.config.defaults = dict(self.family.defaults)
        self.config.need("quantization_config")
        keys = {name: value for name, (theirs, kind, required) in self.family.keys.items()
                if (value := self.config.get(theirs, kind, *(() if required else (None,)))) is not None}
        for name, (theirs, kind, _) in self.family.keys.items():
            most = {"block_count": MAX_LAYERS, "context_length": MAX_CONTEXT}.get(name, MAX_SIZE)
            if kind is int and name in keys and not 1 <= keys[name] <= most:
                raise self.config.refuse(theirs, f"is {keys[name]}", f"1 to {most}")
        self._made = self.family.more(self.config, keys)
        pooling, normalise = pooling_keys(folder)
        keys |= pooling
        prefix = self.family.architecture
        self.metadata: Mapping[str, Any] = MappingProxyType(
            {"general.architecture": prefix, "general.name": folder.resolve().name,
             **{f"{prefix}.{key}": value for key, value in keys.items()}, **normalise})
        self._files = SafetensorsSet(folder)
        self.tensors: Mapping[str, FolderTensor] = MappingProxyType(self._tensors(keys))
        self.untied = self.config.get("tie_word_embeddings", bool, True) is False
        self._kept: dict[str, np.ndarray] = {}

    def _family(self) -> Family:
        kind = self.config.get("model_type", str)
        if kind not in FAMILIES:
            raise self.config.refuse("model_type", f"is {kind!r}, which is not supported",
                                     "one of " + ", ".join(sorted(FAMILIES)))
        family = FAMILIES[kind]
        other = family.with_experts
        return other[1] if other is not None and self.config.get(other[0], int, 0) > 0 else family

    # Tensors.

    def _tensors(self, keys: Mapping[str, Any]) -> dict[str, FolderTensor]:
        tied = self.config.get("tie_word_embeddings", bool, False)
        parts: dict[str, tuple[Transform, dict[int, StoredTensor]]] = {}
        for stored in self._files.tensors.values():
            for name, how, number in self._parts(stored, keys["block_count"]):
                if name == "output.weight" and tied:
                    continue
                others = parts.setdefault(name, (how, {}))[1]
                if number in others:
                    raise self._fail(stored, f"is {name} like tensor {others[number].name!r}",
                                     "one tensor for each part")
                others[number] = stored
        found = {name: self._tensor(name, how, stored, keys) for name, (how, stored) in parts.items()}
        for name, values in self._made.items():
            found[name] = FolderTensor(name, GGML_TYPES["F32"], values.shape, ())
        return found

    def _fail(self, stored: StoredTensor, problem: str, expected: str) -> ModelFileError:
        return ModelFileError(self._files.home[stored.name].path, problem, item=f"tensor {stored.name!r}",
                              expected=expected)

    def _parts(self, stored: StoredTensor, layers: int) -> list[tuple[str, Transform, int]]:
        """What a stored tensor becomes: (GGUF name, how, number among the stacked ones); nothing when programs do not
        need it.  ModelFileError when it belongs to no part of the architecture."""
        family = self.family
        for prefix in family.prefixes:
            if not stored.name.startswith(prefix):
                continue
            short = stored.name.removeprefix(prefix)
            if family.ignored and short.startswith(family.ignored) or short.endswith("rotary_emb.inv_freq"):
                return []
            short = re.sub(r"LayerNorm\.(gamma|beta)$", _old_name, short)
            numbers = [int(n) for n in _NUMBER.findall(short)]
            found = family.tensors.get(_NUMBER.sub("{}", short))
            if found is not None and (not numbers or numbers[0] < layers):
                usual = ONE_PLUS if family.one_plus and len(stored.shape) == 1 else AS_STORED
                several = [(found, usual)] if isinstance(found, str) else found if isinstance(found, list) else [found]
                return [(name.format(*numbers), how, numbers[1] if how.stacked else 0) for name, how in several]
        raise self._fail(stored, f"is no part of {family.architecture} with {layers} layers",
                         "the tensors of that architecture")

    def _tensor(self, name: str, how: Transform, stored: dict[int, StoredTensor],
                keys: Mapping[str, Any]) -> FolderTensor:
        inside = [stored[number] for number in sorted(stored)]
        for tensor in inside:
            if tensor.dtype not in READ_DTYPES or tensor.dtype != inside[0].dtype:
                raise self._fail(tensor, f"has dtype {tensor.dtype}", "one of " + ", ".join(READ_DTYPES)
                                 if tensor.dtype not in READ_DTYPES else f"{inside[0].dtype}, as the others have")
        if how.stacked and sorted(stored) != list(range(len(stored))):
            raise self._fail(inside[0], f"is one of {len(stored)} whose numbers have gaps", "experts 0, 1, 2 and so on")
        try:
            shape = how.shape_of([tensor.shape for tensor in inside], keys)
        except ValueError as problem:
            raise self._fail(inside[0], f"has {problem}", f"what {name} is made of") from None
        kind = "F32" if how.values else inside[0].dtype
        return FolderTensor(name, GGML_TYPES[kind], shape, tuple(tensor.name for tensor in inside), how)

    def tensor(self, name: str) -> FolderTensor:
        """What tensor `name` is; ModelFileError with the nearest names when there is none."""
        if name in self.tensors:
            return self.tensors[name]
        import difflib

        near = difflib.get_close_matches(name, self.tensors, 3)
        raise ModelFileError(self.path, "is missing", item=f"tensor {name!r}",
                             remedy=f"The nearest names are {', '.join(near)}." if near else
                             "No tensor has a similar name.")

    def tensor_bytes(self, name: str) -> np.ndarray:
        """The tensor's bytes, read-only uint8: a view of the map where they are used as they are stored."""
        info = self.tensor(name)
        if info.stored and info.how.is_view:
            return self._rows(info.stored[0], info.how)
        if name not in self._kept:
            if not info.stored:
                values = self._made[name]
            elif info.how.values:
                values = info.how.values(self._widened(info.stored[0]))
            else:
                values = np.concatenate([self._rows(stored, info.how) for stored in info.stored])
            self._kept[name] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            self._kept[name].setflags(write=False)
        return self._kept[name]

    def _rows(self, stored: str, how: Transform) -> np.ndarray:
        """The bytes of the rows that are used."""
        raw, shape = self._files.tensor_bytes(stored), self._files.tensors[stored].shape
        if how.rows is None:
            return raw
        first, end = how.rows(shape[how.axis])
        rows = raw.reshape(*shape[:how.axis + 1], -1)
        return rows[:, first:end].reshape(-1) if how.inner else rows[first:end].reshape(-1)

    def _widened(self, stored: str) -> np.ndarray:
        """A stored tensor as F32."""
        raw, dtype = self._files.tensor_bytes(stored), self._files.tensors[stored].dtype
        if dtype == "BF16":
            return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        return raw.view({"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)

    # Metadata.

    def value(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """metadata[key] when it is of Python type `kind`, as GGUFFile.value; an int passes as a float."""
        if key not in self.metadata:
            if default is not _REQUIRED:
                return default
            raise ModelFileError(self.config.path, "gives no value", item=f"metadata key {key!r}",
                                 expected=f"a value of type {kind.__name__}")
        found = self.metadata[key]
        wanted: Any = {float: (float, int), list: (list, np.ndarray)}.get(kind, kind)
        if not isinstance(found, wanted) or isinstance(found, bool) and kind is not bool:
            raise ModelFileError(self.config.path, f"is {found!r}", item=f"metadata key {key!r}",
                                 expected=f"a value of type {kind.__name__}")
        return float(found) if kind is float else found

    @property
    def content_hash(self) -> str:
        """Fast key for caches derived from this folder, as GGUFFile.content_hash: config.json, headers, samples."""
        import xxhash

        digest = xxhash.xxh3_128(b"hf-folder")
        digest.update(repr(sorted(self.config.values.items())).encode("utf-8", "replace"))
        self._files.feed_key(digest)
        return digest.hexdigest()

    def full_hash(self) -> str:
        """xxh3-128 of config.json's values and every byte of the weights, 32 hex digits, as GGUFFile.full_hash."""
        import xxhash

        digest = xxhash.xxh3_128(b"hf-folder")
        digest.update(repr(sorted(self.config.values.items())).encode("utf-8", "replace"))
        self._files.feed_content(digest)
        return digest.hexdigest()

    def close(self) -> None:
        """Release the maps that no view uses."""
        self._files.close()

    def __repr__(self) -> str:
        return f"<HFFolder {self.path!r}: {self.family.architecture}, {len(self.tensors)} tensors>"


def _old_name(found: re.Match[str]) -> str:
    """The present name of a gain or bias of BERT's first release."""
    return "LayerNorm." + {"gamma": "weight", "beta": "bias"}[found.group(1)]
