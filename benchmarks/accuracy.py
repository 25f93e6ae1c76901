"""Prints the accuracy table of language models: every weight type, architecture and format against its stored oracle.

    python -m benchmarks.accuracy [--only TEXT] [--smollm2 FILE] [--gemma3 FILE] [--minilm FOLDER]

Tiny random models are made anew (tools/make_tiny_*.py) and must have the bytes the oracle saw.  "error" is the distance
of our logits at the prompt's last position (of vectors: all elements) from the unrounded model, beside the peer's own.
"ppl" is the perplexity over a text that the model itself has written behind 20 prompts (640 tokens), beside the peer's;
limit: 1 %.  "greedy": of the likeliest tokens along that text, how many are the peer's where its margin is at least
the one stated, and where it is at least 0.05 (benchmarks/agreement.py has the rules).  Folders are run without a cache,
which no peer rounds there; a second row with it.  Real models are shown where they have been obtained.
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

from benchmarks import agreement  # noqa: E402  (finds tools through the path set above)
from benchmarks.agreement import F16_CACHE, SUMS  # noqa: E402



@dataclass
class Row:
    """A line: error (max, mean) of ours and of the peer, the text (None: it writes none), more to show, what is not
    met."""
    name: str
    peer: str
    ours: tuple[float, float]
    theirs: tuple[float, float]
    text: agreement.Agreement | None
    missed: list[str]
    more: str = ""


def read(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((ORACLES / name).read_bytes()))


def read_json(name: str) -> dict[str, Any]:
    return json.loads((ORACLES / name).read_text())


def files(folder: Path) -> Iterator[tuple[str, str, Callable[[], Path], dict[str, Any], list[int], float]]:
    """GGUF models: name, peer, how to make it, the oracle's row, the prompt, the slack of `agreement.Errors`."""
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


def compared(name: str, peer: str, path: Path, row: dict[str, Any], prompt: list[int], slack: float,
             adapters: Sequence[tuple[Path, float]] = ()) -> Row:
    """What m3jit computes against an oracle's row."""
    from m3jit.models.provider import Models
    loaded = [Models().adapter(str(file), scale) for file, scale in adapters]
    text = agreement.over_text(path, row["text"], prompt, adapters=loaded)
    errors = agreement.errors(text.logits, row, slack)
    return Row(name, peer, errors.ours, errors.theirs, text, errors.missed() + text.missed())


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
            yield Row(f"folder/{name}", "transformers", (float(own.max()), float(own.mean())), (theirs, np.nan), None,
                      beyond(own, 4 * theirs + 1e-6))
            continue
        for label, change, bound in (("", agreement.without_cache, 4 * theirs + 1e-6),
                                     (", F16 cache", agreement.unchanged, F16_CACHE)):
            text = agreement.over_text(path, row["text"], oracle["prompt"], change=change)
            own = np.abs(text.logits - np.array(row["logits"]))
            yield Row(f"folder/{name}{label}", "transformers", (float(own.max()), float(own.mean())), (theirs, np.nan),
                      text, beyond(own, bound) + text.missed())


def beyond(own: np.ndarray, limit: float) -> list[str]:
    """What is not met where the largest error has a limit, the mean one a third of it."""
    return [f"error {what} {error:.3g}, expected at most {most:.3g}"
            for what, error, most in (("max", own.max(), limit), ("mean", own.mean(), limit / 3)) if not error <= most]


def write_tokenizer(folder: Path) -> None:
    """A tokeniser of bytes, which runs on token ids do not use."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, [])).save(str(folder / "tokenizer.json"))


def greedy_runs(path: Path, runs: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Of each stored greedy run (`ids` and the peer's `tokens` behind them): our logits before each of its tokens."""
    for run in runs:
        (rows,) = agreement.all_positions(path, [[*run["ids"], *run["tokens"][:-1]]], threads=2)
        yield run, rows[len(run["ids"]) - 1:]


def equal_tokens(runs: list[tuple[dict[str, Any], np.ndarray]], limit: float) -> tuple[int, int]:
    """(equal, compared) of the likeliest tokens along the peer's text where its margin is at least the limit."""
    same, margin = (np.concatenate(parts) for parts in zip(*(
        (best == np.array(run["tokens"]), np.array(run["margin"])) for run, best in runs)))
    return int(same[margin >= limit].sum()), int((margin >= limit).sum())


def beside(name: str, ours: tuple[float, float], theirs: tuple[float, float],
           runs: list[tuple[dict[str, Any], np.ndarray]], more: str, missed: list[str]) -> Row:
    """A real model: ours, theirs: errors (max, mean) from the unrounded model or, where that is not known, distances
    from what llama.cpp said, theirs at its other settings; missed: what is not met of what the caller has judged.
    Clear are margins from 0.5, where llama.cpp agrees with itself (tests/oracles/README.md)."""
    clear, near = equal_tokens(runs, 0.5), equal_tokens(runs, agreement.SMALLEST)
    if clear[0] != clear[1] or clear[1] < 50:
        missed = [*missed, f"{clear[0]} equal tokens of {clear[1]}, expected all of at least 50"]
    return Row(name, "llama.cpp", ours, theirs, None, missed,
               f"{more}  {clear[0]} of {clear[1]} from 0.5, {near[0]} of {near[1]}")


def largest_and_mean(errors: np.ndarray) -> tuple[float, float]:
    sizes = np.abs(errors)
    return float(sizes.max()), float(sizes.mean())


def centred(errors: np.ndarray) -> np.ndarray:
    """Errors [prompts, logits] without the mean of each prompt."""
    return errors - errors.mean(axis=1, keepdims=True)


