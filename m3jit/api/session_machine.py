"""The machine of a session: it is put to any state, and runs from there token by token."""
from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

import numpy as np

from m3jit.api.checkpoints import Checkpoint
from m3jit.models import grammar as grammars
from m3jit.timetravel.hosting import ENTER, GRAMMAR, KEEP, Entry, Mark, digest_of, put_back
from m3jit.vm.sources import END, Source
from m3jit.vm.vm import VM


class _Prompts(Source):
    """The machine's USER_INPUT: one prompt at a time.  What was read is not read again after a rollback."""
    name = "USER_INPUT"

    def __init__(self, signal: Any):
        self._signal, self._prompt, self._closed = signal, None, False

    def push(self, prompt: np.ndarray) -> None:
        with self._signal:
            self._prompt = prompt
            self._signal.notify()

    def close(self) -> None:
        with self._signal:
            self._closed = True
            self._signal.notify()

    def read(self, position: int, count: int, blocking: bool) -> tuple[Any, int]:
        with self._signal:
            if self._prompt is None:
                if self._closed:
                    return END, position
                self._signal.block(lambda: self._prompt is not None or self._closed, "the next prompt", True)
            prompt, self._prompt = self._prompt, None
            return prompt, position


class SessionMachine:
    """A machine with the program of `Options.conversation` (m3jit.models.hosted), which does not end with a text.

    whole: False where a step failed or was interrupted; its states are not to be used, nor is the machine."""

    def __init__(self, vm: VM):
        self.vm = vm
        self._position = vm.register("rPos")
        self.seed: int = vm.main.rng                    # of the random stream, before the first draw
        self._prompts = _Prompts(vm.signal)
        vm.set_source("USER_INPUT", self._prompts)
        self._tokens: Iterator[bytes] = vm.output("TOKENS")
        self._beginning = vm.fork()
        self._entered, self.whole = 0, True
        self._times, self._marked = 0, (0, 0, 0)        # entered so often; the last states in the log

    def enter(self, point: Checkpoint, tokens: Sequence[int], random: int, registers: Mapping[str, Any],
              guided: tuple[grammars.Matcher, int] | None) -> None:
        """Stand where `tokens` end, the first of them as `point` has them; the others are computed by the first `step`.

        random: the state of the random stream.  guided: the grammar before the last token of the text, and that
        token."""
        vm, values = self.vm, dict(registers)
        self._note(point, tokens, random, registers, guided)
        self.place(point, len(tokens))
        vm.main.rng = random
        if guided is not None:
            vm.machine.set_extension_state(vm.main, GRAMMAR, guided[0])
            values["rToken"] = guided[1]
        for name, value in values.items():
            vm.set(name, value)
        self._entered = point.rows
        self._prompts.push(np.array(tokens, np.int64))

    def place(self, point: Checkpoint, total: int) -> None:
        """Stand at the program's beginning with these states, and with their logits where the prompt, of `total`
        tokens, is no longer than they are."""
        put_back(self.vm, self._beginning, point.states, point.rows, point.logits if point.rows == total else None)

    def _note(self, point: Checkpoint, tokens: Sequence[int], random: int, registers: Mapping[str, Any],
              guided: tuple[grammars.Matcher, int] | None) -> None:
        """Log where the text goes on, if the machine is recorded."""
        recorder = self.vm.recorder
        if recorder.idle:
            return
        values, text = {name: int(value) for name, value in registers.items()}, None
        if guided is not None:
            values["rToken"], text = int(guided[1]), np.array(guided[0].tokens(), np.int64).tobytes()
        recorder.host((ENTER, *Entry(point.mark, point.rows, point.rows == len(tokens), len(tokens), digest_of(tokens),
                                     random, values, text)))
        self._times += 1

    def _mark(self) -> Mark | None:
        """A name in the log for the states as they are; None where there is no log."""
        recorder = self.vm.recorder
        if recorder.idle:
            return None
        mark = self.vm.retired, self._times, self.rows
        if mark != self._marked and not recorder.replaying:
            recorder.note("host", (KEEP, mark))
        self._marked = mark
        return mark

    def step(self) -> bytes:
        """The next token as the program writes it; a negative number at the end of a text.  Raises what the run
        raises."""
        self.whole = False
        token = next(self._tokens)
        self.whole = True
        return token

    @property
    def rows(self) -> int:
        """Tokens that the states hold."""
        rows = self.vm.main.read(self._position)
        return self._entered if rows is None else rows

    @property
    def evaluated(self) -> int:
        """Tokens that were computed since `enter`."""
        return max(0, self.rows - self._entered)

    def here(self, logits: bool, marked: bool = True) -> Checkpoint:
        """The states as they are; logits: with those of the token behind them, None where they are not computed yet (in
        the middle of a prompt).  marked: they may be put back, so a log of the machine says where they were taken."""
        return Checkpoint(self.rows, self.vm.states(object), self.vm.get("rLogits") if logits else None,
                          self._mark() if marked else None)

    def close(self) -> None:
        """Let the program end."""
        self._prompts.close()
