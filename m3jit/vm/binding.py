"""Turns a decoded instruction into a Python function that executes it.

The function's source is generated once per *pattern* (which operands are registers of which bank, which are constants,
where results go) and compiled; register numbers, constants and the opcode's body are closure variables.  This is what
makes the interpreter's inner loop one call per instruction without any decoding left in it.

A value handler executes the instruction and returns the index of the next one, or `-2 - index` to ask the loop to look
at the stop word first.
"""
from __future__ import annotations

from operator import attrgetter, setitem
from types import CodeType
from typing import Any, Callable

from m3jit.errors import OperandError
from m3jit.isa.fields import (Hidden, IntOrReg, PayloadReg, Reg, RegField, RegList, ShapeField, SPECIAL)
from m3jit.isa.table import Instruction
from m3jit.vm import values
from m3jit.vm.commit import Store, attribute, commit, item
from m3jit.vm.values import Handle, classes_of, expected, said

BANK = "RVS"
HANDLER = "<m3jit handler>"         # file name of handlers
STORING: set[CodeType] = set()      # code of others that store what they made (`stored`): `made`, and then `nxt`
SCALARS = frozenset({int, float})
Handler = Callable[[Any], int]


class Operand:
    """How one field of one instruction is fetched and written back.

    code names the pattern: k constant, r register, s state, g getter function, h hidden state.  `where` is (bank
    letter, index) of a register."""
    __slots__ = ("field", "name", "code", "bank", "index", "classes", "value", "writes")

    def __init__(self, field: Any, code: str, value: Any = None, reg: Reg | None = None,
                 classes: frozenset[type] = frozenset(), writes: bool = False):
        self.field, self.name, self.code, self.value, self.classes, self.writes = \
            field, field.name, code, value, classes, writes
        self.bank, self.index = (BANK[reg.bank], reg.index) if reg is not None else ("", 0)

    @property
    def register(self) -> str:
        return f"{self.bank}{self.index}"


def kind_fault(op: Operand, value: Any, kinds: tuple[str, ...]) -> OperandError:
    """The error for a register of the wrong kind."""
    return OperandError(f"{op.register} ({op.name}) holds {said(value)}, expected {expected(kinds)}", op.register)


def _fault(operand: Operand, value: Any) -> None:
    raise kind_fault(operand, value, operand.field.kinds)


def _need_int(ctx: Any, reg: Reg, name: str) -> int:
    v = ctx.bank(reg.bank)[reg.index]
    if v.__class__ is not int:
        raise OperandError(f"{reg} ({name}) holds {said(v)}, expected an integer", str(reg))
    return v


def _shape_getter(value: tuple, name: str) -> Callable[[Any], tuple]:
    return lambda ctx: tuple(_need_int(ctx, d, name) if isinstance(d, Reg) else d for d in value)


def _list_getter(regs: tuple[Reg, ...], name: str) -> Callable[[Any], tuple]:
    def get(ctx: Any) -> tuple:
        found = tuple(ctx.R[r.index] for r in regs)
        for r, v in zip(regs, found):
            if v is None:
                raise OperandError(f"{r} ({name}) holds {said(v)}, expected a value", str(r))
        return found
    return get


def operands(ins: Instruction, pure: bool, machine: Any, pc: int) -> list[Operand]:
    """The operands of an instruction in field order.  pure: value route (destinations are passed as None); else
    destinations are passed as registers and register lists stay lists of registers."""
    out: list[Operand] = []
    for f in ins.op.fields:
        if isinstance(f, Hidden):
            out.append(Operand(f, "h", f.state, writes=True))
            continue
        v = ins.args.get(f.name, None if isinstance(f, (RegField, PayloadReg)) else f.default)
        if isinstance(f, (RegField, PayloadReg)):
            out.append(_register(f, v, pure, machine, pc))
        elif isinstance(f, IntOrReg) and isinstance(v, Reg):
            out.append(Operand(f, "r", reg=v, classes=classes_of(f.kinds)))
        elif isinstance(f, ShapeField) and any(isinstance(d, Reg) for d in v):
            out.append(Operand(f, "g", _shape_getter(v, f.name)))
        elif isinstance(f, RegList) and pure:
            out.append(Operand(f, "g", _list_getter(v, f.name)))
        else:
            out.append(Operand(f, "k", v))
    return out


