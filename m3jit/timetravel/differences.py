"""What differs between two versions of a context: registers, tensors, states row by row, memory by ranges."""
from __future__ import annotations

from typing import Any, Iterator

import numpy as np

from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.types import Tensor
from m3jit.timetravel.views import brief_value, numbers, register_names
from m3jit.vm.digest import parts, stream_digest, value_digest
from m3jit.vm.memory import NAMES, PAGE, Page

RANGES = 8                         # ranges of memory that are listed


def difference(a: Any, b: Any, program: Any = None) -> list[str]:
    """What differs from root `a` to root `b`, a line or more each; nothing: the versions are equal."""
    names, out = register_names(program), []
    for bank in "RVS":
        for i, (x, y) in enumerate(zip(getattr(a, bank), getattr(b, bank))):
            if not _same(x, y):
                name = names.get(f"{bank}{i}", "")
                out.append(f"{bank}{i}{f' {name}' if name else ''}: {_values(x, y)}")
    for number in sorted({n for n, _ in a.states.items()} | {n for n, _ in b.states.items()}):
        out += _states(number, a.states.get(number), b.states.get(number))
    out += _memory(a.memory, b.memory)
    return out + _others(a, b)


def _same(x: Any, y: Any) -> bool:
    return x is y or x is not None and y is not None and value_digest(x) == value_digest(y)


def _values(x: Any, y: Any) -> str:
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype is y.dtype and x.shape == y.shape:
        return f"{x.dtype.name.lower()}{list(x.shape)} {arrays(numbers(x), numbers(y), x, y)}"
    return f"{brief_value(x)} -> {brief_value(y)}"


def arrays(a: np.ndarray | None, b: np.ndarray | None, x: Tensor | None = None, y: Tensor | None = None) -> str:
    """How two arrays of one shape differ: how many elements, the first, the greatest difference."""
    if a is None or b is None:
        raw = np.nonzero(x.data.reshape(-1) != y.data.reshape(-1))[0]
        return f"{len(raw)} packed bytes differ, first at {raw[0]}"
    with np.errstate(all="ignore"):
        differ = ~((a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b))
        gap = np.abs(a - b)
    if not differ.any():
        return "the same values, other bits"
    first = np.unravel_index(int(np.argmax(differ)), a.shape) if a.ndim else ()
    finite = gap[differ & np.isfinite(gap)]
    most = f", by at most {finite.max():.6g}" if finite.size else ""
    where = [int(i) for i in first]
    return f"{int(differ.sum())} of {a.size} differ{most}; first at {where}: {a[first]:.6g} -> {b[first]:.6g}"


def _states(number: int, x: Any, y: Any) -> Iterator[str]:
    name = f"state #{number}"
    if x is y:
        return
    if x is None or y is None:
        yield f"{name}: {'new' if x is None else 'gone'}"
    elif isinstance(x, KVStream) and isinstance(y, KVStream):
        yield from (f"{name} {line}" for line in _streams(x, y))
    elif isinstance(x, CellState) and isinstance(y, CellState):
        for layer, part in sorted(set(x.cells) | set(y.cells)):
            p, q = x.array(layer, part), y.array(layer, part)
            if p is None or q is None or p.shape != q.shape:
                how = "new" if p is None else "gone" if q is None else "another shape"
                yield f"{name} {part} of layer {layer}: {how}"
            elif p.tobytes() != q.tobytes():
                yield f"{name} {part} of layer {layer}: {arrays(p.astype(float), q.astype(float))}"


def _streams(x: KVStream, y: KVStream) -> Iterator[str]:
    """Layers of equal difference are said together."""
    said: dict[str, list[int]] = {}
    for layer in sorted(set(x.layers) | set(y.layers)):
        line = _layer(x, y, layer)
        if line:
            said.setdefault(line, []).append(layer)
    for line, layers in said.items():
        whole = len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1))
        names = f"{layers[0]} to {layers[-1]}" if whole else ", ".join(map(str, layers))
        yield f"layer{'s' if len(layers) > 1 else ''} {names}: {line}"


def _layer(x: KVStream, y: KVStream, layer: int) -> str:
    n, m = x.length(layer), y.length(layer)
    if n == m and (x.pages(layer) == y.pages(layer) or stream_digest(x, layer) == stream_digest(y, layer)):
        return ""
    first = -1
    if x.geometry == y.geometry and x.dtype is y.dtype:
        common = min(n, m)
        rows = [np.any(p[:common].view(np.uint32) != q[:common].view(np.uint32), axis=1)
                for p, q in zip(x.rows(layer), y.rows(layer))]
        other = np.nonzero(rows[0] | rows[1])[0]
        first = int(other[0]) if len(other) else -1
    length, equal = (f"{n} -> {m} rows", ", the common ones are equal") if n != m else (f"{n} rows", "")
    return length + (f", the first that differs is {first}" if first >= 0 else equal)


def _memory(a: Any, b: Any) -> list[str]:
    out: list[str] = []
    for region in sorted(set(a.pages) | set(b.pages)):
        spans: list[list[int]] = []
        pages = [dict(m.pages[region].map.items()) if region in m.pages else {} for m in (a, b)]
        for number in sorted(set(pages[0]) | set(pages[1])):
            x, y = (_bytes(p.get(number)) for p in pages)
            if x is y or x == y:
                continue
            where = np.nonzero(np.frombuffer(x, np.uint8) != np.frombuffer(y, np.uint8))[0] + number * PAGE
            for at in where.tolist():
                if spans and at - spans[-1][1] < 8:
                    spans[-1][1] = at
                else:
                    spans.append([at, at])
        base = region << 60
        out += [f"memory {NAMES[region]} 0x{base | first:016x} to 0x{base | last:016x} ({last - first + 1} bytes)"
                for first, last in spans[:RANGES]]
        if len(spans) > RANGES:
            out.append(f"memory {NAMES[region]}: {len(spans) - RANGES} more ranges")
    return out


def _bytes(page: Page | None) -> bytes | bytearray:
    return page.data if page is not None else bytes(PAGE)


def _others(a: Any, b: Any) -> list[str]:
    """Parts that have no view of their own: frames, flags, the random stream, positions, arenas."""
    seen = ("R", "V", "S", "state ")
    before, after = ({name: d for name, d in parts(root) if not name.startswith(seen) and " page " not in name}
                     for root in (a, b))
    return [f"{name}: {'new' if name not in before else 'gone' if name not in after else 'differs'}"
            for name in sorted(set(before) | set(after)) if before.get(name) != after.get(name)]
