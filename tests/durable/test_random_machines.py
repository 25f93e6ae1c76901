"""Random programs of several contexts, lost and restored again and again: they do what they do in one piece."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import m3jit
from m3jit.durable import Store
from m3jit.vm.digest import parts
from tests.durable.simulated_disk import SimulatedDisk
from tests.timetravel.random_programs import random_program

STEPS = 600                        # instructions at most
FOLDER = Path("/disk/store")


def machine(program: Any, limit: int, said: list[Any], backend: str) -> Any:
    vm = m3jit.VM(program, backend, max_steps=limit)
    vm.set_sink("OUTPUT", said.append)
    return vm


def ended(vm: Any) -> str:
    """Run it; how that ended ("": at the limit)."""
    try:
        vm.run()
    except m3jit.LimitError:
        return ""
    except m3jit.errors.UserError as e:
        return f"{type(e).__name__}: {e}"
    return "done"


def in_one_piece(program: Any, backend: str) -> tuple[str, list[Any], list[Any]]:
    """(how it ended, what it said, the main context's version)."""
    said: list[Any] = []
    vm = machine(program, STEPS, said, backend)
    give(vm)
    return ended(vm), said, list(parts(vm.main))


def in_pieces(program: Any, piece: int, backend: str) -> tuple[str, list[Any], list[Any]]:
    """The same of a machine that is committed and made anew after every `piece` instructions."""
    said: list[Any] = []
    vm = machine(program, piece, said, backend)
    give(vm)
    with Store.open(FOLDER, files=SimulatedDisk()) as store:
        for done in range(piece, STEPS + 1, piece):
            how = ended(vm)
            if how or done == STEPS:
                return how, said, list(parts(vm.main))
            store.commit(vm, "a")
            vm = machine(program, piece, said, backend)
            store.restore(vm, "a")
    raise AssertionError("unreachable")


def give(vm: Any) -> None:
    for word in ("one", "two", "three"):
        vm.push_input(word)


def compare(seed: int, piece: int, backend: str) -> str:
    program = m3jit.assemble(random_program(seed).replace("CYCLES_COUNT R6", "NOP"), f"seed{seed}.m3asm")
    straight, pieces = in_one_piece(program, backend), in_pieces(program, piece, backend)
    assert pieces[:2] == straight[:2], (seed, piece)
    assert pieces[2] == straight[2], (seed, piece)
    return straight[0]


@pytest.mark.parametrize("seed", range(40))
def test_random_machines(seed):
    compare(seed, (20, 50, 120)[seed % 3], "interpreter")


def test_the_programs_end_in_many_ways():
    found = {in_one_piece(m3jit.assemble(random_program(seed).replace("CYCLES_COUNT R6", "NOP")),
                          "interpreter")[0].split(":")[0] for seed in range(40)}
    assert {"", "done", "Trap"} <= found


@pytest.mark.slow
def test_random_machines_many():
    for seed in range(40, 3000):
        compare(seed, (1, 3, 10, 25, 60, 150)[seed % 6], "interpreter" if seed % 5 else "cpu")
