"""A container is read exactly, or refused: truncation, bit flips, hostile tables, capabilities."""
import random
import struct

import pytest
import xxhash

from m3jit.frontend import ContainerError, Program, assemble, load, verify
from m3jit.frontend.records import Symbol, SymbolKind
from m3jit.isa.capabilities import Capability
from m3jit.isa.table import OPS
from tests.frontend import samples

SOURCE = """
.model net "net.gguf"
.import "lib.m3b" AS lib
.data
x: .f32 [1, 2]
t: .str "text"
.text
start: LOADI rX, @x
LOADI rY, "hello"
CALL lib.f ARGS=[rX]
COMPARE rX, 5
IF_LESS rX, start
HALT
.func g(rA)
RET
"""


@pytest.fixture(scope="module")
def good() -> bytes:
    return assemble(SOURCE, "a.m3asm").to_bytes()


def refused(data: bytes) -> ContainerError:
    with pytest.raises(ContainerError) as caught:
        load(data)
    return caught.value


def test_load_from_bytes_and_file(good, tmp_path):
    (tmp_path / "a.m3b").write_bytes(good)
    p = load(tmp_path / "a.m3b")
    assert p.to_bytes() == load(good).to_bytes() == good
    assert p.name.endswith("a.m3b") and verify(p) == []


def test_truncation_at_every_byte(good):
    for n in range(len(good)):
        e = refused(good[:n])
        assert "<bytes>: byte" in str(e)
    refused(good + b"\0")


def test_every_bit_flip(good):
    for i in range(len(good)):
        bad = bytearray(good)
        bad[i] ^= 1 << i % 8
        if bad[i] != good[i] and 16 <= i < 24:      # OPTIONAL is covered by the header's checksum like the rest
            refused(bytes(bad))
        refused(bytes(bad))


def fixed(data: bytearray) -> bytes:
    """Set the checksums of a patched file right, as a hostile writer would."""
    (sections,) = struct.unpack_from("<I", data, 40)
    end = 64 + 32 * min(sections, 7)
    for i in range(min(sections, 7)):
        kind, zero, offset, length, _ = struct.unpack_from("<IIQQQ", data, 64 + 32 * i)
        if offset + length <= len(data):
            struct.pack_into("<Q", data, 64 + 32 * i + 24, xxhash.xxh64_intdigest(bytes(data[offset:offset + length])))
    struct.pack_into("<Q", data, 56, xxhash.xxh64_intdigest(bytes(data[:56] + data[64:end])))
    return bytes(data)


def test_hostile_bytes_with_right_checksums(good):
    """Any byte changed, checksums set right: refused by name, or a sound program; nothing else may come out."""
    rng = random.Random(5)
    accepted = 0
    for i in range(len(good)):
        for value in {0, 255, good[i] ^ 1, rng.randrange(256)} - {good[i]}:
            bad = bytearray(good)
            bad[i] = value
            try:
                p = load(fixed(bad))
            except ContainerError:
                continue
            accepted += 1
            assert verify(p) == [] and load(p.to_bytes()).to_bytes() == p.to_bytes()
    assert accepted                      # names, data and immediates may be anything


def test_required_bits_refuse_by_name(good):
    bad = bytearray(good)
    struct.pack_into("<Q", bad, 8, 1 << 50)
    assert "bit 50" in str(refused(fixed(bad)))
    bad = bytearray(good)
    struct.pack_into("<Q", bad, 8, int(Capability.PROVISIONAL))
    assert "REQUIRED names PROVISIONAL" in str(refused(fixed(bad)))
    bad = bytearray(good)
    struct.pack_into("<Q", bad, 16, 1 << 50)         # OPTIONAL
    assert load(fixed(bad)).optional == 1 << 50


def test_versions(good):
    for major, minor, ok in ((1, 0, True), (1, 1, False), (2, 0, False), (0, 0, False)):
        bad = bytearray(good)
        struct.pack_into("<HH", bad, 4, major, minor)
        if ok:
            load(fixed(bad))
        else:
            assert "version" in str(refused(fixed(bad)))


def test_provisional_bit_is_set_by_absent_opcodes():
    absent = next(r for r in OPS if not r.executable and not r.syntax)
    p = samples.program(random.Random(3), [absent])
    assert p.required & Capability.PROVISIONAL
    assert load(p.to_bytes()).required == p.required
    assert assemble("HALT").required == 0 and assemble("NOP").required == Capability.DUAL_MODE


def test_huge_counts_do_not_allocate(good):
    """A table that claims 4 G records is refused before anything of that size is made."""
    (sections,) = struct.unpack_from("<I", good, 40)
    for i in range(sections):
        kind, _, offset, length, _ = struct.unpack_from("<IIQQQ", good, 64 + 32 * i)
        if kind >= 3:
            bad = bytearray(good)
            struct.pack_into("<I", bad, offset, 0xFFFFFFFF)
            assert "do not fit" in str(refused(fixed(bad)))


def test_findings_name_the_place():
    p = assemble("start: JUMP start\nHALT")
    p.text = p.text[:8] + (16).to_bytes(4, "little") + p.text[12:]
    p.__dict__.pop("instructions", None)
    (finding,) = verify(p)
    assert finding.section == "TEXT" and finding.offset == 0 and "goes to 0x10" in finding.message
    assert finding.line == ("<text>", 1)
    with pytest.raises(ContainerError, match="goes to 0x10"):
        load(p.to_bytes())


def test_symbols_are_checked():
    p = assemble(".data\nx: .f32 [1, 2]\n.text\nHALT")
    for wrong in (Symbol(SymbolKind.DATA, "x", 4, 8, 0, (2,)), Symbol(SymbolKind.DATA, "x", 0, 8, 999, (2,)),
                  Symbol(SymbolKind.DATA, "x", 0, 12, 0, (2,)), Symbol(SymbolKind.DATA, "a b", 0, 8, 0, (2,)),
                  Symbol(SymbolKind.LABEL, "x", 5), Symbol(SymbolKind.STRING, "x", 0, 8),
                  Symbol(SymbolKind.REGISTER, "rX", 999), Symbol(SymbolKind.TENSOR, "net:w")):
        p.symbols = [wrong]
        with pytest.raises(ContainerError):
            Program.from_bytes(p.to_bytes())
