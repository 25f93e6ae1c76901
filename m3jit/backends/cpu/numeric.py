"""Number formats and roundings with no instruction on some level, spelled out exactly.

Every function takes a `Form` (a scalar or one machine vector) and names of LLVM values, emits straight-line code and
returns the name of the result.  Each has one value for every input on every level, NaN payloads of the f16 and bf16
conversions included (F16C's rule: the payload's top bits are kept and the quiet bit is set).
"""
from __future__ import annotations

from m3jit.backends.cpu.text import Writer, literal


class Form:
    """Scalar or vector spelling of types and constants."""

    __slots__ = ("width",)

    def __init__(self, width: int):
        self.width = width             # lanes; 1 = scalar

    def t(self, llvm_type: str) -> str:
        return llvm_type if self.width == 1 else f"<{self.width} x {llvm_type}>"

    def k(self, llvm_type: str, text: str | int) -> str:
        return str(text) if self.width == 1 else f"splat ({llvm_type} {text})"

    def f(self, value: float, type: str = "f32") -> str:
        return self.k("float" if type == "f32" else "double", literal(type, value))

    def mangled(self, short: str) -> str:
        """Suffix of an overloaded intrinsic: f32 or v16f32."""
        return short if self.width == 1 else f"v{self.width}{short}"


SCALAR = Form(1)


def intrinsic(w: Writer, F: Form, name: str, short: str, *operands: str) -> str:
    """Calls llvm.<name> on operands that all have the element type `short` (f32, i64, ...)."""
    t = F.t({"f32": "float", "f64": "double"}.get(short, short))
    return w.call(t, f"llvm.{name}.{F.mangled(short)}", ", ".join(f"{t} {x}" for x in operands),
                  ", ".join([t] * len(operands)))


def f16_to_f32(w: Writer, F: Form, h: str) -> str:
    """i16 image of a half -> float, by integer operations."""
    i, f = F.t("i32"), F.t("float")
    x = w.op(f"zext {F.t('i16')} {h} to {i}")
    sign = w.op(f"shl {i} {w.op(f'and {i} {x}, ' + F.k('i32', 0x8000))}, {F.k('i32', 16)}")
    mag = w.op(f"and {i} {x}, {F.k('i32', 0x7FFF)}")
    wide = w.op(f"shl {i} {mag}, {F.k('i32', 13)}")
    normal = w.op(f"add {i} {wide}, {F.k('i32', 112 << 23)}")
    special = w.op(f"or {i} {wide}, {F.k('i32', 0x7F800000)}")
    quiet = w.op(f"or {i} {special}, {F.k('i32', 0x400000)}")
    nan = w.op(f"icmp ugt {i} {mag}, {F.k('i32', 0x7C00)}")
    special = w.op(f"select {F.t('i1')} {nan}, {i} {quiet}, {i} {special}")
    scaled = w.op(f"fmul {f} {w.op(f'sitofp {i} {mag} to {f}')}, {F.f(2.0 ** -24)}")      # subnormals and zero: exact
    tiny = w.op(f"bitcast {f} {scaled} to {i}")
    is_special = w.op(f"icmp uge {i} {mag}, {F.k('i32', 0x7C00)}")
    is_tiny = w.op(f"icmp ult {i} {mag}, {F.k('i32', 0x400)}")
    bits = w.op(f"select {F.t('i1')} {is_special}, {i} {special}, {i} {normal}")
    bits = w.op(f"select {F.t('i1')} {is_tiny}, {i} {tiny}, {i} {bits}")
    return w.op(f"bitcast {i} {w.op(f'or {i} {bits}, {sign}')} to {f}")


def f32_to_f16(w: Writer, F: Form, x: str) -> str:
    """float -> i16 image of the half, to nearest even, by integer operations."""
    i, f, b = F.t("i32"), F.t("float"), F.t("i1")
    bits = w.op(f"bitcast {f} {x} to {i}")
    sign = w.op(f"and {i} {w.op(f'lshr {i} {bits}, ' + F.k('i32', 16))}, {F.k('i32', 0x8000)}")
    mag = w.op(f"and {i} {bits}, {F.k('i32', 0x7FFFFFFF)}")
    rebiased = w.op(f"sub {i} {mag}, {F.k('i32', 112 << 23)}")
    odd = w.op(f"and {i} {w.op(f'lshr {i} {rebiased}, ' + F.k('i32', 13))}, {F.k('i32', 1)}")
    half = w.op(f"add {i} {w.op(f'add {i} {rebiased}, ' + F.k('i32', 0xFFF))}, {odd}")
    normal = w.op(f"lshr {i} {half}, {F.k('i32', 13)}")
    # below 2^-14: adding 0.5 rounds |x| to a multiple of 2^-24, the spacing of subnormal halves
    shifted = w.op(f"fadd {f} {w.op(f'bitcast {i} {mag} to {f}')}, {F.f(0.5)}")
    tiny = w.op(f"sub {i} {w.op(f'bitcast {f} {shifted} to {i}')}, {F.k('i32', 0x3F000000)}")
    payload = w.op(f"and {i} {w.op(f'lshr {i} {mag}, ' + F.k('i32', 13))}, {F.k('i32', 0x3FF)}")
    nan = w.op(f"or {i} {payload}, {F.k('i32', 0x7E00)}")
    r = w.op(f"select {b} {w.op(f'icmp ult {i} {mag}, ' + F.k('i32', 0x38800000))}, {i} {tiny}, {i} {normal}")
    r = w.op(f"select {b} {w.op(f'icmp uge {i} {mag}, ' + F.k('i32', 0x477FF000))}, {i} {F.k('i32', 0x7C00)}, {i} {r}")
    r = w.op(f"select {b} {w.op(f'icmp ugt {i} {mag}, ' + F.k('i32', 0x7F800000))}, {i} {nan}, {i} {r}")
    return w.op(f"trunc {i} {w.op(f'or {i} {r}, {sign}')} to {F.t('i16')}")


