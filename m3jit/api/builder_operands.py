"""How Python values become operands of a table row: the builder's side of `frontend.binding`."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np

from m3jit.errors import UserError
from m3jit.frontend.binding import HEADER, Plan, candidates, describe, key_of, plan, usage
from m3jit.frontend.errors import suggest
from m3jit.isa.extension_rows import ExtensionRow
from m3jit.isa.fields import (GPR, REQUIRED, BytesField, EncodingError, EnumField, Field, FlagField, FloatOrReg,
                              IntOrReg, LabelField, Number, PayloadReg, PrecisionField, Reg, RegField, RegList,
                              ShapeField, SymbolField)
from m3jit.isa.table import Instruction, Op, encode
from m3jit.isa.types import DType, Tensor, numpy_dtype


class BuilderError(UserError):
    """A program that cannot be built; the message says at which Python line, what was expected and how to write it."""
    exit_code = 2


class Unfit(Exception):
    """The operands do not fit this row; another form of the mnemonic may take them."""


@dataclass(eq=False)
class Value:
    """A register of the program being built.  name: None for one that the builder numbers; kind: what it is known to
    hold ("tensor", "int", "float", "state") or None."""
    scope: Any
    bank: int = GPR
    name: str | None = None
    kind: str | None = None
    fixed: Reg | None = None
    assigned: int = 0                   # instructions that write it

    def __repr__(self) -> str:
        return f"<register {self.name or self.fixed or 'R?'}>"

    def __bool__(self) -> bool:
        raise BuilderError("a register has no truth value while the program is built; branch with b.op.COMPARE and "
                           "IF_*")


@dataclass(eq=False)
class Label:
    """A place in the program; name None: local, not among the program's symbols."""
    name: str | None
    index: int | None = None            # number of the instruction it stands before, when placed

    def __repr__(self) -> str:
        return f"<label {self.name or 'local'}>"


@dataclass(eq=False)
class Reference:
    """Something with a name: what `b.data`, `b.string`, `b.model`, `b.tensor` give, or `b.address` of such."""
    kind: str                           # "value", "address", "string"
    name: str
    addend: int = 0

    def __repr__(self) -> str:
        return f"<{'&' if self.kind == 'address' else '@'}{self.name}>"


@dataclass
class Filled:
    """A row with a value for every field (registers as `Value`, labels and symbols unresolved)."""
    row: Op
    args: dict[str, Any] = field(default_factory=dict)
    header: dict[str, int] = field(default_factory=dict)
    wanted: list[Field] = field(default_factory=list)       # destinations the caller gave no register for


def fill(row: Op, args: tuple, options: dict[str, Any], constant: Callable[[Any], Value]) -> Filled:
    """Operands of a call `b.op.NAME(*args, **options)` for the row, or for another form of the mnemonic that they fit.

    constant: makes a register that holds a number or array (used when no form takes it as it is).  BuilderError for the
    nearest form when none fits."""
    first: Unfit | None = None
    for loading in (False, True):
        for form in candidates(row):
            try:
                return _fill(form, args, options, constant if loading else None)
            except Unfit as e:
                first = first or e
    raise BuilderError(f"{first}; usage: {usage(row)}")


def _fill(row: Op, args: tuple, options: dict[str, Any], constant: Callable[[Any], Value] | None) -> Filled:
    p, out = plan(row), Filled(row)
    at = 0
    for value in args:
        at = _place(p, out, value, at, constant)
    for key, value in options.items():
        _option(p, out, key, value, constant)
    for f in row.operands():
        if f.name in out.args:
            continue
        if _destination(f):
            if f.default is REQUIRED:
                out.wanted.append(f)
            out.args[f.name] = None
        elif f.default is REQUIRED and not isinstance(f, FlagField):
            raise Unfit(f"{row.name} needs {describe(f)}")
        else:
            out.args[f.name] = False if f.default is REQUIRED else f.default
    return out


def _destination(f: Field) -> bool:
    return isinstance(f, (RegField, PayloadReg)) and f.dest and not f.both


def _place(p: Plan, out: Filled, value: Any, at: int, constant: Callable[[Any], Value] | None) -> int:
    """Put a positional value into the next field that takes it; a word of an option or flag may stand anywhere."""
    if isinstance(value, str) and value.upper() in p.words and p.words[value.upper()][0].name not in out.args:
        f, setting = p.words[value.upper()]
        out.args[f.name] = setting
        return at
    for i in range(at, len(p.positional)):
        f = p.positional[i]
        if f.name in out.args or _destination(f):
            continue
        if value is None and isinstance(f, RegField) and f.default is not REQUIRED:
            out.args[f.name] = None
            return i + 1
        read = _read(f, value, constant)
        if read is not MISS:
            out.args[f.name] = read
            return i + 1 if not isinstance(f, LabelField) else at
        if f.default is REQUIRED and not isinstance(f, LabelField):
            raise Unfit(f"{out.row.name}: expected {describe(f)}, got {shown(value)}")
    raise Unfit(f"{out.row.name} has no place for {shown(value)}")


