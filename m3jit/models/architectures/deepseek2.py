"""deepseek2 (DeepSeek-V2, V2-Lite, V2.5 and models of that form; DeepSeek-AI 2024): multi-head latent attention.

    q = Wqb rmsnorm(Wqa n), or Wq n;   per head q = [q_nope | q_rope]
    [c | k_rope] = Wkva n;   c = rmsnorm(c) * g     the latent row of a token, one for all heads; k_rope likewise
    k_h = [Wk_h c | rope(k_rope)],   v_h = Wv_h c,   x += Wo [softmax(q_h k_h^T scale) v_h]

Keys and values of the heads are never made: Wk goes to the query's side, Wv behind the attention (the absorbed form),
    q_h k_h^T = [Wk_h^T q_nope | rope(q_rope)] [c | rope(k_rope)]^T,   out_h = Wv_h (sum of weights times c),
so the stream holds one row [c | rope(k_rope)] a token and layer, and its first columns are the values.

Files have `attn_k_b` [heads, rank, nope], Wk turned round, and `attn_v_b` [heads, value, rank]; older ones hold both in
`attn_kv_b` and are given that form when they are opened (`latent_parts.py`).  Products with Wk and Wv compute in f32
with the weights' exact values.  YaRN enters the scores alone: scale = m^2 / sqrt(key length),
m = 1 + yarn_log_multiplier ln(factor); what is rotated keeps its length.

Layers from leading_dense_block_count on have experts: p = softmax or sigmoid of the router's scores, the `used` largest
of p (plus a bias, which only chooses) are taken, divided by their sum where expert_weights_norm says so, and multiplied
by expert_weights_scale; shared experts are added.  With expert_group_count over 1 (DeepSeek-V3) only the experts of the
expert_group_used_count best groups are looked at; a group is as good as the sum of its two best.
"""
from __future__ import annotations

import math

from m3jit.kernels.attention_pages import MAX_DIM
from m3jit.models.architectures.experts import Experts
from m3jit.models.model_source import LAYER_PREFIX, Shapes
from m3jit.models.program import Writer

SOFTMAX, SIGMOID = 1, 2                     # expert_gating_func


