"""Models of Hugging Face folders with latent attention: DeepSeek-V2 and V3."""
from __future__ import annotations

from m3jit.models import hf_transforms as how
from m3jit.models.hf_config import Config
from m3jit.models.hf_family import DECODER_KEYS, DECODER_TENSORS, Family, KeyTable, Made, Metadata, Part, add_rope

SOFTMAX, SIGMOID = 1, 2             # expert_gating_func
LATENT_KEYS: KeyTable = {
    **{key: row for key, row in DECODER_KEYS.items() if key not in ("attention.key_length", "attention.value_length")},
    "attention.kv_lora_rank": ("kv_lora_rank", int, True), "attention.q_lora_rank": ("q_lora_rank", int, False),
    "attention.value_length": ("v_head_dim", int, True), "rope.dimension_count": ("qk_rope_head_dim", int, True),
    "expert_count": ("n_routed_experts", int, True), "expert_used_count": ("num_experts_per_tok", int, True),
    "expert_feed_forward_length": ("moe_intermediate_size", int, True)}
LATENT_TENSORS: dict[str, Part] = {
    **{f"layers.{{}}.self_attn.{theirs}.weight": f"blk.{{}}.{ours}.weight" for theirs, ours in (
        ("q_a_proj", "attn_q_a"), ("q_a_layernorm", "attn_q_a_norm"), ("q_b_proj", "attn_q_b"),
        ("kv_a_proj_with_mqa", "attn_kv_a_mqa"), ("kv_a_layernorm", "attn_kv_a_norm"), ("kv_b_proj", "attn_kv_b"))},
    "layers.{}.mlp.gate.weight": "blk.{}.ffn_gate_inp.weight",
    "layers.{}.mlp.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
    **{f"layers.{{}}.mlp.experts.{{}}.{part}_proj.weight": (f"blk.{{}}.ffn_{part}_exps.weight", how.EXPERTS)
       for part in ("gate", "up", "down")},
    **{f"layers.{{}}.mlp.shared_experts.{part}_proj.weight": f"blk.{{}}.ffn_{part}_shexp.weight"
       for part in ("gate", "up", "down")},
}


def deepseek(config: Config, keys: Metadata, gating: int) -> Made:
    config.need("hidden_act", "silu")
    config.need("attention_bias", False)
    config.need("moe_layer_freq", 1)
    rotary = keys["rope.dimension_count"]
    keys |= {"attention.key_length": config.get("qk_nope_head_dim", int) + rotary,
             "leading_dense_block_count": config.get("first_k_dense_replace", int),
             "expert_shared_count": config.get("n_shared_experts", int, 0), "expert_gating_func": gating,
             "expert_weights_scale": config.get("routed_scaling_factor", float),
             "expert_weights_norm": config.get("norm_topk_prob", bool)}
    return add_rope(config, keys, rotary, latent=True)


def deepseek_v2(config: Config, keys: Metadata) -> Made:
    config.need("topk_method", "greedy")
    config.need("norm_topk_prob", False)
    config.need("n_group", 1)
    return deepseek(config, keys, SOFTMAX)


def deepseek_v3(config: Config, keys: Metadata) -> Made:
    config.need("topk_method", "noaux_tc")
    config.need("rope_interleave", True)
    keys |= {"expert_group_count": config.get("n_group", int, 1),
             "expert_group_used_count": config.get("topk_group", int, 1)}
    return deepseek(config, keys, SIGMOID)


LATENT: dict[str, Family] = {
    model_type: Family("deepseek2", DECODER_TENSORS | LATENT_TENSORS, more, LATENT_KEYS, rope_pairing="NORM")
    for model_type, more in (("deepseek_v2", deepseek_v2), ("deepseek_v3", deepseek_v3))}
