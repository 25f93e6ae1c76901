"""A Hugging Face folder (config.json, safetensors, tokenizer.json) as a source of architectures.

It answers with the keys and tensor names that GGUF uses (`hf_families.py`). Three things differ from GGUF files:
- rows of the query and key matrices are in the original order, so rotary pairs are (i, i + d/2): `rope_pairing`;
- gains stored as w but meaning 1 + w (gemma) are read as the sum, rounded once to F32, which is what GGUF files hold;
- factors of the rotation that follow from config.json appear as tensors, as converters write them.
F32, F16 and BF16 weights are used as they are stored.
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
from m3jit.models.model_error import ModelFileError
from m3jit.models.safetensors_file import SafetensorsSet, StoredTensor

READ_DTYPES = ("F32", "F16", "BF16")
MAX_LAYERS = 4096
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """A tensor under its GGUF name; `stored` is its name in the files, None when it follows from config.json."""

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    stored: str | None
    one_plus: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.ggml_type.nbytes


class HFFolder:
    """The model in a folder.  ModelFileError names what is missing, damaged or not supported."""

    rope_pairing = "NEOX"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        folder = Path(path)
        self.config = Config.read(folder)
        self.family = self._family()
        self.config.defaults = dict(self.family.defaults)
        self.config.need("quantization_config")
        keys = {name: value for name, (theirs, kind, required) in self.family.keys.items()
                if (value := self.config.get(theirs, kind, *(() if required else (None,)))) is not None}
        if not 0 < keys["block_count"] <= MAX_LAYERS:
            raise self.config.refuse("num_hidden_layers", f"is {keys['block_count']}", f"1 to {MAX_LAYERS}")
        self._made = self.family.more(self.config, keys)
        pooling, normalise = pooling_keys(folder)
        keys |= pooling
        prefix = self.family.architecture
        self.metadata: Mapping[str, Any] = MappingProxyType(
            {"general.architecture": prefix, "general.name": folder.resolve().name,
             **{f"{prefix}.{key}": value for key, value in keys.items()}, **normalise})
        self._files = SafetensorsSet(folder)
        self.tensors: Mapping[str, FolderTensor] = MappingProxyType(self._tensors(keys["block_count"]))
        self.untied = self.config.get("tie_word_embeddings", bool, True) is False
        self._kept: dict[str, np.ndarray] = {}

    def _family(self) -> Family:
        kind = self.config.get("model_type", str)
        if kind not in FAMILIES:
            raise self.config.refuse("model_type", f"is {kind!r}, which is not supported",
                                     "one of " + ", ".join(sorted(FAMILIES)))
        return FAMILIES[kind]

    # Tensors.

    def _tensors(self, layers: int) -> dict[str, FolderTensor]:
        found: dict[str, FolderTensor] = {}
        tied = self.config.get("tie_word_embeddings", bool, False)
        for stored in self._files.tensors.values():
            name = self._name(stored.name, layers)
            if name is None or name == "output.weight" and tied:
                continue
            if name in found:
                raise self._fail(stored, f"is {name} like tensor {found[name].stored!r}", "one tensor for each part")
            found[name] = self._tensor(name, stored)
        for name, values in self._made.items():
            found[name] = FolderTensor(name, GGML_TYPES["F32"], values.shape, None)
        return found

    def _fail(self, stored: StoredTensor, problem: str, expected: str) -> ModelFileError:
        return ModelFileError(self._files.home[stored.name].path, problem, item=f"tensor {stored.name!r}",
                              expected=expected)

    def _name(self, stored: str, layers: int) -> str | None:
        """The GGUF name of a tensor; None when programs do not need it.  ModelFileError when it belongs to no part."""
        family = self.family
        for prefix in family.prefixes:
            if not stored.startswith(prefix):
                continue
            short = stored.removeprefix(prefix)
            if short.startswith(family.ignored) and family.ignored or short.endswith("rotary_emb.inv_freq"):
                return None
            short = re.sub(r"LayerNorm\.(gamma|beta)$", _old_name, short)
            number = re.search(r"(?<=\.)\d+(?=\.)", short)
            name = family.tensors.get(short[:number.start()] + "{}" + short[number.end():] if number else short)
            if name is not None and (number is None or int(number.group()) < layers):
                return name.replace("{}", number.group()) if number else name
        raise self._fail(self._files.tensors[stored], f"is no part of {family.architecture} with {layers} layers",
                         "the tensors of " + ("that architecture" if self.family.tensors else "an architecture"))

    def _tensor(self, name: str, stored: StoredTensor) -> FolderTensor:
        if stored.dtype not in READ_DTYPES:
            raise self._fail(stored, f"has dtype {stored.dtype}", "one of " + ", ".join(READ_DTYPES))
        one_plus = self.family.one_plus and len(stored.shape) == 1
        return FolderTensor(name, GGML_TYPES["F32" if one_plus else stored.dtype], stored.shape, stored.name, one_plus)

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
        if info.stored is not None and not info.one_plus:
            return self._files.tensor_bytes(info.stored)
        if name not in self._kept:
            values = self._made[name] if info.stored is None else np.float32(1) + self._widened(info.stored)
            self._kept[name] = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
            self._kept[name].setflags(write=False)
        return self._kept[name]

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
        if not isinstance(found, (float, int) if kind is float else kind) or isinstance(found, bool) and kind is not bool:
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

    def close(self) -> None:
        """Release the maps that no view uses."""
        self._files.close()

    def __repr__(self) -> str:
        return f"<HFFolder {self.path!r}: {self.family.architecture}, {len(self.tensors)} tensors>"


def _old_name(found: re.Match[str]) -> str:
    """The present name of a gain or bias of BERT's first release."""
    return "LayerNorm." + {"gamma": "weight", "beta": "bias"}[found.group(1)]
