"""Operand kinds of the instruction table: where an operand sits in the frame and what it may be.

Used as annotations of opcode functions; the default value of the parameter is what is encoded when it is absent::

    @op(0x33, "REDUCE", ...)
    def reduce(xp, rd: Rd, src: R1, op: Enum("SUM MEAN MAX MIN PROD")[0], axis: U8[1] = 255): ...

`[n]` is an offset into the payload (32-byte frames: byte 8 + n, 64-byte frames: PAYLOAD_CORE, byte 32 + n).
A parameter without a default is mandatory.  Assembly: registers are positional in parameter order (destination
first), everything else is `KEY=value` with the parameter's upper-case name, or positional where the op says so.
"""
from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

GPR, VEC, STATE, SPECIAL = 0, 1, 2, 3
BANK_LETTERS = ("R", "V", "S", "SP")
BANK_SIZES = (256, 32, 64, 19)
ABSENT = 255                       # register byte of an absent operand (= R255, the null register)
REQUIRED = object()                # default of a mandatory field


class Reg(NamedTuple):
    """A register operand."""
    bank: int
    index: int

    def __str__(self) -> str:
        return f"{BANK_LETTERS[self.bank]}{self.index}"


class EncodingError(Exception):
    """A frame or operand value that the table does not allow; the message names the operand and what is allowed."""


@dataclass(frozen=True)
class Field:
    """Base of all operand kinds.  `at` is a payload offset for payload fields."""
    at: int = -1
    name: str = ""
    default: Any = REQUIRED

    width = 0                      # bytes in the payload
    positional = False

    def __getitem__(self, at: int) -> "Field":
        return replace(self, at=at)

    def spans(self, base: int) -> list[range]:
        """Byte ranges of the frame this field owns; `base` = first payload byte."""
        return [range(base + self.at, base + self.at + self.width)]

    def encode(self, frame: bytearray, base: int, value: Any) -> None: raise NotImplementedError(type(self).__name__)
    def decode(self, frame: bytes, base: int) -> Any: raise NotImplementedError(type(self).__name__)
    def describe(self) -> str: return type(self).__name__


@dataclass(frozen=True)
class RegField(Field):
    """A register byte at a fixed frame position, with its bank bits in BANKS.

    slot: 0 rdest, 1.. rsrc1..; frame byte and BANKS bits follow from it.  banks: allowed banks (one = fixed).
    kinds: run-time kinds accepted (see isa.types.Kind), names for messages.  dest: written by the instruction.
    both: read and written (a state operand, or a moved register).
    """
    slot: int = 0
    banks: tuple[int, ...] = (GPR, VEC)
    kinds: tuple[str, ...] = ("tensor",)
    dest: bool = False
    both: bool = False

    positional = True

    def __call__(self, *kinds: str, banks: tuple[int, ...] | None = None, both: bool = False,
                 dest: bool | None = None) -> "RegField":
        """R1("int", "float"), R3("tensor", dest=True), R4("state"): kinds of "state" imply the S bank or a GPR."""
        if banks is None:
            banks = (STATE, GPR) if kinds and all(k == "state" for k in kinds) else \
                (GPR, VEC) if not kinds or "tensor" in kinds or "any" in kinds else (GPR,)
        return replace(self, kinds=kinds or self.kinds, banks=banks, both=both,
                       dest=self.dest if dest is None else dest)

    def frame_byte(self, wide: bool) -> int:
        if wide:
            return 2 + self.slot
        return 7 if self.slot == 4 else 2 + self.slot

    def spans(self, base: int) -> list[range]:
        b = self.frame_byte(base == 32)
        return [range(b, b + 1)]

    def describe(self) -> str:
        return "register"


