"""Feed-forward layers of experts: a router gives each token a few of many gated feed-forward blocks.

    g = Wrouter n;  (s, e) = the `used` largest of g;  p = softmax(s)
    y = sum_j scale p_j Wdown[e_j] (silu(Wgate[e_j] n) * (Wup[e_j] n)), plus what a block that all tokens share gives

softmax of the chosen scores is what softmax of all of them gives once the chosen ones are divided by their sum
(Mixtral, Jiang et al. 2024; Qwen 3).  Weights of experts are tensors [experts, rows, columns]; `MATVEC EXPERTS=`
multiplies with the chosen ones alone, so a token costs what its experts cost.
"""
from __future__ import annotations

from m3jit.models.architectures.decoder import Decoder
from m3jit.models.model_source import LAYER_PREFIX, Shapes
from m3jit.models.program import Writer


class Experts(Decoder):
    """A decoder whose feed-forward layers are experts of `expert_hidden` elements, or dense if there are no experts."""
    experts = used = 0
    expert_hidden = 0
    shared = 0                                         # elements of the block that every token takes besides
    scale = 1.0

    def read_experts(self, hidden: int) -> None:
        """hidden: of an expert, where the metadata does not say."""
        need = self.keys.need
        self.experts, self.used = need("expert_count", int), need("expert_used_count", int)
        self.expert_hidden = need("expert_feed_forward_length", int, default=hidden)
        self.scale = need("expert_weights_scale", float, default=1.0) or 1.0
        if not 0 < self.used <= self.experts:
            raise self.keys.refuse("expert_used_count", f"is {self.used}", f"1 to {self.experts}, the experts")

    def ffn_tensors(self) -> Shapes:
        if not self.experts:
            return super().ffn_tensors()
        e, hidden = self.experts, self.expert_hidden
        shared: Shapes = {"ffn_gate_shexp.weight": (self.shared, self.width),
                          "ffn_up_shexp.weight": (self.shared, self.width),
                          "ffn_down_shexp.weight": (self.width, self.shared)} if self.shared else {}
        return {"ffn_gate_inp.weight": (e, self.width), "ffn_gate_exps.weight": (e, hidden, self.width),
                "ffn_up_exps.weight": (e, hidden, self.width), "ffn_down_exps.weight": (e, self.width, hidden),
                **shared}

    def feed_forward(self, w: Writer, i: int) -> None:
        if not self.experts:
            return super().feed_forward(w, i)
        b = LAYER_PREFIX.format(i)
        self.choose(w, b)
        if self.shared:
            w.product("rQ", "rH", b + "ffn_gate_shexp.weight")
            w("SILU rQ, rQ")
            w.product("rK", "rH", b + "ffn_up_shexp.weight")
            w("MUL rQ, rQ, rK")
            w.product("rShared", "rQ", b + "ffn_down_shexp.weight")
        if self.scale != 1:
            w(f"LOADI rScale, {self.scale!r}")
            w("MUL rP, rP, rScale")
        self.chosen_experts(w, b)
        if self.shared:
            w("ADD rH, rH, rShared")

    def choose(self, w: Writer, b: str) -> None:
        """rH -> rExperts [T, used] and what each counts for, rP [T, used]."""
        w.product("rQ", "rH", b + "ffn_gate_inp.weight")
        w(f"TOPK rP, rQ, rExperts K={self.used} AXIS=1", "the experts of each token [T, used]")
        w("SOFTMAX rP, rP")

    def chosen_experts(self, w: Writer, b: str) -> None:
        """rH = what the experts rExperts [T, used] of a layer make of rH, added up with the weights rP [T, used]."""
        w(f"RESHAPE rP, rP SHAPE=[-1, {self.used}, 1]")
        w.routed("rQ", "rH", b + "ffn_gate_exps.weight", "rExperts")
        w.routed("rK", "rH", b + "ffn_up_exps.weight", "rExperts")
        w("SILU rQ, rQ")
        w("MUL rQ, rQ, rK")
        w.routed("rH", "rQ", b + "ffn_down_exps.weight", "rExperts")
        w("MUL rH, rH, rP")
        w("REDUCE rH, rH SUM AXIS=1")
