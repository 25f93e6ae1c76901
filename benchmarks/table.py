"""Prints the speed and memory table: every row beside its peer, measured in the same minutes.

    python -m benchmarks.table [--rows chain,scalar,...] [--model FILE.gguf] [--peer-python PATH] [--json FILE]

--peer-python: an interpreter that has llama-cpp-python (a native build) and wasmtime; default: this one.  Timings are
medians of alternating pairs; a row whose peer is missing says so and is not counted as met.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np

ROOT = Path(__file__).parent.parent
PAIRS = 7


@dataclass
class Row:
    """One line: what, the target in words, what was seen, whether the target is met (None: no verdict)."""
    name: str
    target: str
    seen: str
    met: bool | None


def median_pairs(a: Callable[[], float], b: Callable[[], float], pairs: int = PAIRS) -> tuple[float, float, float]:
    """Medians of both and the median of the ratios a/b, alternating."""
    a(), b()
    both = [(a(), b()) for _ in range(pairs)]
    return (statistics.median(x for x, _ in both), statistics.median(y for _, y in both),
            statistics.median(x / y for x, y in both))


def environment(cache: str) -> dict[str, str]:
    """Of a fresh process with a code cache of its own; Python keeps its own bytecode, as it does by default."""
    return {**{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}, "M3JIT_CACHE_DIR": cache}


def timed(f: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        f()
        return time.perf_counter() - start
    return run


def settled(f: Callable[[], Any]) -> Callable[[], float]:
    """As `timed`, after two calls that wake the threads."""
    def run() -> float:
        f()
        f()
        start = time.perf_counter()
        f()
        return time.perf_counter() - start
    return run


# -- elementwise chain ------------------------------------------------------------------------------------------------

CHAIN = """
    LOADI rHalf, 0.5
    LOADI rQuarter, 0.25
    LOADI rOne, 1.0
    MUL rA, rX, rY
    ADD rA, rA, rX
    MUL rA, rA, rHalf
    ADD rA, rA, rY
    MUL rA, rA, rX
    ADD rA, rA, rOne
    MUL rA, rA, rY
    ADD rA, rA, rX
    MUL rA, rA, rQuarter
    ADD rA, rA, rY
    HALT
"""


def chain_numpy(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    np.multiply(x, y, out=out)
    np.add(out, x, out=out)
    np.multiply(out, np.float32(0.5), out=out)
    np.add(out, y, out=out)
    np.multiply(out, x, out=out)
    np.add(out, np.float32(1.0), out=out)
    np.multiply(out, y, out=out)
    np.add(out, x, out=out)
    np.multiply(out, np.float32(0.25), out=out)
    np.add(out, y, out=out)


def chain_expression(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """The chain as NumPy code is usually written, the last operation into a preallocated output."""
    np.add(((((((x * y + x) * np.float32(0.5) + y) * x + np.float32(1.0)) * y + x) * np.float32(0.25))), y, out=out)


HAND_WRITTEN = """
import hashlib, sys, time
import numba, numpy as np
numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))

@numba.njit(parallel=True, error_model="numpy")
def loop(x, y, out):
    h, q, one = np.float32(0.5), np.float32(0.25), np.float32(1.0)
    for i in numba.prange(x.shape[0]):
        a, b = x[i], y[i]
        out[i] = (((((a * b + a) * h + b) * a + one) * b + a) * q) + b

@numba.njit(parallel=True)
def copy(x, y, out):
    for i in numba.prange(x.shape[0]):
        out[i] = x[i]

n = int(sys.argv[1])
rng = np.random.default_rng(0)
x, y = rng.random(n, np.float32), rng.random(n, np.float32)
out = np.empty_like(x)
loop(x, y, out)
print(hashlib.blake2b(out).hexdigest(), flush=True)
for line in sys.stdin:
    f = {"loop": loop, "copy": copy}[line.strip()]
    f(x, y, out)
    f(x, y, out)
    start = time.perf_counter()
    f(x, y, out)
    print(time.perf_counter() - start, flush=True)
