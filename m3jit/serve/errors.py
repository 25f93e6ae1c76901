"""Errors as OpenAI's clients read them."""
from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """What a client did wrong, or why it cannot be served now.  `body` is the JSON it gets."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None,
                 headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 429 else "rate_limit_error" if self.status == 429 else \
            "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
