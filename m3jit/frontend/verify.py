"""The verifier: everything a program must satisfy before it runs, all findings at once."""
from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Iterator

from m3jit.frontend.errors import Finding
from m3jit.frontend.records import (LOCAL_LABEL, NAME, NO_SYMBOL, Reloc, RelocKind, Symbol, SymbolKind, reloc_word,
                                    required_mask)
from m3jit.frontend.scopes import IMPLICIT, MAX_PARAMS, bank_of, physical
from m3jit.isa.capabilities import names
from m3jit.isa.fields import ABSENT, BANK_LETTERS, BANK_SIZES, GPR, STATE, EncodingError, LabelField, SymbolField
from m3jit.isa.table import Instruction, decode, load_table
from m3jit.isa.types import BOOL, BY_CODE, I64

if TYPE_CHECKING:
    from m3jit.frontend.program import Program

MAX_FINDINGS = 1000
_WHERE = {RelocKind.BRANCH: "branch", RelocKind.STRING: "string", RelocKind.VALUE: "value",
          RelocKind.ADDRESS: "address"}


def verify(program: "Program") -> list[Finding]:
    """All findings, at most 1000, in order of section; an empty list for a sound program.

    Checked: frame boundaries and operand kinds (decoding), branch targets on instruction starts, the entry, symbols in
    canonical order and within their sections, relocations on operands of their kind with the word they ask for, strings
    within DATA, the source map, and the REQUIRED capabilities.
    """
    load_table()
    out: list[Finding] = []
    for finding in _all(program):
        out.append(finding)
        if len(out) == MAX_FINDINGS:
            break
    return out


class _Facts:
    """What the checks of symbols and relocations look up, gathered once."""

    def __init__(self, p: "Program", starts: dict[int, Instruction]):
        self.p, self.starts = p, starts
        self.functions: dict[int, int] = {}                        # TEXT offset -> how many
        self.registers: dict[int, dict[str, int]] = {}             # scope -> name -> register
        self.named: dict[tuple[int, int], int] = {}                # (scope, register) -> how many names
        self.models: set[str] = set()
        self.used = {r.symbol for r in p.relocs}
        self.integers: set[int] = set()                            # DATA offsets of I64 elements that have relocations
        for s in p.symbols:
            if s.kind == SymbolKind.FUNC:
                self.functions[s.value] = self.functions.get(s.value, 0) + 1
            elif s.kind == SymbolKind.REGISTER:
                self.registers.setdefault(s.scope, {})[s.name] = s.value
                self.named[s.scope, s.value] = self.named.get((s.scope, s.value), 0) + 1
            elif s.kind == SymbolKind.MODEL:
                self.models.add(s.name)
        wanted = sorted(r.offset for r in p.relocs if r.section == "DATA")
        for s in p.symbols if wanted else ():
            if s.kind == SymbolKind.DATA and s.dtype == I64.code:
                low, high = bisect.bisect_left(wanted, s.value), bisect.bisect_left(wanted, s.value + s.size)
                self.integers.update(o for o in wanted[low:high] if (o - s.value) % 8 == 0)


def _all(p: "Program") -> Iterator[Finding]:
    starts: dict[int, Instruction] = {}
    yield from _text(p, starts)
    if p.text and p.entry not in starts or not p.text and p.entry:
        yield Finding("TEXT", p.entry, "the entry is not the start of an instruction")
    complete = sum(i.size for i in starts.values()) == len(p.text)
    if complete:
        need = required_mask(starts.values())
        if need != p.required:
            yield Finding("TEXT", 0, f"REQUIRED names {_bits(p.required)}, the instructions need {_bits(need)}")
    facts = _Facts(p, starts)
    yield from _symbols(facts)
    yield from _relocs(facts)
    yield from _lines(p, starts)
    yield from _imports(p)


def _bits(mask: int) -> str:
    return ", ".join(names(mask)) or "nothing"


