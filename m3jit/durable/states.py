"""State values as trees: one row of `CODECS` a kind, (class, pack, unpack).

pack(value, packing) gives a tree; big parts go to blocks through `packing.writer`.  unpack(tree, unpacking) checks all
of it and raises ValueError, KeyError, TypeError or OperandError for a tree that `pack` does not give.  A state's bytes
are those of its value alone: what lies beyond a stream's length or between the lanes of a cell is written as zero.
"""
from __future__ import annotations

import math
import weakref
from typing import Any, Callable, NamedTuple

import numpy as np

from m3jit.durable.blocks import name_of, DATA, CHUNK
from m3jit.durable.tree import HASH, Ref
from m3jit.errors import M3Error
from m3jit.isa.cells import SCAN, WINDOW, CellState, cell_of
from m3jit.isa.kv import KVStream, Layer
from m3jit.isa.kv_layout import DTYPES as KV_TYPES
from m3jit.isa.kv_layout import PAGE, KVGeometry, rows_of, storage
from m3jit.isa.kv_pages import Claim, Mark, Page, lock
from m3jit.isa.types import BY_CODE, MAX_RANK, Tensor
from m3jit.vm.machine_models import ModelState
from m3jit.vm.machine_system import ExtensionState

INLINE = 512                       # bytes of a tensor that stand in the tree itself


class Codec(NamedTuple):
    """How a kind of state is stored."""
    kind: str
    cls: type
    pack: Callable[[Any, Any], Any]
    unpack: Callable[[Any, Any], Any]


def expect(condition: bool, what: str) -> None:
    """ValueError unless a tree is as it must be."""
    if not condition:
        raise ValueError(what)


def whole(value: Any, low: int, high: int, what: str) -> int:
    """An integer of a tree within its bounds."""
    expect(value.__class__ is int and low <= value <= high, f"{what} is {value!r}")
    return value


# -- tensors ----------------------------------------------------------------------------------------------------------
def pack_tensor(tensor: Tensor, packing: Any) -> Any:
    """[type, shape, bytes or a reference]; a model's weight: [model, name]."""
    weight = packing.weight(tensor)
    if weight is not None:
        return weight
    raw = memoryview(np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8))
    return [tensor.dtype.code, list(tensor.shape), bytes(raw) if raw.nbytes <= INLINE else packing.blob(tensor, raw)]


def unpack_tensor(tree: Any, unpacking: Any) -> Tensor:
    if len(tree) == 2:
        return unpacking.weight(*tree)
    code, shape, content = tree
    expect(code in BY_CODE, f"no type of tensor has the number {code!r}")
    expect(isinstance(shape, list) and len(shape) <= MAX_RANK, f"a shape {shape!r}")
    dtype, shape = BY_CODE[code], tuple(whole(d, 0, 2 ** 48, "a dimension") for d in shape)
    if dtype.is_block:
        expect(bool(shape) and shape[-1] % dtype.block == 0, f"{dtype.name} of shape {shape}")
        stored = (*shape[:-1], dtype.row_bytes(shape[-1]))
    else:
        stored = shape
    nbytes = math.prod(stored) * (1 if dtype.is_block else dtype.nbytes)
    key = (content, code, shape)
    if key in unpacking.tensors:                       # of another root: they have it together
        return unpacking.tensors[key]
    raw = unpacking.data(content, nbytes)
    array = np.frombuffer(raw, np.uint8) if dtype.is_block else np.frombuffer(raw, dtype.numpy)
    if dtype.kind == "bool":
        expect(not nbytes or int(np.frombuffer(raw, np.uint8).max()) <= 1, "a BOOL that is neither 0 nor 1")
    made = Tensor(dtype, shape, array.reshape(stored))
    if content.__class__ is Ref:
        unpacking.tensors[key] = made
    return made


# -- key/value streams ------------------------------------------------------------------------------------------------
_page_names: "weakref.WeakKeyDictionary[Page, tuple[weakref.ref[Claim], bytes]]" = weakref.WeakKeyDictionary()


def _page_name(page: Page, claim: Claim, writer: Any) -> bytes:
    """The name of a full page's block, written if it is not there.

    A page keeps its rows while its claim is alive, so the name is known as long."""
    known = _page_names.get(page)
    if known is not None and known[0]() is not None and writer.has(known[1]):
        return known[1]
    name = writer.item(memoryview(page.data.view(np.uint8)))
    _page_names[page] = (weakref.ref(claim), name)
    return name


