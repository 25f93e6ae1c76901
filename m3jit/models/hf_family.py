"""What the architectures of Hugging Face folders are described with: tables of keys and tensors, the rotation."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from m3jit.models.hf_config import Config
from m3jit.models.hf_transforms import Transform

Metadata = dict[str, Any]
Made = dict[str, np.ndarray]
Part = str | tuple[str, Transform] | list[tuple[str, Transform]]
"""What a stored tensor becomes: a tensor as it is, another one, several."""

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


@dataclass(frozen=True)
class Family:
    """How folders of one model_type become an architecture of GGUF.

    architecture: its name there, and the prefix of its keys.  tensors: name in the folder, without `prefixes`, -> name
    (a second "{}" numbers experts).  defaults: values of config.json that its authors leave out.  one_plus: gains are
    stored as w, meaning 1 + w.
    with_experts: (key of config.json, family): what takes this one's place where the key is above 0.
    rope_pairing: "NEOX" for pairs (i, i + d/2), "NORM" for (2i, 2i + 1).  ignored: beginnings of tensor names that a
    program for text does not need.
    more: further keys (without the architecture's prefix) and tensors made from the configuration; checks the rest."""
    architecture: str
    tensors: Mapping[str, Part]
    more: Callable[[Config, Metadata], Made]
    keys: KeyTable = field(default_factory=lambda: DECODER_KEYS)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    one_plus: bool = False
    rope_pairing: str = "NEOX"
    with_experts: tuple[str, "Family"] | None = None
    prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = ()


def head_dim(config: Config) -> int:
    """Elements of an attention head."""
    heads = config.get("num_attention_heads", int)
    return config.get("head_dim", int, config.get("hidden_size", int) // max(1, heads))


def add_rope(config: Config, keys: Metadata, rotary: int = 0, latent: bool = False) -> Made:
    """The keys and tensors of the rotation.  rotary: elements it turns, where that is not the head.  latent: as
    `Rope.yarn_keys`."""
    rope, dim = config.rope("full_attention"), rotary or head_dim(config)
    keys["rope.freq_base"] = rope.theta
    if rope.rotary != 1.0:
        keys["rope.dimension_count"] = int(dim * rope.rotary)
    dim = keys.get("rope.dimension_count", dim)
    if rope.kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        keys |= rope.yarn_keys(latent)
    if rope.kind == "llama3":
        return {"rope_freqs.weight": np.array(rope.llama3_factors(dim), np.float32)}
    if rope.kind == "longrope":
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": rope.trained,
                 "rope.scaling.attn_factor": rope.magnitude(keys["context_length"])}
        long, short = rope.long_and_short(dim)
        return {"rope_factors_long.weight": np.array(long, np.float32),
                "rope_factors_short.weight": np.array(short, np.float32)}
    return {}
