"""`.m3asm` text to a program: all errors of a source in one run.

Three walks over the statements: names (labels, constants, registers pinned), places (rows, sizes, data), bytes.  No
mnemonic appears here: rows come from the table, their text from `binding`.
"""
from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Iterable

import m3jit
from m3jit.frontend import binding
from m3jit.frontend.directives import Directives
from m3jit.frontend.errors import AssemblyError, SourceError, suggest
from m3jit.frontend.lexer import Source, Token, split, unquote
from m3jit.frontend.naming import NameTable, Place
from m3jit.frontend.operand_text import TextError
from m3jit.frontend.program import Program
from m3jit.frontend.records import Line, patch, reloc_word, required_mask, sort_symbols
from m3jit.frontend.scopes import RegisterScope
from m3jit.frontend.syntax import Statement, parse
from m3jit.isa import extension_rows
from m3jit.isa.escape import escape_length
from m3jit.isa.fields import EncodingError
from m3jit.isa.quirks import QUIRKS
from m3jit.isa.table import BY_NAME, ESCAPES, Instruction, encode, load_table

MAX_SOURCE = 1 << 28               # characters
MAX_ERRORS = 1000                  # a source with more is given up


class _TooMany(Exception):
    """The source has more errors than anyone reads."""


@dataclass
class _Placed:
    """An instruction with its place: what pass three encodes."""
    pc: int
    bound: binding.Bound
    statement: Statement
    scope: RegisterScope
    origin: tuple[str, int]
    tail: bytes = b""


def assemble(text: str, filename: str = "<text>", search: Iterable[str] = (), allow_undefined: bool = False) -> Program:
    """The program of a source text.

    search: folders for FILE= and .import, after the source's own.  allow_undefined: a name nobody defines becomes an
    external one.  AssemblyError holds every error with file, line, column and a suggestion; warnings end up in
    `Program.warnings`.
    """
    load_table()
    if len(text) > MAX_SOURCE:
        raise AssemblyError(
            [SourceError(filename, 1, 1, f"a source of {len(text)} characters; {MAX_SOURCE} are allowed")])
    return _Assembler(text, filename, search, allow_undefined).run()


def assemble_file(path: str, search: Iterable[str] = (), allow_undefined: bool = False) -> Program:
    """The program of a source file (UTF-8).  As `assemble`, and OSError when the file cannot be read."""
    with open(path, "rb") as f:
        raw = f.read()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        column = e.start - (raw.rfind(b"\n", 0, e.start) + 1) + 1
        raise AssemblyError([SourceError(str(path), line, column, f"byte 0x{raw[e.start]:02x} is not UTF-8",
                                         hint="save the file as UTF-8")]) from None
    return assemble(text.replace("\r\n", "\n"), str(path), search, allow_undefined)


