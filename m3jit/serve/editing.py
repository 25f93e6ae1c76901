"""POST .../{id}/edit: go back to a place in a response, put a text there, and go on behind it.

The place is a token, or a text of the response (`m3jit.api.places`, as `Session.rollback` has it).  Everything before
it is kept, states included; a token that the place cuts is taken back, and what lies before the place of it is written
again, with the text.  The random stream goes back too: without a change the rest comes out as it was, and the rest of
any edit is what `POST /v1/completions` gives for these token ids with the seed that the answer names.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Sequence

from m3jit.api.checkpoints import Checkpoint
from m3jit.api.generation import LanguageModel, Settings
from m3jit.api.places import Place, TokenText
from m3jit.api.spelling import spelled
from m3jit.errors import UserError
from m3jit.serve.engine import Fork, Job, Ticket, ignore
from m3jit.serve.errors import ApiError
from m3jit.serve.requests import MOST_CHOICES, Fields, about, wrong

MANY = 2 ** 31 - 1
FIELDS = ("position", "text", "model", "choice", "stream", "stream_options", "n", "seed", "max_tokens",
          "max_completion_tokens")


@dataclass(frozen=True)
class EditRequest:
    """A checked request.  token, before, after: exactly one says the place; which: the how-manieth of a text.

    seed, max_tokens: None, as the response has them there; max_tokens is of what is generated now."""
    model: str | None
    choice: int
    text: str
    stream: bool
    usage: bool
    alternatives: int
    token: int | None = None
    before: str | None = None
    after: str | None = None
    which: int | None = None
    seed: int | None = None
    max_tokens: int | None = None


def edit_request(fields: Fields) -> EditRequest:
    """ApiError 400 says what is wrong with a body of .../edit."""
    position = fields.take("position")
    expected = 'an object with "token", "text" or "after" is expected'
    if not isinstance(position, dict):
        if position is None:                           # a name that is misspelt is said first
            for name in FIELDS:
                fields.values.pop(name, None)
            fields.finish(FIELDS)
        raise wrong("position", expected.removesuffix(" is expected"), position)
    inner = Fields(position, "position.")
    token = inner.whole("token", 0, MANY, None)
    before, after = (inner.text(n) if position.get(n) is not None else inner.take(n) for n in ("text", "after"))
    which = inner.whole("which", -MANY, MANY, None)
    inner.finish(("token", "text", "after", "which"))
    if [token, before, after].count(None) != 2 or (which is not None and token is not None):
        raise ApiError(400, f"position: {expected}, one of them, and \"which\" only with a text", "invalid_value",
                       "position")
    text = fields.take("text", "")
    if not isinstance(text, str):
        raise wrong("text", "a string", text)
    options = fields.values.get("stream_options") or {}
    if not isinstance(options, dict):
        raise wrong("stream_options", "an object", options)
    limit = fields.whole("max_completion_tokens", 1, MANY, fields.whole("max_tokens", 1, MANY, None))
    found = EditRequest(fields.text("model") if fields.values.get("model") is not None else None,
                        fields.whole("choice", 0, MOST_CHOICES - 1, 0) or 0, text, fields.flag("stream"),
                        bool(options.get("include_usage")), fields.whole("n", 1, MOST_CHOICES, 1) or 1, token, before,
                        after, which, fields.whole("seed", -2 ** 63, 2 ** 64 - 1, None), limit)
    fields.finish(FIELDS)
    return found


@dataclass(frozen=True)
class Edit:
    """Where an edited text goes on.  prompt: of the response; kept, injected: tokens of the text before that place;
    random: the random stream at the text's beginning and behind each of these."""
    prompt: tuple[int, ...]
    kept: tuple[int, ...]
    injected: tuple[int, ...]
    random: tuple[int, ...]
    settings: Settings

    def facts(self, model: LanguageModel, response: str, choice: int) -> dict[str, Any]:
        """What the answer says of it."""
        return {"id": response, "choice": choice, "kept_tokens": len(self.kept), "kept": model.decode(self.kept),
                "injected_tokens": len(self.injected), "injected": model.decode(self.injected)}

    def jobs(self, model: LanguageModel, original: Ticket, alternatives: int) -> list[Job]:
        """The texts that go on, without their clients.  original: has ended."""
        ids, same = [*self.prompt, *self.kept, *self.injected], len(self.prompt) + len(self.kept)
        found = [usable(c, same, len(ids)) for c in original.checkpoints]
        if model.prefixes is not None:
            found.append(model.prefixes.find(model.key_of(None, original.job.owner), ids))
        known = max((c for c in found if c is not None), key=lambda c: c.rows, default=None)
        base = Job(ids, self.settings, ignore, len(self.kept) + len(self.injected), self.random, known,
                   Fork() if alternatives > 1 else None, True,
                   tuple(c for c in original.checkpoints if c.rows <= same), original.job.owner)
        return [replace(base, settings=replace(self.settings, seed=(self.settings.seed + i) % 2 ** 64))
                for i in range(alternatives)]


