"""Random programs with loops and branches on their data, run by several machines at once: each machine ends with the
registers, the counters and the error it has alone."""
from __future__ import annotations

import random

import numpy as np
import pytest

import m3jit
from m3jit.isa.types import Tensor
from m3jit.vm.batch import Batch
from m3jit.vm.stopping import ATTENTION
from tests.api.outcomes import exact
from tests.api.random_programs import array, generate
from tests.backends.cpu_engines import LEVELS

COLUMNS = 48
STATEMENTS = ("MATVEC rX, rX, rW", "MUL rX, rX, rY", "ADD rX, rX, rB", "SILU rY, rX", "SOFTMAX rY, rX AXIS=1",
              "ADD rX, rX, rY", "MATVEC rY, rX, rW2 TRANSPOSE", "TANH rY, rY", "ARGMAX rA, rX, AXIS=1",
              "REDUCE rS, rX SUM AXIS=1 KEEPDIMS", "SUB rX, rX, rS", "TRANSPOSE rT, rX", "GETELEM rE, rX, INDEX=3")
REGISTERS = "rX rY rW rW2 rG rB rN rFuse rI rE rS rA rT rQ".split()
GROWS = "NORM rX, rX, rG RMS EPS=1e-5"


def program(rng: random.Random) -> m3jit.Program:
    """A loop of rN rounds over blocks of tensor instructions; which blocks a round executes hangs on the data."""
    def block(label: str) -> list[str]:
        lines = [f"{label}:", *(rng.choice(STATEMENTS) for _ in range(rng.randint(1, 4))), GROWS]
        if rng.random() < 0.3:
            lines.append("DIV rQ, rN, rFuse")                  # rFuse counts down; 0 traps
        return lines
    lines = ["LOADI rI, 0", "LOADI rE, 0.0", "REDUCE rS, rX SUM AXIS=1 KEEPDIMS", "loop:", "SUB rFuse, rFuse, 1"]
    for i in range(rng.randint(1, 3)):
        lines += [f"GETELEM rE, rX, INDEX={rng.randrange(2 * COLUMNS)}",
                  f"COMPARE rE, {rng.choice(('0.0', '-0.3', '0.4'))}", f"IF_LESS other_{i}", *block(f"one_{i}"),
                  f"JUMP after_{i}", *block(f"other_{i}"), f"after_{i}:", "NOP"]
    lines += ["ADD rI, rI, 1", "COMPARE rI, rN", "IF_LESS loop"]
    if rng.random() < 0.5:
        lines.append("STREAM rI TENSOR")               # a slow instruction: machines leave the region, and meet again
        lines += ["ADD rN, rN, -1", "LOADI rI, 0", "COMPARE rN, 2", "IF_GREATER loop"]
    names = [f".reg {name} R{i}" for i, name in enumerate(REGISTERS)]
    return m3jit.assemble("\n".join([*names, *lines, "HALT"]))


def prepared(code: m3jit.Program, seed: int, shared: dict[str, Tensor], level: str, threads: int) -> m3jit.VM:
    """A machine with data of its own; the matrices are the same objects for all."""
    g = np.random.default_rng(seed)
    vm = m3jit.VM(code, backend=f"cpu:{level}", threads=threads)
    rows = int(g.choice((2, 3, 5, 9)))
    for name, value in {"rX": g.standard_normal((rows, COLUMNS)), "rY": g.standard_normal((rows, COLUMNS))}.items():
        vm.set(name, value.astype(np.float32))
    for name, value in shared.items():
        vm.set(name, value)
    vm.set("rN", int(g.integers(1, 8)))
    vm.set("rFuse", int(g.choice((3, 1000, 1000))))
    vm.set_sink("OUTPUT", lambda item: None)
    return vm


def ended(vm: m3jit.VM) -> tuple:
    return {n: exact(v) for n, v in vm.registers.items()}, vm.retired, vm.main.flags, str(vm.error), vm.main.status


