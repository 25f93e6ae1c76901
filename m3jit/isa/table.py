"""The instruction table: one opcode = one decorated function; everything else is derived from it.

    @op(0x0A, "ADD", shape="broadcast", dtypes=NUMBERS)
    def add(xp, rd: Rd, a: R1, b: R2):
        "a + b elementwise ..."
        return xp.add(a, b)

Routes (what the function is):
* "value"   body(xp, **operands): pure; returns the value of the destination(s) in operand order (and of `both` and
            hidden state operands, in order).  Interpreter: `xp` computes; compiler: `xp` builds tensor IR.
* "machine" body(m, **operands): a slow-path instruction; `m` is the running context's view of the machine
            (m3jit.vm.machine).  Never compiled; ends a region.
* "control" body(m, **operands) -> next pc or None: `control` names the kind for the control-flow graph.
* "absent"  not executable yet: in the table, traps when reached.
"""
from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

from m3jit.isa.escape import decode_escape, encode_escape
from m3jit.isa.fields import (ABSENT, BANK_LETTERS, BANK_SIZES, GPR, REQUIRED, BitsEnum, EncodingError, Field,
                              FlagField, Hidden, PayloadReg, PrecisionField, Reg, RegField)

NO_DEADLINE = 2 ** 64 - 1
ESCAPES = {0xB0: None, 0xB1: 128, 0xB2: 256, 0xB3: None}     # frame bytes; None: the frame carries its own length


@dataclass(frozen=True)
class StateDoc:
    """Principle 2: where an opcode's state lives, what a snapshot of it costs, what ABORT does to it."""
    home: str
    snapshot: str
    abort: str


STATELESS = StateDoc("none: reads and writes registers only", "O(1), part of the context root", "registers restored")
OUTSIDE = StateDoc("outside the context root", "not captured", "not rolled back")


@dataclass(frozen=True, eq=False)
class Op:
    """One row of the table."""
    code: int
    name: str
    sub: int | None                 # payload byte 0 tells several rows of one code apart (ALU, IF_*)
    fields: tuple[Field, ...]
    body: Callable | None
    route: str                      # value | machine | control | absent
    control: str = ""               # halt jump branch interrupt call ret spawn
    doc: str = ""
    aliases: tuple[str, ...] = ()
    key_aliases: dict[str, str] = field(default_factory=dict)    # TEMP -> TEMPERATURE
    shape: str = ""                 # shape rule in words, checked by tests against the body's result
    dtypes: str = ""
    state: StateDoc = STATELESS
    reads: tuple[str, ...] = ()     # context state besides operands ("memory", "flags", "rng", "input", ...)
    writes: tuple[str, ...] = ()
    why_slow: str = ""              # machine route: why it leaves compiled code
    source: str = ""
    syntax: str = ""                # named exception in frontend quirks, else ""
    family: str = ""                # module that declares the row; a page of the reference
    positional: tuple[str, ...] = ()    # optional non-register operands also accepted without their key (COMPARE rA, 5)
    forms: tuple[str, ...] = ()     # rows the assembler tries when an operand does not fit this one; "<name>I" is
                                    # tried anyway (SUB rD, rA, 5 -> SUBI; LOADI rD, @x -> the row for symbols)
    sample: dict[str, Any] = field(default_factory=dict)          # operand hints for generated test programs

    @property
    def wide(self) -> bool:
        return self.code >= 0x80

    @property
    def size(self) -> int:
        """Frame bytes (ESCAPE forms with their own length: the least, 64)."""
        return ESCAPES.get(self.code) or (64 if self.wide else 32)

    @property
    def base(self) -> int:
        return 32 if self.wide else 8

    @property
    def executable(self) -> bool:
        return self.route != "absent"

    @property
    def key(self) -> tuple[int, int | None]:
        return (self.code, self.sub)

    def operands(self) -> Iterator[Field]:
        """Encoded fields (no hidden state)."""
        return (f for f in self.fields if not isinstance(f, Hidden))

    def registers(self) -> list[Field]:
        return [f for f in self.fields if isinstance(f, (RegField, PayloadReg))]

    def __repr__(self) -> str:
        return f"<{self.name} 0x{self.code:02X}>"


@dataclass(slots=True)
class Instruction:
    """A decoded instruction.  `args` maps field names to values (registers: Reg or None = absent)."""
    op: Op
    args: dict[str, Any]
    lamport: int = 0                # 64-byte frames
    deadline: int = NO_DEADLINE
    ext: int = 0
    tail: bytes = b""               # ESCAPE forms: the payload
    size: int = 32

    def __eq__(self, other):
        return isinstance(other, Instruction) and encode(self) == encode(other)


