"""FORK and ABORT of a SmolLM2 context of 100 and 4k tokens and of one whose page table has a million; what follows.

The context is a real one: the machine that generates is stopped behind a token, with its registers, streams and random
state.  A round forks it, appends eight rows to each layer of its stream, as eight tokens would, and goes back.  A million
rows are the pages of the 4k context over and over: the model could not compute at that length in reasonable time.
"""
from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np

from benchmarks.generation import Ours
from benchmarks.state_setup import Setup, micros, p50_p99
from benchmarks.table import Row

NAME = "FORK and ABORT of a SmolLM2 context"
LENGTHS = {"100 tokens": 100, "4k tokens": 4096}
MILLION = 1 << 20
ROUNDS, WARM = 2000, 100
EVERY, TRIALS = 8, 120                  # a rollback behind every 8th token, so many times
FORK, ABORT = (5e-6, 20e-6), (39e-6, 150e-6)


def context(ours: Ours, tokens: int, behind: Callable[[Any, int], float], generate: int = 1) -> None:
    """Generate behind a prompt of `tokens` tokens; behind(machine, n) is called after the n-th one, in the run."""
    ours.stamps(tokens, generate, lambda n: behind(ours.machine, n))


def stream_register(vm: Any) -> int:
    """The S register that names the model's key/value stream."""
    return next(n for n in range(64) if type(vm.machine.state_of(vm.main, n)).__name__ == "KVStream")


def appended(stream: Any, layers: tuple[int, ...], rows: int) -> Any:
    """As a compiled region appends, without the rows' contents."""
    reserved = stream.reserve_all(layers, [rows] * len(layers))
    return reserved.with_all_lengths(layers, [n + rows for n in stream.lengths(layers)])


def million(stream: Any) -> Any:
    """A stream with the pages of this one over and over."""
    from m3jit.isa.kv import KVStream, Layer
    from m3jit.isa.kv_pages import NO_PAGES
    layers = {}
    for number, layer in stream.layers.items():
        pages = [p for p, _ in zip(layer.pages, range(layer.length // 64))]
        count = MILLION // 64
        held = None
        for _ in range(count - 1):
            held = layer.held[0], held
        table = NO_PAGES.spliced(0, (pages * (count // len(pages) + 1))[:count])
        layers[number] = Layer(table, MILLION, layer.held[0], held)
    return KVStream(stream.geometry, stream.dtype, layers)


def rounds(vm: Any, stream: Any) -> dict[str, list[float]]:
    """Seconds of each step of the rounds; the machine is as before at the end."""
    clock, m, ctx, n = time.perf_counter, vm.machine, vm.main, stream_register(vm)
    layers = tuple(stream.layers)
    before = m.state_of(ctx, n)
    m.set_state_of(ctx, n, appended(stream, layers, 1))
    found: dict[str, list[float]] = {"fork": [], "abort": [], "append": [], "append again": []}
    for i in range(WARM + ROUNDS):
        a = clock()
        snapshot = vm.fork()
        b = clock()
        for _ in range(EVERY):
            c = clock()
            m.set_state_of(ctx, n, appended(m.state_of(ctx, n), layers, 1))
        d = clock()
        vm.abort(snapshot)
        e = clock()
        m.set_state_of(ctx, n, appended(m.state_of(ctx, n), layers, 1))
        f = clock()
        vm.abort(snapshot)
        if i >= WARM:
            for name, seconds in (("fork", b - a), ("abort", e - d), ("append", d - c), ("append again", f - e)):
                found[name].append(seconds)
    m.set_state_of(ctx, n, before)
    return found


def measure(setup: Setup) -> list[Row]:
    ours = Ours(setup.smollm2)
    found: dict[str, dict[str, list[float]]] = {}

    def behind(vm: Any, n: int) -> float:
        began = time.perf_counter()
        name = next(k for k, v in LENGTHS.items() if v == length)
        stream = vm.machine.state_of(vm.main, stream_register(vm))
        found[name] = rounds(vm, stream)
        if length == max(LENGTHS.values()):
            found["1M-token page table"] = rounds(vm, million(stream))
        return time.perf_counter() - began
    for length in LENGTHS.values():
        context(ours, length, behind)
    for name, steps in found.items():
        for k, v in steps.items():
            print(name, k, [micros(x) for x in p50_p99(v)])
    return []
