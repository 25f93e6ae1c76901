"""The builder: equal to what the assembler makes of the same program, registers, data, places, errors."""
from __future__ import annotations

import numpy as np
import pytest

import m3jit
from m3jit import Builder, BuilderError
from m3jit.isa.table import OPS
from tests.api.outcomes import exact
from tests.api.random_programs import generate


def same_as_text(b: Builder, text: str) -> None:
    """The built program is the assembled one, apart from where its lines come from."""
    built, assembled = b.build(), m3jit.assemble(text)
    assert built.lines and all(line.file == "test_builder.py" for line in built.lines)
    built.lines = assembled.lines = []
    assert m3jit.disassemble(built) == m3jit.disassemble(assembled)
    assert built.to_bytes() == assembled.to_bytes()


def test_equal_to_the_assembler():
    b = Builder()
    x, y = b.input("rX"), b.input("rY")
    b.op.MUL(x, y, rd="rA")
    b.op.SOFTMAX(b.register("rA"), axis=0, temp=0.5, rd="rB")
    b.op.NORM(b.register("rB"), None, y, "LAYER", rd="rC")
    b.op.STREAM(b.register("rC"), "LINE")
    b.op.TENSOR(shape=(2, -1 + 4), dtype=np.int32, fill=3, rd="rT")
    b.op.REDUCE(b.register("rT"), "MAX", axis=1, keepdims=True, rd="rM")
    b.op.TRANSPOSE(b.register("rT"), (1, 0), rd="rT")
    b.halt()
    same_as_text(b, """
        .reg rX R0
        .reg rY R1
        MUL rA, rX, rY
        SOFTMAX rB, rA, AXIS=0, TEMP=0.5
        NORM rC, rB, _, rY, LAYER
        STREAM rC, LINE
        TENSOR rT, SHAPE=2x3, DTYPE=I32, FILL=3
        REDUCE rM, rT, MAX, AXIS=1, KEEPDIMS
        TRANSPOSE rT, rT, [1, 0]
        HALT""")


def test_labels_data_strings_functions_and_states():
    b = Builder()
    b.data("table", np.arange(6, dtype=np.float32).reshape(2, 3))
    b.string("hello", "hi\n")
    b.model("M", "some.gguf")
    n = b.op.LOADI(0, rd="rN")
    b.label("top")
    b.op.STREAM(n, "LINE")
    b.op.ADD(n, 1, rd=n)
    b.op.COMPARE(n, 10)
    b.op.IF_LESS("top")
    end = b.forward("end")
    b.jump(end)
    b.op.LOADI("text", rd="rS")
    b.op.LOADI(b.address("table", 4), rd="rP")
    b.op.CALL("twice", [n, b.register("rS")])
    b.place(end)
    b.op.ATTN(n, n, n, b.state("sKV"), heads=2, rd="rQ")
    b.halt()
    rIn, rOut = b.function("twice", ["rIn", "rOut"])
    b.op.ADD(rIn, rIn, rd=rOut)
    b.op.RET()
    b.export("top")
    same_as_text(b, """
        .data
        table: .f32 [[0, 1, 2], [3, 4, 5]]
        hello: .str "hi\\n"
        .text
        .model M "some.gguf"
        .global top
        LOADI rN, 0
    top:
        STREAM rN, LINE
        ADD rN, rN, 1
        COMPARE rN, 10
        IF_LESS top
        JUMP end
        LOADI rS, "text"
        LOADI rP, &table+4
        CALL twice ARGS=[rN, rS]
    end:
        ATTN rQ, rN, rN, rN, sKV, HEADS=2
        HALT
        .func twice(rIn, rOut)
        ADD rOut, rIn, rIn
        RET""")


@pytest.mark.parametrize("seed", range(8))
def test_built_programs_go_to_text_and_back(seed):
    program = generate(seed, length=60).builder.build()
    text = m3jit.disassemble(program)
    assert m3jit.assemble(text, "<builder>").to_bytes() == program.to_bytes()
    assert not m3jit.verify(program)


def test_every_mnemonic_has_a_method():
    b = Builder()
    for row in OPS:
        assert getattr(b.op, row.name).__doc__.startswith(row.name)
    assert {"MUL", "SOFTMAX", "COMPAREI"} <= set(dir(b.op))
    with pytest.raises(AttributeError, match="did you mean SOFTMAX"):
        b.op.SOFTMX


def test_immediate_forms_and_loaded_numbers():
    b = Builder()
    x, k = b.input("rX", "tensor"), b.input("rK", "int")
    outs = [b.op.ADD(x, 2.5), b.op.ADD(x, 3), b.op.ADD(k, 3), b.op.MUL(x, np.float32([1, 2, 3])), b.op.MUL(2.0, x),
            b.op.SUB(k, 1)]
    b.halt()
    got = b.compile(outputs=outs)(np.float32([1, -1, 5]), 7)
    assert [v.tolist() if isinstance(v, np.ndarray) else v for v in got] == \
        [[3.5, 1.5, 7.5], [4, 2, 8], 10, [1, -2, 15], [2, -2, 10], 6]
    assert [ins.op.name for _, ins in b.build().instructions] == \
        ["LOADF", "ADD", "LOADI", "ADD", "ADDI", "LOADV", "MUL", "LOADF", "MUL", "SUBI", "HALT"]


def test_constants_are_kept_once():
    b = Builder()
    for _ in range(3):
        b.const(np.ones(100, np.float32))
    b.const(np.ones(100, np.int32))
    assert len(b.build().data) == 848                          # the second at a cache line


