"""Prints the speed and memory table of language models, every row beside llama.cpp in the same minutes.

    python -m benchmarks.language --peer-python PYTHON [--smollm2 FILE] [--folder DIR] [--rows q4_k,q8_0,smollm2,...]

The 1.1B models have random weights (benchmarks/models.py) and are made in --folder when they are not there.  Rates are
medians of alternating pairs; a row whose peer is missing, or whose peer is under 0.8 of what it reaches on a like
machine, has no verdict.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Callable

from benchmarks import models
from benchmarks.generation import Ours, Peer, Reader
from benchmarks.peer_llama import DEEP, DEEP_GENERATED, GENERATED
from benchmarks.table import MEMORY, PROMPT, Row, environment, machine, model_path

PAIRS, READ_PAIRS = 7, 15
# llama.cpp, 2 threads of a Zen 4: what a comparison must find the peer at (0.8 of it at least)
LIKE = {("smollm2", "generate"): 120, ("smollm2", "prompt"): 352, ("q4_k", "generate"): 38, ("q4_k", "prompt"): 140,
        ("q8_0", "generate"): 23.9, ("q8_0", "prompt"): 108}


def pairs_of(ours: Callable[[], float], theirs: Callable[[], float], count: int = PAIRS) -> list[tuple[float, float]]:
    ours(), theirs()
    return [(ours(), theirs()) for _ in range(count)]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}, {min(values):.2f} to {max(values):.2f}"


def compare(name: str, path: Path, args: argparse.Namespace, targets: dict[str, float],
            of_read: float | None = None) -> list[Row]:
    """Generation and prompt of one file; of_read: the share of the plain-read rate that generation must reach."""
    ours, rows = Ours(path), []
    with Peer(args.peer_python, path) as peer:
        for kind, target in targets.items():
            title = f"{name}: {kind}, 2 threads, against llama.cpp"
            if peer.absent:
                rows.append(Row(title, f">= {target}", f"no peer: {peer.absent}", None))
                continue
            found = pairs_of(getattr(ours, kind), lambda: peer.rate(kind))
            ratios, theirs = [a / b for a, b in found], statistics.median(b for _, b in found)
            ratio, like = statistics.median(ratios), LIKE.get((name, kind), 0)
            slow = theirs < 0.8 * like
            seen = f"{spread(ratios)} ({statistics.median(a for a, _ in found):.1f} against {theirs:.1f} tokens/s" + \
                (f"; the peer is under 0.8 of {like}: no verdict)" if slow else ")")
            rows.append(Row(title, f">= {target}", seen, None if slow else ratio >= target))
    if of_read is not None:
        rows.append(_read_share(name, path, ours, of_read))
    return rows


def _read_share(name: str, path: Path, ours: Ours, target: float) -> Row:
    """Bytes of weights a second while generating, against a plain read loop that runs for as long.

    A single pass takes 7 ms, and what the machine does besides meets few of them but every text: the median of single
    passes is 1.5 % above the rate of half a second."""
    reader = Reader()
    weights = sum(t.nbytes for n, t in ours.model.file.tensors.items() if n != "token_embd.weight")
    rate = ours.generate()
    found = pairs_of(lambda: ours.generate() * weights, lambda: reader.rate(GENERATED / rate), READ_PAIRS)
    ratios = [a / b for a, b in found]
    return Row(f"{name}: generation's bytes/s of weights, of the plain-read rate", f">= {target}",
               f"{spread(ratios)} ({statistics.median(a for a, _ in found) / 1e9:.1f} of "
               f"{statistics.median(b for _, b in found) / 1e9:.1f} GB/s)", statistics.median(ratios) >= target)


def made(args: argparse.Namespace, kind: str) -> Path:
    """A model with random weights, made when it is not there."""
    path = Path(args.folder) / f"{kind}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        models.write_llama(path, models.TINYLLAMA, models.TYPES[kind])
    return path


def row_q4_k(args: argparse.Namespace) -> list[Row]:
    """1.1B in Q4_K_M."""
    return compare("q4_k", made(args, "tinyllama-q4_k_m"), args, {"generate": 1.0, "prompt": 2.0}, 0.9)


def row_q8_0(args: argparse.Namespace) -> list[Row]:
    """1.1B in Q8_0."""
    return compare("q8_0", made(args, "tinyllama-q8_0"), args, {"generate": 1.0, "prompt": 2.5}, 0.9)


def row_smollm2(args: argparse.Namespace) -> list[Row]:
    """SmolLM2-135M in Q4_1."""
    path = model_path(args)
    if path is None:
        return [Row("smollm2: generate and prompt", ">= 2.2, >= 3.0", "no model: `m3jit model get smollm2`", None)]
    return compare("smollm2", path, args, {"generate": 2.2, "prompt": 3.0})


def row_mamba(args: argparse.Namespace) -> list[Row]:
    """State-space models: the shapes of benchmarks/mamba.py that the table names."""
    from benchmarks import mamba
    rows = []
    for name in ("mamba-q8_0-130m", "mamba-f32-letters"):
        path = Path(args.folder) / f"{name}.gguf"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            mamba.write(path, mamba.MODELS[name])
        rows += mamba.compare(name, path, args.peer_python, 2, PAIRS)
    return rows


def row_batch(args: argparse.Namespace) -> list[Row]:
    """Eight contexts of SmolLM2 together."""
    from benchmarks import batch
    path = model_path(args)
    if path is None:
        return [Row("smollm2: 8 contexts", ">= 1.5, >= 0.5", "no model: `m3jit model get smollm2`", None)]
    return batch.rows(path, args.peer_python, 2, PAIRS)


def row_deep(args: argparse.Namespace) -> list[Row]:
    """Extra time per token behind 4,096 positions, 1.1B: time there less the time behind a short prompt, which is taken
    between the tokens there."""
    title, path = "extra time per token at 4k context, 1.1B, against llama.cpp", made(args, "tinyllama-q4_k_m")
    deep, ours, rounds = Ours(path), Ours(path), 7
    with Peer(args.peer_python, path) as peer:
        if peer.absent:
            return [Row(title, "<= 0.35", f"no peer: {peer.absent}", None)]
        others: list[tuple[float, float, float]] = []       # the peer's there; ours and the peer's behind a short one

        def between(n: int) -> float:
            """Behind every 16th token there it is the others' turn."""
            start = time.perf_counter()
            if n % DEEP_GENERATED == 0:
                others.append((1 / peer.rate("deep"), 1 / ours.generate(), 1 / peer.rate("generate")))
            return time.perf_counter() - start
        peer.rate("deep"), peer.rate("generate"), ours.generate()
        _, stamps = deep.stamps(DEEP, DEEP_GENERATED * (rounds + 1), between)
    gaps = [b - a for a, b in zip(stamps, stamps[1:])]
    found = []                                                 # the extra time of each round: ours, the peer's
    for k, (there, short, peer_short) in enumerate(others[:rounds]):
        behind = gaps[DEEP_GENERATED * (k + 1):DEEP_GENERATED * (k + 2) - 1]
        found.append((statistics.median(behind) - short, there - peer_short))
    ratios = [a / b for a, b in found]
    return [Row(title, "<= 0.35", f"{spread(ratios)} ({1e3 * statistics.median(a for a, _ in found):.1f} against "
                f"{1e3 * statistics.median(b for _, b in found):.1f} ms)", statistics.median(ratios) <= 0.35)]


