"""A region compiled for one set of argument types, and what is bound to one set of dimensions."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

from m3jit.ir.region import Weight
from m3jit.ir.tensor import Function, Sym, Type, eval_dim
from m3jit.vm.native import CompiledRegion

SMALL_BYTES = 1 << 17           # regions that touch less run on the calling thread: waking a worker costs more


@dataclass(eq=False)
class Variant:
    """A region compiled for some types.  done: numbers of the exits at the program's end."""
    types: tuple[Type | None, ...]
    function: Function
    region: Any
    native: Any
    pointer_of_weight: Callable[[Weight, str], int]
    work: list[Any]                                     # dimensions whose sum is the bytes one pass touches
    done: list[int]
    polls: set[int]
    frames: dict[int, CompiledRegion] = field(default_factory=dict)

    def compiled(self, threads: int) -> CompiledRegion:
        """The region with frames for that many threads."""
        if threads not in self.frames:
            self.frames[threads] = CompiledRegion(self.region, self.native, self.pointer_of_weight, threads)
        return self.frames[threads]

    def threads_for(self, syms: dict[Sym, int], most: int) -> int:
        """Threads worth waking for these dimensions, `most` at most."""
        return 1 if sum(eval_dim(d, syms) for d in self.work) < SMALL_BYTES else most

    def given(self, outputs: Sequence[Any]) -> dict[int, int]:
        """Output words that may be computed into the caller's memory: word -> position among `outputs` (keys)."""
        if len(self.done) != 1:
            return {}
        found: dict[int, int] = {}
        stores = {s.key: s for s in self.region.exits[self.done[0]].stores}
        for i, key in enumerate(outputs):
            s = stores.get(key)
            if s is not None and s.how == "tensor":
                found.setdefault(s.word, i)
        return found


@dataclass
class Call:
    """What the table holds for one set of dtypes and shapes."""
    run: Callable[..., Any]
    note: str
    arena: int = 0
    left: int = 0                   # runs that left compiled code and were done by the interpreter
