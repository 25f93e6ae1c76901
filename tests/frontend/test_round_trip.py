"""bytes -> text -> bytes for random programs over the whole table."""
import random

import pytest
from hypothesis import given, settings, strategies as st

from m3jit.frontend import Program, assemble, disassemble, verify
from m3jit.isa.table import OPS, RESERVED, decode, encode, missing_numbers
from tests.frontend import samples

PARTS = ("text", "data", "symbols", "relocs", "imports", "lines", "meta", "entry", "required")


def same(p: Program, q: Program, parts=PARTS) -> None:
    for part in parts:
        assert getattr(p, part) == getattr(q, part), part


def there_and_back(p: Program) -> None:
    assert verify(p) == []
    text = disassemble(p)
    q = assemble(text)
    same(p, q)
    assert disassemble(q) == text
    stripped = assemble(disassemble(p, strip=True, offsets=True))
    same(p, stripped, [part for part in PARTS if part != "lines"])
    again = Program.from_bytes(p.to_bytes())
    same(p, again)
    assert again.to_bytes() == p.to_bytes()


@pytest.mark.parametrize("row", OPS, ids=lambda r: f"{r.code:02X}-{r.name}")
def test_every_row_alone(row):
    rng = random.Random(row.code * 256 + (row.sub or 0))
    for _ in range(6):
        ins = samples.instruction(row, rng)
        assert encode(decode(encode(ins))) == encode(ins)
        there_and_back(samples.program(rng, [row] * 3))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2 ** 64 - 1))
def test_random_programs(seed):
    there_and_back(samples.program(random.Random(seed)))


def test_programs_cover_the_table(capsys):
    """One program that holds every row, in random order."""
    rng = random.Random(1)
    rows = list(OPS)
    rng.shuffle(rows)
    there_and_back(samples.program(rng, rows))
    with capsys.disabled():
        codes = {r.code for r in rows}
        print(f"\nround trip: {len(rows)} rows of {len(codes)} opcodes, {len(RESERVED)} numbers reserved")


def test_every_number_is_in_the_table_or_reserved():
    assert missing_numbers() == []
    assert len({r.code for r in OPS}) == 243 and len(RESERVED) == 13
