"""The architectures that m3jit compiles: the name in a file -> what writes the program.

An entry is a function (source, reference, options, ends) -> assembly text (`program.Compiler`).  Models that generate
text are classes whose instances say sizes, tensors and one layer; `program.generation` makes the function.
"""
from __future__ import annotations

from m3jit.models.architectures.llama import Llama
from m3jit.models.program import Compiler, generation

ARCHITECTURES: dict[str, Compiler] = {
    "llama": generation(Llama),
}
