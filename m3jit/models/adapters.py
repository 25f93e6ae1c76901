"""Low-rank adapters (LoRA; Hu et al. 2021) beside a model: files, checks, and the lines that apply them.

An adapter holds for some matrices W [N, K] of a model a pair a [rank, K], b [N, rank]; with it the model computes
    x W^T + scale alpha / rank (x a^T) b^T            (alpha 0 or missing: scale alone)
scale is the user's.  For the table of token embeddings a [vocabulary, rank] and b [width, rank]: rows of a times b^T.
GGUF files: general.type = "adapter", adapter.type = "lora", adapter.lora.alpha, tensors `W.lora_a` and `W.lora_b`.
Folders of PEFT's format answer with the same keys and names (`peft_folder.py`).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m3jit.models.model_error import ModelFileError
from m3jit.models.model_source import BLOCK_TYPES, FLOAT_TYPES, ONE_OF_THE_TYPES, Source

if TYPE_CHECKING:
    from m3jit.models.program import Writer

A, B = ".lora_a", ".lora_b"
EMBEDDING = "token_embd.weight"
# Architectures whose GGUF files have the rows of Wq and Wk in the order of rotary pairs (2i, 2i + 1), and those whose
# files keep the order of the models they were made from.
REORDERED = ("llama",)
SAME_ROWS = ("qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "olmo2", "bitnet", "deepseek2")


@dataclass(frozen=True)
class Adapter:
    """An adapter to apply.  reference: how programs name its file; scale: times alpha / rank."""
    source: Source
    reference: str
    scale: float = 1.0

    def scale_of(self, name: str) -> float:
        """What the product with the pair of matrix `name` is multiplied by."""
        alpha = self.source.value("adapter.lora.alpha", float, default=0.0)
        rank = self.source.tensor(name + B).shape[1]
        return self.scale * alpha / rank if alpha else self.scale

    def has(self, name: str) -> bool:
        return name + A in self.source.tensors

    def b_name(self, name: str, model: Source) -> str:
        """The tensor b of matrix `name`, with its rows in the model's order.

        ModelFileError: that order is not known."""
        part = name.split(".")[-2]
        if getattr(self.source, "rope_pairing", None) is None or getattr(model, "rope_pairing", None) is not None or \
                part not in ("attn_q", "attn_k"):
            return name + B
        architecture = model.value("general.architecture", str)
        if architecture in SAME_ROWS:
            return name + B
        if architecture not in REORDERED:
            problem = f"is for a {architecture} model in a GGUF file, whose rows may have another order"
            raise ModelFileError(self.source.path, problem, item=f"tensor {name + B!r}",
                                 expected="a GGUF adapter, or the model as a folder")
        heads = model.value(f"{architecture}.attention.head_count", int)
        if part == "attn_k":
            heads = model.value(f"{architecture}.attention.head_count_kv", int, default=heads)
        return f"{name}{B}.pairs{heads}"


def is_adapter(source: Source) -> bool:
    return source.metadata.get("general.type") == "adapter"


def check_adapter(adapter: Adapter, model: Source) -> None:
    """Every tensor of the adapter belongs to a matrix of the model and has the shape it needs.

    ModelFileError: another kind of file or architecture, a tensor without partner or place, a shape that differs."""
    source = adapter.source
    architecture = model.value("general.architecture", str)
    for key, want in (("general.type", "adapter"), ("adapter.type", "lora"), ("general.architecture", architecture)):
        found = source.value(key, str, default="missing")
        if found != want and found:                        # PEFT's folders do not say which architecture they are for
            raise ModelFileError(source.path, f"is {found}" if found == "missing" else f"is {found!r}",
                                 item=f"metadata key {key!r}", expected=repr(want))
    if "adapter.alora.invocation_tokens" in source.metadata:
        raise ModelFileError(source.path, "is there", item="metadata key 'adapter.alora.invocation_tokens'",
                             expected="an adapter that applies to every token")
    for name, info in source.tensors.items():
        base = name.removesuffix(A).removesuffix(B)
        other = base + (B if name.endswith(A) else A)
        if base == name or other not in source.tensors:
            problem = f"has no partner {other!r}" if base != name else "belongs to no pair"
            raise ModelFileError(source.path, problem, item=f"tensor {name!r}",
                                 expected=f"names that end in {A} and {B}")
        if info.ggml_type.name not in BLOCK_TYPES | FLOAT_TYPES:
            raise ModelFileError(source.path, f"has type {info.ggml_type.name}", item=f"tensor {name!r}",
                                 expected=ONE_OF_THE_TYPES)
        if name.endswith(A):
            _check_pair(source, base, model)


def _check_pair(source: Source, base: str, model: Source) -> None:
    a, b = (tuple(source.tensor(base + suffix).shape) for suffix in (A, B))
    if base not in model.tensors:
        raise ModelFileError(source.path, f"is for tensor {base!r}, which {model.path} does not have",
                             item=f"tensor {base + A!r}", expected="an adapter made for this model")
    shape = tuple(model.tensors[base].shape)
    if len(shape) != 2:
        raise ModelFileError(source.path, f"is for a tensor of shape {list(shape)}", item=f"tensor {base + A!r}",
                             expected="pairs for matrices; experts and vectors take no adapter here")
    n, k = shape
    rank = a[-1] if base == EMBEDDING else a[0]
    want = ((n, rank), (k, rank)) if base == EMBEDDING else ((rank, k), (n, rank))
    for found, expected, suffix in ((a, want[0], A), (b, want[1], B)):
        if found != expected:
            raise ModelFileError(source.path, f"has shape {list(found)}", item=f"tensor {base + suffix!r}",
                                 expected=f"shape {list(expected)}, for {base} {list(shape)} of {model.path}")


class Adapted:
    """The adapters of a program: writes what they add, and knows which of their pairs were used."""

    def __init__(self, adapters: tuple[Adapter, ...], model: Source):
        for adapter in adapters:
            check_adapter(adapter, model)
        self.adapters, self.model = adapters, model
        self.used: set[tuple[int, str]] = set()

    def declare(self, w: "Writer") -> None:
        for i, adapter in enumerate(self.adapters):
            w(f'.model lora_{i} "{adapter.reference}"')

    def of(self, name: str) -> list[tuple[int, Adapter]]:
        return [(i, adapter) for i, adapter in enumerate(self.adapters) if adapter.has(name)]

    def product(self, w: "Writer", rd: str, x: str, name: str) -> None:
        """rd = x times weight `name`, whose value is in rW, with all its adapters; those after the first are added in
        their order."""
        if name == EMBEDDING:
            raise ModelFileError(self.of(name)[0][1].source.path, "is for the embeddings, which are also the output "
                                 "matrix of this model", item=f"tensor {name + A!r}",
                                 expected="a model with an output.weight of its own")
        first, *others = self.of(name)
        for n, (i, adapter) in enumerate(others):
            self._load(w, i, name)
            w(f"MATVEC rMore{n}, {x}, rLoraA TRANSPOSE")
            w(f"MATVEC rMore{n}, rMore{n}, rLoraB TRANSPOSE")
            w(f"LOADI rScale, {adapter.scale_of(name)!r}")
            w(f"MUL rMore{n}, rMore{n}, rScale")
        i, adapter = first
        self._load(w, i, name)
        w(f"LORA_APPLY {rd}, {x}, rW, rLoraA, rLoraB SCALE={adapter.scale_of(name)!r} {w.precision(name)}")
        for n in range(len(others)):
            w(f"ADD {rd}, {rd}, rMore{n}")

    def embedding(self, w: "Writer", rd: str) -> None:
        """rd += what the adapters add to the embeddings of rIds."""
        for i, adapter in self.of(EMBEDDING):
            self._load(w, i, EMBEDDING)
            w("EMBED rMore0, rIds, rLoraA")
            w("MATVEC rMore0, rMore0, rLoraB TRANSPOSE")
            w(f"LOADI rScale, {adapter.scale_of(EMBEDDING)!r}")
            w("MUL rMore0, rMore0, rScale")
            w(f"ADD {rd}, {rd}, rMore0")

    def _load(self, w: "Writer", i: int, name: str) -> None:
        self.used.add((i, name))
        w(f"LOADI rLoraA, @lora_{i}:{name}{A}")
        w(f"LOADI rLoraB, @lora_{i}:{self.adapters[i].b_name(name, self.model)}")

    def check_used(self, but: tuple[str, ...] = ()) -> None:
        """ModelFileError for a pair that the program does not apply: nothing of an adapter is left out silently.

        but: matrices that what the program gives does not depend on."""
        for i, adapter in enumerate(self.adapters):
            for name in (n.removesuffix(A) for n in adapter.source.tensors if n.endswith(A)):
                if (i, name) not in self.used and name not in but:
                    problem = "is for a matrix that programs of this architecture use in a way no adapter fits"
                    raise ModelFileError(adapter.source.path, problem, item=f"tensor {name + A!r}",
                                         expected="pairs for the matrices of plain products")