@dataclass(frozen=True)
class PayloadReg(Field):
    """A further register whose number sits in a payload byte (255 = absent); its bank is fixed by the table."""
    bank: int = GPR
    kinds: tuple[str, ...] = ("tensor",)
    dest: bool = False
    both: bool = False
    width = 1

    def __call__(self, *kinds: str, bank: int = GPR, dest: bool = False, both: bool = False) -> "PayloadReg":
        return replace(self, kinds=kinds or self.kinds, bank=bank, dest=dest, both=both)

    def encode(self, frame, base, value):
        if value is not None and (value.bank != self.bank or value.index >= BANK_SIZES[self.bank]):
            raise EncodingError(f"{self.name}: {value} is not a {BANK_LETTERS[self.bank]} register")
        frame[base + self.at] = ABSENT if value is None else value.index

    def decode(self, frame, base):
        n = frame[base + self.at]
        if n != ABSENT and n >= BANK_SIZES[self.bank]:
            raise EncodingError(f"{self.name}: register number {n} is over {BANK_SIZES[self.bank] - 1}")
        return None if n == ABSENT else Reg(self.bank, n)

    def describe(self): return "register"


@dataclass(frozen=True)
class Number(Field):
    """Fixed-width integer or float.  fmt: struct letter (e is f16)."""
    fmt: str = "B"

    @property
    def width(self) -> int:        # type: ignore[override]
        return struct.calcsize("<" + self.fmt)

    @property
    def is_float(self) -> bool:
        return self.fmt in "efd"

    def bounds(self) -> tuple[int, int]:
        bits = self.width * 8
        return (0, 2 ** bits - 1) if self.fmt.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

    def encode(self, frame, base, value):
        if not self.is_float:
            lo, hi = self.bounds()
            if not isinstance(value, int) or not lo <= value <= hi:
                raise EncodingError(f"{self.name}: {value!r} is not an integer in {lo}..{hi}")
        elif self.fmt == "f" and isinstance(value, RawF32):
            struct.pack_into("<I", frame, base + self.at, value.bits)
            return
        try:
            struct.pack_into("<" + self.fmt, frame, base + self.at, value)
        except (OverflowError, struct.error):
            raise EncodingError(f"{self.name}: {value!r} does not fit a {self.describe()}") from None

    def decode(self, frame, base):
        if self.fmt == "f":
            bits = struct.unpack_from("<I", frame, base + self.at)[0]
            if bits & 0x7FFFFFFF > 0x7F800000:
                return RawF32(bits)
        return struct.unpack_from("<" + self.fmt, frame, base + self.at)[0]

    def describe(self):
        return {"B": "u8", "H": "u16", "I": "u32", "Q": "u64", "b": "i8", "h": "i16", "i": "i32", "q": "i64",
                "e": "f16", "f": "f32", "d": "f64"}[self.fmt]


class RawF32(float):
    """An f32 NaN with its exact bits (Python floats do not keep f32 NaN payloads through struct)."""

    def __new__(cls, bits: int):
        self = super().__new__(cls, "nan")
        self.bits = bits
        return self

    def __eq__(self, other): return isinstance(other, RawF32) and other.bits == self.bits
    def __hash__(self): return hash(self.bits)


@dataclass(frozen=True)
class EnumField(Field):
    """One of several words in one byte.  words[i] has number numbers[i].  Positional when `bare`."""
    words: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    bare: bool = True              # the word alone is accepted: `RED` for PRIORITY=RED
    width = 1

    def encode(self, frame, base, value):
        if value not in self.words:
            raise EncodingError(f"{self.name}: {value!r} is not one of {', '.join(self.words)}")
        frame[base + self.at] = self.numbers[self.words.index(value)]

    def decode(self, frame, base):
        n = frame[base + self.at]
        if n not in self.numbers:
            raise EncodingError(f"{self.name}: {n} is not the number of one of {', '.join(self.words)}")
        return self.words[self.numbers.index(n)]

    def describe(self): return " | ".join(self.words)


