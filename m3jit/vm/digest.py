"""A digest of a context's version: equal versions have equal digests, on every backend, machine and day.

A version is what a snapshot holds (m3jit.vm.context.Root): registers, call frames, flags, the random stream, states,
memory, positions in sources, unfinished text.  Where a state lies, how it is shared and what lies beyond its length do
not count.  xxh3-128: fast (some 10 GB/s), against accidents, not against forgery.  What is immutable (tensors, full
pages of a key/value stream) is hashed once while it is alive.
"""
from __future__ import annotations

import struct
import weakref
from typing import Any, Iterator

import numpy as np
import xxhash

from m3jit.errors import InternalError
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.kv_layout import PAGE, read
from m3jit.isa.types import Tensor
from m3jit.vm.machine_models import ModelState
from m3jit.vm.machine_system import ExtensionState
from m3jit.vm.memory import NAMES
from m3jit.vm.snapshots import SnapshotHandle
from m3jit.vm.values import ContextRef, Handle

_known_pages: "weakref.WeakKeyDictionary[Any, tuple[bytes, Any]]" = weakref.WeakKeyDictionary()    # and its claim
_known: "weakref.WeakKeyDictionary[Any, bytes]" = weakref.WeakKeyDictionary()     # immutable object -> digest
SAMPLES, SAMPLE = 16, 4096
Part = tuple[str, bytes]                               # what it is, and its digest


def digest(version: Any) -> str:
    """The digest of a version (a `Context`, or a root that `capture` gave): 32 hex digits."""
    h = xxhash.xxh3_128()
    for name, value in parts(version):
        h.update(name.encode() + b"\0" + value)
    return h.hexdigest()


def parts(version: Any) -> Iterator[Part]:
    """A version in named parts, in a fixed order: registers, frames, states, memory pages, the rest.

    Two versions differ in the parts whose digests differ (or which only one has)."""
    for bank in "RVS":
        for i, v in enumerate(getattr(version, bank)):
            if v is not None:
                yield f"{bank}{i}", value_digest(v)
    frame = version.frames
    while frame is not None:
        yield f"frame {frame.depth}", _frame(frame)
        frame = frame.parent
    yield "flags", bytes((version.flags,))
    yield "random stream", struct.pack("<q", version.rng)
    if version.model is not None:
        yield "current model", value_digest(version.model)
    for number, state in version.states.items():
        for name, value in state_parts(state):
            yield f"state #{number}{name}", value
    yield from memory_parts(version.memory)
    for source, at in sorted(version.cursors.items()):
        yield f"position in {source}", struct.pack("<q", at)
    for sink, held in sorted(version.texts.items()):
        if held:
            yield f"unfinished text of {sink}", held


def value_digest(value: Any) -> bytes:
    """The digest of a register's value."""
    kind = value.__class__
    if kind is int:
        return b"i" + struct.pack("<q", value)
    if kind is float:
        return b"f" + struct.pack("<d", value)
    if kind is Tensor:
        return tensor_digest(value)
    if kind is Handle:
        return b"h" + struct.pack("<q", value.id) + value.what.encode()
    if kind is SnapshotHandle:
        return b"s" + struct.pack("<q", value.id)
    if kind is ContextRef:
        return b"c" + struct.pack("<q", value.id)
    return b"?" + repr(value).encode()


def tensor_digest(tensor: Tensor) -> bytes:
    """Type, shape and bytes; of a weight (a tensor of a model's file) its name there and `SAMPLES` pieces."""
    found = _known.get(tensor)
    if found is None:
        h = xxhash.xxh3_128(f"{tensor.dtype.name}{list(tensor.shape)}".encode())
        data = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
        if tensor.key is None or len(data) <= SAMPLES * SAMPLE:
            h.update(data)
        else:
            h.update(tensor.key.rpartition("/")[2].encode())
            for at in range(0, len(data), len(data) // SAMPLES):
                h.update(data[at:at + SAMPLE])
        found = _known[tensor] = h.digest()
    return found


def _frame(frame: Any) -> bytes:
    h = xxhash.xxh3_128(struct.pack("<q", frame.back) + bytes(frame.args))
    for bank, values in ((b"R", frame.R), (b"V", frame.V)):
        for i, v in enumerate(values):
            if v is not None:
                h.update(bank + bytes((i,)) + value_digest(v))
    return h.digest()


def state_parts(state: Any) -> Iterator[Part]:
    """A state in named parts: the layers of a stream, the cells of a recurrent state."""
    if isinstance(state, KVStream):
        g = state.geometry
        yield "", f"{state.dtype.name} {g}".encode()
        for layer in sorted(state.layers):
            if state.length(layer):
                yield f" layer {layer}", stream_digest(state, layer)
    elif isinstance(state, CellState):
        for layer, part in sorted(state.cells):
            cell = state.array(layer, part)
            yield f" {part} {layer}", xxhash.xxh3_128_digest(str(cell.shape).encode() + cell.tobytes())
    elif isinstance(state, ModelState):
        yield "", state.model.name.encode()
    elif isinstance(state, ExtensionState):
        yield "", value_digest(Tensor.of(state.value) if isinstance(state.value, np.ndarray) else state.value)
    elif hasattr(state, "digest"):
        yield "", state.digest()
    else:
        raise InternalError(f"no digest for a state of class {type(state).__name__}; give the class a method `digest`")


def stream_digest(stream: KVStream, layer: int) -> bytes:
    """The rows of a layer: the bytes of full pages, the values of the last one's rows."""
    length = stream.length(layer)
    h = xxhash.xxh3_128(struct.pack("<q", length))
    for page, claim in stream.layers[layer].whole_pages():
        found, kept = _known_pages.get(page, (b"", _no_claim))
        if kept() is None:                             # the page may have other rows by now
            found = xxhash.xxh3_128_digest(page.data)
            _known_pages[page] = found, weakref.ref(claim)
        h.update(found)
    if length % PAGE:
        for part in read(stream.pages(layer)[length // PAGE].data, stream.geometry, stream.dtype, length % PAGE):
            h.update(np.ascontiguousarray(part))
    return h.digest()


def _no_claim() -> None:
    """Of a page whose digest is not known."""


def memory_parts(memory: Any) -> Iterator[Part]:
    """The pages of a context's memory and of the machine's SHARED region that are not all zero; arenas."""
    regions = {**memory.pages, 6: memory.machine.shared}
    for region in sorted(regions):
        for number, page in regions[region].map.items():
            if any(page.data):
                yield f"{NAMES[region]} page {number}", xxhash.xxh3_128_digest(page.data)
    for number, size in sorted(memory.arenas.items()):
        yield f"arena {number}", struct.pack("<q", size)
