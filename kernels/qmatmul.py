"""y [T, N] = quantised x [T, K] times w [N, K] transposed, w a block type in layout R16.

Value of each output (f32; acc from +0, blocks of the row in order; isum, msum, qsum exact int32; dx the activation's
scale):
    Q8_0  u = dw dx; acc = fma(u, f32(isum), acc)                     isum = sum q w
    Q4_0  as Q8_0 with w - 8
    Q4_1  u = fma(dw, f32(isum), m f32(qsum)); acc = fma(dx, u, acc)  w in 0..15, qsum = sum q
    Q4_K  u = fma(d, f32(isum), -(dmin f32(msum))); acc = fma(dx, u, acc)
          isum = sum_j sc_j sum q w, msum = sum_j m_j sum q over 8 sub-blocks of 32
    Q6_K  acc = fma(dx, d f32(isum), acc)                             isum = sum_j sc_j sum q (w - 32), 16 sub-blocks

Schedule: 16 lanes = 16 weight rows; 4 bytes of one token's activation are broadcast into dot4, so nothing is summed
across lanes.  One token, 32-element formats: a group walks two tiles of rows half the matrix apart in one loop (two far
streams of memory are faster than one, two near ones slower).  Else two neighbouring tiles of rows, one after the other,
for tiles of 8, then 4, 2, 1 tokens; nibbles are split on the fly.
"""
from __future__ import annotations

import functools
from typing import Callable, Sequence

from m3jit.ir import scalar_math
from m3jit.ir.loop import Buffer, Builder, Kernel, Value
from m3jit.isa.types import DType, DTYPES
from m3jit.kernels import layout
from m3jit.kernels.quantize import BIAS8, BIAS32, BIAS128, D32, D256, HIGH, LOW, RECORD_BYTES, SUM32

NIBBLE = 0x0F0F0F0F
TOKEN_TILES = (8, 4, 2, 1)
FEW = 4                                      # tokens up to which more sums at once cost no registers that are needed
# Bytes the K-quant kernels ask for ahead of their loads.  One stream with this request runs at 0.9-0.95 of a plain read
# loop; without it, or with two streams, the rate hangs on the order of instructions (Q4_K, Zen 5: 22-39 GB/s for one
# and the same body at different places, read loop 41).  The 32-element formats gain nothing from it.
AHEAD = 8192


def activation_block(dtype: DType) -> int:
    """The activation block (32 or 256) that weights of this type are multiplied with."""
    return dtype.block


# -- one block of 16 rows, for some streams of weights and a tile of tokens --------------------------------------------
# w: the tile-block of each stream; x: the tokens' records.  Gives [stream][token] (scale, value) pairs:
# acc = fma(scale, value, acc).  Loops inside a block take all streams in turn, a few vectors each: memory likes that.

Pairs = list[list[tuple[Value, Value]]]


def _dot_vectors(b: Builder, w: Buffer, x: Sequence[Buffer], start: Sequence[Value], count: int,
                 nibbles: bool) -> list[Value]:
    """Sums over the `count` vectors at w, from `start`; nibble vectors serve the words v and count + v."""
    sums = list(start)
    for v in range(count):
        raw = b.load_lanes("i32", w, 16 * v)
        halves = [(raw & NIBBLE, v), (b.lshr(raw, 4) & NIBBLE, count + v)] if nibbles else [(raw, v)]
        for weights, word in halves:
            sums = [b.dot4(s, weights, b.load("i32", record, word)) for s, record in zip(sums, x)]
    return sums


def _q8_0(b: Builder, streams: Sequence[Buffer], x: Sequence[Buffer], bias: int = BIAS128, vectors: int = 8,
          nibbles: bool = False) -> Pairs:
    out: Pairs = []
    for w in streams:
        sums = _dot_vectors(b, w.at(32), x, [b.load("i32", r, bias) for r in x], vectors, nibbles)
        dw = b.load_lanes("f16", w, 0)
        out.append([(dw * b.load("f32", r, D32), b.cvt(s, "f32")) for s, r in zip(sums, x)])
    return out


