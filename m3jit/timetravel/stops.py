"""Where a run stops: in front of instructions, or behind one that changed something.

A place is written `file.m3asm:12` or `12` (a line), `label`, `label+2` (instructions behind it), `0x40` (a pc) or a
mnemonic (every such instruction).  What is watched is a register (`rX`, R3, V0, S1: the value, the state it names) or
bytes of memory (`0x3000000000000010 16`).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from m3jit.errors import M3Error, UserError
from m3jit.frontend.errors import suggest
from m3jit.isa.fields import STATE, Reg
from m3jit.timetravel.views import brief_value, labels_of
from m3jit.vm.digest import state_parts, value_digest
from m3jit.vm.values import Handle

SHOWN = 16                         # bytes of watched memory that are shown when they change
MAX_WATCHED = 1 << 20              # bytes of memory that are compared after every instruction


@dataclass(frozen=True)
class Breakpoint:
    """A place, as it was written, and the instructions it means."""
    text: str
    pcs: frozenset[int]


def place(vm: Any, text: str) -> Breakpoint:
    """The place that a text means.  UserError says what there is."""
    image, program = vm.image, vm.image.program
    word = text.strip()
    if word.lower().startswith("0x"):
        return Breakpoint(word, _pc(image, word))
    file, colon, line = word.rpartition(":")
    if line.isdecimal():
        return Breakpoint(word, _line(image, file if colon else None, int(line), word))
    name, plus, more = word.partition("+")
    labels = labels_of(program)
    if name in labels and (not plus or more.isdecimal()):
        at = image.index_of[labels[name]] + int(more or 0)
        if at >= len(image.pcs):
            raise UserError(f"{word}: the program ends before")
        return Breakpoint(word, frozenset({image.pcs[at]}))
    found = frozenset(pc for pc,
                      ins in zip(image.pcs, image.instructions) if word.upper() in (ins.op.name, _family(ins)))
    if found:
        return Breakpoint(word.upper(), found)
    hint = suggest(word, [*labels, *{ins.op.name for ins in image.instructions}])
    raise UserError(f"{word!r}: no label, line, pc or instruction of this program" + (f"; {hint}" if hint else ""))


def layer_pcs(vm: Any) -> frozenset[int]:
    """Where the layers of a model begin; of a program without such labels, every label."""
    labels = labels_of(vm.image.program)
    layers = {pc for name, pc in labels.items() if name.startswith("layer_")}
    found = frozenset(pc for pc in (layers or labels.values()) if pc in vm.image.index_of)
    if not found:
        raise UserError("the program has no labels to go to; step instructions, or outputs")
    return found


def _family(ins: Any) -> str:
    """The mnemonic a source uses for forms: ADD of ADDS and ADDI."""
    return ins.op.name[:-1] if ins.op.name[-1:] in "ISFV" and len(ins.op.name) > 3 else ins.op.name


def _pc(image: Any, text: str) -> frozenset[int]:
    try:
        pc = int(text, 16)
    except ValueError:
        raise UserError(f"{text}: is no number") from None
    if pc not in image.index_of:
        raise UserError(f"{text}: is not the start of an instruction; the program has 0x0000 to 0x{image.pcs[-1]:04x}")
    return frozenset({pc})


def _line(image: Any, file: str | None, line: int, text: str) -> frozenset[int]:
    lines: dict[tuple[str, int], int] = {}
    for pc in image.pcs:
        found = image.line(pc)
        if found is not None:
            lines.setdefault(found, pc)                # the first instruction of a line
    if not lines:
        raise UserError(f"{text}: the program has no source map; give a pc (0x..) or a label")
    if file is None:
        file = image.line(image.entry_pc)[0] if image.line(image.entry_pc) else next(iter(lines))[0]
    behind = sorted((n, pc) for (f, n), pc in lines.items() if f == file or f.endswith("/" + file))
    if not behind:
        raise UserError(f"{text}: no code comes from {file}; there is {', '.join(sorted({f for f, _ in lines}))}")
    after = [pc for n, pc in behind if n >= line]
    if not after:
        raise UserError(f"{text}: the last line of {file} with code is {behind[-1][0]}")
    return frozenset({after[0]})


class Watch:
    """Something whose changes stop a run.  `changed()`: has it changed since the last question?"""

    def __init__(self, vm: Any, text: str, context: Any):
        self.vm, self.text, self.context = vm, text, context
        address, _, length = text.partition(" ")
        self.register: Reg | None = None
        self.depth = context.depth                     # of calls: a callee has other registers
        if address.lower().startswith("0x") or address.isdecimal():
            self.address, self.length = _range(address, length.strip() or "8")
            self._look()                               # an address that cannot be read is said now
        else:
            self.register = vm.register(text)
        self.last = self._look()
        self.shown = "", self._said()

    def changed(self) -> bool:
        """Has it another value than at the last question?  `shown` then holds how it was and how it is."""
        now = self._look()
        before, self.last = self.last, now
        if now == before:
            return False
        self.shown = self.shown[-1], self._said()
        return True

    def _said(self) -> str:
        """What it is now, for people."""
        if self.register is not None:
            return brief_value(self._read(self.register), self.context)
        if isinstance(self.last, str):
            return self.last                           # why it cannot be read
        more = " .." if self.length > SHOWN else ""
        return self.last[:SHOWN].hex(" ") + more

    def _look(self) -> Any:
        if self.register is None:
            try:
                return self.context.memory.read(self.address, self.length)
            except M3Error as e:
                if not hasattr(self, "last"):
                    raise UserError(f"{self.text}: cannot be watched: {e}") from None
                return str(e)                          # the block was freed
        value = self._read(self.register)
        if self.register.bank == STATE and value.__class__ is Handle:
            state = self.context.states.get(value.id)
            return b"" if state is None else b"".join(digest for _, digest in state_parts(state))
        return None if value is None else value_digest(value)

    def _read(self, reg: Reg) -> Any:
        """The register in the call it was named in, whichever is running; None once that has returned."""
        ctx = self.context
        if reg.bank == STATE or ctx.depth == self.depth:
            return ctx.read(reg)
        frame = ctx.frames
        while frame is not None and frame.depth > self.depth + 1:
            frame = frame.parent
        if frame is None or frame.depth != self.depth + 1:
            return None
        return (frame.R, frame.V)[reg.bank][reg.index]


def _range(address: str, length: str) -> tuple[int, int]:
    try:
        at, size = int(address, 0), int(length, 0)
    except ValueError:
        raise UserError(f"{address} {length}: an address and a number of bytes are expected") from None
    if not 0 < size <= MAX_WATCHED:
        raise UserError(f"{length} bytes; 1 to {MAX_WATCHED} can be watched")
    return at, size
