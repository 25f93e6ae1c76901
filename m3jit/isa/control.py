"""Control flow: HALT, JUMP, IF_*, IF_INTERRUPT, CALL, RET, NOP."""
from m3jit.isa.fields import I64, IntOrReg, FloatOrReg, Label, PayloadReg, R, R1, R2, Rd, Enum, RegList
from m3jit.isa.table import op


@op(0x00, "HALT", route="control", control="halt")
def halt(m):
    """End the context.  Its streams are flushed and closed; the program ends when no context is left."""
    m.halt()


@op(0x0E, "JUMP", route="control", control="jump", aliases=("JMP",))
def jump(m, target: Label[0]):
    """pc = pc of this instruction + distance."""
    return m.pc + target


@op(0xFF, "NOP", route="control", control="next")
def nop(m):
    """Do nothing."""


_PREDICATES = ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL")


def _branch(number: int, word: str) -> None:
    @op(0x0D, f"IF_{word}", sub=number, route="control", control="branch", reads=("flags",))
    def branch(m, target: Label[4], compared: R1("any") = None):
        return m.pc + target if m.flags_hold(number) else None
    return branch


for _n, _w in enumerate(_PREDICATES):
    pass
