"""Derive tests/oracles/quantisers.json: how well llama.cpp's own quantisers do on stored recipes of data.

    python tools/make_quantiser_oracles.py [--check]

Needs llama-cpp-python, whose ggml library packs the data (`ggml_quantize_chunk`, no importance matrix), and gguf and
NumPy, which measure the error; not m3jit.  --check compares with the stored file instead of writing it (exit code 1 on
a difference).  Stored: for each set of data and type the root of the mean squared error over that of the data.
"""
from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools")]

from make_tiny_models import uniform  # noqa: E402  (found through the path set above)

STORED = ROOT / "tests" / "oracles" / "quantisers.json"
ROWS, COLUMNS, SEED = 48, 1024, 20261
TYPES = ("Q4_K", "Q6_K")


def data_sets() -> dict[str, np.ndarray]:
    """Weights of several distributions, f32 [ROWS, COLUMNS]; only sums and products, so the same everywhere."""
    def draw(name: str) -> np.ndarray:
        return uniform(SEED, name, ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    bell = sum(draw(f"bell{i}") for i in range(6)) * 0.5
    by_row = np.arange(1, ROWS + 1).reshape(-1, 1)
    outliers = np.where(draw("where") > 0.995, 12.0, 1.0)
    found = {"uniform": draw("flat"), "bell": bell, "heavy tails": bell ** 3, "outliers": bell * outliers,
             "rows of different size": bell * by_row ** 2 * 1e-4, "positive": (draw("up") + 1.0) * 0.5,
             "small": bell * 2.0 ** -20, "few values": np.rint(bell * 3)}
    return {name: values.astype(np.float32) for name, values in found.items()}


def relative_error(values: np.ndarray, packed: np.ndarray, kind: str) -> float:
    apart = gguf.quants.dequantize(packed, Type[kind]).astype(np.float64) - values
    return float(np.sqrt((apart ** 2).mean() / (values.astype(np.float64) ** 2).mean()))


def peer_quantise(values: np.ndarray, kind: str) -> np.ndarray:
    """llama.cpp's blocks, uint8 [ROWS, bytes]."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    library = ctypes.CDLL(str(next(folder.glob("libggml-base.so*"))))
    quantise = library.ggml_quantize_chunk
    quantise.restype = ctypes.c_size_t
    quantise.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
                         ctypes.c_void_p]
    block, nbytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    source = np.ascontiguousarray(values)
    out = np.empty((len(source), source.shape[1] // block * nbytes), np.uint8)
    written = quantise(Type[kind].value, source.ctypes.data, out.ctypes.data, 0, len(source), source.shape[1], None)
    if written != out.nbytes:
        raise RuntimeError(f"ggml wrote {written} bytes of {kind}, expected {out.nbytes}")
    return out


def derive() -> dict:
    import llama_cpp

    rows = {}
    for name, values in data_sets().items():
        errors = {kind: relative_error(values, peer_quantise(values, kind), kind) for kind in TYPES}
        rows[name] = {"sha256": hashlib.sha256(values.tobytes()).hexdigest(), "relative_rms": errors}
    return {"peer": f"llama-cpp-python {llama_cpp.__version__}", "data": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description="Derive or check the oracle of llama.cpp's quantisers.")
    parser.add_argument("--check", action="store_true", help="compare with the stored file, write nothing")
    derived = derive() if (options := parser.parse_args()) else {}
    if options.check:
        same = json.loads(STORED.read_text()) == derived
        print(f"{STORED.name}: {'as stored' if same else 'DIFFERS'}")
        return 0 if same else 1
    STORED.write_text(json.dumps(derived, indent=1) + "\n")
    print(f"{STORED.name}: {STORED.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
