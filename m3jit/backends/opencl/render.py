"""Renders a kernel as OpenCL C: a group is a work-group, a lane a work-item.

Every work-item executes the uniform code too (same values); uniform stores are done by lane 0.  Lane trees go through
local memory.  One operation per statement and FP_CONTRACT OFF, so that nothing is fused but `fma`.
"""
from __future__ import annotations

import math
import re
from typing import Sequence

from m3jit.backends.group_memory import fenced_stores
from m3jit.ir.loop import MEMORY, Kernel, Value

_TYPE = {"b1": "int", "i32": "int", "i64": "long", "f32": "float", "f64": "double"}
_UNSIGNED = {"i32": "uint", "i64": "ulong"}
_MEMORY_TYPE = {"i8": "char", "u8": "uchar", "i16": "short", "u16": "ushort", "i32": "int", "i64": "long",
                "f32": "float", "f64": "double", "bool": "uchar"}
_INFIX = {"mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
          "idiv": "/", "irem": "%"}
_COMBINE = {"fmin": "(({a} < {b}) || ({b} != {b})) ? {a} : {b}", "fmax": "(({b} < {a}) || ({b} != {b})) ? {a} : {b}",
            "imin": "{a} < {b} ? {a} : {b}", "imax": "{a} > {b} ? {a} : {b}", "mul": "{a} * {b}",
            "and": "{a} & {b}", "or": "{a} | {b}"}

# LLVM 15 and before make `-0.0f < x ? -0.0f : x` one minss, which gives the wrong zero, and any LLVM thinks all NaNs
# alike: hide what these constants are (a launch has one dimension, which the compiler does not know).
HIDDEN = {
    "minus_zero_f32": "    const float minus_zero_f32 = as_float(0x80000000u + (get_work_dim() - 1u));",
    "minus_zero_f64": "    const double minus_zero_f64 = as_double(0x8000000000000000ul + (get_work_dim() - 1u));",
    "nan_f32": "    const float nan_f32 = as_float(0x7fc00000u + (get_work_dim() - 1u));",
    "nan_f64": "    const double nan_f64 = as_double(0x7ff8000000000000ul + (get_work_dim() - 1u));",
}
BARRIER = "barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);"
PRELUDE = """\
#pragma OPENCL FP_CONTRACT OFF

float f32_from_f16(ushort h) {
    uint sign = (uint)(h & 0x8000u) << 16;
    uint exponent = (h >> 10) & 31u;
    uint fraction = h & 0x3ffu;
    if (exponent == 31u) return as_float(sign | 0x7f800000u | (fraction << 13));
    if (exponent == 0u) {
        float value = (float)fraction * 0x1p-24f;
        return as_float(sign | as_uint(value));
    }
    return as_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

ushort f16_from_f32(float v) {
    uint bits = as_uint(v);
    uint sign = (bits >> 16) & 0x8000u;
    uint a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return (ushort)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    if (a >= 0x47800000u) return (ushort)(sign | 0x7c00u);
    if (a >= 0x38800000u) {
        uint r = a - 0x38000000u;
        return (ushort)(sign | ((r + 0xfffu + ((r >> 13) & 1u)) >> 13));
    }
    float x = as_float(a) * 0x1p24f;
    return (ushort)(sign | (uint)rint(x));
}

ushort bf16_from_f32(float v) {
    uint bits = as_uint(v);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (ushort)((bits >> 16) | 0x40u);
    return (ushort)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

int dot4(int acc, int u, int s) {
    uchar4 w = as_uchar4(u);
    char4 x = as_char4(s);
    return acc + (int)w.x * (int)x.x + (int)w.y * (int)x.y + (int)w.z * (int)x.z + (int)w.w * (int)x.w;
}

int lookup(int codes, int t0, int t1, int t2, int t3) {
    uint out = 0;
    for (int at = 0; at < 32; at += 8) {
        uint code = ((uint)codes >> at) & 15u;
        int word = code & 8u ? (code & 4u ? t3 : t2) : (code & 4u ? t1 : t0);
        out |= (((uint)word >> (8u * (code & 3u))) & 255u) << at;
    }
    return (int)out;
}
"""