class _Assembler:
    """One run over one source."""

    def __init__(self, text: str, filename: str, search: Iterable[str], allow_undefined: bool):
        self.source: Source = split(text, filename)
        self.origin = filename.encode("utf-8", "replace").decode()        # the source map holds UTF-8
        here = os.path.dirname(os.path.abspath(filename)) if not filename.startswith("<") else os.getcwd()
        self.search = [here, *search]
        self.errors: list[SourceError] = []
        self.warnings: list[SourceError] = []
        self.names = NameTable(self, allow_undefined)
        self.directives = Directives(self)
        self.files: list[str] = []                         # found for FILE=
        self.placed: list[_Placed] = []
        self.section = "TEXT"
        self.scope = self.names.main
        self.pc = 0
        self.loc: tuple[str, int] | None = None

    def error(self, token: Token | None, message: str, hint: str = "") -> None:
        """Note an error."""
        self.errors.append(self.source.error(token, message, hint))
        if len(self.errors) >= MAX_ERRORS:
            self.errors.append(self.source.error(token, f"more than {MAX_ERRORS - 1} errors; the rest is not listed"))
            raise _TooMany

    def warn(self, token: Token, message: str, hint: str = "") -> None:
        """Note a warning."""
        self.warnings.append(self.source.error(token, message, hint, severity="warning"))

    def find(self, name: str) -> str | None:
        """A file beside the source or in the search folders."""
        for folder in self.search:
            path = os.path.join(folder, name)
            if name and "\0" not in name and os.path.isfile(path):
                self.files.append(path)
                return path
        return None

    def run(self) -> Program:
        try:
            return self._run()
        except _TooMany:
            raise AssemblyError(self.errors, self.warnings) from None

    def _run(self) -> Program:
        statements = list(parse(self.source))
        self.errors += self.source.errors[:MAX_ERRORS]
        for walk in (self.directives.declare, self._place):
            self.section, self.scope, self.pc, self.loc = "TEXT", self.names.main, 0, None
            for s in statements:
                try:
                    walk(s)
                except TextError as e:
                    self.error(e.value.token, e.message, e.hint)
        self.names.allocate()
        program = self._finish(self._encode())
        if self.errors:
            raise AssemblyError(self.errors, self.warnings)
        from m3jit.frontend.warnings import check
        check(program, [(p.pc, p.statement) for p in self.placed], self)
        program.warnings = self.warnings
        return program

    # -- second walk: rows and places -----------------------------------------------------------------------------

    def _place(self, s: Statement) -> None:
        for label in s.labels:
            if self.section == "TEXT":
                self.names.labels[label.text] = self.pc
        if s.head is None:
            return
        if s.head.text.startswith("."):
            self.directives.apply(s)
            return
        if self.section == "DATA":
            self.error(s.head, f"{s.head.text} in .data", "instructions belong after .text")
            return
        row = BY_NAME.get(s.head.text.upper()) or extension_rows.ROWS.get(s.head.text.upper())
        if row is None:
            known = [*BY_NAME, *extension_rows.ROWS]
            self.error(s.head, f"no mnemonic {s.head.text}", suggest(s.head.text.upper(), known))
            return
        place = Place(self.names, self.scope, self.pc)
        named = isinstance(row, extension_rows.ExtensionRow)
        quirk = QUIRKS.get(row.syntax) if not named else None
        tail = self._tail(s, quirk.tail) if quirk and quirk.tail else b""
        bound = binding.bind(row, s, place)
        self.names.note_registers([o.value for o in s.operands], self.scope)
        origin = self.loc or (self.origin, s.head.line)
        self.placed.append(_Placed(self.pc, bound, s, self.scope, origin, tail))
        self.pc += escape_length(row.code, len(tail)) if row.code in ESCAPES and not named else bound.row.size

    def _tail(self, s: Statement, key: str) -> bytes:
        """Take `PAYLOAD="hex"` out of the operands."""
        mine = [o for o in s.operands if o.key and o.key.text.upper() == key]
        s.operands = [o for o in s.operands if o not in mine]
        if not mine:
            return b""
        if len(mine) > 1 or mine[0].value.kind != "string":
            raise TextError(mine[-1].value, f'{key}= takes one string of hexadecimal digits')
        try:
            return bytes.fromhex(unquote(mine[0].value.token.text))
        except ValueError:
            raise TextError(mine[0].value, f"{key}= takes hexadecimal digits, two for a byte") from None

    # -- third walk: bytes ----------------------------------------------------------------------------------------

    def _encode(self) -> bytearray:
        out = bytearray()
        for p in self.placed:
            place = Place(self.names, p.scope, p.pc, p.bound.row)
            try:
                ins: Instruction = binding.read(p.bound, place)
                ins.tail = p.tail
                frame = encode(ins.op.frame(ins) if isinstance(ins.op, extension_rows.ExtensionRow) else ins)
            except TextError as e:
                self.error(e.value.token, e.message, e.hint)
                continue
            except EncodingError as e:
                self.error(p.statement.head, str(e))
                continue
            out += frame
        return out

    def _finish(self, text: bytearray) -> Program:
        data = self.names.data_with_strings()
        symbols, relocs = self.names.symbols(len(text)), self.names.relocs
        if self.errors:
            return Program(name=self.source.file)
        symbols, relocs = sort_symbols(symbols, relocs)
        for r in relocs:
            patch(text if r.section == "TEXT" else data, r, reloc_word(r, symbols))
        lines: list[Line] = []
        for p in self.placed:
            if ((lines[-1].file, lines[-1].line) if lines else ("", 0)) != p.origin:
                lines.append(Line(p.pc, *p.origin))
        self.directives.meta.setdefault("producer", f"m3jit {m3jit.__version__}")
        program = Program(bytes(text), bytes(data), symbols, relocs, lines, self.directives.imports,
                          self.directives.meta, self.names.entry(), name=self.source.file, files=self.files)
        program.required = required_mask(i for _, i in program.instructions)
        return program
