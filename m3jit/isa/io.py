"""Streams and the outside: STREAM, SENSE, DUMP, TRACE_EVENT, CYCLES_COUNT, ASSERT."""
from m3jit.isa.fields import U16, U32, Enum, IntOrReg, PayloadFlag, R, R1, R2, Rd, Text
from m3jit.isa.table import OUTSIDE, StateDoc, op

NO_TEXT = 2 ** 64 - 1              # the word of an absent string operand

_OUT = StateDoc("the sink, outside the root; the bytes of an unfinished code point in the root",
                "O(1), part of the root", "what was written stays written; the unfinished code point comes back")
_IN = StateDoc("the position in the source, a root value; the device itself outside the root", "O(1), part of the root",
               "the same items are read again while the source still has them, else a trap")


@op(0x03, "STREAM", route="machine", why_slow="writes to the outside", writes=("output",), state=_OUT,
    positional=("sink", "format"), key_aliases={"PATH": "NAME", "FILE": "NAME"})
def stream(m, src: R1("tensor", "int", "float"), sink: Enum("OUTPUT ERROR FILE RING SINK")[0] = "OUTPUT",
           format: Enum("AUTO TEXT RAW AUDIO_PCM TENSOR")[1] = "AUTO", blocking: PayloadFlag(0, "DROP")[2] = True,
           line: PayloadFlag(1)[2] = False, model: R("state")[3] = None, rate: U32[4] = 24000,
           name: Text[8] = NO_TEXT):
    """Write src to a sink: OUTPUT (standard output), ERROR, FILE (NAME is its path), RING or SINK (by NAME).

    TEXT: numbers in decimal (floats in their shortest exact form), U8 vectors as UTF-8, other tensors as nested lists;
    with MODEL the integers are token ids and their text is written, never half a code point.  LINE adds a line feed.
    RAW: the bytes of the tensor (numbers: 8 bytes).  AUDIO_PCM: samples [n] or [n, channels] at RATE.  TENSOR: the
    tensor itself (.npy in files).  AUTO: what the file's name asks for, else TEXT for numbers and U8 vectors.
    A full ring makes the context wait (BLOCKING) or loses the item (DROP).
    Traps: a form the sink does not store, an unknown sink, a file outside the directory the machine allows."""
    m.stream(src, sink, m.text(name), format, rate, line, blocking, model)


@op(0x06, "SENSE", route="machine", why_slow="reads from the outside", reads=("input",), state=_IN,
    positional=("peripheral", "format"), key_aliases={"PATH": "NAME", "FILE": "NAME"})
def sense(m, rd: Rd("any"), status: R1("int", dest=True) = None,
          peripheral: Enum("AUDIO VAD TOKEN USER_INPUT AUDIO_PCM CODEC_FRAME FILE TIME RING NAMED",
                           (0, 1, 3, 5, 6, 7, 8, 9, 10, 11))[0] = "USER_INPUT",
          format: Enum("AUTO TEXT RAW AUDIO_PCM TENSOR")[1] = "AUTO",
          blocking: PayloadFlag(0, "NON_BLOCKING")[2] = True,
          model: R("state")[3] = None, count: IntOrReg(fmt="I")[4, 16] = 0, name: Text[8] = NO_TEXT):
    """rd = the next item of a source; status = 1 (a value), 0 (nothing now, NON_BLOCKING only) or -1 (the end).

    USER_INPUT and TOKEN are what the host pushes; FILE reads NAME (.wav: samples, .npy: rows, else bytes), COUNT
    frames, rows or bytes at a time (0: all); RING reads what a STREAM wrote; TIME is the wall clock in ns since 1970;
    the others are sources the host attaches under their name (NAMED: under NAME).  Text becomes its UTF-8 bytes, with
    MODEL its token ids (I64).  At the end, and when nothing is there, rd is an empty tensor.
    Traps: no such source; an item that a rollback asks for again and the source no longer has."""
    return m.sense(peripheral, m.text(name), format, count, blocking, model)


@op(0x6A, "CYCLES_COUNT", route="machine", why_slow="reads a clock", reads=("clock",), state=OUTSIDE,
    positional=("what",))
def cycles_count(m, rd: Rd("int"), what: Enum("TIME STEPS")[0] = "TIME"):
    """rd = nanoseconds of a monotonic clock, or STEPS: the instructions this context has completed.

    TIME differs between runs; a recorded run replays it.  STEPS is the same on every machine."""
    return m.clock_ns() if what == "TIME" else m.ctx.retired


@op(0x6B, "TRACE_EVENT", route="machine", why_slow="writes the trace", writes=("trace",), state=OUTSIDE)
def trace_event(m, event: R1("int"), data: R2("int") = None):
    """Append (event, data) to the machine's trace, which keeps the newest 1024."""
    m.trace_event(event, data or 0)


@op(0x6E, "ASSERT", route="machine", why_slow="may end the context", reads=("registers",),
    positional=("code",))
def assert_(m, cond: R1("int"), code: U16[0] = 0, message: Text[8] = NO_TEXT):
    """Trap with CODE and MESSAGE if cond is 0."""
    if not cond:
        text = m.text(message)
        m.trap_with_code(f"assertion {code} failed" + (f": {text}" if text else ""), code)


@op(0x6F, "DUMP", route="machine", why_slow="writes to standard error", reads=("registers",), state=OUTSIDE)
def dump(m):
    """Print this context (position, flags, written registers) on standard error."""
    m.dump()
