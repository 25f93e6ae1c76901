"""Every opcode of the value families against its witness, and the mutation check of the witnesses."""
from __future__ import annotations

import math

import pytest

from m3jit.isa import table
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.types import Tensor
from tests.ops import (witness_elementwise, witness_layout, witness_lora, witness_recurrent, witness_reduce,
                       witness_sampling, witness_transformer)
from tests.ops.cases import WITNESS, execute, mutants, values

MODULES = {witness_elementwise, witness_layout, witness_lora, witness_recurrent, witness_reduce, witness_sampling,
           witness_transformer}
FAMILIES = {f"m3jit.isa.{n}" for n in ("ssm_audio", "tensor", "elementwise", "layout", "reduce", "transformer",
                                       "sampling", "learning")}
SIZES = {"empty": lambda n: n == 0, "one": lambda n: n == 1, "odd": lambda n: n > 1 and n % 2 == 1,
         "over 64": lambda n: n > 64}
IMPOSSIBLE = {"QUANTIZE": {"one", "odd"}}                                # whole blocks of 32
WITHOUT_SIZES = {"RNG_SEED", "RNG_NEXT", "RNG_NORMAL", "RNG_UNIFORM"}      # no tensor operand


def test_every_executable_opcode_of_these_families_has_a_row():
    wanted = {r.name for r in table.OPS if r.executable and r.body.__module__ in FAMILIES}
    assert len(wanted) >= 46 and wanted == set(WITNESS)


def test_every_row_states_its_shape_and_dtypes():
    for row in (table.BY_NAME[n] for n in WITNESS):
        if any(f.kinds == ("tensor",) for f in row.registers() if f.dest):
            assert row.shape and row.dtypes, row.name


@pytest.mark.parametrize("name", sorted(WITNESS))
def test_result_agrees_with_the_witness(name):
    count = 0
    for case in WITNESS[name]():
        results = execute(name, case.operands)
        try:
            if case.shape is not None:
                assert values(results[0]).shape == case.shape or results[0].shape == case.shape
            case.check(*results)
        except AssertionError as e:
            raise AssertionError(f"{name}, case {case.label}: {e}") from e
        count += 1
    assert count >= 3


@pytest.mark.parametrize("name", sorted(WITNESS))
def test_a_change_of_one_percent_is_noticed(name):
    tried = 0
    for case in WITNESS[name]():
        results = execute(name, case.operands)
        for i, result in enumerate(results):
            for mutant in mutants(result):
                tried += 1
                with pytest.raises(AssertionError):
                    case.check(*results[:i], mutant, *results[i + 1:])
                    print(f"{name}, case {case.label}: the witness accepts a mutated result {i}")
    assert tried >= 3


def size_of(v) -> list[int]:
    if isinstance(v, CellState):
        return [sum(v.array(*key).size for key in v.cells)]
    if isinstance(v, KVStream):
        return [sum(map(v.length, v.layers))]
    return [v.size] if isinstance(v, Tensor) else [math.prod(v)] if isinstance(v, tuple) else []


@pytest.mark.parametrize("name", sorted(set(WITNESS) - WITHOUT_SIZES))
def test_cases_cover_empty_single_odd_and_large_operands(name):
    sizes = [n for case in WITNESS[name]() for v in case.operands.values() for n in size_of(v)]
    missing = {what for what, holds in SIZES.items() if not any(map(holds, sizes))}
    assert missing <= IMPOSSIBLE.get(name, set()), f"{name} has no operand that is {missing}"
