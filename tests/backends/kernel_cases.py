"""Every kernel builder with small arguments: what the executors must agree on, byte for byte.

`CASES` holds one entry per builder, format and shape of interest (0, 1, odd, more than one group); `args()` gives fresh
arguments, the same ones each time, whose output arrays hold a pattern that no kernel writes.
"""
from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Sequence

import numpy as np

from m3jit.ir.loop import Kernel
from m3jit.ir.passes.fuse import Group, fuse
from m3jit.ir.rope_frequencies import rope_frequencies
from m3jit.ir.tensor import Block, Function, Leave, Node, TensorType
from m3jit.isa import types as T
from m3jit.isa.types import DTYPES
from m3jit.kernels import (argmax, attention, conv, convert, embed, fused, layout, lowering, matmul, moves, qmatmul,
                           quantize, reduce, rope, sample, sort)
from tests.kernels import reference

f32 = np.float32
SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-42, 3.4e38, -1.0, 88.8, -104.0, 0.5, 1.5], f32)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], Kernel]
    make: Callable[[np.random.Generator], list[Any]]
    first_slice: bool = False                # one of what OpenCL and PTX have to run
    slow: bool = False                       # in the sweep only
    heavy: bool = False                      # numba takes seconds to compile it: in the sweep only

    @property
    def kernel(self) -> Kernel:
        return self.build()

    def args(self) -> list[Any]:
        return self.make(np.random.default_rng(zlib.crc32(self.name.encode())))