@dataclass(frozen=True)
class FlaggedEnum(EnumField):
    """An EnumField whose presence is a bit of FLAGS (PRIORITY: 5, FUSED_ACT: 2).  Value None: absent, byte zero."""
    bit: int = 5

    def encode(self, frame, base, value):
        if value is not None:
            super().encode(frame, base, value)
            frame[1] |= 1 << self.bit

    def decode(self, frame, base):
        return super().decode(frame, base) if frame[1] >> self.bit & 1 else None


@dataclass(frozen=True)
class BitsEnum(EnumField):
    """An EnumField in bits `bit`, `bit` + 1 of a payload byte that others share."""
    bit: int = 0

    def spans(self, base): return []           # bits are checked separately

    def encode(self, frame, base, value):
        byte = bytearray(base + self.at + 1)
        super().encode(byte, base, value)
        frame[base + self.at] |= byte[-1] << self.bit

    def decode(self, frame, base):
        return super().decode(bytes(self.at) + bytes([frame[base + self.at] >> self.bit & 3]), 0)


@dataclass(frozen=True)
class FlagField(Field):
    """A bit of FLAGS (in_payload: of a payload byte).  Written bare: `TRANSPOSE`; `off_word` names the other value."""
    bit: int = 0
    in_payload: bool = False
    off_word: str = ""             # STREAM: BLOCKING (1) against DROP (0)

    def spans(self, base): return []           # bits are checked separately

    def _byte(self, base): return base + self.at if self.in_payload else 1

    def encode(self, frame, base, value):
        if value:
            frame[self._byte(base)] |= 1 << self.bit

    def decode(self, frame, base):
        return bool(frame[self._byte(base)] >> self.bit & 1)

    def describe(self): return "flag"


@dataclass(frozen=True)
class PrecisionField(Field):
    """FLAGS bits 0-1: how the instruction computes (exact, never a silent fallback)."""
    words = ("FP32", "BF16", "FP16", "INT8")

    def spans(self, base): return []

    def encode(self, frame, base, value):
        if value not in self.words:
            raise EncodingError(f"{self.name}: {value!r} is not one of {', '.join(self.words)}")
        frame[1] = frame[1] & 0xFC | self.words.index(value)

    def decode(self, frame, base): return self.words[frame[1] & 3]
    def describe(self): return " | ".join(self.words)


@dataclass(frozen=True)
class LabelField(Field):
    """A branch target: signed 32-bit distance in bytes from the instruction's own first byte.  Value: the distance."""
    width = 4
    positional = True

    def encode(self, frame, base, value):
        if not -2 ** 31 <= value < 2 ** 31:
            raise EncodingError(f"{self.name}: the target is {value} bytes away; a branch reaches +-2 GiB")
        struct.pack_into("<i", frame, base + self.at, value)

    def decode(self, frame, base): return struct.unpack_from("<i", frame, base + self.at)[0]
    def describe(self): return "label"


@dataclass(frozen=True)
class IntOrReg(Field):
    """`KEY=5` or `KEY=rX`: an i64 immediate (fmt width) and a register byte; a register makes the immediate zero.

    at: offset of the immediate; reg_at: offset of the register byte; kinds: what the register may hold.  Value: int, or
    Reg."""
    fmt: str = "q"
    reg_at: int = -1
    kinds: tuple[str, ...] = ("int",)

    def __getitem__(self, at):
        return replace(self, at=at[0], reg_at=at[1])

    @property
    def size(self) -> int:
        return struct.calcsize("<" + self.fmt)

    def spans(self, base):
        return [range(base + self.at, base + self.at + self.size), range(base + self.reg_at, base + self.reg_at + 1)]

    def encode(self, frame, base, value):
        if isinstance(value, Reg):
            if value.bank != GPR or value.index == ABSENT:
                raise EncodingError(f"{self.name}: {value} is not a general register R0..R254")
            frame[base + self.reg_at] = value.index
            return
        frame[base + self.reg_at] = ABSENT
        Number(self.at, self.name, fmt=self.fmt).encode(frame, base, value)

    def decode(self, frame, base):
        r = frame[base + self.reg_at]
        value = struct.unpack_from("<" + self.fmt, frame, base + self.at)[0]
        if r != ABSENT:
            if value:
                raise EncodingError(f"{self.name}: immediate {value} beside a register; it must be zero")
            return Reg(GPR, r)
        return value

    def describe(self): return "integer or register"


