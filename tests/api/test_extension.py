"""`@m3jit.extension`: mnemonics, options, frames, state, numba functions, errors."""
from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

import m3jit
from m3jit.api.extending import forget
from m3jit.isa.extension_rows import ROWS
from m3jit.isa.table import BY_NAME


@pytest.fixture(autouse=True)
def undone():
    before = set(ROWS)
    yield
    for name in set(ROWS) - before:
        forget(name)


def declare_blend():
    @m3jit.extension(name="BLEND", number=40, version=(2, 3))
    def blend(a, b=None, *, weight: float = 0.5, times: int = 1, flip: bool = False,
              mode: Literal["mix", "max"] = "mix"):
        """a * (1 - weight) + b * weight."""
        b = np.zeros_like(a) if b is None else b
        a, b = (b, a) if flip else (a, b)
        return (np.maximum(a, b) if mode == "max" else a * np.float32(1 - weight) + b * np.float32(weight)) * times
    return blend


SOURCE = """
    BLEND rU, rX, rY
    BLEND rV, rX, rY, WEIGHT=0.25, TIMES=-3, FLIP
    BLEND rW, rX, MODE=MAX
    BLEND rT, rX, rY, MAX, OPTIONAL
    HALT
"""


def test_mnemonics_assemble_run_and_disassemble():
    declare_blend()
    program = m3jit.assemble(SOURCE)
    text = m3jit.disassemble(program, strip=True)
    assert "BLEND rV, rX, rY, WEIGHT=0.25, TIMES=-3, FLIP" in text and "BLEND rT, rX, rY, MAX, OPTIONAL" in text
    assert "BLEND rW, rX, MAX" in text
    assert m3jit.assemble(m3jit.disassemble(program)).to_bytes() == program.to_bytes()
    x, y = np.float32([1, -2]), np.float32([4, 8])
    f = m3jit.compile(program, ["rX", "rY"], ["rU", "rV", "rW", "rT"])
    u, v, w, t = f(x, y)
    assert (u.tolist(), w.tolist(), t.tolist()) == ([2.5, 3.0], [1, 0], [4, 8])
    assert v.tolist() == ((y * np.float32(0.75) + x * np.float32(0.25)) * -3).tolist()
    assert "interpreted: BLEND" in f.report() or "interpreted: ESCAPE" in f.report()
    assert m3jit.Program.from_bytes(program.to_bytes()).instructions[0][1].op.name == "ESCAPE"


def test_without_the_extension_the_bytes_stay_the_same():
    declare_blend()
    program = m3jit.assemble(SOURCE)
    forget("BLEND")
    text = m3jit.disassemble(program, strip=True)
    assert 'ESCAPE EXT=40, VERSION=196610, PAYLOAD="' in text and "BLEND" not in text
    again = m3jit.assemble(text)
    assert (again.text, again.required) == (program.text, program.required)
    with pytest.raises(m3jit.Trap, match=r"extension 40 version 2.3 is not known.*@m3jit.extension"):
        m3jit.VM(program, backend="interpreter").run()
    with pytest.raises(m3jit.AssemblyError, match="no mnemonic BLEND"):
        m3jit.assemble(SOURCE)
    assert m3jit.VM(_only_optional(), backend="interpreter").run().finished


def _only_optional():
    declare_blend()
    program = m3jit.assemble("BLEND rT, rX, rY, OPTIONAL\nHALT")
    forget("BLEND")
    return program


def test_a_frame_that_another_writer_filled_stays_an_escape():
    """Only what the row itself would write is shown by name."""
    declare_blend()
    program = m3jit.assemble('ESCAPE EXT=40, VERSION=196610, PAYLOAD="01010001"\nHALT')         # one source, not two
    assert 'ESCAPE EXT=40' in m3jit.disassemble(program)
    marked = m3jit.assemble('ESCAPE EXT=40, FLAGS=2, VERSION=196610, PAYLOAD="0102000102"\nHALT')
    assert 'ESCAPE EXT=40, FLAGS=2' in m3jit.disassemble(marked)
    other = m3jit.assemble('ESCAPE EXT=40, VERSION=1, PAYLOAD="0102000102"\nHALT')              # another major version
    assert 'ESCAPE EXT=40' in m3jit.disassemble(other)


def test_in_the_builder_and_in_mixed_compiled_runs():
    declare_blend()
    b = m3jit.Builder()
    x = b.input("rX", "tensor")
    y = b.op.BLEND(b.op.EXP(x), x, weight=0.25)
    z = b.op.TANH(y)
    b.halt()
    program = b.build()
    assert m3jit.assemble(m3jit.disassemble(program), "<builder>").to_bytes() == program.to_bytes()
    x0 = np.linspace(-1, 1, 100_000, dtype=np.float32)
    runs = []
    for backend in ("cpu", "interpreter"):
        vm = m3jit.VM(program, backend=backend)
        vm.set("rX", x0)
        vm.run()
        runs.append({k: v.tobytes() for k, v in vm.registers.items()})
    assert runs[0] == runs[1]
    with pytest.raises(m3jit.BuilderError, match="no option WAIT; did you mean WEIGHT"):
        b.op.BLEND(x, WAIT=1.0)


