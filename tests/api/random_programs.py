"""Random tensor programs that never trap, written with the builder, and their inputs.

Every value carries its dtype and shape, so that each instruction gets operands it accepts; dimensions include 0, 1, odd
and larger than a vector, values include NaN, infinities, signed zeros and subnormals.
"""
from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from m3jit import Builder, Tensor
from m3jit.api.builder import Value
from m3jit.isa import types as T
from m3jit.isa.types import DType
from tests.api.random_items import BLOCKS, FLOATS, INTS, MAX_ELEMENTS, SIZES, Item, Program, array


class Generator:
    """Appends random instructions."""

    def __init__(self, seed: int, zero: bool = False, mixed: bool = False):
        self.rng = random.Random(seed)
        self.zero = zero                                   # dimensions may be 0
        self.mixed = mixed                                 # also what has no compiled form
        self.p = Program(Builder(f"random{seed}"))
        self.op = self.p.builder.op
        self.makers: list[tuple[float, Callable[[], bool]]] = [
            (6, self.unary), (6, self.binary), (2, self.clip), (2, self.softmax), (3, self.reduce), (1, self.argmax),
            (1, self.sort), (1, self.topk), (2, self.reshape), (2, self.slice), (1, self.concat), (1, self.broadcast),
            (1, self.pad), (1, self.tile), (2, self.transpose), (1, self.gather), (1, self.scatter), (3, self.cast),
            (1, self.quantize), (1, self.filled), (2, self.norm), (2, self.matvec), (0.7, self.ffn), (0.7, self.embed),
            (1, self.rope), (0.7, self.attention), (0.4, self.sparse), (0.7, self.convolution), (1, self.sanity),
            (1, self.dim), (1, self.element), (1, self.scalars), (1, self.immediate), (0.7, self.moved),
            (1, self.scaled), (0.7, self.draw), (0.4, self.sample)]
        if mixed:
            self.makers.append((2, self.digest))

    # -- picking ------------------------------------------------------------------------------------------------------
    def pick(self, ok: Callable[[Item], bool]) -> Item | None:
        """A value that fits, newer ones more often."""
        found = [i for i in self.p.items if ok(i)]
        if not found:
            return None
        return found[-1] if self.rng.random() < 0.35 else self.rng.choice(found)

    def tensor(self, dtypes: tuple[DType, ...] = T.PLAIN, rank: tuple[int, int] = (0, 5),
               empty: bool = True) -> Item | None:
        return self.pick(lambda i: i.kind == "tensor" and i.dtype in dtypes and rank[0] <= i.rank <= rank[1] and
                         (empty or math.prod(i.shape) > 0))

    def floats(self, **kw: Any) -> Item | None:
        return self.tensor(T.FLOATS, **kw)

    def numbers(self, **kw: Any) -> Item | None:
        return self.tensor(T.FLOATS + T.INTS, **kw)

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        rng = self.rng
        rank = rng.choice((0, 1, 1, 2, 2, 2, 3, 4)) if rank is None else rank
        while True:
            s = tuple(rng.choice(SIZES) for _ in range(rank))
            if self.zero and rank and rng.random() < 0.2:
                s = (*s[:-1], 0) if rng.random() < 0.5 else (0, *s[1:])
            if math.prod(s) <= MAX_ELEMENTS:
                return s

    def add(self, name: str, value: Value, dtype: DType | None, shape: tuple[int, ...] | None,
            kind: str = "tensor") -> Item:
        item = Item(value, dtype, None if shape is None else tuple(shape), kind)
        self.p.items.append(item)
        self.p.opcodes.append(name)
        return item

    def emit(self, name: str, dtype: DType | None, shape: tuple[int, ...] | None, *args: Any, kind: str = "tensor",
             **options: Any) -> bool:
        self.add(name, getattr(self.op, name)(*args, **options), dtype, shape, kind)
        return True

    def input(self, dtype: DType, shape: tuple[int, ...] | None, kind: str = "tensor") -> Item:
        n = len(self.p.inputs)
        value = self.p.builder.input(f"rIn{n}", kind)
        item = Item(value, dtype, shape, kind)
        self.p.inputs.append(item)
        self.p.items.append(item)
        self.p.arguments.append(array(self.rng, dtype, shape) if kind == "tensor" else
                                self.rng.randrange(-50, 50) if kind == "int" else self.rng.uniform(-3, 3))
        return item

    def weight(self, dtype: DType, shape: tuple[int, ...]) -> Value:
        return self.p.builder.const(array(self.rng, dtype, shape, special=0.0))

    # -- elementwise --------------------------------------------------------------------------------------------------
    def unary(self) -> bool:
        x = self.floats()
        name = self.rng.choice(("SILU", "GELU", "GELU", "SIGMOID", "TANH", "RELU", "EXP", "LOG"))
        options = {"approx": "TANH"} if name == "GELU" and self.rng.random() < 0.5 else {}
        return x is not None and self.emit(name, x.dtype, x.shape, x.value, **options)

    def binary(self) -> bool:
        a = self.numbers()
        if a is None:
            return False
        same = T.FLOATS if a.dtype in T.FLOATS else (a.dtype,)

        def fits(i: Item) -> bool:
            try:
                return i.kind == "tensor" and i.dtype in same and \
                    math.prod(np.broadcast_shapes(a.shape, i.shape)) <= MAX_ELEMENTS
            except ValueError:
                return False
        b = self.pick(fits)
        if b is None:
            return False
        dtype = a.dtype if a.dtype is b.dtype else T.F32
        x, y = (a, b) if self.rng.random() < 0.5 else (b, a)
        shape = np.broadcast_shapes(a.shape, b.shape)
        return self.emit(self.rng.choice(("ADD", "MUL")), dtype, shape, x.value, y.value)

    def clip(self) -> bool:
        x = self.floats()
        return x is not None and self.emit("CLIP", x.dtype, x.shape, x.value, -1.5, 2.0)

    def scaled(self) -> bool:
        """A tensor with a number in a register."""
        x = self.numbers()
        if x is None:
            return False
        s = self.pick(lambda i: i.kind == "int" or (i.kind == "float" and x.dtype.kind == "float"))
        return s is not None and self.emit(self.rng.choice(("ADD", "MUL")), x.dtype, x.shape, x.value, s.value)

    def sanity(self) -> bool:
        x = self.floats()
        if x is None:
            return False
        clean, count = self.op.SANITY_CHECK(x.value, count=True)
        self.add("SANITY_CHECK", clean, x.dtype, x.shape)
        self.p.items.append(Item(count, None, None, "int"))
        return True

    # -- orders and reductions ----------------------------------------------------------------------------------------
    def axis_of(self, x: Item) -> int:
        return self.rng.randrange(-x.rank, x.rank)

    def softmax(self) -> bool:
        x = self.floats(rank=(1, 4), empty=False)
        return x is not None and self.emit("SOFTMAX", x.dtype, x.shape, x.value, axis=self.axis_of(x),
                                           temp=self.rng.choice((1.0, 1.0, 0.7)))

    def reduce(self) -> bool:
        x = self.numbers(rank=(1, 4))
        if x is None:
            return False
        axis = self.axis_of(x) if self.rng.random() < 0.8 else None
        keep = self.rng.random() < 0.5
        along = range(x.rank) if axis is None else (axis % x.rank,)
        op = self.rng.choice(("SUM", "MEAN", "PROD") + (("MAX", "MIN") if all(x.shape[a] for a in along) else ()))
        shape = tuple(1 if i in along else d for i, d in enumerate(x.shape) if keep or i not in along)
        integer = x.dtype.kind == "int"
        dtype = T.F32 if integer and op == "MEAN" else T.I64 if integer and op in ("SUM", "PROD") else x.dtype
        options = {} if axis is None else {"axis": axis}
        return self.emit("REDUCE", dtype, shape, x.value, op, keepdims=keep, **options)

    def argmax(self) -> bool:
        x = self.tensor(rank=(1, 4), empty=False)
        if x is None:
            return False
        axis = self.axis_of(x)
        return self.emit("ARGMAX", T.I64, tuple(1 if i == axis % x.rank else d for i, d in enumerate(x.shape)), x.value,
                         axis)

    def _with_indices(self, name: str, x: Item, shape: tuple[int, ...], *args: Any, **options: Any) -> bool:
        values, places = getattr(self.op, name)(x.value, *args, indices=True, **options)
        self.add(name, values, x.dtype, shape)
        self.p.items.append(Item(places, T.I64, tuple(shape)))
        return True

    def sort(self) -> bool:
        x = self.tensor(rank=(1, 3))
        return x is not None and self._with_indices("SORT", x, x.shape, axis=self.axis_of(x),
                                                    order=self.rng.choice(("ASC", "DESC")))

    def topk(self) -> bool:
        x = self.tensor(T.PLAIN if self.mixed else T.FLOATS + T.INTS, rank=(1, 3), empty=False)
        if x is None:
            return False
        axis = self.axis_of(x)
        k = self.rng.randint(1, x.shape[axis])
        shape = tuple(k if i == axis % x.rank else d for i, d in enumerate(x.shape))
        return self._with_indices("TOPK", x, shape, k, axis=axis, smallest=self.rng.random() < 0.3,
                                  unsorted=self.rng.random() < 0.3)

    # -- moves -------------------------------------------------------------------------------------------------------
    def reshape(self) -> bool:
        x = self.tensor()
        if x is None:
            return False
        n = math.prod(x.shape)
        cuts = [d for d in range(1, n + 1) if n % d == 0] or [1]
        d = self.rng.choice(cuts)
        shape = self.rng.choice(((n,), (d, n // d), (1, n), (n, 1))) if n else (0, 3)
        inferred = self.rng.random() < 0.4 and 0 not in shape[1:]
        given = (-1, *shape[1:]) if inferred else shape
        return self.emit("RESHAPE", x.dtype, shape, x.value, given)

    def slice(self) -> bool:
        x = self.tensor(rank=(1, 4))
        if x is None:
            return False
        axis = self.axis_of(x)
        d = x.shape[axis]
        start = self.rng.randint(0, d)
        length = self.rng.randint(0, d - start) if self.zero else min(d - start, self.rng.randint(1, max(1, d)))
        step = self.rng.choice((1, 1, 2, 3))
        if self.rng.random() < 0.3 and d:
            start, length = d - 1, 1
            n = 1
            options = {"start": -1, "len": 1}
        else:
            n = -(-length // step)
            options = {"start": start, "len": length, "step": step}
        if not n and not self.zero:
            return False
        shape = tuple(n if i == axis % x.rank else v for i, v in enumerate(x.shape))
        return self.emit("SLICE", x.dtype, shape, x.value, axis=axis, **options)

    def concat(self) -> bool:
        x = self.tensor(rank=(1, 4))
        if x is None:
            return False
        axis = self.axis_of(x) % x.rank

        def fits(i: Item) -> bool:
            return i.kind == "tensor" and i.dtype is x.dtype and i.rank == x.rank and \
                all(a == b for n, (a, b) in enumerate(zip(i.shape, x.shape)) if n != axis)
        parts = [x, *(self.pick(fits) for _ in range(self.rng.randint(1, 3)))]
        total = sum(p.shape[axis] for p in parts)
        shape = tuple(total if i == axis else d for i, d in enumerate(x.shape))
        return math.prod(shape) <= MAX_ELEMENTS and self.emit("CONCAT", x.dtype, shape, *(p.value for p in parts),
                                                              axis=axis)

    def broadcast(self) -> bool:
        x = self.tensor(rank=(0, 4))
        if x is None:
            return False
        shape = tuple(self.rng.choice(SIZES[:6]) if d == 1 else d for d in x.shape)
        if len(shape) < 4 and self.rng.random() < 0.5:
            shape = (self.rng.choice(SIZES[:5]), *shape)
        fits = bool(shape) and math.prod(shape) <= MAX_ELEMENTS
        return fits and self.emit("BROADCAST", x.dtype, shape, x.value, shape)

    def pad(self) -> bool:
        x = self.tensor(rank=(1, 4))
        if x is None:
            return False
        axis, before, after = self.axis_of(x), self.rng.randrange(4), self.rng.randrange(4)
        shape = tuple(d + before + after if i == axis % x.rank else d for i, d in enumerate(x.shape))
        value = self.rng.choice((0.0, 1.0) if x.dtype.kind != "float" else (0.0, 1.0, -2.5))
        return self.emit("PAD", x.dtype, shape, x.value, axis=axis, before=before, after=after, value=value)

    def tile(self) -> bool:
        x = self.tensor(rank=(1, 4))
        if x is None:
            return False
        axis, reps = self.axis_of(x), self.rng.choice((1, 2, 3))
        shape = tuple(d * reps if i == axis % x.rank else d for i, d in enumerate(x.shape))
        return math.prod(shape) <= MAX_ELEMENTS and self.emit("TILE", x.dtype, shape, x.value, reps, axis=axis)

    def transpose(self) -> bool:
        x = self.tensor(rank=(1, 5))
        if x is None:
            return False
        axes = list(range(x.rank))
        self.rng.shuffle(axes)
        return self.emit("TRANSPOSE", x.dtype, tuple(x.shape[a] for a in axes), x.value, tuple(axes))

    def index(self, limit: int, shape: tuple[int, ...]) -> Value:
        """An index tensor with values below a limit, made by the program from a constant."""
        g = np.random.default_rng(self.rng.getrandbits(32))
        dtype = self.rng.choice((np.int32, np.int64))
        return self.p.builder.const(g.integers(0, limit, shape, dtype=dtype))

    def gather(self) -> bool:
        x = self.tensor(rank=(1, 3), empty=False)
        if x is None:
            return False
        axis = self.axis_of(x) % x.rank
        shape = self.rng.choice(((), (3,), (2, 5)))
        out = (*x.shape[:axis], *shape, *x.shape[axis + 1:])
        return math.prod(out) <= MAX_ELEMENTS and self.emit("GATHER", x.dtype, out, x.value,
                                                            self.index(x.shape[axis], shape), axis=axis)

    def scatter(self) -> bool:
        acc = self.numbers(rank=(1, 3), empty=False)
        if acc is None:
            return False
        axis, n = self.axis_of(acc) % acc.rank, self.rng.choice((1, 4, 9))
        table = self.weight(acc.dtype, tuple(n if i == axis else d for i, d in enumerate(acc.shape)))
        return self.emit("GATHER", acc.dtype, acc.shape, table, self.index(acc.shape[axis], (n,)), acc.value, axis=axis,
                         mode=self.rng.choice(("SCATTER_ADD", "SCATTER_MAX")))

    # -- making and converting ---------------------------------------------------------------------------------------
    def cast(self) -> bool:
        x = self.tensor()
        dtype = self.rng.choice((*FLOATS, *INTS, T.BOOL))
        return x is not None and self.emit("CAST", dtype, x.shape, x.value, dtype)

    def quantize(self) -> bool:
        x = self.pick(lambda i: i.kind == "tensor" and i.dtype in T.FLOATS and i.rank >= 1 and i.shape[-1] % 32 == 0 and
                      math.prod(i.shape) > 0)
        if x is None:
            return False
        clean = self.op.CLIP(self.op.SANITY_CHECK(x.value), -50.0, 50.0)
        self.p.opcodes += ["SANITY_CHECK", "CLIP"]
        packed = self.op.QUANTIZE(clean, self.rng.choice(BLOCKS if self.mixed else BLOCKS[:3]))
        self.p.opcodes.append("QUANTIZE")
        return self.emit("DEQUANT", T.F32, x.shape, packed)

    def filled(self) -> bool:
        dtype, shape = self.rng.choice((*FLOATS, *INTS, T.BOOL)), self.shape()
        fill = self.rng.choice((0.0, 1.0) if dtype.kind != "float" else (0.0, 1.0, -0.5))
        return self.emit("TENSOR", dtype, shape, shape, dtype, fill=fill)

    # -- models ------------------------------------------------------------------------------------------------------
    def norm(self) -> bool:
        mode = self.rng.choice(("RMS", "LAYER", "BATCH"))
        x = self.floats(rank=(2 if mode == "BATCH" else 1, 4), empty=False)
        if x is None:
            return False
        n = (x.shape[1] if mode == "BATCH" else x.shape[-1],)
        affine = [self.weight(T.F32, n) for _ in range(self.rng.randrange(3))]
        return self.emit("NORM", x.dtype, x.shape, x.value, *affine, mode=mode)

    def matvec(self) -> bool:
        x = self.floats(rank=(1, 3), empty=False)
        if x is None:
            return False
        k, n, transpose = x.shape[-1], self.rng.choice((1, 3, 16, 33)), self.rng.random() < 0.5
        if math.prod(x.shape[:-1]) * n > MAX_ELEMENTS:
            return False
        options: dict[str, Any] = {"act": self.rng.choice(("SILU", "RELU", "GELU"))} if self.rng.random() < 0.3 else {}
        if self.rng.random() < 0.3:
            options["bias"] = self.weight(T.F32, (n,))
        if k % 32 == 0 and self.rng.random() < 0.6:
            w = self.blocks((n, k))
            transpose, options["precision"] = True, self.rng.choice(("FP32", "INT8"))
        else:
            w = self.weight(self.rng.choice(FLOATS), (n, k) if transpose else (k, n))
        return self.emit("MATVEC", T.F32, (*x.shape[:-1], n), x.value, w, transpose=transpose, **options)

    def blocks(self, shape: tuple[int, int]) -> Value:
        """A block-quantised weight in the program's data."""
        from m3jit.ir.eager import EagerXp
        g = np.random.default_rng(self.rng.getrandbits(32))
        x = Tensor.of(g.standard_normal(shape).astype(np.float32))
        return self.p.builder.const(EagerXp().quantize(x, T.DTYPES[self.rng.choice(("Q8_0", "Q4_0", "Q4_1"))]))

    def ffn(self) -> bool:
        x = self.pick(lambda i: i.kind == "tensor" and i.dtype is T.F32 and 1 <= i.rank <= 2 and
                      0 < i.shape[-1] <= 100 and math.prod(i.shape) > 0)
        if x is None:
            return False
        d, h, o = x.shape[-1], self.rng.choice((3, 32)), self.rng.choice((2, 17))
        gate = [self.weight(T.F32, (d, h))] if self.rng.random() < 0.6 else []
        return self.emit("FFN", T.F32, (*x.shape[:-1], o), x.value, self.weight(T.F32, (d, h)),
                         self.weight(T.F32, (h, o)), *gate,
                         act=self.rng.choice(("SILU", "GELU", "GELU_TANH", "RELU", "RELU2")))

    def embed(self) -> bool:
        rows, cols, n = self.rng.choice((3, 50)), self.rng.choice((1, 32, 65)), self.rng.choice((1, 2, 7))
        table = self.weight(self.rng.choice(FLOATS), (rows, cols))
        return self.emit("EMBED", T.F32, (n, cols), self.index(rows, (n,)), table)

    def rope(self) -> bool:
        x = self.pick(lambda i: i.kind == "tensor" and i.dtype in T.FLOATS and 1 <= i.rank <= 3 and
                      i.shape[-1] % 2 == 0 and math.prod(i.shape) > 0)
        if x is None:
            return False
        pos = self.pick(lambda i: i.kind == "int" and i in self.p.inputs)
        return self.emit("ROPE", x.dtype, x.shape, x.value, pos=pos.value if pos and self.rng.random() < 0.5 else 3,
                         pairing=self.rng.choice(("NEOX", "NORM")), heads=1)

    def attention(self) -> bool:
        heads, kv, dim = self.rng.choice(((1, 1, 8), (4, 2, 8), (2, 2, 16)))
        t, n = self.rng.choice((1, 2, 5)), self.rng.choice((5, 64, 70))
        q, k, v = (self.weight(T.F32, s) for s in ((t, heads * dim), (n, kv * dim), (n, kv * dim)))
        x = self.pick(lambda i: i.kind == "tensor" and i.dtype is T.F32 and i.shape == (t, heads * dim))
        options = {"causal": self.rng.random() < 0.5, "window": self.rng.choice((0, 0, 3)),
                   "softcap": self.rng.choice((0.0, 0.0, 5.0))}
        return self.emit(self.rng.choice(("ATTN", "FLASH_ATTN")), T.F32, (t, heads * dim), x.value if x else q, k, v,
                         heads=heads, kv_heads=kv, hdim=dim, **options)

    def sparse(self) -> bool:
        q, k, v = (self.weight(T.F32, s) for s in ((3, 8), (20, 8), (20, 6)))
        return self.emit("ATTN_SPARSE", T.F32, (3, 6), q, k, v, self.rng.choice((0, 4)))

    def convolution(self) -> bool:
        groups = self.rng.choice((1, 2))
        x = self.weight(T.F32, (2, 2 * groups, 9)) if self.rng.random() < 0.5 else None
        size = (9,) if x is not None else (6, 7)
        x = x if x is not None else self.weight(T.F32, (1, 2 * groups, 6, 7))
        n = 2 if len(size) == 1 else 1
        w = self.weight(T.F32, (2 * groups, 2, *([3] * len(size))))
        stride, pad, dilation = self.rng.choice((1, 2)), self.rng.choice((0, 1)), self.rng.choice((1, 2))
        out = tuple((s + 2 * pad - dilation * 2 - 1) // stride + 1 for s in size)
        return self.emit("CONV", T.F32, (n, 2 * groups, *out), x, w, stride=stride, pad=pad, dilation=dilation,
                         groups=groups)

    # -- numbers -----------------------------------------------------------------------------------------------------
    def dim(self) -> bool:
        x = self.tensor(rank=(1, 5))
        return x is not None and self.emit("DIM", None, None, x.value, self.axis_of(x), kind="int")

    def element(self) -> bool:
        x = self.numbers(empty=False)
        return x is not None and self.emit("GETELEM", None, None, x.value, self.rng.randrange(math.prod(x.shape)),
                                           kind="float" if x.dtype.kind == "float" else "int")

    def scalars(self) -> bool:
        kind = self.rng.choice(("int", "float"))
        a, b = self.pick(lambda i: i.kind == kind), self.pick(lambda i: i.kind == kind)
        if a is None:
            return False
        integer = ("AND", "XOR", "SHL", "SAR") if kind == "int" else ()
        name = self.rng.choice(("ADDS", "SUB", "MULS", "MIN", "MAX") + integer)
        return self.emit(name, None, None, a.value, b.value, kind=kind)

    def immediate(self) -> bool:
        a = self.pick(lambda i: i.kind == "int")
        name = self.rng.choice(("ADDI", "SUBI", "MULI", "DIVI", "MODI", "ANDI", "ORI", "XORI", "SHLI", "SHRI", "SARI",
                                "MINI", "MAXI"))
        return a is not None and self.emit(name, None, None, a.value, self.rng.choice((1, 3, -7, 62)), kind="int")

    def moved(self) -> bool:
        """MOV, NEG, CVT, SELECT and RNG_SEED."""
        a, b = self.pick(lambda i: i.kind == "int"), self.pick(lambda i: i.kind == "float")
        any_ = self.pick(lambda i: True)
        if a is None or b is None:
            return False
        return self.rng.choice((
            lambda: self.emit("MOV", any_.dtype, any_.shape, any_.value, kind=any_.kind),
            lambda: self.emit("NEG", None, None, b.value, kind="float"),
            lambda: self.emit("CVT", None, None, a.value, "FLOAT", kind="float"),
            lambda: self.emit("CVT", None, None, b.value, "INT", kind="int"),
            lambda: self.emit("SELECT", None, None, a.value, b.value, b.value, kind="float"),
            lambda: self.op.RNG_SEED(seed=self.rng.choice((a.value, 77))) is None))()

    def digest(self) -> bool:
        x = self.tensor()
        return x is not None and self.emit(self.rng.choice(("HASH", "CHECKSUM")), None, None, x.value, kind="int")

    def draw(self) -> bool:
        name = self.rng.choice(("RNG_NEXT", "RNG_UNIFORM", "RNG_NORMAL"))
        return self.emit(name, None, None, kind="int" if name == "RNG_NEXT" else "float")

    def sample(self) -> bool:
        logits = self.weight(T.F32, (40,))
        temp = self.rng.choice((0.0, 0.8)) if self.mixed else 0.0
        return self.emit("SAMPLE", None, None, logits, temp=temp, topk=self.rng.choice((0, 5)), kind="int")

    # -- whole programs ----------------------------------------------------------------------------------------------
    def run(self, length: int, only: set[str] | None = None) -> Program:
        """A program of at least `length` instructions that compute values."""
        rng = self.rng
        base = self.shape(2)
        for dtype in (T.F32, T.F32, rng.choice(FLOATS), rng.choice(INTS)):
            shape = rng.choice((base, base[1:], (1, base[1]), (base[0], 1), self.shape()))
            self.input(dtype, shape)
        self.input(T.I64, None, "int")
        self.input(T.F32, None, "float")
        makers = [(w, m) for w, m in self.makers if only is None or m.__name__ in only]
        while len(self.p.opcodes) < length:
            rng.choices([m for _, m in makers], [w for w, _ in makers])[0]()
        self.p.builder.halt()
        return self.p


def generate(seed: int, length: int = 30, zero: bool = False, mixed: bool = False,
             only: set[str] | None = None) -> Program:
    """The program of a seed."""
    return Generator(seed, zero, mixed).run(length, only)
