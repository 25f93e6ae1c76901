"""Pure loop-IR operations on scalars and machine vectors."""
from __future__ import annotations

from m3jit.backends.cpu import numeric
from m3jit.backends.cpu.numeric import Form, SCALAR, intrinsic
from m3jit.backends.cpu.target import CpuTarget
from m3jit.backends.cpu.text import BITS, LLVM_TYPE, Writer
from m3jit.backends.cpu.values import Lanes, Val

_INT = {"add": "add", "sub": "sub", "mul": "mul", "idiv": "sdiv", "irem": "srem", "and": "and", "or": "or",
        "xor": "xor", "shl": "shl", "lshr": "lshr", "ashr": "ashr"}
_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_ICMP = {"lt": "slt", "le": "sle", "eq": "eq", "ne": "ne"}
_FCMP = {"lt": "olt", "le": "ole", "eq": "oeq", "ne": "une"}
_KEEPS_INDEX = frozenset(("add", "sub", "mul", "idiv", "irem", "imin", "imax", "cvt", "shl", "ashr", "select"))
_LARGEST_STRIDE = 1 << 20


class Arith:
    """Emits pure operations of one kernel body."""

    def __init__(self, writer: Writer, lanes: Lanes, target: CpuTarget):
        self.w, self.lanes, self.target = writer, lanes, target
        self.part_form = Form(lanes.per_part)

    def pure(self, op: str, type: str, args: list[Val], attrs: dict, live: list[bool]) -> Val:
        """Value of `op`; parts whose `live` flag is off are not computed (no one reads them)."""
        if op == "lookup":
            attrs = {"table": [a.const for a in args[1:]]}
        if all(a.uniform for a in args):
            v = self.lanes.uniform(type, emit(self.w, SCALAR, self.target, op, type, args[0].type if args else type,
                                              [a.scalar for a in args], attrs))
            if type in ("i32", "i64"):
                v.index = op in _KEEPS_INDEX and all(a.index for a in args if a.type != "b1")
                v.bound = op in ("add", "sub") and all(a.bound for a in args)
                v.bytes7 = _bytes7(op, args)
            return v
        symbolic = self._affine(op, type, args) or self._prefix(op, args)
        if symbolic is not None:
            return symbolic
        if op == "dot4":
            attrs = {"bytes7": args[1].bytes7}
        columns = [self.lanes.parts(a) for a in args]
        parts = [emit(self.w, self.part_form, self.target, op, type, args[0].type, [c[j] for c in columns], attrs)
                 if live[j] else "poison" for j in range(self.lanes.count)]
        v = self.lanes.varying(type, parts)
        v.bytes7 = _bytes7(op, args)
        return v

    def _uniform(self, op: str, type: str, *args: Val) -> Val:
        return self.pure(op, type, list(args), {"to": type}, [])

    # -- symbolic forms ---------------------------------------------------------------------------------------
    def _affine(self, op: str, type: str, args: list[Val]) -> Val | None:
        """base + stride * lane stays symbolic under +, -, constant * and <<, and widening of small i32 values."""
        if type not in ("i32", "i64") or op not in ("add", "sub", "mul", "shl", "cvt", "zext"):
            return None
        if not all(a.uniform or a.stride is not None for a in args):
            return None
        a = args[0]
        if op in ("cvt", "zext"):
            if (a.type, type) != ("i32", "i64") or not (a.base is None or a.base.bound) or op == "zext":
                return None
            return self.lanes.affine("i64", a.base and self._widen(a.base), a.stride)
        b = args[1]
        if op in ("mul", "shl"):
            if op == "mul" and a.const is not None:
                a, b = b, a
            if b.const is None or a.stride is None:
                return None
            factor = b.const if op == "mul" else 1 << b.const
            if abs(a.stride * factor) > _LARGEST_STRIDE:
                return None
            scale = self.lanes.constant(type, factor)
            return self.lanes.affine(type, a.base and self._uniform("mul", type, a.base, scale), a.stride * factor)
        (base_a, stride_a), (base_b, stride_b) = self._split(a), self._split(b)
        stride = stride_a + stride_b if op == "add" else stride_a - stride_b
        if stride == 0 or abs(stride) > _LARGEST_STRIDE:
            return None
        if base_b is None:
            base = base_a
        elif base_a is None and op == "add":
            base = base_b
        else:
            base = self._uniform(op, type, base_a or self.lanes.constant(type, 0), base_b)
        return self.lanes.affine(type, base, stride)

    def _widen(self, base: Val) -> Val:
        if base.const is not None:
            return self.lanes.constant("i64", base.const)
        wide = self._uniform("cvt", "i64", base)
        wide.index = True
        return wide

    @staticmethod
    def _split(v: Val) -> tuple[Val | None, int]:
        return (v, 0) if v.uniform else (v.base, v.stride)

    def _prefix(self, op: str, args: list[Val]) -> Val | None:
        """base + lane < n holds for the first n - base lanes, when base + lane cannot wrap."""
        if op != "lt":
            return None
        x, n = args
        if x.stride != 1 or not n.uniform or n.type not in ("i32", "i64"):
            return None
        if x.base is not None and not (x.base.index if x.type == "i64" else x.base.bound):
            return None
        w, t = self.w, LLVM_TYPE[n.type]
        left = n.scalar
        if x.base is not None:
            left = intrinsic(w, SCALAR, "ssub.sat", t, left, x.base.scalar)
        left = intrinsic(w, SCALAR, "smax", t, left, "0")
        left = intrinsic(w, SCALAR, "smin", t, left, str(self.lanes.lanes))
        return self.lanes.prefix(left if t == "i32" else w.op(f"trunc i64 {left} to i32"))


