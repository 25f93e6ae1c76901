"""Which registers a program uses, so that a capture copies no others and looks for snapshots in few.

Found once in its instructions; what the host writes widens it.  All contexts of a machine have the same object.
"""
from __future__ import annotations

from typing import Any, Iterable

from m3jit.errors import OperandError
from m3jit.isa.fields import ABSENT, BANK_SIZES, GPR, STATE, VEC, PayloadReg, Reg, RegField
from m3jit.isa.table import ESCAPES, Instruction
from m3jit.vm.extensions import unpack

PARAMETERS = 12                    # a callee's are R0-R11


class RegisterUse:
    """R, V, S: registers of a bank from this number on hold nothing.  naming: the general registers that may hold a
    snapshot handle, in whatever frame (a list that grows)."""
    __slots__ = ("R", "V", "S", "naming", "_moves")

    def __init__(self, instructions: Iterable[Instruction] = ()):
        self.R, self.V, self.S = PARAMETERS, 0, 0
        self.naming: list[int] = []
        self._moves: dict[int, set[int]] = {}          # general register -> those that a value of any kind is moved to
        for ins in instructions:
            self._see(ins)
        for ins in instructions:
            for number in _made_names(ins):
                self.may_name_snapshots(number)

    def _see(self, ins: Instruction) -> None:
        """Note the registers an instruction names, and where MOV, CALL and RET take a value of any kind."""
        if ins.op.code in ESCAPES:                     # an extension may name any
            self.R = BANK_SIZES[GPR]
            return
        for v in ins.args.values():
            for r in v if v.__class__ is tuple else (v,):
                if r.__class__ is Reg:
                    self.cover(r)
        if ins.op.control == "call":                   # arguments; RET copies them back
            for i, r in enumerate(ins.args.get("args", ())):
                self._moves.setdefault(r.index, set()).add(i)
                self._moves.setdefault(i, set()).add(r.index)
        elif ins.op.route == "value":
            found = [(f, r) for f, r in _general(ins) if "any" in f.kinds]
            for _, source in [x for x in found if x[0].both or not x[0].dest]:
                self._moves.setdefault(source, set()).update(n for f, n in found if f.dest)

    def cover(self, reg: Reg) -> None:
        """From now on that register may hold something."""
        if reg.bank == GPR:
            self.R = max(self.R, reg.index + 1)
        elif reg.bank == VEC:
            self.V = max(self.V, reg.index + 1)
        elif reg.bank == STATE:
            self.S = max(self.S, reg.index + 1)

    def may_name_snapshots(self, number: int) -> None:
        """From now on a handle of a snapshot may be in that general register, and wherever it is moved from there."""
        found, todo = set(self.naming), [number]
        while todo:
            at = todo.pop()
            if at not in found:
                found.add(at)
                todo += self._moves.get(at, ())
        self.naming += sorted(found.difference(self.naming))


def _general(ins: Instruction) -> list[tuple[Any, int]]:
    """(operand, number) of the operands that are general registers."""
    return [(f, r.index) for f in ins.op.operands() if isinstance(f, (RegField, PayloadReg))
            and (r := ins.args.get(f.name)) is not None and r.bank == GPR]


def _made_names(ins: Instruction) -> list[int]:
    """The general registers where an instruction may put a snapshot handle that it had from no register."""
    if ins.op.code in ESCAPES:                         # an extension gives what it likes
        try:
            return [r.index for r in unpack(ins.tail)[0] if r.index != ABSENT]
        except OperandError:                           # damaged: it traps
            return []
    return [n for f, n in _general(ins) if f.dest and
            ("snapshot" in f.kinds or "any" in f.kinds and ins.op.route == "machine")]