def blank(shape: Any, dtype: Any = f32) -> np.ndarray:
    """An output array filled with bytes 0xA5."""
    return np.frombuffer(bytes([0xA5]) * (int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape).copy()


def floats(rng: np.random.Generator, *shape: int, special: bool = True) -> np.ndarray:
    x = (rng.normal(0, 1, shape) * 2.0 ** rng.integers(-3, 4, shape)).astype(f32)
    if special and x.size > 1:
        flat = x.reshape(-1)
        at = rng.choice(flat.size, min(len(SPECIAL), flat.size // 2), replace=False)
        flat[at] = SPECIAL[:len(at)]
    return x


# -- fused groups ---------------------------------------------------------------------------------------------------

class Graph:
    """A few tensor-IR nodes that fuse into one group, and its arguments."""

    def __init__(self, *shape: int):
        self.shape, self.inputs, self.body = shape, [], []

    def input(self, dtype: T.DType, *shape: int) -> Node:
        n = Node("input", TensorType(dtype, shape or self.shape))
        self.inputs.append(n)
        return n

    def imm(self, dtype: T.DType, value: float) -> Node:
        return Node("imm", TensorType(dtype, (1,) * len(self.shape)), [], {"value": value})

    def scalar(self, dtype: T.DType, value: float) -> Node:
        return Node("from_scalar", TensorType(dtype, (1,) * len(self.shape)), [], {"value": value})

    def op(self, name: str, *args: Node, dtype: T.DType | None = None, **attrs: Any) -> Node:
        first = args[1] if name == "select" else args[0]
        shape = tuple(np.broadcast_shapes(*(a.shape for a in args)))
        if name == "reduce":
            shape = (*args[0].shape[:-1], 1)
            attrs["axis"] = len(shape) - 1
        n = Node(name, TensorType(dtype or (T.BOOL if name in ("lt", "le", "eq", "ne", "logical_not") else first.dtype),
                                  shape), list(args), attrs)
        self.body.append(n)
        return n

    def group(self, *outputs: Node) -> Group:
        block = Block("b", 0, body=list(self.body), end=Leave(0, dict(enumerate(outputs))))
        fuse(Function("f", 0, [block], {}, [], {}))
        groups = [g for g in block.body if isinstance(g, Group)]
        assert len(groups) == 1, f"{len(groups)} groups"
        return groups[0]


def storage(rng: np.random.Generator, dtype: T.DType, shape: Sequence[int], special: bool = True) -> np.ndarray:
    if dtype is T.BF16:
        return (floats(rng, *shape, special=special).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.kind == "float":
        with np.errstate(over="ignore"):
            return floats(rng, *shape, special=special).astype(dtype.numpy)
    if dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    info = np.iinfo(dtype.numpy)
    return rng.integers(info.min, info.max, shape, dtype.numpy, endpoint=True)


def group_case(
    name: str, describe: Callable[[Graph], Iterable[Node]], shape: Sequence[int], slow: bool = False
) -> Case:
    g = Graph(*shape)
    group = g.group(*describe(g))

    def make(rng: np.random.Generator) -> list[Any]:
        args: list[Any] = [storage(rng, n.dtype, n.shape) for n, _ in group.inputs]
        args += [blank(n.shape or (1,), n.dtype.numpy) for n in group.outputs]
        args += [int(np.prod(shape))] if group.flat else [int(np.prod(shape[:-1])), shape[-1]]
        return args + [s.attrs["value"] for s in group.scalars]
    title = f"fused_{name}_{'x'.join(map(str, shape))}"
    return Case(title, lambda: fused.build(group, f"fused_{name}"), make, first_slice=True, slow=slow)


def chain(g: Graph) -> list[Node]:
    """Ten elementwise operations with two uniform operands."""
    x, y, one = g.input(T.F32), g.input(T.F32), g.input(T.F32, *(1 for _ in g.shape))
    k = g.scalar(T.F32, 1.75)
    a = g.op("add", g.op("mul", x, k), y)
    b = g.op("fma", a, x, one)
    c = g.op("select", g.op("lt", a, b), g.op("abs", b), g.op("neg", a))
    d = g.op("div", c, g.op("sqrt", g.op("abs", a)))
    return [g.op("maximum", g.op("minimum", d, x), g.imm(T.F32, -0.5)), g.op("rint", c)]


def functions(g: Graph) -> list[Node]:
    x = g.op("neg", g.input(T.F32))
    return [g.op(name, x) for name in ("exp", "log", "sin", "cos", "tanh", "erf", "sigmoid")]


def softmax(g: Graph) -> list[Node]:
    x = g.op("abs", g.input(T.F32))
    e = g.op("exp", g.op("sub", x, g.op("reduce", x, op="MAX")))
    return [g.op("div", e, g.op("reduce", e, op="SUM"))]


def rms_norm(g: Graph) -> list[Node]:
    x, w = g.input(T.F32), g.input(T.F32, *(1 for _ in g.shape[:-1]), g.shape[-1])
    mean = g.op("mul", g.op("reduce", g.op("mul", x, x), op="SUM"), g.imm(T.F32, 1.0 / max(g.shape[-1], 1)))
    scale = g.op("div", g.imm(T.F32, 1.0), g.op("sqrt", g.op("add", mean, g.imm(T.F32, 1e-5))))
    return [g.op("mul", g.op("mul", x, scale), w)]


def float_reductions(g: Graph) -> list[Node]:
    x = g.op("neg", g.input(T.F32))
    return [g.op("reduce", x, op=op) for op in ("SUM", "PROD", "MAX", "MIN")]


def row_operands(g: Graph) -> list[Node]:
    x, row, col = g.input(T.F32), g.input(T.F32, 1, g.shape[-1]), g.input(T.F32, g.shape[0], 1)
    return [g.op("sub", g.op("mul", x, col), row)]


def single(name: str, dtype: T.DType, count: int = 1, result: T.DType | None = None, **attrs: Any):
    def describe(g: Graph) -> list[Node]:
        return [g.op(name, *(g.input(dtype) for _ in range(count)), dtype=result, **attrs)]
    return describe


def integers(g: Graph) -> list[Node]:
    a, b = g.input(T.I32), g.input(T.I32)
    d = g.op("sub", a, b)
    s = g.op("add", g.op("mul", d, b), g.op("abs", d))
    return [g.op("maximum", s, g.op("neg", d)), g.op("cast", s, dtype=T.F32), g.op("cast", d, dtype=T.I64)]


def _fused() -> Iterable[Case]:
    for shape in ((0,), (1,), (63,), (64, 65), (4097,)):
        yield group_case("chain", chain, shape)
        yield group_case("integers", integers, shape, slow=shape not in ((63,), (4097,)))
    yield group_case("functions", functions, (333,))
    for shape in ((1, 1), (2, 63), (3, 64), (5, 200)):
        for describe in (softmax, rms_norm, float_reductions, row_operands):
            yield group_case(describe.__name__, describe, shape, slow=shape in ((1, 1), (3, 64)))
    yield group_case("float_reductions", float_reductions, (3, 0))
    yield group_case("float_reductions", float_reductions, (0, 5))
    for dtype in (T.F16, T.BF16, T.I8, T.U8, T.I16, T.I64):
        n = dtype.name.lower()
        yield group_case(f"add_{n}", single("add", dtype, 2), (70,))
        yield group_case(f"max_{n}", single("reduce", dtype, op="MAX"), (3, 70))
        yield group_case(f"sum_{n}", single("reduce", dtype, op="SUM",
                                            result=T.I64 if dtype.kind == "int" else dtype), (3, 70))
        yield group_case(f"from_f32_{n}", single("cast", T.F32, result=dtype), (200,))
        yield group_case(f"to_f32_{n}", single("cast", dtype, result=T.F32), (70,))
    yield group_case("to_bool", single("cast", T.F32, result=T.BOOL), (70,))
    yield group_case("not", single("logical_not", T.BOOL), (70,))


# -- quantised and float products -------------------------------------------------------------------------------------

PACKED = [d.name for d in layout.PACKED]


def records(rng: np.random.Generator, rows: int, cols: int, block: int) -> np.ndarray:
    """Activation records of random rows, made by the NumPy evaluator."""
    from tests.loop_eval import run_kernel
    out = np.zeros(quantize.activation_bytes(rows, cols, block), np.uint8)
    run_kernel(quantize.quantize_activation(block), [floats(rng, rows, cols, special=False), out, rows * cols // block])
    return out


def _packed(rng: np.random.Generator, name: str, rows: int, cols: int) -> np.ndarray:
    d = DTYPES[name]
    return layout.repack(d, reference.random_blocks(rng, d, rows, cols), rows, cols)


def _quantised() -> Iterable[Case]:
    for block in (32, 256):
        for rows in (0, 1, 3):
            def make(rng, rows=rows, block=block):
                return [
                    floats(rng, rows, 2 * block),
                    blank(quantize.activation_bytes(rows, 2 * block, block), np.uint8),
                    2 * rows,
                ]
            yield Case(f"quantize_activation_{block}_{rows}", lambda block=block: quantize.quantize_activation(block),
                       make, first_slice=True, slow=rows == 1)

            def make(rng, rows=rows, block=block):
                return [floats(rng, rows, 2 * block), blank((rows, 2 * block), np.int8), blank((rows, 2)), 2 * rows]
            yield Case(f"quantize_rows_{block}_{rows}", lambda block=block: quantize.quantize_rows(block), make,
                       first_slice=True, slow=rows < 3)
    for name in PACKED:
        block = DTYPES[name].block
        for tokens, rows in ((0, 16), (1, 1), (1, 50), (3, 17), (9, 33)):
            def make(rng, name=name, block=block, tokens=tokens, rows=rows):
                return [records(rng, tokens, 2 * block, block), _packed(rng, name, rows, 2 * block),
                        blank((tokens, rows)), tokens, 2 * block, rows]
            yield Case(f"qmatmul_{name}_{tokens}x{rows}", lambda name=name: qmatmul.qmatmul(name), make,
                       first_slice=(tokens, rows) == (1, 50) or (name, tokens) == ("Q8_0", 3),
                       slow=(tokens, rows) in ((0, 16), (1, 1), (9, 33)), heavy=block == 256)

    def biased(rng):
        return [records(rng, 2, 64, 32), _packed(rng, "Q4_1", 35, 64), blank((2, 35)), floats(rng, 35),
                floats(rng, 2, 35), 2, 64, 35]
    yield Case("qmatmul_bias_residual", lambda: qmatmul.qmatmul("Q4_1", bias=True, residual=True), biased, slow=True)
    for gate, up in (("Q4_1", "Q4_1"), ("Q4_K", "Q6_K")):
        def make(rng, gate=gate, up=up):
            return [records(rng, 3, 512, DTYPES[gate].block), _packed(rng, gate, 21, 512), _packed(rng, up, 21, 512),
                    blank((3, 21)), 3, 512, 21]
        yield Case(f"qmatmul_gated_{gate}_{up}", lambda gate=gate, up=up: qmatmul.qmatmul_gated(gate, up), make,
                   slow=gate == "Q4_K")


def weight(rng: np.random.Generator, name: str, rows: int, cols: int) -> np.ndarray:
    d = DTYPES[name]
    return reference.random_blocks(rng, d, rows, cols) if d.is_block else storage(rng, d, (rows, cols))


def _products() -> Iterable[Case]:
    for name, rows, cols in (("F32", 37, 200), ("F16", 5, 64), ("BF16", 5, 33), ("F32", 1, 1), ("Q8_0", 5, 96),
                             ("Q4_0", 5, 32), ("Q4_1", 5, 160), ("Q4_K", 3, 512), ("Q6_K", 3, 256)):
        for tokens in (0, 1, 3, 9):
            def make(rng, name=name, rows=rows, cols=cols, tokens=tokens):
                return [floats(rng, tokens, cols), weight(rng, name, rows, cols), blank((tokens, rows)), tokens, cols,
                        rows]
            yield Case(
                f"matmul_rows_{name}_{tokens}x{rows}x{cols}",
                lambda name=name: matmul.matmul_rows(name),
                make,
                slow=tokens in (0, 9)
                or DTYPES[name].is_block
                and tokens == 3
                or name in ("Q4_1", "Q4_0", "Q4_K", "Q6_K", "F16"),
                heavy=True,
            )
    for name, cols, outs, tokens in (("F32", 100, 37, 3), ("F16", 64, 70, 1), ("BF16", 3, 5, 5), ("F32", 130, 1, 0)):
        def make(rng, name=name, cols=cols, outs=outs, tokens=tokens):
            return [floats(rng, tokens, cols), weight(rng, name, cols, outs), blank((tokens, outs)), tokens, cols, outs]
        yield Case(f"matmul_columns_{name}_{tokens}x{outs}", lambda name=name: matmul.matmul_columns(name), make)


# -- rows, positions, attention ---------------------------------------------------------------------------------------

def _rows() -> Iterable[Case]:
    for name in ("F32", "F16", "BF16", *PACKED):
        cols = 1280 if DTYPES[name].is_block else 1100

        def make(rng, name=name, cols=cols):
            return [np.array([2, 0, 2], np.int64), weight(rng, name, 3, cols), blank((3, cols)), 3, cols]
        yield Case(f"embed_{name}", lambda name=name: embed.embed(name), make, slow=name in ("Q4_0", "Q6_K", "F16"))
    for name in PACKED:
        def make(rng, name=name):
            return [weight(rng, name, 3, 2048), blank((3, 2048)), 3 * 2048]
        yield Case(f"dequantize_{name}", lambda name=name: embed.dequantize(name), make, slow=name != "Q4_K")

    def ids32(rng):
        return [np.array([1], np.int32), weight(rng, "F32", 3, 7), blank((1, 7)), 1, 7]
    yield Case("embed_i32", lambda: embed.embed("F32", "i32"), ids32)
    for dim, heads, pos, pairing, tokens in ((64, 3, 5, "NEOX", 2), (64, 3, 5, "NORM", 2), (6, 1, 10 ** 9, "NORM", 3),
                                             (80, 2, 131071, "NEOX", 1), (2, 2, 0, "NEOX", 0)):
        def make(rng, dim=dim, heads=heads, pos=pos, tokens=tokens):
            return [
                floats(rng, tokens, heads * dim),
                rope_frequencies(10000.0, dim),
                blank((tokens, heads * dim)),
                tokens,
                heads,
                pos,
            ]
        yield Case(f"rope_{dim}_{pairing}_{tokens}", lambda dim=dim, pairing=pairing: rope.rope(dim, pairing), make,
                   slow=dim == 64 and pairing == "NORM")

    def factors(rng):
        return [
            floats(rng, 2, 24),
            rope_frequencies(5e5, 24),
            rng.uniform(0.5, 8, 12).astype(f32),
            blank((2, 24)),
            2,
            1,
            3,
        ]
    yield Case("rope_factors", lambda: rope.rope(24, "NEOX", factors=True), factors)
    for memory, dtype in (("f32", T.F32), ("f16", T.F16), ("i8", T.I8), ("i64", T.I64)):
        def make(rng, dtype=dtype):
            return [storage(rng, dtype, (3, 130)), blank(3, np.int64), 3, 130]
        yield Case(f"argmax_rows_{memory}", lambda memory=memory: argmax.argmax_rows(memory), make)

        def make(rng, dtype=dtype):
            return [storage(rng, dtype, (2, 9, 70)), blank((2, 70), np.int64), 2, 9, 70]
        yield Case(f"argmax_columns_{memory}", lambda memory=memory: argmax.argmax_columns(memory), make)
    for memory, dtype, value in (
        ("f32", f32, 1.5),
        ("f16", np.float16, -2.0),
        ("i8", np.int8, 300),
        ("i64", np.int64, -3),
    ):
        def make(rng, dtype=dtype, value=value):
            return [blank(4099, dtype), 4099, value]
        yield Case(f"fill_{memory}", lambda memory=memory: lowering.fill_kernel(memory), make)
    yield Case("rows_i32", lambda: lowering.rows_kernel("i32"),
               lambda rng: [rng.integers(-9, 9, 5000).astype(np.int32), blank(4100, np.int32), 700, 4100], slow=True)
    for last in (3, 5):
        def make(rng, last=last):
            return [np.array([0, 4, 2, last], np.int64), blank(1, np.int32), 4, 5]
        yield Case(f"in_bounds_{last}", lambda: lowering.in_bounds_kernel("i64"), make)


def pages(rng: np.random.Generator, g: attention.Geometry, keys: int) -> list[np.ndarray]:
    """Key/value pages of finite numbers in a shuffled pool, and their table.  (What attn_blocks leaves in `partial` is
    not visible to a program: with NaNs about, their payloads there may differ.)"""
    count, size = -(-keys // 64) + 1, attention.page_bytes(g.dtype, g.kv_heads, g.head_dim)
    values = storage(rng, DTYPES[g.dtype], (count, size // DTYPES[g.dtype].nbytes), special=False)
    pool = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return [pool] if g.dense else [pool, (rng.permutation(count)[:count - 1] * size).astype(np.int64)]


def _attention() -> Iterable[Case]:
    G = attention.Geometry
    for g, tokens, past, window, slow in ((G(3, 1, 8), 1, 70, 0, False), (G(3, 1, 8), 5, 62, 0, False),
                                          (G(2, 2, 20, "F32", dense=True), 1, 65, 9, False),
                                          (G(2, 2, 20, "F32", dense=True), 3, 3, 2, True),
                                          (G(2, 1, 5, "BF16", causal=False, softcap=True), 1, 64, 0, True),
                                          (G(2, 1, 5, "BF16", causal=False, softcap=True), 2, 64, 0, True)):
        keys = past + tokens
        tail = [tokens, past, keys, window or attention.NO_WINDOW]
        scale = [0.3] + ([5.0] if g.softcap else [])

        def append(rng, g=g, tokens=tokens, past=past, keys=keys):
            return [floats(rng, tokens, g.kv_heads * g.head_dim), floats(rng, tokens, g.kv_heads * g.head_dim),
                    *pages(rng, g, keys), tokens, past]
        yield Case(
            f"kv_append_{g.name}_{tokens}",
            lambda g=g: attention.kv_append(g.kv_heads, g.head_dim, g.dtype, g.dense),
            append,
            slow=slow,
        )

        def blocks(rng, g=g, tokens=tokens, keys=keys, tail=tail, scale=scale):
            partial = blank(max(attention.partial_floats(tokens, keys, g.heads, g.head_dim), 1))
            return [
                floats(rng, tokens, g.heads * g.head_dim, special=False),
                *pages(rng, g, keys),
                partial,
                *tail,
                *scale,
            ]
        yield Case(
            f"attn_blocks_{g.name}_{tokens}", lambda g=g: attention.attn_blocks(g), blocks, slow=slow or tokens > 1
        )

        def combine(rng, g=g, tokens=tokens, keys=keys, tail=tail):
            partial = floats(rng, max(attention.partial_floats(tokens, keys, g.heads, g.head_dim), 1), special=False)
            return [partial, blank((tokens, g.heads * g.head_dim)), *tail]
        yield Case(f"attn_combine_{g.name}_{tokens}", lambda g=g: attention.attn_combine(g), combine,
                   slow=slow or tokens > 1)

        def rows(rng, g=g, tokens=tokens, keys=keys, tail=tail, scale=scale):
            return [floats(rng, tokens, g.heads * g.head_dim, special=False), *pages(rng, g, keys),
                    blank((tokens, g.heads * g.head_dim)), *tail, *scale]
        yield Case(f"attn_rows_{g.name}_{tokens}", lambda g=g: attention.attn_rows(g), rows, slow=slow or tokens == 1)


# -- moves, sorting, convolution, sampling ----------------------------------------------------------------------------

def _moves() -> Iterable[Case]:
    for width, dtype in ((1, np.uint8), (2, np.float16), (4, np.int32), (8, np.int64)):
        def transposed(rng, dtype=dtype):
            x = rng.integers(0, 200, (70, 130)).astype(dtype)
            return [x, blank((130, 70), dtype), 1, 1, 1, 130, 70, 0, 0, 0, 1, 130, 0, 0, 0, 70, 0, 0]
        yield Case(f"strided_copy_{width}", lambda width=width: moves.strided_copy(width), transposed, slow=width == 2)

        def steps(rng, dtype=dtype):
            x = rng.integers(0, 200, 300).astype(dtype)
            return [x, blank((2, 40), dtype), 1, 1, 1, 2, 40, 0, 0, 0, 100, -2, 0, 0, 0, 40, 190, 0]
        yield Case(f"strided_copy_back_{width}", lambda width=width: moves.strided_copy(width), steps, slow=True)
        for inner in (3, 70):
            def gather(rng, dtype=dtype, inner=inner):
                return [
                    rng.integers(0, 99, (2, 9, inner)).astype(dtype),
                    rng.integers(0, 9, 67),
                    blank((2, 67, inner), dtype),
                    2,
                    9,
                    67,
                    inner,
                ]
            yield Case(f"gather_{width}_{inner}", lambda width=width: moves.gather(width), gather, slow=width != 4)
    for memory, dtype in (("f32", T.F32), ("i8", T.I8), ("i64", T.I64)):
        for mode in ("ADD", "MAX"):
            def scatter(rng, dtype=dtype):
                return [
                    storage(rng, dtype, (2, 5, 70)),
                    rng.integers(0, 5, 11),
                    storage(rng, dtype, (2, 11, 70)),
                    2,
                    5,
                    11,
                    70,
                ]
            yield Case(
                f"scatter_{mode}_{memory}",
                lambda memory=memory, mode=mode: moves.scatter(memory, mode),
                scatter,
                slow=memory == "i8",
            )
    for source, target in (("f32", "f16"), ("f32", "bf16"), ("f16", "f32"), ("bf16", "f32")):
        def float_copy(rng, source=source, target=target):
            types = {"f32": T.F32, "f16": T.F16, "bf16": T.BF16}
            return [storage(rng, types[source], (4100,)), blank(4100, types[target].numpy), 4100]
        yield Case(f"float_copy_{source}_{target}", lambda s=source, t=target: moves.float_copy(s, t), float_copy)
    for name in convert.TYPES:
        def quantize_rows(rng, name=name):
            return [floats(rng, 5, 32), blank(5 * DTYPES[name].nbytes, np.uint8), blank(5, np.uint8), 5]
        yield Case(f"quantize_{name}", lambda name=name: convert.quantize(name), quantize_rows)
    for op in reduce.OPS:
        for memory, dtype in (("f32", T.F32), ("f16", T.F16), ("u8", T.U8), ("i64", T.I64)):
            def columns(rng, op=op, dtype=dtype):
                target = dtype if dtype.kind == "float" or op in ("MAX", "MIN") else T.I64
                return [storage(rng, dtype, (2, 130, 20)), blank((2, 20), target.numpy), 2, 130, 20]
            yield Case(
                f"reduce_columns_{op}_{memory}",
                lambda memory=memory, op=op: reduce.reduce_columns(memory, op),
                columns,
                slow=(op, memory) not in (("SUM", "f32"), ("MAX", "f16"), ("SUM", "u8"), ("MIN", "i64")),
            )


def _searches() -> Iterable[Case]:
    for memory, dtype in (("f32", T.F32), ("i8", T.I8), ("i64", T.I64), ("bf16", T.BF16)):
        for descending in (False, True):
            def sorted_rows(rng, memory=memory, dtype=dtype):
                return [storage(rng, dtype, (2, 33)), blank((2, 33), dtype.numpy), blank((2, 33), np.int64),
                        blank(sort.work_bytes(memory, 2, 33), np.uint8), 2, 33]
            yield Case(f"sort_{memory}_{descending}", lambda m=memory, d=descending: sort.sort_rows(m, d), sorted_rows,
                       slow=descending or memory == "bf16")

            def top(rng, memory=memory, dtype=dtype):
                return [storage(rng, dtype, (2, 33)), blank((2, 5), dtype.numpy), blank((2, 5), np.int64),
                        blank(sort.work_bytes(memory, 2, 33), np.uint8), 2, 33, 5]
            yield Case(
                f"topk_{memory}_{descending}",
                lambda m=memory, d=descending: sort.topk_rows(m, d, ordered=not d),
                top,
                slow=not descending or memory != "f32",
            )
    for bias in (False, True):
        def convolution(rng, bias=bias):
            x, w = floats(rng, 2, 4, 7, 70), floats(rng, 6, 2, 3, 3, special=False)
            return [
                x,
                w,
                *([floats(rng, 6)] if bias else []),
                blank((2, 6, 4, 37)),
                2,
                4,
                7,
                70,
                6,
                3,
                3,
                4,
                37,
                2,
                2,
                1,
                3,
                1,
                1,
                2,
            ]
        yield Case(f"conv_{bias}", lambda bias=bias: conv.conv(bias), convolution, slow=not bias)
    for top_k, temperature, top_p, min_p in ((0, 1.0, 1.0, 0.0), (5, 0.8, 0.9, 0.05), (1, 0.0, 1.0, 0.0)):
        def draw(rng, options=(top_k, temperature), limits=(top_p, min_p)):
            return [
                floats(rng, 90, special=False),
                blank(sample.work_bytes(90), np.uint8),
                blank(3, np.int64),
                90,
                12345,
                *options,
                *limits,
            ]
        yield Case(f"sample_{top_k}", lambda: sample.sample(sample.Operands()), draw, slow=top_k != 5)

    def penalised(rng):
        return [floats(rng, 90, special=False), rng.integers(0, 90, 12), rng.integers(0, 2, 90).astype(bool),
                blank(sample.work_bytes(90), np.uint8), blank(3, np.int64), 90, 12, 8, 777, 20, 0.7, 1.3, 0.95, 0.0]
    yield Case(
        "sample_history_mask", lambda: sample.sample(sample.Operands("f32", "i64", "bool")), penalised, slow=True
    )


CASES: list[Case] = [*_fused(), *_quantised(), *_products(), *_rows(), *_attention(), *_moves(), *_searches()]