def _bytes7(op: str, args: list[Val]) -> bool:
    """Are the result's bytes known to be 0 .. 127?  True of nibbles and the like, made with `and` and `or`."""
    return op == "and" and any(a.bytes7 for a in args) or op == "or" and all(a.bytes7 for a in args)


def emit(w: Writer, F: Form, target: CpuTarget, op: str, type: str, operand: str, x: list[str], attrs: dict) -> str:
    """One scalar or vector operation.  `type` and `operand`: loop-IR types of the result and of the first operand."""
    t = F.t(LLVM_TYPE[operand])
    is_float = operand in ("f32", "f64")
    if op in _INT and not is_float:
        return w.op(f"{_INT[op]} {t} {x[0]}, {x[1]}")
    if op in _FLOAT and is_float:
        return w.op(f"{_FLOAT[op]} {t} {x[0]}, {x[1]}")
    if op in _ICMP:
        return w.op(f"fcmp {_FCMP[op]} {t} {x[0]}, {x[1]}" if is_float else f"icmp {_ICMP[op]} {t} {x[0]}, {x[1]}")
    match op:
        case "select":
            r = F.t(LLVM_TYPE[type])
            return w.op(f"select {F.t('i1')} {x[0]}, {r} {x[1]}, {r} {x[2]}")
        case "fma":
            if operand == "f32" and not target.has("fma"):
                return numeric.fma32_through_f64(w, F, *x)
            return _fma(w, F, target, operand, x)
        case "sqrt":
            return intrinsic(w, F, "sqrt", operand, x[0])
        case "neg":
            return w.op(f"fneg {t} {x[0]}" if is_float else f"sub {t} {F.k(LLVM_TYPE[operand], 0)}, {x[0]}")
        case "abs":
            if is_float:
                return intrinsic(w, F, "fabs", operand, x[0])
            negative = w.op(f"icmp slt {t} {x[0]}, {F.k(LLVM_TYPE[operand], 0)}")
            minus = w.op(f"sub {t} {F.k(LLVM_TYPE[operand], 0)}, {x[0]}")
            return w.op(f"select {F.t('i1')} {negative}, {t} {minus}, {t} {x[0]}")
        case "imin" | "imax":
            return intrinsic(w, F, "smin" if op == "imin" else "smax", operand, *x)
        case "not":
            return w.op(f"xor {t} {x[0]}, {F.k('i1', 'true')}")
        case "bits":
            return w.op(f"bitcast {t} {x[0]} to {F.t(LLVM_TYPE[type])}")
        case "floor" | "rint":
            if target.arch == "x86_64" and not target.has("sse4.1"):
                return numeric.round_inline(w, F, operand, x[0], op == "floor")
            return intrinsic(w, F, "floor" if op == "floor" else "roundeven", operand, x[0])
        case "zext":
            return w.op(f"zext {t} {x[0]} to {F.t('i64')}")
        case "cvt":
            return convert(w, F, operand, attrs["to"], x[0])
        case "dot4":
            return dot4(w, F, target, *x, bytes7=attrs.get("bytes7", False))
        case "lookup":
            return lookup(w, F, target, x[0], attrs["table"])
    raise NotImplementedError(f"CPU renderer: no operation {op} on {operand}")


