"""Hashes of byte strings that HASH and CHECKSUM give."""
from __future__ import annotations

import zlib

FNV_OFFSET, FNV_PRIME, MASK64 = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


def fnv1a64(data: bytes) -> int:
    """FNV-1a, 64 bits, as a signed integer: h = (h xor byte) * prime for each byte."""
    h = FNV_OFFSET
    for byte in data:
        h = (h ^ byte) * FNV_PRIME & MASK64
    return h - (1 << 64) if h >> 63 else h


def crc32(data: bytes) -> int:
    """CRC-32 (IEEE 802.3), 0 .. 2^32 - 1."""
    return zlib.crc32(data)
