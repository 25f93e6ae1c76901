"""Operands of a statement to fields of a table row, by position, key and bare word; and back.

Positional: registers, labels, references, shapes and lists, mandatory numbers, and what the row names in
`Op.positional`, in parameter order, registers first.  An operand skips optional fields that do not take its form; a
label may stand anywhere.  Words of enums and flags stand bare when only one field of the row knows them, or when the
row names all those fields as positional (then in their order).  Everything has a key.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from m3jit.frontend.errors import suggest
from m3jit.frontend.operand_text import Names, Scope, TextError, codec, is_register
from m3jit.frontend.syntax import Operand, Statement, Value
from m3jit.isa.fields import (REQUIRED, BytesField, EnumField, Field, FlagField, LabelField, Number, PayloadReg,
                              PrecisionField, RegField, ShapeField, SymbolField)
from m3jit.isa.table import BY_NAME, NO_DEADLINE, Instruction, Op

HEADER = {"LAMPORT": Number(name="lamport", fmt="Q", default=0),
          "DEADLINE": Number(name="deadline", fmt="Q", default=NO_DEADLINE),
          "EXT": Number(name="ext", fmt="Q", default=0)}


def key_of(field: Field) -> str:
    """The key an operand is written with: `from_` is FROM."""
    return field.name.rstrip("_").upper()


@dataclass(frozen=True)
class Plan:
    """What the text of one row looks like, worked out once."""
    positional: tuple[Field, ...]
    keys: dict[str, Field]                          # field keys and their aliases
    words: dict[str, tuple[Field, object]]          # bare words and what they set
    clashes: dict[str, tuple[tuple[Field, object], ...]]    # words of several fields, in parameter order
    header: dict[str, Field]                        # LAMPORT= DEADLINE= EXT= of 64-byte frames


@lru_cache(maxsize=None)
def plan(row: Op) -> Plan:
    """The text plan of a row."""
    keys, found = {}, {}
    for f in row.operands():
        keys[key_of(f)] = f
        for word, value in _words(f):
            found.setdefault(word, []).append((f, value))
    for alias, key in row.key_aliases.items():
        if key.rstrip("_").upper() in keys:
            keys.setdefault(alias.upper(), keys[key.rstrip("_").upper()])
    words = {w: hits[0] for w, hits in found.items() if len(hits) == 1}
    clashes = {w: tuple(hits) for w, hits in found.items() if len(hits) > 1}
    header = {k: f for k, f in HEADER.items() if k not in keys} if row.wide and not row.syntax == "escape" else {}
    positional = sorted((f for f in row.operands() if _positional(f, row)), key=lambda f: not isinstance(f, RegField))
    return Plan(tuple(positional), keys, words, clashes, header)


def _words(f: Field):
    if isinstance(f, FlagField):
        yield key_of(f), True
        if f.off_word:
            yield f.off_word.upper(), False
    elif isinstance(f, PrecisionField) or isinstance(f, EnumField) and f.bare:
        for w in f.words:
            yield w, w


def _positional(f: Field, row: Op) -> bool:
    if isinstance(f, (RegField, LabelField, SymbolField, ShapeField, BytesField)) or f.name in row.positional:
        return True
    return f.default is REQUIRED and not isinstance(f, (FlagField, EnumField, PrecisionField))


@dataclass
class Bound:
    """A statement matched with a row: values not read yet."""
    row: Op
    values: dict[str, Value]                        # field name -> value
    words: dict[str, object]                        # set by bare words
    header: dict[str, Value]


def candidates(row: Op) -> list[Op]:
    """A mnemonic's row, then the rows tried when operands do not fit it."""
    out = [row, *(BY_NAME[n] for n in row.forms)]
    immediate = BY_NAME.get(row.name + "I")
    if immediate is not None and immediate not in out:
        out.append(immediate)
    return out


def bind(row: Op, statement: Statement, scope: Scope) -> Bound:
    """Match operands with the row or one of its other forms.  TextError (for the nearest form) when none fits."""
    first: TextError | None = None
    for form in candidates(row):
        try:
            return _bind(form, statement, scope)
        except TextError as e:
            first = first or e
    assert first is not None
    raise first


