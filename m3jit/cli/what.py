"""WHAT a command is about: a program file, a source, a model file, the name of a model, or the default model."""
from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from m3jit.errors import UserError

DEFAULT = "default"
PROGRAM_MAGIC, MODEL_MAGIC = b"\x89M3B", b"GGUF"


@dataclass
class What:
    """kind: "program", "source" or "model"; reference: the path, or the name of a model."""
    kind: str
    reference: str

    @property
    def is_default(self) -> bool:
        return self.reference == DEFAULT


class LazyModels:
    """The model provider of programs: the model libraries are imported when a program asks for its first model."""

    def __init__(self) -> None:
        self._models: Any = None

    @property
    def models(self) -> Any:
        if self._models is None:
            from m3jit.models.provider import Models
            self._models = Models()
        return self._models

    def load(self, reference: str, quant: str = "") -> Any:
        return self.models.load(reference, quant)


def find(name: str | None) -> What:
    """What a name on the command line means.  Files go before names of models; their first bytes before their suffix.

    UserError says what was looked for."""
    if name is None or name == DEFAULT and not os.path.exists(name):
        return What("model", DEFAULT)
    if os.path.isdir(name):
        if os.path.isfile(os.path.join(name, "config.json")):
            return What("model", nameable(name, "the name of a model's folder"))
        raise UserError(f"{name}: is a directory without a config.json; give a program (.m3b, .m3asm), a model file "
                        "(.gguf), a model's folder or the name of a model")
    if os.path.exists(name):
        with open(name, "rb") as file:
            start = file.read(512 if os.path.isfile(name) else 4)
        magic = start[:4]
        suffix = os.path.splitext(name)[1].lower()
        if magic == PROGRAM_MAGIC or suffix == ".m3b":
            return What("program", name)
        if magic == MODEL_MAGIC or suffix == ".gguf":
            return What("model", nameable(name, "the name of a model file"))
        if suffix == ".safetensors":
            raise UserError(f"{name}: holds weights alone; give its folder, which says what they are (config.json)")
        if b"\0" in start and suffix != ".m3asm":
            raise UserError(f"{name}: is no text, so no program's source, and no container (.m3b) or model file "
                            "(.gguf) either; models are read as .gguf files or folders with .safetensors files")
        return What("source", name)
    from m3jit.models import store
    if name in store.SOURCES:
        store.path(name)                               # says how to obtain it, when it is not there
        return What("model", name)
    from m3jit.frontend.errors import suggest
    names = [*store.SOURCES, DEFAULT]
    near = [f for f in os.listdir(os.path.dirname(name) or ".") if f.endswith((".m3b", ".m3asm", ".gguf"))] \
        if os.path.isdir(os.path.dirname(name) or ".") else []
    hint = suggest(os.path.basename(name), [*near, *names])
    raise UserError(f"{name or repr(name)}: no such file, and no model of that name (models: {', '.join(names)})"
                    + (f"; {hint}" if hint else ""))


def nameable(name: str, what: str) -> str:
    """The name, which programs can hold.  UserError when it is not UTF-8."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{name}: {what} must be UTF-8, for programs name it; rename the file") from None
    return name


def open_program(what: What, search: tuple[str, ...] = (), bound: tuple[str, ...] = ()) -> Any:
    """The program in a `.m3b` or a source file, with what it imports; warnings go to standard error.

    bound: registers the command line sets."""
    from m3jit import frontend
    if what.kind == "program":
        program = frontend.load(what.reference)
    else:
        program = frontend.assemble_file(what.reference, search)
        warn(program, bound)
    return frontend.link([program], search) if program.imports else program


def warn(program: Any, bound: tuple[str, ...] = ()) -> None:
    """A program's warnings on standard error, but for those that bound registers are not written."""
    from m3jit.cli.terminal import note
    for warning in program.warnings:
        if not any(warning.message.startswith(f"{name} is read here") for name in bound):
            note(str(warning))
