"""ESCAPE frames (0xB0 ESCAPE, 0xB1 ESCAPE_128, 0xB2 ESCAPE_256, 0xB3 ESCAPE_VAR): extensions.

Layout: byte 0 opcode; 1 ext_opcode; 2-3 ext_flags (bit 0: optional, may be skipped); 4-7 ext_version (u16 major,
u16 minor); 8-15 ext_len, the total length (>= 64, multiple of 8, <= 1 MiB; 128 and 256 for the fixed forms); 16-23
zero; 24-31 xxHash64 (seed 0) of bytes 0-23 and the payload; 32... payload.
"""
from __future__ import annotations

from typing import Any

import xxhash

from m3jit.isa.fields import EncodingError

MAX_ESCAPE = 1 << 20
FIXED = {0xB1: 128, 0xB2: 256}


def escape_length(code: int, payload: int) -> int:
    """Total frame length for a payload of that many bytes."""
    if code in FIXED:
        return FIXED[code]
    return max(64, 32 + (payload + 7) // 8 * 8)


def encode_escape(ins) -> bytes:
    a = ins.args
    code = ins.op.code
    total = escape_length(code, len(ins.tail))
    if total > MAX_ESCAPE or len(ins.tail) > total - 32:
        raise EncodingError(f"{ins.op.name}: a payload of {len(ins.tail)} bytes does not fit "
                            f"({total - 32 if code in FIXED else MAX_ESCAPE - 32} at most)")
    payload = ins.tail + bytes(total - 32 - len(ins.tail))
    for name, top in (("ext", 255), ("flags", 0xFFFF), ("version", 2 ** 32 - 1)):
        if not 0 <= a.get(name, 0) <= top:
            raise EncodingError(f"{ins.op.name}: {name}: {a[name]} is outside 0..{top}")
    head = bytes([code, a["ext"]]) + a.get("flags", 0).to_bytes(2, "little") + \
        a.get("version", 0).to_bytes(4, "little") + total.to_bytes(8, "little") + bytes(8)
    check = xxhash.xxh64_intdigest(head + payload, seed=0)
    return head + check.to_bytes(8, "little") + payload


def decode_escape(code, pc: int, name: str) -> tuple[dict[str, Any], bytes, int]:
    """Operands, payload and length of the frame at byte `pc`.  EncodingError, with the mnemonic `name`."""
    left = len(code) - pc
    if left < 64:
        raise EncodingError(f"{name}: needs at least 64 bytes, {left} are left")
    total = int.from_bytes(code[pc + 8:pc + 16], "little")
    want = FIXED.get(code[pc])
    if total % 8 or not 64 <= total <= MAX_ESCAPE or (want and total != want):
        raise EncodingError(f"{name}: length {total}; " + (f"it must be {want}" if want else
                            f"it must be a multiple of 8 from 64 to {MAX_ESCAPE}"))
    if total > left:
        raise EncodingError(f"{name}: length {total}, but {left} bytes are left")
    frame = bytes(code[pc:pc + total])
    if any(frame[16:24]):
        raise EncodingError(f"{name}: bytes 16-23 must be zero")
    check = xxhash.xxh64_intdigest(frame[:24] + frame[32:], seed=0)
    if check != int.from_bytes(frame[24:32], "little"):
        raise EncodingError(f"{name}: checksum mismatch")
    args = {"ext": frame[1], "flags": int.from_bytes(frame[2:4], "little"),
            "version": int.from_bytes(frame[4:8], "little")}
    return args, frame[32:], total