OPS: list[Op] = []                               # table order: by family, then number
BY_KEY: dict[tuple[int, int | None], Op] = {}
BY_NAME: dict[str, Op] = {}                      # mnemonics and aliases, upper case
SUBCODED: set[int] = set()                       # codes whose payload byte 0 is a sub-operation
RESERVED = frozenset([0x7F, *range(0x9A, 0xA0), *range(0xAA, 0xB0)])


def op(code: int, name: str, *, sub: int | None = None, route: str = "value", **info: Any) -> Callable:
    """Declare an opcode; see the module docstring.  Import-time errors: a number or name used twice, fields that
    overlap or leave the frame, a missing docstring."""
    def declare(body: Callable) -> Callable:
        where = f"{body.__module__}:{body.__code__.co_firstlineno}"
        fields = _fields(body, name, where)
        row = Op(code=code, name=name, sub=sub, fields=fields, body=None if route == "absent" else body, route=route,
                 doc=inspect.getdoc(body) or "", family=body.__module__.rpartition(".")[2], **info)
        _check(row, where)
        OPS.append(row)
        BY_KEY[row.key] = row
        if sub is not None:
            SUBCODED.add(code)
        for n in (name, *row.aliases):
            BY_NAME[n] = row
        body.op = row
        return body
    return declare


def _fields(body: Callable, name: str, where: str) -> tuple[Field, ...]:
    out = []
    hints = inspect.get_annotations(body, eval_str=True)
    for i, p in enumerate(inspect.signature(body).parameters.values()):
        if i == 0:
            continue                           # xp or m
        kind = hints.get(p.name)
        if not isinstance(kind, Field):
            raise TypeError(f"{where}: {name}: parameter {p.name} needs an operand kind as annotation")
        default = REQUIRED if p.default is inspect.Parameter.empty else p.default
        out.append(_replace(kind, name=p.name, default=default))
    return tuple(out)


def _replace(f: Field, **kw: Any) -> Field:
    import dataclasses
    return dataclasses.replace(f, **kw)


def _check(row: Op, where: str) -> None:
    if row.key in BY_KEY or (row.sub is None and any(k[0] == row.code for k in BY_KEY)) or \
            (row.sub is not None and (row.code, None) in BY_KEY):
        raise TypeError(f"{where}: {row.name}: opcode 0x{row.code:02X} is already {BY_KEY.get(row.key)}")
    if row.code in RESERVED:
        raise TypeError(f"{where}: {row.name}: 0x{row.code:02X} is reserved")
    for n in (row.name, *row.aliases):
        if n in BY_NAME:
            raise TypeError(f"{where}: mnemonic {n} is already {BY_NAME[n]}")
    if not row.doc:
        raise TypeError(f"{where}: {row.name} has no docstring")
    owner: dict[int, str] = {0: "OPCODE", 1: "FLAGS"}
    if not row.wide:
        owner[6] = "BANKS"
    else:
        owner.update({b: "header" for b in range(8, 32)})
        owner.update({62: "BANKS", 63: "BANKS"})
    if row.sub is not None:
        owner[row.base] = "sub-operation"
    end = 64 if row.wide else 32
    bits: dict[tuple[int, int], str] = {}
    for f in row.operands():
        for span in f.spans(row.base):
            for b in span:
                if b in owner or b >= end:
                    raise TypeError(f"{where}: {row.name}: byte {b} of {f.name} "
                                    + (f"overlaps {owner[b]}" if b in owner else f"is outside the {end}-byte frame"))
                owner[b] = f.name
        if isinstance(f, (FlagField, PrecisionField, BitsEnum)):
            at = [(1, 0), (1, 1)] if isinstance(f, PrecisionField) else [(f._byte(row.base), f.bit)] if isinstance(
                f, FlagField) else [(row.base + f.at, f.bit), (row.base + f.at, f.bit + 1)]
            for key in at:
                if key in bits:
                    raise TypeError(f"{where}: {row.name}: {f.name} shares a flag bit with {bits[key]}")
                if key[0] != 1 and owner.get(key[0], "flag bits") != "flag bits":
                    raise TypeError(f"{where}: {row.name}: {f.name} overlaps {owner[key[0]]}")
                bits[key] = f.name
                if key[0] != 1:
                    owner[key[0]] = "flag bits"


# -- encoding -----------------------------------------------------------------------------------------------------

