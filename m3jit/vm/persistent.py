"""A map from non-negative integers that is shared in O(1) and copied where it is written.

A radix tree of fan-out 32.  A map that is written has an owner token; a node carrying the map's token is its own and is
changed in place, any other node is copied on the way to the write.  After `share` neither map has a token, and the next
write gives a map a fresh one, so neither sees what the other writes afterwards.
"""
from __future__ import annotations

from typing import Any, Iterator

from m3jit.vm.commit import attribute, commit

BITS = 5
WIDTH = 1 << BITS
MASK = WIDTH - 1
_new = object.__new__


class PersistentMap:
    """`get`, `set`, `delete`, `items` in key order; `share` in O(1)."""
    __slots__ = ("root", "height", "token")

    def __init__(self) -> None:
        self.root: list | None = None          # node: [token, 32 children or values]
        self.height = 1                        # levels; keys below 32 ** height fit
        self.token: Any = None

    def share(self) -> "PersistentMap":
        """Another map with the same content."""
        other = _new(PersistentMap)
        other.root, other.height, other.token = self.root, self.height, None
        self.token = None
        return other

    def owner(self) -> object:
        """The token; a map without one gets it."""
        if self.token is None:
            self.token = object()
        return self.token

    def get(self, key: int, default: Any = None) -> Any:
        node = self.root
        if node is None or key >> BITS * self.height:
            return default
        if self.height == 1:
            node = node[1 + key]
            return default if node is None else node
        for shift in range(BITS * (self.height - 1), -1, -BITS):
            node = node[1 + (key >> shift & MASK)]
            if node is None:
                return default
        return node

    def set(self, key: int, value: Any) -> None:
        """Store a value (not None)."""
        node, at = self.place(key)
        node[at] = value

    def place(self, key: int) -> tuple[list, int]:
        """(list, index) where the value of a key is stored: the way there is the map's own from now on, its content is
        as before."""
        if key < 0:
            raise ValueError(f"key {key} is negative")
        token, root = self.owner(), self.root
        if key < WIDTH and self.height == 1 and root is not None and root[0] is token:
            return root, 1 + key
        while key >> BITS * self.height:
            root = None if self.root is None else [token, self.root] + [None] * (WIDTH - 1)
            commit((attribute(self, "root", root), attribute(self, "height", self.height + 1)))
        node = self.root = self._own(self.root)
        for shift in range(BITS * (self.height - 1), 0, -BITS):
            at = 1 + (key >> shift & MASK)
            node[at] = child = self._own(node[at])
            node = child
        return node, 1 + (key & MASK)

    def delete(self, key: int) -> None:
        """Remove a key if it is there (nodes stay)."""
        if self.get(key) is not None:
            self.set(key, None)

    def _own(self, node: list | None) -> list:
        if node is None:
            return [self.token] + [None] * WIDTH
        if node[0] is self.token:
            return node
        copy = node.copy()
        copy[0] = self.token
        return copy

    def values(self) -> list[Any]:
        """All values, in key order."""
        if self.height == 1:
            return [] if self.root is None else [v for v in self.root[1:] if v is not None]
        return [v for _, v in self.items()]

    def items(self) -> Iterator[tuple[int, Any]]:
        if self.root is not None:
            yield from self._walk(self.root, self.height - 1, 0)

    def _walk(self, node: list, level: int, prefix: int) -> Iterator[tuple[int, Any]]:
        for i in range(WIDTH):
            child = node[1 + i]
            if child is None:
                continue
            key = prefix << BITS | i
            if level:
                yield from self._walk(child, level - 1, key)
            else:
                yield key, child

    def __len__(self) -> int:
        return sum(1 for _ in self.items())
