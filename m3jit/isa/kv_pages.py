"""Pages of key/value streams, the tables that list them, and who may write where.

**Pages.**  64 positions of one layer (`kv_layout`).  The memory of a page that nobody holds any more is used again.

**Tables.**  The pages of a layer are listed by a tree of two levels that is never changed: a top table with the address
of every leaf, a leaf with the addresses of up to FAN pages.  Page i is entry i % FAN of leaf i // FAN; that is how
kernels reach it.  A version that adds or replaces a page copies one leaf and the top table and shares the rest: at a
million positions, 8 KiB.

**Claims.**  Positions beyond the length of every live value are written in place, others never.  A `Claim` keeps
positions 0 .. stop-1 of some pages: a value holds one for every page it has rows in.  A `Mark` knows the claims of its
pages, weakly: the furthest live one says where they are free.  So a rolled back value that is the only one left writes
where its successors have been, without a copy; and while one of them lives, in a snapshot, say, its rows are safe.
Pages that grow together (the last pages of a model's layers) share a mark, so that taking a position of all layers is
one step.
"""
from __future__ import annotations

import threading
import weakref
from array import array
from typing import Any, Iterator, Sequence

import numpy as np

from m3jit.isa import spare
from m3jit.isa.kv_layout import FAN, PAGE

lock = threading.Lock()             # guards every mark; held for short list operations only
_TIDY = 16                          # marks forget dead claims among live ones when they have more, then twice as many


class Claim:
    """Keeps positions 0 .. stop-1 of the pages of a mark while it is alive."""
    __slots__ = ("stop", "__weakref__")

    def __init__(self, stop: int):
        self.stop = stop


class Mark:
    """The claims of `members` pages.  Every method wants `lock`.

    broken: a page has left for a mark of its own."""
    __slots__ = ("claims", "members", "broken", "_tidy")

    def __init__(self, members: int = 1):
        self.claims: list[tuple[int, weakref.ref]] = []            # (stop, claim), by stop
        self.members, self.broken, self._tidy = members, False, _TIDY

    def position(self) -> int:
        """The first position that nobody holds."""
        claims = self.claims
        while claims:
            stop, claim = claims[-1]
            if claim() is not None:
                return stop
            claims.pop()
        return 0

    def take(self, first: int, stop: int) -> Claim | None:
        """Positions first .. stop-1 for writing; None when another value has taken some of them."""
        if self.position() != first:
            return None
        return self._add(len(self.claims), stop)

    def hold(self, stop: int) -> Claim:
        """A claim of positions 0 .. stop-1 for a value that has them already.  The dead on the way to it go."""
        at = len(self.claims)
        while at and self.claims[at - 1][0] >= stop:
            at -= 1
            length, name = self.claims[at]
            found = name()
            if found is None:
                del self.claims[at]
            elif length == stop:
                return found
        return self._add(at, stop)

    def _add(self, at: int, stop: int) -> Claim:
        claim = Claim(stop)
        self.claims.insert(at, (stop, weakref.ref(claim)))
        if len(self.claims) > self._tidy:
            self.claims = [c for c in self.claims if c[1]() is not None]
            self._tidy = max(_TIDY, 2 * len(self.claims))
        return claim

    def copy(self) -> Mark:
        """The same claims for a page that leaves."""
        other = Mark()
        other.claims = list(self.claims)
        self.broken = True
        return other


class Page:
    """64 positions of one layer.  Nothing may keep a view of `data` longer than the page."""
    __slots__ = ("address", "mark", "_block", "_storage", "__weakref__")

    def __init__(self, block: spare.Block, storage: np.dtype, mark: Mark):
        self._block, self.address, self._storage, self.mark = block, block.address, storage, mark

    @classmethod
    def zeros(cls, nbytes: int, storage: np.dtype, mark: Mark) -> Page:
        """A new page."""
        block = spare.take(nbytes)
        block.data.fill(0)
        return cls(block, storage, mark)

    def copied(self, mark: Mark) -> Page:
        """A page with the same contents."""
        block = spare.take(self._block.data.nbytes)
        block.data[:] = self._block.data
        return Page(block, self._storage, mark)

    @property
    def data(self) -> np.ndarray:
        """The numbers, one-dimensional."""
        return self._block.data.view(self._storage)

    @property
    def claimed(self) -> int:
        """Positions that live values hold."""
        with lock:
            return self.mark.position()

    def __del__(self, blocks: Any = spare) -> None:     # this module's names may be gone already
        try:
            block = self._block
        except AttributeError:                         # making it was interrupted
            return
        if blocks.give is not None:                    # the process ends
            blocks.give(block)


