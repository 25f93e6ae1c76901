"""States of texts that were computed before, found by the tokens they begin with.

A radix tree over token ids.  A node may hold a *version*: the states (key/value streams, recurrent states) behind the
tokens on the way to it, and perhaps the logits there.  A text that begins with known tokens starts from the longest
version that serves it and computes the rest alone; since states are immutable values, and do not depend on how a prompt
was cut into chunks, its bytes are those of computing everything.

Streams can be cut at any token, so a version that holds nothing else serves every beginning of its tokens.  Recurrent
states cannot: such a version serves where it stands.

Memory has a bound.  What counts is what versions reach: pages, cells and logits, each once, however many versions share
it.  Above the bound the versions go that were not used for the longest time.

A version is added or dropped by one step (m3jit.vm.commit): an interrupt (Ctrl-C) finds the index before it or behind
it.
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
from m3jit.vm.commit import Store, attribute, commit, item

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
    out.  Everything is kept under a key, which names what else states depend on: weights, adapters, the type of keys
    and values (`LanguageModel.key_of`).  UserError: a bound that is no number of bytes."""

    def __init__(self, memory: int = DEFAULT_MEMORY, least: int = LEAST):
        if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
            raise UserError(f"prefix memory: a number of bytes from 0 is expected, got {memory!r}")
        self.memory, self.least = memory, max(least, 1)
        self._lock = threading.Lock()
        self._roots: dict[Hashable, _Node] = {}
        self._recent: OrderedDict[_Node, None] = OrderedDict()         # nodes with versions, the newest use last
        self._ledger: Ledger | None = Ledger()         # None while it changes (`_open`)
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
            node, _ = self._at(key, wanted)
            if node.version is not None and (node.version.logits is not None or version.logits is None):
                self._recent.move_to_end(node)         # the same states
                return
            ledger = self._open()
            ledger.add(version)
            while ledger.bytes > self.memory and self._recent:
                self._drop(next(iter(self._recent)), ledger)
            node, stores = self._at(key, wanted)       # where the others have left it
            if node.version is not None:
                ledger.take_off(node.version)
            commit([item(self._recent, node, None), attribute(node, "version", version), *stores,
                    (OrderedDict.move_to_end, self._recent, node, True)])
            self._ledger = ledger

    def _open(self) -> Ledger:
        """The ledger, to be changed and put back; counted anew where an interrupt kept somebody from putting it
        back."""
        ledger, self._ledger = self._ledger, None
        if ledger is None:
            ledger = Ledger()
            for node in self._recent:
                ledger.add(node.version)
        return ledger

    def _at(self, key: Hashable, ids: np.ndarray) -> tuple[_Node, list[Store]]:
        """(the node of these tokens, the stores that put it into the tree where it is not there yet)."""
        stores: list[Store] = []
        node, partial, at = self._walk(key, ids)
        if partial is None and node is not None and at == len(ids):
            return node, stores
        if node is None:
            node = _Node(ids[:0], 0, None)
            stores.append(attribute(self, "_roots", {**self._roots, key: node}))
        top = leaf = _Node(ids[at:], len(ids), node)
        if partial is not None:                        # it is parted where the tokens part
            cut = at - node.position
            top = _Node(partial.tokens[:cut], at, node)
            top.children = {int(partial.tokens[cut]): partial}
            stores += [attribute(partial, "tokens", partial.tokens[cut:]), attribute(partial, "parent", top)]
            if at < len(ids):
                leaf.parent, top.children[int(ids[at])] = top, leaf
            else:
                leaf = top
        stores.append(attribute(node, "children", {**node.children, int(top.tokens[0]): top}))
        return leaf, stores

    def _drop(self, node: _Node, ledger: Ledger) -> None:
        """Let a version go, and what of the tree no longer leads to any."""
        ledger.take_off(node.version)
        stores: list[Store] = [(OrderedDict.pop, self._recent, node, None), attribute(node, "version", None),
                               attribute(self, "dropped", self.dropped + 1)]
        top, left = node, list(node.children.values())             # the last node that stays, and what it leads to
        while not left and top.parent is not None and (top is node or top.version is None):
            gone, top = top, top.parent
            left = [child for child in top.children.values() if child is not gone]
        children = {int(child.tokens[0]): child for child in left}
        stores.append(attribute(top, "children", children))
        if top is node or top.version is None:
            if top.parent is None and not left:
                stores.append(attribute(self, "_roots",
                                        {k: root for k, root in self._roots.items() if root is not top}))
            elif top.parent is not None and len(left) == 1:
                child, tokens = left[0], np.concatenate([top.tokens, left[0].tokens])
                stores += [attribute(child, "tokens", tokens), attribute(child, "parent", top.parent),
                           item(top.parent.children, int(tokens[0]), child)]
        commit(stores)

    def clear(self) -> int:
        """Let all versions go; how many bytes they reached."""
        with self._lock:
            freed = self._open().bytes
            commit([attribute(self, "_roots", {}), attribute(self, "_recent", OrderedDict()),
                    attribute(self, "_ledger", Ledger())])
        return freed

    @property
    def stats(self) -> dict[str, int]:
        """Counters: searches, those that found something, tokens of the searched texts, those of them that need not be
        computed, versions dropped for their memory; versions that are there, bytes they reach."""
        with self._lock:
            self._ledger = ledger = self._open()
            return {"searches": self.searches, "hits": self.hits, "tokens": self.asked, "reused_tokens": self.reused,
                    "dropped": self.dropped, "versions": len(self._recent), "bytes": ledger.bytes}


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements two arrays have in common at their beginnings."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
