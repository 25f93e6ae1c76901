"""Everything a source gives a name to, and how operands find it."""
from __future__ import annotations

from typing import TYPE_CHECKING

from m3jit.frontend.errors import suggest
from m3jit.frontend.lexer import Token, unquote
from m3jit.frontend.numbers import Literal, NumberError, parse_number
from m3jit.frontend.operand_text import TextError
from m3jit.frontend.pool import StringPool
from m3jit.frontend.records import LOCAL_LABEL, NAME, NO_SYMBOL, Reloc, RelocKind, Symbol, SymbolKind
from m3jit.frontend.scopes import IMPLICIT, MAX_PARAMS, RegisterScope, bank_of, physical
from m3jit.frontend.syntax import Value
from m3jit.isa.fields import GPR, VEC, Field, Reg, SymbolField
from m3jit.isa.table import Op

if TYPE_CHECKING:
    from m3jit.frontend.assembler import _Assembler

MAX_ADDEND = 2 ** 31               # of `&name+addend`


class NameTable:
    """Names of one source.  `kinds` says what each name is declared as, before its place is known."""

    def __init__(self, run: "_Assembler", allow_undefined: bool):
        self.run, self.allow_undefined = run, allow_undefined
        self.constants: dict[str, Literal] = {}
        self.kinds: dict[str, SymbolKind] = {}
        self.where: dict[str, Token] = {}
        self.labels: dict[str, int] = {}                   # labels and functions: TEXT offset
        self.params: dict[str, tuple[str, ...]] = {}
        self.blobs: dict[str, Symbol] = {}                 # named data
        self.models: dict[str, str] = {}
        self.exported: dict[str, Token] = {}
        self.namespaces: set[str] = set()
        self.entry_name: Token | None = None
        self.main, self.context = RegisterScope(), RegisterScope()
        self.functions: dict[str, RegisterScope] = {}
        self.first_use: dict[tuple[str | None, str], Token] = {}     # (function, register name) -> where it stands
        self.data = bytearray()
        self.strings: dict[str, int] = {}                  # text -> DATA offset of strings declared in .data
        self.pool = StringPool(self.strings)               # literals of operands
        self._symbols: list[Symbol] = []
        self._index: dict[str, int] = {}
        self.relocs: list[Reloc] = []
        self.data_references: list[tuple[int, str, int, Token]] = []

    def declare(self, token: Token, kind: SymbolKind) -> None:
        """Note a name; a second definition or a misleading name is an error."""
        name = token.text
        if not NAME.match(name) or name == "_":
            self.run.error(token, f"{name} cannot be a name", "names are letters, digits, _ and .")
        elif physical(name) or IMPLICIT.match(name):
            self.run.error(token, f"{name} looks like a register and cannot be a {kind.name.lower()}")
        elif LOCAL_LABEL.match(name) and kind != SymbolKind.LABEL:
            self.run.error(token, f"{name} is a form kept for local labels")
        elif name in self.kinds or name in self.constants:
            first = self.where[name]
            self.run.error(token, f"{name} is already defined in line {first.line}")
        else:
            self.kinds[name], self.where[name] = kind, token

    def constant(self, token: Token, value: Literal) -> None:
        """Define a constant."""
        if token.text in self.kinds or token.text in self.constants:
            self.run.error(token, f"{token.text} is already defined in line {self.where[token.text].line}")
        elif physical(token.text) or IMPLICIT.match(token.text) or not NAME.match(token.text):
            self.run.error(token, f"{token.text} cannot name a constant", "it looks like a register")
        else:
            self.constants[token.text], self.where[token.text] = value, token

    # -- registers ------------------------------------------------------------------------------------------------

    def scope_of(self, bank: int, scope: RegisterScope) -> RegisterScope:
        """Where names of that bank live."""
        return scope if bank in (GPR, VEC) else self.context

    def find_register(self, name: str, scope: RegisterScope) -> Reg | None:
        """The register of a name that is pinned or allocated."""
        return physical(name) or scope.names.get(name) or self.context.names.get(name)

    def is_register(self, name: str, scope: RegisterScope) -> bool:
        """Whether a word is a register at this place."""
        if physical(name) or name in scope.names or name in self.context.names:
            return True
        return bool(IMPLICIT.match(name)) and name not in self.kinds and name not in self.constants

    def pin(self, token: Token, reg: Reg, scope: RegisterScope) -> None:
        """`.reg`."""
        if not IMPLICIT.match(token.text) or bank_of(token.text) != reg.bank:
            letters = ("r", "v", "s", "sp")[reg.bank]
            self.run.error(token, f"{token.text} cannot name {reg}", f"such a name starts with {letters} and a capital")
            return
        problem = self.scope_of(reg.bank, scope).pin(token.text, reg)
        if problem:
            self.run.error(token, problem)

    def open_function(self, token: Token, params: list[Token]) -> RegisterScope:
        """Start a function's register names; its parameters are R0, R1, ..."""
        scope = RegisterScope(token.text)
        if len(params) > MAX_PARAMS:
            self.run.error(params[MAX_PARAMS], f"a function has at most {MAX_PARAMS} parameters")
        for i, p in enumerate(params[:MAX_PARAMS]):
            if not (IMPLICIT.match(p.text) and p.text[0] == "r"):
                self.run.error(p, f"{p.text} cannot name a parameter", "parameters are named rName")
            else:
                self.pin(p, Reg(GPR, i), scope)
        self.params[token.text] = tuple(p.text for p in params)
        self.functions[token.text] = scope
        return scope

    def note_registers(self, values: list[Value], scope: RegisterScope) -> None:
        """Note every register a statement names, so that numbers can be given out."""
        for v in values:
            if v.kind == "list":
                self.note_registers(v.items, scope)
                continue
            parts = v.text.replace("X", "x").split("x") if v.kind == "shape" else [v.text] if v.kind == "word" else []
            for name in parts:
                reg = physical(name)
                if reg is not None:
                    self.scope_of(reg.bank, scope).used.add(reg)
                elif IMPLICIT.match(name) and self.is_register(name, scope):
                    bank = bank_of(name)
                    if name not in self.context.names:
                        self.scope_of(bank, scope).names.setdefault(name, None)
                        self.first_use.setdefault((scope.function, name), v.token)

    def allocate(self) -> None:
        """Give every register name its number."""
        for scope in (self.context, self.main, *self.functions.values()):
            for name in scope.allocate():
                token = self.first_use.get((scope.function, name)) or next(
                    (t for (_, n), t in self.first_use.items() if n == name), None)
                self.run.error(token, f"no register is left for {name}", "use fewer names, or memory")
                scope.names[name] = Reg(bank_of(name), 0)       # said once; the source is refused

    # -- data -----------------------------------------------------------------------------------------------------

    def intern(self, text: str) -> int:
        """Offset in DATA of a string: one declared in .data, or in the pool behind it."""
        self.pool.end = len(self.data)              # complete: strings are asked for in the last walk
        return self.pool.intern(text)

    def data_with_strings(self) -> bytearray:
        """The DATA section; also notes the relocations inside it."""
        for offset, name, addend, token in self.data_references:
            try:
                i = NO_SYMBOL if name == ".data" else self.lookup(Value("word", token), name)
            except TextError as e:
                self.run.error(token, e.message, e.hint)
            else:
                self.relocs.append(Reloc("DATA", offset, RelocKind.ADDRESS, i, addend))
        return self.data + self.pool.data

    # -- symbols --------------------------------------------------------------------------------------------------

    def symbol(self, name: str) -> int:
        """Index of a name's symbol, made on first use."""
        if name not in self._index:
            self._index[name] = len(self._symbols)
            kind = self.kinds[name]
            exported = name in self.exported or kind == SymbolKind.FUNC
            if kind in (SymbolKind.LABEL, SymbolKind.FUNC):
                s = Symbol(kind, name, self.labels.get(name, 0), params=self.params.get(name, ()), exported=exported)
            elif kind in (SymbolKind.DATA, SymbolKind.STRING):
                s = self.blobs.get(name) or Symbol(kind, name)
                s = Symbol(kind, name, s.value, s.size, s.dtype, s.shape, exported=exported)
            else:
                s = Symbol(kind, name, text=self.models.get(name, ""))
            self._symbols.append(s)
        return self._index[name]

    def lookup(self, value: Value, name: str) -> int:
        """Symbol index of a name used at `value`; TextError with a suggestion when nobody defines it."""
        if LOCAL_LABEL.match(name):
            raise TextError(value, f"{name} is a local label" if name in self.kinds else f"{name} is not defined",
                            "labels of the form L_<hex> can only be branched to, in their own source")
        if name not in self.kinds:
            if self.allow_undefined or name.partition(".")[0] in self.namespaces:
                self.kinds[name], self.where[name] = SymbolKind.EXTERN, value.token
            else:
                hint = suggest(name, self.kinds) or f"define it, or declare `.extern {name}`"
                raise TextError(value, f"{name} is not defined", hint)
        return self.symbol(name)

    def tensor(self, value: Value, model: str, tensor: str) -> int:
        """Symbol index of `@model:tensor`."""
        if self.kinds.get(model) != SymbolKind.MODEL:
            models = [n for n, k in self.kinds.items() if k == SymbolKind.MODEL]
            raise TextError(value, f"no model {model}", suggest(model, models) or f'declare `.model {model} "file"`')
        name = f"{model}:{tensor}"
        if name not in self._index:
            self._index[name] = len(self._symbols)
            self._symbols.append(Symbol(SymbolKind.TENSOR, name))
        return self._index[name]

    def symbols(self, text_end: int) -> list[Symbol]:
        """All symbols, register names included."""
        for name in self.kinds:
            if not LOCAL_LABEL.match(name):
                self.symbol(name)
        for name, token in self.exported.items():
            if name not in self.kinds or LOCAL_LABEL.match(name):
                self.run.error(token, f".global names {name}, which is not defined", suggest(name, self.kinds))
        out = list(self._symbols)
        for scope in (self.context, self.main, *self.functions.values()):
            if scope.function is not None:
                scope.start = self.labels.get(scope.function, 0)
            out += scope.symbols()
        return out

    def entry(self) -> int:
        """TEXT offset where the program starts."""
        if self.entry_name is None:
            return 0
        name = self.entry_name.text
        if self.kinds.get(name) not in (SymbolKind.LABEL, SymbolKind.FUNC):
            self.run.error(self.entry_name, f".entry names {name}, which is no label", suggest(name, self.labels))
            return 0
        return self.labels.get(name, 0)


