"""Rotary positions beyond the trained context: what divides the frequencies, what the rotated parts are multiplied by.

A pair i of a head turns by position * theta^(-2i / rotary) * scale / factors[i].

    linear     scale = 1 / factor (Chen et al. 2023)
    longrope   factors are tensors of the model, one set for short and one for long contexts (Ding et al. 2024)
    yarn       fast pairs keep their frequency, slow ones are divided by factor, those between are mixed (Peng et al.
               2023): factors[i] = 1 / (r_i + (1 - r_i) / factor), r_i falling from 1 to 0 between the pairs that turn
               beta_fast and beta_slow times within the original context

longrope and yarn multiply the cosines and sines by m: what is rotated grows by m, scores of whole heads by m^2.
"""
from __future__ import annotations

import math

from m3jit.models.model_source import Keys, Shapes
from m3jit.models.program import Writer

SHORT, LONG, FREQUENCIES = "rope_factors_short.weight", "rope_factors_long.weight", "rope_freqs.weight"
KINDS = ("none", "linear", "longrope", "yarn")


class Rotation:
    """How an architecture rotates queries and keys; read from its metadata.

    context: positions the program allows (longrope's choice of factors).  Raises ModelFileError for a kind of scaling
    that is not known, or a rotary size that does not fit the head."""

    def __init__(self, keys: Keys, head_dim: int, context: int):
        self.keys, self.context = keys, context
        self.theta = keys.need("rope.freq_base", float, default=10000.0)
        self.rotary = keys.need("rope.dimension_count", int, default=head_dim)
        if not 0 < self.rotary <= head_dim or self.rotary % 2:
            raise keys.refuse("rope.dimension_count", f"is {self.rotary}", f"an even number from 2 to {head_dim}")
        tensors = keys.source.tensors
        self.kind = keys.need("rope.scaling.type", str, default="longrope" if LONG in tensors else "none")
        if self.kind not in KINDS:
            raise keys.refuse("rope.scaling.type", f"is {self.kind!r}", "one of " + ", ".join(KINDS))
        self.factor = keys.need("rope.scaling.factor", float, default=1.0)
        if self.factor <= 0:
            raise keys.refuse("rope.scaling.factor", f"is {self.factor!r}", "a factor above 0")
        self.scale = 1.0 / self.factor if self.kind == "linear" else 1.0
        self.original = keys.need("rope.scaling.original_context_length", int, default=context)
        self.magnitude = keys.need("rope.scaling.attn_factor", float, default=1.0)
        if self.kind == "yarn":
            self.magnitude *= 1.0 + 0.1 * math.log(self.factor)

    def tensors(self) -> Shapes:
        """The tensors of the model that hold factors."""
        found = [n for n in (FREQUENCIES, SHORT, LONG) if n in self.keys.source.tensors]
        return {name: (self.rotary // 2,) for name in found}

    def load_factors(self, w: Writer) -> str:
        """Loads the factors into rF, where there are any; the option of ROPE that uses them."""
        if w.has(FREQUENCIES):
            w.weight("rF", FREQUENCIES)
        elif self.kind == "longrope":
            w.weight("rF", LONG if self.context > self.original else SHORT)
        elif self.kind == "yarn":
            w.constant("rF", "rope_factors", self.yarn_factors())
        else:
            return ""
        return " FACTORS=rF"

    def yarn_factors(self) -> list[float]:
        def pair(turns: float) -> float:
            """The pair that turns so often within the original context."""
            return self.rotary * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
        first = max(0, math.floor(pair(self.keys.need("rope.scaling.yarn_beta_fast", float, default=32.0))))
        last = min(self.rotary - 1, math.ceil(pair(self.keys.need("rope.scaling.yarn_beta_slow", float, default=1.0))))
        out = []
        for i in range(self.rotary // 2):
            kept = 1 - min(1.0, max(0.0, (i - first) / max(0.001, last - first)))
            out.append(1 / (kept + (1 - kept) / self.factor))
        return out
