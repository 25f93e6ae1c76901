"""Write tiny random models as Hugging Face folders, and store what transformers computes with them.

Weights come from SplitMix64 over (seed, tensor name, element number), as in `make_tiny_models.py`, so folders are a
pure function of the seed; they are made where they are needed and never stored. tests/oracles/folder_logits.json.gz
holds the SHA-256 of each folder's weights and what transformers (float32 and float64, eager attention) computes.

    python tools/make_tiny_folders.py DIRECTORY [--name NAME ...]
    python tools/make_tiny_folders.py --oracle tests/oracles/folder_logits.json.gz [--check]   (needs transformers)
"""
from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from make_tiny_models import uniform  # noqa: E402

SEED = 20261
PROMPT = [84, 104, 101, 32, 114, 105, 118, 101, 114, 32, 114, 117, 110, 115, 32, 116, 111, 32, 115, 101, 97, 0, 255]
BASE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "max_position_embeddings": 128, "vocab_size": 264, "rms_norm_eps": 1e-5,
        "eos_token_id": 258, "pad_token_id": None}
GEMMA = BASE | {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 6, "rms_norm_eps": 1e-6,
                "query_pre_attn_scalar": 24, "tie_word_embeddings": True}

BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
        "max_position_embeddings": 64, "vocab_size": 264, "type_vocab_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12, "pad_token_id": 0}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 4, "vocab_size": 264, "use_bias": False,
         "use_conv_bias": True, "hidden_act": "silu", "layer_norm_epsilon": 1e-5, "eos_token_id": 258,
         "pad_token_id": None}
HYBRID = {"hidden_act": "silu", "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
          "tie_word_embeddings": True}

