"""Which registers a program uses, and where handles of snapshots can be: what a capture copies and looks at."""
from __future__ import annotations

import numpy as np
import pytest

import m3jit
from m3jit.isa.fields import GPR, STATE, Reg
from m3jit.vm.extensions import Extension, Registry, pack
from m3jit.vm.register_use import RegisterUse
from m3jit.vm.vm import VM

MOVED = """
    FORK R1
    MOV R2, R1
    CALL callee, ARGS=[R5, R2]
    HALT
callee:
    MOV R20, R1
    MOV R0, R20
    RET
other:
    LOADI R30, 1
    MOV R31, R30
"""
GIVEN = f'ESCAPE EXT=9, VERSION=1, PAYLOAD="{pack([Reg(GPR, 40)], [], b"").hex()}"'


def machine(text: str, **options) -> VM:
    return VM(m3jit.assemble(text), backend="interpreter", **options)


def use(text: str) -> RegisterUse:
    return machine(text).image.registers


def live(vm: VM) -> list[int]:
    return [s.id for s in vm.snapshots.live()]


def test_handles_are_followed_through_moves_calls_and_returns():
    assert sorted(use(MOVED).naming) == [0, 1, 2, 5, 20]


@pytest.mark.parametrize("text, naming", [
    ("LOADI R3, 1", []), ("SNAPSHOT R4", [4]), ("CTX_SWITCH R6", [6]), ('CHECKPOINT_RESTORE R2, PATH="x"', [2]),
    ("SENSE R7, USER_INPUT", [7]), ("SELECT R1, R2, R3, R4\nFORK R3", [3]), ("MOV V1, R3\nMOV R2, R3\nFORK R3", [2, 3]),
    (GIVEN, [40])])
def test_where_handles_can_be(text, naming):
    assert sorted(use(text).naming) == naming


def test_what_the_host_writes_is_followed():
    vm = machine("MOV R2, R30")
    assert not vm.image.registers.naming
    vm.set("R30", vm.fork())
    assert sorted(vm.image.registers.naming) == [2, 30]


def test_registers_that_only_the_host_writes_go_back():
    vm = machine("LOADI R1, 1")
    before = vm.fork()
    vm.set("R200", 7)
    vm.set("V3", np.arange(8, dtype=np.float32))
    kept = vm.fork()
    vm.set("R200", 8)
    vm.set("V3", None)
    vm.abort(kept)
    assert vm.get("R200") == 7 and vm.get("V3").data.tolist() == list(range(8))
    vm.abort(before)
    assert vm.get("R200") is None and vm.get("V3") is None


def test_a_root_holds_no_more_than_is_used():
    vm = machine("KV_TRUNCATE S2, 0\nMOV V3, V2\nFORK R17")
    root = vm.main.capture()
    assert (len(root.R), len(root.V), len(root.S)) == (18, 4, 3)
    vm.image.registers.cover(Reg(STATE, 5))
    assert len(vm.main.capture().S) == 6


@pytest.mark.parametrize("text", [
    "FORK R1\nMOV R20, R1\nFORK R1\nLOADI R20, 0\nHALT",
    "FORK R1\nCALL on, ARGS=[R20, R1]\nFORK R1\nLOADI R20, 0\nHALT\non:\nMOV R0, R1\nRET",
    "FORK R1\nCALL on, ARGS=[R2]\nLOADI R1, 0\nHALT\non:\nFORK R0\nRET"], ids=["moved", "returned", "in a caller"])
def test_a_captured_handle_keeps_no_snapshot(text):
    """Whichever way it came into its register: the second snapshot, which a register holds, names the first one
    weakly."""
    vm = machine(text, snapshot_window=0)
    vm.run()
    assert live(vm) == [2]


def test_what_an_extension_gives_keeps_no_snapshot_inside_another():
    kept = []
    registry = Registry()
    registry.add(Extension("give", 9, (1, 0), lambda immediate=b"": kept.pop()))
    vm = machine(GIVEN + "\nFORK R1\nLOADI R40, 0\nNOP", snapshot_window=0, extensions=registry)
    kept.append(vm.fork())
    vm.step(2)
    assert live(vm) == [1, 2]
    vm.step(1)
    assert live(vm) == [2] and repr(vm.snapshots.live()[0].root.R[40]) == "<snapshot 1 (released)>"


def test_a_snapshot_that_no_register_gets_is_in_the_window():
    vm = machine("FORK _\nSNAPSHOT R255\nFORK R1\nHALT")
    vm.run()
    assert live(vm) == [1, 2, 3] and vm.get("R0") is None and vm.retired == 4