def _register(f: Any, v: Reg | None, pure: bool, machine: Any, pc: int) -> Operand:
    if f.dest and not f.both:
        o = Operand(f, "k", None if pure else v, reg=v if v is not None and v.bank != SPECIAL else None, writes=True)
        return o
    if v is None:
        return Operand(f, "k", None, writes=f.both)
    if v.bank == SPECIAL:
        if v.index == 0:
            return Operand(f, "k", pc)
        return Operand(f, "g", lambda ctx: machine.read_special(ctx, v.index))
    if f.kinds == ("state",) or (pure and "state" in f.kinds and set(f.kinds) <= {"state", "null"}):
        return Operand(f, "s" if pure else "r", reg=v, writes=f.both, classes=classes_of(("state", "null")
                       if f.both or "null" in f.kinds else ("state",)))
    return Operand(f, "r", reg=v, classes=classes_of(f.kinds), writes=f.both)


_factories: dict[tuple, Callable[..., Handler]] = {}


def value_handler(ins: Instruction, pc: int, xp: Any, nxt: int, poll: int, stop: Any, machine: Any) -> Handler:
    """The handler of a value-route instruction.  It returns nxt, or poll when the stop word is set."""
    ops = operands(ins, True, machine, pc)
    results = [o for o in ops if o.writes]
    scalar_only = ins.op.code == 0x7C or all(o.classes <= SCALARS for o in ops if o.code == "r")
    fast = ins.op.code in (0x7C, 0x0C)
    moved = _moved_register(ins, ops)
    pattern = tuple((o.code, o.bank, o.writes, o.value if o.code == "h" else None) for o in ops) + \
        (fast, scalar_only, ops.index(moved) if moved is not None else -1)
    factory = _factories.get(pattern)
    if factory is None:
        factory = _factories[pattern] = _compile(ops, results, fast, scalar_only, moved)
    env = {"body": ins.op.body, "xp": xp, "nxt": nxt, "poll": poll, "stop": stop, "fault": _fault,
           "state_in": machine.state_in, "state_out": machine.state_out, "normal": values.normalise,
           "results_fault": results_fault, "moved": moved}
    for i, o in enumerate(ops):
        env.update({f"n{i}": o.index, f"k{i}": o.value, f"c{i}": o.classes, f"o{i}": o})
    return factory(**env)


def _moved_register(ins: Instruction, ops: list[Operand]) -> Operand | None:
    """INPLACE empties the first source register."""
    if not ins.args.get("inplace"):
        return None
    return next((o for o in ops if o.code == "r" and not o.writes and isinstance(o.field, RegField)), None)


def _compile(ops: list[Operand], results: list[Operand], fast: bool, scalar_only: bool,
             moved: Operand | None) -> Callable[..., Handler]:
    lines = ["def handler(ctx):"]
    for bank in sorted({o.bank for o in ops if o.bank}):
        lines.append(f"    {bank} = ctx.{bank}")
    for i, o in enumerate(ops):
        if o.code == "k":
            continue
        if o.code == "h":
            lines.append(f"    a{i} = ctx.{o.value}")
        elif o.code == "g":
            lines.append(f"    a{i} = k{i}(ctx)")
        else:
            lines += [f"    a{i} = {o.bank}[n{i}]", f"    if a{i}.__class__ not in c{i}: fault(o{i}, a{i})"]
            if o.code == "s":
                lines.append(f"    s{i} = state_in(ctx, o{i}, a{i})")
    args = ", ".join({"k": f"k{i}", "s": f"s{i}"}.get(o.code, f"a{i}") for i, o in enumerate(ops))
    lines.append(f"    r = body(xp, {args})")
    at = {id(o): i for i, o in enumerate(ops)}
    if len(results) == 1:
        names = ["r"]
    else:
        names = [f"r{i}" for i in range(len(results))]
        lines += [f"    if r.__class__ is not tuple or len(r) != {len(results)}: results_fault(r, {len(results)})",
                  f"    {', '.join(names)}{',' if len(names) == 1 else ''} = r"] if results else []
    checked = []
    for name, o in zip(names, results):            # everything is checked before anything is written
        if o.bank and o.code != "s" and not fast:
            checked.append(f"    {name} = normal({name})")
        if o.bank == "V":
            checked.append(f"    {name} = vector({name})")
    lines += checked
    stores = [] if moved is None else [f"item({moved.bank}, n{ops.index(moved)}, None)"]
    for name, o in zip(names, results):
        if o.code == "h":
            stores.append(f"attribute(ctx, '{o.value}', {name})")
        elif o.code == "s":
            stores.append(f"*state_out(ctx, o{at[id(o)]}, a{at[id(o)]}, {name})")
        elif o.bank:
            stores.append(f"item({o.bank}, n{at[id(o)]}, {name})")
    only = results[0] if len(stores) == 1 == len(results) and moved is None else None
    if only is not None and only.code != "s":      # one store needs no commit
        lines.append(f"    ctx.{only.value} = r" if only.code == "h" else f"    {only.bank}[n{at[id(only)]}] = r")
    elif stores:
        lines += [f"    made = ({', '.join(stores)},)", "    commit(made)"]
    if not scalar_only:
        lines.append("    if stop.raised: return poll")
    lines.append("    return nxt")
    params = ["body", "xp", "nxt", "poll", "stop", "fault", "state_in", "state_out", "normal", "results_fault",
              "moved"] + \
        [f"{p}{i}" for i in range(len(ops)) for p in "nkco"]
    source = "\n    ".join([f"def factory({', '.join(params)}):", *lines, "return handler\n"])
    scope: dict[str, Any] = {"vector": values.vector, "commit": commit, "item": item, "attribute": attribute}
    exec(compile(source, HANDLER, "exec"), scope)      # source is built from fixed strings above only
    return scope["factory"]


