"""POST /v1/embeddings: vectors of texts, by an encoder or the last hidden states of a model that generates."""
from __future__ import annotations

import base64
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from m3jit.api.embedding import Embedder, load_embedder
from m3jit.models.program import Options
from m3jit.serve.engine import Busy
from m3jit.serve.errors import ApiError
from m3jit.serve.requests import Fields, about, prompts_of, wrong
from m3jit.vm.regions import check as check_backend

MOST_TEXTS = 2048


@dataclass(frozen=True)
class EmbeddingRequest:
    """A checked request: its texts (or token ids), and whether vectors go out as base64 of little-endian F32."""
    model: str
    texts: list[str | list[int]]
    base64: bool
    dimensions: int | None


def embedding_request(fields: Fields) -> EmbeddingRequest:
    """ApiError 400 says what is wrong with a body of /v1/embeddings."""
    model = fields.text("model")
    texts = prompts_of("input", fields.take("input"))
    form = fields.take("encoding_format", "float")
    if form not in ("float", "base64"):
        raise wrong("encoding_format", '"float" or "base64"', form)
    dimensions = fields.whole("dimensions", 1, 1 << 20, None)
    fields.finish()
    if len(texts) > MOST_TEXTS:
        raise ApiError(400, f"input: {len(texts)} texts; at most {MOST_TEXTS}", "invalid_value", "input")
    return EmbeddingRequest(model, texts, form == "base64", dimensions)


class Vectors:
    """The embedder of a server: loaded when it is first asked, one request at a time; `room` more may wait.  options:
    what its program is compiled with besides."""

    def __init__(self, reference: str, backend: str, threads: int | None, room: int, options: Options | None = None):
        check_backend(backend)                         # now, not at the first request
        self._how, self._room = (reference, backend, threads, options), room
        self._embedder: Embedder | None = None
        self._turn, self._count = threading.Lock(), threading.Lock()
        self.present = 0

    def answer(self, asked: EmbeddingRequest, name: str, gone: threading.Event) -> dict[str, Any]:
        """The answer's JSON; stops between two texts when the client is gone.  Raises Busy, ApiError, UserError."""
        with self._count:
            if self.present > self._room:
                raise Busy(self.present - 1, 1)
            self.present += 1
        try:
            with self._turn:
                return self._answer(asked, name, gone)
        finally:
            with self._count:
                self.present -= 1

    def load(self) -> Embedder:
        """The embedder.  UserError, ModelFileError: the model gives no vectors, or its adapters do not fit."""
        if self._embedder is None:
            reference, backend, threads, options = self._how
            self._embedder = load_embedder(reference, backend=backend, threads=threads, options=options)
        return self._embedder

    def _answer(self, asked: EmbeddingRequest, name: str, gone: threading.Event) -> dict[str, Any]:
        embedder, data, tokens = self.load(), [], 0
        if asked.dimensions not in (None, embedder.width):
            raise ApiError(400, f"dimensions: this model's vectors have {embedder.width} elements, not "
                                f"{asked.dimensions}", "invalid_value", "dimensions")
        for i, text in enumerate(asked.texts):
            if gone.is_set():
                break
            with about("input", "input: "):
                ids = embedder.encode(text) if isinstance(text, str) else text
                _check_ids(ids, embedder, i + 1)
                vector = embedder.embed_one(ids, i + 1)
            tokens += len(ids)
            data.append({"object": "embedding", "index": i, "embedding": _encoded(vector, asked.base64)})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": name, "usage": usage}


def _check_ids(ids: list[int], embedder: Embedder, number: int) -> None:
    vocabulary = embedder.model.tensor("token_embd.weight").shape[0]
    outside = next((t for t in ids if not 0 <= t < vocabulary), None)
    if outside is not None:
        raise ApiError(400, f"input: text {number}: token {outside} is outside the vocabulary of {vocabulary}",
                       "invalid_value", "input")


def _encoded(vector: np.ndarray, as_base64: bool) -> str | list[float]:
    if as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype(np.float64).tolist()
