"""One rollback of everything: key/value streams, recurrent states, random stream, a grammar's state, an audio window.

The program senses 80 ms of sound from a ring of 2 s, appends to a stream with the sizes of SmolLM2 at 4k tokens, scans
a recurrent state with the sizes of Mamba 130M (every step has a cell of its own, so going back is putting the old ones
back), draws a token and steps a grammar (the state of an extension).  A round takes a snapshot through the host, runs a
few steps and goes back; timed is going back, through the host and as the instruction ABORT.  Afterwards the bytes of
every state are compared with those at the snapshot, and the sound is read again.
"""
from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.state_setup import STATED, Setup, micros, p50_p99
from benchmarks.table import Row

NAME = "joint rollback of KV, SSM, sampler, grammar and a 2 s audio ring"
LAYERS, KV_HEADS, HEAD, TOKENS = 30, 3, 64, 4096                    # SmolLM2's stream
SSM_LAYERS, CHANNELS, D_STATE, TAPS = 24, 1536, 16, 4               # Mamba 130M's cells
FRAME = 1920                                                        # 80 ms at 24 kHz
ROUNDS, WARM, STEPS = 1000, 50, 3
LIMIT = 100e-6
PROGRAM = f"""
turn:
    SENSE rSound, AUDIO_PCM, AUDIO_PCM, COUNT={FRAME}
    ATTN rY, rQ, rK, rV, S0, HEADS={KV_HEADS}, KV_HEADS={KV_HEADS}, LAYER=7
    CONV rX, rX, rW, _, S1, LAYER=5
    SSM_SCAN rH, rX, S1, rDt, rA, rB, rC, LAYER=5
    SAMPLE R100, rLogits            ; and R101 = the grammar's step
    ESCAPE EXT=77, VERSION=1, PAYLOAD="01016564"
    YIELD
    JUMP turn
back:
    FORK rSnap
    TRACE_EVENT rOne
    ABORT rSnap
    YIELD
    JUMP back
"""


def grammar(held: Any, token: int, immediate: bytes = b"") -> tuple[int, tuple]:
    """A stack of positions, as a grammar's is: an immutable value."""
    new = (*(held or ()), token % 7)[-16:]
    return len(new), new


def machine() -> tuple[Any, Any]:
    """(the machine with its states in place, its audio ring)."""
    from m3jit.frontend import assemble
    from m3jit.isa.cells import CellState, cell_of
    from m3jit.isa.kv import KVStream
    from m3jit.vm.extensions import Extension, Registry
    from m3jit.vm.vm import VM
    registry = Registry()
    registry.add(Extension("grammar", 77, (1, 0), grammar, state=True))
    vm = VM(assemble(PROGRAM, "joint.m3asm"), backend="cpu", threads=1, extensions=registry)
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)
    stream = KVStream().with_geometry(KV_HEADS, HEAD)
    rows = normal(TOKENS, KV_HEADS * HEAD)
    for layer in range(LAYERS):
        stream = stream.append(layer, rows, rows)
    cells = {(n, "scan"): cell_of("scan", normal(1, CHANNELS, D_STATE)) for n in range(SSM_LAYERS)}
    cells |= {(n, "window"): cell_of("window", normal(TAPS - 1, CHANNELS)) for n in range(SSM_LAYERS)}
    vm.set_state("S0", stream)
    vm.set_state("S1", CellState(cells))
    row = KV_HEADS * HEAD
    for name, a in {"rQ": normal(1, row), "rK": normal(1, row), "rV": normal(1, row), "rX": normal(1, CHANNELS),
                    "rW": normal(CHANNELS, TAPS), "rDt": abs(normal(1, CHANNELS)),
                    "rA": -abs(normal(CHANNELS, D_STATE)), "rB": normal(1, D_STATE), "rC": normal(1, D_STATE),
                    "rLogits": normal(49152)}.items():
        vm.set(name, a)
    vm.set("rOne", 1)
    ring = vm.audio_input()
    ring.push(np.zeros(2 * ring.rate, np.float32))
    vm.skip_input("AUDIO_PCM", "newest", keep=FRAME)
    return vm, ring


def digest(vm: Any) -> tuple:
    """Everything that goes back, as bytes (one layer of the large states)."""
    main, stream, cells = vm.main, vm.state("S0"), vm.state("S1")
    grammar_state = [s.value for _, s in main.states.items() if type(s).__name__ == "ExtensionState"]
    return (main.rng, dict(main.cursors), grammar_state, stream.lengths(tuple(range(LAYERS))),
            stream.rows(7)[0].tobytes(), cells.array(5).tobytes(), cells.array(5, "window").tobytes())


def turns(vm: Any, ring: Any, count: int) -> None:
    """Steps of the program, each with 80 ms of new sound."""
    for _ in range(count):
        ring.push(np.full(FRAME, vm.main.retired % 100, np.float32))
        before = vm.main.cursors
        while vm.main.cursors is before or not vm.main.leave:          # to the YIELD of this turn
            vm.interpreter.run(vm.main, 1 << 30)
            if vm.main.trap is not None:
                raise vm.main.trap


def through_host(vm: Any, ring: Any) -> list[float]:
    """Seconds of each rollback."""
    found, clock = [], time.perf_counter
    start = digest(vm)
    for i in range(WARM + ROUNDS):
        snapshot = vm.fork()
        turns(vm, ring, STEPS if i % 100 == 0 else 1)
        sound = vm.get("rSound").data.tobytes()
        a = clock()
        vm.abort(snapshot, resume=True)
        found.append(clock() - a)
        if i % 100 == 0:
            if digest(vm) != start:
                raise AssertionError("the states are not those of the snapshot")
            again = ring.read(vm.main.cursors["AUDIO_PCM"] + FRAME * (STEPS - 1), FRAME, False)[0][:, 0].tobytes()
            if again != sound:
                raise AssertionError("the sound is not the same")
        if i % 10 == 9:                                # go on, so that the window stays within the ring's reach
            vm.skip_input("AUDIO_PCM", "newest", keep=FRAME)
            start = digest(vm)
    return found[WARM:]


def as_instruction(vm: Any) -> list[float]:
    """Seconds of each ABORT, with the work of one turn to take back: measured between the instructions around it."""
    vm.main.index = vm.image.index_of[vm.image.program.symbol("back").value]
    found, clock = [], time.perf_counter
    for _ in range(WARM + ROUNDS):
        for _ in range(2):
            vm.interpreter.run_exactly(vm.main, 1)
        vm.set_state("S0", vm.state("S0").truncate(TOKENS - 1))
        vm.main.rng = 5
        a = clock()
        vm.interpreter.run_exactly(vm.main, 1)
        found.append(clock() - a)
        for _ in range(2):
            vm.interpreter.run_exactly(vm.main, 1)
    return found[WARM:]


def measure(setup: Setup) -> list[Row]:
    """The rows."""
    vm, ring = machine()
    rows = []
    for how, times in (("through the host", through_host(vm, ring)), ("the instruction ABORT", as_instruction(vm))):
        p50, p99 = p50_p99(times)
        rows.append(Row(f"joint rollback (4k tokens of KV, {SSM_LAYERS} recurrent layers, sampler, grammar, 2 s of "
                        f"sound), {how} (p50)", f"<= {micros(LIMIT)}", micros(p50), p50 <= LIMIT))
        rows.append(Row(f"the same, {how} (p99)", STATED, micros(p99), None))
    return rows