def encode(ins: Instruction) -> bytes:
    """The frame of an instruction.  EncodingError names mnemonic and operand."""
    row = ins.op
    if row.code in ESCAPES:
        return encode_escape(ins)
    frame = bytearray(row.size)
    frame[0] = row.code
    for b in range(2, 8 if row.wide else 6):
        frame[b] = ABSENT
    if not row.wide:
        frame[7] = ABSENT
    if row.sub is not None:
        frame[row.base] = row.sub
    banks = 0
    try:
        for f in row.operands():
            value = ins.args.get(f.name, f.default)
            if value is REQUIRED:
                raise EncodingError(f"{f.name}: missing")
            if isinstance(f, RegField):
                if value is None:
                    if f.default is REQUIRED and not f.dest:
                        raise EncodingError(f"{f.name}: must be a register, it is absent")
                    banks |= f.banks[0] << 2 * f.slot
                    continue
                banks_here = f.banks if row.wide or f.slot < 4 else f.banks[:1]     # BANKS has no room for RSRC4
                if value.bank not in banks_here or value.index >= BANK_SIZES[value.bank]:
                    raise EncodingError(f"{f.name}: {value} is not in bank "
                                        + " or ".join(BANK_LETTERS[b] for b in banks_here))
                frame[f.frame_byte(row.wide)] = value.index
                banks |= value.bank << 2 * f.slot
            else:
                f.encode(frame, row.base, value)
    except EncodingError as e:
        raise EncodingError(f"{row.name}: {e}") from None
    if row.wide:
        frame[8:16] = ins.lamport.to_bytes(8, "little")
        frame[16:24] = ins.deadline.to_bytes(8, "little")
        frame[24:32] = ins.ext.to_bytes(8, "little")
        frame[62:64] = banks.to_bytes(2, "little")
    else:
        frame[6] = banks & 0xFF        # slots 0-3; RSRC4 has the bank the table declares
    return bytes(frame)


def decode(code: bytes | memoryview, pc: int = 0) -> Instruction:
    """The instruction at byte `pc`.  EncodingError when bytes are missing, the opcode is reserved, an operand is out
    of range, or an unused byte is not zero (register bytes: 255)."""
    if pc >= len(code):
        raise EncodingError(f"no instruction at byte {pc}: the program ends there")
    first = code[pc]
    if first in RESERVED:
        raise EncodingError(f"opcode 0x{first:02X} is reserved")
    if first in ESCAPES:
        row = BY_KEY[(first, None)]
        args, tail, size = decode_escape(code, pc, row.name)
        return Instruction(row, args, tail=tail, size=size)
    size = 64 if first >= 0x80 else 32
    frame = bytes(code[pc:pc + size])
    if len(frame) < size:
        raise EncodingError(f"opcode 0x{first:02X} needs {size} bytes, {len(frame)} are left")
    base = 32 if first >= 0x80 else 8
    sub = frame[base] if first in SUBCODED else None
    row = BY_KEY.get((first, sub))
    if row is None:
        raise EncodingError(f"opcode 0x{first:02X}" + (f" has no sub-operation {sub}" if sub is not None
                                                       else " is not in the table"))
    args: dict[str, Any] = {}
    banks = int.from_bytes(frame[62:64], "little") if row.wide else frame[6]
    try:
        for f in row.operands():
            if isinstance(f, RegField):
                n = frame[f.frame_byte(row.wide)]
                bank = (banks >> 2 * f.slot & 3) if row.wide or f.slot < 4 else f.banks[0]
                if bank not in f.banks:
                    raise EncodingError(f"{f.name}: bank {BANK_LETTERS[bank]}, expected "
                                        + " or ".join(BANK_LETTERS[b] for b in f.banks))
                if n == ABSENT and bank == GPR or n == ABSENT:
                    args[f.name] = None
                elif n >= BANK_SIZES[bank]:
                    raise EncodingError(f"{f.name}: {BANK_LETTERS[bank]}{n} does not exist")
                else:
                    args[f.name] = Reg(bank, n)
            else:
                args[f.name] = f.decode(frame, row.base)
    except EncodingError as e:
        raise EncodingError(f"{row.name}: {e}") from None
    ins = Instruction(row, args, size=size)
    if row.wide:
        ins.lamport, ins.deadline, ins.ext = (int.from_bytes(frame[b:b + 8], "little") for b in (8, 16, 24))
    again = encode(ins)
    if again != frame:
        at = next(i for i in range(size) if again[i] != frame[i])
        raise EncodingError(f"{row.name}: byte {at} is 0x{frame[at]:02x}, expected 0x{again[at]:02x}")
    return ins


def load_table() -> None:
    """Import every family, so that OPS is complete."""
    from m3jit.isa import families
    families.load()


def missing_numbers() -> list[int]:
    """Numbers that are neither in the table nor reserved."""
    have = {r.code for r in OPS} | RESERVED
    return [n for n in range(256) if n not in have]
