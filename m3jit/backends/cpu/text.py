"""Writing LLVM IR text: one function's lines, fresh names, basic blocks and insertion slots.

Text is written rather than llvmlite.ir objects because it is several times cheaper to build and reads like the result.
"""
from __future__ import annotations

import struct

LLVM_TYPE = {"b1": "i1", "i32": "i32", "i64": "i64", "f32": "float", "f64": "double", "ptr": "ptr"}
BITS = {"b1": 1, "i32": 32, "i64": 64, "f32": 32, "f64": 64}


def literal(type: str, value: int | float | bool) -> str:
    """LLVM spelling of a constant.  Floats are written as the hexadecimal image of a double, NaN as the quiet NaN."""
    if type in ("f32", "f64"):
        if value != value:
            return "0x7FF8000000000000"
        if type == "f32":
            value = struct.unpack("<f", struct.pack("<f", value))[0]
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    if type == "b1":
        return "true" if value else "false"
    bits = BITS[type]
    value &= (1 << bits) - 1
    return str(value - (1 << bits) if value >> (bits - 1) else value)


class Writer:
    """Lines of one function.  A slot is a place kept open so that a line can be added to it later."""

    def __init__(self) -> None:
        self._root: list = []
        self._here: list = self._root
        self._count = 0
        self.block = "entry"
        self.declared: set[str] = set()

    def name(self, stem: str = "v") -> str:
        self._count += 1
        return f"%{stem}{self._count}"

    def line(self, text: str) -> None:
        self._here.append("  " + text)

    def op(self, text: str) -> str:
        """Emits `%fresh = text` and returns the name."""
        self._count += 1
        name = f"%v{self._count}"
        self._here.append(f"  {name} = {text}")
        return name

    def call(self, result: str, function: str, operands: str, argument_types: str, attributes: str = "") -> str:
        """Calls an external function or intrinsic, declaring it once.  Returns the result's name ("" for void)."""
        self.declared.add(f"declare {result} @{function}({argument_types}){attributes}")
        text = f"call {result} @{function}({operands})"
        if result == "void":
            self.line(text)
            return ""
        return self.op(text)

    def new_block(self, stem: str = "b") -> str:
        """A fresh label, not yet placed."""
        self._count += 1
        return f"{stem}{self._count}"

    def place(self, label: str) -> None:
        """Starts the basic block `label`: the caller ended the previous one."""
        self._here.append(f"{label}:")
        self.block = label

    def jump(self, label: str) -> None:
        self.line(f"br label %{label}")

    def branch(self, cond: str, then: str, other: str) -> None:
        self.line(f"br i1 {cond}, label %{then}, label %{other}")

    def slot(self) -> list:
        """An insertion point here."""
        place: list = []
        self._here.append(place)
        return place

    def into(self, slot: list) -> "_Into":
        """Context manager: lines go to `slot` (straight-line code only)."""
        return _Into(self, slot)

    def text(self) -> str:
        out: list[str] = []
        _flatten(self._root, out)
        return "\n".join(out)


class _Into:
    __slots__ = ("writer", "slot", "saved")

    def __init__(self, writer: Writer, slot: list):
        self.writer, self.slot = writer, slot

    def __enter__(self) -> None:
        self.saved, self.writer._here = self.writer._here, self.slot

    def __exit__(self, *exc) -> None:
        self.writer._here = self.saved


def _flatten(lines: list, out: list[str]) -> None:
    for x in lines:
        if type(x) is str:
            out.append(x)
        else:
            _flatten(x, out)
