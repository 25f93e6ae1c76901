"""Derive the stored llama.cpp oracles of tests/oracles/ (needs llama-cpp-python, gguf and numpy; not m3jit).

    python tools/make_oracles.py MODEL.gguf [--only tokens greedy logits perplexity tiny types] [--threads 2] [--check]

MODEL is SmolLM2-135M-Instruct.Q4_1.gguf; its SHA-256 goes into each file. --check derives everything again and compares
it with the stored files instead of writing them (exit code 1 on a difference): the live run of the stored oracles.
tests/oracles/README.md describes the files. Contexts have flash attention off and an f16 key/value cache; a prompt is
one batch, generated tokens are fed one at a time.
"""
from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]

import make_tiny_models  # noqa: E402  (found through the path set above)
from nasty_strings import SEED, nasty_strings, special_strings  # noqa: E402
import oracle_text  # noqa: E402
from oracle_prompts import GREEDY_TOKENS, LOGIT_PROMPTS, PROMPTS, TINY_GREEDY_TOKENS, TINY_PROMPT  # noqa: E402
from peer_llama import LlamaPeer, PeerError, lc  # noqa: E402
from reference_llama import ReferenceLlama  # noqa: E402

ORACLES = ROOT / "tests" / "oracles"
WINDOW, WINDOWS = 512, 9
PREFIX, TOP = 4096, 32  # logits stored: the first PREFIX of the vocabulary and the TOP largest
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "prompt token by token": {}, "flash attention": {"flash": True}, "f32 cache": {"kv_type": "f32"},
}
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class Maker:
    """Derives each oracle from one opened model."""

    def __init__(self, model: Path, threads: int) -> None:
        self.model, self.threads = model, threads
        self.peer = LlamaPeer(model)
        self.source = {"peer": f"llama-cpp-python {lc.__version__}", "model": model.name, "model_sha256": MODEL_SHA256}

    def tokens(self) -> dict[str, Any]:
        """Ids of nasty strings without, and of some also with special tokens parsed; no BOS or EOS added."""
        plain, special = nasty_strings(), special_strings()
        return {
            **self.source, "seed": SEED,
            "plain": [[text, self.peer.tokenize(text)] for text in plain],
            "special": [[text, self.peer.tokenize(text, parse_special=True)] for text in special],
        }

    def greedy(self) -> dict[str, Any]:
        """Greedy continuations; `margin[i]` is the peer's largest logit minus its second largest where token i was
        chosen. Generation goes on past an end-of-text token; `end` is the position of the first one, or null.
        `exact[i]` is what the float64 model would choose after the prompt and the peer's tokens before i, and
        `otherwise` the [i, token] where the peer, at another of its own settings, chooses another token there."""
        rows = []
        model = ReferenceLlama(self.model)
        for prompt in PROMPTS:
            ids = self.peer.tokenize(prompt, add_special=True)
            with self.peer.context(self.threads) as context:
                tokens, margins, _ = greedy_run(context, ids, GREEDY_TOKENS)
            text = b"".join(map(self.peer.piece, tokens)).decode("utf-8", "replace")
            end = next((i for i, token in enumerate(tokens) if self.peer.is_end(token)), None)
            exact = model.forward(ids + tokens[:-1], last_only=False)[len(ids) - 1:].argmax(axis=1).tolist()
            rows.append({
                "prompt": prompt, "ids": ids, "tokens": tokens, "margin": margins, "exact": exact,
                "otherwise": self.otherwise(ids, tokens), "end": end, "text": text,
            })
        return {**self.source, "prompts": rows}

    def otherwise(self, ids: list[int], tokens: list[int]) -> dict[str, list[tuple[int, int]]]:
        """Where other settings of the peer, led along the same tokens, would choose another one: its own spread."""
        out = {}
        for name, settings in OTHER_SETTINGS.items():
            with self.peer.context(self.threads, **settings) as context:
                for step in ([[token] for token in ids] if name == "prompt token by token" else [ids]):
                    logits = context.decode(step)
                chosen = [int(logits.argmax())]
                chosen += [int(context.decode([token]).argmax()) for token in tokens[:-1]]
            out[name] = [(i, other) for i, (other, token) in enumerate(zip(chosen, tokens)) if other != token]
        return out

    def logits(self) -> dict[str, np.ndarray]:
        """Last-position logits of some prompts, by llama.cpp and by the float64 model, as arrays for an .npz file."""
        exact = ReferenceLlama(self.model)
        out: dict[str, np.ndarray] = {"prompts": np.array(LOGIT_PROMPTS), "model_sha256": np.array(MODEL_SHA256)}
        for index in LOGIT_PROMPTS:
            ids = self.peer.tokenize(PROMPTS[index], add_special=True)
            with self.peer.context(self.threads) as context:
                logits = context.decode(ids).copy()
            reference = exact.forward(ids)
            for name, values in (("peer", logits), ("exact", reference)):
                top = np.argsort(-values, kind="stable")[:TOP]
                out[f"{name}{index}_first"] = values[:PREFIX].astype(np.float32)
                out[f"{name}{index}_top"] = top.astype(np.int32)
                out[f"{name}{index}_top_logits"] = values[top].astype(np.float32)
                wide = values.astype(np.float64)
                logsumexp = wide.max() + np.log(np.exp(wide - wide.max()).sum())
                out[f"{name}{index}_stats"] = np.array([wide.mean(), wide.std(), logsumexp])
            error = np.abs(logits - reference)
            out[f"error{index}"] = np.array([error.max(), error.mean()])
        return out

    def perplexity(self) -> dict[str, Any]:
        """Mean negative log-likelihood (nats) of positions 1..511 of windows in a row, each from an empty context."""
        text = held_text()
        ids = self.peer.tokenize(text)[:WINDOW * WINDOWS]
        if len(ids) < WINDOW * WINDOWS:
            raise PeerError(f"the text has {len(ids)} tokens, but {WINDOW * WINDOWS} are needed")
        windows = []
        for start in range(0, len(ids), WINDOW):
            window = ids[start:start + WINDOW]
            with self.peer.context(self.threads, WINDOW) as context:
                logits = context.decode_all(window)[:-1].astype(np.float64)
            top = logits.max(axis=1)
            chosen = logits[np.arange(WINDOW - 1), window[1:]]
            windows.append(float((top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - chosen).mean()))
        mean = sum(windows) / len(windows)
        return {
            **self.source, "text": "perplexity_text.txt", "window": WINDOW, "scored_per_window": WINDOW - 1,
            "window_nll": windows, "mean_nll": mean, "perplexity": float(np.exp(mean)), "ids": ids,
        }

    def types(self) -> dict[str, Any]:
        """As `tiny`, for the other weight types."""
        return self.tiny(tuple(make_tiny_models.MORE_TYPES))

    def tiny(self, names: tuple[str, ...] = tuple(make_tiny_models.TYPES)) -> dict[str, Any]:
        """Logits of every prompt position and a greedy run for each tiny model, with the float64 model's logits; and
        perplexity and greedy tokens over a text."""
        with tempfile.TemporaryDirectory() as folder:
            paths = make_tiny_models.build(folder, names)
            readable = dict(paths)
            if "F64" in names:                   # llama.cpp computes no products of them
                readable["F64"] = Path(folder) / "f64-as-f32.gguf"
                make_tiny_models.write_model(readable["F64"], "F64", as_f32=True)
            rows = {name: tiny_row(paths[name], readable[name], self.threads) for name in names}
        return {"peer": self.source["peer"], "seed": make_tiny_models.SEED, "prompt": TINY_PROMPT, "models": rows}


