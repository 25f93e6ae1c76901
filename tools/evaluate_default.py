"""Evaluate the default model on the held-out text, beside an order-3 byte n-gram (``byte_ngram.py``).

    python tools/evaluate_default.py --work build/default-model --engine torch          (torch, gguf, tokenizers)
    python tools/evaluate_default.py --work build/default-model --engine llama.cpp      (llama-cpp-python, tokenizers)

Both engines read nothing but the exported GGUF file: PyTorch on the dequantised weights in float32, llama.cpp on the
packed ones. Bits per byte = -Σ log2 p(token) / bytes of text, where the sum runs over every token of the held-out
chapters and the end-of-text tokens around them (which carry no bytes, so the model is charged for them in full).
The text is read in windows of one context that advance by half a context; each token is scored once, in the first
window that reaches it, so all but the first have at least half a context before them. The very first token is
charged log2(vocabulary).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import austen_text
import byte_ngram
import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Logits = Callable[[list[int]], np.ndarray]
"""Token numbers (at most one context) → float32 (tokens, vocab): logits of the token after each."""

PROMPTS = ("Emma was", "\"My dear Mr. Bennet,\" said", "The carriage stopped at the door, and")


def token_stream(tokenizer: Tokenizer, chapters: list[str], end: int) -> list[int]:
    """The chapters' tokens with the end-of-text token before, between and after them."""
    stream = [end]
    for chapter in chapters:
        stream += tokenizer.encode(chapter).ids + [end]
    return stream


def metadata(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def tokenizer_of(meta: dict[str, Any]) -> Tokenizer:
    """The tokenizer as the file's own vocabulary and merges define it."""
    vocabulary = {token: number for number, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def torch_engine(path: Path, meta: dict[str, Any]) -> Logits:
    import torch
    from llama_torch import Llama, Shape
    shape = Shape(vocab=len(meta["tokenizer.ggml.tokens"]), layers=meta["llama.block_count"],
                  width=meta["llama.embedding_length"], heads=meta["llama.attention.head_count"],
                  kv_heads=meta["llama.attention.head_count_kv"], ffn=meta["llama.feed_forward_length"],
                  context=meta["llama.context_length"], theta=meta["llama.rope.freq_base"],
                  epsilon=meta["llama.attention.layer_norm_rms_epsilon"])
    model = Llama(shape).eval()
    tensors = {tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
               for tensor in gguf.GGUFReader(path).tensors}
    model.load_state_dict(tensors)

    def logits(tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([tokens]))[0].numpy()
    return logits


def llama_cpp_engine(path: Path, meta: dict[str, Any]) -> Logits:
    from llama_cpp import Llama
    context = meta["llama.context_length"]
    llama = Llama(str(path), n_ctx=context, n_batch=context, n_threads=1, n_threads_batch=1, logits_all=True,
                  verbose=False)

    def logits(tokens: list[int]) -> np.ndarray:
        llama.reset()
        llama.eval(tokens)
        return np.array(llama.scores[:len(tokens)], np.float32)
    return logits


ENGINES = {"torch": torch_engine, "llama.cpp": llama_cpp_engine}


def log2_sum(logits_of: Logits, stream: list[int], context: int, vocabulary: int) -> float:
    """-Σ log2 p over ``stream``, in windows as the module's text says."""
    bits, scored = float(np.log2(vocabulary)), 1
    for start in range(0, len(stream), context // 2):
        window = stream[start:start + context]
        targets = np.array(stream[start + 1:start + len(window) + 1])
        fresh = scored - start - 1
        if fresh >= len(targets):
            continue
        logits = logits_of(window)[fresh:len(targets)].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(len(logits)), targets[fresh:]] - np.log(np.exp(logits).sum(axis=1))
        bits -= float(chosen.sum()) / np.log(2)
        scored += len(chosen)
    if scored != len(stream):
        raise AssertionError(f"scored {scored} of {len(stream)} tokens")
    return bits


def continuation(logits_of: Logits, tokenizer: Tokenizer, prompt: str, count: int, temperature: float,
                 end: int, seed: int = 1) -> str:
    """``count`` tokens after ``prompt``: the likeliest each time at temperature 0, else sampled."""
    random = np.random.default_rng(seed)
    tokens = tokenizer.encode(prompt).ids
    begun = len(tokens)
    for _ in range(count):
        last = logits_of(tokens)[-1].astype(np.float64)
        if temperature == 0:
            token = int(last.argmax())
        else:
            p = np.exp((last - last.max()) / temperature)
            token = int(random.choice(len(p), p=p / p.sum()))
        if token == end:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[begun:])


def report(model: Path, work: Path, engine: str) -> None:
    """Print the bits per byte of the model and of the n-gram, then a greedy and a sampled continuation."""
    training, held_out = austen_text.split(austen_text.load(work))
    train_bytes, test_bytes = "".join(training).encode(), "".join(held_out).encode()
    meta = metadata(model)
    tokenizer, end = tokenizer_of(meta), meta["tokenizer.ggml.eos_token_id"]
    logits_of = ENGINES[engine](model, meta)
    stream = token_stream(tokenizer, held_out, end)
    bits = log2_sum(logits_of, stream, meta["llama.context_length"], len(meta["tokenizer.ggml.tokens"]))
    print(f"{model.name}: {model.stat().st_size} bytes; held out: {len(test_bytes)} bytes, {len(stream)} tokens")
    print(f"bits per byte, {engine}: {bits / len(test_bytes):.4f}")
    print(f"bits per byte, order-{byte_ngram.ORDER} byte n-gram: "
          f"{byte_ngram.bits_per_byte(train_bytes, test_bytes):.4f}", flush=True)
    for prompt in PROMPTS:
        for temperature in (0.0, 0.8):
            text = continuation(logits_of, tokenizer, prompt, 60, temperature, end)
            print(f"temperature {temperature}: {prompt}|{text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "m3jit" / "models" / "data" / "default.gguf"
    parser.add_argument("--model", type=Path, default=default)
    parser.add_argument("--work", type=Path, default=Path("build/default-model"), help="where the text is kept")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="torch")
    options = parser.parse_args()
    report(options.model, options.work, options.engine)


if __name__ == "__main__":
    main()
