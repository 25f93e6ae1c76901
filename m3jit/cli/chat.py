"""`m3jit run --chat`: a prompt in the model's own chat template."""
from __future__ import annotations

from typing import Any

import numpy as np

from m3jit.errors import UserError


def chat_tokens(model: Any, prompt: str, system: str | None) -> np.ndarray:
    """Token ids of the filled template; its control tokens become tokens, the prompt's text stays text.

    UserError: jinja2 is missing, or the model has no template, or a broken one."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("--chat needs jinja2, which fills the model's chat template: pip install jinja2") from None
    template = model.tokenizer.chat_template
    if not template:
        raise UserError(f"{model.path}: has no chat template (metadata key 'tokenizer.chat_template'); run it without "
                        "--chat")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})

    def refuse(message: str) -> None:
        raise TemplateError(message)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    texts = model.tokenizer.vocabulary.texts
    special = {name: "" if token is None else texts[token]
               for name, token in (("bos_token", model.tokenizer.bos), ("eos_token", model.tokenizer.eos))}
    try:
        text = environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special)
    except TemplateError as error:
        raise UserError(f"{model.path}: its chat template fails: {error}") from None
    bos = special["bos_token"]
    ids = model.tokenizer.encode(text, special=True, add_bos=False if bos and text.startswith(bos) else None,
                                 add_eos=False)
    return np.array(ids, np.int64)
