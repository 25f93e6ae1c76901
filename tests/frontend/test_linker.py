"""Modules become one program, whose text goes to bytes and back like any other."""
import pytest

from m3jit.frontend import LinkError, Program, assemble, disassemble, link, load, verify
from m3jit.isa.fields import Reg

LIB = """
.extern hook
.data
.global tab
tab: .i64 [1, 2, 3]
note: .str "lib"
p: .i64 [&note]
.text
.func f(rA, rB)
loop:
LOADI rB, @tab
LOADI rC, "hello"
LOADI sIdx, @tab
LOADI sKV, @tab
CALL hook
IF_EQUAL loop
RET
"""
MAIN = """
.import "lib.m3b" AS lib
.global hook
.data
x: .f32 [1, 2]
.text
LOADI rX, 1
loop:
CALL lib.f ARGS=[rX, rY]
LOADI rX, "hello"
LOADI sKV, @x
LOADI rX, @lib.tab
IF_EQUAL loop
HALT
.func hook()
RET
"""


@pytest.fixture
def linked(tmp_path) -> Program:
    (tmp_path / "lib.m3b").write_bytes(assemble(LIB, "lib.m3asm").to_bytes())
    return link([assemble(MAIN, str(tmp_path / "main.m3asm"))])


def test_calls_values_and_strings_meet(linked):
    assert verify(linked) == [] and linked.unresolved == [] and linked.imports == []
    rows = dict((pc, i) for pc, i in linked.instructions)
    f = linked.symbol("f").value
    call = next((pc, i) for pc, i in linked.instructions if i.op.control == "call")
    assert call[0] + call[1].args["target"] == f
    hook = next((pc, i) for pc, i in linked.instructions if pc > f and i.op.control == "call")
    assert hook[0] + hook[1].args["target"] == linked.symbol("hook").value
    assert linked.value(linked.symbol("tab")).data.tolist() == [1, 2, 3]
    assert linked.data.count(b"hello") == 1, "the same string of two modules is one"
    assert rows[f].op.name == "LOADV"


def test_local_names_do_not_meet(linked):
    assert linked.symbol("loop").value != linked.symbol("loop.2").value
    branches = [(pc, pc + i.args["target"]) for pc, i in linked.instructions if i.op.control == "branch"]
    assert [t for _, t in branches] == [linked.symbol("loop").value, linked.symbol("loop.2").value]


def test_state_registers_of_modules_do_not_collide(linked):
    """sKV is S0 in both sources' own numbering or not: after linking one name is one register, two names are two."""
    assert linked.register("sKV") == linked.register("sKV", "f") == Reg(2, 0)
    assert linked.register("sIdx") == Reg(2, 1)
    f = linked.symbol("f").value
    states = [i.args["rd"] for pc, i in linked.instructions if pc > f and i.args.get("rd", Reg(0, 0)).bank == 2]
    assert states == [Reg(2, 1), Reg(2, 0)]


def test_the_result_goes_through_text_and_bytes(linked):
    again = assemble(disassemble(linked))
    for part in ("text", "data", "symbols", "relocs", "imports", "lines", "entry"):
        assert getattr(again, part) == getattr(linked, part), part
    assert load(linked.to_bytes()).to_bytes() == linked.to_bytes()


def test_undefined_names_have_a_hint():
    with pytest.raises(LinkError, match="foo is defined nowhere; did you mean fooo?"):
        link([assemble(".extern foo\nCALL foo\nHALT"), assemble(".func fooo()\nRET")])
    p = link([assemble(".extern foo\nCALL foo\nHALT")], allow_undefined=True)
    assert p.unresolved == ["foo"] and verify(p) == []


def test_every_problem_is_reported(tmp_path):
    (tmp_path / "bad.m3b").write_bytes(b"nonsense")
    main = assemble('.import "bad.m3b" AS a\n.import "none.m3b" AS b\nHALT', str(tmp_path / "m.m3asm"))
    with pytest.raises(LinkError) as caught:
        link([main])
    assert len(caught.value.problems) == 2 and "not a program" in str(caught.value) and "none.m3b" in str(caught.value)


def test_a_module_that_does_not_export(tmp_path):
    (tmp_path / "lib.m3b").write_bytes(assemble(LIB).to_bytes())
    main = assemble('.import "lib.m3b" AS lib\nCALL lib.g\nHALT', str(tmp_path / "m.m3asm"))
    with pytest.raises(LinkError, match="does not export g"):
        link([main])


def test_two_exports_of_one_name():
    with pytest.raises(LinkError, match="f is exported by .* too"):
        link([assemble(".func f()\nRET"), assemble(".func f()\nRET")])


def test_code_is_not_a_value():
    with pytest.raises(LinkError, match="x is called, but it is data"):
        link([assemble(".extern x\nCALL x\nHALT"), assemble(".data\n.global x\nx: .f32 1\n.text\nRET")])


def test_imports_import_each_other_once(tmp_path):
    (tmp_path / "a.m3b").write_bytes(assemble('.import "b.m3b" AS b\n.func fa()\nCALL b.fb\nRET',
                                              str(tmp_path / "a")).to_bytes())
    (tmp_path / "b.m3b").write_bytes(assemble('.import "a.m3b" AS a\n.func fb()\nCALL a.fa\nRET',
                                              str(tmp_path / "b")).to_bytes())
    p = link([assemble('.import "a.m3b" AS a\n.import "b.m3b" AS b\nCALL a.fa\nCALL b.fb\nHALT', str(tmp_path / "m"))])
    assert len(p.instructions) == 7 and verify(p) == []