def tiny_row(path: Path, readable: Path, threads: int) -> dict[str, Any]:
    """What is stored of one tiny model.  readable: the file for llama.cpp."""
    exact_model, peer, prompt = ReferenceLlama(path, keep=True), LlamaPeer(readable), list(TINY_PROMPT)
    text = oracle_text.drawn(prompt, make_tiny_models.VOCAB, exact_model.forward)
    with peer.context(threads, 64) as context:
        positions = context.decode_all(TINY_PROMPT)
        context.clear()
        tokens, margins, last = greedy_run(context, prompt, TINY_GREEDY_TOKENS)
        found = peer_positions(context, text, len(prompt))
    peer.close()
    exact = exact_model.forward(prompt, last_only=False)
    exact_found = np.array([oracle_text.behind_prompts(exact_model.forward(ids, last_only=False), len(prompt))
                            for ids in text])
    return {
        "sha256": make_tiny_models.sha256(path), "tokens": tokens, "margin": margins,
        "logits": rounded(last), "exact_logits": rounded(exact[-1]),
        "argmax": positions.argmax(axis=1).tolist(), "exact_argmax": exact.argmax(axis=1).tolist(),
        "max_error": float(np.abs(positions - exact).max()), "mean_error": float(np.abs(positions - exact).mean()),
        "text": oracle_text.row(text, exact_found, found)}


