"""ALU, COMPARE and IF_* against witnesses that share nothing with the implementation: Python's big integers reduced by
hand, `struct`, `fractions`, NumPy's f64."""
from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3jit.errors import Trap
from m3jit.isa.types import BF16, F16, F32, I8, I64, U8, Tensor
from m3jit.vm.vm import VM
from tests.vm.programs import ins, run

EDGES = [0, 1, -1, 2, 63, 64, 65, 2 ** 31, -2 ** 31, 2 ** 53 + 1, 2 ** 63 - 1, -2 ** 63, -2 ** 63 + 1, 10 ** 18]
ints = st.one_of(st.sampled_from(EDGES), st.integers(-2 ** 63, 2 ** 63 - 1), st.integers(-5, 5))
floats = st.one_of(st.sampled_from([0.0, -0.0, 1.5, -2.5, math.inf, -math.inf, math.nan, 1e308, 5e-324]), st.floats())


def one(name: str, a, b=None, **more):
    """R2 after `name R2, R0, R1`."""
    names = [f.name for f in ins(name).op.operands() if f.positional]
    args = {n: r for n, r in zip(names, ("R2", "R0", "R1"))}
    vm = VM([ins(name, **args, **more), ins("HALT")], backend="interpreter")
    vm.set("R0", a)
    if b is not None:
        vm.set("R1", b)
    return vm.run().get("R2")


def as64(v: int) -> int:
    """Two's complement through bytes."""
    return struct.unpack("<q", (v % 2 ** 64).to_bytes(8, "little"))[0]


def unsigned(v: int) -> int:
    return struct.unpack("<Q", struct.pack("<q", v))[0]


WITNESS = {
    "ADDS": lambda a, b: as64(a + b),
    "SUB": lambda a, b: as64(a - b),
    "MULS": lambda a, b: as64(a * b),
    "AND": lambda a, b: as64(int("".join("1" if x == y == "1" else "0" for x, y in
                                         zip(f"{unsigned(a):064b}", f"{unsigned(b):064b}")), 2)),
    "OR": lambda a, b: as64(int("".join("1" if "1" in (x, y) else "0" for x, y in
                                        zip(f"{unsigned(a):064b}", f"{unsigned(b):064b}")), 2)),
    "XOR": lambda a, b: as64(int("".join("1" if x != y else "0" for x, y in
                                         zip(f"{unsigned(a):064b}", f"{unsigned(b):064b}")), 2)),
    "SHL": lambda a, b: as64(int((f"{unsigned(a):064b}" + "0" * (b % 64))[-64:], 2)),
    "SHR": lambda a, b: as64(int(("0" * (b % 64) + f"{unsigned(a):064b}")[:64], 2)),
    "SAR": lambda a, b: as64(int((f"{unsigned(a):064b}"[0] * (b % 64) + f"{unsigned(a):064b}")[:64], 2)),
    "MIN": lambda a, b: sorted([a, b])[0],
    "MAX": lambda a, b: sorted([a, b])[1],
}


@pytest.mark.parametrize("name", sorted(WITNESS))
@settings(max_examples=60, deadline=None)
@given(a=ints, b=ints)
def test_integer_operations(name, a, b):
    assert one(name, a, b) == WITNESS[name](a, b)


@settings(max_examples=150, deadline=None)
@given(a=ints, b=ints.filter(bool))
def test_division_truncates_and_the_remainder_follows(a, b):
    exact = Fraction(a, b)
    quotient = math.trunc(exact)
    assert one("DIV", a, b) == as64(quotient)
    assert one("MOD", a, b) == a - quotient * b


IMMEDIATE = {"ADDI": "ADDS", "SUBI": "SUB", "MULI": "MULS", "ANDI": "AND", "ORI": "OR", "XORI": "XOR", "SHLI": "SHL",
             "SHRI": "SHR", "SARI": "SAR", "MINI": "MIN", "MAXI": "MAX"}


@pytest.mark.parametrize("name", sorted(IMMEDIATE))
@settings(max_examples=30, deadline=None)
@given(a=ints, b=ints)
def test_immediate_forms(name, a, b):
    assert one(name, a, imm=b) == WITNESS[IMMEDIATE[name]](a, b)


@pytest.mark.parametrize("name,witness", [("DIVI", lambda a, b: as64(math.trunc(Fraction(a, b)))),
                                          ("MODI", lambda a, b: a - math.trunc(Fraction(a, b)) * b)])
@settings(max_examples=30, deadline=None)
@given(a=ints, b=ints.filter(bool))
def test_immediate_division(name, witness, a, b):
    assert one(name, a, imm=b) == witness(a, b)


def same_float(x: float, y: float) -> bool:
    """Equal bits, except that a NaN must be the canonical one."""
    if y != y:
        return struct.pack("<d", x) == struct.pack("<Q", 0x7FF8000000000000)
    return struct.pack("<d", x) == struct.pack("<d", y)


