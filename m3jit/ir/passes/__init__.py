"""The passes over tensor IR, in order; each is a name, one sentence and a function that changes the region in place."""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable

from m3jit.ir.passes.fuse import fuse
from m3jit.ir.passes.peephole import match_patterns
from m3jit.ir.passes.simplify import eliminate_common, eliminate_dead, fold_constants, remove_trivial_parameters
from m3jit.ir.tensor import Function, IRError, verify_function


@dataclass(frozen=True)
class Pass:
    name: str
    sentence: str
    run: Callable[[Function], None]


PASSES = (
    Pass("trivial-params", "Remove block parameters that always receive the same value.", remove_trivial_parameters),
    Pass("fold", "Compute scalar operations on constants.", fold_constants),
    Pass("cse", "Keep one of several equal pure operations of a block.", eliminate_common),
    Pass("patterns", "Use kernels that compute several operations at once, with the same bytes.", match_patterns),
    Pass("dce", "Drop what nobody reads.", eliminate_dead),
    Pass("fuse", "Group elementwise chains and row reductions into one kernel each.", fuse),
)


@dataclass
class PassLog:
    """Seconds per pass, and the text before and after where asked for."""
    seconds: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    keep: frozenset[str] = frozenset()           # pass names whose result is kept as text ("all" = every)
    check: bool = False                          # verify after each pass
    stop_after: str = ""


def run_passes(f: Function, log: PassLog | None = None) -> Function:
    """Run all passes; IRError names the pass after which the IR is malformed."""
    log = log or PassLog()
    for p in PASSES:
        start = time.perf_counter()
        p.run(f)
        log.seconds[p.name] = log.seconds.get(p.name, 0.0) + time.perf_counter() - start
        if p.name in log.keep or "all" in log.keep:
            log.texts[p.name] = str(f)
        if log.check and p.name != "fuse":
            try:
                verify_function(f)
            except IRError as e:
                raise IRError(f"after pass {p.name}: {e}") from None
        if p.name == log.stop_after:
            break
    return f
