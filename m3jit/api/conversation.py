"""A conversation with a model, whose state stays in one machine.

    talk = m3jit.Conversation("smollm2", system="Be brief.")
    for text in talk.say("Name three rivers."):
        print(text, end="", flush=True)

Each message is put into the model's chat template, but only what is new is computed: keys, values and recurrent states
of what was said are there already.  A snapshot is taken before every message, so that `undo` costs nothing, and a
template that rewrites the past (some leave out earlier thoughts) is met by going back to the last snapshot that still
fits.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Iterator

import numpy as np

from m3jit.api.generated import FinishReason, GeneratedText
from m3jit.api.generation import LanguageModel, Settings
from m3jit.api.stop_strings import check_stops
from m3jit.errors import UserError
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm.sources import END, Source
from m3jit.vm.vm import VM


KEPT = 64                           # snapshots before messages that a conversation holds


class ContextFull(UserError):
    """The conversation has more tokens than the model's context."""


@dataclass(frozen=True)
class _State:
    """What the machine holds: tokens so far, how many of them went through the model (the last drawn one has not), how
    many messages they are (-1: the system message has changed since), and the last answer as it was generated."""
    tokens: tuple[int, ...] = ()
    done: int = 0
    messages: int = 0
    spoken: str | None = None


@dataclass(frozen=True)
class _Point:
    """A state to go back to, and how many messages there were."""
    state: _State
    snapshot: Any
    messages: int


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
                self._signal.block(lambda: self._prompt is not None or self._closed, "the next message", True)
            prompt, self._prompt = self._prompt, None
            return prompt, position