def row_start(args: argparse.Namespace) -> list[Row]:
    """Start of the process to the first token of a 16-token prompt, cold and warm cache; peak memory."""
    path = model_path(args)
    if path is None:
        return [Row("smollm2: start to first token", "<= 3 s, <= 0.6 s", "no model: `m3jit model get smollm2`", None)]
    command = [sys.executable, "-m", "m3jit", "run", str(path), "--prompt", PROMPT, "--max-tokens", "1", "--temp", "0",
               "--threads", "2"]
    cold, warm = [], []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as cache:
            env = environment(cache)
            for into in (cold, warm):
                start = time.perf_counter()
                subprocess.run(command, env=env, check=True, capture_output=True)
                into.append(time.perf_counter() - start)
    c, w = statistics.median(cold), statistics.median(warm)
    return [Row("smollm2: start to first token, cold cache", "<= 3 s", f"{c:.2f} s", c <= 3),
            Row("smollm2: start to first token, warm cache", "<= 0.6 s", f"{w:.2f} s", w <= 0.6)]


def row_memory(args: argparse.Namespace) -> list[Row]:
    """Peak anonymous memory while generating."""
    smollm2 = model_path(args)
    rows = [] if smollm2 is None else [_memory("smollm2", smollm2, 120)]
    return rows + [_memory("1.1B Q4_K_M", made(args, "tinyllama-q4_k_m"), 250)]


def _memory(name: str, path: Path, allowed: float) -> Row:
    with tempfile.TemporaryDirectory() as cache:
        env = environment(cache)
        seen = []
        for _ in range(2):                          # with an empty cache, then with a warm one
            done = subprocess.run([sys.executable, "-c", MEMORY, str(path), PROMPT], env=env, check=True,
                                  capture_output=True, text=True)
            seen.append([float(v) for v in done.stdout.split()])
    (cold, kv), (warm, _) = seen
    return Row(f"{name}: peak memory beside mapped files", f"<= KV + {allowed:.0f} MB",
               f"{max(cold, warm):.0f} MiB, KV {kv:.0f} MiB (cold {cold:.0f}, warm {warm:.0f})",
               max(cold, warm) <= kv + allowed * 1e6 / 2 ** 20)


ROWS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "q4_k": row_q4_k, "q8_0": row_q8_0, "smollm2": row_smollm2, "mamba": row_mamba,
    "batch": row_batch, "deep": row_deep, "start": row_start,
    "memory": row_memory}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated: " + ", ".join(ROWS))
    parser.add_argument("--smollm2", dest="model", help="SmolLM2 GGUF (default: the obtained one)")
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "m3jit-bench"),
                        help="where the models with random weights are kept (1.9 GB)")
    parser.add_argument("--peer-python", default=sys.executable, help="Python with llama-cpp-python")
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
