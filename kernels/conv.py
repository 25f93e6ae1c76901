"""Convolution (cross-correlation) in one or two dimensions."""
from __future__ import annotations

import functools

from m3jit.ir.loop import Kernel, Value
from m3jit.ir.loop_builder import Builder

TILE = 4                                     # output channels that share the loads of x


@functools.lru_cache(maxsize=None)
def conv(bias: bool = False) -> Kernel:
    """x r f32 [N, C, H, W], w r f32 [O, C / groups, KH, KW], [bias r f32 [O],] y w f32 [N, O, OH, OW],
    N, C, H, W, O, KH, KW, OH, OW, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups i64.

    Each output folds fma(x, w, acc) over its group's channels, then the kernel positions in row-major order, from its
    bias or +0; taps in the padding are performed with x = +0.  One dimension: H = KH = OH = 1, pad_h = 0.
    Lanes are 64 neighbouring outputs of a row; a group does up to 4 output channels of one group of channels."""
    b = Builder(f"conv{'_bias' if bias else ''}", 64)
    x, w = b.ptr("x", "r", "f32"), b.ptr("w", "r", "f32")
    bias_p = b.ptr("bias", "r", "f32") if bias else None
    y = b.ptr("y", "w", "f32")
    names = ("N", "C", "H", "W", "O", "KH", "KW", "OH", "OW", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h",
             "dilation_w", "groups")
    p: dict[str, Value] = {n: b.scalar(n) for n in names}
    inner, outputs = p["C"] // p["groups"], p["O"] // p["groups"]
    pieces, tiles = (p["OW"] + 63) // 64, (outputs + (TILE - 1)) // TILE
    b.set_grid(p["N"] * p["groups"] * tiles * p["OH"] * pieces)
    rest, column = b.group // pieces, b.group % pieces * 64
    rest, out_row = rest // p["OH"], rest % p["OH"]
    rest, tile = rest // tiles, rest % tiles
    batch, group = rest // p["groups"], rest % p["groups"]
    # channels beyond the last of the group stand for it: computed twice, the same bytes
    channels = [group * outputs + b.imin(tile * TILE + i, outputs - 1) for i in range(TILE)]
    lanes = b.cvt(b.lane, "i64") + column
    active = lanes < p["OW"]
    acc = [b.var("f32", b.load("f32", bias_p, c) if bias_p is not None else 0.0) for c in channels]
    with b.loop(0, inner) as c:
        plane = (batch * p["C"] + group * inner + c) * p["H"]
        with b.loop(0, p["KH"]) as i:
            row = out_row * p["stride_h"] + i * p["dilation_h"] - p["pad_h"]
            row_in = (row < p["H"]) & (b.i64(0) <= row)
            with b.loop(0, p["KW"]) as j:
                at = lanes * p["stride_w"] + (j * p["dilation_w"] - p["pad_w"])
                inside = active & row_in & (b.i64(0) <= at) & (at < p["W"])
                v = b.load("f32", x, (plane + row) * p["W"] + at, inside)
                for cell, channel in zip(acc, channels):
                    weight = b.load("f32", w, ((channel * inner + c) * p["KH"] + i) * p["KW"] + j)
                    cell.set(b.fma(v, weight, cell.get()))
    for cell, channel in zip(acc, channels):
        at = ((batch * p["O"] + channel) * p["OH"] + out_row) * p["OW"] + column
        b.store_lanes("f32", y, at, b.canonical_nan(cell.get()), active)
    return b.finish()
