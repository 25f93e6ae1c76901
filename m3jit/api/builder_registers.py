"""Numbers for the registers of a program that is built: each its own while they last, shared by lifetime after that."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterable

from m3jit.api.builder_operands import BuilderError, Filled, Label, Value
from m3jit.isa.fields import ABSENT, BANK_LETTERS, BANK_SIZES, GPR, LabelField, Reg


@dataclass(eq=False)
class Scope:
    """A function's general and vector registers, or the program's states."""
    function: str | None = None
    values: list[Value] = field(default_factory=list)              # in order of first mention
    by_name: dict[str, Value] = field(default_factory=dict)
    numbers: dict[Value, Reg] = field(default_factory=dict)

    def mention(self, value: Value) -> None:
        """Take a value in, unless it is there already."""
        if value not in self.numbers:
            self.numbers[value] = Reg(value.bank, ABSENT)          # no number yet
            self.values.append(value)


def mentioned(filled: Filled) -> Iterable[tuple[Value, bool]]:
    """(register, is it written) of the operands."""
    for f in filled.row.operands():
        v = filled.args[f.name]
        written = bool(getattr(f, "dest", False)) and not getattr(f, "both", False)
        for x in v if isinstance(v, tuple) else (v,):
            if isinstance(x, Value):
                yield x, written


def allocate(scope: Scope, items: list[Filled], place: Any) -> None:
    """Give every register of the scope its number.  items: all instructions; place(label) -> index.

    Registers with a name or a fixed number keep theirs for the whole scope.  BuilderError when a bank is full."""
    for bank in range(3):
        values = [v for v in scope.values if v.bank == bank]
        top = ABSENT if bank == GPR else BANK_SIZES[bank]
        taken = {v.fixed.index for v in values if v.fixed is not None}
        for v in values:
            if v.fixed is not None:
                scope.numbers[v] = v.fixed
        open_values = [v for v in values if v.fixed is None]
        if len(open_values) + len(taken) <= top:
            free = (n for n in range(top) if n not in taken)
            for v in open_values:
                scope.numbers[v] = Reg(bank, next(free))
            continue
        _share(scope, bank, top, taken, open_values, items, place)


def _share(scope: Scope, bank: int, top: int, taken: set[int], values: list[Value], items: list[Filled],
           place: Any) -> None:
    """Linear scan: a register that the program assigns once gives its number back after its last use."""
    spans = _lifetimes(set(values), items, place)
    kept = [v for v in values if v.name is not None or v.assigned != 1]
    free = [n for n in range(top - 1, -1, -1) if n not in taken]
    if len(kept) > len(free):
        raise BuilderError(f"{len(kept) + len(taken)} registers of bank {BANK_LETTERS[bank]} have a name or are "
                           f"assigned several times; there are {top}")
    for v in kept:
        scope.numbers[v] = Reg(bank, free.pop())
    active: list[tuple[int, int]] = []                             # (last use, number)
    for v in sorted((v for v in values if v not in set(kept)), key=lambda v: spans[v][0]):
        start, end = spans[v]
        for done in [a for a in active if a[0] < start]:
            active.remove(done)
            free.append(done[1])
        if not free:
            raise BuilderError(f"more than {top} registers of bank {BANK_LETTERS[bank]} are needed at once; keep "
                               f"values in memory, or join them with CONCAT")
        n = free.pop()
        active.append((end, n))
        scope.numbers[v] = Reg(bank, n)


def _lifetimes(values: set[Value], items: list[Filled], place: Any) -> dict[Value, tuple[int, int]]:
    """First and last instruction of each register, widened to the loops it lives across."""
    spans: dict[Value, tuple[int, int]] = {}
    read_first: set[Value] = set()
    loops: list[tuple[int, int]] = []
    for i, item in enumerate(items):
        for v, written in sorted(mentioned(item), key=lambda m: m[1]):
            if v in values:
                if v not in spans and not written:
                    read_first.add(v)
                spans[v] = (spans.get(v, (i, i))[0], i)
        for f in item.row.operands():
            target = item.args[f.name]
            if isinstance(f, LabelField) and isinstance(target, (Label, str)):
                at = place(target)
                if at is not None and at <= i:
                    loops.append((at, i))
    changed = True
    while changed:
        changed = False
        for v, (start, end) in spans.items():
            for top, bottom in loops:
                if start > bottom or end < top:
                    continue
                new = (start, end)
                if start < top:
                    new = (start, max(end, bottom))
                elif v in read_first:
                    new = (top, max(end, bottom))
                if new != (start, end):
                    spans[v] = start, end = new
                    changed = True
    return spans
