"""Text from a language model.

    model = m3jit.load_model("default")                 a .gguf file, the name of an obtained model, or the embedded one
    for piece in model.generate("Emma was", max_tokens=40, temperature=0):
        print(piece.text, end="", flush=True)

The compiled program of the model runs in a machine of its own for each text; a text with a seed is the same on every
machine, alone or beside others.
"""
from __future__ import annotations

import functools
import math
import os
import threading
import warnings
from dataclasses import dataclass, fields, replace
from typing import Any, Hashable, Iterator, Mapping, Sequence, Union

import numpy as np

from m3jit.api.checkpoints import NOTHING, Checkpoint
from m3jit.api.generated import FinishReason, GeneratedText, Piece, Usage, fault
from m3jit.api.prefixes import Keep, Keeper, begin_behind
from m3jit.api.stop_strings import check_stops
from m3jit.errors import Interrupted, Trap, UserError, brief
from m3jit.models import grammar as grammars
from m3jit.models import hosted
from m3jit.models.grammar import Grammar
from m3jit.models.prefix_index import PrefixIndex
from m3jit.models.program import Options
from m3jit.models.provider import Models
from m3jit.vm.context import DEFAULT_SEED
from m3jit.vm.regions import check as check_backend
from m3jit.vm.vm import VM

Prompt = Union[str, Sequence[int], np.ndarray, Sequence[Mapping[str, Any]]]
LARGEST = 2 ** 31 - 1
PENALISED = 2.0                     # any penalty but 1: the program keeps the tokens so far; a register has the penalty
# Options of a program that do not change its states; chunks do not by the contract of determinism.
UNSEEN_BY_STATES = {"max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "chunk", "hosted",
                    "conversation", "scoring", "checkpoint_every"}


@dataclass(frozen=True)
class Settings:
    """How a text is generated.  top_k 0, top_p 1, min_p 0, repeat_penalty 1: off.  seed None: the machine's own, the
    same each time.  logprobs None: none; N: of each token and the N likeliest ones.  max_tokens None: as many as fit.
    context: positions that may be used, at most the model's (None: all of them)."""
    max_tokens: int | None = 256
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    logprobs: int | None = None
    context: int | None = None
    grammar: Grammar | None = None

    def checked(self) -> "Settings":
        """These settings, with stop strings as a tuple.  UserError names the setting that is out of range."""
        _number("temperature", self.temperature, 0, 1e6)
        _number("top_p", self.top_p, 0, 1)
        _number("min_p", self.min_p, 0, 1)
        _number("repeat_penalty", self.repeat_penalty, 1e-6, 1e6)
        _whole("top_k", self.top_k, 0, LARGEST)
        _whole("max_tokens", self.max_tokens, 1, LARGEST, optional=True)
        _whole("seed", self.seed, -2 ** 63, 2 ** 64 - 1, optional=True)
        _whole("logprobs", self.logprobs, 0, hosted.BEST, optional=True)
        _whole("context", self.context, 1, LARGEST, optional=True)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UserError(f"grammar: a m3jit.Grammar is expected, got {type(self.grammar).__name__}")
        return replace(self, stop=check_stops(self.stop))


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or \
            not low <= value <= high:
        raise UserError(f"{name}: a number from {low:g} to {high:g} is expected, got {brief(repr(value))}")


