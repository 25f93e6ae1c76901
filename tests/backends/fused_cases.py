"""Cases of `m3jit.kernels.fused`: small groups of tensor-IR nodes, one kernel each."""
from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import numpy as np

from m3jit.ir.passes.fuse import Group, fuse
from m3jit.ir.tensor import Block, Function, Leave, Node, TensorType
from m3jit.isa import types as T
from m3jit.kernels import fused
from tests.backends.case_parts import Case, blank, storage


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
    return [g.op(name, x) for name in ("exp", "log", "sin", "cos", "tanh", "erf", "sigmoid", "softplus")]


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


def fused_cases() -> Iterable[Case]:
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
