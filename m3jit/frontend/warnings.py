"""What the assembler warns about: registers nobody wrote, branches on another register than the one compared."""
from __future__ import annotations


def check(program, placed, run) -> None:
    """Filled in with the control-flow graph."""
