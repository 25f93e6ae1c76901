"""`m3jit.compile` and `m3jit.load`."""
from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Sequence

from m3jit.api.compiled import CompiledProgram, Interface
from m3jit.errors import UserError
from m3jit.frontend import Program, assemble, assemble_file
from m3jit.frontend import load as load_container
from m3jit.frontend.cfg import Cfg, liveness
from m3jit.frontend.errors import suggest
from m3jit.frontend.records import Symbol, SymbolKind
from m3jit.isa.fields import GPR, VEC, Reg
from m3jit.isa.table import BY_NAME, Instruction, encode, load_table

SOURCE, CONTAINER = ".m3asm", ".m3b"


def load(source: str | os.PathLike | bytes) -> Program:
    """A program from a file or from the bytes of a `.m3b` file, verified.

    A file is read as what its name says: `.m3asm` is assembled, anything else is a container.  ContainerError or
    AssemblyError when it is not sound, OSError when it cannot be read."""
    if not isinstance(source, (bytes, bytearray, memoryview)) and Path(source).suffix == SOURCE:
        return assemble_file(os.fspath(source))
    return load_container(source)


def compile(program: Program | str | os.PathLike, inputs: Sequence[str] | None = None,
            outputs: Sequence[str] | None = None, *, threads: int | None = None, backend: str = "cpu",
            entry: str | None = None, models: Any = None) -> CompiledProgram:
    """A program as a function of NumPy arrays and numbers.

    program: a Program, a Builder, assembly text, or the path of a `.m3asm` or `.m3b` file.  inputs, outputs: the
    registers that are set before and read after a run (`"rX"`, `"R3"`).  entry: label or function to start at.  When
    the program starts in a `.func`, inputs default to the parameters it reads and outputs to the parameters it writes,
    and its RET ends the run; otherwise HALT does.  threads: at most (default: the CPUs this process may use); small
    work runs on the calling thread.  backend: "cpu", "cpu:LEVEL" (avx512, avx2, baseline), "interpreter", "python",
    "numba".  models: a provider for programs with `.model` lines.

    Every call starts from unwritten registers, fresh memory and the default random stream.  Whatever the backend cannot
    compile runs on the interpreter for that call, with the same bytes; `CompiledProgram.report()` says what and why.
    UserError when a name is not known; the program's own errors come as `Trap` from the call."""
    program = _program(program)
    load_table()
    function = _function(program, entry)
    start = function.value if function is not None else _start(program, entry)
    if function is not None:
        default_in, default_out = _parameters(program, function)
        inputs = default_in if inputs is None else inputs
        outputs = default_out if outputs is None else outputs
    if inputs is None or outputs is None:
        raise UserError(_missing(program, start, inputs, outputs))
    where = _scope(program, start)
    ins, outs = ({n: _register(program, n, where) for n in _names(names)} for names in (inputs, outputs))
    if not outs:
        raise UserError(f"{program.name}: outputs= names no register; nothing would come back")
    if function is not None:
        program = _calling(program, function, [*ins.items(), *outs.items()])
    elif start != program.entry:
        program = replace(program, entry=start)
    return CompiledProgram(program, Interface(start, ins, outs), threads=threads, backend=backend, models=models)


def _program(source: Any) -> Program:
    if isinstance(source, Program):
        return source
    if hasattr(source, "build"):
        return source.build()
    if isinstance(source, str) and "\n" not in source and Path(source).suffix not in (SOURCE, CONTAINER):
        return assemble(source)
    if isinstance(source, str) and "\n" in source:
        return assemble(source)
    if isinstance(source, (str, os.PathLike, bytes, bytearray)):
        return load(source)
    raise UserError(f"m3jit.compile takes a Program, a Builder, assembly text or a path, got a {type(source).__name__}")


def _names(names: Sequence[str] | str) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _code(program: Program, name: str) -> Symbol:
    """A label or function by name."""
    known = [s.name for s in program.symbols if s.kind in (SymbolKind.LABEL, SymbolKind.FUNC)]
    if name not in known:
        hint = suggest(name, known) or (f"it has {', '.join(known)}" if known else "it has none")
        raise UserError(f"{program.name}: no label or function {name!r}; {hint}")
    return program.symbol(name)


