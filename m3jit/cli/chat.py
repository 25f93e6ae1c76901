"""`m3jit run --chat`: a prompt in the model's own chat template."""
from __future__ import annotations

from typing import Any

import numpy as np


def chat_tokens(model: Any, prompt: str, system: str | None) -> np.ndarray:
    """Token ids of the filled template; its control tokens become tokens, the prompt's text stays text.

    UserError: the model has no template, or a broken one."""
    from m3jit.models.chat_template import ChatTemplate
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return np.array(ChatTemplate(model.tokenizer).tokens(messages), np.int64)
