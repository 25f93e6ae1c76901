"""Train and export the default model that the package ships, ``m3jit/models/data/default.gguf``.

    pip install torch==2.13.0 numpy gguf==0.19.0 tokenizers==0.23.3        (on Debian or a derivative, for the text)
    python tools/train_default.py --work build/default-model

Steps, each kept in ``--work`` and taken up again by a later run with the same arguments:

1. fetch the text (``austen_text.py``) and hold out the last chapters of each novel;
2. train a byte-level BPE vocabulary on the training text;
3. train the model (``llama_torch.py``): AdamW, linear warm-up and cosine decay, bfloat16 products with float32
   weights, sequences of 256 tokens and of 512 for the last quarter; a checkpoint every ``CHECKPOINT_EVERY`` steps;
4. export to GGUF: matrices Q8_0, norms F32, vocabulary and merges inside;
5. evaluate the exported file (``evaluate_default.py``) beside an order-3 n-gram on the same split.

The last checkpoint is the one exported; the held-out text chooses nothing. Batches and dropout masks are functions
of (seed, step), so an interrupted run continues as it would have gone; on one machine and thread count the result
is reproducible as far as PyTorch's kernels are. A processor with AVX512-BF16 takes about half an hour on one
thread, one without several times that (``--float32`` avoids bfloat16 emulation).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import austen_text
import evaluate_default
import gguf
import torch
import torch.nn.functional as F
from llama_torch import Llama, Shape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCAB = 2048
BATCH_TOKENS = 4096
PEAK_RATE, FINAL_RATE, WARM_UP = 3e-3, 1e-4, 100
CHECKPOINT_EVERY = 200
WEIGHT_DECAY, DROPOUT, CLIP = 0.1, 0.1, 1.0
OUTPUT = Path(__file__).resolve().parent.parent / "m3jit" / "models" / "data" / "default.gguf"


def train_tokenizer(texts: list[str], path: Path) -> Tokenizer:
    """Byte-level BPE with llama.cpp's ``smollm`` pre-tokeniser: GPT-2's pattern, after single digits are split off."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END_OF_TEXT], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return tokenizer


def learning_rate(step: int, steps: int) -> float:
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    progress = (step - WARM_UP) / max(1, steps - WARM_UP)
    return FINAL_RATE + (PEAK_RATE - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def batch(stream: torch.Tensor, step: int, steps: int, seed: int, context: int) -> torch.Tensor:
    """(sequences, length + 1) tokens from random places; also seeds the dropout masks of this step."""
    length = context if step >= steps * 3 // 4 else context // 2
    torch.manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(stream) - length, (BATCH_TOKENS // length, 1))
    return stream[starts + torch.arange(length + 1)]


def optimizer_for(model: Llama) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": WEIGHT_DECAY},
                              {"params": gains, "weight_decay": 0.0}], lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def train(stream: torch.Tensor, shape: Shape, steps: int, seed: int, bfloat16: bool, checkpoint: Path) -> Llama:
    """Train for ``steps`` steps in all, starting from ``checkpoint`` where it exists."""
    torch.manual_seed(seed)
    model = Llama(shape, DROPOUT)
    optimizer, first = optimizer_for(model), 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if (state["steps"], state["seed"]) != (steps, seed):
            raise SystemExit(f"{checkpoint}: made with --steps {state['steps']} --seed {state['seed']}; give the same, "
                             "or another --work")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    model.train()
    began, loss_sum = time.monotonic(), 0.0
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        tokens = batch(stream, step, steps, seed, shape.context)
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum += loss.item()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps}: {loss_sum / 50:.4f} nats/token, {time.monotonic() - began:.0f} s",
                  flush=True)
            loss_sum = 0.0
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            partial = checkpoint.with_suffix(".partial")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1,
                        "steps": steps, "seed": seed}, partial)
            partial.replace(checkpoint)
    return model.eval()


def export(model: Llama, tokenizer: Tokenizer, path: Path) -> None:
    """Write ``model`` as GGUF; a matrix becomes Q8_0 (every row is a multiple of 32 long), a norm stays F32."""
    shape = model.shape
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_name("m3jit default")
    writer.add_description("A small language model of Jane Austen's six novels, trained by tools/train_default.py")
    writer.add_license(austen_text.LICENSE)
    writer.add_source_url(austen_text.SOURCE)
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    _add_tokenizer(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        array = tensor.detach().float().numpy()
        if array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    bpe = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    end = bpe["vocab"][END_OF_TEXT]
    types = [gguf.TokenType.CONTROL if token == END_OF_TEXT else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/default-model"), help="text, vocabulary, checkpoint")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--float32", action="store_true", help="float32 products: slower where BF16 is native")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)

    training, _ = austen_text.split(austen_text.load(options.work))
    tokenizer = train_tokenizer(training, options.work / "tokenizer.json")
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = torch.tensor(evaluate_default.token_stream(tokenizer, training, end))
    shape = Shape(vocab=tokenizer.get_vocab_size())
    print(f"{sum(len(text.encode()) for text in training)} bytes, {len(stream)} tokens; {shape}", flush=True)
    model = train(stream, shape, options.steps, options.seed, not options.float32, options.work / "checkpoint.pt")
    export(model, tokenizer, options.output)
    evaluate_default.report(options.output, options.work, "torch")


if __name__ == "__main__":
    main()
