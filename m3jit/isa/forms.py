"""Pieces that several families' bodies share: computing in f32, products with weights, activations.

Everything here is written with the primitives of `xp` alone, so that the compiler can trace it.
"""
from __future__ import annotations

from typing import Any, Callable

from m3jit.isa.fields import Flag, FlaggedEnum
from m3jit.isa.types import BF16, F16, F32

NUMBERS = "F32 F16 BF16 I8 U8 I16 I32 I64"
FLOAT = "F32 F16 BF16"
ANY = NUMBERS + " BOOL"
WEIGHT = "F32 F16 BF16 and block types"
INPLACE = Flag(3)              # empties the source register; the machine does it, no body looks at the flag


def fused_act() -> FlaggedEnum:
    """FUSED_ACT, or the bare word: NONE SILU RELU GELU; None when absent."""
    return FlaggedEnum(words=("NONE", "SILU", "RELU", "GELU"), numbers=(0, 1, 2, 3), bit=2)


def in_f32(xp: Any, x: Any, f: Callable[[Any], Any]) -> Any:
    """f(x) computed in f32 throughout, rounded once to x's dtype at the end."""
    if x.dtype is F32 or x.dtype.kind != "float":
        return f(x)
    return xp.cast(f(xp.cast(x, F32)), x.dtype)


def silu(xp: Any, x: Any) -> Any:
    return xp.mul(x, xp.sigmoid(x))


def gelu(xp: Any, x: Any) -> Any:
    """0.5 x (1 + erf(x / sqrt 2)); the constant is f32(1 / sqrt 2)."""
    return xp.mul(xp.mul(x, 0.5), xp.add(xp.erf(xp.mul(x, 0.7071067690849304)), 1.0))


def gelu_tanh(xp: Any, x: Any) -> Any:
    """0.5 x (1 + tanh(f32(sqrt(2 / pi)) (x + 0.044715 x^3)))."""
    inner = xp.mul(xp.fma(xp.mul(xp.mul(x, x), x), 0.044714998453855515, x), 0.7978845834732056)
    return xp.mul(xp.mul(x, 0.5), xp.add(xp.tanh(inner), 1.0))


def relu(xp: Any, x: Any) -> Any:
    return xp.maximum(x, 0)


def relu2(xp: Any, x: Any) -> Any:
    r = xp.maximum(x, 0)
    return xp.mul(r, r)


ACTIVATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "NONE": lambda xp, x: x, "SILU": silu, "GELU": gelu, "GELU_TANH": gelu_tanh, "RELU": relu, "RELU2": relu2,
}


def product(xp: Any, x: Any, w: Any, transposed: bool, precision: str) -> Any:
    """x times a weight in f32.  INT8: the integer dot with quantised activations; otherwise the float dot of the
    dequantised weights."""
    if precision == "INT8":
        if not w.dtype.is_block:
            raise xp.error(f"INT8 multiplies block-quantised weights, got {w.dtype.name}; use FP32 or QUANTIZE")
        if not transposed:
            raise xp.error("INT8 needs rows of weights [N, K]: set TRANSPOSE")
        return xp.qmatmul(x, w)
    return xp.matmul(x, w, transposed)


def stored(xp: Any, y: Any, precision: str) -> Any:
    """y as PRECISION stores it: BF16 and FP16 round once, FP32 and INT8 leave f32."""
    if precision in ("BF16", "FP16"):
        return xp.cast(y, BF16 if precision == "BF16" else F16)
    return y


def plus(xp: Any, a: Any, b: Any) -> Any:
    """a + b of integers that may be registers."""
    return a + b if type(a) is int and type(b) is int else xp.scalar("add", a, b)


def static(xp: Any, d: Any, what: str) -> int:
    """A dimension that must be known when the instruction is compiled."""
    if not isinstance(d, int):
        raise xp.error(f"{what} must be given: the dimension it comes from is not fixed")
    return d
