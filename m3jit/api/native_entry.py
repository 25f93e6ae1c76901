"""LLVM IR of the C entry of a compiled program: a frame on the stack, filled from the arguments, around its regions."""
from __future__ import annotations

import ctypes
import struct
from typing import Any

from m3jit.api import variants as compiled_variants
from m3jit.ir.plan import FrameWord
from m3jit.ir.tensor import F64T, Dim, Sym, TensorType, Type
from m3jit.vm.native import ALIGN, NO_BUDGET

STACK_BYTES = 1 << 14                      # temporaries up to this size live on the caller's stack
DONE, LEFT, UNFIT, NO_MEMORY = range(4)    # what the function returns


def has_length(t: Type) -> bool:
    """Is the first dimension an argument of its own?"""
    return isinstance(t, TensorType) and bool(t.shape) and isinstance(t.shape[0], Sym)


class Entry:
    """Writes the module: one internal function per variant, and the entry that tries them in order."""
    symbol = "m3_program"

    def __init__(self, program: Any, inputs: dict[str, Type], outputs: dict[str, Type], threads: int):
        self.program, self.inputs, self.outputs, self.threads = program, inputs, outputs, threads
        lib = ctypes.CDLL(None)
        self.imports = {n: ctypes.cast(getattr(lib, n), ctypes.c_void_p).value for n in ("malloc", "free")}
        self.params = []
        for i, t in enumerate(inputs.values()):
            self.params.append(f"{'ptr' if isinstance(t, TensorType) else 'double' if t == F64T else 'i64'} %a{i}")
            if has_length(t):
                self.params.append(f"i64 %n{i}")
        self.params += [f"ptr %out{i}" for i in range(len(outputs))]

    def text(self, variants: list[Any]) -> str:
        """The module."""
        parts = ["declare ptr @malloc(i64)", "declare void @free(ptr)", "@m3_stop_word = internal global i32 0",
                 "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
                 "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)"]
        for i, v in enumerate(variants):
            parts += [f"declare void @m3_region{i}(ptr, ptr)", _Try(self, v, i).text()]
            self.imports[f"m3_region{i}"] = v.native.address
        if self.threads > 1:
            parts.append("declare i64 @m3_call(ptr)")
            self.imports["m3_call"] = variants[0].native.call_address
        args = ", ".join(self.params)
        body = [f"define i64 @{self.symbol}({args}) {{", "entry:"]
        for i in range(len(variants)):
            body += [f"  %r{i} = call i64 @try{i}({args})", f"  %u{i} = icmp eq i64 %r{i}, {UNFIT}",
                     f"  br i1 %u{i}, label %next{i}, label %done{i}", f"done{i}:", f"  ret i64 %r{i}", f"next{i}:"]
        return "\n".join([*parts, *body, f"  ret i64 {UNFIT}", "}"])


