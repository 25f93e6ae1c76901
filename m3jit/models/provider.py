"""Models as the machine sees them: `SourceModel` (m3jit.vm.models.Model) and the provider that finds them."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from m3jit.errors import UserError, brief
from m3jit.isa.types import DTYPES, F32, Tensor
from m3jit.models import store
from m3jit.models.adapters import Adapter, is_adapter
from m3jit.models.architectures import ARCHITECTURES, EMBEDDERS, GENERATORS
from m3jit.models.folder_tokenizer import FolderTokenizer
from m3jit.models.gguf_shards import open_gguf
from m3jit.models.hf_folder import HFFolder
from m3jit.models.latent_parts import with_latent_parts
from m3jit.models.model_error import ModelFileError
from m3jit.models.model_source import Source, content_of
from m3jit.models.peft_folder import PeftFolder, is_adapter_folder
from m3jit.models.pooling import Pooling
from m3jit.models.program import Compiler, Options
from m3jit.models.tokenizer import Tokenizer

DEFAULT_MODEL = Path(__file__).parent / "data" / "default.gguf"
_INFO = {"layers": "block_count", "heads": "attention.head_count", "kv_heads": "attention.head_count_kv",
         "embedding": "embedding_length", "context": "context_length"}


def is_model_folder(path: str | os.PathLike) -> bool:
    """Whether a path is a folder with a config.json, as models of Hugging Face are."""
    return os.path.isfile(os.path.join(path, "config.json"))


def open_source(path: str | os.PathLike) -> Source:
    """The model at a path: a Hugging Face folder, or a GGUF file (any one of several that a model is split over).
    ModelFileError when it is neither.  Adapters have the same forms: a folder of PEFT's, or a GGUF file."""
    if is_adapter_folder(path):
        return PeftFolder(path)
    return with_latent_parts(HFFolder(path) if os.path.isdir(path) else open_gguf(path))


