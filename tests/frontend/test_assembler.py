"""What the language says becomes the bytes it means."""
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st

from m3jit.frontend import AssemblyError, SymbolKind, assemble, assemble_file, disassemble
from m3jit.frontend.numbers import NumberError, format_float, parse_number, round_to
from m3jit.isa.fields import RawF32, Reg


def args(line: str, index: int = 0, **kw):
    return assemble(line, **kw).instructions[index][1].args


def test_forms_of_a_mnemonic():
    rows = [i.op.name for _, i in assemble("""
        .data
        x: .i64 7
        .text
        LOADI rA, 5
        LOADI rA, 5.5
        LOADI rA, "text"
        LOADI rA, @x
        LOADI rA, &x+8
        SUB rA, rA, rB
        SUB rA, rA, -3
        COMPARE rA, rB
        COMPARE rA, 3
        COMPARE rA, 3.5
        HALT""").instructions]
    assert rows == ["LOADI", "LOADF", "LOADS", "LOADV", "LOADA", "SUB", "SUBI", "COMPARE", "COMPAREI", "COMPAREF",
                    "HALT"]


def test_options_in_any_order_case_and_spacing():
    a = assemble("getelem rX, rY, index = 3")
    b = assemble("GETELEM INDEX=3 rX rY")
    c = assemble("GETELEM rX, rY, 3")
    assert a.text == b.text == c.text


def test_continuation_lines():
    a = assemble("loop: SUB rX,\n   rY, ; a comment\n   rZ\n      \nCALL loop\n   ARGS=[rX,\n   rY]\n")
    b = assemble("loop: SUB rX, rY, rZ\nCALL loop ARGS=[rX, rY]\n")
    assert a.text == b.text


def test_comments_are_not_strings():
    p = assemble('LOADI rX, "a;b#c" ; "x"\nHALT # y\n')
    assert p.string(p.instructions[0][1].args["text"]) == "a;b#c"


def test_both_forms_of_equ_and_use_before_definition():
    p = assemble("LOADI rX, FRAME\nLOADI rX, RATE\nLOADI rX, HALF\nFRAME .equ 1920\n.equ RATE 0x10\n.equ HALF 0.5\n")
    assert [i.args["imm"] for _, i in p.instructions] == [1920, 16, 0.5]


def test_durations_are_nanoseconds():
    for text, value in (("80ms", 80_000_000), ("1.5us", 1500), ("3s", 3 * 10 ** 9), ("2min", 120 * 10 ** 9), ("7ns", 7),
                        ("1h", 3600 * 10 ** 9), ("-1s", -10 ** 9)):
        assert args(f"LOADI rX, {text}")["imm"] == value


def test_registers_are_given_out_around_those_that_are_named():
    p = assemble("ADDS rA, rB, rC\nADDS R0, R2, R254\n.reg rB R1\n")
    assert [p.register(n) for n in ("rA", "rB", "rC")] == [Reg(0, 3), Reg(0, 1), Reg(0, 4)]
    assert p.register("R7") == p.register("R7") == p.register("r7") == Reg(0, 7)
    for _ in range(2):
        with pytest.raises(KeyError, match="no register rNone"):
            p.register("rNone")


def test_functions_have_their_own_registers_and_share_states():
    p = assemble("""
        LOADI rA, 1
        LOADI rX, 2
        CALL f ARGS=[rA]
        MOV sKV, rX
        HALT
        .func f(rIn)
        ADDS rX, rIn, rIn
        MOV rIn, sKV
        RET""")
    assert p.register("rX") == Reg(0, 1) and p.register("rIn", "f") == Reg(0, 0) and p.register("rX", "f") == Reg(0, 1)
    assert p.register("sKV", "f") == p.register("sKV") == Reg(2, 0)


def test_too_many_registers():
    with pytest.raises(AssemblyError, match="no register is left for rX255"):
        assemble("".join(f"LOADI rX{i}, 1\n" for i in range(256)))
    assert assemble("".join(f"LOADI rX{i}, 1\n" for i in range(255)))


