"""Strings of operands in DATA: behind the named values, each once, in order of first use."""
from __future__ import annotations

from m3jit.frontend.program import Program
from m3jit.frontend.records import NO_SYMBOL, RelocKind, SymbolKind

STRING_ALIGN = 4


class StringPool:
    """known: strings that have a place already (those with a name); end: length of DATA before the pool."""

    def __init__(self, known: dict[str, int] | None = None, end: int = 0):
        self.known: dict[str, int] = {} if known is None else known
        self.end = end
        self.data = bytearray()

    def intern(self, text: str) -> int:
        """Offset in DATA of a string's length."""
        if text not in self.known:
            used = self.end + len(self.data)
            self.data += bytes(-used % STRING_ALIGN)
            self.known[text] = self.end + len(self.data)
            raw = text.encode("utf-8")
            self.data += len(raw).to_bytes(4, "little") + raw
        return self.known[text]


def named_strings(p: Program) -> dict[str, int]:
    """Each string with a name, at its first place."""
    known: dict[str, int] = {}
    for s in sorted((s for s in p.symbols if s.kind == SymbolKind.STRING), key=lambda s: s.value):
        known.setdefault(p.string(s.value), s.value)
    return known


def pool_start(p: Program) -> int | None:
    """Where the pool of a program starts, or None when DATA is not laid out as the assembler does it."""
    end = max((s.value + s.size for s in p.symbols if s.kind in (SymbolKind.DATA, SymbolKind.STRING)), default=0)
    pool = StringPool(named_strings(p), end)
    for r in p.relocs:
        if r.kind == RelocKind.STRING and r.symbol == NO_SYMBOL and pool.intern(p.string(r.addend)) != r.addend:
            return None
    return end if p.data[end:] == pool.data else None
