"""phi3 (Phi-3, Phi-3.5 and Phi-4 mini; Abdin et al. 2024).

Layers as llama's, with one weight for queries, keys and values and one for gate and up, gate first; products are taken
whole and sliced.  Contexts beyond the original one have longrope factors; which set applies hangs on how many positions
the program allows, as in llama.cpp.  A sliding window in the metadata of GGUF files is not applied, as in llama.cpp;
that of a Hugging Face folder, which says which layers have it, is, as in transformers.
"""
from __future__ import annotations

from m3jit.models.architectures.decoder import Decoder
from m3jit.models.model_source import LAYER_PREFIX, Shapes
from m3jit.models.program import Writer


class Phi3(Decoder):
    name = "phi3"

    def read(self) -> None:
        if self.keys.has("attention.sliding_window_pattern"):
            self.read_windows(period=0)

    def attention_tensors(self) -> Shapes:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {"attn_qkv.weight": (q + 2 * kv, self.width), "attn_output.weight": (self.width, q)}

    def ffn_tensors(self) -> Shapes:
        return {"ffn_up.weight": (2 * self.hidden, self.width), "ffn_down.weight": (self.width, self.hidden)}

    def queries_keys_values(self, w: Writer, i: int, x: str) -> None:
        w.product("rV", x, LAYER_PREFIX.format(i) + "attn_qkv.weight")
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        w(f"SLICE rQ, rV AXIS=1 START=0 LEN={q}")
        w(f"SLICE rK, rV AXIS=1 START={q} LEN={kv}")
        w(f"SLICE rV, rV AXIS=1 START={q + kv} LEN={kv}")

    def feed_forward(self, w: Writer, i: int) -> None:
        b = LAYER_PREFIX.format(i)
        w.product("rK", "rH", b + "ffn_up.weight")
        w(f"SLICE rQ, rK AXIS=1 START=0 LEN={self.hidden}", "gate")
        w(f"SLICE rK, rK AXIS=1 START={self.hidden} LEN={self.hidden}", "up")
        w("SILU rQ, rQ")
        w("MUL rQ, rQ, rK")
        w.product("rH", "rQ", b + "ffn_down.weight")
