"""The dot words of the language.

    .text  .data                       sections
    .equ NAME 5                        also NAME .equ 5
    .reg rName R7                      a register's name
    .func name(rIn, rOut)              a function; parameters are R0, R1, ...
    .extern name   .global name        names of other modules; names for other modules
    .import "file.m3b" AS ns           a module; its names are ns.name
    .model NAME "file-or-hash"         a model
    .entry name                        where the program starts (default: its first instruction)
    .loc "file" 12                     source line of the following instructions (`.loc 0`: none)
    .meta key "value"                  a note in the container
    .org 64                            in .data: the next value starts at this offset
"""
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Callable

from m3jit.frontend.errors import suggest
from m3jit.frontend.lexer import Token, unquote
from m3jit.frontend.naming import Place, split_address
from m3jit.frontend.numbers import NumberError
from m3jit.frontend.operand_text import TextError, literal
from m3jit.frontend.pool import STRING_ALIGN
from m3jit.frontend.records import NAME, Import, Symbol, SymbolKind
from m3jit.frontend.scopes import physical
from m3jit.frontend.source_data import MAX_BLOB, TYPES, alignment, parse_blob
from m3jit.frontend.syntax import Statement, Value

if TYPE_CHECKING:
    from m3jit.frontend.assembler import _Assembler


