"""Bodies of requests: read, checked, and turned into settings of a text.

A field that would change the answer and is not supported is refused by name; fields that only label a request (`user`,
`metadata`, ...) are accepted and have no effect.
"""
from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any, Iterator, Mapping, Sequence

from m3jit.api.generation import Settings
from m3jit.api.stop_strings import check_stops
from m3jit.errors import UserError, brief
from m3jit.frontend.errors import suggest
from m3jit.models import grammar as grammars
from m3jit.models import hosted
from m3jit.models.grammar import Grammar
from m3jit.serve.errors import ApiError

MOST_CHOICES = 16
LABELS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
          "stream_options"}
NEUTRAL: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "best_of": 1, "suffix": "",
                           "modalities": ["text"], "functions": [], "function_call": "none"}
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


@contextlib.contextmanager
def about(field: str, prefix: str = "") -> Iterator[None]:
    """What is wrong inside is wrong with this field.  prefix: what the message begins with, unless it does."""
    try:
        yield
    except UserError as error:
        if error.exit_code not in (1, 2):
            raise
        said = str(error)
        raise ApiError(400, said if said.startswith(prefix) else prefix + said, "invalid_value", field) from None


def parse(body: bytes) -> "Fields":
    """The object in a request's body.  ApiError 400: no JSON, or no object."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", "invalid_json") from None
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise ApiError(400, "the body has a text with half a surrogate pair, which is not Unicode", "invalid_json") \
            from None
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is a JSON {_kind(found)}; an object is expected", "invalid_json")
    return Fields(found)


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def wrong(name: str, expected: str, value: Any) -> ApiError:
    return ApiError(400, f"{name}: {expected} is expected, got {brief(json.dumps(value))}", "invalid_value", name)


class Fields:
    """The fields of a request; each is taken once, and `finish` refuses what nobody took.

    inside: the field that has these, with a dot behind it; errors name them so."""

    def __init__(self, values: Mapping[str, Any], inside: str = ""):
        self.values, self.inside = dict(values), inside

    def take(self, name: str, default: Any = None) -> Any:
        """Any value; null counts as absent."""
        value = self.values.pop(name, None)
        return default if value is None else value

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise wrong(self.inside + name, "a string", value)
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise wrong(self.inside + name, "true or false", value)
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or \
                not low <= value <= high:
            raise wrong(self.inside + name, f"a number from {low:g} to {high:g}", value)
        return float(value)

    def whole(self, name: str, low: int, high: int, default: int | None) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(self.inside + name, f"a whole number from {low} to {high}", value)
        return value

    def finish(self, known: Sequence[str] = ()) -> None:
        """ApiError 400 for fields that are unknown, or known and not supported; the latter, and labels, are fields of
        the request itself, not of what is inside one.  known: names that may have been meant."""
        for name, value in self.values.items():
            if value is None or name in LABELS and not self.inside:
                continue
            if name in NEUTRAL and not self.inside:
                if value == NEUTRAL[name]:
                    continue
                raise ApiError(400, f"{name}: is not supported; leave it out", "unsupported_parameter", name)
            hint = suggest(name, known)
            raise ApiError(400, f"{self.inside}{brief(name)}: no such field{'; ' * bool(hint)}{hint}",
                           "unknown_parameter", self.inside + name)


@dataclass(frozen=True)
class TextRequest:
    """What both endpoints that generate text ask for."""
    model: str
    settings: Settings
    choices: int                        # texts for each prompt
    stream: bool
    usage: bool                         # a stream ends with a chunk of its own for the usage
    guide: str = "response_format"      # the field that the grammar is from


def text_request(fields: Fields, logprobs: int | None, grammar: Grammar | None, max_tokens: int | None) -> TextRequest:
    """The fields that chat and plain completions share."""
    model = fields.text("model")
    stream = fields.flag("stream")
    options = fields.values.get("stream_options") or {}
    if not isinstance(options, dict):
        raise wrong("stream_options", "an object", options)
    try:
        stop = check_stops(fields.take("stop"))
    except UserError as error:
        raise ApiError(400, str(error), "invalid_value", "stop") from None
    settings = Settings(
        max_tokens=max_tokens, temperature=fields.number("temperature", 0, 100, 1.0),
        top_p=fields.number("top_p", 0, 1, 1.0), top_k=fields.whole("top_k", 0, 2 ** 31 - 1, 0) or 0,
        min_p=fields.number("min_p", 0, 1, 0.0), repeat_penalty=fields.number("repeat_penalty", 1e-6, 1e6, 1.0),
        seed=fields.whole("seed", -2 ** 63, 2 ** 64 - 1, None), stop=stop, logprobs=logprobs, grammar=grammar)
    choices = fields.whole("n", 1, MOST_CHOICES, 1) or 1
    return TextRequest(model, settings, choices, stream, bool(options.get("include_usage")))


@dataclass(frozen=True)
class ChatRequest:
    """A checked chat completion.  tools: given to the template; names: the functions a call may name."""
    text: TextRequest
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    names: tuple[str, ...]


def chat_request(fields: Fields) -> ChatRequest:
    """ApiError 400 says what is wrong with a body of /v1/chat/completions."""
    messages = _messages(fields.take("messages"))
    tools, names = _tools(fields.take("tools", []))
    tools, names, call = _tool_choice(fields.take("tool_choice", "auto"), tools, names)
    grammar = _response_format(fields.take("response_format", {"type": "text"}))
    if call is not None and grammar is not None:
        raise ApiError(400, "response_format: cannot be joined with a tool_choice that asks for a call",
                       "invalid_value", "response_format")
    top = fields.whole("top_logprobs", 0, hosted.BEST, None)
    wanted = fields.flag("logprobs")
    if top is not None and not wanted:
        raise ApiError(400, "top_logprobs: needs logprobs to be true", "invalid_value", "top_logprobs")
    old = fields.whole("max_tokens", 1, 2 ** 31 - 1, None)
    limit = fields.whole("max_completion_tokens", 1, 2 ** 31 - 1, old)
    text = text_request(fields, (top or 0) if wanted else None, grammar or call, limit)
    if call is not None:
        text = replace(text, guide="tool_choice")
    fields.finish()
    return ChatRequest(text, messages, tools, names)


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a list of at least one message", value)
    for i, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise ApiError(400, f"messages[{i}]: an object with a role of {', '.join(sorted(ROLES))} is expected, got "
                                f"{brief(json.dumps(role))}", "invalid_value", f"messages[{i}]")
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in value]


def _tools(value: Any) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    if not isinstance(value, list):
        raise wrong("tools", "a list", value)
    names = []
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or \
                tool.get("type") != "function":
            raise wrong(f"tools[{i}]", '{"type": "function", "function": {"name": ...}}', tool)
        names.append(function["name"])
    return value, tuple(names)


def _tool_choice(choice: Any, tools: list[dict[str, Any]], names: tuple[str, ...]
                 ) -> tuple[list[dict[str, Any]], tuple[str, ...], Grammar | None]:
    """(tools for the template, names of calls, the grammar of a call that must come)."""
    if choice == "none":
        return [], (), None
    if choice == "auto":
        return tools, names, None
    if choice == "required":
        wanted = names
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        if not isinstance(function, dict) or function.get("name") not in names:
            raise wrong("tool_choice", '"auto", "none", "required" or one of the tools', choice)
        wanted = (function["name"],)
    if not wanted:
        raise ApiError(400, "tool_choice: asks for a call, but there are no tools", "invalid_value", "tool_choice")
    needs_grammars("tool_choice")
    calls = [{"type": "object", "properties": {"name": {"const": t["function"]["name"]},
                                               "arguments": t["function"].get("parameters") or {"type": "object"}},
              "required": ["name", "arguments"], "additionalProperties": False}
             for t in tools if t["function"]["name"] in wanted]
    return tools, wanted, Grammar.of_schema(calls[0] if len(calls) == 1 else {"anyOf": calls})


def _response_format(value: Any) -> Grammar | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema", "regex", "grammar"):
        raise wrong("response_format", 'an object with type "text", "json_object", "json_schema", "regex" or "grammar"',
                    value)
    needs_grammars("response_format")
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "regex" or kind == "grammar":
        text = value.get("regex" if kind == "regex" else "grammar")
        if not isinstance(text, str):
            raise wrong("response_format", f'the {kind} as a string under "{kind}"', value)
        return Grammar("regex" if kind == "regex" else value.get("syntax", "lark"), text)
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, (dict, bool)):
        raise wrong("response_format", 'the schema under json_schema.schema', value)
    return Grammar.of_schema(schema)


def needs_grammars(param: str) -> None:
    """ApiError 400 when the library for constrained generation is missing."""
    if not grammars.installed():
        raise ApiError(400, f"{param}: this server cannot constrain what a model writes; install llguidance beside it "
                            "(pip install 'm3jit[grammar]')", "unsupported_parameter", param)


@dataclass(frozen=True)
class CompletionRequest:
    """A checked plain completion: its prompts, texts or token ids."""
    text: TextRequest
    prompts: list[str | list[int]]
    echo: bool


def completion_request(fields: Fields) -> CompletionRequest:
    """ApiError 400 says what is wrong with a body of /v1/completions."""
    prompts = prompts_of("prompt", fields.take("prompt"))
    logprobs = fields.whole("logprobs", 0, hosted.BEST, None)
    echo = fields.flag("echo")
    grammar = _response_format(fields.take("response_format", {"type": "text"}))
    text = text_request(fields, logprobs, grammar, fields.whole("max_tokens", 1, 2 ** 31 - 1, 16))
    fields.finish()
    if len(prompts) * text.choices > MOST_CHOICES:
        raise ApiError(400, f"prompt: {len(prompts)} prompts, {text.choices} texts each; at most {MOST_CHOICES} texts "
                            "in one request", "invalid_value", "prompt")
    return CompletionRequest(text, prompts, echo)


def prompts_of(name: str, value: Any) -> list[str | list[int]]:
    """A text, token ids, or a list of either, as a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(v, str) for v in value) or all(_is_ids(v) for v in value):
            return value
        if _is_ids(value):
            return [value]
    raise wrong(name, "a text, token ids, or a list of them", value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)


def same_model(asked: str, served: Sequence[str]) -> None:
    """ApiError 404: another model was asked for than the one this server runs."""
    if asked not in served:
        raise ApiError(404, f"model {asked!r}: this server runs {served[0]!r}", "model_not_found", "model")
