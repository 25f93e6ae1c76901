"""Every mistake is named with its place and a way out; all mistakes of a source in one run."""
import pytest

from m3jit.frontend import AssemblyError, assemble, assemble_file

# source, (line, column), words the message must hold
WRONG = [
    ("MATVEK rY, rX, rW", (1, 1), ["no mnemonic MATVEK", "did you mean MATVEC?"]),
    ("HALT 5", (1, 6), ["HALT has no place for 5"]),
    ("JUMP", (1, 1), ["JUMP needs target", "usage: JUMP target"]),
    ("JUMP lop\nloop: HALT", (1, 6), ["lop is not defined", "did you mean loop?"]),
    ("JUMP nowhere", (1, 6), ["nowhere is not defined", ".extern nowhere"]),
    ("CALL f ARG=[rX]\n.func f()\nRET", (1, 8), ["CALL has no option ARG", "did you mean ARGS?"]),
    ("SUB rX, rY", (1, 1), ["SUB needs register b"]),
    ("SUB rX, rY, rZ, rW", (1, 17), ["SUB has no place for rW"]),
    ("SUB rX, 5, rY", (1, 9), ["expected register a, found 5"]),
    ("LOADI rX, 99999999999999999999", (1, 11), ["outside -9223372036854775808..9223372036854775807"]),
    ("LOADI rX", (1, 1), ["LOADI needs IMM="]),
    ("LOADI S99, 5", (1, 7), ["S99"]),
    ("LOADI sX, 5", (1, 7), ["sX is an S register", "rd takes R"]),
    ("LOADI rX, 0x", (1, 11), ["0x"]),
    ("LOADI rX, 1.5ns", (1, 11), ["not a whole number of nanoseconds"]),
    ("LOADI rX, @nothing", (1, 11), ["nothing is not defined"]),
    ("LOADI rX, @loop\nloop: HALT", (1, 11), ["loop is code and has no value", "&loop"]),
    ("LOADI rX, @m:t", (1, 11), ["no model m", ".model m"]),
    ('LOADI rX, "open', (1, 11), ["closing quote"]),
    ('LOADI rX, "\\q"', (1, 11), ["unknown escape"]),
    ('LOADI rX, "\\u{110000}"', (1, 11), ["not a Unicode character"]),
    ("CALL f ARGS=[rX, rY\n.func f()\nRET", (1, 13), ["closing bracket"]),
    ("CALL f ARGS=[rX,, rY]", (1, 17), ["comma"]),
    ("CALL f ARGS=[rX,]", (1, 17), ["comma"]),
    ("CALL f ARGS=[5]\n.func f()\nRET", (1, 14), ["expected a general register, found 5"]),
    ("SUB rX,", (1, 7), ["comma at the end"]),
    ("SUB ,rX", (1, 5), ["comma with no operand"]),
    ("SUB rX rY rZ $", (1, 14), ["'$' is not a token"]),
    ("loop: HALT\nloop: HALT", (2, 1), ["loop is already defined in line 1"]),
    ("r5: HALT", (1, 1), ["looks like a register"]),
    ("rX: HALT", (1, 1), ["looks like a register"]),
    (".equ N", (1, 1), [".equ takes a name and a number"]),
    (".equ N 5\n.equ N 6", (2, 6), ["N is already defined"]),
    (".equ rN 5", (1, 6), ["cannot name a constant"]),
    (".reg rX R999", (1, 9), ["R999 is not a register"]),
    (".reg rX S1", (1, 6), ["rX cannot name S1"]),
    (".reg rX R1\n.reg rY R1", (2, 6), ["R1 is already named rX"]),
    (".reg rX R1\n.reg rX R2", (2, 6), ["rX already names R1"]),
    (".dta", (1, 1), ["no directive .dta", "did you mean .data?"]),
    (".data\nHALT", (2, 1), ["HALT in .data", ".text"]),
    (".data\nx:", (2, 1), ["x names nothing"]),
    ("x: .f32 1", (1, 4), [".f32 outside .data"]),
    (".data\nx: .f32 [2, 2] [1, 2, 3]", (2, 16), ["needs 4 values, found 3"]),
    (".data\nx: .f32 [[1, 2], [3]]", (2, 18), ["a list of 1 entries among lists of 2"]),
    (".data\nx: .i8 300", (2, 8), ["300 is outside -128..127"]),
    (".data\nx: .i8 1.5", (2, 8), ["1.5 is not an integer"]),
    (".data\nx: .f16 70000", (2, 9), ["too large for f16"]),
    (".data\nx: .f32 1e999999999", (2, 9), ["exponent is out of range"]),
    (".data\nx: .q8_0 [31] [1]", (2, 10), ["multiples of 32"]),
    ('.data\nx: .f32 FILE="nothing.npy"', (2, 14), ["no file nothing.npy"]),
    (".data\nx: .f32 [1,1,1,1,1,1] [1]", (2, 9), ["at most 5 dimensions"]),
    (".data\nx: .f32 nan:0x7f800000", (2, 9), ["not a NaN"]),
    (".data\nx: .f32 SHAPE=[2147483647, 2147483647] FILL=1", (2, 15), ["are allowed"]),
    (".func f(sX)\nRET", (1, 9), ["cannot name a parameter"]),
    (".func f()\n.func g()\nRET", (2, 1), ["function f has no instructions"]),
    (".global f\nHALT", (1, 9), [".global names f, which is not defined"]),
    (".entry f\nHALT", (1, 8), [".entry names f, which is no label"]),
    (".org 5", (1, 6), [".org belongs to .data"]),
    (".data\nx: .f32 1\n.org 0", (3, 6), ["before the end of the data so far"]),
    ("NOP LAMPORT=-1", (1, 13), ["-1 is outside 0..18446744073709551615"]),
    ("NOP DEADLIN=5", (1, 5), ["NOP has no option DEADLIN", "did you mean DEADLINE?"]),
    ("SUB rX, rY, rZ A=rX", (1, 16), ["A is given twice"]),
    ('ESCAPE EXT=1 PAYLOAD="0g"', (1, 22), ["hexadecimal"]),
    ("ESCAPE_128 EXT=1 PAYLOAD=\"" + "00" * 97 + '"', (1, 1), ["does not fit"]),
    ("JUMP L_0040", (1, 6), ["L_0040 is not defined"]),
    ("LOADI rX, &L_0000\nL_0000: HALT", (1, 11), ["local label"]),
    ("CVT rX, rY, INTT", (1, 13), ["CVT does not know INTT", "did you mean INT?"]),
    ("CVT rX, rY, TO=9", (1, 16), ["9 is not one of INT, FLOAT"]),
]


