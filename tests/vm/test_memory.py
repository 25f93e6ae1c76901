"""Addressed memory: bounds, permissions, freed blocks, sharing; MEMCPY, MEMSET, PREFETCH, arenas, TENSOR FROM."""
from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3jit.errors import Trap
from m3jit.vm.commit import commit
from m3jit.vm.memory import ARENA_LIMIT, PAGE, WINDOW, Pages
from m3jit.vm.persistent import PersistentMap
from tests.vm.programs import ins, machine, run

ACT = "0x3000000000000000"


def trap(source: str, **options) -> str:
    with pytest.raises(Trap) as e:
        run(source, **options)
    return str(e.value)


def test_memset_memcpy_and_back():
    vm = machine(f"LOADI rA, {ACT}\nMEMSET rA, PATTERN=7, LEN=10, OFFSET=4090\nADDI rB, rA, 20000\n"
                 f"MEMCPY rB, rA, LEN=20, SRC_OFFSET=4085\nHALT").run()
    assert vm.main.memory.read(0x3 << 60, 4110) == bytes(4090) + b"\x07" * 10 + bytes(10)
    assert vm.main.memory.read((0x3 << 60) + 20000, 20) == bytes(5) + b"\x07" * 10 + bytes(5)


def test_overlapping_copies_are_as_if_buffered():
    vm = run(f'LOADI rA, {ACT}\nLOADI rT, "abcdefgh"\nMEMCPY rA, rT\nMEMCPY rA, rA, LEN=6, DST_OFFSET=2\nHALT')
    assert vm.main.memory.read(0x3 << 60, 9) == b"ababcdef\0"


def test_tensors_go_to_memory_and_come_back():
    vm = machine(f"LOADI rA, {ACT}\nMEMCPY rA, rT\nMEMCPY rA, rT, SRC_OFFSET=4, LEN=4, DST_OFFSET=8\nHALT")
    vm.set("rT", np.array([1.5, -2.0, 3.25], np.float32))
    vm.run()
    from m3jit.isa.types import F32
    got = vm.main.memory.read_tensor(0x3 << 60, F32, (3,))
    assert got.numpy().tolist() == [1.5, -2.0, -2.0]


def test_prefetch_checks_and_changes_nothing():
    vm = run(f"LOADI rA, {ACT}\nPREFETCH rA, LEN=100\nHALT")
    assert not list(vm.main.memory._pages(3).map.items())
    assert "ends at offset 0x100000000" in trap(f"LOADI rA, {ACT}\nPREFETCH rA, LEN=1, OFFSET={WINDOW - 1}\n"
                                                f"PREFETCH rA, LEN=2, OFFSET={WINDOW - 1}\nHALT")


@pytest.mark.parametrize("address,size,words", [
    (0x0 << 60, 1, ["TEXT is read-only", "region TEXT", "offset 0x0", "1 bytes"]),
    (0x1 << 60, 1, ["GLOBAL is read-only"]),
    (0x2 << 60, 8, ["WEIGHTS is read-only"]),
    ((0x3 << 60) + WINDOW, 1, ["region ACTIVATION", f"offset 0x{WINDOW:x}", "ends at"]),
    ((0x3 << 60) + WINDOW - 1, 2, ["ends at"]),
    (0x5 << 60, 1, ["no arena 0"]),
    (0x7 << 60, 1, ["WAL is a log; MEMCPY appends to it"]),
    (0xC << 60, 1, ["FEDERATED is not available"]),
    (0xF << 60, 1, ["MMIO is not available"]),
])
def test_forbidden_writes_name_address_region_offset_and_size(address, size, words):
    signed = address - 2 ** 64 if address >= 2 ** 63 else address
    text = trap(f"LOADI rA, {signed}\nMEMSET rA, PATTERN=1, LEN={size}\nHALT")
    for w in [*words, f"0x{address:016x}", "test.m3asm:2", "MEMSET"]:
        assert w in text, text


def test_reads_outside():
    assert "GLOBAL" in trap(f'LOADI rT, "abc"\nLOADI rA, {0x1 << 60}\nLOADI rB, {ACT}\nMEMCPY rB, rA, LEN=4000\nHALT')
    assert "not inside one tensor" in trap(f"LOADI rA, {0x2 << 60}\nLOADI rB, {ACT}\nMEMCPY rB, rA, LEN=4\nHALT")
    assert "negative" in trap(f"LOADI rA, {ACT}\nLOADI rN, -1\nMEMSET rA, LEN=rN\nHALT")
    assert "needs LEN" in trap(f"LOADI rA, {ACT}\nMEMCPY rA, rA\nHALT")
    assert "which has 3" in trap(f'LOADI rT, "abc"\nLOADI rA, {ACT}\nMEMCPY rA, rT, LEN=4\nHALT')


