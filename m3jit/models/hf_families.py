"""The architectures of Hugging Face folders, in the names GGUF uses: one small table each.

To add one: a `Family` with the keys its config.json has beyond those of `DECODER_KEYS`, and the tensors it has beyond
those of `DECODER_TENSORS` ("{}" is the layer), under the model_type of its config.json in `FAMILIES`.
"""
from __future__ import annotations

import numpy as np

from m3jit.models import hf_transforms as how
from m3jit.models.hf_config import Config
from m3jit.models.hf_encoders import ENCODERS
from m3jit.models.hf_family import (DECODER_TENSORS, GEMMA_NORMS, HEAD_NORMS, POST_NORMS, Family, Made,
                                    Metadata, Part, add_rope, head_dim)
from m3jit.models.hf_latent import LATENT
from m3jit.models.hf_recurrent import RECURRENT


def plain(config: Config, keys: Metadata) -> Made:
    config.need("hidden_act", "silu")
    return add_rope(config, keys)


def llama(config: Config, keys: Metadata) -> Made:
    if 0 < config.get("sliding_window", int, 0) < keys["context_length"]:
        add_windows(config, keys, 0)
        if not keys["attention.sliding_window_pattern"].all():
            raise config.refuse("layer_types", "has layers without a window", "sliding_attention in all of them")
    return plain(config, keys)


def mixtral(config: Config, keys: Metadata) -> Made:
    keys |= {"expert_count": config.get("num_local_experts", int),
             "expert_used_count": config.get("num_experts_per_tok", int)}
    return llama(config, keys)


def qwen3_moe(config: Config, keys: Metadata) -> Made:
    config.need("norm_topk_prob", True)
    config.need("mlp_only_layers", [])
    config.need("decoder_sparse_step", 1)
    keys |= {"expert_count": config.get("num_experts", int, config.get("num_local_experts", int, None)),
             "expert_used_count": config.get("num_experts_per_tok", int),
             "expert_feed_forward_length": config.get("moe_intermediate_size", int)}
    if keys["expert_count"] is None or config.get("norm_topk_prob", bool, False) is not True:
        raise config.refuse("norm_topk_prob", "is not true, or num_experts is missing",
                            "experts whose shares are divided by their sum")
    return qwen(config, keys)


def qwen(config: Config, keys: Metadata) -> Made:
    config.need("use_sliding_window", False)
    return plain(config, keys)


def add_windows(config: Config, keys: Metadata, period: int) -> None:
    """The window, and which layers have it: those of `layer_types`, else all but every `period`-th one."""
    layers = keys["block_count"]
    period = config.get("sliding_window_pattern", int, period)
    usual = ["full_attention" if period > 0 and (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    kinds = config.get("layer_types", list, usual)
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.refuse("layer_types", f"has {len(kinds)} items of {', '.join(sorted(set(map(str, kinds))))[:80]}",
                            f"{layers} of full_attention and sliding_attention")
    window = config.get("sliding_window", int)
    if not 1 <= window < 1 << 31:
        raise config.refuse("sliding_window", f"is {window}", "at least 1")
    keys["attention.sliding_window"] = window
    keys["attention.sliding_window_pattern"] = np.array([kind == "sliding_attention" for kind in kinds])


def gemma(config: Config, keys: Metadata, period: int) -> Made:
    config.need("hidden_activation", "gelu_pytorch_tanh")
    config.need("use_bidirectional_attention", False)
    add_windows(config, keys, period)
    keys["final_logit_softcapping"] = config.get("final_logit_softcapping", float, 0.0)
    keys["attention.scale"] = config.get("query_pre_attn_scalar", float, float(head_dim(config))) ** -0.5
    return add_rope(config, keys)


def gemma2(config: Config, keys: Metadata) -> Made:
    keys["attn_logit_softcapping"] = config.get("attn_logit_softcapping", float, 0.0)
    return gemma(config, keys, 2)


def gemma3(config: Config, keys: Metadata) -> Made:
    config.need("attn_logit_softcapping")
    made = gemma(config, keys, 6)
    local = config.rope("sliding_attention")
    nested = "sliding_attention" in (config.values.get("rope_parameters") or {})
    keys["rope.freq_base_swa"] = local.theta if nested else config.get("rope_local_base_freq", float, 10000.0)
    if nested and local.kind != "default":
        raise config.refuse("rope_parameters", f"scales the layers with a window ({local.kind})", "default there")
    return made


def bitnet(config: Config, keys: Metadata) -> Made:
    """Weights as they are stored: what quantises them on the way (`quantization_config`) is refused."""
    config.need("hidden_act", "silu", "relu2")
    keys["hidden_activation"] = config.get("hidden_act", str)
    return add_rope(config, keys)


def experts(gate: str, parts: tuple[str, str, str]) -> dict[str, Part]:
    """Tensors of a router and of experts: gate, up and down."""
    return {gate: "blk.{}.ffn_gate_inp.weight", **{
        name: (f"blk.{{}}.ffn_{part}_exps.weight", how.EXPERTS) for part, name in zip(("gate", "up", "down"), parts)}}


QWEN_EXPERTS = experts("layers.{}.mlp.gate.weight", tuple(
    f"layers.{{}}.mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")))
MIXTRAL_EXPERTS = experts("layers.{}.block_sparse_moe.gate.weight", tuple(
    f"layers.{{}}.block_sparse_moe.experts.{{}}.{part}.weight" for part in ("w1", "w3", "w2")))
_DECODER_IGNORED = ("vision_tower.", "multi_modal_projector.", "visual.")
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", DECODER_TENSORS, llama),
    "mistral": Family("llama", DECODER_TENSORS, llama, defaults={"sliding_window": 4096}),
    "mixtral": Family("llama", DECODER_TENSORS | MIXTRAL_EXPERTS, mixtral),
    "qwen2": Family("qwen2", DECODER_TENSORS, qwen),
    "qwen3": Family("qwen3", DECODER_TENSORS | HEAD_NORMS, qwen),
    "qwen3_moe": Family("qwen3moe", DECODER_TENSORS | HEAD_NORMS | QWEN_EXPERTS, qwen3_moe),
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
    "olmo2": Family("olmo2", DECODER_TENSORS | POST_NORMS | HEAD_NORMS, plain),
    "bitnet": Family("bitnet", DECODER_TENSORS | {
        "layers.{}.self_attn.attn_sub_norm.weight": "blk.{}.attn_sub_norm.weight",
        "layers.{}.mlp.ffn_sub_norm.weight": "blk.{}.ffn_sub_norm.weight"}, bitnet),
    **LATENT,
    **ENCODERS,
    **RECURRENT,
}
FAMILIES["gemma3"] = FAMILIES["gemma3_text"]
