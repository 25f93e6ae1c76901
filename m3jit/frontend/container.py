"""The `.m3b` container, byte by byte; every byte of a file is checked.

    0   magic 89 4D 33 42 ("M3B")     4  u16 major   6  u16 minor
    8   u64 REQUIRED mask            16  u64 OPTIONAL mask
    24  u64 file length              32  u64 entry (offset in TEXT)
    40  u32 number of sections       44  u32 zero
    48  u64 zero                     56  u64 xxHash64 (seed 0) of bytes 0..55 and the section table
    64  section table: for each u32 kind, u32 zero, u64 offset, u64 length, u64 xxHash64 of its bytes
    ..  sections in order of kind, each at a multiple of 64, the gaps zero

Sections (little-endian; `str` = u32 length and UTF-8 bytes): TEXT 1 frames; DATA 2 bytes; SYMBOLS 3: u32 count, then
each u8 kind, u8 exported, u16 zero, u32 scope, u64 value, u64 size, u32 dtype, u8 rank, u32 x rank, str name, str text,
u8 params, str x params; RELOCS 4: u32 count, then each u8 section, u8 kind, u16 zero, u32 symbol, u64 offset, i64
addend; LINES 5: u32 files, str x files, u32 count, then each u32 pc, u32 file, u32 line; IMPORTS 6: u32 count, then str
path, str namespace; META 7: u32 count, then str key, str value, keys ascending.  An empty section is left out.

Version: the major must match, a lower minor is read, a higher one refused.
"""
from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Callable, NoReturn

import xxhash

from m3jit.frontend.errors import ContainerError
from m3jit.frontend.records import Import, Line, Reloc, RelocKind, Symbol, SymbolKind
from m3jit.isa.capabilities import SUPPORTED, names

if TYPE_CHECKING:
    from m3jit.frontend.program import Program

MAGIC = b"\x89M3B"
MAJOR, MINOR = 1, 0
HEADER, ENTRY = 64, 32
ALIGN = 64
SECTIONS = {1: "TEXT", 2: "DATA", 3: "SYMBOLS", 4: "RELOCS", 5: "LINES", 6: "IMPORTS", 7: "META"}

MAX_FILE = 1 << 31                 # bytes; each limit is checked before anything of that size is made
MAX_TEXT = 8 << 20
MAX_DATA = 1 << 30
MAX_TABLE = 16 << 20               # any other section
MAX_STRING = 1 << 16
MAX_PARAMS = 12


# -- writing ------------------------------------------------------------------------------------------------------

def write(p: "Program") -> bytes:
    """The file of a program."""
    bodies = {1: p.text, 2: p.data, 3: _symbols(p.symbols), 4: _relocs(p.relocs), 5: _lines(p.lines),
              6: _imports(p.imports), 7: _meta(p.meta)}
    bodies = {k: b for k, b in bodies.items() if b}
    for kind, body in bodies.items():
        limit = {1: MAX_TEXT, 2: MAX_DATA}.get(kind, MAX_TABLE)
        if len(body) > limit:
            raise ContainerError(p.name, 0, f"{SECTIONS[kind]} would have {len(body)} bytes; {limit} are allowed")
    at = HEADER + ENTRY * len(bodies)
    table, out = b"", []
    for kind, body in bodies.items():
        gap = -at % ALIGN
        at += gap
        table += struct.pack("<IIQQQ", kind, 0, at, len(body), xxhash.xxh64_intdigest(body, seed=0))
        out += [bytes(gap), body]
        at += len(body)
    head = MAGIC + struct.pack("<HHQQQQIIQ", MAJOR, MINOR, p.required, p.optional, at, p.entry, len(bodies), 0, 0)
    check = xxhash.xxh64_intdigest(head + table, seed=0)
    return b"".join([head, check.to_bytes(8, "little"), table, *out])


def _str(text: str) -> bytes:
    raw = text.encode("utf-8")
    if len(raw) > MAX_STRING:
        raise ContainerError("<program>", 0, f"a name of {len(raw)} bytes; {MAX_STRING} are allowed")
    return struct.pack("<I", len(raw)) + raw


def _symbols(symbols: list[Symbol]) -> bytes:
    if not symbols:
        return b""
    out = [struct.pack("<I", len(symbols))]
    for s in symbols:
        out.append(struct.pack(f"<BBHIQQIB{len(s.shape)}I", s.kind, s.exported, 0, s.scope, s.value, s.size, s.dtype,
                               len(s.shape), *s.shape))
        out += [_str(s.name), _str(s.text), bytes([len(s.params)]), *(_str(p) for p in s.params)]
    return b"".join(out)


