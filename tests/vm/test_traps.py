"""What a program that goes wrong is told: one message with line, instruction, register, what was found and expected."""
from __future__ import annotations

import numpy as np
import pytest

from m3jit.errors import InternalError, LimitError, Trap, UserError
from m3jit.isa.control import MAX_CALL_DEPTH
from m3jit.isa.table import OPS
from m3jit.vm.vm import VM
from tests.vm.programs import ins, machine, run


def trap(source: str, **options) -> Trap:
    with pytest.raises(Trap) as e:
        run(source, **options)
    return e.value


@pytest.mark.parametrize("source,words", [
    ("LOADI rA, 1\nLOADI rB, 2.0\nADDS rC, rA, rB\nHALT",
     ["test.m3asm:3", "ADDS", "an integer", "a float", "CVT", "pc 0x0040"]),
    ("LOADI rA, 1\nLOADI rB, 0\nDIV rC, rA, rB\nHALT", ["test.m3asm:3", "division by zero"]),
    ("LOADI rA, 1\nMODI rC, rA, 0\nHALT", ["modulo by zero"]),
    ("LOADI r4, 1\nAND r5, r4, r6\nHALT", ["R6", "never written", "expected an integer"]),
    ('LOADI r4, "text"\nADDI r5, r4, 1\nHALT', ["R4 (a) holds a tensor (U8 [4]), expected an integer"]),
    ("LOADI r4, 1\nABORT r4\nHALT", ["R4 (snap) holds an integer, expected a snapshot"]),
    ("FORK r4\nKILL_CONTEXT r4\nHALT", ["R4 (target) holds a snapshot, expected a context"]),
    ("LOADI r4, 1\nUNLOAD_MODEL r4\nHALT", ["holds an integer, expected a state handle"]),
    ("RET", ["no CALL to return from"]),
    ("NOP", ["past the last instruction", "HALT"]),
    ("f: CALL f", [f"{MAX_CALL_DEPTH} is the limit", "recursion"]),
    ("LOADI rA, 0\nASSERT rA, 12, MESSAGE=\"sums differ\"\nHALT", ["assertion 12 failed: sums differ"]),
    ("LOADI rP, 3\nPRIORITY_SET rP\nHALT", ["priority 3", "0 GREEN, 1 BLUE or 2 RED"]),
    ("PRIORITY_SET\nHALT", ["needs a priority"]),
    ("CAPABILITY_ASSERT FEATURES, NUMBER=0x400000000000000\nHALT", ["lacks feature bit 58"]),
    ("CAPABILITY_ASSERT OPCODE, NUMBER=0x80\nHALT", ["lacks opcode 128 (REMOTE_SPAWN_EXT)"]),
    ("PROFILE_STOP \"x\"\nHALT", ["'x' is not open"]),
])
def test_messages(source, words):
    text = str(trap(source))
    for w in words:
        assert w in text, text
    assert "\n" not in text


def test_attributes():
    t = trap("NOP\nLOADI rA, 0\nASSERT rA, 12\nHALT")
    assert (t.code, t.pc, t.line, t.retired, t.context) == (12, 96, ("test.m3asm", 3), 2, 1)
    t = trap("LOADI r4, 1\nAND r5, r4, r6\nHALT")
    assert t.register == "R6" and t.instruction.startswith("AND R5, R4, R6")


def test_a_trap_writes_nothing_and_leaves_the_machine_readable():
    vm = machine("LOADI rA, 1\nLOADI rB, 5\nLOADI rZ, 0\nDIV rB, rA, rZ\nHALT")
    with pytest.raises(Trap):
        vm.run()
    assert vm.get("rB") == 5 and vm.finished and vm.retired == 3


def test_a_childs_trap_is_reported_when_the_others_have_ended():
    got = []
    vm = machine("LOADI rA, 1\nFORK rC, child, RED\nSTREAM rA\nHALT\nchild: RET")
    vm.set_sink("OUTPUT", got.append)
    with pytest.raises(Trap, match="context 2"):
        vm.run()
    assert got == ["1"]


def test_absent_opcodes_trap_with_their_name():
    row = next(r for r in OPS if not r.executable and all(f.default is not ... for f in r.fields) and r.code < 0x80)
    from m3jit.isa.fields import REQUIRED
    for row in OPS:
        if not row.executable and not any(f.default is REQUIRED for f in row.operands()):
            break
    vm = VM([ins(row.name), ins("HALT")], backend="interpreter")
    with pytest.raises(Trap, match=f"{row.name} .*not implemented"):
        vm.run()


def test_branches_into_the_middle_of_an_instruction():
    for name, args in (("JUMP", {}), ("IF_NOT_EQUAL", {})):
        with pytest.raises(Trap, match="past the last instruction, or to an address that starts none"):
            VM([ins(name, target=8, **args), ins("HALT")], backend="interpreter").run()
    with pytest.raises(Trap, match="not the start of an instruction"):
        VM([ins("CALL", target=8), ins("HALT")], backend="interpreter").run()


def test_limits():
    with pytest.raises(LimitError, match="max_steps = 100"):
        run("loop: JUMP loop", max_steps=100)
    vm = machine("loop: ADDI r1, r1, 1\nJUMP loop", max_steps=1001)
    vm.set("r1", 0)
    with pytest.raises(LimitError):
        vm.run()
    assert vm.retired == 1001 and vm.get("r1") == 501
    with pytest.raises(LimitError, match=r"timeout.*context 1 was at pc 0x0000 \(test.m3asm:1\)"):
        run("loop: JUMP loop", timeout=0.2)
    assert run("NOP\nNOP\nHALT", max_steps=3).retired == 3


def test_an_error_of_our_own_is_called_one():
    class Broken:
        def number_kind(self, *_):
            raise ZeroDivisionError("oops")
    vm = VM([ins("LOADI", rd="R0", imm=1), ins("NEG", rd="R1", a="R0"), ins("HALT")], xp=Broken(),
            backend="interpreter")
    with pytest.raises(InternalError, match="bug in m3jit.*|ZeroDivisionError: oops"):
        vm.run()


def test_bad_host_calls():
    vm = machine("HALT")
    with pytest.raises(UserError, match="no register"):
        vm.set("Q7", 1)
    with pytest.raises(UserError, match="cannot hold a dict"):
        vm.set("R7", {})
    with pytest.raises(UserError, match="signed 64-bit"):
        vm.set("R7", 2 ** 63)
    with pytest.raises(UserError, match="S5 holds state handles"):
        vm.set("S5", 1)
    with pytest.raises(TypeError, match="no tensor type"):
        vm.set("R7", np.zeros(2, np.complex64))
