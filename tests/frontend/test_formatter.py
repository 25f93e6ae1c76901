"""`m3jit fmt`: the same program, the same comments, and formatting twice changes nothing."""
import random
import re

import pytest
from hypothesis import given, settings, strategies as st

from m3jit.frontend import AssemblyError, assemble, disassemble, format_source
from tests.frontend import samples

UGLY = """
; header
#second
.EQU n 5
m .EQU 0x10 ; sixteen
.Data
x:   .f32   [2,2] [1 2 3   4]  # values
y: .i64 [1,
 2]   ; two
.text
start:  loadi   rX,n;load

  ; about the next


  call f
      args=[rX,rY]  ; the arguments
  sub rX , rX,   1
a: b: halt
.func f( rA,rB )   ; a function
ret
"""
PRETTY = """; header
#second
.equ n 5
m .equ 0x10  ; sixteen
.data
x: .f32 [2, 2] [1, 2, 3, 4]  # values
y: .i64 [1,
    2]  ; two
.text
start:
    LOADI rX, n  ;load

    ; about the next

    CALL f
        ARGS=[rX, rY]  ; the arguments
    SUB rX, rX, 1
a:
b:
    HALT
.func f(rA, rB)  ; a function
    RET
"""


def test_layout():
    assert format_source(UGLY) == PRETTY


def comments(text: str) -> list[str]:
    return re.findall(r"[;#].*", text)


def check(text: str) -> None:
    out = format_source(text)
    assert format_source(out) == out
    a, b = assemble(text), assemble(out)
    for part in ("text", "data", "symbols", "relocs", "imports", "meta", "entry"):
        assert getattr(a, part) == getattr(b, part), part
    assert [c.strip() for c in comments(out)] == [c.strip() for c in comments(text)]


def test_same_program_and_comments():
    check(UGLY)
    check(PRETTY)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2 ** 32))
def test_random_programs(seed):
    rng = random.Random(seed)
    text = disassemble(samples.program(rng), strip=True)
    if '"' not in text:
        text = "\n".join(line + rng.choice(["", " ; note", "\n\n\n# own line"]) for line in text.split("\n"))
        text = text.replace(", ", rng.choice([" , ", ",", "  "]))
    out = format_source(text)
    assert format_source(out) == out
    a, b = assemble(text), assemble(out)
    assert (a.text, a.data, a.symbols, a.relocs) == (b.text, b.data, b.symbols, b.relocs)


def test_damaged_source_is_refused():
    with pytest.raises(AssemblyError):
        format_source('LOADI rX, "open')
