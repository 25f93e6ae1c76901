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
across lanes; nibbles are split on the fly.  The 32-element formats take two tiles of rows at once, half the matrix
apart (two far streams of memory are faster than one or two near ones), for 4, then 2, then 1 tokens: 2 x 4 sums, a
token's bytes loaded once for both (Zen 5, one thread, K = 2048, GOP/s: 1 x 8 537-650, 2 x 4 705-760, 2 x 8 680-705,
4 x 4 720-750).  K-quants, which do more work per vector of weights, take one tile at a time for 8, 4, 2, 1 tokens
(1 x 8 600-650 and 460, 2 x 4 575 and 390 for Q4_K and Q6_K).
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
TOKEN_TILES = (4, 2, 1)                      # with two tiles of rows
K_TOKEN_TILES = (8, 4, 2, 1)                 # with one
FEW = 4                                      # tiles x tokens up to which there are registers for more sums at once
# Bytes the K-quant kernels ask for ahead of their loads.  One stream with this request runs at 0.9-0.95 of a plain read
# loop; without it, or with two streams, the rate hangs on the order of instructions (Q4_K, Zen 5: 22-39 GB/s for one
# and the same body at different places, read loop 41).  The 32-element formats gain nothing from it.
AHEAD = 8192


def activation_block(dtype: DType) -> int:
    """The activation block (32 or 256) that weights of this type are multiplied with."""
    return dtype.block


# -- one block of some tiles of rows for a tile of tokens -------------------------------------------------------------
# ws: the tile-block of each tile of rows; x: the tokens' records.  Gives [tile][token] (scale, value) pairs:
# acc = fma(scale, value, acc).  A token's four bytes are loaded once for all tiles.

Pairs = list[list[tuple[Value, Value]]]
Sums = list[list[Value]]                     # [tile][token]


def _dot(b: Builder, sums: Sums, weights: Sequence[Value], x: Sequence[Buffer], word: Value | int) -> None:
    """sums += weights of each tile times word `word` of each token."""
    for t, record in enumerate(x):
        bytes4 = b.load("i32", record, word)
        for s, w in zip(sums, weights):
            s[t] = b.dot4(s[t], w, bytes4)


def _dot_vectors(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer], start: Sequence[Value], count: int,
                 nibbles: bool) -> Sums:
    """Sums over the `count` vectors at each of ws, from `start`; nibble vectors serve the words v and count + v."""
    sums = [list(start) for _ in ws]
    for v in range(count):
        raws = [b.load_lanes("i32", w, 16 * v) for w in ws]
        _dot(b, sums, [r & NIBBLE for r in raws] if nibbles else raws, x, v)
        if nibbles:
            _dot(b, sums, [b.lshr(r, 4) & NIBBLE for r in raws], x, count + v)
    return sums


def _q8_0(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer], bias: int = BIAS128, vectors: int = 8,
          nibbles: bool = False) -> Pairs:
    sums = _dot_vectors(b, [w.at(32) for w in ws], x, [b.load("i32", r, bias) for r in x], vectors, nibbles)
    dx = [b.load("f32", r, D32) for r in x]
    out: Pairs = []
    for w, s in zip(ws, sums):
        dw = b.load_lanes("f16", w, 0)
        out.append([(dw * d, b.cvt(t, "f32")) for t, d in zip(s, dx)])
    return out