DEEPSEEK = {"hidden_act": "silu", "attention_bias": False, "num_key_value_heads": 4, "kv_lora_rank": 24,
            "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 4,
            "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "tie_word_embeddings": False}

# Name -> (how tensors are stored, files, config.json).
FOLDERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("F32", 1, BASE | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rope_theta": 500.0,
        "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}}),
    "llama-bf16": ("BF16", 2, BASE | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
        "tie_word_embeddings": True, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "mistral": ("F16", 1, BASE | {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "sliding_window": 5,
        "head_dim": 24, "rope_theta": 10000.0, "tie_word_embeddings": False}),
    "qwen2": ("F32", 1, BASE | {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
        "use_sliding_window": False, "sliding_window": 8, "tie_word_embeddings": True}),
    "qwen3": ("F32", 1, BASE | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "head_dim": 32,
        "attention_bias": False, "rope_theta": 1000000.0, "tie_word_embeddings": False}),
    "gemma2": ("F32", 1, GEMMA | {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 6.0, "num_hidden_layers": 3, "rope_theta": 10000.0}),
    "gemma3": ("F32", 1, GEMMA | {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "phi3": ("F32", 1, BASE | {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
        "tie_word_embeddings": False, "sliding_window": None}),
    "phi3-long": ("F32", 1, BASE | {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
        "tie_word_embeddings": False, "sliding_window": 9, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 16, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]}}),
    "olmo2": ("F32", 1, BASE | {
        "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_act": "silu", "rope_theta": 500000.0,
        "attention_bias": False, "tie_word_embeddings": False}),
    "qwen3-yarn": ("F32", 1, BASE | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "head_dim": 32,
        "attention_bias": False, "rope_theta": 10000.0, "tie_word_embeddings": True, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    "mixtral": ("F32", 1, BASE | {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "rope_theta": 1e4,
        "tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3moe": ("F32", 2, BASE | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "head_dim": 16,
        "rope_theta": 1e6, "tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
        "attention_bias": False}),
    "mamba": ("F32", 1, MAMBA | {
        "model_type": "mamba", "architectures": ["MambaForCausalLM"], "state_size": 8, "time_step_rank": 5,
        "tie_word_embeddings": True}),
    "mamba2": ("F32", 1, MAMBA | {
        "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "state_size": 16, "num_heads": 8,
        "head_dim": 16, "n_groups": 2, "chunk_size": 8, "tie_word_embeddings": False}),
    "jamba": ("F32", 1, BASE | HYBRID | {
        "model_type": "jamba", "architectures": ["JambaForCausalLM"], "num_hidden_layers": 4, "attn_layer_period": 4,
        "attn_layer_offset": 1, "num_experts": 1, "mamba_dt_rank": 6, "mamba_d_state": 8, "use_mamba_kernels": False}),
    "granite": ("F32", 1, BASE | HYBRID | {
        "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 96, "position_embedding_type": "rope", "rope_theta": 10000.0,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0,
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 8,
        "attention_bias": False}),
    "jamba-experts": ("F32", 1, BASE | HYBRID | {
        "model_type": "jamba", "architectures": ["JambaForCausalLM"], "num_hidden_layers": 4, "attn_layer_period": 4,
        "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_dt_rank": 6, "mamba_d_state": 8}),
    "granite-experts": ("F32", 1, BASE | HYBRID | {
        "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 40, "shared_intermediate_size": 96, "position_embedding_type": "nope",
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0,
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 8,
        "attention_bias": False}),
    "deepseek-v2": ("F32", 1, BASE | DEEPSEEK | {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None,
        "norm_topk_prob": False, "topk_method": "greedy", "rope_theta": 10000.0}),
    "deepseek-v3": ("F32", 1, BASE | DEEPSEEK | {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 20,
        "norm_topk_prob": True, "rope_interleave": True, "rope_theta": 10000.0, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
            "mscale_all_dim": 1.0}}),
    "deepseek-v3-groups": ("F32", 1, BASE | DEEPSEEK | {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 20,
        "norm_topk_prob": True, "rope_interleave": True, "rope_theta": 10000.0, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2}),
    "bitnet": ("F32", 1, BASE | {
        "model_type": "bitnet", "architectures": ["BitNetForCausalLM"], "hidden_act": "relu2", "rope_theta": 10000.0,
        "attention_bias": False, "tie_word_embeddings": True}),
    "bert": ("F32", 1, BERT | {"model_type": "bert", "architectures": ["BertModel"]}),
    "roberta": ("F32", 1, BERT | {
        "model_type": "roberta", "architectures": ["RobertaModel"], "max_position_embeddings": 66, "pad_token_id": 1,
        "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "distilbert": ("F16", 1, {
        "model_type": "distilbert", "architectures": ["DistilBertModel"], "dim": 64, "n_layers": 2, "n_heads": 4,
        "hidden_dim": 96, "max_position_embeddings": 64, "vocab_size": 264, "activation": "gelu", "pad_token_id": 0}),
}


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, as transformers saves such a model."""
    config = FOLDERS[name][2]
    kind, vocab = config["model_type"], config["vocab_size"]
    if kind == "distilbert":
        return distilbert_shapes(config)
    width = config["hidden_size"]
    if kind in ("bert", "roberta"):
        return bert_shapes(config)
    alone = kind in ("mamba", "mamba2")
    base, embedding, norm = ("backbone.", "embeddings", "norm_f") if alone else \
        ("model.", "embed_tokens", "final_layernorm" if kind == "jamba" else "norm")
    found: dict[str, tuple[int, ...]] = {f"{base}{embedding}.weight": (vocab, width), f"{base}{norm}.weight": (width,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, width)
    for i in range(config["num_hidden_layers"]):
        layer = {"norm.weight": (width,), **mixer_shapes("mixer.", config, "", i)} if alone else \
            hybrid_shapes(config, i) if kind in ("jamba", "granitemoehybrid") else \
            latent_shapes(config, i) if kind.startswith("deepseek") else layer_shapes(config)
        found |= {f"{base}layers.{i}.{part}": shape for part, shape in layer.items()}
    return found


def mixer_shapes(prefix: str, config: dict[str, Any], key: str, i: int) -> dict[str, tuple[int, ...]]:
    """Of a layer that scans; key: what the configuration's names begin with."""
    width = config["hidden_size"]
    inner = width * config[f"{key}expand"]
    taps = config[f"{key}d_conv" if key else "conv_kernel"]
    states = config[f"{key}d_state" if key else "state_size"]
    heads = config.get("num_heads", config.get("mamba_n_heads"))
    if heads is None:
        rank = config[f"{key}dt_rank" if key else "time_step_rank"]
        found = {"in_proj.weight": (2 * inner, width), "conv1d.weight": (inner, 1, taps), "conv1d.bias": (inner,),
                 "x_proj.weight": (rank + 2 * states, inner), "dt_proj.weight": (inner, rank), "dt_proj.bias": (inner,),
                 "A_log": (inner, states), "D": (inner,), "out_proj.weight": (width, inner)}
        norms = {"dt": rank, "b": states, "c": states} if key else {}
        found |= {f"{part}_layernorm.weight": (size,) for part, size in norms.items()}
    else:
        mixed = inner + 2 * states * config.get("n_groups", config.get("mamba_n_groups"))
        found = {"in_proj.weight": (inner + mixed + heads, width), "conv1d.weight": (mixed, 1, taps),
                 "conv1d.bias": (mixed,), "A_log": (heads,), "D": (heads,), "dt_bias": (heads,),
                 "norm.weight": (inner,), "out_proj.weight": (width, inner)}
    return {prefix + part: shape for part, shape in found.items()}


def hybrid_shapes(config: dict[str, Any], i: int) -> dict[str, tuple[int, ...]]:
    width, ffn, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    attends = config["layer_types"][i] == "attention" if kind == "granitemoehybrid" else \
        i % config["attn_layer_period"] == config["attn_layer_offset"]
    dense = layer_shapes(config)
    found = {part: shape for part, shape in dense.items() if part.startswith("self_attn.")} if attends else \
        mixer_shapes("mamba.", config, "mamba_", i)
    found["input_layernorm.weight"] = (width,)
    if kind == "jamba":
        found["pre_ff_layernorm.weight"] = (width,)
        if config["num_experts"] > 1 and i % config["expert_layer_period"] == config["expert_layer_offset"]:
            moe = expert_shapes(config | {"moe_intermediate_size": ffn})
            return found | {part.replace("mlp.gate", "feed_forward.router").replace("mlp.", "feed_forward."): shape
                            for part, shape in moe.items()}
        return found | {"feed_forward.gate_proj.weight": (ffn, width), "feed_forward.up_proj.weight": (ffn, width),
                        "feed_forward.down_proj.weight": (width, ffn)}
    shared, count = config["shared_intermediate_size"], config["num_local_experts"]
    experts = {"router.layer.weight": (count, width), "input_linear.weight": (count, 2 * ffn, width),
               "output_linear.weight": (count, width, ffn)} if count else {}
    return found | {f"block_sparse_moe.{part}": shape for part, shape in experts.items()} | {
        "post_attention_layernorm.weight": (width,), "shared_mlp.input_linear.weight": (2 * shared, width),
        "shared_mlp.output_linear.weight": (width, shared)}


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    kind, width, ffn = config["model_type"], config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim", width // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    found: dict[str, tuple[int, ...]] = {"self_attn.o_proj.weight": (width, q), "mlp.down_proj.weight": (width, ffn)}
    if "num_experts_per_tok" in config and kind not in ("granitemoehybrid", "jamba"):
        del found["mlp.down_proj.weight"]
        found |= expert_shapes(config)
    if kind == "phi3":
        found |= {"self_attn.qkv_proj.weight": (q + 2 * kv, width), "mlp.gate_up_proj.weight": (2 * ffn, width)}
    else:
        found |= {f"self_attn.{n}_proj.weight": (rows, width) for n, rows in (("q", q), ("k", kv), ("v", kv))}
        found |= {f"mlp.{n}_proj.weight": (ffn, width) for n in ("gate", "up") if "num_experts_per_tok" not in config}
    if kind == "qwen2":
        found |= {f"self_attn.{n}_proj.bias": (rows,) for n, rows in (("q", q), ("k", kv), ("v", kv))}
    if config.get("attention_bias"):
        found |= {f"self_attn.{n}_proj.bias": (rows,) for n, rows in (("q", q), ("k", kv), ("v", kv), ("o", width))}
    if config.get("mlp_bias"):
        found |= {f"mlp.{n}_proj.bias": (rows,) for n, rows in (("gate", ffn), ("up", ffn), ("down", width))}
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        found |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    if kind == "olmo2":
        found |= {"self_attn.q_norm.weight": (q,), "self_attn.k_norm.weight": (kv,)}
    if kind == "bitnet":
        found |= {"self_attn.attn_sub_norm.weight": (q,), "mlp.ffn_sub_norm.weight": (ffn,)}
    norms = ["post_attention_layernorm"] + (["input_layernorm"] if kind != "olmo2" else [])
    norms += ["post_feedforward_layernorm"] if kind in ("olmo2", "gemma2", "gemma3_text") else []
    norms += ["pre_feedforward_layernorm"] if kind in ("gemma2", "gemma3_text") else []
    return found | {f"{norm}.weight": (width,) for norm in norms}


def latent_shapes(config: dict[str, Any], i: int) -> dict[str, tuple[int, ...]]:
    """Of a layer of DeepSeek's."""
    width, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rotary, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q, q_rank = heads * (nope + rotary), config["q_lora_rank"]
    found: dict[str, tuple[int, ...]] = {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + rotary, width), "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), rank), "self_attn.o_proj.weight": (width, heads * value),
        "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
    found |= {"self_attn.q_a_proj.weight": (q_rank, width), "self_attn.q_a_layernorm.weight": (q_rank,),
              "self_attn.q_b_proj.weight": (q, q_rank)} if q_rank else {"self_attn.q_proj.weight": (q, width)}
    dense = i < config["first_k_dense_replace"]
    ffn = config["intermediate_size"] if dense else config["n_shared_experts"] * config["moe_intermediate_size"]
    found |= {f"mlp.{'' if dense else 'shared_experts.'}{n}_proj.weight": (width, ffn) if n == "down" else (ffn, width)
              for n in ("gate", "up", "down")}
    if not dense:
        found |= expert_shapes(config | {"num_experts": config["n_routed_experts"]})
        if config["model_type"] == "deepseek_v3":
            found["mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
    return found


def expert_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, mixtral = config["hidden_size"], config["model_type"] == "mixtral"
    ffn = config["intermediate_size" if mixtral else "moe_intermediate_size"]
    count = config["num_local_experts" if mixtral else "num_experts"]
    prefix = "block_sparse_moe." if mixtral else "mlp."
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found: dict[str, tuple[int, ...]] = {f"{prefix}gate.weight": (count, width)}
    for e in range(count):
        found |= {f"{prefix}experts.{e}.{name}.weight": (width, ffn) if name in ("w2", "down_proj") else (ffn, width)
                  for name in names}
    return found


def distilbert_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, ffn = config["dim"], config["hidden_dim"]
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width)}
    norms = ["embeddings.LayerNorm"]
    for i in range(config["n_layers"]):
        b = f"transformer.layer.{i}."
        norms += [b + "sa_layer_norm", b + "output_layer_norm"]
        for part, rows, columns in (("attention.q_lin", width, width), ("attention.k_lin", width, width),
                                    ("attention.v_lin", width, width), ("attention.out_lin", width, width),
                                    ("ffn.lin1", ffn, width), ("ffn.lin2", width, ffn)):
            found |= {f"{b}{part}.weight": (rows, columns), f"{b}{part}.bias": (rows,)}
    return found | {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}


def bert_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, ffn = config["hidden_size"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], width),
        "pooler.dense.weight": (width, width), "pooler.dense.bias": (width,)}
    norms = ["embeddings.LayerNorm"]
    for i in range(config["num_hidden_layers"]):
        b = f"encoder.layer.{i}."
        norms += [b + "attention.output.LayerNorm", b + "output.LayerNorm"]
        for part, rows, columns in (("attention.self.query", width, width), ("attention.self.key", width, width),
                                    ("attention.self.value", width, width), ("attention.output.dense", width, width),
                                    ("intermediate.dense", ffn, width), ("output.dense", width, ffn)):
            found |= {f"{b}{part}.weight": (rows, columns), f"{b}{part}.bias": (rows,)}
    return found | {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}


