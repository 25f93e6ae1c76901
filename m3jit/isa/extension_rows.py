"""Named extension instructions: `MY_OP rD, rA, LIMIT=2` as an ESCAPE frame, and back.

A row says what the text of one extension looks like; the frame is ESCAPE's (m3jit.isa.escape).  Its payload begins with
the number of destination and of source registers, one byte each, then their register bytes (255: absent), then the
options in declaration order, little-endian: i64, f64, one byte for a flag or a word.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from m3jit.isa.escape import escape_length
from m3jit.isa.fields import ABSENT, GPR, REQUIRED, EncodingError, EnumField, Field, FlagField, Number, Reg, RegField
from m3jit.isa.table import BY_KEY, BY_NAME, Instruction, Op, load_table

CARRIER = 0xB0
MAX_OPERANDS = 16
MAX_OPTION_BYTES = 48
OPTIONAL = "optional"                 # the flag of every extension: skipped by machines that do not know it


@dataclass(frozen=True, eq=False)
class ExtensionRow(Op):
    """The row of an extension mnemonic; `frame` and `named` go to the ESCAPE instruction and back."""
    number: int = 0
    version: tuple[int, int] = (1, 0)
    dests: tuple[RegField, ...] = ()
    sources: tuple[RegField, ...] = ()
    options: tuple[Field, ...] = ()
    option_bytes: int = 0

    @property
    def payload_bytes(self) -> int:
        return 2 + len(self.dests) + len(self.sources) + self.option_bytes

    @property
    def size(self) -> int:
        return escape_length(CARRIER, self.payload_bytes)

    def frame(self, ins: Instruction) -> Instruction:
        """The ESCAPE instruction of a named one.  EncodingError names the operand that does not fit."""
        registers = []
        for f in (*self.dests, *self.sources):
            reg = ins.args.get(f.name, f.default)
            if reg is REQUIRED or (reg is None and f.default is REQUIRED and not f.dest):
                raise EncodingError(f"{self.name}: {f.name}: missing")
            if reg is not None and reg.bank != GPR:
                raise EncodingError(f"{self.name}: {f.name}: {reg} is not a general register R0..R254")
            registers.append(reg)
        immediate = bytearray(self.option_bytes)
        for f in self.options:
            try:
                f.encode(immediate, 0, ins.args.get(f.name, f.default))
            except EncodingError as e:
                raise EncodingError(f"{self.name}: {e}") from None
        n = len(self.dests)
        row = BY_KEY[CARRIER, None]
        args = {"ext": self.number, "flags": int(bool(ins.args.get(OPTIONAL))),
                "version": self.version[0] | self.version[1] << 16}
        return Instruction(row, args, tail=pack(registers[:n], registers[n:], bytes(immediate)), size=self.size)

    def named(self, ins: Instruction) -> Instruction | None:
        """The named form of an ESCAPE instruction, or None when it is not exactly what this row would write."""
        tail, n = ins.tail, len(self.dests)
        at = 2 + n + len(self.sources)
        if len(tail) < self.payload_bytes or (tail[0], tail[1]) != (n, len(self.sources)):
            return None
        args: dict[str, Any] = {OPTIONAL: bool(ins.args.get("flags", 0) & 1)}
        for f, byte in zip((*self.dests, *self.sources), tail[2:at]):
            args[f.name] = None if byte == ABSENT else Reg(GPR, byte)
        try:
            for f in self.options:
                args[f.name] = f.decode(tail[at:at + self.option_bytes], 0)
            named = Instruction(self, args, size=self.size)
            again = self.frame(named)
        except EncodingError:
            return None
        padded = again.tail + bytes(self.size - 32 - len(again.tail))
        return named if (padded, again.args) == (tail, ins.args) else None


ROWS: dict[str, ExtensionRow] = {}                         # by mnemonic


def pack(dests: Any, sources: Any, immediate: bytes = b"") -> bytes:
    """The payload of an extension instruction; None stands for an absent register."""
    registers = [ABSENT if r is None else r.index for r in (*dests, *sources)]
    return bytes([len(dests), len(sources), *registers]) + immediate


def make_row(name: str, number: int, version: tuple[int, int], outputs: int, sources: list[tuple[str, bool]],
             options: list[Field], doc: str) -> ExtensionRow:
    """A row; sources: (name, may be absent).  ValueError says what is wrong with the declaration."""
    if not 0 <= number <= 255:
        raise ValueError(f"number {number} is outside 0..255")
    if any(not 0 <= v <= 0xFFFF for v in version):
        raise ValueError(f"version {version}: two numbers from 0 to 65535")
    if not 0 <= outputs <= MAX_OPERANDS or len(sources) > MAX_OPERANDS:
        raise ValueError(f"at most {MAX_OPERANDS} outputs and {MAX_OPERANDS} registers, got {outputs} and "
                         f"{len(sources)}")
    dests = tuple(RegField(slot=i, dest=True, banks=(GPR,), kinds=("any",), name="rd" if i == 0 else f"rd{i}")
                  for i in range(outputs))
    srcs = tuple(RegField(slot=outputs + i, banks=(GPR,), kinds=("any",), name=n, default=None if absent else REQUIRED)
                 for i, (n, absent) in enumerate(sources))
    placed, at = [], 0
    for f in options:
        placed.append(f[at])
        at += f.width or 1
    if at > MAX_OPTION_BYTES:
        raise ValueError(f"the options need {at} bytes, {MAX_OPTION_BYTES} are allowed")
    flag = replace(FlagField(bit=0), name=OPTIONAL, default=False)
    fields = (*dests, *srcs, *placed, flag)
    names = [f.name for f in fields]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice:
        raise ValueError(f"two operands are named {twice}")
    return ExtensionRow(CARRIER, name, None, fields, None, "machine", doc=doc, syntax="escape", number=number,
                        version=version, dests=dests, sources=srcs, options=tuple(placed), option_bytes=at)


def option(name: str, default: Any, words: tuple[str, ...] = ()) -> Field:
    """The operand of an option with that default: a flag, a whole number, a float, or one of some words."""
    if words:
        return EnumField(words=words, numbers=tuple(range(len(words))), name=name, default=default)
    if isinstance(default, bool):
        return FlagField(bit=0, in_payload=True, name=name, default=default)
    return Number(fmt="q" if isinstance(default, int) else "d", name=name, default=default)


def add_row(row: ExtensionRow, replacing: bool = False) -> None:
    """Make a mnemonic known to the assembler.  ValueError: it is taken."""
    load_table()
    if row.name in BY_NAME:
        raise ValueError(f"{row.name} is an opcode of the table")
    if row.name in ROWS and not replacing:
        raise ValueError(f"{row.name} is already extension {ROWS[row.name].number}")
    for name in [n for n, r in ROWS.items() if (r.number, r.version[0]) == (row.number, row.version[0])]:
        if name != row.name and not replacing:
            raise ValueError(f"extension {row.number} version {row.version[0]} is already {name}")
        del ROWS[name]
    ROWS[row.name] = row


def remove_row(name: str) -> None:
    ROWS.pop(name, None)


def named(ins: Instruction) -> Instruction | None:
    """An ESCAPE instruction by the name of its extension, when that is known and its payload regular."""
    if ins.op.code != CARRIER:
        return None
    for row in ROWS.values():
        if row.number == ins.args["ext"] and row.version[0] == ins.args["version"] & 0xFFFF:
            return row.named(ins)
    return None
