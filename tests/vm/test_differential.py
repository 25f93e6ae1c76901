"""Random programs with loops, branches, calls, forks, aborts and children: interpreted and compiled runs agree in every
register, flag, output, in the order of outputs of all contexts, and at every point where a step limit cuts them off."""
from __future__ import annotations

import random
import struct

import pytest

from m3jit.errors import LimitError, M3Error
from m3jit.vm.vm import VM
from tests.vm.programs import machine

INTS = ("R1", "R2", "R3", "R4")
FLOATS = ("R5", "R6")
BINARY = ("ADDS", "SUB", "MULS", "AND", "OR", "XOR", "SHL", "SHR", "SAR", "MIN", "MAX")


def statement(rng: random.Random) -> str:
    """One instruction that cannot trap."""
    d, a, b = (rng.choice(INTS) for _ in range(3))
    f, g, h = (rng.choice(FLOATS) for _ in range(3))
    n = rng.choice((1, 2, 3, 7, -5, 63, 2 ** 40, -2 ** 63))
    return rng.choice((
        lambda: f"{rng.choice(BINARY)} {d}, {a}, {b}",
        lambda: f"{rng.choice(('ADDI', 'SUBI', 'MULI', 'DIVI', 'MODI', 'XORI', 'SHRI', 'MAXI'))} {d}, {a}, {n}",
        lambda: f"{rng.choice(('ADDS', 'SUB', 'MULS', 'DIV', 'MIN', 'MAX'))} {f}, {g}, {h}",
        lambda: f"LOADI {d}, {n}", lambda: f"MOV {d}, {a}", lambda: f"NEG {f}, {g}", lambda: f"NEG {d}, {a}",
        lambda: f"SELECT {d}, {a}, {b}, {d}", lambda: f"CVT {f}, {a}, FLOAT", lambda: f"CVT {d}, {g}, INT",
        lambda: f"COMPARE {a}, {b}", lambda: f"COMPARE {f}, {g}", lambda: f"COMPARE {a}, {rng.choice((0, 1, -3, 2.5))}",
    ))()


class Writer:
    """Builds the text; loops count down in registers of their own, so that every program ends."""

    def __init__(self, rng: random.Random):
        self.rng, self.lines, self.labels, self.counters = rng, [], 0, 20

    def label(self) -> str:
        self.labels += 1
        return f"l{self.labels}"

    def block(self, depth: int, slow: bool) -> None:
        rng = self.rng
        for _ in range(rng.randrange(2, 6)):
            kind = rng.random()
            if depth and kind < 0.3:
                counter, top = f"R{self.counters}", self.label()
                self.counters += 1
                self.lines += [f"LOADI {counter}, {rng.choice((1, 2, 5, 40))}", f"{top}:"]
                self.block(depth - 1, slow)
                self.lines += [f"SUBI {counter}, {counter}, 1", f"COMPARE {counter}, 0", f"IF_GREATER {top}"]
            elif depth and kind < 0.5:
                skip = self.label()
                test = rng.choice(("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"))
                self.lines += [statement(rng), f"IF_{test} {skip}"]
                self.block(depth - 1, slow)
                self.lines.append(f"{skip}: NOP")
            elif slow and kind < 0.62:
                self.lines.append(rng.choice((f"STREAM {rng.choice(INTS)}", f"STREAM {rng.choice(FLOATS)}", "FORK R10",
                                              "ABORT R10", "CALL sub ARGS=[R2, R5]", "PREEMPT_CHECK R7", "YIELD")))
            else:
                self.lines.append(statement(rng))


def program(seed: int) -> str:
    rng = random.Random(seed)
    w = Writer(rng)
    for r in INTS:
        w.lines.append(f"LOADI {r}, {rng.randrange(-100, 100)}")
    for r in FLOATS:
        w.lines.append(f"LOADI {r}, {rng.uniform(-9, 9)!r}")
    children = rng.randrange(3)
    for i in range(children):
        w.lines += [f"FORK R{11 + i}, child{i}, {rng.choice(('GREEN', 'GREEN', 'BLUE', 'RED'))}"]
    for name in ["main", *(f"child{i}" for i in range(children))]:
        w.lines.append(f"{name}:")
        w.block(3, True)
        w.lines.append("HALT")
    w.lines += ["sub: XORI R0, R0, 77", "ADDS R1, R1, R1", "RET"]
    return "\n".join(w.lines)


def outcome(source: str, backend: str, max_steps: int) -> tuple:
    vm: VM = machine(source, backend=backend, max_steps=max_steps, threads=1)
    got: list[str] = []
    vm.set_sink("OUTPUT", lambda x: got.append(x))
    ended = ""
    try:
        vm.run()
    except LimitError:
        ended = "limit"
    except M3Error as e:
        ended = str(e)
    registers = {str(r): struct.pack("<d", v) if isinstance(v, float) else repr(v)
                 for r, v in vm.main.live_registers().items()}
    return ended, got, registers, vm.main.flags, vm.retired


@pytest.mark.parametrize("seed", [*range(12), 161, 253])       # the last two found mistakes once
def test_compiled_and_interpreted_programs_agree(seed):
    source = program(seed)
    whole = outcome(source, "interpreter", 200_000)
    assert outcome(source, "cpu", 200_000) == whole, source
    rng = random.Random(seed)
    for _ in range(3):
        cut = rng.randrange(1, max(2, whole[-1]))
        assert outcome(source, "cpu", cut) == outcome(source, "interpreter", cut), f"cut at {cut}\n{source}"
