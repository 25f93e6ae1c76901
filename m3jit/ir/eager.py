"""`EagerXp`: the primitives computed at once, in the contract's arithmetic.

An opcode's body that runs with this namespace is the interpreter's execution of the opcode and the reference every
compiled kernel is compared with, byte for byte.  Operands are `Tensor` values, Python ints and floats (registers and
immediates), strings, bools and None; an operand that does not fit raises `OperandError`, which the machine turns into
a trap.  docs/dev/plan.md defines every primitive; the mixins hold them by group.
"""
from __future__ import annotations

from m3jit.errors import OperandError
from m3jit.ir.eager_attention import Attention
from m3jit.ir.eager_conv import Conv
from m3jit.ir.eager_elementwise import Elementwise
from m3jit.ir.eager_layout import Layout
from m3jit.ir.eager_matrix import Matrix
from m3jit.ir.eager_reduce import Reduce
from m3jit.ir.eager_sampling import Sampling
from m3jit.ir.eager_scalar import ScalarOps


class EagerXp(ScalarOps, Elementwise, Layout, Reduce, Matrix, Attention, Conv, Sampling):
    """Stateless; one instance serves every thread."""
    tracing = False

    def error(self, message: str) -> OperandError:
        """What a body raises when its operands do not fit: `raise xp.error(...)`."""
        return OperandError(message)
