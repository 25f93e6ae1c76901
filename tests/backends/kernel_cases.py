"""Every kernel builder with small arguments: what the executors must agree on, byte for byte.

`CASES` holds one entry per builder, format and shape of interest (0, 1, odd, more than one group); `args()` gives fresh
arguments, the same ones each time, whose output arrays hold a pattern that no kernel writes.
"""
from __future__ import annotations

from typing import Iterable

import numpy as np

from m3jit.ir.rope_frequencies import rope_frequencies
from m3jit.isa import types as T
from m3jit.isa.kv_layout import DTYPES as KV_DTYPES
from m3jit.isa.kv_layout import write
from m3jit.isa.types import DTYPES
from m3jit.kernels import (argmax, attention, conv, convert, embed, layout, lowering_elements, lowering_moves,
                           lowering_table, matmul, moves, qmatmul, quantize, recurrent, reduce, rope, routed, sample,
                           sort)
from tests.backends.case_parts import Case, blank, f32, floats, storage
from tests.backends.fused_cases import fused_cases
from tests.kernels import reference

# -- quantised and float products -------------------------------------------------------------------------------------

PACKED = [d.name for d in layout.PACKED]
ALSO = ("Q5_0", "Q5_1", "MXFP4", "Q2_K", "Q3_K", "Q5_K", "IQ4_XS", "TQ1_0", "TQ2_0")   # mostly in the sweep only


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
                       first_slice=name not in ALSO and (tokens, rows) == (1, 50) or (name, tokens) == ("Q8_0", 3),
                       slow=(tokens, rows) in ((0, 16), (1, 1), (9, 33)) or name in ALSO and rows != 17,
                       heavy=block == 256 or name in ALSO)

    def biased(rng):
        return [records(rng, 2, 64, 32), _packed(rng, "Q4_1", 35, 64), blank((2, 35)), floats(rng, 35),
                floats(rng, 2, 35), 2, 64, 35]
    yield Case("qmatmul_bias_residual", lambda: qmatmul.qmatmul("Q4_1", bias=True, residual=True), biased, slow=True)
    for gate, up in (("Q4_1", "Q4_1"), ("Q4_K", "Q6_K"), ("Q4_K", "Q4_K")):
        def make(rng, gate=gate, up=up):
            weights = [_packed(rng, gate, 21, 512), _packed(rng, up, 21, 512)]
            if len(qmatmul.gated_weights(DTYPES[gate])) == 1:
                weights = [layout.alternate(weights, 21)]
            return [records(rng, 3, 512, DTYPES[gate].block), *weights, blank((3, 21)), 3, 512, 21]
        yield Case(f"qmatmul_gated_{gate}_{up}", lambda gate=gate, up=up: qmatmul.qmatmul_gated(gate, up), make,
                   slow=gate == "Q4_K")


def weight(rng: np.random.Generator, name: str, rows: int, cols: int) -> np.ndarray:
    d = DTYPES[name]
    return reference.random_blocks(rng, d, rows, cols) if d.is_block else storage(rng, d, (rows, cols))


def _products() -> Iterable[Case]:
    for name, rows, cols in (("F32", 37, 200), ("F16", 5, 64), ("BF16", 5, 33), ("F32", 1, 1), ("Q8_0", 5, 96),
                             ("Q4_0", 5, 32), ("Q4_1", 5, 160), ("Q4_K", 3, 512), ("Q6_K", 3, 256),
                             *((name, 3, 256) for name in (*ALSO, "IQ4_NL"))):
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
                or name in ("Q4_1", "Q4_0", "Q4_K", "Q6_K", "F16", *ALSO, "IQ4_NL"),
                heavy=True,
            )
    for name, cols, outs, tokens in (("F32", 100, 37, 3), ("F16", 64, 70, 1), ("BF16", 3, 5, 5), ("F32", 130, 1, 0)):
        def make(rng, name=name, cols=cols, outs=outs, tokens=tokens):
            return [floats(rng, tokens, cols), weight(rng, name, cols, outs), blank((tokens, outs)), tokens, cols, outs]
        yield Case(f"matmul_columns_{name}_{tokens}x{outs}", lambda name=name: matmul.matmul_columns(name), make)
    for kind, tokens in ((matmul.matmul_rows, 1), (matmul.matmul_rows, 3), (matmul.matmul_columns, 2)):
        def make(rng, tokens=tokens):
            return [floats(rng, tokens, 3, 70), floats(rng, 3, 20 * 70), blank((tokens, 3, 20)), tokens, 70, 20, 3]
        yield Case(f"{kind.__name__}_grouped_{tokens}", lambda kind=kind: kind("F32", True), make, heavy=True)


