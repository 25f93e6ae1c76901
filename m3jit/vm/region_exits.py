"""Leaving a compiled region: what the registers hold after each of its exits."""
from __future__ import annotations

from operator import itemgetter, setitem
from typing import Any, Mapping, Sequence

import numpy as np

from m3jit.ir.eager_scalar import NAN
from m3jit.ir.region import ExitInfo, Store
from m3jit.ir.tensor import Sym, TensorType, eval_dim
from m3jit.ir.trace_recurrent import is_cell
from m3jit.isa.kv import KVStream
from m3jit.isa.types import Tensor
from m3jit.vm.region_streams import RegionStreams


class Way:
    """One exit, its stores sorted by how the value is found.

    keys: of everything but states, in the order of `values`.  general: the general registers, whose values `placed`
    takes out of them, and `calls` (m3jit.vm.commit).  others: (key, place) of what else is written."""

    def __init__(self, info: ExitInfo, streams: RegionStreams, shapes: Mapping[int, tuple[int, ...]]):
        """shapes: of the arrays of tensors made, by word, where they are always the same."""
        self.info = info
        stores = [s for s in info.stores if not is_cell(s.key)]
        kv = [s for s in stores if s.how == "i64" and isinstance(s.key, tuple) and s.key[0] == "kvlen"]
        integers = [s for s in stores if s.how == "i64" and s not in kv]
        floats = [s for s in stores if s.how == "f64"]
        self.tensors = [(s.word, s.type.dtype, _Shape(s.type)) for s in stores if s.how == "tensor"]
        self.steady: Any = None                       # of tensors whose shapes never change: arrays, dtypes, shapes
        if len(self.tensors) > 1 and all(shape.fixed is not None and shapes.get(word) == shape.rows
                                        for word, _, shape in self.tensors):
            self.steady = (itemgetter(*(word for word, _, _ in self.tensors)), [dtype for _, dtype, _ in self.tensors],
                          [shape.fixed for _, _, shape in self.tensors])
        self.inputs = [(s.source, _Shape(s.type)) for s in stores if s.how == "input"]
        constants = [s for s in stores if s.how not in ("i64", "f64", "tensor", "input")]
        self.constants = [s.source for s in constants]
        self.integer_words, self.float_words = _words(integers), _words(floats)
        self.keys = [s.key for s in (*constants, *integers, *floats)]
        self.keys += [s.key for how in ("tensor", "input") for s in stores if s.how == how]
        everything = [(key, i) for i, key in enumerate(self.keys)]
        general = [(key[1], i) for key, i in everything if _is_general(key) and key[1] != 255]
        self.general, places = [n for n, _ in general], [i for _, i in general]
        self.placed = itemgetter(*places) if len(places) > 1 else lambda values: [values[i] for i in places]
        self.calls = [setitem] * len(general)
        self.others = [(key, i) for key, i in everything if not _is_general(key)]
        self.lengths: dict[Any, tuple[tuple[int, ...], np.ndarray]] = {}       # state register -> layers, their words
        for key in dict.fromkeys(s.key[1] for s in kv):
            words = {s.key[2]: s.word for s in kv if s.key[1] == key}
            layers = streams.in_order(key, words)
            self.lengths[key] = (layers, np.array([words[n] for n in layers], np.intp))

    def numbers(self, frames: np.ndarray) -> list["Numbers"]:
        """What the frames [contexts, words] of contexts that took this exit hold, one for each."""
        none: list[list] = [[]] * len(frames)
        integers = frames[:, self.integer_words].tolist() if len(self.integer_words) else none
        floats = frames[:, self.float_words].view(np.float64).tolist() if len(self.float_words) else none
        lengths = [frames[:, words].tolist() for _, words in self.lengths.values()]
        return list(zip(integers, floats, zip(*lengths) if lengths else none))

    def values(self, regs: Any, numbers: "Numbers", fresh: Mapping[int, np.ndarray], syms: dict[Sym, int]) -> list[Any]:
        """The values of `keys`; fresh: the arrays of the tensors made, by word."""
        out = [*self.constants, *numbers[0]]
        if numbers[1]:                               # a register's NaN is the canonical one
            out += [v if v == v else NAN for v in numbers[1]]
        made = Tensor.made
        if self.steady is not None:
            arrays, dtypes, shapes = self.steady
            out += map(made, dtypes, shapes, arrays(fresh))
        else:
            for word, dtype, shape in self.tensors:
                dims = shape.of(syms)
                a, stored = fresh[word], shape.stored(dims)
                out.append(made(dtype, dims, a if a.shape == stored else a.reshape(stored)))
        for source, shape in self.inputs:            # a reshape may have given it another shape
            t, dims = regs.get(source), shape.of(syms)
            out.append(t if dims == t.shape else Tensor(t.dtype, dims, t.data.reshape(dims)))
        return out

    def streams(self, numbers: "Numbers", reserved: Mapping[Any, KVStream]) -> dict[Any, KVStream]:
        """State register -> its stream, of those that were reserved, with the rows it has now."""
        return {key: reserved[key].with_all_lengths(layers, rows)
                for (key, (layers, _)), rows in zip(self.lengths.items(), numbers[2])}


Numbers = tuple[list[int], list[float], Sequence[list[int]]]          # integers, floats, rows of each stream's layers


def _is_general(key: Any) -> bool:
    return isinstance(key, tuple) and key[0] == "R"


def _words(stores: list[Store]) -> np.ndarray:
    return np.array([s.word for s in stores], np.intp)


class _Shape:
    """A tensor type whose dimensions may depend on symbols."""

    def __init__(self, t: TensorType):
        self.type = t
        self.fixed = tuple(t.shape) if all(isinstance(d, int) for d in t.shape) else None
        self.rows = self.stored(self.fixed) if self.fixed is not None else None

    def of(self, syms: dict[Sym, int]) -> tuple[int, ...]:
        return self.fixed if self.fixed is not None else tuple(eval_dim(d, syms) for d in self.type.shape)

    def stored(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the array that stores it (block types: packed bytes along the last axis)."""
        return (*dims[:-1], self.type.dtype.row_bytes(dims[-1])) if self.type.dtype.is_block else dims
