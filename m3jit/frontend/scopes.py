"""Registers by name: where each name stands for which register.

GPR and VEC names belong to a function (CALL opens a fresh frame), S and SP names to the whole program.  A name is
pinned by `.reg`, is a parameter of `.func` (R0 first), or is given the lowest number that nothing else uses.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field

from m3jit.frontend.records import Symbol, SymbolKind
from m3jit.isa.fields import ABSENT, BANK_LETTERS, BANK_SIZES, GPR, SPECIAL, STATE, VEC, Reg

PHYSICAL = re.compile(r"(SP|[RVS])([0-9]{1,3})\Z", re.I)
IMPLICIT = re.compile(r"(?:sp|[rvs])[A-Z]\w*\Z")
MAX_PARAMS = 12


def bank_of(name: str) -> int:
    """The bank a register name's first letters say."""
    return SPECIAL if name.startswith("sp") else {"r": GPR, "v": VEC, "s": STATE}[name[0]]


def physical(name: str) -> Reg | None:
    """R7, V3, S0, SP6; None for anything else or a number the bank does not have."""
    m = PHYSICAL.match(name)
    if not m:
        return None
    bank = BANK_LETTERS.index(m[1].upper())
    return Reg(bank, int(m[2])) if int(m[2]) < BANK_SIZES[bank] else None


@dataclass
class RegisterScope:
    """Names of one function (start: its TEXT offset), of the main program, or of the context (S registers)."""
    function: str | None = None
    start: int | None = None
    names: dict[str, Reg | None] = field(default_factory=dict)         # None: not allocated yet
    used: set[Reg] = field(default_factory=set)

    def pin(self, name: str, reg: Reg) -> str | None:
        """Bind a name; what stands against it, or None."""
        if self.names.get(name) not in (None, reg):
            return f"{name} already names {self.names[name]}"
        owner = next((n for n, r in self.names.items() if r == reg and n != name), None)
        if owner:
            return f"{reg} is already named {owner}"
        self.names[name] = reg
        self.used.add(reg)
        return None

    def allocate(self) -> list[str]:
        """Give every name its register; names for which none is left."""
        failed, free = [], {}
        for bank in (GPR, VEC, STATE):
            top = ABSENT if bank == GPR else BANK_SIZES[bank]
            free[bank] = (n for n in range(top) if Reg(bank, n) not in self.used)
        for name, reg in self.names.items():
            if reg is not None:
                continue
            bank = bank_of(name)
            n = next(free[bank], None) if bank in free else None
            if n is None:
                failed.append(name)
            else:
                self.names[name] = Reg(bank, n)
        return failed

    def symbols(self) -> list[Symbol]:
        """REGISTER symbols of this scope."""
        scope = 0 if self.start is None else 1 + self.start
        return [Symbol(SymbolKind.REGISTER, n, r.bank << 8 | r.index, scope=scope)
                for n, r in self.names.items() if r is not None]
