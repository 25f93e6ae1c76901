"""Control flow: HALT, COMPARE, IF_*, JUMP, IF_INTERRUPT, CALL, RET, NOP.

The flags are one number of the context's root: 0 equal, 1 less, 2 greater, 3 unordered, 4 nothing compared yet.
"""
from m3jit.isa.fields import F64, I64, R1, R2, Flags, Label, RegList
from m3jit.isa.table import StateDoc, op

FLAGS_STATE = StateDoc("the flags of the context root", "O(1), part of the root", "flags restored")
FRAMES_STATE = StateDoc("the call frames of the context root", "O(1): frames are immutable and shared",
                        "call depth and the callers' registers restored")
CONTEXT_STATE = StateDoc("the scheduler, outside the root", "not captured", "a context that ended stays ended")

MAX_CALL_DEPTH = 1024


@op(0x00, "HALT", route="control", control="halt", state=CONTEXT_STATE, writes=("scheduler",))
def halt(m):
    """End the context.  When no context is left the program ends: sinks are flushed and files completed."""
    m.halt()


@op(0x0C, "COMPARE", sub=0, forms=("COMPAREI", "COMPAREF"), writes=("flags",), state=FLAGS_STATE)
def compare(xp, a: R1("int", "float", "tensor"), b: R2("int", "float", "tensor"), flags: Flags):
    """flags = order of a against b: equal, less, greater, or unordered when one is NaN.

    A one-element tensor compares as its element.  Traps: an integer against a float (CVT first); a tensor of more or
    fewer than one element."""
    return xp.compare(a, b)


@op(0x0C, "COMPAREI", sub=1, positional=("imm",), writes=("flags",), state=FLAGS_STATE)
def compare_int(xp, a: R1("int", "float", "tensor"), imm: I64[8], flags: Flags):
    """flags = order of a against an integer immediate, which is rounded to f64 (nearest even) when a is a float."""
    return xp.compare(a, imm, immediate=True)


@op(0x0C, "COMPAREF", sub=2, positional=("imm",), writes=("flags",), state=FLAGS_STATE)
def compare_float(xp, a: R1("int", "float", "tensor"), imm: F64[8], flags: Flags):
    """flags = order of a against a float immediate, which is rounded to an integer (half to even, saturated) when a is
    an integer.  A NaN immediate is unordered with everything."""
    return xp.compare(a, imm, immediate=True)


def _branch(number: int, word: str, formula: str) -> None:
    def branch(m, target: Label[4], compared: R1("any") = None):
        return m.pc + target if m.flags_hold(number) else None
    branch.__name__ = f"if_{word.lower()}"
    branch.__doc__ = (
        f"Go to the label if the last COMPARE found a {formula} b, else to the next instruction.  "
        + ("Unordered operands, and no COMPARE yet, satisfy it." if word == "NOT_EQUAL" else
           "Unordered operands, and no COMPARE yet, do not satisfy it.")
        + "\n\nThe register, if given, is the first operand of that COMPARE; it is for the reader and for the "
        "assembler's warning, the machine does not read it.")
    op(0x0D, f"IF_{word}", sub=number, route="control", control="branch", reads=("flags",),
       state=FLAGS_STATE)(branch)


for _number, (_word, _formula) in enumerate((("EQUAL", "="), ("NOT_EQUAL", "≠"), ("LESS", "<"), ("LESS_EQUAL", "≤"),
                                             ("GREATER", ">"), ("GREATER_EQUAL", "≥"))):
    _branch(_number, _word, _formula)


@op(0x0E, "JUMP", route="control", control="jump", aliases=("JMP",))
def jump(m, target: Label[0]):
    """pc = pc of this instruction + distance."""
    return m.pc + target


@op(0x0F, "IF_INTERRUPT", route="control", control="interrupt", reads=("input",), writes=("interrupt",),
    state=StateDoc("a pending interrupt, outside the root", "not captured", "not rolled back"))
def if_interrupt(m, target: Label[4], flag: R1("int", "null") = None):
    """Go to the label if the flag register is not zero or an interrupt is pending for this context.

    Taking the branch clears the pending interrupt; a never-written flag register counts as zero.  When one comes while
    compiled code that begins with the next instruction runs, that code is left at once and this instruction looks
    again.  Between two interrupts by input a context gets at least 64 instructions done."""
    if flag or m.interrupt_pending():
        m.clear_interrupt()
        return m.pc + target
    m.no_interrupt()
    return None


@op(0x7D, "CALL", route="control", control="call", reads=("frames",), writes=("frames",), state=FRAMES_STATE)
def call(m, target: Label[4], args: RegList(count=12)[8] = ()):
    """Open a fresh GPR/VEC frame and go to the label; args[i] becomes the callee's R_i and is copied back at RET.

    All other general and vector registers of the callee start unwritten; S registers, flags and memory belong to the
    context.  Traps: more than 1024 calls deep."""
    return m.call(target, args)


@op(0x7E, "RET", route="control", control="ret", reads=("frames",), writes=("frames",), state=FRAMES_STATE)
def ret(m):
    """Close the frame CALL opened: the caller's registers come back, its argument registers take the callee's R0...,
    and execution goes on after the CALL.  Traps: no CALL to return from."""
    return m.ret()


@op(0xFF, "NOP", route="control", control="next")
def nop(m):
    """Do nothing; retires one instruction."""
