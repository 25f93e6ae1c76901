"""A program as source text that assembles to the same TEXT, DATA, SYMBOLS, RELOCS and IMPORTS, byte for byte.

LINES come back through `.loc`, or are left out with strip=True.  Branch targets without a name get a local label
(`L_0040`, the offset), which the assembler does not record.
"""
from __future__ import annotations

import bisect
import re

from m3jit.frontend import binding
from m3jit.frontend.lexer import quote
from m3jit.frontend.pool import STRING_ALIGN, pool_start
from m3jit.frontend.program import Program
from m3jit.frontend.records import NO_SYMBOL, Reloc, RelocKind, Symbol, SymbolKind
from m3jit.frontend.source_data import alignment, format_blob
from m3jit.isa import extension_rows
from m3jit.isa.escape import FIXED
from m3jit.isa.fields import Field, LabelField, Reg
from m3jit.isa.quirks import QUIRKS
from m3jit.isa.table import Instruction
from m3jit.isa.types import BY_CODE

CODE = (SymbolKind.LABEL, SymbolKind.FUNC)
DATA = (SymbolKind.DATA, SymbolKind.STRING)
TENSOR_WORD = re.compile(r"[A-Za-z0-9_./-]+\Z")


def disassemble(program: Program, strip: bool = False, offsets: bool = False) -> str:
    """Source text of a verified program.  strip: without `.loc`; offsets: each instruction's pc in a comment."""
    return Listing(program, strip, offsets).run()


def instruction_text(program: Program, pc: int, ins: Instruction) -> str:
    """One instruction as it would stand in the disassembly (for messages and listings)."""
    return Listing(program).instruction(pc, ins)


