"""Leaving a compiled region: what the registers hold after each of its exits."""
from __future__ import annotations

from typing import Any, Mapping

import numpy as np

from m3jit.ir.eager_scalar import NAN
from m3jit.ir.lower import ExitInfo, Store
from m3jit.ir.tensor import Sym, TensorType, eval_dim
from m3jit.ir.trace_recurrent import is_cell
from m3jit.isa.kv import KVStream
from m3jit.isa.types import Tensor
from m3jit.vm.region_streams import RegionStreams


class Way:
    """One exit, its stores sorted by how the value is found."""

    def __init__(self, info: ExitInfo, streams: RegionStreams):
        self.info = info
        stores = [s for s in info.stores if not is_cell(s.key)]
        kv = [s for s in stores if s.how == "i64" and isinstance(s.key, tuple) and s.key[0] == "kvlen"]
        self.integers = [s for s in stores if s.how == "i64" and s not in kv]
        self.floats = [s for s in stores if s.how == "f64"]
        self.tensors = [(s, _Shape(s.type)) for s in stores if s.how == "tensor"]
        self.inputs = [(s, _Shape(s.type)) for s in stores if s.how == "input"]
        self.constants = [s for s in stores if s.how not in ("i64", "f64", "tensor", "input")]
        self.integer_words, self.float_words = _words(self.integers), _words(self.floats)
        self.lengths: dict[Any, tuple[tuple[int, ...], np.ndarray]] = {}       # state register -> layers, their words
        for key in dict.fromkeys(s.key[1] for s in kv):
            words = {s.key[2]: s.word for s in kv if s.key[1] == key}
            layers = streams.in_order(key, words)
            self.lengths[key] = (layers, np.array([words[n] for n in layers], np.intp))

    def values(self, regs: Any, frame: np.ndarray, fresh: Mapping[int, np.ndarray],
               syms: dict[Sym, int]) -> list[tuple[Any, Any]]:
        """(key, value) of everything but states; fresh: the arrays of the tensors made, by word."""
        out = [(s.key, s.source) for s in self.constants]
        if self.integers:
            out += zip([s.key for s in self.integers], frame[self.integer_words].tolist())
        if self.floats:                              # a register's NaN is the canonical one
            out += [(s.key, v if v == v else NAN)
                    for s, v in zip(self.floats, frame[self.float_words].view(np.float64).tolist())]
        for s, shape in self.tensors:
            dims = shape.of(syms)
            out.append((s.key, Tensor.made(s.type.dtype, dims, fresh[s.word].reshape(shape.stored(dims)))))
        for s, shape in self.inputs:                 # a reshape may have given it another shape
            t, dims = regs.get(s.source), shape.of(syms)
            out.append((s.key, t if dims == t.shape else Tensor(t.dtype, dims, t.data.reshape(dims))))
        return out

    def streams(self, frame: np.ndarray, reserved: Mapping[Any, KVStream]) -> dict[Any, KVStream]:
        """State register -> its stream, of those that were reserved, with the rows it has now."""
        return {key: reserved[key].with_all_lengths(layers, frame[words].tolist())
                for key, (layers, words) in self.lengths.items()}


def _words(stores: list[Store]) -> np.ndarray:
    return np.array([s.word for s in stores], np.intp)


class _Shape:
    """A tensor type whose dimensions may depend on symbols."""

    def __init__(self, t: TensorType):
        self.type = t
        self.fixed = tuple(t.shape) if all(isinstance(d, int) for d in t.shape) else None

    def of(self, syms: dict[Sym, int]) -> tuple[int, ...]:
        return self.fixed if self.fixed is not None else tuple(eval_dim(d, syms) for d in self.type.shape)

    def stored(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the array that stores it (block types: packed bytes along the last axis)."""
        return (*dims[:-1], self.type.dtype.row_bytes(dims[-1])) if self.type.dtype.is_block else dims
