"""Checkpoints of a context's state on disk (0xFA, 0xFB)."""
from m3jit.isa.fields import NO_STRING, R1, Enum, PayloadFlag, Rd, Text
from m3jit.isa.table import StateDoc, op

SAVED = StateDoc("a file, outside the context root", "not captured", "not rolled back: a written checkpoint stays")
RESTORED = StateDoc("the context root", "O(1), as any snapshot", "the root of the snapshot is put back")


@op(0xFA, "CHECKPOINT_SAVE", route="absent", state=SAVED, source="write-ahead logging", positional=("path",))
def checkpoint_save(m, what: R1("snapshot", "state", "tensor") = None, rd: Rd("int") = None, path: Text[0] = NO_STRING,
                    compression: Enum("NONE LZ4 ZSTD")[8] = "NONE", asynchronous: PayloadFlag(0)[9] = False):
    """Write a snapshot (absent: the present root), a state or a tensor to file PATH; rd = bytes written.

    The file appears complete or not at all.  Errors: no room; not permitted."""


@op(0xFB, "CHECKPOINT_RESTORE", route="absent", state=RESTORED, source="write-ahead logging", positional=("path",),
    writes=("memory", "rng"))
def checkpoint_restore(m, rd: Rd("snapshot", "state", "tensor"), path: Text[0] = NO_STRING,
                       verify: PayloadFlag(0)[8] = True):
    """rd = what CHECKPOINT_SAVE wrote to PATH; a snapshot is put back by RESTORE or ABORT.

    VERIFY checks the file's hashes.  Errors: a missing or damaged file; one of another program."""
