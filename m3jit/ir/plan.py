"""Launch plan: what a region becomes between the tensor IR and a backend.

A plan is scalar control flow plus an ordered list of kernel launches.  On the CPU it is rendered as one function
`region(frame, pool)`, which the calling thread runs; the other threads only take chunks of its parallel launches.  On
CUDA and OpenCL the host walks the plan and enqueues; the Python backend walks it too.

Parallel launches and copies between two barriers are independent of each other and may run in any order, also after
what follows them up to the barrier.  Everything else happens in order.

The frame is an array of i64 words shared by caller and region.  Word `k` holds an integer, the bits of an f64, or a
pointer.  All memory a launch touches is reached through pointers in frame words: live-in tensors, constants, fresh
outputs, temporaries (the caller lays these out for the actual dimensions before entry) and key/value page tables.

Reserved words: see `FrameWord`.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Sequence

from m3jit.ir.loop import Kernel


class FrameWord(IntEnum):
    """Frame words every plan has."""
    STOP = 0        # in: pointer to an i32 stop word: over 0 = leave at the next poll, over 1 = between two kernels
    BUDGET = 1      # in: most instructions to retire before leaving (signed 64-bit)
    RETIRED = 2     # out: instructions retired
    EXIT = 3        # out: number of the exit taken, or ABANDONED
    FIRST_FREE = 4


ABANDONED = -1      # exit: given up in the middle; nothing it did is to be used, RETIRED is 0


SCALAR_OPS = {
    # integer i64 (wrap), all operands i64
    "add", "sub", "mul", "div", "mod", "and", "or", "xor", "shl", "shr", "sar", "neg", "min", "max",
    # f64
    "fadd", "fsub", "fmul", "fdiv", "fneg", "fmin", "fmax", "fsqrt",
    # comparisons -> b1
    "eq", "ne", "lt", "le", "feq", "fne", "flt", "fle",
    # b1
    "bool_and", "bool_or", "bool_not",
    "select",       # b1, a, b
    "i2f",          # i64 -> f64, round to nearest even
    "f2i",          # f64 -> i64, truncate, saturate, NaN -> 0
    "f2f32",        # f64 -> f32 rounded to nearest even, kept as f32 (a kernel's scalar argument)
    "const",        # attrs value
    "frame",        # read frame word attrs["word"] as the result type
    "element",      # read one element: args (ptr value, index i64), attrs dtype; result i64 or f64
    "param",        # block parameter
}
# shl/shr/sar use the count modulo 64; div truncates toward zero and mod has the dividend's sign; both are emitted only
# where the divisor was tested to be non-zero (the plan branches to a side exit first); INT64_MIN / -1 wraps.
# fmin/fmax: a if a < b (a > b) else b.


@dataclass(eq=False, slots=True)
class Scalar:
    """One scalar SSA value of type i64, f64, f32, b1 or ptr."""
    op: str
    type: str
    args: tuple["Scalar", ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Launch:
    """Run `kernel`; args[i] belongs to kernel.params[i] (ptr for "ptr", i64 for "i64", f32 for "f32").

    `parallel` False: one thread runs it, in order.  `replicated`: tiny work that is not worth sharing: it is done in
    order, before any statement that follows, by one thread or by every thread that will use it (the same bytes in the
    same places); its outputs overlap none of its inputs.  What follows may read them without a barrier.

    `rows` >= 0: the launch treats rows independently of each other, and argument `rows` is their number.  A pointer
    with a stride (bytes of a row, i64) in `strides` then points at the first row; all other arguments serve every row.
    So launches that differ in those pointers alone, and whose rows lie one behind the other, may be done as one."""
    kernel: Kernel
    args: list[Scalar]
    label: str = ""                # op and register names, for profiles and dumps
    parallel: bool = True
    replicated: bool = False
    rows: int = -1
    strides: dict[int, Scalar] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Barrier:
    """All launches and copies before are done, and what they wrote is visible, before any statement after begins."""


@dataclass(eq=False, slots=True)
class StoreFrame:
    """frame[word] = value."""
    word: int
    value: Scalar


@dataclass(eq=False, slots=True)
class Copy:
    """Copy nbytes (i64) from src to dst (ptr values that do not overlap); as a parallel launch does."""
    dst: Scalar
    src: Scalar
    nbytes: Scalar


@dataclass(eq=False, slots=True)
class Retire:
    """Add `count` to the retired-instruction counter."""
    count: int


@dataclass(eq=False, slots=True)
class Poll:
    """If the stop word is set or retired >= budget, take exit `exit` after storing `stores`; else go on."""
    exit: int
    stores: list[StoreFrame]


@dataclass(eq=False, slots=True)
class Jump:
    target: "PlanBlock"
    args: list[Scalar]


@dataclass(eq=False, slots=True)
class Branch:
    cond: Scalar
    then: "PlanBlock"
    then_args: list[Scalar]
    other: "PlanBlock"
    other_args: list[Scalar]


@dataclass(eq=False, slots=True)
class Exit:
    """Leave with exit number `exit` when all launches and copies are done; writes RETIRED, EXIT and `stores`."""
    exit: int
    stores: list[StoreFrame]


@dataclass(eq=False, slots=True)
class PlanBlock:
    name: str
    params: list[Scalar] = field(default_factory=list)
    body: list[Any] = field(default_factory=list)       # Scalar | Launch | Barrier | StoreFrame | Copy | Retire | Poll
    end: Any = None                                     # Jump | Branch | Exit


@dataclass(eq=False, slots=True)
class Plan:
    """blocks[0] is the entry and has no parameters."""
    name: str
    words: int                                          # frame length
    blocks: list[PlanBlock]

    def kernels(self) -> list[Kernel]:
        """The distinct kernels launched, by structure, in order of first use."""
        seen: dict[str, Kernel] = {}
        for block in self.blocks:
            for s in block.body:
                if isinstance(s, Launch):
                    seen.setdefault(s.kernel.digest(), s.kernel)
        return list(seen.values())

    def __str__(self) -> str:
        return print_plan(self)


def print_plan(plan: Plan) -> str:
    """Readable text of a plan (for `m3jit explain` and dumps)."""
    ids: dict[int, str] = {}

    def ref(v: Scalar) -> str:
        if v.op == "const":
            return repr(v.attrs["value"])
        return ids.setdefault(id(v), f"%{len(ids)}")

    def refs(vs: Sequence[Scalar]) -> str:
        return ", ".join(map(ref, vs))

    def stores(items: Sequence[StoreFrame]) -> str:
        return ", ".join(f"[{s.word}]={ref(s.value)}" for s in items)

    out = [f"plan {plan.name} frame {plan.words}"]
    for b in plan.blocks:
        out.append(f"{b.name}({', '.join(f'{ref(p)}: {p.type}' for p in b.params)}):")
        for s in b.body:
            match s:
                case Scalar(op="const"):
                    continue
                case Scalar():
                    attrs = "".join(f" {k}={v}" for k, v in s.attrs.items())
                    out.append(f"    {ref(s)}: {s.type} = {s.op}{attrs} {refs(s.args)}".rstrip())
                case Launch():
                    how = " replicated" if s.replicated else "" if s.parallel else " one-thread"
                    label = f"  ; {s.label}" if s.label else ""
                    out.append(f"    launch{how} {s.kernel.name}({refs(s.args)}){label}")
                case Barrier():
                    out.append("    barrier")
                case StoreFrame():
                    out.append(f"    frame {stores([s])}")
                case Copy():
                    out.append(f"    copy {ref(s.dst)} <- {ref(s.src)}, {ref(s.nbytes)} bytes")
                case Retire():
                    out.append(f"    retire {s.count}")
                case Poll():
                    out.append(f"    poll else exit {s.exit} {stores(s.stores)}".rstrip())
        match b.end:
            case Jump():
                out.append(f"    jump {b.end.target.name}({refs(b.end.args)})")
            case Branch():
                e = b.end
                out.append(f"    branch {ref(e.cond)}, {e.then.name}({refs(e.then_args)}), "
                           f"{e.other.name}({refs(e.other_args)})")
            case Exit():
                out.append(f"    exit {b.end.exit} {stores(b.end.stores)}".rstrip())
    return "\n".join(out)
