"""Control-flow graph of a program: basic blocks, edges, loops, and which registers are live where.

Edges follow `Op.control`: "jump", "branch" and "interrupt" go to their label (the latter two also to the next
instruction), "call" to its callee and, when that returns, to the next instruction, "spawn" starts a context at its
label (if given) and goes on, "halt" and "ret" end a path.  "abort" goes on, and with a flag set it may instead go back
to just behind any instruction that captured the registers.  Everything else goes on.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Iterator

from m3jit.frontend.program import Program
from m3jit.frontend.records import RelocKind, SymbolKind
from m3jit.isa.fields import (ABSENT, GPR, STATE, FlagField, IntOrReg, LabelField, PayloadReg, Reg, RegField, RegList,
                              ShapeField)
from m3jit.isa.table import Instruction

ENDS = ("halt", "ret", "jump")                # nothing falls through
INPLACE_BIT = 3
CAPTURES = frozenset({"registers", "context"})    # `Op.reads` words: the instruction keeps every register
MAX_ARGS = 12


@dataclass(frozen=True)
class Edge:
    """kind: next jump branch interrupt call return spawn resume.  `call` and `spawn` enter another frame or context."""
    source: int
    target: int
    kind: str

    @property
    def flows(self) -> bool:
        """Whether the same context goes on in the same frame."""
        return self.kind not in ("call", "spawn")


@dataclass(eq=False)
class Block:
    """A basic block: `start` is the pc of its first instruction and its name in the graph."""
    start: int
    instructions: list[tuple[int, Instruction]]
    successors: list[Edge] = field(default_factory=list)
    predecessors: list[Edge] = field(default_factory=list)

    @property
    def end(self) -> int:
        """pc behind the last instruction."""
        pc, ins = self.instructions[-1]
        return pc + ins.size

    @property
    def last(self) -> Instruction:
        return self.instructions[-1][1]


@dataclass(frozen=True)
class Loop:
    """A natural loop: `header` is entered from outside, each of `latches` jumps back to it."""
    header: int
    latches: tuple[int, ...]
    blocks: frozenset[int]


def label_target(pc: int, ins: Instruction) -> int | None:
    """pc of the label an instruction names, or None (none given, or it has no label operand)."""
    for f in ins.op.operands():
        if isinstance(f, LabelField):
            if ins.args[f.name] == f.default:
                return None
            return pc + ins.args[f.name]
    return None


def registers_of(ins: Instruction) -> tuple[frozenset[Reg], frozenset[Reg]]:
    """(read, written) registers of an instruction, from its operands; R255 counts as absent."""
    reads: set[Reg] = set()
    writes: set[Reg] = set()
    inplace = False
    for f in ins.op.operands():
        value = ins.args[f.name]
        if isinstance(f, (RegField, PayloadReg)):
            if value is not None:
                if f.dest or f.both:
                    writes.add(value)
                if f.both or not f.dest:
                    reads.add(value)
        elif isinstance(f, RegList):
            if f.both or not f.dest:
                reads.update(value)
            if f.both or f.dest or ins.op.control == "call":
                writes.update(value)           # a call copies its arguments back at RET
        elif isinstance(f, IntOrReg) and isinstance(value, Reg):
            reads.add(value)
        elif isinstance(f, ShapeField):
            reads.update(d for d in value if isinstance(d, Reg))
        elif isinstance(f, FlagField) and f.bit == INPLACE_BIT and not f.in_payload:
            inplace = bool(value)
    if inplace:
        source = next((f for f in ins.op.operands() if isinstance(f, RegField) and not f.dest), None)
        if source is not None and ins.args[source.name] is not None:
            writes.add(ins.args[source.name])  # a move empties its source
    null = Reg(GPR, ABSENT)
    return frozenset(reads - {null}), frozenset(writes - {null})


def must_read(ins: Instruction) -> frozenset[Reg]:
    """Registers that must hold something: those read, without operands the instruction itself may fill."""
    optional: set[Reg] = set()
    for f in ins.op.operands():
        value = ins.args[f.name]
        if isinstance(f, RegList) and f.both:
            optional.update(value)
        elif isinstance(f, (RegField, PayloadReg)) and value is not None:
            if f.both or "null" in f.kinds or "any" in f.kinds:
                optional.add(value)
    return registers_of(ins)[0] - optional


class Cfg:
    """The graph of a program.

    blocks: by start pc, in order of pc; entries: pcs where a frame or context starts (the program's entry, called
    functions, spawned labels, exported functions, code whose address is taken); edges.
    """

    def __init__(self, program: Program):
        self.program = program
        self.instructions = program.instructions
        self.blocks: dict[int, Block] = {}
        self.unresolved: set[int] = {r.offset for r in program.relocs if r.kind == RelocKind.BRANCH}
        self._cut()
        self._connect()
        self.entries = self._entries()
        self.reachable = self._reach(self.entries)

    # -- building -------------------------------------------------------------------------------------------------

    def _target(self, pc: int, ins: Instruction) -> int | None:
        """The label's pc, unless another module will define it."""
        for f in ins.op.operands():
            if isinstance(f, LabelField) and pc + ins.op.base + f.at in self.unresolved:
                return None
        return label_target(pc, ins)

    def _cut(self) -> None:
        starts = {pc for pc, _ in self.instructions}
        self.resume_points = [pc + ins.size for pc, ins in self.instructions
                              if "registers" in ins.op.reads and any("snapshot" in f.kinds for f in ins.op.registers())]
        leaders = {self.program.entry, *self._named_code(), *self.resume_points}
        for pc, ins in self.instructions:
            target = self._target(pc, ins)
            if target is not None:
                leaders.add(target)
            if ins.op.control not in ("", "next"):
                leaders.add(pc + ins.size)
        leaders &= starts
        block: Block | None = None
        for pc, ins in self.instructions:
            if block is None or pc in leaders:
                block = self.blocks[pc] = Block(pc, [])
            block.instructions.append((pc, ins))

    def _named_code(self) -> Iterator[int]:
        for s in self.program.symbols:
            if s.kind == SymbolKind.FUNC or s.kind == SymbolKind.LABEL and s.exported:
                yield s.value
        for r in self.program.relocs:
            if r.kind == RelocKind.ADDRESS and r.symbol < len(self.program.symbols):
                s = self.program.symbols[r.symbol]
                if s.kind in (SymbolKind.LABEL, SymbolKind.FUNC):
                    yield s.value + r.addend

    def _connect(self) -> None:
        for block in self.blocks.values():
            pc, ins = block.instructions[-1]
            kind, target = ins.op.control, self._target(pc, ins)
            edges = []
            if target is not None and target in self.blocks:
                edges.append(Edge(block.start, target, kind or "jump"))
            if kind not in ENDS and block.end in self.blocks:
                edges.append(Edge(block.start, block.end, "return" if kind == "call" else "next"))
            if kind == "abort" and any(ins.args[f.name] for f in ins.op.operands() if isinstance(f, FlagField)):
                edges += [Edge(block.start, pc, "resume") for pc in self.resume_points if pc in self.blocks]
            block.successors = edges
            for e in edges:
                self.blocks[e.target].predecessors.append(e)

    def _entries(self) -> list[int]:
        found = {self.program.entry, *self._named_code()}
        found |= {e.target for b in self.blocks.values() for e in b.successors if not e.flows}
        return [pc for pc in sorted(found) if pc in self.blocks]

    def _reach(self, roots: list[int]) -> frozenset[int]:
        seen, todo = set(), list(roots)
        while todo:
            start = todo.pop()
            if start not in seen:
                seen.add(start)
                todo += [e.target for e in self.blocks[start].successors]
        return frozenset(seen)

    # -- order, dominators, loops ---------------------------------------------------------------------------------

    def order(self) -> list[int]:
        """Reachable blocks in reverse postorder (a block comes after all its predecessors but those of back edges)."""
        out: list[int] = []
        seen: set[int] = set()
        for root in self.entries:
            stack = [(root, iter(self._flow(root)))]
            if root in seen:
                continue
            seen.add(root)
            while stack:
                start, rest = stack[-1]
                following = next((t for t in rest if t not in seen), None)
                if following is None:
                    out.append(start)
                    stack.pop()
                else:
                    seen.add(following)
                    stack.append((following, iter(self._flow(following))))
        return out[::-1]

    def _flow(self, start: int) -> list[int]:
        return [e.target for e in self.blocks[start].successors if e.flows]

    @cached_property
    def dominators(self) -> dict[int, int | None]:
        """Immediate dominator of each reachable block; None for entries (a virtual root dominates them)."""
        order = self.order()
        rank = {b: i for i, b in enumerate(order)}
        root = -1
        idom: dict[int, int] = {root: root, **{e: root for e in self.entries}}
        rank[root] = -1

        def meet(a: int, b: int) -> int:
            while a != b:
                while rank[a] > rank[b]:
                    a = idom[a]
                while rank[b] > rank[a]:
                    b = idom[b]
            return a
        changed, entries = True, set(self.entries)
        while changed:
            changed = False
            for b in order:
                if b in entries:
                    continue
                known = [e.source for e in self.blocks[b].predecessors if e.flows and e.source in idom]
                best = known[0]
                for other in known[1:]:
                    best = meet(best, other)
                if idom.get(b) != best:
                    idom[b] = best
                    changed = True
        return {b: None if d == root else d for b, d in idom.items() if b != root}

    @cached_property
    def _intervals(self) -> dict[int, tuple[int, int]]:
        """Entry and exit times of a walk over the dominator tree: a dominates b iff a's interval holds b's."""
        children: dict[int | None, list[int]] = {}
        for b, d in self.dominators.items():
            children.setdefault(d, []).append(b)
        out, time = {}, 0
        stack: list[tuple[int, bool]] = [(b, False) for b in children.get(None, ())]
        opened: dict[int, int] = {}
        while stack:
            b, done = stack.pop()
            time += 1
            if done:
                out[b] = (opened[b], time)
                continue
            opened[b] = time
            stack.append((b, True))
            stack += [(c, False) for c in children.get(b, ())]
        return out

    def dominates(self, a: int, b: int) -> bool:
        """Whether every path to block b passes block a."""
        first, second = self._intervals.get(a), self._intervals.get(b)
        return first is not None and second is not None and first[0] <= second[0] and second[1] <= first[1]

    @cached_property
    def back_edges(self) -> list[Edge]:
        """Edges to a block that dominates their source."""
        return [e for b in self.blocks.values() if b.start in self.reachable for e in b.successors
                if e.flows and self.dominates(e.target, e.source)]

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops by header."""
        latches: dict[int, list[int]] = {}
        for e in self.back_edges:
            latches.setdefault(e.target, []).append(e.source)
        out = []
        for header, sources in sorted(latches.items()):
            body, todo = {header}, list(sources)
            while todo:
                b = todo.pop()
                if b not in body:
                    body.add(b)
                    todo += [e.source for e in self.blocks[b].predecessors if e.flows and e.source in self.reachable]
            out.append(Loop(header, tuple(sorted(sources)), frozenset(body)))
        return out

    def block_of(self, pc: int) -> Block:
        """The block an instruction belongs to."""
        for block in self.blocks.values():
            if block.start <= pc < block.end:
                return block
        raise KeyError(f"no instruction at 0x{pc:04x}")

    def dump(self) -> str:
        """The graph as text: one paragraph for each block."""
        from m3jit.frontend.disassembler import Listing
        listing, live = Listing(self.program), liveness(self)
        headers = {lp.header for lp in self.loops}
        out = []
        for b in self.blocks.values():
            notes = [w for w, on in (("entry", b.start in self.entries), ("loop", b.start in headers),
                                     ("unreachable", b.start not in self.reachable)) if on]
            name = self.program.label_at(b.start)
            title = f"block 0x{b.start:04x}" + (f" {name}" if name else "") + (f" ({','.join(notes)})" if notes else "")
            out.append(f"{title} live-in {_names(live.live_in[b.start])}")
            out += [f"    0x{pc:04x} {listing.instruction(pc, ins)}" for pc, ins in b.instructions]
            out += [f"    -> 0x{e.target:04x} {e.kind}" for e in b.successors]
        return "\n".join(out)


def _names(registers: frozenset[Reg]) -> str:
    return " ".join(str(r) for r in sorted(registers)) or "-"


@dataclass(frozen=True)
class Liveness:
    """Per block: `exposed` registers are read before any write in it, `written` are written, `live_in` and `live_out`
    may still be read when it is entered or left."""
    exposed: dict[int, frozenset[Reg]]
    written: dict[int, frozenset[Reg]]
    live_in: dict[int, frozenset[Reg]]
    live_out: dict[int, frozenset[Reg]]


def liveness(cfg: Cfg, outputs: frozenset[Reg] | None = None) -> Liveness:
    """Which registers are live at block borders.

    outputs: registers read after HALT (None: every register of the program, for a host may look at any).  A call reads
    what its arguments name and every S register live at the callee's entry; RET keeps S registers and the argument
    registers alive; a spawned context starts with all of its parent's registers; an instruction that captures the
    registers keeps all of them.
    """
    used = frozenset(r for _, ins in cfg.instructions for s in registers_of(ins) for r in s)
    states = frozenset(r for r in used if r.bank == STATE)
    returned = _returned(cfg)
    final = used if outputs is None else outputs
    exposed, written = {}, {}
    for start, block in cfg.blocks.items():
        exposed[start], written[start] = _summary(block, used)
    live_in: dict[int, frozenset[Reg]] = {b: frozenset() for b in cfg.blocks}
    live_out = dict(live_in)
    todo = list(cfg.blocks)                        # popped from the end: later blocks first
    waiting = set(todo)
    while todo:
        start = todo.pop()
        waiting.discard(start)
        block = cfg.blocks[start]
        ends = block.last.op.control
        out = final if ends == "halt" else states | returned[start] if ends == "ret" else frozenset()
        for e in block.successors:
            into = live_in[e.target]
            out |= frozenset(r for r in into if r.bank == STATE) if e.kind == "call" else into
        live_out[start] = out
        before = exposed[start] | (out - written[start])
        if before != live_in[start]:
            live_in[start] = before
            for e in block.predecessors:
                if e.source not in waiting:
                    waiting.add(e.source)
                    todo.append(e.source)
    return Liveness(exposed, written, live_in, live_out)


def _returned(cfg: Cfg) -> dict[int, frozenset[Reg]]:
    """For each block that ends in RET, the registers its callers get back: R0... for the most arguments of any call."""
    counts: dict[int, int] = {s.value: len(s.params) for s in cfg.program.symbols if s.kind == SymbolKind.FUNC}
    for b in cfg.blocks.values():
        for e in b.successors:
            if e.kind == "call":
                args = max((len(b.last.args[f.name]) for f in b.last.op.operands() if isinstance(f, RegList)),
                           default=0)
                counts[e.target] = max(counts.get(e.target, 0), args)
    most: dict[int, int] = {}
    for entry, n in counts.items():
        seen, todo = set(), [entry]
        while todo:
            start = todo.pop()
            if start in cfg.blocks and start not in seen:
                seen.add(start)
                todo += [e.target for e in cfg.blocks[start].successors if e.flows]
                most[start] = max(most.get(start, 0), n)
    rets = (b.start for b in cfg.blocks.values() if b.last.op.control == "ret")
    return {b: frozenset(Reg(GPR, i) for i in range(most.get(b, MAX_ARGS))) for b in rets}


def _summary(block: Block, everything: frozenset[Reg]) -> tuple[frozenset[Reg], frozenset[Reg]]:
    exposed: set[Reg] = set()
    written: set[Reg] = set()
    for _, ins in block.instructions:
        reads, writes = registers_of(ins)
        if CAPTURES & set(ins.op.reads):
            reads = everything
        exposed |= reads - written
        written |= writes
    return frozenset(exposed), frozenset(written)


def build(program: Program) -> Cfg:
    """The control-flow graph of a verified program."""
    return Cfg(program)
