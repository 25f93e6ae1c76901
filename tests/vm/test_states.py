"""Values that live in the root besides registers and memory: KV streams, random streams; INPLACE; tensors from memory;
the same order of contexts in compiled code."""
from __future__ import annotations

import numpy as np
import pytest

from m3jit.errors import Trap
from tests.vm.programs import machine, outputs, run

ACT = "0x3000000000000000"


def step(rng: np.random.Generator, rows: int = 1) -> np.ndarray:
    return rng.standard_normal((rows, 8)).astype(np.float32)


def attend(source: str, arrays: dict[str, np.ndarray]):
    vm = machine(source)
    for name, a in arrays.items():
        vm.set(name, a)
    return vm.run()


def test_a_rolled_back_stream_forgets_what_was_appended():
    rng = np.random.default_rng(1)
    a, b, c = step(rng, 3), step(rng, 2), step(rng)
    head = "ATTN r9, r1, r1, r1, S0, HEADS=2, CAUSAL\n"
    straight = attend(head + "ATTN r10, r3, r3, r3, S0, HEADS=2, CAUSAL\nHALT", {"r1": a, "r3": c}).get("r10")
    again = attend(head + "FORK rS\nATTN r9, r2, r2, r2, S0, HEADS=2, CAUSAL\nABORT rS\n"
                   "ATTN r10, r3, r3, r3, S0, HEADS=2, CAUSAL\nHALT", {"r1": a, "r2": b, "r3": c}).get("r10")
    other = attend(head + "ATTN r9, r2, r2, r2, S0, HEADS=2, CAUSAL\nATTN r10, r3, r3, r3, S0, HEADS=2, CAUSAL\nHALT",
                   {"r1": a, "r2": b, "r3": c}).get("r10")
    assert again.tobytes() == straight.tobytes() != other.tobytes()


def test_a_child_continues_its_own_copy_of_a_stream():
    rng = np.random.default_rng(2)
    arrays = {f"r{i}": step(rng) for i in (1, 2, 3)}
    source = """
        ATTN r9, r1, r1, r1, S0, HEADS=2, CAUSAL
        FORK rC, child, {priority}
        ATTN r9, r2, r2, r2, S0, HEADS=2, CAUSAL
        STREAM r9, SINK, NAME="parent"
        HALT
    child:
        ATTN r9, r3, r3, r3, S0, HEADS=2, CAUSAL
        STREAM r9, SINK, NAME="child"
        HALT"""
    results = {}
    for priority in ("RED", "GREEN"):                  # the first to append claims the slot, the other copies the page
        vm = machine(source.format(priority=priority))
        for name, a in arrays.items():
            vm.set(name, a)
        for who in ("parent", "child"):
            vm.set_sink(who, lambda x, w=(priority, who): results.__setitem__(w, x.tobytes()))
        vm.run()
    assert results["RED", "parent"] == results["GREEN", "parent"]
    assert results["RED", "child"] == results["GREEN", "child"] != results["RED", "parent"]


def test_a_handle_in_a_general_register_names_the_same_stream():
    rng = np.random.default_rng(3)
    a = {"r1": step(rng), "r2": step(rng)}
    moved = attend("ATTN r9, r1, r1, r1, S0, CAUSAL\nMOV r20, S0\nMOV S5, r20\nATTN r9, r2, r2, r2, S5, CAUSAL\n"
                   "ATTN r10, r2, r2, r2, S0, CAUSAL\nHALT", a)
    plain = attend("ATTN r9, r1, r1, r1, S0, CAUSAL\nATTN r9, r2, r2, r2, S0, CAUSAL\n"
                   "ATTN r10, r2, r2, r2, S0, CAUSAL\nHALT", a)
    assert moved.get("r10").tobytes() == plain.get("r10").tobytes()
    assert moved.get("r20") == moved.get("S0") == moved.get("S5")


