"""A program as the machine runs it: instructions by index, constants resolved, text for messages."""
from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from m3jit.errors import OperandError, UserError, brief
from m3jit.frontend.lexer import quote
from m3jit.ir.eager_scalar import wrap64
from m3jit.isa.fields import Reg, SymbolField
from m3jit.isa.table import Instruction, encode
from m3jit.isa.types import U8, Tensor
from m3jit.vm.register_use import RegisterUse


class ModelLookup(Protocol):
    """How constants reach models (the machine provides it)."""
    def model(self, name: str) -> Any: ...
    def tensor(self, name: str) -> Tensor: ...


class Image:
    """Instructions in order.  pcs[i] is the byte offset of instruction i; index_of is the inverse.

    loop_heads: targets of backward jumps and branches.  Executors look at their budget whenever execution arrives at
    one (and after slow instructions), so that slices end at the same instruction everywhere."""

    def __init__(self, program: Any):
        """program: a `frontend.Program`, or an iterable of instructions (branch distances already in place)."""
        if hasattr(program, "instructions"):
            self.program = program
            pairs = list(program.instructions)
            self.text, self.data = bytes(program.text), bytes(program.data)
            self.entry_pc, self.name = program.entry, program.name
            if program.unresolved:
                raise UserError(f"{program.name}: not defined anywhere: {', '.join(program.unresolved)}; link it with "
                                f"the modules that define them")
            if program.imports:
                raise UserError(f"{program.name}: imports {', '.join(i.path for i in program.imports)}; link it first")
        else:
            self.program = None
            pairs, pc = [], 0
            for ins in program:
                pairs.append((pc, ins))
                pc += ins.size
            self.text, self.data = b"".join(encode(ins) for _, ins in pairs), b""
            self.entry_pc, self.name = 0, "<instructions>"
        self.pcs: list[int] = [pc for pc, _ in pairs]
        self.instructions: list[Instruction] = [ins for _, ins in pairs]
        self.index_of: dict[int, int] = {pc: i for i, pc in enumerate(self.pcs)}
        self.loop_heads: frozenset[int] = frozenset(
            pc + ins.args["target"] for pc, ins in pairs if ins.op.control in ("jump", "branch", "interrupt")
            and ins.args["target"] <= 0 and pc + ins.args["target"] in self.index_of)
        self.registers = RegisterUse(self.instructions)
        if pairs and self.entry_pc not in self.index_of:
            raise UserError(f"{self.name}: the entry point 0x{self.entry_pc:04x} is not the start of an instruction")

    def at(self, pc: int) -> Instruction | None:
        """The instruction at a byte offset, or None."""
        i = self.index_of.get(pc)
        return None if i is None else self.instructions[i]

    def line(self, pc: int) -> tuple[str, int] | None:
        """(file, line) of the instruction at pc, where the program says so."""
        return self.program.line_of(pc) if self.program is not None else None

    # -- constants --------------------------------------------------------------------------------------------------
    def constant(self, ins: Instruction, models: ModelLookup, weights: Any) -> Any:
        """The value a row that reads "constant" loads.  OperandError when it has none on this machine."""
        if ins.op.name == "LOADS":
            if self.program is None:
                raise OperandError("a string constant needs a program with a DATA section")
            raw = self.program.string(ins.args["text"]).encode("utf-8")
            return Tensor(U8, (len(raw),), np.frombuffer(raw, np.uint8))
        if ins.op.name == "LOADV":
            return self._symbol_value(ins.args["symbol"], models)
        if ins.op.name == "LOADA":
            return wrap64(self._address(ins, models, weights))
        raise OperandError(f"{ins.op.name} loads no constant")

    def _symbol(self, index: int) -> Any:
        symbols = self.program.symbols if self.program is not None else []
        if not 0 <= index < len(symbols):
            raise OperandError(f"symbol {index} does not exist; the program has {len(symbols)}")
        return symbols[index]

    def _symbol_value(self, index: int, models: ModelLookup) -> Any:
        symbol = self._symbol(index)
        kind = symbol.kind.name
        if kind in ("DATA", "STRING"):
            return self.program.value(symbol)
        if kind == "MODEL":
            return models.model(symbol.name)
        if kind == "TENSOR":
            return models.tensor(symbol.name)
        raise OperandError(f"@{symbol.name} is a {kind.lower()} and has no value; &{symbol.name} is its address")

    def _address(self, ins: Instruction, models: ModelLookup, weights: Any) -> int:
        word = ins.args["address"]
        if word or self.program is None:
            return word
        place = self._place_of(ins)
        for reloc in self.program.relocs:
            if reloc.section == "TEXT" and reloc.offset == place:
                symbol = self._symbol(reloc.symbol) if reloc.symbol < 2 ** 32 - 1 else None
                if symbol is not None and symbol.kind.name == "TENSOR":
                    return weights.address_of(models.tensor(symbol.name)) + reloc.addend
        return word

    def _place_of(self, ins: Instruction) -> int:
        field = next(f for f in ins.op.fields if f.name == "address")
        for i, other in enumerate(self.instructions):
            if other is ins:
                return self.pcs[i] + ins.op.base + field.at
        raise OperandError("the instruction is not part of this program")


def show(ins: Instruction, program: Any = None) -> str:
    """An instruction in one line for messages: mnemonic, registers in order, other operands by name.

    program: the one it belongs to, for the texts and names its operands stand for."""
    words: list[str] = []
    for f in ins.op.operands():
        v = ins.args.get(f.name, f.default)
        if isinstance(f, SymbolField) and v is not None and v != f.default:
            words.append(f"{f.name.upper()}={brief(symbol_text(f, v, program))}")
        elif isinstance(v, Reg):
            words.append(str(v) if f.positional else f"{f.name.upper()}={v}")
        elif isinstance(v, tuple):
            if v:
                words.append(f"{f.name.upper()}=[{', '.join(map(str, v))}]")
        elif v is not None and v is not f.default and v != f.default:
            words.append(str(v) if f.name in ("imm", "to", "index", "axis") else f"{f.name.upper()}={v}")
    return f"{ins.op.name} {', '.join(words)}".strip()


def symbol_text(field: SymbolField, word: int, program: Any) -> str:
    """What a string, symbol or address operand stands for, as a source writes it; its number where it stands for
    none."""
    try:
        if program is not None and field.what == "string":
            return quote(program.string(word))
        if program is not None and field.what == "value":
            return f"@{program.symbols[word].name}"
    except (UserError, IndexError):
        pass                                           # a damaged operand: its trap says what is wrong
    return f"0x{word:x}" if field.what == "address" else str(word)


def entry_points(image: Any) -> list[int]:
    """Program start, branch targets, and what follows a slow-path instruction."""
    out = {image.entry_pc}
    for pc, ins in zip(image.pcs, image.instructions):
        nxt = pc + ins.size
        if ins.args.get("target").__class__ is int:    # a label (a context to end is a register)
            out.add(pc + ins.args["target"])
        if ins.op.route in ("machine", "absent") or (ins.op.route == "control" and
                                                     ins.op.control not in ("next", "jump", "branch")):
            out.add(nxt)
    return sorted(pc for pc in out if pc in image.index_of)