def test_nothing_is_written_when_a_copy_traps():
    source = f'LOADI rT, "abcdef"\nLOADI rA, {(0x3 << 60) + WINDOW - 3}\nMEMCPY rA, rT\nHALT'
    vm = machine(source)
    with pytest.raises(Trap):
        vm.run()
    assert vm.main.memory.read((0x3 << 60) + WINDOW - 3, 3) == bytes(3)


def test_running_out_of_memory_is_a_trap():
    text = trap(f"LOADI rA, {ACT}\nMEMSET rA, LEN=65536\nADDI rA, rA, 1000000\nMEMSET rA, LEN=65536\nHALT",
                memory_limit=100_000)
    assert "out of memory" in text and "limit of 100000 bytes" in text
    assert "memory limit" in trap(f"LOADI rA, {ACT}\nMEMSET rA, LEN=4000000000\nHALT")


def test_arenas():
    vm = run("ARENA_ALLOC rA, 10\nARENA_ALLOC rB, 1\nARENA_ALLOC rC, 8, ALIGN=64\nARENA_ALLOC rD, 5, ARENA=3\nHALT")
    base = 5 << 60
    assert [vm.get(r) for r in ("rA", "rB", "rC", "rD")] == [base, base + 16, base + 64, base + (3 << 48)]
    assert "the block was freed" in trap("ARENA_ALLOC rA, 10\nMEMSET rA, LEN=10\nARENA_RESET\nMEMSET rA, LEN=1\nHALT")
    assert "10 bytes allocated" in trap("ARENA_ALLOC rA, 10\nMEMSET rA, LEN=11\nHALT")
    assert "power of two" in trap("ARENA_ALLOC rA, 10, ALIGN=3\nHALT")
    assert "positive" in trap("ARENA_ALLOC rA, 0\nHALT")
    assert "is full" in trap(f"ARENA_ALLOC rA, 1\nARENA_ALLOC rB, {ARENA_LIMIT}\nHALT")
    assert "no arena 9" in trap("ARENA_RESET 9\nHALT")


def test_shared_is_seen_by_every_context_and_activation_is_not():
    vm = run(f"""
        LOADI rS, 0x6000000000000000
        LOADI rA, {ACT}
        FORK rC, child, RED
        FENCE
        HALT
    child:
        MEMSET rS, PATTERN=9, LEN=4
        MEMSET rA, PATTERN=9, LEN=4
        FENCE
        HALT""")
    assert vm.main.memory.read(0x6 << 60, 5) == b"\x09" * 4 + b"\0"
    assert vm.main.memory.read(0x3 << 60, 4) == bytes(4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["write", "fill", "share", "swap"]), st.integers(0, 5 * PAGE),
                          st.integers(0, 2 * PAGE), st.integers(1, 255)), max_size=25))
def test_pages_agree_with_byte_arrays(script):
    pages, plain = [Pages()], [bytearray(8 * PAGE)]
    at = 0
    for what, offset, size, byte in script:
        if what == "share":
            pages.append(pages[at].share())
            plain.append(bytearray(plain[at]))
        elif what == "swap":
            at = byte % len(pages)
        else:
            data = bytes((byte + i) % 256 for i in range(size)) if what == "write" else bytes([byte]) * size
            commit(pages[at].writing(offset, data) if what == "write" else pages[at].filling(offset, byte, size))
            plain[at][offset:offset + size] = data
    for p, b in zip(pages, plain):
        assert p.read(0, len(b)) == bytes(b)
        assert p.count == len(list(p.map.items()))


def test_persistent_maps_agree_with_dictionaries():
    rng = random.Random(5)
    maps, dicts = [PersistentMap()], [{}]
    for _ in range(4000):
        i = rng.randrange(len(maps))
        key = rng.choice((rng.randrange(40), rng.randrange(5000), rng.randrange(2 ** 48)))
        if rng.random() < 0.02 and len(maps) < 12:
            maps.append(maps[i].share())
            dicts.append(dict(dicts[i]))
        elif rng.random() < 0.2:
            maps[i].delete(key)
            dicts[i].pop(key, None)
        else:
            maps[i].set(key, _)
            dicts[i][key] = _
        assert maps[i].get(key) == dicts[i].get(key)
    for m, d in zip(maps, dicts):
        assert list(m.items()) == sorted(d.items())
        assert all(m.get(k) == v for k, v in d.items())


def test_program_text_and_data_can_be_read():
    vm = machine(f'.data\nx: .u8 [3] [1, 2, 3]\n.text\nLOADI rX, &x\nLOADI rA, {ACT}\nMEMCPY rA, rX, LEN=3\n'
                 f'LOADI rT, &start\nADDI rB, rA, 16\nMEMCPY rB, rT, LEN=1\nstart: HALT').run()
    assert vm.main.memory.read(0x3 << 60, 3) == b"\1\2\3"
    assert vm.main.memory.read((0x3 << 60) + 16, 1) == bytes([ins("HALT").op.code])
