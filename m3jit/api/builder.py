"""`Builder`: programs in Python, without assembly text; every instruction is derived from the instruction table.

    b = m3jit.Builder()
    x = b.input("rX")
    y = b.op.MUL(x, x)                    # the destination is a register of its own, returned
    z = b.op.SOFTMAX(y, axis=-1)          # options by key, flags as keyword=True, words as strings
    f = b.compile(outputs=[z])            # or b.build(): the Program
"""
from __future__ import annotations

import os
import sys
from typing import Any, Sequence

import numpy as np

import m3jit
from m3jit.api.builder_operands import (BuilderError, Filled, Label, Reference, Value, check, fill, instruction)
from m3jit.api.builder_registers import Scope, allocate, mentioned
from m3jit.frontend.binding import usage
from m3jit.frontend.errors import suggest
from m3jit.frontend.pool import STRING_ALIGN, StringPool
from m3jit.frontend.program import Program
from m3jit.frontend.records import (LOCAL_LABEL, NAME, NO_SYMBOL, Line, Reloc, RelocKind, Symbol, SymbolKind, patch,
                                    reloc_word, required_mask, sort_symbols)
from m3jit.frontend.scopes import IMPLICIT, MAX_PARAMS, bank_of, physical
from m3jit.frontend.source_data import alignment
from m3jit.isa.extension_rows import ROWS, ExtensionRow
from m3jit.isa.fields import GPR, STATE, LabelField, Reg, SymbolField
from m3jit.isa.table import BY_NAME, Instruction, Op, encode, load_table
from m3jit.isa.types import DType, Tensor

__all__ = ["Builder", "BuilderError", "Label", "Reference", "Value"]


class Instructions:
    """`b.op`: one method for each mnemonic of the table and of the registered extensions."""

    def __init__(self, builder: "Builder"):
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        row = BY_NAME.get(name.upper()) or ROWS.get(name.upper())
        if row is None or name.startswith("_"):
            raise AttributeError(f"no mnemonic {name}; {suggest(name.upper(), [*BY_NAME, *ROWS])}".rstrip("; "))
        builder = self._builder

        def emit(*args: Any, **options: Any) -> Any:
            return builder.emit(row, args, options)
        emit.__name__, emit.__doc__ = row.name, f"{usage(row)}\n\n{row.doc}"
        return emit

    def __dir__(self) -> list[str]:
        return sorted([*BY_NAME, *ROWS])


