"""Programs whose registers change kind, or share a state, around compiled regions: same outcome on every executor."""
from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from m3jit.errors import Trap
from m3jit.frontend import assemble
from m3jit.vm import jit
from m3jit.vm.streams import CallbackSink
from m3jit.vm.vm import VM

KIND_CHANGES = """
    LOADI rA, 7
    LOADI rC, 5
    LOADI rN, 2
top:
    AND rA, rC, rA          ; traps in the second round, although its result is overwritten
    RNG_NORMAL rA
    COMPARE rN, 0
    IF_GREATER top
    HALT
"""
COPIED_HANDLE = """
.data
q: .f32 [1, 4] [1.0, 2.0, 3.0, 4.0]
k: .f32 [1, 4] [4.0, 3.0, 2.0, 1.0]
.text
    LOADI rQ, @q
    LOADI rK, @k
    ATTN rA, rQ, rQ, rQ, sA
    MOV sB, sA
    ATTN rB, rQ, rK, rK, sB
    ATTN rC, rQ, rK, rK, sA
    STREAM rA, OUTPUT TEXT LINE
    STREAM rB, OUTPUT TEXT LINE
    STREAM rC, OUTPUT TEXT LINE
    HALT
"""
BACKENDS = ("interpreter", "cpu", "auto", "python")


def run(text: str, backend: str) -> tuple[str, str]:
    """What the program wrote, and how it ended."""
    out: list[str] = []
    vm = VM(assemble(text), backend=backend, threads=2, max_steps=10_000)
    vm.sinks["OUTPUT"] = CallbackSink("output", lambda b: out.append(b if isinstance(b, str) else bytes(b).decode()))
    try:
        vm.run()
    except Trap as e:
        return "".join(out), str(e)
    return "".join(out), ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dead_instruction_still_traps_on_its_operand(backend):
    _, end = run(KIND_CHANGES, backend)
    assert "AND" in end and "holds a float, expected an integer" in end


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copied_handle_names_the_same_stream(backend):
    written, end = run(COPIED_HANDLE, backend)
    assert end == ""
    assert (written, end) == run(COPIED_HANDLE, "interpreter")
    rows = [np.array(eval(line)) for line in written.split("\n") if line]
    assert rows[0].tolist() == [[1.0, 2.0, 3.0, 4.0]] and (rows[1] != rows[2]).any(), "three streams of 1, 2, 3 rows"


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unwritten_state_cannot_be_copied(backend):
    _, end = run("    MOV sB, sA\n    HALT\n", backend)
    assert "was never written" in end


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stored_nan_is_canonical_in_a_stream(backend):
    vm = VM(assemble("    ATTN rA, rX, rX, rX, sA\n    HALT\n"), backend=backend, threads=1)
    bits = np.array([0x7FA00001, 0xFFC12345, 0x3F800000, 0], np.uint32).reshape(1, 4)
    vm.set("rX", bits.view(np.float32))
    vm.run()
    keys, _ = vm.machine.state_of(vm.main, 0).rows(0)
    assert keys.view(np.uint32).ravel().tolist() == [0x7FC00000, 0x7FC00000, 0x3F800000, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(4,), (9,), (2, 8)])
def test_a_vector_register_takes_eight_floats(backend, shape):
    vm = VM(assemble("    RELU V1, rX\n    HALT\n"), backend=backend, threads=1)
    vm.set("rX", np.ones(shape, np.float32))
    with pytest.raises(Trap, match="V register holds a F32 tensor of shape"):
        vm.run()


@pytest.mark.parametrize("backend", BACKENDS)
def test_instructions_are_counted_before_one_that_is_left_to_the_interpreter(backend):
    """TOPK of BOOL emits a check and then cannot be compiled: what came before it still counts."""
    vm = VM(assemble("    ADD rA, rX, rX\n    TOPK rB, rC, K=1\n    HALT\n"), backend=backend, threads=1)
    vm.set("rX", np.ones((3, 4), np.float32))
    vm.set("rC", np.array([True, False, True]))
    vm.run()
    assert vm.retired == 3


@pytest.mark.parametrize("rounds", [1, 2, 3, 63, 64, 65, 200])
@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_a_stream_that_grows_in_a_compiled_loop(backend, rounds):
    """Rows are reserved for one round of a loop; every round gets its own."""
    source = f"""
.data
a: .f32 [[1, 2, 3, 4]]
.text
    LOADV rA, @a
    LOADI rN, {rounds}
top:
    ATTN rX, rA, rA, rA, sA
    ADD rA, rX, rA
    SUB rN, rN, 1
    COMPARE rN, 0
    IF_GREATER top
    HALT
"""
    found = []
    for name in ("interpreter", backend):
        vm = VM(assemble(source), name).run()
        found.append((vm.get("rX").tobytes(), vm.retired))
    assert found[0] == found[1]


@pytest.mark.parametrize("value", [1e-320, 0.0, 0.7])
def test_sampling_options_in_registers_are_rounded_to_f32_first(value):
    """A temperature that is zero as F32 draws nothing, wherever the instruction runs."""
    ends = []
    for backend in BACKENDS:
        vm = VM(assemble("    SAMPLE rA, rX, TEMP=rT\n    RNG_NEXT rN\n    HALT\n"), backend=backend, threads=1)
        vm.set("rX", np.array([1, 2, 3, 4], np.float32))
        vm.set("rT", value)
        vm.run()
        ends.append((vm.get("rA"), vm.get("rN")))
    assert len(set(ends)) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_a_restored_snapshot_does_not_have(backend):
    text = """
.data
q: .f32 [1, 4] [1.0, 2.0, 3.0, 4.0]
.text
    LOADI rQ, @q
    FORK rS
    ATTN rA, rQ, rQ, rQ, sA
    RESTORE rS                 ; the stream is gone, its name stays
    ATTN rA, rQ, rQ, rQ, sA
    HALT
"""
    _, end = run(text, backend)
    assert "does not exist here: it was made after the snapshot that was restored" in end


def test_a_new_stream_has_the_type_of_its_instruction_whatever_was_compiled_before():
    program = assemble("    ATTN rA, rX, rX, rX, sA, KV_TYPE=F32\n    HALT\n")
    x = np.full((1, 4), 1 / 3, np.float32)
    other = VM(assemble("    ATTN rA, rX, rX, rX, sA, KV_TYPE=F16\n    HALT\n"), backend="interpreter")
    other.set("rX", x)
    other.run()
    for state, rounded in ((other.state("sA"), np.float16), (None, np.float32)):
        vm = VM(program, backend="cpu", threads=1)
        vm.set("rX", x)
        vm.set_state("sA", state)
        vm.run()
        assert vm.state("sA").rows(0)[0][-1].tolist() == x[0].astype(rounded).tolist()


def test_equal_dimensions_leave_no_cycle_behind(monkeypatch):
    """Lifting names them alike; what it used is gone when it is done, not when the garbage collector comes by."""
    lifters: list = []

    class Seen(jit.Lifter):
        def lift(self, name):
            lifters.append(weakref.ref(self))
            found = super().lift(name)
            assert self.same_as
            return found
    monkeypatch.setattr(jit, "Lifter", Seen)
    collecting = gc.isenabled()
    gc.disable()
    try:
        vm = VM(assemble(".reg rA R0\n.reg rB R1\nADD rC, rA, rB\nMUL rC, rC, rB\nHALT"), backend="cpu")
        for name in ("rA", "rB"):
            vm.set(name, np.ones((300, 400), np.float32))
        vm.run()
        assert lifters and [found() for found in lifters] == [None] * len(lifters)
    finally:
        if collecting:
            gc.enable()