def _routed() -> Iterable[Case]:
    """Choices 2, 0, 2, 1 of three matrices; two choices share a row of x, or each has its own."""
    chosen = np.array([2, 0, 2, 1], np.int64)
    for name in PACKED:
        for share in (2, 1):
            def make(rng, name=name, share=share):
                cols = 2 * DTYPES[name].block
                return [records(rng, 4 // share, cols, DTYPES[name].block), _packed(rng, name, 3 * 32, cols),
                        blank((4, 32)), 4, cols, 32, chosen, share]
            yield Case(f"routed_qmatmul_{name}_{share}", lambda name=name: routed.routed_qmatmul(name), make,
                       slow=name != "Q4_K" or share == 1, heavy=True)
    for name, rows, cols in (("F32", 37, 70), ("BF16", 16, 64), ("Q8_0", 5, 96)):
        for share in (2, 1):
            def make(rng, name=name, rows=rows, cols=cols, share=share):
                return [floats(rng, 4 // share, cols), weight(rng, name, 3 * rows, cols), blank((4, rows)), 4, cols,
                        rows, chosen, share]
            yield Case(f"routed_matmul_{name}_{share}", lambda name=name: routed.routed_matmul(name), make,
                       slow=name != "F32", heavy=True)


# -- rows, positions, attention ---------------------------------------------------------------------------------------

def _rows() -> Iterable[Case]:
    for name in ("F32", "F16", "BF16", *PACKED):
        cols = 1280 if DTYPES[name].is_block else 1100

        def make(rng, name=name, cols=cols):
            return [np.array([2, 0, 2], np.int64), weight(rng, name, 3, cols), blank((3, cols)), 3, cols]
        yield Case(f"embed_{name}", lambda name=name: embed.embed(name), make,
                   slow=name in ("Q4_0", "Q6_K", "F16", "IQ4_NL", *ALSO) and name != "TQ1_0", heavy=name == "TQ1_0")
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


def _elements() -> Iterable[Case]:
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
        yield Case(f"fill_{memory}", lambda memory=memory: lowering_table.fill_kernel(memory), make)
    yield Case("rows_i32", lambda: lowering_moves.rows_kernel("i32"),
               lambda rng: [rng.integers(-9, 9, 5000).astype(np.int32), blank(4100, np.int32), 700, 4100], slow=True)
    for last in (3, 5):
        def make(rng, last=last):
            return [np.array([0, 4, 2, last], np.int64), blank(1, np.int32), 4, 5]
        yield Case(f"in_bounds_{last}", lambda: lowering_elements.in_bounds_kernel("i64"), make)


def pages(rng: np.random.Generator, g: attention.Geometry, keys: int) -> list[np.ndarray]:
    """Key/value pages of finite numbers in a shuffled pool, and their table.  (What attn_blocks leaves in `partial` is
    not visible to a program: with NaNs about, their payloads there may differ.)"""
    count, size = -(-keys // 64) + 1, g.page_bytes
    end = -(-count * size // 8) * 8                       # of the pages; the leaves of their table lie behind them
    pool = np.zeros(end + 8 * (count - 1), np.uint8)
    for i in range(count):                                # rows as a stream stores them
        rows = (floats(rng, 64, g.kv_heads, dim, special=False) for dim in (g.head_dim, g.value_dim))
        write(pool[i * size:(i + 1) * size], g.layout, KV_DTYPES[g.dtype], 0, *rows)
    leaves, top = attention.leaf_tables(rng.permutation(count)[:count - 1] * size, end)
    pool[end:] = leaves.view(np.uint8)
    return [pool] if g.dense else [pool, top]


def _attention() -> Iterable[Case]:
    G = attention.Geometry
    for g, tokens, past, window, slow in ((G(3, 1, 8), 1, 70, 0, False), (G(3, 1, 8), 5, 62, 0, False),
                                          (G(2, 2, 20, "F32", dense=True), 1, 65, 9, False),
                                          (G(2, 2, 20, "F32", dense=True), 3, 3, 2, True),
                                          (G(4, 1, 70, value_dim=66, shared=True), 1, 70, 0, False),
                                          (G(2, 1, 9, value_dim=5, shared=True), 5, 62, 0, False),
                                          (G(2, 1, 66, "Q8_0", value_dim=40), 1, 65, 0, False),
                                          (G(2, 2, 40, "Q8_0"), 3, 64, 0, True),
                                          (G(4, 1, 40, "Q8_0", value_dim=33, shared=True), 2, 66, 0, True),
                                          (G(3, 1, 6, "F32", dense=True, value_dim=3, shared=True), 1, 5, 0, True),
                                          (G(3, 1, 6, "F32", dense=True, value_dim=9), 2, 5, 0, True),
                                          (G(2, 1, 5, "BF16", causal=False, softcap=True), 1, 64, 0, True),
                                          (G(2, 1, 5, "BF16", causal=False, softcap=True), 2, 64, 0, True)):
        keys = past + tokens
        tail = [tokens, past, keys, window or attention.NO_WINDOW]
        scale = [0.3] + ([5.0] if g.softcap else [])

        def append(rng, g=g, tokens=tokens, past=past, keys=keys):
            v = [] if g.shared else [floats(rng, tokens, g.kv_heads * g.value_dim)]
            return [floats(rng, tokens, g.kv_heads * g.head_dim), *v, *pages(rng, g, keys), tokens, past]
        yield Case(
            f"kv_append_{g.name}_{tokens}",
            lambda g=g: attention.kv_append(g),
            append,
            slow=slow,
        )

        def blocks(rng, g=g, tokens=tokens, keys=keys, tail=tail, scale=scale):
            partial = blank(max(attention.partial_floats(tokens, keys, g.heads, g.value_dim), 1))
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
            partial = floats(rng, max(attention.partial_floats(tokens, keys, g.heads, g.value_dim), 1), special=False)
            return [partial, blank((tokens, g.heads * g.value_dim)), *tail]
        yield Case(f"attn_combine_{g.name}_{tokens}", lambda g=g: attention.attn_combine(g), combine,
                   slow=slow or tokens > 1)

        def rows(rng, g=g, tokens=tokens, keys=keys, tail=tail, scale=scale):
            return [floats(rng, tokens, g.heads * g.head_dim, special=False), *pages(rng, g, keys),
                    blank((tokens, g.heads * g.value_dim)), *tail, *scale]
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


def _columns() -> Iterable[Case]:
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


def _draws() -> Iterable[Case]:
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


# -- recurrences ------------------------------------------------------------------------------------------------------

def _recurrences() -> Iterable[Case]:
    for taps, bias, tokens in ((4, True, 5), (1, False, 2), (2, True, 0)):
        def convolution(rng, taps=taps, bias=bias, tokens=tokens):
            return [floats(rng, tokens, 21), floats(rng, 21, taps, special=False), *([floats(rng, 21)] if bias else []),
                    floats(rng, taps - 1, 21), blank((tokens, 21)), blank((taps - 1, 21)), tokens, 21]
        yield Case(f"causal_conv_{taps}_{tokens}", lambda t=taps, b=bias: recurrent.causal_conv(t, b), convolution,
                   slow=taps == 2)
    for n, heads, skip, packed, tokens, slow in (
            (3, False, "channel", True, 4, False), (20, True, "head", False, 3, False),
            (4, True, "channel", False, 2, False), (5, False, "", False, 1, True),
            (34, False, "channel", True, 2, True), (3, True, "", False, 0, True)):
        def scan(rng, n=n, heads=heads, skip=skip, packed=packed, tokens=tokens):
            runs, length = 4, 19                        # two tiles a run
            dt = floats(rng, tokens, runs if heads else runs * length, special=False)
            shape = (tokens, runs) if heads else (8, n, 16) if packed else (runs * length, n)
            a = floats(rng, *shape) if heads else -abs(floats(rng, *shape))
            d = [floats(rng, runs if skip == "head" else runs * length)] if skip else []
            return [floats(rng, 8, n, 16), floats(rng, tokens, runs * length), dt, a, floats(rng, tokens, 2 * n),
                    floats(rng, tokens, 2 * n), *d, blank((tokens, runs * length)), blank((8, n, 16)),
                    tokens, runs, length, 2]
        yield Case(f"scan_{n}_{heads}_{skip}_{tokens}", lambda k=(n, heads, skip, packed): recurrent.scan(*k), scan,
                   slow=slow, heavy=n > 16 and not heads)


CASES: list[Case] = [*fused_cases(), *_quantised(), *_products(), *_routed(), *_rows(), *_elements(),
                     *_attention(), *_moves(), *_columns(), *_searches(), *_draws(), *_recurrences()]
