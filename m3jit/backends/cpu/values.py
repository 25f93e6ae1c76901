"""How a loop-IR value is held in LLVM: a scalar, machine vectors (parts), or a lazy form that is cheap to index with.

A varying value of L lanes is n = L / P parts of P lanes, one LLVM vector each (P = 32-bit elements of one register), so
16 lanes are one zmm, two ymm or four xmm.  Two forms stay symbolic until their vectors are asked for:

* affine: base + stride * lane, the form of nearly every index;
* prefix: lanes 0 .. count-1 true, the form of nearly every mask.
"""
from __future__ import annotations

from m3jit.backends.cpu.text import LLVM_TYPE, Writer, literal


class Val:
    """One value.  `scalar` set = uniform; `stride` set = affine; `count` set = prefix mask; `parts` = its vectors."""

    __slots__ = ("type", "scalar", "const", "parts", "base", "stride", "count", "slot", "index", "bound", "bytes7")

    def __init__(self, type: str, scalar: str | None = None, parts: list[str] | None = None):
        self.type = type
        self.scalar = scalar
        self.parts = parts
        self.const = None                  # Python value of a constant
        self.base: Val | None = None       # affine: uniform base (None = 0)
        self.stride: int | None = None
        self.count: str | None = None      # prefix: number of true lanes, an i32 in [0, lanes]
        self.slot: list | None = None      # where vectors of a lazy or uniform value are written
        self.index = False                 # uniform int made of group, loop and parameter arithmetic: adding a lane
        #                                    number to it cannot wrap
        self.bytes7 = False                # i32 whose four bytes are known to be 0 .. 127
        self.bound = False                 # i32 known to be small: sign extension commutes with adding lanes

    @property
    def uniform(self) -> bool:
        return self.scalar is not None


class Lanes:
    """Vector shape of the values of one body, and the conversions between their forms."""

    def __init__(self, writer: Writer, lanes: int, vector_bits: int):
        self.w = writer
        self.lanes = lanes
        self.per_part = min(lanes, vector_bits // 32)
        self.count = lanes // self.per_part

    # -- types and constants ----------------------------------------------------------------------------------
    def vec(self, type: str) -> str:
        """LLVM type of one part of a varying value."""
        t = LLVM_TYPE[type]
        return t if self.per_part == 1 else f"<{self.per_part} x {t}>"

    def vec_of(self, llvm_type: str) -> str:
        return llvm_type if self.per_part == 1 else f"<{self.per_part} x {llvm_type}>"

    def splat_literal(self, llvm_type: str, value: str) -> str:
        return value if self.per_part == 1 else f"splat ({llvm_type} {value})"

    def constant(self, type: str, value) -> Val:
        v = Val(type, scalar=literal(type, value))
        v.const = value
        v.bytes7 = type == "i32" and not value & 0x80808080
        v.index = v.bound = type in ("i32", "i64") and -(1 << 20) < value < (1 << 20)
        return v

    def lane_numbers(self, type: str, part: int, stride: int = 1) -> str:
        """Constant vector stride * (part * P + i)."""
        t, first = LLVM_TYPE[type], part * self.per_part
        if self.per_part == 1:
            return literal(type, stride * first)
        return "<" + ", ".join(f"{t} {literal(type, stride * (first + i))}" for i in range(self.per_part)) + ">"

    # -- making values ----------------------------------------------------------------------------------------
    def uniform(self, type: str, scalar: str) -> Val:
        """A uniform value just computed by the line before; its vectors, if any, will be made right here."""
        v = Val(type, scalar=scalar)
        v.slot = self.w.slot()
        return v

    def varying(self, type: str, parts: list[str]) -> Val:
        return Val(type, parts=parts)

    def affine(self, type: str, base: Val | None, stride: int) -> Val:
        v = Val(type)
        v.base, v.stride, v.slot = base, stride, self.w.slot()
        return v

    def prefix(self, count: str) -> Val:
        v = Val("b1")
        v.count, v.slot = count, self.w.slot()
        return v

    # -- taking values apart ----------------------------------------------------------------------------------
    def parts(self, v: Val) -> list[str]:
        """The vectors of a value, made on first use where the value was defined."""
        if v.parts is not None:
            return v.parts
        if v.const is not None:
            v.parts = [self.splat_literal(LLVM_TYPE[v.type], v.scalar)] * self.count
        elif v.scalar is not None:
            with self.w.into(v.slot):
                v.parts = [self.splat(v.type, v.scalar)] * self.count
        elif v.stride is not None:
            v.parts = self._affine_parts(v)
        else:
            v.parts = self._prefix_parts(v)
        return v.parts

    def splat(self, type: str, scalar: str) -> str:
        """One part with every lane equal to `scalar`, computed here."""
        if self.per_part == 1:
            return scalar
        t, vt = LLVM_TYPE[type], self.vec(type)
        one = self.w.op(f"insertelement {vt} poison, {t} {scalar}, i64 0")
        return self.w.op(f"shufflevector {vt} {one}, {vt} poison, <{self.per_part} x i32> zeroinitializer")

    def _affine_parts(self, v: Val) -> list[str]:
        steps = [self.lane_numbers(v.type, j, v.stride) for j in range(self.count)]
        if v.base is None:
            return steps
        vt = self.vec(v.type)
        with self.w.into(v.slot):
            base = self.splat_literal(LLVM_TYPE[v.type], v.base.scalar) if v.base.const is not None \
                else self.splat(v.type, v.base.scalar)
            return [self.w.op(f"add {vt} {base}, {s}") for s in steps]

    def _prefix_parts(self, v: Val) -> list[str]:
        vt = self.vec("i32")
        with self.w.into(v.slot):
            count = self.splat("i32", v.count)
            return [self.w.op(f"icmp slt {vt} {self.lane_numbers('i32', j)}, {count}") for j in range(self.count)]
