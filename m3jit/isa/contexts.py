"""Contexts: FORK, ABORT, CTX_SWITCH, PREEMPT_CHECK, YIELD, PRIORITY_SET/GET, FENCE, SPAWN_CONTEXT, KILL_CONTEXT."""
from m3jit.isa.fields import R1, Enum, Flag, Label, PayloadFlag, Priority, Rd
from m3jit.isa.table import OUTSIDE, StateDoc, op

_SNAPSHOT = StateDoc("the whole context root: registers, flags, calls, memory, states, random stream, stream positions",
                     "O(1) in the size of the state (the register lists are copied)",
                     "everything in the root is put back; not the pc, nor what lies outside the root")
_CONTEXTS = StateDoc("the scheduler, outside the root", "not captured", "contexts that were started go on")


@op(0x04, "FORK", sub=0, route="machine", why_slow="captures the context", forms=("FORK_CONTEXT",),
    reads=("registers", "memory"), writes=("snapshots",), state=_SNAPSHOT)
def fork(m, rd: Rd("snapshot"), persist: Flag(7) = False):
    """rd = a snapshot handle; then capture the context (so that after ABORT rd still names it).

    PERSIST: the machine is also committed to its store (`m3jit run --store`) before the instruction is done: this
    context behind it, all others where they stand, and what they share.  A run that is started again goes on there.
    Traps: PERSIST without a store; no room; a value without a form on a disk."""
    m.snapshot(rd, persist)


@op(0x04, "FORK_CONTEXT", sub=1, route="control", control="spawn", reads=("registers", "memory"),
    writes=("scheduler",), state=_CONTEXTS)
def fork_context(m, rd: Rd("context"), target: Label[4], priority: Priority()[1] = None):
    """rd = a child context that starts at the label with a copy of everything and is isolated from then on.

    Written FORK rC, LABEL, PRIORITY (GREEN when not given).  Sharing is copy on write: O(1) in the size of the state.
    The child's registers are those from before rd is written."""
    m.write(rd, m.fork_context(target, priority))


@op(0x05, "ABORT", route="control", control="abort", writes=("registers", "memory", "states", "rng", "flags", "frames"),
    state=_SNAPSHOT)
def abort(m, snap: R1("snapshot", "null"), resume: PayloadFlag(0)[0] = False):
    """Put the state of a snapshot back: memory, states, random stream, stream positions, registers, flags, calls.

    Execution goes on with the next instruction; RESUME: right after the FORK that took the snapshot.  A register that
    was never written: nothing happens.  Traps: a released snapshot."""
    return m.abort(snap, resume)


@op(0x18, "CTX_SWITCH", route="machine", why_slow="calls the scheduler", writes=("scheduler",), state=_CONTEXTS,
    positional=("pipeline",))
def ctx_switch(m, rd: Rd("snapshot") = None, pipeline: Enum("MAMBA TRANSFORMER AUDIO")[0] = "TRANSFORMER",
               priority: Priority()[1] = None):
    """Mark the context as running a pipeline (for profiles and placement), set its priority if one is given, take a
    snapshot when rd is given, and let more urgent contexts run."""
    m.switch_pipeline(pipeline)
    if priority is not None:
        m.set_priority(m.ctx, ("GREEN", "BLUE", "RED").index(priority))
    if rd is not None:
        m.snapshot(rd)


@op(0x6D, "PREEMPT_CHECK", route="machine", why_slow="looks at pending interrupts", reads=("input",), state=OUTSIDE)
def preempt_check(m, rd: Rd("int")):
    """rd = 1 if an interrupt is pending for this context, else 0; the interrupt stays pending.  More urgent contexts
    that are ready run before the next instruction."""
    m.ctx.leave = m.ctx.leave or m.vm.scheduler.more_urgent_than(m.ctx)
    return int(m.interrupt_pending())


@op(0x70, "YIELD", route="machine", why_slow="calls the scheduler", writes=("scheduler",), state=_CONTEXTS)
def yield_(m):
    """Let the other ready contexts of this priority run first."""
    m.yield_turn()


@op(0x73, "PRIORITY_SET", route="machine", why_slow="calls the scheduler", writes=("scheduler",), state=_CONTEXTS)
def priority_set(m, level: R1("int") = None, priority: Priority()[0] = None):
    """This context's priority = the word, or level: 0 GREEN, 1 BLUE, 2 RED.  Traps: another level, or neither given."""
    m.set_priority(m.ctx, m.priority_level(level, priority))


@op(0x74, "PRIORITY_GET", route="machine", why_slow="asks the scheduler", state=_CONTEXTS)
def priority_get(m, rd: Rd("int")):
    """rd = this context's priority: 0 GREEN, 1 BLUE, 2 RED."""
    return m.ctx.priority


@op(0x77, "FENCE", route="machine", why_slow="orders memory", reads=("memory",), writes=("memory",), state=OUTSIDE)
def fence(m):
    """Every write to SHARED before it is seen by every read after it, in all contexts.

    One scheduler runs all contexts of a machine and compiled regions do not write SHARED, so the order holds already;
    compiled code is left here."""


@op(0xA2, "SPAWN_CONTEXT", route="control", control="spawn", writes=("scheduler",), state=_CONTEXTS,
    key_aliases={"ENTRY": "TARGET"})
def spawn_context(m, rd: Rd("context"), target: Label[0], model: R1("state") = None, priority: Priority()[4] = None):
    """rd = a context that starts at the label with empty registers, memory and states, and `model` as its model."""
    m.write(rd, m.spawn_context(target, priority, model))


@op(0xA3, "KILL_CONTEXT", route="machine", why_slow="calls the scheduler", writes=("scheduler",), state=_CONTEXTS)
def kill_context(m, target: R1("context")):
    """End a context (this one, too).  Its files are completed with the program.  Traps: it has already ended."""
    m.kill(target)
