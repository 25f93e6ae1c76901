"""llama (Llama 1 to 3, Mistral, Mixtral, SmolLM2 and others of that form; Touvron et al. 2023).

    x += Wo attention(rope(Wq n), rope(Wk n), Wv n),   n = rmsnorm(x) * g1
    x += Wdown (silu(Wgate n) * (Wup n)),              n = rmsnorm(x) * g2

The second line is a layer of experts where the file has some (Mixtral, Jiang et al. 2024; `experts.py`).
Mistral's sliding window (key "attention.sliding_window", in all layers) is kept where a file states it; llama.cpp reads
no window for this architecture, so longer texts differ from what it computes there.
"""
from __future__ import annotations

from m3jit.models.architectures.experts import Experts


class Llama(Experts):
    name = "llama"
    pairing = "NORM"                    # converters reorder the rows of Wq and Wk for it

    def read(self) -> None:
        self.windows = [self.keys.need("attention.sliding_window", int, default=0)] * self.layers
        if self.keys.need("expert_count", int, default=0):
            self.read_experts(self.hidden)