def test_several_destinations_and_optional_ones():
    b = Builder()
    x = b.input("rX")
    values, places = b.op.TOPK(x, 2, indices=True)
    only = b.op.SORT(x, order="DESC")
    clean, count = b.op.SANITY_CHECK(x, count=True)
    b.halt()
    x0 = np.float32([3, np.inf, 1])
    got = b.compile(outputs=[values, places, only, clean, count])(x0)
    assert [np.asarray(v).tolist() for v in got] == [[np.inf, 3], [1, 0], [np.inf, 3, 1], [3, 0, 1], 1]


def test_renamed_results_are_found_by_name():
    b = Builder()
    b.rename(b.op.EXP(b.input("rX")), "rY")
    b.halt()
    program = b.build()
    assert m3jit.compile(program, ["rX"], ["rY"])(np.float32([0])).tolist() == [1]
    assert m3jit.compile(b, ["rX"], ["rY"])(np.float32([0])).tolist() == [1]


def test_more_results_than_registers():
    """400 temporaries, a value that lives through all of them, and a loop around some."""
    b = Builder()
    x = b.input("rX")
    first = b.op.ADD(x, 1.0)
    acc = b.op.MOV(x, rd="rAcc")
    n = b.op.LOADI(0, rd="rN")
    b.label("top")
    inside = b.op.ADD(first, 2.0)
    for i in range(400):
        acc = b.op.ADD(acc, b.op.MUL(first, 0.5), rd=acc)
        if i == 390:
            b.op.ADD(acc, inside, rd=acc)
    b.op.ADD(n, 1, rd=n)
    b.op.COMPARE(n, 3)
    b.op.IF_LESS("top")
    last = b.op.ADD(acc, first)
    b.halt()
    x0 = np.float32([1.0])
    f = b.compile(outputs=[last, acc])
    want = x0[0] + 3 * (400 * 1.0 + 4.0)
    assert f(x0)[1].tolist() == [want] and f(x0)[0].tolist() == [want + 2]
    assert exact(f(x0)[0]) == exact(b.compile(outputs=[last], backend="interpreter")(x0))


def test_out_of_registers():
    b = Builder()
    values = [b.const(float(i)) for i in range(300)]
    with pytest.raises(BuilderError, match="more than 255 registers of bank R are needed at once"):
        for i in range(299):
            b.op.ADD(values[i], values[i + 1])
        for v in values:
            b.op.ADD(v, v)
        b.build()
    c = Builder()
    with pytest.raises(BuilderError, match="have a name"):
        for i in range(256):
            c.op.LOADI(i, rd=f"rN{i}")
        c.build()


def test_traps_name_the_python_line():
    b = Builder()
    x = b.input("rX")
    b.op.ADD(x, x)
    b.op.RESHAPE(x, (7,))                                      # this line
    b.halt()
    with pytest.raises(m3jit.Trap) as trap:
        b.compile(outputs=[x])(np.float32([1, 2]))
    here = next(i for i, line in enumerate(open(__file__), 1) if "# this line" in line)
    assert trap.value.line == ("test_builder.py", here)


@pytest.mark.parametrize("write, message", [
    (lambda b, x: b.op.SOFTMAX(x, axes=1), "no option axes; did you mean AXIS"),
    (lambda b, x: b.op.MUL(x), "MUL needs register b; usage: MUL rD, a, b"),
    (lambda b, x: b.op.MUL(x, x, x), "no place for"),
    (lambda b, x: b.op.SOFTMAX(x, axis=1000), "1000 is not an integer in -128..127"),
    (lambda b, x: b.op.REDUCE(x, "SUMM"), "expected OP="),
    (lambda b, x: b.op.SOFTMAX("rX"), "expected register x, got 'rX'"),
    (lambda b, x: b.op.RESHAPE(x, (1,) * 6), "at most 5 dimensions"),
    (lambda b, x: b.op.SOFTMAX(x, axis=0, AXIS=1), "AXIS is given twice"),
    (lambda b, x: b.op.CAST(x, np.complex64), "CAST"),
    (lambda b, x: b.op.ADD(x, np.ones(2, np.complex64)), "no tensor type for NumPy dtype complex64"),
    (lambda b, x: b.register("X"), "cannot name a register"),
    (lambda b, x: b.label("rX"), "cannot name"),
    (lambda b, x: (b.label("a"), b.label("a")), "a is already defined"),
    (lambda b, x: (b.function("f", ["x"])), "cannot name a parameter"),
    (lambda b, x: (b.function("f", ["rA"]), b.op.ADD(x, x)), "belongs to another function"),
    (lambda b, x: (b.jump("nowhere"), b.build()), "label nowhere is not placed"),
    (lambda b, x: (b.forward("a"), b.jump("b"), b.label("bb"), b.build()), "label b is not placed"),
    (lambda b, x: (b.jump(b.forward()), b.build()), "is not placed"),
    (lambda b, x: (b.op.LOADI(b.address("dat")), b.build()), "dat is not defined"),
    (lambda b, x: (b.export("zed"), b.build()), "export names zed"),
    (lambda b, x: b.tensor(b.data("d", [1.0]), "w"), "is not a model"),
    (lambda b, x: b.rename(x, "rZ"), "has a name already"),
    (lambda b, x: [1] if x else [2], "no truth value"),
])
def test_errors_say_what_to_do(write, message):
    b = Builder()
    with pytest.raises(BuilderError, match=message) as e:
        write(b, b.input("rX"))
    if "truth value" not in message:
        assert str(e.value).startswith("test_builder.py:")


def test_a_failed_instruction_leaves_no_trace():
    b = Builder()
    x = b.input("rX")
    before = len(b.build().text)
    with pytest.raises(BuilderError):
        b.op.SOFTMAX(x, axis=1000)
    assert len(b.build().text) == before
