"""Scalar operations: opcode 0x7C, one row for each sub-operation.

Integers are signed 64-bit and wrap; floats are f64.  A row that takes both needs both operands of one kind; only CVT
converts.  <NAME>I is the form with an integer immediate; the assembler picks it (SUB rD, rA, 5).
"""
from m3jit.isa.fields import (F64, GPR, I8, I64, R1, R2, R3, SPECIAL, STATE, VEC, Address, Enum, IntOrReg, Rd,
                              SymbolValue, Text)
from m3jit.isa.table import op

ALU = 0x7C
NUMBER = Rd("int", "float")
INT = Rd("int")


# -- loading constants --------------------------------------------------------------------------------------------
# Rows that read "constant" name a value which is known when the program is loaded: the machine and the compiler put
# it in place (`constant(ins)` of the loaded program) and do not run the body.

@op(ALU, "LOADI", sub=0, positional=("imm",), forms=("LOADF", "LOADS", "LOADV", "LOADA"))
def loadi(xp, rd: INT, imm: I64[8]):
    """rd = imm, a signed 64-bit integer."""
    return imm


@op(ALU, "LOADF", sub=1, positional=("imm",))
def loadf(xp, rd: Rd("float"), imm: F64[8]):
    """rd = imm, an f64."""
    return imm


@op(ALU, "LOADS", sub=2, shape="[bytes]", dtypes="U8", positional=("text",), reads=("constant",))
def loads(xp, rd: Rd("tensor"), text: Text[8]):
    """rd = the UTF-8 bytes of a string, a U8 tensor [n]."""
    return xp.constant()


@op(ALU, "LOADV", sub=3, positional=("symbol",), reads=("constant",))
def loadv(xp, rd: Rd("any", banks=(GPR, VEC, STATE)), symbol: SymbolValue[8]):
    """rd = the value `@name` stands for: a data tensor, a tensor of a model (`@model:name`), or a model's handle.

    Traps: a model that is not loaded, a tensor it does not have, a symbol without a value."""
    return xp.constant()


@op(ALU, "LOADA", sub=4, positional=("address",), reads=("constant",))
def loada(xp, rd: INT, address: Address[8]):
    """rd = the 64-bit address `&name` stands for (region in bits 60-63, offset below)."""
    return xp.constant()


# -- moves --------------------------------------------------------------------------------------------------------

@op(ALU, "MOV", sub=5)
def mov(xp, rd: Rd("any", banks=(GPR, VEC, STATE)), src: R1("any", banks=(GPR, VEC, STATE, SPECIAL))):
    """rd = src, a value of any kind.  A V register takes a F32 tensor of 8 elements.  A state handle is copied, not
    the state: both registers then name the same stream.

    Special registers read as integers: SP0 PC (of this instruction), SP1 call depth, SP3 CTX_ID, SP4 NODE_ID, SP5
    LAMPORT, SP6 DEADLINE (-1 = none), SP7 STATUS, SP8 DEVICE_ID, SP9 DEVICE_AFFINITY, SP10 DEVICE_HEALTH.  Traps: a
    special register this machine does not have."""
    return src


@op(ALU, "SELECT", sub=7)
def select(xp, rd: NUMBER, cond: R1("int"), a: R2("int", "float"), b: R3("int", "float")):
    """rd = a if cond is not 0, else b.  Traps: a and b of different kinds."""
    xp.number_kind(a, b)
    return xp.scalar("select", xp.scalar("ne", cond, 0), a, b)


# -- arithmetic ---------------------------------------------------------------------------------------------------

def _either(xp, name, a, b):
    """The integer or the float operation, by the kind of the operands."""
    return xp.scalar(name if xp.number_kind(a, b) == "int" else "f" + name, a, b)


@op(ALU, "ADDS", sub=8)
def adds(xp, rd: NUMBER, a: R1("int", "float"), b: R2("int", "float")):
    """rd = a + b.  Integers wrap.  Traps: mixed kinds."""
    return _either(xp, "add", a, b)


@op(ALU, "SUB", sub=9, aliases=("SUBS",))
def sub(xp, rd: NUMBER, a: R1("int", "float"), b: R2("int", "float")):
    """rd = a - b.  Integers wrap.  Traps: mixed kinds."""
    return _either(xp, "sub", a, b)


@op(ALU, "MULS", sub=10)
def muls(xp, rd: NUMBER, a: R1("int", "float"), b: R2("int", "float")):
    """rd = a * b.  Integers wrap.  Traps: mixed kinds."""
    return _either(xp, "mul", a, b)


@op(ALU, "DIV", sub=11, source="IEEE 754")
def div(xp, rd: NUMBER, a: R1("int", "float"), b: R2("int", "float")):
    """rd = a / b: integers truncate toward zero (-2^63 / -1 wraps to -2^63), floats follow IEEE 754 (x/0 = inf).

    Traps: integer division by zero; mixed kinds."""
    return _either(xp, "div", a, b)


@op(ALU, "MOD", sub=12)
def mod(xp, rd: INT, a: R1("int"), b: R2("int")):
    """rd = a - trunc(a / b) * b: the remainder, with the sign of a.  Traps: b = 0."""
    return xp.scalar("mod", a, b)


