"""Plan -> LLVM IR text for several contexts at once: `void @region(ptr work, ptr pool)`.

Every context has a frame of its own: the plan's words, then one word for each scalar that is computed.  Each is at a
block; in turn the contexts at the lowest one execute it together: scalars in a loop over them, launches through
`m3_gather` (runtime_batch.py), which joins those whose rows lie one behind the other, so that one pass over a matrix
serves all of them.  Blocks stand in program order, so contexts that took different ways meet again where the ways do.
A context that leaves writes its exit and stores into its frame; the others go on.  Its own stop word makes it leave at
loop heads.  The word of the entry (`Work.HALT`) ends it for all who have not left, in the middle of a launch too, until
one has come to a loop head twice: their frames keep the exit that they had, ABANDONED.

Per context everything happens in the plan's order, and no row's bytes depend on how many rows a launch has: each
context's results are those it gets alone.
"""
from __future__ import annotations

import struct
from typing import Any, Callable, Sequence

from m3jit.backends.cpu.region import PlanError, RegionRenderer
from m3jit.backends.cpu.render import grid_symbol, run_symbol
from m3jit.backends.cpu.runtime import guarded
from m3jit.backends.cpu.runtime_batch import ARGUMENT_WORDS, HEAD_WORDS, ROWS, Work
from m3jit.backends.cpu.target import CpuTarget
from m3jit.backends.cpu.text import LLVM_TYPE, literal
from m3jit.ir.loop import Kernel
from m3jit.ir.plan import (Branch, Copy, Exit, FrameWord, Jump, Launch, Plan, PlanBlock, Poll, Retire, Scalar,
                           StoreFrame)

SYMBOL = "region"
_PARAMS = "ptr %work, ptr %pool"
LEFT = -1                              # a context's block when it has left


def frame_words(plan: Plan) -> int:
    """Words of one context's frame."""
    return plan.words + sum(len(b.params) + sum(map(_is_computed, b.body)) for b in plan.blocks)


def room(plan: Plan) -> tuple[int, int, int]:
    """(arguments of the launch with most, launches of the longest chain, most arguments of a chain): room for them."""
    most = max((len(s.args) for b in plan.blocks for s in b.body if isinstance(s, Launch)), default=0)
    linked = [[s for s in b.body[chain] if isinstance(s, Launch)] for b in plan.blocks for chain in chains(b.body)]
    return (max(most, 3), max(map(len, linked), default=0),
            max((sum(len(s.args) for s in links) for links in linked), default=0))


def chains(body: Sequence[Any]) -> list[slice]:
    """Where statements of a block form a chain (runtime_batch.py): launches that are tiny or made for each context by
    itself, from a tiny one to a tiny one, with nothing in between that other contexts or the host have to be waited
    for."""
    out: list[slice] = []
    found: list[int] = []

    def close() -> None:
        while found and not body[found[0]].replicated:
            del found[0]
        while found and not body[found[-1]].replicated:
            del found[-1]
        if len(found) > 1:
            out.append(slice(found[0], found[-1] + 1))
        found.clear()
    for i, s in enumerate(body):
        if isinstance(s, Launch) and s.parallel and (s.replicated or s.rows < 0):
            found.append(i)
        elif isinstance(s, Launch | Copy | Poll) or isinstance(s, Scalar) and s.op == "element":
            close()
    close()
    return out


def render_batch_region(plan: Plan, target: CpuTarget, digest: Callable[[Kernel], str]) -> str:
    """The functions, constants and declarations, without triple and data layout."""
    r = _BatchRenderer(plan, target, digest)
    body = r.render()
    return "\n".join([*sorted(r.w.declared), *r.constants, guarded(target, SYMBOL, _PARAMS, "body"),
                      f"define internal void @body({_PARAMS}) nounwind noinline {{", "entry:", body, "}", ""])