class Directives:
    """What each directive does in the first walk (`declare`) and in the second (`apply`)."""

    def __init__(self, run: "_Assembler"):
        self.run = run
        self.imports: list[Import] = []
        self.meta: dict[str, str] = {}
        self.org: int | None = None
        self.entered: dict[int, str] = {}           # TEXT offset -> the function that starts there
        self.first: dict[str, Callable[[Statement], None]] = {
            ".equ": self._equ, ".reg": self._reg, ".func": self._func, ".extern": self._extern,
            ".global": self._global, ".import": self._import, ".model": self._model, ".entry": self._entry,
            ".meta": self._meta}
        self.second: dict[str, Callable[[Statement], None]] = {
            ".func": self._enter, ".loc": self._loc, ".org": self._org}
        self.sections = {".text": "TEXT", ".data": "DATA"}

    @property
    def known(self) -> list[str]:
        """All dot words."""
        return [*self.sections, *self.first, *self.second, *TYPES, ".str"]

    # -- first walk -----------------------------------------------------------------------------------------------

    def declare(self, s: Statement) -> None:
        """Names of a statement."""
        names = self.run.names
        word = s.head.text.lower() if s.head else ""
        is_data = word in TYPES or word == ".str"
        for label in s.labels:
            if is_data:
                names.declare(label, SymbolKind.STRING if word == ".str" else SymbolKind.DATA)
            elif self.run.section == "DATA":
                self.run.error(label, f"{label.text} names nothing", "in .data a name stands before a typed value")
            else:
                names.declare(label, SymbolKind.LABEL)
        if is_data and len(s.labels) > 1:
            self.run.error(s.labels[1], "a value has one name")
        if word in self.sections:
            self._count(s, 0, 0, "no operands")
            self.run.section = self.sections[word]
        elif word in self.first:
            self.first[word](s)
        elif word.startswith(".") and not is_data and word not in self.second:
            self.run.error(s.head, f"no directive {s.head.text}", suggest(word, self.known))

    def _count(self, s: Statement, low: int, high: int, form: str) -> list[Value]:
        for o in s.operands:
            if o.key:
                raise TextError(Value("word", o.key), f"{s.head.text} takes {form}")
        if not low <= len(s.operands) <= high:
            raise TextError(Value("word", s.head), f"{s.head.text} takes {form}")
        return [o.value for o in s.operands]

    def _word(self, value: Value, what: str) -> Token:
        if value.kind != "word":
            raise TextError(value, f"expected {what}, found {value.text}")
        return value.token

    def _string(self, value: Value, what: str) -> str:
        if value.kind != "string":
            raise TextError(value, f'expected a "{what}", found {value.text}')
        try:
            return unquote(value.token.text)
        except ValueError as e:
            raise TextError(value, str(e)) from None

    def _place(self) -> Place:
        return Place(self.run.names, self.run.scope, self.run.pc)

    def _equ(self, s: Statement) -> None:
        name, value = self._count(s, 2, 2, "a name and a number")
        self.run.names.constant(self._word(name, "a name"), literal(value, self._place()))

    def _reg(self, s: Statement) -> None:
        name, value = self._count(s, 2, 2, "a name and a register")
        token, reg = self._word(name, "a name"), physical(value.text)
        if reg is None:
            raise TextError(value, f"{value.text} is not a register",
                            "registers are R0..R255, V0..V31, S0..S63, SP0..SP18")
        if physical(token.text) or token.text == "_":
            raise TextError(name, f"{token.text} is a register itself")
        self.run.names.pin(token, reg, self.run.scope)

    def _func(self, s: Statement) -> None:
        (name,) = self._count(s, 1, 1, "a name and its parameters: .func name(rA, rB)")
        token = self._word(name, "a name")
        self.run.names.declare(token, SymbolKind.FUNC)
        self.run.scope = self.run.names.open_function(token, s.params or [])

    def _extern(self, s: Statement) -> None:
        for value in self._count(s, 1, 1000, "names"):
            self.run.names.declare(self._word(value, "a name"), SymbolKind.EXTERN)

    def _global(self, s: Statement) -> None:
        for value in self._count(s, 1, 1000, "names"):
            self.run.names.exported[value.text] = self._word(value, "a name")

    def _import(self, s: Statement) -> None:
        path, word, ns = self._count(s, 3, 3, '"file.m3b" AS namespace')
        if self._word(word, "AS").text.upper() != "AS":
            raise TextError(word, f"expected AS, found {word.text}")
        token = self._word(ns, "a namespace")
        if not NAME.match(token.text) or "." in token.text:
            raise TextError(ns, f"{token.text} cannot be a namespace")
        if token.text in self.run.names.namespaces:
            raise TextError(ns, f"{token.text} is already a namespace")
        self.run.names.namespaces.add(token.text)
        self.imports.append(Import(self._string(path, "file.m3b"), token.text))

    def _model(self, s: Statement) -> None:
        name, spec = self._count(s, 2, 2, 'a name and a "file or hash"')
        token = self._word(name, "a name")
        self.run.names.models[token.text] = self._string(spec, "file or hash")
        self.run.names.declare(token, SymbolKind.MODEL)

    def _entry(self, s: Statement) -> None:
        (name,) = self._count(s, 1, 1, "a label")
        if self.run.names.entry_name is not None:
            raise TextError(name, f"the entry is already {self.run.names.entry_name.text}")
        self.run.names.entry_name = self._word(name, "a label")

    def _meta(self, s: Statement) -> None:
        key, value = self._count(s, 2, 2, 'a key and a "value"')
        name = self._string(key, "key") if key.kind == "string" else self._word(key, "a key").text
        self.meta[name] = self._string(value, "value")

    # -- second walk ----------------------------------------------------------------------------------------------

    def apply(self, s: Statement) -> None:
        """Places and bytes of a directive."""
        word = s.head.text.lower()
        if word in self.sections:
            self.run.section = self.sections[word]
        elif word in self.second:
            self.second[word](s)
        elif word == ".str":
            self._str(s)
        elif word in TYPES:
            self._typed(s)

    def _enter(self, s: Statement) -> None:
        if not s.operands:
            return
        name = s.operands[0].value.text
        names = self.run.names
        self.run.scope = names.functions.get(name, self.run.scope)
        names.labels[name] = self.run.pc
        other = self.entered.setdefault(self.run.pc, name)
        if other != name:
            self.run.error(s.head, f"function {other} has no instructions before {name} starts")

    def _loc(self, s: Statement) -> None:
        values = self._count(s, 1, 2, '"file" line, or 0')
        line = values[-1]
        try:
            number = literal(line, self._place()).integer
        except NumberError as e:
            raise TextError(line, str(e)) from None
        if not 0 <= number < 2 ** 31 or (len(values) == 1) != (number == 0):
            raise TextError(line, "a line number from 1 with a file, or 0 alone")
        self.run.loc = (self._string(values[0], "file"), number) if number else ("", 0)

    def _org(self, s: Statement) -> None:
        (value,) = self._count(s, 1, 1, "an offset")
        try:
            offset = literal(value, self._place()).integer
        except NumberError as e:
            raise TextError(value, str(e)) from None
        data = self.run.names.data
        if self.run.section != "DATA":
            raise TextError(value, ".org belongs to .data")
        if not len(data) <= offset <= MAX_BLOB:
            raise TextError(value, f"offset {offset} is before the end of the data so far ({len(data)}) or over "
                            f"{MAX_BLOB}")
        data.extend(bytes(offset - len(data)))
        self.org = offset

    def _align(self, n: int) -> int:
        data = self.run.names.data
        if self.org != len(data):
            data.extend(bytes(-len(data) % n))
        self.org = None
        return len(data)

    def _str(self, s: Statement) -> None:
        (value,) = self._count(s, 1, 1, 'a "string"')
        self._in_data(s)
        text = self._string(value, "string")
        raw = text.encode("utf-8")
        names = self.run.names
        start = self._align(STRING_ALIGN)
        names.data += len(raw).to_bytes(4, "little") + raw
        names.strings.setdefault(text, start)
        self._name(s, Symbol(SymbolKind.STRING, "", start, 4 + len(raw)))

    def _typed(self, s: Statement) -> None:
        self._in_data(s)
        names, dtype = self.run.names, TYPES[s.head.text.lower()]
        references: list[tuple[int, str, int, Token]] = []

        def address(value: Value, offset: int) -> int:
            references.append((offset, *split_address(value), value.token))
            return 0
        shape, raw = parse_blob(dtype, s, self._place(), self.run.find, address)
        if len(names.data) + len(raw) > MAX_BLOB:
            raise TextError(Value("word", s.head), f"DATA would be over {MAX_BLOB} bytes")
        start = self._align(alignment(dtype, len(raw)))
        names.data += raw
        names.data_references += [(start + o, n, a, t) for o, n, a, t in references]
        self._name(s, Symbol(SymbolKind.DATA, "", start, len(raw), dtype.code, shape))

    def _in_data(self, s: Statement) -> None:
        if self.run.section != "DATA":
            raise TextError(Value("word", s.head), f"{s.head.text} outside .data")

    def _name(self, s: Statement, symbol: Symbol) -> None:
        if s.labels:
            self.run.names.blobs[s.labels[0].text] = replace(symbol, name=s.labels[0].text)