@pytest.mark.parametrize("source, place, words", WRONG, ids=[w[0].split("\n")[-1][:40] or "-" for w in WRONG])
def test_the_message_names_place_and_way_out(source, place, words):
    with pytest.raises(AssemblyError) as caught:
        assemble(source, "t.m3asm")
    errors = caught.value.errors
    first = errors[0]
    assert (first.line, first.column) == place, str(first)
    for word in words:
        assert word in str(first)
    line = source.split("\n")[first.line - 1]
    assert str(first).startswith(f"t.m3asm:{first.line}:{first.column}: error: ")
    shown = line if len(line) <= 160 else line[:160] + "..."
    assert f"\n    {shown}\n    {' ' * (first.column - 1)}^" in str(first)


def test_all_errors_come_in_one_run():
    source = "\n".join(w[0].split("\n")[0] for w in WRONG)
    with pytest.raises(AssemblyError) as caught:
        assemble(source)
    assert len({e.line for e in caught.value.errors}) > 0.6 * len(WRONG)
    assert caught.value.errors == sorted(caught.value.errors, key=lambda e: (e.line, e.column))


def test_a_bad_line_is_reported_once():
    with pytest.raises(AssemblyError) as caught:
        assemble('JUMP "x\nHALT')
    assert len(caught.value.errors) == 1


def test_warnings():
    p = assemble(".func f(rA)\n  ADDS rA, rA, rB\n  COMPARE rA, 5\n  IF_LESS rB, f\n  RET\n")
    messages = [w.message for w in p.warnings]
    assert any("rB is read here" in m for m in messages)
    assert any("comparison of R0, not of R1" in m for m in messages)
    assert len(messages) == 2 and all(w.severity == "warning" for w in p.warnings)
    assert assemble("  LOADI rA, 1\n  COMPARE rA, 5\n  IF_LESS rA, done\ndone: HALT\n").warnings == []


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.m3asm").write_bytes(b"HALT\n  \xff\n")
    with pytest.raises(AssemblyError) as caught:
        assemble_file(tmp_path / "a.m3asm")
    assert (caught.value.errors[0].line, caught.value.errors[0].column) == (2, 3)
