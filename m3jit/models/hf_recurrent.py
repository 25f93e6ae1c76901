"""Models of Hugging Face folders that scan: Mamba, Mamba-2, Jamba, Granite 4.0."""
from __future__ import annotations

import math

import numpy as np

from m3jit.models import hf_transforms as how
from m3jit.models.hf_config import Config
from m3jit.models.hf_family import DECODER_KEYS, DECODER_TENSORS, Family, KeyTable, Made, Metadata, Part, add_rope

UNBOUNDED = 1 << 20                 # context of models whose state does not grow, as converters write it

MAMBA_KEYS: KeyTable = {
    "block_count": DECODER_KEYS["block_count"], "embedding_length": DECODER_KEYS["embedding_length"],
    "ssm.conv_kernel": ("conv_kernel", int, True), "ssm.state_size": ("state_size", int, True),
    "attention.layer_norm_rms_epsilon": ("layer_norm_epsilon", float, True),
    "vocab_size": DECODER_KEYS["vocab_size"]}
HYBRID_KEYS: KeyTable = {
    **{key: DECODER_KEYS[key] for key in DECODER_KEYS if key != "attention.head_count_kv"},
    "ssm.conv_kernel": ("mamba_d_conv", int, True), "ssm.state_size": ("mamba_d_state", int, True)}
HYBRID_TENSORS = {name: part for name, part in DECODER_TENSORS.items() if ".mlp." not in name and ".bias" not in name}


def mixer(prefix: str, one: dict[str, Part]) -> dict[str, Part]:
    """Tensors of a layer that scans; `one`: those only its kind has."""
    both: dict[str, Part] = {"in_proj.weight": "ssm_in.weight", "conv1d.weight": ("ssm_conv1d.weight", how.TAPS),
                             "conv1d.bias": "ssm_conv1d.bias", "out_proj.weight": "ssm_out.weight"}
    found: dict[str, Part] = {}
    for name, part in (both | one).items():
        ours, transform = (part, how.AS_STORED) if isinstance(part, str) else part
        found[f"layers.{{}}.{prefix}.{name}"] = (f"blk.{{}}.{ours}", transform)
    return found


SELECTIVE: dict[str, Part] = {"x_proj.weight": "ssm_x.weight", "dt_proj.weight": "ssm_dt.weight", "D": "ssm_d",
                              "dt_proj.bias": "ssm_dt.bias", "A_log": ("ssm_a", how.DECAY)}
HEADS: dict[str, Part] = {"A_log": ("ssm_a", how.HEAD_DECAY), "D": ("ssm_d", how.COLUMN), "dt_bias": "ssm_dt.bias",
                          "norm.weight": ("ssm_norm.weight", how.GROUPED)}
BACKBONE: dict[str, Part] = {
    "embeddings.weight": "token_embd.weight", "embedding.weight": "token_embd.weight",
    "norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight", "layers.{}.norm.weight": "blk.{}.attn_norm.weight"}


def _rank(config: Config, key: str) -> int:
    """Columns of the step sizes; "auto": a sixteenth of the width."""
    automatic = config.values.get(key) in (None, "auto")
    return math.ceil(config.get("hidden_size", int) / 16) if automatic else config.get(key, int)


def _check_mixer(config: Config, prefix: str = "") -> None:
    config.need("hidden_act", "silu")
    for key, value in (("use_bias", False), ("use_conv_bias", True)) if not prefix else \
            ((f"{prefix}proj_bias", False), (f"{prefix}conv_bias", True)):
        config.need(key, value)
    config.need("time_step_limit", [0.0, math.inf], [0, math.inf])


def _alone(config: Config, keys: Metadata) -> None:
    """Keys of a model without attention."""
    _check_mixer(config)
    width = config.get("hidden_size", int)
    keys |= {"context_length": UNBOUNDED, "feed_forward_length": 0, "attention.head_count": 0,
             "ssm.inner_size": config.get("expand", int, 2) * width}


def mamba(config: Config, keys: Metadata) -> Made:
    _alone(config, keys)
    keys["ssm.inner_size"] = config.get("intermediate_size", int, keys["ssm.inner_size"])
    keys["ssm.time_step_rank"] = _rank(config, "time_step_rank")
    return {}


def mamba2(config: Config, keys: Metadata) -> Made:
    _alone(config, keys)
    keys |= {"ssm.time_step_rank": config.get("num_heads", int), "ssm.group_count": config.get("n_groups", int)}
    return {}


def jamba(config: Config, keys: Metadata) -> Made:
    _check_mixer(config, "mamba_")
    if config.get("num_experts", int) > 1:
        keys |= {"expert_count": config.get("num_experts", int),
                 "expert_used_count": config.get("num_experts_per_tok", int)}
    period, offset = config.get("attn_layer_period", int), config.get("attn_layer_offset", int)
    if not 0 <= offset < period:
        raise config.refuse("attn_layer_offset", f"is {offset}", f"a number below attn_layer_period, {period}")
    kv_heads = config.get("num_key_value_heads", int)
    keys |= {"attention.head_count_kv": np.array([kv_heads if i % period == offset else 0
                                                  for i in range(keys["block_count"])]),
             "ssm.inner_size": config.get("mamba_expand", int) * config.get("hidden_size", int),
             "ssm.time_step_rank": _rank(config, "mamba_dt_rank")}
    return {}


