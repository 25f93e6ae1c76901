"""A folder of PEFT's format (adapter_config.json, adapter_model.safetensors) as a source of low-rank adapters.

It answers with the keys and names of adapters in GGUF files (`adapters.py`): `X.lora_a` and `X.lora_b` for a matrix X
of the model, named as GGUF names it.  GGUF files of `llama` have the rows of Wq and Wk in another order than the models
they were made from; for those, `X.lora_b.pairs9` is `X.lora_b` with its rows put into the order of 9 heads.
"""
from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from m3jit.models.ggml_types import GGML_TYPES, GGMLType
from m3jit.models.hf_families import FAMILIES
from m3jit.models.model_error import ModelFileError
from m3jit.models.safetensors_file import SafetensorsFile, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DTYPES = ("F32", "F16", "BF16")
_REQUIRED = object()
_STORED = re.compile(r"base_model\.model\.(.+)\.lora_(?:(embedding)_)?([AB])(?:\.default)?(?:\.weight)?")
# What would change the model in another way than a pair of matrices does, and the values with which it does not.
NEUTRAL = {"use_dora": (False,), "fan_in_fan_out": (False,), "bias": ("none",), "modules_to_save": ([],),
           "layer_replication": ([],), "megatron_config": ({},), "trainable_token_indices": ([], {}),
           "lora_bias": (False,)}


def is_adapter_folder(path: str | os.PathLike) -> bool:
    return os.path.isfile(os.path.join(path, CONFIG))


@dataclass(frozen=True, slots=True)
class PeftTensor:
    """A tensor under its GGUF name.  turned: columns are stored as rows; heads: rows in another order."""
    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    stored: str
    turned: bool = False
    heads: int = 0


