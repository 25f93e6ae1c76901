"""Nodes of a cluster: 0x1A-0x1D, 0x4A-0x4F, and the 64-byte forms 0x80-0x8F with time, deadline and authentication.

Of these SIGNAL executes, between contexts of one machine.

A 64-byte form with LAMPORT=0, no DEADLINE and EXT=0 means the same as its 32-byte form.  LAMPORT orders messages;
after DEADLINE the instruction gives up with status 1; EXT carries a truncated HMAC, an RDMA key or a capability.
Status: 0 done, 1 deadline passed, 2 no such node or context, 3 refused.
"""
import inspect

from m3jit.isa.fields import (NO_STRING, R1, I64, Enum, IntOrReg, Label, PayloadFlag, PayloadReg, Rd, Text, U8, U16,
                              U32, U64)
from m3jit.isa.table import StateDoc, op

MEMBERS = StateDoc("cluster membership and messages, outside the context root", "not captured", "not rolled back")
SIGNALLED = StateDoc("the target context: its scheduling, its pending interrupt, its root", "not captured by a signal",
                     "ABORT puts a root of the target back; what else a signal did is not rolled back")
SPAWNED = StateDoc("a context of another node, outside this context's root", "not captured; the child has its own root",
                   "not rolled back; SIGNAL KIND=ABORT reaches the child")
STAGED = StateDoc("CLUSTER_STAGING (region 0xB) and the receiver's root", "not captured here",
                  "what was sent is not taken back; the receiver's own snapshots cover what arrived")
REDUCTIONS = "SUM MEAN MAX MIN PROD"
PRIORITIES = "GREEN BLUE RED"
SIGNALS = "ABORT FORK_REQ HALT PING INTERRUPT"
CONTEXT = IntOrReg(fmt="q", kinds=("int", "context"))
NODE = IntOrReg(fmt="i")


def spawn(m, rd: Rd("context"), entry: Label[0], node: NODE[4, 8] = 0, priority: Enum(PRIORITIES)[9] = "GREEN",
          model: PayloadReg(at=10)("state") = None):
    """rd = a new context on NODE that starts at ENTRY with empty registers; node 0 is this one.

    The code must be loaded there.  Errors: an unknown node; an entry that is no instruction."""


def signal(m, rd: Rd("int") = None, kind: Enum(SIGNALS)[0] = "PING", node: NODE[4, 8] = 0, ctx: CONTEXT[12, 20] = 0):
    """Send a control signal to context CTX (a number, or a register that FORK wrote) of NODE; rd = status: 0 done, 2 no
    such context, 3 refused.

    ABORT puts the newest live snapshot that the target took back, as ABORT does there: registers, memory and states,
    not the pc; a target that waits executes its instruction again; refused when it has none.  HALT ends the target;
    INTERRUPT makes its IF_INTERRUPT true; PING only asks whether it lives.  Signals carry no data.
    Traps: a node other than this one, 0; FORK_REQ, because a snapshot has no name outside its context."""
    return m.signal(kind, node, ctx)


def send(m, src: R1, rd: Rd("int") = None, node: NODE[0, 4] = 0, offset: U64[5] = 0, len: U32[13] = 0,
         mode: Enum("COPY MOVE")[17] = "COPY"):
    """Send the tensor's bytes [OFFSET, OFFSET + LEN) to NODE (LEN 0: all); rd = status.

    MOVE empties the source register once the receiver has acknowledged.  Errors: a range outside the tensor."""


def barrier(m, rd: Rd("int") = None, id: U32[0] = 0, expect: U16[4] = 1, timeout: U64[6] = 0, epoch: U32[14] = 0):
    """Wait until EXPECT contexts have reached barrier ID of EPOCH; rd = status.

    TIMEOUT in ns, 0: none; when it passes, every waiter goes on with status 1.  Errors: EXPECT=0; a different EXPECT
    for the same id and epoch."""


def multicast(m, src: R1, rd: Rd("int") = None, nodes: U64[0] = 0):
    """Send a tensor to every node of the bit set NODES; rd = number of nodes that acknowledged."""


def migrate(m, src: R1("context", "tensor"), rd: Rd("int") = None, node: NODE[0, 4] = 0,
            mode: Enum("COPY WAL RDMA")[5] = "WAL", retention: U8[6] = 60):
    """Move a context or a tensor to NODE; rd = status.

    WAL: the state is logged first and kept RETENTION seconds, so that a failed move loses nothing.  A context goes on
    there exactly where it stopped here.  Errors: an unknown node; a context that waits for a local device."""


def heartbeat(m, rd: Rd("int") = None, node: NODE[0, 4] = 0, free_pct: U8[5] = 0):
    """Tell NODE (0: all) that this node lives, how much memory is free and how long its queues are; rd = status."""


def ping(m, rd: Rd("int"), node: NODE[0, 4] = 0):
    """rd = round-trip time to NODE in ns, or -1 when no answer came in time."""