def pack_stream(stream: KVStream, packing: Any) -> Any:
    """[type, geometry, [[layer, rows, table of pages] ...]]."""
    g, layers = stream.geometry, []
    for number, layer in sorted(stream.layers.items()):
        if not layer.length:
            continue
        names = [_page_name(page, claim, packing.writer) for page, claim in layer.whole_pages()]
        rest = layer.length - len(names) * PAGE
        if rest:
            last = rows_of(layer.pages[len(names)].data, g, stream.dtype, rest)
            names.append(packing.writer.item(memoryview(last.view(np.uint8))))
        layers.append([number, layer.length, packing.writer.table(b"".join(names), stream.page_bytes)])
    return [stream.dtype.code, None if g is None else [g.kv_heads, g.head_dim, g.value_dim, g.shared], layers]


def unpack_stream(tree: Any, unpacking: Any) -> KVStream:
    code, numbers, layers = tree
    dtype = {d.code: d for d in KV_TYPES.values()}.get(code)
    expect(dtype is not None, f"a stream of type {code!r}")
    if numbers is None:
        expect(not layers, "rows of a stream without geometry")
        return KVStream(None, dtype)
    heads, head_dim, value_dim, shared = numbers
    for n, what in ((heads, "heads"), (head_dim, "features of a key"), (value_dim, "features of a value")):
        whole(n, 0 if what.endswith("value") else 1, 2 ** 24, what)
    expect(shared.__class__ is bool, f"shared is {shared!r}")
    g = KVGeometry(heads, head_dim, value_dim, shared)
    empty, found = KVStream(None, dtype).with_geometry(heads, head_dim, value_dim, shared), {}
    expect(empty.geometry == g, "a geometry that no stream has")
    for number, length, table in layers:
        whole(number, 0, 2 ** 32, "a layer")
        whole(length, 1, 2 ** 40, "rows")
        expect(number not in found, f"layer {number} twice")
        count = -(-length // PAGE)
        expect(isinstance(table, Ref) and table.item == empty.page_bytes and table.length == count * HASH,
               "a page table that does not fit its rows")
        found[number] = _layer(number, unpacking.names(table), length, empty, unpacking)
    return KVStream(g, dtype, found)


def _layer(number: int, names: bytes, length: int, like: KVStream, unpacking: Any) -> Layer:
    found = [unpacking.page(names[i:i + HASH], min(PAGE, length - i // HASH * PAGE), like, (number, i // HASH))
             for i in range(0, len(names), HASH)]
    return Layer.of([page for page, _ in found], length, [claim for _, claim in found])


def make_page(raw: bytes, rows: int, like: KVStream) -> tuple[Page, Claim]:
    """A page with these bytes, and the claim of its rows."""
    mark = Mark()
    page = Page.zeros(len(raw), storage(like.dtype), mark)
    page.data.view(np.uint8)[:] = np.frombuffer(raw, np.uint8)
    with lock:
        claim = mark.take(0, rows)
    if rows == PAGE and len(raw) <= CHUNK:
        _page_names[page] = (weakref.ref(claim), name_of(DATA, raw))
    return page, claim


def joined_page(raw: bytes, rows: int, like: KVStream, place: tuple[int, int],
                begun: dict[Any, tuple[Page, int]]) -> tuple[Page, Claim] | None:
    """A page of the same place (layer, number) that has these rows, or the first of them and no others: then it gets
    the rest.  With the claim of the rows; None: there is none.  begun: (page, its rows), by place, kind and first row.

    So versions of a stream share the page they end in, as they did on the machine that appended to it."""
    data = np.frombuffer(raw, storage(like.dtype))

    def beginning(of: np.ndarray, count: int) -> bytes:
        return rows_of(of, like.geometry, like.dtype, count).tobytes()
    key = place, like.geometry, like.dtype.code, beginning(data, 1)
    page, filled = begun.get(key, (None, 0))
    if page is None or beginning(page.data, min(filled, rows)) != beginning(data, min(filled, rows)):
        return None
    if rows > filled:
        page.data[:] = data
        begun[key] = page, rows
    with lock:
        return page, page.mark.hold(rows)


def begin_page(page: Page, rows: int, like: KVStream, place: tuple[int, int],
               begun: dict[Any, tuple[Page, int]]) -> None:
    """Note a new page for `joined_page`."""
    first = rows_of(page.data, like.geometry, like.dtype, 1).tobytes()
    begun[place, like.geometry, like.dtype.code, first] = page, rows


# -- recurrent states -------------------------------------------------------------------------------------------------
def pack_cells(state: CellState, packing: Any) -> Any:
    """[[layer, part, shape, bytes] ...], h as [runs, length, d_state]."""
    out = []
    for layer, part in sorted(state.cells):
        a = state.array(layer, part)
        out.append([layer, part, list(a.shape), packing.writer.blob(memoryview(a.reshape(-1).view(np.uint8)))])
    return out


def unpack_cells(tree: Any, unpacking: Any) -> CellState:
    cells = {}
    for layer, part, shape, content in tree:
        whole(layer, -2 ** 31, 2 ** 31, "a layer")
        rank = {SCAN: 3, WINDOW: 2}.get(part)
        expect(len(shape) == rank, f"a cell {part!r} of shape {shape!r}")
        shape = tuple(whole(d, 0, 2 ** 40, "a dimension") for d in shape)
        raw = unpacking.data(content, 4 * math.prod(shape))
        if part == SCAN:
            unpacking.spend(64 * shape[0] * max(shape[2], 1))       # tiles of 16 channels are padded
        cells[layer, part] = cell_of(part, np.frombuffer(raw, np.float32).reshape(shape))
    return CellState(cells)


# -- models, extensions -----------------------------------------------------------------------------------------------
def pack_model(state: ModelState, packing: Any) -> Any:
    return packing.model(state.model)


def unpack_model(tree: Any, unpacking: Any) -> ModelState:
    return ModelState(unpacking.model(tree))


def pack_extension(state: ExtensionState, packing: Any) -> Any:
    """[number, major version, the extension's own tree]: what its `pack` gives, else plain values and arrays."""
    extension = packing.extension_of(state)
    pack = getattr(extension, "pack", None)
    tree = pack_plain(state.value, packing) if pack is None or state.value is None else \
        ["packed", _asked(extension, "pack", state.value)]
    return [extension.number, extension.version[0], tree]


def unpack_extension(tree: Any, unpacking: Any) -> ExtensionState:
    number, major, content = tree
    extension = unpacking.extension(number, major)
    if isinstance(content, list) and content[0] == "packed":
        unpack = getattr(extension, "unpack", None)
        expect(unpack is not None, f"extension {extension.name} of this machine has no `unpack`")
        return ExtensionState(_asked(extension, "unpack", content[1]))
    return ExtensionState(unpack_plain(content, unpacking))


def _asked(extension: Any, what: str, value: Any) -> Any:
    """What the extension's own `pack` or `unpack` gives; what it raises is a ValueError that names it."""
    try:
        return getattr(extension, what)(value)
    except M3Error:
        raise
    except Exception as e:
        raise ValueError(f"`{what}` of extension {extension.name} failed: {type(e).__name__}: {e}") from e


def pack_plain(value: Any, packing: Any) -> Any:
    """None, numbers, text, bytes, lists, tuples, dictionaries, arrays and tensors.  TypeError for others."""
    kind = value.__class__
    if value is None or kind in (bool, int, float, bytes, str):
        return ["plain", value]
    if kind in (list, tuple):
        return [kind.__name__, [pack_plain(v, packing) for v in value]]
    if kind is dict:
        return ["dict", [[pack_plain(k, packing), pack_plain(v, packing)] for k, v in value.items()]]
    if kind is Tensor:
        return ["tensor", pack_tensor(value, packing)]
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" and value.dtype.isnative:
        raw = memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return ["array", value.dtype.str, list(value.shape), packing.writer.blob(raw)]
    raise TypeError(f"a {kind.__name__}; an extension's state is plain values, or the extension has `pack` and "
                    f"`unpack`")


def unpack_plain(tree: Any, unpacking: Any) -> Any:
    what, *rest = tree
    if what == "plain":
        expect(not isinstance(rest[0], (list, Ref)), "a plain value that is none")
        return rest[0]
    if what in ("list", "tuple"):
        items = [unpack_plain(v, unpacking) for v in rest[0]]
        return items if what == "list" else tuple(items)
    if what == "dict":
        return {unpack_plain(k, unpacking): unpack_plain(v, unpacking) for k, v in rest[0]}
    if what == "tensor":
        return unpack_tensor(rest[0], unpacking)
    expect(what == "array", f"a value of kind {what!r}")
    name, shape, content = rest
    dtype = np.dtype(name)
    expect(dtype.kind in "fiub" and dtype.str == name and len(shape) <= 32, f"an array of {name!r}")
    shape = tuple(whole(d, 0, 2 ** 48, "a dimension") for d in shape)
    return np.frombuffer(unpacking.data(content, math.prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()


CODECS = (
    Codec("KV stream", KVStream, pack_stream, unpack_stream),
    Codec("recurrent state", CellState, pack_cells, unpack_cells),
    Codec("model", ModelState, pack_model, unpack_model),
    Codec("extension state", ExtensionState, pack_extension, unpack_extension),
)
BY_CLASS = {c.cls: c for c in CODECS}
BY_KIND = {c.kind: c for c in CODECS}
