"""What the block kernels of the integer matmuls share: one block of some tiles of rows for a tile of tokens.

A block function gets `ws`, the tile-block of each tile of rows (layout R16), and `x`, the tokens' activation records,
and gives (scale, value) pairs, [tile][token], for acc = fma(scale, value, acc).
"""
from __future__ import annotations

from typing import Callable, Sequence

from m3jit.ir.loop import Buffer, Value
from m3jit.ir.loop_builder import Builder

NIBBLE = 0x0F0F0F0F
FEW = 4                                      # tiles x tokens up to which there are registers for more sums at once
# Bytes the K-quant kernels ask for ahead of their loads.  One stream of (nearly) equal steps with this request runs at
# 0.95-1.0 of a plain read loop (Zen 5; without it at 0.62-0.89).  Every line has to be asked for: every third alone
# 0.7-0.8.  Tiles of 8 tokens need it as much: one pass over weights in memory for 8 tokens, one thread, GOP/s: Q4_K 221
# without, 625 with; Q6_K 108 and 387, Q5_K 134 and 430, Q3_K 159 and 495, Q2_K 219 and 508, IQ4_XS 217, 676.  The
# 32-element formats gain nothing from it for one token.
AHEAD = 8192
# What those ask for with tiles of so many tokens: a tile of rows is read once for each tile of tokens, and memory would
# rest meanwhile.  SmolLM2 Q4_1, Zen 5, 2 threads, tokens/s of 8 contexts and of a prompt: 1,757 and 4,200 without; with
# 1,024 1,845 and 4,460, with 4,096 2,114 and 4,590, with 8,192 2,035 and 4,420, with 12,288 1,850 and 4,400.
AHEAD_TOKENS = {4: 4096, 8: AHEAD}

Pairs = list[list[tuple[Value, Value]]]
Sums = list[list[Value]]                     # [tile][token]
Block = Callable[[Builder, Sequence[Buffer], Sequence[Buffer]], Pairs]


def dot(b: Builder, sums: Sums, weights: Sequence[Value], x: Sequence[Buffer], word: Value | int) -> None:
    """sums += weights of each tile times word `word` of each token, whose four bytes are loaded once for all tiles."""
    for t, record in enumerate(x):
        bytes4 = b.load("i32", record, word)
        for s, w in zip(sums, weights):
            s[t] = b.dot4(s[t], w, bytes4)


def add_scaled(totals: Sequence, sums: Sequence[Value], scale: Value) -> None:
    for total, s in zip(totals, sums):
        total.set(total.get() + s * scale)


def moved(b: Builder, word: Value, left: int) -> Value:
    """word << left, or the logical >> -left."""
    return word << left if left > 0 else b.lshr(word, -left) if left < 0 else word


def table_words(values: Sequence[int], bias: int) -> list[int]:
    """16 table values, `bias` added, as the four words of `Builder.lookup`."""
    raw = bytes(v + bias for v in values)
    return [int.from_bytes(raw[i:i + 4], "little", signed=True) for i in range(0, 16, 4)]
