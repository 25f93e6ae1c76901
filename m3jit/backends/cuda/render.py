"""Renders a kernel as LLVM IR for NVPTX (a group is a thread block, a lane a thread), and that as PTX text.

The same LLVM that makes CPU code emits the PTX, so no CUDA tool kit is needed.  Nothing is contracted or approximated:
fma appears only where the loop IR says fma; division and square root are the rounded ones.  Every access is aligned to
its own size, as the layouts keep it (a GPU has no other accesses).
"""
from __future__ import annotations

import struct
from typing import Sequence

from m3jit.backends.group_memory import fenced_stores, group_memory_bytes
from m3jit.errors import UserError
from m3jit.ir.loop import MEMORY, Kernel, Value

_TYPE = {"b1": "i1", "i32": "i32", "i64": "i64", "f32": "float", "f64": "double"}
_MEMORY_TYPE = {"i8": "i8", "u8": "i8", "i16": "i16", "u16": "i16", "i32": "i32", "i64": "i64", "f16": "i16",
                "bf16": "i16", "f32": "float", "f64": "double", "bool": "i8"}
_INT = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "or": "or", "xor": "xor", "shl": "shl", "lshr": "lshr",
        "ashr": "ashr", "idiv": "sdiv", "irem": "srem"}
_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_COMPARE = {"lt": ("slt", "olt"), "le": ("sle", "ole"), "eq": ("eq", "oeq"), "ne": ("ne", "une")}
TRIPLE = "nvptx64-nvidia-cuda"
STATIC_SHARED = 48 << 10           # bytes of shared memory a block may declare on every architecture


def render_nvptx(kernel: Kernel) -> str:
    """LLVM IR of a kernel entry point; launch with `grid` blocks of `lanes` threads."""
    return _Renderer(kernel).text()


def refusal(kernel: Kernel) -> str | None:
    """Why this kernel cannot run on CUDA, or None."""
    need = group_memory_bytes(kernel)
    if need > STATIC_SHARED:
        return f"{kernel.name} needs {need} bytes of shared memory, a block has {STATIC_SHARED} (use the CPU backend)"
    return None


def render_ptx(kernel: Kernel, arch: str = "sm_80") -> str:
    """PTX text for one architecture (sm_75, sm_80, sm_90, sm_100).  UserError: a kernel that `refusal` names."""
    why = refusal(kernel)
    if why:
        raise UserError(why)
    import llvmlite.binding as llvm
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=arch, opt=3)
    module = llvm.parse_assembly(render_nvptx(kernel))
    module.verify()
    options = llvm.create_pipeline_tuning_options()
    builder = llvm.create_pass_builder(machine, options)
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.run(module, builder)
    return machine.emit_assembly(module)


def literal(type: str, x) -> str:
    """An LLVM constant that denotes exactly x."""
    if type == "b1":
        return "true" if x else "false"
    if type in ("i32", "i64"):
        return str(x)
    if type == "f32":
        x = struct.unpack("<f", struct.pack("<f", x))[0]
    bits = 0x7FF8000000000000 if x != x else struct.unpack("<Q", struct.pack("<d", x))[0]
    return f"0x{bits:016X}"