def stored(error: BaseException) -> int | None:
    """Where a value-route instruction goes on that was left by `error` behind its stores (all of them, see
    m3jit.vm.commit); None: in front of them, or somewhere else."""
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == HANDLER or at.tb_frame.f_code in STORING:
            found = at.tb_frame.f_locals
            made = found.get("made", ())               # none where the handler is only being made
            if made and all((target[key] if call is setitem else getattr(target, key)) is value
                            for call, target, key, value in made):
                nxt = found["nxt"]
                return nxt if nxt >= 0 else -2 - nxt
        at = at.tb_next
    return None


def results_fault(result: Any, wanted: int) -> None:
    """A body that returned the wrong number of results (an error of the table)."""
    n = len(result) if isinstance(result, tuple) else 1
    raise AssertionError(f"the body returned {n} result{'s' if n != 1 else ''} for {wanted} destinations")


def checked(reg: Reg, value: Any) -> Any:
    """The value as the register holds it.  OperandError when its bank cannot hold it."""
    value = values.normalise(value)
    if reg.bank == 1 and value is not None:
        return values.vector(value)
    if reg.bank == 2 and value is not None and value.__class__ is not Handle:
        raise OperandError(f"{reg} holds state handles, got {said(value)}", str(reg))
    return value


def stores(ctx: Any, reg: Reg | None, value: Any) -> list[Store]:
    """The store (m3jit.vm.commit) that writes a register; none for None: discard.  Errors as `checked`."""
    return [] if reg is None else [item(ctx.bank(reg.bank), reg.index, checked(reg, value))]


def put(ctx: Any, reg: Reg | None, value: Any) -> None:
    """Write a register (None and R255: discard).  OperandError when the bank cannot hold the value."""
    if reg is not None:
        ctx.bank(reg.bank)[reg.index] = checked(reg, value)


def arguments(ops: list[Operand]) -> tuple[list[Any] | None, Callable[[Any], list[Any]]]:
    """The operand values of a machine or control instruction: (those of every context, None where they depend on it;
    context -> the values, kinds checked)."""
    fixed = [o.value if o.code == "k" else None for o in ops]
    asked = [(i, o, o.bank, o.index, o.classes, _getter(o)) for i, o in enumerate(ops) if o.code != "k"]

    def values_of(ctx: Any) -> list[Any]:
        out = fixed.copy()
        for i, o, bank, index, classes, get in asked:
            if get is not None:
                out[i] = get(ctx)
                continue
            v = getattr(ctx, bank)[index]
            if v.__class__ not in classes:
                _fault(o, v)
            out[i] = v
        return out
    return None if asked else fixed, values_of


def _getter(o: Operand) -> Callable[[Any], Any] | None:
    """How an operand that is no constant and no register is had."""
    return o.value if o.code == "g" else attrgetter(o.value) if o.code == "h" else None
