"""Every core opcode on every executor: the interpreter and compiled regions at all CPU levels and thread counts give
the same bytes.  The cases are those of the witness table; an opcode that stays in the slow path is named here."""
from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from m3jit.isa.fields import Hidden, PayloadReg, Reg, RegField
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.table import BY_NAME, Instruction, decode, encode
from m3jit.isa.types import NEW_STATE, Tensor
from m3jit.vm.vm import VM
from tests.ops import (cases, witness_elementwise, witness_layout, witness_lora, witness_recurrent,  # noqa: F401
                       witness_reduce, witness_sampling, witness_transformer)

# In compiled code these always go to the slow path (their table rows say why), whatever their operands.
SLOW_PATH = {"SAMPLE with a draw", "KV_TRUNCATE", "KV_COMPRESS", "SSM_RESET", "HASH", "CHECKSUM"}
LEVELS = (("cpu:baseline", 1), ("cpu:avx2", 2), ("cpu:native", 3))
CASES = 5                                        # per opcode in the default run; `-m slow` runs all, on all levels


def value_bytes(v: Any) -> Any:
    return (v.dtype.name, v.shape, v.tobytes()) if isinstance(v, Tensor) else repr(v)


def instruction(row: Any, case: Any) -> tuple[Instruction, list[tuple[Reg, Any]]]:
    """The case as one instruction with its operands in registers."""
    args: dict[str, Any] = {}
    binds: list[tuple[Reg, Any]] = []
    for f in row.fields:
        if isinstance(f, Hidden):
            continue
        v = case.operands.get(f.name)
        if isinstance(f, (RegField, PayloadReg)):
            if f.dest and not f.both:
                args[f.name] = Reg(0, 100 + len(args))
            elif v is None or v is NEW_STATE:
                args[f.name] = Reg(2, 0) if f.both and f.name in case.operands else None
            else:
                r = Reg(2, 0) if isinstance(v, (KVStream, CellState)) else Reg(0, 1 + len(binds))
                args[f.name] = r
                binds.append((r, contiguous(v)))
        elif v is not None:
            args[f.name] = v
    return decode(encode(Instruction(row, args))), binds


def contiguous(v: Any) -> Any:
    if isinstance(v, Tensor):
        return Tensor(v.dtype, v.shape, np.ascontiguousarray(v.data).reshape(v.data.shape), v.key)
    return v


def outcome(ins: Instruction, binds: list, backend: str, threads: int) -> tuple[dict[str, Any], int]:
    """Everything the instruction changed, and how many instructions ran in native code."""
    vm = VM([ins, Instruction(BY_NAME["HALT"], {})], backend=backend, threads=threads)
    for r, v in binds:
        if isinstance(v, (KVStream, CellState)):
            vm.machine.set_state_of(vm.main, r.index, v)
        else:
            vm.set(r, v)
    vm.run()
    out = {str(r): value_bytes(v) for r, v in vm.main.live_registers().items()}
    stream = vm.machine.state_of(vm.main, 0)
    if isinstance(stream, KVStream):
        out["stream"] = [(n, [a.tobytes() for a in stream.rows(n)]) for n in sorted(stream.layers)]
    if isinstance(stream, CellState):
        out["cells"] = [(key, stream.shapes[key], stream.array(*key).tobytes()) for key in sorted(stream.cells)]
    out["flags"], out["rng"] = vm.main.flags, vm.main.rng
    return out, sum(r.retired for r in vm.regions.regions) if vm.regions is not None else 0


def compare(name: str, chosen: list, executors: tuple) -> int:
    """Native instructions executed over all cases; raises where bytes differ."""
    native = 0
    for case in chosen:
        try:
            ins, binds = instruction(BY_NAME[name], case)
        except Exception as e:                    # an operand no frame can carry (tested with the bodies alone)
            assert type(e).__name__ == "EncodingError", e
            continue
        expected, _ = outcome(ins, binds, "interpreter", 1)
        for backend, threads in executors:
            found, count = outcome(ins, binds, backend, threads)
            native += count
            assert found == expected, f"{name} {case.label}: {backend} with {threads} threads differs"
    return native


def spread(all_cases: list, count: int) -> list:
    step = max(len(all_cases) // count, 1)
    return all_cases[::step][:count]


def on_baseline(all_cases: list) -> list:
    """The first case, and those with NaN, -0 and infinities, where a level without fma is likeliest to differ; of an
    opcode without such a case the first two that are chosen."""
    special = [case for case in all_cases if "special values" in case.label]
    return [all_cases[0], *spread(special, CASES)] if special else spread(all_cases, CASES)[:2]


@pytest.mark.parametrize("name", sorted(cases.WITNESS))
def test_same_bytes(name):
    all_cases = list(cases.WITNESS[name]())
    everywhere = on_baseline(all_cases)
    others = [case for case in spread(all_cases, CASES) if not any(case is one for one in everywhere)]
    native = compare(name, everywhere, LEVELS) + compare(name, others, LEVELS[1:])
    if name not in SLOW_PATH and name != "SAMPLE":
        assert native, f"{name}: no case ran in native code"


def test_special_values_are_on_baseline():
    found = {name: [c.label for c in on_baseline(list(cases.WITNESS[name]()))] for name in cases.WITNESS}
    special = {name for name, labels in found.items() if any("special values" in label for label in labels)}
    assert special >= {"ADD", "CLIP", "EXP", "GELU", "LOG", "MUL", "REDUCE", "RELU", "SIGMOID", "SILU", "SOFTMAX",
                       "SORT", "TANH", "TOPK"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(cases.WITNESS))
def test_same_bytes_all_cases(name):
    executors = tuple(itertools.product(("cpu:baseline", "cpu:avx2", "cpu:native"), (1, 2, 3)))
    compare(name, list(cases.WITNESS[name]()), executors)
