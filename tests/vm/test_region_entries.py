"""What follows an instruction that is not compiled runs as compiled code all the same: counts tell, bytes do not."""
from __future__ import annotations

import numpy as np
import pytest

import m3jit
from m3jit.ir import lift
from m3jit.isa.types import Tensor
from m3jit.vm.batch import Batch

# Nothing jumps behind the slices, which start at a register and are not compiled.
STRAIGHT = """
    MATVEC rX, rX, rW
    SLICE rY, rX, START=rAt LEN=2
    MATVEC rY, rY, rW
    SLICE rZ, rY, START=rAt LEN=1
    SLICE rY, rY, START=rAt LEN=1
    MATVEC rY, rY, rW
    ADD rY, rY, rZ
    HALT
"""
NOT_COMPILED = 4                                       # three SLICE and HALT
WEIGHTS = (np.random.default_rng(1).standard_normal((128, 128)) / 12).astype(np.float32)


def machine(code: m3jit.Program, backend: str = "cpu", seed: int = 0) -> m3jit.VM:
    vm = m3jit.VM(code, backend=backend, threads=1)
    vm.set("rX", np.random.default_rng(seed).standard_normal((3, 128)).astype(np.float32))
    vm.set("rW", Tensor.of(WEIGHTS))
    vm.set("rAt", 1)
    return vm


def result(vm: m3jit.VM) -> bytes:
    return vm.get("rY").numpy().tobytes()


@pytest.fixture
def expected() -> bytes:
    vm = machine(m3jit.assemble(STRAIGHT), "interpreter").run()
    assert vm.retired == 8
    return result(vm)


def test_what_follows_is_compiled(expected):
    code = m3jit.assemble(STRAIGHT)
    for _ in range(3):                                 # the second machine finds the code of the first
        vm = machine(code).run()
        assert result(vm) == expected and vm.retired == 8
        assert vm.regions.retired == vm.retired - NOT_COMPILED


def test_what_follows_is_compiled_for_machines_together():
    code = m3jit.assemble(STRAIGHT)
    alone = [machine(code, "interpreter", seed).run() for seed in range(3)]
    together, batch = [machine(code, seed=seed) for seed in range(3)], Batch()
    for vm in together:
        batch.add(vm)
    batch.run()
    assert [*map(result, together)] == [*map(result, alone)]
    assert [vm.regions.retired for vm in together] == [8 - NOT_COMPILED] * 3
    assert batch.stats["shared_entries"] == 9          # each of the three regions, by each machine


def test_a_first_instruction_that_is_not_compiled():
    code = m3jit.assemble("SLICE rY, rX, START=rAt LEN=2\nMATVEC rY, rY, rW\nADD rY, rY, rY\nHALT")
    vm = machine(code).run()
    assert vm.regions.retired == 2 and result(vm) == result(machine(code, "interpreter").run())


def test_the_next_region_begins_where_one_is_full(monkeypatch):
    monkeypatch.setattr(lift, "MAX_INSTRUCTIONS", 5)
    code = m3jit.assemble("MATVEC rY, rX, rW\n" + "ADD rY, rY, rX\n" * 30 + "MOV rY, rY\nMOV rAt, rAt\nHALT")
    vm = machine(code).run()
    assert vm.regions.retired == 33 == vm.retired - 1
    assert result(vm) == result(machine(code, "interpreter").run())


def test_branches_alone_are_no_region():
    """Where no register is written on any way, entering would cost more than it does."""
    code = m3jit.assemble("""
        LOADI rN, 3
    again:
        IF_INTERRUPT end
        SUB rN, rN, 1
        COMPARE rN, 0
        STREAM rN, OUTPUT RAW
        IF_GREATER again
        JUMP end
    end:
        HALT
    """)
    vm, out = m3jit.VM(code, backend="cpu", threads=1), []
    vm.set_sink("OUTPUT", out.append)
    vm.run()
    assert [int.from_bytes(b, "little") for b in out] == [2, 1, 0]
    assert vm.regions.retired == 1 + 3 * 2             # LOADI, SUB and COMPARE
    assert vm.retired == vm.regions.retired + 3 * 3 + 2


def test_a_loop_around_it():
    code = m3jit.assemble(f"LOADI rI, 0\nMOV rIn, rX\nloop:\nMOV rX, rIn\n{STRAIGHT.replace('HALT', '')}"
                          "ADD rI, rI, 1\nCOMPARE rI, 20\nIF_LESS loop\nHALT")
    vm, reference = machine(code).run(), machine(code, "interpreter").run()
    assert (result(vm), vm.retired) == (result(reference), reference.retired)
    assert vm.regions.retired == vm.retired - 3 * 20 - 1


@pytest.mark.parametrize("before", [False, True])
def test_machines_whose_small_regions_are_interpreted(before):
    """"auto" compiles the large part alone, though a small one ends before it; for each machine, made early or late."""
    lines = ["ADD rY, rX, rX", "SLICE rY, rY, START=rAt LEN=2", *["MATVEC rY, rY, rW"] * 40, "HALT"]
    code = m3jit.assemble("\n".join(lines))
    made = [machine(code, "auto", i) for i in range(3)] if before else []
    for i in range(3):
        vm = (made[i] if before else machine(code, "auto", i)).run()
        assert vm.regions.retired == 40, i
        assert result(vm) == result(machine(code, "interpreter", i).run())
