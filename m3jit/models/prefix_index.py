"""States of texts that were computed before, found by the tokens they begin with.

A radix tree over token ids.  A node may hold a *version*: the states (key/value streams, recurrent states) behind the
tokens on the way to it, and perhaps the logits there.  A text that begins with known tokens starts from the longest
version that serves it and computes the rest alone; since states are immutable values, and do not depend on how a prompt
was cut into chunks, its bytes are those of computing everything.

Streams can be cut at any token, so a version that holds nothing else serves every beginning of its tokens.  Recurrent
states cannot: such a version serves where it stands.

Memory has a bound.  What counts is what versions reach: pages, cells and logits, each once, however many versions share
it.  Above the bound the versions go that were not used for the longest time.
"""
from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import islice
from typing import Any, Hashable, Iterable, Iterator, Mapping, Protocol, Sequence

import numpy as np

from m3jit.errors import UserError
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.kv_layout import PAGE
from m3jit.isa.types import Tensor

DEFAULT_MEMORY = 512 << 20          # bytes
LEAST = 16                          # fewer known tokens are computed: as fast as copying the last page of each layer


class Version(Protocol):
    """States behind `rows` tokens (`m3jit.api.checkpoints.Checkpoint`): an immutable value."""
    @property
    def rows(self) -> int: ...
    @property
    def states(self) -> Mapping[str, Any]: ...
    @property
    def logits(self) -> Any: ...                       # what follows the tokens, F32 [1, vocabulary], or None
    @property
    def shortens(self) -> bool: ...                    # whether `cut` gives every beginning
    def cut(self, rows: int) -> "Version | None": ...