def test_several_outputs_none_and_numbers():
    said = []

    @m3jit.extension(name="DIVMOD", number=41, outputs=2)
    def div(a, b):
        return divmod(a, b)

    @m3jit.extension(name="SAY", number=42, outputs=0)
    def say(a):
        said.append(a)
    vm = m3jit.VM(m3jit.assemble("LOADI rA, 17\nLOADI rB, 5\nDIVMOD rQ, rR, rA, rB\nSAY rR\nHALT"), backend="cpu")
    vm.run()
    assert (vm.get("rQ"), vm.get("rR"), said) == (3, 2, [2])


def test_state_rolls_back():
    @m3jit.extension(name="COUNT", number=43, state=True)
    def count(n, *, by: int = 1):
        n = (n or 0) + by
        return n, n
    vm = m3jit.VM(m3jit.assemble("COUNT rA\nFORK rF\nCOUNT rB, BY=5\nABORT rF\nCOUNT rC\nHALT"), backend="interpreter")
    vm.run()
    assert (vm.get("rA"), vm.get("rB"), vm.get("rC")) == (1, None, 2)


def test_numba_functions():
    numba = pytest.importorskip("numba")

    @m3jit.extension(name="CUMSUM", number=44)
    @numba.njit
    def cumsum(x, scale=1.0):
        out = np.empty_like(x)
        total = np.float32(0)
        for i in range(x.size):
            total += x[i] * np.float32(scale)
            out[i] = total
        return out
    f = m3jit.compile("CUMSUM rZ, rX, SCALE=2.0\nHALT", ["rX"], ["rZ"])
    assert f(np.float32([1, 2, 3])).tolist() == [2, 6, 12]
    assert cumsum(np.float32([1, 2])).tolist() == [1, 3]        # still the function itself


def test_arrays_come_read_only_and_failures_trap_with_their_place():
    @m3jit.extension(name="SPOIL", number=45)
    def spoil(x):
        x[0] = 1
    program = m3jit.assemble("LOADI rX, @c\nSPOIL rZ, rX\nHALT\n.data\nc: .f32 [5]", "a.m3asm")
    with pytest.raises(m3jit.Trap, match=r"a.m3asm:2: .*extension SPOIL failed: ValueError: .*read-only"):
        m3jit.VM(program, backend="interpreter").run()


def test_assembly_errors_name_the_operand():
    declare_blend()
    with pytest.raises(m3jit.AssemblyError) as e:
        m3jit.assemble("BLEND rZ\nBLEND rZ, rX, WAIGHT=1\nBLEND rZ, rX, TIMES=1.5\nBLEND S0, rX\n"
                       "BLEND rZ, rX, PAYLOAD=\"00\"\nBLENT rZ, rX\nHALT")
    text = str(e.value)
    for part in ("BLEND needs register a; usage: BLEND rD, a, [b], [WEIGHT=f64], [TIMES=i64], [FLIP], "
                 "[MODE=MIX | MAX], [OPTIONAL]", "did you mean WEIGHT?", "an integer is expected",
                 "S0 is an S register",
                 "no option PAYLOAD", "no mnemonic BLENT; did you mean BLEND?"):
        assert part in text, part


@pytest.mark.parametrize("options, function, message", [
    (dict(name="ADD", number=1), lambda x: x, "ADD is an opcode of the table"),
    (dict(name="two words", number=1), lambda x: x, "a mnemonic is letters"),
    (dict(name="FINE", number=256), lambda x: x, "number 256 is outside 0..255"),
    (dict(name="FINE", number=1, version=(1, -1)), lambda x: x, "two numbers from 0 to 65535"),
    (dict(name="FINE", number=1), lambda *x: x, "fixed number of operands"),
    (dict(name="FINE", number=1), lambda x=1.0, y=None: x, "register y stands behind options"),
    (dict(name="FINE", number=1), lambda x, *, k: x, "option k needs a default"),
    (dict(name="FINE", number=1), lambda x, k="a": x, 'annotate it Literal\\["a"'),
    (dict(name="FINE", number=1), lambda x, k=(1, 2): x, "a default of type tuple"),
    (dict(name="FINE", number=1), lambda rd: rd, "cannot be named rd"),
    (dict(name="FINE", number=1, outputs=17), lambda x: x, "at most 16 outputs"),
    (dict(name="FINE", number=1, state=True), lambda: 0, "first parameter is the state"),
    (dict(name="FINE", number=1), lambda a=0, b=0, c=0, d=0, e=0, f=0, g=0: 0, "the options need 56 bytes"),
])
def test_declarations_that_cannot_be(options, function, message):
    with pytest.raises(m3jit.UserError, match=message):
        m3jit.extension(**options)(function)
    assert "FINE" not in ROWS


def test_names_and_numbers_are_taken_once():
    declare_blend()
    with pytest.raises(m3jit.UserError, match="BLEND is already extension 40"):
        m3jit.extension(name="BLEND", number=50)(lambda x: x)
    with pytest.raises(m3jit.UserError, match="extension 40 version 2 is already BLEND"):
        m3jit.extension(name="OTHER", number=40, version=(2, 0))(lambda x: x)
    m3jit.extension(name="OTHER", number=40, version=(3, 0))(lambda x: x)      # another major version is another one
    m3jit.extension(name="BLEND", number=40, version=(2, 4), replace=True)(lambda x: x + 1)
    assert m3jit.compile("BLEND rZ, rX\nHALT", ["rX"], ["rZ"])(1) == 2
    assert "BLEND" not in BY_NAME
