"""Where a context stands that Ctrl-C stopped."""
from __future__ import annotations

from typing import Any, NamedTuple

from m3jit.vm.context import Context
from m3jit.vm.image import Image

OUTSIDE = frozenset({"output", "files"})                 # what an instruction that writes outside of the machine writes


class BrokenOff(NamedTuple):
    """Where a context stands that Ctrl-C (KeyboardInterrupt) stopped.  pc, line: of the instruction that it came in
    (the first one of compiled code); done: whether that has taken effect, all of it; goes_on, next_line: of the
    instruction that is next; retired: instructions that it has completed; outside: it is one that writes outside of the
    machine (STREAM, CHECKPOINT_SAVE, PERSIST), and what it wrote before it was stopped stays."""
    context: int
    pc: int
    line: tuple[str, int] | None
    done: bool
    goes_on: int
    next_line: tuple[str, int] | None
    retired: int
    outside: bool = False

    def __str__(self) -> str:
        effect = "has taken effect" if self.done else "has not taken effect" if not self.outside else \
            "has not taken effect, but may have written outside of the machine, and will again"

        def at(pc: int, line: tuple[str, int] | None) -> str:
            return f"pc 0x{pc:04x}" + (f" ({line[0]}:{line[1]})" if line else "")
        return (f"context {self.context} was stopped in the instruction at {at(self.pc, self.line)}, which {effect}; "
                f"it goes on at {at(self.goes_on, self.next_line)}, {self.retired} instructions are done")


def broken_off(image: Image, ctx: Context, index: int, done: bool) -> BrokenOff:
    """Where a context of a program stands that was stopped in instruction `index`."""
    def at(i: int) -> tuple[int, Any]:
        pc = image.pcs[i] if i < len(image.pcs) else len(image.text)
        return pc, image.line(pc) if i < len(image.pcs) else None
    ins = image.instructions[index] if index < len(image.pcs) else None
    outside = ins is not None and (not OUTSIDE.isdisjoint(ins.op.writes) or bool(ins.args.get("persist")))
    return BrokenOff(ctx.id, *at(index), done, *at(ctx.index), ctx.retired, outside)
