"""Responses that can still be edited: those that run, and the newest that have ended, within two bounds.

What is kept of a response: token ids, the random stream behind each, settings, and states (key/value pages, recurrent
states) behind its prompt and its end; of recurrent models behind each chunk too.  Pages that texts share count once.
The oldest goes first; its id is remembered for a while, to say why it is gone.
"""
from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Sequence

from m3jit.models.prefix_index import Ledger, size_of
from m3jit.serve.engine import ENDED, Ticket
from m3jit.serve.errors import ApiError

COUNT, MEMORY = 64, 256 << 20       # responses and bytes that are kept
REMEMBERED = 4096                   # ids of released responses
TOKEN_BYTES = 80                    # of a token and the random stream behind it, in Python's lists


@dataclass(eq=False)
class Given:
    """What a request got.  texts: its choices; names: functions its calls may name; kind: "chat" or "completion";
    owner: who may edit it."""
    id: str
    kind: str
    owner: str = ""
    names: tuple[str, ...] = ()
    texts: Sequence[Ticket] = ()
    counted: list = field(default_factory=list)        # versions in the ledger, once it has ended
    nbytes: int = 0                                    # of its lists

    @property
    def ended(self) -> bool:
        return all(t.state == ENDED for t in self.texts)


class Kept:
    """The responses of a server.  Methods may be called from any thread.

    count: responses that have ended; memory: bytes that these may reach together."""

    def __init__(self, count: int = COUNT, memory: int = MEMORY):
        self.count, self.memory = count, memory
        self._lock = threading.Lock()
        self._all: OrderedDict[str, Given] = OrderedDict()
        self._ended: OrderedDict[str, Given] = OrderedDict()
        self._released: OrderedDict[str, tuple[str, str]] = OrderedDict()        # id -> (owner, the bound that it met)
        self._ledger, self._lists = Ledger(), 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def bytes(self) -> int:
        """Memory that the responses that have ended reach."""
        with self._lock:
            return self._ledger.bytes + self._lists

    def add(self, response: Given) -> None:
        """A response that has begun."""
        if self.count:
            with self._lock:
                self._all[response.id] = response
            self.settle(response)

    def settle(self, response: Given) -> None:
        """Count a response if it has ended, and release the oldest ones beyond the bounds; one that alone is beyond the
        bound of memory takes no other's place."""
        with self._lock:
            if not response.ended or response.id not in self._all or response.id in self._ended:
                return
            versions = [version for text in response.texts for version in text.checkpoints]
            nbytes = TOKEN_BYTES * sum(len(text.job.ids) + len(text.tokens) for text in response.texts)
            if nbytes + size_of(versions) > self.memory:
                del self._all[response.id]
                return self._remember(response, self._memory_bound())
            self._ended[response.id] = response
            response.nbytes, response.counted = nbytes, versions
            for version in versions:
                self._ledger.add(version)
            self._lists += nbytes
            while len(self._ended) > self.count:
                self._release(f"the newest {self.count} are kept (--keep-responses)")
            while self._ledger.bytes + self._lists > self.memory:
                self._release(self._memory_bound())

    def _memory_bound(self) -> str:
        return f"those that are kept reach {self.memory} bytes at most (--keep-memory)"

    def _release(self, bound: str) -> None:
        name, response = self._ended.popitem(last=False)
        del self._all[name]
        self._lists -= response.nbytes
        for version in response.counted:
            self._ledger.take_off(version)
        self._remember(response, bound)

    def _remember(self, response: Given, bound: str) -> None:
        """Say from now on why a response is gone."""
        self._released[response.id] = response.owner, bound
        while len(self._released) > REMEMBERED:
            self._released.popitem(last=False)

    def clear(self) -> int:
        """Release all that have ended; how many bytes they reached."""
        with self._lock:
            freed = self._ledger.bytes + self._lists
            while self._ended:
                self._release("a text needed its memory")
        return freed

    def find(self, name: str, kind: str, owner: str = "") -> Given:
        """The response of an id.  ApiError 410: it was released, and by which bound; 404: there is none of that kind,
        or it is, or was, another's."""
        with self._lock:
            found, (whose, bound) = self._all.get(name), self._released.get(name, ("", None))
        if found is not None and found.owner != owner:
            found = None
        if found is not None and found.kind == kind:
            return found
        if bound is not None and whose == owner:
            raise ApiError(410, f"response {name!r} was released: {bound}; ask again with its text as the prompt",
                           "response_released", "id")
        why = "this server keeps none (--keep-responses 0)" if not self.count else \
            "no such response" if found is None else f"is a {found.kind}, not a {kind}: edit it at its own path"
        raise ApiError(404, f"response {name!r}: {why}", "response_not_found", "id")