def _is_computed(s: object) -> bool:
    """Scalars with a word of their own; integers and pointers of the frame are read where they are used."""
    return isinstance(s, Scalar) and s.op != "const" and not (s.op == "frame" and s.type in ("i64", "f64", "ptr"))


class _BatchRenderer(RegionRenderer):
    def __init__(self, plan: Plan, target: CpuTarget, digest: Callable[[Kernel], str]):
        super().__init__(plan, target, digest)
        self.constants: list[str] = []
        self.words: dict[int, int] = {}                # scalar -> its word
        self.local: dict[int, str] = {}                # scalars computed in the present loop over contexts
        self.number: dict[int, int] = {}               # block -> its number
        self.retired = 0                               # instructions not yet added to the contexts' counters
        self.pending = False                           # may launches wait to be executed?
        self.in_chain = False                          # do they belong to a chain?
        self.context = ""                              # number of the context, inside a loop over contexts

    # -- the function -----------------------------------------------------------------------------------------------
    def render(self) -> str:
        w = self.w
        for word, name in ((Work.FRAMES, "frames"), (Work.LIST, "list"), (Work.STATE, "state")):
            w.line(f"%{name} = load ptr, ptr {self._work(word)}, align 8")
        w.line(f"%stride = load i64, ptr {self._work(Work.STRIDE)}, align 8")
        w.line(f"%activep = getelementptr i64, ptr %work, i64 {int(Work.ACTIVE)}")
        w.line(f"store ptr %pool, ptr {self._work(Work.POOL)}, align 8")
        w.line("%never = alloca i32")
        w.line("store i32 0, ptr %never")
        w.line("%rounds = alloca i32")
        w.line("store i32 0, ptr %rounds")
        w.line(f"%halt = load ptr, ptr {self._work(Work.HALT)}, align 8")
        w.line("%skipped = getelementptr i8, ptr %halt, i64 8")
        blocks = self._reachable()
        self._assign(blocks)
        w.jump("choose")
        w.place("choose")
        chosen = w.call("i64", "m3_choose", "ptr %work", "ptr", " nounwind")
        ways = " ".join(f"i64 {i}, label %{self.labels[id(b)]}" for i, b in enumerate(blocks))
        w.line(f"switch i64 {chosen}, label %done [ {ways} ]")
        for b in blocks:
            w.place(self.labels[id(b)])
            self._block(b)
        w.place("done")
        w.line("ret void")
        return w.text()

    def _work(self, word: Work) -> str:
        return self.w.op(f"getelementptr i64, ptr %work, i64 {int(word)}")

    def _assign(self, blocks: list[PlanBlock]) -> None:
        """Numbers of the blocks, words of the scalars."""
        free = self.plan.words
        for b in self.plan.blocks:
            for s in (*b.params, *(s for s in b.body if _is_computed(s))):
                self.words[id(s)] = free
                free += 1
        for i, b in enumerate(blocks):
            self.number[id(b)], self.labels[id(b)] = i, self.w.new_block("block")

    def _block(self, b: PlanBlock) -> None:
        run: list[Scalar | StoreFrame] = []
        self.retired = 0
        links = chains(b.body)
        begins, ends = {c.start for c in links}, {c.stop for c in links}
        for i, s in enumerate(b.body):
            if i in ends:
                self._scalars(run)
                self._end_chain()
            if i in begins:
                self._scalars(run)
                self._begin_chain()
            match s:
                case Scalar(op="element") if self.pending:
                    self._scalars(run)
                    self._execute()
                    run.append(s)
                case Scalar() | StoreFrame():
                    if not isinstance(s, Scalar) or _is_computed(s):
                        run.append(s)
                case Retire(count):
                    self.retired += count
                case _:
                    self._scalars(run)
                    self._statement(s)
        self._scalars(run)
        if len(b.body) in ends:
            self._end_chain()
        self._execute()
        self._end(b)

    # -- loops over contexts ------------------------------------------------------------------------------------------
    def _each(self, body: Callable[[], None], kept: bool = False) -> None:
        """body() for every active context, %frame and its number at hand.  kept: the body ends in a jump to
        `self.stay` or `self.latch`; only contexts that stay remain active."""
        w = self.w
        before = w.block
        head, inside, self.stay, self.latch, end = map(w.new_block, ("each", "one", "stay", "latch", "end"))
        n = w.op("load i64, ptr %activep, align 8")
        i, i1, k, k1 = (w.name("i") for _ in range(4))
        w.jump(head)
        w.place(head)
        w.line(f"{i} = phi i64 [ 0, %{before} ], [ {i1}, %{self.latch} ]")
        if kept:
            w.line(f"{k} = phi i64 [ 0, %{before} ], [ {k1}, %{self.latch} ]")
        w.branch(w.op(f"icmp slt i64 {i}, {n}"), inside, end)
        w.place(inside)
        self.context = w.op(f"load i64, ptr {w.op(f'getelementptr i64, ptr %list, i64 {i}')}, align 8")
        self.frame = w.op(f"getelementptr i8, ptr %frames, i64 {w.op(f'mul i64 {self.context}, %stride')}")
        self.local = {}
        body()
        if kept:
            w.place(self.stay)
            w.line(f"store i64 {self.context}, ptr {w.op(f'getelementptr i64, ptr %list, i64 {k}')}, align 8")
            more = w.op(f"add i64 {k}, 1")
            w.jump(self.latch)
            w.place(self.latch)
            w.line(f"{k1} = phi i64 [ {more}, %{self.stay} ], [ {k}, %{self.gone} ]")
        else:
            w.jump(self.latch)
            w.place(self.latch)
        w.line(f"{i1} = add i64 {i}, 1")
        w.jump(head)
        w.place(end)
        if kept:
            w.line(f"store i64 {k}, ptr %activep, align 8")
        self.local = {}

    def _scalars(self, run: list[Scalar | StoreFrame]) -> None:
        """Executes scalars and stores collected so far, and empties the list."""
        def body() -> None:
            for s in run:
                if isinstance(s, StoreFrame):
                    self._store_frame(s)
                    continue
                value = self.w.op(self._expression(s, [self._ref(a) for a in s.args]))
                self.local[id(s)] = value
                self._keep(s, value)
        if run:
            self._each(body)
            run.clear()

    def _keep(self, s: Scalar, value: str) -> None:
        """Writes a scalar to its word."""
        if s.type == "b1":
            self._store_word(self.words[id(s)], "i64", self.w.op(f"zext i1 {value} to i64"))
        else:
            self._store_word(self.words[id(s)], LLVM_TYPE[s.type], value)

    def _ref(self, v: Scalar) -> str:
        if v.op == "const":
            return super()._ref(v)
        known = self.local.get(id(v))
        if known is None:
            known = self.local[id(v)] = self._read(v)
        return known

    def _read(self, v: Scalar) -> str:
        w = self.w
        if id(v) not in self.words:
            if v.op != "frame":
                raise PlanError(f"plan {self.plan.name}: {v.op} is used and not in a block")
            return w.op(self._frame(v))
        at = w.op(f"getelementptr i64, ptr {self.frame}, i64 {self.words[id(v)]}")
        if v.type == "b1":
            return w.op(f"icmp ne i64 {w.op(f'load i64, ptr {at}, align 8')}, 0")
        return w.op(f"load {LLVM_TYPE[v.type]}, ptr {at}, align 8")

    # -- control ------------------------------------------------------------------------------------------------------
    def _end(self, b: PlanBlock) -> None:
        match b.end:
            case Jump(target, args):
                self._each(lambda: self._go(target, args))
            case Branch(cond, then, then_args, other, other_args):
                self._each(lambda: self._choose(cond, (then, then_args), (other, other_args)))
            case Exit(exit, stores):
                self._each(lambda: self._leave(exit, stores))
            case _:
                raise PlanError(f"plan {self.plan.name}: block {b.name} ends with {b.end!r}")
        self.w.jump("choose")

    def _choose(self, cond: Scalar, then: tuple[PlanBlock, list[Scalar]],
                other: tuple[PlanBlock, list[Scalar]]) -> None:
        w = self.w
        yes, no, after = (w.new_block(n) for n in ("then", "else", "after"))
        known = dict(self.local)
        w.branch(self._ref(cond), yes, no)
        for label, (target, args) in ((yes, then), (no, other)):
            w.place(label)
            self.local = dict(known)
            self._go(target, args)
            w.jump(after)
        w.place(after)

    def _go(self, target: PlanBlock, args: list[Scalar]) -> None:
        """The context's next block and its parameters."""
        if len(args) != len(target.params):
            raise PlanError(f"plan {self.plan.name}: {len(args)} arguments for block {target.name} with "
                            f"{len(target.params)} parameters")
        self._count()
        values = [self._ref(a) for a in args]              # all are read before one is written
        for p, value in zip(target.params, values):
            self._keep(p, value)
        self._set_state(self.number[id(target)])

    def _set_state(self, number: int) -> None:
        at = self.w.op(f"getelementptr i64, ptr %state, i64 {self.context}")
        self.w.line(f"store i64 {number}, ptr {at}, align 8")

    def _count(self) -> str:
        """Brings the context's counter up to date; its value."""
        w = self.w
        at = w.op(f"getelementptr i64, ptr {self.frame}, i64 {FrameWord.RETIRED.value}")
        value = w.op(f"load i64, ptr {at}, align 8")
        if self.retired:
            value = w.op(f"add i64 {value}, {self.retired}")
            w.line(f"store i64 {value}, ptr {at}, align 8")
        return value

    def _leave(self, exit: int, stores: list[StoreFrame]) -> None:
        self._count()
        self._out(exit, stores)

    def _out(self, exit: int, stores: list[StoreFrame]) -> None:
        self._store_word(FrameWord.EXIT.value, "i64", str(exit))
        values = [self._ref(s.value) for s in stores]
        for s, value in zip(stores, values):
            self.local[id(s.value)] = value
            self._store_frame(s)
        self._set_state(LEFT)

    def _poll(self, s: Poll) -> None:
        self._execute()

        def body() -> None:
            w = self.w
            retired = self._count()
            budget = w.op(f"load i64, ptr {w.op(f'getelementptr i64, ptr {self.frame}, i64 {FrameWord.BUDGET.value}')}")
            over = w.op(f"icmp sge i64 {retired}, {budget}")
            given = w.op(f"load ptr, ptr {w.op(f'getelementptr i64, ptr {self.frame}, i64 {FrameWord.STOP.value}')}")
            word = w.op(f"select i1 {w.op(f'icmp eq ptr {given}, null')}, ptr %never, ptr {given}")
            stop = w.op(f"icmp sgt i32 {w.op(f'load atomic i32, ptr {word} monotonic, align 4')}, 0")
            self.gone = w.new_block("gone")
            w.branch(w.op(f"or i1 {over}, {stop}"), self.gone, self.stay)
            w.place(self.gone)
            self._out(s.exit, s.stores)
            w.jump(self.latch)
        self._each(body, kept=True)
        self.retired = 0
        # what was computed on the way to a loop head a second time would be lost
        again = self.w.op(f"icmp ne i32 {self.w.op('load i32, ptr %rounds')}, 0")
        self.w.line("store i32 1, ptr %rounds")
        word = self.w.op("load ptr, ptr %halt, align 8")
        self.w.line(f"store ptr {self.w.op(f'select i1 {again}, ptr %never, ptr {word}')}, ptr %halt, align 8")

    # -- launches -----------------------------------------------------------------------------------------------------
    def _launch(self, s: Launch) -> None:
        k = s.kernel
        if len(s.args) != len(k.params):
            raise PlanError(f"plan {self.plan.name}: launch of {k.name} with {len(s.args)} arguments, "
                            f"it has {len(k.params)} parameters")
        for p, a in zip(k.params, s.args):
            if p.kind != a.type and (p.kind, a.type) != ("i32", "i64"):
                raise PlanError(f"plan {self.plan.name}: {k.name} takes {p.name} as {p.kind}, "
                                f"the launch gives {a.type}")
        digest = self.digest(k)
        if not s.parallel:
            self._execute()
        self._gather(run_symbol(digest), grid_symbol(digest), s.args, s.rows if s.parallel else -1, s.strides,
                     not s.replicated)
        if self.in_chain:
            return
        if not s.parallel:
            self.w.call("void", "m3_flush_alone", "ptr %work", "ptr", " nounwind")
            self.pending = False
            self._give_up_if_skipped()
        elif s.replicated:                             # what follows may read it without a barrier
            self._execute()

    def _copy(self, s: Copy) -> None:
        one = Scalar("const", "i64", (), {"value": 1})
        self._gather("m3_copy", "m3_copy_grid", [s.dst, s.src, s.nbytes], 2, {0: one, 1: one})

    def _gather(self, run: str, grid: str, args: list[Scalar], rows: int, strides: dict[int, Scalar],
                worth: bool = True) -> None:
        w = self.w
        w.declared |= {f"declare void @{run}(i64, i64, ptr, ptr) nounwind", f"declare i64 @{grid}(ptr) nounwind"}
        words = [f"ptrtoint (ptr @{run} to i64)", f"ptrtoint (ptr @{grid} to i64)", str(len(args)), str(rows),
                 str(int(worth))]
        nothing = Scalar("const", "i64", (), {"value": 0})
        for i, a in enumerate(args):
            words += [*self._source(a), str(ROWS if i == rows else 0), *self._source(strides.get(i, nothing))]
        name = f"@launch{len(self.constants)}"
        assert len(words) == HEAD_WORDS + ARGUMENT_WORDS * len(args)
        self.constants.append(f"{name} = internal constant [{len(words)} x i64] "
                              f"[{', '.join(f'i64 {x}' for x in words)}], align 8")
        w.call("void", "m3_gather", f"ptr %work, ptr {name}", "ptr, ptr", " nounwind")
        self.pending = True

    def _source(self, v: Scalar) -> tuple[str, str]:
        """(word, constant) of a launch's argument."""
        if v.op == "const":
            if v.type in ("f32", "f64"):
                image = struct.pack("<f4x" if v.type == "f32" else "<d", v.attrs["value"])
                return "-1", str(struct.unpack("<q", image)[0])
            return "-1", literal("i64", int(v.attrs["value"]))
        if id(v) in self.words:
            return str(self.words[id(v)]), "0"
        if v.op != "frame" or not 0 <= v.attrs["word"] < self.plan.words:
            raise PlanError(f"plan {self.plan.name}: {v.op} is used and not in a block")
        return str(int(v.attrs["word"])), "0"

    def _begin_chain(self) -> None:
        self._execute()
        self.w.call("void", "m3_chain", "ptr %work", "ptr", " nounwind")
        self.in_chain = True

    def _end_chain(self) -> None:
        self.w.call("void", "m3_flush_chain", "ptr %work", "ptr", " nounwind")
        self.in_chain = self.pending = False
        self._give_up_if_skipped()

    def _execute(self) -> None:
        """Executes the pending launches; those of a chain wait for its end."""
        if self.pending and not self.in_chain:
            self.w.call("void", "m3_flush", "ptr %work", "ptr", " nounwind")
            self.pending = False
            self._give_up_if_skipped()

    def _give_up_if_skipped(self) -> None:
        """Return when a launch before this point was not executed to its end."""
        w = self.w
        go = w.new_block("complete")
        w.branch(w.op(f"icmp ne i32 {w.op('load atomic i32, ptr %skipped monotonic, align 4')}, 0"), "done", go)
        w.place(go)

    def _flush(self) -> None:
        self._execute()
