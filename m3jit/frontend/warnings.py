"""What the assembler warns about: registers nobody wrote, branches on another register than the one compared."""
from __future__ import annotations

from typing import TYPE_CHECKING

from m3jit.frontend.cfg import Cfg, liveness, must_read, registers_of
from m3jit.frontend.program import Program
from m3jit.frontend.syntax import Statement
from m3jit.isa.fields import GPR, VEC, Reg, RegField

if TYPE_CHECKING:
    from m3jit.frontend.assembler import _Assembler


def check(program: Program, placed: list[tuple[int, Statement]], run: "_Assembler") -> None:
    """Warn about a sound program.  placed: the statement of each instruction."""
    if not program.instructions:
        return
    statements = dict(placed)
    cfg = Cfg(program)
    _unwritten(cfg, statements, run)
    _compared(cfg, statements, run)


def _unwritten(cfg: Cfg, statements: dict[int, Statement], run: "_Assembler") -> None:
    """Registers that may be read before any write, at the first such read of each."""
    live = liveness(cfg, outputs=frozenset())
    params = {1 + run.names.labels[n]: len(p) for n, p in run.names.params.items()}
    for entry in cfg.entries:
        given = params.get(1 + entry, 0)
        own = {Reg(GPR, i) for i in range(given)}
        suspects = {r for r in live.live_in[entry] if r.bank in (GPR, VEC) or entry == cfg.program.entry} - own
        if entry != cfg.program.entry and not given and (1 + entry) not in params:
            continue                            # a spawned or exported label: its registers come from elsewhere
        for reg in sorted(suspects):
            pc = _first_read(cfg, entry, reg)
            if pc is not None and reg.bank != 3:
                token = statements[pc].head
                name = _name(entry, reg, run)
                run.warn(token, f"{name} is read here, but nothing has written it",
                         f"write it first, or bind it when running: --bind {name}=...")


def _name(entry: int, reg: Reg, run: "_Assembler") -> str:
    """What the source calls a register in the code that starts at `entry`."""
    own = next((s for n, s in run.names.functions.items() if run.names.labels[n] == entry), run.names.main)
    return next((n for s in (own, run.names.context) for n, r in s.names.items() if r == reg), str(reg))


def _first_read(cfg: Cfg, entry: int, reg: Reg) -> int | None:
    """pc of the nearest read of a register from an entry, along paths that do not write it."""
    seen, todo = set(), [entry]
    while todo:
        start = todo.pop(0)
        if start in seen:
            continue
        seen.add(start)
        for pc, ins in cfg.blocks[start].instructions:
            if reg in must_read(ins):
                return pc
            if reg in registers_of(ins)[1]:
                break
        else:
            todo += [e.target for e in cfg.blocks[start].successors if e.flows]
    return None


def _compared(cfg: Cfg, statements: dict[int, Statement], run: "_Assembler") -> None:
    """A conditional branch that names another register than the last comparison's first operand."""
    for block in cfg.blocks.values():
        first: Reg | None = None
        known = False
        for pc, ins in block.instructions:
            if ins.op.control == "branch" and "flags" in ins.op.reads:
                named = next((ins.args[f.name] for f in ins.op.operands() if isinstance(f, RegField)), None)
                if known and named is not None and named != first:
                    run.warn(statements[pc].head, f"this branches on the comparison of {first}, not of {named}",
                             "compare it first, or name the register that was compared")
            elif "flags" in ins.op.writes:
                operand = next((f for f in ins.op.operands() if isinstance(f, RegField)), None)
                first, known = (ins.args[operand.name] if operand else None), True