def _relocs(relocs: list[Reloc]) -> bytes:
    if not relocs:
        return b""
    return struct.pack("<I", len(relocs)) + b"".join(
        struct.pack("<BBHIQq", 1 if r.section == "TEXT" else 2, r.kind, 0, r.symbol, r.offset,
                    r.addend) for r in relocs)


def _lines(lines: list[Line]) -> bytes:
    if not lines:
        return b""
    files = list(dict.fromkeys(e.file for e in lines))
    index = {f: i for i, f in enumerate(files)}
    return b"".join([struct.pack("<I", len(files)), *(_str(f) for f in files), struct.pack("<I", len(lines)),
                     *(struct.pack("<III", e.pc, index[e.file], e.line) for e in lines)])


def _imports(imports: list[Import]) -> bytes:
    if not imports:
        return b""
    return struct.pack("<I", len(imports)) + b"".join(_str(i.path) + _str(i.namespace) for i in imports)


def _meta(meta: dict[str, str]) -> bytes:
    if not meta:
        return b""
    return struct.pack("<I", len(meta)) + b"".join(_str(k) + _str(meta[k]) for k in sorted(meta))


# -- reading ------------------------------------------------------------------------------------------------------

class _Reader:
    """A cursor over one section; every read is checked.  `base`: the section's place in the file."""

    def __init__(self, data: memoryview, base: int, file: str, section: str):
        self.data, self.base, self.file, self.section, self.at = data, base, file, section, 0

    def fail(self, message: str) -> NoReturn:
        raise ContainerError(self.file, self.base + self.at, f"{self.section}: {message}")

    def unpack(self, fmt: str) -> tuple:
        n = struct.calcsize(fmt)
        if n > len(self.data) - self.at:
            self.fail(f"{n} bytes expected, {len(self.data) - self.at} are left")
        out = struct.unpack_from(fmt, self.data, self.at)
        self.at += n
        return out

    def count(self, least: int) -> int:
        """A u32 count of records of at least that many bytes."""
        (n,) = self.unpack("<I")
        if n * least > len(self.data) - self.at:
            self.fail(f"{n} records of at least {least} bytes do not fit the {len(self.data) - self.at} bytes left")
        if not n:
            self.fail("an empty table; it must be left out")
        return n

    def string(self) -> str:
        (n,) = self.unpack("<I")
        if n > MAX_STRING or n > len(self.data) - self.at:
            self.fail(f"a string of {n} bytes; at most {min(MAX_STRING, len(self.data) - self.at)} can stand here")
        try:
            text = str(self.data[self.at:self.at + n], "utf-8")
        except UnicodeDecodeError:
            self.fail("a string that is not UTF-8")
        self.at += n
        return text

    def zero(self, value: int, what: str) -> None:
        if value:
            self.fail(f"{what} is {value}, it must be zero")

    def end(self) -> None:
        if self.at != len(self.data):
            self.fail(f"{len(self.data) - self.at} bytes after the last record")