def _fma(w: Writer, F: Form, target: CpuTarget, type: str, x: list[str]) -> str:
    if target.has("fma"):
        return intrinsic(w, F, "fma", type, *x)
    # f64 without an fma instruction: the C library's fma is correctly rounded; one call per lane
    if F.width == 1:
        return w.call("double", "fma", ", ".join(f"double {v}" for v in x), "double, double, double", " nounwind")
    out, t = "poison", F.t("double")
    for i in range(F.width):
        scalars = [w.op(f"extractelement {t} {v}, i64 {i}") for v in x]
        out = w.op(f"insertelement {t} {out}, double {_fma(w, SCALAR, target, type, scalars)}, i64 {i}")
    return out


def convert(w: Writer, F: Form, source: str, to: str, x: str) -> str:
    """cvt between loop-IR types."""
    s, d = F.t(LLVM_TYPE[source]), F.t(LLVM_TYPE[to])
    if source == to:
        return x
    if source == "b1":
        return w.op(f"{'zext' if to in BITS and to[0] == 'i' else 'uitofp'} {s} {x} to {d}")
    if to == "b1":
        raise NotImplementedError(f"CPU renderer: no conversion from {source} to b1 (compare with zero instead)")
    if source[0] == "i":
        if to[0] == "f":
            return w.op(f"sitofp {s} {x} to {d}")
        return w.op(f"{'sext' if BITS[to] > BITS[source] else 'trunc'} {s} {x} to {d}")
    if to[0] == "i":
        return w.op(f"fptosi {s} {x} to {d}")
    return w.op(f"{'fpext' if BITS[to] > BITS[source] else 'fptrunc'} {s} {x} to {d}")


_VPDPBUSD = {16: "512", 8: "256", 4: "128"}
_PMADDWD = {16: ("avx512bw", "llvm.x86.avx512.pmaddw.d.512"), 8: ("avx2", "llvm.x86.avx2.pmadd.wd"),
            4: ("sse2", "llvm.x86.sse2.pmadd.wd")}


def dot4(w: Writer, F: Form, target: CpuTarget, acc: str, a: str, b: str, bytes7: bool = False) -> str:
    """acc + sum over 4 bytes of u8(a) * s8(b), exact in i32 (wrapping).  bytes7: the bytes of a are 0 .. 127."""
    n, i32 = F.width, F.t("i32")
    if n in _VPDPBUSD and _has_vnni(target, n):
        t8 = f"<{4 * n} x i8>"
        u, s = (w.op(f"bitcast {i32} {v} to {t8}") for v in (a, b))
        return w.call(i32, f"llvm.x86.avx512.vpdpbusd.{_VPDPBUSD[n]}", f"{i32} {acc}, {t8} {u}, {t8} {s}",
                      f"{i32}, {t8}, {t8}")
    if bytes7 and n == 8 and target.has("avx2"):
        # 2 * 127 * -128 fits 16 bits: with bytes up to 127 pmaddubsw is exact (it saturates only beyond)
        u, s = (w.op(f"bitcast {i32} {v} to <32 x i8>") for v in (a, b))
        pairs = w.call("<16 x i16>", "llvm.x86.avx2.pmadd.ub.sw", f"<32 x i8> {u}, <32 x i8> {s}",
                       "<32 x i8>, <32 x i8>")
        quads = w.call(i32, "llvm.x86.avx2.pmadd.wd", f"<16 x i16> {pairs}, <16 x i16> splat (i16 1)",
                       "<16 x i16>, <16 x i16>")
        return w.op(f"add {i32} {acc}, {quads}")
    if n in _PMADDWD and target.has(_PMADDWD[n][0]):
        # bytes 0 and 2, then 1 and 3, widened to 16 bits: pmaddwd of those cannot saturate, pmaddubsw could
        t16, eight = f"<{2 * n} x i16>", "splat (i16 8)"
        u, s = (w.op(f"bitcast {i32} {v} to {t16}") for v in (a, b))
        u_even = w.op(f"and {t16} {u}, splat (i16 255)")
        u_odd = w.op(f"lshr {t16} {u}, {eight}")
        s_even = w.op(f"ashr {t16} {w.op(f'shl {t16} {s}, {eight}')}, {eight}")
        s_odd = w.op(f"ashr {t16} {s}, {eight}")
        for u16, s16 in ((u_even, s_even), (u_odd, s_odd)):
            pair = w.call(i32, _PMADDWD[n][1], f"{t16} {u16}, {t16} {s16}", f"{t16}, {t16}")
            acc = w.op(f"add {i32} {acc}, {pair}")
        return acc
    for k in range(4):
        u = w.op(f"lshr {i32} {a}, {F.k('i32', 8 * k)}") if k else a
        u = w.op(f"and {i32} {u}, {F.k('i32', 255)}")
        s = w.op(f"shl {i32} {b}, {F.k('i32', 24 - 8 * k)}") if k < 3 else b
        s = w.op(f"ashr {i32} {s}, {F.k('i32', 24)}")
        acc = w.op(f"add {i32} {acc}, {w.op(f'mul {i32} {u}, {s}')}")
    return acc