def _text(p: "Program", starts: dict[int, Instruction]) -> Iterator[Finding]:
    pc = 0
    while pc < len(p.text):
        try:
            ins = decode(p.text, pc)
        except EncodingError as e:
            yield Finding("TEXT", pc, str(e), p.line_of(pc))
            return                  # what follows has no known boundaries
        starts[pc] = ins
        pc += ins.size
    for pc, ins in starts.items():
        for f in ins.op.operands():
            if isinstance(f, LabelField) and pc + ins.args[f.name] not in starts:
                yield Finding("TEXT", pc, f"{ins.op.name}: {f.name} goes to 0x{pc + ins.args[f.name]:x}, which is not "
                              "the start of an instruction", p.line_of(pc))


def _symbols(v: _Facts) -> Iterator[Finding]:
    p = v.p
    seen: dict[tuple, Symbol] = {}
    last, data_end = None, 0
    for i, s in enumerate(p.symbols):
        problem = _symbol_problem(v, s, i)
        if last is not None and s.order <= last.order:
            problem = problem or f"it stands after {last.name}; symbols have one canonical order"
        key = (s.name, s.scope if s.kind == SymbolKind.REGISTER else None)
        if key in seen:
            problem = problem or "its name is used twice"
        seen[key] = s
        if problem:
            yield Finding("SYMBOLS", i, f"symbol {s.name!r}: {problem}")
        last = s
    blobs = sorted((s for s in p.symbols if s.kind in (SymbolKind.DATA, SymbolKind.STRING)), key=lambda s: s.value)
    for s in blobs:
        if s.value < data_end:
            yield Finding("DATA", s.value, f"{s.name} overlaps the value before it")
        data_end = max(data_end, s.value + s.size)


def _symbol_problem(v: _Facts, s: Symbol, index: int) -> str:
    plain = s.kind not in (SymbolKind.TENSOR, SymbolKind.REGISTER)
    if plain and (not NAME.match(s.name) or s.name == "_" or physical(s.name) or IMPLICIT.match(s.name)):
        return "not a name, or one that looks like a register"
    if LOCAL_LABEL.match(s.name):
        return "a name kept for local labels"
    if s.kind == SymbolKind.TENSOR and index not in v.used:
        return "no instruction names it"
    if s.scope and s.kind != SymbolKind.REGISTER or s.text and s.kind != SymbolKind.MODEL or \
            s.params and s.kind != SymbolKind.FUNC or (s.dtype or s.shape) and s.kind != SymbolKind.DATA:
        return "a field that its kind does not have"
    if s.exported and s.kind not in (SymbolKind.LABEL, SymbolKind.FUNC, SymbolKind.DATA, SymbolKind.STRING):
        return "only code and data are exported"
    return _KINDS[s.kind](v, s)


def _code_problem(v: _Facts, s: Symbol) -> str:
    if s.size or s.value not in v.starts and s.value != len(v.p.text):
        return f"0x{s.value:x} is not the start of an instruction"
    if len(s.params) > MAX_PARAMS or any(not IMPLICIT.match(n) or n[0] != "r" for n in s.params) or \
            len(set(s.params)) != len(s.params):
        return "parameters are distinct names such as rX, at most 12"
    registers = v.registers.get(1 + s.value, {})
    if s.kind == SymbolKind.FUNC:
        if not s.exported:
            return "functions are exported"
        if any(registers.get(n) != i for i, n in enumerate(s.params)):
            return "its parameters are not the registers R0, R1, ... of its scope"
        if v.functions[s.value] > 1:
            return "two functions at one place"
    return ""


