"""ESCAPE_128, ESCAPE_256 and ESCAPE_VAR: further carriers of extensions; ESCAPE itself is in the machine's family.

The fields of an ESCAPE head stand outside the payload; `m3jit.isa.escape` writes and reads the whole frame.
"""
from __future__ import annotations

import struct
from dataclasses import dataclass

from m3jit.isa.fields import Number
from m3jit.isa.table import StateDoc, op


@dataclass(frozen=True)
class HeadNumber(Number):
    """A number in an ESCAPE head, at byte `at` of the frame; the escape encoder places it."""

    def spans(self, base): return []
    def encode(self, frame, base, value): super().encode(frame, 0, value)
    def decode(self, frame, base): return struct.unpack_from("<" + self.fmt, frame, self.at)[0]


Ext, ExtFlags, ExtVersion = HeadNumber(fmt="B")[1], HeadNumber(fmt="H")[2], HeadNumber(fmt="I")[4]

EXTENSION_STATE = StateDoc("what the extension declares; a root value unless it says otherwise",
                           "O(1), part of the context root", "restored with the root")


def _carrier(code: int, name: str, length: str) -> None:
    def escape(m, ext: Ext, flags: ExtFlags = 0, version: ExtVersion = 0):
        raise NotImplementedError(name)
    escape.__doc__ = f"""An extension instruction of {length}: calls extension `ext` with the payload.

    The head holds ext_flags (bit 0: optional, skipped where the extension is unknown), ext_version (major in the low
    half, minor in the high half), the total length and the xxHash64 of head and payload.
    Errors: unknown extension without the optional flag; a length that is not allowed; a checksum that differs.
    """
    op(code, name, route="absent", syntax="escape", state=EXTENSION_STATE, source="instruction set: ESCAPE layout",
       sample={"ext": 1})(escape)


_carrier(0xB1, "ESCAPE_128", "128 bytes")
_carrier(0xB2, "ESCAPE_256", "256 bytes")
_carrier(0xB3, "ESCAPE_VAR", "64 bytes to 1 MiB, as its head says")