@pytest.mark.parametrize("name,f", [("ADDS", np.add), ("SUB", np.subtract), ("MULS", np.multiply), ("DIV", np.divide)])
@settings(max_examples=80, deadline=None)
@given(a=floats, b=floats)
def test_float_arithmetic(name, f, a, b):
    with np.errstate(all="ignore"):
        assert same_float(one(name, a, b), float(f(np.float64(a), np.float64(b))))


@settings(max_examples=80, deadline=None)
@given(a=floats, b=floats)
def test_float_min_max_give_b_when_unordered(a, b):
    want_min = a if a < b else b
    want_max = a if a > b else b
    assert same_float(one("MIN", a, b), want_min)
    assert same_float(one("MAX", a, b), want_max)


def test_negation():
    assert one("NEG", 5) == -5
    assert one("NEG", -2 ** 63) == -2 ** 63
    assert same_float(one("NEG", 0.0), -0.0)
    assert same_float(one("NEG", math.nan), math.nan)


@pytest.mark.parametrize("value,want", [(1.9, 1), (-1.9, -1), (math.nan, 0), (math.inf, 2 ** 63 - 1),
                                        (-math.inf, -2 ** 63), (2.0 ** 63, 2 ** 63 - 1), (-2.0 ** 63, -2 ** 63),
                                        (2.0 ** 53, 2 ** 53), (5, 5), (9.3e18, 2 ** 63 - 1)])
def test_conversion_to_integer(value, want):
    assert one("CVT", value, to="INT") == want


@settings(max_examples=100, deadline=None)
@given(a=ints)
def test_conversion_to_float_rounds_to_nearest_even(a):
    got = one("CVT", a, to="FLOAT")
    below, above = Fraction(math.nextafter(got, -math.inf)), Fraction(math.nextafter(got, math.inf))
    error = abs(Fraction(got) - a)
    assert error <= abs(below - a) and error <= abs(above - a)
    if error in (abs(below - a), abs(above - a)):
        assert struct.unpack("<Q", struct.pack("<d", got))[0] % 2 == 0


def test_select():
    assert [run(f"LOADI R0, {c}\nLOADI R1, 7\nLOADI R2, 9\nSELECT R3, R0, R1, R2\nHALT").get("R3")
            for c in (0, 1, -3)] == [9, 7, 7]
    with pytest.raises(Trap, match="different kinds"):
        run("LOADI R0, 1\nLOADI R1, 7\nLOADI R2, 9.0\nSELECT R3, R0, R1, R2\nHALT")


# -- comparing and branching --------------------------------------------------------------------------------------

ORDERS = {"IF_EQUAL": lambda a, b: a == b, "IF_NOT_EQUAL": lambda a, b: a != b, "IF_LESS": lambda a, b: a < b,
          "IF_LESS_EQUAL": lambda a, b: a <= b, "IF_GREATER": lambda a, b: a > b,
          "IF_GREATER_EQUAL": lambda a, b: a >= b}


def taken(branch: str, compare, values) -> bool:
    """Does the branch jump after the comparison?"""
    vm = VM([compare, ins(branch, target=96), ins("LOADI", rd="R9", imm=0), ins("HALT"),
             ins("LOADI", rd="R9", imm=1), ins("HALT")], backend="interpreter")
    for r, v in values.items():
        vm.set(r, v)
    return bool(vm.run().get("R9"))


@pytest.mark.parametrize("branch", sorted(ORDERS))
@settings(max_examples=40, deadline=None)
@given(pair=st.one_of(st.tuples(ints, ints), st.tuples(floats, floats)))
def test_branches_follow_the_order(branch, pair):
    a, b = pair
    assert taken(branch, ins("COMPARE", a="R0", b="R1"), {"R0": a, "R1": b}) == ORDERS[branch](a, b)


@pytest.mark.parametrize("branch", sorted(ORDERS))
def test_an_immediate_takes_the_other_kind(branch):
    order = ORDERS[branch]
    assert taken(branch, ins("COMPAREI", a="R0", imm=3), {"R0": 2.5}) == order(2.5, 3)
    # 2.5 rounds to 2 (half to even), 3.5 to 4
    assert taken(branch, ins("COMPAREF", a="R0", imm=2.5), {"R0": 2}) == order(2, 2)
    assert taken(branch, ins("COMPAREF", a="R0", imm=3.5), {"R0": 4}) == order(4, 4)
    assert taken(branch, ins("COMPAREF", a="R0", imm=math.inf), {"R0": 2 ** 63 - 1}) == order(0, 0)
    assert taken(branch, ins("COMPAREF", a="R0", imm=math.nan), {"R0": 0}) == order(math.nan, 0)
    # an integer that f64 cannot hold is rounded before it is compared
    assert taken(branch, ins("COMPAREI", a="R0", imm=2 ** 53 + 1), {"R0": 2.0 ** 53}) == order(0, 0)


