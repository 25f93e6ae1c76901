"""A float64 NumPy forward pass of GGUF models of the `llama` architecture: the exact model behind rounding executors.

llama.cpp rounds activations to int8 blocks (quantised weights), f16 or bf16 and keeps f16 keys and values, so its
logits are only one rounding of the model. This file computes the same network in float64 from dequantised weights;
both the peer's and our own error can be measured against it. Weights are read and dequantised by the gguf package.

    x = embed[t];  per layer: x += Wo . attn(rope(Wq n), rope(Wk n), Wv n),  n = rmsnorm(x) * g1
                              x += Wdown . (silu(Wgate n) * (Wup n)),        n = rmsnorm(x) * g2
    logits = Wout . (rmsnorm(x) * g)

Rotary pairs are neighbours (2i, 2i+1), as GGUF stores llama weights; query head h uses key/value head h // group.
Needs about 9 bytes of memory per weight while a layer is used; weights are dequantised once per call of `forward`, or,
where they are to be kept, once.
"""
from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def values(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Stored weights as float64."""
    if kind is gguf.GGMLQuantizationType.F64:        # the package does not convert it
        return data.astype(np.float64)
    return gguf.quants.dequantize(data, kind).astype(np.float64)


class ReferenceLlama:
    """One opened model; `forward` runs a whole sequence from an empty context."""

    def __init__(self, path: Path | str, keep: bool = False) -> None:
        self.kept: dict[str, np.ndarray] | None = {} if keep else None
        reader = gguf.GGUFReader(str(path))
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

        def value(key: str) -> float:
            return reader.fields[f"llama.{key}"].contents()

        self.layers, self.width = int(value("block_count")), int(value("embedding_length"))
        self.heads, self.kv_heads = int(value("attention.head_count")), int(value("attention.head_count_kv"))
        self.head_dim = self.width // self.heads
        if int(value("rope.dimension_count")) != self.head_dim:
            raise ValueError(f"{path}: only rotary dimensions equal to the head size {self.head_dim} are covered")
        self.theta, self.eps = float(value("rope.freq_base")), float(value("attention.layer_norm_rms_epsilon"))

    def weight(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """A tensor (or some of its rows) as float64; the values of the packed blocks are exact in float32."""
        if self.kept is not None:
            if name not in self.kept:
                self.kept[name] = values(self.tensors[name].data, self.tensors[name].tensor_type)
            return self.kept[name] if rows is None else self.kept[name][rows]
        tensor = self.tensors[name]
        return values(tensor.data if rows is None else tensor.data[rows], tensor.tensor_type)

    def normalise(self, x: np.ndarray, gain: str) -> np.ndarray:
        """x / sqrt(mean(x^2) + eps) * gain over the last axis."""
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.weight(gain)

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Rotary position embedding of x (tokens, heads, head_dim), positions from 0."""
        frequency = self.theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angle = np.arange(x.shape[0])[:, None, None] * frequency
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
        return out

    def attend(self, n: np.ndarray, layer: str) -> np.ndarray:
        """Causal grouped-query attention of n (tokens, width), before the output matrix."""
        tokens = n.shape[0]
        q = self.rotate((n @ self.weight(layer + "attn_q.weight").T).reshape(tokens, self.heads, self.head_dim))
        k = self.rotate((n @ self.weight(layer + "attn_k.weight").T).reshape(tokens, self.kv_heads, self.head_dim))
        v = (n @ self.weight(layer + "attn_v.weight").T).reshape(tokens, self.kv_heads, self.head_dim)
        group = self.heads // self.kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(self.head_dim)
        scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return np.einsum("hij,jhd->ihd", scores, v).reshape(tokens, -1)

    def forward(self, tokens: list[int], last_only: bool = True) -> np.ndarray:
        """Logits as float64: (vocab,) of the last position, or (tokens, vocab) with last_only=False."""
        x = self.weight("token_embd.weight", np.asarray(tokens))
        for index in range(self.layers):
            layer = f"blk.{index}."
            attended = self.attend(self.normalise(x, layer + "attn_norm.weight"), layer)
            x = x + attended @ self.weight(layer + "attn_output.weight").T
            n = self.normalise(x, layer + "ffn_norm.weight")
            gate = n @ self.weight(layer + "ffn_gate.weight").T
            hidden = gate / (1.0 + np.exp(-gate)) * (n @ self.weight(layer + "ffn_up.weight").T)
            x = x + hidden @ self.weight(layer + "ffn_down.weight").T
        x = self.normalise(x[-1] if last_only else x, "output_norm.weight")
        head = "output.weight" if "output.weight" in self.tensors else "token_embd.weight"
        return x @ self.weight(head).T