def test_a_stream_made_after_the_snapshot_is_gone():
    vm = machine("SNAPSHOT rS\nATTN r9, r1, r1, r1, S0, CAUSAL\nRESTORE rS\nATTN r9, r1, r1, r1, S0, CAUSAL\nHALT")
    vm.set("r1", step(np.random.default_rng(4)))
    with pytest.raises(Trap, match=r"S0 \(state\) names .* which does not exist here"):
        vm.run()


def test_random_streams_roll_back():
    vm = run("LOADI r1, 7\nRNG_SEED r1\nRNG_NEXT r2\nFORK rS\nRNG_NEXT r3\nSTREAM r3, SINK, NAME=\"x\"\nRNG_NEXT r4\n"
             "ABORT rS\nRNG_NEXT r5\nHALT".replace('STREAM r3, SINK, NAME="x"', "NOP"))
    straight = run("LOADI r1, 7\nRNG_SEED r1\nRNG_NEXT r2\nRNG_NEXT r3\nHALT")
    assert vm.get("r2") == straight.get("r2") and vm.get("r5") == straight.get("r3") and vm.get("r3") is None


def test_inplace_empties_the_source():
    vm = machine("ROPE r2, r1, POS=3, INPLACE\nHALT")
    vm.set("r1", step(np.random.default_rng(5)))
    assert vm.run().get("r1") is None and vm.get("r2") is not None
    vm = machine("ROPE r1, r1, POS=3, INPLACE\nHALT")
    vm.set("r1", step(np.random.default_rng(5)))
    assert vm.run().get("r1") is not None


@pytest.mark.parametrize("dtype", ["F32", "F16", "I8", "U8", "I16", "I32", "I64", "BOOL"])
def test_tensors_from_memory(dtype):
    names = {"F32": "<f4", "F16": "<f2", "I8": "i1", "U8": "u1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "BOOL": "?"}
    raw = bytes(range(1, 49))
    vm = machine(f"LOADI rA, {ACT}\nMEMCPY rA, r1\nLOADI rN, 3\nTENSOR r2, FROM=rA, SHAPE=[2, rN], DTYPE={dtype}\n"
                 f"MEMCPY rA, r2, DST_OFFSET=100\nTENSOR r3, FROM=rA, SHAPE=[0, 7], DTYPE={dtype}\nHALT")
    vm.set("r1", np.frombuffer(raw, np.uint8))
    vm.run()
    want = (np.frombuffer(raw, np.uint8)[:6] != 0) if dtype == "BOOL" else np.frombuffer(raw, names[dtype])[:6]
    assert np.array_equal(vm.get("r2").numpy(), want.reshape(2, 3)) and vm.get("r3").shape == (0, 7)
    assert vm.main.memory.read((0x3 << 60) + 100, want.nbytes) == want.tobytes()
    with pytest.raises(Trap, match="ACTIVATION"):
        run(f"LOADI rA, {ACT}\nTENSOR r2, FROM=rA, SHAPE=[100000, 100000], DTYPE=F32\nHALT")


def test_tensors_that_are_too_large():
    refused = r"out of memory: a F32 tensor \[1000, 1000\] takes 4000000 bytes; the limit is 1000"
    with pytest.raises(Trap, match=refused):
        run("TENSOR r1, SHAPE=[1000, 1000]\nHALT", tensor_limit=10 ** 6)


ORDER = """
    LOADI r1, 0
spawn:
    FORK rC, work, GREEN
    ADDI r1, r1, 1
    COMPARE r1, 4
    IF_LESS spawn
    HALT
work:
    LOADI r3, 0
outer:
    LOADI r5, 0
inner:
    ADDI r5, r5, 1
    MULI r6, r1, 3
    ADDI r6, r6, 40
    COMPARE r5, r6
    IF_LESS inner
    ADDI r3, r3, 1
    MODI r4, r3, 97
    COMPARE r4, 0
    IF_NOT_EQUAL outer
    STREAM r1
    COMPARE r3, 900
    IF_LESS outer
    HALT"""


@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_contexts_take_turns_in_the_same_order_compiled_and_interpreted(backend):
    want = outputs(ORDER)
    assert len(set("".join(want)[:8])) > 1 and outputs(ORDER, backend=backend) == want
