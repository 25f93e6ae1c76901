"""Weight layouts of the matmul kernels.

Block types are kept in layout **R16**: rows in tiles of 16 (missing rows are zero bytes), tile after tile; in a tile,
block after block along K.  A tile-block holds the bytes of the 16 file blocks (of the types in `layout_codes` the
bits), permuted into the order of use, so a layout is as large as the file's rows (padded to 16); Q3_K and IQ4_XS
(scales unpacked, 4 and 2 bytes more a block) and TQ1_0 (66 bytes for 54) are larger.  Scales come before codes; large
blocks are equal pieces, each with the scales of its codes, so that a loop over the pieces moves on by one step.
"Vector" below: 64 bytes, 16 rows x 4 bytes, byte 4r + i belongs to row r.

Q8_0    544 bytes  d f16[16]; 8 vectors: vector v = q[4v .. 4v+3] + 128 (biased to unsigned)
Q4_0    288        d f16[16]; 4 vectors: vector v = file bytes qs[4v .. 4v+3]: low nibbles are elements 4v + i, high
                   nibbles 16 + 4v + i (values 0..15, bias 8 removed by the kernel)
Q4_1    320        d f16[16], m f16[16]; 4 vectors as Q4_0
Q5_0    352        d f16[16]; 1 vector of fifth bits: bit v of byte i is that of element 4v + i; 4 vectors as Q4_0
Q5_1    384        d f16[16], m f16[16]; fifth bits and 4 vectors as Q5_0
IQ4_NL  288        as Q4_0; the nibbles number entries of a table
MXFP4   272        e u8[16]; 4 vectors as Q4_0
Q4_K    2304       4 pieces c of 9 vectors: the heads of 16 rows (`layout_codes`: mins, scales, bits of d and dmin);
                   8 vectors v = file bytes qs[32c + 4v ..]: low nibbles are elements 64c + 4v + i of the super-block
                   (sub-block 2c), high nibbles 64c + 32 + 4v + i (sub-block 2c + 1)
Q5_K    2816       4 pieces c of 11 vectors: heads; 2 vectors w of fifth bits: bit 2q + h of byte i is that of element
                   64c + 32h + 16w + 4q + i; 8 vectors as Q4_K
Q6_K    3360       d f16[16]; 4 pieces g = 2h + s (half h of 128 elements, s = 0..1): scales i8[4 parts p][16 rows] of
                   the sub-blocks 8h + s + 2p; 12 vectors, for each v = 0..3: a = ql[64h + 16s + 4v ..],
                   b = ql[64h + 32 + 16s + 4v ..], c = qh[32h + 16s + 4v ..].  (a & 15) | (c & 3) << 4 are elements
                   128h + 16s + 4v + i (part 0), (b & 15) | (c >> 2 & 3) << 4 those 32 on (part 1),
                   (a >> 4) | (c >> 4 & 3) << 4 and (b >> 4) | (c >> 6) << 4 the next two; values 0..63
Q2_K    1344       d f16[16], dmin f16[16]; 4 pieces g = 2h + s: scales and mins u8[4 parts p][16 rows] of the
                   sub-blocks 8h + s + 2p (low nibble the scale); 4 vectors v: qs[32h + 16s + 4v ..]; bits 2p, 2p + 1
                   are elements 128h + 32p + 16s + 4v + i
Q3_K    1824       d f16[16]; 4 pieces g: scales - 32 i8[4 parts p][16 rows] (unpacked from 6 bits); 2 vectors w of
                   third bits: bit 4u + p of byte i is bit 2 of element 128h + 32p + 16s + 8w + 4u + i; 4 vectors as
                   Q2_K; values 0..7, bias 4 removed by the kernel
IQ4_XS  2208       d f16[16]; 8 pieces j: scale - 32 of a sub-block i8[16 rows] (unpacked from 6 bits); 4 vectors v =
                   qs[16j + 4v ..], low nibbles elements 32j + 4v + i, high ones 32j + 16 + 4v + i; as IQ4_NL
TQ2_0   1056       d f16[16]; 16 vectors: vector 8h + v = qs[32h + 4v ..]; bits 2p, 2p + 1 are elements
                   128h + 32p + 4v + i; values 0..2, bias 1 removed by the kernel
TQ1_0   1056       kept as TQ2_0: two bits for each digit

Of gate and up of a gated product with super-blocks of 256 the tiles alternate (`alternate`).

F32, F16 and BF16 weights stay as in the file: row-major [N, K].
"""
from __future__ import annotations

