"""FORK, ABORT, SNAPSHOT, RESTORE, CALL, child contexts: random sequences against a model that copies everything.

The model is a plain Python object per context; a snapshot is a deep copy.  After every instruction all registers,
flags, memory bytes, arenas, model handles and stream positions must agree, and a snapshot must be released exactly when
the model says so (older than the window and in no register of a running context).
"""
from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3jit.isa.table import Instruction
from m3jit.vm.memory import ACTIVATION, SHARED
from m3jit.vm.snapshots import SnapshotHandle
from m3jit.vm.values import ContextRef, Handle
from m3jit.vm.vm import VM
from tests.vm.programs import ins

WINDOW = 3
REGISTERS = 5
A, S = ACTIVATION << 60, SHARED << 60
OFFSETS = (0, 100, 4090, 4096, 8191, 70_000)
INPUTS = list(range(100, 160))


@dataclass
class Name:
    """A register value of the model that names something."""
    what: str
    id: int

    def __deepcopy__(self, memo): return self
    def __eq__(self, other): return isinstance(other, Name) and (self.what, self.id) == (other.what, other.id)


@dataclass
class State:
    """What rolls back."""
    R: list[Any] = field(default_factory=lambda: [None] * REGISTERS)
    frames: list[tuple[list[Any], tuple[int, ...]]] = field(default_factory=list)
    flags: int = 4
    memory: dict[int, int] = field(default_factory=dict)
    arena: int | None = None
    models: set[int] = field(default_factory=set)
    position: int = 0


class Trapped(Exception):
    pass


class Model:
    """All contexts, the shared region, the snapshots."""

    def __init__(self):
        self.contexts = [State()]
        self.shared: dict[int, int] = {}
        self.snapshots: dict[int, State] = {}
        self.taken: list[int] = []
        self.handles = 0

    def live(self) -> set[int]:
        held = {v.id for c in self.contexts for regs in [c.R, *(r for r, _ in c.frames)] for v in regs
                if isinstance(v, Name) and v.what == "snapshot"}
        return held | set(self.taken[-WINDOW:])

    def collect(self) -> None:
        alive = self.live()
        for k in [k for k in self.snapshots if k not in alive]:
            del self.snapshots[k]

    def find(self, value: Any) -> State:
        if not isinstance(value, Name) or value.what != "snapshot" or value.id not in self.snapshots:
            raise Trapped
        return self.snapshots[value.id]

    def apply(self, who: int, op: tuple) -> None:
        c = self.contexts[who]
        match op:
            case ("loadi", r, v):
                c.R[r] = v
            case ("mov", r, s):
                if c.R[s] is None:
                    raise Trapped
                c.R[r] = c.R[s]
            case ("compare", r, v):
                if not isinstance(c.R[r], int):
                    raise Trapped
                c.flags = 0 if c.R[r] == v else 1 if c.R[r] < v else 2
            case ("memset", where, offset, byte, n):
                target = c.memory if where == A else self.shared
                for i in range(n):
                    target[offset + i] = byte
            case ("arena", r, size):
                start = (c.arena or 0) + 15 & ~15
                c.arena, c.R[r] = start + size, 5 << 60 | start
            case ("arena_reset",):
                if c.arena is None:
                    raise Trapped
                c.arena = 0
            case ("fork", r):
                n = len(self.taken) + 1
                c.R[r] = Name("snapshot", n)
                self.snapshots[n] = copy.deepcopy(c)
                self.taken.append(n)
            case ("abort", r):
                if c.R[r] is not None:
                    self.contexts[who] = copy.deepcopy(self.find(c.R[r]))
            case ("restore", r):
                old = copy.deepcopy(self.find(c.R[r]))
                c.memory, c.arena, c.models, c.position = old.memory, old.arena, old.models, old.position
            case ("call", args):
                c.frames.append((c.R, args))
                c.R = [c.R[a] for a in args] + [None] * (REGISTERS - len(args))
            case ("ret",):
                if not c.frames:
                    raise Trapped
                R, args = c.frames.pop()
                R = list(R)
                for i, a in enumerate(args):
                    R[a] = c.R[i]
                c.R = R
            case ("child", r):
                self.contexts.append(copy.deepcopy(c))
                c.R[r] = Name("context", len(self.contexts))
            case ("load", r):
                self.handles += 1
                c.R[r] = Name("model", self.handles)
                c.models.add(self.handles)
            case ("unload", r):
                if not isinstance(c.R[r], Name) or c.R[r].what != "model" or c.R[r].id not in c.models:
                    raise Trapped
                c.models.remove(c.R[r].id)
            case ("sense", r):
                if c.position < len(INPUTS):
                    c.R[r] = INPUTS[c.position]
                    c.position += 1
        self.collect()


class Provider:
    """Models that are nothing but a name."""

    def load(self, reference, quant=""):
        class Nothing:
            name = reference
        return Nothing()


