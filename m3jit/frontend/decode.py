"""TEXT to instructions."""
from __future__ import annotations

from m3jit.isa.fields import EncodingError
from m3jit.isa.table import Instruction, decode, load_table


def decode_text(text: bytes) -> list[tuple[int, Instruction]]:
    """Every instruction with its pc.  EncodingError names the pc of the first frame that is not one."""
    load_table()
    out, pc = [], 0
    while pc < len(text):
        try:
            ins = decode(text, pc)
        except EncodingError as e:
            raise EncodingError(f"at 0x{pc:04x}: {e}") from None
        out.append((pc, ins))
        pc += ins.size
    return out
