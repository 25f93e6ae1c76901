"""Drawing a token from logits."""
from __future__ import annotations

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir.eager_math import exp32
from m3jit.ir.eager_scalar import wrap64
from m3jit.ir.eager_values import describe, float_tensor, index_tensor, plain, to_f32, widen

GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK64 = (1 << 64) - 1


def splitmix64(state: int) -> tuple[int, int]:
    """(next state, draw) of the generator, both as signed 64-bit integers."""
    state = state + GOLDEN & MASK64
    z = (state ^ state >> 30) * MIX1 & MASK64
    z = (z ^ z >> 27) * MIX2 & MASK64
    return wrap64(state), wrap64(z ^ z >> 31)


class Sampling:
    """Mixin of `EagerXp`."""

    def sample(self, logits, rng: int, *, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float,
               history=None, window: int = 0, mask=None) -> tuple[int, int]:
        """(token, next RNG state): the steps that SAMPLE documents, in its order."""
        x = float_tensor(logits)
        scores = widen(x).reshape(-1).copy()
        if not scores.size:
            raise OperandError(f"SAMPLE of an empty tensor, {describe(x)}")
        temperature, top_p, min_p, penalty = (float(to_f32(float(v))) for v in (temperature, top_p, min_p, penalty))
        _check("TEMP", temperature, 0.0, np.inf)
        _check("TOPP", top_p, 0.0, 1.0)
        _check("MINP", min_p, 0.0, 1.0)
        _check("PENALTY", penalty, 2.0 ** -126, np.inf)
        with np.errstate(all="ignore"):
            if penalty != 1.0 and history is not None:
                _penalise(scores, index_tensor(history).ravel(), window, to_f32(float(penalty)))
            allowed = scores == scores
            if mask is not None:
                m = plain(mask)
                if m.size != scores.size or m.dtype.kind not in ("bool", "int"):
                    raise OperandError(f"SAMPLE needs a BOOL or integer mask of {scores.size} elements, got "
                                       f"{describe(m)}")
                allowed &= m.data.reshape(-1) != 0
            ids = np.flatnonzero(allowed)
            if not ids.size:
                if mask is None:
                    return 0, rng
                raise OperandError("SAMPLE: the mask allows no token whose logit is a number")
            if temperature == 0:
                return int(ids[np.argmax(scores[ids])]), rng
            ids = ids[np.argsort(-scores[ids], kind="stable")]
            return _draw(scores[ids], ids, rng, temperature, top_k, top_p, min_p)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise OperandError(f"SAMPLE {name} is {value!r}; it must lie in {low:g}..{high:g}")


def _penalise(scores: np.ndarray, history: np.ndarray, window: int, penalty: np.ndarray) -> None:
    recent = np.unique(history[max(0, len(history) - window):] if window else history)
    if recent.size and not (0 <= recent[0] and recent[-1] < scores.size):
        raise OperandError(f"SAMPLE: the history holds token {int(recent[0] if recent[0] < 0 else recent[-1])}, "
                           f"outside 0..{scores.size - 1}")
    s = scores[recent]
    scores[recent] = np.where(s <= 0, s * penalty, s / penalty)


def _weights(scores: np.ndarray) -> np.ndarray:
    """exp(s - s_0) in f32 for scores in descending order; exactly 1 for those equal to the first (also infinities)."""
    return np.where(scores == scores[0], np.float32(1), exp32(scores - scores[0])).astype(np.float64)


def _draw(scores: np.ndarray, ids: np.ndarray, rng: int, temperature: float, top_k: int, top_p: float,
          min_p: float) -> tuple[int, int]:
    """The candidates are in descending order."""
    if top_k > 0:
        scores, ids = scores[:top_k], ids[:top_k]
    if top_p < 1:
        sums = np.cumsum(_weights(scores))
        keep = 1 + int(np.searchsorted(sums, top_p * sums[-1], side="left"))
        scores, ids = scores[:keep], ids[:keep]
    if min_p > 0:
        keep = int(np.count_nonzero(_weights(scores) >= min_p))
        scores, ids = scores[:keep], ids[:keep]
    scaled = scores / to_f32(float(temperature))
    sums = np.cumsum(_weights(scaled))
    rng, bits = splitmix64(rng)
    target = ((bits & MASK64) >> 40) * 2.0 ** -24 * sums[-1]
    return int(ids[min(int(np.searchsorted(sums, target, side="right")), len(ids) - 1)]), rng