@pytest.mark.parametrize("level, seeds", [(level, range(8) if level == "native" else range(2)) for level in LEVELS])
def test_each_machine_ends_as_it_does_alone(level, seeds):
    joined = failed = 0
    for seed in seeds:
        rng = random.Random(seed)
        code, g = program(rng), np.random.default_rng(seed)
        shared = {"rW": Tensor.of(g.standard_normal((COLUMNS, COLUMNS)).astype(np.float32)),
                  "rW2": Tensor.of(g.standard_normal((COLUMNS, COLUMNS)).astype(np.float32)),
                  "rG": Tensor.of(np.ones(COLUMNS, np.float32)),
                  "rB": Tensor.of(g.standard_normal(COLUMNS).astype(np.float32))}
        n, threads = rng.randint(2, 5), rng.randint(1, 3)
        alone = [prepared(code, 10 * seed + i, shared, level, threads) for i in range(n)]
        for vm in alone:
            try:
                vm.run()
            except m3jit.Trap:
                failed += 1
        together = [prepared(code, 10 * seed + i, shared, level, threads) for i in range(n)]
        batch = Batch()
        for vm in together:
            batch.add(vm)
            if rng.random() < 0.3:
                batch.step()                                   # those before are ahead by a round
        batch.run()
        for one, other in zip(alone, together):
            assert ended(other) == ended(one), seed
        joined += batch.stats["joined_launches"]
    assert joined > 10                                         # launches did serve several machines
    assert failed or level != "native"


def with_inputs(p, code: m3jit.Program, seed: int) -> m3jit.VM:
    """A machine of a random straight program with values of its own in the inputs, of the same types and shapes."""
    rng = random.Random(seed)
    vm = m3jit.VM(code, backend="cpu", threads=1 + seed % 3)
    for item, value in zip(p.inputs, p.arguments):
        if item.kind == "tensor" and item.dtype is not None and not item.dtype.is_block:
            value = array(rng, item.dtype, item.shape)
        vm.set(item.value.name, value)
    return vm


def straight(seed: int) -> int:
    """Machines of a random straight program, alone and together; how many launches were joined."""
    p = generate(seed, length=40, mixed=seed % 4 == 2)
    code = p.builder.build()
    seeds = [100 * seed + i for i in range(2 + seed % 4)]
    alone, together, batch = [with_inputs(p, code, s) for s in seeds], [with_inputs(p, code, s) for s in seeds], Batch()
    for vm in alone:
        vm.run()
    members = [batch.add(vm) for vm in together]
    batch.run()
    assert [m.error for m in members] == [None] * len(seeds)
    for one, other in zip(alone, together):
        assert ended(other) == ended(one), seed
    return batch.stats["joined_launches"]


def test_straight_programs_of_all_types():
    """Every kind of tensor instruction the generator draws, every dtype; shapes with 1 and odd numbers."""
    assert sum(straight(seed) for seed in range(8)) > 80


def test_results_without_dimensions_are_each_machine_s_own():
    code = m3jit.assemble("MUL rY, rX, rX\nREDUCE rSum, rY, SUM AXIS=0\nHALT")
    made = [m3jit.VM(code, backend="cpu", threads=1) for _ in range(3)]
    batch = Batch()
    for i, vm in enumerate(made):
        vm.set("rX", np.full(5, i + 1, np.float32))
        batch.add(vm)
    batch.run()
    assert batch.stats["shared_entries"] == 3
    assert [vm.get("rSum").numpy().tolist() for vm in made] == [5.0, 20.0, 45.0]


TURNS = """
    SPAWN_CONTEXT rSleeper, sleeper, GREEN
    SPAWN_CONTEXT rOther, second, GREEN
    LOADI rWho, 1
    LOADI rLong, 900
    JUMP work
second:
    LOADI rWho, 2
    LOADI rLong, 700
work:
    LOADI rN, 0
more:
    ADD rN, rN, 1
    LOADI rK, 0
round:
    ADD rK, rK, 1
    COMPARE rK, rLong
    IF_LESS round
    STREAM rWho
    COMPARE rN, 30
    IF_LESS more
    HALT
sleeper:
    SENSE rX, USER_INPUT
    HALT
"""


def test_who_looks_at_a_machine_changes_none_of_its_turns():
    """A slice that is cut for somebody's attention is gone on with, alone and in a batch."""
    def said(together: bool, attention: bool) -> list[str]:
        vm = m3jit.VM(m3jit.assemble(TURNS, "turns.m3asm"), backend="interpreter", wait_input=True)
        out: list[str] = []

        def hear(item: object) -> None:
            out.append(str(item))
            if attention:
                vm.stop_word.set(ATTENTION)
            if len(out) == 60:
                vm.push_input("end")
        vm.set_sink("OUTPUT", hear)
        if together:
            batch = Batch()
            member = batch.add(vm)
            batch.run()
            assert member.error is None
        else:
            vm.run()
        return out
    alone = said(False, False)
    assert alone == said(False, True) == said(True, False) == said(True, True) and len(set(alone)) == 2
