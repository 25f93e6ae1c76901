"""The kernel library's table of contents: tensor primitive -> the builders that compute it.

A builder returns a `m3jit.ir.loop.Kernel`; its docstring gives the parameters in order.  Importing the table imports no
kernel module: `builders(primitive)` does, on first use.
"""
from __future__ import annotations

import importlib
from typing import Callable

from m3jit.ir.loop import Kernel

# primitive -> "module.function", in the order they are launched where one primitive takes several
_TABLE: dict[str, tuple[str, ...]] = {
    "quantize_activation": ("quantize.quantize_activation", "quantize.quantize_rows"),
    "qmatmul": ("qmatmul.qmatmul", "qmatmul.qmatmul_gated"),
    "matmul": ("matmul.matmul_rows", "matmul.matmul_columns"),
    "routed": ("routed.routed_qmatmul", "routed.routed_matmul"),
    "embed": ("embed.embed",),
    "dequantize": ("embed.dequantize",),
    "quantize": ("convert.quantize",),
    "rope": ("rope.rope",),
    "kv_append": ("attention.kv_append",),
    "attention": ("attention.kv_append", "attention.attn_blocks", "attention.attn_combine", "attention.attn_rows"),
    "kv_attention": ("attention.attn_blocks", "attention.attn_combine", "attention.attn_rows"),
    "argmax": ("argmax.argmax_rows", "argmax.argmax_columns"),
    "reduce": ("reduce.reduce_columns",),
    "sort": ("sort.sort_rows",),
    "topk": ("sort.topk_rows",),
    "transpose": ("moves.strided_copy",),
    "slice": ("moves.strided_copy",),
    "concat": ("moves.strided_copy",),
    "broadcast": ("moves.strided_copy",),
    "pad": ("moves.strided_copy",),
    "tile": ("moves.strided_copy",),
    "gather": ("moves.gather",),
    "scatter": ("moves.float_copy", "moves.scatter"),
    "conv": ("conv.conv",),
    "causal_conv": ("recurrent.causal_conv",),
    "scan": ("recurrent.scan",),
    "sample": ("sample.sample",),
}
PRIMITIVES = tuple(_TABLE)


def builders(primitive: str) -> list[Callable[..., Kernel]]:
    """The builders of a primitive.  KeyError: it has none (elementwise chains are built by m3jit.kernels.fused)."""
    out = []
    for name in _TABLE[primitive]:
        module, function = name.split(".")
        out.append(getattr(importlib.import_module(f"m3jit.kernels.{module}"), function))
    return out


def describe() -> str:
    """Every builder once, with its docstring: what `parameters in order` means for each."""
    seen: dict[str, Callable] = {}
    for primitive in PRIMITIVES:
        for f in builders(primitive):
            seen.setdefault(f"{f.__module__.rsplit('.', 1)[-1]}.{f.__name__}", f)
    return "\n\n".join(f"{name}\n    {(f.__doc__ or '').strip()}" for name, f in sorted(seen.items()))