"""


def row_chain(args: argparse.Namespace) -> list[Row]:
    """A fused chain of 10 operations against one hand-written loop (numba, two threads) and NumPy.

    The loop runs in a process of its own: OpenMP's threads spin after each call and would take a core from the other
    side."""
    import hashlib
    import m3jit
    n = 10_000_000
    rng = np.random.default_rng(0)
    x, y = rng.random(n, np.float32), rng.random(n, np.float32)
    out, third = np.empty_like(x), np.empty_like(x)
    f = m3jit.compile(CHAIN, inputs=["rX", "rY"], outputs=["rA"], threads=2)
    f(x, y, out=out)
    chain_numpy(x, y, third)
    peer = subprocess.Popen([sys.executable, "-c", HAND_WRITTEN, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True)

    def ask(what: str) -> float:
        peer.stdin.write(what + "\n")
        peer.stdin.flush()
        seconds = float(peer.stdout.readline())
        time.sleep(0.02)                        # its threads come to rest
        return seconds
    try:
        same = peer.stdout.readline().strip() == hashlib.blake2b(out).hexdigest() == hashlib.blake2b(third).hexdigest()
        assert same, "the three chains differ"
        ours, hand, ratio = median_pairs(settled(lambda: f(x, y, out=out)), lambda: ask("loop"), 25)
        copying = statistics.median(ask("copy") for _ in range(25))
    finally:
        peer.kill()
    against_numpy = median_pairs(settled(lambda: f(x, y, out=out)), settled(lambda: chain_expression(x, y, third)))[2]
    assert third.tobytes() == out.tobytes()
    in_place = median_pairs(settled(lambda: f(x, y, out=out)), settled(lambda: chain_numpy(x, y, third)))[2]
    base = (12 * n / hand) / (8 * n / copying)
    fair = base >= 0.85
    verdict = "" if fair else ", under 0.85: no verdict"
    return [Row("chain of 10 elementwise ops, 1e7 f32, 2 threads, against a hand-written loop", ">= 0.9",
                f"{1 / ratio:.2f} ({12e-9 * n / ours:.0f} against {12e-9 * n / hand:.0f} GB/s; loop at {base:.2f} of "
                f"copy bandwidth{verdict})", 1 / ratio >= 0.9 if fair else None),
            Row("the same against NumPy", ">= 8", f"{1 / against_numpy:.1f} (every operation in place: "
                f"{1 / in_place:.1f})", 1 / against_numpy >= 8)]


# -- scalar loop -------------------------------------------------------------------------------------------------------

SCALAR = """
.equ MULTIPLIER 6364136223846793005
.equ INCREMENT 1442695040888963407
    LOADI rX, 1
    LOADI rAcc, 0
    LOADI rM, MULTIPLIER
    LOADI rI, INCREMENT
loop:
    MULS rX, rX, rM
    ADDS rX, rX, rI
    SHR rBit, rX, 33
    AND rBit, rBit, 1
    COMPARE rBit, 0
    IF_EQUAL even
    ADDS rAcc, rAcc, rX
    JUMP next
even:
    XOR rAcc, rAcc, rX
next:
    SUB rN, rN, 1
    COMPARE rN, 0
    IF_GREATER loop
    HALT
