"""Leaving a compiled region: what the registers hold after each of its exits."""
from __future__ import annotations

from operator import itemgetter, setitem
from typing import Any, Callable, Mapping, Sequence

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

    calls, targets, names: of the stores (m3jit.vm.commit) of `values`, in their order, and of the context's `retired`
    and `index` behind them.  kept: those of the values that are written anywhere (None: all).  index: of the
    instruction where the exit goes on; -1: nobody has asked yet."""

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
        self.pick_integers, self.index = picker(self.integer_words.tolist()), -1
        keys = [s.key for s in (*constants, *integers, *floats)]
        keys += [s.key for how in ("tensor", "input") for s in stores if s.how == how]
        written = [i for i, key in enumerate(keys) if key != ("R", 255)]
        self.kept = None if len(written) == len(keys) else picker(written)
        places = [_place(keys[i]) for i in written] + [(setattr, 2, "retired"), (setattr, 2, "index")]
        self.calls, places_in, self.names = zip(*places)
        self.targets = picker(places_in)
        self.lengths: dict[Any, tuple[tuple[int, ...], np.ndarray]] = {}       # state register -> layers, their words
        for key in dict.fromkeys(s.key[1] for s in kv):
            words = {s.key[2]: s.word for s in kv if s.key[1] == key}
            layers = streams.in_order(key, words)
            self.lengths[key] = (layers, np.array([words[n] for n in layers], np.intp))
        self.pick_lengths = [picker(words.tolist()) for _, words in self.lengths.values()]

    def numbers_in(self, words: memoryview) -> "Numbers":
        """What the frame of a context that took this exit holds."""
        floats = np.frombuffer(words, np.float64)[self.float_words].tolist() if len(self.float_words) else ()
        rows = [pick(words) for pick in self.pick_lengths] if self.pick_lengths else ()
        return self.pick_integers(words), floats, rows

    def numbers(self, frames: np.ndarray) -> list["Numbers"]:
        """What the frames [contexts, words] of contexts that took this exit hold, one for each."""
        none: list[list] = [[]] * len(frames)
        integers = frames[:, self.integer_words].tolist() if len(self.integer_words) else none
        floats = frames[:, self.float_words].view(np.float64).tolist() if len(self.float_words) else none
        lengths = [frames[:, words].tolist() for _, words in self.lengths.values()]
        return list(zip(integers, floats, zip(*lengths) if lengths else none))

    def values(self, regs: Any, numbers: "Numbers", fresh: Mapping[int, np.ndarray], syms: dict[Sym, int]) -> list[Any]:
        """The values of the exit's stores; fresh: the arrays of the tensors made, by word."""
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


Numbers = tuple[Sequence[int], Sequence[float], Sequence[Sequence[int]]]  # integers, floats, rows of streams' layers


def picker(places: Sequence[int]) -> Callable[[Any], tuple]:
    """What takes the elements at these places out of a sequence, by one call into C where there are several."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda values: (values[places[0]],)) if places else lambda values: ()


def _place(key: Any) -> tuple[Any, int, Any]:
    """How a register is stored: setitem or setattr; in which of R, V and the context; index or name."""
    return (setitem, "RV".index(key[0]), key[1]) if isinstance(key, tuple) else (setattr, 2, key)


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
