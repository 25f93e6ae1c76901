"""wasmtime as a peer for compiled scalar code: a linear congruential generator with a branch on its bits.

    for n in range(N):  x = x * 6364136223846793005 + 1442695040888963407   (modulo 2^64)
                        if (x >> 33) & 1: acc += x  else: acc ^= x
    return acc

The branch depends on the data, so the loop cannot be folded away; results of short runs are checked against Python
integers, and the timed runs against one another. Fuel and epoch interruption are off (wasmtime's
fastest setting); nothing of m3jit is imported.

    python benchmarks/peer_wasmtime.py [--iterations N] [--rounds R] [--json]
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib import metadata
from typing import Any

try:
    import wasmtime
except (ImportError, OSError) as error:  # OSError: installed, but its library does not load
    wasmtime = None
    UNAVAILABLE = f"{type(error).__name__}: {error}"
else:
    UNAVAILABLE = ""

EXIT_NO_PEER, EXIT_WRONG = 3, 5
MULTIPLIER, INCREMENT, MASK = 6364136223846793005, 1442695040888963407, (1 << 64) - 1
SEED = 0x9E3779B97F4A7C15

WAT = f"""
(module
  (func (export "lcg") (param $n i64) (param $x i64) (result i64)
    (local $acc i64)
    (if (i64.eqz (local.get $n)) (then (return (i64.const 0))))
    (loop $next
      (local.set $x (i64.add (i64.mul (local.get $x) (i64.const {MULTIPLIER})) (i64.const {INCREMENT})))
      (if (i32.wrap_i64 (i64.and (i64.shr_u (local.get $x) (i64.const 33)) (i64.const 1)))
        (then (local.set $acc (i64.add (local.get $acc) (local.get $x))))
        (else (local.set $acc (i64.xor (local.get $acc) (local.get $x)))))
      (local.set $n (i64.sub (local.get $n) (i64.const 1)))
      (br_if $next (i64.ne (local.get $n) (i64.const 0))))
    (local.get $acc)))
"""


def expected(iterations: int, seed: int = SEED) -> int:
    """The loop in Python integers, as an unsigned 64-bit value (about 0.2 us an iteration)."""
    x, acc = seed, 0
    for _ in range(iterations):
        x = (x * MULTIPLIER + INCREMENT) & MASK
        acc = (acc + x) & MASK if x >> 33 & 1 else acc ^ x
    return acc


def loop_function() -> Any:
    """The compiled loop: f(iterations, seed) -> accumulator, unsigned. Compilation is not part of the timing."""
    config = wasmtime.Config()
    config.consume_fuel = False
    config.epoch_interruption = False
    config.cranelift_opt_level = "speed"
    store = wasmtime.Store(wasmtime.Engine(config))
    module = wasmtime.Module(store.engine, wasmtime.wat2wasm(WAT))
    exported = wasmtime.Instance(store, module, []).exports(store)["lcg"]

    def run(iterations: int, seed: int = SEED) -> int:
        signed = seed - (1 << 64) if seed >> 63 else seed
        return exported(store, iterations, signed) & MASK

    return run


def measure(iterations: int = 20_000_000, rounds: int = 7) -> dict[str, Any]:
    """Nanoseconds per iteration over `rounds` calls, after checked runs short enough for Python.

    Raises ArithmeticError when the module does not compute the loop.
    """
    run = loop_function()
    for short in (0, 1, 2, 1000, 100_003):
        if run(short) != expected(short):
            raise ArithmeticError(f"wasmtime's result after {short} iterations is {run(short)}, not {expected(short)}")
    result = run(iterations)
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        again = run(iterations)
        samples.append((time.perf_counter() - start) / iterations * 1e9)
        if again != result:
            raise ArithmeticError(f"two runs of {iterations} iterations gave {result} and {again}")
    return {
        "peer": f"wasmtime {metadata.version('wasmtime')}", "iterations": iterations, "rounds": rounds,
        "result": result,
        "ns_per_iteration": statistics.median(samples), "best": min(samples), "worst": max(samples),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the scalar LCG loop in wasmtime.")
    parser.add_argument("--iterations", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args(arguments)
    if wasmtime is None:
        print(
            f"peer_wasmtime: wasmtime cannot be imported in {sys.executable} ({UNAVAILABLE}); install it there with "
            "pip install wasmtime, or use the environment that has it", file=sys.stderr,
        )
        return EXIT_NO_PEER
    try:
        report = measure(options.iterations, options.rounds)
    except ArithmeticError as error:
        print(f"peer_wasmtime: {error}", file=sys.stderr)
        return EXIT_WRONG
    if options.json:
        print(json.dumps(report))
    else:
        print(
            f"{report['peer']}: {report['ns_per_iteration']:.3f} ns/iteration median "
            f"({report['best']:.3f}..{report['worst']:.3f}) over {report['iterations']} iterations, "
            f"acc {report['result']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