class DeepSeek2(Experts):
    name = "deepseek2"
    pairing = "NORM"

    def _check_heads(self) -> None:
        """Sizes of a head: the metadata of newer files describes the latent row, and the heads under other names."""
        need = self.keys.need
        self.rank = need("attention.kv_lora_rank", int)
        self.rotary = need("rope.dimension_count", int)
        self.value = need("attention.value_length_mla", int, default=need("attention.value_length", int))
        self.head_dim = need("attention.key_length_mla", int, default=self.head_dim)
        self.nope = self.head_dim - self.rotary
        self.q_rank = need("attention.q_lora_rank", int, default=0)
        self.kv_heads = 1
        if min(self.heads, self.rank, self.rotary, self.value, self.nope) <= 0 or self.rank + self.rotary > MAX_DIM:
            found = (f"{self.heads} heads of {self.nope} + {self.rotary} features and values of {self.value}, latent "
                     f"rows of {self.rank}")
            raise self.keys.refuse("attention.kv_lora_rank", found, "all above 0, latent and rotated features together "
                                   f"at most {MAX_DIM}")

    def read(self) -> None:
        need = self.keys.need
        if need("rope.scaling.attn_factor", float, default=1.0) != 1:
            raise self.keys.refuse("rope.scaling.attn_factor", "is not 1", "1")
        magnitude = 1.0 + need("rope.scaling.yarn_log_multiplier", float, default=0.0) * math.log(self.rotation.factor)
        self.score_scale = magnitude ** 2 / math.sqrt(self.head_dim)
        self.dense = need("leading_dense_block_count", int, default=0)
        if self.dense < self.layers:
            self.read_experts(self.hidden)
            self.shared = need("expert_shared_count", int, default=0) * self.expert_hidden
            self.gating = need("expert_gating_func", int, default=SOFTMAX) or SOFTMAX
            self.normed = need("expert_weights_norm", bool, default=False)
            if self.gating not in (SOFTMAX, SIGMOID):
                raise self.keys.refuse("expert_gating_func", f"is {self.gating}", f"{SOFTMAX} or {SIGMOID}")
            self.groups = need("expert_group_count", int, default=1) or 1
            self.used_groups = need("expert_group_used_count", int, default=self.groups)
            if self.groups < 1 or self.experts % self.groups or not 0 < self.used_groups <= self.groups or \
                    self.groups > 1 and self.experts < 2 * self.groups:
                raise self.keys.refuse("expert_group_count", f"is {self.groups}, {self.used_groups} of them used",
                                       f"a divisor of the {self.experts} experts, groups of two or more")
            if self.used > self.used_groups * (self.experts // self.groups):
                raise self.keys.refuse("expert_group_used_count", f"is {self.used_groups}, of "
                                       f"{self.experts // self.groups} experts each",
                                       f"groups that hold the {self.used} experts of a token")

    # Tensors.

    def layer_tensors(self, i: int) -> Shapes:
        attention = {"attn_norm.weight": (self.width,), **self.attention_tensors(), "ffn_norm.weight": (self.width,)}
        if i < self.dense:
            return attention | super(Experts, self).ffn_tensors()
        shapes = attention | self.ffn_tensors()
        if LAYER_PREFIX.format(i) + "exp_probs_b.bias" in self.source.tensors:
            shapes["exp_probs_b.bias"] = (self.experts,)
        return shapes

    def attention_tensors(self) -> Shapes:
        q = self.heads * self.head_dim
        shapes: Shapes = {"attn_kv_a_mqa.weight": (self.rank + self.rotary, self.width),
                          "attn_kv_a_norm.weight": (self.rank,),
                          "attn_output.weight": (self.width, self.heads * self.value)}
        if LAYER_PREFIX.format(0) + "attn_kv_b.weight" in self.source.tensors:
            shapes["attn_kv_b.weight"] = (self.heads * (self.nope + self.value), self.rank)
        shapes |= {"attn_k_b.weight": (self.heads, self.rank, self.nope),
                   "attn_v_b.weight": (self.heads, self.value, self.rank)}
        return shapes | ({"attn_q_a.weight": (self.q_rank, self.width), "attn_q_a_norm.weight": (self.q_rank,),
                          "attn_q_b.weight": (q, self.q_rank)} if self.q_rank else {"attn_q.weight": (q, self.width)})

    # Lines.

    def attention(self, w: Writer, i: int, x: str = "rH") -> None:
        b = LAYER_PREFIX.format(i)
        factors = self.rotation.load_factors(w)
        if self.q_rank:
            w.product("rQ", x, b + "attn_q_a.weight")
            w.norm("rQ", "rQ", b + "attn_q_a_norm.weight", self.eps)
            w.product("rQ", "rQ", b + "attn_q_b.weight")
        else:
            w.product("rQ", x, b + "attn_q.weight")
        w.product("rK", x, b + "attn_kv_a_mqa.weight")
        self._queries(w, b, factors)
        w(f"SLICE rTail, rK AXIS=1 START={self.rank}", "what is rotated")
        w(f"SLICE rK, rK AXIS=1 START=0 LEN={self.rank}", "the latent")
        w.norm("rK", "rK", b + "attn_kv_a_norm.weight", self.eps)
        self._rope(w, "rTail", factors)
        w("CONCAT rK, rK, rTail AXIS=1")
        kv_type = f" KV_TYPE={w.options.kv_type}" if w.options.kv_type != "F16" else ""
        w(f"ATTN rH, rQ, rK, _, sKV HEADS={self.heads} KV_HEADS=1 HDIM={self.rank + self.rotary} VDIM={self.rank} "
          f"LAYER={i} SCALE={self.score_scale!r} CAUSAL{kv_type}")
        w(f"RESHAPE rH, rH SHAPE=[-1, {self.heads}, {self.rank}]")
        w.weight("rW", b + "attn_v_b.weight")
        w("MATVEC rH, rH, rW TRANSPOSE", "latent to values [T, heads, value]")
        w(f"RESHAPE rH, rH SHAPE=[-1, {self.heads * self.value}]")
        w.product("rH", "rH", b + "attn_output.weight")

    def _queries(self, w: Writer, b: str, factors: str) -> None:
        """rQ [T, heads * (nope + rotary)] -> [T, heads * (rank + rotary)]."""
        w(f"RESHAPE rQ, rQ SHAPE=[-1, {self.heads}, {self.head_dim}]")
        w(f"SLICE rTail, rQ AXIS=2 START={self.nope}")
        w(f"SLICE rQ, rQ AXIS=2 START=0 LEN={self.nope}")
        w(f"RESHAPE rTail, rTail SHAPE=[-1, {self.heads * self.rotary}]")
        self._rope(w, "rTail", factors)
        w(f"RESHAPE rTail, rTail SHAPE=[-1, {self.heads}, {self.rotary}]")
        w.weight("rW", b + "attn_k_b.weight")
        w("MATVEC rQ, rQ, rW TRANSPOSE", "queries of latent rows [T, heads, rank]")
        w("CONCAT rQ, rQ, rTail AXIS=2")
        w(f"RESHAPE rQ, rQ SHAPE=[-1, {self.heads * (self.rank + self.rotary)}]")

    def _rope(self, w: Writer, register: str, factors: str) -> None:
        theta, scale = self.rotation.theta, self.rotation.scale
        w(f"ROPE {register}, {register} POS=rPos HDIM={self.rotary} {self.pairing} THETA={theta!r}"
          + (f" SCALE={scale!r}" if scale != 1 else "") + factors)

    def feed_forward(self, w: Writer, i: int) -> None:
        if i < self.dense:
            return w.ffn("rH", "rH", LAYER_PREFIX.format(i) + "ffn_", self.act)
        super().feed_forward(w, i)

    def choose(self, w: Writer, b: str) -> None:
        w.product("rQ", "rH", b + "ffn_gate_inp.weight")
        w("SOFTMAX rQ, rQ" if self.gating == SOFTMAX else "SIGMOID rQ, rQ")
        bias = w.has(b + "exp_probs_b.bias")
        if bias:
            w.weight("rB", b + "exp_probs_b.bias")
            w("ADD rQ, rQ, rB", "chooses, but does not count")
        if self.groups > self.used_groups:
            self._leave_best_groups(w)
        w(f"TOPK rP, rQ, rExperts K={self.used} AXIS=1", "the experts of each token [T, used]")
        if bias:
            # No instruction takes from each row its own columns, so p is what is left of p + bias: right to half a unit
            # in the last place of p + bias.
            w("GATHER rB, rB, rExperts")
            w("LOADI rScale, -1.0")
            w("MUL rB, rB, rScale")
            w("ADD rP, rP, rB")
        if self.normed:
            w("LOG rP, rP")
            w("SOFTMAX rP, rP", "p over the sum of the chosen")

    def _leave_best_groups(self, w: Writer) -> None:
        """Takes a large number from the scores rQ [T, experts] of all groups but the best."""
        count, size = self.groups, self.experts // self.groups
        w(f"RESHAPE rP, rQ SHAPE=[-1, {count}, {size}]")
        w("TOPK rP, rP, rK K=2 AXIS=2")
        w("REDUCE rP, rP SUM AXIS=2", "what each group is worth [T, groups]")
        w(f"TOPK rP, rP, rK K={self.used_groups} AXIS=1")
        w.constant("rW", "group_rows", [float(i == j) for i in range(count) for j in range(count)])
        w(f"RESHAPE rW, rW SHAPE=[{count}, {count}]")
        w("EMBED rK, rK, rW", "a row with a 1 for each chosen group")
        w(f"RESHAPE rK, rK SHAPE=[-1, {self.used_groups}, {count}]")
        w("REDUCE rK, rK SUM AXIS=1")
        w("LOADI rScale, -1.0")
        w("ADD rK, rK, rScale")
        w("LOADI rScale, 1e30")
        w("MUL rK, rK, rScale", "0 for those, -1e30 for others")
        w(f"RESHAPE rK, rK SHAPE=[-1, {count}, 1]")
        w(f"RESHAPE rQ, rQ SHAPE=[-1, {count}, {size}]")
        w("ADD rQ, rQ, rK")
        w(f"RESHAPE rQ, rQ SHAPE=[-1, {self.experts}]")