class SourceModel:
    """A GGUF file or a folder: weights by name (no copy), its tokeniser, facts.  An immutable value."""

    def __init__(self, path: str | os.PathLike):
        self.file = open_source(path)
        self.path = Path(path)
        self.architecture = self.file.value("general.architecture", str)
        self.name = self.file.value("general.name", str, default=self.path.stem)
        self._tensors: dict[str, Tensor] = {}
        self._token_bytes: dict[int, bytes] = {}
        self._tokenizer: Tokenizer | FolderTokenizer | None = None
        self._hash: str | None = None

    @property
    def generates(self) -> bool:
        """Whether it writes text (an encoder gives vectors only)."""
        return self.architecture not in EMBEDDERS or self.architecture in {model.name for model in GENERATORS}

    @property
    def tokenizer(self) -> Tokenizer | FolderTokenizer:
        if self._tokenizer is None:
            self._tokenizer = FolderTokenizer(self.path) if self.path.is_dir() else Tokenizer(self.file)
        return self._tokenizer

    def tensor(self, name: str) -> Tensor:
        """A weight over the mapped bytes (F64: values rounded to F32); KeyError when there is none."""
        if name not in self._tensors:
            if name not in self.file.tensors:
                raise KeyError(name)
            info = self.file.tensors[name]
            kind = info.ggml_type.name
            dtype = F32 if kind == "F64" else DTYPES.get(kind)
            if dtype is None:
                raise ModelFileError(self.path, f"has type {kind}", item=f"tensor {name!r}",
                                     expected=f"one of {', '.join(sorted([*DTYPES, 'F64']))}")
            raw = self.file.tensor_bytes(name)
            key = f"{self.file.content_hash}/{name}"
            shape = tuple(info.shape)
            if kind == "F64":
                with np.errstate(over="ignore"):
                    raw = raw.view("<f8").astype("<f4").view(np.uint8)
            if dtype.is_block:
                self._tensors[name] = Tensor.blocks(dtype, shape, raw, key)
            else:
                self._tensors[name] = Tensor(dtype, shape, raw.view(dtype.numpy).reshape(shape), key)
        return self._tensors[name]

    def encode(self, text: str) -> Sequence[int]:
        return self.tokenizer.encode(text)

    def decode_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; those of tokens that were asked for are kept."""
        known = self._token_bytes.get(token)
        if known is None:
            known = self._token_bytes[token] = self.tokenizer.decode_bytes(token)
        return known

    @property
    def content_hash(self) -> str:
        """What tells this model from others wherever its file lies: 32 hex digits.  A file is read once as a whole."""
        if self._hash is None:
            self._hash = content_of(self.file)
        return self._hash

    @property
    def context(self) -> int:
        """Tokens a text may have.  ModelFileError when the file does not say, or says nonsense."""
        key = f"{self.architecture}.{_INFO['context']}"
        found: int = self.file.value(key, int)
        if found < 1:
            raise ModelFileError(self.path, f"is {found}", item=f"metadata key {key!r}", expected="1 or more")
        return found

    def info(self, key: str) -> int | float | str | Tensor:
        """vocab, eos, bos, layers, heads, kv_heads, embedding, context, architecture, name, or a metadata key."""
        if key == "vocab":
            return len(self.tokenizer)
        if key in ("eos", "bos"):
            value = getattr(self.tokenizer, key)
            return -1 if value is None else int(value)
        if key in ("architecture", "name"):
            return getattr(self, key)
        found = self.file.metadata[f"{self.architecture}.{_INFO[key]}" if key in _INFO else key]
        if isinstance(found, np.ndarray):
            return Tensor.of(found)
        if isinstance(found, (bool, int, float, str)):
            return found
        raise KeyError(key)


class Models:
    """The provider (m3jit.vm.models.ModelProvider): files, folders, obtained models by name, "default"."""

    def __init__(self, options: Options | None = None):
        self.options = options or Options()
        self._loaded: dict[str, SourceModel] = {}

    def find(self, reference: str) -> Path:
        """The file or folder a reference means; UserError says what was looked for."""
        if reference == "default":
            return DEFAULT_MODEL
        path = Path(reference)
        try:
            if path.is_file() or is_model_folder(path) or is_adapter_folder(path):
                return path
        except OSError as error:                        # a name that is too long, a loop of links
            raise UserError(f"model {brief(repr(reference))}: {error.strerror}; give the path of a model, or its name"
                            ) from None
        try:
            stored = store.path(reference)
        except UserError:
            stored = None
        if stored is not None and Path(stored).exists():
            return Path(stored)
        raise UserError(f"model {reference!r}: no such file, and no model of that name was obtained; "
                        f"`m3jit model list` shows what there is, `m3jit model get NAME` obtains one")

    def load(self, reference: str, quant: str = "") -> SourceModel:
        path = self.find(reference)
        key = str(path.resolve())
        if key not in self._loaded:
            self._loaded[key] = SourceModel(path)
        model = self._loaded[key]
        if quant:
            types = {t.ggml_type.name for t in model.file.tensors.values() if len(t.shape) == 2}
            if types - {quant}:
                found = ", ".join(sorted(types))
                raise UserError(f"{path}: has weight matrices of {found}, QUANT={quant} was asked for")
        return model

    def adapter(self, reference: str, scale: float = 1.0) -> Adapter:
        """The low-rank adapter in a file, for `Options.adapters`; whether it fits a model is checked with that."""
        model = self.load(reference)
        if not is_adapter(model.file):
            raise ModelFileError(model.path, "is no adapter", item="metadata key 'general.type'", expected="'adapter'",
                                 remedy="A model file is run as it is.")
        return Adapter(model.file, str(model.path.resolve()), scale)

    @staticmethod
    def compiler(model: SourceModel) -> Compiler:
        """What writes a model's program; ModelFileError for an adapter and for an architecture that has none."""
        if is_adapter(model.file):
            raise ModelFileError(model.path, "is an adapter, no model", item="metadata key 'general.type'",
                                 remedy="Run the model it was made for, with --lora for this file.")
        make = ARCHITECTURES.get(model.architecture)
        if make is None:
            raise ModelFileError(model.path, f"is {model.architecture!r}", item="metadata key 'general.architecture'",
                                 expected=f"one of {', '.join(ARCHITECTURES)}")
        return make

    def assembly(self, model: SourceModel, reference: str | None = None, options: Options | None = None) -> str:
        """The model as assembly text."""
        return self.compiler(model)(model.file, reference or str(model.path.resolve()), options or self.options,
                                    sorted(model.tokenizer.ends))

    def embedding(self, model: SourceModel, reference: str | None = None, pooling: str | None = None,
                  normalize: bool | None = None, options: Options | None = None) -> str:
        """A program that streams vectors of texts, as assembly text.  pooling, normalize: None, as the model says."""
        make = EMBEDDERS.get(model.architecture)
        if make is None:
            raise ModelFileError(model.path, f"is {model.architecture!r}", item="metadata key 'general.architecture'",
                                 expected=f"one that gives vectors: {', '.join(EMBEDDERS)}")
        return make(model.file, reference or str(model.path.resolve()), options or self.options,
                    Pooling.of(model.file, model.architecture, pooling, normalize))

    def program(self, model: SourceModel, reference: str | None = None, options: Options | None = None) -> Any:
        """The model as a `Program`."""
        from m3jit.frontend import assemble
        return assemble(self.assembly(model, reference, options), f"{model.path.stem}.m3asm")

    def compile(self, model: SourceModel) -> bytes:
        return self.program(model).to_bytes()
