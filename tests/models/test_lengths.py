"""Prompt lengths are symbolic: code is compiled for one row and for several, and for nothing else as the text grows."""
from __future__ import annotations

import numpy as np

import m3jit
from m3jit.models.program import Options
from m3jit.models.provider import Models


def test_no_prompt_length_compiles_anything_new():
    models = Models(Options(max_tokens=3))
    model = models.load("default")
    program = models.program(model)
    limit = model.info("context")

    def regions(length: int) -> int:
        """Compiled variants of the program's entry points after a run with such a prompt."""
        vm = m3jit.VM(program, backend="cpu", threads=1, models=models)
        vm.push_input(np.arange(1, length + 1, dtype=np.int64) % 250 + 1)
        assert len(list(vm.output())) > 0
        points = next(iter(program.__dict__["_compiled_regions"].values()))[1]
        return sum(len(p.variants) for p in points.values())
    regions(1)                                   # a prompt of one row
    regions(2)                                   # of several
    first = regions(65)                          # of several, with one left over for the last chunk
    assert first >= 3
    for length in (3, 7, 63, 64, 66, 127, 128, 129, 200, limit - 3):
        assert regions(length) == first, length