class _Renderer:
    def __init__(self, kernel: Kernel):
        self.k = kernel
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        self.cells: list[str] = []
        self.globals: dict[str, str] = {}
        self.declared: set[str] = set()
        self.fenced = fenced_stores(kernel)
        self.count = 0
        self.label = "entry"

    def text(self) -> str:
        params = ", ".join(f"ptr addrspace(1) %arg.{p.name}" if p.kind == "ptr" else f"{_TYPE[p.kind]} %arg.{p.name}"
                           for p in self.k.params)
        self._block(self.k.prologue)
        self._block(self.k.body)
        self.emit("ret void")
        tid, ctaid = "llvm.nvvm.read.ptx.sreg.tid.x", "llvm.nvvm.read.ptx.sreg.ctaid.x"
        out = [
            f'target triple = "{TRIPLE}"',
            *self.globals.values(),
            f"declare i32 @{tid}()",
            f"declare i32 @{ctaid}()",
            "declare void @llvm.nvvm.barrier0()",
            *sorted(self.declared),
            f"define ptx_kernel void @{self.k.name}({params}) {{",
            "entry:",
            *self.cells,
            f"  %lane = call i32 @{tid}()",
            f"  %group32 = call i32 @{ctaid}()",
            "  %group = zext i32 %group32 to i64",
            *self.lines,
            "}",
        ]
        return "\n".join(out) + "\n"

    # -- emission ---------------------------------------------------------------------------------------------------
    def emit(self, text: str) -> None:
        self.lines.append("  " + text)

    def fresh(self, prefix: str = "t") -> str:
        self.count += 1
        return f"%{prefix}{self.count}"

    def value(self, text: str) -> str:
        name = self.fresh()
        self.emit(f"{name} = {text}")
        return name

    def start(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.label = label

    def ref(self, v: Value) -> str:
        if v.op == "const":
            return literal(v.type, v.attrs["value"])
        if v.op == "param":
            return "%arg." + v.attrs["name"]
        return "%" + v.op if v.op in ("lane", "group") else self.names[id(v)]

    def typed(self, v: Value) -> str:
        return f"{_TYPE[v.type]} {self.ref(v)}"

    def intrinsic(self, name: str, type: str, args: Sequence[str]) -> str:
        t = _TYPE[type]
        self.declared.add(f"declare {t} @{name}({', '.join([t] * len(args))})")
        return self.value(f"call {t} @{name}({', '.join(f'{t} {a}' for a in args)})")

    def barrier(self) -> None:
        self.emit("call void @llvm.nvvm.barrier0()")

    # -- statements -------------------------------------------------------------------------------------------------
    def _block(self, body: Sequence[Value]) -> None:
        for v in body:
            self._statement(v)

    def _statement(self, v: Value) -> None:
        match v.op:
            case "scratch":
                size = MEMORY[v.attrs["dtype"]][0] * v.attrs["count"]
                name = f"@scratch{len(self.globals)}"
                self.globals[name] = f"{name} = internal addrspace(3) global [{size} x i8] undef, align 16"
                self.names[id(v)] = name
            case "sync":
                self.barrier()
            case "var":
                cell = self.fresh("cell")
                self.cells.append(f"  {cell} = alloca {_TYPE[v.type]}")
                self.names[id(v)] = cell
                self.emit(f"store {self.typed(v.args[0])}, ptr {cell}")
            case "set":
                self.emit(f"store {self.typed(v.args[1])}, ptr {self.names[id(v.args[0])]}")
            case "get":
                self.names[id(v)] = self.value(f"load {_TYPE[v.type]}, ptr {self.names[id(v.args[0])]}")
            case "loop":
                self._loop(v)
            case "if":
                self._if(v)
            case "load" | "load_lanes":
                self._load(v)
            case "store" | "store_lanes":
                self._store(v)
            case "fold" | "shuffle_down" | "first":
                self._cross(v)
            case _:
                self.names[id(v)] = self._pure(v)

    def _loop(self, v: Value) -> None:
        lo, hi, index = v.args
        n = self.count = self.count + 1
        cell = f"%i{n}"
        self.cells.append(f"  {cell} = alloca i64")
        self.emit(f"store i64 {self.ref(lo)}, ptr {cell}")
        self.emit(f"br label %test{n}")
        self.start(f"test{n}")
        i = self.value(f"load i64, ptr {cell}")
        self.names[id(index)] = i
        more = self.value(f"icmp slt i64 {i}, {self.ref(hi)}")
        self.emit(f"br i1 {more}, label %body{n}, label %done{n}")
        self.start(f"body{n}")
        self._block(v.body)
        nxt = self.value(f"add i64 {i}, {v.attrs['step']}")
        self.emit(f"store i64 {nxt}, ptr {cell}")
        self.emit(f"br label %test{n}")
        self.start(f"done{n}")

    def _if(self, v: Value) -> None:
        n = self.count = self.count + 1
        other = f"else{n}" if v.orelse else f"end{n}"
        self.emit(f"br i1 {self.ref(v.args[0])}, label %then{n}, label %{other}")
        self.start(f"then{n}")
        self._block(v.body)
        self.emit(f"br label %end{n}")
        if v.orelse:
            self.start(other)
            self._block(v.orelse)
            self.emit(f"br label %end{n}")
        self.start(f"end{n}")

    # -- memory -----------------------------------------------------------------------------------------------------
    def _pointer(self, v: Value) -> tuple[str, int]:
        base, offset, index = v.args[:3]
        space = 3 if base.op == "scratch" else 1
        i = self.ref(index)
        if index.type == "i32":
            i = self.value(f"sext i32 {i} to i64")
        if v.op.endswith("_lanes"):
            lane = self.value("zext i32 %lane to i64")
            i = self.value(f"add i64 {i}, {lane}")
        size = MEMORY[v.attrs["dtype"]][0]
        if size > 1:
            i = self.value(f"mul i64 {i}, {size}")
        at = self.value(f"add i64 {i}, {self.ref(offset)}")
        return self.value(f"getelementptr i8, ptr addrspace({space}) {self.ref(base)}, i64 {at}"), space

    def _guarded(self, condition: str | None, body) -> None:
        if condition is None:
            return body()
        n = self.count = self.count + 1
        self.emit(f"br i1 {condition}, label %do{n}, label %skip{n}")
        self.start(f"do{n}")
        body()
        self.emit(f"br label %skip{n}")
        self.start(f"skip{n}")

    def _load(self, v: Value) -> None:
        cell = self.fresh("cell")
        self.cells.append(f"  {cell} = alloca {_TYPE[v.type]}")
        masked = v.attrs.get("masked")
        if masked:
            self.emit(f"store {_TYPE[v.type]} zeroinitializer, ptr {cell}")

        def read() -> None:
            p, space = self._pointer(v)
            dtype = v.attrs["dtype"]
            raw = self.value(f"load {_MEMORY_TYPE[dtype]}, ptr addrspace({space}) {p}, align {MEMORY[dtype][0]}")
            self.emit(f"store {_TYPE[v.type]} {self._widen(dtype, raw)}, ptr {cell}")
        self._guarded(self.ref(v.args[3]) if masked else None, read)
        self.names[id(v)] = self.value(f"load {_TYPE[v.type]}, ptr {cell}")

    def _widen(self, dtype: str, raw: str) -> str:
        if dtype in ("i8", "i16"):
            return self.value(f"sext {_MEMORY_TYPE[dtype]} {raw} to i32")
        if dtype in ("u8", "u16", "bool"):
            return self.value(f"zext {_MEMORY_TYPE[dtype]} {raw} to i32")
        if dtype == "f16":
            return self._f32_from_f16(raw)
        if dtype == "bf16":
            wide = self.value(f"zext i16 {raw} to i32")
            return self.value(f"bitcast i32 {self.value(f'shl i32 {wide}, 16')} to float")
        return raw

    def _store(self, v: Value) -> None:
        conditions = []
        if v.attrs.get("masked"):
            conditions.append(self.ref(v.args[4]))
        if v.op == "store" and not v.varying:
            conditions.append(self.value("icmp eq i32 %lane, 0"))
        condition = None if not conditions else conditions[0] if len(conditions) == 1 else \
            self.value(f"and i1 {conditions[0]}, {conditions[1]}")

        def write() -> None:
            dtype = v.attrs["dtype"]
            p, space = self._pointer(v)
            x = self._narrow(dtype, v.args[3])
            self.emit(f"store {_MEMORY_TYPE[dtype]} {x}, ptr addrspace({space}) {p}, align {MEMORY[dtype][0]}")
        if id(v) in self.fenced:
            self.barrier()
        self._guarded(condition, write)
        if id(v) in self.fenced:
            self.barrier()

    def _narrow(self, dtype: str, v: Value) -> str:
        x = self.ref(v)
        if dtype in ("i8", "u8", "bool", "i16", "u16"):
            return self.value(f"trunc i32 {x} to {_MEMORY_TYPE[dtype]}")
        if dtype == "f16":
            return self._f16_from_f32(x)
        if dtype == "bf16":
            bits = self.value(f"bitcast float {x} to i32")
            odd = self.value(f"and i32 {self.value(f'lshr i32 {bits}, 16')}, 1")
            up = self.value(f"add i32 {self.value(f'add i32 {bits}, 32767')}, {odd}")
            nan = self.value(f"fcmp uno float {x}, 0.0")
            quiet = self.value(f"or i32 {bits}, 4194304")
            chosen = self.value(f"select i1 {nan}, i32 {quiet}, i32 {up}")
            return self.value(f"trunc i32 {self.value(f'lshr i32 {chosen}, 16')} to i16")
        return x

    # -- across lanes -----------------------------------------------------------------------------------------------
    def _cross(self, v: Value) -> None:
        a, n = v.args[0], self.k.lanes
        t = a.type
        memory = "i8" if t == "b1" else _TYPE[t]
        tree = f"@tree_{t}"
        self.globals[tree] = f"{tree} = internal addrspace(3) global [{n} x {memory}] undef, align 16"

        def at(lane: str) -> str:
            return self.value(f"getelementptr {memory}, ptr addrspace(3) {tree}, i32 {lane}")

        def read(lane: str) -> str:
            x = self.value(f"load {memory}, ptr addrspace(3) {at(lane)}")
            return self.value(f"trunc i8 {x} to i1") if t == "b1" else x

        def write(x: str) -> None:
            x = self.value(f"zext i1 {x} to i8") if t == "b1" else x
            self.emit(f"store {memory} {x}, ptr addrspace(3) {at('%lane')}")
        write(self.ref(a))
        self.barrier()
        if v.op == "shuffle_down":
            far = self.value(f"add i32 %lane, {v.attrs['by']}")
            inside = self.value(f"icmp slt i32 {far}, {n}")
            out = read(self.value(f"select i1 {inside}, i32 {far}, i32 %lane"))
        elif v.op == "first":
            out = read("0")
        else:
            half = n // 2
            while half:
                active = self.value(f"icmp slt i32 %lane, {half}")

                def step(half=half) -> None:
                    mine, other = read("%lane"), read(self.value(f"add i32 %lane, {half}"))
                    write(self._combine(v.attrs["op"], t, mine, other))
                self._guarded(active, step)
                self.barrier()
                half //= 2
            out = read("0")
        self.barrier()
        self.names[id(v)] = out

    def _choose(self, type: str, c: str, a: str, b: str) -> str:
        """c ? a : b.  Floats are chosen as integers: of a comparison and selection of floats, one of them a constant,
        LLVM makes max.f32, which puts -0 below +0."""
        if type not in ("f32", "f64"):
            return self.value(f"select i1 {c}, {_TYPE[type]} {a}, {_TYPE[type]} {b}")
        t, i = _TYPE[type], "i32" if type == "f32" else "i64"
        x, y = (self.value(f"bitcast {t} {v} to {i}") for v in (a, b))
        return self.value(f"bitcast {i} {self.value(f'select i1 {c}, {i} {x}, {i} {y}')} to {t}")

    def _combine(self, op: str, t: str, a: str, b: str) -> str:
        lt = _TYPE[t]
        if op in ("fmin", "fmax"):
            x, y = (a, b) if op == "fmin" else (b, a)
            less = self.value(f"fcmp olt {lt} {x}, {y}")
            nan = self.value(f"fcmp uno {lt} {b}, {b}")
            return self._choose(t, self.value(f"or i1 {less}, {nan}"), a, b)
        if op in ("imin", "imax"):
            less = self.value(f"icmp {'slt' if op == 'imin' else 'sgt'} {lt} {a}, {b}")
            return self.value(f"select i1 {less}, {lt} {a}, {lt} {b}")
        table = _FLOAT if t in ("f32", "f64") else _INT
        return self.value(f"{table[op]} {lt} {a}, {b}")

    # -- pure operations --------------------------------------------------------------------------------------------
    def _pure(self, v: Value) -> str:
        a = [self.ref(x) for x in v.args]
        t = v.args[0].type if v.args else v.type
        lt, op, floating = _TYPE[t], v.op, t in ("f32", "f64")
        suffix = "f32" if t == "f32" else "f64"
        if op in _COMPARE:
            kind = _COMPARE[op][floating]
            return self.value(f"{'fcmp' if floating else 'icmp'} {kind} {lt} {a[0]}, {a[1]}")
        if floating and op in _FLOAT:
            return self.value(f"{_FLOAT[op]} {lt} {a[0]}, {a[1]}")
        if op in _INT:
            return self.value(f"{_INT[op]} {lt} {a[0]}, {a[1]}")
        match op:
            case "fma" | "sqrt" | "floor" | "rint":
                return self.intrinsic(f"llvm.{op}.{suffix}", t, a)
            case "neg":
                return self.value(f"fneg {lt} {a[0]}" if floating else f"sub {lt} 0, {a[0]}")
            case "abs":
                if floating:
                    return self.intrinsic(f"llvm.fabs.{suffix}", t, a)
                minus = self.value(f"sub {lt} 0, {a[0]}")
                return self.value(f"select i1 {self.value(f'icmp slt {lt} {a[0]}, 0')}, {lt} {minus}, {lt} {a[0]}")
            case "imin" | "imax":
                return self._combine(op, t, *a)
            case "select":
                return self._choose(v.type, *a)
            case "not":
                return self.value(f"xor i1 {a[0]}, true")
            case "bits":
                return self.value(f"bitcast {lt} {a[0]} to {_TYPE[v.type]}")
            case "zext":
                return self.value(f"zext i32 {a[0]} to i64")
            case "cvt":
                return self._convert(t, v.type, a[0])
            case "dot4":
                return self._dot4(*a)
            case "lookup":
                return self._lookup(*a)
        raise KeyError(f"no LLVM IR for {op}")

    def _convert(self, source: str, target: str, x: str) -> str:
        s, t = _TYPE[source], _TYPE[target]
        if source == target:
            return x
        if source == "b1":
            return self.value(f"uitofp i1 {x} to {t}" if target in ("f32", "f64") else f"zext i1 {x} to {t}")
        if source in ("i32", "i64"):
            if target in ("f32", "f64"):
                return self.value(f"sitofp {s} {x} to {t}")
            return self.value(f"sext i32 {x} to i64" if target == "i64" else f"trunc i64 {x} to i32")
        if target in ("i32", "i64"):
            return self.value(f"fptosi {s} {x} to {t}")
        return self.value(f"fpext float {x} to double" if target == "f64" else f"fptrunc double {x} to float")

    def _dot4(self, acc: str, u: str, s: str) -> str:
        """dp4a: four byte products and a 32-bit sum that wraps; nothing saturates, so it is exactly dot4."""
        self.declared.add("declare i32 @llvm.nvvm.idp4a.u.s(i32, i32, i32)")
        return self.value(f"call i32 @llvm.nvvm.idp4a.u.s(i32 {u}, i32 {s}, i32 {acc})")

    def _lookup(self, codes: str, *words: str) -> str:
        """Per byte: one of four words by bits 2 and 3 of its code, a byte of that by bits 0 and 1."""
        out = "0"
        for at in (0, 8, 16, 24):
            code = self.value(f"and i32 {self.value(f'lshr i32 {codes}, {at}')}, 15")
            four, eight = (self.value(f"icmp ne i32 {self.value(f'and i32 {code}, {bit}')}, 0") for bit in (4, 8))
            pairs = [self.value(f"select i1 {four}, i32 {words[i + 1]}, i32 {words[i]}") for i in (0, 2)]
            word = self.value(f"select i1 {eight}, i32 {pairs[1]}, i32 {pairs[0]}")
            place = self.value(f"shl i32 {self.value(f'and i32 {code}, 3')}, 3")
            byte = self.value(f"and i32 {self.value(f'lshr i32 {word}, {place}')}, 255")
            out = self.value(f"or i32 {out}, {self.value(f'shl i32 {byte}, {at}')}")
        return out

    # -- half precision, by integers: a GPU's conversions replace NaNs, the contract's keep their upper bits -----------
    def _select(self, test: str, a: str, b: str) -> str:
        return self.value(f"select i1 {self.value(test)}, i32 {a}, i32 {b}")

    def _f32_from_f16(self, raw: str) -> str:
        h = self.value(f"zext i16 {raw} to i32")
        sign = self.value(f"shl i32 {self.value(f'and i32 {h}, 32768')}, 16")
        magnitude = self.value(f"and i32 {h}, 32767")
        moved = self.value(f"shl i32 {magnitude}, 13")
        quiet = self._select(f"icmp ugt i32 {magnitude}, 31744", "4194304", "0")
        special = self.value(f"or i32 {self.value(f'or i32 {moved}, {0x7F800000}')}, {quiet}")
        as_float = self.value(f"sitofp i32 {magnitude} to float")
        scaled = self.value(f"fmul float {as_float}, {literal('f32', 2.0 ** -24)}")
        tiny = self.value(f"bitcast float {scaled} to i32")
        out = self._select(f"icmp uge i32 {magnitude}, 31744", special, self.value(f"add i32 {moved}, {112 << 23}"))
        out = self._select(f"icmp ult i32 {magnitude}, 1024", tiny, out)
        return self.value(f"bitcast i32 {self.value(f'or i32 {out}, {sign}')} to float")

    def _f16_from_f32(self, x: str) -> str:
        """To nearest even; below 2^-14 adding 0.5 rounds to a multiple of 2^-24, the spacing of subnormal halves."""
        bits = self.value(f"bitcast float {x} to i32")
        sign = self.value(f"and i32 {self.value(f'lshr i32 {bits}, 16')}, 32768")
        magnitude = self.value(f"and i32 {bits}, {0x7FFFFFFF}")
        rebiased = self.value(f"sub i32 {magnitude}, {112 << 23}")
        odd = self.value(f"and i32 {self.value(f'lshr i32 {rebiased}, 13')}, 1")
        raised = self.value(f"add i32 {self.value(f'add i32 {rebiased}, 4095')}, {odd}")
        normal = self.value(f"lshr i32 {raised}, 13")
        as_float = self.value(f"bitcast i32 {magnitude} to float")
        shifted = self.value(f"fadd float {as_float}, {literal('f32', 0.5)}")
        tiny = self.value(f"sub i32 {self.value(f'bitcast float {shifted} to i32')}, {0x3F000000}")
        payload = self.value(f"and i32 {self.value(f'lshr i32 {magnitude}, 13')}, 1023")
        out = self._select(f"icmp ult i32 {magnitude}, {0x38800000}", tiny, normal)
        out = self._select(f"icmp uge i32 {magnitude}, {0x477FF000}", "31744", out)
        out = self._select(f"icmp ugt i32 {magnitude}, {0x7F800000}", self.value(f"or i32 {payload}, {0x7E00}"), out)
        return self.value(f"trunc i32 {self.value(f'or i32 {out}, {sign}')} to i16")