@dataclass(frozen=True)
class FloatOrReg(IntOrReg):
    """`KEY=0.7` or `KEY=rX`, immediate f32."""
    fmt: str = "f"
    kinds: tuple[str, ...] = ("float",)

    def decode(self, frame, base):
        r = frame[base + self.reg_at]
        if r != ABSENT:
            if any(frame[base + self.at: base + self.at + 4]):
                raise EncodingError(f"{self.name}: an immediate beside a register; it must be zero")
            return Reg(GPR, r)
        return Number(self.at, self.name, fmt="f").decode(frame, base)

    def describe(self): return "float or register"


@dataclass(frozen=True)
class ShapeField(Field):
    """Up to 5 dims.  Byte 0: rank (bits 0-2) and, in bit 3 + i, whether entry i is a register; then 5 x i32.

    Value: tuple of int (-1 = inferred) and Reg.  Text: SHAPE=2x3 or SHAPE=[2, rN, -1]."""
    width = 21

    def encode(self, frame, base, value):
        if len(value) > 5:
            raise EncodingError(f"{self.name}: a shape has at most 5 dimensions, got {len(value)}")
        a = base + self.at
        mask, top = 0, 2 ** 31
        for i, d in enumerate(value):
            if isinstance(d, Reg):
                mask |= 1 << i
                n = d.index
                if d.bank != GPR or n == ABSENT:
                    raise EncodingError(f"{self.name}: {d} is not a general register")
            else:
                n = d
                if not -1 <= n < top:
                    raise EncodingError(f"{self.name}: dimension {d} is outside -1..{top - 1}")
            struct.pack_into("<i", frame, a + 1 + 4 * i, n)
        frame[a] = len(value) | mask << 3

    def decode(self, frame, base):
        a = base + self.at
        rank, mask = frame[a] & 7, frame[a] >> 3
        if rank > 5 or mask >> rank:
            raise EncodingError(f"{self.name}: rank {rank} with register mask {mask:#x}")
        out: list[Any] = []
        for i in range(5):
            n = struct.unpack_from("<i", frame, a + 1 + 4 * i)[0]
            if i >= rank:
                if n:
                    raise EncodingError(f"{self.name}: unused dimension {i} is {n}, not zero")
                continue
            if mask >> i & 1:
                if not 0 <= n < ABSENT:
                    raise EncodingError(f"{self.name}: register number {n} in dimension {i}")
                out.append(Reg(GPR, n))
            elif n < -1:
                raise EncodingError(f"{self.name}: dimension {n}")
            else:
                out.append(n)
        return tuple(out)

    def describe(self): return "shape"


@dataclass(frozen=True)
class BytesField(Field):
    """`count` small integers (a permutation, a register list): byte 0 = how many, then the bytes.  Value: tuple."""
    count: int = 5
    signed: bool = False

    def spans(self, base):
        return [range(base + self.at, base + self.at + 1 + self.count)]

    def encode(self, frame, base, value):
        if len(value) > self.count:
            raise EncodingError(f"{self.name}: at most {self.count} entries, got {len(value)}")
        frame[base + self.at] = len(value)
        for i, v in enumerate(value):
            if not 0 <= v < 256:
                raise EncodingError(f"{self.name}: entry {v} is outside 0..255")
            frame[base + self.at + 1 + i] = v

    def decode(self, frame, base):
        n = frame[base + self.at]
        if n > self.count:
            raise EncodingError(f"{self.name}: {n} entries, at most {self.count}")
        rest = frame[base + self.at + 1 + n: base + self.at + 1 + self.count]
        if any(rest):
            raise EncodingError(f"{self.name}: unused entries are not zero")
        return tuple(frame[base + self.at + 1: base + self.at + 1 + n])

    def describe(self): return "list"