@op(ALU, "AND", sub=13)
def and_(xp, rd: INT, a: R1("int"), b: R2("int")):
    """rd = a & b, bit by bit."""
    return xp.scalar("and", a, b)


@op(ALU, "OR", sub=14)
def or_(xp, rd: INT, a: R1("int"), b: R2("int")):
    """rd = a | b, bit by bit."""
    return xp.scalar("or", a, b)


@op(ALU, "XOR", sub=15)
def xor(xp, rd: INT, a: R1("int"), b: R2("int")):
    """rd = a ^ b, bit by bit."""
    return xp.scalar("xor", a, b)


@op(ALU, "SHL", sub=16)
def shl(xp, rd: INT, a: R1("int"), b: R2("int")):
    """rd = a * 2^(b mod 64), wrapped."""
    return xp.scalar("shl", a, b)


@op(ALU, "SHR", sub=17)
def shr(xp, rd: INT, a: R1("int"), b: R2("int")):
    """rd = floor((a mod 2^64) / 2^(b mod 64)): zeros come in from the left."""
    return xp.scalar("shr", a, b)


@op(ALU, "SAR", sub=18)
def sar(xp, rd: INT, a: R1("int"), b: R2("int")):
    """rd = floor(a / 2^(b mod 64)): the sign comes in from the left."""
    return xp.scalar("sar", a, b)


@op(ALU, "NEG", sub=19)
def neg(xp, rd: NUMBER, a: R1("int", "float")):
    """rd = -a.  -(-2^63) wraps to -2^63."""
    return xp.scalar("neg" if xp.number_kind(a) == "int" else "fneg", a)


@op(ALU, "MIN", sub=20)
def min_(xp, rd: NUMBER, a: R1("int", "float"), b: R2("int", "float")):
    """rd = a if a < b else b (so b when either is NaN).  Traps: mixed kinds."""
    return _either(xp, "min", a, b)


@op(ALU, "MAX", sub=21)
def max_(xp, rd: NUMBER, a: R1("int", "float"), b: R2("int", "float")):
    """rd = a if a > b else b (so b when either is NaN).  Traps: mixed kinds."""
    return _either(xp, "max", a, b)


@op(ALU, "CVT", sub=22, positional=("to",))
def cvt(xp, rd: NUMBER, a: R1("int", "float"), to: Enum("INT FLOAT")[1]):
    """rd = a as an integer or a float.  FLOAT: to nearest even.  INT: toward zero, saturated at -2^63 and 2^63 - 1,
    NaN gives 0.  A value that already has the kind is copied."""
    if xp.number_kind(a) == to.lower():
        return a
    return xp.scalar("i2f" if to == "FLOAT" else "f2i", a)


# -- reading a tensor ---------------------------------------------------------------------------------------------

@op(ALU, "GETELEM", sub=23, positional=("index",))
def getelem(xp, rd: NUMBER, x: R1("tensor"), index: IntOrReg(fmt="q")[8, 1] = 0):
    """rd = element `index` of the flattened tensor: an integer for integer and BOOL tensors, else a float (exact; NaN
    becomes the canonical NaN).  Traps: an index outside 0..size-1; a block-quantised tensor."""
    return xp.element(x, index)


@op(ALU, "DIM", sub=24, positional=("axis",))
def dim(xp, rd: INT, x: R1("tensor"), axis: I8[1] = 0):
    """rd = length of an axis; -1 is the last one.  Traps: an axis the tensor does not have."""
    return xp.dim(x, axis)


# -- immediate forms ----------------------------------------------------------------------------------------------

def _immediate(number: int, base: str, scalar_op: str, formula: str, aliases: tuple[str, ...] = ()) -> None:
    def body(xp, rd: INT, a: R1("int"), imm: I64[8]):
        return xp.scalar(scalar_op, a, imm)
    body.__name__ = f"{base.lower()}_immediate"
    body.__doc__ = f"rd = {formula} with an integer immediate; otherwise as {base}."
    op(ALU, base.rstrip("S") + "I" if base in ("ADDS", "MULS") else base + "I", sub=number, positional=("imm",),
       aliases=aliases)(body)


for _args in ((40, "ADDS", "add", "a + imm", ("ADD_IMM",)), (41, "SUB", "sub", "a - imm", ("SUB_IMM",)),
              (42, "MULS", "mul", "a * imm"), (43, "DIV", "div", "trunc(a / imm)"), (44, "MOD", "mod", "a mod imm"),
              (45, "AND", "and", "a & imm"), (46, "OR", "or", "a | imm"), (47, "XOR", "xor", "a ^ imm"),
              (48, "SHL", "shl", "a * 2^(imm mod 64)"), (49, "SHR", "shr", "(a mod 2^64) / 2^(imm mod 64)"),
              (50, "SAR", "sar", "floor(a / 2^(imm mod 64))"), (51, "MIN", "min", "a if a < imm else imm"),
              (52, "MAX", "max", "a if a > imm else imm")):
    _immediate(*_args)
