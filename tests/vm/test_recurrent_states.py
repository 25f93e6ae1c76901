"""Recurrent states (SSM_SCAN, SSM_RESET, CONV with a state): pieces of a prompt, roll-back, sharing, loops, what is
refused.  Every executor gives the same bytes."""
from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3jit.errors import Trap
from m3jit.isa.cells import SCAN, WINDOW, CellState, cell_of, take, tiled, untiled
from m3jit.isa.kv import KVStream
from tests.vm.programs import machine

BACKENDS = ("interpreter", "cpu", "python")
CHANNELS, STATES, TAPS = 37, 5, 4
STEP = """
    CONV rC, {x}, rW, rBias, {s} LAYER=3 SILU
    SSM_SCAN rY, rC, {s}, rDt, rA, B=rB C=rC2 D=rD DT_BIAS=rBias SOFTPLUS LAYER=3
    SSM_SCAN rY, rY, {s}, rDt2, rA2, B=rB C=rC2 D=rD2 LAYER=1 HEADS=1
"""
PER_ROW = ("rX", "rDt", "rDt2", "rB", "rC2")


def operands(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def noise(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)
    return {"rX": noise(rows, CHANNELS), "rW": noise(CHANNELS, TAPS), "rBias": noise(CHANNELS),
            "rDt": noise(rows, CHANNELS), "rA": -np.exp(noise(CHANNELS, STATES)), "rB": noise(rows, STATES),
            "rC2": noise(rows, STATES), "rD": noise(CHANNELS), "rDt2": abs(noise(rows, 1)) / 4,
            "rA2": -np.exp(noise(1)), "rD2": noise(1)}


def cells(vm: Any, register: int = 0) -> list[tuple]:
    """The contents of the state an S register names."""
    state = vm.machine.state_of(vm.main, register)
    return [] if state is None else [(k, state.shapes[k], state.array(*k).tobytes()) for k in sorted(state.cells)]


def pieces(backend: str, rows: dict[str, np.ndarray], sizes: list[int], threads: int = 2) -> tuple[bytes, list]:
    """y of all rows, and the state, when the rows are given in pieces."""
    y, at, state = b"", 0, None
    for n in sizes:
        vm = machine(STEP.format(x="rX", s="S0") + "HALT", backend=backend, threads=threads)
        for name, a in rows.items():
            vm.set(name, a[at:at + n] if name in PER_ROW else a)
        if state is not None:
            vm.machine.set_state_of(vm.main, 0, state)
        vm.run()
        y += vm.get("rY").numpy().tobytes()
        state, at = vm.machine.state_of(vm.main, 0), at + n
    return y, cells(vm)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_in_pieces_gives_the_bytes_of_the_whole(backend):
    rows = operands(70)
    want = pieces("interpreter", rows, [70])
    for threads, sizes in ((1, [70]), (3, [64, 6]), (2, [7] * 10), (1, [0, 1, 1, 1, 67, 0])):
        assert pieces(backend, rows, sizes, threads) == want
    if backend != "python":
        assert pieces(backend, rows, [1] * 70) == want


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("back", ["FORK rSnap", "SNAPSHOT rSnap"])
def test_a_state_rolls_back(backend, back):
    rows = operands(2)
    undo = "ABORT rSnap" if back.startswith("FORK") else "RESTORE rSnap"
    step = STEP.format(x="rX", s="S0")

    def end(source: str) -> tuple[list, bytes]:
        vm = machine(source + "HALT", backend=backend, threads=2)
        for name, a in rows.items():
            vm.set(name, a)
        vm.run()
        return cells(vm), vm.get("rY").numpy().tobytes()
    straight = end(step + step)
    tried = f"SSM_RESET S0 LAYER=3\n{step}{step}"
    assert end(f"{step}{back}\n{tried}{undo}\n{step}") == straight
    assert end(f"{step}{back}\n{tried}{undo}\n{tried}{undo}\n{step}") == straight
    assert end(step + tried + step) != straight


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_child_goes_on_with_its_own_state(backend):
    source = (STEP + """
        FORK rCtx, child, {priority}
    """ + STEP + """
        STREAM rY, SINK, NAME="parent"
        HALT
    child:
        MUL rX, rX, rX
    """ + STEP + """
        STREAM rY, SINK, NAME="child"
        HALT""")
    results: dict[str, set] = {"parent": set(), "child": set()}
    for priority in ("RED", "GREEN"):
        vm = machine(source.format(x="rX", s="S0", priority=priority), backend=backend, threads=2)
        for name, a in operands(3).items():
            vm.set(name, a)
        for who in results:
            vm.set_sink(who, lambda y, w=who: results[w].add(y.tobytes()))
        vm.run()
    assert len(results["parent"]) == len(results["child"]) == 1 and results["parent"] != results["child"]


LOOP = """
    LOADI rN, 0
again:
""" + STEP.format(x="rX", s="S0") + """
    ADD rX, rX, rY
    ADDI rN, rN, 1
    COMPARE rN, 5
    IF_LESS again
    HALT"""


def test_a_loop_inside_compiled_code_hands_its_state_from_round_to_round():
    found = []
    for backend in BACKENDS:
        vm = machine(LOOP, backend=backend, threads=2)
        for name, a in operands(2).items():
            vm.set(name, a * np.float32(0.1))
        vm.run()
        found.append((cells(vm), vm.get("rX").numpy().tobytes()))
        if backend == "cpu":
            assert sum(r.retired for r in vm.regions.regions) >= 5 * 6
    assert all(f == found[0] for f in found)


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_two_registers_may_name_one_state(backend):
    step = [STEP.format(x="rX", s=s) for s in ("S0", "S1")]
    ends = []
    for source in (f"{step[0]}MOV S1, S0\n{step[1]}{step[0]}HALT", step[0] * 3 + "HALT"):
        vm = machine(source, backend=backend)
        for name, a in operands(2).items():
            vm.set(name, a)
        vm.run()
        ends.append((cells(vm), vm.get("rY").numpy().tobytes()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_reset_is_a_new_beginning(backend):
    step = STEP.format(x="rX", s="S0")
    ends = []
    for source in (step, f"{step}{step}SSM_RESET S0\n{step}", f"SSM_RESET S0\n{step}",
                   f"{step}LOADI rL, 3\nSSM_RESET S0 LAYER=rL\nLOADI rL, 1\nSSM_RESET S0 LAYER=rL\n{step}"):
        vm = machine(source + "HALT", backend=backend)
        for name, a in operands(2).items():
            vm.set(name, a)
        vm.run()
        ends.append((cells(vm), vm.get("rY").numpy().tobytes()))
    assert all(e == ends[0] for e in ends)


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
@pytest.mark.parametrize("source, message", [
    ("ATTN r1, rX, rX, rX, S0\nCONV r1, rX, rW, R255, S0", r"CONV .*not a recurrent state: it is a KV stream"),
    ("CONV r1, rX, rW, R255, S0\nATTN r1, rX, rX, rX, S0", "ATTN .*not a KV stream"),
    ("CONV r1, rX, rW, R255, S0\nCONV r1, rB, rW5, R255, S0",
     r"window of layer 0 in this state is \[3, 37\]; this .* \[3, 5\]"),
    ("CONV r1, rX, rW, R255, S0 PAD=1", "it takes no STRIDE, PAD, DILATION or GROUPS"),
    ("CONV r1, rX, rW5, R255, S0", r"needs rows x \[T, C\] and w \[C, K\], got F32 \[2, 37\] and F32 \[5, 4\]"),
    ("CONV r1, rX, rW, rD2, S0", r"needs 37 biases, got F32 \[1\]"),
    ("SSM_SCAN r1, rX, S0, rDt, rA, B=rB C=rC2 GROUPS=2", "37 channels do not divide into 2 groups"),
    ("SSM_SCAN r1, rX, S0, rDt, rD, B=rB C=rC2 HEADS=3", "reshape|37 channels do not divide into 3 heads of 1 groups"),
    ("SSM_SCAN r1, rX, S0, rB, rA, B=rB C=rC2", r"dt must be \[2, 37\], got F32 \[2, 5\]"),
    ("SSM_SCAN r1, rX, S0, rDt, rW, B=rB C=rC2", r"A must be \[37, 5\], got F32 \[37, 4\]"),
    ("SSM_SCAN r1, rX, S0, rDt, rA, B=rB C=rX", r"B and C must be \[2, 1 \* d_state\], got F32 \[2, 5\] and F32"),
    ("SSM_SCAN r1, rX, S0, rDt, rA, B=rB C=rC2 D=rD2", r"D must have 37 elements, got F32 \[1\]"),
    ("SSM_RESET S0 LAYER=-2", "LAYER is -2"),
])
def test_what_is_refused(backend, source, message):
    vm = machine(source + "\nHALT", backend=backend)
    for name, a in (operands(2) | {"rW5": np.ones((5, TAPS), np.float32)}).items():
        if re.search(rf"\b{name}\b", source):
            vm.set(name, a)
    with pytest.raises(Trap, match=message):
        vm.run()


@pytest.mark.parametrize("backend", ["interpreter", "cpu"])
def test_a_state_there_is_no_room_for(backend):
    """10^12 states from operands of 4 MB."""
    n = 10 ** 6
    vm = machine("SSM_SCAN r1, r2, S0, r3, r4, B=r2 C=r2 HEADS=1\nHALT", backend=backend)
    for name, a in (("r2", np.ones((1, n))), ("r3", np.ones((1, 1))), ("r4", -np.ones(1))):
        vm.set(name, a.astype(np.float32))
    with pytest.raises(Trap, match="out of memory"):
        vm.run()
    assert vm.get("S0") is None


def test_memory_of_dead_cells_is_used_again_and_that_of_live_ones_is_not():
    shape = (3, 1001)
    first = cell_of(WINDOW, np.full(shape, 1, np.float32))
    held = CellState().with_cells({(0, WINDOW): first})
    address = cell_of(WINDOW, np.full(shape, 2, np.float32)).address            # dies at once
    other = take(3 * 1001)
    assert other.address == address != first.address
    other.data[:] = 3
    assert (held.array(0, WINDOW) == 1).all() and held.nbytes == 4 * 3 * 1001


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 20))
def test_tiles_hold_what_was_put_in(runs, length, states):
    a = np.arange(runs * length * states, dtype=np.float32).reshape(runs, length, states) + 1
    stored = tiled(a)
    assert stored.shape == (runs * -(-length // 16), states, 16)
    assert untiled(stored, a.shape).tobytes() == a.tobytes()
    r, i, n = runs - 1, length - 1, states // 2
    at = ((r * -(-length // 16) + i // 16) * states + n) * 16 + i % 16
    assert stored.reshape(-1)[at] == a[r, i, n]


OPERATIONS = st.lists(st.one_of(
    st.tuples(st.just("step"), st.integers(0, 2), st.integers(0, 1)), st.tuples(st.just("reset"), st.integers(-1, 2)),
    st.tuples(st.just("fork"), st.integers(0, 2)), st.tuples(st.just("abort"), st.integers(0, 2))), max_size=30)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OPERATIONS)
def test_any_order_of_steps_and_roll_backs_agrees_with_a_copying_model(script):
    """The model keeps one number per cell: A = 0 and one tap make each step a sum."""
    source, model, snapshots = "", {}, {}
    for op in script:
        match op:
            case ("step", layer, x):
                source += f"SSM_SCAN r9, r2{x}, S0, r30, r31, B=r30 C=r30 LAYER={layer}\n"
                model[layer] = model.get(layer, 0) + x + 1
            case ("reset", layer):
                source += f"SSM_RESET S0 LAYER={layer}\n"
                model = {k: 0 if layer in (-1, k) else v for k, v in model.items()}
            case ("fork", r):
                source += f"FORK r1{r}\n"
                snapshots[r] = (dict(model), dict(snapshots))
            case ("abort", r):
                source += f"ABORT r1{r}\n"
                if r in snapshots:
                    own = snapshots[r]
                    model, snapshots = dict(own[0]), {**own[1], r: own}
    for backend in ("interpreter", "cpu"):
        vm = machine("SSM_RESET S0\n" + source + "HALT", backend=backend, snapshot_window=40)
        vm.set("r30", np.ones((1, 1), np.float32))
        vm.set("r31", np.zeros((1, 1), np.float32))
        for x in range(2):
            vm.set(f"r2{x}", np.full((1, 1), x + 1, np.float32))
        vm.run()
        state = vm.machine.state_of(vm.main, 0)
        assert {k: state.array(k, SCAN).item() for k, _ in state.cells} == model


@pytest.mark.parametrize("state", [KVStream(), CellState()])
def test_only_a_recurrent_state_is_taken_for_one(state):
    vm = machine("CONV r1, rX, rW, R255, S0\nHALT", backend="cpu")
    for name in ("rX", "rW"):
        vm.set(name, operands(2)[name])
    vm.machine.set_state_of(vm.main, 0, state)
    if isinstance(state, KVStream):
        with pytest.raises(Trap, match="not a recurrent state"):
            vm.run()
    else:
        assert vm.run().get("r1").shape == (2, CHANNELS)


AT_THE_END = """
import colorsys, gc, sys
sys.first = colorsys                     # imported first, so that its names go last, after those of m3jit's modules
import numpy as np
import m3jit
vm = m3jit.VM(m3jit.assemble('''
    SSM_SCAN rY, rX, sCells, rDt, rLog, B=rBs C=rBs D=rD LAYER=0
    ATTN rA, rX, rX, rX, sKV HEADS=2 LAYER=0 CAUSAL
    HALT'''), backend="interpreter")
for name, shape in {"rX": (3, 8), "rDt": (3, 8), "rLog": (8, 4), "rBs": (3, 4), "rD": (8,)}.items():
    vm.set(name, np.ones(shape, np.float32))
vm.run()
sys.others = [m for name, m in sys.modules.items() if name.startswith("m3jit")]
colorsys.kept = [vm.state("sCells"), vm.state("sKV")]
del vm
gc.collect()
print(len(colorsys.kept), "states are alive")
"""


def test_a_process_ends_quietly_with_states_alive():
    """Their memory is handed back when the names of the modules are gone already."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 states are alive\n", "")