def take_all(pages: Sequence[Page], first: int, stop: int) -> list[Claim | None]:
    """`Mark.take` for the last pages of several layers: one claim for pages that share a mark.  Where two layers have
    the same page, one of them gets it."""
    with lock:
        sharing: dict[Mark, int] = {}
        for page in pages if all_different(pages) else ():
            sharing[page.mark] = sharing.get(page.mark, 0) + 1
        together = {mark: mark.take(first, stop) for mark, count in sharing.items() if count == mark.members}
        out = []
        for page in pages:
            if page.mark not in together:            # others that are not appended to now share it
                page.mark = page.mark.copy()
                out.append(page.mark.take(first, stop))
            else:
                out.append(together[page.mark])
        return out


def all_different(pages: Sequence[Page]) -> bool:
    """Are these as many pages as there are names for them?"""
    return len(set(pages)) == len(pages)


def common_mark(pages: Sequence[Page]) -> Mark:
    """The mark of these pages as one: theirs where they have one, else a new one with the claims of all."""
    with lock:
        mark = pages[0].mark
        if mark.members == len(pages) and not mark.broken and all(page.mark is mark for page in pages):
            return mark
        old = {page.mark for page in pages}
        mark = Mark(len(pages))
        mark.claims = sorted({id(c[1]): c for m in old for c in m.claims}.values(), key=lambda c: c[0])
        for m in old:
            m.broken = True
        for page in pages:
            page.mark = mark
        return mark


class Leaf:
    """Up to FAN pages."""
    __slots__ = ("pages", "table", "address")

    def __init__(self, pages: tuple[Page, ...], table: array):
        self.pages, self.table = pages, table
        self.address = table.buffer_info()[0]


class PageTable:
    """The pages of a layer, in order; immutable.  address: of the top table."""
    __slots__ = ("leaves", "top", "address", "count")

    def __init__(self, leaves: tuple[Leaf, ...], top: array, count: int):
        self.leaves, self.top, self.count = leaves, top, count
        self.address = top.buffer_info()[0]

    def spliced(self, keep: int, pages: Sequence[Page] = ()) -> PageTable:
        """The first `keep` pages, then others."""
        whole, rest = divmod(keep, FAN)
        leaves = []
        if rest:
            leaf, more = self.leaves[whole], pages[:FAN - rest]
            table = leaf.table[:rest] + array("q", [page.address for page in more])
            leaves = [Leaf((*leaf.pages[:rest], *more), table)]
            pages = pages[FAN - rest:]
        for at in range(0, len(pages), FAN):
            more = pages[at:at + FAN]
            leaves.append(Leaf(tuple(more), array("q", [page.address for page in more])))
        top = self.top[:whole] + array("q", [leaf.address for leaf in leaves])
        leaves = (*self.leaves[:whole], *leaves)
        return PageTable(leaves, top, (len(leaves) - 1) * FAN + len(leaves[-1].pages) if leaves else 0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Page:
        if not -self.count <= i < self.count:
            raise IndexError(i)
        i %= self.count
        return self.leaves[i // FAN].pages[i % FAN]

    def __iter__(self) -> Iterator[Page]:
        for leaf in self.leaves:
            yield from leaf.pages

    def addresses(self) -> np.ndarray:
        """Of every page, as int64."""
        return np.array([page.address for page in self], np.int64)


NO_PAGES = PageTable((), array("q"), 0)
