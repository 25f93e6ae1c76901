"""Randomness and digests: SAMPLE RNG_SEED RNG_NEXT RNG_NORMAL RNG_UNIFORM HASH CHECKSUM.

The context's random stream is splitmix64, a value of the root: state += 0x9E3779B97F4A7C15; z = state;
z = (z ^ z>>30) * 0xBF58476D1CE4E5B9; z = (z ^ z>>27) * 0x94D049BB133111EB; the draw is z ^ z>>31, all modulo 2^64.  A
uniform number is the top 24 bits of a draw / 2^24.  It is not for secrets.
"""
from __future__ import annotations

from typing import Any

from m3jit.isa.fields import F32, R1, R2, R3, FloatOrReg, IntOrReg, Rd, Rng, U16
from m3jit.isa.forms import ANY, FLOAT
from m3jit.isa.table import StateDoc, op
from m3jit.isa.types import F32 as F32_TYPE

RNG_STATE = StateDoc("the random stream of the context root, 64 bits", "O(1), part of the root", "the stream goes back")
GOLDEN, MIX1, MIX2 = (c - 2 ** 64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
DEFAULT_SEED = GOLDEN
SPLITMIX = "splitmix64: Steele, Lea and Flood 2014"


def _draw(xp: Any, state: Any) -> tuple[Any, Any]:
    """(next state, draw)."""
    state = xp.scalar("add", state, GOLDEN)
    z = xp.scalar("mul", xp.scalar("xor", state, xp.scalar("shr", state, 30)), MIX1)
    z = xp.scalar("mul", xp.scalar("xor", z, xp.scalar("shr", z, 27)), MIX2)
    return state, xp.scalar("xor", z, xp.scalar("shr", z, 31))


def _uniform(xp: Any, state: Any) -> tuple[Any, Any]:
    """(next state, float in [0, 1) with 24 bits)."""
    state, z = _draw(xp, state)
    return state, xp.scalar("fmul", xp.scalar("i2f", xp.scalar("shr", z, 40)), 2.0 ** -24)


@op(0x60, "RNG_SEED", state=RNG_STATE, positional=("seed",), source=SPLITMIX)
def rng_seed(xp, rng: Rng, seed: IntOrReg(fmt="q")[0, 8] = DEFAULT_SEED):
    """rng = SEED, a number or a register (absent: the machine's default seed): the random stream starts anew."""
    return seed


@op(0x61, "RNG_NEXT", state=RNG_STATE, source=SPLITMIX)
def rng_next(xp, rd: Rd("int"), rng: Rng):
    """rd = the next 64 bits of the random stream, as a signed integer.  One draw."""
    state, z = _draw(xp, rng)
    return z, state


@op(0x62, "RNG_NORMAL", state=RNG_STATE, source="Box and Muller 1958")
def rng_normal(xp, rd: Rd("float"), rng: Rng, mean: F32[0] = 0.0, std: F32[4] = 1.0):
    """rd = MEAN + STD * sqrt(-2 ln u1) cos(2 pi u2) from two uniform numbers, u1 first (Box-Muller, cosine branch).

    u1 = 0 counts as 2^-126.  The normal number is computed in f32, MEAN + STD * n in f64.  Two draws.  Traps: STD not
    positive and finite, MEAN not finite."""
    if not (0 < std < float("inf") and abs(mean) < float("inf")):
        raise xp.error(f"RNG_NORMAL needs a finite MEAN and a positive, finite STD, got {mean!r} and {std!r}")
    rng, u1 = _uniform(xp, rng)
    rng, u2 = _uniform(xp, rng)
    one = xp.full((1,), F32_TYPE, 1.0)
    u1, u2 = (xp.mul(one, u) for u in (u1, u2))
    radius = xp.sqrt(xp.mul(xp.log(xp.maximum(u1, 2.0 ** -126)), -2.0))
    n = xp.element(xp.mul(radius, xp.cos(xp.mul(u2, 6.2831854820251465))), 0)
    return xp.scalar("fadd", xp.scalar("fmul", n, std), mean), rng


@op(0x63, "RNG_UNIFORM", state=RNG_STATE, key_aliases={"LOW": "a", "HIGH": "b"}, source=SPLITMIX)
def rng_uniform(xp, rd: Rd("float"), rng: Rng, a: F32[0] = 0.0, b: F32[4] = 1.0):
    """rd = A + u (B - A), in f64, with u uniform in [0, 1).  One draw.  Traps: A or B not finite, A >= B."""
    if not (abs(a) < float("inf") and abs(b) < float("inf") and a < b):
        raise xp.error(f"RNG_UNIFORM needs finite A < B, got {a!r} and {b!r}")
    rng, u = _uniform(xp, rng)
    return xp.scalar("fadd", xp.scalar("fmul", u, b - a), a), rng


@op(0x0B, "SAMPLE", shape="a number", dtypes=FLOAT, state=RNG_STATE,
    key_aliases={"TEMPERATURE": "temp", "TOP_K": "topk", "TOP_P": "topp", "MIN_P": "minp", "REPEAT_PENALTY": "penalty"},
    source="the order of llama.cpp's default sampler chain")
def sample(xp, rd: Rd("int"), logits: R1, rng: Rng, history: R2 = None, mask: R3 = None,
           temp: FloatOrReg()[0, 4] = 1.0, topk: IntOrReg(fmt="H")[5, 7] = 0, topp: FloatOrReg()[8, 12] = 1.0,
           minp: FloatOrReg()[13, 17] = 0.0, window: U16[18] = 64, penalty: FloatOrReg()[20, -1] = 1.0):
    """rd = a token drawn from the logits (flattened).  Steps, in this order:

    1. PENALTY: each distinct token among the last WINDOW (0: all) of `history` (integers): logit <= 0: times PENALTY,
       else divided by it.
    2. Tokens whose MASK (BOOL or integer, one per logit) is 0 and tokens whose logit is NaN are out.
    3. TEMP = 0: the first greatest logit; nothing is drawn.  Otherwise candidates in descending order, ties by index.
    4. TOPK > 0: the first TOPK.  5. TOPP < 1: the fewest whose sum of e^(l - l_0) reaches TOPP of the whole.
    6. MINP > 0: those with e^(l - l_0) >= MINP.  7. Logits / TEMP; w_i = e^(l_i - l_0).
    8. One uniform u (24 bits): the first candidate whose running sum of w exceeds u * (sum of w).
    Exponentials in f32, running sums in f64 in order; logits equal to l_0 weigh exactly 1 (so infinities tie).
    All logits NaN and no mask: token 0, nothing drawn.
    Traps: no logits; a mask that leaves none; a history token outside the logits; TEMP < 0, TOPP or MINP outside 0..1,
    PENALTY not positive."""
    greedy = mask is None and type(temp) is float and temp == 0 and \
        (history is None or (type(penalty) is float and penalty == 1))
    if greedy:
        return xp.element(xp.argmax(xp.reshape(logits, (-1,)), 0), 0), rng
    return xp.sample(logits, rng, temperature=temp, top_k=topk, top_p=topp, min_p=minp, penalty=penalty,
                     history=history, window=window, mask=mask)


@op(0x64, "HASH", shape="a number", dtypes=ANY + " and block types", source="FNV-1a, 64 bits")
def hash_(xp, rd: Rd("int"), x: R1):
    """rd = FNV-1a (64 bits) of the tensor's canonical bytes, as a signed integer.

    Canonical bytes: float and block tensors as F32 little-endian (NaN canonical), others as stored; row-major; shape
    and dtype do not enter.  Not for secrets."""
    return xp.digest(x, "FNV1A64")


@op(0x65, "CHECKSUM", shape="a number", dtypes=ANY + " and block types", source="CRC-32, IEEE 802.3")
def checksum(xp, rd: Rd("int"), x: R1):
    """rd = CRC-32 of the tensor's canonical bytes (as HASH), 0 .. 2^32 - 1."""
    return xp.digest(x, "CRC32")
