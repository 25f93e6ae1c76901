"""Encoders of Hugging Face folders: BERT, RoBERTa and XLM-RoBERTa, DistilBERT; all are architecture `bert` of GGUF."""
from __future__ import annotations

import numpy as np

from m3jit.models import hf_transforms as how
from m3jit.models.hf_config import Config
from m3jit.models.hf_family import DECODER_KEYS, Family, KeyTable, Made, Metadata, Part

BERT_KEYS: KeyTable = {
    **{key: DECODER_KEYS[key] for key in ("block_count", "embedding_length", "feed_forward_length",
                                          "attention.head_count", "context_length", "vocab_size")},
    "attention.layer_norm_epsilon": ("layer_norm_eps", float, True)}
DISTILBERT_KEYS: KeyTable = {
    "block_count": ("n_layers", int, True), "embedding_length": ("dim", int, True),
    "feed_forward_length": ("hidden_dim", int, True), "attention.head_count": ("n_heads", int, True),
    "context_length": ("max_position_embeddings", int, True), "vocab_size": ("vocab_size", int, False)}
TABLES: dict[str, Part] = {"embeddings.word_embeddings.weight": "token_embd.weight",
                           "embeddings.position_embeddings.weight": "position_embd.weight",
                           "embeddings.token_type_embeddings.weight": "token_types.weight"}
BERT_PARTS = {
    "embeddings.LayerNorm": "token_embd_norm",
    "encoder.layer.{}.attention.self.query": "blk.{}.attn_q",
    "encoder.layer.{}.attention.self.key": "blk.{}.attn_k",
    "encoder.layer.{}.attention.self.value": "blk.{}.attn_v",
    "encoder.layer.{}.attention.output.dense": "blk.{}.attn_output",
    "encoder.layer.{}.attention.output.LayerNorm": "blk.{}.attn_output_norm",
    "encoder.layer.{}.intermediate.dense": "blk.{}.ffn_up",
    "encoder.layer.{}.output.dense": "blk.{}.ffn_down",
    "encoder.layer.{}.output.LayerNorm": "blk.{}.layer_output_norm"}
DISTILBERT_PARTS = {
    "embeddings.LayerNorm": "token_embd_norm",
    "transformer.layer.{}.attention.q_lin": "blk.{}.attn_q",
    "transformer.layer.{}.attention.k_lin": "blk.{}.attn_k",
    "transformer.layer.{}.attention.v_lin": "blk.{}.attn_v",
    "transformer.layer.{}.attention.out_lin": "blk.{}.attn_output",
    "transformer.layer.{}.sa_layer_norm": "blk.{}.attn_output_norm",
    "transformer.layer.{}.ffn.lin1": "blk.{}.ffn_up",
    "transformer.layer.{}.ffn.lin2": "blk.{}.ffn_down",
    "transformer.layer.{}.output_layer_norm": "blk.{}.layer_output_norm"}


def with_biases(parts: dict[str, str]) -> dict[str, Part]:
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in parts.items() for kind in ("weight", "bias")}


def bert(config: Config, keys: Metadata) -> Made:
    config.need("hidden_act", "gelu")
    config.need("position_embedding_type", "absolute")
    config.need("is_decoder", False)
    keys["attention.causal"] = False
    return {}


def roberta(config: Config, keys: Metadata) -> Made:
    """As bert, but positions are counted from 2, the number behind the padding token's."""
    config.need("pad_token_id", 1)
    keys["context_length"] -= 2
    return bert(config, keys)


def distilbert(config: Config, keys: Metadata) -> Made:
    """No token types: a row of zeros stands for them."""
    config.need("activation", "gelu")
    keys |= {"attention.causal": False, "attention.layer_norm_epsilon": 1e-12}
    return {"token_types.weight": np.zeros((1, keys["embedding_length"]), np.float32)}


_IGNORED = ("pooler.", "cls.", "lm_head.", "classifier.", "embeddings.position_ids")
ROBERTA = Family("bert", TABLES | with_biases(BERT_PARTS) | {
    "embeddings.position_embeddings.weight": ("position_embd.weight", how.AFTER_TWO)}, roberta, BERT_KEYS,
    prefixes=("roberta.", ""), ignored=_IGNORED)
ENCODERS: dict[str, Family] = {
    "bert": Family("bert", TABLES | with_biases(BERT_PARTS), bert, BERT_KEYS, prefixes=("bert.", ""), ignored=_IGNORED),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "distilbert": Family("bert", TABLES | with_biases(DISTILBERT_PARTS), distilbert, DISTILBERT_KEYS,
                         prefixes=("distilbert.", ""), ignored=(
                             "vocab_transform.", "vocab_layer_norm.", "vocab_projector.", "pre_classifier.",
                             "classifier.", "qa_outputs.")),
}
