"""Every value opcode with operands of any kind, dtype and shape, fitting or not: compiled and interpreted runs give the
same registers, or the same trap at the same instruction."""
from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

from m3jit import VM, M3Error, Tensor
from m3jit.ir.eager import EagerXp
from m3jit.isa import types as T
from m3jit.isa.fields import (GPR, REQUIRED, STATE, BytesField, EnumField, Field, FlagField, FloatOrReg, Hidden,
                              IntOrReg, Number, PayloadReg, PrecisionField, Reg, RegField, RegList, ShapeField)
from m3jit.isa.table import BY_NAME, OPS, Instruction, load_table
from tests.api.outcomes import exact
from tests.api.random_items import array

load_table()
ROWS = [row for row in OPS if row.route == "value" and row.executable and
        "constant" not in row.reads and "memory" not in row.reads]
TRIES = int(os.environ.get("M3JIT_OPERAND_FUZZ", "10"))
SHAPES = ((), (1,), (4,), (32,), (4, 4), (4, 32), (1, 4), (4, 1), (0,), (2, 4, 4), (0, 4), (4, 2, 3, 1), (3,), (256,))


def value(rng: random.Random) -> Any:
    """What a register may hold: often a float tensor, else anything."""
    roll = rng.random()
    if roll < 0.08:
        return None
    if roll < 0.16:
        return rng.choice((0, 1, -1, 3, 2 ** 40))
    if roll < 0.24:
        return rng.choice((0.0, 1.5, -2.0, float("nan")))
    shape = rng.choice(SHAPES)
    if roll < 0.34 and shape and shape[-1] % 32 == 0 and 0 not in shape:
        x = Tensor.of(array(rng, T.F32, shape, 0.0))
        return EagerXp().quantize(x, T.DTYPES[rng.choice(("Q8_0", "Q4_0", "Q5_1"))])
    dtype = rng.choice((T.F32, T.F32, T.F32, T.F16, T.BF16, T.I64, T.I32, T.U8, T.BOOL))
    a = array(rng, dtype, shape)
    return a if isinstance(a, Tensor) else Tensor.of(a)


def option(f: Field, rng: random.Random, sample: dict[str, Any]) -> Any:
    """A value of an operand that is no plain register: its default or sample, or anything small its kind can hold."""
    if isinstance(f, FlagField):
        return rng.random() < 0.3
    if rng.random() < 0.5 and (f.default is not REQUIRED or f.name in sample):
        return sample.get(f.name, f.default) if f.default is REQUIRED else f.default
    if isinstance(f, IntOrReg):
        number = rng.choice((0.0, 0.5, 1.0, 1.5)) if isinstance(f, FloatOrReg) else rng.choice((0, 1, 2, 4))
        return Reg(GPR, rng.randrange(1, 6)) if rng.random() < 0.3 else number
    if isinstance(f, ShapeField):
        return rng.choice(((4,), (-1,), (2, 2), (4, 4), (1, 4), (), (-1, 4), (0,), (Reg(GPR, rng.randrange(1, 6)), 4)))
    if isinstance(f, RegList):
        return tuple(Reg(GPR, rng.randrange(1, 6)) for _ in range(2))
    if isinstance(f, BytesField):
        return rng.choice(((), (0,), (1, 0), (0, 1, 2), (2, 0, 1), (0, 0)))
    if isinstance(f, (EnumField, PrecisionField)):
        return rng.choice(f.words)
    if isinstance(f, Number):
        return rng.choice((0.0, 1.0, -1.0, 0.5)) if f.is_float else \
            rng.choice((0, 1, 2, 3, 4)) if f.bounds()[0] == 0 else rng.choice((-2, -1, 0, 1, 2))
    raise AssertionError(f"no values for {type(f).__name__}")


def instruction(row: Any, rng: random.Random) -> Instruction:
    args: dict[str, Any] = {}
    for f in row.fields:
        if isinstance(f, Hidden):
            continue
        if isinstance(f, (RegField, PayloadReg)):
            bank = f.banks[0] if isinstance(f, RegField) else f.bank
            absent = f.default is not REQUIRED and rng.random() < 0.4
            n = rng.randrange(7, 10) if f.dest and not f.both else rng.randrange(2) if bank == STATE else \
                rng.randrange(1, 6)
            args[f.name] = None if absent else Reg(bank, n)
        else:
            args[f.name] = option(f, rng, row.sample)
    return Instruction(row, args, size=row.size)


def outcome(program: list[Instruction], values: dict[int, Any], backend: str, seed: int) -> tuple:
    vm = VM(program, backend=backend, threads=1 + seed % 2)
    for n, v in values.items():
        vm.set(Reg(GPR, n), v)
    try:
        vm.run()
        trap: tuple = ()
    except M3Error as e:
        trap = (type(e).__name__, str(e))
    return trap, {k: exact(v) if not hasattr(v, "id") else "handle" for k, v in vm.registers.items()}, vm.main.flags, \
        vm.main.rng, vm.retired


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_compiled_and_interpreted_agree(row):
    for seed in range(TRIES):
        rng = random.Random(f"{row.name} {seed}")
        values = {n: value(rng) for n in range(1, 6)}
        program = [instruction(row, rng), Instruction(BY_NAME["HALT"], {}, size=32)]
        with np.errstate(all="ignore"):
            want = outcome(program, values, "interpreter", seed)
            got = outcome(program, values, "cpu", seed)
        assert got == want, f"seed {seed}: {program[0].op.name} {program[0].args} with " \
            f"{ {n: repr(v) for n, v in values.items()} }\n{want[0]}\n{got[0]}"