class Place:
    """What names mean for one instruction (`operand_text.Scope`).  row: None while only forms are matched."""

    def __init__(self, names: NameTable, scope: RegisterScope, pc: int, row: Op | None = None):
        self.names, self.scope, self.pc, self.row = names, scope, pc, row

    def is_register(self, name: str) -> bool:
        return self.names.is_register(name, self.scope)

    def is_constant(self, name: str) -> bool:
        return name in self.names.constants

    def register(self, value: Value) -> Reg:
        reg = self.names.find_register(value.text, self.scope) if value.kind == "word" else None
        if reg is None:
            hint = suggest(value.text, self.scope.names) if value.kind == "word" else ""
            raise TextError(value, f"{value.text} is not a register",
                            hint or "registers are R0..R255, V0..V31, S0..S63, "
                            "SP0..SP18, or names such as rX")
        return reg

    def constant(self, value: Value) -> Literal:
        try:
            return self.names.constants[value.text]
        except KeyError:
            hint = suggest(value.text, self.names.constants)
            raise TextError(value, f"{value.text} is not a number or a constant", hint) from None

    def distance(self, value: Value, field: Field) -> int:
        if LOCAL_LABEL.match(value.text) and value.text in self.names.labels:
            return self.names.labels[value.text] - self.pc
        i = self.names.lookup(value, value.text)
        s = self.names._symbols[i]
        if s.kind == SymbolKind.EXTERN:
            at = self.row.base + field.at
            self.names.relocs.append(Reloc("TEXT", self.pc + at, RelocKind.BRANCH, i, at))
            return 0
        if s.kind not in (SymbolKind.LABEL, SymbolKind.FUNC):
            raise TextError(value, f"{value.text} is a {s.kind.name.lower()}, not a label")
        return s.value - self.pc

    def reference(self, value: Value, field: SymbolField) -> int:
        at = self.pc + self.row.base + field.at
        if value.kind == "string":
            try:
                text = unquote(value.token.text)
            except ValueError as e:
                raise TextError(value, str(e)) from None
            self.names.relocs.append(Reloc("TEXT", at, RelocKind.STRING, NO_SYMBOL, self.names.intern(text)))
            return 0
        if value.kind == "symbol":
            self.names.relocs.append(Reloc("TEXT", at, RelocKind.VALUE, self._valued(value), 0))
            return 0
        name, addend = split_address(value)
        kind = RelocKind.STRING if field.what == "string" else RelocKind.ADDRESS
        i = NO_SYMBOL if name == ".data" else self.names.lookup(value, name)
        if field.what == "string" and i != NO_SYMBOL and self.names._symbols[i].kind != SymbolKind.STRING:
            raise TextError(value, f"{name} is not a string")
        self.names.relocs.append(Reloc("TEXT", at, kind, i, addend))
        return 0

    def _valued(self, value: Value) -> int:
        name, colon, tensor = value.text[1:].partition(":")
        if colon:
            if tensor.startswith('"'):
                try:
                    tensor = unquote(tensor)
                except ValueError as e:
                    raise TextError(value, str(e)) from None
            return self.names.tensor(value, name, tensor)
        i = self.names.lookup(value, name)
        if self.names._symbols[i].kind in (SymbolKind.LABEL, SymbolKind.FUNC):
            raise TextError(value, f"{name} is code and has no value", f"&{name} is its address")
        return i


def split_address(value: Value) -> tuple[str, int]:
    """`&name+8` -> ("name", 8).  TextError when the distance is too large."""
    text = value.text
    for i, c in enumerate(text):
        if c in "+-" and i:
            try:
                addend = parse_number(text[i:]).integer
            except NumberError as e:
                raise TextError(value, str(e)) from None
            if abs(addend) >= MAX_ADDEND:
                raise TextError(value, f"{text[i:]} is outside -{MAX_ADDEND - 1}..{MAX_ADDEND - 1}, the range of a "
                                "distance from a name")
            return text[1:i], addend
    return text[1:], 0
