"""Memory that is used again: blocks of bytes that state values hold, kept for the next block of their size.

Memory new to the process is given page by page by the operating system when it is first written, which costs more than
filling it.  A generated token, and a copy of a page that a rollback makes necessary, then allocate nothing.

What is kept has a limit.  Beyond it blocks of the size that was not taken for the longest time go, so that what a
former model left does not stand in the way of the next one's.
"""
from __future__ import annotations

import numpy as np

ALIGN = 64                                   # bytes: whole cache lines
LIMIT = 256 << 20                            # bytes of free blocks that are kept

_free: dict[int, list["Block"]] = {}         # bytes -> free blocks; list operations are atomic
_taken: dict[int, int] = {}                  # bytes -> `handed_out` when a block of this size was last taken
handed_out = 0                               # bytes that `take` has given so far
_kept = 0                                    # bytes in them (an estimate when threads race)


class Block:
    """An uint8 array whose address is a multiple of `ALIGN`."""
    __slots__ = ("data", "address")

    def __init__(self, nbytes: int):
        try:
            raw = np.empty(nbytes + ALIGN, np.uint8)
        except (ValueError, OverflowError) as error:        # a size that no machine has
            raise MemoryError(str(error)) from None
        start = raw.ctypes.data
        skipped = -start % ALIGN
        self.data, self.address = raw[skipped:skipped + nbytes], start + skipped


def take(nbytes: int) -> Block:
    """A block with arbitrary contents.  MemoryError when there is no room for it."""
    global _kept, handed_out
    handed_out += nbytes
    _taken[nbytes] = handed_out
    free = _free.get(nbytes)
    if free:
        try:
            block = free.pop()
            _kept -= nbytes
            return block
        except IndexError:                   # another thread took the last one
            pass
    return Block(nbytes)


def give(block: Block) -> None:
    """Hand back what `take` gave; nobody may use it any more.  Any thread, finalisers too: so there is no lock."""
    global _kept
    if _free is None:                        # the process ends, this module's names went before the block's holder
        return
    nbytes = block.data.nbytes
    if nbytes > LIMIT or _kept + nbytes > LIMIT and not _make_room(nbytes):
        return
    _kept += nbytes
    _free.setdefault(nbytes, []).append(block)


def _make_room(nbytes: int) -> bool:
    """Let blocks of sizes go that were taken before one of this size was; whether there is room for it now."""
    global _kept
    _kept = free_bytes()
    own = _taken.get(nbytes, 0)
    for last, size in sorted((_taken.get(size, 0), size) for size, blocks in list(_free.items()) if blocks):
        while last < own and _kept + nbytes > LIMIT:
            try:
                _free[size].pop()
            except IndexError:               # another thread took the last one
                break
            _kept -= size
    return _kept + nbytes <= LIMIT


def free_bytes() -> int:
    """Bytes of the blocks that are kept."""
    return sum(len(blocks) * nbytes for nbytes, blocks in list(_free.items()))
