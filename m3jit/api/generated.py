"""One generated text: the machine that makes it, and its tokens as pieces of text."""
from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, Sequence

import numpy as np

from m3jit.api.stop_strings import StopStrings
from m3jit.errors import Interrupted
from m3jit.models import hosted
from m3jit.models.grammar import GrammarError

FinishReason = Literal["stop", "length", "context", "cancelled", "edited"]
LONGEST_CHARACTER = 4               # bytes, and so tokens, of one
_REASONS: dict[int, FinishReason] = {hosted.STOP: "stop", hosted.LENGTH: "length", hosted.CONTEXT: "context",
                                     hosted.INTERRUPTED: "cancelled"}


def fault(error: BaseException) -> BaseException:
    """What ended a text: of a grammar, its own error, not the trap of the program that asked for its mask."""
    return error.__cause__ if isinstance(error.__cause__, GrammarError) else error


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt and of the generated text (a token that ends the text is not counted)."""
    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Choice:
    """A token that was possible, and its log-probability (natural logarithm, before temperature and masks)."""
    token: int
    data: bytes                     # its bytes; several tokens may share a character
    logprob: float

    @property
    def text(self) -> str:
        """The bytes as UTF-8; those that are part of no character in it as U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a generated token, and the likeliest tokens at its place, likeliest first."""
    chosen: Choice
    top: tuple[Choice, ...]


@dataclass(frozen=True)
class Piece:
    """What came at once: text ("" while a character or a possible stop string is unfinished), the tokens behind it.

    The last piece of a text has a finish reason: "stop" (the model ended it, or a stop string came), "length" (as many
    tokens as asked for), "context" (no room left) or "cancelled".  back: of a text that goes on another one, so many
    characters at the end of that one are the beginning of the stop string."""
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    back: int = 0

    def __str__(self) -> str:
        return self.text


class GeneratedText:
    """The consumer of one machine that runs a hosted program (m3jit.models.hosted).

    `take_token` and `take_logprobs` are its sinks; `ready` collects the pieces; `finish` makes the last one.  behind:
    the last tokens of the prompt that are the beginning of the text itself: a character and a stop string may begin in
    them."""

    def __init__(self, vm: Any, model: Any, prompt: Sequence[int], stops: Sequence[str], wanted: int,
                 behind: Sequence[int] = ()):
        from m3jit.models.tokenizer import StreamDecoder
        self.vm, self._model, self._wanted = vm, model, wanted
        self.prompt_tokens, self.reused_tokens = len(prompt), 0         # of the prompt: not computed, but known
        self.keeper: Any = None                         # takes states of the text (m3jit.api.prefixes)
        self.tokens: list[int] = []
        self.said_before = 0                            # tokens of the text that another machine generated
        self.random: list[int] = []                     # the random stream behind each token
        self.ready: deque[Piece] = deque()
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self._decoder = StreamDecoder(model.tokenizer)
        said = "".join(map(self._decoder.feed, behind if stops else behind[-LONGEST_CHARACTER:]))
        self._stops, self._length = StopStrings(stops, said), len(said)
        self._noted: list[Any] = []

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and of the text so far."""
        return Usage(self.prompt_tokens, len(self.tokens))

    def take_logprobs(self, item: Any) -> None:
        """The sink LOGPROBS: of the chosen token, then the best, then their tokens."""
        self._noted.append(item)

    def take_token(self, item: bytes) -> None:
        """The sink TOKENS.  A stop string interrupts the machine before it computes another token."""
        token = int.from_bytes(item, "little", signed=True)
        self.tokens.append(token)
        self.random.append(self.vm.main.rng)
        if self.keeper is not None:
            self.keeper.token(self.tokens)
        logprobs = None
        if self._noted:
            logprobs, self._noted = self._logprobs(token, *self._noted), []
        text = self._stops.feed(self._decoder.feed(token))
        self._length += len(text)
        self.ready.append(Piece(text, (token,), logprobs))
        if self._stops.found is not None:
            self.vm.interrupt()

    def go_on(self, before: "GeneratedText") -> None:
        """Say what follows another text, whose machine is gone: this one's begins behind its tokens."""
        self.said_before = before.said_before + len(before.tokens)
        self._decoder, self._stops, self._length = before._decoder, before._stops, before._length

    @property
    def ended_at(self) -> int | None:
        """Characters of the text, from its beginning, in front of the stop string that ended it; None: none did."""
        return self._length - self._stops.back if self._stops.found is not None else None

    def complete(self, full: bool) -> bool:
        """Whether nothing may follow the tokens so far: a stop string came, or, as the caller says, there are as many
        as asked for.  Appends the last piece then."""
        if self._stops.found is None and not full:
            return False
        self._conclude("stop" if self._stops.found is not None else "length", stopped=True)
        return True

    def _logprobs(self, token: int, chosen: bytes, best: np.ndarray, ids: np.ndarray) -> TokenLogprobs:
        top = zip(ids.reshape(-1)[:self._wanted].tolist(), best.reshape(-1)[:self._wanted].tolist())
        return TokenLogprobs(self._choice(token, struct.unpack("<d", chosen)[0]),
                             tuple(self._choice(t, p) for t, p in top))

    def _choice(self, token: int, logprob: float) -> Choice:
        try:
            data = self._model.decode_bytes(token)
        except LookupError:                             # a row of padding in the model's vocabulary
            data = b""
        return Choice(token, data, logprob)

    def finish(self, error: BaseException | None = None) -> None:
        """The machine has ended: with `error`, or as its register rFinish says.  Appends the last piece."""
        if self.finish_reason is not None or self.error is not None:
            return
        if error is not None and not isinstance(error, Interrupted):
            self.error = fault(error)
            return
        if self._stops.found is not None:
            reason: FinishReason = "stop"
        elif error is not None:
            reason = "cancelled"
        else:
            reason = _REASONS[self.vm.get("rFinish")]
        self._conclude(reason, stopped=error is not None)

    def _conclude(self, reason: FinishReason, stopped: bool) -> None:
        found = self._stops.found is not None
        rest = "" if found else self._stops.feed(self._decoder.flush()) + self._stops.flush()
        self.finish_reason = reason
        if self.keeper is not None:
            self.keeper.end(self.tokens, stopped)
        self.ready.append(Piece(rest, finish_reason=reason, back=self._stops.back))
