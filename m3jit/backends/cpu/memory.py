"""Loads and stores: contiguous, gathered, masked, and the narrow types.

Masked-off lanes never touch memory.  Where the level has a masked instruction for the element size it is used;
elsewhere a full mask takes plain vector accesses and a partial one goes through a small buffer on the stack.
"""
from __future__ import annotations

from typing import Callable

from m3jit.backends.cpu import numeric
from m3jit.backends.cpu.arith import Arith
from m3jit.backends.cpu.numeric import Form, SCALAR
from m3jit.backends.cpu.target import CpuTarget
from m3jit.backends.cpu.text import LLVM_TYPE, Writer
from m3jit.backends.cpu.values import Lanes, Val
from m3jit.ir.loop import MEMORY

_RAW = {"i8": "i8", "u8": "i8", "bool": "i8", "i16": "i16", "u16": "i16", "i32": "i32", "i64": "i64",
        "f16": "i16", "bf16": "i16", "f32": "float", "f64": "double"}
_SHORT = {"float": "f32", "double": "f64"}


def has_f16(target: CpuTarget) -> bool:
    """Does the CPU convert between half and float itself?"""
    return target.has("f16c") or target.has("neon")


def decode(w: Writer, F: Form, target: CpuTarget, dtype: str, x: str) -> str:
    """Memory element -> value (i32, i64, f32, f64)."""
    match dtype:
        case "i32" | "i64" | "f32" | "f64":
            return x
        case "i8" | "i16":
            return w.op(f"sext {F.t(_RAW[dtype])} {x} to {F.t('i32')}")
        case "u8" | "u16" | "bool":
            return w.op(f"zext {F.t(_RAW[dtype])} {x} to {F.t('i32')}")
        case "bf16":
            return numeric.bf16_to_f32(w, F, x)
        case "f16":
            if has_f16(target):
                half = w.op(f"bitcast {F.t('i16')} {x} to {F.t('half')}")
                return w.op(f"fpext {F.t('half')} {half} to {F.t('float')}")
            return numeric.f16_to_f32(w, F, x)
    raise NotImplementedError(f"CPU renderer: no memory type {dtype}")


def encode(w: Writer, F: Form, target: CpuTarget, dtype: str, x: str) -> str:
    """Value -> memory element: ints wrap, f32 -> f16/bf16 to nearest even."""
    match dtype:
        case "i32" | "i64" | "f32" | "f64":
            return x
        case "i8" | "u8" | "bool" | "i16" | "u16":
            return w.op(f"trunc {F.t('i32')} {x} to {F.t(_RAW[dtype])}")
        case "bf16":
            return numeric.f32_to_bf16(w, F, x)
        case "f16":
            if has_f16(target):
                half = w.op(f"fptrunc {F.t('float')} {x} to {F.t('half')}")
                return w.op(f"bitcast {F.t('half')} {half} to {F.t('i16')}")
            return numeric.f32_to_f16(w, F, x)
    raise NotImplementedError(f"CPU renderer: no memory type {dtype}")


