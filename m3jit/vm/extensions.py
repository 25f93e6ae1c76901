"""The registry behind ESCAPE: extension number and major version -> a Python function.

The payload of an extension instruction begins with its registers: one byte with the number of destinations, one with
the number of sources, then their register bytes; the rest is the extension's own.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from m3jit.errors import OperandError, UserError
from m3jit.isa.extension_rows import MAX_OPERANDS, pack
from m3jit.isa.fields import GPR, Reg

__all__ = ["REGISTRY", "Extension", "Registry", "pack", "unpack"]


@dataclass(frozen=True)
class Extension:
    """function(values, immediate: bytes, state) -> the destinations' values (one, a tuple, or None for none).

    With `state` True the function returns (values, new state); the state is a root value, so it rolls back.
    pack, unpack: what makes a tree of plain values (None, numbers, text, bytes, lists) of a state that is none itself,
    and the state of such a tree, for checkpoints on disk."""
    name: str
    number: int
    version: tuple[int, int]
    function: Callable[..., Any]
    state: bool = False
    pack: Callable[[Any], Any] | None = None
    unpack: Callable[[Any], Any] | None = None


class Registry:
    """Extensions by number and major version."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Extension] = {}

    def add(self, extension: Extension) -> Extension:
        key = (extension.number, extension.version[0])
        if key in self._known and self._known[key].function is not extension.function:
            raise UserError(f"extension {extension.number} version {extension.version[0]} is already "
                            f"{self._known[key].name}")
        self._known[key] = extension
        return extension

    def find(self, number: int, version: tuple[int, int]) -> Extension | None:
        """The extension that can run an instruction of that version: same major, at least that minor."""
        found = self._known.get((number, version[0]))
        return found if found is not None and found.version[1] >= version[1] else None

    def remove(self, extension: Extension) -> None:
        self._known.pop((extension.number, extension.version[0]), None)

    def __iter__(self):
        return iter(self._known.values())


REGISTRY = Registry()


def unpack(payload: bytes) -> tuple[tuple[Reg, ...], tuple[Reg, ...], bytes]:
    """(destinations, sources, immediate) of a payload; OperandError when it is not well-formed."""
    if len(payload) < 2:
        raise OperandError("the payload is too short for its operand counts")
    d, s = payload[0], payload[1]
    if d > MAX_OPERANDS or s > MAX_OPERANDS or len(payload) < 2 + d + s:
        raise OperandError(f"the payload names {d} destinations and {s} sources; at most {MAX_OPERANDS} each, and "
                           f"{len(payload) - 2} bytes are there")
    regs = tuple(Reg(GPR, n) for n in payload[2:2 + d + s])
    return regs[:d], regs[d:], payload[2 + d + s:]