class _Tensors(dict):
    """Tensors by name; `.pairs` names are made when asked for."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or isinstance(name, str) and self._made(name) is not None

    def __missing__(self, name: str) -> PeftTensor:
        found = self._made(name)
        if found is None:
            raise KeyError(name)
        return found

    def _made(self, name: str) -> PeftTensor | None:
        base, dot, heads = name.rpartition(".pairs")
        plain = self.get(base)
        if not dot or plain is None or not heads.isdecimal() or plain.shape[0] % (2 * max(int(heads), 1)):
            return None
        return PeftTensor(name, plain.ggml_type, plain.shape, plain.stored, plain.turned, int(heads))


class PeftFolder:
    """The adapter in a folder.  ModelFileError names what is missing, damaged or not supported."""

    rope_pairing = "NEOX"

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self.config = read_json(Path(path) / CONFIG)
        self._check()
        self._file = SafetensorsFile(Path(path) / WEIGHTS)
        self.tensors: Mapping[str, PeftTensor] = _Tensors((t.name, t) for t in map(self._tensor, self._file.tensors))
        self.metadata: Mapping[str, Any] = MappingProxyType({
            "general.type": "adapter", "adapter.type": "lora", "general.architecture": "",
            "general.name": Path(path).resolve().name, "adapter.lora.alpha": self._alpha()})
        self._kept: dict[str, np.ndarray] = {}

    def _refuse(self, key: str, expected: str) -> ModelFileError:
        found = self.config.get(key)
        problem = "is missing" if found is None else f"is {str(found)[:60]!r}"
        return ModelFileError(os.path.join(self.path, CONFIG), problem, item=f"key {key!r}", expected=expected)

    def _check(self) -> None:
        if self.config.get("peft_type") != "LORA":
            raise self._refuse("peft_type", "'LORA'")
        for key, allowed in NEUTRAL.items():
            if self.config.get(key) not in (None, *allowed):
                raise self._refuse(key, " or ".join(repr(value) for value in allowed))
        for key in ("rank_pattern", "alpha_pattern"):
            if self.config.get(key):
                raise self._refuse(key, "one rank and one alpha for all matrices")
        for key in ("r", "lora_alpha"):
            if not isinstance(self.config.get(key), (int, float)) or not 0 < self.config[key] < 1 << 24:
                raise self._refuse(key, "a number above 0")

    def _alpha(self) -> float:
        """alpha as GGUF has it: what is divided by the rank.  rsLoRA divides by the rank's root instead."""
        alpha = float(self.config["lora_alpha"])
        return alpha * math.sqrt(self.config["r"]) if self.config.get("use_rslora") else alpha

    def _tensor(self, stored: str) -> PeftTensor:
        place = self._file.tensors[stored]

        def fail(problem: str, expected: str) -> ModelFileError:
            return ModelFileError(self._file.path, problem, item=f"tensor {stored!r}", expected=expected)
        found = _STORED.fullmatch(stored)
        name = _gguf_name(found[1]) if found else None
        if name is None:
            raise fail("belongs to no matrix that is known", "pairs lora_A and lora_B of the matrices of a decoder")
        if place.dtype not in DTYPES or len(place.shape) != 2:
            raise fail(f"is {place.dtype} {list(place.shape)}", "a matrix of " + ", ".join(DTYPES))
        turned = bool(found[2]) and found[3] == "A"                   # [rank, vocabulary]; GGUF has a row for a token
        if (place.shape[1] if found[3] == "B" else place.shape[0]) != self.config["r"]:
            raise fail(f"has shape {list(place.shape)}", f"rank {self.config['r']}, as {CONFIG} says")
        return PeftTensor(f"{name}.lora_{found[3].lower()}", GGML_TYPES[place.dtype],
                          place.shape[::-1] if turned else place.shape, stored, turned)

    def tensor(self, name: str) -> PeftTensor:
        if name not in self.tensors:
            raise ModelFileError(self.path, "is missing", item=f"tensor {name!r}")
        return self.tensors[name]

    def tensor_bytes(self, name: str) -> np.ndarray:
        """The tensor's bytes, read-only uint8."""
        info = self.tensor(name)
        raw = self._file.tensor_bytes(info.stored)
        if not info.turned and not info.heads:
            return raw
        if name not in self._kept:
            values = raw.view(np.uint32 if info.ggml_type.name == "F32" else np.uint16)
            if info.turned:
                values = values.reshape(info.shape[::-1]).T
            if info.heads:
                rows, rank = info.shape
                values = values.reshape(info.heads, 2, rows // info.heads // 2, rank).swapaxes(1, 2)
            self._kept[name] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            self._kept[name].setflags(write=False)
        return self._kept[name]

    def value(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """metadata[key], as GGUFFile.value."""
        if key in self.metadata:
            return kind(self.metadata[key])
        if default is _REQUIRED:
            raise ModelFileError(self.path, "gives no value", item=f"metadata key {key!r}",
                                 expected=f"a value of type {kind.__name__}")
        return default

    @property
    def content_hash(self) -> str:
        """Fast key for caches derived from this folder."""
        import xxhash
        digest = xxhash.xxh3_128(b"peft-folder")
        self._file.feed_key(digest)
        return digest.hexdigest()

    def full_hash(self) -> str:
        """xxh3-128 of the metadata and every byte of the weights, 32 hex digits."""
        import xxhash
        digest = xxhash.xxh3_128(b"peft-folder")
        digest.update(repr(sorted(self.metadata.items())).encode("utf-8", "replace"))
        self._file.feed_content(digest)
        return digest.hexdigest()

    def close(self) -> None:
        self._file.close()


def _gguf_name(module: str) -> str | None:
    """GGUF's name of the matrix of a module ("model.layers.3.self_attn.q_proj"), the same in every family."""
    short = re.sub(r"^(?:language_model\.)?model\.(?:language_model\.)?", "", module)
    number = re.search(r"(?<=\.)\d+(?=\.)", short)
    key = (short[:number.start()] + "{}" + short[number.end():] if number else short) + ".weight"
    for family in FAMILIES.values():
        name = family.tensors.get(key)
        if isinstance(name, str):
            return name.replace("{}", number.group()) if number else name
    return None
