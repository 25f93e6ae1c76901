"""Only the declared errors may come out of the assembler, the formatter and the loader."""
import random

from hypothesis import given, settings, strategies as st

from m3jit.frontend import AssemblyError, ContainerError, assemble, disassemble, format_source, load
from m3jit.isa.table import OPS
from tests.frontend import samples

WORDS = [r.name for r in OPS] + """.data .text .equ .reg .func .f32 .str .loc .org .model .extern .global .import .entry
    .meta AS rX vX sX spX R255 R7 V3 S0 SP6 _ x: x @x &x+1 &.data+8 @m:t 1 -1 0x1p3 nan:0x7fc00000 80ms 2x3 [ ] , = ( )
    "s" SHAPE= ARGS= PAYLOAD= FILE= L_0000 inf 1e400""".split() + ["; c", "\n", "\n", "\n"]


def attempt(text: str) -> None:
    try:
        p = assemble(text)
    except AssemblyError as e:
        assert e.errors and all(x.line >= 1 and x.column >= 1 and x.message for x in e.errors)
    else:
        q = assemble(disassemble(p))
        assert (p.text, p.data, p.symbols) == (q.text, q.data, q.symbols)
    try:
        once = format_source(text)
    except AssemblyError:
        return
    assert format_source(once) == once


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=60))
def test_random_words(words):
    attempt(" ".join(words))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_random_text(text):
    attempt(text)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2 ** 32), st.integers(1, 8))
def test_mutated_programs(seed, count):
    rng = random.Random(seed)
    text = disassemble(samples.program(rng, length=12))
    for _ in range(count):
        i = rng.randrange(len(text) + 1)
        j = min(len(text), i + rng.choice([0, 1, 1, 5]))
        piece = rng.choice(["", "", " ", "\n", ",", "=", "[", '"', rng.choice(WORDS), chr(rng.randrange(32, 400))])
        text = text[:i] + piece + text[j:]
    attempt(text)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(data):
    for prefix in (b"", b"\x89M3B\x01\x00\x00\x00"):
        try:
            load(prefix + data)
        except ContainerError:
            pass


def test_finds_of_the_fuzzer():
    """Inputs that once let something else than a declared error out, or were formatted differently twice."""
    for text in (".data\np: .i64 [&x+4]\n", ".data\np: .i64 [&nothing]\n",
                 'start: KEYLIKE="00ff"\nOTHER=5, NEXT, rX\n', 'start:\n    A=1\nB=5, C\n'):
        attempt(text)
