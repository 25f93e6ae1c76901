"""Matrix kernels for one token as launches of one region, beside plain reads of as many bytes in launches of the same
sizes: what the ends of launches cost, and what the kernels.

    python -m benchmarks.launches [--format Q4_K] [--width 2048] [--ffn 5632] [--layers 22] [--threads 2]
"""
from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Callable, Sequence

import numpy as np

from benchmarks.kernels import packed, read_kernel
from m3jit.backends.cpu.engine import Engine
from m3jit.ir.loop import Kernel
from m3jit.ir.plan import Barrier, Exit, FrameWord, Launch, Plan, PlanBlock, Scalar
from m3jit.isa.types import DTYPES
from m3jit.kernels import qmatmul, quantize
from m3jit.vm.native import NO_BUDGET

PIECE = 1 << 15                               # bytes one group of the read loop sums

Work = Sequence[tuple[Kernel, Sequence[Any]]]  # launches: kernel, arguments


def region(engine: Engine, name: str, work: Work, threads: int) -> Callable[[], None]:
    """A function that runs the launches, each when the one before has ended."""
    first, pointers, body = int(FrameWord.FIRST_FREE), [], []
    for kernel, arguments in work:
        scalars = []
        for a in arguments:
            if isinstance(a, np.ndarray):
                scalars.append(Scalar("frame", "ptr", (), {"word": first + len(pointers)}))
                pointers.append(a)
                body.append(scalars[-1])
            else:
                scalars.append(Scalar("const", "i64", (), {"value": a}))
        body += [Launch(kernel, scalars), Barrier()]
    frame = np.zeros(first + len(pointers), np.int64)
    compiled = engine.region(Plan(name, len(frame), [PlanBlock("entry", body=body, end=Exit(0, []))]))
    frame[FrameWord.BUDGET] = NO_BUDGET
    frame[first:] = [a.ctypes.data for a in pointers]
    return lambda: compiled.run(frame, threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="Q4_K")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    args = parser.parse_args()
    one = packed(np.random.default_rng(0), args.format, args.ffn, args.width)
    pairs, size = args.layers, one.size
    weights = np.tile(one, 2 * pairs)
    single = [weights[i * size:(i + 1) * size] for i in range(2 * pairs)]
    double = [weights[2 * i * size:2 * (i + 1) * size] for i in range(pairs)]
    records = quantize.activation_bytes(1, args.ffn, DTYPES[args.format].block)
    act = np.random.default_rng(1).integers(0, 127, records, dtype=np.uint8)
    y, sums = np.empty(args.ffn, np.float32), np.empty((weights.size // PIECE + 1) * 64, np.int32)
    read, matmul, gated = read_kernel(PIECE), qmatmul.qmatmul(args.format), qmatmul.qmatmul_gated(args.format)
    gates: list[list[np.ndarray]] = [[both] for both in double]            # tiles of one and the other in turn
    if len(qmatmul.gated_weights(DTYPES[args.format])) == 2:
        gates = [[a, b] for a, b in zip(single[::2], single[1::2])]
    engine = Engine()

    def reads(parts: Sequence[np.ndarray]) -> Work:
        return [(read, [part, sums, part.size // PIECE]) for part in parts]
    work = {
        "plain read, one launch": reads([weights]),
        f"plain read, launches of {2 * size / 1e6:.1f} MB": reads(double),
        "gate and up, a launch each": [(gated, [act, *both, y, 1, args.width, args.ffn]) for both in gates],
        f"plain read, launches of {size / 1e6:.1f} MB": reads(single),
        "down, a launch each": [(matmul, [act, w, y, 1, args.ffn, args.width]) for w in single]}
    runs = {name: region(engine, f"work{i}", launches, args.threads) for i, (name, launches) in enumerate(work.items())}
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            rates[name].append(weights.size / (time.perf_counter() - start) / 1e9)
    whole = next(iter(rates.values()))
    for name, found in rates.items():
        share = statistics.median(a / b for a, b in zip(found, whole))
        print(f"{name:32} {statistics.median(found):6.1f} GB/s ({max(found):6.1f})   {share:.3f} of one launch")


if __name__ == "__main__":
    main()
