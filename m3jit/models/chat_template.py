"""Conversations as a model was trained to read them: the chat template of a model file, filled in.

A template is a jinja2 text.  It runs in jinja2's immutable sandbox, within limits (template_limits.py), with what
templates of model files use: the variables `messages`, `tools`, `documents`, `add_generation_prompt`, `bos_token`,
`eos_token`, `unk_token`, `pad_token` and the caller's own (such as `enable_thinking`), `raise_exception(text)`,
`strftime_now(format)`, `tojson`, `break` and `continue`, and `{% generation %}` blocks.

Control tokens of the template become tokens; those written in messages or tools stay characters.
"""
from __future__ import annotations

import json
import traceback
from datetime import datetime
from functools import cached_property
from typing import Any, Mapping, Protocol, Sequence

from m3jit.errors import UserError, brief
from m3jit.models.control_guard import ControlGuard, ControlTexts
from m3jit.models.model_error import ModelFileError

Message = Mapping[str, Any]
_FILE = "<template>"                # what jinja2 calls a template without a file in tracebacks
# What a broken template, or one that is given what it did not expect, raises.
_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, AttributeError, MemoryError)


class _Refusal(Exception):
    """What `raise_exception` of a template raises."""


class ChatTokenizer(Protocol):
    """What a template needs of a tokeniser (`Tokenizer`, `FolderTokenizer`)."""
    path: Any
    chat_template: str | None
    adds_bos: bool
    bos: int | None
    eos: int | None

    def encode(self, text: str, special: bool = False, add_bos: bool | None = None,
               add_eos: bool | None = None) -> list[int]: ...
    def split_control(self, text: str) -> list[str | int]: ...
    def control_texts(self) -> Sequence[str]: ...


