"""Prints the accuracy table of language models: every weight type, architecture and format against its stored oracle.

    python -m benchmarks.accuracy [--only TEXT] [--smollm2 FILE] [--minilm FOLDER]

Tiny random models are made anew (tools/make_tiny_*.py) and must have the bytes the oracle saw.  "error" is the distance
of our logits at the last position (of vectors: all elements) from the unrounded model, beside the peer's own; "tokens"
are greedy ones, compared up to the first whose margin at the peer is within its error.  Met: an error of at most 1.5
times the peer's (rounding, and the order of sums, fall as they may), and equal tokens.  Folders are run without a
cache, which no peer rounds there; a second row with it.  Real models are shown where they have been obtained.
"""
from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
ORACLES = ROOT / "tests" / "oracles"
sys.path.insert(0, str(ROOT / "tools"))

SUMS = 2e-5                          # what logits may differ by where only the order of f32 sums does
F16_CACHE = 0.02                     # and where we round keys and values to F16 and the peer does not


@dataclass
class Row:
    """A line: error (max, mean) of ours and of the peer, tokens as text, whether the bounds are met."""
    name: str
    peer: str
    ours: tuple[float, float]
    theirs: tuple[float, float]
    tokens: str
    met: bool


def read(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((ORACLES / name).read_bytes()))


def run(path: Path, prompt: list[int], tokens: int, change: Callable[[str], str] = lambda text: text,
        adapters: Sequence[tuple[Path, float]] = ()) -> tuple[np.ndarray, list[int]]:
    """The logits from which the last of so many greedy tokens is taken, and the tokens; ends do not end it."""
    from m3jit.frontend import assemble
    from m3jit.models.program import Options
    from m3jit.models.provider import Models
    from m3jit.vm.vm import VM
    models = Models()
    loaded = tuple(models.adapter(str(file), scale) for file, scale in adapters)
    text = change(models.assembly(models.load(str(path)), options=Options(max_tokens=tokens, adapters=loaded)))
    text = text.replace("STREAM rToken, OUTPUT TEXT MODEL=rModel", "STREAM rToken, OUTPUT TEXT LINE")
    text = "\n".join("    NOP" if line.strip() == "IF_EQUAL done" else line for line in text.splitlines())
    vm, out = VM(assemble(text), backend="cpu", models=models), []
    vm.set_sink("OUTPUT", out.append)
    vm.push_input(np.array(prompt, np.int64))
    vm.run()
    return vm.get("rLogits").data.ravel(), [int(token) for token in "".join(out).split()]


def files(folder: Path) -> Iterator[tuple[str, str, Callable[[], Path], dict[str, Any], list[int], float]]:
    """GGUF models: name, peer, how to make it, the oracle's row, the prompt, what the bound starts from."""
    import make_tiny_architectures
    import make_tiny_bitnet
    import make_tiny_deepseek
    import make_tiny_models
    import make_tiny_recurrent
    for oracle in (read("tiny_logits.json.gz"), read("tiny_types.json.gz")):
        for name, row in oracle["models"].items():
            yield (f"llama/{name}", "llama.cpp", lambda name=name: make_tiny_models.build(folder, (name,))[name], row,
                   oracle["prompt"], 0.0)
    for module, file, start in ((make_tiny_architectures, "tiny_architectures", 0.0),
                                (make_tiny_recurrent, "tiny_recurrent", SUMS),
                                (make_tiny_deepseek, "tiny_deepseek", 0.0), (make_tiny_bitnet, "tiny_bitnet", 0.0),
                                (make_tiny_bitnet, "tiny_bitnet_relu2", F16_CACHE)):
        oracle = read(f"{file}.json.gz")
        prefix = {"make_tiny_deepseek": "deepseek2/", "make_tiny_bitnet": "bitnet/"}.get(module.__name__, "")
        for name, row in oracle["models"].items():
            yield (prefix + name, "transformers" if "relu2" in file else "llama.cpp",
                   lambda name=name, module=module: module.build(folder, name), row, oracle["prompt"], start)


def file_rows(folder: Path, only: str) -> Iterator[Row]:
    import make_tiny_models
    for name, peer, make, row, prompt, start in files(folder):
        if only not in name:
            continue
        path = make()
        if make_tiny_models.sha256(path) != row["sha256"]:
            raise SystemExit(f"{name}: is not the file the peer ran; the oracle is out of date")
        yield compared(name, peer, path, row, prompt, start)


def compared(name: str, peer: str, path: Path, row: dict[str, Any], prompt: list[int], start: float,
             adapters: Sequence[tuple[Path, float]] = ()) -> Row:
    """What m3jit computes against an oracle's row."""
    own = np.abs(run(path, prompt, 1, adapters=adapters)[0] - np.array(row["exact_logits"]))
    here = np.abs(np.array(row["logits"]) - np.array(row["exact_logits"]))
    theirs = max(row["max_error"], float(here.max())), max(row["mean_error"], float(here.mean()))
    bound = max(theirs[0], start / 1.5)
    until = next((i for i, margin in enumerate(row["margin"]) if margin <= bound), len(row["margin"]))
    found = run(path, prompt, len(row["tokens"]), adapters=adapters)[1]
    same = next((i for i in range(until) if found[i] != row["tokens"][i]), until)
    return Row(name, peer, (float(own.max()), float(own.mean())), theirs, f"{same} of {until}",
               own.max() <= 1.5 * bound + (start if start == SUMS else 0) and same == until)


