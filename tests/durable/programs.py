"""Programs whose states are of every kind a version can hold, and what they are compared by."""
from __future__ import annotations

from typing import Any

import numpy as np

import m3jit
from m3jit.vm.digest import digest
from m3jit.vm.vm import VM

# Each round appends to two layers of a stream, scans, draws, calls, writes memory and takes a snapshot.
EVERY_KIND = """
.reg rN R0
    LOADI rN, 0
    RNG_SEED 7
    ARENA_ALLOC rBlock, 256
    LOADI rFloat, 0.1
    LOADV rTable, @table
    FORK rFirst
round:
    ADD rN, rN, 1
    ATTN rA, rX, rX, rX, sKV HEADS=2 LAYER=0 CAUSAL
    ATTN rA, rA, rA, rA, sKV HEADS=2 LAYER=1 CAUSAL
    ATTN rB, rX, rX, rX, sNarrow HEADS=2 LAYER=0 CAUSAL KV_TYPE=Q8_0
    SSM_SCAN rY, rX, sCells, rDt, rLog, B=rBs C=rBs D=rD LAYER=0
    CONV rC, rX, rTaps, R255, sCells LAYER=1
    RNG_UNIFORM rU
    MEMCPY rBlock, rA
    MEMSET rWide, PATTERN=3 LEN=5000
    SLICE rV, rA, START=0 LEN=1
    CALL deep, [rN]
    FORK rLast
    COMPARE rN, rRounds
    IF_LESS round
    HALT
deep:
    ADD R0, R0, 1
    SUB R0, R0, 1
    RET
.data
table: .f32 [1.5, -0.0, nan:0x7fc00001]
"""


def every_kind(rounds: int = 3, rows: int = 3, **options: Any) -> VM:
    """A machine for EVERY_KIND, its inputs set."""
    options.setdefault("backend", "interpreter")
    vm = m3jit.VM(m3jit.assemble(EVERY_KIND, "every_kind.m3asm"), **options)
    rng = np.random.default_rng(5)
    for name, shape in {"rX": (rows, 8), "rDt": (rows, 8), "rLog": (8, 4), "rBs": (rows, 4), "rD": (8,),
                        "rTaps": (8, 3)}.items():
        vm.set(name, rng.standard_normal(shape).astype(np.float32))
    vm.set("rRounds", rounds)
    vm.set("rWide", (3 << 60) + 100)
    return vm


def state(vm: VM) -> str:
    """The digest of the main context's version."""
    return digest(vm.main)
