"""Random instructions and programs over the whole table, drawn from the operand kinds alone."""
from __future__ import annotations

import math
import random
import struct

from m3jit.frontend.program import Program
from m3jit.frontend.records import Reloc, RelocKind, Symbol, SymbolKind, required_mask, sort_symbols
from m3jit.isa.fields import (ABSENT, BANK_SIZES, GPR, REQUIRED, BytesField, EnumField, Field, FlagField, IntOrReg,
                              LabelField, Number, PayloadReg, PrecisionField, RawF32, Reg, RegField, RegList,
                              ShapeField,
                              SymbolField)
from m3jit.isa.table import ESCAPES, NO_DEADLINE, OPS, Instruction, Op, encode, load_table

load_table()


def operand(f: Field, rng: random.Random, wide: bool = True):
    """A value of an operand: often its default, else anything its kind can hold, edges included."""
    if f.default is not REQUIRED and not isinstance(f, FlagField) and rng.random() < 0.4:
        return f.default
    if isinstance(f, RegField):
        optional = f.default is not REQUIRED or f.dest
        banks = f.banks if wide or f.slot < 4 else f.banks[:1]
        return None if optional and rng.random() < 0.2 else _register(banks, rng)
    if isinstance(f, PayloadReg):
        return None if f.default is None and rng.random() < 0.3 else _register((f.bank,), rng)
    if isinstance(f, IntOrReg):
        return _register((GPR,), rng) if rng.random() < 0.5 else _number(f.fmt, rng)
    if isinstance(f, ShapeField):
        return tuple(_register((GPR,), rng) if rng.random() < 0.3 else rng.choice([-1, 0, 1, 7, 2 ** 31 - 1])
                     for _ in range(rng.randrange(6)))
    if isinstance(f, RegList):
        return tuple(_register((GPR,), rng) for _ in range(rng.randrange(f.count + 1)))
    if isinstance(f, BytesField):
        return tuple(rng.randrange(256) for _ in range(rng.randrange(f.count + 1)))
    if isinstance(f, (EnumField, PrecisionField)):
        return rng.choice(f.words)
    if isinstance(f, FlagField):
        return rng.random() < 0.5
    if isinstance(f, Number):
        return _number(f.fmt, rng)
    if isinstance(f, SymbolField):
        return rng.choice([0, 1, rng.getrandbits(64)])
    if isinstance(f, LabelField):
        return 0
    raise TypeError(f"no samples for operand kind {type(f).__name__}")


def _register(banks, rng: random.Random) -> Reg:
    bank = rng.choice(banks)
    return Reg(bank, rng.randrange(min(BANK_SIZES[bank], ABSENT)))


def _number(fmt: str, rng: random.Random):
    if fmt in "efd":
        bits = rng.getrandbits(8 * struct.calcsize(fmt))
        value = struct.unpack("<" + fmt, bits.to_bytes(struct.calcsize(fmt), "little"))[0]
        if math.isnan(value):
            value = {"f": RawF32(bits), "e": math.nan}.get(fmt, value)
        return rng.choice([value, value, 0.0, -0.0, 0.1, math.inf, -math.inf]) if fmt == "d" else \
            rng.choice([value, value, 0.0, -0.0, 1.0, math.inf, -math.inf])
    bits = 8 * struct.calcsize("<" + fmt)
    low, high = (0, 2 ** bits - 1) if fmt.isupper() else (-2 ** (bits - 1), 2 ** (bits - 1) - 1)
    return rng.choice([low, high, rng.randint(low, high), rng.randint(0, min(9, high))])