@pytest.mark.parametrize("branch", sorted(ORDERS))
def test_one_element_tensors_compare_as_their_element(branch):
    for array, b in ((np.array([[3]], np.int8), 4), (np.array(2.5, np.float16), 2.5), (np.array([True]), 0)):
        values = {"R0": array, "R1": b}
        assert taken(branch, ins("COMPARE", a="R0", b="R1"), values) == ORDERS[branch](array.item(), b)


def test_nothing_compared_yet_counts_as_unordered():
    for branch in ORDERS:
        assert taken(branch, ins("NOP"), {}) == (branch == "IF_NOT_EQUAL")


@pytest.mark.parametrize("values,message", [
    ({"R0": 1, "R1": 1.0}, "different kinds"), ({"R0": np.zeros(2, np.float32), "R1": 1.0}, "one-element tensors"),
    ({"R0": np.zeros(0, np.float32), "R1": 1.0}, "one-element tensors"), ({"R0": 1}, "never written")])
def test_comparisons_that_trap(values, message):
    with pytest.raises(Trap, match=message):
        taken("IF_EQUAL", ins("COMPARE", a="R0", b="R1"), values)


# -- reading tensors ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype,array", [(F32, np.array([1.5, np.nan, -0.0], np.float32)),
                                         (F16, np.array([65504, 6e-8, -1], np.float16)),
                                         (I64, np.array([2 ** 62, -1, 0])), (I8, np.array([-128, 127, 0], np.int8)),
                                         (U8, np.array([255, 0, 1], np.uint8))])
def test_getelem_is_exact(dtype, array):
    for i, v in enumerate(array):
        got = one("GETELEM", Tensor.of(array), index=i)
        assert same_float(got, float(v)) if dtype.kind == "float" else got == int(v)


def test_getelem_of_bfloat16():
    bits = np.array([0x3FC0, 0xFF80, 0x7FC1], np.uint16)
    wide = [struct.unpack("<f", struct.pack("<I", int(b) << 16))[0] for b in bits]
    for i, v in enumerate(wide):
        assert same_float(one("GETELEM", Tensor(BF16, (3,), bits), index=i), v)


def test_getelem_index_from_a_register_and_out_of_range():
    assert run('LOADI R0, "abc"\nLOADI R1, 2\nGETELEM R2, R0, INDEX=R1\nHALT').get("R2") == ord("c")
    for index in (3, -1):
        with pytest.raises(Trap, match="it has 3 elements"):
            one("GETELEM", np.zeros(3, np.float32), index=index)


def test_dim():
    x = np.zeros((2, 0, 5), np.float32)
    assert [one("DIM", x, axis=a) for a in (0, 1, 2, -1, -3)] == [2, 0, 5, 5, 2]
    with pytest.raises(Trap, match="it has 3 dimensions"):
        one("DIM", x, axis=3)


# -- constants and moves --------------------------------------------------------------------------------------------

def test_loading_constants():
    vm = run('''
        .data
        table: .f32 [2, 2] [1, 2, 3, 4]
        .text
        LOADI rI, -7
        LOADI rF, 0x1.8p3
        LOADI rS, "héllo"
        LOADI rT, @table
        LOADI rA, &table
        HALT''')
    assert vm.get("rI") == -7 and vm.get("rF") == 12.0
    assert vm.get("rS").tobytes() == "héllo".encode()
    assert vm.get("rT").numpy().tolist() == [[1, 2], [3, 4]]
    assert vm.get("rA") >> 60 == 1


def test_moves_between_banks():
    v = np.arange(8, dtype=np.float32)
    vm = VM([ins("MOV", rd="V3", src="R0"), ins("MOV", rd="R1", src="V3"), ins("HALT")], backend="interpreter")
    vm.set("R0", v)
    assert vm.run().get("R1").numpy().tolist() == v.tolist()
    vm = VM([ins("MOV", rd="V3", src="R0"), ins("HALT")], backend="interpreter")
    vm.set("R0", v[:7])
    with pytest.raises(Trap, match=r"F32 tensor of shape \[8\]"):
        vm.run()


def test_special_registers():
    vm = run("NOP\nMOV R0, SP0\nMOV R1, SP3\nMOV R2, SP1\nCALL f ARGS=[R3]\nHALT\nf: MOV R0, SP1\nRET")
    assert [vm.get(f"R{i}") for i in range(4)] == [64, 1, 0, 1]
    with pytest.raises(Trap, match="POWER_BUDGET_MW"):
        run("MOV R0, SP12\nHALT")
