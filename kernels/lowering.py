"""How each tensor-IR primitive becomes kernel launches: `LIBRARY[op](lowering, node)`.

`lowering` is an `m3jit.ir.plan_writer.PlanWriter`: it hands out memory (`of`, `out`, `scratch`), dimensions and
scalars, and `launch` records a kernel with what it reads and writes.  Importing a module of lowerings enters them.
"""
from m3jit.kernels import lowering_elements, lowering_moves, lowering_products, lowering_recurrent  # noqa: F401
from m3jit.kernels.lowering_attention import KV_BLOCKS
from m3jit.kernels.lowering_table import LIBRARY

__all__ = ["KV_BLOCKS", "LIBRARY"]
