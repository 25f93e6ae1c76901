"""Addressed memory: sixteen regions behind 64-bit addresses, checked on every access, copied on write.

An address is region << 60 | offset.  Writable pages of ACTIVATION, KV_CACHE, ARENA and RAG_INDEX belong to a context's
root (`ContextMemory.share` is O(1)); SHARED belongs to the machine.  An access outside a region, to a freed block or
against its permission is an OperandError with region, offset and size, and nothing is written.
"""
from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Callable, Iterable

import numpy as np

from m3jit.errors import NoRoom, OperandError
from m3jit.isa.types import DType, Tensor
from m3jit.vm.commit import Store, attribute, commit, item
from m3jit.vm.persistent import PersistentMap

PAGE_BITS = 12
PAGE = 1 << PAGE_BITS
OFFSET_MASK = (1 << 60) - 1
ARENA_SHIFT = 48                   # arena number in the offset
ARENA_LIMIT = 1 << 30              # bytes of one arena
ARENAS = 256
WINDOW = 1 << 32                   # bytes of a plain writable region
DEFAULT_LIMIT = 1 << 30            # bytes of pages that the contexts of a machine may write
_new = object.__new__
made = 0                           # pages made so far in this process

TEXT, GLOBAL, WEIGHTS, ACTIVATION, KV_CACHE, ARENA, SHARED, WAL, SNAPSHOT, STREAM_RING, RAG_INDEX, CLUSTER_STAGING, \
    FEDERATED, CONFIDENTIAL, SCRATCH_DEVICE, MMIO = range(16)
NAMES = ("TEXT", "GLOBAL", "WEIGHTS", "ACTIVATION", "KV_CACHE", "ARENA", "SHARED", "WAL", "SNAPSHOT", "STREAM_RING",
         "RAG_INDEX", "CLUSTER_STAGING", "FEDERATED", "CONFIDENTIAL", "SCRATCH_DEVICE", "MMIO")
READ_ONLY = frozenset({TEXT, GLOBAL, WEIGHTS})
IN_ROOT = (ACTIVATION, KV_CACHE, ARENA, RAG_INDEX)


@dataclass(frozen=True)
class TableEntry:
    """A row of the region table: region 0x10-0x17 seen through a window of a plain region."""
    region: int
    name: str
    window: int                    # address of the window's first byte, or -1: not mapped on this machine
    size: int = 0


REGION_TABLE: tuple[TableEntry, ...] = tuple(
    TableEntry(0x10 + i, name, -1) for i, name in enumerate(
        ("COLD", "WARM", "HOT", "KV_TIER_WARM", "KV_TIER_COLD", "KEYS", "GRADIENTS", "OPTIMIZER")))


class Page:
    """4 KiB and the token of the map that may write it in place."""
    __slots__ = ("token", "data", "__weakref__")

    def __init__(self, token: Any, data: bytearray):
        self.token, self.data = token, data


class Pages:
    """A sparse, zero-filled byte range that is shared in O(1)."""
    __slots__ = ("map", "count")

    def __init__(self) -> None:
        self.map, self.count = PersistentMap(), 0

    def share(self) -> "Pages":
        other = Pages.__new__(Pages)
        other.map, other.count = self.map.share(), self.count
        return other

    def read(self, offset: int, size: int) -> bytes:
        out = bytearray(size)
        at = 0
        while at < size:
            start = (offset + at) & (PAGE - 1)
            n = min(PAGE - start, size - at)
            page = self.map.get((offset + at) >> PAGE_BITS)
            if page is not None:
                out[at:at + n] = page.data[start:start + n]
            at += n
        return bytes(out)

    def missing(self, offset: int, size: int) -> int:
        """Pages that a write there would add."""
        first, last = offset >> PAGE_BITS, (offset + size - 1) >> PAGE_BITS
        return sum(self.map.get(p) is None for p in range(first, last + 1)) if size else 0

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes: all of them or none."""
        commit(self.writing(offset, data))

    def writing(self, offset: int, data: bytes | bytearray | memoryview) -> list[Store]:
        """The stores (m3jit.vm.commit) of `write`."""
        view = memoryview(data).cast("B")
        return self._places(offset, len(view), lambda at, n: view[at:at + n])

    def filling(self, offset: int, byte: int, size: int) -> list[Store]:
        """The stores that write `size` times the same byte."""
        same = memoryview(bytes((byte,)) * min(size, PAGE))
        return self._places(offset, size, lambda at, n: same[:n])

    def _places(self, offset: int, size: int, part: Callable[[int, int], memoryview]) -> list[Store]:
        """The stores of a write, by pages, all made and owned; part(first, count) gives the bytes."""
        out, at = [], 0
        while at < size:
            start = (offset + at) & (PAGE - 1)
            n = min(PAGE - start, size - at)
            there = memoryview(self._own((offset + at) >> PAGE_BITS).data)[start:start + n]
            out.append(item(there, slice(None), part(at, n)))
            at += n
        return out

    def _own(self, number: int) -> Page:
        global made
        page, token = self.map.get(number), self.map.owner()
        if page is None:
            page = Page(token, bytearray(PAGE))
            made += 1
            node, at = self.map.place(number)
            commit((item(node, at, page), attribute(self, "count", self.count + 1)))
        elif page.token is not token:
            page = Page(token, bytearray(page.data))
            made += 1
            self.map.set(number, page)
        return page


class WeightMap:
    """Addresses of model tensors (region WEIGHTS), given out in the order of first use; 64-byte aligned."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._tensors: list[Tensor] = []
        self._by_id: dict[int, int] = {}
        self._next = 0

    def address_of(self, tensor: Tensor) -> int:
        at = self._by_id.get(id(tensor))
        if at is None:
            at = self._next
            self._starts.append(at)
            self._tensors.append(tensor)          # keeps the identity valid
            self._by_id[id(tensor)] = at
            self._next = (at + tensor.nbytes + 63) // 64 * 64
        return WEIGHTS << 60 | at

    def read(self, offset: int, size: int) -> bytes | None:
        """The bytes there, or None unless they lie in one tensor."""
        i = bisect_right(self._starts, offset) - 1
        if i < 0 or offset + size > self._starts[i] + self._tensors[i].nbytes:
            return None
        flat = self._tensors[i].data.reshape(-1).view(np.uint8)
        return flat[offset - self._starts[i]:][:size].tobytes()


