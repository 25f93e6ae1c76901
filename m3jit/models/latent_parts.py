"""Older files of latent attention in the form of newer ones: `attn_kv_b` as `attn_k_b` and `attn_v_b`.

`attn_kv_b` [heads * (nope + value), rank] has for each head the rows of Wk, then those of Wv.  `LatentParts` answers
for a source of such a file as if it also had
    attn_v_b [heads, value, rank]   the rows of Wv as they are stored
    attn_k_b [heads, rank, nope]    Wk of each head turned round; of block types the exact values, in F32
made on first use and kept: programs read them like any weight.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from m3jit.ir import eager_blocks
from m3jit.isa.types import DTYPES
from m3jit.models.ggml_types import GGML_TYPES, GGMLType
from m3jit.models.model_source import LAYER_PREFIX, Keys, Source

BOTH, KEYS, VALUES = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor made of rows first .. last - 1 of each head of `whole`."""
    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    whole: str
    first: int
    last: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        dtype = DTYPES[self.ggml_type.name]
        return prod(self.shape[:-1]) * dtype.row_bytes(self.shape[-1])


def with_latent_parts(source: Source) -> Source:
    """The source itself, unless it is of deepseek2 in the older layout; layers whose sizes fit get the parts."""
    old = LAYER_PREFIX.format(0) + BOTH in source.tensors
    if not old or source.metadata.get("general.architecture") != "deepseek2":
        return source
    need = Keys(source, "deepseek2").need
    heads, rotary = need("attention.head_count", int), need("rope.dimension_count", int)
    nope = need("attention.key_length", int) - rotary
    value = need("attention.value_length", int)
    parts: dict[str, Part] = {}
    for i in range(need("block_count", int)):
        b = LAYER_PREFIX.format(i)
        info = source.tensors.get(b + BOTH)
        if info is None or len(info.shape) != 2 or min(heads, nope, value) <= 0 or \
                info.shape[0] != heads * (nope + value) or info.ggml_type.name not in DTYPES:
            continue                                   # the architecture says what is wrong with it
        rank, kind = info.shape[1], info.ggml_type
        turned = GGML_TYPES["F32"] if DTYPES[kind.name].is_block else kind
        parts[b + KEYS] = Part(b + KEYS, turned, (heads, rank, nope), b + BOTH, 0, nope)
        parts[b + VALUES] = Part(b + VALUES, kind, (heads, value, rank), b + BOTH, nope, nope + value)
    return LatentParts(source, parts)


class LatentParts:
    """A source with more tensors; everything else is the other's."""

    def __init__(self, source: Source, parts: dict[str, Part]):
        self._source, self._parts, self._kept = source, parts, {}
        self.tensors: Mapping[str, Any] = {**source.tensors, **parts}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def tensor(self, name: str) -> Any:
        return self._parts[name] if name in self._parts else self._source.tensor(name)

    def tensor_bytes(self, name: str) -> np.ndarray:
        """The tensor's bytes, read-only uint8."""
        part = self._parts.get(name)
        if part is None:
            return self._source.tensor_bytes(name)
        if name not in self._kept:
            made = np.ascontiguousarray(self._made(part)).reshape(-1).view(np.uint8)
            made.setflags(write=False)
            self._kept[name] = made
        return self._kept[name]

    def _made(self, part: Part) -> np.ndarray:
        whole = self._source.tensor(part.whole)
        dtype, heads = DTYPES[whole.ggml_type.name], part.shape[0]
        rows = self._source.tensor_bytes(part.whole).reshape(heads, -1, dtype.row_bytes(whole.shape[1]))
        rows = rows[:, part.first:part.last]
        if part.name.endswith(VALUES):
            return rows
        numbers = eager_blocks.decode(dtype, np.ascontiguousarray(rows)) if dtype.is_block else \
            np.ascontiguousarray(rows).view(dtype.numpy)
        return numbers.transpose(0, 2, 1)