def values(name: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random float32 weights: matrices of a size that keeps activations near 1, gains around 1 (gemma: 1 + w), biases
    around 0."""
    drawn = uniform(SEED, f"{name}/{tensor}", int(np.prod(shape))).reshape(shape)
    if "norm" in tensor.lower() and tensor.endswith("weight"):
        return (0.5 * drawn + (0.0 if name.startswith("gemma") else 1.0)).astype(np.float32)
    if tensor.endswith((".A_log", ".D")):
        return (drawn + (1.0 if tensor.endswith("D") else 0.0)).astype(np.float32)
    if tensor.endswith("bias"):
        return (0.3 * drawn).astype(np.float32)
    scale = 3.0 if "lm_head" in tensor else 1.5
    embedding = 0.4 if name == "gemma3" else 1.0         # it scales them: a token's own logit would hide the others
    spread = embedding if "embed" in tensor else scale * 3.0**0.5 / shape[-1]**0.5
    return (spread * drawn).astype(np.float32)


def stored(weights: np.ndarray, dtype: str) -> bytes:
    """The bytes of float32 weights in a storage type; BF16 by nearest even."""
    if dtype == "BF16":
        bits = weights.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
    return weights.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Write a .safetensors file: name -> (dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))


def write_folder(folder: Path, name: str) -> Path:
    """Write config.json and the weights of one model; no tokeniser."""
    dtype, files, config = FOLDERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {tensor: (dtype, shape, stored(values(name, tensor, shape), dtype))
               for tensor, shape in shapes(name).items()}
    if files == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    places = {tensor: f"model-{1 + i % files:05}-of-{files:05}.safetensors" for i, tensor in enumerate(tensors)}
    for part in sorted(set(places.values())):
        write_safetensors(folder / part, {t: tensors[t] for t in tensors if places[t] == part})
    (folder / "model.safetensors.index.json").write_text(json.dumps({
        "metadata": {"total_size": sum(len(raw) for _, _, raw in tensors.values())}, "weight_map": places}))
    return folder


def build(directory: Path | str, names: tuple[str, ...] = tuple(FOLDERS)) -> dict[str, Path]:
    """Write the models `names` as DIRECTORY/NAME; returns name -> folder."""
    return {name: write_folder(Path(directory) / name, name) for name in names}


def sha256(folder: Path) -> str:
    """SHA-256 of the folder's weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def oracle_row(folder: Path) -> dict[str, Any]:
    """What transformers computes in float64: hidden states after the last norm (their mean and the last; bert: all),
    logits of the last position, the best token of each; how far float32 is from it; and both over a text
    (`oracle_text.row`, the peer being float32)."""
    import torch
    import transformers

    import oracle_text
    found, texts, text = {}, {}, []
    config = json.loads((folder / "config.json").read_text())
    encoder = config["model_type"] in ("bert", "roberta", "distilbert")
    more = {"experts_implementation": "eager"} if config.get("num_experts_per_tok") else {}
    for dtype in (torch.float64, torch.float32):
        kind = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
        model, loading = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **more,
                                              output_loading_info=True)
        assert not any(loading.values()), loading
        model.eval()
        with torch.no_grad():
            out = model(torch.tensor([PROMPT]), output_hidden_states=True)
            if not encoder:
                text = text or oracle_text.drawn(PROMPT, config["vocab_size"], lambda ids, model=model: model(
                    torch.tensor([ids]), use_cache=False).logits[0, -1].numpy())
                texts[dtype] = np.array([oracle_text.behind_prompts(model(
                    torch.tensor([ids]), use_cache=False).logits[0].double().numpy(), len(PROMPT)) for ids in text])
        states = (out.last_hidden_state if encoder else out.hidden_states[-1])[0].double().numpy()
        found[dtype] = states, states if encoder else out.logits[0].double().numpy()
    (states, exact), (_, single) = found.values()
    row = {"sha256": sha256(folder), "float32_error": float(np.abs(single - exact).max()),
           "mean": rounded(states.mean(axis=0)), "last": rounded(states[-1])}
    if encoder:
        return row | {"rows": [rounded(line) for line in states]}
    return row | {"logits": rounded(exact[-1]), "best": exact.argmax(axis=1).tolist(),
                  "text": oracle_text.row(text, *texts.values())}