class _Try:
    """The function of one variant: checks that the dimensions fit, fills the frame, runs, hands the results over."""

    def __init__(self, entry: Entry, variant: Any, number: int):
        self.entry, self.variant, self.region, self.number = entry, variant, variant.region, number
        self.lines: list[str] = []
        self.count = 0
        self.symbols: dict[Sym, str] = {}
        self.program = entry.program
        self.index = {k: i for i, k in enumerate(self.program._in_keys)}
        self.exit_type = dict(self.region.outputs)
        self.heap = False

    # -- pieces -------------------------------------------------------------------------------------------------------
    def value(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {text}")
        return f"%v{self.count}"

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def require(self, condition: str) -> None:
        """Go on when it holds, else UNFIT."""
        self.count += 1
        self.lines += [f"  br i1 {condition}, label %go{self.count}, label %unfit", f"go{self.count}:"]

    def dim(self, d: Dim) -> str:
        if isinstance(d, int):
            return str(d)
        if isinstance(d, Sym):
            return self.symbols[d]
        a, b = self.dim(d.a), self.dim(d.b)
        if d.op != "ceildiv":
            return self.value(f"{d.op} i64 {a}, {b}")
        return self.value(f"udiv i64 {self.value(f'add i64 {a}, {int(b) - 1}')}, {b}")

    def word(self, number: int) -> str:
        return self.value(f"getelementptr i64, ptr %frame, i64 {number}")

    def store(self, number: int, value: str) -> None:
        self.do(f"store i64 {value}, ptr {self.word(number)}, align 8")

    def address(self, pointer: str) -> str:
        return self.value(f"ptrtoint ptr {pointer} to i64")

    # -- the function -------------------------------------------------------------------------------------------------
    def text(self) -> str:
        self._dimensions()
        self._frame()
        self._memory()
        self._run()
        self._exits()
        head = f"define internal i64 @try{self.number}({', '.join(self.entry.params)}) noinline {{"
        tail = ["unfit:", f"  ret i64 {UNFIT}"] if any("%unfit" in x for x in self.lines) else []
        return "\n".join([head, "entry:", f"  %frame = alloca [{self.region.plan.words} x i64], align {ALIGN}",
                          "  %call = alloca [4 x i64], align 8", *self.lines, *tail, "}"])

    def _dimensions(self) -> None:
        """Bind symbols to the lengths that were passed; the others must equal what the variant has for them."""
        pending = []
        types = list(self.variant.types)
        for i, t in enumerate(self.entry.inputs.values()):
            if not has_length(t):
                continue
            node = self.variant.function.inputs.get(self.program._in_keys[i])
            shape = node.type.shape if node is not None else types[i].shape      # type: ignore[union-attr]
            d = shape[0]
            if isinstance(d, Sym) and d not in self.symbols:
                self.symbols[d] = f"%n{i}"
                self.require(self.value(f"icmp sge i64 %n{i}, 2"))
            else:
                pending.append((f"%n{i}", d))
        for have, d in pending:
            self.require(self.value(f"icmp eq i64 {have}, {self.dim(d)}"))
        for a, b in self.variant.function.guards:
            self.require(self.value(f"icmp eq i64 {self.dim(a)}, {self.dim(b)}"))

    def _frame(self) -> None:
        r = self.region
        self.do(f"call void @llvm.memset.p0.i64(ptr align {ALIGN} %frame, i8 0, i64 {8 * r.plan.words}, i1 false)")
        self.store(FrameWord.STOP, "ptrtoint (ptr @m3_stop_word to i64)")
        self.store(FrameWord.BUDGET, str(NO_BUDGET))
        for word, d in r.dims:
            self.store(word, self.dim(d))
        for word, address in self.variant.compiled(1)._weights():
            self.store(word, str(address))
        for key, word in r.pointers:
            self.store(word, self.address(f"%a{self.index[key]}"))
        for key, word, how in r.scalars:
            self.store(word, self._scalar(key, how))

    def _scalar(self, key: Any, how: str) -> str:
        if key in self.index:
            a = f"%a{self.index[key]}"
            return a if how == "i64" else self.value(f"bitcast double {a} to i64")
        v = self.program._view.unwritten.get(key)               # the random stream, the flags
        return str(v if how == "i64" else struct.unpack("<q", struct.pack("<d", v))[0])

    def _memory(self) -> None:
        """Temporaries, and results that are copied out, in one piece of memory."""
        self.direct = self.variant.given(self.program._out_keys)
        needs = [(s.word, s.nbytes) for s in self.region.slots]
        needs += [(w, t.nbytes()) for w, t in self.region.outputs if w not in self.direct]
        for w, i in self.direct.items():
            self.store(w, self.address(f"%out{i}"))
        if not needs:
            return
        sizes = [self._rounded(n) for _, n in needs]
        total = "0"
        starts = []
        for size in sizes:
            starts.append(total)
            total = str(int(total) + int(size)) if total.isdecimal() and size.isdecimal() else \
                self.value(f"add i64 {total}, {size}")
        self.heap = not (total.isdecimal() and int(total) <= STACK_BYTES)
        if self.heap:
            self.do(f"%memory = call ptr @malloc(i64 {self.value(f'add i64 {total}, {ALIGN}')})")
            self.do("%none = icmp eq ptr %memory, null")
            self.lines += ["  br i1 %none, label %nomem, label %have", "nomem:", f"  ret i64 {NO_MEMORY}", "have:"]
            up = self.value(f"add i64 {self.address('%memory')}, {ALIGN - 1}")
            base = self.value(f"and i64 {up}, {-ALIGN}")
        else:
            self.do(f"%memory = alloca [{total} x i8], align {ALIGN}")
            base = self.address("%memory")
        for (word, _), start in zip(needs, starts):
            self.store(word, self.value(f"add i64 {base}, {start}"))

    def _rounded(self, nbytes: Dim) -> str:
        if isinstance(nbytes, int):
            return str(-(-max(nbytes, 1) // ALIGN) * ALIGN)
        up = self.value(f"add i64 {self.dim(nbytes)}, {2 * ALIGN - 1}")          # at least one unit
        return self.value(f"and i64 {up}, {-ALIGN}")

    def _run(self) -> None:
        if self.entry.threads == 1 or not self.variant.native.parallel:
            self.do(f"call void @m3_region{self.number}(ptr %frame, ptr null)")
            self.do(f"%exit = load i64, ptr {self.word(FrameWord.EXIT)}, align 8")
            return
        work = "0"
        for d in self.variant.work:
            work = self.value(f"add i64 {work}, {self.dim(d)}")
        small = self.value(f"icmp slt i64 {work}, {compiled_variants.SMALL_BYTES}")
        threads = self.value(f"select i1 {small}, i64 1, i64 {self.entry.threads}")
        pool = self.program._compiler.engine._pool(self.entry.threads).address
        region = f"ptrtoint (ptr @m3_region{self.number} to i64)"
        for i, v in enumerate((str(pool), region, self.address("%frame"), threads)):
            self.do(f"store i64 {v}, ptr {self.value(f'getelementptr i64, ptr %call, i64 {i}')}, align 8")
        self.do("%exit = call i64 @m3_call(ptr %call)")

    def _exits(self) -> None:
        cases = " ".join(f"i64 {n}, label %exit{n}" for n in self.variant.done)
        self.lines += [f"  switch i64 %exit, label %left [ {cases} ]"]
        for n in self.variant.done:
            self.lines.append(f"exit{n}:")
            for i, key in enumerate(self.program._out_keys):
                self._output(n, i, key)
            self._leave(DONE)
        self.lines.append("left:")
        self._leave(LEFT)

    def _leave(self, code: int) -> None:
        if self.heap:
            self.do("call void @free(ptr %memory)")
        self.do(f"ret i64 {code}")

    def _output(self, exit: int, i: int, key: Any) -> None:
        s = next((s for s in self.region.exits[exit].stores if s.key == key), None)
        if s is None:
            t = self.variant.types[self.index[key]]
            a = f"%a{self.index[key]}"
            if isinstance(t, TensorType):
                node = self.variant.function.inputs.get(key)
                self._copy(i, a, (node.type if node is not None else t).nbytes())
            else:
                self.do(f"store {'double' if t == F64T else 'i64'} {a}, ptr %out{i}, align 8")
        elif s.how in ("i64", "f64"):
            v = self.value(f"load i64, ptr {self.word(s.word)}, align 8")
            self.do(f"store i64 {v}, ptr %out{i}, align 8")
        elif s.how == "tensor":
            if self.direct.get(s.word) != i:
                self._copy(i, self._at(s.word), s.type.nbytes())
        elif s.how == "input":
            self._copy(i, f"%a{self.index[s.source]}", s.type.nbytes())
        else:
            address = self.program._compiler.weights.pointer(s.source, "raw")
            self._copy(i, self.value(f"inttoptr i64 {address} to ptr"), s.type.nbytes())

    def _at(self, word: int) -> str:
        return self.value(f"inttoptr i64 {self.value(f'load i64, ptr {self.word(word)}, align 8')} to ptr")

    def _copy(self, i: int, source: str, nbytes: Dim) -> None:
        self.do(f"call void @llvm.memcpy.p0.p0.i64(ptr %out{i}, ptr {source}, i64 {self.dim(nbytes)}, i1 false)")
