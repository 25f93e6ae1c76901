"""Random programs of several contexts that snapshot, roll back, call, write memory, read clocks and input, lock,
signal each other, and loop."""
from __future__ import annotations

import random

REGISTERS = 6


def random_program(seed: int, length: int = 50) -> str:
    """Assembly text that ends with HALT; some of them trap, some never end."""
    rng = random.Random(seed)
    lines = [".data", "t: .f32 [1, -2, 3]", ".text"] + [f"LOADI R{r}, {r}" for r in range(REGISTERS)]
    lines += ["LOADI R8, 0x3000000000000000", "LOADI R9, 0x6000000000000000", "FORK R7", "LOADI R10, 0",
              "LOADI R12, @t"]
    children, labels, loops = 0, 0, []
    while len(lines) < length:
        r, s = (f"R{rng.randrange(REGISTERS)}" for _ in range(2))
        kind = rng.randrange(20)
        simple = (f"LOADI {r}, {rng.randrange(-9, 9)}", f"MOV {r}, {s}",
                  f"MEMSET R8, PATTERN={rng.randrange(256)}, LEN={rng.choice((1, 3, 4100))}, "
                  f"OFFSET={rng.choice((0, 4090, 9000))}",
                  f"MEMSET R9, PATTERN={rng.randrange(256)}, LEN=2, OFFSET={rng.randrange(20)}", "FORK R7", "ABORT R7",
                  "RESTORE R7",
                  "SENSE R6, USER_INPUT", "CYCLES_COUNT R6", "STREAM R10, LINE", "MUL R12, R12, R12", "YIELD")
        if kind < len(simple):
            lines.append(simple[kind])
        elif kind in (15, 16):
            lines.append(f"{'LOCK' if kind == 15 else 'UNLOCK'} NUMBER={rng.randrange(2)}")
        elif kind == 17:
            lines.append(f"SIGNAL R6, KIND={rng.choice(('INTERRUPT', 'PING', 'ABORT', 'HALT'))} "
                         f"CTX={rng.randrange(1, 5)}")
        elif kind == 18:
            labels += 1
            lines += [f"IF_INTERRUPT after{labels}", "STREAM R3, LINE", f"after{labels}:"]
        elif kind == 12 and children < 3:
            children, labels = children + 1, labels + 1
            lines += [f"FORK R11, child{labels}, {rng.choice(('GREEN', 'BLUE'))}", "ADD R10, R10, 7", f"child{labels}:"]
        elif kind == 13 and len(loops) < 2:
            labels += 1
            loops.append(f"loop{labels}")
            lines.append(f"loop{labels}:")
        elif kind == 14 and loops:
            lines += ["ADD R10, R10, 1", f"COMPARE R10, {rng.randrange(40)}", f"IF_LESS {loops.pop()}"]
    return "\n".join([*lines, "CALL square, [R3]", "STREAM R3, LINE", "HALT", ".func square(rX)", "MUL rX, rX, rX",
                      "RET"])
