"""Random instructions over the whole executable table on random registers: each runs, or says why in one line; nothing
hangs, crashes or is called an error of m3jit, a trap leaves every register as it was, and a second run does the same.
"""
from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from m3jit.errors import InternalError, M3Error
from m3jit.frontend.records import SymbolKind
from m3jit.isa.fields import FloatOrReg, IntOrReg, PayloadReg, Reg, RegField, ShapeField
from m3jit.isa.table import OPS
from m3jit.isa.types import BF16, Tensor
from m3jit.vm.context import READY
from m3jit.vm.vm import VM
from tests.frontend.samples import program
from tests.vm.test_system_ops import Provider

OUTSIDE = {"CYCLES_COUNT", "DUMP"}                     # differ from run to run, or print
ROWS = [r for r in OPS if r.executable and r.name not in OUTSIDE]


def tensor(rng: random.Random) -> Tensor:
    shape = [rng.choice((0, 1, 2, 3, 5, 32)) for _ in range(rng.randrange(0, 4))]
    draw = np.random.default_rng(rng.getrandbits(32))
    kind = rng.randrange(8)
    if kind == 0:
        return Tensor.of(draw.integers(0, 4, shape))
    if kind == 1:
        return Tensor.of(draw.integers(0, 256, shape, dtype=np.uint8))
    if kind == 2:
        return Tensor.of(draw.random(shape) < 0.5)
    if kind == 3:
        return Tensor(BF16, tuple(shape), draw.integers(0, 2 ** 16, shape, dtype=np.uint16))
    if kind == 4:
        return Tensor.of(draw.integers(0, 2 ** 16, shape, dtype=np.uint16).view(np.float16))
    return Tensor.of(draw.standard_normal(shape).astype(np.float32))


def value(rng: random.Random, kinds: tuple[str, ...]):
    """A register value of one of these kinds (now and then of another)."""
    makers = {"int": lambda: rng.choice((rng.randrange(-2, 6), rng.randrange(-2 ** 63, 2 ** 63), 0x3 << 60, 0x6 << 60)),
              "float": lambda: rng.choice((rng.uniform(-4, 4), float("nan"), float("inf"), 1e300)),
              "tensor": lambda: tensor(rng)}
    known = [k for k in kinds if k in makers] if rng.random() < 0.95 else []
    return makers[rng.choice(known or list(makers))]()


def give(vm: VM, reg: Reg, kinds: tuple[str, ...], rng: random.Random) -> None:
    if reg.bank == 0 and reg.index < 255 and not set(kinds) & {"state", "snapshot", "context"}:
        vm.set(reg, value(rng, kinds))
    elif reg.bank == 1 and rng.random() < 0.9:
        vm.set(reg, np.random.default_rng(rng.getrandbits(32)).standard_normal(8).astype(np.float32))


def prepare(vm: VM, ins, rng: random.Random) -> None:
    """Values of fitting kinds for the sources of an instruction."""
    for f in ins.op.fields:
        v = ins.args.get(f.name)
        if isinstance(f, (RegField, PayloadReg)) and isinstance(v, Reg) and (not f.dest or f.both):
            give(vm, v, ("int", "float", "tensor") if "any" in f.kinds else f.kinds, rng)
        elif isinstance(f, IntOrReg) and isinstance(v, Reg):
            vm.set(v, value(rng, ("float",) if isinstance(f, FloatOrReg) else ("int",)))
        elif isinstance(f, ShapeField):
            for d in v:
                if isinstance(d, Reg):
                    vm.set(d, rng.choice((0, 1, 3, -1, 32)))


def shown(vm: VM) -> dict[str, object]:
    """Registers, comparable between runs."""
    return {str(r): (v.dtype.name, v.shape, v.tobytes()) if isinstance(v, Tensor) else repr(v)
            for r, v in vm.main.live_registers().items()}


def run(seed: int) -> list:
    """Every instruction of a random program in order, wherever it would have gone: what each one did."""
    rng = random.Random(seed)
    p = program(rng, [rng.choice(ROWS) for _ in range(12)])
    p.imports = []
    p.symbols = [replace(s, kind=SymbolKind.LABEL) if s.kind == SymbolKind.EXTERN else s for s in p.symbols]
    vm = VM(p, backend="interpreter", files=None, models=Provider(), memory_limit=1 << 20, tensor_limit=1 << 20)
    for name in ("OUTPUT", "ERROR"):
        vm.set_sink(name, lambda _: None)
    for ins in vm.image.instructions:
        if ins.args.get("peripheral") == "TIME":
            ins.args["peripheral"] = "USER_INPUT"
    did = []
    for i, ins in enumerate(vm.image.instructions):
        prepare(vm, ins, rng)
        ctx, before = vm.main, shown(vm)
        ctx.index, ctx.status, ctx.trap = i, READY, None
        try:
            vm.interpreter.run_exactly(ctx, 1)
            error = str(ctx.trap) if ctx.trap is not None else ""
        except InternalError:
            raise
        except M3Error as e:
            error = str(e)
        assert "\n" not in error and (not error or ins.op.name in error), error
        after = shown(vm)
        if error and not ins.args.get("inplace"):
            assert after == before, f"{ins.op.name} wrote before it trapped: {error}"
        did.append((ins.op.name, error, after))
    return did


@pytest.mark.parametrize("block", range(10))
def test_random_instructions(block):
    ran = 0
    for seed in range(block * 25, block * 25 + 25):
        try:
            first = run(seed)
            assert first == run(seed)
        except Exception as e:
            raise AssertionError(f"seed {seed}: {type(e).__name__}: {e}") from e
        ran += sum(not error for _, error, _ in first)
    assert ran > 50                                    # it is not all refusals
