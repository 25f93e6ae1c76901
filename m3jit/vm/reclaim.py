"""Freeing what a rollback replaced, in a thread of its own.

A root that nobody needs any more may hold much: pages of streams, tensors, addressed memory.  Dropping it takes time in
proportion, which is no time of the program's.  A rollback, and a snapshot that is released, hand over the parts that
may be large; the thread takes page tables apart leaf by leaf and lets others in between.  It looks every few
milliseconds while there is work, so handing over wakes nobody; after a second without any it sleeps until it is called.

What decides how a program goes on is never left to the thread: handles of snapshots and claims of pages
(m3jit.isa.kv_pages) are let go by the program itself, at once.

The backlog has a bound.  At the bound the program frees its own (`freed_inline` counts that), so memory that waits to
be freed is never more than that many roots hold.
"""
from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from sys import getrefcount
from typing import Any

from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.kv_pages import PageTable

DEFAULT_BACKLOG = 256                       # handed-over roots that may wait
OURS = 3                                    # references to an object here: a list of pieces or a local, an argument
INTERVAL, PATIENCE = 0.003, 1.0             # seconds between looks; without work until it sleeps

_waiting: deque[Any] = deque()              # its operations, and the queue's, are safe in finalisers
_call: queue.SimpleQueue = queue.SimpleQueue()
_asleep = False
_starting = threading.Lock()
thread: threading.Thread | None = None     # None: nothing is handed over yet


class Reclaimer:
    """One machine's side of it.  limit: the bound of the process's backlog that this machine keeps to.

    handed_over, freed_inline: roots."""

    def __init__(self, limit: int = DEFAULT_BACKLOG):
        self.limit, self.handed_over, self.freed_inline = limit, 0, 0

    def give(self, things: list[Any]) -> None:
        """Let these be freed.  The caller keeps no reference."""
        if not things:
            return
        if thread is None or len(_waiting) >= self.limit:
            self.freed_inline += 1
            return
        self.handed_over += 1
        _waiting.append(things)
        if _asleep:
            _call.put(None)

    @property
    def stats(self) -> dict[str, int]:
        """handed_over, freed_inline (roots of this machine), backlog (roots of the process that wait)."""
        return {"handed_over": self.handed_over, "freed_inline": self.freed_inline, "backlog": len(_waiting)}


def leavings(root: Any, *registers: list[Any]) -> list[Any]:
    """These registers and what else of a context or of a snapshot's root may take long to free; without what the
    program itself must let go."""
    out: list[Any] = [*registers]
    if root.memory.pages:
        out.append(root.memory)
    states = root.states
    if getrefcount(states.root) >= OURS:               # another version has all of these states too
        return out
    for value in states.values():
        if value.__class__ is KVStream:
            out += value.tables_of_its_own()
        elif value.__class__ is not CellState:         # one block of memory, to be used again at once
            out.append(value)
    return out


def drain(seconds: float = 60.0) -> bool:
    """Wait until everything handed over so far is freed; False when it took longer."""
    if thread is None:
        return True
    done = threading.Event()
    _waiting.append(done)
    if _asleep:
        _call.put(None)
    return done.wait(seconds)


def start() -> None:
    """Have a thread, now that there will be something to free."""
    global thread
    with _starting:
        if thread is None:
            new = threading.Thread(target=_work, name="m3jit-reclaimer", daemon=True)
            new.start()
            thread = new


def _after_fork() -> None:
    """A process made by os.fork has no such thread; what waited is the parent's to free."""
    global thread, _waiting, _call, _starting, _asleep
    thread, _waiting, _call, _starting, _asleep = None, deque(), queue.SimpleQueue(), threading.Lock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _work() -> None:
    while True:
        try:
            _look_and_free()
        except MemoryError:                            # what it had in hand is gone with the frame; there is more
            continue


def _look_and_free() -> None:
    """Free what comes, without an end."""
    global _asleep
    worked = time.monotonic()
    while True:
        if not _waiting:
            if time.monotonic() - worked < PATIENCE:
                time.sleep(INTERVAL)
                continue
            _asleep = True
            if not _waiting:                           # nothing came before it could be seen
                _call.get()
            _asleep = False
            worked = time.monotonic()
            continue
        things = _waiting.popleft()
        if things.__class__ is threading.Event:
            things.set()
        else:
            _free(things)
        worked = time.monotonic()


def _free(pieces: list[Any]) -> None:
    """Drop the pieces one after another, large tables by their leaves."""
    while pieces:
        piece = pieces.pop()
        if piece.__class__ is PageTable and getrefcount(piece) < OURS:      # nobody else has it
            leaves = list(piece.leaves)
            piece = None
            while leaves and getrefcount(leaves[-1]) < OURS:       # tables that share a leaf share those before it
                del leaves[-1]
                time.sleep(0)                          # others may have the interpreter
        piece = None