def usable(found: Checkpoint, same: int, total: int) -> Checkpoint | None:
    """These states, or what can be cut from them, for a text of `total` tokens whose first `same` ones they agree with;
    all of it only where they have the logits."""
    if found.rows == same == total and found.logits is not None:
        return found
    rows = min(found.rows, same, total - 1)
    return found.cut(rows) if rows else None


def plan(model: LanguageModel, original: Ticket, asked: EditRequest) -> Edit:
    """The edit of a text, as far as it has come.  ApiError 400, UserError: it cannot be done.  Nothing is changed."""
    job, tokenizer = original.job, model.model.tokenizer
    prompt, written = tuple(job.ids[:len(job.ids) - job.written]), list(job.ids[len(job.ids) - job.written:])
    random = [*job.random, *original.random]
    tokens = [*written, *original.tokens][:len(random) - 1]            # it may be going on meanwhile
    place = _place(tokenizer, tokens, asked, original.ended_at)
    injected = _injected(tokenizer, place, asked.text)
    made, most = place.tokens + len(injected), asked.max_tokens
    field = "text" if asked.text else "position"       # what the answer is too long by
    if most is None and job.settings.max_tokens is not None:
        whole = job.settings.max_tokens + job.written
        most = whole - made
        if most < 1:
            raise ApiError(400, f"{field}: with it the answer has {made} tokens, and its max_tokens are {whole}; go "
                                "further back, or give max_tokens for the rest", "invalid_value", field)
    seed = random[place.tokens] if asked.seed is None else asked.seed
    settings = replace(job.settings, seed=seed % 2 ** 64, max_tokens=most)
    kept = tuple(tokens[:place.tokens])
    _, limit, matcher = model.check(0, settings)
    if len(prompt) + made > limit:
        raise ApiError(400, f"{field}: with it the response has {len(prompt) + made} tokens, the context holds "
                       f"{limit}; go further back{', or shorten the text' * bool(asked.text)}", "invalid_value", field)
    if matcher is not None:
        with about(field, f"{field}: "):
            matcher.after_all([*kept, *injected])
    begun = (*random[:place.tokens + 1], *[seed] * len(injected))
    return Edit(prompt, kept, injected, begun, settings)


def _place(tokenizer: Any, tokens: Sequence[int], asked: EditRequest, seen: int | None) -> Place:
    """The place in the text of these tokens; seen: characters of it that the response has (None: all).

    ApiError 400: it is not there."""
    if asked.token is not None:
        if asked.token > len(tokens):
            raise ApiError(400, f"position.token: {asked.token}, but the answer has {len(tokens)} tokens; give 0 to "
                                f"{len(tokens)}", "invalid_place", "position.token")
        return Place(asked.token)
    wanted, text = asked.before if asked.before is not None else asked.after, TokenText(tokenizer, tokens)
    if seen is not None:
        text = text.shown(seen)
    field = "position.text" if asked.before is not None else "position.after"
    try:
        at = text.find(wanted, asked.which, field)     # type: ignore[arg-type]
    except UserError as error:
        said = str(error).removeprefix(f"{field}: ")
        if said.startswith("which: "):
            field, said = "position.which", said.removeprefix("which: ")
        raise ApiError(400, f"{field}: {said}", "invalid_place", field) from None
    return text.place(at if asked.before is not None else at + len(wanted))        # type: ignore[arg-type]


def _injected(tokenizer: Any, place: Place, text: str) -> tuple[int, ...]:
    """The tokens of what is written at a place: the rest of the token that it cuts, and the text."""
    if not place.rest and not text:
        return ()
    try:
        if text:
            spelled(tokenizer, text)                   # says what is wrong with it alone
        return tuple(spelled(tokenizer, place.rest + text))
    except UserError as error:
        field = "text" if text else "position"         # then it is what a token was cut to
        raise ApiError(400, f"{field}: " + str(error).removeprefix("inject: "), "invalid_text", field) from None
