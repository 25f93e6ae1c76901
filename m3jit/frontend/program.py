"""A program: bytecode, data, symbols, relocations, source map, imports and notes, in memory.

The bytes of a `.m3b` file are in `container.py`, the entries of its tables in `records.py`.  Symbols are kept in one
canonical order (`Symbol.order`), so that equal programs have equal bytes.
"""
from __future__ import annotations

import bisect
import os
import re
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from m3jit.frontend.container import read, write
from m3jit.frontend.decode import decode_text
from m3jit.frontend.errors import ContainerError, suggest
from m3jit.frontend.records import Import, Line, Reloc, Symbol, SymbolKind, required_mask
from m3jit.frontend.verify import verify
from m3jit.isa.fields import BANK_LETTERS, BANK_SIZES, Reg
from m3jit.isa.table import Instruction
from m3jit.isa.types import BY_CODE, Tensor


@dataclass(eq=False)
class Program:
    """What a `.m3b` file holds.  `name` is the file's name in messages; `warnings` come from the assembler.

    files: paths of the files it was made from beside `name` (FILE= and .import), so that no one writes over them."""
    text: bytes = b""
    data: bytes = b""
    symbols: list[Symbol] = field(default_factory=list)
    relocs: list[Reloc] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    meta: dict[str, str] = field(default_factory=dict)
    entry: int = 0
    required: int = 0
    optional: int = 0
    name: str = "<program>"
    warnings: list = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @cached_property
    def instructions(self) -> list[tuple[int, Instruction]]:
        """All instructions with their pc (offset in TEXT).  EncodingError if TEXT is damaged."""
        return decode_text(self.text)

    @cached_property
    def _by_name(self) -> dict[str, Symbol]:
        return {s.name: s for s in reversed(self.symbols) if s.kind != SymbolKind.REGISTER}

    @cached_property
    def _labels(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for s in self.symbols:
            if s.kind == SymbolKind.FUNC or s.kind == SymbolKind.LABEL and s.value not in found:
                found[s.value] = s.name
        return found

    @cached_property
    def _line_starts(self) -> list[int]:
        return [entry.pc for entry in self.lines]

    @cached_property
    def _known_registers(self) -> dict[tuple[str, str | None], Reg]:
        """What `register` has answered: a machine is asked for a register with every token."""
        return {}

    def symbol(self, name: str) -> Symbol:
        """The symbol of that name; KeyError with a suggestion otherwise."""
        try:
            return self._by_name[name]
        except KeyError:
            hint = suggest(name, self._by_name)
            raise KeyError(f"{self.name}: no symbol {name}" + (f"; {hint}" if hint else "")) from None

    def register(self, name: str, function: str | None = None) -> Reg:
        """The register a source name such as `rPCM` stands for, in the main program or in a function.

        KeyError with a suggestion when there is none."""
        known = self._known_registers.get((name, function))
        if known is None:
            known = self._known_registers[name, function] = self._register(name, function)
        return known

    def _register(self, name: str, function: str | None) -> Reg:
        """`register`, looked for."""
        scope = 0 if function is None else 1 + self.symbol(function).value
        for s in self.symbols:
            if s.kind == SymbolKind.REGISTER and s.name == name and s.scope in (scope, 0):
                if s.scope == scope or s.register.bank >= 2:
                    return s.register
        for bank, letter in enumerate(BANK_LETTERS):
            m = re.fullmatch(rf"{letter}(\d{{1,3}})", name, re.I)
            if m and int(m[1]) < BANK_SIZES[bank]:
                return Reg(bank, int(m[1]))
        hint = suggest(name, [s.name for s in self.symbols if s.kind == SymbolKind.REGISTER and s.scope in (scope, 0)])
        raise KeyError(f"{self.name}: no register {name}" + (f"; {hint}" if hint else ""))

    def line_of(self, pc: int) -> tuple[str, int] | None:
        """(file, line) of the instruction at `pc`, or None when the program does not say."""
        i = bisect.bisect_right(self._line_starts, pc) - 1
        if i < 0 or not self.lines[i].line:
            return None
        return self.lines[i].file, self.lines[i].line

    def string(self, offset: int) -> str:
        """The string whose u32 length stands at `offset` of DATA."""
        if offset < 0 or offset + 4 > len(self.data):
            raise ContainerError(self.name, offset, f"no string there: DATA has {len(self.data)} bytes")
        n = int.from_bytes(self.data[offset:offset + 4], "little")
        if n > len(self.data) - offset - 4:
            raise ContainerError(self.name, offset,
                                 f"a string of {n} bytes runs past the {len(self.data)} bytes of DATA")
        try:
            return self.data[offset + 4:offset + 4 + n].decode("utf-8")
        except UnicodeDecodeError as e:
            raise ContainerError(self.name, offset + 4 + e.start, "a string that is not UTF-8") from None

    def value(self, symbol: Symbol) -> Tensor:
        """The tensor a DATA symbol names (a view of DATA); a STRING symbol's UTF-8 bytes as U8."""
        if symbol.kind == SymbolKind.STRING:
            raw = np.frombuffer(self.data, np.uint8, symbol.size - 4, symbol.value + 4)
            return Tensor(BY_CODE[128], raw.shape, raw)
        if symbol.kind != SymbolKind.DATA:
            raise ValueError(f"{symbol.name} is a {symbol.kind.name.lower()}, not data of this program")
        dtype = BY_CODE[symbol.dtype]
        raw = np.frombuffer(self.data, np.uint8, symbol.size, symbol.value)
        if dtype.is_block:
            return Tensor.blocks(dtype, symbol.shape, raw)
        return Tensor(dtype, symbol.shape, raw.view(dtype.numpy).reshape(symbol.shape))

    @property
    def unresolved(self) -> list[str]:
        """Names that another module must define before the program can run."""
        return [s.name for s in self.symbols if s.kind == SymbolKind.EXTERN]

    @property
    def models(self) -> dict[str, str]:
        """`.model` names and the file or hash each asks for."""
        return {s.name: s.text for s in self.symbols if s.kind == SymbolKind.MODEL}

    def label_at(self, pc: int) -> str | None:
        """A function or label name at that pc."""
        return self._labels.get(pc)

    def needs(self) -> int:
        """The REQUIRED capability mask that follows from TEXT."""
        return required_mask(ins for _, ins in self.instructions)

    def to_bytes(self) -> bytes:
        """The `.m3b` file."""
        return write(self)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "<bytes>") -> "Program":
        """Read and verify a `.m3b` file; ContainerError when anything is not as it must be."""
        fields, places = read(data, name)
        program = cls(**fields)
        findings = verify(program)
        if findings:
            first = findings[0]
            offset = places[first.section] + first.offset if first.section in places else 0
            more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
            raise ContainerError(name, offset, f"{first}{more}", findings)
        return program


def load(source: str | os.PathLike | bytes) -> Program:
    """A program from a `.m3b` file (its path) or its bytes, verified.  ContainerError when it is not sound."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return Program.from_bytes(bytes(source))
    with open(source, "rb") as f:
        return Program.from_bytes(f.read(), os.fspath(source))
