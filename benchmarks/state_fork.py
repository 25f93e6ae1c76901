"""FORK and ABORT of a SmolLM2 context of 100 and 4k tokens and of one whose page table has a million; what follows.

The context is a real one: a machine that generates, with its registers, streams and random state.  Through the host a
round forks it, appends eight rows to each layer of its stream, as eight tokens would, and goes back.  As instructions,
FORK and ABORT are executed by a program that was given its registers and stream, around a KV_TRUNCATE.  A million rows
are the pages of the 4k context over and over: the model could not compute at that length in reasonable time.

The token after an ABORT is taken while generating: every eighth token the program goes back over seven.
"""
from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import numpy as np

from benchmarks.generation import Ours
from benchmarks.peer_llama import fixed_tokens
from benchmarks.state_setup import STATED, Setup, micros, p50_p99
from benchmarks.table import Row

NAME = "FORK and ABORT of a SmolLM2 context"
LENGTHS = {"100 tokens": 100, "4k tokens": 4096}
MILLION, LONGEST = 1 << 20, "1M-token page table"
ROUNDS, WARM = 2000, 100
EVERY, TRIALS = 8, 150                  # a rollback behind every 8th token, so many times
STEPS = 1000                            # FORK, KV_TRUNCATE, ABORT of the program
LIMITS = {"FORK": (5e-6, 20e-6), "ABORT": (39e-6, 150e-6)}
ALIKE, NEXT = 2.0, 1.1                  # largest ratio between the lengths; of a token after an ABORT to a normal one
Times = dict[str, list[float]]          # what -> seconds


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


def through_host(vm: Any, stream: Any) -> Times:
    """Seconds of each step of the rounds; the machine is as before at the end."""
    clock, m, ctx, n = time.perf_counter, vm.machine, vm.main, stream_register(vm)
    layers = tuple(stream.layers)
    before = m.state_of(ctx, n)
    m.set_state_of(ctx, n, appended(stream, layers, 1))
    found: Times = {"FORK": [], "ABORT": [], "append": [], "append after ABORT": []}
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
            for name, seconds in zip(found, (b - a, e - d, d - c, f - e)):
                found[name].append(seconds)
    m.set_state_of(ctx, n, before)
    return found


def as_instructions(vm: Any, stream: Any) -> Times:
    """Seconds of FORK and ABORT in a program that has the registers of `vm` and this stream."""
    import m3jit
    from m3jit.errors import Interrupted
    used = vm.image.registers.R
    text = f"again: FORK R{used}\nKV_TRUNCATE S0, {stream.length(0) - EVERY}\nABORT R{used}\nJUMP again\n"
    other = m3jit.VM(m3jit.assemble(text), backend="interpreter")
    for i, value in enumerate(vm.main.R[:used]):
        other.main.R[i] = value
    other.machine.set_state_of(other.main, 0, stream)
    names = [ins.op.name for ins in other.image.instructions]
    found: Times = {"FORK": [], "ABORT": []}

    def watch(ctx: Any, index: int, began: int, ended: int) -> None:
        if names[index] in found:
            found[names[index]].append((ended - began) / 1e9)
            if len(found["ABORT"]) == WARM + STEPS:
                other.stop()                           # a counter would go back too
    other.interpreter.watch = watch
    try:
        other.run()
    except Interrupted:                                # by `watch`, when it has seen enough
        pass
    return {name: times[WARM:] for name, times in found.items()}


STEERED = """emit:
    STREAM rToken, OUTPUT TEXT MODEL=rModel
    COMPARE rDo, 1
    IF_EQUAL take
    COMPARE rDo, 2
    IF_EQUAL back
    JUMP on
take:
    LOADI rDo, 0
    FORK rKept
    JUMP on
back:
    ABORT rKept
on:
    COMPARE rMade, MAX_TOKENS
"""


