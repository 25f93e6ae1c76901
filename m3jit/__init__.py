"""m3jit: a JIT-compiling virtual machine for M³-AVM bytecode.

    import m3jit

    program = m3jit.assemble(text)               m3jit.load("model.m3b")         m3jit.Builder() writes one in Python
    f = m3jit.compile(program, inputs=["rX"], outputs=["rZ"])                    a function on NumPy arrays
    vm = m3jit.VM(program).run()                                                 full control: registers, streams, forks
    for piece in m3jit.load_model("default").generate("Emma was"): ...           text from a language model

Names load their part of the package on first use: importing m3jit itself loads no code generator, driver or tokeniser.
"""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from m3jit.api.compile import compile, load
    from m3jit.api.builder import Builder, BuilderError
    from m3jit.api.compiled import CompiledProgram
    from m3jit.errors import (Deadlock, InternalError, Interrupted, LimitError, M3Error, SinkClosed, StreamError, Trap,
                              UnsupportedError, UserError)
    from m3jit.api.embedding import Embedder, load_embedder
    from m3jit.api.extending import extension
    from m3jit.api.checkpoints import EverySentence, EveryToken, EveryTokens
    from m3jit.api.conversation import Conversation
    from m3jit.api.generation import Generation, LanguageModel, load_model
    from m3jit.api.recorded import RecordedConversation, RecordedSession
    from m3jit.api.session import ContextFull, Session
    from m3jit.durable import Checkpoints, DamagedStore, Store, StoreError
    from m3jit.frontend import (AssemblyError, ContainerError, LinkError, Program, assemble, assemble_file, disassemble,
                                link, verify)
    from m3jit.isa.types import Tensor
    from m3jit.models.grammar import Grammar
    from m3jit.vm.batch import Batch
    from m3jit.vm.vm import VM

_HOME = {
    "m3jit.api.compile": ("compile", "load"),
    "m3jit.api.builder": ("Builder", "BuilderError"),
    "m3jit.api.compiled": ("CompiledProgram",),
    "m3jit.errors": ("Deadlock", "InternalError", "Interrupted", "LimitError", "M3Error", "SinkClosed", "StreamError",
                     "Trap", "UnsupportedError", "UserError"),
    "m3jit.api.embedding": ("Embedder", "load_embedder"),
    "m3jit.api.extending": ("extension",),
    "m3jit.api.checkpoints": ("EverySentence", "EveryToken", "EveryTokens"),
    "m3jit.api.conversation": ("Conversation",),
    "m3jit.api.generation": ("Generation", "LanguageModel", "load_model"),
    "m3jit.api.recorded": ("RecordedConversation", "RecordedSession"),
    "m3jit.api.session": ("ContextFull", "Session"),
    "m3jit.durable": ("Checkpoints", "DamagedStore", "Store", "StoreError"),
    "m3jit.frontend": ("AssemblyError", "ContainerError", "LinkError", "Program", "assemble", "assemble_file",
                       "disassemble", "link", "verify"),
    "m3jit.isa.types": ("Tensor",),
    "m3jit.models.grammar": ("Grammar",),
    "m3jit.vm.batch": ("Batch",),
    "m3jit.vm.vm": ("VM",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["AssemblyError", "Batch", "Builder", "BuilderError", "Checkpoints", "CompiledProgram", "ContainerError",
           "ContextFull", "Conversation", "DamagedStore", "Deadlock", "Embedder", "EverySentence", "EveryToken",
           "EveryTokens", "Generation", "Grammar", "InternalError", "Interrupted", "LanguageModel", "LimitError",
           "LinkError", "M3Error", "Program", "RecordedConversation", "RecordedSession", "Session", "SinkClosed",
           "Store", "StoreError", "StreamError", "Tensor", "Trap", "UnsupportedError", "UserError", "VM",
           "__version__", "assemble", "assemble_file", "compile", "disassemble", "extension", "link", "load",
           "load_embedder", "load_model", "verify"]


class _Checkout:
    """Finds `m3jit.kernels` in a checkout, where it is the folder `kernels` beside this package; installing puts it
    inside. So Python that runs in a checkout, whose `m3jit` comes before an installed one, has all of it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "m3jit.kernels":
            return None
        from importlib.util import spec_from_file_location
        from os.path import abspath, dirname, isfile, join
        folder = join(dirname(dirname(abspath(__file__))), "kernels")
        first = join(folder, "__init__.py")
        return spec_from_file_location(name, first, submodule_search_locations=[folder]) if isfile(first) else None


sys.meta_path.append(_Checkout)     # the last: an installed package, also an editable one, is found before


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for (PEP 562)."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'm3jit' has no attribute {name!r}")
    from importlib import import_module
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
