"""Plan -> LLVM IR text: one function `void @region(ptr frame, ptr pool)`, which runs on the calling thread.

Kernels are external functions `k_<digest>`, so that each is compiled and cached once however many regions use it.
Replicated and one-thread launches are called in order.  Parallel launches and copies between two barriers do not depend
on each other: they are collected, and handed to `m3_run` (runtime.py) as one batch at the next barrier, read
of an element, poll, end of a block or exit.  With `pool` null `m3_run` executes them here; else the pool's workers may
take chunks, and it returns when all are done.  So nothing waits at a barrier for a thread that has no work, and a poll
is a load and a comparison.

When the stop word is urgent whoever computes leaves out the rest of a launch (runtime.py); the region then returns with
the exit ABANDONED, as if it had not been entered: what a region writes becomes visible by what its exit says.  In a
region that goes round, what it has done is kept instead: from the second arrival at a loop head on it is left at loop
heads only.

The floating-point control word is set on entry (round to nearest, denormals kept) and restored on exit.
"""
from __future__ import annotations

from typing import Callable

from m3jit.backends.cpu.memory import decode
from m3jit.backends.cpu.numeric import SCALAR
from m3jit.backends.cpu.render import grid_symbol, kernel_signature, kernel_symbol, polls, run_symbol
from m3jit.backends.cpu.runtime import guarded
from m3jit.backends.cpu.runtime_jobs import ITEM_WORDS, MOST_ITEMS
from m3jit.backends.cpu.target import CpuTarget
from m3jit.backends.cpu.text import LLVM_TYPE, Writer, literal
from m3jit.ir.loop import MEMORY, Kernel
from m3jit.ir.plan import (ABANDONED, Barrier, Branch, Copy, Exit, FrameWord, Jump, Launch, Plan, PlanBlock, Poll,
                           Retire, Scalar, StoreFrame)

SYMBOL = "region"
_PARAMS = "ptr %frame, ptr %pool"


class PlanError(Exception):
    """A malformed plan: always a bug of its builder."""


_BINARY = {"add": "add i64", "sub": "sub i64", "mul": "mul i64", "and": "and i64", "or": "or i64", "xor": "xor i64",
           "fadd": "fadd double", "fsub": "fsub double", "fmul": "fmul double", "fdiv": "fdiv double",
           "eq": "icmp eq i64", "ne": "icmp ne i64", "lt": "icmp slt i64", "le": "icmp sle i64",
           "feq": "fcmp oeq double", "fne": "fcmp une double", "flt": "fcmp olt double", "fle": "fcmp ole double",
           "bool_and": "and i1", "bool_or": "or i1"}
_SHIFTS = {"shl": "shl", "shr": "lshr", "sar": "ashr"}


def is_parallel(plan: Plan) -> bool:
    """Does any statement share work between threads?  Purely scalar plans are run by one thread."""
    return any(isinstance(s, Copy) or (isinstance(s, Launch) and s.parallel and not s.replicated)
               for b in plan.blocks for s in b.body)


def render_region(plan: Plan, target: CpuTarget, digest: Callable[[Kernel], str]) -> str:
    """The region's functions and declarations, without triple and data layout."""
    r = RegionRenderer(plan, target, digest)
    body = r.render()
    return "\n".join([*sorted(r.w.declared), guarded(target, SYMBOL, _PARAMS, "body"),
                      f"define internal void @body({_PARAMS}) nounwind noinline {{", "entry:", body, "}", ""])


