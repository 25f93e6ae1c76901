"""Capability bits of the container's REQUIRED and OPTIONAL masks.

REQUIRED bits follow from the program's text (the verifier checks that they are exactly those); a bit this machine
does not know refuses the file by number, a known one it lacks by name.  OPTIONAL bits are advice and never refuse.
"""
from __future__ import annotations

import enum


class Capability(enum.IntFlag):
    """What a program needs from the machine that runs it."""
    ESCAPE = 1 << 0                # holds ESCAPE frames that may not be skipped
    DUAL_MODE = 1 << 1             # holds 64-byte frames
    LAMPORT = 1 << 2               # a frame carries a logical time
    DEADLINE = 1 << 3              # a frame carries an absolute deadline
    PROVISIONAL = 1 << 40          # uses an opcode whose encoding is not final


SUPPORTED = Capability.ESCAPE | Capability.DUAL_MODE | Capability.LAMPORT | Capability.DEADLINE | Capability.PROVISIONAL


def names(mask: int) -> list[str]:
    """Names of the bits of a mask; a bit without a name is `bit N`."""
    known = {c.value: c.name or "" for c in Capability}
    return [known.get(1 << b, f"bit {b}") for b in range(64) if mask >> b & 1]
