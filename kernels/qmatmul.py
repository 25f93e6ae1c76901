"""y [T, N] = quantised x [T, K] times w [N, K] transposed, w a block type in layout R16.

Value of each output (f32; acc from +0, blocks of the row in order; isum, msum and S = sum q exact int32; dx the
activation block's scale; d, codes c, integer scales s_j and mins m_j of the sub-blocks as in `m3jit/ir/eager_blocks`):
    Q8_0 Q4_0 Q5_0 IQ4_NL MXFP4  u = d dx; acc = fma(u, f32(isum), acc)                       isum = sum q c
    Q4_1 Q5_1                    u = fma(d, f32(isum), m f32(S)); acc = fma(dx, u, acc)
    Q3_K Q6_K IQ4_XS             acc = fma(dx, d f32(isum), acc)                              isum = sum_j s_j sum q c
    TQ1_0 TQ2_0                  the same with one s_j = 1
    Q2_K Q4_K Q5_K               u = fma(d, f32(isum), -(dmin f32(msum))); acc = fma(dx, u, acc)
                                 msum = sum_j m_j sum q

Schedule: 16 lanes = 16 weight rows; 4 bytes of one token's activation are broadcast into dot4, so nothing is summed
across lanes; codes are unpacked on the fly.  The 32-element formats take two tiles of rows at once, half the matrix
apart (two far streams of memory are faster than one or two near ones), for 4, then 2, then 1 tokens: 2 x 4 sums, a
token's bytes loaded once for both (Zen 5, one thread, K = 2048, GOP/s: 1 x 8 537-650, 2 x 4 705-760, 2 x 8 680-705,
4 x 4 720-750).  Q8_0, which has nothing to unpack, begins with 8 (2 x 8 for 2 x 4: 8 tokens 577 for 409, 64 tokens 663
for 629).  K-quants, which do more work per vector of weights, take one tile at a time for 8, 4, 2, 1 tokens
(1 x 8 600-650 and 460, 2 x 4 575 and 390 for Q4_K and Q6_K).
"""
from __future__ import annotations

import functools
from typing import Callable, Sequence

from m3jit.ir import scalar_math
from m3jit.ir.loop import Buffer, Kernel, Value
from m3jit.ir.loop_builder import Builder
from m3jit.isa.types import DType, DTYPES
from m3jit.kernels import layout, qmatmul_32, qmatmul_256
from m3jit.kernels.quantize import RECORD_BYTES

TOKEN_TILES = (4, 2, 1)                      # with two tiles of rows
MORE_TOKEN_TILES = (8, 4, 2, 1)              # K-quants, with one; Q8_0, with two
_BLOCKS = qmatmul_32.BLOCKS | qmatmul_256.BLOCKS


# -- the kernel -------------------------------------------------------------------------------------------------------

class Shape:
    """The parameters every variant has, and addresses derived from them."""

    def __init__(self, b: Builder, dtype: DType):
        self.dtype = dtype
        self.tokens, self.cols, self.rows = b.scalar("T"), b.scalar("K"), b.scalar("N")
        self.blocks = self.cols // dtype.block
        self.tiles = (self.rows + 15) // 16

    def tile(self, w: Buffer, tile: Value) -> Buffer:
        return w.at(tile * self.blocks * layout.tile_block_bytes(self.dtype))

    def record(self, act: Buffer, token: Value | int) -> Buffer:
        return act.at(self.blocks * token * RECORD_BYTES[self.dtype.block])


def accumulate(b: Builder, shape: Shape, streams: Sequence[Buffer], records: Sequence[Buffer]) -> list[list[Value]]:
    """[stream][token] dot products; all streams are walked in one loop over the blocks."""
    acc = [[b.var("f32", 0.0) for _ in records] for _ in streams]
    size, step = layout.tile_block_bytes(shape.dtype), RECORD_BYTES[shape.dtype.block]
    with b.loop(0, shape.blocks) as k:
        pairs = _BLOCKS[shape.dtype.name](b, [w.at(k * size) for w in streams], [r.at(k * step) for r in records])
        for cells, of_stream in zip(acc, pairs):
            for cell, (scale, value) in zip(cells, of_stream):
                cell.set(b.fma(scale, value, cell.get()))
    return [[v.get() for v in a] for a in acc]


@functools.lru_cache(maxsize=None)
def qmatmul(dtype_name: str, bias: bool = False, residual: bool = False) -> Kernel:
    """act r records (`quantize_activation` of the type's block) [T, K], w r u8 R16 [N, K], y w f32 [T, N],
    [bias r f32 [N],] [res r f32 [T, N],] T, K, N i64.

    bias and residual are added as separate f32 additions in that order: the same bytes as unfused."""
    dtype = DTYPES[dtype_name]
    b = Builder(f"qmatmul_{dtype_name.lower()}{'_bias' if bias else ''}{'_residual' if residual else ''}", 16)
    act, w, y = b.ptr("act", "r", "i32"), b.ptr("w", "r", "u8"), b.ptr("y", "w", "f32")
    bias_p = b.ptr("bias", "r", "f32") if bias else None
    res = b.ptr("res", "r", "f32") if residual else None
    shape = Shape(b, dtype)
    half = (shape.tiles + 1) // 2
    b.set_grid(half)

    def store(token: Value | int, tile: Value, value: Value) -> None:
        row = tile * 16
        inside = b.in_range(row, shape.rows)
        at = shape.rows * token + row
        if bias_p is not None:
            value = value + b.load_lanes("f32", bias_p, row, inside)
        if res is not None:
            value = value + b.load_lanes("f32", res, at, inside)
        b.store_lanes("f32", y, at, b.canonical_nan(value), inside)

    def tokens(tiles: Sequence[Value], first: Value, count: int) -> None:
        records = [shape.record(act, first + i) for i in range(count)]
        values = accumulate(b, shape, [shape.tile(w, t) for t in tiles], records)
        for tile, of_tile in zip(tiles, values):
            for i, value in enumerate(of_tile):
                store(first + i, tile, value)
    if dtype.block == 256:
        with b.loop(b.group * 2, b.imin(b.group * 2 + 2, shape.tiles)) as tile:
            token_tiles(b, shape.tokens, lambda first, count: tokens([tile], first, count), tiles_of(dtype))
    else:
        far = b.group + half                             # an odd last tile is done twice: the same bytes
        pair = [b.group, b.select(far < shape.tiles, far, b.group)]
        token_tiles(b, shape.tokens, lambda first, count: tokens(pair, first, count), tiles_of(dtype))
    return b.finish()