class RegionRenderer:
    """State of one region's rendering."""

    def __init__(self, plan: Plan, target: CpuTarget, digest: Callable[[Kernel], str]):
        self.plan, self.target, self.digest = plan, target, digest
        self.w = Writer()
        self.frame = "%frame"
        self.names: dict[int, str] = {}
        self.labels: dict[int, str] = {}
        self.phis: dict[int, list] = {}
        self.edges: dict[int, list[tuple[str, list[Scalar]]]] = {}
        self.batch: list[tuple[str, str, list[str]]] = []      # pending launches: run, grid, typed arguments
        self.largest = (0, 0)                                   # items of a batch, argument slots of a batch

    # -- the function -----------------------------------------------------------------------------------------
    def render(self) -> str:
        w = self.w
        w.line("%retired = alloca i64")
        w.line("store i64 0, ptr %retired")
        space = w.slot()
        budget = w.op(f"getelementptr i64, ptr %frame, i64 {FrameWord.BUDGET.value}")
        w.line(f"%budget = load i64, ptr {budget}")
        self._stop_word()
        blocks = self._reachable()
        for b in blocks:
            self.labels[id(b)], self.edges[id(b)] = w.new_block("block"), []
        w.jump(self.labels[id(blocks[0])])
        for b in blocks:
            w.place(self.labels[id(b)])
            self.phis[id(b)] = w.slot()
            for p in b.params:
                self._name(p)
            for s in b.body:
                self._statement(s)
            self._flush()
            self._end(b)
        self._abandoned()
        items, slots = self.largest
        if items:
            space += [f"  %items = alloca [{ITEM_WORDS * items} x i64], align 64",
                      f"  %slots = alloca [{max(slots, 1)} x i64], align 64"]
        for b in blocks:
            for i, p in enumerate(b.params):
                sources = ", ".join(f"[ {self._ref(args[i])}, %{label} ]" for label, args in self.edges[id(b)])
                self.phis[id(b)].append(f"  {self._name(p)} = phi {LLVM_TYPE[p.type]} {sources}")
        return w.text()

    def _stop_word(self) -> None:
        """%stop: the stop word, or a word that is always zero where the frame holds a null pointer."""
        w = self.w
        w.line("%never = alloca i32")
        w.line("store i32 0, ptr %never")
        given = w.op(f"load ptr, ptr {w.op(f'getelementptr i64, ptr {self.frame}, i64 {FrameWord.STOP.value}')}")
        none = w.op(f"icmp eq ptr {given}, null")
        w.line(f"%stop = select i1 {none}, ptr %never, ptr {given}")
        w.line("%halt = alloca { ptr, i32 }")
        w.line("store ptr %stop, ptr %halt, align 8")
        w.line("%skipped = getelementptr i8, ptr %halt, i64 8")
        w.line("store i32 0, ptr %skipped, align 4")
        self.abandoned = ""
        if any(isinstance(s, Poll) for b in self.plan.blocks for s in b.body):
            w.line("%rounds = alloca i32")
            w.line("store i32 0, ptr %rounds")

    def _give_up_if_skipped(self) -> None:
        """Leave when a launch before this point was not executed to its end."""
        w = self.w
        self.abandoned = self.abandoned or w.new_block("abandoned")
        go = w.new_block("complete")
        w.branch(w.op(f"icmp ne i32 {w.op('load atomic i32, ptr %skipped monotonic, align 4')}, 0"), self.abandoned, go)
        w.place(go)

    def _abandoned(self) -> None:
        if self.abandoned:
            self.w.place(self.abandoned)
            self._store_word(FrameWord.RETIRED.value, "i64", "0")
            self._store_word(FrameWord.EXIT.value, "i64", str(ABANDONED))
            self.w.line("ret void")

    def _reachable(self) -> list[PlanBlock]:
        seen: dict[int, PlanBlock] = {}
        todo = [self.plan.blocks[0]]
        while todo:
            b = todo.pop()
            if id(b) in seen:
                continue
            seen[id(b)] = b
            if isinstance(b.end, Jump):
                todo.append(b.end.target)
            elif isinstance(b.end, Branch):
                todo += [b.end.then, b.end.other]
        return [b for b in self.plan.blocks if id(b) in seen]

    def _name(self, v: Scalar) -> str:
        name = self.names.get(id(v))
        if name is None:
            name = self.names[id(v)] = self.w.name("s")
        return name

    def _ref(self, v: Scalar) -> str:
        if v.op == "const":
            if v.type == "ptr":
                value = int(v.attrs["value"])
                return "null" if value == 0 else f"inttoptr (i64 {literal('i64', value)} to ptr)"
            return literal(v.type, v.attrs["value"])
        return self._name(v)

    # -- control ----------------------------------------------------------------------------------------------
    def _end(self, b: PlanBlock) -> None:
        w = self.w
        match b.end:
            case Jump(target, args):
                self._edge(target, w.block, args)
                w.jump(self.labels[id(target)])
            case Branch(cond, then, then_args, other, other_args):
                label, rest = self.labels[id(then)], self.labels[id(other)]
                split = w.new_block("edge") if then is other else None
                w.branch(self._ref(cond), label, split or rest)
                self._edge(then, w.block, then_args)
                if split:                      # one predecessor may give a phi one value only
                    w.place(split)
                    w.jump(rest)
                self._edge(other, w.block, other_args)
            case Exit(exit, stores):
                self._leave(exit, stores)
            case _:
                raise PlanError(f"plan {self.plan.name}: block {b.name} ends with {b.end!r}")

    def _edge(self, target: PlanBlock, label: str, args: list[Scalar]) -> None:
        if len(args) != len(target.params):
            raise PlanError(f"plan {self.plan.name}: {len(args)} arguments for block {target.name} with "
                            f"{len(target.params)} parameters")
        self.edges[id(target)].append((label, args))

    def _leave(self, exit: int, stores: list[StoreFrame]) -> None:
        """Writes RETIRED, EXIT and the stores, and returns."""
        w = self.w
        self._store_word(FrameWord.RETIRED.value, "i64", w.op("load i64, ptr %retired"))
        self._store_word(FrameWord.EXIT.value, "i64", str(exit))
        for s in stores:
            self._store_frame(s)
        w.line("ret void")

    # -- statements -------------------------------------------------------------------------------------------
    def _statement(self, s) -> None:
        w = self.w
        match s:
            case Scalar(op="const"):
                pass                                   # written where it is used
            case Scalar():
                self._scalar(s)
            case Launch():
                self._launch(s)
            case Barrier():
                self._flush()
            case StoreFrame():
                self._store_frame(s)
            case Copy():
                self._copy(s)
            case Retire(count):
                r = w.op("load i64, ptr %retired")
                w.line(f"store i64 {w.op(f'add i64 {r}, {count}')}, ptr %retired")
            case Poll():
                self._poll(s)
            case _:
                raise PlanError(f"plan {self.plan.name}: unknown statement {s!r}")

    def _store_word(self, word: int, llvm_type: str, value: str) -> None:
        at = self.w.op(f"getelementptr i64, ptr {self.frame}, i64 {word}")
        self.w.line(f"store {llvm_type} {value}, ptr {at}")

    def _store_frame(self, s: StoreFrame) -> None:
        v, x = s.value, self._ref(s.value)
        if v.type == "b1":
            x, t = self.w.op(f"zext i1 {x} to i64"), "i64"
        elif v.type == "f32":
            x, t = self.w.op(f"fpext float {x} to double"), "double"
        else:
            t = LLVM_TYPE[v.type]
        self._store_word(s.word, t, x)

    def _launch(self, s: Launch) -> None:
        w, k = self.w, s.kernel
        if len(s.args) != len(k.params):
            raise PlanError(f"plan {self.plan.name}: launch of {k.name} with {len(s.args)} arguments, "
                            f"it has {len(k.params)} parameters")
        args = []
        for p, a in zip(k.params, s.args):
            x = self._ref(a)
            if (p.kind, a.type) == ("i32", "i64"):
                x = w.op(f"trunc i64 {x} to i32")
            elif p.kind != a.type:
                raise PlanError(f"plan {self.plan.name}: {k.name} takes {p.name} as {p.kind}, "
                                f"the launch gives {a.type}")
            args.append(f"{LLVM_TYPE[p.kind]} {x}")
        digest = self.digest(k)
        if s.parallel and not s.replicated:
            self._defer(run_symbol(digest), grid_symbol(digest), args)
        else:
            w.call("void", kernel_symbol(digest), ", ".join(["i64 0", "i64 1", "ptr %halt", *args]),
                   kernel_signature(k), " nounwind")
            if polls(k):
                self._give_up_if_skipped()

    def _copy(self, s: Copy) -> None:
        args = [f"{LLVM_TYPE[a.type]} {self._ref(a)}" for a in (s.dst, s.src, s.nbytes)]
        self._defer("m3_copy", "m3_copy_grid", args)

    def _defer(self, run: str, grid: str, args: list[str]) -> None:
        """The launch joins the pending ones; its arguments are values by now."""
        self.w.declared |= {f"declare void @{run}(i64, i64, ptr, ptr) nounwind", f"declare i64 @{grid}(ptr) nounwind"}
        self.batch.append((run, grid, args))
        if len(self.batch) == MOST_ITEMS:
            self._flush()

    def _flush(self) -> None:
        """Executes the pending launches: writes their items and argument slots and calls m3_run."""
        if not self.batch:
            return
        w, batch, slot = self.w, self.batch, 0
        self.batch = []
        for i, (run, grid, args) in enumerate(batch):
            here = w.op(f"getelementptr i64, ptr %slots, i64 {slot}")
            for k, word in enumerate((f"@{run}", f"@{grid}", here)):
                w.line(f"store ptr {word}, ptr {w.op(f'getelementptr i64, ptr %items, i64 {ITEM_WORDS * i + k}')}")
            for a in args:
                w.line(f"store {a}, ptr {w.op(f'getelementptr i64, ptr %slots, i64 {slot}')}, align 8")
                slot += 1
        self.largest = (max(self.largest[0], len(batch)), max(self.largest[1], slot))
        w.call("void", "m3_run", f"ptr %pool, ptr %items, i64 {len(batch)}, ptr %halt", "ptr, ptr, i64, ptr",
               " nounwind")
        self._give_up_if_skipped()

    def _poll(self, s: Poll) -> None:
        w = self.w
        self._flush()
        over = w.op(f"icmp sge i64 {w.op('load i64, ptr %retired')}, %budget")
        stop = w.op(f"icmp sgt i32 {w.op('load atomic i32, ptr %stop monotonic, align 4')}, 0")
        leave, go = w.new_block("leave"), w.new_block("go")
        w.branch(w.op(f"or i1 {over}, {stop}"), leave, go)
        w.place(leave)
        self._leave(s.exit, s.stores)
        w.place(go)
        # what was computed on the way here a second time would be lost
        again = w.op(f"icmp ne i32 {w.op('load i32, ptr %rounds')}, 0")
        word = w.op(f"select i1 {again}, ptr %never, ptr %stop")
        w.line("store i32 1, ptr %rounds")
        w.line(f"store ptr {word}, ptr %halt, align 8")

    # -- scalars ----------------------------------------------------------------------------------------------
    def _scalar(self, s: Scalar) -> None:
        if s.op == "element":
            self._flush()
        self.w.line(f"{self._name(s)} = {self._expression(s, [self._ref(a) for a in s.args])}")

    def _expression(self, s: Scalar, x: list[str]) -> str:
        """Right-hand side of the scalar's definition; lines it needs are emitted before."""
        w, op = self.w, s.op
        if op in _BINARY:
            return f"{_BINARY[op]} {x[0]}, {x[1]}"
        if op in _SHIFTS:
            return f"{_SHIFTS[op]} i64 {x[0]}, {w.op(f'and i64 {x[1]}, 63')}"
        match op:
            case "div" | "mod":
                # INT64_MIN / -1 overflows: divide by 1 instead and fix the result
                minus = w.op(f"icmp eq i64 {x[1]}, -1")
                divisor = w.op(f"select i1 {minus}, i64 1, i64 {x[1]}")
                r = w.op(f"{'sdiv' if op == 'div' else 'srem'} i64 {x[0]}, {divisor}")
                special = w.op(f"sub i64 0, {x[0]}") if op == "div" else "0"
                return f"select i1 {minus}, i64 {special}, i64 {r}"
            case "neg":
                return f"sub i64 0, {x[0]}"
            case "fneg":
                return f"fneg double {x[0]}"
            case "bool_not":
                return f"xor i1 {x[0]}, true"
            case "min" | "max":
                less = w.op(f"icmp slt i64 {x[0]}, {x[1]}")
                a, b = (x[0], x[1]) if op == "min" else (x[1], x[0])
                return f"select i1 {less}, i64 {a}, i64 {b}"
            case "fmin" | "fmax":
                better = w.op(f"fcmp {'olt' if op == 'fmin' else 'ogt'} double {x[0]}, {x[1]}")
                return f"select i1 {better}, double {x[0]}, double {x[1]}"
            case "fsqrt":
                return self._intrinsic("double", "llvm.sqrt.f64", "double", x[0])
            case "select":
                t = LLVM_TYPE[s.type]
                return f"select i1 {x[0]}, {t} {x[1]}, {t} {x[2]}"
            case "i2f":
                return f"sitofp i64 {x[0]} to double"
            case "f2i":
                return self._intrinsic("i64", "llvm.fptosi.sat.i64.f64", "double", x[0])
            case "f2f32":
                return f"fptrunc double {x[0]} to float"
            case "frame":
                return self._frame(s)
            case "element":
                return self._element(s, x)
        raise PlanError(f"plan {self.plan.name}: unknown scalar operation {op!r}")

    def _intrinsic(self, result: str, name: str, operand: str, x: str) -> str:
        self.w.declared.add(f"declare {result} @{name}({operand})")
        return f"call {result} @{name}({operand} {x})"

    def _frame(self, s: Scalar) -> str:
        w = self.w
        word = s.attrs["word"]
        if not 0 <= word < self.plan.words:
            raise PlanError(f"plan {self.plan.name}: frame word {word} outside the frame of {self.plan.words} words")
        at = w.op(f"getelementptr i64, ptr {self.frame}, i64 {int(word)}")
        if s.type == "b1":
            return f"icmp ne i64 {w.op(f'load i64, ptr {at}')}, 0"
        if s.type == "f32":
            return f"fptrunc double {w.op(f'load double, ptr {at}')} to float"
        return f"load {LLVM_TYPE[s.type]}, ptr {at}"

    def _element(self, s: Scalar, x: list[str]) -> str:
        w, dtype = self.w, s.attrs["dtype"]
        size, value = MEMORY[dtype]
        at = w.op(f"getelementptr i{8 * size}, ptr {x[0]}, i64 {x[1]}")
        raw = {"f32": "float", "f64": "double"}.get(dtype, f"i{8 * size}")
        loaded = decode(w, SCALAR, self.target, dtype, w.op(f"load {raw}, ptr {at}, align 1"))
        match (value, s.type):
            case ("i32", "i64"):
                return f"sext i32 {loaded} to i64"
            case ("i64", "i64"):
                return f"add i64 {loaded}, 0"
            case ("f32", "f64"):
                return f"fpext float {loaded} to double"
            case ("f64", "f64"):
                return f"select i1 true, double {loaded}, double {loaded}"
            case ("i32" | "i64", "f64"):
                return f"sitofp {value} {loaded} to double"
        raise PlanError(f"plan {self.plan.name}: element of {dtype} read as {s.type}")
