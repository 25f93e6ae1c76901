"""Checked mode: every entry into compiled code is repeated on the interpreter, and the outcomes compared by bytes."""
from __future__ import annotations

from typing import Any

from m3jit.errors import InternalError
from m3jit.isa.fields import BANK_LETTERS
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.types import Tensor


def check_regions(vm: Any) -> "Checker":
    """From now on compare every region of a machine with the interpreter, and verify the IR after each pass."""
    return Checker(vm)


class Checker:
    """`entries` counts the comparisons made, `instructions` what was interpreted for them."""

    def __init__(self, vm: Any):
        self.vm, self.entries, self.instructions = vm, 0, 0
        vm.regions.compiler.checked = True
        self._enter, vm.regions.enter = vm.regions.enter, self.enter

    def enter(self, ctx: Any, pc: int) -> int | None:
        """As `Regions.enter`; InternalError names the region and the first register that differs."""
        before, retired, index, leave = ctx.capture(), ctx.retired, ctx.index, ctx.leave
        new = self._enter(ctx, pc)
        count = ctx.retired - retired
        if new is None or count <= 0:                  # -1: an IF_INTERRUPT in front looks again
            return new
        compiled, after, budget = outcome(ctx), ctx.capture(), ctx.budget
        ctx.restore(before)
        ctx.retired, ctx.index = retired, index
        interpreter = self.vm.interpreter
        left = count
        while left and ctx.trap is None:
            done = ctx.retired
            interpreter.run_exactly(ctx, left)
            left -= ctx.retired - done
            if left and self.vm.stop_word.raised:      # being stopped: no time to compare
                ctx.restore(after)
                ctx.retired, ctx.index, ctx.leave, ctx.budget = retired + count, index, leave, budget
                return new
        where = f"region at 0x{pc:04x}, {count} instructions"
        if ctx.trap is not None:
            raise InternalError(f"{where}: compiled code completed what the interpreter refuses: {ctx.trap}")
        image = self.vm.image
        at = image.pcs[ctx.index] if ctx.index < len(image.pcs) else len(image.text)
        if at != new:
            raise InternalError(f"{where}: compiled code goes on at 0x{new:04x}, the interpreter at 0x{at:04x}")
        differ(where, compiled, outcome(ctx))
        self.entries += 1
        self.instructions += count
        ctx.index, ctx.leave, ctx.budget = index, leave, budget
        return new


def outcome(ctx: Any) -> dict[str, Any]:
    """Everything a region may change, by name, as bytes or plain values."""
    found: dict[str, Any] = {"flags": ctx.flags, "rng": ctx.rng}
    for bank, letter in enumerate(BANK_LETTERS[:2]):
        for i, value in enumerate(ctx.bank(bank)):
            if value is not None:
                found[f"{letter}{i}"] = comparable(value)
    for i, handle in enumerate(ctx.S):
        if handle is not None:
            found[f"S{i}"] = comparable(ctx.states.get(handle.id))
    return found


def comparable(value: Any) -> Any:
    """A value in a form that compares by bytes."""
    if isinstance(value, Tensor):
        return (value.dtype.name, value.shape, value.tobytes())
    if isinstance(value, float):
        return ("float", value.hex() if value == value else "nan")
    if isinstance(value, KVStream):
        layers = [(layer, *(a.tobytes() for a in value.rows(layer)))     # hybrids attend in some of their layers
                  for layer in sorted(value.layers) if value.length(layer)]
        return ("kv", str(value.geometry), value.dtype.name, layers)
    if isinstance(value, CellState):
        return ("cells", [(key, value.array(*key).tobytes()) for key in sorted(value.cells)])
    return (type(value).__name__, value if isinstance(value, int) else None)


def differ(where: str, compiled: dict[str, Any], interpreted: dict[str, Any]) -> None:
    """InternalError when two outcomes are not the same."""
    for name in sorted(compiled.keys() | interpreted.keys()):
        a, b = compiled.get(name), interpreted.get(name)
        if a != b:
            raise InternalError(f"{where}: {name} is {_said(a)} in compiled code and {_said(b)} on the interpreter")


def _said(value: Any) -> str:
    if value is None:
        return "not written"
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."