def bf16_to_f32(w: Writer, F: Form, h: str) -> str:
    """i16 image of a bfloat16 -> float: exact, NaN bits unchanged."""
    i = F.t("i32")
    wide = w.op(f"zext {F.t('i16')} {h} to {i}")
    return w.op(f"bitcast {i} {w.op(f'shl {i} {wide}, ' + F.k('i32', 16))} to {F.t('float')}")


def f32_to_bf16(w: Writer, F: Form, x: str) -> str:
    """float -> i16 image of the bfloat16, to nearest even; a NaN keeps its top payload bits and becomes quiet."""
    i, b = F.t("i32"), F.t("i1")
    bits = w.op(f"bitcast {F.t('float')} {x} to {i}")
    top = w.op(f"lshr {i} {bits}, {F.k('i32', 16)}")
    odd = w.op(f"and {i} {top}, {F.k('i32', 1)}")
    sum_ = w.op(f"add {i} {w.op(f'add {i} {bits}, ' + F.k('i32', 0x7FFF))}, {odd}")
    rounded = w.op(f"lshr {i} {sum_}, {F.k('i32', 16)}")
    quiet = w.op(f"or {i} {top}, {F.k('i32', 0x40)}")
    nan = w.op(f"fcmp uno {F.t('float')} {x}, {x}")
    return w.op(f"trunc {i} {w.op(f'select {b} {nan}, {i} {quiet}, {i} {rounded}')} to {F.t('i16')}")


def fma32_through_f64(w: Writer, F: Form, a: str, b: str, c: str) -> str:
    """fma of floats without an fma instruction: the product is exact in f64; the sum is rounded to odd (TwoSum gives
    the discarded part), which makes the last rounding to f32 the only one that counts (Boldo and Melquiond 2008)."""
    d, i, f, m = F.t("double"), F.t("i64"), F.t("float"), F.t("i1")
    x, y, z = (w.op(f"fpext {f} {v} to {d}") for v in (a, b, c))
    p = w.op(f"fmul {d} {x}, {y}")
    s = w.op(f"fadd {d} {p}, {z}")
    zz = w.op(f"fsub {d} {s}, {p}")
    pp = w.op(f"fsub {d} {s}, {zz}")
    e1 = w.op(f"fsub {d} {p}, {pp}")
    e2 = w.op(f"fsub {d} {z}, {zz}")
    e = w.op(f"fadd {d} {e1}, {e2}")
    bits = w.op(f"bitcast {d} {s} to {i}")
    inexact = w.op(f"fcmp one {d} {e}, {F.f(0.0, 'f64')}")                    # false for NaN: infinities pass through
    even = w.op(f"icmp eq {i} {w.op(f'and {i} {bits}, ' + F.k('i64', 1))}, {F.k('i64', 0)}")
    adjust = w.op(f"and {m} {inexact}, {even}")
    # away from zero when the discarded part has the sign of s: one unit up in magnitude, else one down
    signs = w.op(f"xor {i} {bits}, {w.op(f'bitcast {d} {e} to {i}')}")
    step = w.op(f"or {i} {w.op(f'ashr {i} {signs}, ' + F.k('i64', 63))}, {F.k('i64', 1)}")
    moved = w.op(f"add {i} {bits}, {step}")
    odd = w.op(f"select {m} {adjust}, {i} {moved}, {i} {bits}")
    return w.op(f"fptrunc {d} {w.op(f'bitcast {i} {odd} to {d}')} to {f}")


def round_inline(w: Writer, F: Form, type: str, x: str, floor: bool) -> str:
    """rint or floor without SSE4.1: adding and subtracting 2^(p-1) rounds to integral; larger values are integral."""
    t = F.t("float" if type == "f32" else "double")
    b, big = F.t("i1"), F.f(2.0 ** 23 if type == "f32" else 2.0 ** 52, type)
    mag = intrinsic(w, F, "fabs", type, x)
    r = w.op(f"fsub {t} {w.op(f'fadd {t} {mag}, {big}')}, {big}")
    r = intrinsic(w, F, "copysign", type, r, x)
    if floor:
        above = w.op(f"fcmp ogt {t} {r}, {x}")
        r = w.op(f"select {b} {above}, {t} {w.op(f'fsub {t} {r}, ' + F.f(1.0, type))}, {t} {r}")
    small = w.op(f"fcmp olt {t} {mag}, {big}")
    return w.op(f"select {b} {small}, {t} {r}, {t} {x}")
