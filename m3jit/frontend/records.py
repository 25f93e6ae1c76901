"""What a program's tables hold: symbols, relocations, lines of source, imports; and the words that follow from them."""
from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Iterable, NamedTuple

from m3jit.isa.capabilities import Capability
from m3jit.isa.fields import Reg
from m3jit.isa.table import ESCAPES, NO_DEADLINE, Instruction

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
