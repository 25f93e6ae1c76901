"""The witnesses of the scalar operations notice plausible mistakes: each mutant changes one operation, and the same
checks that the real one passes must fail.  And: every opcode of the machine's families occurs in these tests."""
from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from m3jit.ir import eager_scalar
from m3jit.ir.eager_scalar import INT_MAX, INT_MIN, float_to_int, wrap64
from m3jit.isa.table import OPS
from tests.vm.test_scalar_ops import EDGES, WITNESS, as64, one, same_float

PAIRS = [(a, b) for a in EDGES for b in EDGES]
FAMILIES = {f"m3jit.isa.{n}" for n in ("control", "alu", "io", "memory", "contexts", "system")}


def integers(name):
    return lambda: all(one(name, a, b) == WITNESS[name](a, b) for a, b in PAIRS)


def division():
    return all(one("DIV", a, b) == as64(abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)) for a, b in PAIRS if b)


def remainder():
    return all(one("MOD", a, b) == math.copysign(1, a) * 0 + (abs(a) % abs(b)) * (-1 if a < 0 else 1)
               for a, b in PAIRS if b and abs(a) < 2 ** 53 and abs(b) < 2 ** 53)


def conversion():
    return [one("CVT", v, to="INT") for v in (1.9, -1.9, 2.5, math.nan, math.inf, -math.inf, 2.0 ** 63)] == \
        [1, -1, 2, 0, INT_MAX, INT_MIN, INT_MAX]


def unordered_minimum():
    return same_float(one("MIN", math.nan, 1.0), 1.0) and same_float(one("MIN", 1.0, math.nan), math.nan) and \
        same_float(one("MIN", 0.0, -0.0), -0.0)


def not_a_number():
    return same_float(one("SUB", math.inf, math.inf), math.nan) and same_float(one("DIV", 0.0, 0.0), math.nan)


def clamp(v):
    return max(INT_MIN, min(INT_MAX, v))


MUTANTS = {
    "add saturates": (integers("ADDS"), "_BINARY", "add", lambda a, b: clamp(a + b)),
    "add wraps at 32 bits": (integers("ADDS"), "_BINARY", "add", lambda a, b: (a + b + 2 ** 31) % 2 ** 32 - 2 ** 31),
    "sub swaps": (integers("SUB"), "_BINARY", "sub", lambda a, b: wrap64(b - a)),
    "mul keeps the high half's sign": (integers("MULS"), "_BINARY", "mul", lambda a, b: clamp(a * b)),
    "and is or": (integers("AND"), "_BINARY", "and", lambda a, b: a | b),
    "or is xor": (integers("OR"), "_BINARY", "or", lambda a, b: a ^ b),
    "xor is or": (integers("XOR"), "_BINARY", "xor", lambda a, b: a | b),
    "shl does not reduce its count": (integers("SHL"), "_BINARY", "shl",
                                      lambda a, b: wrap64(a << b) if 0 <= b < 64 else 0),
    "shr is arithmetic": (integers("SHR"), "_BINARY", "shr", lambda a, b: a >> (b & 63)),
    "sar is logical": (integers("SAR"), "_BINARY", "sar", lambda a, b: wrap64((a % 2 ** 64) >> (b & 63))),
    "min is unsigned": (integers("MIN"), "_BINARY", "min", lambda a, b: a if a % 2 ** 64 < b % 2 ** 64 else b),
    "max is min": (integers("MAX"), "_BINARY", "max", lambda a, b: a if a < b else b),
    "div floors": (division, "_BINARY", "div", lambda a, b: wrap64(a // b)),
    "mod has the divisor's sign": (remainder, "_BINARY", "mod", lambda a, b: a % b),
    "f2i rounds": (conversion, "_UNARY", "f2i",
                   lambda v: float_to_int(v) if v != v or math.isinf(v) else clamp(round(v))),
    "f2i wraps": (conversion, "_UNARY", "f2i", lambda v: 0 if v != v or math.isinf(v) else wrap64(int(v))),
    "fmin ignores NaN": (unordered_minimum, "_BINARY", "fmin", lambda a, b: b if a != a or b < a else a),
    "NaN keeps its sign": (not_a_number, "_BINARY", "fsub", lambda a, b: math.copysign(a - b, -1.0)),
}


@pytest.mark.parametrize("what", sorted(MUTANTS))
def test_a_wrong_operation_is_noticed(what, monkeypatch):
    check, table, op, mutant = MUTANTS[what]
    assert check()
    operations = getattr(eager_scalar, table)
    monkeypatch.setitem(operations, op, (operations[op][0], mutant))
    assert not check()


def test_every_opcode_of_the_machine_occurs_in_these_tests():
    text = "\n".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    words = set(re.findall(r"[A-Z][A-Z0-9_]+", text))
    rows = [r for r in OPS if r.executable and r.body.__module__ in FAMILIES]
    assert len(rows) >= 90
    forms = {"LOADF", "LOADS", "LOADV", "LOADA", "FORK_CONTEXT"}       # written LOADI and FORK in assembly
    assert {r.name for r in rows} - words <= forms
