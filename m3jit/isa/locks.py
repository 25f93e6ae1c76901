"""Locks between contexts of one machine (0x75, 0x76)."""
from m3jit.isa.fields import R1, I64, Rd
from m3jit.isa.table import StateDoc, op

LOCKS = StateDoc("the machine's lock table, outside the context root", "not captured",
                 "not rolled back; what a context holds is released when it ends")


@op(0x75, "LOCK", route="absent", state=LOCKS, source="mutual exclusion with priority inheritance")
def lock(m, id: R1("int") = None, rd: Rd("int") = None, number: I64[0] = 0, timeout: I64[8] = -1):
    """Take lock `id` (or NUMBER), waiting up to TIMEOUT ns (-1: without end, 0: not at all); rd = 1 taken, 0 not.

    A context may take a lock it holds again.  The holder inherits the priority of who waits.  Traps: a deadlock, named
    with the contexts and locks of the cycle."""


@op(0x76, "UNLOCK", route="absent", state=LOCKS, source="mutual exclusion with priority inheritance")
def unlock(m, id: R1("int") = None, number: I64[0] = 0):
    """Give the lock back once; the longest waiter of the highest priority gets it.  Traps: not held by this context."""
