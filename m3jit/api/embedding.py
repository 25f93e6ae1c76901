"""Vectors of texts.

    embedder = m3jit.load_embedder("minilm")            a model's folder or .gguf file, or the name of an obtained model
    vectors = embedder.embed(["guitar", "instrument"])  [2, width], F32; of length 1: their product is the cosine
"""
from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from m3jit.errors import UserError, brief
from m3jit.models.pooling import POOLINGS, Pooling
from m3jit.models.program import Options
from m3jit.models.provider import Models, SourceModel
from m3jit.vm.regions import check as check_backend
from m3jit.vm.vm import VM


class Embedder:
    """A model that turns texts into vectors; made by `load_embedder`.  Its methods may be called from any thread."""

    def __init__(self, reference: str, models: Models, pooling: str | None, normalize: bool | None, backend: str,
                 threads: int | None, options: Options | None = None):
        if pooling is not None and pooling not in POOLINGS:
            raise UserError(f"pooling: one of {', '.join(POOLINGS)} is expected, got {pooling!r}")
        check_backend(backend)                         # before a large model is loaded
        self._models, self._backend, self._threads = models, backend, threads
        self.model: SourceModel = models.load(reference)
        text = models.embedding(self.model, reference, pooling, normalize, options)
        chosen = Pooling.of(self.model.file, self.model.architecture, pooling, normalize)
        self.pooling, self.normalize = chosen.kind, chosen.normalize
        from m3jit.frontend import assemble
        self._program = assemble(text, f"{self.model.path.stem}.m3asm")

    @property
    def name(self) -> str:
        """The name in the model's file."""
        return self.model.name

    @functools.cached_property
    def width(self) -> int:
        """Elements of a vector."""
        return int(self.model.info("embedding"))

    @functools.cached_property
    def context(self) -> int:
        """Tokens a text may have."""
        return self.model.context

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, framed as the model wants it ([CLS] text [SEP], for example)."""
        return list(self.model.encode(text))

    def rows(self, text: str | Sequence[int] | np.ndarray) -> np.ndarray:
        """The vector of one text or its token ids, [1, width]; with pooling "none" those of its tokens, [T, width].

        UserError: something else, a text without tokens, or longer than the context; a model that gives what is no
        number."""
        if isinstance(text, (bytes, bytearray)) or not isinstance(text, (str, Sequence, np.ndarray)):
            raise UserError(f"a text or token ids are expected, got {type(text).__name__}")
        for number, t in enumerate(() if isinstance(text, str) else text):
            if isinstance(t, bool) or not isinstance(t, (int, np.integer)):
                raise UserError(f"token ids are whole numbers, and item {number} is {brief(repr(t))}")
        ids = self.encode(text) if isinstance(text, str) else [int(t) for t in text]
        if not ids:
            raise UserError("a text without tokens has no vector; give at least one word")
        if len(ids) > self.context:
            raise UserError(f"the text has {len(ids)} tokens, the context {self.context}; embed it in parts")
        vm = VM(self._program, self._backend, self._threads, models=self._models, files=None)
        out: list[Any] = []
        vm.set_sink("OUTPUT", out.append)
        vm.push_input(np.array(ids, np.int64))
        vm.close_input()
        vm.run()
        if not np.isfinite(out[0]).all():
            raise UserError(f"{self.model.path}: gives a vector that holds no numbers (NaN or infinity); its weights "
                            "are damaged")
        return out[0]

    def embed(self, texts: str | Sequence[str]) -> np.ndarray:
        """The vectors of texts, [n, width], F32; of no texts [0, width].  UserError names the text that has none."""
        texts = [texts] if isinstance(texts, str) else texts
        found = [self.embed_one(text, number) for number, text in enumerate(texts, 1)]
        return np.stack(found) if found else np.zeros((0, self.width), np.float32)

    def embed_one(self, text: str | Sequence[int] | np.ndarray, number: int = 1) -> np.ndarray:
        """The vector [width] of text `number`, as messages call it."""
        if self.pooling == "none":
            raise UserError("embed: pooling \"none\" gives a vector for each token; use rows")
        try:
            return self.rows(text)[0]
        except UserError as error:
            if type(error) is UserError:               # one of those above
                raise UserError(f"text {number}: {error}") from None
            raise


def load_embedder(reference: str | os.PathLike, *, pooling: str | None = None, normalize: bool | None = None,
                  backend: str = "auto", threads: int | None = None, options: Options | None = None) -> Embedder:
    """A model of vectors by its folder, its file or the name it was obtained under.

    pooling: "mean", "cls" (the first token), "last" or "none"; None: as the model says, else the mean.  normalize:
    vectors of length 1; None: as the model says, else yes.  Encoders look at a whole text; models that generate give
    their last hidden states.  backend, threads: as `m3jit.VM`; they never change a byte.  options: what the program is
    compiled with besides (adapters, kv_type).
    Raises UserError (no such model) or ModelFileError (it cannot be run)."""
    return Embedder(os.fspath(reference), Models(), pooling, normalize, backend, threads, options)
