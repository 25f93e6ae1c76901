"""Locks between contexts of one machine (0x75, 0x76).

A lock is a number: the address of what it guards, or any other that the contexts agree on.  It is taken and given back
in the machine's table, which lies outside the roots of contexts: a rollback while a lock is held leaves it held.
"""
from m3jit.isa.fields import R1, I64, Rd
from m3jit.isa.table import StateDoc, op

LOCKS = StateDoc("the machine's lock table, outside the context root", "not captured",
                 "not rolled back; what a context holds is released when it ends")


@op(0x75, "LOCK", route="machine", why_slow="asks the machine's lock table", reads=("locks",),
    writes=("locks", "scheduler"), state=LOCKS)
def lock(m, id: R1("int") = None, rd: Rd("int") = None, number: I64[0] = 0, timeout: I64[8] = -1):
    """Take lock `id` (or NUMBER), waiting up to TIMEOUT ns (-1: without end, 0: not at all); rd = 1 taken, 0 not.

    A context may take a lock it holds again.  The holder inherits the priority of who waits.  Locks of a context that
    ends are given on.  Traps: a deadlock (waits without TIMEOUT), named with the contexts and locks of the cycle."""
    return m.lock(number if id is None else id, timeout)


@op(0x76, "UNLOCK", route="machine", why_slow="changes the machine's lock table", reads=("locks",),
    writes=("locks", "scheduler"), state=LOCKS)
def unlock(m, id: R1("int") = None, number: I64[0] = 0):
    """Give the lock back once; the longest waiter of the highest priority gets it.  Traps: not held by this context."""
    m.unlock(number if id is None else id)
