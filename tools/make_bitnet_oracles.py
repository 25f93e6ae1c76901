"""Derive tests/oracles/tiny_bitnet_relu2.json.gz with torch and transformers (needs them, gguf and numpy; not m3jit).

    python tools/make_bitnet_oracles.py [--check]

The models of make_tiny_bitnet.py with a squared ReLU, which llama.cpp 0.3.36 computes as SiLU: the weights are put into
transformers' BitNetForCausalLM in float64.  `exact_logits`: of the prompt's last token, nothing rounded; `logits`:
with the inputs of the products rounded to int8 as BitNet's training does, but per 256 values (for each, max |x| /
127), as integer products of ternary weights do; the largest and mean difference of the two over all positions; greedy
`tokens` of the exact model with the margin between the two largest logits; `text`: both over 20 prompts and what the
exact model says behind them (`oracle_text.row`).
"""
from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import BitNetConfig, BitNetForCausalLM, __version__

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools")]

import make_tiny_bitnet as tiny  # noqa: E402  (found through the path set above)
import oracle_text  # noqa: E402
from make_oracles import as_gzip, rounded  # noqa: E402
from make_tiny_models import sha256  # noqa: E402

FILE = ROOT / "tests" / "oracles" / "tiny_bitnet_relu2.json.gz"
PROMPT, GREEDY_TOKENS = [4 + i * 37 % 256 for i in range(24)], 8
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "attn_sub_norm": "self_attn.attn_sub_norm", "attn_norm": "input_layernorm",
         "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "ffn_sub_norm": "mlp.ffn_sub_norm"}


def model_of(path: Path) -> Any:
    """transformers' model with a file's weights in float64."""
    config = BitNetConfig(
        vocab_size=tiny.VOCAB, hidden_size=tiny.WIDTH, intermediate_size=tiny.FFN, num_hidden_layers=tiny.LAYERS,
        num_attention_heads=tiny.HEADS, num_key_value_heads=tiny.KV_HEADS, hidden_act="relu2", rms_norm_eps=tiny.EPS,
        max_position_embeddings=tiny.CONTEXT, rope_parameters={"rope_type": "default", "rope_theta": tiny.THETA},
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=None,
        attn_implementation="eager")
    model = BitNetForCausalLM(config).to(torch.float64).eval()
    state = {}
    for tensor in gguf.GGUFReader(str(path)).tensors:
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64))
        part = tensor.name.split(".")
        name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}.get(part[0]) or \
            f"model.layers.{part[1]}.{NAMES[part[2]]}"
        state[name + ".weight"] = values.reshape(model.get_parameter(name + ".weight").shape)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def to_int8(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A product's input, each 256 values rounded to int8."""
    blocks = inputs[0].reshape(*inputs[0].shape[:-1], -1, 256)
    size = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((blocks / size).round() * size).reshape(inputs[0].shape), *inputs[1:]


def derive(folder: Path, name: str) -> dict[str, Any]:
    """The oracle of one model."""
    path = tiny.build(folder, name)
    model = model_of(path)

    def positions(text: list[list[int]]) -> np.ndarray:
        rows = model(torch.tensor(text)).logits.numpy()
        return np.array([oracle_text.behind_prompts(each, len(PROMPT)) for each in rows])
    with torch.no_grad():
        text = oracle_text.drawn(PROMPT, tiny.VOCAB, lambda ids: model(torch.tensor([ids])).logits[0, -1].numpy())
        text_exact = positions(text)
        exact = model(torch.tensor([PROMPT])).logits[0].numpy()
        ids, margins = list(PROMPT), []
        for _ in range(GREEDY_TOKENS):
            last = model(torch.tensor([ids])).logits[0, -1].numpy()
            runner_up, best = np.partition(last, -2)[-2:]
            margins.append(round(float(best - runner_up), 5))
            ids.append(int(last.argmax()))
        if not name.endswith("/F32"):
            for module_name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear) and module_name != "lm_head":
                    module.register_forward_pre_hook(to_int8)
        logits, text_logits = model(torch.tensor([PROMPT])).logits[0].numpy(), positions(text)
    error = np.abs(logits - exact)
    return {"sha256": sha256(path), "logits": rounded(logits[-1]), "exact_logits": rounded(exact[-1]),
            "max_error": round(float(error.max()), 6), "mean_error": round(float(error.mean()), 6),
            "tokens": ids[len(PROMPT):], "margin": margins, "text": oracle_text.row(text, text_exact, text_logits)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Derive or check the oracles of bitnet with a squared ReLU.")
    parser.add_argument("--check", action="store_true", help="compare with the stored file, write nothing")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        models = {name: derive(Path(folder), name) for name in tiny.names(peer=False)}
    found = {"peer": f"transformers {__version__}, torch {torch.__version__}", "prompt": PROMPT,
             "models": models}
    if options.check:
        equal = json.loads(gzip.decompress(FILE.read_bytes())) == json.loads(json.dumps(found))
        print(f"{FILE.name}: {'as stored' if equal else 'DIFFERS'}")
        return 0 if equal else 1
    FILE.write_bytes(as_gzip(found))
    print(f"{FILE.name}: {FILE.stat().st_size} bytes, {len(models)} models")
    return 0


if __name__ == "__main__":
    sys.exit(main())
