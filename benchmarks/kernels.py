"""Throughput of the matmul and attention kernels beside a plain read loop of the same minutes.

    python benchmarks/kernels.py [--formats Q4_1,Q4_K] [--rounds 5] [--size 300] [--attention]

Decode: T = 1 over weights larger than every cache, GB/s of weight bytes; "read" is a loop that only sums the same
bytes, taken in turn with the kernel.  "cached" is the kernel on one thread over 0.6 MB that stay in the second-level
cache, the best of many runs, without the time of a call: what its own instructions allow.  Prompt: T = 128, K = 2048,
N = 5632 (weights stay in cache), GOP/s with 2 operations a multiply-add.  Every figure is "median (best)" over the
rounds, kernel and read loop alternating.  One thread is timed in CPU time, so that other jobs on the machine do not
count; more threads by the clock.
"""
from __future__ import annotations

import argparse
import statistics
import time
from typing import Callable

import numpy as np

from m3jit.backends.cpu.engine import Engine
from m3jit.ir.loop import Kernel
from m3jit.ir.loop_builder import Builder
from m3jit.isa.types import DTYPES
from m3jit.kernels import attention, layout, qmatmul, quantize

READ_PIECE = 1 << 18                          # bytes one group of the read loop sums


def read_kernel(piece: int = READ_PIECE) -> Kernel:
    """data r i32, out w i32 [groups, 64], groups i64: sums of pieces of so many bytes."""
    b = Builder("plain_read", 64)
    data, out, groups = b.ptr("data", "r", "i32"), b.ptr("out", "w", "i32"), b.scalar("groups")
    b.set_grid(groups)
    acc = b.var("i32", 0)
    with b.loop(0, piece // 4, 64) as at:
        acc.set(acc.get() + b.load_lanes("i32", data.at(b.group * piece), at))
    b.store_lanes("i32", out, b.group * 64, acc.get())
    return b.finish()


def seconds(f: Callable[[], None], threads: int) -> float:
    clock = time.thread_time if threads == 1 else time.perf_counter
    start = clock()
    f()
    return clock() - start


def rates(work: float, times: list[float]) -> str:
    return f"{work / statistics.median(times):6.1f} ({work / min(times):6.1f})"


def packed(rng: np.random.Generator, name: str, rows: int, cols: int) -> np.ndarray:
    dtype = DTYPES[name]
    raw = rng.integers(0, 256, (rows, dtype.row_bytes(cols)), dtype=np.uint8)
    return layout.repack(dtype, raw, rows, cols)


def decode(engine: Engine, name: str, cols: int, nbytes: int, rounds: int, threads: int) -> tuple[str, str]:
    """(kernel, read loop) in GB/s."""
    dtype, rng = DTYPES[name], np.random.default_rng(0)
    piece = packed(rng, name, 1024, cols)
    copies = max(1, nbytes // piece.size)
    w, rows = np.tile(piece, copies), 1024 * copies
    act = rng.integers(0, 127, quantize.activation_bytes(1, cols, dtype.block), dtype=np.uint8)
    y, sums = np.empty(rows, np.float32), np.empty(w.size // READ_PIECE * 64, np.int32)
    run, read = engine.kernel(qmatmul.qmatmul(name)), engine.kernel(read_kernel())
    ours, plain = [], []
    for _ in range(rounds):
        ours.append(seconds(lambda: run([act, w, y, 1, cols, rows], threads), threads))
        plain.append(seconds(lambda: read([w, sums, w.size // READ_PIECE], threads), threads))
    return rates(w.size / 1e9, ours), rates(w.size / 1e9, plain)


def cached(engine: Engine, name: str, cols: int, runs: int = 500) -> float:
    """GB/s of one thread where memory is no limit."""
    dtype, rng = DTYPES[name], np.random.default_rng(0)
    rows = 600_000 // layout.packed_bytes(dtype, 16, cols) * 16
    w = packed(rng, name, rows, cols)
    act = rng.integers(0, 127, quantize.activation_bytes(1, cols, dtype.block), dtype=np.uint8)
    y, run = np.empty(rows, np.float32), engine.kernel(qmatmul.qmatmul(name))

    def best(n: int) -> float:
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            run([act, w, y, 1, cols, n], 1)
            times.append(time.perf_counter() - start)
        return min(times)
    return w.size / 1e9 / (best(rows) - best(0))


def prompt(engine: Engine, name: str, cols: int, rows: int, tokens: int, rounds: int, threads: int) -> str:
    """GOP/s."""
    dtype, rng = DTYPES[name], np.random.default_rng(0)
    w = packed(rng, name, rows, cols)
    act = rng.integers(0, 127, quantize.activation_bytes(tokens, cols, dtype.block), dtype=np.uint8)
    y = np.empty((tokens, rows), np.float32)
    run = engine.kernel(qmatmul.qmatmul(name))
    return rates(2e-9 * tokens * cols * rows,
                 [seconds(lambda: run([act, w, y, tokens, cols, rows], threads), threads) for _ in range(2 * rounds)])


def attend(engine: Engine, g: attention.Geometry, keys: int, tokens: int, layers: int, rounds: int,
           threads: int) -> str:
    """ms per token over `layers` layers with their own pages."""
    rng = np.random.default_rng(0)
    page, pages = g.page_bytes, -(-keys // 64)
    pool = (rng.normal(0, 1, layers * pages * page // 2).astype(np.float16)).view(np.uint8)
    q = rng.normal(0, 1, (tokens, g.heads * g.head_dim)).astype(np.float32)
    out = np.empty_like(q)
    partial = np.empty(attention.partial_floats(tokens, keys, g.heads, g.value_dim) + 1, np.float32)
    run, join, many = (engine.kernel(f(g))
                       for f in (attention.attn_blocks, attention.attn_combine, attention.attn_rows))
    past = keys - tokens
    tables = [attention.leaf_tables((np.arange(pages) + layer * pages) * page, pool.nbytes + layer * 8 * pages)
              for layer in range(layers)]
    pool = np.concatenate([pool, *(leaves.view(np.uint8) for leaves, _ in tables)])
    tops = [top for _, top in tables]

    def once() -> None:
        for layer in range(layers):
            table = tops[layer]
            if tokens <= attention.FEW_TOKENS:
                run([q, pool, table, partial, tokens, past, keys, attention.NO_WINDOW, 0.125], threads)
                join([partial, out, tokens, past, keys, attention.NO_WINDOW], threads)
            else:
                many([q, pool, table, out, tokens, past, keys, attention.NO_WINDOW, 0.125], threads)
    times = [seconds(once, threads) * 1e3 / tokens for _ in range(rounds)]
    gb = layers * pages * page / 1e9
    return f"{statistics.median(times):8.3f} ({min(times):8.3f}) ms/token" + (
        f"  {gb / (statistics.median(times) / 1e3):5.1f} GB/s" if tokens == 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default="Q8_0,Q4_0,Q4_1,Q4_K,Q6_K")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=300, help="MB of weights for decode")
    parser.add_argument("--attention", action="store_true")
    args = parser.parse_args()
    engine = Engine("native")
    print(f"{'format':6} {'K':>5} thr  {'decode GB/s':>17}  {'plain read GB/s':>17}  {'prompt GOP/s':>17}  cached GB/s")
    for name in args.formats.split(",") if args.formats else []:
        for cols in (2048, 576) if DTYPES[name].block == 32 else (2048,):
            for threads in (1, 2):
                ours, plain = decode(engine, name, cols, args.size * 10 ** 6, args.rounds, threads)
                gop = prompt(engine, name, cols, 5632, 128, args.rounds, threads)
                alone = f"{cached(engine, name, cols):6.1f}" if threads == 1 else ""
                print(f"{name:6} {cols:5} {threads:3}  {ours:>17}  {plain:>17}  {gop:>17}  {alone}", flush=True)
    if args.attention:
        for g, layers in ((attention.Geometry(32, 4, 64), 22), (attention.Geometry(9, 3, 64), 30)):
            for tokens, keys in ((1, 4096), (1, 400), (128, 4096), (128, 128)):
                for threads in (1, 2):
                    figure = attend(engine, g, keys, tokens, layers, args.rounds, threads)
                    print(f"attention {g.heads}/{g.kv_heads} heads, {layers} layers, {tokens} tokens at {keys} keys, "
                          f"{threads} threads: {figure}", flush=True)


if __name__ == "__main__":
    main()