def granite(config: Config, keys: Metadata) -> Made:
    _check_mixer(config, "mamba_")
    config.need("attention_bias", False)
    config.need("position_embedding_type", "rope", "nope")
    kinds = config.get("layer_types", list)
    if len(kinds) != keys["block_count"] or not set(map(str, kinds)) <= _ATTENDS | _SCANS:
        raise config.refuse("layer_types", f"has {len(kinds)} items, of {', '.join(sorted(set(map(str, kinds))))[:60]}",
                            f"{keys['block_count']} of {', '.join(sorted(_ATTENDS | _SCANS))}")
    kv_heads = config.get("num_key_value_heads", int)
    rotates = config.get("position_embedding_type", str, "nope") == "rope"
    shared, count = config.get("shared_intermediate_size", int), config.get("num_local_experts", int, 0)
    if count > 0:
        keys |= {"expert_count": count, "expert_used_count": config.get("num_experts_per_tok", int),
                 "expert_feed_forward_length": keys["feed_forward_length"], "expert_shared_feed_forward_length": shared}
    else:
        keys["feed_forward_length"] = shared
    keys |= {"attention.head_count_kv": np.array([kv_heads if kind in _ATTENDS else 0 for kind in kinds]),
             "ssm.inner_size": config.get("mamba_expand", int) * config.get("hidden_size", int),
             "ssm.time_step_rank": config.get("mamba_n_heads", int),
             "ssm.group_count": config.get("mamba_n_groups", int),
             "rope.scaling.finetuned": rotates, "attention.scale": config.get("attention_multiplier", float),
             "embedding_scale": config.get("embedding_multiplier", float),
             "residual_scale": config.get("residual_multiplier", float),
             "logit_scale": config.get("logits_scaling", float)}
    return add_rope(config, keys) if rotates else {}


def granite_ffn(suffix: str) -> dict[str, Part]:
    """Tensors of the feed-forward part that every token takes."""
    return {"layers.{}.shared_mlp.input_linear.weight": [(f"blk.{{}}.ffn_gate{suffix}.weight", how.FIRST_HALF),
                                                         (f"blk.{{}}.ffn_up{suffix}.weight", how.SECOND_HALF)],
            "layers.{}.shared_mlp.output_linear.weight": f"blk.{{}}.ffn_down{suffix}.weight"}


GRANITE_EXPERTS: dict[str, Part] = {
    "layers.{}.block_sparse_moe.router.layer.weight": "blk.{}.ffn_gate_inp.weight",
    "layers.{}.block_sparse_moe.input_linear.weight": [("blk.{}.ffn_gate_exps.weight", how.FIRST_HALVES),
                                                       ("blk.{}.ffn_up_exps.weight", how.SECOND_HALVES)],
    "layers.{}.block_sparse_moe.output_linear.weight": "blk.{}.ffn_down_exps.weight"}
GRANITE = HYBRID_TENSORS | mixer("mamba", HEADS)
_ATTENDS, _SCANS = {"attention", "full_attention"}, {"mamba", "linear_attention"}
RECURRENT: dict[str, Family] = {
    "mamba": Family("mamba", BACKBONE | mixer("mixer", SELECTIVE), mamba, MAMBA_KEYS, prefixes=("backbone.", "")),
    "mamba2": Family("mamba2", BACKBONE | mixer("mixer", HEADS), mamba2, MAMBA_KEYS, prefixes=("backbone.", "")),
    "jamba": Family("jamba", HYBRID_TENSORS | mixer("mamba", SELECTIVE) | {
        "final_layernorm.weight": "output_norm.weight",
        "layers.{}.pre_ff_layernorm.weight": "blk.{}.ffn_norm.weight",
        **{f"layers.{{}}.feed_forward.{part}_proj.weight": f"blk.{{}}.ffn_{part}.weight"
           for part in ("gate", "up", "down")},
        "layers.{}.feed_forward.router.weight": "blk.{}.ffn_gate_inp.weight",
        **{f"layers.{{}}.feed_forward.experts.{{}}.{part}_proj.weight":
           (f"blk.{{}}.ffn_{part}_exps.weight", how.EXPERTS) for part in ("gate", "up", "down")},
        **{f"layers.{{}}.mamba.{part}_layernorm.weight": f"blk.{{}}.ssm_{part}_norm.weight"
           for part in ("dt", "b", "c")},
    }, jamba, HYBRID_KEYS),
    "granitemoehybrid": Family("granitehybrid", GRANITE | granite_ffn(""), granite, HYBRID_KEYS, with_experts=(
        "num_local_experts", Family("granitehybrid", GRANITE | GRANITE_EXPERTS | granite_ffn("_shexp"), granite,
                                    HYBRID_KEYS))),
}
