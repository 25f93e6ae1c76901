"""Random loop-IR kernels: seeded, verified, free of undefined behaviour, with every result stored.

A kernel reads one array per type, computes with values of every type inside loops and ifs, moves data across lanes and
through scratch, and stores the last values of each type.  What is undefined is avoided by construction: shift counts
and float-to-integer conversions stay in range, divisors are positive, scratch is synchronised, and floats are made
canonical where their bits can be seen.
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from m3jit.ir.loop import FLOATS, INTS, MEMORY, Kernel, Value
from m3jit.ir.loop_builder import Builder

ELEMENTS = 150                              # of every input array; groups past the end are masked
NUMPY = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64}
INPUTS = {"f32": np.float32, "i32": np.int32, "i64": np.int64, "f64": np.float64, "f16": np.float16, "bf16": np.uint16,
          "i8": np.int8, "u8": np.uint8, "i16": np.int16, "u16": np.uint16, "bool": np.uint8}
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-45, 1e-40, 1.5, -2.5, 3.4e38, 16777217.0]


def random_kernel(seed: int, statements: int = 45, lanes: int | None = None) -> Kernel:
    """A kernel of about that many statements; the same one for the same seed."""
    return _Generator(seed, statements, lanes).build()


def random_args(kernel: Kernel, seed: int) -> list[Any]:
    """Arguments for it: inputs with special values among random ones, outputs of bytes 0xA5."""
    rng = np.random.default_rng(seed + 1)
    args: list[Any] = []
    groups = -(-ELEMENTS // kernel.lanes)
    for p in kernel.params:
        if p.kind == "ptr" and p.access == "r":
            args.append(_input(rng, p.dtype))
        elif p.kind == "ptr":
            count = max(groups, ELEMENTS)
            args.append(np.full(count * MEMORY[p.dtype][0], 0xA5, np.uint8).view(INPUTS[p.dtype]))
        else:
            args.append({"n": ELEMENTS, "trip": 3, "k": 1.25, "s": -7}[p.name])
    return args


def _input(rng: np.random.Generator, dtype: str) -> np.ndarray:
    t = np.dtype(INPUTS[dtype])
    if dtype == "bool":
        return rng.integers(0, 2, ELEMENTS).astype(t)
    if t.kind == "f":
        with np.errstate(over="ignore"):
            x = (rng.standard_normal(ELEMENTS) * 2.0 ** rng.integers(-10, 11, ELEMENTS)).astype(t)
            x[rng.choice(ELEMENTS, 3 * len(SPECIAL), replace=False)] = np.array(SPECIAL * 3).astype(t)
        return x
    bits = 8 * t.itemsize
    info = np.iinfo(t)
    return rng.integers(info.min, info.max, ELEMENTS, t, endpoint=True) >> t.type(rng.integers(0, bits // 2))


class _Generator:
    def __init__(self, seed: int, statements: int, lanes: int | None):
        self.rng = np.random.default_rng(seed)
        self.left = statements
        self.b = Builder(f"random_{seed}", lanes or int(self.rng.choice([1, 8, 16, 32, 64])))
        self.pool: dict[str, list[Value]] = {t: [] for t in ("b1", "i32", "i64", "f32", "f64")}
        self.cells: list = []
        self.scratches = 0

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def build(self) -> Kernel:
        b = self.b
        self.buffers = {t: b.ptr(f"in_{t}", "r", t) for t in INPUTS}
        self.n, self.trip = b.scalar("n"), b.scalar("trip")
        k, s = b.scalar("k", "f32"), b.scalar("s", "i32")
        b.set_grid((self.n + (b.lanes - 1)) // b.lanes)
        self.base = b.group * b.lanes
        self.inside = b.in_range(self.base, self.n)
        self.pool["f32"] += [k, b.f32(0.5), b.f32(-0.0)]
        self.pool["i32"] += [s, b.lane, b.i32(-2 ** 31), b.i32(3)]
        self.pool["i64"] += [b.group, self.trip, b.i64(2 ** 62 + 5)]
        self.pool["b1"] += [self.inside, self.trip < 5]
        self.pool["f64"] += [b.f64(0.1)]
        for t in ("f32", "i32", "i64", "f64", self.pick(sorted(INPUTS)), self.pick(sorted(INPUTS))):
            self.keep(self.load(t))
        self.statements(0)
        self.outputs()
        return b.finish()

    def keep(self, v: Value) -> None:
        self.pool[v.type].append(v)

    def some(self, type: str, uniform: bool = False) -> Value:
        """A value of the type, recent ones more often."""
        choices = [v for v in self.pool[type] if not (uniform and v.varying)]
        if not choices:
            return self.b.const(type, {"b1": True}.get(type, 1.0 if type in FLOATS else 1))
        at = len(choices) - 1 - int(self.rng.exponential(4.0))
        return choices[max(at, 0)]

    def load(self, dtype: str) -> Value:
        b = self.b
        way = int(self.rng.integers(3))
        if way == 0:
            return b.load_lanes(dtype, self.buffers[dtype], self.base, self.inside)
        if way == 1:                                     # a gather, perhaps masked
            index = (self.some("i32") & 127) if self.rng.random() < 0.5 else b.cvt(self.some("i64") & 127, "i64")
            return b.load(dtype, self.buffers[dtype], index, self.some("b1") if index.varying else None)
        return b.load(dtype, self.buffers[dtype].at(MEMORY[dtype][0] * 2), b.group & 63)

    # -- statements -----------------------------------------------------------------------------------------------
    def statements(self, depth: int) -> None:
        count = int(self.rng.integers(4, 9)) if depth else 10 ** 6
        while self.left > 0 and count > 0:
            self.left, count = self.left - 1, count - 1
            r = self.rng.random()
            if r < 0.07 and depth < 3:
                self.nested(depth)
            elif r < 0.14:
                t = self.pick(("i32", "i64", "f32", "f64", "b1"))
                v = self.some(t)
                self.cells.append(self.b.var(t, v, v.varying or self.rng.random() < 0.6))
            elif r < 0.24 and self.cells:
                cell = self.pick(self.cells)
                self.keep(cell.get())
                cell.set(self.some(cell.cell.type, uniform=not cell.cell.varying))
            elif r < 0.31:
                self.across()
            elif r < 0.37:
                self.keep(self.load(self.pick(sorted(INPUTS))))
            elif r < 0.41:
                self.through_scratch()
            else:
                self.keep(self.pure())

    def nested(self, depth: int) -> None:
        """A loop or an if with its own scope; cells carry values out."""
        saved, cells = {t: list(v) for t, v in self.pool.items()}, list(self.cells)
        b = self.b
        if self.rng.random() < 0.5:
            lo, step = int(self.rng.integers(0, 3)), int(self.rng.integers(1, 3))
            with b.loop(lo, self.pick([self.trip, b.i64(0), b.i64(4), self.trip + 1]), step) as i:
                self.keep(i)
                self.statements(depth + 1)
        else:
            with b.if_(self.some("b1", uniform=True)):
                self.statements(depth + 1)
            self.pool, self.cells = {t: list(v) for t, v in saved.items()}, list(cells)
            if self.rng.random() < 0.5:
                with b.else_():
                    self.statements(depth + 1)
        self.pool, self.cells = saved, cells

    def across(self) -> None:
        b = self.b
        kind = self.pick(("fold", "shuffle", "first"))
        t = self.pick(("i32", "i64", "f32", "f64", "b1"))
        v = self.some(t)
        if kind == "first":
            self.keep(b.first(v))
        elif kind == "shuffle":
            self.keep(b.shuffle_down(v, int(self.rng.integers(0, b.lanes))))
        else:
            ops = {"b1": ("and", "or"), "i32": ("add", "mul", "imin", "imax", "and", "or"),
                   "i64": ("add", "imin", "imax", "and", "or"), "f32": ("add", "mul", "fmin", "fmax"),
                   "f64": ("add", "fmin", "fmax")}[t]
            self.keep(b.fold(v, self.pick(ops)))

    def through_scratch(self) -> None:
        """Each lane writes, all wait, each reads another's."""
        b = self.b
        dtype = self.pick(("f32", "i32", "i64", "f16", "bf16", "u8"))
        t = MEMORY[dtype][1]
        self.scratches += 1
        s = b.scratch(f"s{self.scratches}", dtype, b.lanes)
        v = self.some(t)
        b.store_lanes(dtype, s, 0, b.canonical_nan(v) if t in FLOATS else v)
        b.sync()
        self.keep(b.load(dtype, s, (b.lane + int(self.rng.integers(0, b.lanes))) & (b.lanes - 1)))
        b.sync()

    # -- pure operations --------------------------------------------------------------------------------------------
    def pure(self) -> Value:
        return self.pick((self.arithmetic, self.arithmetic, self.arithmetic, self.compare, self.convert, self.bitwise,
                          self.rounding))()

    def arithmetic(self) -> Value:
        b, t = self.b, self.pick(("i32", "i64", "f32", "f32", "f64"))
        x, y, z = (self.some(t) for _ in range(3))
        ops: list[Callable[[], Value]] = [lambda: x + y, lambda: x - y, lambda: x * y, lambda: -x, lambda: b.abs(x),
                                          lambda: b.select(self.some("b1"), x, y)]
        if t in FLOATS:
            ops += [lambda: x / y, lambda: b.fma(x, y, z), lambda: b.fmax(x, y), lambda: b.fmin(x, y)]
        else:
            ops += [lambda: b.imin(x, y), lambda: b.imax(x, y), self.divide]
        return self.pick(ops)()

    def divide(self) -> Value:
        t = self.pick(INTS)
        x, y = self.some(t, uniform=True), self.some(t, uniform=True)
        positive = self.b.imax(y, 1)
        x = self.b.imax(x, -1000000)
        return x // positive if self.rng.random() < 0.5 else x % positive

    def compare(self) -> Value:
        t = self.pick(("i32", "i64", "f32", "f64"))
        x, y = self.some(t), self.some(t)
        m = self.pick((lambda: x < y, lambda: x <= y, lambda: x.equals(y), lambda: self.b.pure("ne", x, y)))()
        other = self.some("b1")
        return self.pick((lambda: m, lambda: m & other, lambda: m | other, lambda: m ^ other,
                          lambda: self.b.logical_not(m)))()

    def convert(self) -> Value:
        b, t = self.b, self.pick(("i32", "i64", "f32", "f64", "b1"))
        x = self.some(t)
        if t == "b1":
            return b.cvt(x, self.pick(("i32", "i64", "f32")))
        if t in FLOATS:
            other = "f64" if t == "f32" else "f32"
            small = b.select(b.abs(x) < 1e6, x, b.const(t, 7.75))
            return b.cvt(x, other) if self.rng.random() < 0.4 else b.cvt(small, self.pick(INTS))
        return b.cvt(x, self.pick(("f32", "f64", "i64" if t == "i32" else "i32")))

    def bitwise(self) -> Value:
        b, t = self.b, self.pick(INTS)
        x, y, mask = self.some(t), self.some(t), 31 if t == "i32" else 63
        ops = [lambda: x & y, lambda: x | y, lambda: x ^ y, lambda: x << (y & mask), lambda: x >> (y & mask),
               lambda: b.lshr(x, y & mask), lambda: b.bits(x),
               lambda: b.bits(b.canonical_nan(self.some(self.pick(FLOATS))))]
        if t == "i32":
            ops += [lambda: b.zext(x), lambda: b.dot4(self.some("i32"), x, y), lambda: b.dot4(self.some("i32"), x, y),
                    lambda: b.lookup(x & 0x0F0F0F0F, [0x3020100 * 7 + 5, -2, 2 ** 31 - 1, -0x7F1E2D3C])]
        return self.pick(ops)()

    def rounding(self) -> Value:
        x = self.some(self.pick(FLOATS))
        return self.pick((self.b.floor, self.b.rint, self.b.sqrt))(x)

    # -- results ----------------------------------------------------------------------------------------------------
    def outputs(self) -> None:
        """Stores the last values of every type, and cells, in several memory types."""
        b = self.b
        last = [v for t in self.pool for v in self.pool[t][-3:]] + [c.get() for c in self.cells[-4:]]
        for i, v in enumerate(last):
            if v.type == "b1":
                v = b.cvt(v, "i32")
            dtype = self.pick([m for m, (_, t) in MEMORY.items() if t == v.type])
            if v.type in FLOATS:
                v = b.canonical_nan(v)
            if dtype == "bool":
                v = b.cvt(b.pure("ne", v, b.i32(0)), "i32")
            out = b.ptr(f"out{i}", "w", dtype)
            if not v.varying and self.rng.random() < 0.7:
                b.store(dtype, out, b.group, v)
            elif self.rng.random() < 0.3:                # a scatter that reverses the lanes
                at = b.cvt(self.base, "i64") + b.cvt((b.lanes - 1) - b.lane, "i64")
                b.store(dtype, out, at, v, at < self.n)
            else:
                b.store_lanes(dtype, out, self.base, v, self.inside)