def token_times(ours: Ours, length: int) -> tuple[list[float], list[float]]:
    """Seconds of the tokens after an ABORT, and of those after neither ABORT nor FORK, while generating.

    The host tells the program what to do behind a token: register rDo."""
    import m3jit
    from m3jit.models.program import Options
    from m3jit.vm.streams import CallbackSink
    text = ours.models.assembly(ours.model, options=Options(max_tokens=1 << 30)).replace("IF_EQUAL done", "NOP ; go on")
    head, tail = text.split("emit:\n")
    tail = tail.replace("    STREAM rToken, OUTPUT TEXT MODEL=rModel\n", STEERED.removeprefix("emit:\n"), 1)
    source = head.replace("main:\n", "main:\n    LOADI rDo, 0\n", 1) + "emit:\n" + tail
    vm = m3jit.VM(m3jit.assemble(source), backend="cpu", threads=ours.threads, models=ours.models)
    stamps: list[float] = []

    def token(_: Any) -> None:
        n = len(stamps)
        stamps.append(time.perf_counter())
        if n == EVERY * (TRIALS + 1):
            vm.set("rMade", 1 << 30)                   # enough
            vm.set("rDo", 0)
        else:
            vm.set("rDo", {0: 1, EVERY - 1: 2}.get(n % EVERY, 0))
    vm.sinks["OUTPUT"] = CallbackSink("tokens", token)
    vm.push_input(np.array(fixed_tokens(length, ours.model.info("vocab")), np.int64))
    vm.run()
    gaps = [b - a for a, b in zip(stamps, stamps[1:])][EVERY:]         # the first ones are compiled
    return ([t for i, t in enumerate(gaps) if i % EVERY == EVERY - 1],
            [t for i, t in enumerate(gaps) if i % EVERY not in (0, EVERY - 1)])


def freeing(vm: Any, stream: Any) -> tuple[float, float, int]:
    """Seconds until the thread has freed a replaced stream with pages of its own, the longest time in which this thread
    did not get on meanwhile, and the bytes."""
    from m3jit.isa.kv import KVStream
    from m3jit.vm import reclaim
    m, ctx, n = vm.machine, vm.main, stream_register(vm)
    rows, copied = stream.length(0), KVStream(stream.geometry, stream.dtype)
    layers = tuple(stream.layers)
    snapshot = vm.fork()
    m.set_state_of(ctx, n, appended(copied, layers, rows))
    done = threading.Event()
    reclaim.drain()
    vm.abort(snapshot)
    began = last = time.perf_counter()
    threading.Thread(target=lambda: (reclaim.drain(), done.set())).start()
    longest = 0.0
    while not done.is_set():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return time.perf_counter() - began, longest, stream.nbytes


def measure(setup: Setup) -> list[Row]:
    ours = Ours(setup.smollm2)
    host: dict[str, Times] = {}
    program: dict[str, Times] = {}
    freed: list[tuple[float, float, int]] = []

    def behind(vm: Any, length: int) -> float:
        """At the first token behind the prompt, in the run: its registers, its stream."""
        began = time.perf_counter()
        stream = vm.machine.state_of(vm.main, stream_register(vm))
        streams = {next(k for k, v in LENGTHS.items() if v == length): stream}
        if length == max(LENGTHS.values()):
            streams[LONGEST] = million(stream)
            freed.append(freeing(vm, stream))
        for name, s in streams.items():
            host[name], program[name] = through_host(vm, s), as_instructions(vm, s)
        return time.perf_counter() - began
    for length in LENGTHS.values():
        ours.stamps(length, 1, lambda n, length=length: behind(ours.machine, length))
    rows = _times("through the host", host) + _times("as instructions", program)
    for name, length in LENGTHS.items():
        after, normal = (statistics.median(t) for t in token_times(ours, length))
        rows.append(Row(f"the token after an ABORT, {name}, to a normal one", f"<= {NEXT}",
                        f"{after / normal:.3f} ({1e3 * after:.2f} against {1e3 * normal:.2f} ms)",
                        after <= NEXT * normal))
    for name, times in host.items():
        rows.append(Row(f"append of a row to all layers, {name}: normal; after an ABORT (p50)", STATED,
                        "; ".join(micros(p50_p99(times[k])[0]) for k in ("append", "append after ABORT")), None))
    seconds, longest, nbytes = freed[0]
    rows.append(Row(f"freeing a replaced 4k context ({nbytes / 1e6:.0f} MB) in the background", STATED,
                    f"{1e3 * seconds:.1f} ms; the program waited {1e3 * longest:.2f} ms at most at a time", None))
    return rows


def _times(how: str, found: dict[str, Times]) -> list[Row]:
    rows = []
    for what, (p50, p99) in LIMITS.items():
        seen = {name: p50_p99(times[what]) for name, times in found.items()}
        for name, (a, b) in seen.items():
            rows.append(Row(f"{what} {how}, {name} (p50; p99)", f"<= {micros(p50)}; {micros(p99)}",
                            f"{micros(a)}; {micros(b)}", a <= p50 and b <= p99))
        ratio = max(a for a, _ in seen.values()) / min(a for a, _ in seen.values())
        rows.append(Row(f"{what} {how}: the slowest of the lengths to the fastest (p50)", f"<= {ALIKE}", f"{ratio:.2f}",
                        ratio <= ALIKE))
    return rows
