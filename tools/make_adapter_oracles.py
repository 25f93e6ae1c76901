"""Derive tests/oracles/tiny_adapters.json.gz with llama.cpp (needs llama-cpp-python, gguf and numpy; not m3jit).

    python tools/make_adapter_oracles.py [--check]

For each case of make_tiny_adapters.py: what make_architecture_oracles.py has for a model, with the adapters applied.
"""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]

import make_tiny_adapters as adapters  # noqa: E402  (found through the path set above)
import make_tiny_architectures as tiny  # noqa: E402
from make_architecture_oracles import CONTEXT, PROMPT, compared  # noqa: E402
from make_oracles import as_gzip  # noqa: E402
from make_tiny_models import sha256  # noqa: E402
from peer_llama import LlamaPeer, PeerContext, PeerError, lc  # noqa: E402

FILE = ROOT / "tests" / "oracles" / "tiny_adapters.json.gz"


@contextlib.contextmanager
def adapted(path: Path, files: list[tuple[Path, float]], kv_type: str) -> Iterator[PeerContext]:
    """A context of a model with adapters applied."""
    peer = LlamaPeer(path)
    with peer.context(1, CONTEXT, kv_type=kv_type) as context:
        handles = [lc.llama_adapter_lora_init(peer.model, str(file).encode()) for file, _ in files]
        if not all(handles):
            raise PeerError(f"llama.cpp could not load one of {[str(file) for file, _ in files]}")
        array = (lc.llama_adapter_lora_p_ctypes * len(files))(*handles)
        scales = (ctypes.c_float * len(files))(*(scale for _, scale in files))
        if lc.llama_set_adapters_lora(context.handle, array, len(files), scales) != 0:
            raise PeerError("llama.cpp did not take the adapters")
        yield context
    peer.close()


def derive(folder: Path, name: str) -> dict[str, Any]:
    """The oracle of one case."""
    model, wanted = adapters.CASES[name]
    files = [(adapters.build(folder, adapter), scale) for adapter, scale in wanted]
    exact = tiny.build(folder, model, dequantised=True)
    with adapted(tiny.build(folder, model), files, "f16") as context, adapted(exact, files, "f32") as unrounded:
        out = compared(context, unrounded)
    return {"sha256": {adapter: sha256(file) for (adapter, _), (file, _) in zip(wanted, files)}, **out}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Derive or check the oracles of the tiny adapters.")
    parser.add_argument("--check", action="store_true", help="compare with the stored file, write nothing")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            cases = {name: derive(Path(folder), name) for name in adapters.CASES}
    except PeerError as error:
        print(f"make_adapter_oracles: {error}", file=sys.stderr)
        return 3
    found = {"peer": f"llama-cpp-python {lc.__version__}", "prompt": PROMPT, "cases": cases}
    if options.check:
        equal = json.loads(gzip.decompress(FILE.read_bytes())) == json.loads(json.dumps(found))
        print(f"{FILE.name}: {'as stored' if equal else 'DIFFERS'}")
        return 0 if equal else 1
    FILE.write_bytes(as_gzip(found))
    print(f"{FILE.name}: {FILE.stat().st_size} bytes, {len(cases)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