@dataclass(frozen=True)
class RegList(BytesField):
    """A list of general registers `[rA, rB]`.  Value: tuple of Reg.  dest: written; both: read and written."""
    dest: bool = False
    both: bool = False

    def encode(self, frame, base, value):
        for v in value:
            if not isinstance(v, Reg) or v.bank != GPR or v.index == ABSENT:
                raise EncodingError(f"{self.name}: {v} is not a general register")
        super().encode(frame, base, tuple(v.index for v in value))

    def decode(self, frame, base):
        regs = super().decode(frame, base)
        if ABSENT in regs:
            raise EncodingError(f"{self.name}: R255 in a register list")
        return tuple(Reg(GPR, n) for n in regs)

    def describe(self): return "register list"


@dataclass(frozen=True)
class SymbolField(Field):
    """A u64 that text gives as `"string"`, `@name`, `@model:tensor`, `&name` or an integer: an offset that the linker
    fills through a relocation.

    what: "string" (offset of a length-prefixed UTF-8 string in DATA), "value" (index of a symbol whose value is
    loaded), "address" (64-bit address).  The encoded word is the addend; the relocation names the symbol."""
    what: str = "address"
    width = 8

    def encode(self, frame, base, value):
        if not isinstance(value, int) or not 0 <= value < 2 ** 64:
            raise EncodingError(f"{self.name}: {value!r} is not an unresolved or resolved 64-bit word")
        struct.pack_into("<Q", frame, base + self.at, value)

    def decode(self, frame, base): return struct.unpack_from("<Q", frame, base + self.at)[0]
    def describe(self): return self.what


@dataclass(frozen=True)
class Hidden(Field):
    """Not encoded: a piece of the context's state the instruction reads and writes ("rng", "flags")."""
    state: str = ""

    def spans(self, base): return []


Rd = RegField(slot=0, dest=True)
R1, R2, R3, R4, R5 = (RegField(slot=i) for i in range(1, 6))
R = PayloadReg()
U8, U16, U32, U64 = (Number(fmt=f) for f in "BHIQ")
I8, I16, I32, I64 = (Number(fmt=f) for f in "bhiq")
F16, F32, F64 = Number(fmt="e"), Number(fmt="f"), Number(fmt="d")
Label, Shape = LabelField(), ShapeField()
NO_STRING = 2 ** 64 - 1            # default of an optional Text operand: offset 0 of DATA is a place like any other
Text, SymbolValue, Address = SymbolField(what="string"), SymbolField(what="value"), SymbolField(what="address")
Precision = PrecisionField()
Rng, Flags = Hidden(state="rng"), Hidden(state="flags")


def Enum(words: str, numbers: tuple[int, ...] | None = None, bare: bool = True) -> EnumField:
    """Enum("SUM MEAN MAX")[0]: words in number order, or with explicit numbers."""
    w = tuple(words.split())
    return EnumField(words=w, numbers=numbers or tuple(range(len(w))), bare=bare)


def Priority() -> FlaggedEnum:
    """PRIORITY, or the bare word: GREEN BLUE RED; None when absent."""
    return FlaggedEnum(words=("GREEN", "BLUE", "RED"), numbers=(0, 1, 2), bit=5)


def Flag(bit: int, off_word: str = "") -> FlagField:
    """A FLAGS bit: 2 FUSED_ACT, 3 INPLACE, 4 TRANSPOSE, 5 PRIORITY, 6 ATOMIC, 7 PERSIST."""
    return FlagField(bit=bit, off_word=off_word)


def PayloadFlag(bit: int, off_word: str = "") -> FlagField:
    """A bit of payload byte `[n]`."""
    return FlagField(bit=bit, in_payload=True, off_word=off_word)
