"""ATTN's streams in programs: the first append decides type and geometry, in compiled code as on the interpreter."""
from __future__ import annotations

import numpy as np
import pytest

import m3jit
from m3jit.errors import Trap
from m3jit.isa.kv_layout import FAN
from m3jit.vm.checked import comparable

ROWS = np.random.default_rng(1).standard_normal((5, 12)).astype(np.float32)
BACKENDS = ("interpreter", "cpu")


def run(text: str, backend: str) -> m3jit.VM:
    vm = m3jit.VM(m3jit.assemble(text, "streams.m3asm"), backend=backend, threads=1)
    vm.set("rX", ROWS)
    vm.run()
    return vm


def outcome(vm: m3jit.VM) -> tuple:
    stream = vm.machine.state_of(vm.main, 0)
    rows = [part.tobytes() for layer in sorted(stream.layers) for part in stream.rows(layer)]
    return vm.get("rY").data.tobytes(), stream.dtype.name, str(stream.geometry), rows


@pytest.mark.parametrize("first, second", [("", "KV_TYPE=BF16"), ("KV_TYPE=Q8_0", ""), ("KV_TYPE=F32", "KV_TYPE=Q8_0")])
def test_a_stream_keeps_the_type_it_was_made_with(first, second):
    text = f"""
        ATTN rA, rX, rX, rX, sKV HEADS=2 LAYER=0 CAUSAL {first}
        ATTN rY, rA, rA, rA, sKV HEADS=2 LAYER=1 CAUSAL {second}
        HALT
    """
    a, b = (run(text, backend) for backend in BACKENDS)
    assert outcome(a) == outcome(b)
    assert outcome(a)[1] == (first or "KV_TYPE=F16").removeprefix("KV_TYPE=")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options, message", [
    ("HEADS=4", "has 2 heads of 6; an append of 4 heads of 3 does not fit it"),
    ("HEADS=2 HDIM=6 VDIM=6 _", "")])
def test_an_append_of_another_geometry_traps(options, message, backend):
    shared = options.endswith("_")
    values = "_" if shared else "rX"
    text = f"""
        ATTN rA, rX, rX, rX, sKV HEADS=2 LAYER=0
        ATTN rY, rX, rX, {values}, sKV {options.rstrip('_ ')} LAYER=1
        HALT
    """
    with pytest.raises(Trap, match=message or r"has 2 heads of 6; an append of 2 heads of 6 \(part of the keys\)"):
        run(text, backend)


def test_values_that_are_part_of_the_keys_are_compiled():
    """One region, and the bytes of values that are given."""
    given = """
        SLICE rV, rX AXIS=1 START=0 LEN=8
        ATTN rY, rX, rX, rV, sKV KV_HEADS=1 HDIM=12 VDIM=8 CAUSAL
        HALT
    """
    shared = "ATTN rY, rX, rX, _, sKV KV_HEADS=1 HDIM=12 VDIM=8 CAUSAL\nHALT"
    a, b, c = run(given, "cpu"), run(shared, "cpu"), run(shared, "interpreter")
    assert a.get("rY").data.tobytes() == b.get("rY").data.tobytes() == c.get("rY").data.tobytes()
    assert sum(r.entries for r in b.regions.regions) == 1 and b.get("rY").shape == (5, 8)
    streams = [vm.machine.state_of(vm.main, 0) for vm in (a, b)]
    assert [s.page_bytes for s in streams] == [64 * 20 * 2, 64 * 12 * 2]


def test_a_page_table_of_several_leaves():
    """Rows that cross from one leaf of the table to the next, and a token behind them."""
    text = """
        ATTN rA, rX, rX, rX, sKV HEADS=1 CAUSAL
        SLICE rLast, rX, START=0 LEN=1
        ATTN rY, rLast, rLast, rLast, sKV HEADS=1 CAUSAL
        HALT
    """
    found = []
    for backend in BACKENDS:
        vm = m3jit.VM(m3jit.assemble(text, "leaves.m3asm"), backend=backend, threads=1)
        vm.set("rX", np.random.default_rng(2).standard_normal((64 * FAN + 70, 2)).astype(np.float32))
        vm.run()
        found.append((vm.get("rA").data.tobytes(), outcome(vm)))
        assert len(vm.machine.state_of(vm.main, 0).pages(0).leaves) == 2
    assert found[0] == found[1]


def test_checked_mode_compares_rows_of_layers_behind_one_without_rows():
    """Hybrids attend in some of their layers, not always in the first."""
    text = "ATTN rY, rX, rX, rX, sKV HEADS=2 LAYER=3 CAUSAL\nHALT"
    stream = (vm := run(text, "interpreter")).machine.state_of(vm.main, 0)
    other = stream.truncate(4).append(3, ROWS[4:] + 1, ROWS[4:])
    again = stream.truncate(4).append(3, ROWS[4:], ROWS[4:])
    assert comparable(stream) == comparable(again) != comparable(other)
