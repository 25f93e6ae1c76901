"""Loop IR -> LLVM IR text: one function `void @k_<digest>(i64 chunk, i64 chunks, ptr halt, params...)` per kernel.

Chunk c of n computes groups [G*c/n, G*(c+1)/n).  For batches (runtime.py) there are two more functions, which take the
parameters from 8-byte slots: `void @run_<digest>(i64 chunk, i64 chunks, ptr args, ptr halt)` calls the first one, and
`i64 @grid_<digest>(ptr args)` gives G.

A kernel whose groups are loops looks at the stop word before each group and in each turn of a loop that holds another
loop; when the word is urgent it says so in `halt` (runtime.py) and returns, whatever it has computed so far.

Three things are chosen here, none of which can change a result:

* **passes**: a kernel whose lanes never meet is computed a few machine vectors at a time, so that its values stay in
  registers (64 lanes of a long expression would need 16 registers per value on SSE2).  This relies on what "r" says:
  memory of such a parameter is not written by the launch, except by the lane that read it (in place, same index);
* **versions**: where masks depend only on the group, a group with every lane active runs a body without masks;
* **dead lanes**: vectors that only `first` would drop are not computed.

Variables become stack slots; LLVM's SROA turns them into registers.  No other pass is needed.
"""
from __future__ import annotations

from typing import Sequence

from m3jit.backends.cpu import analysis, cross
from m3jit.backends.cpu.arith import Arith, part_is_live
from m3jit.backends.cpu.memory import Memory
from m3jit.backends.cpu.numeric import SCALAR, intrinsic
from m3jit.backends.cpu.runtime import URGENT, look
from m3jit.backends.cpu.target import CpuTarget
from m3jit.backends.cpu.text import LLVM_TYPE, Writer
from m3jit.backends.cpu.values import Lanes, Val
from m3jit.ir.loop import MEMORY, PURE, Kernel, Value

# Bodies longer than this many vector operations are not duplicated into a masked and an unmasked version.
_LARGEST_VERSIONED = 600


class UnsupportedKernel(Exception):
    """The CPU backend cannot compile this kernel; the message names the operation and its operands."""


def kernel_symbol(digest: str) -> str:
    return f"k_{digest}"


def run_symbol(digest: str) -> str:
    return f"run_{digest}"


def grid_symbol(digest: str) -> str:
    return f"grid_{digest}"


def kernel_signature(kernel: Kernel) -> str:
    """LLVM types of the kernel function's arguments."""
    return ", ".join(["i64", "i64", "ptr"] + [LLVM_TYPE[p.kind] for p in kernel.params])


def polls(kernel: Kernel) -> bool:
    """Does the kernel look at the stop word while it runs?  A group without a loop is soon done."""
    return any(v.op == "loop" for v in analysis.walk(kernel.body))


def render_kernel(kernel: Kernel, target: CpuTarget, digest: str, counted: bool = False) -> str:
    """The kernel's functions and their declarations, as LLVM IR text without triple and data layout.

    counted: see `runtime.look`."""
    r, g = _KernelRenderer(kernel, target, counted), _KernelRenderer(kernel, target, counted)
    body, count = r.render(), g.render_grid()
    args = [f"{LLVM_TYPE[p.kind]} %p{i}" for i, p in enumerate(kernel.params)]
    unpack = [line for i, p in enumerate(kernel.params) for line in (
        f"  %a{i} = getelementptr i64, ptr %args, i64 {i}", f"  %p{i} = load {LLVM_TYPE[p.kind]}, ptr %a{i}, align 8")]
    symbol = kernel_symbol(digest)
    return "\n".join([
        *sorted(r.w.declared | g.w.declared),
        f"define void @{symbol}({', '.join(['i64 %tid', 'i64 %nth', 'ptr %halt', *args])}) nounwind {{",
        "entry:", body, "}",
        f"define void @{run_symbol(digest)}(i64 %tid, i64 %nth, ptr %args, ptr %halt) nounwind {{", *unpack,
        f"  call void @{symbol}({', '.join(['i64 %tid', 'i64 %nth', 'ptr %halt', *args])})", "  ret void", "}",
        f"define i64 @{grid_symbol(digest)}(ptr %args) nounwind {{", "entry:", *unpack, count, "}", ""])


