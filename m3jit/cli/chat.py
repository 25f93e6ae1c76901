"""`m3jit run --chat`: a prompt in the model's own chat template."""
from __future__ import annotations

import re
from typing import Any

import numpy as np

from m3jit.errors import UserError


def chat_tokens(model: Any, prompt: str, system: str | None) -> np.ndarray:
    """Token ids of the filled template; its control tokens become tokens, the prompt's text stays text.

    UserError: jinja2 is missing, or the model has no template, or a broken one."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise UserError("--chat needs jinja2, which fills the model's chat template: pip install jinja2") from None
    template = model.tokenizer.chat_template
    if not template:
        raise UserError(f"{model.path}: has no chat template (metadata key 'tokenizer.chat_template'); run it without "
                        "--chat")
    said = {"\ue000prompt\ue001": prompt, "\ue000system\ue001": system or ""}
    tokenizer = model.tokenizer

    def ids(text: str, special: bool) -> list[int]:
        return tokenizer.encode(text, special=special, add_bos=False, add_eos=False)
    if all(ids(text, True) == ids(text, False) for text in said.values()):
        parts = [_fill(model, template, prompt, system)]
    else:                                              # control tokens written in the prompt must stay characters there
        stand_ins = list(said)
        filled = _fill(model, template, stand_ins[0], stand_ins[1] if system else None)
        parts = re.split("(\ue000(?:prompt|system)\ue001)", filled)
    bos = tokenizer.vocabulary.texts[tokenizer.bos] if tokenizer.bos is not None else ""
    first = [tokenizer.bos] if tokenizer.adds_bos and bos and not parts[0].startswith(bos) else []
    tokens = sum((ids(said.get(part, part), part not in said) for part in parts), first)
    return np.array(tokens, np.int64)


def _fill(model: Any, template: str, prompt: str, system: str | None) -> str:
    """The template's text for one exchange."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    texts = model.tokenizer.vocabulary.texts
    special = {name: "" if token is None else texts[token]
               for name, token in (("bos_token", model.tokenizer.bos), ("eos_token", model.tokenizer.eos))}
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise UserError(f"{model.path}: its chat template fails: {error}") from None