def instruction(op: tuple) -> Instruction:
    r = f"R{op[1]}" if len(op) > 1 and isinstance(op[1], int) else None
    match op:
        case ("loadi", _, v): return ins("LOADI", rd=r, imm=v)
        case ("mov", _, s): return ins("MOV", rd=r, src=f"R{s}")
        case ("compare", _, v): return ins("COMPAREI", a=r, imm=v)
        case ("memset", where, offset, byte, n):
            return ins("MEMSET", dst="R200" if where == A else "R201", offset=offset, pattern=byte, len=n)
        case ("arena", _, size): return ins("ARENA_ALLOC", rd=r, size=size)
        case ("arena_reset",): return ins("ARENA_RESET")
        case ("fork", _): return ins("FORK", rd=r)
        case ("abort", _): return ins("ABORT", snap=r)
        case ("restore", _): return ins("RESTORE", snap=r)
        case ("call", args): return ins("CALL", target=32, args=tuple(f"R{a}" for a in args))
        case ("ret",): return ins("RET")
        case ("child", _): return ins("FORK_CONTEXT", rd=r, target=0)
        case ("load", _): return ins("LOAD_MODEL", rd=r, reference="R202")
        case ("unload", _): return ins("UNLOAD_MODEL", model=r)
        case ("sense", _): return ins("SENSE", rd=r, peripheral="TOKEN")
    raise AssertionError(op)


reg = st.integers(0, REGISTERS - 1)
operations = st.one_of(
    st.tuples(st.just("loadi"), reg, st.integers(-3, 3)),
    st.tuples(st.just("mov"), reg, reg),
    st.tuples(st.just("compare"), reg, st.integers(-3, 3)),
    st.tuples(st.just("memset"), st.sampled_from((A, A, S)), st.sampled_from(OFFSETS), st.integers(0, 255),
              st.sampled_from((1, 3, 4100))),
    st.tuples(st.just("arena"), reg, st.integers(1, 40)),
    st.tuples(st.just("arena_reset")),
    st.tuples(st.just("fork"), reg), st.tuples(st.just("fork"), reg), st.tuples(st.just("abort"), reg),
    st.tuples(st.just("abort"), reg), st.tuples(st.just("restore"), reg),
    st.tuples(st.just("call"), st.lists(reg, max_size=3, unique=True).map(tuple)),
    st.tuples(st.just("ret")), st.tuples(st.just("child"), reg), st.tuples(st.just("load"), reg),
    st.tuples(st.just("unload"), reg), st.tuples(st.just("sense"), reg))


def seen(value: Any) -> Any:
    """A register of the machine in the model's terms."""
    if isinstance(value, SnapshotHandle):
        return Name("snapshot", value.id)
    if isinstance(value, ContextRef):
        return Name("context", value.id)
    return Name("model", value.id) if isinstance(value, Handle) else value


def check(vm: VM, contexts: list, model: Model) -> None:
    for ctx, c in zip(contexts, model.contexts, strict=True):
        assert [seen(v) for v in ctx.R[:REGISTERS]] == c.R
        frame, depth = ctx.frames, len(c.frames)
        assert ctx.depth == depth
        while frame is not None:
            depth -= 1
            assert [seen(v) for v in frame.R[:REGISTERS]] == c.frames[depth][0]
            frame = frame.parent
        assert ctx.flags == c.flags
        assert ctx.cursors.get("TOKEN", 0) == c.position
        assert {k for k, v in ctx.states.items() if v is not None} == c.models
        assert ctx.memory.arenas.get(0) == c.arena
        for base, written in ((A, c.memory), (S, model.shared)):
            for offset in OFFSETS:
                want = bytes(written.get(offset + i, 0) for i in range(-1 if offset else 0, 5))
                start = base + offset - (1 if offset else 0)
                assert ctx.memory.read(start, len(want)) == want
    assert {s.id for s in vm.snapshots.live()} == set(model.snapshots)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 2), operations), max_size=60))
def test_the_machine_agrees_with_a_copying_model(script):
    program = [instruction(op) for _, op in script] + [ins("HALT")]
    vm = VM(program, backend="interpreter", snapshot_window=WINDOW, models=Provider())
    vm.set_source("TOKEN", INPUTS)
    vm.set("R200", A)
    vm.set("R201", S - 2 ** 64 if S >= 2 ** 63 else S)
    vm.set("R202", "m")
    contexts, model = [vm.main], Model()
    high = list(vm.main.R[200:203])
    for at, (who, op) in enumerate(script):
        who %= len(contexts)
        ctx = contexts[who]
        ctx.R[200:203] = high                       # a callee starts without them
        ctx.index = at
        before = copy.deepcopy(model)
        try:
            model.apply(who, op)
            failed = False
        except Trapped:
            model, failed = before, True
        vm.interpreter.run_exactly(ctx, 1)
        assert (ctx.trap is not None) == failed, ctx.trap
        ctx.trap = None
        if op[0] == "child":
            contexts.append(vm.scheduler.contexts[max(vm.scheduler.contexts)])
        check(vm, contexts, model)