def _whole(name: str, value: Any, low: int, high: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise UserError(f"{name}: a whole number from {low} to {high} is expected, got {brief(repr(value))}")


class LanguageModel:
    """A model that generates text; made by `load_model`.  Its methods may be called from any thread."""

    def __init__(self, reference: str, models: Models, backend: str = "auto", threads: int | None = None,
                 limit: int | None = None, chat_template: str | None = None, options: Options | None = None,
                 prefixes: PrefixIndex | None = None):
        _whole("context", limit, 1, LARGEST, optional=True)
        check_backend(backend)                         # before a large model is loaded
        self.reference, self._models, self._backend, self._threads = reference, models, backend, threads
        self.limit, self._template_text, self._template_lock = limit, chat_template, threading.Lock()
        self._options, self.prefixes = options or Options(), prefixes
        self.model = models.load(reference)
        if not self.model.generates:
            raise UserError(f"{self.model.path}: a model of architecture {self.model.architecture!r} gives vectors, "
                            "not text; m3jit.load_embedder and `m3jit embed` run it")
        models.compiler(self.model)                    # an architecture that is not there is said now
        self.context = self.model.context              # tokens a prompt and its text may have together
        if limit is not None and limit > self.context:
            warnings.warn(f"context: {limit} tokens are asked for, {reference} has {self.context}, which it gets",
                          stacklevel=2)
        if chat_template is not None:
            self._template                             # what is wrong with it is said now, not at the first message
        self._program = functools.lru_cache(maxsize=8)(self._compile)

    @property
    def name(self) -> str:
        """The name in the model's file."""
        return self.model.name

    @functools.cached_property
    def vocabulary(self) -> int:
        """Logits the model gives for a token."""
        return int(self.model.tensor("token_embd.weight").shape[0])

    @functools.cached_property
    def _grammars(self) -> grammars.TokenGrammars:
        return grammars.TokenGrammars(self.model.tokenizer, self.vocabulary)

    def _compile(self, repeat_penalty: float) -> Any:
        return self.program(repeat_penalty=repeat_penalty)

    def program(self, options: Options | None = None, **changed: Any) -> Any:
        """The hosted program with these options (None: the model's own), some of them changed.

        UserError: the options are none."""
        if options is not None and not isinstance(options, Options):
            raise UserError(f"options: m3jit.models.program.Options are expected, got {brief(repr(options))}")
        return self._models.program(self.model, self.reference,
                                    replace(options or self._options, hosted=True, **changed))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, as the model's file says (with its start token where it asks for one).

        UserError: it is no text."""
        if not isinstance(text, str):
            raise UserError(f"encode: a text is expected, got {brief(repr(text))}")
        return list(self.model.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return self.model.tokenizer.decode(tokens)

    def template(self, source: str | None = None) -> Any:
        """The `ChatTemplate` of `source`, None: of the text the model was loaded with, else of its file."""
        from m3jit.models.chat_template import ChatTemplate
        return ChatTemplate(self.model.tokenizer, self._template_text if source is None else source)

    @functools.cached_property
    def _template(self) -> Any:
        return self.template()

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template (`ChatTemplate.tokens`: tools=, variables).

        UserError: no template, or messages it refuses."""
        with self._template_lock:                      # a template being filled keeps notes in itself
            return list(self._template.tokens(messages, **more))

    def prompt_tokens(self, prompt: Prompt, what: str = "prompt", messages: bool = True) -> list[int]:
        """Token ids of a text, of chat messages (where they may be given), or checked ids.  what: how errors call it.

        UserError: an empty prompt, ids outside the vocabulary, or messages that `chat_tokens` refuses."""
        if isinstance(prompt, str):
            ids = self.encode(prompt)
        elif not isinstance(prompt, (Sequence, np.ndarray)) or isinstance(prompt, (bytes, bytearray, memoryview)) or \
                not messages and len(prompt) and isinstance(prompt[0], Mapping):
            expected = "a text, token ids or messages are" if messages else "a text or token ids are"
            got = "messages" if isinstance(prompt, (list, tuple)) else type(prompt).__name__
            raise UserError(f"{what}: {expected} expected, got {got}" +
                            "; decode them first" * isinstance(prompt, (bytes, bytearray, memoryview)))
        elif len(prompt) and isinstance(prompt[0], Mapping):
            ids = self.chat_tokens(prompt)             # type: ignore[arg-type]
        else:
            for number, t in enumerate(prompt):
                if not isinstance(t, (int, np.integer)) or isinstance(t, bool):
                    raise UserError(f"{what}: token ids are whole numbers, and item {number} is {brief(repr(t))}")
            ids = [int(t) for t in prompt]             # type: ignore[arg-type]
            wrong = next((t for t in ids if not 0 <= t < self.vocabulary), None)
            if wrong is not None:
                raise UserError(f"{what}: token {wrong} is outside the vocabulary of {self.vocabulary}")
        if not ids:
            raise UserError(f"{what}: is empty; give at least one token")
        return ids

    def generate(self, prompt: Prompt, **settings: Any) -> "Generation":
        """The continuation of a prompt (a text, token ids, or chat messages), as an iterator of `Piece`.

        Settings: the fields of `Settings`, by name.  UserError: a setting out of range, or a prompt longer than the
        context."""
        try:
            asked = Settings(**settings)
        except TypeError:
            unknown = [name for name in settings if name not in Settings.__dataclass_fields__]
            raise UserError(f"generate: no setting {unknown[0]!r}; there are "
                            f"{', '.join(Settings.__dataclass_fields__)}") from None
        return Generation(self.start(self.prompt_tokens(prompt), asked))

    @functools.cached_property
    def recurrent(self) -> bool:
        """Whether it has states that cannot be cut at any token."""
        return any(ins.op.name == "SSM_SCAN" for _, ins in self._program(1.0).instructions)

    def key_of(self, options: Options | None, owner: str = "") -> Hashable:
        """What states depend on besides tokens: weights, adapters, and all options that change what is computed (None:
        the model's own).  owner: whose texts they may serve."""
        options = options or self._options
        given = {f.name: getattr(options, f.name) for f in fields(Options) if f.name not in UNSEEN_BY_STATES}
        given["adapters"] = tuple((a.source.content_hash, a.scale) for a in options.adapters)
        return self.model.file.content_hash, tuple(sorted(given.items())), owner

    def start(self, ids: Sequence[int], settings: Settings, *, written: int = 0,
              known: Checkpoint | None = None, keep: Keep | None = None, owner: str = "",
              **machine: Any) -> GeneratedText:
        """A machine that is ready to run: its sinks are attached, its registers set.  Raises as `generate`.

        written: so many of the last ids are the beginning of the text itself; its grammar, and a character or a stop
        string that they begin, go on behind them.  known: states behind the first of these tokens (None: what the
        model's prefix index has; `NOTHING`: the index is left alone).  keep: gets states of the text, besides the index
        (`Keeper`).  owner: states in the index serve texts of the same owner alone.  machine: arguments of `m3jit.VM`
        besides."""
        s, context, matcher = self.check(len(ids), settings)
        begun = list(ids[len(ids) - written:])
        if matcher is not None:
            matcher = matcher.after_all(begun)
        vm = self.machine(self._program(1.0 if s.repeat_penalty == 1 else PENALISED), s, context, matcher, **machine)
        text = GeneratedText(vm, self.model, ids, check_stops(s.stop), -1 if s.logprobs is None else int(s.logprobs),
                             behind=begun)
        vm.set_sink("LOGPROBS", text.take_logprobs)
        index = None if known is NOTHING else self.prefixes
        key = self.key_of(None, owner)
        if known is None and index is not None:
            known = index.find(key, ids)
        if known is not None and known is not NOTHING:
            begin_behind(vm, known, len(ids))
            text.reused_tokens = known.rows
        if index is not None or keep is not None:
            def kept(tokens: Sequence[int], found: Checkpoint) -> None:
                if index is not None:
                    index.add(key, tokens, found)
                if keep is not None:
                    keep(tokens, found)
            text.keeper = Keeper(vm, ids, self.recurrent, kept)
        vm.push_input(np.array(ids, np.int64))
        return text

    def machine(self, program: Any, s: Settings, context: int, matcher: grammars.Matcher | None, *,
                backend: str | None = None, threads: int | None = None, **more: Any) -> VM:
        """A machine for a hosted program of this model, its registers set.  s, context, matcher: as `check` gives them;
        backend, threads: in place of the model's; more: arguments of `m3jit.VM`."""
        seed = DEFAULT_SEED if s.seed is None else (int(s.seed) + 2 ** 63) % 2 ** 64 - 2 ** 63
        vm = VM(program, backend or self._backend, threads or self._threads, models=self._models, files=None, seed=seed,
                extensions=grammars.registry(matcher), **more)
        values = {"rTemp": float(s.temperature), "rTopP": float(s.top_p), "rMinP": float(s.min_p),
                  "rTopK": int(min(s.top_k, self.vocabulary)), "rContext": context,
                  "rMaxTokens": LARGEST if s.max_tokens is None else int(s.max_tokens),
                  "rWanted": -1 if s.logprobs is None else int(s.logprobs), "rGuided": int(matcher is not None),
                  "rStart": 0, "rMarks": 0, "rMade": 0, "rToken": -1}
        for name in hosted.REGISTERS:
            vm.set(name, values[name])
        if s.repeat_penalty != 1:
            vm.set("rPenalty", float(s.repeat_penalty))
        return vm

    @functools.cached_property
    def _scoring(self) -> Any:
        return self._models.program(self.model, self.reference, replace(self._options, scoring=True))

    def score(self, ids: Sequence[int]) -> np.ndarray:
        """The log-probability of each token but the first after those before it: F32 [n - 1], natural logarithm.

        UserError: ids outside the vocabulary, or more than the context holds."""
        ids = self.prompt_tokens(ids)
        self.check(len(ids), Settings())
        vm = VM(self._scoring, self._backend, self._threads, models=self._models, files=None)
        scores: list[np.ndarray] = [np.empty(0, np.float32)]
        vm.set_sink("SCORES", scores.append)
        vm.push_input(np.array(ids, np.int64))
        vm.run()
        return np.concatenate(scores)[:-1]             # nothing is behind the last token

    def check(self, tokens: int, settings: Settings) -> tuple[Settings, int, grammars.Matcher | None]:
        """(checked settings, positions that may be used, the grammar at its start) for a prompt of so many tokens.

        UserError: a setting out of range, a prompt that does not fit, a grammar that is wrong."""
        s = settings.checked()
        most = self.context if self.limit is None else min(self.limit, self.context)
        limit = most if s.context is None else min(s.context, most)
        if tokens > limit:
            raise UserError(f"the prompt has {tokens} tokens, the context {limit}"
                            + (f" (of the model's {self.context})" if limit < self.context else "")
                            + "; shorten the prompt" + (", or allow more context" if limit < self.context else ""))
        return s, limit, self._grammars.matcher(s.grammar) if s.grammar is not None else None


class Generation:
    """A text that is being generated: an iterator of `Piece`.

    `text`, `tokens`, `usage` and `finish_reason` (None until the end) say what came so far.  Leaving a loop over it
    does not end it; `cancel` does, and so does dropping it."""

    def __init__(self, generated: GeneratedText):
        self._generated, self._pieces = generated, self._run(generated)
        self.text = ""

    def _run(self, g: GeneratedText) -> Iterator[Piece]:
        error: BaseException | None = None
        try:
            for item in g.vm.output("TOKENS"):
                g.take_token(item)
                while g.ready:
                    yield g.ready.popleft()
        except Interrupted as stopped:
            error = stopped
        except Trap as trap:
            raise fault(trap) from None
        g.finish(error)
        yield from g.ready

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> Piece:
        piece = next(self._pieces)
        self.text += piece.text
        return piece

    @property
    def tokens(self) -> list[int]:
        """Token ids generated so far."""
        return list(self._generated.tokens)

    @property
    def usage(self) -> Usage:
        """Tokens of the prompt and of the text so far."""
        return self._generated.usage

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were not computed: an earlier text began with them (`load_model`'s
        prefix_memory)."""
        return self._generated.reused_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended (see `Piece`)."""
        return self._generated.finish_reason

    def cancel(self) -> None:
        """End it before its next token, from any thread; the last piece then says "cancelled"."""
        self._generated.vm.stop()

    def result(self) -> str:
        """All of the text, waiting for its end."""
        for _ in self:
            pass
        return self.text


def load_model(reference: str | os.PathLike = "default", *, backend: str = "auto", threads: int | None = None,
               context: int | None = None, chat_template: str | None = None, options: Options | None = None,
               prefix_memory: int = 0) -> LanguageModel:
    """A language model by the path of its file or the name it was obtained under; "default": the embedded one.

    backend, threads: as `m3jit.VM`; they never change what is generated.  context: positions a text may use (None: all
    the model has).  chat_template: jinja2 text in place of the model's own.  options: what its program is compiled with
    besides (kv_type, adapters, chunk).  prefix_memory: bytes of states of texts that are kept, so that a text that
    begins like one of them computes only what is new (0: none).  Raises UserError (no such model) or
    ModelFileError (it cannot be run)."""
    prefixes = PrefixIndex(prefix_memory) if prefix_memory else None
    model = LanguageModel(os.fspath(reference), Models(), backend, threads, context, chat_template, options, prefixes)
    model._program(1.0)                                # what is wrong with the file is said now
    return model