def _data_problem(v: _Facts, s: Symbol) -> str:
    p, dtype = v.p, BY_CODE.get(s.dtype)
    if dtype is None:
        return f"dtype {s.dtype} does not exist"
    if s.value > len(p.data) or s.size > len(p.data) - s.value:
        return f"{s.size} bytes at {s.value} are outside the {len(p.data)} bytes of DATA"
    if not dtype.is_block and s.value % dtype.nbytes:
        return f"{dtype.name} at {s.value}, which is not a multiple of {dtype.nbytes}"
    if dtype.is_block and (not s.shape or s.shape[-1] % dtype.block):
        return f"shape {list(s.shape)}; rows of {dtype.name} are multiples of {dtype.block}"
    count = 1
    for d in s.shape:
        count *= d
        if d >= 2 ** 31:
            return f"shape {list(s.shape)}"
    if count // dtype.block * dtype.nbytes != s.size:
        return f"shape {list(s.shape)} of {dtype.name} has another size than {s.size}"
    if dtype is BOOL and p.data[s.value:s.value + s.size].strip(b"\0\1"):
        return "a BOOL element other than 0 and 1"
    return ""


def _string_problem(v: _Facts, s: Symbol) -> str:
    p = v.p
    problem = string_problem(p, s.value)
    if not problem and s.size != 4 + int.from_bytes(p.data[s.value:s.value + 4], "little"):
        problem = f"its size is {s.size}"
    return problem


def string_problem(p: "Program", offset: int) -> str:
    """What is wrong with a string at that place of DATA, or ""."""
    if offset < 0 or offset % 4 or offset + 4 > len(p.data):
        return f"no string can start at {offset} of the {len(p.data)} bytes of DATA"
    n = int.from_bytes(p.data[offset:offset + 4], "little")
    if n > len(p.data) - offset - 4:
        return f"a string of {n} bytes at {offset} runs past the end of DATA"
    try:
        p.data[offset + 4:offset + 4 + n].decode("utf-8")
    except UnicodeDecodeError:
        return f"the string at {offset} is not UTF-8"
    return ""


def _tensor_problem(v: _Facts, s: Symbol) -> str:
    model, colon, tensor = s.name.partition(":")
    if not colon or not tensor or s.value or s.size:
        return "a tensor is named model:tensor"
    if model not in v.models:
        return f"there is no model {model}"
    return ""


def _outside_problem(v: _Facts, s: Symbol) -> str:
    return "it has no place or size of its own" if s.value or s.size else ""


def _register_problem(v: _Facts, s: Symbol) -> str:
    bank, index = s.value >> 8, s.value & 255
    if s.value >> 16 or bank > 3 or index >= BANK_SIZES[bank] or bank == GPR and index == ABSENT or s.size:
        return f"register {s.value:#x} does not exist"
    if not IMPLICIT.match(s.name) or "." in s.name or bank_of(s.name) != bank:
        return f"not a name for {BANK_LETTERS[bank]}{index}; such names start with r, v, s or sp and a capital"
    if s.scope and (bank >= STATE or s.scope - 1 not in v.functions):
        return f"there is no function at 0x{s.scope - 1:x}, or the register is not a function's own"
    return "the register has two names" if v.named[s.scope, s.value] > 1 else ""


_KINDS = {SymbolKind.LABEL: _code_problem, SymbolKind.FUNC: _code_problem, SymbolKind.DATA: _data_problem,
          SymbolKind.STRING: _string_problem, SymbolKind.MODEL: _outside_problem, SymbolKind.TENSOR: _tensor_problem,
          SymbolKind.EXTERN: _outside_problem, SymbolKind.REGISTER: _register_problem}


# -- relocations --------------------------------------------------------------------------------------------------