def logit_errors(ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray) -> tuple[agreement.Errors, list[str]]:
    """Logits [prompts, logits] of ours, the peer and the unrounded model: the errors without what all logits of a
    prompt have in common, and what of them is not met.  The largest error is judged with that part too."""
    own, peer = ours - exact, theirs - exact
    errors = agreement.Errors(*(largest_and_mean(centred(e)) for e in (own, peer, ours - theirs)), slack=0.0)
    missed, largest, limit = errors.missed(), np.abs(own).max(), agreement.LUCK * np.abs(peer).max()
    if not largest <= limit:
        missed.append(f"error of a logit {largest:.3g} with the common part, expected at most {limit:.3g}")
    return errors, missed


def smollm2_row(path: str) -> Row:
    """Logits behind four prompts (their first 4,096), 20 greedy runs, and perplexity of the stored text.  Errors are
    without what all logits of a prompt have in common: no probability sees that, and with so few prompts its mean is
    luck (ours 0.11 to 0.32, the peer's 0.04 to 0.18)."""
    import m3jit
    oracle, logits = read_json("smollm2_perplexity.json"), np.load(ORACLES / "smollm2_logits.npz")
    model, ids, size = m3jit.load_model(path), oracle["ids"], oracle["window"]
    scores = [model.score(ids[at:at + size]) for at in range(0, len(ids) - size + 1, size)]
    ours = float(np.exp(-np.concatenate(scores).astype(np.float64).mean()))
    ratio = ours / oracle["perplexity"]
    runs, first = [], []
    for run, rows in greedy_runs(Path(path), read_json("smollm2_greedy.json")["prompts"]):
        runs.append((run, rows.argmax(axis=1)))
        first.append(rows[0, :4096])
    theirs, exact = (np.array([logits[f"{which}{i}_first"] for i in logits["prompts"]]) for which in ("peer", "exact"))
    errors, missed = logit_errors(np.array(first)[logits["prompts"]], theirs, exact)
    return beside("SmolLM2-135M Q4_1", errors.ours, errors.theirs, runs,
                  f"{ours:>7.4g} {oracle['perplexity']:>7.4g} {ratio:>7.4f}",
                  missed + ([] if abs(ratio - 1) <= agreement.PERPLEXITY else ["perplexity"]))


def gemma3_row(path: str) -> Row:
    """Logits behind seven prompts (the peer's 64 largest) and greedy runs."""
    runs, apart = [], []
    oracle = read_json("gemma3_greedy.json")["prompts"]
    for run, rows in greedy_runs(Path(path), oracle):
        runs.append((run, rows.argmax(axis=1)))
        apart.append(rows[0, run["top"]] - np.array(run["logits"]))
    spread = np.array([run["spread"] for run in oracle])
    theirs = float(spread[:, 0].max()), float(spread[:, 1].mean())
    ours = largest_and_mean(np.array(apart))
    return beside("Gemma 3 270M Q4_K_M", ours, theirs, runs, f"{'':23}", agreement.beyond_luck(ours, theirs))


def minilm_row(path: str) -> Row:
    import m3jit
    rows = read("minilm_vectors.json.gz")
    found = m3jit.load_embedder(path).embed([row["text"] for row in rows])
    own = np.abs(found - np.array([row["vector"] for row in rows]))
    return Row("MiniLM-L6-v2", "transformers", (float(own.max()), float(own.mean())), (np.nan, np.nan), None,
               beyond(own, 2e-6), f"cos(guitar, instrument) {found[0] @ found[1]:.4f}")


def obtained(given: str | None, variable: str, name: str) -> str | None:
    """A real model: as given, named by the environment, or in the user's cache (which has no Gemma)."""
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
    parser.add_argument("--gemma3", metavar="FILE")
    parser.add_argument("--minilm", metavar="FOLDER")
    wanted = parser.parse_args()
    missed = 0
    print(f"{'model':30} {'peer':12} {'error max':>9} {'mean':>7} {'peer max':>9} {'mean':>7} {'ppl':>7} {'peer':>7} "
          f"{'ratio':>7}  greedy")

    def show(row: Row) -> None:
        nonlocal missed
        missed += bool(row.missed)
        text = row.text
        found = "" if text is None else (
            f"{text.perplexity:>7.4g} {text.peer:>7.4g} {text.ratio:>7.4f}  {text.clear[0]} of {text.clear[1]} from "
            f"{text.limit:.2f}, {text.near[0]} of {text.near[1]}")
        print(f"{row.name:30} {row.peer:12} {number(row.ours[0]):>9} {number(row.ours[1]):>7} "
              f"{number(row.theirs[0]):>9} {number(row.theirs[1]):>7} {found}{row.more}"
              f"{'  NOT MET: ' + '; '.join(row.missed) if row.missed else ''}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in file_rows(Path(folder), wanted.only):
            show(row)
        for row in adapter_rows(Path(folder), wanted.only):
            show(row)
        for row in folder_rows(Path(folder) / "folders", wanted.only):
            show(row)
    for make, given, variable, name in ((smollm2_row, wanted.smollm2, "M3JIT_TEST_SMOLLM2", "smollm2"),
                                        (gemma3_row, wanted.gemma3, "M3JIT_TEST_GEMMA3", "gemma3"),
                                        (minilm_row, wanted.minilm, "M3JIT_TEST_MINILM", "minilm")):
        path = obtained(given, variable, name)
        if wanted.only in name and path is not None:
            show(make(path))
        elif wanted.only in name:
            how = f"set {variable} to the file of Gemma 3 270M" if name == "gemma3" else f"m3jit model get {name}"
            print(f"{name:30} not obtained: {how}")
    print("every row is met" if not missed else f"{missed} rows are not met")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
