"""What the machine asks of language models and other model files, without knowing any.

`m3jit.models` provides a `ModelProvider`; a machine without one says so when a program needs it.
"""
from __future__ import annotations

from typing import Any, Protocol, Sequence, runtime_checkable

from m3jit.isa.types import Tensor


@runtime_checkable
class Model(Protocol):
    """A loaded model: an immutable value."""
    name: str

    def tensor(self, name: str) -> Tensor:
        """A weight; KeyError (with the nearest names) if there is none."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text, as the model's file says (with its start token where it asks for one)."""

    def decode_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; KeyError for an id outside the vocabulary."""

    def info(self, key: str) -> int | float | str | Tensor:
        """A fact about the model ("vocab", "eos", "layers", any metadata key); KeyError if unknown."""


class ModelProvider(Protocol):
    """Finds and compiles models."""

    def load(self, reference: str, quant: str = "") -> Model:
        """A model by file name, content hash or the name it was obtained under.  quant: refuse other weight types."""

    def compile(self, model: Model) -> bytes:
        """The model as a program (a `.m3b` file's bytes)."""


class NoModels:
    """The provider of a machine that was given none."""

    def load(self, reference: str, quant: str = "") -> Model:
        from m3jit.errors import OperandError
        raise OperandError(f"model {reference!r}: this machine has no model provider; run it with `m3jit run`, or pass "
                           f"VM(models=...)")

    def compile(self, model: Any) -> bytes:
        return self.load(getattr(model, "name", "?"))          # type: ignore[return-value]


NO_MODELS = NoModels()             # one for all: machines with the same provider share what they compile
