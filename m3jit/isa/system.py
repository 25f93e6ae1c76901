"""Models, profiling, versions, capabilities and the carrier of extensions."""
from m3jit.isa.escape_ops import EXTENSION_STATE, Ext, ExtFlags, ExtVersion
from m3jit.isa.fields import R1, R2, Enum, IntOrReg, Rd, Text
from m3jit.isa.io import NO_TEXT
from m3jit.isa.table import OUTSIDE, StateDoc, op

ISA_VERSION = (1, 0)

_MODEL = StateDoc("a state of the context (the weights themselves are mapped, shared and read-only)",
                  "O(1), part of the root", "handles are as they were; files stay mapped")
_CURRENT = StateDoc("the current model of the context root", "O(1), part of the root", "restored")
_QUANTS = "ANY F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q4_K Q6_K Q5_0 Q5_1 Q2_K Q3_K Q5_K IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4"


# -- models -------------------------------------------------------------------------------------------------------

@op(0xA0, "LOAD_MODEL", route="machine", why_slow="opens a file", reads=("files",), writes=("states",), state=_MODEL,
    positional=("path",))
def load_model(m, rd: Rd("state"), reference: R1("tensor") = None, path: Text[0] = NO_TEXT,
               quant: Enum(_QUANTS, bare=False)[8] = "ANY"):
    """rd = handle of the model named by the string (or by the U8 text in `reference`): a file, a content hash, or the
    name it was obtained under.  QUANT: trap unless its weight matrices are of this type.

    Traps: no such model, a damaged file, another weight type, a machine without models."""
    return m.load_model(m.text_of(path, reference, "LOAD_MODEL"), "" if quant == "ANY" else quant)


@op(0xA1, "UNLOAD_MODEL", route="machine", why_slow="changes the context's states", writes=("states",), state=_MODEL)
def unload_model(m, model: R1("state")):
    """Forget a model handle; the file is unmapped when nothing names it any more.  Traps: not a loaded model."""
    m.unload_model(model)


@op(0xA7, "SET_MODEL", route="machine", why_slow="changes a context", writes=("model",), state=_CURRENT)
def set_model(m, model: R1("state"), context: R2("context") = None):
    """The current model of this context (or of `context`) = model.  Traps: not a loaded model, a context that ended."""
    m.set_model(model, context)


@op(0xA8, "GET_MODEL", route="machine", why_slow="asks a context", reads=("model",), state=_CURRENT)
def get_model(m, rd: Rd("state"), context: R1("context") = None):
    """rd = handle of the current model of this context (or of `context`).  Traps: it has none."""
    return m.get_model(context)


@op(0xA9, "MODEL_SWITCH", route="machine", why_slow="changes the context", reads=("model",), writes=("model",),
    state=_CURRENT)
def model_switch(m, rd: Rd("state"), model: R1("state")):
    """rd = the current model (left unwritten when there was none); the current model = model."""
    before = m.ctx.model
    m.set_model(model, None)
    return before


@op(0xFC, "MODEL_LOAD_UNIFIED", route="machine", why_slow="opens a file", reads=("files",), writes=("states",),
    state=_MODEL, positional=("path",))
def model_load_unified(m, rd: Rd("state"), reference: R1("tensor") = None, path: Text[0] = NO_TEXT):
    """rd = handle of a model in any format this machine reads; otherwise as LOAD_MODEL."""
    return m.load_model(m.text_of(path, reference, "MODEL_LOAD_UNIFIED"))


@op(0xFD, "MODEL_COMPILE", route="machine", why_slow="runs the model compiler", state=OUTSIDE)
def model_compile(m, rd: Rd("tensor"), model: R1("state") = None):
    """rd = the model as a program: the bytes of a .m3b file, U8 [n].  Without `model`: the context's current one.

    Traps: an architecture the compiler does not know."""
    return m.compile_model(model)


@op(0xFE, "MODEL_QUERY", route="machine", why_slow="looks at a model", state=_MODEL, positional=("key",))
def model_query(m, rd: Rd("any"), model: R1("state") = None, key: Text[0] = NO_TEXT):
    """rd = a fact about a model (the context's current one when not given): a number, a tensor, or text as U8.

    Keys: vocab, eos, bos, layers, heads, kv_heads, embedding, context, architecture, name, and every metadata key of
    the file.  Traps: an unknown key."""
    return m.model_info(model, m.text_of(key, None, "MODEL_QUERY"))


# -- profiling ----------------------------------------------------------------------------------------------------

@op(0xA5, "PROFILE_START", route="machine", why_slow="reads a clock", writes=("profile",), state=OUTSIDE,
    positional=("tag",))
def profile_start(m, tag: Text[0] = NO_TEXT):
    """Open a profiling window of that name; windows nest and may be opened again."""
    m.profile_start(m.text(tag) or "")


@op(0xA6, "PROFILE_STOP", route="machine", why_slow="reads a clock", writes=("profile",), state=OUTSIDE,
    positional=("tag",))
def profile_stop(m, rd: Rd("int") = None, tag: Text[0] = NO_TEXT):
    """Close the window; rd = the instructions this context completed in it.  Traps: it is not open."""
    return m.profile_stop(m.text(tag) or "")


# -- extensions, versions, capabilities -----------------------------------------------------------------------------

@op(0xB0, "ESCAPE", route="machine", syntax="escape", why_slow="runs an extension", reads=("registers",),
    writes=("registers", "states"), state=EXTENSION_STATE, source="instruction set: ESCAPE layout", sample={"ext": 1})
def escape(m, ext: Ext, flags: ExtFlags = 0, version: ExtVersion = 0):
    """An extension instruction: calls extension `ext` with the payload.

    The head holds ext_flags (bit 0: optional, skipped where the extension is unknown), ext_version (major in the low
    half, minor in the high half), the total length and the xxHash64 of head and payload.  The payload begins with the
    number of destination and of source registers and their bytes; the rest is the extension's own.
    Traps: an unknown extension without the optional flag; what the extension refuses."""
    m.run_extension(ext, flags, (version & 0xFFFF, version >> 16))


@op(0xB4, "VERSION", route="machine", why_slow="asks the machine", positional=("part",))
def version(m, rd: Rd("int"), part: Enum("BOTH MAJOR MINOR")[0] = "BOTH"):
    """rd = version of the instruction set: major * 65536 + minor, or one of them."""
    major, minor = ISA_VERSION
    return {"BOTH": major << 16 | minor, "MAJOR": major, "MINOR": minor}[part]


_CAPABILITIES = "FEATURE OPCODE EXTENSION FEATURES"


@op(0xB5, "CAPABILITY_QUERY", route="machine", why_slow="asks the machine", positional=("kind",))
def capability_query(m, rd: Rd("int"), kind: Enum(_CAPABILITIES)[0] = "FEATURES", number: IntOrReg(fmt="q")[8, 1] = 0):
    """rd = 1 if this machine has it, else 0: a FEATURE (bit of the capability masks), an OPCODE that executes, an
    EXTENSION (any version).  FEATURES: the whole mask."""
    return m.capability(kind, number)


@op(0xB6, "CAPABILITY_ASSERT", route="machine", why_slow="asks the machine", positional=("kind",))
def capability_assert(m, kind: Enum(_CAPABILITIES)[0] = "FEATURES", number: IntOrReg(fmt="q")[8, 1] = 0):
    """Trap unless this machine has it (FEATURES: every bit of NUMBER).  Operands as CAPABILITY_QUERY."""
    m.capability_assert(kind, number)
