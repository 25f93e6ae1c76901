"""A Llama-architecture language model in PyTorch, with the tensor names and conventions of GGUF's arch ``llama``.

    x ← x + W_o · attention(rope(W_q · rms(x)), rope(W_k · rms(x)), W_v · rms(x))
    x ← x + W_down · (silu(W_gate · rms(x)) ⊙ (W_up · rms(x)))          rms(x) = x / √(mean(x²) + ε) ⊙ g

Rotary embedding pairs neighbouring elements (2i, 2i+1), as llama.cpp does for this architecture, so the weights are
exported without the permutation that checkpoints of the half-split pairing need. The output matrix is the token
embedding (tied). Used for training and as the float reference of an exported file; the package does not import it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of one model; ``width`` = ``heads`` · ``head_dim``, and ``heads`` is a multiple of ``kv_heads``."""

    vocab: int
    layers: int = 4
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 768
    context: int = 512
    theta: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Rms(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin of position · theta^(-2i/head_dim), each (context, 1, head_dim/2)."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angle = torch.arange(shape.context, dtype=torch.float64)[:, None] * shape.theta ** -half[None]
    return angle.cos().float()[:, None], angle.sin().float()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (2i, 2i+1) of ``x`` (batch, position, head, head_dim) by its position's angle."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        kv_width = shape.kv_heads * shape.head_dim
        self.attn_norm, self.ffn_norm = Rms(shape.width, shape.epsilon), Rms(shape.width, shape.epsilon)
        self.attn_q = nn.Linear(shape.width, shape.width, bias=False)
        self.attn_k = nn.Linear(shape.width, kv_width, bias=False)
        self.attn_v = nn.Linear(shape.width, kv_width, bias=False)
        self.attn_output = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn_gate = nn.Linear(shape.width, shape.ffn, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.ffn, bias=False)
        self.ffn_down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.attn_norm(x)
        q = rotate(self.attn_q(h).view(batch, length, -1, self.shape.head_dim), cos, sin).transpose(1, 2)
        k = rotate(self.attn_k(h).view(batch, length, -1, self.shape.head_dim), cos, sin).transpose(1, 2)
        v = self.attn_v(h).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
        groups = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._drop(self.attn_output(a.transpose(1, 2).reshape(batch, length, -1)))
        h = self.ffn_norm(x)
        return x + self._drop(self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Llama(nn.Module):
    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocab, shape.width)
        self.blk = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.output_norm = Rms(shape.width, shape.epsilon)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                into_residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * shape.layers) ** 0.5 if into_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length ≤ context) token numbers → (batch, length, vocab) logits of the token after each."""
        x = self.token_embd(tokens)
        cos, sin = self.cos[:tokens.shape[1]], self.sin[:tokens.shape[1]]
        for layer in self.blk:
            x = layer(x, cos, sin)
        return F.linear(self.output_norm(x), self.token_embd.weight)
