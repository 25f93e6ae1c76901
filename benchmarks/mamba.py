"""Prints the speed of state-space models beside llama.cpp's, in the same minutes.

    python -m benchmarks.mamba --peer-python PYTHON [--folder DIR] [--rows mamba-q8_0-130m,...] [--threads N]

The models have the shapes of Mamba-130M and Mamba-2-130M (24 layers of width 768, 1536 channels; 16 states a channel,
or 128 in 24 heads), or of a model of letters with 0.33 million parameters (4 layers of width 96, F32), and random
weights; they are made in --folder when they are not there.  Rates are medians of
alternating pairs; a row whose peer is missing has no verdict.
"""
from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.generation import Ours, Peer
from benchmarks.language import pairs_of, spread
from benchmarks.models import BLOCKS, SPREAD, add_vocabulary
from benchmarks.table import Row, machine

TAPS, CONTEXT, HEADS = 4, 8192, 24
TARGETS = {"generate": 1.0, "prompt": 1.0}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; there are twice as many channels as the width."""
    arch: str
    kind: str
    states: int
    layers: int = 24
    width: int = 768
    rank: int = 48
    vocabulary: int = 50280


MODELS = {f"{arch}-{kind.lower()}-130m": Shape(arch, kind, states)
          for arch, states in (("mamba", 16), ("mamba2", 128)) for kind in ("Q8_0", "F32")}
MODELS["mamba-f32-letters"] = Shape("mamba", "F32", 16, layers=4, width=96, rank=6, vocabulary=512)


def write(path: Path, s: Shape, seed: int = 1) -> None:
    """A model with random weights; its vocabulary is 256 bytes and made-up words."""
    import gguf
    arch, kind, n, channels = s.arch, s.kind, s.states, 2 * s.width
    writer = gguf.GGUFWriter(str(path), arch)
    rng = np.random.default_rng(seed)
    writer.add_name("random weights")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(s.width)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_inner_size(channels)
    writer.add_ssm_state_size(n)
    writer.add_ssm_time_step_rank(HEADS if arch == "mamba2" else s.rank)
    if arch == "mamba2":
        writer.add_ssm_group_count(1)
    add_vocabulary(writer, s.vocabulary)

    def matrix(name: str, rows: int, columns: int) -> None:
        if kind == "F32" or columns % 32:
            return floats(name, (rng.standard_normal((rows, columns)) * SPREAD).astype(np.float32))
        block, make = BLOCKS[kind]
        writer.add_tensor(name, make(rng, rows * columns // block).reshape(rows, -1),
                          raw_dtype=gguf.GGMLQuantizationType[kind])

    def floats(name: str, values: np.ndarray) -> None:
        writer.add_tensor(name, values.astype(np.float32))
    matrix("token_embd.weight", s.vocabulary, s.width)
    floats("output_norm.weight", np.ones(s.width))
    mixed = channels + 2 * n * (arch == "mamba2")
    for i in range(s.layers):
        b = f"blk.{i}."
        floats(b + "attn_norm.weight", np.ones(s.width))
        matrix(b + "ssm_in.weight", channels + mixed + HEADS if arch == "mamba2" else 2 * channels, s.width)
        floats(b + "ssm_conv1d.weight", rng.standard_normal((mixed, TAPS)) / 2)
        floats(b + "ssm_conv1d.bias", np.zeros(mixed))
        matrix(b + "ssm_out.weight", s.width, channels)
        if arch == "mamba2":
            floats(b + "ssm_norm.weight", np.ones((1, channels)))
            floats(b + "ssm_dt.bias", rng.uniform(-5, -1, HEADS))
            floats(b + "ssm_a", -rng.uniform(1, 16, (HEADS, 1)))
            floats(b + "ssm_d", np.ones((HEADS, 1)))
        else:
            matrix(b + "ssm_x.weight", s.rank + 2 * n, channels)
            matrix(b + "ssm_dt.weight", channels, s.rank)
            floats(b + "ssm_dt.bias", rng.uniform(-5, -1, channels))
            floats(b + "ssm_a", -np.tile(np.arange(1, n + 1), (channels, 1)))
            floats(b + "ssm_d", np.ones(channels))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare(name: str, path: Path, python: str, threads: int, pairs: int) -> list[Row]:
    """Generation and prompt of one file."""
    ours, rows = Ours(path, threads), []
    with Peer(python, path, threads) as peer:
        for kind, target in TARGETS.items():
            title = f"{name}: {kind}, {threads} threads, against llama.cpp"
            if peer.absent:
                rows.append(Row(title, f">= {target}", f"no peer: {peer.absent}", None))
                continue
            found = pairs_of(getattr(ours, kind), lambda: peer.rate(kind), pairs)
            ratios = [a / b for a, b in found]
            a, b = (statistics.median(side) for side in zip(*found))
            rows.append(Row(title, f">= {target}", f"{spread(ratios)} ({a:.1f} against {b:.1f} tokens/s)",
                            statistics.median(ratios) >= target))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(MODELS), help="comma-separated: " + ", ".join(MODELS))
    parser.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "m3jit-bench"),
                        help="where the models are kept (1.4 GB)")
    parser.add_argument("--peer-python", default=sys.executable, help="Python with llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args(argv)
    print(machine())
    met = []
    for name in args.rows.split(","):
        path = Path(args.folder) / f"{name}.gguf"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, MODELS[name])
        for row in compare(name, path, args.peer_python, args.threads, args.pairs):
            met.append(row.met)
            verdict = {True: "met", False: "NOT MET", None: "no verdict"}[row.met]
            print(f"{verdict:10} | {row.name} | {row.target} | {row.seen}", flush=True)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
