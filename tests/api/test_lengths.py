"""One compiled function called with many lengths: whatever a variant assumed about dimensions is guarded, so results
(or traps) are those of the interpreter."""
from __future__ import annotations

import os
import random
from typing import Any

import pytest

from m3jit import M3Error
from tests.api.outcomes import exact
from tests.api.random_items import Item, Program, array
from tests.api.random_programs import generate

COUNT = int(os.environ.get("M3JIT_LENGTHS", "25"))
PLAIN = {"unary", "binary", "clip", "softmax", "reduce", "argmax", "sort", "topk", "reshape", "slice", "concat",
         "broadcast", "pad", "tile", "transpose", "gather", "cast", "norm", "sanity", "dim", "element", "scaled",
         "scalars"}


def resized(p: Program, rng: random.Random) -> list[Any]:
    """Arguments with other first dimensions, the same for equal ones, and now and then another last one."""
    sizes: dict[int, int] = {}
    out = []
    for item, value in zip(p.inputs, p.arguments):
        if item.kind != "tensor":
            out.append(value)
            continue
        shape = list(item.shape or ())
        if shape:
            d = shape[0]
            shape[0] = sizes.setdefault(d, rng.choice((d, d + 1, 2 * d, max(2, d - 1), 1, 0, 2, 3, 6, 64, 65)))
        out.append(array(rng, item.dtype, tuple(shape)))
    return out


def outcome(f: Any, args: list[Any]) -> Any:
    try:
        result = f(*args)
    except M3Error as e:
        return type(e).__name__, str(e)
    return [exact(v) for v in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize("seed", range(COUNT))
def test_lengths(seed):
    rng = random.Random(f"lengths {seed}")
    p = generate(5000 + seed, length=rng.choice((3, 5, 8)), zero=seed % 3 == 0, only=PLAIN)
    outputs: list[Item] = [p.items[-1]] if rng.random() < 0.5 else p.items
    names = [[i.value for i in items] for items in (p.inputs, outputs)]
    f = p.builder.compile(*names, backend="cpu", threads=2)
    g = p.builder.compile(*names, backend="interpreter")
    for _ in range(12):
        args = resized(p, rng)
        want, got = outcome(g, args), outcome(f, args)
        assert got == want, f"{[getattr(a, 'shape', a) for a in args]} {p.opcodes}\n{f.report()}\n" \
            f"{str(want)[:300]}\n{str(got)[:300]}"
