"""A lowered region: its launch plan, and what the machine needs to enter and leave it."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from m3jit.ir.plan import Plan
from m3jit.ir.tensor import Dim, Function, TensorType
from m3jit.isa.kv import KVGeometry
from m3jit.isa.types import Tensor

Weight = Tensor | tuple[Tensor, ...]      # several: their tiles alternate in the layout


@dataclass(eq=False, slots=True)
class Slot:
    """Space in the region's arena for one temporary at a time."""
    word: int
    nbytes: Dim


@dataclass(slots=True)
class KvUse:
    """Rows a region appends to one layer of a KV stream."""
    key: Any
    layer: int
    table_word: int
    geometry: KVGeometry
    dtype: str
    rows: Dim


@dataclass(slots=True)
class Store:
    """What a register holds after an exit.  how: i64 | f64 (frame word), tensor (output word), input (unchanged
    value of another register), weight, cell (output word)."""
    key: Any
    how: str
    word: int = -1
    type: TensorType | None = None
    source: Any = None


@dataclass(slots=True)
class ExitInfo:
    pc: int
    reason: str
    stores: list[Store]


@dataclass(eq=False)
class Region:
    """A lowered region and what the runtime needs to enter and leave it."""
    function: Function
    plan: Plan
    pointers: list[tuple[Any, int]]                         # live-in tensors: key -> word
    scalars: list[tuple[Any, int, str]]                     # key, word, "i64" | "f64"
    dims: list[tuple[int, Dim]]
    weights: list[tuple[int, Weight, str]]                  # word, weight, layout ("raw", "R16", …)
    outputs: list[tuple[int, TensorType]]
    slots: list[Slot]
    kv: list[KvUse]
    cells_in: list[tuple[Any, int]]                         # cells of recurrent states: key, word
    cells_out: list[tuple[Any, int]]
    exits: list[ExitInfo]
    has_launches: bool
