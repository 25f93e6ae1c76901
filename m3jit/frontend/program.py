"""A program: bytecode, data, symbols, relocations, source map, imports and notes, in memory.

The bytes of a `.m3b` file are in `container.py`.  Symbols are kept in one canonical order (`Symbol.order`), so that
equal programs have equal bytes.
"""
from __future__ import annotations

import bisect
import enum
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Iterable, NamedTuple

import numpy as np

from m3jit.isa.capabilities import Capability
from m3jit.isa.fields import BANK_LETTERS, BANK_SIZES, Reg
from m3jit.isa.table import ESCAPES, NO_DEADLINE, Instruction
from m3jit.isa.types import BY_CODE, Tensor

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
LOCAL_LABEL = re.compile(r"L_[0-9a-f]{4,}\Z")       # such labels are local to a source, SYMBOLS does not hold them
REGION_TEXT, REGION_GLOBAL = 0, 1
NO_SYMBOL = 0xFFFFFFFF             # a relocation against the DATA section itself


class SymbolKind(enum.IntEnum):
    """What a name stands for."""
    LABEL = 1                      # value: offset in TEXT
    FUNC = 2                       # value: offset in TEXT; params: its parameters, R0 first
    DATA = 3                       # value: offset in DATA; dtype, shape
    STRING = 4                     # value: offset in DATA of the u32 length in front of the UTF-8 bytes
    MODEL = 5                      # text: file name or content hash
    TENSOR = 6                     # name "model:tensor"
    EXTERN = 7                     # defined in another module
    REGISTER = 8                   # value: bank << 8 | index; scope: the function it is named in


@dataclass(frozen=True)
class Symbol:
    """A name of the program.  scope: 0, or 1 + TEXT offset of the function a register name belongs to."""
    kind: SymbolKind
    name: str
    value: int = 0
    size: int = 0
    dtype: int = 0
    shape: tuple[int, ...] = ()
    text: str = ""
    params: tuple[str, ...] = ()
    exported: bool = False
    scope: int = 0

    @property
    def order(self) -> tuple:
        return (self.kind, self.scope, self.value, self.name)

    @property
    def register(self) -> Reg:
        """The register a REGISTER symbol names."""
        return Reg(self.value >> 8, self.value & 255)


class RelocKind(enum.IntEnum):
    """How a relocation's word follows from symbol S, addend A and its own place P."""
    BRANCH = 1                     # i32: S + A - P (A: place of the word in its frame)
    STRING = 2                     # u64: offset in DATA of a string: S + A
    VALUE = 3                      # u64: index of the symbol
    ADDRESS = 4                    # u64: 64-bit address of S, + A; 0 while S is not known (models, externs)


class Reloc(NamedTuple):
    """A word to be filled in.  section: "TEXT" or "DATA"; symbol: index, or NO_SYMBOL for the start of DATA."""
    section: str
    offset: int
    kind: RelocKind
    symbol: int
    addend: int


class Line(NamedTuple):
    """From TEXT offset `pc` up to the next entry, code comes from this line ("" and 0: unknown)."""
    pc: int
    file: str
    line: int


class Import(NamedTuple):
    """`.import "path" AS namespace`, not linked yet."""
    path: str
    namespace: str


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
        from m3jit.frontend.decode import decode_text
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
            from m3jit.frontend.errors import suggest
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
        from m3jit.frontend.errors import suggest
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
        from m3jit.frontend.errors import ContainerError
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
        from m3jit.frontend.container import write
        return write(self)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "<bytes>") -> "Program":
        """Read and verify a `.m3b` file; ContainerError when anything is not as it must be."""
        from m3jit.frontend.container import read
        return read(data, name)


def required_mask(instructions: Iterable[Instruction]) -> int:
    """The REQUIRED mask of some instructions."""
    mask = Capability(0)
    for ins in instructions:
        if ins.op.code in ESCAPES and not ins.args.get("flags", 0) & 1:
            mask |= Capability.ESCAPE
        if ins.op.wide:
            mask |= Capability.DUAL_MODE
        if ins.lamport:
            mask |= Capability.LAMPORT
        if ins.deadline != NO_DEADLINE:
            mask |= Capability.DEADLINE
        if not ins.op.executable:
            mask |= Capability.PROVISIONAL
    return int(mask)


def address_of(symbol: Symbol) -> int | None:
    """The 64-bit address of a symbol, or None while it is unknown (models, externs)."""
    if symbol.kind in (SymbolKind.LABEL, SymbolKind.FUNC):
        return REGION_TEXT << 60 | symbol.value
    if symbol.kind in (SymbolKind.DATA, SymbolKind.STRING):
        return REGION_GLOBAL << 60 | symbol.value
    return None


def reloc_word(reloc: Reloc, symbols: list[Symbol]) -> int:
    """The word a relocation puts at its place (0 for what is not known yet)."""
    s = symbols[reloc.symbol] if reloc.symbol != NO_SYMBOL else None
    if reloc.kind == RelocKind.BRANCH:
        return 0 if s is None or s.kind == SymbolKind.EXTERN else s.value + reloc.addend - reloc.offset
    if reloc.kind == RelocKind.STRING:
        return (s.value if s else 0) + reloc.addend
    if reloc.kind == RelocKind.VALUE:
        return reloc.symbol
    base = REGION_GLOBAL << 60 if s is None else address_of(s)
    return 0 if base is None else (base + reloc.addend) % 2 ** 64


def sort_symbols(symbols: list[Symbol], relocs: list[Reloc]) -> tuple[list[Symbol], list[Reloc]]:
    """Symbols in canonical order and relocations that point at them there, in order of place."""
    rank = sorted(range(len(symbols)), key=lambda i: symbols[i].order)
    where = {old: new for new, old in enumerate(rank)}
    moved = [r if r.symbol == NO_SYMBOL else r._replace(symbol=where[r.symbol]) for r in relocs]
    return [symbols[i] for i in rank], sorted(moved, key=lambda r: (r.section != "TEXT", r.offset))


def patch(section: bytearray, reloc: Reloc, word: int) -> None:
    """Write a relocation's word."""
    n = 4 if reloc.kind == RelocKind.BRANCH else 8
    section[reloc.offset:reloc.offset + n] = (word % (1 << 8 * n)).to_bytes(n, "little")


def describe_value(value: Any) -> str:
    """How a decoded operand is shown in messages."""
    return "absent" if value is None else str(value)