def _relocs(v: _Facts) -> Iterator[Finding]:
    p, starts = v.p, v.starts
    places: dict[int, tuple[str, int]] = {}
    for pc, ins in starts.items():
        for f in ins.op.operands():
            if isinstance(f, LabelField):
                places[pc + ins.op.base + f.at] = ("branch", pc)
            elif isinstance(f, SymbolField):
                places[pc + ins.op.base + f.at] = (f.what, pc)
    last: tuple = ("", -1)
    for i, r in enumerate(p.relocs):
        order = (r.section != "TEXT", r.offset)
        problem = "relocations are in order of place" if i and order <= last else _reloc_problem(v, r, places)
        if problem:
            yield Finding("RELOCS", i, f"relocation at {r.section}+0x{r.offset:x}: {problem}", p.line_of(r.offset)
                          if r.section == "TEXT" else None)
        last = order


def _reloc_problem(v: _Facts, r: Reloc, places: dict[int, tuple[str, int]]) -> str:
    p = v.p
    if r.symbol != NO_SYMBOL and r.symbol >= len(p.symbols):
        return f"symbol {r.symbol}; there are {len(p.symbols)}"
    s = p.symbols[r.symbol] if r.symbol != NO_SYMBOL else None
    section = p.text if r.section == "TEXT" else p.data
    width = 4 if r.kind == RelocKind.BRANCH else 8
    if r.offset > len(section) - width:
        return f"outside the {len(section)} bytes of the section"
    if r.section == "TEXT":
        what, pc = places.get(r.offset, ("", 0))
        if what != _WHERE[r.kind]:
            return f"a {_WHERE[r.kind]} on {'no operand' if not what else 'an operand that holds a ' + what}"
        if r.kind == RelocKind.BRANCH and r.addend != r.offset - pc:
            return f"addend {r.addend} on a branch; it must be {r.offset - pc}"
    elif r.kind != RelocKind.ADDRESS or r.offset not in v.integers:
        return "in DATA only an element of an I64 value can be an address"
    problem = _target_problem(p, r, s)
    if problem:
        return problem
    word = int.from_bytes(section[r.offset:r.offset + width], "little")
    want = reloc_word(r, p.symbols) % (1 << 8 * width)
    return "" if word == want else f"the word is {word:#x}, it must be {want:#x}"


def _target_problem(p: "Program", r: Reloc, s: Symbol | None) -> str:
    kind = s.kind if s is not None else None
    if r.kind == RelocKind.BRANCH and kind != SymbolKind.EXTERN:
        return "a branch needs a relocation only to another module"
    if r.kind == RelocKind.STRING:
        if kind not in (None, SymbolKind.STRING) or kind is not None and r.addend:
            return "a string relocation names a string, or a place in DATA"
        return string_problem(p, (s.value if s else 0) + r.addend)
    if r.kind == RelocKind.VALUE and (kind in (None, SymbolKind.LABEL, SymbolKind.FUNC,
                                               SymbolKind.REGISTER) or r.addend):
        return "it names nothing that has a value"
    if r.kind == RelocKind.ADDRESS:
        if kind == SymbolKind.REGISTER:
            return "a register has no address"
        if abs(r.addend) >= 2 ** 31:
            return f"addend {r.addend}"
        if s is None and not 0 <= r.addend <= len(p.data):
            return f"{r.addend} is outside DATA"
    return ""


def _lines(p: "Program", starts: dict[int, Instruction]) -> Iterator[Finding]:
    last = None
    for i, e in enumerate(p.lines):
        if e.pc not in starts or last is not None and (e.pc <= last.pc or e[1:] == last[1:]) or \
                e.line >= 2 ** 31 or (e.line == 0) != (e.file == "") or last is None and e.line == 0:
            yield Finding("LINES", i, f"entry for 0x{e.pc:x}, line {e.line}: entries ascend, start at instructions and "
                          "differ from the one before")
        last = e


def _imports(p: "Program") -> Iterator[Finding]:
    seen: set[str] = set()
    for i, imp in enumerate(p.imports):
        if not NAME.match(imp.namespace) or "." in imp.namespace or imp.namespace in seen:
            yield Finding("IMPORTS", i, f"namespace {imp.namespace!r}; namespaces are distinct names without a dot")
        seen.add(imp.namespace)