"""


def row_scalar(args: argparse.Namespace) -> list[Row]:
    """A linear congruential generator with a branch on its bits, against the same loop in wasmtime."""
    import m3jit
    from benchmarks.peer_wasmtime import expected
    n = 20_000_000
    program = m3jit.assemble(SCALAR)

    def run(count: int) -> tuple[float, int, int]:
        vm = m3jit.VM(program, backend="cpu", threads=1)
        vm.set("rN", count)
        start = time.perf_counter()
        vm.run()
        return time.perf_counter() - start, vm.get("rAcc"), vm.retired
    assert run(100_000)[1] % 2 ** 64 == expected(100_000, 1), "wrong result"
    times, retired = [], 0
    for _ in range(PAIRS):
        seconds, _, retired = run(n)
        times.append(seconds)
    seconds = statistics.median(times)
    rate = retired / seconds
    rows = [Row("scalar loop, compiled", ">= 1e9 instructions/s", f"{rate:.2e} ({1e9 * seconds / n:.2f} ns a round)",
                rate >= 1e9)]
    peer = subprocess.run([args.peer_python, str(ROOT / "benchmarks/peer_wasmtime.py"), "--json"], capture_output=True,
                          text=True, timeout=300)
    if peer.returncode:
        return rows + [Row("scalar loop against wasmtime", ">= 0.5", f"no peer: {peer.stderr.strip()[:100]}", None)]
    theirs = json.loads(peer.stdout.strip().splitlines()[-1])
    ns = theirs["ns_per_iteration"]
    speed = ns / (1e9 * seconds / n)
    return rows + [Row("scalar loop against wasmtime", ">= 0.5", f"{speed:.2f} (wasmtime {ns:.2f} ns)", speed >= 0.5)]


def row_interpreter(args: argparse.Namespace) -> list[Row]:
    """The slow path: NOPs, and the loop above."""
    import m3jit
    nops = m3jit.assemble("    LOADI rN, 2000\nloop:\n" + "    NOP\n" * 500 +
                          "    SUB rN, rN, 1\n    COMPARE rN, 0\n    IF_GREATER loop\n    HALT\n")

    def rate(program: Any, n: int | None) -> float:
        vm = m3jit.VM(program, backend="interpreter")
        if n is not None:
            vm.set("rN", n)
        start = time.perf_counter()
        vm.run()
        return vm.retired / (time.perf_counter() - start)
    scalar = m3jit.assemble(SCALAR)
    plain = statistics.median(rate(nops, None) for _ in range(5))
    mixed = statistics.median(rate(scalar, 50_000) for _ in range(5))
    return [Row("interpreter, NOPs", ">= 1e6/s", f"{plain:.2e}", plain >= 1e6),
            Row("interpreter, mixed ALU and branches", ">= 5e5/s", f"{mixed:.2e}", mixed >= 5e5)]


# -- compile and call latency ------------------------------------------------------------------------------------------

def fifty() -> str:
    lines = []
    for i in range(25):
        lines += [f"    MUL rA, r{'X' if i == 0 else 'A'}, rY", "    ADD rA, rA, rX"]
    return "\n".join(lines + ["    HALT\n"])


COMPILE = """
import sys, time, numpy as np, m3jit
from benchmarks.table import fifty
x = np.ones(1000, np.float32)
warm = m3jit.compile("    MUL rA, rX, rX\\n    HALT\\n", inputs=["rX"], outputs=["rA"], threads=1)
warm(x)
f = m3jit.compile(fifty(), inputs=["rX", "rY"], outputs=["rA"], threads=1)
start = time.perf_counter()
f(x, x)
print(1e3 * (time.perf_counter() - start))
"""


def row_compile(args: argparse.Namespace) -> list[Row]:
    """First call of a program of 50 operations, in a process that has compiled something else before."""
    cold, warm = [], []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as cache:
            env = environment(cache)
            for into in (cold, warm):
                done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=env, check=True, text=True,
                                      capture_output=True)
                into.append(float(done.stdout))
    c, w = statistics.median(cold), statistics.median(warm)
    return [Row("compile a fused region of 50 ops, cold", "<= 60 ms", f"{c:.1f} ms", c <= 60),
            Row("the same from the disk cache", "<= 5 ms", f"{w:.1f} ms", w <= 5)]


def row_call(args: argparse.Namespace) -> list[Row]:
    """A call with two arrays of 16 floats, less the native region itself."""
    import timeit
    import m3jit
    x, out = np.ones(16, np.float32), np.empty(16, np.float32)
    f = m3jit.compile("    ADD rA, rX, rY\n    HALT\n", inputs=["rX", "rY"], outputs=["rA"], threads=1)
    f(x, x)
    number = 20_000
    fresh = min(timeit.repeat(lambda: f(x, x), number=number, repeat=7)) / number
    given = min(timeit.repeat(lambda: f(x, x, out=out), number=number, repeat=7)) / number
    empty = min(timeit.repeat(lambda: None, number=number, repeat=7)) / number
    fresh, given = fresh - empty, given - empty
    return [Row("call of a compiled program, small tensors", "<= 5 us over the kernel",
                f"{1e6 * fresh:.2f} us ({1e6 * given:.2f} us with out=), kernel included", fresh <= 5e-6)]


# -- SmolLM2 -----------------------------------------------------------------------------------------------------------

def model_path(args: argparse.Namespace) -> Path | None:
    if args.model:
        return Path(args.model)
    from m3jit.models import store
    try:
        found = store.path("smollm2")
    except Exception:
        return None
    return Path(found) if found and Path(found).is_file() else None


class Generator:
    """m3jit generating from one prompt; `seconds(n)` is the time of n tokens after the first."""

    def __init__(self, path: Path, threads: int, prompt: str):
        from m3jit.models.program import Options
        from m3jit.models.provider import Models
        self.models, self.threads, self.prompt = Models(), threads, prompt
        self.model = self.models.load(str(path))
        self.options = Options
        self.programs: dict[int, Any] = {}

    def rate(self, tokens: int) -> float:
        """Tokens per second after the first."""
        import m3jit
        from m3jit.vm.streams import CallbackSink
        if tokens not in self.programs:
            text = self.models.assembly(self.model, options=self.options(max_tokens=tokens + 1))
            self.programs[tokens] = m3jit.assemble(text.replace("IF_EQUAL done", "NOP ; go on"))
        vm = m3jit.VM(self.programs[tokens], backend="cpu", threads=self.threads, models=self.models)
        stamps: list[float] = []
        vm.sinks["OUTPUT"] = CallbackSink("tokens", lambda _: stamps.append(time.perf_counter()))
        vm.push_input(self.prompt)
        vm.run()
        return (len(stamps) - 1) / (stamps[-1] - stamps[0]) if len(stamps) > 1 else 0.0


PROMPT = "The old lighthouse keeper climbed the stairs every evening to light the lamp, and"


def row_smollm2(args: argparse.Namespace) -> list[Row]:
    """Generation against llama.cpp, alternating; then first token and memory from fresh processes."""
    path = model_path(args)
    name = "SmolLM2 generation, 2 threads, against llama.cpp"
    if path is None:
        return [Row(name, ">= 1.0", "no model: `m3jit model get smollm2`, or --model FILE", None)]
    rows = []
    ours = Generator(path, 2, PROMPT)
    ours.rate(8)
    peer = subprocess.Popen([args.peer_python, str(ROOT / "benchmarks/peer_llama.py"), str(path), "--serve"],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def theirs() -> float:
        peer.stdin.write("generate 2\n")
        peer.stdin.flush()
        answer = json.loads(peer.stdout.readline() or "{}")
        return answer.get("tokens_per_second", 0.0)
    try:
        peer.stdout.readline()                      # what the peer is
        first = theirs()
        if not first:
            rows.append(Row(name, ">= 1.0", "no peer: llama_cpp does not run in --peer-python", None))
        else:
            pairs = [(ours.rate(48), theirs()) for _ in range(PAIRS)]
            ratio = statistics.median(a / b for a, b in pairs)
            rows.append(Row(name, ">= 1.0", f"{ratio:.2f} ({statistics.median(a for a, _ in pairs):.0f} against "
                                            f"{statistics.median(b for _, b in pairs):.0f} tokens/s)", ratio >= 1.0))
    finally:
        peer.kill()
    rows += _first_token(path) + _memory(path)
    return rows


def _first_token(path: Path) -> list[Row]:
    command = [sys.executable, "-m", "m3jit", "run", str(path), "--prompt", PROMPT, "--max-tokens", "1", "--temp", "0",
               "--threads", "2"]
    cold, warm = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as cache:
            env = environment(cache)
            for into in (cold, warm):
                start = time.perf_counter()
                subprocess.run(command, env=env, check=True, capture_output=True)
                into.append(time.perf_counter() - start)
    c, w = statistics.median(cold), statistics.median(warm)
    return [Row("start to first token, SmolLM2, cold cache", "<= 3 s", f"{c:.2f} s", c <= 3),
            Row("the same, warm cache", "<= 1 s", f"{w:.2f} s", w <= 1)]


MEMORY = """
import sys, threading, time
peak = 0
def watch():
    global peak
    while True:
        anonymous = dirty = 0
        for line in open("/proc/self/smaps_rollup"):
            if line.startswith("Anonymous:"):
                anonymous = int(line.split()[1])
            elif line.startswith("Private_Dirty:"):
                dirty = int(line.split()[1])
        peak = max(peak, anonymous, dirty)
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
from m3jit.models.program import Options
from m3jit.models.provider import Models
import m3jit
models = Models()
model = models.load(sys.argv[1])
vm = m3jit.VM(models.program(model, options=Options(max_tokens=64)), backend="cpu", threads=2, models=models)
from m3jit.vm.streams import CallbackSink
vm.sinks["OUTPUT"] = CallbackSink("tokens", lambda _: None)
vm.push_input(sys.argv[2])
vm.run()
time.sleep(0.02)
kv = sum(s.nbytes for s in (vm.machine.state_of(vm.main, n) for n in range(64)) if hasattr(s, "nbytes"))
print(peak / 1024, kv / 2 ** 20)
"""


def _memory(path: Path) -> list[Row]:
    with tempfile.TemporaryDirectory() as cache:
        env = environment(cache)
        seen = []
        for _ in range(2):                          # with an empty cache, then with a warm one
            done = subprocess.run([sys.executable, "-c", MEMORY, str(path), PROMPT], env=env, check=True,
                                  capture_output=True, text=True)
            seen.append([float(v) for v in done.stdout.split()])
    (cold, kv), (warm, _) = seen
    return [Row("memory while generating SmolLM2 (peak anonymous, from start)", "<= KV + 150 MB",
                f"{max(cold, warm):.0f} MiB, KV {kv:.0f} MiB (cold {cold:.0f}, warm {warm:.0f})",
                max(cold, warm) <= kv + 150e6 / 2 ** 20)]


def row_hello(args: argparse.Namespace) -> list[Row]:
    """`m3jit run` of a program that prints one line."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "hello.m3asm"
        source.write_text('    LOADI rText, "hello"\n    STREAM rText, OUTPUT TEXT LINE\n    HALT\n')
        times = []
        for _ in range(8):
            start = time.perf_counter()
            done = subprocess.run([sys.executable, "-m", "m3jit", "run", str(source)], capture_output=True, text=True)
            times.append(time.perf_counter() - start)
            assert done.stdout == "hello\n", done.stderr
    t = statistics.median(times[1:])
    return [Row("m3jit run of a hello program, warm", "<= 0.4 s", f"{t:.2f} s", t <= 0.4)]


ROWS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "chain": row_chain, "scalar": row_scalar, "interpreter": row_interpreter, "compile": row_compile, "call": row_call,
    "smollm2": row_smollm2, "hello": row_hello}


def machine() -> str:
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    load = os.getloadavg()[0]
    return f"{cpu}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}, load {load:.1f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated: " + ", ".join(ROWS))
    parser.add_argument("--model", help="SmolLM2 GGUF (default: the obtained one)")
    parser.add_argument("--peer-python", default=sys.executable, help="Python with llama-cpp-python and wasmtime")
    parser.add_argument("--json", help="write the rows to this file too")
    args = parser.parse_args(argv)
    print(machine())
    found: list[Row] = []
    for name in args.rows.split(","):
        for row in ROWS[name](args):
            found.append(row)
            verdict = {True: "met", False: "NOT MET", None: "no verdict"}[row.met]
            print(f"{verdict:10} | {row.name} | {row.target} | {row.seen}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine(), "rows": [asdict(r) for r in found]}, indent=1))
    return 0 if all(r.met for r in found) else 1


if __name__ == "__main__":
    sys.exit(main())
