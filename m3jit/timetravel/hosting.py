"""What the host does to the machine of a conversation between two instructions, as a log keeps it.

The program of a conversation (m3jit.models.hosted) runs from one token to the next.  In between its host may put it to
another state, for a rollback, a correction or the next message, and takes states out that it may put back later.  Two
kinds of values of events "host":

    ("keep", mark)      states are taken out, known as `mark` from now on
    ("enter", ...)      the fields of `Entry`: the machine goes to its beginning and gets states and registers

States are not in a log: those that are put back were taken out of the same machine before.  So whoever executes the
machine from its beginning has them all.
"""
from __future__ import annotations

from typing import Any, Iterable, Mapping, NamedTuple

import numpy as np
import xxhash

from m3jit.errors import Divergence
from m3jit.models import grammar as grammars
from m3jit.vm.recording import Event

KEEP, ENTER = "keep", "enter"
Mark = tuple[int, int, int]                            # instructions by then, entries by then, tokens that are held
GRAMMAR = (grammars.NUMBER, grammars.VERSION[0])


class Entry(NamedTuple):
    """Where a text goes on.  mark: the states that are put back (None: none), their first `rows` tokens; logits: with
    those behind them.  total, tokens: of the whole text, how many and the xxh3-64 of their ids (I64).  random: the
    random stream.  guided: tokens of the text (I64) that the grammar is behind, or None."""
    mark: Mark | None
    rows: int
    logits: bool
    total: int
    tokens: int
    random: int
    registers: dict[str, int]
    guided: bytes | None

    @classmethod
    def of(cls, value: tuple) -> "Entry | None":
        """That of a host event; None: it is another one."""
        return cls(*value[1:]) if value[0] == ENTER else None


def fits(value: Any) -> bool:
    """Is it the value of a host event?"""
    if type(value) is not tuple or not value:
        return False
    if value[0] != ENTER or len(value) != 1 + len(Entry._fields):
        return value[0] == KEEP and len(value) == 2 and is_mark(value[1])
    entry = Entry(*value[1:])
    numbers = (entry.rows, entry.total, entry.tokens, entry.random)
    return all(type(n) is int for n in numbers) and type(entry.logits) is bool and type(entry.registers) is dict and \
        all(type(n) is int for n in entry.registers.values()) and (entry.mark is None or is_mark(entry.mark)) and \
        (entry.guided is None or type(entry.guided) is bytes and len(entry.guided) % 8 == 0)


def is_mark(value: Any) -> bool:
    """Is it a `Mark`?"""
    return type(value) is tuple and len(value) == 3 and all(type(n) is int for n in value)


def digest_of(tokens: Any) -> int:
    """xxh3-64 of token ids."""
    return xxhash.xxh3_64_intdigest(np.asarray(tokens, np.int64).tobytes())


def put_back(vm: Any, beginning: Any, states: Mapping[str, Any], rows: int, logits: Any) -> None:
    """Stand at the program's beginning (a snapshot) with these states of the first `rows` tokens; logits: what follows
    them, None where the program computes that."""
    vm.abort(beginning, resume=True)
    vm.main.interrupt = False
    for name, state in states.items():
        vm.set_state(name, state)
    vm.set("rLogits", logits)
    vm.set("rStart", rows)


class Host:
    """The host of a machine that is looked at: does again what the recorded one did.

    matcher: the grammar at its start, or None.  events: of the whole log, of which it learns what will be put back."""

    def __init__(self, vm: Any, matcher: Any, events: Iterable[Event]):
        self.vm, self.matcher = vm, matcher
        self._beginning = vm.fork()
        entries = (Entry.of(e.value) for e in events if e.what == "host")
        self._wanted = {entry.mark for entry in entries if entry is not None}
        self._kept: dict[Mark, tuple[dict[str, Any], Any]] = {}

    def apply(self, value: Any) -> None:
        """Do what an event "host" says."""
        entry = Entry.of(value)
        if entry is None:
            if value[1] in self._wanted:
                self._kept[value[1]] = self.vm.states(object), self.vm.get("rLogits")
            return
        states, logits = self._kept.get(entry.mark, ({}, None)) if entry.mark is not None else ({}, None)
        if entry.mark is not None and entry.mark not in self._kept:
            raise Divergence(f"replay: states {entry.mark} are put back that nobody took out; the log was changed "
                             "after it was written")
        if entry.mark is not None and entry.rows < entry.mark[2]:
            states = {name: state.truncate(entry.rows) for name, state in states.items()}
        put_back(self.vm, self._beginning, states, entry.rows, logits if entry.logits else None)
        self.vm.main.rng = entry.random
        if entry.guided is not None and self.matcher is not None:
            tokens = np.frombuffer(entry.guided, np.int64).tolist()
            self.vm.machine.set_extension_state(self.vm.main, GRAMMAR, self.matcher.after_all(tokens))
        for name, number in entry.registers.items():
            self.vm.set(name, number)
