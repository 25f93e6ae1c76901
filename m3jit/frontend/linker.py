"""Several programs to one.

TEXT and DATA are put one after the other; a name one program declares `.extern` and another exports becomes that
code or value; `ns.name` of an `.import` is looked up among the exports of that module.  Names nobody exports stay
local: when two modules use one name for different things, the later one gets `.2`, `.3` ... behind it.  Named S
registers belong to the whole program: one name is one register, and a later module's other names move to registers
nobody uses.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Iterable

from m3jit.frontend.cfg import registers_of
from m3jit.frontend.errors import ContainerError, LinkError, suggest
from m3jit.frontend.pool import StringPool, named_strings, pool_start
from m3jit.frontend.program import Program, load
from m3jit.frontend.records import (NO_SYMBOL, Import, Line, Reloc, RelocKind, Symbol, SymbolKind, patch, reloc_word,
                                    required_mask, sort_symbols)
from m3jit.isa.fields import BANK_SIZES, STATE, Reg
from m3jit.isa.table import encode

ALIGN = 64                         # of each module's part of DATA
MAX_MODULES = 1000
PLACED = {SymbolKind.LABEL: "text", SymbolKind.FUNC: "text", SymbolKind.DATA: "data", SymbolKind.STRING: "data"}


@dataclass
class _Module:
    """A program with its place in the result.  namespaces: prefix -> index of the imported module."""
    program: Program
    text: int = 0
    data: int = 0
    namespaces: dict[str, int] = field(default_factory=dict)
    index: list[int] = field(default_factory=list)       # its symbols -> symbols of the result
    pool: int | None = None                              # where its strings without names start
    states: dict[int, int] = field(default_factory=dict)  # its named S registers -> those of the result


def link(programs: Iterable[Program], search: Iterable[str] = (), allow_undefined: bool = False) -> Program:
    """One program of several; the first one's entry starts it.

    search: folders for imported files, after the importing program's own.  LinkError holds every problem: names nobody
    defines (unless allow_undefined), names exported twice, imports that cannot be read.
    """
    return _Linker(list(programs), list(search), allow_undefined).run()


class _Linker:
    """One run."""

    def __init__(self, programs: list[Program], search: list[str], allow_undefined: bool):
        if not programs:
            raise LinkError(["nothing to link: give at least one program"])
        self.modules = [_Module(p) for p in programs]
        self.search, self.allow_undefined = search, allow_undefined
        self.problems: list[str] = []
        self.symbols: list[Symbol] = []
        self.relocs: list[Reloc] = []
        self.main: set[object] = set()                     # names and numbers of registers of the main program
        self.states: dict[str, int] = {}                   # named S registers of the result
        self.states_used: set[int] = set()

    def run(self) -> Program:
        self._load_imports()
        if self.problems:
            raise LinkError(self.problems)
        text, data, lines = self._lay_out()
        exports = self._exports()
        self._merge_symbols(exports)
        self._merge_relocs(data)
        if self.problems:
            raise LinkError(self.problems)
        symbols, relocs = sort_symbols(self.symbols, self.relocs)
        for r in relocs:
            patch(text if r.section == "TEXT" else data, r, reloc_word(r, symbols))
        relocs = [r for r in relocs if r.kind != RelocKind.BRANCH or symbols[r.symbol].kind == SymbolKind.EXTERN]
        first = self.modules[0].program
        meta = {k: v for m in reversed(self.modules) for k, v in m.program.meta.items()}
        optional = 0
        for m in self.modules:
            optional |= m.program.optional
        out = Program(bytes(text), bytes(data), symbols, relocs, lines, [], meta, first.entry, optional=optional,
                      name=first.name, files=[f for m in self.modules for f in (m.program.name, *m.program.files)])
        out.required = required_mask(i for _, i in out.instructions)
        return out

    # -- modules --------------------------------------------------------------------------------------------------

    def _load_imports(self) -> None:
        known: dict[str, int] = {}
        at = 0
        while at < len(self.modules):
            module = self.modules[at]
            for imp in module.program.imports:
                path = self._find(imp, module.program)
                if path is None:
                    self.problems.append(f"{module.program.name}: .import {imp.path}: no such file beside it or in the "
                                         "search folders")
                    continue
                if path not in known and len(self.modules) < MAX_MODULES:
                    known[path] = len(self.modules)
                    loaded = self._load(path)
                    if loaded is None:
                        continue
                    self.modules.append(_Module(loaded))
                if path in known and known[path] < len(self.modules):
                    module.namespaces[imp.namespace] = known[path]
            at += 1

    def _find(self, imp: Import, program: Program) -> str | None:
        here = os.path.dirname(os.path.abspath(program.name)) if not program.name.startswith("<") else os.getcwd()
        for folder in (here, *self.search):
            path = os.path.abspath(os.path.join(folder, imp.path))
            if "\0" not in path and os.path.isfile(path):
                return path
        return None

    def _load(self, path: str) -> Program | None:
        try:
            return load(path)
        except (ContainerError, OSError) as e:
            self.problems.append(str(e))
            return None

    def _lay_out(self) -> tuple[bytearray, bytearray, list[Line]]:
        text, data, lines = bytearray(), bytearray(), []
        for m in self.modules:
            m.pool = None if any(r.symbol == NO_SYMBOL and r.kind == RelocKind.ADDRESS for r in m.program.relocs) else \
                pool_start(m.program)              # an address into DATA without a name must keep its place
            data += bytes(-len(data) % ALIGN) if m.program.data[:m.pool] else b""
            m.text, m.data = len(text), len(data)
            text += self._place_states(m)
            data += m.program.data[:m.pool]
            mine = [e._replace(pc=e.pc + m.text) for e in m.program.lines]
            if m.program.text and (not mine or mine[0].pc != m.text):
                mine.insert(0, Line(m.text, "", 0))        # no line known up to the first entry
            for e in mine:
                if (lines[-1][1:] if lines else ("", 0)) != e[1:]:
                    lines.append(e)
        return text, data, lines

    def _place_states(self, m: _Module) -> bytes:
        """A module's TEXT with its named S registers moved out of the way of those before it."""
        named = {s.register.index: s.name for s in m.program.symbols
                 if s.kind == SymbolKind.REGISTER and s.register.bank == STATE}
        mine = {r.index for _, ins in m.program.instructions for part in registers_of(ins) for r in part
                if r.bank == STATE}
        m.states = {n: self.states[name] for n, name in named.items() if name in self.states}
        taken = self.states_used | (mine - set(named)) | set(m.states.values())
        for n, name in named.items():
            if n in m.states:
                continue
            place = n if n not in taken else next((i for i in range(BANK_SIZES[STATE]) if i not in taken), None)
            if place is None:
                self.problems.append(f"{m.program.name}: no S register is left for {name}")
                place = n
            m.states[n] = self.states[name] = place
            taken.add(place)
        self.states_used |= {m.states.get(n, n) for n in mine} | set(m.states.values())
        if all(a == b for a, b in m.states.items()):
            return m.program.text
        out = bytearray(m.program.text)
        for pc, ins in m.program.instructions:
            moved = {f.name: Reg(STATE, m.states.get(r.index, r.index)) for f in ins.op.registers()
                     if (r := ins.args[f.name]) is not None and r.bank == STATE}
            if moved:
                out[pc:pc + ins.size] = encode(replace(ins, args={**ins.args, **moved}))
        return bytes(out)

    # -- symbols --------------------------------------------------------------------------------------------------

    def _exports(self) -> dict[str, tuple[int, int]]:
        """Exported name -> (module, symbol)."""
        out: dict[str, tuple[int, int]] = {}
        imported = {i for m in self.modules for i in m.namespaces.values()}
        for i, m in enumerate(self.modules):
            for j, s in enumerate(m.program.symbols):
                if not s.exported:
                    continue
                if s.name in out and i not in imported:
                    first = self.modules[out[s.name][0]].program.name
                    self.problems.append(f"{m.program.name}: {s.name} is exported by {first} too; rename one, or "
                                         "import "
                                         "the module under a namespace")
                out.setdefault(s.name, (i, j))
        return out

    def _merge_symbols(self, exports: dict[str, tuple[int, int]]) -> None:
        used: set[str] = set()
        shared: dict[tuple, int] = {}
        for i, m in enumerate(self.modules):
            renamed = {s.name: self._rename(s, used, i) for s in m.program.symbols
                       if s.kind in PLACED or s.kind == SymbolKind.MODEL}
            for s in m.program.symbols:
                m.index.append(-1 if s.kind == SymbolKind.EXTERN else self._add(m, i, s, renamed, shared))
        for i, m in enumerate(self.modules):
            for j, s in enumerate(m.program.symbols):
                if s.kind == SymbolKind.EXTERN:
                    m.index[j] = self._resolve(m, s.name, exports, shared)

    def _rename(self, s: Symbol, used: set[str], module: int) -> str:
        name, n = s.name, 2
        if s.kind == SymbolKind.MODEL and any(o.kind == SymbolKind.MODEL and o.name == s.name and o.text == s.text
                                              for m in self.modules[:module] for o in m.program.symbols):
            return name                                    # one model, named alike
        while name in used:
            name, n = f"{s.name}.{n}", n + 1
        used.add(name)
        return name

    def _add(self, m: _Module, i: int, s: Symbol, renamed: dict[str, str], shared: dict[tuple, int]) -> int:
        """A symbol of the result; models, their tensors and main registers of equal meaning are one."""
        if s.kind in PLACED:
            base = m.text if PLACED[s.kind] == "text" else m.data
            s = replace(s, name=renamed[s.name], value=s.value + base)
        elif s.kind == SymbolKind.MODEL:
            s = replace(s, name=renamed[s.name])
        elif s.kind == SymbolKind.TENSOR:
            model, _, tensor = s.name.partition(":")
            s = replace(s, name=f"{renamed.get(model, model)}:{tensor}")
        elif s.kind == SymbolKind.REGISTER and s.scope:
            s = replace(s, scope=s.scope + m.text)
        elif s.kind == SymbolKind.REGISTER:
            if s.register.bank == STATE:
                s = replace(s, value=STATE << 8 | m.states[s.register.index])
            if self.main & {s.name, s.value}:
                return -1                                  # the name or the register is spoken for by an earlier module
            self.main |= {s.name, s.value}
        key = (s.kind, s.name, s.scope, s.value)
        if key not in shared:
            shared[key] = len(self.symbols)
            self.symbols.append(s)
        return shared[key]

    def _resolve(self, m: _Module, name: str, exports: dict[str, tuple[int, int]], shared: dict[tuple, int]) -> int:
        namespace, dot, rest = name.partition(".")
        if dot and namespace in m.namespaces:
            other = self.modules[m.namespaces[namespace]]
            for j, s in enumerate(other.program.symbols):
                if s.exported and s.name == rest:
                    return other.index[j]
            names = [s.name for s in other.program.symbols if s.exported]
            self._undefined(m, name, f"{other.program.name} does not export {rest}",
                            suggest(rest, names, f"{namespace}."))
        elif name in exports:
            i, j = exports[name]
            return self.modules[i].index[j]
        else:
            self._undefined(m, name, f"{name} is defined nowhere", suggest(name, exports))
        key = (SymbolKind.EXTERN, name, 0, 0)
        if key not in shared:
            shared[key] = len(self.symbols)
            self.symbols.append(Symbol(SymbolKind.EXTERN, name))
        return shared[key]

    def _undefined(self, m: _Module, name: str, problem: str, hint: str) -> None:
        if not self.allow_undefined:
            self.problems.append(f"{m.program.name}: {problem}" + (f"; {hint}" if hint else "; link the module that "
                                 "exports it, or allow undefined names"))

    def _merge_relocs(self, data: bytearray) -> None:
        known: dict[str, int] = {}
        for m in self.modules:
            for text, at in named_strings(m.program).items():
                known.setdefault(text, m.data + at)
        pool = StringPool(known, len(data))
        for m in self.modules:
            for r in m.program.relocs:
                base = m.text if r.section == "TEXT" else m.data
                moved = r._replace(offset=r.offset + base)
                if r.symbol == NO_SYMBOL and r.kind == RelocKind.STRING and m.pool is not None:
                    self.relocs.append(moved._replace(addend=pool.intern(m.program.string(r.addend))))
                    continue
                if r.symbol == NO_SYMBOL:
                    self.relocs.append(moved._replace(addend=r.addend + m.data))
                    continue
                moved = moved._replace(symbol=m.index[r.symbol])
                self._check(m, moved)
                self.relocs.append(moved)
        data += pool.data

    def _check(self, m: _Module, r: Reloc) -> None:
        """A name must be the kind of thing it is used as."""
        s = self.symbols[r.symbol]
        code = s.kind in (SymbolKind.LABEL, SymbolKind.FUNC)
        if r.kind == RelocKind.BRANCH and not code and s.kind != SymbolKind.EXTERN:
            self.problems.append(f"{m.program.name}: {s.name} is called, but it is {s.kind.name.lower()}")
        if r.kind == RelocKind.VALUE and code:
            self.problems.append(f"{m.program.name}: {s.name} is used as a value, but it is code")