def rounded(values: np.ndarray) -> list[float]:
    return [round(v, 6) for v in values.tolist()]


def oracle() -> dict[str, Any]:
    import transformers
    with tempfile.TemporaryDirectory() as folder:
        return {"transformers": transformers.__version__, "prompt": PROMPT,
                "models": {name: oracle_row(path) for name, path in build(folder).items()}}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write tiny random Hugging Face folders.")
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--name", dest="names", action="append", choices=tuple(FOLDERS), help="this one (repeatable)")
    parser.add_argument("--oracle", type=Path, metavar="FILE", help="store what transformers computes")
    parser.add_argument("--check", action="store_true", help="compare with the stored file instead of writing it")
    options = parser.parse_args(arguments)
    if options.directory:
        for path in build(options.directory, tuple(options.names or FOLDERS)).values():
            print(f"{sha256(path)}  {path}")
    if options.oracle:
        found = oracle()
        if options.check:
            before = json.loads(gzip.decompress(options.oracle.read_bytes()))["models"]
            apart = {f"{name} {key}": float(np.abs(np.array(row[key]) - np.array(before[name][key])).max())
                     for name, row in found["models"].items() for key in ("mean", "last", "logits") if key in row}
            apart |= {f"{name} text": abs(row["text"]["nll"] - before[name]["text"]["nll"])
                      for name, row in found["models"].items() if "text" in row}
            print(apart)
            return int(max(apart.values()) > 1e-5)
        options.oracle.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))
        for name, row in found["models"].items():
            spread = np.std(row.get("logits", row["last"]))
            print(f"{name:20} float32 error {row['float32_error']:.2g}, std {spread:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