def test_data_of_every_rank_and_type():
    p = assemble("""
        .data
        s: .f32 1.5
        v: .i16 [1, -2, 3]
        m: .f64x 1
        """.replace("        m: .f64x 1\n", "") + """
        m: .bf16 [[1, 2], [nan:0x7fc1, -inf]]
        t: .bool [1, 2, 1, 2] [1, 0, true, FALSE]
        f: .u8 SHAPE=2x3 FILL=7
        e: .f32 [0, 3] []
        h: .f32 0x1.8p-1
        q: .q8_0 [1, 32] [""" + ", ".join(str(i) for i in range(34)) + """]
        z: .str "h\\u{e9}\\n\\x41"
        .text
        HALT""")
    v = {s.name: p.value(s) for s in p.symbols if s.kind in (SymbolKind.DATA, SymbolKind.STRING)}
    assert v["s"].shape == () and v["s"].data == 1.5
    assert v["v"].data.tolist() == [1, -2, 3]
    assert v["m"].data.tolist() == [[0x3F80, 0x4000], [0x7FC1, 0xFF80]]
    assert v["t"].shape == (1, 2, 1, 2) and v["t"].data.ravel().tolist() == [True, False, True, False]
    assert v["f"].data.tolist() == [[7] * 3] * 2
    assert v["e"].shape == (0, 3) and v["h"].data == 0.75
    assert v["q"].shape == (1, 32) and v["q"].tobytes() == bytes(range(34))
    assert v["z"].tobytes() == "h\u00e9\nA".encode()


def test_data_from_a_file(tmp_path):
    np.save(tmp_path / "w.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    np.save(tmp_path / "d.npy", np.zeros(3))
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999,), }" + b" " * 50 + b"\n"
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00" + header)
    source = tmp_path / "p.m3asm"
    source.write_text('.data\nw: .f32 FILE="w.npy"\n.text\nHALT\n')
    p = assemble_file(source)
    assert p.value(p.symbol("w")).data.tolist() == [[0, 1, 2], [3, 4, 5]]
    for name, message in (("d.npy", "holds float64"), ("bad.npy", "not a .npy file of numbers: it is damaged"),
                          ("none.npy", "no file none.npy")):
        source.write_text(f'.data\nw: .f32 FILE="{name}"\n')
        with pytest.raises(AssemblyError, match=message):
            assemble_file(source)


def test_references_become_relocations_and_words():
    p = assemble("""
        .model net "net.gguf"
        .data
        x: .f32 [1, 2]
        p: .i64 [&x+4, 9]
        .text
        LOADI rA, @x
        LOADI rB, &x+4
        LOADI rC, @net:blk.0.w
        LOADI rD, &here
        here: HALT""")
    words = [list(i.args.values())[-1] for _, i in p.instructions[:4]]
    assert p.symbols[words[0]].name == "x" and p.symbols[words[2]].name == "net:blk.0.w"
    assert words[1] == (1 << 60) + 4 and words[3] == p.symbol("here").value
    assert np.frombuffer(p.data, "<i8", 2, p.symbol("p").value).tolist() == [(1 << 60) + 4, 9]
    assert p.models == {"net": "net.gguf"}


def test_an_absent_optional_operand_keeps_its_place():
    p = assemble("NORM rY, rX, _, rB")
    q = assemble(disassemble(p))
    assert p.text == q.text
    ins = p.instructions[0][1]
    registers = [ins.args[f.name] for f in ins.op.registers()]
    assert registers[2] is None and registers[3] is not None


def test_lines_and_loc():
    p = assemble('HALT\n.loc "b.m3asm" 7\nHALT\nHALT\n.loc 0\nHALT\n', "a.m3asm")
    pcs = [pc for pc, _ in p.instructions]
    assert [p.line_of(pc) for pc in pcs] == [("a.m3asm", 1), ("b.m3asm", 7), ("b.m3asm", 7), None]


def test_allow_undefined_makes_an_external_name():
    p = assemble("CALL far\nHALT", allow_undefined=True)
    assert p.unresolved == ["far"]


# -- numbers ------------------------------------------------------------------------------------------------------

@given(st.floats(allow_nan=False, width=32))
def test_f32_text_is_exact(x):
    text = format_float(x, "f")
    if not math.isinf(x):
        back = parse_number(text).number("f")
        assert back == x and math.copysign(1, back) == math.copysign(1, x)