def reduce_remote(m, rd: Rd, src: R1, op: Enum(REDUCTIONS)[0] = "SUM", nodes: U64[1] = 0, barrier: U32[9] = 0,
                  compression: Enum("NONE LZ4 ZSTD")[13] = "NONE"):
    """rd = OP over the tensors of all NODES, elementwise, in order of node number, the same bytes everywhere.

    The order is fixed, so the result does not depend on the network.  BARRIER joins calls that belong together.
    Errors: shapes or dtypes that differ; a node that fails before all have contributed."""


def gather_remote(m, rd: Rd, src: R1, axis: U8[0] = 0, nodes: U64[1] = 0, barrier: U32[9] = 0):
    """rd = the tensors of all NODES joined along AXIS, in order of node number.  Errors: shapes that do not fit."""


_BASIC = ((0x1A, "REMOTE_SPAWN", spawn, SPAWNED), (0x1B, "SIGNAL", signal, SIGNALLED),
          (0x1C, "SEND_TENSOR", send, STAGED), (0x1D, "BARRIER", barrier, MEMBERS),
          (0x4A, "MULTICAST", multicast, STAGED), (0x4B, "MIGRATE", migrate, STAGED),
          (0x4C, "HEARTBEAT", heartbeat, MEMBERS), (0x4D, "PING", ping, MEMBERS),
          (0x4E, "REDUCE_REMOTE", reduce_remote, STAGED), (0x4F, "GATHER_REMOTE", gather_remote, STAGED))
_EXTENDED = {0x80: 0x1A, 0x81: 0x1B, 0x82: 0x1C, 0x83: 0x1D, 0x84: 0x4B, 0x85: 0x4A, 0x86: 0x4E, 0x87: 0x4F, 0x8A: 0x4C,
             0x8B: 0x4D}
_SOURCE = "cluster instructions of the M3-AVM map"
_CONTROL = {"REMOTE_SPAWN": "spawn"}

for _code, _name, _body, _state in _BASIC:
    _how = {"route": "machine", "why_slow": "changes another context", "writes": ("scheduler",)} \
        if _name == "SIGNAL" else {"route": "absent"}
    op(_code, _name, state=_state, source=_SOURCE, control=_CONTROL.get(_name, ""),
       key_aliases={"EXPECTED": "expect"} if _name == "BARRIER" else {}, **_how)(_body)
for _code, _short in _EXTENDED.items():
    _name, _body, _state = next((n, b, s) for c, n, b, s in _BASIC if c == _short)

    def _long(m):
        pass                                           # absent: only its signature, that of the short form, is used
    _long.__signature__ = inspect.signature(_body)
    _long.__annotations__ = _body.__annotations__
    _long.__doc__ = f"""{_body.__doc__}

    The 64-byte form: ordered by LAMPORT, ended by DEADLINE, authenticated by EXT."""
    op(_code, _name + "_EXT", route="absent", state=_state, source=_SOURCE, control=_CONTROL.get(_name, ""))(_long)


@op(0x88, "SCATTER_REMOTE", route="absent", state=STAGED, source=_SOURCE)
def scatter_remote(m, rd: Rd, src: R1, axis: U8[0] = 0, nodes: U64[1] = 0, root: U32[9] = 0, barrier: U32[13] = 0):
    """rd = this node's part of ROOT's tensor, split evenly along AXIS in order of node number.

    Errors: an axis whose length is not a multiple of the number of nodes."""


@op(0x89, "BROADCAST_REMOTE", route="absent", state=STAGED, source=_SOURCE)
def broadcast_remote(m, rd: Rd, src: R1 = None, nodes: U64[0] = 0, root: U32[8] = 0, barrier: U32[12] = 0):
    """rd = ROOT's tensor on every node of NODES; the source is read on ROOT only."""


@op(0x8C, "NODE_JOIN", route="absent", state=MEMBERS, source="SWIM membership", positional=("node",))
def node_join(m, rd: Rd("int"), cookie: R1("int", "tensor") = None, node: Text[0] = NO_STRING, port: U16[8] = 0,
              timeout: I64[10] = 0):
    """Join the cluster that node NAME belongs to; rd = this node's number, or -1.

    The shared secret COOKIE is proved, never sent.  Errors: a wrong cookie; a node that does not answer in TIMEOUT
    ns."""


@op(0x8D, "NODE_LEAVE", route="absent", state=MEMBERS, source="SWIM membership")
def node_leave(m, rd: Rd("int") = None, drain: PayloadFlag(0)[0] = False):
    """Leave the cluster; DRAIN: migrate this node's contexts away first.  rd = status."""


def _verdict(code: int, name: str, text: str) -> None:
    def body(m, rd: Rd("int") = None, node: NODE[0, 4] = 0, incarnation: U32[5] = 0):
        pass                                           # absent: only its signature is used
    body.__doc__ = text
    op(code, name, route="absent", state=MEMBERS, source="SWIM membership")(body)


_verdict(0x8E, "NODE_SUSPECT", """Tell the cluster that NODE did not answer; it is dead unless it speaks up in time; rd
= status.

    INCARNATION: the newest number this node heard of NODE; an older suspicion is ignored.""")
_verdict(0x8F, "NODE_DEAD", """Tell the cluster that NODE is gone: it leaves all routes, its contexts restart from their
logs.

    rd = status.  INCARNATION as in NODE_SUSPECT.""")
