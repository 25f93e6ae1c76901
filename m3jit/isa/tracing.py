"""Spans of a trace, in the W3C Trace Context model (0xE0-0xE7).  Traces stand outside the context root."""
from m3jit.isa.fields import NO_STRING, R1, R2, U8, Enum, Rd, Text
from m3jit.isa.table import StateDoc, op

TRACES = StateDoc("the trace buffer, outside the context root", "not captured",
                  "not rolled back: an aborted attempt stays visible, its open spans end with status ABORTED")
_W3C = "W3C Trace Context, OpenTelemetry"


@op(0xE0, "TRACE_SPAN_START", route="absent", state=TRACES, source=_W3C, positional=("name",))
def trace_span_start(m, span: Rd("state"), parent: R1("state") = None, name: Text[0] = NO_STRING,
                     kind: Enum("INTERNAL SERVER CLIENT PRODUCER CONSUMER")[8] = "INTERNAL"):
    """span = a new open span NAME under a parent (absent: the context's current one)."""


@op(0xE1, "TRACE_SPAN_END", route="absent", state=TRACES, source=_W3C)
def trace_span_end(m, span: R1("state"), status: Enum("UNSET OK ERROR")[0] = "UNSET"):
    """Close a span.  Errors: it is closed already."""


@op(0xE2, "TRACE_ATTR", route="absent", state=TRACES, source=_W3C, positional=("key",))
def trace_attr(m, span: R1("state"), value: R2("int", "float", "tensor") = None, key: Text[0] = NO_STRING,
               text: Text[8] = NO_STRING):
    """Set attribute KEY of a span to a register's value, or to TEXT."""


@op(0xE3, "TRACE_LINK", route="absent", state=TRACES, source=_W3C)
def trace_link(m, span: R1("state"), other: R2("state", "tensor")):
    """Link a span with another one, or with an extracted context of 25 bytes."""


@op(0xE4, "TRACE_EXPORT", route="absent", state=TRACES, source="OpenTelemetry protocol (OTLP)", positional=("to",))
def trace_export(m, rd: Rd("int") = None, to: Text[0] = NO_STRING, format: Enum("OTLP PERFETTO")[8] = "OTLP",
                 flush: U8[9] = 0):
    """Send finished spans to a collector or file TO; rd = number sent.  A collector that does not answer is no trap."""


@op(0xE5, "TRACE_INJECT", route="absent", shape="[25]", dtypes="U8", state=TRACES, source=_W3C)
def trace_inject(m, rd: Rd, span: R1("state") = None):
    """rd = version, trace id (16), span id (8): 25 bytes that TRACE_EXTRACT reads on another node."""


@op(0xE6, "TRACE_EXTRACT", route="absent", state=TRACES, source=_W3C)
def trace_extract(m, span: Rd("state"), header: R1):
    """span = the remote span that TRACE_INJECT wrote.  Errors: other than 25 bytes, an unknown version, zero ids."""


@op(0xE7, "TRACE_QUERY", route="absent", state=TRACES, source=_W3C)
def trace_query(m, rd: Rd("int"), span: R1("state") = None, what: Enum("DURATION COUNT DROPPED OPEN")[0] = "COUNT"):
    """rd = DURATION ns of a span so far, or the COUNT, DROPPED or OPEN spans of the buffer."""
