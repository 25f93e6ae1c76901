"""Each operand kind as text: which tokens it takes, their value, and how a value is printed.

One class per field class of the table; `codec(field)` finds it.  `Scope` is what the assembler knows (names), `Names`
what the disassembler knows.
"""
from __future__ import annotations

from typing import Any, Protocol

from m3jit.frontend.numbers import Literal, NumberError, format_float, parse_number
from m3jit.frontend.syntax import Value
from m3jit.isa.fields import (ABSENT, BANK_LETTERS, GPR, BytesField, EnumField, Field, FlagField, FloatOrReg, IntOrReg,
                              LabelField, Number, PayloadReg, PrecisionField, Reg, RegField, RegList, ShapeField,
                              SymbolField)


class TextError(Exception):
    """An operand that does not fit; `value` is where."""

    def __init__(self, value: Value, message: str, hint: str = ""):
        super().__init__(message)
        self.value, self.message, self.hint = value, message, hint


class Scope(Protocol):
    """Names of a source at one place."""
    def is_register(self, name: str) -> bool: ...
    def is_constant(self, name: str) -> bool: ...
    def register(self, value: Value) -> Reg: ...
    def constant(self, value: Value) -> Literal: ...
    def distance(self, value: Value, field: Field) -> int: ...
    def reference(self, value: Value, field: SymbolField) -> int: ...


class Names(Protocol):
    """Names of a program at one place."""
    def register_name(self, reg: Reg) -> str: ...
    def label_name(self, field: Field, distance: int) -> str: ...
    def reference_text(self, field: Field, word: int) -> str: ...


def literal(value: Value, scope: Scope) -> Literal:
    """The number a token or a constant means."""
    if value.kind == "word":
        return scope.constant(value)
    if value.kind != "number":
        raise TextError(value, f"expected a number, found {value.text}")
    try:
        return parse_number(value.token.text)
    except NumberError as e:
        raise TextError(value, str(e)) from None


def _integer(value: Value, scope: Scope) -> int:
    try:
        return literal(value, scope).integer
    except NumberError as e:
        raise TextError(value, f"{e}; an integer is expected") from None


def is_register(value: Value, scope: Scope) -> bool:
    """A register name or `_`."""
    return value.kind == "word" and (value.text == "_" or scope.is_register(value.text))


def is_number(value: Value, scope: Scope) -> bool:
    """A number token or a constant's name."""
    return value.kind == "number" or value.kind == "word" and scope.is_constant(value.text)


class Codec:
    """Text of one field class."""

    def accepts(self, field: Any, value: Value, scope: Scope) -> bool:
        """Whether the value has a form this field takes (its content may still be wrong)."""
        return is_number(value, scope)

    def read(self, field: Any, value: Value, scope: Scope) -> Any: raise NotImplementedError
    def show(self, field: Any, arg: Any, names: Names) -> str: raise NotImplementedError


class _Register(Codec):
    def accepts(self, field, value, scope): return is_register(value, scope)

    def read(self, field, value, scope):
        if value.text == "_":
            return None
        reg = scope.register(value)
        banks = field.banks if isinstance(field, RegField) else (field.bank,)
        if reg.index == ABSENT and reg.bank == GPR and GPR in banks:
            return None
        if reg.bank not in banks:
            raise TextError(value, f"{value.text} is {'an' if reg.bank in (0, 2, 3) else 'a'} {BANK_LETTERS[reg.bank]} "
                            f"register, {field.name} takes {' or '.join(BANK_LETTERS[b] for b in banks)}")
        return reg

    def show(self, field, arg, names): return "_" if arg is None else names.register_name(arg)


def is_whole(value: Value, scope: Scope) -> bool:
    """An integer: a float there means another form of the instruction."""
    try:
        return is_number(value, scope) and literal(value, scope).whole
    except TextError:
        return True


class _Number(Codec):
    def accepts(self, field, value, scope):
        return is_number(value, scope) if field.is_float else is_whole(value, scope)

    def read(self, field, value, scope):
        if field.is_float:
            try:
                return literal(value, scope).number(field.fmt)
            except NumberError as e:
                raise TextError(value, str(e)) from None
        n, (lo, hi) = _integer(value, scope), field.bounds()
        if not lo <= n <= hi:
            raise TextError(value, f"{value.text} is outside {lo}..{hi}, the range of {field.name} "
                            f"({field.describe()})")
        return n

    def show(self, field, arg, names): return format_float(arg, field.fmt) if field.is_float else str(arg)


class _Enum(Codec):
    def accepts(self, field, value, scope):
        return value.kind == "word" and value.text.upper() in field.words or value.kind == "number"

    def read(self, field, value, scope):
        numbers = getattr(field, "numbers", range(len(field.words)))
        if value.kind == "word" and value.text.upper() in field.words:
            return value.text.upper()
        if is_number(value, scope) and (n := _integer(value, scope)) in numbers:
            return field.words[list(numbers).index(n)]
        from m3jit.frontend.errors import suggest
        raise TextError(value, f"{value.text} is not one of {', '.join(field.words)}", suggest(value.text, field.words))

    def show(self, field, arg, names): return arg