@given(st.floats(allow_nan=False, allow_infinity=False, width=16))
def test_f16_text_is_exact(x):
    assert parse_number(format_float(x, "e")).number("e") == x


@given(st.fractions(min_value=-10 ** 6, max_value=10 ** 6))
def test_rounding_agrees_with_numpy(x):
    """Half to even, once: numpy rounds an f64 to f32 correctly when the f64 is exact."""
    exact = Fraction(float(x))
    assert round_to(exact, "f") == float(np.float32(float(x)))
    assert round_to(exact, "d") == float(x)


def test_a_decimal_is_rounded_once():
    # 1 + 2^-24 + 2^-60: through f64 it would round to 1 (a tie to even); once, it rounds up
    text = "1.00000005960464477626"
    assert parse_number(text).number("f") == float(np.nextafter(np.float32(1), np.float32(2)))


def test_nan_bits():
    x = parse_number("nan:0xffc12345").number("f")
    assert isinstance(x, RawF32) and x.bits == 0xFFC12345 and format_float(x, "f") == "nan:0xffc12345"
    with pytest.raises(NumberError):
        parse_number("nan:0x7f800000").number("f")


# -- phrases of the language's description ------------------------------------------------------------------------

def test_phrases():
    """Lines the instruction set's description shows; each must mean what it says."""
    p = assemble("""
        .model net "net.gguf"
        start:
        FORK rS
        FORK rC, start, RED
        ABORT rS RESUME
        SENSE rPCM, AUDIO_PCM
        SENSE rPCM, FILE, AUDIO_PCM NAME="a.wav"
        SET_DEADLINE rNode, 80000000
        SET_DEADLINE rNode, 80ms
        SET_DEADLINE rAbs
        DEADLINE_AND rTree, CHILDREN=[rA, rB]
        IF_INTERRUPT rFlag, start
        IF_GREATER rX, start
        LOADI rX, @net:blk.0.attn_q.weight
        SIGNAL KIND=ABORT
        HALT""")
    rows = [i for _, i in p.instructions]
    assert [i.op.name for i in rows] == ["FORK", "FORK_CONTEXT", "ABORT", "SENSE", "SENSE", "SET_DEADLINE",
                                         "SET_DEADLINE",
                                         "SET_DEADLINE", "DEADLINE_AND", "IF_INTERRUPT", "IF_GREATER", "LOADV",
                                         "SIGNAL", "HALT"]
    assert rows[1].args["priority"] == "RED" and rows[2].args["resume"]
    assert rows[3].args["peripheral"] == "AUDIO_PCM" and rows[4].args["format"] == "AUDIO_PCM"
    assert rows[5].args == rows[6].args != rows[7].args
    assert not [w for w in p.warnings if "rTree" in w.message or "rA " in w.message or "rNode" in w.message]


def test_keys_name_fields_and_words_have_one_home():
    """Rows whose text would be ambiguous: every alias names a field, a word of two fields is declared positional."""
    from m3jit.frontend.binding import key_of, plan
    from m3jit.isa.table import ESCAPES, OPS
    for row in OPS:
        keys = {key_of(f) for f in row.operands()}
        assert {k.rstrip("_").upper() for k in row.key_aliases.values()} <= keys, row
        for word, hits in plan(row).clashes.items():
            assert all(f.name in row.positional for f, _ in hits), (row, word)
        if row.wide and row.code not in ESCAPES:
            assert not keys & {"LAMPORT", "DEADLINE", "EXT"}, row
        assert set(row.positional) <= {f.name for f in row.operands()}, row
        for name in row.forms:
            assert name in {r.name for r in OPS}, row


def test_no_mnemonic_stands_in_the_frontend():
    """Everything about an opcode comes from the table: no string of the frontend's code is a mnemonic."""
    import ast
    import pathlib

    import m3jit.frontend
    from m3jit.isa.table import BY_NAME
    for path in pathlib.Path(m3jit.frontend.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            value = node.value if isinstance(node, ast.Constant) else None
            assert not (isinstance(value, str) and value in BY_NAME), f"{path.name}:{node.lineno}: {value}"
