"""The architectures of Hugging Face folders, in the names GGUF uses: one small table each.

To add one: a `Family` with the keys its config.json has beyond those of `DECODER_KEYS`, and the tensors it has beyond
those of `DECODER_TENSORS` ("{}" is the layer), under the model_type of its config.json in `FAMILIES`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from m3jit.models.hf_config import Config

Metadata = dict[str, Any]
Made = dict[str, np.ndarray]

# GGUF key -> (key of config.json, type, whether it must be there).
KeyTable = Mapping[str, tuple[str, type, bool]]
DECODER_KEYS: KeyTable = {
    "block_count": ("num_hidden_layers", int, True),
    "embedding_length": ("hidden_size", int, True),
    "feed_forward_length": ("intermediate_size", int, True),
    "attention.head_count": ("num_attention_heads", int, True),
    "attention.head_count_kv": ("num_key_value_heads", int, False),
    "attention.key_length": ("head_dim", int, False),
    "attention.value_length": ("head_dim", int, False),
    "context_length": ("max_position_embeddings", int, True),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float, True),
    "vocab_size": ("vocab_size", int, False),
}
DECODER_TENSORS = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
    **{f"layers.{{}}.self_attn.{theirs}.{kind}": f"blk.{{}}.{ours}.{kind}"
       for theirs, ours in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v"), ("o_proj", "attn_output"))
       for kind in ("weight", "bias")},
    **{f"layers.{{}}.mlp.{part}_proj.{kind}": f"blk.{{}}.ffn_{part}.{kind}"
       for part in ("gate", "up", "down") for kind in ("weight", "bias")},
}
HEAD_NORMS = {"layers.{}.self_attn.q_norm.weight": "blk.{}.attn_q_norm.weight",
              "layers.{}.self_attn.k_norm.weight": "blk.{}.attn_k_norm.weight"}
POST_NORMS = {"layers.{}.post_attention_layernorm.weight": "blk.{}.post_attention_norm.weight",
              "layers.{}.post_feedforward_layernorm.weight": "blk.{}.post_ffw_norm.weight"}
GEMMA_NORMS = {**POST_NORMS, "layers.{}.pre_feedforward_layernorm.weight": "blk.{}.ffn_norm.weight"}
BERT_TENSORS = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    **{f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias") for theirs, ours in (
        ("embeddings.LayerNorm", "token_embd_norm"),
        ("encoder.layer.{}.attention.self.query", "blk.{}.attn_q"),
        ("encoder.layer.{}.attention.self.key", "blk.{}.attn_k"),
        ("encoder.layer.{}.attention.self.value", "blk.{}.attn_v"),
        ("encoder.layer.{}.attention.output.dense", "blk.{}.attn_output"),
        ("encoder.layer.{}.attention.output.LayerNorm", "blk.{}.attn_output_norm"),
        ("encoder.layer.{}.intermediate.dense", "blk.{}.ffn_up"),
        ("encoder.layer.{}.output.dense", "blk.{}.ffn_down"),
        ("encoder.layer.{}.output.LayerNorm", "blk.{}.layer_output_norm"))},
}


@dataclass(frozen=True)
class Family:
    """How folders of one model_type become an architecture of GGUF.

    architecture: its name there, and the prefix of its keys.  tensors: name in the folder, without `prefixes`, -> name.
    defaults: values of config.json that its authors leave out.  one_plus: gains are stored as w, meaning 1 + w.
    ignored: beginnings of tensor names that a program for text does not need.
    more: further keys (without the architecture's prefix) and tensors made from the configuration; checks the rest."""
    architecture: str
    tensors: Mapping[str, str]
    more: Callable[[Config, Metadata], Made]
    keys: KeyTable = field(default_factory=lambda: DECODER_KEYS)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    one_plus: bool = False
    prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = ()


def head_dim(config: Config) -> int:
    """Elements of an attention head."""
    heads = config.get("num_attention_heads", int)
    return config.get("head_dim", int, config.get("hidden_size", int) // max(1, heads))


def add_rope(config: Config, keys: Metadata) -> Made:
    """The keys and tensors of the rotation."""
    rope, dim = config.rope("full_attention"), head_dim(config)
    keys["rope.freq_base"] = rope.theta
    if rope.rotary != 1.0:
        keys["rope.dimension_count"] = int(dim * rope.rotary)
    dim = keys.get("rope.dimension_count", dim)
    if rope.kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    if rope.kind == "llama3":
        return {"rope_freqs.weight": np.array(rope.llama3_factors(dim), np.float32)}
    if rope.kind == "longrope":
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": rope.trained,
                 "rope.scaling.attn_factor": rope.magnitude(keys["context_length"])}
        long, short = rope.long_and_short(dim)
        return {"rope_factors_long.weight": np.array(long, np.float32),
                "rope_factors_short.weight": np.array(short, np.float32)}
    return {}


def llama(config: Config, keys: Metadata) -> Made:
    config.need("hidden_act", "silu")
    if 0 < config.get("sliding_window", int, 0) < keys["context_length"]:
        add_windows(config, keys, 0)
    return add_rope(config, keys)


def qwen(config: Config, keys: Metadata) -> Made:
    config.need("hidden_act", "silu")
    config.need("use_sliding_window", False)
    return add_rope(config, keys)


def add_windows(config: Config, keys: Metadata, period: int) -> None:
    """The window, and which layers have it: those of `layer_types`, else all but every `period`-th one."""
    layers = keys["block_count"]
    period = config.get("sliding_window_pattern", int, period)
    usual = ["full_attention" if period > 0 and (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    kinds = config.get("layer_types", list, usual)
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.refuse("layer_types", f"has {len(kinds)} items of {', '.join(sorted(set(map(str, kinds))))[:80]}",
                            f"{layers} of full_attention and sliding_attention")
    keys["attention.sliding_window"] = config.get("sliding_window", int)
    keys["attention.sliding_window_pattern"] = np.array([kind == "sliding_attention" for kind in kinds])


def gemma(config: Config, keys: Metadata, period: int) -> Made:
    config.need("hidden_activation", "gelu_pytorch_tanh")
    config.need("use_bidirectional_attention", False)
    add_windows(config, keys, period)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = config.get(key, float, None)
        if value is not None:
            keys[key] = value
    keys["attention.scale"] = config.get("query_pre_attn_scalar", float, float(head_dim(config))) ** -0.5
    return add_rope(config, keys)


def gemma2(config: Config, keys: Metadata) -> Made:
    return gemma(config, keys, 2)


def gemma3(config: Config, keys: Metadata) -> Made:
    made = gemma(config, keys, 6)
    local = config.rope("sliding_attention")
    nested = "sliding_attention" in (config.values.get("rope_parameters") or {})
    keys["rope.freq_base_swa"] = local.theta if nested else config.get("rope_local_base_freq", float, 10000.0)
    if nested and local.kind != "default":
        raise config.refuse("rope_parameters", f"scales the layers with a window ({local.kind})", "default there")
    return made


def bert(config: Config, keys: Metadata) -> Made:
    config.need("hidden_act", "gelu")
    config.need("position_embedding_type", "absolute")
    config.need("is_decoder", False)
    keys["attention.causal"] = False
    return {}


_DECODER_IGNORED = ("vision_tower.", "multi_modal_projector.", "visual.")
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", DECODER_TENSORS, llama),
    "mistral": Family("llama", DECODER_TENSORS, llama, defaults={"sliding_window": 4096}),
    "qwen2": Family("qwen2", DECODER_TENSORS, qwen),
    "qwen3": Family("qwen3", DECODER_TENSORS | HEAD_NORMS, qwen),
    "gemma2": Family("gemma2", DECODER_TENSORS | GEMMA_NORMS, gemma2, one_plus=True),
    "gemma3_text": Family(
        "gemma3", DECODER_TENSORS | GEMMA_NORMS | HEAD_NORMS, gemma3, one_plus=True,
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
                  "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "rope_theta": 1e6,
                  "sliding_window": 4096},
        prefixes=("language_model.model.", "model.language_model.", "language_model.", "model.", ""),
        ignored=_DECODER_IGNORED),
    "phi3": Family("phi3", DECODER_TENSORS | {
        "layers.{}.self_attn.qkv_proj.weight": "blk.{}.attn_qkv.weight",
        "layers.{}.mlp.gate_up_proj.weight": "blk.{}.ffn_up.weight"}, llama),
    "olmo2": Family("olmo2", DECODER_TENSORS | POST_NORMS | HEAD_NORMS, llama),
    "bert": Family("bert", BERT_TENSORS, bert, keys={
        "block_count": DECODER_KEYS["block_count"], "embedding_length": DECODER_KEYS["embedding_length"],
        "feed_forward_length": DECODER_KEYS["feed_forward_length"],
        "attention.head_count": DECODER_KEYS["attention.head_count"], "context_length": DECODER_KEYS["context_length"],
        "attention.layer_norm_epsilon": ("layer_norm_eps", float, True), "vocab_size": DECODER_KEYS["vocab_size"]},
        prefixes=("bert.", ""), ignored=("pooler.", "cls.", "embeddings.position_ids", "classifier.")),
}
FAMILIES["gemma3"] = FAMILIES["gemma3_text"]