def blocks(version: Version) -> Iterator[tuple[int, int]]:
    """(identity, bytes) of each block of memory that a version reaches, some of them more than once."""
    for state in version.states.values():
        if isinstance(state, KVStream):
            size = state.page_bytes
            for layer in state.layers:
                for page in islice(state.pages(layer), -(-state.length(layer) // PAGE)):
                    yield id(page), size
        elif isinstance(state, CellState):
            for cell in state.cells.values():
                yield id(cell.memory), cell.memory.data.nbytes
    if isinstance(version.logits, Tensor):
        yield id(version.logits.data), version.logits.data.nbytes


def size_of(versions: Iterable[Version]) -> int:
    """Bytes that these versions reach by themselves; a block that several share counts once."""
    return sum({block: size for version in versions for block, size in blocks(version)}.values())


class Ledger:
    """How much memory a set of versions reaches; a block that several share counts once."""

    def __init__(self) -> None:
        self.bytes = 0
        self._uses: dict[int, int] = {}

    def add(self, version: Version) -> None:
        """Count a version; it must stay alive until it is taken off."""
        uses = self._uses
        for block, size in dict(blocks(version)).items():
            known = uses.get(block, 0)
            uses[block] = known + 1
            if not known:
                self.bytes += size

    def take_off(self, version: Version) -> None:
        """The opposite of `add`."""
        uses = self._uses
        for block, size in dict(blocks(version)).items():
            uses[block] -= 1
            if not uses[block]:
                del uses[block]
                self.bytes -= size


class _Node:
    """A place in the tree.  tokens: from the parent to here; position: tokens from the root to here."""
    __slots__ = ("tokens", "position", "parent", "children", "version")

    def __init__(self, tokens: np.ndarray, position: int, parent: "_Node | None"):
        self.tokens, self.position, self.parent = tokens, position, parent
        self.children: dict[int, _Node] = {}
        self.version: Version | None = None

    def any_below(self) -> "_Node | None":
        """A node with a version, this one or one below; every leaf has one."""
        node = self
        while node.version is None:
            if not node.children:
                return None
            node = next(iter(node.children.values()))
        return node


class PrefixIndex:
    """Finds states by tokens.  Methods may be called from any thread.

    memory: bytes that the versions may reach together; 0: nothing is kept.  least: shorter beginnings are not given
    out.  Everything is kept under a key, which names what else states depend on: weights, adapters, the type of keys and
    values (`LanguageModel.key_of`).  UserError: a bound that is no number of bytes."""

    def __init__(self, memory: int = DEFAULT_MEMORY, least: int = LEAST):
        if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
            raise UserError(f"prefix memory: a number of bytes from 0 is expected, got {memory!r}")
        self.memory, self.least = memory, max(least, 1)
        self._lock = threading.Lock()
        self._roots: dict[Hashable, _Node] = {}
        self._recent: OrderedDict[_Node, None] = OrderedDict()         # nodes with versions, the newest use last
        self._ledger = Ledger()
        self.searches = self.hits = self.asked = self.reused = self.dropped = 0

    # -- finding ----------------------------------------------------------------------------------------------------
    def find(self, key: Hashable, ids: Sequence[int]) -> Version | None:
        """The version of the longest beginning of these tokens that is known; None when there is none of `least`.

        At least one token is left to compute, unless the version of all of them has its logits."""
        wanted = np.asarray(ids, np.int64)
        with self._lock:
            self.searches += 1
            self.asked += len(wanted)
            node, rows = self._longest(key, wanted)
            if node is None or rows < self.least:
                return None
            self._recent.move_to_end(node)
            self.hits += 1
            self.reused += rows
            version = node.version
        return version.cut(rows)

    def known(self, key: Hashable, ids: Sequence[int]) -> int:
        """How many of these tokens `find` would give now; nothing is counted."""
        with self._lock:
            rows = self._longest(key, np.asarray(ids, np.int64))[1]
        return rows if rows >= self.least else 0

    def _longest(self, key: Hashable, ids: np.ndarray) -> tuple[_Node | None, int]:
        """(the node whose version serves, how many tokens of it)."""
        node, partial, at = self._walk(key, ids)
        if node is None:
            return None, 0
        below = (partial or node).any_below()
        best: tuple[_Node | None, int] = None, 0
        if below is not None and below.version.shortens:
            best = below, min(at, len(ids) - 1)
        up: _Node | None = node
        while up is not None and up.position > best[1]:
            version = up.version
            if version is not None and (up.position < len(ids) or version.logits is not None):
                return up, up.position
            up = up.parent
        return best

    def _walk(self, key: Hashable, ids: np.ndarray) -> tuple[_Node | None, _Node | None, int]:
        """(the last node whose tokens are all there, the child of it that begins like the rest, tokens that match)."""
        node, at = self._roots.get(key), 0
        while node is not None and at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                break
            same = common(child.tokens, ids[at:])
            at += same
            if same < len(child.tokens):
                return node, child, at
            node = child
        return node, None, at

    # -- keeping ----------------------------------------------------------------------------------------------------
    def add(self, key: Hashable, ids: Sequence[int], version: Version) -> None:
        """Keep a version, which stands behind the first `version.rows` of these tokens; not one that alone reaches more
        than all may (it counts as dropped)."""
        if not self.memory or version.rows < 1:
            return
        wanted = np.array(ids[:version.rows], np.int64)
        if len(wanted) != version.rows:
            raise ValueError(f"a version of {version.rows} tokens, but {len(wanted)} tokens")
        with self._lock:
            if size_of([version]) > self.memory:
                self.dropped += 1
                return
            node = self._at(key, wanted)
            if node.version is not None and (node.version.logits is not None or version.logits is None):
                self._recent.move_to_end(node)         # the same states
            else:
                if node.version is not None:
                    self._ledger.take_off(node.version)
                node.version = version
                self._ledger.add(version)
                self._recent[node] = None
                self._recent.move_to_end(node)
            while self._ledger.bytes > self.memory:
                self._drop(next(iter(self._recent)))

    def _at(self, key: Hashable, ids: np.ndarray) -> _Node:
        """The node of these tokens, made where there is none."""
        if key not in self._roots:
            self._roots[key] = _Node(ids[:0], 0, None)
        node, partial, at = self._walk(key, ids)
        if partial is not None:                        # it is parted where the tokens part
            cut = at - node.position
            middle = _Node(partial.tokens[:cut], at, node)
            node.children[int(partial.tokens[0])] = middle
            partial.tokens, partial.parent = partial.tokens[cut:], middle
            middle.children[int(partial.tokens[0])] = partial
            node = middle
        if at < len(ids):
            leaf = _Node(ids[at:], len(ids), node)
            node.children[int(ids[at])] = leaf
            node = leaf
        return node

    def _drop(self, node: _Node) -> None:
        """Let a version go, and what of the tree no longer leads to any."""
        del self._recent[node]
        self._ledger.take_off(node.version)
        node.version = None
        self.dropped += 1
        while node.version is None and not node.children and node.parent is not None:
            del node.parent.children[int(node.tokens[0])]
            node = node.parent
        if node.version is None and len(node.children) == 1 and node.parent is not None:
            child = next(iter(node.children.values()))
            child.tokens, child.parent = np.concatenate([node.tokens, child.tokens]), node.parent
            node.parent.children[int(child.tokens[0])] = child
        elif node.parent is None and not node.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not node}

    def clear(self) -> int:
        """Let all versions go; how many bytes they reached."""
        with self._lock:
            freed, self._ledger = self._ledger.bytes, Ledger()
            self._roots.clear()
            self._recent.clear()
        return freed

    @property
    def stats(self) -> dict[str, int]:
        """Counters: searches, those that found something, tokens of the searched texts, those of them that need not be
        computed, versions dropped for their memory; versions that are there, bytes they reach."""
        with self._lock:
            return {"searches": self.searches, "hits": self.hits, "tokens": self.asked, "reused_tokens": self.reused,
                    "dropped": self.dropped, "versions": len(self._recent), "bytes": self._ledger.bytes}


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements two arrays have in common at their beginnings."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
