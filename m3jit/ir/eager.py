"""`EagerXp`: the primitives computed at once, in the contract's arithmetic.

An opcode's body that runs with this namespace is the interpreter's execution of the opcode and the reference every
compiled kernel is compared with, byte for byte.  Operands are `Tensor` values, Python ints and floats (registers and
immediates), strings, bools and None; an operand that does not fit raises `OperandError`, which the machine turns into
a trap.  docs/dev/plan.md defines every primitive; the mixins hold them by group.
"""
from __future__ import annotations

import math
import os
from typing import Sequence

from m3jit.errors import NoRoom, OperandError
from m3jit.ir.eager_attention import Attention
from m3jit.ir.eager_conv import Conv
from m3jit.ir.eager_elementwise import Elementwise
from m3jit.ir.eager_layout import Layout
from m3jit.ir.eager_matrix import Matrix
from m3jit.ir.eager_recurrent import Recurrent
from m3jit.ir.eager_reduce import Reduce
from m3jit.ir.eager_routed import Routed
from m3jit.ir.eager_sampling import Sampling
from m3jit.ir.eager_scalar import ScalarOps
from m3jit.isa.types import DType


def physical_memory() -> int:
    """Bytes of memory of this machine (2^33 where it does not say)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 1 << 33


class EagerXp(ScalarOps, Elementwise, Layout, Reduce, Matrix, Routed, Attention, Conv, Recurrent, Sampling):
    """Stateless; one instance serves every thread.  `limit_bytes`: the largest tensor a primitive may make."""
    tracing = False
    limit_bytes = physical_memory() // 2

    def room(self, shape: Sequence[int], dtype: DType) -> None:
        """NoRoom unless a tensor of this shape may be made; asked by primitives whose result can be much larger
        than their operands."""
        wanted = math.prod(shape) * dtype.numpy.itemsize
        if wanted > self.limit_bytes or math.prod(d for d in shape if d) * 8 >= 2 ** 62:
            raise NoRoom(f"out of memory: a {dtype.name} tensor {list(shape)} takes {wanted} bytes; the limit is "
                         f"{self.limit_bytes} bytes")

    def error(self, message: str) -> OperandError:
        """What a body raises when its operands do not fit: `raise xp.error(...)`."""
        return OperandError(message)
