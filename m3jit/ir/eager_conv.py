"""Convolution of the eager namespace."""
from __future__ import annotations

import itertools

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir.eager_layout import check_range
from m3jit.ir.eager_math import fma32
from m3jit.ir.eager_values import describe, floats


class Conv:
    """Mixin of `EagerXp`."""

    def conv(self, x, w, bias=None, *, stride: int = 1, pad: int = 0, dilation: int = 1, groups: int = 1):
        """Cross-correlation of x [N, C, L] or [N, C, H, W] with w [O, C / groups, K..] -> F32 [N, O, ..].

        Each output folds fma over its group's channels, then over the kernel positions in row-major order, from its
        bias or +0; taps in the padding are performed with x = +0."""
        x, w = self._f32(x), self._f32(w)
        if x.rank not in (3, 4) or w.rank != x.rank:
            raise OperandError(f"CONV needs x [N, C, L] or [N, C, H, W] and w [O, C / GROUPS, K..] of the same rank, "
                               f"got {describe(x)} and {describe(w)}")
        for what, value, low in (("STRIDE", stride, 1), ("PAD", pad, 0), ("DILATION", dilation, 1),
                                 ("GROUPS", groups, 1)):
            check_range(what, value, low, 2 ** 31)
        n, channels = x.shape[:2]
        outputs, inner = w.shape[:2]
        if channels % groups or outputs % groups or inner != channels // groups:
            raise OperandError(f"CONV with {groups} groups: {channels} input and {outputs} output channels need w "
                               f"[O, {channels / groups:g}, K..], got {describe(w)}")
        spans = [dilation * (k - 1) + 1 for k in w.shape[2:]]
        if min(w.shape[2:]) < 1 or any(d + 2 * pad < s for d, s in zip(x.shape[2:], spans)):
            raise OperandError(f"CONV: the kernel of {describe(w)} is larger than the padded input {describe(x)}")
        sizes = [(d + 2 * pad - s) // stride + 1 for d, s in zip(x.shape[2:], spans)]
        acc = np.zeros((n, groups, outputs // groups, *sizes), np.float32)
        if bias is not None:
            b = self._f32(bias)
            if b.size != outputs:
                raise OperandError(f"CONV needs {outputs} biases, got {describe(b)}")
            acc += b.data.reshape(1, groups, outputs // groups, *[1] * len(sizes))
        padded = np.pad(x.data, [(0, 0), (0, 0)] + [(pad, pad)] * len(sizes))
        padded = padded.reshape(n, groups, 1, inner, *padded.shape[2:])
        kernel = w.data.reshape(1, groups, outputs // groups, *w.shape[1:])
        for c in range(inner):
            for tap in itertools.product(*map(range, w.shape[2:])):
                window = tuple(slice(t * dilation, t * dilation + (s - 1) * stride + 1, stride)
                               for t, s in zip(tap, sizes))
                factor = kernel[(slice(None),) * 3 + (c, *tap)].reshape(1, groups, outputs // groups, *[1] * len(sizes))
                fma32(padded[(slice(None),) * 3 + (c, *window)], factor, acc, out=acc)
        return floats(acc.reshape(n, outputs, *sizes))
