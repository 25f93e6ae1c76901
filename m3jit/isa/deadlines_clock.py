"""Deadlines and clocks: 0x71, 0x72, 0x78-0x7B, and trees of deadlines 0xD0-0xD7.

Times are nanoseconds; absolute ones count from the machine's start.  A deadline never changes a result: it orders
contexts, and what happens when it is missed is the program's to say.
"""
from m3jit.isa.fields import F32, I64, R1, U8, Enum, PayloadFlag, Rd, RegField, RegList
from m3jit.isa.table import OUTSIDE, StateDoc, op

TREE = StateDoc("a deadline tree of the scheduler, outside the context root", "not captured",
                "not rolled back: time goes on")
Node = R1("int", "state")
Tree = RegField(slot=0, kinds=("state",), banks=(2, 0), both=True)
_CLOCK = "clock resilience of the M3-AVM map"
_TREE = "deadline trees of the M3-AVM map"


@op(0x71, "SET_DEADLINE", route="absent", state=OUTSIDE, positional=("relative",),
    source="earliest-deadline-first scheduling")
def set_deadline(m, node: R1("int", "state", both=True, banks=(0, 2)), relative: I64[0] = -1):
    """`SET_DEADLINE rAbs`: this context's absolute deadline = rAbs (-1: none).  `SET_DEADLINE rNode, 80000000`: a node
    of a deadline tree falls due that many ns from now; an empty register gets a new leaf.  Sets SP6."""


@op(0x72, "GET_DEADLINE", route="absent", state=OUTSIDE, source="earliest-deadline-first scheduling")
def get_deadline(m, rd: Rd("int"), node: R1("state") = None):
    """rd = absolute deadline of this context, or of a node of a tree; -1: none."""


@op(0x78, "CLOCK_QUERY", route="absent", state=OUTSIDE, source=_CLOCK)
def clock_query(m, rd: Rd("int"), what: Enum("NOW HEALTH OFFSET DRIFT")[0] = "NOW"):
    """rd = NOW ns since the machine's start; HEALTH 0 ok, 1 drifting, 2 jumped, 3 frozen; OFFSET to the cluster's clock
    in ns; DRIFT in parts per billion.  Recorded, so that a replay reads the same."""


@op(0x79, "CLOCK_SYNC", route="absent", state=OUTSIDE, source=_CLOCK)
def clock_sync(m, rd: Rd("int") = None, timeout: I64[0] = 1000000000):
    """Synchronise with the cluster's clock now; rd = the offset in ns.  A jump over 100 ms marks the clock as
    suspect."""


@op(0x7A, "CLOCK_ADJUST", route="absent", state=OUTSIDE, source=_CLOCK)
def clock_adjust(m, offset: R1("int") = None, by: I64[0] = 0, slew: PayloadFlag(0)[8] = False):
    """Add an offset in ns (a register, or BY) to this machine's clock; SLEW: at most 500 ppm at a time.  Sets SP18."""


@op(0x7B, "DEADLINE_NEGOTIATE", route="absent", state=TREE, source=_CLOCK)
def deadline_negotiate(m, rd: Rd("int"), node: R1("int", "state"), wanted: I64[0] = 0, least: I64[8] = 0):
    """Ask everyone who waits for a deadline to accept WANTED ns from now, or at least LEAST; rd = what was agreed, or
    -1."""


def _tree(code: int, name: str, rule: str) -> None:
    def body(m, tree: Tree, children: RegList(count=12, both=True)[0] = ()):
        pass                                           # absent: only its signature is used
    body.__doc__ = f"""tree = a deadline that is met when {rule}.

    CHILDREN are leaves or trees; an empty register gets a new leaf.  A missed child is reported upwards.  Errors: no
    children; a cycle."""
    op(code, name, route="absent", state=TREE, source=_TREE)(body)


_tree(0xD0, "DEADLINE_AND", "all children are met; it falls due with the earliest")
_tree(0xD1, "DEADLINE_OR", "any child is met; it falls due with the latest")


@op(0xD2, "DEADLINE_N_OF_M", route="absent", state=TREE, source=_TREE)
def deadline_n_of_m(m, tree: Tree, children: RegList(count=12, both=True)[0] = (), n: U8[13] = 1):
    """tree = a deadline that is met when N of the children are met; it falls due when that is no longer possible.

    Errors: N = 0 or over the number of children; a cycle."""


_tree(0xD3, "DEADLINE_CHAIN", "the children are met one after the other, each counted from the one before")


@op(0xD4, "DEADLINE_QUERY", route="absent", state=TREE, source=_TREE)
def deadline_query(m, rd: Rd("int"), tree: R1("state"), what: Enum("STATUS REMAINING DUE MISSED")[0] = "STATUS"):
    """rd = STATUS 0 open, 1 met, 2 missed; REMAINING ns; DUE absolute; MISSED number of missed leaves."""


@op(0xD5, "DEADLINE_RELAX", route="absent", state=TREE, source=_TREE)
def deadline_relax(m, tree: R1("int", "state", both=True, banks=(0, 2)), factor: F32[0] = 2.0):
    """Time left of an open deadline *= FACTOR.  Errors: a factor below 1."""


@op(0xD6, "DEADLINE_TIGHTEN", route="absent", state=TREE, source=_TREE)
def deadline_tighten(m, tree: R1("int", "state", both=True, banks=(0, 2)), factor: F32[0] = 0.5):
    """Time left of an open deadline *= FACTOR.  Errors: a factor outside (0, 1]."""


@op(0xD7, "DEADLINE_RESET", route="absent", state=TREE, source=_TREE)
def deadline_reset(m, tree: R1("state", both=True)):
    """Open every deadline of the tree again, each with its first length, counted from now."""