def adapter_rows(folder: Path, only: str) -> Iterator[Row]:
    """Models with low-rank adapters."""
    import make_tiny_adapters as tiny
    import make_tiny_architectures
    from make_tiny_models import sha256
    oracle = read("tiny_adapters.json.gz")
    for case, (model, wanted) in tiny.CASES.items():
        name, row = f"adapters/{case}, {model}", oracle["cases"][case]
        if only not in name:
            continue
        adapters = [(tiny.build(folder, adapter), scale) for adapter, scale in wanted]
        if {adapter: sha256(file) for (adapter, _), (file, _) in zip(wanted, adapters)} != row["sha256"]:
            raise SystemExit(f"{name}: is not what the peer ran; the oracle is out of date")
        path = make_tiny_architectures.build(folder, model)
        yield compared(name, "llama.cpp", path, row, oracle["prompt"], 0.0, adapters)


def folder_rows(folder: Path, only: str) -> Iterator[Row]:
    """Hugging Face folders; encoders by the vectors of single tokens."""
    import m3jit
    import make_tiny_folders
    oracle = read("folder_logits.json.gz")
    for name, row in oracle["models"].items():
        if only not in f"folder/{name}":
            continue
        path = make_tiny_folders.write_folder(folder / name, name)
        write_tokenizer(path)
        theirs = row["float32_error"]
        if "rows" in row:
            found = m3jit.load_embedder(path, pooling="none", normalize=False, backend="cpu").rows(oracle["prompt"])
            own = np.abs(found - np.array(row["rows"]))
            yield Row(f"folder/{name}", "transformers", (float(own.max()), float(own.mean())), (theirs, np.nan), "",
                      own.max() <= 4 * theirs + 1e-6)
            continue
        for label, change, bound in (("", lambda text: text.replace(", sKV ", " "), 4 * theirs + 1e-6),
                                     (", F16 cache", lambda text: text, F16_CACHE)):
            logits, tokens = run(path, oracle["prompt"], 1, change)
            own = np.abs(logits - np.array(row["logits"]))
            same = tokens[0] == row["best"][-1]
            yield Row(f"folder/{name}{label}", "transformers", (float(own.max()), float(own.mean())), (theirs, np.nan),
                      f"{int(same)} of 1", own.max() <= bound and same)


def write_tokenizer(folder: Path) -> None:
    """A tokeniser of bytes, which runs on token ids do not use."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, [])).save(str(folder / "tokenizer.json"))


def smollm2_row(path: str) -> Row:
    """Perplexity of the stored text, beside llama.cpp's."""
    import m3jit
    oracle = json.loads((ORACLES / "smollm2_perplexity.json").read_text())
    model, ids, size = m3jit.load_model(path), oracle["ids"], oracle["window"]
    scores = [model.score(ids[at:at + size]) for at in range(0, len(ids) - size + 1, size)]
    ours = float(np.exp(-np.concatenate(scores).astype(np.float64).mean()))
    ratio = ours / oracle["perplexity"]
    return Row("SmolLM2-135M Q4_1", "llama.cpp", (np.nan, np.nan), (np.nan, np.nan),
               f"perplexity {ours:.3f}, peer's {oracle['perplexity']:.3f}, ratio {ratio:.4f}", abs(ratio - 1) < 0.01)


def minilm_row(path: str) -> Row:
    import m3jit
    rows = read("minilm_vectors.json.gz")
    found = m3jit.load_embedder(path).embed([row["text"] for row in rows])
    own = np.abs(found - np.array([row["vector"] for row in rows]))
    return Row("MiniLM-L6-v2", "transformers", (float(own.max()), float(own.mean())), (np.nan, np.nan),
               f"cos(guitar, instrument) {found[0] @ found[1]:.4f}", own.max() < 2e-6)


def obtained(given: str | None, variable: str, name: str) -> str | None:
    """A real model: as given, named by the environment, or in the user's cache."""
    from m3jit.errors import UserError
    from m3jit.models import store
    try:
        return given or os.environ.get(variable) or str(store.path(name))
    except UserError:
        return None


def number(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name holds TEXT")
    parser.add_argument("--smollm2", metavar="FILE")
    parser.add_argument("--minilm", metavar="FOLDER")
    wanted = parser.parse_args()
    missed = 0
    print(f"{'model':34} {'peer':13} {'error max':>10} {'mean':>8} {'peer max':>9} {'mean':>8}  tokens")

    def show(row: Row) -> None:
        nonlocal missed
        missed += not row.met
        print(f"{row.name:34} {row.peer:13} {number(row.ours[0]):>10} {number(row.ours[1]):>8} "
              f"{number(row.theirs[0]):>9} {number(row.theirs[1]):>8}  {row.tokens}{'' if row.met else '  NOT MET'}",
              flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in file_rows(Path(folder), wanted.only):
            show(row)
        for row in adapter_rows(Path(folder), wanted.only):
            show(row)
        for row in folder_rows(Path(folder) / "folders", wanted.only):
            show(row)
    for make, given, variable, name in ((smollm2_row, wanted.smollm2, "M3JIT_TEST_SMOLLM2", "smollm2"),
                                        (minilm_row, wanted.minilm, "M3JIT_TEST_MINILM", "minilm")):
        path = obtained(given, variable, name)
        if wanted.only in name and path is not None:
            show(make(path))
        elif wanted.only in name:
            print(f"{name:34} not obtained: m3jit model get {name}")
    print("every row is met" if not missed else f"{missed} rows are not met")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