def read(data: bytes, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The fields of the `Program` in a file, and where in it each section starts.  ContainerError."""
    fields, sections = _header(data, name)
    places = {}
    for kind, (at, body) in _table(data, name, sections).items():
        section = SECTIONS[kind]
        places[section] = at
        if kind in _PARSERS:
            r = _Reader(body, at, name, section)
            fields[section.lower()] = _PARSERS[kind](r)
            r.end()
        else:
            fields[section.lower()] = bytes(body)
    return fields, places


def _header(data: bytes, name: str) -> tuple[dict[str, Any], int]:
    """Fields of the program that stand in the header, and the number of sections."""
    if data[:4] != MAGIC:
        raise ContainerError(name, 0, "not a program: it does not start with the magic 89 4D 33 42")
    if len(data) < HEADER:
        raise ContainerError(name, len(data), f"the header has {HEADER} bytes, the file has {len(data)}")
    if len(data) > MAX_FILE:
        raise ContainerError(name, 0, f"a file of {len(data)} bytes; {MAX_FILE} are allowed")
    major, minor, required, optional, length, entry, sections, zero, zero2 = struct.unpack_from("<HHQQQQIIQ", data, 4)
    if major != MAJOR or minor > MINOR:
        raise ContainerError(name, 4, f"container version {major}.{minor}; this m3jit reads {MAJOR}.0 "
                             f"to {MAJOR}.{MINOR}")
    if length != len(data):
        raise ContainerError(name, 24, f"the header says {length} bytes, the file has {len(data)}")
    if sections > len(SECTIONS):
        raise ContainerError(name, 40, f"{sections} sections; there are {len(SECTIONS)} kinds")
    end = HEADER + ENTRY * sections
    if end > len(data):
        raise ContainerError(name, 40, f"a table of {sections} sections ends at {end}, the file at {len(data)}")
    stored = int.from_bytes(data[56:64], "little")
    if xxhash.xxh64_intdigest(data[:56] + data[64:end], seed=0) != stored:
        raise ContainerError(name, 56, "the checksum of the header does not match; the file is damaged")
    if zero or zero2:
        raise ContainerError(name, 44, "reserved header bytes are not zero")
    unknown = required & ~int(SUPPORTED)
    if unknown:
        raise ContainerError(name, 8, f"the program requires {', '.join(names(unknown))}, which this m3jit does not "
                             "have; "
                             "a newer version may")
    return {"name": name, "required": required, "optional": optional, "entry": entry}, sections


def _table(data: bytes, name: str, sections: int) -> dict[int, tuple[int, memoryview]]:
    view, out = memoryview(data), {}
    at, previous = HEADER + ENTRY * sections, 0
    for i in range(sections):
        place = HEADER + ENTRY * i
        kind, zero, offset, length, check = struct.unpack_from("<IIQQQ", data, place)
        if kind not in SECTIONS or kind <= previous or zero:
            raise ContainerError(name, place, f"section kind {kind} after {previous}; kinds ascend and are at most "
                                 f"{max(SECTIONS)}")
        want = at + -at % ALIGN
        if offset != want or length > len(data) - offset or not length:
            raise ContainerError(name, place + 8, f"{SECTIONS[kind]} at {offset} with {length} bytes; it must start at "
                                 f"{want}, hold something and end within the file's {len(data)} bytes")
        limit = {1: MAX_TEXT, 2: MAX_DATA}.get(kind, MAX_TABLE)
        if length > limit:
            raise ContainerError(name, place + 16, f"{SECTIONS[kind]} has {length} bytes; {limit} are allowed")
        if any(view[at:offset]):
            raise ContainerError(name, at, f"the gap before {SECTIONS[kind]} is not zero")
        body = view[offset:offset + length]
        if xxhash.xxh64_intdigest(body, seed=0) != check:
            raise ContainerError(name, offset, f"the checksum of {SECTIONS[kind]} does not match; the file is damaged")
        out[kind] = (offset, body)
        at, previous = offset + length, kind
    if at != len(data):
        raise ContainerError(name, at, f"{len(data) - at} bytes after the last section")
    return out


def _read_symbols(r: _Reader) -> list[Symbol]:
    out = []
    for _ in range(r.count(38)):
        kind, exported, zero, scope, value, size, dtype, rank = r.unpack("<BBHIQQIB")
        r.zero(zero, "a reserved field")
        if kind not in SymbolKind._value2member_map_ or exported > 1 or rank > 5:
            r.fail(f"a symbol of kind {kind}, exported {exported}, rank {rank}")
        shape = r.unpack(f"<{rank}I")
        name, text = r.string(), r.string()
        (params,) = r.unpack("<B")
        if params > MAX_PARAMS:
            r.fail(f"{params} parameters; {MAX_PARAMS} are allowed")
        out.append(Symbol(SymbolKind(kind), name, value, size, dtype, shape, text,
                          tuple(r.string() for _ in range(params)), bool(exported), scope))
    return out


def _read_relocs(r: _Reader) -> list[Reloc]:
    out = []
    for _ in range(r.count(24)):
        section, kind, zero, symbol, offset, addend = r.unpack("<BBHIQq")
        r.zero(zero, "a reserved field")
        if section not in (1, 2) or kind not in RelocKind._value2member_map_:
            r.fail(f"a relocation of kind {kind} in section {section}")
        out.append(Reloc(SECTIONS[section], offset, RelocKind(kind), symbol, addend))
    return out


def _read_lines(r: _Reader) -> list[Line]:
    files = [r.string() for _ in range(r.count(4))]
    out = []
    for _ in range(r.count(12)):
        pc, file, line = r.unpack("<III")
        if file >= len(files):
            r.fail(f"file number {file}; there are {len(files)}")
        out.append(Line(pc, files[file], line))
    if list(dict.fromkeys(e.file for e in out)) != files:
        r.fail("the files are not in order of first use")
    return out


def _read_imports(r: _Reader) -> list[Import]:
    return [Import(r.string(), r.string()) for _ in range(r.count(8))]


def _read_meta(r: _Reader) -> dict[str, str]:
    out: dict[str, str] = {}
    last = None
    for _ in range(r.count(8)):
        key, value = r.string(), r.string()
        if last is not None and key <= last:
            r.fail(f"key {key!r} after {last!r}; keys ascend")
        out[key] = value
        last = key
    return out


_PARSERS: dict[int, Callable[[_Reader], Any]] = {3: _read_symbols, 4: _read_relocs, 5: _read_lines, 6: _read_imports,
                                                 7: _read_meta}