@dataclass
class MachineMemory:
    """What the contexts of one machine have in common: program text and data, weights, the SHARED region."""
    text: bytes
    data: bytes
    weights: WeightMap
    shared: Pages
    limit: int = DEFAULT_LIMIT
    contexts: Callable[[], Iterable[Any]] = tuple      # the running ones; set by the machine
    _counted: int = 0                                  # pages of all contexts at the last count
    _made: int = 0                                     # `made` then

    def __post_init__(self) -> None:
        self.nothing = ContextMemory(self)             # of all roots that hold no addressed memory; never written

    def has_room(self, more: int, touched: int) -> bool:
        """Whether all contexts together may have `more` new pages in a write to `touched` ones.  Pages they share count
        once; they are counted only when those made since the last count could have reached the limit."""
        if (self._counted + made - self._made + touched) * PAGE <= self.limit:
            return True
        seen: set[int] = set()
        for ctx in self.contexts():
            for pages in ctx.memory.pages.values():
                seen.update(map(id, pages.map.values()))
        self._counted, self._made = len(seen) + self.shared.count, made
        return (self._counted + more) * PAGE <= self.limit


class ContextMemory:
    """One context's view of all regions.  `arenas`: number -> bytes allocated (an immutable mapping)."""
    __slots__ = ("machine", "pages", "arenas")

    def __init__(self, machine: MachineMemory):
        self.machine = machine
        self.pages: dict[int, Pages] = {}
        self.arenas: dict[int, int] = {}

    def share(self) -> "ContextMemory":
        other = _new(ContextMemory)
        other.machine, other.arenas, pages = self.machine, self.arenas, self.pages
        other.pages = {r: p.share() for r, p in pages.items()} if pages else {}
        return other

    # -- checks -----------------------------------------------------------------------------------------------------
    def check(self, address: int, size: int, write: bool = False) -> tuple[int, int]:
        """(region, offset) of an access that is allowed; OperandError otherwise."""
        address &= 2 ** 64 - 1
        region, offset = address >> 60, address & OFFSET_MASK
        what = f"{'write' if write else 'read'} of {size} bytes at 0x{address:016x} (region {NAMES[region]}, offset " \
               f"0x{offset:x})"
        if size < 0:
            raise OperandError(f"{what}: a length cannot be negative")
        if write and region in READ_ONLY:
            raise OperandError(f"{what}: {NAMES[region]} is read-only; allocate with ARENA_ALLOC or write ACTIVATION")
        end = self._end(region, offset, what)
        if offset + size > end:
            raise OperandError(f"{what}: {self._outside(region, offset, size, end)}")
        if size > self.machine.limit:
            raise OperandError(f"{what}: more than the memory limit of {self.machine.limit} bytes")
        return region, offset

    def _end(self, region: int, offset: int, what: str) -> int:
        """First offset past the block that `offset` lies in."""
        if region == TEXT:
            return len(self.machine.text)
        if region == GLOBAL:
            return len(self.machine.data)
        if region == ARENA:
            number = offset >> ARENA_SHIFT
            if number not in self.arenas:
                raise OperandError(f"{what}: there is no arena {number}; ARENA_ALLOC makes it")
            return (number << ARENA_SHIFT) + self.arenas[number]
        if region == WEIGHTS:
            return OFFSET_MASK
        if region in (ACTIVATION, KV_CACHE, SHARED, RAG_INDEX):
            return WINDOW
        if region == WAL:
            raise OperandError(f"{what}: WAL is a log; MEMCPY appends to it, and nothing else reaches it")
        raise OperandError(f"{what}: region {NAMES[region]} is not available on this machine")

    def _outside(self, region: int, offset: int, size: int, end: int) -> str:
        if region == ARENA:
            base = offset >> ARENA_SHIFT << ARENA_SHIFT
            return f"arena {offset >> ARENA_SHIFT} has {end - base} bytes allocated; the block was freed or never was"
        return f"the region ends at offset 0x{end:x}"

    # -- access -----------------------------------------------------------------------------------------------------
    def _pages(self, region: int) -> Pages:
        if region == SHARED:
            return self.machine.shared
        pages = self.pages.get(region)
        if pages is None:
            pages = self.pages[region] = Pages()
        return pages

    def read(self, address: int, size: int) -> bytes:
        region, offset = self.check(address, size)
        if region in (TEXT, GLOBAL):
            source = self.machine.text if region == TEXT else self.machine.data
            return bytes(source[offset:offset + size])
        if region == WEIGHTS:
            found = self.machine.weights.read(offset, size)
            if found is None:
                raise OperandError(f"read of {size} bytes at 0x{address & 2 ** 64 - 1:016x} (region WEIGHTS, offset "
                                   f"0x{offset:x}): not inside one tensor of a loaded model")
            return found
        pages = self.machine.shared if region == SHARED else self.pages.get(region)
        return pages.read(offset, size) if pages is not None else bytes(size)

    def _room(self, region: int, offset: int, size: int) -> Pages:
        pages = self._pages(region)
        held = sum(p.count for p in self.pages.values()) + self.machine.shared.count
        more, limit = pages.missing(offset, size), self.machine.limit
        if (held + more) * PAGE > limit:
            raise NoRoom(f"out of memory: {size} more bytes in region {NAMES[region]} pass the limit of {limit} bytes")
        if not self.machine.has_room(more, size // PAGE + 2):
            raise NoRoom(f"out of memory: with {size} more bytes in region {NAMES[region]} the contexts of this "
                         f"machine pass their common limit of {limit} bytes (memory_limit); end one with "
                         "KILL_CONTEXT, or raise it")
        return pages

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        commit(self.writing(address, data))

    def writing(self, address: int, data: bytes | bytearray | memoryview) -> list[Store]:
        """The stores (m3jit.vm.commit) of `write`."""
        size = memoryview(data).nbytes
        region, offset = self.check(address, size, write=True)
        return self._room(region, offset, size).writing(offset, data)

    def filling(self, address: int, byte: int, size: int) -> list[Store]:
        """The stores that write `size` times the same byte."""
        region, offset = self.check(address, size, write=True)
        return self._room(region, offset, size).filling(offset, byte, size)

    def read_tensor(self, address: int, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        """A block as a tensor value: elements little-endian, row-major."""
        if math.prod(d for d in shape if d) >= 2 ** 60:
            raise OperandError(f"a tensor {list(shape)} does not fit any memory")
        if dtype.is_block:
            if not shape or shape[-1] % dtype.block:
                raise OperandError(f"{dtype.name} needs rows of a multiple of {dtype.block} elements, got "
                                   f"{list(shape)}")
            rows = math.prod(shape[:-1])
            raw = np.frombuffer(self.read(address, rows * dtype.row_bytes(shape[-1])), np.uint8)
            return Tensor.blocks(dtype, shape, raw)
        count = math.prod(shape)
        raw = self.read(address, count * dtype.nbytes)
        if dtype.kind == "bool":
            return Tensor(dtype, shape, (np.frombuffer(raw, np.uint8) != 0).reshape(shape))
        return Tensor(dtype, shape, np.frombuffer(raw, dtype.numpy).reshape(shape))

    # -- arenas -----------------------------------------------------------------------------------------------------
    def arena_alloc(self, number: int, size: int, align: int) -> tuple[int, Store]:
        """(address of `size` fresh bytes of an arena, the store that takes them).  OperandError: size 0, bad alignment,
        arena full."""
        if not 0 <= number < ARENAS:
            raise OperandError(f"arena {number} is outside 0..{ARENAS - 1}")
        if size <= 0:
            raise OperandError(f"a block of {size} bytes; the size must be positive")
        if align <= 0 or align & align - 1:
            raise OperandError(f"alignment {align} is not a power of two")
        start = (self.arenas.get(number, 0) + align - 1) // align * align
        if start + size > ARENA_LIMIT:
            raise OperandError(f"arena {number} is full: {size} bytes after {start} pass the limit of {ARENA_LIMIT}")
        grown = {**self.arenas, number: start + size}
        return ARENA << 60 | number << ARENA_SHIFT | start, attribute(self, "arenas", grown)

    def arena_reset(self, number: int) -> Store:
        """The store that frees every block of an arena.  OperandError: there is none of that number."""
        if number not in self.arenas:
            raise OperandError(f"there is no arena {number}; ARENA_ALLOC makes it")
        return attribute(self, "arenas", {**self.arenas, number: 0})