class TemplateFile(str):
    """The text of a template that stands in a file of its own, which errors name."""
    path: str

    @classmethod
    def read(cls, path: str) -> TemplateFile:
        """The template in a file.  OSError; UserError: it is empty, or no UTF-8."""
        with open(path, "rb") as file:
            raw = file.read()
        if not raw.strip():
            raise UserError(f"{path}: is empty; --chat-template takes a jinja2 text")
        try:
            found = cls(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: byte {error.start} is not UTF-8; --chat-template takes a jinja2 text") from None
        found.path = path
        return found


class ChatTemplate:
    """The chat template of a model, or `source` in its place.  UserError when there is none, ModelFileError naming the
    file and the line when it cannot be read (an unknown tag or filter, a syntax error)."""

    def __init__(self, tokenizer: ChatTokenizer, source: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.path = getattr(source, "path", tokenizer.path)        # where the template stands
        given = source if source is not None else tokenizer.chat_template
        self.source = given and str(given)             # no more than a text: logs of conversations hold it
        if not self.source:
            raise UserError(f"{tokenizer.path}: has no chat template (metadata key 'tokenizer.chat_template'), so it "
                            "was not made for conversations; give it a prompt as text (`m3jit run` without --chat), or "
                            "a template (--chat-template FILE of `m3jit chat` and `m3jit serve`)")
        from jinja2 import TemplateSyntaxError
        try:
            self._environment = _environment()
            self._template = self._environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise ModelFileError(self.path, brief(error.message or str(error)).removesuffix("."),
                                 item=f"chat template, line {error.lineno}",
                                 expected="jinja2 with loop controls and generation blocks") from None
        except (SyntaxError, *_FAILURES) as error:     # nested deeper than Python compiles, a NUL
            raise ModelFileError(self.path, f"cannot be compiled: {brief(str(error) or type(error).__name__)}",
                                 item="chat template") from None

    # Filling in.

    def text(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None,
             add_generation_prompt: bool = True, now: datetime | None = None, **variables: Any) -> str:
        """The conversation as text, ending with the start of an answer when `add_generation_prompt`.

        messages: {"role": "system" | "user" | "assistant" | "tool", "content": text or a list of text parts, and what
        templates know of besides: "tool_calls", "name", ...}.  now: the time `strftime_now` tells (None: the clock's).
        UserError: a message without a role, content that is no text, or what the template itself refuses;
        ModelFileError: the template fails, with its line."""
        return self._render(checked(messages), tools, add_generation_prompt, now, variables)

    def tokens(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, now: datetime | None = None, **variables: Any) -> list[int]:
        """`text` as token ids.  The start token comes first where the file asks for one, and once."""
        messages = checked(messages)
        guard = ControlGuard(self._controls, [self.source, messages, tools, variables])
        text = self._render(guard.mark(messages), guard.mark(tools), add_generation_prompt, now, guard.mark(variables))
        tokenizer = self.tokenizer
        if not guard.used:
            ids = tokenizer.encode(text, special=True, add_bos=False, add_eos=False)
        else:
            ids = []
            for piece in tokenizer.split_control(text):
                ids += [piece] if isinstance(piece, int) else \
                    tokenizer.encode(guard.clear(piece), special=False, add_bos=False, add_eos=False)
        if tokenizer.adds_bos and tokenizer.bos is not None and ids[:1] != [tokenizer.bos]:
            ids = [tokenizer.bos, *ids]
        return ids

    def continuation(self, messages: Sequence[Message], spoken: str, *, now: datetime | None = None,
                     **variables: Any) -> list[int] | None:
        """Token ids that follow a generated answer, for a model whose state holds everything before them.

        messages: end with the answer's message and the next one.  spoken: the answer as it was generated, which may
        have white space around it that its message lacks.  None when the template writes what came before otherwise
        than it did when the answer was generated (some leave thoughts out), or messages hold control tokens: use
        `tokens`."""
        messages = checked(messages)
        guard = ControlGuard(self._controls, [self.source, messages, variables])
        guard.mark([messages, variables])
        if guard.used:
            return None
        before = self._render(messages[:-2], None, True, now, variables)
        after = self._render(messages, None, True, now, variables)
        for answer in (spoken, spoken.lstrip(), spoken.rstrip(), spoken.strip()):
            if after.startswith(before + answer):
                return self.tokenizer.encode(after[len(before + answer):], special=True, add_bos=False, add_eos=False)
        return None

    def _render(self, messages: Any, tools: Any, add_generation_prompt: bool, now: datetime | None,
                variables: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError
        moment = now or datetime.now()
        given = {**self._special, "documents": None, **variables, "messages": messages, "tools": tools or None,
                 "add_generation_prompt": add_generation_prompt, "strftime_now": moment.strftime}
        try:
            return self._rendered(given)
        except _Refusal as refusal:
            raise UserError(f"{self.path}: the chat template (line {_line_of(refusal)}) refuses the "
                            f"conversation: {brief(str(refusal))}") from None
        except (TemplateError, *_FAILURES) as error:
            raise ModelFileError(self.path, f"fails: {brief(str(error) or type(error).__name__)}",
                                 item=f"chat template, line {_line_of(error)}") from None

    def _rendered(self, given: dict[str, Any]) -> str:
        """The filled template.  Most write the arguments of tool calls as JSON, some join them to their text as they
        are: those get JSON text."""
        try:
            return self._environment.fill_in(self._template, given)
        except TypeError:
            if not any(message.get("tool_calls") for message in given["messages"]):
                raise
            return self._environment.fill_in(self._template,
                                             given | {"messages": _with_json_arguments(given["messages"])})

    @cached_property
    def _controls(self) -> ControlTexts:
        return ControlTexts(self.tokenizer.control_texts())

    @cached_property
    def _special(self) -> dict[str, str]:
        """The texts of special tokens, as templates name them; "" for those the model lacks."""
        vocabulary: Any = getattr(self.tokenizer, "vocabulary", None)
        found = {}
        for name, attribute in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token = getattr(self.tokenizer, attribute, None)
            token = getattr(vocabulary, attribute, None) if token is None else token
            found[f"{name}_token"] = "" if token is None else str(vocabulary.texts[token])
        return found


def _environment() -> Any:
    """What a template may use."""
    from jinja2.ext import loopcontrols
    from m3jit.models.template_limits import Sandbox, bounded
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_blocks()])
    environment.filters["tojson"] = bounded("tojson", _to_json)
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(message: Any) -> None:
    raise _Refusal(str(message))


def checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text parts joined by line feeds, arguments of tool calls as objects.

    UserError names the message that is malformed."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UserError(f"messages: a list of messages is expected, got {type(messages).__name__}")
    return [_checked(message, f"message {number}") for number, message in enumerate(messages, 1)]


def _checked(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f'{where}: {{"role": "user", "content": "..."}} is expected, got {brief(repr(message))}')
    made = dict(message)
    content = made.get("content")
    if content is not None and not isinstance(content, str):
        parts = content if isinstance(content, (list, tuple)) else [content]
        wrong = next((part for part in parts if not (isinstance(part, Mapping) and part.get("type") == "text"
                                                     and isinstance(part.get("text"), str))), None)
        if wrong is not None:
            raise UserError(f"{where}: its content is {brief(repr(wrong))}; only text is taken")
        made["content"] = "\n".join(part["text"] for part in parts)
    elif content is None:
        made["content"] = ""
    if made.get("tool_calls"):
        made["tool_calls"] = [_tool_call(call, where) for call in made["tool_calls"]]
    return made


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """OpenAI's clients write the arguments as JSON text; templates write objects out themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f'{where}: a tool call is {{"function": {{"name": "...", "arguments": {{}}}}}}, got '
                        f"{brief(repr(call))}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise UserError(f"{where}: the arguments of {function['name']!r} are no JSON: {brief(arguments)}") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _with_json_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def written(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, str) else
                                     _to_json(arguments)}}
    return [{**message, "tool_calls": [written(call) for call in message["tool_calls"]]} if message.get("tool_calls")
            else message for message in messages]


def _line_of(error: BaseException) -> int:
    """The template's line that was running; the innermost, as a macro's line says more than its call's."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    return next((line for line in reversed(lines) if line), 0)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_blocks() -> type:
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        """`{% generation %} ... {% endgeneration %}` marks what a model is trained on; here it is only its content."""
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return GenerationBlocks