class Builder:
    """A program under construction.

    Registers come from `input`, `register`, `state` and as results of instructions; numbers are given out when the
    program is built.  A number or array where only a register can stand is loaded into one first.  Instructions note
    the Python line they were written in, so that traps name it.  Every error is a `BuilderError` at its line."""

    def __init__(self, name: str = "<builder>"):
        load_table()
        self.name = name
        self.op = Instructions(self)
        self._items: list[Filled] = []
        self._lines: list[tuple[str, int]] = []
        self._scopes: list[Scope] = []                     # of each instruction
        self._main, self._context = Scope(), Scope()
        self._scope = self._main
        self._functions: dict[str, tuple[Label, tuple[str, ...], Scope]] = {}
        self._labels: dict[str, Label] = {}
        self._exported: set[str] = set()
        self._entry: Label | str | None = None
        self._symbols: dict[str, Symbol] = {}              # data, strings, models, tensors, externs
        self._data = bytearray()
        self._strings: dict[str, int] = {}
        self._constants: dict[tuple, str] = {}
        self._inputs: list[Value] = []
        self.meta: dict[str, str] = {}

    # -- registers ----------------------------------------------------------------------------------------------------
    def input(self, name: str, kind: str | None = None) -> Value:
        """A named register the host sets before the run.  kind: "tensor", "int" or "float" when it is known."""
        value = self.register(name, kind)
        if value not in self._inputs:
            self._inputs.append(value)
        return value

    def register(self, name: str, kind: str | None = None) -> Value:
        """The register of a name (rX, vX, sX), or a numbered one (R7); the same object for the same name."""
        fixed = physical(name)
        if fixed is None and not IMPLICIT.match(name):
            raise self._error(f"{name} cannot name a register; such a name starts with r, v or s and a capital, as rX")
        bank = fixed.bank if fixed is not None else bank_of(name)
        scope = self._scope if bank < STATE else self._context
        if name not in scope.by_name:
            value = scope.by_name[name] = Value(scope, bank, None if fixed is not None else name, kind, fixed)
            scope.mention(value)
        return scope.by_name[name]

    def state(self, name: str) -> Value:
        """A named state register (sKV)."""
        return self.register(name, "state")

    def rename(self, value: Value, name: str) -> Value:
        """Give a result register a name, under which the host finds it; returns it."""
        if value.name is not None or value.fixed is not None:
            raise self._error(f"{value} has a name already; copy it with b.op.MOV({value.name or value.fixed}, rd=...)")
        if not IMPLICIT.match(name) or bank_of(name) != value.bank:
            raise self._error(f"{name} cannot name a register of this bank")
        if name in value.scope.by_name:
            raise self._error(f"{name} already names another register")
        value.name = name
        value.scope.by_name[name] = value
        return value

    def _new(self, bank: int, kind: str | None) -> Value:
        return Value(self._scope if bank < STATE else self._context, bank, None, kind)

    # -- instructions -------------------------------------------------------------------------------------------------
    def emit(self, row: Op, args: tuple = (), options: dict[str, Any] | None = None) -> Any:
        """Append an instruction; gives its destinations: none, one register, or a tuple."""
        try:
            options = {k: self.register(v) if k.startswith("rd") and isinstance(v, str) else v
                       for k, v in (options or {}).items()}
            filled = fill(row, args, options, self._constant)
            check(filled)
        except BuilderError as e:
            raise self._error(str(e)) from None
        return self._append(filled)

    def _append(self, filled: Filled) -> Any:
        known = {v.kind for v, _ in mentioned(filled)}
        for f in filled.wanted:
            kinds = tuple(k for k in f.kinds if k != "null")
            kind = kinds[0] if len(kinds) == 1 and kinds != ("any",) else \
                "tensor" if "tensor" in kinds and "tensor" in known else None
            bank = f.banks[0] if hasattr(f, "banks") else f.bank
            filled.args[f.name] = self._new(bank, kind)
        results = []
        for f in filled.row.operands():
            v = filled.args[f.name]
            if isinstance(v, Value) and (getattr(f, "dest", False) or getattr(f, "both", False)):
                v.assigned += 1
                if not getattr(f, "both", False):
                    results.append(v)
                    if f not in filled.wanted and v.kind not in (None, "state"):
                        v.kind = None                          # assigned again: it may hold something else now
        for v, _ in mentioned(filled):
            if v.scope is not self._scope and v.scope is not self._context:
                raise self._error(f"{v} belongs to another function; pass it as an argument of CALL")
            v.scope.mention(v)
        self._items.append(filled)
        self._lines.append(self._here())
        self._scopes.append(self._scope)
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def const(self, value: Any) -> Value:
        """A register that holds a number, or an array (kept in the program's data)."""
        return self._constant(value)

    def _constant(self, value: Any) -> Value:
        if isinstance(value, (bool, int, float, np.generic)) and not isinstance(value, np.ndarray):
            number = value.item() if isinstance(value, np.generic) else value
            return self.emit(BY_NAME["LOADI"], (int(number) if isinstance(number, bool) else number,))
        tensor = value if isinstance(value, Tensor) else self._tensor(value)
        key = (tensor.dtype.name, tensor.shape, tensor.tobytes())
        name = self._constants.get(key)
        if name is None:
            n = len(self._constants)
            while f"c{n}" in self._symbols:
                n += 1
            name = self._constants[key] = f"c{n}"
            self.data(name, tensor)
        out = self.emit(BY_NAME["LOADI"], (Reference("value", name),))
        out.kind = "tensor"
        return out

    def halt(self) -> None:
        """HALT."""
        self.emit(BY_NAME["HALT"])

    def jump(self, label: Label | str) -> None:
        """JUMP to a label."""
        self.emit(BY_NAME["JUMP"], (label,))

    # -- places -------------------------------------------------------------------------------------------------------
    def label(self, name: str | None = None) -> Label:
        """A label at this place; without a name it is local."""
        return self.place(self.forward(name))

    def forward(self, name: str | None = None) -> Label:
        """A label that is placed later with `place`."""
        if name is None:
            return Label(None)
        self._declare(name, "a label")
        found = self._labels[name] = Label(name)
        return found

    def place(self, label: Label) -> Label:
        """Put a label here."""
        if label.index is not None:
            raise self._error(f"{label} is placed already")
        label.index = len(self._items)
        return label

    def function(self, name: str, params: Sequence[str] = ()) -> tuple[Value, ...]:
        """Start a function: what follows belongs to it, with registers of its own; gives its parameters R0, R1, ..."""
        self._declare(name, "a function")
        if len(params) > MAX_PARAMS:
            raise self._error(f"a function has at most {MAX_PARAMS} parameters, got {len(params)}")
        scope, label = Scope(name), Label(name, len(self._items))
        values = []
        for i, p in enumerate(params):
            if not IMPLICIT.match(p) or p[0] != "r":
                raise self._error(f"{p} cannot name a parameter; parameters are named rName")
            values.append(Value(scope, GPR, p, None, Reg(GPR, i)))
            scope.by_name[p] = values[-1]
            scope.mention(values[-1])
        self._functions[name] = (label, tuple(params), scope)
        self._labels[name], self._scope = label, scope
        return tuple(values)

    def entry(self, label: Label | str) -> None:
        """Where the program starts (default: its first instruction)."""
        self._entry = label

    def export(self, *names: str) -> None:
        """Make names visible to other modules (`.global`)."""
        self._exported.update(names)

    def extern(self, name: str) -> str:
        """A name another module defines; use it as a label, or `address(name)`."""
        self._declare(name, "an external name")
        self._symbols[name] = Symbol(SymbolKind.EXTERN, name)
        return name

    # -- data ---------------------------------------------------------------------------------------------------------
    def data(self, name: str, value: Any, dtype: DType | None = None) -> Reference:
        """A named tensor in the program's data."""
        self._declare(name, "data")
        tensor = value if isinstance(value, Tensor) else self._tensor(value, dtype)
        raw = tensor.tobytes()
        start = self._aligned(alignment(tensor.dtype, len(raw)))
        self._data += raw
        self._symbols[name] = Symbol(SymbolKind.DATA, name, start, len(raw), tensor.dtype.code, tensor.shape)
        return Reference("value", name)

    def string(self, name: str, text: str) -> Reference:
        """A named string in the program's data."""
        self._declare(name, "a string")
        raw = text.encode("utf-8")
        start = self._aligned(STRING_ALIGN)
        self._data += len(raw).to_bytes(4, "little") + raw
        self._strings.setdefault(text, start)
        self._symbols[name] = Symbol(SymbolKind.STRING, name, start, 4 + len(raw))
        return Reference("string", name)

    def model(self, name: str, file_or_hash: str) -> Reference:
        """Name a model; `tensor` gives its weights."""
        self._declare(name, "a model")
        self._symbols[name] = Symbol(SymbolKind.MODEL, name, text=file_or_hash)
        return Reference("value", name)

    def tensor(self, model: Reference, name: str) -> Reference:
        """A tensor of a model."""
        if model.name not in self._symbols or self._symbols[model.name].kind != SymbolKind.MODEL:
            raise self._error(f"{model} is not a model; declare one with b.model")
        full = f"{model.name}:{name}"
        self._symbols.setdefault(full, Symbol(SymbolKind.TENSOR, full))
        return Reference("value", full)

    def address(self, of: Reference | Label | str, offset: int = 0) -> Reference:
        """The 64-bit address of data, a string, a label or an external name."""
        return Reference("address", of if isinstance(of, str) else of.name or "", offset)

    def _tensor(self, value: Any, dtype: DType | None = None) -> Tensor:
        try:
            return Tensor.of(value, dtype)
        except TypeError as e:
            raise self._error(str(e)) from None

    def _aligned(self, n: int) -> int:
        self._data.extend(bytes(-len(self._data) % n))
        return len(self._data)

    def _declare(self, name: str, what: str) -> None:
        if not NAME.match(name) or LOCAL_LABEL.match(name) or physical(name) or IMPLICIT.match(name):
            raise self._error(f"{name!r} cannot name {what}; names are letters, digits, _ and ., and do not look like "
                              f"registers")
        if name in self._labels or name in self._symbols:
            raise self._error(f"{name} is already defined")

    # -- the program -------------------------------------------------------------------------------------------------
    def build(self) -> Program:
        """The program; the builder can go on and build a longer one later."""
        return _Layout(self).program()

    def compile(self, inputs: Sequence[Value | str] | None = None, outputs: Sequence[Value | str] = (),
                **options: Any) -> Any:
        """The program as a function (`m3jit.compile`); inputs default to the `input` registers in their order."""
        layout = _Layout(self)
        program = layout.program()

        def name(v: Value | str) -> str:
            return v if isinstance(v, str) else v.name or str(layout.register(v))
        return m3jit.compile(program, [name(v) for v in (self._inputs if inputs is None else inputs)],
                             [name(v) for v in outputs], **options)

    # -- where -------------------------------------------------------------------------------------------------------
    def _here(self) -> tuple[str, int]:
        """File and line of the caller outside this package."""
        frame = sys._getframe(1)
        inside = os.path.dirname(os.path.abspath(__file__)) + os.sep + "builder"
        while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
            frame = frame.f_back
        return os.path.basename(frame.f_code.co_filename), frame.f_lineno

    def _error(self, message: str) -> BuilderError:
        file, line = self._here()
        prefix = f"{file}:{line}: "
        return BuilderError(message if message.startswith(prefix) else prefix + message)