def unsupported(kernel: Kernel) -> str | None:
    """Why the CPU backend refuses the kernel, or None.  Everything `verify_kernel` admits is supported, except:
    a conversion to b1, and a varying mask on a memory operation with a uniform index."""
    for v in analysis.walk([*kernel.prologue, *kernel.body]):
        if v.op == "cvt" and v.attrs["to"] == "b1" and v.args[0].type != "b1":
            return f"kernel {kernel.name}: cvt from {v.args[0].type} to b1 (compare with zero instead)"
        if v.op in ("load", "store") and v.attrs.get("masked") and not v.args[2].varying and v.args[-1].varying:
            return (f"kernel {kernel.name}: {v.op} of {v.attrs['dtype']} with a uniform index and a mask that differs "
                    "between lanes (use load_lanes/store_lanes or a uniform mask)")
    return None


class _KernelRenderer:
    """State of one kernel's rendering."""

    def __init__(self, kernel: Kernel, target: CpuTarget, counted: bool = False):
        reason = unsupported(kernel)
        if reason:
            raise UnsupportedKernel(reason)
        self.kernel, self.target, self.counted = kernel, target, counted
        self.halted = ""                       # the block for a group that is given up, in kernels that look
        self.w = Writer()
        self.allocas = self.w.slot()
        self.stages: dict[str, str] = {}
        self.cells: dict[int, list[str]] = {}
        self.env: dict[int, Val] = {}
        self.consts: dict[int, Val] = {}
        self.pass_lane: Val | None = None
        self.lanes = Lanes(self.w, self._lanes_per_pass(), target.vector_bits)
        self.passes = kernel.lanes // self.lanes.lanes
        self.read = analysis.lanes_read(kernel) if self.passes == 1 else None
        self.all_live = [True] * self.lanes.count
        self.arith = Arith(self.w, self.lanes, target)
        self.memory = Memory(self.w, self.lanes, target, self.arith, self._stage)

    def _lanes_per_pass(self) -> int:
        lanes = self.kernel.lanes
        part = min(lanes, self.target.vector_bits // 32)
        if lanes == part or not analysis.lanes_are_independent(self.kernel):
            return lanes
        registers = 32 if self.target.vector_bits == 512 or self.target.arch == "aarch64" else 16
        fitting = max(1, registers // (analysis.pressure(self.kernel) + 3))
        while part * 2 <= lanes and fitting >= 2:
            part, fitting = part * 2, fitting // 2
        return part

    # -- the functions ----------------------------------------------------------------------------------------
    def _grid(self) -> str:
        """The number of groups, computed here."""
        self.params = {p.name: self._param(i, p.kind) for i, p in enumerate(self.kernel.params)}
        self.block(self.kernel.prologue)
        return self.get(self.kernel.grid).scalar

    def render_grid(self) -> str:
        """Body of the function that returns the number of groups."""
        self.w.line(f"ret i64 {self._grid()}")
        return self.w.text()

    def render(self) -> str:
        """Body of the function that computes one chunk of the groups."""
        w = self.w
        lo, hi = self._chunk(self._grid())
        head, latch, leave = w.new_block("group"), w.new_block("latch"), w.new_block("leave")
        if polls(self.kernel):
            w.line("%word = load ptr, ptr %halt, align 8")
            self.halted = w.new_block("halted")
        before, g, following = w.block, w.name("g"), w.name("g")
        w.branch(w.op(f"icmp slt i64 {lo}, {hi}"), head, leave)
        w.place(head)
        w.line(f"{g} = phi i64 [ {lo}, %{before} ], [ {following}, %{latch} ]")
        self.group = self.lanes.uniform("i64", g)
        self.group.index = True
        self._look()
        self._group_body()
        w.jump(latch)
        w.place(latch)
        w.line(f"{following} = add nsw i64 {g}, 1")
        w.branch(w.op(f"icmp slt i64 {following}, {hi}"), head, leave)
        if self.halted:
            w.place(self.halted)
            w.line(f"store atomic i32 1, ptr {w.op('getelementptr i8, ptr %halt, i64 8')} monotonic, align 4")
            w.jump(leave)
        w.place(leave)
        w.line("ret void")
        return w.text()

    def _look(self) -> None:
        """Give the chunk up when the stop word is urgent."""
        if self.halted:
            w, go = self.w, self.w.new_block("on")
            w.branch(w.op(f"icmp sge i32 {w.op(look('%word', self.counted))}, {URGENT}"), self.halted, go)
            w.place(go)

    def _param(self, i: int, kind: str) -> Val:
        v = self.lanes.uniform(kind, f"%p{i}")
        v.index = kind in ("i64", "i32")
        return v

    def _chunk(self, grid: str) -> tuple[str, str]:
        """The groups of this chunk; without the divisions when there is one chunk."""
        w = self.w
        split, ready, before = w.new_block("split"), w.new_block("ready"), w.block
        w.branch(w.op("icmp eq i64 %nth, 1"), ready, split)
        w.place(split)
        lo = w.op(f"sdiv i64 {w.op(f'mul i64 {grid}, %tid')}, %nth")
        after = w.op("add i64 %tid, 1")
        hi = w.op(f"sdiv i64 {w.op(f'mul i64 {grid}, {after}')}, %nth")
        w.jump(ready)
        w.place(ready)
        return (w.op(f"phi i64 [ 0, %{before} ], [ {lo}, %{split} ]"),
                w.op(f"phi i64 [ {grid}, %{before} ], [ {hi}, %{split} ]"))

    def _group_body(self) -> None:
        """The body: once, or in an unmasked and a masked version."""
        w = self.w
        masks = analysis.guard_masks(self.kernel)
        if self.passes > 1:
            self._hoist_uniform()
        small = analysis.statements(self.kernel) * self.lanes.count <= _LARGEST_VERSIONED
        full = self._all_active(masks) if masks and small else None
        if full is None:
            self._passes()
            return
        fast, slow, done = w.new_block("full"), w.new_block("part"), w.new_block("done")
        w.branch(full, fast, slow)
        outer = dict(self.env)
        w.place(fast)
        for m in masks:
            self.env[id(m)] = self.lanes.constant("b1", True)
        self._passes()
        w.jump(done)
        self.env = outer
        w.place(slow)
        self._passes()
        w.jump(done)
        w.place(done)

    def _hoist_uniform(self) -> None:
        for v in self.kernel.body:
            if v.op in PURE and not v.varying and all(self._known(a) for a in v.args):
                self.statement(v)

    def _known(self, a: Value) -> bool:
        return a.op in ("const", "param", "group") or id(a) in self.env

    def _all_active(self, masks: Sequence[Value]) -> str | None:
        """i1: every mask holds on every lane of the group; None if that is not a comparison of scalars."""
        w, lanes, result = self.w, self.kernel.lanes, None
        for m in masks:
            x, n = m.args
            base, stride, known = self._affine_base(x)
            if not known or stride != 1 or n.varying:
                return None
            n = self._compute(n).scalar
            t, limit = LLVM_TYPE[x.type], n
            if base is not None:
                # base + lanes - 1 < n, with the sum saturated: a wrapping group is not full, and is done lane by lane
                limit = intrinsic(w, SCALAR, "sadd.sat", t, base.scalar, str(lanes - 1))
                ok = w.op(f"icmp slt {t} {limit}, {n}")
            else:
                ok = w.op(f"icmp sge {t} {n}, {lanes}")
            result = ok if result is None else w.op(f"and i1 {result}, {ok}")
        return result

    def _affine_base(self, x: Value) -> tuple[Val | None, int | None, bool]:
        """(uniform base, stride, found) of a pure varying index, computed here if it is not yet."""
        saved, self.pass_lane = self.pass_lane, None
        v = self._compute(x, keep=self.passes == 1)
        self.pass_lane = saved
        return v.base, v.stride, v.stride is not None

    def _compute(self, v: Value, keep: bool = True) -> Val:
        """Value of a pure node, ahead of its turn.  keep=False leaves varying nodes to be recomputed in each pass."""
        if self._known(v) or v.op == "lane":
            return self.get(v)
        args = [self._compute(a, keep) for a in v.args]
        val = self.arith.pure(v.op, v.type, args, v.attrs, self.all_live)
        if keep or not v.varying:
            self.env[id(v)] = val
        return val

    def _passes(self) -> None:
        """The body over all lanes: in one go, or a loop over passes."""
        if self.passes == 1:
            self.block(self.kernel.body)
            return
        w = self.w
        head, leave = w.new_block("pass"), w.new_block("over")
        before, lane, following = w.block, w.name("pass"), w.name("pass")
        back = w.name("latch")[1:]
        w.jump(head)
        w.place(head)
        w.line(f"{lane} = phi i64 [ 0, %{before} ], [ {following}, %{back} ]")
        self.pass_lane = self.lanes.uniform("i64", lane)
        self.pass_lane.index = True
        narrow = self.lanes.uniform("i32", w.op(f"trunc i64 {lane} to i32"))
        narrow.index = narrow.bound = True
        self.pass_narrow = narrow
        outer = dict(self.env)
        self.block(self.kernel.body)
        self.env = outer
        self.pass_lane = None
        w.jump(back)
        w.place(back)
        w.line(f"{following} = add nsw i64 {lane}, {self.lanes.lanes}")
        w.branch(w.op(f"icmp slt i64 {following}, {self.kernel.lanes}"), head, leave)
        w.place(leave)

    # -- values -----------------------------------------------------------------------------------------------
    def get(self, a: Value) -> Val:
        match a.op:
            case "const":
                v = self.consts.get(id(a))
                if v is None:
                    v = self.consts[id(a)] = self.lanes.constant(a.type, a.attrs["value"])
                return v
            case "param":
                return self.params[a.attrs["name"]]
            case "group":
                return self.group
            case "lane":
                base = self.pass_narrow if self.pass_lane is not None else None
                return self.lanes.affine("i32", base, 1)
        return self.env[id(a)]

    def _live(self, v: Value) -> list[bool]:
        return self.all_live if self.read is None else part_is_live(self.lanes, self.read.get(id(v), 0))

    def _stage(self, name: str, size: int) -> str:
        """A 64-byte aligned stack buffer of the function."""
        if name not in self.stages:
            self.stages[name] = self._alloca(f"[{size} x i8]", 64)
        return self.stages[name]

    def _alloca(self, type: str, align: int = 0) -> str:
        name = self.w.name("cell")
        self.allocas.append(f"  {name} = alloca {type}" + (f", align {align}" if align else ""))
        return name

    # -- statements -------------------------------------------------------------------------------------------
    def block(self, body: Sequence[Value]) -> None:
        for v in body:
            if id(v) not in self.env:
                self.statement(v)

    def statement(self, v: Value) -> None:
        op = v.op
        if op in PURE:
            self.env[id(v)] = self._pure(v)
            return
        match op:
            case "load" | "load_lanes" | "store" | "store_lanes":
                self._memory(v)
            case "var":
                cells = self.cells.get(id(v))
                if cells is None:
                    t = self.lanes.vec(v.type) if v.varying else LLVM_TYPE[v.type]
                    cells = self.cells[id(v)] = [self._alloca(t) for _ in range(self.lanes.count if v.varying else 1)]
                self._assign(v, self.get(v.args[0]))
            case "set":
                self._assign(v.args[0], self.get(v.args[1]))
            case "get":
                self.env[id(v)] = self._read(v.args[0])
            case "loop":
                self._loop(v)
            case "if":
                self._if(v)
            case "scratch":
                size = v.attrs["count"] * MEMORY[v.attrs["dtype"]][0]
                self.env[id(v)] = Val("ptr", scalar=self._alloca(f"[{size} x i8]", 64))
            case "sync":
                pass                   # one thread runs all lanes of a group, statement by statement
            case _:
                raise UnsupportedKernel(f"kernel {self.kernel.name}: the CPU backend has no statement {op!r}")

    def _pure(self, v: Value) -> Val:
        args = [self.get(a) for a in v.args]
        match v.op:
            case "first":
                return cross.first(self.w, self.lanes, args[0])
            case "fold":
                return cross.fold(self.w, self.lanes, self.target, args[0], v.attrs["op"])
            case "shuffle_down":
                return cross.shuffle_down(self.w, self.lanes, args[0], v.attrs["by"], self._live(v))
        val = self.arith.pure(v.op, v.type, args, v.attrs, self._live(v))
        if v.op in ("cvt", "zext") and val.uniform and v.type == "i64" and v.args[0].type == "i32":
            val.index = True           # at most 32 bits: far from wrapping
        return val

    def _memory(self, v: Value) -> None:
        dtype, masked = v.attrs["dtype"], v.attrs.get("masked", False)
        ptr, offset, index = (self.get(a) for a in v.args[:3])
        mask = self.get(v.args[-1]) if masked else None
        value = self.get(v.args[3]) if v.op.startswith("store") else None
        m, args = self.memory, (dtype, ptr.scalar, offset, index)
        if mask is not None and mask.const is False:
            mask = self.lanes.prefix("0") if v.varying else mask
        if v.op.endswith("_lanes") and self.pass_lane is not None:
            index = self._widened(index)
            args = (dtype, ptr.scalar, offset, self.arith.pure("add", "i64", [index, self.pass_lane], {}, []))
        match v.op:
            case "load_lanes":
                if "ahead" in v.attrs:
                    m.prefetch(*args, v.attrs["ahead"])
                self.env[id(v)] = m.load_lanes(*args, mask, self._live(v))
            case "store_lanes":
                m.store_lanes(*args, value, mask)
            case "load" if v.args[2].varying:
                self.env[id(v)] = m.gather(*args, mask, self._live(v))
            case "load":
                self.env[id(v)] = m.load_uniform(*args, mask)
            case "store" if v.args[2].varying:
                m.scatter(*args, value, mask)
            case "store":
                m.store_uniform(*args, value, mask)

    def _widened(self, index: Val) -> Val:
        return index if index.type == "i64" else self.arith.pure("cvt", "i64", [index], {"to": "i64"}, [])

    def _assign(self, cell: Value, value: Val) -> None:
        t = self.lanes.vec(cell.type) if cell.varying else LLVM_TYPE[cell.type]
        parts = self.lanes.parts(value) if cell.varying else [value.scalar]
        for name, x in zip(self.cells[id(cell)], parts):
            self.w.line(f"store {t} {x}, ptr {name}")

    def _read(self, cell: Value) -> Val:
        t = self.lanes.vec(cell.type) if cell.varying else LLVM_TYPE[cell.type]
        parts = [self.w.op(f"load {t}, ptr {name}") for name in self.cells[id(cell)]]
        return self.lanes.varying(cell.type, parts) if cell.varying else self.lanes.uniform(cell.type, parts[0])

    # -- control ----------------------------------------------------------------------------------------------
    def _loop(self, v: Value) -> None:
        w = self.w
        lo, hi = self._widened(self.get(v.args[0])), self._widened(self.get(v.args[1]))
        head, latch, leave = w.new_block("loop"), w.new_block("latch"), w.new_block("end")
        before, i, following = w.block, w.name("i"), w.name("i")
        w.branch(w.op(f"icmp slt i64 {lo.scalar}, {hi.scalar}"), head, leave)
        w.place(head)
        w.line(f"{i} = phi i64 [ {lo.scalar}, %{before} ], [ {following}, %{latch} ]")
        index = self.env[id(v.args[2])] = self.lanes.uniform("i64", i)
        index.index = lo.index
        if any(inner.op == "loop" for inner in analysis.walk(v.body)):
            self._look()
        self._scoped(v.body)
        w.jump(latch)
        w.place(latch)
        w.line(f"{following} = add nsw i64 {i}, {v.attrs['step']}")
        w.branch(w.op(f"icmp slt i64 {following}, {hi.scalar}"), head, leave)
        w.place(leave)

    def _if(self, v: Value) -> None:
        w = self.w
        then, done = w.new_block("then"), w.new_block("fi")
        other = w.new_block("else") if v.orelse else done
        w.branch(self.get(v.args[0]).scalar, then, other)
        w.place(then)
        self._scoped(v.body)
        w.jump(done)
        if v.orelse:
            w.place(other)
            self._scoped(v.orelse)
            w.jump(done)
        w.place(done)

    def _scoped(self, body: Sequence[Value]) -> None:
        outer = dict(self.env)
        self.block(body)
        self.env = outer