def _bind(row: Op, statement: Statement, scope: Scope) -> Bound:
    p = plan(row)
    out = Bound(row, {}, {}, {})
    at = 0                                          # next positional field
    for operand in statement.operands:
        if operand.key is not None:
            _keyed(p, out, operand)
            continue
        value = operand.value
        word = value.text.upper() if value.kind == "word" else ""
        if word in p.words and not (is_register(value, scope) and _awaits_register(p, at, out)):
            field, setting = p.words[word]
            _once(out, field, value)
            out.words[field.name] = setting
            continue
        if word in p.clashes:
            field, setting = _which(p, out, word, value)
            out.words[field.name] = setting
            continue
        at = _place(p, out, value, at, scope)
    for f in row.operands():
        if f.default is REQUIRED and f.name not in out.values and f.name not in out.words and \
                not isinstance(f, FlagField):
            where = Value("word", statement.head)
            raise TextError(where, f"{row.name} needs {describe(f)}", f"usage: {usage(row)}")
    return out


def _which(p: Plan, out: Bound, word: str, value: Value) -> tuple[Field, object]:
    """A word several fields know belongs to the first of them not given yet, if the row names them all as
    positional."""
    hits = p.clashes[word]
    if all(f.name in out.row.positional for f, _ in hits):
        free = [hit for hit in hits if hit[0].name not in out.values and hit[0].name not in out.words]
        if free:
            return free[0]
    homes = " or ".join(f"{key_of(f)}={word}" for f, _ in hits)
    raise TextError(value, f"{word} could be several options of {out.row.name}", f"write {homes}")


def _awaits_register(p: Plan, at: int, out: Bound) -> bool:
    return any(isinstance(f, RegField) and f.name not in out.values for f in p.positional[at:])


def _keyed(p: Plan, out: Bound, operand: Operand) -> None:
    key = operand.key.text.upper()
    if key in p.keys:
        field = p.keys[key]
        _once(out, field, Value("word", operand.key))
        out.values[field.name] = operand.value
        return
    if key in p.header:
        out.header[key] = operand.value
        return
    known = [*p.keys, *p.header]
    hint = suggest(key, known) or (f"its options are {', '.join(known)}" if known else "it has none")
    raise TextError(Value("word", operand.key), f"{out.row.name} has no option {operand.key.text}", hint)


def _once(out: Bound, field: Field, value: Value) -> None:
    if field.name in out.values or field.name in out.words:
        raise TextError(value, f"{key_of(field)} is given twice")


def _place(p: Plan, out: Bound, value: Value, at: int, scope: Scope) -> int:
    """Put a positional value; the next position."""
    for i in range(at, len(p.positional)):
        f = p.positional[i]
        if f.name in out.values or not codec(f).accepts(f, value, scope):
            if f.default is REQUIRED and not isinstance(f, LabelField) and f.name not in out.values:
                raise _unfit(p, out, value, f)
            continue
        out.values[f.name] = value
        return i + 1 if not isinstance(f, LabelField) else at
    for f in p.positional[:at]:
        if isinstance(f, LabelField) and f.name not in out.values and codec(f).accepts(f, value, scope):
            out.values[f.name] = value
            return at
    raise _unfit(p, out, value, None)


def _unfit(p: Plan, out: Bound, value: Value, wanted: Field | None) -> TextError:
    name = out.row.name
    if value.kind == "word":
        hint = suggest(value.text, [*p.words, *p.keys, *p.header])
        if hint:
            return TextError(value, f"{name} does not know {value.text}", hint)
    if wanted is None:
        return TextError(value, f"{name} has no place for {value.text}", f"usage: {usage(out.row)}")
    return TextError(value, f"expected {describe(wanted)}, found {value.text}", f"usage: {usage(out.row)}")


def read(bound: Bound, scope: Scope) -> Instruction:
    """The instruction a bound statement means.  TextError at the operand that has no value."""
    row, args = bound.row, {}
    for f in row.operands():
        if f.name in bound.values:
            args[f.name] = codec(f).read(f, bound.values[f.name], scope)
            if args[f.name] is None and f.default is REQUIRED and not getattr(f, "dest", False):
                raise TextError(bound.values[f.name], f"{row.name} needs {describe(f)}; it cannot be absent")
        elif f.name in bound.words:
            args[f.name] = bound.words[f.name]
        else:
            args[f.name] = False if f.default is REQUIRED else f.default
    ins = Instruction(row, args, size=row.size)
    for key, value in bound.header.items():
        field = HEADER[key]
        none = key == "DEADLINE" and value.kind == "word" and value.text.upper() == "NONE"
        setattr(ins, field.name, NO_DEADLINE if none else codec(field).read(field, value, scope))
    return ins