def _q4_0(b: Builder, streams: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    return _q8_0(b, streams, x, BIAS8, 4, nibbles=True)


def _q4_1(b: Builder, streams: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    out: Pairs = []
    for w in streams:
        sums = _dot_vectors(b, w.at(64), x, [b.i32(0)] * len(x), 4, nibbles=True)
        dw, m = b.load_lanes("f16", w, 0), b.load_lanes("f16", w, 16)
        out.append([(b.load("f32", r, D32), b.fma(dw, b.cvt(s, "f32"), m * b.load("f32", r, SUM32)))
                    for s, r in zip(sums, x)])
    return out


class _K4Stream:
    """One stream's super-block of Q4_K: scales unpacked to scratch, so that the loop over sub-blocks can stay a loop."""

    def __init__(self, b: Builder, number: int, w: Buffer, tokens: int):
        self.w = w
        self.d, self.dmin = b.load_lanes("f16", w, 0), b.load_lanes("f16", w, 16)
        words = [b.load_lanes("i32", w.at(64), 16 * i) for i in range(3)]
        top = 0x03030303                                 # the two upper bits of scales and mins 4..7
        scales = [words[0] & 0x3F3F3F3F, (words[2] & NIBBLE) | ((b.lshr(words[0], 6) & top) << 4)]
        self.mins = [words[1] & 0x3F3F3F3F, (b.lshr(words[2], 4) & NIBBLE) | ((b.lshr(words[1], 6) & top) << 4)]
        self.table = b.scratch(f"scales{number}", "i32", 8 * 16)
        for j in range(8):
            b.store_lanes("i32", self.table, 16 * j, b.lshr(scales[j // 4], 8 * (j % 4)) & 255)
        self.isum = [b.var("i32", 0) for _ in range(tokens)]

    def min_sum(self, b: Builder, r: Buffer) -> Value:
        """sum_j m_j sum q, exact: the sums of q come as two signed bytes, low and high."""
        low, high = b.i32(0), b.i32(0)
        for i, mins in enumerate(self.mins):
            low = b.dot4(low, mins, b.load("i32", r, LOW + i))
            high = b.dot4(high, mins, b.load("i32", r, HIGH + i))
        return low + (high << 7)


def _q4_k(b: Builder, streams: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    blocks = [_K4Stream(b, i, w, len(x)) for i, w in enumerate(streams)]
    together = len(x) <= FEW                             # both nibbles of a vector at once: each byte is read once
    with b.loop(0, 4) as c:
        for s in blocks:
            quants = s.w.at(c * 512 + 256)
            for halves in ([(0, 1)] if together else [(0,), (1,)]):  # low nibbles: sub-block 2c, high: 2c + 1
                sums: dict[int, list[Value]] = {h: [b.i32(0)] * len(x) for h in halves}
                for v in range(8):
                    raw = b.load_lanes("i32", quants, 16 * v, ahead=AHEAD if together else 0)
                    for h in halves:
                        q = (b.lshr(raw, 4) if h else raw) & NIBBLE
                        sums[h] = [b.dot4(t, q, b.load("i32", r, c * 16 + (8 * h + v))) for t, r in zip(sums[h], x)]
                for h in halves:
                    scale = b.load_lanes("i32", s.table, c * 32 + 16 * h)
                    for total, t in zip(s.isum, sums[h]):
                        total.set(total.get() + t * scale)
    return [[(b.load("f32", r, D256), b.fma(s.d, b.cvt(total.get(), "f32"), -(s.dmin * b.cvt(s.min_sum(b, r), "f32"))))
             for total, r in zip(s.isum, x)] for s in blocks]


def _q6_k(b: Builder, streams: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    ds = [b.load_lanes("f16", w, 0) for w in streams]
    isums = [[b.var("i32", 0) for _ in x] for _ in streams]
    together = len(x) <= FEW // 2
    with b.loop(0, 4) as g:                              # group g = 2h + s of the layout
        first = (g >> 1 << 3) + (g & 1)            # its sub-blocks are first, + 2, + 4, + 6
        for w, isum in zip(streams, isums):
            quants = w.at(g * 768 + 288)
            for parts in ([(0, 1, 2, 3)] if together else [(0,), (1,), (2,), (3,)]):
                sums = {part: [b.load("i32", r, first + (BIAS32 + 2 * part)) for r in x] for part in parts}
                for v in range(4):
                    _q6_step(b, quants, x, sums, v, first)
                for part in parts:
                    scale = b.load_lanes("i8", w.at(32), (first + 2 * part) * 16)
                    for total, p in zip(isum, sums[part]):
                        total.set(total.get() + p * scale)
    return [[(b.load("f32", r, D256), d * b.cvt(t.get(), "f32")) for t, r in zip(isum, x)] for d, isum in zip(ds, isums)]


def _q6_step(b: Builder, quants: Buffer, x: Sequence[Buffer], sums: dict[int, list[Value]], v: int,
             first: Value) -> None:
    """One vector (4 elements of 16 rows) of the sub-blocks `first + 2 part`: four low bits, two high bits together."""
    ahead = AHEAD if len(x) <= FEW // 2 else 0
    raws = {side: b.load_lanes("i32", quants, 16 * (3 * v + side), ahead=ahead)
            for side in sorted({part % 2 for part in sums})}
    high = b.load_lanes("i32", quants, 16 * (3 * v + 2), ahead=ahead)
    for part in sums:
        raw = raws[part % 2]
        low = (b.lshr(raw, 4) if part >= 2 else raw) & NIBBLE
        shift = 4 - 2 * part                             # brings bits 2 part, 2 part + 1 of each byte to 4, 5
        moved = high << shift if shift > 0 else b.lshr(high, -shift) if shift < 0 else high
        weights = low | (moved & 0x30303030)
        word = first * 4 + (8 * part + v)
        sums[part] = [b.dot4(t, weights, b.load("i32", r, word)) for t, r in zip(sums[part], x)]


_BLOCK: dict[str, Callable[..., Pairs]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q6_K": _q6_k}


# -- the kernel -------------------------------------------------------------------------------------------------------

class _Shape:
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


def _accumulate(b: Builder, shape: _Shape, streams: Sequence[Buffer], records: Sequence[Buffer]) -> list[list[Value]]:
    """[stream][token] dot products; all streams are walked in one loop over the blocks."""
    acc = [[b.var("f32", 0.0) for _ in records] for _ in streams]
    size, step = layout.tile_block_bytes(shape.dtype), RECORD_BYTES[shape.dtype.block]
    with b.loop(0, shape.blocks) as k:
        pairs = _BLOCK[shape.dtype.name](b, [w.at(k * size) for w in streams], [r.at(k * step) for r in records])
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
    shape = _Shape(b, dtype)
    half = (shape.tiles + 1) // 2
    b.set_grid(half)
    far = b.group + half
    two = far < shape.tiles

    def store(token: Value | int, tile: Value, value: Value) -> None:
        row = tile * 16
        inside = b.in_range(row, shape.rows)
        at = shape.rows * token + row
        if bias_p is not None:
            value = value + b.load_lanes("f32", bias_p, row, inside)
        if res is not None:
            value = value + b.load_lanes("f32", res, at, inside)
        b.store_lanes("f32", y, at, b.canonical_nan(value), inside)

    def far_streams() -> None:
        tiles = [b.group, b.select(two, far, b.group)]   # an odd last tile is done twice, with the same result
        for tile, (value,) in zip(tiles, _accumulate(b, shape, [shape.tile(w, t) for t in tiles], [act])):
            store(0, tile, value)

    def one_by_one() -> None:
        first_tile = b.group * 2
        with b.loop(first_tile, b.imin(first_tile + 2, shape.tiles)) as tile:
            def tokens(first: Value, count: int) -> None:
                records = [shape.record(act, first + i) for i in range(count)]
                values = _accumulate(b, shape, [shape.tile(w, tile)], records)[0]
                for i, value in enumerate(values):
                    store(first + i, tile, value)
            token_tiles(b, shape.tokens, tokens)
    _by_tokens(b, shape, far_streams, one_by_one)
    return b.finish()


def _by_tokens(b: Builder, shape: _Shape, far_streams: Callable[[], None], one_by_one: Callable[[], None]) -> None:
    if shape.dtype.block == 256:
        one_by_one()
        return
    with b.if_(shape.tokens.equals(1)):
        far_streams()
    with b.else_():
        one_by_one()


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
    """act r records [T, K], gate r u8 R16 [N, K], up r u8 R16 [N, K], y w f32 [T, N], T, K, N i64:
    y = silu(x gate) * (x up), silu(g) = g * sigmoid(g).  The two types share the activation block."""
    dtype = DTYPES[dtype_name]
    up_dtype = DTYPES[up_dtype_name or dtype_name]
    if up_dtype.block != dtype.block:
        raise ValueError(f"gate {dtype.name} and up {up_dtype.name} need differently quantised activations")
    b = Builder(f"qmatmul_gated_{dtype.name.lower()}_{up_dtype.name.lower()}", 16)
    act, gate, up = b.ptr("act", "r", "i32"), b.ptr("gate", "r", "u8"), b.ptr("up", "r", "u8")
    y = b.ptr("y", "w", "f32")
    shape = _Shape(b, dtype)
    up_shape = _Shape.__new__(_Shape)
    up_shape.__dict__.update(shape.__dict__, dtype=up_dtype)
    b.set_grid(shape.tiles)
    row = b.group * 16
    inside = b.in_range(row, shape.rows)
    weights = [(shape, shape.tile(gate, b.group)), (up_shape, up_shape.tile(up, b.group))]

    def store(token: Value | int, g: Value, u: Value) -> None:
        silu = g * scalar_math.sigmoid(b, g)
        b.store_lanes("f32", y, shape.rows * token + row, b.canonical_nan(silu * u), inside)

    def tokens(first: Value, count: int) -> None:
        records = [shape.record(act, first + i) for i in range(count)]
        g, u = (_accumulate(b, s, [w], records)[0] for s, w in weights)
        for i in range(count):
            store(first + i, g[i], u[i])

    def far_streams() -> None:                           # the two matrices are the two streams
        (g,), (u,) = _accumulate(b, shape, [w for _, w in weights], [act])
        store(0, g, u)
    if up_dtype is dtype:
        _by_tokens(b, shape, far_streams, lambda: token_tiles(b, shape.tokens, tokens))
    else:
        token_tiles(b, shape.tokens, tokens)
    return b.finish()
