"""States of texts: taken while they are generated, and put into machines that begin with the same tokens."""
from __future__ import annotations

from typing import Any, Callable, Sequence

from m3jit.api.checkpoints import Checkpoint
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.models.program import CHUNK
from m3jit.vm.vm import VM

Keep = Callable[[Sequence[int], Checkpoint], None]


def begin_behind(vm: VM, known: Checkpoint, total: int) -> None:
    """Let a machine with a hosted program start behind tokens whose states are known; its prompt, of `total` tokens,
    stays whole.  rLogits is what follows all of it, or empty until the program has computed that: where it stops in the
    middle of the prompt, it has no logits that belong to other tokens."""
    for name, state in known.states.items():
        vm.set_state(name, state)
    vm.set("rLogits", known.logits if known.rows == total else None)
    vm.set("rStart", known.rows)


class Keeper:
    """Takes the states of one text where others may begin: behind its prompt (with the logits there) and behind its
    last token; recurrent states, which cannot be cut, also behind each chunk.

    A state is a value: nothing is copied and the machine is not held up.  keep(ids, checkpoint): gets each, with all
    tokens of the text so far.  It is called from the thread that runs the machine."""

    def __init__(self, vm: VM, ids: Sequence[int], recurrent: bool, keep: Keep):
        self._vm, self._ids, self._recurrent, self._keep = vm, ids, recurrent, keep
        if recurrent:
            vm.set("rMarks", 1)
            vm.set_sink("MARKS", lambda item: self._take(int.from_bytes(item, "little"), ()))

    def token(self, tokens: Sequence[int]) -> None:
        """A token was handed out, the last of these: the states hold all tokens before it."""
        rows = len(self._ids) + len(tokens) - 1
        if len(tokens) == 1:
            self._take(rows, tokens, logits=True)
        elif self._recurrent and rows % CHUNK == 0:
            self._take(rows, tokens)

    def end(self, tokens: Sequence[int], stopped: bool = False) -> None:
        """The machine has ended; stopped: from outside, anywhere in its program."""
        rows = self._vm.get("rPos")
        if isinstance(rows, int) and rows:
            fresh = not tokens and not stopped and rows == len(self._ids)     # it ended where it would have begun
            self._take(rows, tokens, logits=fresh, stopped=stopped)

    def _take(self, rows: int, tokens: Sequence[int], logits: bool = False, stopped: bool = False) -> None:
        states = self._vm.states(KVStream, CellState)
        if stopped:                                    # in the middle of a layer, perhaps
            if self._recurrent:
                return
            states = {name: stream.truncate(rows) for name, stream in states.items()}
        self._keep([*self._ids, *tokens], Checkpoint(rows, states, self._vm.get("rLogits") if logits else None))