def show(ins: Instruction, names: Names) -> str:
    """The operands of an instruction as text that binds to the same values."""
    p = plan(ins.op)
    parts = [*_show_positional(p, ins, names), *_show_options(p, ins, names)]
    for key, field in p.header.items():
        value = getattr(ins, field.name)
        if value != field.default:
            parts.append(f"{key}={value}")
    return ", ".join(parts)


def _show_positional(p: Plan, ins: Instruction, names: Names) -> list[str]:
    out, pending = [], []
    for f in p.positional:                          # `_` keeps the place of an absent register before a present one
        if isinstance(f, RegField):
            pending.append(codec(f).show(f, ins.args[f.name], names))
            if ins.args[f.name] is not None or f.default is REQUIRED:
                out += pending
                pending = []
    for f in p.positional:
        if isinstance(f, LabelField) and not is_default(f, ins.args[f.name]):
            text = codec(f).show(f, ins.args[f.name], names)
            clash = text.upper() in p.words or text.upper() in p.clashes
            out.append(f"{key_of(f)}={text}" if clash else text)
    return out


def _show_options(p: Plan, ins: Instruction, names: Names) -> list[str]:
    out, bare = [], _bare(p, ins, names)
    for f in bare:
        out.append(codec(f).show(f, ins.args[f.name], names))
    for f in ins.op.operands():
        value = ins.args[f.name]
        if isinstance(f, (RegField, LabelField)) or f in bare or _left_out(f, value, names):
            continue
        if isinstance(f, FlagField):
            default = False if f.default is REQUIRED else f.default
            if value == default:
                continue
            word = key_of(f) if value else f.off_word.upper()
            out.append(word if word in p.words else f"{key_of(f)}={int(value)}")
            continue
        text = codec(f).show(f, value, names)
        word = isinstance(f, (EnumField, PrecisionField)) and text in p.words
        out.append(text if word else f"{key_of(f)}={text}")
    return out


def _left_out(f: Field, value: object, names: Names) -> bool:
    """Whether an operand needs no text: its default, and no relocation that happens to give the same word."""
    if isinstance(f, FlagField) or not is_default(f, value):
        return False
    return not isinstance(f, SymbolField) or codec(f).show(f, value, names).isdigit()


def _bare(p: Plan, ins: Instruction, names: Names) -> list[Field]:
    """Operands that can stand without a key: mandatory ones behind the registers, up to the first optional one."""
    out = []
    for f in p.positional:
        if isinstance(f, (RegField, LabelField)):
            continue
        number = isinstance(f, Number) and f.name in ins.op.positional
        if f.default is not REQUIRED or not (number or isinstance(f, (SymbolField, ShapeField))):
            break
        if isinstance(f, SymbolField):
            first = codec(f).show(f, ins.args[f.name], names)[0]
            if first.isdigit() or first == "&" and f.what == "string":
                break
        out.append(f)
    return out


def is_default(f: Field, value: object) -> bool:
    """Whether leaving the operand out writes the same bytes."""
    if f.default is REQUIRED:
        return False
    given, absent = bytearray(64), bytearray(64)
    f.encode(given, 8, value)
    f.encode(absent, 8, f.default)
    return given == absent


def describe(f: Field) -> str:
    """An operand in words."""
    if isinstance(f, RegField):
        return f"register {f.name}"
    if isinstance(f, PayloadReg):
        return f"{key_of(f)}=register"
    if isinstance(f, (LabelField,)):
        return f"{f.name} (a label)"
    return f"{key_of(f)}= ({f.describe()})"


def usage(row: Op) -> str:
    """One line: mandatory operands, then optional ones in brackets."""
    p, out = plan(row), []
    for f in sorted(row.operands(), key=lambda f: not isinstance(f, RegField)):
        if isinstance(f, (RegField, LabelField)):
            text = "rD" if f.name == "rd" else f.name.rstrip("_")
        elif isinstance(f, FlagField):
            text = key_of(f)
        else:
            text = f"{key_of(f)}={f.describe()}"
        required = f.default is REQUIRED and not isinstance(f, FlagField)
        out.append(text if required else f"[{text}]")
    return f"{row.name} {', '.join(out)}".rstrip() + (" [LAMPORT=] [DEADLINE=] [EXT=]" if p.header else "")
