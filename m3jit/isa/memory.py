"""Addressed memory and snapshots of it: ARENA_ALLOC, ARENA_RESET, SNAPSHOT, RESTORE, MEMCPY, MEMSET, PREFETCH."""
from m3jit.isa.fields import R1, R2, U8, U32, Flag, IntOrReg, Rd
from m3jit.isa.table import StateDoc, op

WHOLE = -1                         # LEN that was not given

_PAGES = StateDoc("pages of the region, shared copy on write by snapshots and contexts (SHARED: by all, outside the "
                  "root)", "O(1): the page tree is shared", "the pages of the snapshot are put back (SHARED: not)")
_SNAPSHOTS = StateDoc("the snapshot tree of the machine; kept alive by registers and a bounded window",
                      "O(1) in the size of the state", "snapshots themselves stay")


@op(0x26, "ARENA_ALLOC", route="machine", why_slow="changes addressed memory", writes=("memory",), state=_PAGES,
    positional=("size",))
def arena_alloc(m, rd: Rd("int"), size: IntOrReg(fmt="q")[0, 8], arena: U8[9] = 0, align: U32[12] = 16):
    """rd = address of `size` fresh bytes of arena `arena` (0-255): the end of what is allocated, rounded up to ALIGN.

    Bytes that were never written are zero.  Traps: a size of 0 or less; ALIGN not a power of two; more than 2^30 bytes
    in one arena."""
    return m.arena_alloc(arena, size, align)


@op(0x27, "ARENA_RESET", route="machine", why_slow="changes addressed memory", writes=("memory",), state=_PAGES,
    positional=("arena",))
def arena_reset(m, arena: U8[9] = 0):
    """Free every block of an arena.  Addresses in it trap until they are allocated again; contents are kept.

    Traps: an arena that was never used."""
    m.arena_reset(arena)


@op(0x28, "SNAPSHOT", route="machine", why_slow="captures the context", reads=("memory", "registers"),
    writes=("snapshots",), state=_SNAPSHOTS)
def snapshot(m, rd: Rd("snapshot"), persist: Flag(7) = False):
    """rd = a snapshot of memory and state; the same mechanism as FORK, PERSIST included."""
    m.snapshot(rd, persist)


@op(0x29, "RESTORE", route="machine", why_slow="replaces the context's root", writes=("memory", "states", "rng"),
    state=_SNAPSHOTS)
def restore(m, snap: R1("snapshot")):
    """Put memory, states, random stream and stream positions of a snapshot back; registers, flags and calls stay.

    Any live snapshot can be restored any number of times.  Traps: a released snapshot."""
    m.restore(snap)


@op(0x2A, "MEMCPY", route="machine", why_slow="changes addressed memory", reads=("memory",), writes=("memory",),
    state=_PAGES)
def memcpy(m, dst: R1("int"), src: R2("int", "tensor"), len: IntOrReg(fmt="q")[0, 8] = WHOLE,
           src_offset: IntOrReg(fmt="I")[12, 9] = 0, dst_offset: IntOrReg(fmt="I")[16, 10] = 0,
           persist: Flag(7) = False):
    """memory[dst + DST_OFFSET ...] = LEN bytes of src from SRC_OFFSET on; src is an address or a tensor's bytes.

    Without LEN a tensor is copied to its end.  Overlapping ranges are copied as if through a buffer.
    A destination in WAL is the end of the log of the machine's store (`m3jit run --store`): the region's first address,
    or the log's length as the offset.  What is appended there is not rolled back; it is on the disk with the next
    version that is committed, with PERSIST before the instruction is done.
    Traps: an address without LEN; a range outside the tensor, a region or a block; a region that is read-only; PERSIST
    and a destination that is not WAL; WAL without a store."""
    m.copy(dst + dst_offset, src, src_offset, len, persist)


@op(0x2B, "MEMSET", route="machine", why_slow="changes addressed memory", writes=("memory",), state=_PAGES)
def memset(m, dst: R1("int"), pattern: U8[9] = 0, len: IntOrReg(fmt="q")[0, 8] = 0,
           offset: IntOrReg(fmt="I")[12, 10] = 0):
    """memory[dst + OFFSET ...] = PATTERN, LEN bytes.  Traps as MEMCPY."""
    m.fill(dst + offset, pattern, len)


@op(0x2C, "PREFETCH", route="machine", why_slow="checks addressed memory", reads=("memory",))
def prefetch(m, src: R1("int", "tensor"), len: IntOrReg(fmt="q")[0, 8] = WHOLE, offset: IntOrReg(fmt="I")[12, 9] = 0):
    """Ask for LEN bytes of a block or tensor soon; changes nothing.  Traps: a range that could not be read."""
    m.prefetch(src, offset, len)