def instruction(row: Op, rng: random.Random) -> Instruction:
    """A random instruction of a row; branches go to distance 0 until a program sets them."""
    ins = Instruction(row, {f.name: operand(f, rng, row.wide) for f in row.operands()}, size=row.size)
    if row.code in ESCAPES:
        room = row.size - 32 if ESCAPES[row.code] else rng.choice([0, 8, 32, 40, 200])
        ins.tail = rng.randbytes(rng.choice([0, room // 2, room]))
    elif row.wide:
        if rng.random() < 0.3:
            ins.lamport, ins.deadline, ins.ext = (rng.getrandbits(64) for _ in range(3))
        if rng.random() < 0.3:
            ins.deadline = NO_DEADLINE
    ins.size = len(encode(ins))
    return ins


def program(rng: random.Random, rows: list[Op] | None = None, length: int | None = None) -> Program:
    """A sound random program: labels, functions, names, strings, data, models, relocations, source lines."""
    rows = rows or [rng.choice(OPS) for _ in range(length or rng.randrange(1, 40))]
    code = [instruction(row, rng) for row in rows]
    places, pc = [], 0
    for ins in code:
        places.append(pc)
        pc += ins.size
    p = Program(name="random")
    _names(p, places, rng)
    data = _data(p, rng)
    relocs: list[Reloc] = []
    for at, ins in zip(places, code):
        for f in ins.op.operands():
            if isinstance(f, LabelField) and rng.random() < 0.9:
                ins.args[f.name] = rng.choice(places) - at
            elif isinstance(f, SymbolField) and rng.random() < 0.7:
                _reference(p, f, at + ins.op.base + f.at, ins, relocs, data, rng)
    p.data = bytes(data)
    p.symbols, p.relocs = sort_symbols(p.symbols, relocs)
    _resolve(p, places, code)
    p.text = b"".join(encode(i) for i in code)
    p.entry = rng.choice(places)
    p.required = required_mask(code)
    _lines(p, places, rng)
    p.meta = {"producer": "samples", **({"k": 'quote " and \n newline'} if rng.random() < 0.5 else {})}
    return p


def _names(p: Program, places: list[int], rng: random.Random) -> None:
    for i, at in enumerate(rng.sample(places, min(len(places), rng.randrange(6)))):
        params = tuple(f"rP{j}" for j in range(rng.randrange(4)))
        p.symbols.append(Symbol(SymbolKind.FUNC, f"fn{i}", at, params=params, exported=True))
        pool = rng.sample(range(len(params), ABSENT), rng.randrange(8))
        registers = [*enumerate(params), *((n, f"rN{k}") for k, n in enumerate(pool))]
        p.symbols += [Symbol(SymbolKind.REGISTER, name, n, scope=1 + at) for n, name in registers]
    for i in range(rng.randrange(8)):
        p.symbols.append(Symbol(SymbolKind.LABEL, f"lab.{i}", rng.choice(places), exported=rng.random() < 0.3))
    for k, n in enumerate(rng.sample(range(ABSENT), rng.randrange(30))):
        p.symbols.append(Symbol(SymbolKind.REGISTER, f"rM{k}", n))
    for k, n in enumerate(rng.sample(range(32), rng.randrange(6))):
        p.symbols.append(Symbol(SymbolKind.REGISTER, f"vM{k}", 1 << 8 | n))
        p.symbols.append(Symbol(SymbolKind.REGISTER, f"sM{k}", 2 << 8 | n))
    if rng.random() < 0.5:
        p.symbols.append(Symbol(SymbolKind.MODEL, "net", text='dir/a "b".gguf'))
        p.symbols.append(Symbol(SymbolKind.EXTERN, "lib.run"))


def _data(p: Program, rng: random.Random) -> bytearray:
    from m3jit.isa.types import BOOL, DTYPES
    data = bytearray()
    for i in range(rng.randrange(6)):
        if rng.random() < 0.3:
            data += rng.randbytes(rng.randrange(9)) if rng.random() < 0.3 else bytes(rng.randrange(70))
        if rng.random() < 0.3:
            data += bytes(-len(data) % 4)
            raw = rng.choice(["", "same", "h\u00e9 \"q\" \\ \n \x00", "\U0001f600" * 30]).encode()
            p.symbols.append(Symbol(SymbolKind.STRING, f"text{i}", len(data), 4 + len(raw)))
            data += len(raw).to_bytes(4, "little") + raw
            continue
        dtype = rng.choice(list(DTYPES.values()))
        shape = tuple(rng.choice([0, 1, 2, 3]) for _ in range(rng.randrange(4)))
        if dtype.is_block:
            shape = (*shape[:1], dtype.block * rng.randrange(1, 3))
        size = math.prod(shape) // dtype.block * dtype.nbytes
        raw = rng.randbytes(size)
        if dtype is BOOL:
            raw = bytes(b & 1 for b in raw)
        least = 1 if dtype.is_block else dtype.nbytes
        align = rng.choice([64 if size >= 64 else least, least])
        data += bytes(-len(data) % align)
        p.symbols.append(Symbol(SymbolKind.DATA, f"w{i}", len(data), size, dtype.code, shape))
        data += raw
    return data


def _reference(p: Program, f: SymbolField, at: int, ins: Instruction, relocs: list[Reloc], data: bytearray,
               rng: random.Random) -> None:
    def some(*kinds: SymbolKind) -> int | None:
        found = [i for i, s in enumerate(p.symbols) if s.kind in kinds]
        return rng.choice(found) if found else None
    if f.what == "string":
        named = some(SymbolKind.STRING)
        if named is not None and rng.random() < 0.3:
            relocs.append(Reloc("TEXT", at, RelocKind.STRING, named, 0))
            return
        data += bytes(-len(data) % 4)
        raw = rng.choice(["", "same", "other \t text", "x" * 40]).encode()
        relocs.append(Reloc("TEXT", at, RelocKind.STRING, 0xFFFFFFFF, len(data)))
        data += len(raw).to_bytes(4, "little") + raw
    elif f.what == "value":
        named = some(SymbolKind.DATA, SymbolKind.STRING, SymbolKind.MODEL, SymbolKind.EXTERN, SymbolKind.TENSOR)
        if any(s.kind == SymbolKind.MODEL for s in p.symbols) and rng.random() < 0.4:
            name = "net:" + rng.choice(["blk.0.attn_q.weight", 'odd "name" ; #', "a b"])
            named = next((i for i, s in enumerate(p.symbols) if s.name == name), None)
            if named is None:
                p.symbols.append(Symbol(SymbolKind.TENSOR, name))
                named = len(p.symbols) - 1
        if named is not None:
            relocs.append(Reloc("TEXT", at, RelocKind.VALUE, named, 0))
    else:
        named = some(SymbolKind.DATA, SymbolKind.LABEL, SymbolKind.FUNC, SymbolKind.EXTERN, SymbolKind.STRING)
        if named is not None:
            relocs.append(Reloc("TEXT", at, RelocKind.ADDRESS, named, rng.choice([0, 0, 8, -3])))


def _resolve(p: Program, places: list[int], code: list[Instruction]) -> None:
    """Put every relocation's word into its instruction."""
    from m3jit.frontend.records import reloc_word
    where = {r.offset: r for r in p.relocs}
    for at, ins in zip(places, code):
        for f in ins.op.operands():
            if isinstance(f, SymbolField) and at + ins.op.base + f.at in where:
                ins.args[f.name] = reloc_word(where[at + ins.op.base + f.at], p.symbols)


def _lines(p: Program, places: list[int], rng: random.Random) -> None:
    from m3jit.frontend.records import Line
    last = ("", 0)
    for at in places:
        if rng.random() < 0.6:
            now = rng.choice([("a.m3asm", rng.randrange(1, 9)), ("b \"c\".m3asm", 7), ("", 0)])
            if now != last:
                p.lines.append(Line(at, *now))
                last = now