class Conversation:
    """Messages with a model: made from a model's name or file, or a `LanguageModel`.

    settings: the fields of `Settings` (max_tokens None by default: answers may fill the context; a grammar holds for
    each answer).  options: what the program is compiled with besides.  chat_template: jinja2 text in place of the
    model's.  backend, threads: as `m3jit.VM`.  Each of these, where it is not given, is what a `LanguageModel` was loaded
    with.  now: the time that templates see, the same throughout.  Raises UserError or ModelFileError: no such model, no
    chat template, a bad setting, logprobs (`LanguageModel.generate` gives them)."""

    def __init__(self, model: LanguageModel | str = "default", system: str | None = None, *,
                 options: Options | None = None, chat_template: str | None = None, now: datetime | None = None,
                 backend: str | None = None, threads: int | None = None, **settings: Any):
        self.model = model if isinstance(model, LanguageModel) else LanguageModel(model, Models())
        self.settings, self.context, self._matcher = self.model.check(0, Settings(**{"max_tokens": None, **settings}))
        if self.settings.logprobs is not None:
            raise UserError("logprobs: a conversation gives text alone; m3jit.load_model(..).generate gives them")
        self.template = self.model.template(chat_template)
        self.messages: list[dict[str, str]] = []
        self.finish_reason: FinishReason | None = None         # of the last answer
        self._system, self._now = system, now or datetime.now()
        self._backend, self._threads = backend, threads
        self._program = self.model.program(options, conversation=True, repeat_penalty=self.settings.repeat_penalty)
        self._start()

    def _start(self) -> None:
        """A fresh machine."""
        self._vm = self.model.machine(self._program, self.settings, self.context, self._matcher, backend=self._backend,
                                      threads=self._threads)
        self._prompts = _Prompts(self._vm.signal)
        self._vm.set_source("USER_INPUT", self._prompts)
        self._state = _State()
        self._points = [_Point(self._state, self._vm.fork(), 0)]

    # What is said.

    @property
    def system(self) -> str | None:
        """The system message; setting it changes how the whole conversation is read at the next message."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system = text or None
        self._state = replace(self._state, messages=-1)
        self._points = [replace(p, state=replace(p.state, messages=-1)) for p in self._points]

    @property
    def machine(self) -> VM:
        """The machine that holds the conversation."""
        return self._vm

    @property
    def used(self) -> int:
        """Positions of the context that are taken."""
        return len(self._state.tokens)

    def transcript(self) -> list[dict[str, str]]:
        """All messages, the system message first."""
        return ([{"role": "system", "content": self._system}] if self._system else []) + [dict(m) for m in self.messages]

    def say(self, text: str) -> Iterator[str]:
        """The answer to a message, as it comes.  Leaving the loop early, or `stop`, ends it and keeps what was said; an
        answer that was stopped before its first token takes the message back.

        ContextFull: the conversation no longer fits; the message is not taken.  UserError: the template refuses it."""
        messages = [*self.transcript(), {"role": "user", "content": text}]
        point, prompt = self._plan(messages)
        kept = self._state if point is None else point.state
        whole = kept.tokens[:kept.done] + tuple(prompt)
        if len(whole) >= self.context:
            raise ContextFull(f"the conversation would have {len(whole)} tokens, the context holds {self.context}; take "
                              "messages back, start afresh, or allow more context")
        if not prompt:
            raise UserError(f"{self.model.model.path}: the chat template makes nothing of the message")
        return self._answer(text, point, prompt, whole)

    def _answer(self, text: str, point: _Point | None, prompt: list[int], whole: tuple[int, ...]) -> Iterator[str]:
        if point is not None:
            self._go_back(point)
            del self._points[self._points.index(point) + 1:]
        before = _Point(self._state, self._vm.fork(), len(self.messages))
        answer = GeneratedText(self._vm, self.model.model, whole, check_stops(self.settings.stop), -1)
        self._vm.main.interrupt = False
        self._prompts.push(np.array(prompt, np.int64))
        spoken: list[str] = []
        pieces = self._pieces(answer, spoken)
        try:
            for piece in pieces:
                if piece:
                    yield piece
        except GeneratorExit:                          # whoever listened left
            self.stop()
            for _ in pieces:
                pass
            self._keep(text, "".join(spoken), before, whole, answer)
            raise
        except BaseException:
            self._start()                              # the machine is of no use any more; the messages are
            raise
        self._keep(text, "".join(spoken), before, whole, answer)

    def _pieces(self, answer: GeneratedText, spoken: list[str]) -> Iterator[str]:
        """Run the machine until the turn is over: the texts, each also appended to `spoken`."""
        for item in self._vm.output("TOKENS"):
            if int.from_bytes(item, "little", signed=True) < 0:
                break
            answer.take_token(item)
            yield from self._taken(answer, spoken)
        answer.finish()
        yield from self._taken(answer, spoken)

    @staticmethod
    def _taken(answer: GeneratedText, spoken: list[str]) -> Iterator[str]:
        while answer.ready:
            spoken.append(answer.ready.popleft().text)
            yield spoken[-1]

    def _keep(self, text: str, spoken: str, before: _Point, whole: tuple[int, ...],
              answer: GeneratedText) -> None:
        """Note what was said; a message that was stopped before its answer began is taken back."""
        self.finish_reason = answer.finish_reason
        if answer.finish_reason == "cancelled" and not answer.tokens:
            self._go_back(before)
            return
        self._points.append(before)
        del self._points[1:-KEPT]                      # further back, `undo` computes again
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": spoken.strip()}]
        tokens = whole + tuple(answer.tokens)
        # Behind a stop string the state holds what the message does not.
        faithful = not self.settings.stop or answer.finish_reason != "stop"
        self._state = _State(tokens, self._vm.get("rPos"), len(self.messages), spoken if faithful else None)

    def stop(self) -> None:
        """End the answer before its next token, from any thread or a signal handler."""
        self._vm.interrupt()

    def undo(self) -> bool:
        """Take the last message and its answer back; False when there is none."""
        if not self.messages:
            return False
        del self.messages[-2:]
        while len(self._points) > 1 and self._points[-1].messages > len(self.messages):
            self._points.pop()
        if self._points[-1].messages == len(self.messages):
            self._go_back(self._points[-1])
            if len(self._points) > 1:
                self._points.pop()
        return True

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages.clear()
        del self._points[1:]
        self._go_back(self._points[0])

    def close(self) -> None:
        """End the machine."""
        self._prompts.close()

    # What is computed.

    def _go_back(self, point: _Point) -> None:
        self._vm.abort(point.snapshot, resume=True)
        self._state = point.state

    def _plan(self, messages: list[dict[str, str]]) -> tuple[_Point | None, list[int]]:
        """(the point to go back to, or None to go on from here; the tokens to compute)."""
        state = self._state
        if state.spoken is not None and state.messages == len(self.messages):
            following = self.template.continuation(messages, state.spoken, now=self._now)
            if following is not None:
                return None, [*state.tokens[state.done:], *following]
        tokens = self.template.tokens(messages, now=self._now)
        for point in (None, *reversed(self._points)):
            known = state if point is None else point.state
            if known.done < len(tokens) and tuple(tokens[:known.done]) == known.tokens[:known.done]:
                return point, tokens[known.done:]
        return None, []