class Listing:
    """One listing: `run()` for all of it, `instruction(pc, ins)` for one line.  Also the `operand_text.Names` of the
    instruction at hand (`pc`, `row`)."""

    def __init__(self, p: Program, strip: bool = True, offsets: bool = False):
        self.p, self.strip, self.offsets = p, strip, offsets
        self.code: dict[int, list[Symbol]] = {}
        for s in p.symbols:
            if s.kind in CODE:
                self.code.setdefault(s.value, []).append(s)
        self.functions = sorted(s.value for s in p.symbols if s.kind == SymbolKind.FUNC)
        self.registers: dict[int, dict[Reg, str]] = {}
        for s in p.symbols:
            if s.kind == SymbolKind.REGISTER:
                self.registers.setdefault(s.scope, {})[s.register] = s.name
        self.relocs = {(r.section, r.offset): r for r in p.relocs}
        self.in_data = [r for r in p.relocs if r.section == "DATA"]
        self.generated: set[int] = set()
        self.pc, self.ins = 0, None
        self.literals = pool_start(p) is not None     # strings can stand in the operands

    def run(self) -> str:
        body = self._text()
        return "\n".join([*self._head(), *self._data(), ".text", *body]) + "\n"

    # -- names ----------------------------------------------------------------------------------------------------

    def register_name(self, reg: Reg) -> str:
        i = bisect.bisect_right(self.functions, self.pc) - 1
        own = self.registers.get(1 + self.functions[i] if i >= 0 else 0, {})
        if reg.bank >= 2 and i >= 0:
            name = self.registers.get(0, {}).get(reg)
            return name if name and name not in own.values() else str(reg)
        return own.get(reg) or str(reg)

    def label_name(self, field: Field, distance: int) -> str:
        r = self.relocs.get(("TEXT", self.pc + self.ins.op.base + field.at))
        if r is not None:
            return self.p.symbols[r.symbol].name
        target = self.pc + distance
        named = self.code.get(target)
        if named:
            first = SymbolKind.FUNC if self.ins.op.control == "call" else SymbolKind.LABEL
            return min(named, key=lambda s: s.kind != first).name
        return generated_label(target) if target in self.generated else str(distance)

    def reference_text(self, field: Field, word: int) -> str:
        r = self.relocs.get(("TEXT", self.pc + self.ins.op.base + field.at))
        if r is None:
            return str(word)
        if r.kind == RelocKind.STRING and r.symbol == NO_SYMBOL and self.literals:
            return quote(self.p.string(r.addend))
        if r.kind == RelocKind.VALUE:
            return _value_text(self.p.symbols[r.symbol])
        return self._address_text(r)

    def _address_text(self, r: Reloc) -> str:
        name = ".data" if r.symbol == NO_SYMBOL else self.p.symbols[r.symbol].name
        return f"&{name}" + (f"{r.addend:+d}" if r.addend else "")

    # -- parts ----------------------------------------------------------------------------------------------------

    def _head(self) -> list[str]:
        p = self.p
        out = [f'.meta {quote(k)} {quote(v)}' for k, v in sorted(p.meta.items())]
        out += [f'.model {s.name} {quote(s.text)}' for s in p.symbols if s.kind == SymbolKind.MODEL]
        out += [f'.import {quote(i.path)} AS {i.namespace}' for i in p.imports]
        out += [f'.extern {s.name}' for s in p.symbols if s.kind == SymbolKind.EXTERN]
        out += [f'.global {s.name}' for s in p.symbols if s.exported and s.kind != SymbolKind.FUNC]
        if p.entry:
            named = self.code.get(p.entry)
            out.append(f".entry {named[0].name if named else generated_label(p.entry)}")
            if not named:
                self.generated.add(p.entry)
        out += [f".reg {n} {r}" for r, n in self.registers.get(0, {}).items()]
        return out

    def _text(self) -> list[str]:
        p, out = self.p, []
        starts = {pc for pc, _ in p.instructions}
        for pc, ins in p.instructions:
            for f in ins.op.operands():
                if isinstance(f, LabelField) and not binding.is_default(f, ins.args[f.name]) and \
                        ("TEXT", pc + ins.op.base + f.at) not in self.relocs:
                    target = pc + ins.args[f.name]
                    if target in starts and target not in self.code:
                        self.generated.add(target)
        if p.entry and p.entry not in self.code:
            self.generated.add(p.entry)
        lines = {e.pc: e for e in p.lines}
        if not self.strip and p.instructions and 0 not in lines:
            out.append("    .loc 0")
        for pc, ins in p.instructions:
            out += self._labels(pc)
            if not self.strip and pc in lines:
                e = lines[pc]
                out.append(f"    .loc {quote(e.file)} {e.line}" if e.line else "    .loc 0")
            text = f"    {self.instruction(pc, ins)}"
            out.append(f"{text:<60} ; 0x{pc:04x}" if self.offsets else text)
        return out + self._labels(len(p.text))

    def _labels(self, pc: int) -> list[str]:
        out = []
        names = self.code.get(pc, ())
        for s in names:
            if s.kind == SymbolKind.FUNC:
                out += ["", f".func {s.name}({', '.join(s.params)})"]
                own = self.registers.get(1 + pc, {})
                out += [f".reg {n} {r}" for r, n in own.items() if n not in s.params]
        out += [f"{s.name}:" for s in names if s.kind == SymbolKind.LABEL]
        if pc in self.generated:
            out.append(f"{generated_label(pc)}:")
        return out

    def instruction(self, pc: int, ins: Instruction) -> str:
        """Mnemonic and operands."""
        ins = extension_rows.named(ins) or ins
        self.pc, self.ins = pc, ins
        operands = binding.show(ins, self)
        quirk = QUIRKS.get(ins.op.syntax)
        if quirk and quirk.tail and ins.tail:
            tail = ins.tail.rstrip(b"\0") if ins.op.code in FIXED else ins.tail
            operands += f'{", " if operands else ""}{quirk.tail}="{tail.hex()}"' if tail else ""
        return f"{ins.op.name} {operands}".rstrip()

    # -- data -----------------------------------------------------------------------------------------------------

    def _blobs(self) -> list[Symbol]:
        return sorted((s for s in self.p.symbols if s.kind in DATA), key=lambda s: (s.value, s.size))

    def _data(self) -> list[str]:
        p, end = self.p, 0                          # end: how far the assembler's DATA would reach
        out: list[str] = []
        for s in self._blobs():
            end = self._unnamed(out, end, s.value)
            n = STRING_ALIGN if s.kind == SymbolKind.STRING else alignment(BY_CODE[s.dtype], s.size)
            if end + -end % n != s.value:
                out.append(f".org {s.value}")
            out += self._blob(s)
            end = s.value + s.size
        if not self.literals:
            end = self._unnamed(out, end, len(p.data))
            if end < len(p.data):
                out.append(f".org {len(p.data)}")
        return [".data", *out] if out else []

    def _unnamed(self, out: list[str], start: int, stop: int) -> int:
        """Bytes that no symbol names; zeros at both ends need no text."""
        gap = self.p.data[start:stop]
        first, last = len(gap) - len(gap.lstrip(b"\0")), len(gap.rstrip(b"\0"))
        if first >= last:
            return start
        out += [f".org {start + first}"]
        out += _joined("", ".u8 ", format_blob(BY_CODE[128], (last - first,), gap[first:last], {}))
        return start + last

    def _blob(self, s: Symbol) -> list[str]:
        if s.kind == SymbolKind.STRING:
            return [f"{s.name}: .str {quote(self.p.string(s.value))}"]
        dtype = BY_CODE[s.dtype]
        low, high = (bisect.bisect_left(self.in_data, at, key=lambda r: r.offset) for at in (s.value, s.value + s.size))
        addresses = {r.offset - s.value: self._address_text(r) for r in self.in_data[low:high]}
        lines = format_blob(dtype, s.shape, self.p.data[s.value:s.value + s.size], addresses)
        return _joined(f"{s.name}: ", f".{dtype.name.lower()} ", lines)


def _joined(name: str, kind: str, lines: list[str]) -> list[str]:
    return [name + kind + lines[0], *("    " + line for line in lines[1:])]


def _value_text(s: Symbol) -> str:
    if s.kind != SymbolKind.TENSOR:
        return f"@{s.name}"
    model, _, tensor = s.name.partition(":")
    return f"@{model}:{tensor if TENSOR_WORD.match(tensor) else quote(tensor)}"


def generated_label(pc: int) -> str:
    """The local label of an instruction nobody named."""
    return f"L_{pc:04x}"