class _Flag(Codec):
    def accepts(self, field, value, scope): return False

    def read(self, field, value, scope):
        n = _integer(value, scope) if is_number(value, scope) else {"TRUE": 1, "FALSE": 0}.get(value.text.upper(), 2)
        if n not in (0, 1):
            raise TextError(value, f"{value.text} is not 0 or 1")
        return bool(n)

    def show(self, field, arg, names): return str(int(arg))


class _Label(Codec):
    def accepts(self, field, value, scope):
        return value.kind == "word" and not is_register(value, scope) or value.kind == "number"

    def read(self, field, value, scope):
        if value.kind == "number":
            return _integer(value, scope)
        if value.kind != "word":
            raise TextError(value, f"expected a label, found {value.text}")
        return scope.distance(value, field)

    def show(self, field, arg, names): return names.label_name(field, arg)


class _IntOrReg(Codec):
    def accepts(self, field, value, scope):
        number = is_number(value, scope) if field.fmt == "f" else is_whole(value, scope)
        return number or is_register(value, scope)

    def read(self, field, value, scope):
        if is_register(value, scope):
            reg = scope.register(value) if value.text != "_" else None
            if reg is None or reg.bank != GPR or reg.index == ABSENT:
                raise TextError(value, f"{value.text} is not a general register R0..R254")
            return reg
        number = Number(name=field.name, fmt=field.fmt)
        return _Number().read(number, value, scope)

    def show(self, field, arg, names):
        if isinstance(arg, Reg):
            return names.register_name(arg)
        return _Number().show(Number(fmt=field.fmt), arg, names)


class _Shape(Codec):
    def accepts(self, field, value, scope): return value.kind in ("list", "shape")

    def read(self, field, value, scope):
        if value.kind == "shape":
            items = [Value("number" if p[0] in "-0123456789" else "word", value.token._replace(text=p))
                     for p in value.text.replace("X", "x").split("x")]
        elif value.kind == "list":
            items = value.items
        else:
            items = [value]
        if len(items) > 5:
            raise TextError(value, f"a shape has at most 5 dimensions, found {len(items)}")
        return tuple(_IntOrReg().read(IntOrReg(name=field.name, fmt="i"), v, scope) for v in items)

    def show(self, field, arg, names):
        return "[" + ", ".join(names.register_name(d) if isinstance(d, Reg) else str(d) for d in arg) + "]"


class _Bytes(Codec):
    def accepts(self, field, value, scope): return value.kind in ("list", "shape")

    def read(self, field, value, scope):
        if value.kind == "shape":
            items = [Value("number", value.token._replace(text=p)) for p in value.text.lower().split("x")]
        else:
            items = value.items if value.kind == "list" else [value]
        if len(items) > field.count:
            raise TextError(value, f"{field.name} has at most {field.count} entries, found {len(items)}")
        return tuple(self._item(v, scope) for v in items)

    def _item(self, v: Value, scope: Scope) -> Any:
        return _Number().read(Number(name="entry", fmt="B"), v, scope)

    def show(self, field, arg, names): return "[" + ", ".join(str(v) for v in arg) + "]"


class _RegList(_Bytes):
    def accepts(self, field, value, scope): return value.kind == "list"

    def _item(self, v, scope):
        return _IntOrReg().read(IntOrReg(name="entry"), v, scope) if is_register(v, scope) else self._refuse(v)

    def _refuse(self, v: Value) -> Any:
        raise TextError(v, f"expected a general register, found {v.text}")

    def show(self, field, arg, names): return "[" + ", ".join(names.register_name(r) for r in arg) + "]"


class _Symbol(Codec):
    FORMS = {"string": ("string",), "value": ("symbol",), "address": ("address",)}

    def accepts(self, field, value, scope):
        return value.kind in self.FORMS[field.what]

    def read(self, field, value, scope):
        if is_number(value, scope):
            return _Number().read(Number(name=field.name, fmt="Q"), value, scope)
        named_string = field.what == "string" and value.kind == "address"     # TEXT=&name, only with its key
        if value.kind not in self.FORMS[field.what] and not named_string:
            form = {"string": 'a "string"', "value": "@name", "address": "&name"}[field.what]
            raise TextError(value, f"expected {form}, found {value.text}")
        return scope.reference(value, field)

    def show(self, field, arg, names): return names.reference_text(field, arg)


_CODECS: dict[type, Codec] = {RegField: _Register(), PayloadReg: _Register(), Number: _Number(), EnumField: _Enum(),
                              PrecisionField: _Enum(), FlagField: _Flag(), LabelField: _Label(), IntOrReg: _IntOrReg(),
                              FloatOrReg: _IntOrReg(), ShapeField: _Shape(), BytesField: _Bytes(), RegList: _RegList(),
                              SymbolField: _Symbol()}


def codec(field: Field) -> Codec:
    """The codec of a field's class, or of the nearest base class that has one."""
    for kind in type(field).__mro__:
        if kind in _CODECS:
            return _CODECS[kind]
    raise TypeError(f"no text form for operand kind {type(field).__name__}")
