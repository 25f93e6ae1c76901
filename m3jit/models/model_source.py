"""What an architecture reads: a source of metadata and weights, checked before anything runs.

A source is a GGUF file, or anything else with the same members: a folder of another format answers with the names and
keys that GGUF uses for the architecture.
"""
from __future__ import annotations

import math
import weakref
from typing import Any, Iterable, Mapping, Protocol

import numpy as np

from m3jit.isa.types import WEIGHTS
from m3jit.models.model_error import ModelFileError

BLOCK_TYPES = frozenset(d.name for d in WEIGHTS if d.is_block)
FLOAT_TYPES = frozenset({d.name for d in WEIGHTS if not d.is_block} | {"F64"})      # F64 is rounded to F32 when read
ONE_OF_THE_TYPES = f"one of {', '.join(sorted(BLOCK_TYPES | FLOAT_TYPES))}"        # what messages say is supported
LAYER_PREFIX = "blk.{}."
DERIVED = ("rope_freqs.weight", "attn_rot_embd.weight", ".rotary_emb.inv_freq")        # what the metadata says as well
# The least and the largest value of keys where a damaged one would cost endless time, or give an error in the middle.
_RANGES = {"block_count": (0, 4096), "attention.layer_norm_rms_epsilon": (0, 1e3), "rope.freq_base": (1e-3, 1e30),
           "attention.layer_norm_epsilon": (0, 1e3), "rope.freq_base_swa": (1e-3, 1e30)}
Shapes = dict[str, tuple[int, ...]]
_contents: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()       # what `content_of` has read


class Source(Protocol):
    """Metadata and weights of one model (`GGUFFile` is one).

    A source may also have `untied`, true where it says that logits have a matrix of their own, and `rope_pairing`
    ("NORM" or "NEOX"): how its query and key rows are ordered for the rotation, where that is not what the
    architecture's GGUF files do."""
    path: Any
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]             # name -> .shape (NumPy order), .ggml_type.name

    @property
    def content_hash(self) -> str: ...
    def value(self, key: str, kind: type, default: Any = ...) -> Any: ...
    def tensor(self, name: str) -> Any: ...
    def tensor_bytes(self, name: str) -> np.ndarray: ...


def content_of(source: Source) -> str:
    """What tells a source from others whatever its name and time: all its bytes are read once in a process.

    A source without a `full_hash` has nothing better than its `content_hash`."""
    found = _contents.get(source)
    if found is None:
        whole = getattr(source, "full_hash", None)
        found = _contents[source] = whole() if whole is not None else source.content_hash
    return found


class Keys:
    """The metadata of an architecture: `need("block_count", int)` reads "<architecture>.block_count".

    ModelFileError names the key, what was found and what was expected."""

    def __init__(self, source: Source, architecture: str):
        self.source, self.architecture = source, architecture

    def need(self, key: str, kind: type, **default: Any) -> Any:
        """The value of a key of the architecture; without `default` it must be there.  Numbers are finite."""
        found = self.source.value(f"{self.architecture}.{key}", kind, **default)
        if kind is float and self.has(key) and not math.isfinite(found):
            raise self.refuse(key, f"is {found}", "a finite number")
        least, most = _RANGES.get(key, (-math.inf, math.inf))
        if kind in (int, float) and self.has(key) and not least <= found <= most:
            raise self.refuse(key, f"is {found}", f"a number from {least:g} to {most:g}")
        return found

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.source.metadata

    def per_layer(self, key: str, layers: int, **default: Any) -> list[int]:
        """An integer for each layer: the key holds one for all of them, or an array of as many as there are layers."""
        full = f"{self.architecture}.{key}"
        if full in self.source.metadata and not isinstance(self.source.metadata[full], (int, float)):
            values = [int(v) for v in self.source.value(full, list)]
            if len(values) != layers:
                raise self.refuse(key, f"has {len(values)} values", f"{layers}, one for each layer")
            return values
        return [self.need(key, int, **default)] * layers

    def refuse(self, key: str, problem: str, expected: str) -> ModelFileError:
        """The error for a value that is not supported."""
        return ModelFileError(self.source.path, problem, item=f"metadata key '{self.architecture}.{key}'",
                              expected=expected)


def check_tensors(source: Source, expected: Shapes) -> None:
    """Every tensor the program names exists with the shape it needs and a type the kernels run.

    A weight [.., N, K] may have a bias [.., N], and a gain [N] a bias [N], that `expected` does not name."""
    biases = {name.removesuffix(".weight") + ".bias": shape[:-1] or shape for name, shape in expected.items()
              if name.endswith(".weight")}
    expected = expected | {name: shape for name, shape in biases.items() if name in source.tensors}
    for name, shape in expected.items():
        info = source.tensor(name)
        if tuple(info.shape) != shape:
            raise ModelFileError(source.path, f"has shape {list(info.shape)}", item=f"tensor {name!r}",
                                 expected=f"shape {list(shape)}")
        if info.ggml_type.name not in BLOCK_TYPES | FLOAT_TYPES:
            raise ModelFileError(source.path, f"has type {info.ggml_type.name}", item=f"tensor {name!r}",
                                 expected=ONE_OF_THE_TYPES, remedy="Quantise the model to one of them.")
        if len(shape) == 1 and info.ggml_type.name not in FLOAT_TYPES:
            raise ModelFileError(source.path, f"has type {info.ggml_type.name}", item=f"tensor {name!r}",
                                 expected="a float type")


def check_nothing_is_left(source: Source, used: Iterable[str], architecture: str) -> None:
    """Every tensor of the source is used: what a file has beyond an architecture would change what it computes."""
    left = sorted(set(source.tensors).difference(used))
    for name in left:
        if not name.endswith(DERIVED):
            raise ModelFileError(source.path, f"is not part of architecture {architecture!r} as m3jit computes it",
                                 item=f"tensor {name!r}", expected="none beside those it computes with",
                                 remedy="The model is of a variant that is not supported; its results would be wrong.")