from typing import Sequence

import numpy as np

from m3jit.isa.types import BLOCKS, DType, Q8_0
from m3jit.kernels.layout_codes import RECODED

ROWS = 16                                    # rows of a tile = lanes of the kernels that read it
PACKED = BLOCKS                              # dtypes with an R16 layout
VERSION = 3                                  # changes when a byte of a layout changes (part of the key of cached files)
AT_ONCE = 1 << 20                            # bytes of file blocks recoded at once (what stays in a cache)


class LayoutError(ValueError):
    """A matrix that has no such layout."""


def check(dtype: DType, rows: int, cols: int) -> None:
    """Raises LayoutError unless (dtype, rows, cols) can be packed."""
    if dtype not in PACKED:
        raise LayoutError(f"{dtype.name} has no R16 layout; expected one of {', '.join(d.name for d in PACKED)}")
    if rows < 0 or cols < 0 or cols % dtype.block:
        raise LayoutError(f"{dtype.name} weights need a row length that is a multiple of {dtype.block}, got "
                          f"{rows} x {cols}")


def packed_bytes(dtype: DType, rows: int, cols: int) -> int:
    """Size of the R16 layout of a [rows, cols] matrix."""
    check(dtype, rows, cols)
    return -(-rows // ROWS) * (cols // dtype.block) * tile_block_bytes(dtype)


def tile_block_bytes(dtype: DType) -> int:
    """Bytes of one block of 16 rows."""
    return ROWS * (RECODED[dtype.name].nbytes if dtype.name in RECODED else dtype.nbytes)


# dtype -> list of (offset in the block, recoded where it is, bytes per item, items) in the order of the tile-block's
# fields; an item of all 16 rows stands together.  One-byte items are integer scales and exponents, two-byte items float
# scales, four-byte items the words of vectors.
_FIELDS: dict[str, list[tuple[int, int, int]]] = {
    "Q8_0": [(0, 2, 1), (2, 4, 8)],
    "Q4_0": [(0, 2, 1), (2, 4, 4)],
    "Q4_1": [(0, 2, 1), (2, 2, 1), (4, 4, 4)],
    "Q5_0": [(0, 2, 1), (2, 4, 1), (6, 4, 4)],
    "Q5_1": [(0, 2, 1), (2, 2, 1), (4, 4, 1), (8, 4, 4)],
    "IQ4_NL": [(0, 2, 1), (2, 4, 4)],
    "MXFP4": [(0, 1, 1), (1, 4, 4)],
    "Q4_K": [f for c in range(4) for f in ((4 * c, 4, 1), (16 + 32 * c, 4, 8))],
    "Q5_K": [f for c in range(4) for f in ((4 * c, 4, 1), (16 + 8 * c, 4, 2), (48 + 32 * c, 4, 8))],
    "Q6_K": [(208, 2, 1)] + [f for h in range(2) for s in range(2) for f in (
        *((192 + 8 * h + s + 2 * p, 1, 1) for p in range(4)),
        *((start + 4 * v, 4, 1) for v in range(4)
          for start in (64 * h + 16 * s, 64 * h + 32 + 16 * s, 128 + 32 * h + 16 * s)))],
    "Q2_K": [(80, 2, 1), (82, 2, 1)] + [f for h in range(2) for s in range(2) for f in (
        *((8 * h + s + 2 * p, 1, 1) for p in range(4)), (16 + 32 * h + 16 * s, 4, 4))],
    "Q3_K": [(0, 2, 1)] + [f for h in range(2) for s in range(2) for f in (
        *((2 + 8 * h + s + 2 * p, 1, 1) for p in range(4)), (18 + 16 * h + 8 * s, 4, 2), (50 + 32 * h + 16 * s, 4, 4))],
    "IQ4_XS": [(0, 2, 1)] + [f for j in range(8) for f in ((2 + j, 1, 1), (10 + 16 * j, 4, 4))],
    "TQ1_0": [(64, 2, 1), (0, 4, 16)],
    "TQ2_0": [(64, 2, 1), (0, 4, 16)],
}


def _views(dtype: DType, file: np.ndarray, tile: np.ndarray):
    """Pairs of equally shaped views [tiles, blocks, items, 16 rows] of whole tiles in file and in R16 order."""
    tiles, _, blocks, size = file.shape
    row, at = file.strides[1], 0
    for start, width, items in _FIELDS[dtype.name]:
        kind = {1: "u1", 2: "<u2", 4: "<u4"}[width]
        source = np.ndarray((tiles, blocks, items, ROWS), kind, file, start, (file.strides[0], size, width, row))
        target = np.ndarray((tiles, blocks, items, ROWS), kind, tile, at,
                            (tile.strides[0], tile.strides[1], width * ROWS, width))
        yield source, target
        at += ROWS * width * items


def repack(dtype: DType, raw: np.ndarray, rows: int, cols: int, out: np.ndarray | None = None) -> np.ndarray:
    """R16 bytes (uint8, 1-D) of a matrix given as the file's row-major block bytes; `out` may be a mapped file."""
    check(dtype, rows, cols)
    row_bytes = dtype.row_bytes(cols)
    raw = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    if raw.size != rows * row_bytes:
        raise LayoutError(f"{dtype.name} {rows} x {cols} needs {rows * row_bytes} bytes, got {raw.size}")
    size = packed_bytes(dtype, rows, cols)
    if out is None:
        out = np.empty(size, np.uint8)
    if out.size != size:
        raise LayoutError(f"{dtype.name} {rows} x {cols} packs into {size} bytes, the given buffer has {out.size}")
    whole = rows // ROWS
    end = size // -(-rows // ROWS) * whole if rows else 0
    _repack_tiles(dtype, raw[:whole * ROWS * row_bytes], out[:end], cols)
    if rows % ROWS:
        last = np.zeros(ROWS * row_bytes, np.uint8)
        last[:raw.size - whole * ROWS * row_bytes] = raw[whole * ROWS * row_bytes:]
        _repack_tiles(dtype, last, out[end:], cols)
    return out


def _repack_tiles(dtype: DType, raw: np.ndarray, out: np.ndarray, cols: int) -> None:
    blocks = cols // dtype.block
    file = raw.reshape(-1, ROWS, blocks, dtype.nbytes)
    tile = out.reshape(len(file), blocks, tile_block_bytes(dtype))
    if not tile.size:
        return
    code = RECODED.get(dtype.name)
    step = max(1, AT_ONCE // (ROWS * blocks * dtype.nbytes)) if code else len(file)
    for at in range(0, len(file), step):
        part = file[at:at + step]
        for source, target in _views(dtype, np.ascontiguousarray(code.encode(part)) if code else part,
                                     tile[at:at + step]):
            target[...] = source
            if dtype is Q8_0 and target.dtype.itemsize == 4:
                target ^= np.uint32(0x80808080)


def alternate(packed: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """R16 bytes of several [rows, ..] matrices as one: the first tile of each, then the second of each, and so on."""
    tiles = -(-rows // ROWS)
    if len(packed) == 1 or not tiles:
        return packed[0]
    return np.concatenate([p.reshape(tiles, -1) for p in packed], axis=1).reshape(-1)


def unpack(dtype: DType, packed: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """The inverse of `repack`: row-major block bytes, uint8 [rows, row_bytes].  (Of the bytes that stand for the same
    five ternary digits, TQ1_0 gets those that ggml writes.)"""
    check(dtype, rows, cols)
    blocks, padded, code = cols // dtype.block, -(-rows // ROWS) * ROWS, RECODED.get(dtype.name)
    out = np.empty((padded // ROWS, ROWS, blocks, tile_block_bytes(dtype) // ROWS), np.uint8)
    tile = np.ascontiguousarray(packed).reshape(padded // ROWS, blocks, tile_block_bytes(dtype))
    if tile.size:
        for source, target in _views(dtype, out, tile):
            source[...] = target ^ np.uint32(0x80808080) if dtype is Q8_0 and target.dtype.itemsize == 4 else target
    if code:
        out = code.decode(out)
    return out.reshape(padded, dtype.row_bytes(cols))[:rows].copy()