_RESERVED = frozenset("""
    auto break case char const continue default do double else enum extern float for goto if inline int long register
    restrict return short signed sizeof static struct switch typedef union unsigned void volatile while half bool uchar
    ushort uint ulong size_t kernel global local constant private generic pipe lane group fma sqrt floor rint fabs dot4
    lookup barrier nan_f32 nan_f64 f32_from_f16 f16_from_f32 bf16_from_f32""".split())


def symbol(name: str) -> str:
    """A name OpenCL C accepts."""
    return name + "_" if name in _RESERVED or re.fullmatch(r"[uv]\d+", name) else name


def render_opencl(kernel: Kernel) -> str:
    """OpenCL C 1.2 of one kernel; launch it with grid x lanes work-items in groups of `lanes`."""
    return PRELUDE + "\n" + _Renderer(kernel).text()


class _Renderer:
    def __init__(self, kernel: Kernel):
        self.k = kernel
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        self.scratch: dict[int, Value] = {}
        self.trees: set[str] = set()
        self.fenced = fenced_stores(kernel)

    def text(self) -> str:
        params = []
        for p in self.k.params:
            name = symbol(p.name)
            params.append(
                f"__global uchar *{name}, long {name}_offset" if p.kind == "ptr" else f"{_TYPE[p.kind]} {name}"
            )
        self._block(self.k.prologue, 1)
        self._block(self.k.body, 1)
        body, self.lines = self.lines, []
        n = self.k.lanes
        out = [
            f"__kernel __attribute__((reqd_work_group_size({n}, 1, 1)))",
            f"void {symbol(self.k.name)}({', '.join(params)}) {{",
        ]
        for s in self.scratch.values():
            size = MEMORY[s.attrs["dtype"]][0]
            out.append(f"    __local uchar {self.name(s)}[{s.attrs['count'] * size}] __attribute__((aligned(16)));")
        for t in sorted(self.trees):
            out.append(f"    __local {_TYPE[t]} tree_{t}[{n}];")
        out += ["    const int lane = (int)get_local_id(0);", "    const long group = (long)get_group_id(0);"]
        out += [text for name, text in HIDDEN.items() if any(name in line for line in body)]
        return "\n".join(out + body + ["}"]) + "\n"

    # -- names and operands -----------------------------------------------------------------------------------------
    def name(self, v: Value) -> str:
        return self.names.setdefault(id(v), f"{'v' if v.varying else 'u'}{len(self.names)}")

    def ref(self, v: Value) -> str:
        if v.op == "const":
            return constant(v.type, v.attrs["value"])
        if v.op == "param":
            return symbol(v.attrs["name"])
        return v.op if v.op in ("lane", "group") else self.name(v)

    def emit(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    # -- statements -------------------------------------------------------------------------------------------------
    def _block(self, body: Sequence[Value], depth: int) -> None:
        for v in body:
            self._statement(v, depth)

    def _statement(self, v: Value, depth: int) -> None:
        match v.op:
            case "scratch":
                self.scratch[id(v)] = v
            case "sync":
                self.emit(depth, BARRIER)
            case "var":
                self.emit(depth, f"{_TYPE[v.type]} {self.name(v)} = {self.ref(v.args[0])};")
            case "set":
                self.emit(depth, f"{self.ref(v.args[0])} = {self.ref(v.args[1])};")
            case "get":
                self._define(v, self.ref(v.args[0]), depth)
            case "loop":
                lo, hi, index = v.args
                i = self.name(index)
                self.emit(depth, f"for (long {i} = {self.ref(lo)}; {i} < {self.ref(hi)}; {i} += {v.attrs['step']}) {{")
                self._block(v.body, depth + 1)
                self.emit(depth, "}")
            case "if":
                self.emit(depth, f"if ({self.ref(v.args[0])}) {{")
                self._block(v.body, depth + 1)
                if v.orelse:
                    self.emit(depth, "} else {")
                    self._block(v.orelse, depth + 1)
                self.emit(depth, "}")
            case "load" | "load_lanes":
                self._load(v, depth)
            case "store" | "store_lanes":
                self._store(v, depth)
            case "fold" | "shuffle_down" | "first":
                self._cross(v, depth)
            case _:
                self._define(v, self._pure(v), depth)

    def _define(self, v: Value, text: str, depth: int) -> None:
        self.emit(depth, f"const {_TYPE[v.type]} {self.name(v)} = {text};")

    # -- memory -----------------------------------------------------------------------------------------------------
    def _pointer(self, v: Value, ctype: str) -> str:
        base, offset, index = v.args[:3]
        size = MEMORY[v.attrs["dtype"]][0]
        local = base.op == "scratch"
        i = f"(long){self.ref(index)}" if index.type == "i32" else self.ref(index)
        if v.op.endswith("_lanes"):
            i = f"({i} + lane)"
        at = f"{self.ref(offset)} + {i} * {size}"
        if not local:
            at = f"{self.ref(base)}_offset + {at}"
        return f"*({'__local' if local else '__global'} {ctype} *)({self.ref(base)} + ({at}))"

    def _load(self, v: Value, depth: int) -> None:
        dtype = v.attrs["dtype"]
        if dtype in ("f16", "bf16"):
            raw = self._pointer(v, "ushort")
            text = f"f32_from_f16({raw})" if dtype == "f16" else f"as_float((uint){raw} << 16)"
        else:
            text = f"({_TYPE[v.type]}){self._pointer(v, _MEMORY_TYPE[dtype])}"
        if v.attrs.get("masked"):
            text = f"{self.ref(v.args[3])} ? {text} : ({_TYPE[v.type]})0"
        self._define(v, text, depth)

    def _store(self, v: Value, depth: int) -> None:
        dtype, value = v.attrs["dtype"], self.ref(v.args[3])
        if dtype in ("f16", "bf16"):
            text = f"{self._pointer(v, 'ushort')} = {dtype}_from_f32({value});"
        else:
            ctype = _MEMORY_TYPE[dtype]
            text = f"{self._pointer(v, ctype)} = ({ctype}){value};"
        conditions = []
        if v.attrs.get("masked"):
            conditions.append(self.ref(v.args[4]))
        if v.op == "store" and not v.varying:
            conditions.append("lane == 0")
        fence = [BARRIER] if id(v) in self.fenced else []
        for line in [*fence, f"if ({' && '.join(conditions)}) {text}" if conditions else text, *fence]:
            self.emit(depth, line)

    # -- across lanes -----------------------------------------------------------------------------------------------
    def _cross(self, v: Value, depth: int) -> None:
        a = v.args[0]
        t, n = a.type, self.k.lanes
        self.trees.add(t)
        tree, ref = f"tree_{t}", self.ref(a)
        barrier = "barrier(CLK_LOCAL_MEM_FENCE);"
        self.emit(depth, f"{tree}[lane] = {ref}; {barrier}")
        if v.op == "shuffle_down":
            by = v.attrs["by"]
            self._define(v, f"{tree}[lane + {by} < {n} ? lane + {by} : lane]", depth)
        elif v.op == "first":
            self._define(v, f"{tree}[0]", depth)
        else:
            self.emit(depth, f"for (int half_ = {n // 2}; half_ > 0; half_ >>= 1) {{")
            self.emit(depth + 1, "if (lane < half_) {")
            self.emit(depth + 2, f"const {_TYPE[t]} own = {tree}[lane];")
            self.emit(depth + 2, f"const {_TYPE[t]} other = {tree}[lane + half_];")
            op = v.attrs["op"]
            if op == "add" and t in _UNSIGNED:
                text = f"({_TYPE[t]})(({_UNSIGNED[t]})own + ({_UNSIGNED[t]})other)"
            else:
                text = "own + other" if op == "add" else _COMBINE[op].format(a="own", b="other")
            self.emit(depth + 2, f"{tree}[lane] = {text};")
            self.emit(depth + 1, "}")
            self.emit(depth + 1, barrier)
            self.emit(depth, "}")
            self._define(v, f"{tree}[0]", depth)
        self.emit(depth, barrier)

    # -- pure operations --------------------------------------------------------------------------------------------
    def _pure(self, v: Value) -> str:
        a = [self.ref(x) for x in v.args]
        t = v.args[0].type if v.args else v.type
        op = v.op
        if op in ("add", "sub", "mul") and t in _UNSIGNED:
            sign = {"add": "+", "sub": "-", "mul": "*"}[op]
            return f"({_TYPE[t]})(({_UNSIGNED[t]}){a[0]} {sign} ({_UNSIGNED[t]}){a[1]})"
        if op in ("add", "sub"):
            return f"{a[0]} {'+' if op == 'add' else '-'} {a[1]}"
        if op in _INFIX:
            return f"{a[0]} {_INFIX[op]} {a[1]}"
        match op:
            case "fma" | "sqrt" | "floor" | "rint" | "dot4" | "lookup":
                return f"{op}({', '.join(a)})"
            case "neg":
                return f"({_TYPE[t]})(0u - ({_UNSIGNED[t]}){a[0]})" if t in _UNSIGNED else f"-({a[0]})"
            case "abs":
                # not abs(): of the most negative number it is undefined to PoCL's compiler
                return (
                    f"{a[0]} < 0 ? ({_TYPE[t]})(0u - ({_UNSIGNED[t]}){a[0]}) : {a[0]}"
                    if t in _UNSIGNED
                    else f"fabs({a[0]})"
                )
            case "shl":
                return f"({_TYPE[t]})(({_UNSIGNED[t]}){a[0]} << {a[1]})"
            case "lshr":
                return f"({_TYPE[t]})(({_UNSIGNED[t]}){a[0]} >> {a[1]})"
            case "ashr":
                return f"{a[0]} >> {a[1]}"
            case "imin" | "imax":
                return _COMBINE[op].format(a=a[0], b=a[1])
            case "select":
                return f"{a[0]} ? {a[1]} : {a[2]}"
            case "not":
                return f"!{a[0]}"
            case "bits":
                return f"as_{_TYPE[v.type]}({a[0]})"
            case "zext":
                return f"(long)(uint){a[0]}"
            case "cvt":
                rounding = "_rte" if v.type in ("f32", "f64") else "_rtz" if t in ("f32", "f64") else ""
                return f"convert_{_TYPE[v.type]}{rounding}({a[0]})"
        raise KeyError(f"no OpenCL C for {op}")


def constant(type: str, x) -> str:
    """A literal that denotes exactly x."""
    if type == "b1":
        return "1" if x else "0"
    if type == "i32":
        return f"((int)0x{x % 2 ** 32:x}u)" if not -2 ** 31 < x < 2 ** 31 else str(x)
    if type == "i64":
        return f"((long)0x{x % 2 ** 64:x}ul)" if not -2 ** 63 < x < 2 ** 63 else f"{x}L"
    if x == 0 and math.copysign(1.0, x) < 0:
        return f"minus_zero_{type}"
    suffix = "f" if type == "f32" else ""
    if x != x:
        return f"nan_{type}"
    if x in (float("inf"), float("-inf")):
        bits = "0x7f800000u" if x > 0 else "0xff800000u"
        return f"as_float({bits})" if type == "f32" else f"as_double({'0x7ff' if x > 0 else '0xfff'}0000000000000ul)"
    return f"{float(x).hex()}{suffix}"