class _Layout:
    """Places, numbers and bytes of a builder's program."""

    def __init__(self, b: Builder):
        self.b = b
        self.pcs: list[int] = []
        pc = 0
        for item in b._items:
            self.pcs.append(pc)
            pc += item.row.size
        self.end = pc
        for scope in (b._context, b._main, *(s for _, _, s in b._functions.values())):
            allocate(scope, b._items, self.index)
        self.relocs: list[Reloc] = []
        self.symbols: list[Symbol] = []
        self.number: dict[str, int] = {}
        self.pool = StringPool(dict(b._strings), len(b._data))
        self.at, self.item = 0, -1

    def index(self, label: Label | str) -> int | None:
        """Instruction a label stands before; None for external and unplaced ones."""
        found = self.b._labels.get(label) if isinstance(label, str) else label
        return found.index if found is not None else None

    def register(self, v: Value) -> Reg:
        return v.scope.numbers[v]

    def _failed(self, message: str) -> BuilderError:
        file, line = self.b._lines[self.item] if self.item >= 0 else self.b._here()
        return BuilderError(f"{file}:{line}: {message}")

    def program(self) -> Program:
        b = self.b
        text = bytearray()
        instructions = []
        for self.item, filled in enumerate(b._items):
            self.at = self.pcs[self.item]
            ins = instruction(filled, self.register, self.distance, self.symbol_word)
            if isinstance(ins.op, ExtensionRow):
                ins = ins.op.frame(ins)
            text += encode(ins)
            instructions.append(ins)
        self.item = -1
        return self._finish(text, instructions)

    def _finish(self, text: bytearray, instructions: list[Instruction]) -> Program:
        b = self.b
        for name in [*b._labels, *b._symbols]:
            self.symbol(name)
        for name in b._exported:
            if name not in self.number:
                hint = suggest(name, self.number)
                raise self._failed(f"export names {name}, which is not defined" + (f"; {hint}" if hint else ""))
        symbols = [*self.symbols, *self._register_symbols()]
        symbols, relocs = sort_symbols(symbols, self.relocs)
        data = bytearray(b._data + self.pool.data)
        for r in relocs:
            patch(text if r.section == "TEXT" else data, r, reloc_word(r, symbols))
        lines: list[Line] = []
        for pc, origin in zip(self.pcs, b._lines):
            if not lines or (lines[-1].file, lines[-1].line) != origin:
                lines.append(Line(pc, *origin))
        entry = self.place(b._entry) if b._entry is not None else 0
        meta = {"producer": f"m3jit {m3jit.__version__}", **b.meta}
        return Program(bytes(text), bytes(data), symbols, relocs, lines, [], meta, entry,
                       required_mask(instructions), name=b.name)

    def _register_symbols(self) -> list[Symbol]:
        b, out = self.b, []
        for scope in (b._context, b._main, *(s for _, _, s in b._functions.values())):
            start = 0 if scope.function is None else 1 + self.place(scope.function)
            out += [Symbol(SymbolKind.REGISTER, v.name, r.bank << 8 | r.index, scope=start)
                    for v, r in scope.numbers.items() if v.name is not None]
        return out

    # -- names -------------------------------------------------------------------------------------------------------
    def place(self, label: Label | str) -> int:
        """TEXT offset of a label."""
        i = self.index(label)
        if i is None:
            name = label if isinstance(label, str) else label.name
            known = [n for n, x in self.b._labels.items() if x.index is not None]
            hint = suggest(name or "", known)
            raise self._failed(f"label {name or ''} is not placed anywhere" + (f"; {hint}" if hint else
                               "; call b.label(name) or b.place(label) where it belongs"))
        return self.pcs[i] if i < len(self.pcs) else self.end

    def distance(self, label: Label | str) -> int:
        name = label if isinstance(label, str) else label.name
        if name in self.b._symbols and self.b._symbols[name].kind == SymbolKind.EXTERN:
            row = self.b._items[self.item].row
            f = next(f for f in row.operands() if isinstance(f, LabelField))
            at = row.base + f.at
            self.relocs.append(Reloc("TEXT", self.at + at, RelocKind.BRANCH, self.symbol(name), at))
            return 0
        return self.place(label) - self.at

    def symbol(self, name: str) -> int:
        """Index of a name's symbol, made on first use."""
        if name not in self.number:
            b = self.b
            exported = name in b._exported
            if name in b._functions:
                s = Symbol(SymbolKind.FUNC, name, self.place(name), params=b._functions[name][1], exported=True)
            elif name in b._labels:
                s = Symbol(SymbolKind.LABEL, name, self.place(name), exported=exported)
            elif name in b._symbols:
                s = b._symbols[name]
                s = Symbol(s.kind, s.name, s.value, s.size, s.dtype, s.shape, s.text, exported=exported)
            else:
                hint = suggest(name, [*b._labels, *b._symbols])
                raise self._failed(f"{name} is not defined" + (f"; {hint}" if hint else ""))
            self.number[name] = len(self.symbols)
            self.symbols.append(s)
        return self.number[name]

    def symbol_word(self, value: Any, field: SymbolField) -> int:
        """The word of a string, value or address operand, and its relocation."""
        at = self.at + self.b._items[self.item].row.base + field.at
        if isinstance(value, str):
            self.relocs.append(Reloc("TEXT", at, RelocKind.STRING, NO_SYMBOL, self.pool.intern(value)))
        elif field.what == "value":
            self.relocs.append(Reloc("TEXT", at, RelocKind.VALUE, self.symbol(value.name), 0))
        else:
            kind = RelocKind.STRING if field.what == "string" else RelocKind.ADDRESS
            self.relocs.append(Reloc("TEXT", at, kind, self.symbol(value.name), value.addend))
        return 0
