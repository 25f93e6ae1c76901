"""Memory that is used again: blocks of bytes that state values hold, kept for the next block of their size.

Memory new to the process is given page by page by the operating system when it is first written, which costs more than
filling it.  A generated token, and a copy of a page that a rollback makes necessary, then allocate nothing.
"""
from __future__ import annotations

import numpy as np

ALIGN = 64                                   # bytes: whole cache lines
LIMIT = 256 << 20                            # bytes of free blocks that are kept

_free: dict[int, list["Block"]] = {}         # bytes -> free blocks; list operations are atomic
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
    """Hand back what `take` gave; nobody may use it any more."""
    global _kept
    nbytes = block.data.nbytes
    if _kept + nbytes <= LIMIT:
        _kept += nbytes
        _free.setdefault(nbytes, []).append(block)


def free_bytes() -> int:
    """Bytes of the blocks that are kept."""
    return sum(len(blocks) * nbytes for nbytes, blocks in list(_free.items()))