class Memory:
    """Emits the memory operations of one kernel body.  `stage(name, bytes)` gives a stack buffer of the function."""

    def __init__(self, writer: Writer, lanes: Lanes, target: CpuTarget, arith: Arith, stage: Callable[[str, int], str]):
        self.w, self.lanes, self.target, self.arith, self.stage = writer, lanes, target, arith, stage
        self.form = Form(lanes.per_part)

    # -- uniform ----------------------------------------------------------------------------------------------
    def load_uniform(self, dtype: str, ptr: str, offset: Val, index: Val, mask: Val | None) -> Val:
        raw = _RAW[dtype]
        at = self._guarded(self.element(dtype, ptr, offset, index), mask, "zeros")
        x = self.w.op(f"load {raw}, ptr {at}, align 1")
        return self.lanes.uniform(MEMORY[dtype][1], decode(self.w, SCALAR, self.target, dtype, x))

    def store_uniform(self, dtype: str, ptr: str, offset: Val, index: Val, value: Val, mask: Val | None) -> None:
        x = encode(self.w, SCALAR, self.target, dtype, value.scalar)
        at = self._guarded(self.element(dtype, ptr, offset, index), mask, "void")
        self.w.line(f"store {_RAW[dtype]} {x}, ptr {at}, align 1")

    def _guarded(self, at: str, mask: Val | None, spare: str) -> str:
        """`at` where the uniform mask holds, else a harmless address."""
        if mask is None or mask.const is True:
            return at
        buffer = self.stage(spare, 64)
        if spare == "zeros":
            self.w.line(f"store i64 0, ptr {buffer}, align 64")
        return self.w.op(f"select i1 {mask.scalar}, ptr {at}, ptr {buffer}")

    def element(self, dtype: str, ptr: str, offset: Val, index: Val | None) -> str:
        """Address of element `index` (uniform) at byte `offset` of `ptr`."""
        w = self.w
        if offset.const != 0:
            ptr = w.op(f"getelementptr i8, ptr {ptr}, {LLVM_TYPE[offset.type]} {offset.scalar}")
        if index is None or index.const == 0:
            return ptr
        return w.op(f"getelementptr {_RAW[dtype]}, ptr {ptr}, {LLVM_TYPE[index.type]} {index.scalar}")

    # -- contiguous -------------------------------------------------------------------------------------------
    def load_lanes(self, dtype: str, ptr: str, offset: Val, base: Val, mask: Val | None, live: list[bool]) -> Val:
        at, raw = self.element(dtype, ptr, offset, base), _RAW[dtype]
        size, vt = MEMORY[dtype][0], self.form.t(raw)

        def plain() -> list[str]:
            return [self.w.op(f"load {vt}, ptr {self._part(at, j, size)}, align 1") if live[j] else "poison"
                    for j in range(self.lanes.count)]

        def partial() -> list[str]:
            if not self._native_mask(size):
                return self._load_staged(at, raw, size, mask)
            masks, m, t = self.lanes.parts(mask), self.form.mangled(_SHORT.get(raw, raw)), self.form.t("i1")
            return [self.w.call(vt, f"llvm.masked.load.{m}.p0",
                                f"ptr {self._part(at, j, size)}, i32 1, {t} {masks[j]}, {vt} zeroinitializer",
                                f"ptr, i32, {t}, {vt}") if live[j] else "poison" for j in range(self.lanes.count)]

        loaded = self._by_mask(mask, plain, partial, vt)
        return self._decoded(dtype, loaded, live)

    def prefetch(self, dtype: str, ptr: str, offset: Val, base: Val, distance: int) -> None:
        """Ask for the cache lines `distance` bytes behind a vector of lanes; they may lie outside every buffer.

        Into the first level alone: what is asked for ahead, weights and keys, is read once and is more than the other
        levels hold.  It would drive out what they have of the host's own data, which is needed between two launches."""
        start = self.element(dtype, ptr, offset, base)
        for line in range(0, self.lanes.lanes * MEMORY[dtype][0], 64):
            at = self.w.op(f"getelementptr i8, ptr {start}, i64 {distance + line}")
            self.w.call("void", "llvm.prefetch.p0", f"ptr {at}, i32 0, i32 0, i32 1", "ptr, i32, i32, i32")

    def store_lanes(self, dtype: str, ptr: str, offset: Val, base: Val, value: Val, mask: Val | None) -> None:
        at, raw, size = self.element(dtype, ptr, offset, base), _RAW[dtype], MEMORY[dtype][0]
        vt = self.form.t(raw)
        coded = self._encoded(dtype, value)

        def plain() -> list[str]:
            for j, x in enumerate(coded):
                self.w.line(f"store {vt} {x}, ptr {self._part(at, j, size)}, align 1")
            return []

        def partial() -> list[str]:
            if not self._native_mask(size):
                return self._store_staged(at, raw, size, mask, coded)
            masks, m, t = self.lanes.parts(mask), self.form.mangled(_SHORT.get(raw, raw)), self.form.t("i1")
            for j, x in enumerate(coded):
                self.w.call("void", f"llvm.masked.store.{m}.p0",
                            f"{vt} {x}, ptr {self._part(at, j, size)}, i32 1, {t} {masks[j]}", f"{vt}, ptr, i32, {t}")
            return []

        self._by_mask(mask, plain, partial, vt)

    def _part(self, at: str, part: int, size: int) -> str:
        return at if part == 0 else self.w.op(f"getelementptr i8, ptr {at}, i64 {part * self.lanes.per_part * size}")

    def _native_mask(self, size: int) -> bool:
        if self.lanes.per_part == 1:
            return False
        return self.target.vector_bits == 512 or (self.target.has("avx2") and size >= 4)

    def _decoded(self, dtype: str, raw: list[str], live: list[bool]) -> Val:
        return self.lanes.varying(MEMORY[dtype][1], [
            decode(self.w, self.form, self.target, dtype, x) if live[j] else "poison" for j, x in enumerate(raw)])

    def _encoded(self, dtype: str, value: Val) -> list[str]:
        if value.uniform:                       # convert once, not once per part
            x = encode(self.w, SCALAR, self.target, dtype, value.scalar)
            raw = _RAW[dtype]
            if self.form.width == 1:
                return [x] * self.lanes.count
            vt = self.form.t(raw)
            one = self.w.op(f"insertelement {vt} poison, {raw} {x}, i64 0")
            part = self.w.op(f"shufflevector {vt} {one}, {vt} poison, <{self.form.width} x i32> zeroinitializer")
            return [part] * self.lanes.count
        return [encode(self.w, self.form, self.target, dtype, x) for x in self.lanes.parts(value)]

    def _by_mask(self, mask: Val | None, plain: Callable[[], list[str]], partial: Callable[[], list[str]],
                 vt: str) -> list[str]:
        """`plain` where every lane is active, else `partial`; merges their vectors.

        Tested at run time for a prefix mask, unless masked accesses cost nothing (AVX-512)."""
        w = self.w
        if mask is None or mask.const is True:
            return plain()
        if mask.count is None or (self.target.vector_bits == 512 and self.lanes.per_part > 1):
            return partial()
        fast, slow, done = w.new_block("full"), w.new_block("part"), w.new_block("joined")
        w.branch(w.op(f"icmp eq i32 {mask.count}, {self.lanes.lanes}"), fast, slow)
        w.place(fast)
        a, from_a = plain(), w.block
        w.jump(done)
        w.place(slow)
        b, from_b = partial(), w.block
        w.jump(done)
        w.place(done)
        return [x if x == "poison" else w.op(f"phi {vt} [ {x}, %{from_a} ], [ {y}, %{from_b} ]") for x, y in zip(a, b)]

    # -- through a stack buffer -------------------------------------------------------------------------------
    def _load_staged(self, at: str, raw: str, size: int, mask: Val) -> list[str]:
        w, total = self.w, self.lanes.lanes * size
        buffer = self.stage("data", 8 * self.lanes.lanes)
        w.call("void", "llvm.memset.p0.i64", f"ptr {buffer}, i8 0, i64 {total}, i1 false", "ptr, i8, i64, i1")
        if mask.count is not None:
            self._copy(buffer, at, mask.count, size)
        else:
            self._each_active(mask, lambda lane: self._move(self._nth(buffer, lane, size),
                                                            self._nth(at, lane, size), size))
        vt = self.form.t(raw)
        return [w.op(f"load {vt}, ptr {self._part(buffer, j, size)}, align 1") for j in range(self.lanes.count)]

    def _store_staged(self, at: str, raw: str, size: int, mask: Val, coded: list[str]) -> list[str]:
        buffer = self._spill("data", raw, size, coded)
        if mask.count is not None:
            self._copy(at, buffer, mask.count, size)
        else:
            self._each_active(mask, lambda lane: self._move(self._nth(at, lane, size),
                                                            self._nth(buffer, lane, size), size))
        return []

    def _spill(self, name: str, raw: str, size: int, parts: list[str]) -> str:
        buffer, vt = self.stage(name, 8 * self.lanes.lanes), self.form.t(raw)
        for j, x in enumerate(parts):
            self.w.line(f"store {vt} {x}, ptr {self._part(buffer, j, size)}, align 1")
        return buffer

    def _copy(self, dst: str, src: str, count: str, size: int) -> None:
        w = self.w
        n = w.op(f"mul i64 {w.op(f'zext i32 {count} to i64')}, {size}")
        w.call("void", "llvm.memcpy.p0.p0.i64", f"ptr {dst}, ptr {src}, i64 {n}, i1 false", "ptr, ptr, i64, i1")

    def _nth(self, at: str, index: str, size: int) -> str:
        return self.w.op(f"getelementptr i{8 * size}, ptr {at}, i64 {index}")

    def _move(self, dst: str, src: str, size: int) -> None:
        x = self.w.op(f"load i{8 * size}, ptr {src}, align 1")
        self.w.line(f"store i{8 * size} {x}, ptr {dst}, align 1")

    def _each_active(self, mask: Val, body: Callable[[str], None]) -> None:
        """for lane in range(lanes): if mask[lane]: body(lane)."""
        w, F = self.w, self.form
        flags = self._spill("mask", "i8", 1, [w.op(f"zext {F.t('i1')} {m} to {F.t('i8')}")
                                              for m in self.lanes.parts(mask)])
        head, active, latch, done = (w.new_block(s) for s in ("lane", "active", "next", "done"))
        before, lane, following = w.block, w.name("lane"), w.name("lane")
        w.jump(head)
        w.place(head)
        w.line(f"{lane} = phi i64 [ 0, %{before} ], [ {following}, %{latch} ]")
        flag = w.op(f"load i8, ptr {self._nth(flags, lane, 1)}, align 1")
        w.branch(w.op(f"icmp ne i8 {flag}, 0"), active, latch)
        w.place(active)
        body(lane)
        w.jump(latch)
        w.place(latch)
        w.line(f"{following} = add i64 {lane}, 1")
        w.branch(w.op(f"icmp ult i64 {following}, {self.lanes.lanes}"), head, done)
        w.place(done)

    # -- gather and scatter -----------------------------------------------------------------------------------
    def gather(self, dtype: str, ptr: str, offset: Val, index: Val, mask: Val | None, live: list[bool]) -> Val:
        if index.stride == 1:
            return self.load_lanes(dtype, ptr, offset, index.base or self.lanes.constant("i64", 0), mask, live)
        at, raw, size = self.element(dtype, ptr, offset, None), _RAW[dtype], MEMORY[dtype][0]
        if mask is not None and mask.const is True:
            mask = None
        F, w = self.form, self.w
        indices, it, vt = self.lanes.parts(index), F.t(LLVM_TYPE[index.type]), F.t(raw)
        native = self.target.vector_bits == 512 or (mask is not None and self.target.has("avx2"))
        if native and F.width > 1 and size >= 4:
            masks = self.lanes.parts(mask) if mask is not None else [F.k("i1", "true")] * self.lanes.count
            m = F.mangled(_SHORT.get(raw, raw))
            loaded = []
            for j in range(self.lanes.count):
                p = w.op(f"getelementptr {raw}, ptr {at}, {it} {indices[j]}")
                loaded.append(w.call(vt, f"llvm.masked.gather.{m}.v{F.width}p0",
                                     f"{F.t('ptr')} {p}, i32 1, {F.t('i1')} {masks[j]}, {vt} zeroinitializer",
                                     f"{F.t('ptr')}, i32, {F.t('i1')}, {vt}"))
        elif mask is None:
            loaded = [self._gather_part(at, raw, it, indices[j]) if live[j] else "poison"
                      for j in range(self.lanes.count)]
        else:
            loaded = self._gather_staged(at, raw, size, index, mask)
        return self._decoded(dtype, loaded, live)

    def _gather_part(self, at: str, raw: str, index_type: str, indices: str) -> str:
        w, F = self.w, self.form
        out, scalar_type = "poison", index_type.split()[-1].rstrip(">")
        for i in range(F.width):
            k = w.op(f"extractelement {index_type} {indices}, i64 {i}") if F.width > 1 else indices
            x = w.op(f"load {raw}, ptr {w.op(f'getelementptr {raw}, ptr {at}, {scalar_type} {k}')}, align 1")
            out = w.op(f"insertelement {F.t(raw)} {out}, {raw} {x}, i64 {i}") if F.width > 1 else x
        return out

    def _wide_indices(self, index: Val) -> str:
        """Stack buffer with the indices as i64."""
        F, parts = self.form, self.lanes.parts(index)
        if index.type == "i32":
            parts = [self.w.op(f"sext {F.t('i32')} {x} to {F.t('i64')}") for x in parts]
        return self._spill("index", "i64", 8, parts)

    def _gather_staged(self, at: str, raw: str, size: int, index: Val, mask: Val) -> list[str]:
        w = self.w
        buffer, indices = self.stage("data", 8 * self.lanes.lanes), self._wide_indices(index)
        w.call("void", "llvm.memset.p0.i64", f"ptr {buffer}, i8 0, i64 {self.lanes.lanes * size}, i1 false",
               "ptr, i8, i64, i1")

        def one(lane: str) -> None:
            k = w.op(f"load i64, ptr {self._nth(indices, lane, 8)}, align 8")
            self._move(self._nth(buffer, lane, size), self._nth(at, k, size), size)

        self._each_active(mask, one)
        vt = self.form.t(raw)
        return [w.op(f"load {vt}, ptr {self._part(buffer, j, size)}, align 1") for j in range(self.lanes.count)]

    def scatter(self, dtype: str, ptr: str, offset: Val, index: Val, value: Val, mask: Val | None) -> None:
        if index.stride == 1:
            return self.store_lanes(dtype, ptr, offset, index.base or self.lanes.constant("i64", 0), value, mask)
        at, raw, size = self.element(dtype, ptr, offset, None), _RAW[dtype], MEMORY[dtype][0]
        F, w, coded = self.form, self.w, self._encoded(dtype, value)
        if mask is None or mask.const is True:
            indices, it = self.lanes.parts(index), LLVM_TYPE[index.type]
            for j, x in enumerate(coded):
                for i in range(F.width):
                    k = w.op(f"extractelement {F.t(it)} {indices[j]}, i64 {i}") if F.width > 1 else indices[j]
                    e = w.op(f"extractelement {F.t(raw)} {x}, i64 {i}") if F.width > 1 else x
                    w.line(f"store {raw} {e}, ptr {w.op(f'getelementptr {raw}, ptr {at}, {it} {k}')}, align 1")
            return
        buffer, indices = self._spill("data", raw, size, coded), self._wide_indices(index)

        def one(lane: str) -> None:
            k = w.op(f"load i64, ptr {self._nth(indices, lane, 8)}, align 8")
            self._move(self._nth(at, k, size), self._nth(buffer, lane, size), size)

        self._each_active(mask, one)