_PSHUFB = {16: ("avx512bw", "llvm.x86.avx512.pshuf.b.512"), 8: ("avx2", "llvm.x86.avx2.pshuf.b"),
           4: ("ssse3", "llvm.x86.ssse3.pshuf.b.128")}


def lookup(w: Writer, F: Form, target: CpuTarget, codes: str, table: list[int]) -> str:
    """Each byte of `codes`, all 0..15, replaced by that byte of the 16 of `table` (four words)."""
    n, i32 = F.width, F.t("i32")
    if n in _PSHUFB and target.has(_PSHUFB[n][0]):
        t8 = f"<{4 * n} x i8>"
        entries = b"".join((word & 0xFFFFFFFF).to_bytes(4, "little") for word in table) * (n // 4)
        constant = f"<{', '.join(f'i8 {v}' for v in entries)}>"
        x = w.op(f"bitcast {i32} {codes} to {t8}")
        found = w.call(t8, _PSHUFB[n][1], f"{t8} {constant}, {t8} {x}", f"{t8}, {t8}")
        return w.op(f"bitcast {t8} {found} to {i32}")
    # a tree of selections on all four bytes at once: bit k of a code, spread over its byte, picks one of two entries
    level: list[int | str] = [word >> 8 * i & 255 for word in table for i in range(4)]
    level = [v * 0x01010101 for v in level]
    for k in range(4):
        bit = w.op(f"lshr {i32} {codes}, {F.k('i32', k)}") if k else codes
        bit = w.op(f"and {i32} {bit}, {F.k('i32', 0x01010101)}")
        mask = w.op(f"mul {i32} {bit}, {F.k('i32', 255)}")
        nodes: list[str] = []
        for zero, one in zip(level[0::2], level[1::2]):
            differ = F.k("i32", _signed(zero ^ one)) if k == 0 else w.op(f"xor {i32} {zero}, {one}")
            first = F.k("i32", _signed(zero)) if k == 0 else zero
            nodes.append(w.op(f"xor {i32} {first}, {w.op(f'and {i32} {mask}, {differ}')}"))
        level = list(nodes)
    return level[0]


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _has_vnni(target: CpuTarget, width: int) -> bool:
    if target.has("avx512vnni") and (width == 16 or target.has("avx512vl")):
        return True
    return width < 16 and target.has("avxvnni")


def part_is_live(lanes: Lanes, needed: int) -> list[bool]:
    """For each part: does the lane set `needed` (a bit mask) touch it?"""
    mask = (1 << lanes.per_part) - 1
    return [bool(needed >> (j * lanes.per_part) & mask) for j in range(lanes.count)]