def _function(program: Program, entry: str | None) -> Symbol | None:
    """The function to start in, or None for the main program."""
    if entry is not None:
        found = _code(program, entry)
        return found if found.kind == SymbolKind.FUNC else None
    return next((s for s in program.symbols if s.kind == SymbolKind.FUNC and s.value == program.entry), None)


def _start(program: Program, entry: str | None) -> int:
    return program.entry if entry is None else _code(program, entry).value


def _scope(program: Program, pc: int) -> str | None:
    """The function whose register names hold at that place: the last one that begins there or before."""
    before = [s for s in program.symbols if s.kind == SymbolKind.FUNC and s.value <= pc]
    return max(before, key=lambda s: s.value).name if before else None


def _register(program: Program, name: str, function: str | None) -> Reg:
    try:
        reg = program.register(name, function)
    except KeyError as e:
        known = [s.name for s in program.symbols if s.kind == SymbolKind.REGISTER]
        hint = suggest(name, known)
        raise UserError(f"{e.args[0]}" + (f"; {hint}" if hint else "")) from None
    if reg.bank not in (GPR, VEC) or reg == Reg(GPR, 255):
        raise UserError(f"{program.name}: {name} cannot be an input or output; those are R0-R254 and V0-V31")
    return reg


def _parameters(program: Program, function: Symbol) -> tuple[list[str], list[str]]:
    """Names of the parameters a function reads before it writes them, and of those it writes."""
    regs = {name: Reg(GPR, i) for i, name in enumerate(function.params)}
    cfg = Cfg(program)
    live = liveness(cfg, frozenset())
    body = _reach(cfg, function.value)
    written = frozenset().union(*(live.written[b] for b in body))
    exposed = _read_first(cfg, live, function.value, body)
    return [n for n, r in regs.items() if r in exposed], [n for n, r in regs.items() if r in written]


def _reach(cfg: Cfg, start: int) -> list[int]:
    """Blocks of the frame that starts there."""
    seen, todo = [], [start]
    while todo:
        at = todo.pop()
        if at in seen or at not in cfg.blocks:
            continue
        seen.append(at)
        todo += [e.target for e in cfg.blocks[at].successors if e.flows]
    return seen


def _read_first(cfg: Cfg, live: Any, start: int, body: list[int]) -> frozenset[Reg]:
    """Registers read before any write on some path from `start` (what RET keeps alive does not count)."""
    into = {b: live.exposed[b] for b in body}
    changed = True
    while changed:
        changed = False
        for b in body:
            after = frozenset().union(*(into.get(e.target, frozenset()) for e in cfg.blocks[b].successors if e.flows))
            now = live.exposed[b] | (after - live.written[b])
            if now != into[b]:
                into[b], changed = now, True
    return into.get(start, frozenset())


def _calling(program: Program, function: Symbol, names: list[tuple[str, Reg]]) -> Program:
    """The program with `CALL function; HALT` behind it as its start: how the machine runs a function alone."""
    for name, reg in names:
        if reg.bank != GPR or reg.index >= 12:
            raise UserError(f"{program.name}: {name} is {reg}; inputs and outputs of a function are R0-R11, the "
                            f"registers of its parameters")
    top = max((r.index for _, r in names), default=-1)
    at = len(program.text)
    call, halt = BY_NAME["CALL"], BY_NAME["HALT"]
    args = {"target": function.value - at, "args": tuple(Reg(GPR, i) for i in range(top + 1))}
    added = encode(Instruction(call, args, size=call.size)) + encode(Instruction(halt, {}, size=halt.size))
    return replace(program, text=program.text + added, entry=at)


def _missing(program: Program, start: int, inputs: Any, outputs: Any) -> str:
    """The message for names that were not given."""
    what = [w for w, v in (("inputs", inputs), ("outputs", outputs)) if v is None]
    cfg = Cfg(program)
    live = liveness(cfg, frozenset())
    names = {s.register: s.name for s in program.symbols if s.kind == SymbolKind.REGISTER and s.scope == 0}
    body = _reach(cfg, start)
    reads = [names.get(r, str(r)) for r in sorted(_read_first(cfg, live, start, body)) if r.bank == GPR]
    functions = [s.name for s in program.symbols if s.kind == SymbolKind.FUNC]
    also = f"; or entry= one of its functions {', '.join(functions)}" if functions else ""
    return (f"{program.name}: give {' and '.join(f'{w}=[...]' for w in what)}; the program reads "
            f"{', '.join(reads) or 'no register'} before writing it{also}")