def tiles_of(dtype: DType) -> Sequence[int]:
    """Numbers of tokens that are taken at a time."""
    return MORE_TOKEN_TILES if dtype.block == 256 or dtype.name == "Q8_0" else TOKEN_TILES


def token_tiles(b: Builder, count: Value, body: Callable[[Value, int], None],
                tiles: Sequence[int] = TOKEN_TILES) -> None:
    """body(first token, tile size) over 0 .. count: as many of the largest tile as fit, then smaller ones."""
    done = b.i64(0)
    for size in tiles:
        end = done + (count - done) // size * size
        with b.loop(done, end, size) as first:
            body(first, size)
        done = end


@functools.lru_cache(maxsize=None)
def qmatmul_gated(dtype_name: str, up_dtype_name: str | None = None) -> Kernel:
    """act r records [T, K], w r u8, y w f32 [T, N], T, K, N i64: y = silu(x gate) * (x up), silu(g) = g * sigmoid(g).

    w: gate [N, K] and up [N, K] in layout R16, a tile of gate before each of up (`layout.alternate`), so that memory is
    read in one stream (two matrices one tile at a time, Q4_K, two threads: 0.93 of a plain read loop, this 1.0).  The
    32-element formats walk both at once and take them apart: gate r u8, up r u8 for w.  The two types share the
    activation block."""
    dtype = DTYPES[dtype_name]
    up_dtype = DTYPES[up_dtype_name or dtype_name]
    if up_dtype.block != dtype.block:
        raise ValueError(f"gate {dtype.name} and up {up_dtype.name} need differently quantised activations")
    b = Builder(f"qmatmul_gated_{dtype.name.lower()}_{up_dtype.name.lower()}", 16)
    act, pointers = b.ptr("act", "r", "i32"), [b.ptr(name, "r", "u8") for name in gated_weights(dtype)]
    y = b.ptr("y", "w", "f32")
    shape = Shape(b, dtype)
    up_shape = Shape.__new__(Shape)
    up_shape.__dict__.update(shape.__dict__, dtype=up_dtype)
    b.set_grid(shape.tiles)
    row = b.group * 16
    inside = b.in_range(row, shape.rows)
    if len(pointers) == 1:
        sizes = [shape.blocks * layout.tile_block_bytes(d) for d in (dtype, up_dtype)]
        gate = pointers[0].at(b.group * (sizes[0] + sizes[1]))
        weights = [(shape, gate), (up_shape, gate.at(sizes[0]))]
    else:
        weights = [(s, s.tile(w, b.group)) for s, w in zip((shape, up_shape), pointers)]

    def tokens(first: Value, count: int) -> None:
        records = [shape.record(act, first + i) for i in range(count)]
        if up_dtype is not dtype:
            gs, us = (accumulate(b, s, [w], records)[0] for s, w in weights)
        elif len(pointers) == 2:
            gs, us = accumulate(b, shape, [w for _, w in weights], records)
        else:
            gs, us = _one_after_the_other(b, shape, weights[0][1], records)
        for i, (g, u) in enumerate(zip(gs, us)):
            value = g * scalar_math.sigmoid(b, g) * u
            b.store_lanes("f32", y, shape.rows * (first + i) + row, b.canonical_nan(value), inside)
    token_tiles(b, shape.tokens, tokens, tiles_of(dtype) if up_dtype is dtype or dtype.block == 256 else TOKEN_TILES)
    return b.finish()


def _one_after_the_other(b: Builder, shape: Shape, w: Buffer, records: Sequence[Buffer]) -> list[list[Value]]:
    """[tile][token] dot products of two tiles that follow on each other; both by the same loads (one thread, two
    loops: 0.94 of a plain read loop, so 0.97)."""
    both = [[b.var("f32", 0.0) for _ in records] for _ in range(2)]
    with b.loop(0, 2) as tile:
        values = accumulate(b, shape, [w.at(tile * (shape.blocks * layout.tile_block_bytes(shape.dtype)))], records)[0]
        for first, second, value in zip(*both, values):
            first.set(second.get())
            second.set(value)
    return [[v.get() for v in of_tile] for of_tile in both]


def gated_weights(dtype: DType) -> Sequence[str]:
    """Names of the weights `qmatmul_gated` takes for a gate of this type."""
    return ("w",) if dtype.block == 256 else ("gate", "up")
