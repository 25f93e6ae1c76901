"""Programs whose states are of every kind a version can hold, and what they are compared by."""
from __future__ import annotations

from typing import Any

import numpy as np

import m3jit
from m3jit.durable.contexts import named_snapshots
from m3jit.vm.digest import digest
from m3jit.vm.sources import QueueSource
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


# A main context, one that fills a ring and draws numbers, one that counts in SHARED under a lock, one that waits for
# input.
TEAM = """
.reg rN R0
    LOADI rN, 0
    LOADI rShared, 0x6000000000000100
    FORK rFirst
    MOV rS, rFirst
    FORK rA, producer, GREEN
    FORK rB, counter, GREEN
    SPAWN_CONTEXT rW, sleeper, BLUE
round:
    ADD rN, rN, 1
    SENSE rItem, RING, NAME="numbers"
    SENSE rMore, RING, NAME="numbers"
    SENSE rText, rThere, USER_INPUT, NON_BLOCKING
    ATTN rOut, rX, rX, rX, sKV HEADS=2 CAUSAL
    LOCK NUMBER=7
    TENSOR rSeen, SHAPE=[4] F32 FROM=rShared
    UNLOCK NUMBER=7
    STREAM rItem, SINK, NAME="said"
    STREAM rSeen, SINK, NAME="said"
    MOV rOld, rS
    FORK rS, {persist}
    COMPARE rN, rRounds
    IF_LESS round
    KILL_CONTEXT rA
    KILL_CONTEXT rB
    KILL_CONTEXT rW
    HALT
producer:
    RNG_UNIFORM rU
    STREAM rU, RING, NAME="numbers"
    FORK rMine
    ATTN rOut, rX, rX, rX, sKV HEADS=2 CAUSAL
    STREAM rOut, RING, NAME="numbers", FORMAT=TENSOR
    JUMP producer
counter:
    LOCK NUMBER=7
    ADD rCount, rCount, rOne
    YIELD
    MEMCPY rShared, rCount
    UNLOCK NUMBER=7
    COMPARE rN, 0
    JUMP counter
sleeper:
    SENSE rWord, rHow, USER_INPUT
    JUMP sleeper
"""


def team(rounds: int = 10 ** 9, persist: str = "", **options: Any) -> VM:
    """A machine for TEAM, its inputs set; what it says is in `said`."""
    options.setdefault("backend", "interpreter")
    source = TEAM.replace("FORK rS, {persist}", f"FORK rS, {persist}" if persist else "FORK rS")
    vm = m3jit.VM(m3jit.assemble(source, "team.m3asm"), ring_capacity=3, wait_input=True, **options)
    rng = np.random.default_rng(6)
    vm.set("rX", rng.standard_normal((1, 8)).astype(np.float32))
    vm.set("rCount", np.zeros(4, np.float32))
    vm.set("rOne", np.ones(4, np.float32))
    vm.set("rRounds", rounds)
    vm.said = []                                       # type: ignore[attr-defined]
    vm.set_sink("said", lambda item: vm.said.append(item if isinstance(item, (int, str)) else item.tobytes()))
    return vm


def whole_state(vm: VM) -> dict[str, Any]:
    """Everything of a machine that a whole version holds, in terms that compare."""
    scheduler = vm.scheduler
    out: dict[str, Any] = {f"context {c.id}": (
        digest(c), c.index, c.status, c.newest_snapshot, c.priority, c.lent, c.virtual_time, c.virtual_deadline,
        c.order, c.waiting_for and c.waiting_for.what) for c in {vm.main, *scheduler.contexts.values()}}
    out["turns"] = (list(scheduler.contexts), scheduler._order, scheduler._current and scheduler._current.id,
                    scheduler._used, scheduler._alone, scheduler.turns)
    out["rings"] = {name: (r.capacity, r.base, r.taken, r.dropped, r.closed, [_shown(i) for i in r.items])
                    for name, r in vm.rings.items()}
    out["inputs"] = {name: (s.base, s.taken, s.closed, [repr(i) for i in s.items])
                     for name, s in vm.sources.items() if isinstance(s, QueueSource)}
    out["locks"] = ({k: (x.holder.id, x.count, [w.context.id for w in x.waiting]) for k, x in vm.locks.locks.items()},
                    vm.locks.granted)
    named = named_snapshots([c.capture() for c in {vm.main, *scheduler.contexts.values()}])      # nobody finds others
    out["window"] = [(s.id, s.parent, s.resume, s.context, digest(s.root)) if s in named else None
                     for s in vm.snapshots._ring[vm.snapshots._at:] + vm.snapshots._ring[:vm.snapshots._at]]
    out["trap"] = str(vm._first_trap)
    return out


def _shown(item: Any) -> Any:
    data = item.data
    return item.form, item.rate, data if isinstance(data, bytes) else (str(data.dtype), data.shape, data.tobytes())