def _option(p: Plan, out: Filled, key: str, value: Any, constant: Callable[[Any], Value] | None) -> None:
    name = key.rstrip("_").upper()
    if name in p.header:
        if not isinstance(value, int):
            raise Unfit(f"{out.row.name}: {name} is an integer, got {shown(value)}")
        out.header[HEADER[name].name] = value
        return
    f = p.keys.get(name)
    if f is None and name in p.words and value is True:                # a word as a flag: RED=True
        f, value = p.words[name]
    if f is None:
        known = [*p.keys, *p.header]
        hint = suggest(name, known) or f"its options are {', '.join(known) or 'none'}"
        raise Unfit(f"{out.row.name} has no option {key}; {hint}")
    if f.name in out.args:
        raise Unfit(f"{out.row.name}: {key_of(f)} is given twice")
    if _destination(f) and value is True:
        out.wanted.append(f)
        out.args[f.name] = None
        return
    if value is None and f.default is None:
        out.args[f.name] = None
        return
    read = _read(f, value, constant)
    if read is MISS:
        raise Unfit(f"{out.row.name}: {describe(f)} expected, got {shown(value)}")
    out.args[f.name] = read


MISS = object()


def _read(f: Field, value: Any, constant: Callable[[Any], Value] | None) -> Any:
    """The value as this field keeps it, or MISS when it has the wrong form."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(f, (RegField, PayloadReg)):
        return _register(f, value, constant)
    if isinstance(f, LabelField):
        return value if isinstance(value, Label) or isinstance(value, str) else MISS
    if isinstance(f, SymbolField):
        return _symbol(f, value)
    if isinstance(f, FlagField):
        return bool(value) if isinstance(value, (bool, int)) else MISS
    if isinstance(f, (EnumField, PrecisionField)):
        return _word(f, value)
    if isinstance(f, ShapeField):
        items = (value,) if isinstance(value, int) and not isinstance(value, bool) else value
        fits = isinstance(items, (tuple, list)) and all(isinstance(d, (int, Value)) for d in items)
        return tuple(items) if fits else MISS
    if isinstance(f, RegList):
        return tuple(value) if isinstance(value, (tuple, list)) and all(isinstance(v, Value) for v in value) else MISS
    if isinstance(f, BytesField):
        return tuple(value) if isinstance(value, (tuple, list)) and all(type(v) is int for v in value) else MISS
    if isinstance(value, Value):
        kind = "float" if isinstance(f, FloatOrReg) else "int"
        return value if isinstance(f, IntOrReg) and value.kind in (None, kind) else MISS
    return _number(f, value)


def _number(f: Field, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return MISS
    floating = isinstance(f, FloatOrReg) or (isinstance(f, Number) and f.is_float)
    if floating:
        return float(value)
    return value if isinstance(value, int) else MISS


def _register(f: Any, value: Any, constant: Callable[[Any], Value] | None) -> Any:
    banks = f.banks if isinstance(f, RegField) else (f.bank,)
    if isinstance(value, Value):
        fits = value.bank in banks and (value.kind is None or f.dest or "any" in f.kinds or value.kind in f.kinds)
        return value if fits else MISS
    if constant is None or f.dest or GPR not in banks or isinstance(value, bool):
        return MISS
    if isinstance(value, (int, float)):
        kind = "int" if isinstance(value, int) else "float"
        if kind not in f.kinds and "any" not in f.kinds:
            return MISS
    elif not isinstance(value, (np.ndarray, Tensor)) or not {"tensor", "any"} & set(f.kinds):
        return MISS
    return constant(value)


def _symbol(f: SymbolField, value: Any) -> Any:
    if isinstance(value, str):
        return value if f.what == "string" else MISS
    if isinstance(value, Reference):
        wanted = {"string": ("string",), "value": ("value", "string"), "address": ("address",)}[f.what]
        return value if value.kind in wanted else MISS
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 2 ** 63 else MISS


def _word(f: Any, value: Any) -> Any:
    if isinstance(value, DType):
        value = value.name
    elif isinstance(value, (np.dtype, type)) and not isinstance(value, str):
        try:
            found = numpy_dtype(np.dtype(value).name)
        except TypeError:
            return MISS
        value = found.name if found is not None else value
    if isinstance(value, str) and value.upper() in f.words:
        return value.upper()
    return MISS


def shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check(filled: Filled) -> None:
    """Encode with stand-ins for what is not known yet, so that a value out of range is told at its line."""
    ins = instruction(filled, lambda v: Reg(v.bank, 0), lambda label: 0, lambda ref, f: 0)
    try:
        if isinstance(ins.op, ExtensionRow):
            ins = ins.op.frame(ins)
        encode(ins)
    except EncodingError as e:
        raise BuilderError(f"{e}; usage: {usage(filled.row)}") from None


def instruction(filled: Filled, register: Callable[[Value], Reg], distance: Callable[[Any], int],
                symbol: Callable[[Any, SymbolField], int]) -> Instruction:
    """The instruction, with registers, labels and symbols resolved by the given functions."""
    args: dict[str, Any] = {}
    for f in filled.row.operands():
        v = filled.args[f.name]
        if isinstance(v, Value):
            v = register(v)
        elif isinstance(f, (ShapeField, RegList)):
            v = tuple(register(d) if isinstance(d, Value) else d for d in v)
        elif isinstance(f, LabelField) and not isinstance(v, int):
            v = distance(v)
        elif isinstance(f, SymbolField) and isinstance(v, (str, Reference)):
            v = symbol(v, f)
        args[f.name] = v
    ins = Instruction(filled.row, args, size=filled.row.size)
    for name, value in filled.header.items():
        setattr(ins, name, value)
    return ins
