"""Extensions, capabilities and profiling windows as the machine's instructions see them."""
from __future__ import annotations

import time
from typing import Any

from m3jit.errors import M3Error, OperandError, no_memory
from m3jit.isa.capabilities import SUPPORTED, Capability
from m3jit.isa.fields import ABSENT
from m3jit.isa.table import OPS
from m3jit.isa.types import BF16, U8, Tensor
from m3jit.vm.commit import Store, item
from m3jit.vm.context import Context
from m3jit.vm.extensions import Extension, unpack
from m3jit.vm.values import Handle, said


class SystemView:
    """The part of `Machine` that answers for the machine itself."""
    vm: Any
    ctx: Context
    instruction: Any
    stores: list[Store]
    _extension_handles: dict[tuple[int, int], Handle]
    _windows: dict[tuple[int, str], tuple[int, int]]

    # -- text operands ----------------------------------------------------------------------------------------------
    def text_of(self, word: int, register: Tensor | None, what: str) -> str:
        """Text given as a string operand or as the UTF-8 bytes of a U8 tensor."""
        found = self.text(word)                        # type: ignore[attr-defined]
        if found is not None:
            return found
        if register is None:
            raise OperandError(f"{what} needs a string, or a register with text")
        if register.dtype is not U8 or register.rank != 1:
            raise OperandError(f"text is a U8 tensor [n], got {said(register)}")
        try:
            return register.tobytes().decode("utf-8")
        except UnicodeDecodeError as e:
            raise OperandError(f"the text is not UTF-8: {e.reason} at byte {e.start}") from None

    # -- extensions -------------------------------------------------------------------------------------------------
    def run_extension(self, number: int, flags: int, version: tuple[int, int]) -> None:
        """ESCAPE: run an extension, or skip it when it is optional and unknown."""
        extension = self.vm.extensions.find(number, version)
        if extension is None:
            if flags & 1:
                return
            raise OperandError(f"extension {number} version {version[0]}.{version[1]} is not known to this machine; "
                               f"register it with @m3jit.extension, or mark the instruction optional")
        dests, sources, immediate = unpack(self.instruction.tail)
        values = [None if r.index == ABSENT else _outward(self.ctx.R[r.index], f"{r}") for r in sources]
        results = self._call(extension, values, immediate)
        if len(results) != len(dests):
            raise OperandError(f"extension {extension.name} gave {len(results)} results for {len(dests)} destinations")
        for reg, value in zip(dests, results):
            self.write(None if reg.index == ABSENT else reg, value)      # type: ignore[attr-defined]

    def _call(self, extension: Extension, values: list[Any], immediate: bytes) -> tuple:
        state_handle = None
        if extension.state:
            key = (extension.number, extension.version[0])
            state_handle = self._extension_handles.get(key)
            if state_handle is None:
                state_handle, _ = self.handle_for(self.ctx, ExtensionState(None))     # type: ignore[attr-defined]
                self._extension_handles[key] = state_handle
            held = self.ctx.states.get(state_handle.id)
            values = [held.value if held is not None else None, *values]
        try:
            result = extension.function(*values, immediate=immediate)
            if extension.state:
                result, new = result
                self.stores.append(item(*self.ctx.states.place(state_handle.id), ExtensionState(new)))
        except M3Error:
            raise
        except Exception as e:
            if no_memory(e):
                raise
            raise OperandError(f"extension {extension.name} failed: {type(e).__name__}: {e}") from e
        return result if isinstance(result, tuple) else () if result is None else (result,)

    def set_extension_state(self, ctx: Any, key: tuple[int, int], value: Any) -> None:
        """Give an extension (number, major version) that has a state this one, as if its last call had left it."""
        handle = self._extension_handles.get(key)
        if handle is None:
            handle, _ = self.handle_for(ctx, ExtensionState(value))     # type: ignore[attr-defined]
            self._extension_handles[key] = handle
        ctx.states.set(handle.id, ExtensionState(value))

    # -- capabilities -----------------------------------------------------------------------------------------------
    def capability(self, kind: str, number: int) -> int:
        """CAPABILITY_QUERY."""
        if kind == "FEATURES":
            return int(SUPPORTED)
        if kind == "FEATURE":
            return int(0 <= number < 64 and bool(int(SUPPORTED) >> number & 1))
        if kind == "OPCODE":
            return int(any(row.code == number and row.executable for row in OPS))
        return int(any(e.number == number for e in self.vm.extensions))

    def capability_assert(self, kind: str, number: int) -> None:
        """CAPABILITY_ASSERT."""
        if kind == "FEATURES":
            missing = number & (2 ** 64 - 1) & ~int(SUPPORTED)
            if missing:
                known = {int(c): c.name for c in Capability}
                raise OperandError("this machine lacks " + ", ".join(
                    known.get(1 << b) or f"feature bit {b}" for b in range(64) if missing >> b & 1))
        elif not self.capability(kind, number):
            name = next((row.name for row in OPS if row.code == number), "") if kind == "OPCODE" else ""
            raise OperandError(f"this machine lacks {kind.lower()} {number}" + (f" ({name})" if name else ""))

    # -- profiling --------------------------------------------------------------------------------------------------
    def profile_start(self, tag: str) -> None:
        self._windows[self.ctx.id, tag] = (self.ctx.retired + 1, time.perf_counter_ns())

    def profile_stop(self, tag: str) -> int:
        """Close a window: the instructions completed since PROFILE_START."""
        opened = self._windows.pop((self.ctx.id, tag), None)
        if opened is None:
            raise OperandError(f"profiling window {tag!r} is not open in this context")
        count = self.ctx.retired - opened[0]
        self.vm.windows.append((tag, self.ctx.id, count, time.perf_counter_ns() - opened[1]))
        return count


class ExtensionState:
    """An extension's state as a state of the context."""
    __slots__ = ("value",)
    kind_name = "extension state"

    def __init__(self, value: Any):
        self.value = value


def _outward(value: Any, register: str) -> Any:
    """A register value as an extension gets it: numbers, read-only NumPy arrays, else as it is."""
    if value is None:
        raise OperandError(f"{register} holds nothing: it was never written", register)
    if value.__class__ is Tensor and not value.dtype.is_block and value.dtype is not BF16:
        view = value.data.view()
        view.flags.writeable = False
        return view
    return value