def _q4_0(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    return _q8_0(b, ws, x, BIAS8, 4, nibbles=True)


def _q4_1(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    sums = _dot_vectors(b, [w.at(64) for w in ws], x, [b.i32(0)] * len(x), 4, nibbles=True)
    dx, qsum = [b.load("f32", r, D32) for r in x], [b.load("f32", r, SUM32) for r in x]
    out: Pairs = []
    for w, s in zip(ws, sums):
        dw, m = b.load_lanes("f16", w, 0), b.load_lanes("f16", w, 16)
        out.append([(d, b.fma(dw, b.cvt(t, "f32"), m * q)) for t, d, q in zip(s, dx, qsum)])
    return out


class _K4Block:
    """One tile's super-block of Q4_K: scales unpacked to scratch, so that the loop over sub-blocks can stay a loop."""

    def __init__(self, b: Builder, number: int, w: Buffer, tokens: int):
        self.quants = w.at(256)
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


def _add_scaled(totals: Sequence, sums: Sequence[Value], scale: Value) -> None:
    for total, s in zip(totals, sums):
        total.set(total.get() + s * scale)


def _q4_k(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    blocks = [_K4Block(b, i, w, len(x)) for i, w in enumerate(ws)]
    few = len(ws) * len(x) <= FEW                        # both nibbles of a vector at once: each byte is read once
    with b.loop(0, 4) as c:
        for halves in ([(0, 1)] if few else [(0,), (1,)]):           # low nibbles: sub-block 2c, high: 2c + 1
            sums: dict[int, Sums] = {h: [[b.i32(0)] * len(x) for _ in ws] for h in halves}
            for v in range(8):
                raws = [b.load_lanes("i32", k.quants.at(c * 512), 16 * v, ahead=AHEAD if few else 0) for k in blocks]
                for h in halves:
                    _dot(b, sums[h], [(b.lshr(r, 4) if h else r) & NIBBLE for r in raws], x, c * 16 + (8 * h + v))
            for h in halves:
                for k, s in zip(blocks, sums[h]):
                    _add_scaled(k.isum, s, b.load_lanes("i32", k.table, c * 32 + 16 * h))
    return [[(b.load("f32", r, D256), b.fma(k.d, b.cvt(t.get(), "f32"), -(k.dmin * b.cvt(k.min_sum(b, r), "f32"))))
             for t, r in zip(k.isum, x)] for k in blocks]


def _q6_k(b: Builder, ws: Sequence[Buffer], x: Sequence[Buffer]) -> Pairs:
    ds = [b.load_lanes("f16", w, 0) for w in ws]
    isums = [[b.var("i32", 0) for _ in x] for _ in ws]
    few = len(ws) * len(x) <= FEW // 2
    with b.loop(0, 4) as g:                              # group g = 2h + s of the layout
        first = (g >> 1 << 3) + (g & 1)                  # its sub-blocks are first, + 2, + 4, + 6
        quants = [w.at(g * 768 + 288) for w in ws]
        for parts in ([(0, 1, 2, 3)] if few else [(0,), (1,), (2,), (3,)]):
            start = {part: [b.load("i32", r, first + (BIAS32 + 2 * part)) for r in x] for part in parts}
            sums = {part: [list(s) for _ in ws] for part, s in start.items()}
            for v in range(4):
                _q6_step(b, quants, x, sums, v, first, AHEAD if few else 0)
            for part in parts:
                for w, isum, s in zip(ws, isums, sums[part]):
                    _add_scaled(isum, s, b.load_lanes("i8", w.at(32), (first + 2 * part) * 16))
    return [[(b.load("f32", r, D256), d * b.cvt(t.get(), "f32")) for t, r in zip(isum, x)]
            for d, isum in zip(ds, isums)]


def _q6_step(b: Builder, quants: Sequence[Buffer], x: Sequence[Buffer], sums: dict[int, Sums], v: int, first: Value,
             ahead: int) -> None:
    """One vector (4 elements of 16 rows) of the sub-blocks `first + 2 part`: four low bits, two high bits together."""
    sides = sorted({part % 2 for part in sums})
    raws, highs = [], []
    for q in quants:
        raws.append({side: b.load_lanes("i32", q, 16 * (3 * v + side), ahead=ahead) for side in sides})
        highs.append(b.load_lanes("i32", q, 16 * (3 * v + 2), ahead=ahead))
    for part in sums:
        shift = 4 - 2 * part                             # brings bits 2 part, 2 part + 1 of each byte to 4, 5
        weights = []
        for raw, high in zip(raws, highs):
            low = (b.lshr(raw[part % 2], 4) if part >= 2 else raw[part % 2]) & NIBBLE
            moved = high << shift if shift > 0 else b.lshr(high, -shift) if shift < 0 else high
            weights.append(low | (moved & 0x30303030))
        _dot(b, sums[part], weights, x, first * 4 + (8 * part + v))


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
        values = _accumulate(b, shape, [shape.tile(w, t) for t in tiles], records)
        for tile, of_tile in zip(tiles, values):
            for i, value in enumerate(of_tile):
                store(first + i, tile, value)
    if dtype.block == 256:
        with b.loop(b.group * 2, b.imin(b.group * 2 + 2, shape.tiles)) as tile:
            token_tiles(b, shape.tokens, lambda first, count: tokens([tile], first, count), K_TOKEN_TILES)
    else:
        far = b.group + half                             # an odd last tile is done twice: the same bytes
        pair = [b.group, b.select(far < shape.tiles, far, b.group)]
        token_tiles(b, shape.tokens, lambda first, count: tokens(pair, first, count))
    return b.finish()


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

    def tokens(first: Value, count: int) -> None:
        records = [shape.record(act, first + i) for i in range(count)]
        if up_dtype is dtype and dtype.block == 32:
            gs, us = _accumulate(b, shape, [w for _, w in weights], records)
        else:
            gs, us = (_accumulate(b, s, [w], records)[0] for s, w in weights)
        for i, (g, u) in enumerate(zip(gs, us)):
            value = g * scalar_math.sigmoid(b, g) * u
            b.store_lanes("f32", y, shape.rows * (first + i) + row, b.canonical_nan(value), inside)
    token_tiles(b, shape.tokens, tokens, TOKEN_TILES if dtype.block == 32 else K_TOKEN_TILES)
    return b.finish()