def peer_positions(context: Any, text: list[list[int]], prompt: int) -> np.ndarray:
    """llama.cpp's logits before each token that is drawn behind the prompts [.., vocabulary]."""
    found = []
    for ids in text:
        context.clear()
        found.append(oracle_text.behind_prompts(context.decode_all(ids), prompt))
    return np.array(found)


def peer_after(context: Any) -> Callable[[list[int]], np.ndarray]:
    """`after` of `oracle_text.drawn` for llama.cpp: a longer text by its last token."""
    before: list[int] = []

    def after(ids: list[int]) -> np.ndarray:
        nonlocal before
        longer = before and ids[:-1] == before
        if not longer:
            context.clear()
        before = ids
        return context.decode(ids[-1:] if longer else ids).astype(np.float64)
    return after


def rounded(values: np.ndarray) -> list[float]:
    """float32 values as the shortest decimals that read back as the same float32."""
    return [float(str(value)) for value in values.astype(np.float32)]


def greedy_run(context: Any, prompt: list[int], count: int) -> tuple[list[int], list[float], np.ndarray]:
    """`count` argmax tokens (lowest id on a tie), the top-2 margin at each, and the logits after the prompt."""
    logits = context.decode(prompt)
    first = logits.copy()
    tokens, margins = [], []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        runner_up, best = np.partition(logits, -2)[-2:]
        margins.append(round(float(best) - float(runner_up), 5))
        logits = context.decode(tokens[-1:])
    return tokens, margins, first


def held_text() -> str:
    """The stored text of the perplexity oracle; where it is missing, taken from Python's own language reference.

    The stored file is what counts: pydoc's topics change from one Python release to the next.
    """
    path = ORACLES / "perplexity_text.txt"
    if not path.exists():
        topics = pydoc_data.topics.topics
        chosen = ("if", "lists", "exceptions", "naming", "import", "context-managers", "operator-summary", "numbers")
        text = "\n".join(topics[name].strip() + "\n" for name in chosen)
        path.write_text(text[:26_000].rsplit("\n", 1)[0] + "\n", encoding="utf-8", newline="\n")
    return path.read_text(encoding="utf-8")


def as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def as_gzip(value: Any) -> bytes:
    return gzip.compress(as_json(value), 9, mtime=0)


def as_npz(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


FILES: dict[str, tuple[str, Callable[[Any], bytes]]] = {
    "tokens": ("smollm2_tokens.json.gz", as_gzip),
    "greedy": ("smollm2_greedy.json", as_json),
    "logits": ("smollm2_logits.npz", as_npz),
    "perplexity": ("smollm2_perplexity.json", as_json),
    "tiny": ("tiny_logits.json.gz", as_gzip),
    "types": ("tiny_types.json.gz", as_gzip),
}


def stored(name: str) -> Any:
    """The content of a stored oracle file."""
    path = ORACLES / FILES[name][0]
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {key: arrays[key] for key in arrays.files}
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


def same(name: str, derived: Any) -> bool:
    """Whether a derived oracle equals the stored one, number for number.

    llama.cpp's sums depend on its build and CPU: on another machine margins, logits and near-tied tokens may differ.
    """
    kept = stored(name)
    if isinstance(derived, dict) and any(isinstance(value, np.ndarray) for value in derived.values()):
        return kept.keys() == derived.keys() and all(np.array_equal(kept[key], derived[key]) for key in kept)
    return kept == json.loads(as_json(derived))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Derive or check the stored llama.cpp oracles.")
    parser.add_argument("model", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--only", nargs="+", choices=tuple(FILES), default=tuple(FILES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="compare with the stored files, write nothing")
    options = parser.parse_args(arguments)
    try:
        maker = Maker(options.model, options.threads)
    except PeerError as error:
        print(f"make_oracles: {error}", file=sys.stderr)
        return 3
    digest = hashlib.sha256(options.model.read_bytes()).hexdigest()
    if digest != MODEL_SHA256:
        print(f"make_oracles: {options.model} has SHA-256 {digest}, not SmolLM2's {MODEL_SHA256}", file=sys.stderr)
        return 4
    ORACLES.mkdir(parents=True, exist_ok=True)
    differing = []
    for name in options.only:
        file, encode = FILES[name]
        derived = getattr(maker, name)()
        if options.check:
            equal = same(name, derived)
            differing += [] if equal else [file]
            print(f"{file}: {'as stored' if equal else 'DIFFERS'}", flush=True)
        else:
            raw = encode(derived)
            (ORACLES / file).write_bytes(raw)
            print(f"{file}: {len(raw)} bytes", flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
