"""Checkpoints of a context's state on disk (0xFA, 0xFB)."""
from m3jit.isa.fields import GPR, NO_STRING, R1, STATE, Rd, Text
from m3jit.isa.table import StateDoc, op

SAVED = StateDoc("a store on disk, outside the context root", "not captured",
                 "not rolled back: a written checkpoint stays")
RESTORED = StateDoc("the snapshot tree of the machine, or the context root (a state)",
                    "O(1), as any snapshot", "the root of the snapshot is put back; snapshots themselves stay")


@op(0xFA, "CHECKPOINT_SAVE", route="machine", why_slow="writes to a disk", state=SAVED, source="write-ahead logging",
    reads=("registers", "memory"), writes=("files",), positional=("path",))
def checkpoint_save(m, what: R1("snapshot", "state", "tensor", banks=(GPR, STATE)) = None, rd: Rd("int") = None,
                    path: Text[0] = NO_STRING):
    """Write a snapshot (absent: the context as it is before this instruction), a state or a tensor to the store PATH.

    PATH is a folder in the machine's files, made when it is not there.  Blocks it has are not written again.
    Snapshots that the context names are saved with it; what ABORT leaves as it is (other contexts, SHARED, what rings
    hold) is not saved either: FORK PERSIST does that.
    rd = bytes of blocks written.  What was saved is on the disk when the instruction is done: after a crash at any
    moment the folder has it, or what was saved before.  Traps: no room; not permitted; a folder in use or of something
    else; a value without a form on a disk."""
    return m.save_checkpoint(what, m.text(path))


@op(0xFB, "CHECKPOINT_RESTORE", route="machine", why_slow="reads from a disk", state=RESTORED,
    source="write-ahead logging", reads=("files",), writes=("snapshots", "states"), positional=("path",))
def checkpoint_restore(m, rd: Rd("snapshot", "state", "tensor", banks=(GPR, STATE)), path: Text[0] = NO_STRING):
    """rd = what CHECKPOINT_SAVE wrote to PATH last: a snapshot, which RESTORE or ABORT puts back, a state or a tensor.

    RESUME of a snapshot that was the context itself goes on behind its CHECKPOINT_SAVE.  Every byte is checked against
    its hash.  Traps: a missing or damaged store; one that another program wrote, or one that uses another model; a
    position in a ring that this run never had."""
    return m.restore_checkpoint(m.text(path))
