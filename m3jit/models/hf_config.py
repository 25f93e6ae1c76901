"""What the config.json of a Hugging Face folder says, checked as it is read."""
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from m3jit.models.model_error import ModelFileError
from m3jit.models.safetensors_file import read_json

_REQUIRED = object()
MAX_CONFIG_BYTES = 1 << 24
ROPE_TYPES = ("default", "linear", "llama3", "longrope", "yarn")


class Config:
    """The values of one config.json (of its text model where it describes several), with defaults under them."""

    def __init__(self, path: Path, values: dict[str, Any], defaults: dict[str, Any] | None = None) -> None:
        self.path, self.values = path, values
        self.defaults = defaults or {}

    @classmethod
    def read(cls, folder: Path) -> "Config":
        path = folder / "config.json"
        values = read_json(path, MAX_CONFIG_BYTES)
        inner = values.get("text_config")
        return cls(path, {key: value for key, value in values.items() if key != "text_config"} | inner
                   if isinstance(inner, dict) else values)

    def refuse(self, key: str, problem: str, expected: str) -> ModelFileError:
        """The error for a value that is not supported."""
        return ModelFileError(self.path, problem, item=f"key {key!r}", expected=expected)

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of a key, null meaning none; ModelFileError when it is of another type or must be there.

        An int passes as a float."""
        found = self.values[key] if key in self.values else self.defaults.get(key)
        if found is None:
            if default is _REQUIRED:
                raise self.refuse(key, "is missing", f"a value of type {kind.__name__}")
            return default
        return self._typed(key, found, kind)

    def _typed(self, key: str, found: Any, kind: type) -> Any:
        wanted = (int, float) if kind is float else (kind,)
        if not isinstance(found, wanted) or isinstance(found, bool) and kind is not bool:
            raise self.refuse(key, f"is {str(found)[:60]!r}", f"a value of type {kind.__name__}")
        if isinstance(found, (int, float)) and found and not (
                1e-30 < abs(found) < 1e30 if kind is float else abs(found) < 2 ** 62):
            raise self.refuse(key, f"is {str(found)[:60]}", "an ordinary number")
        return float(found) if kind is float else found

    def need(self, key: str, *allowed: Any) -> None:
        """Nothing happens when the key is absent or has one of these values; else it is refused by name."""
        found = self.values.get(key)
        if found is not None and found not in allowed:
            raise self.refuse(key, f"is {str(found)[:80]!r}, which is not supported",
                              " or ".join(repr(value) for value in allowed) or "no such key")

    def rope(self, layers: str = "") -> "Rope":
        """The rotation, from `rope_parameters` or from `rope_theta` and `rope_scaling`.

        layers: the kind of layers ("full_attention", "sliding_attention") where each kind has its own parameters."""
        found = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(found, dict):
            raise self.refuse("rope_scaling", f"is {str(found)[:60]!r}", "an object")
        if isinstance(found.get(layers), dict):
            found = found[layers]
        return Rope(Config(self.path, found), self)


class Rope:
    """Rotary parameters: `kind` (one of ROPE_TYPES), `theta`, `factor`, and the lists of longrope."""

    def __init__(self, own: Config, whole: Config) -> None:
        self._own, self._whole = own, whole
        self.kind = own.get("rope_type", str, own.get("type", str, "default"))
        self.kind = {"su": "longrope", "none": "default"}.get(self.kind, self.kind)
        if self.kind not in ROPE_TYPES:
            raise whole.refuse("rope_scaling", f"is of type {self.kind!r}, which is not supported",
                               "one of " + ", ".join(ROPE_TYPES))
        self.theta = own.get("rope_theta", float, whole.get("rope_theta", float, 10000.0))
        self.rotary = own.get("partial_rotary_factor", float, whole.get("partial_rotary_factor", float, 1.0))
        self.factor = own.get("factor", float, 1.0 if self.kind in ("default", "longrope") else _REQUIRED)
        if self.theta <= 1 or self.factor <= 0 or not 0 < self.rotary <= 1:
            raise whole.refuse("rope_scaling", f"has theta {self.theta}, factor {self.factor}, share {self.rotary}",
                               "theta above 1, a positive factor, a share of at most 1")

    @property
    def trained(self) -> int:
        """Positions before scaling."""
        key = "original_max_position_embeddings"
        found = self._own.get(key, int, self._whole.get(key, int, self._whole.get("max_position_embeddings", int)))
        if found < 1:
            raise self._whole.refuse(key, f"is {found}", "at least 1")
        return found

    def llama3_factors(self, head_dim: int) -> list[float]:
        """What divides each frequency: 1 for waves shorter than trained / high_freq_factor, `factor` for those longer
        than trained / low_freq_factor, between them the harmonic mean weighted by the position between.
        Source: Llama 3.1."""
        low, high = self._own.get("low_freq_factor", float), self._own.get("high_freq_factor", float)
        if not 0 < low < high:
            raise self._whole.refuse("rope_scaling", f"has low_freq_factor {low} and high_freq_factor {high}",
                                     "0 < low < high")
        factors = []
        for i in range(head_dim // 2):
            turns = self.trained / (2 * math.pi * self.theta ** (2 * i / head_dim))
            smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
            factors.append(1 / ((1 - smooth) / self.factor + smooth))
        return factors

    def long_and_short(self, head_dim: int) -> tuple[list[float], list[float]]:
        """The factors of longrope beyond the trained length, and within it."""
        found = []
        for key in ("long_factor", "short_factor"):
            factors = [self._own._typed(key, f, float) for f in self._own.get(key, list)]
            if len(factors) != head_dim // 2 or min(factors, default=1.0) <= 0:
                raise self._whole.refuse(f"rope_scaling.{key}", f"has {len(factors)} values",
                                         f"{head_dim // 2} positive numbers")
            found.append(factors)
        return found[0], found[1]

    def yarn_keys(self, latent: bool = False) -> dict[str, float | int | str]:
        """Keys of yarn.  attn_factor: what is left of the magnitude beside 1 + 0.1 ln factor, which is understood.

        latent: latent attention, whose scores are multiplied by (1 + 0.1 mscale ln factor)^2 instead."""
        both = [self._own.get(key, float, 0.0) for key in ("mscale", "mscale_all_dim")]
        if both[0] != both[1] or bool(both[0]) != latent:
            raise self._whole.refuse("rope_scaling", f"has mscale {both[0]} and mscale_all_dim {both[1]}",
                                     "equal ones" if latent else "none")
        self._own.need("truncate", True)
        usual = 1.0 + 0.1 * math.log(self.factor) if self.factor > 1 else 1.0
        more = {"rope.scaling.yarn_log_multiplier": 0.1 * both[1]} if both[1] else {}
        return {**more, "rope.scaling.type": "yarn", "rope.scaling.factor": self.factor,
                "rope.scaling.original_context_length": self.trained,
                "rope.scaling.attn_factor": self._own.get("attention_factor", float, usual) / usual,
                "rope.scaling.yarn_beta_fast": self._own.get("beta_fast", float, 32.0),
                "rope.scaling.yarn_beta_slow": self._own.get("beta_slow", float, 1.0)}

    def magnitude(self, context: int) -> float:
        """What longrope multiplies cosines and sines by: sqrt(1 + ln s / ln trained) where s = context / trained
        is above 1.  Source: Phi-3."""
        stretch = self._own.get("factor", float, context / self.trained)
        usual = math.sqrt(1 + math.log(stretch) / math.log(self.trained)) if stretch > 1 and self.trained > 1 else 1.0
        return self._own.get("attention_factor", float, usual)
