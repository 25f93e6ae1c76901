"""What clients get: whole answers and the chunks of streams, for chats and plain completions."""
from __future__ import annotations

import json
import time
import uuid
from typing import Any, Callable, Iterator, Sequence

import m3jit
from m3jit.api.generated import Choice, Piece, TokenLogprobs
from m3jit.serve.errors import ApiError
from m3jit.serve.tool_calls import CallFilter

FINGERPRINT = f"m3jit-{m3jit.__version__}"
FINISH = {"stop": "stop", "length": "length", "context": "length", "edited": "edited"}


class Reply:
    """The frame of an answer: id, time, model, usage."""
    kind, prefix, whole, chunk = "", "", "", ""

    def __init__(self, model: str, seeds: Sequence[int], prompt_tokens: int):
        self.id, self.model, self.created = f"{self.prefix}-{uuid.uuid4().hex}", model, int(time.time())
        self.seeds, self.prompt_tokens = list(seeds), prompt_tokens
        self.completion_tokens = 0
        self.cached: Callable[[], int] = lambda: 0     # prompt tokens that were not computed
        self.edited: dict[str, Any] | None = None      # of an edited response: where it goes on, in its first chunk
        self.backs: dict[int, int] = {}                # text -> characters before it that its stop string begins with
        self._told = False

    def frame(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        if self.edited is not None and not self._told:
            self._told, more = True, {"edited": self.edited, **more}
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model,
                "system_fingerprint": FINGERPRINT, "choices": choices, **more}

    def cut(self, index: int, reason: str | None) -> dict[str, int]:
        """What the end of a text says of an edited response besides: characters of what was kept and injected that
        belong to the stop string, where there are some."""
        return {"cut": self.backs[index]} if reason is not None and index in self.backs else {}

    @property
    def usage(self) -> dict[str, Any]:
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": self.cached()}}

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that `stream_options.include_usage` asks for."""
        return self.frame(self.chunk, [], usage=self.usage)

    def take(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunks of a piece of text `index`; the whole answer is collected besides."""
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        """The whole answer."""
        raise NotImplementedError


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def finish_of(piece: Piece) -> str | None:
    """The finish reason as clients know it.  ApiError 503: the server ended the text."""
    if piece.finish_reason is None:
        return None
    if piece.finish_reason == "cancelled":
        raise ApiError(503, "the server stopped before the text was complete; ask again", "server_stopping")
    return FINISH[piece.finish_reason]


class ChatReply(Reply):
    """A chat completion: messages, with calls of tools."""
    kind, prefix, whole, chunk = "chat", "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, seeds: Sequence[int], prompt_tokens: int, names: Sequence[str]):
        super().__init__(model, seeds, prompt_tokens)
        n, self.names = len(self.seeds), tuple(names)
        self.filters = [CallFilter(names) for _ in range(n)]
        self.texts, self.calls, self.logprobs = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)]
        self.reasons: list[str | None] = [None] * n
        self.begun = [False] * n

    def take(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        reason = finish_of(piece)
        if piece.back:
            self.backs[index] = piece.back
        self.completion_tokens += len(piece.tokens)
        text, calls = self.filters[index].feed(piece.text), []
        if reason is not None:
            rest, calls = self.filters[index].end()
            text += rest
        noted = [_chat_logprob(piece.logprobs)] if piece.logprobs else []
        self.texts[index] += text
        self.logprobs[index] += noted
        if not self.begun[index]:
            self.begun[index] = True
            yield self._chunk(index, {"role": "assistant", "content": ""})
        if text or noted:
            yield self._chunk(index, {"content": text}, noted)
        if calls:
            self.calls[index] = calls
            yield self._chunk(index, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
            reason = "tool_calls"
        if reason is not None:
            self.reasons[index] = reason
            yield self._chunk(index, {}, reason=reason)

    def _chunk(self, index: int, delta: dict[str, Any], noted: Sequence[Any] = (), reason: str | None = None
               ) -> dict[str, Any]:
        logprobs = {"content": list(noted), "refusal": None} if noted else None
        return self.frame(self.chunk, [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason,
                                        **self.cut(index, reason)}])

    def result(self) -> dict[str, Any]:
        choices = []
        for i, reason in enumerate(self.reasons):
            message: dict[str, Any] = {"role": "assistant", "content": self.texts[i], "refusal": None}
            if self.calls[i]:
                message |= {"content": self.texts[i] or None, "tool_calls": self.calls[i]}
            logprobs = {"content": self.logprobs[i], "refusal": None} if self.logprobs[i] else None
            choices.append({"index": i, "message": message, "logprobs": logprobs, "finish_reason": reason,
                            **self.cut(i, reason)})
        return self.frame(self.whole, choices, usage=self.usage, seeds=self.seeds,
                          **({} if self.edited is None else {"edited": self.edited}))


def _chat_logprob(found: TokenLogprobs) -> dict[str, Any]:
    def one(choice: Choice) -> dict[str, Any]:
        return {"token": choice.text, "logprob": _finite(choice.logprob), "bytes": list(choice.data)}
    return {**one(found.chosen), "top_logprobs": [one(c) for c in found.top]}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's servers write -9999 for what is impossible."""
    return max(logprob, -9999.0)


class CompletionReply(Reply):
    """A plain completion: texts."""
    kind, prefix, whole, chunk = "completion", "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, seeds: Sequence[int], prompt_tokens: int, echoes: Sequence[str]):
        super().__init__(model, seeds, prompt_tokens)
        n = len(self.seeds)
        self.echoes = list(echoes)
        self.texts = [""] * n
        self.logprobs: list[dict[str, list[Any]] | None] = [None] * n
        self.reasons: list[str | None] = [None] * n

    def take(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        reason = finish_of(piece)
        if piece.back:
            self.backs[index] = piece.back
        self.completion_tokens += len(piece.tokens)
        text, self.echoes[index] = self.echoes[index] + piece.text, ""
        noted = None
        if piece.logprobs:
            noted = _plain_logprob(piece.logprobs, len(self.texts[index]))
            kept = self.logprobs[index] = self.logprobs[index] or {name: [] for name in noted}
            for name, values in noted.items():
                kept[name] += values
        self.texts[index] += text
        self.reasons[index] = reason
        if text or noted or reason:
            yield self.frame(self.chunk, [{"index": index, "text": text, "logprobs": noted, "finish_reason": reason,
                                           **self.cut(index, reason)}])

    def result(self) -> dict[str, Any]:
        choices = [{"index": i, "text": self.texts[i], "logprobs": self.logprobs[i], "finish_reason": reason,
                    **self.cut(i, reason)} for i, reason in enumerate(self.reasons)]
        return self.frame(self.whole, choices, usage=self.usage, seeds=self.seeds,
                          **({} if self.edited is None else {"edited": self.edited}))


def _plain_logprob(found: TokenLogprobs, offset: int) -> dict[str, list[Any]]:
    return {"tokens": [found.chosen.text], "token_logprobs": [_finite(found.chosen.logprob)],
            "top_logprobs": [{c.text: _finite(c.logprob) for c in found.top}], "text_offset": [offset]}
