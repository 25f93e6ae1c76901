"""What a register can hold besides numbers and tensors, and how kinds are checked and named.

The kind of a register is the Python class of its value: None null, int integer, float float, Tensor tensor (a V
register: one F32 tensor of 8 elements), Handle state handle, SnapshotHandle snapshot, ContextRef context.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir.eager_scalar import INT_MAX, INT_MIN, NAN
from m3jit.isa.types import F32, Tensor
from m3jit.vm.snapshots import SnapshotHandle

VECTOR_LANES = 8


class Handle:
    """Names a state (a KV stream, a model, a codec ...).  The state itself is a value in the context's root."""
    __slots__ = ("id", "what")

    def __init__(self, id: int, what: str):
        self.id, self.what = id, what

    def __eq__(self, other: Any) -> bool:
        return other.__class__ is Handle and other.id == self.id

    def __hash__(self) -> int:
        return hash(("handle", self.id))

    def __repr__(self) -> str:
        return f"<{self.what} #{self.id}>"


class ContextRef:
    """Names a context of this machine."""
    __slots__ = ("id",)

    def __init__(self, id: int):
        self.id = id

    def __eq__(self, other: Any) -> bool:
        return other.__class__ is ContextRef and other.id == self.id

    def __hash__(self) -> int:
        return hash(("context", self.id))

    def __repr__(self) -> str:
        return f"<context {self.id}>"


CLASSES: dict[str, frozenset[type]] = {
    "int": frozenset({int}), "float": frozenset({float}), "tensor": frozenset({Tensor}),
    "vector": frozenset({Tensor}), "state": frozenset({Handle}), "snapshot": frozenset({SnapshotHandle}),
    "context": frozenset({ContextRef}), "event": frozenset(), "null": frozenset({type(None)}),
    "any": frozenset({int, float, Tensor, Handle, SnapshotHandle, ContextRef}),
}
WRITABLE = CLASSES["any"]
_SAID = {int: "an integer", float: "a float", Tensor: "a tensor", Handle: "a state handle",
         SnapshotHandle: "a snapshot", ContextRef: "a context", type(None): "nothing: it was never written"}
_WORDS = {"int": "an integer", "float": "a float", "tensor": "a tensor", "vector": "a vector",
          "state": "a state handle", "snapshot": "a snapshot", "context": "a context", "event": "an event",
          "any": "a value"}


def classes_of(kinds: tuple[str, ...]) -> frozenset[type]:
    """The Python classes a register of these kinds may have."""
    return frozenset().union(*(CLASSES[k] for k in kinds))


def said(value: Any) -> str:
    """What a register holds, in words."""
    if value.__class__ is Tensor:
        return f"a tensor ({value.dtype.name} {list(value.shape)})"
    if value.__class__ is Handle:
        return f"a {value.what} handle"
    return _SAID.get(value.__class__, f"a {value.__class__.__name__}")


def expected(kinds: tuple[str, ...]) -> str:
    """The kinds an operand takes, in words."""
    words = [_WORDS[k] for k in kinds if k != "null"]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def normalise(value: Any) -> Any:
    """A register value from what an opcode body or a host program gives: NumPy scalars become numbers, arrays
    tensors, bools 0 and 1.  OperandError for what no register can hold."""
    if value.__class__ in WRITABLE or value is None:
        if value.__class__ is int and not INT_MIN <= value <= INT_MAX:
            raise OperandError(f"{value} does not fit a signed 64-bit integer")
        return value if value.__class__ is not float or value == value else NAN
    if isinstance(value, (bool, np.bool_, np.integer)):
        return normalise(int(value))
    if isinstance(value, (float, np.floating)):
        v = float(value)
        return v if v == v else NAN
    if isinstance(value, np.ndarray):
        return Tensor.of(value)
    if isinstance(value, int):
        return normalise(int(value))
    raise OperandError(f"a register cannot hold a {type(value).__name__}; it holds integers, floats, tensors and "
                       f"handles")


def vector(value: Any) -> Tensor:
    """The value as a V register holds it.  OperandError unless it is a F32 tensor of 8 elements."""
    if value.__class__ is Tensor and value.dtype is F32 and value.shape == (VECTOR_LANES,):
        return value
    raise OperandError(f"a V register holds a F32 tensor of shape [{VECTOR_LANES}], got {said(value)}")
