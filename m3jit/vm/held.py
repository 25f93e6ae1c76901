"""Bytes of state: what roots lead to, and what snapshots alone hold.

Counted are pages of key/value streams, blocks of recurrent cells, pages of addressed memory and tensors in registers,
each once however many versions share it, and for every snapshot `REGISTERS` bytes for its lists.  What a running
context leads to as well is not a snapshot's.

Counting looks at every page, so it is done only when the bound may have been reached: what snapshots alone hold can
have grown by no more than the running contexts had at the last count, and the blocks and pages made since.  Tensors are
no part of that estimate; they are counted after every `EVERY` snapshots.  And it is done only when its cost has been
earned since the last count: by a snapshot for every `LOOKS` objects that were looked at then, or by new blocks and
pages of 1/`LOOKS` of the bytes that were found.  A snapshot thus costs a constant time, averaged over many,
however large the state is.

So the bound is checked at each snapshot of a small state (`LOOKS` objects), and after one that was refused.  Otherwise
it can be passed between two counts: by what the running contexts had at the last one and have let go since, by new
blocks and pages of 1/`LOOKS` of all that was found then, by `REGISTERS` bytes for each snapshot since, and by tensors.
"""
from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator

from m3jit.errors import UserError
from m3jit.isa import spare
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.types import Tensor
from m3jit.vm import memory

DEFAULT_BOUND = 4 << 30            # bytes that snapshots alone may hold
REGISTERS = 4096                   # bytes of a root's register lists and their entries, about
EVERY = 4096                       # snapshots between two counts, when no more is known
LOOKS = 16                         # objects that a count may look at for each snapshot since the last
DEFAULT_CONTEXTS = 1024            # contexts of a machine at one time


def count_of(name: str, value: Any, least: int) -> int:
    """An option that is a whole number.  UserError: it is none, or less than `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name}={value!r}; a whole number, {least} or more")
    return value


def parts(root: Any, walked: set[int] | None = None) -> Iterator[tuple[Any, int]]:
    """(object, bytes) of what a context, or the root of a snapshot, leads to; an object may come several times.

    walked: frames, layers of streams and states (identities) that need not be walked again; those walked are added."""
    known = set() if walked is None else walked

    def new(thing: Any) -> bool:
        found = id(thing) not in known
        known.add(id(thing))
        return found
    frame, banks = root.frames, [root.R, root.V]
    while frame is not None and new(frame):            # a frame's callers are always the same
        banks += [frame.R, frame.V]
        frame = frame.parent
    for bank in banks:
        yield bank, 0
        for value in bank:
            if value.__class__ is Tensor:
                yield value.data, value.data.nbytes
    for value in root.states.values():
        if value.__class__ is KVStream:
            size = value.page_bytes
            for layer in value.layers.values():
                if new(layer):
                    for page in layer.pages:
                        yield page, size
        elif value.__class__ is CellState and new(value):
            for cell in value.cells.values():
                yield cell.memory, cell.memory.data.nbytes
    for pages in root.memory.pages.values():
        for page in pages.map.values():
            yield page, memory.PAGE


def distinct(roots: Iterable[Any], seen: set[int]) -> int:
    """Bytes that the roots lead to and that are not in `seen` (identities) yet; adds them."""
    return _look(roots, seen, set())[0]


def _look(roots: Iterable[Any], seen: set[int], walked: set[int]) -> tuple[int, int]:
    """(`distinct`, how many objects were looked at; a bank of registers is one)."""
    total = looked = 0
    for root in roots:
        for thing, size in parts(root, walked):
            looked += 1
            if id(thing) not in seen:
                seen.add(id(thing))
                total += size
    return total, looked


class Bound:
    """Watches what snapshots alone hold.  contexts: the running ones; set by the machine."""

    def __init__(self, limit: int):
        self.limit = limit
        self.contexts: Callable[[], Iterable[Any]] = lambda: ()
        self._held = self._running = self._since = 0             # bytes at the last count; snapshots since
        self._made, self._looked = _made(), 0                    # objects that the last count looked at
        self._be_sure()

    def may_be_passed(self) -> bool:
        """Whether a count is due, with one more snapshot."""
        self._since += 1
        if self._since < self._sure_for and spare.handed_out + memory.made * memory.PAGE < self._sure_until:
            return False
        made, found = _made() - self._made, self._held + self._running
        earned = LOOKS * self._since >= self._looked or LOOKS * made >= found
        if not earned and self._held <= self.limit:              # above it: the last snapshot was refused
            return False
        return found + made + REGISTERS * self._since > self.limit or self._since >= EVERY

    def count(self, snapshots: Iterable[Any]) -> int:
        """Bytes that these snapshots alone hold."""
        seen: set[int] = set()
        walked: set[int] = set()
        kept = list(snapshots)
        self._running, running = _look(self.contexts(), seen, walked)
        held, more = _look((s.root for s in kept), seen, walked)
        self._held = held + REGISTERS * len(kept)
        self._since, self._made, self._looked = 0, _made(), running + more
        self._be_sure()
        return self._held

    def _be_sure(self) -> None:
        """Up to how many snapshots and which `_made` there is nothing to think about: half the room is for each."""
        half = max(self.limit - self._held - self._running, 0) // 2
        self._sure_for, self._sure_until = min(half // REGISTERS, EVERY), self._made + half


def _made() -> int:
    """Bytes of blocks and pages that this process has handed out so far."""
    return spare.handed_out + memory.made * memory.PAGE
