"""Derive the oracles of the tiny models with llama.cpp (needs llama-cpp-python, gguf and numpy; not m3jit).

    python tools/make_architecture_oracles.py [--check] [--only NAME]

tests/oracles/tiny_architectures.json.gz for make_tiny_architectures.py, tiny_recurrent.json.gz for
make_tiny_recurrent.py.  For each model: `logits` of the prompt's last token as llama.cpp computes them with its
f16 cache; `exact_logits` by llama.cpp too, from the same weights dequantised to F32 and with an f32 cache, so that
no rounding but that of f32 sums is left (and GELU's, which llama.cpp takes from a table of f16 values); the largest and
mean difference between the two over all positions; greedy `tokens` with the margin between the two largest logits;
`text` (`oracle_text.row`): perplexity and greedy tokens over 20 prompts and what the model says behind them.
--check derives everything again and compares (exit code 1 on a difference).
"""
from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]

import make_tiny_architectures  # noqa: E402  (found through the path set above)
import make_tiny_bitnet  # noqa: E402
import make_tiny_deepseek  # noqa: E402
import make_tiny_recurrent  # noqa: E402
import oracle_text  # noqa: E402
from make_oracles import as_gzip, greedy_run, peer_after, peer_positions, rounded  # noqa: E402
from make_tiny_models import sha256  # noqa: E402
from peer_llama import LlamaPeer, PeerContext, PeerError, lc  # noqa: E402

ORACLES = ROOT / "tests" / "oracles"
MAKERS = {"tiny_architectures": make_tiny_architectures, "tiny_deepseek": make_tiny_deepseek,
          "tiny_bitnet": make_tiny_bitnet,
          "tiny_recurrent": make_tiny_recurrent}
PROMPT = [4 + i * 37 % 256 for i in range(24)]
GREEDY_TOKENS, CONTEXT = 8, 64


def derive(tiny: Any, folder: Path, name: str, threads: int) -> dict[str, Any]:
    """The oracle of one model of a maker."""
    path = tiny.build(folder, name)
    peer, exact = LlamaPeer(path), LlamaPeer(tiny.build(folder, name, dequantised=True))
    with peer.context(threads, CONTEXT) as context, exact.context(threads, CONTEXT, kv_type="f32") as unrounded:
        out = compared(context, unrounded)
    peer.close()
    exact.close()
    return {"sha256": sha256(path), **out}


def compared(context: PeerContext, unrounded: PeerContext) -> dict[str, Any]:
    """What llama.cpp computes in a context, beside the same without rounding."""
    positions, reference = context.decode_all(PROMPT), unrounded.decode_all(PROMPT)
    context.clear()
    tokens, margins, last = greedy_run(context, list(PROMPT), GREEDY_TOKENS)
    text = oracle_text.drawn(PROMPT, context.n_vocab, peer_after(unrounded))
    found, exact = (peer_positions(each, text, len(PROMPT)) for each in (context, unrounded))
    error = np.abs(positions - reference)
    return {"logits": rounded(last), "exact_logits": rounded(reference[-1]),
            "max_error": float(error.max()), "mean_error": float(error.mean()), "tokens": tokens, "margin": margins,
            "text": oracle_text.row(text, exact, found)}


def make(which: str, threads: int, check: bool) -> bool:
    """One file; with check whether what is derived is what is stored."""
    tiny, path = MAKERS[which], ORACLES / f"{which}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        models = {name: derive(tiny, Path(folder), name, threads) for name in tiny.names()}
    found = {"peer": f"llama-cpp-python {lc.__version__}", "prompt": PROMPT, "models": models}
    if check:
        equal = json.loads(gzip.decompress(path.read_bytes())) == json.loads(json.dumps(found))
        print(f"{path.name}: {'as stored' if equal else 'DIFFERS'}")
        return equal
    path.write_bytes(as_gzip(found))
    print(f"{path.name}: {path.stat().st_size} bytes, {len(models)} models")
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Derive or check the oracles of the tiny architectures.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=tuple(MAKERS), help="one file instead of all")
    parser.add_argument("--check", action="store_true", help="compare with the stored file, write nothing")
    options = parser.parse_args(arguments)
    try:
        equal = [make(which, options.threads, options.check) for which in ([options.only] if options.only else MAKERS)]
    except PeerError as error:
        print(f"make_architecture_oracles: {error}", file=sys.stderr)
        return 3
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
