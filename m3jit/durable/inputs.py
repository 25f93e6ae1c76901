"""Rings between contexts, and inputs, as trees: what a machine holds of them, and where.

An input that the host attached or filled before it restores is given again from its beginning, so what it holds stays;
where the host has none the stored items come back, and what is pushed then goes behind them.  Sound goes on: what was
stored comes before what a device has given since.  Items are stored in groups by their position, sound in pieces, so
that a commit writes those that are new.
"""
from __future__ import annotations

from collections import deque
from typing import Any, Callable, Sequence

import numpy as np

from m3jit.durable.states import expect, pack_plain, unpack_plain, whole
from m3jit.durable.tree import Ref
from m3jit.isa.types import Tensor
from m3jit.vm.audio_ring import MOST_BYTES, AudioRing
from m3jit.vm.commit import Store, attribute
from m3jit.vm.sources import QueueSource, RingSource
from m3jit.vm.streams import Item, Ring

GROUP = 64                         # items of a group
PIECE = 4096                       # frames of a piece of sound
MOST = 2 ** 62                     # a position
FORMS = ("TEXT", "RAW", "AUDIO_PCM", "TENSOR")


# -- items ------------------------------------------------------------------------------------------------------------
def pack_items(name: str, base: int, items: Sequence[Any], each: Callable[[Any], Any], writer: Any) -> list[Ref]:
    """Items from position `base` on, in groups.  TypeError names the one that has no form on a disk."""
    def group(start: int) -> Any:
        out = []
        for at in range(max(start, base), min(start + GROUP, base + len(items))):
            try:
                out.append(each(items[at - base]))
            except (TypeError, ValueError) as e:
                what = items[at - base].__class__.__name__
                raise TypeError(f"{name}: item {at}, a {what}, has no form on a disk ({e}); text, bytes, numbers, "
                                f"arrays and tensors have one") from None
        return writer.tree(out)
    return [group(start) for start in range(base // GROUP * GROUP, base + len(items), GROUP)]


def unpack_items(groups: Any, each: Callable[[Any], Any], reading: Any) -> "deque[Any]":
    out: deque[Any] = deque()
    for ref in groups:
        out.extend(map(each, reading.tree(ref)))
    return out


def pack_item(item: Item, packing: Any) -> Any:
    """[form, rate, data] of what STREAM handed to a ring."""
    return [item.form, item.rate, pack_plain(item.data, packing)]


def unpack_item(tree: Any, reading: Any) -> Item:
    form, rate, content = tree
    data = unpack_plain(content, reading)
    fits = {"TEXT": bytes, "RAW": bytes, "AUDIO_PCM": np.ndarray, "TENSOR": (Tensor, np.ndarray)}.get(form)
    expect(fits is not None and isinstance(data, fits), f"an item of form {form!r} that is a {type(data).__name__}")
    expect(form != "AUDIO_PCM" or data.ndim == 2, "sound that is no frames")
    return Item(form, data, whole(rate, 0, MOST, "a rate"))


def pack_given(item: Any, packing: Any) -> Any:
    """What the host pushed."""
    return pack_plain(item.item() if isinstance(item, np.generic) else item, packing)


# -- rings ------------------------------------------------------------------------------------------------------------
def pack_rings(vm: Any, packing: Any) -> list[Any]:
    """[[name, capacity, first position, read up to, dropped, closed, groups] ...] of the rings between contexts."""
    out = []
    for name, ring in sorted(vm.rings.items()):
        closed = name in vm.rings_closed if vm._closed else ring.closed
        groups = pack_items(f"ring {name}", ring.base, list(ring.items), lambda i: pack_item(i, packing),
                            packing.writer)
        out.append([name, ring.capacity, ring.base, ring.taken, ring.dropped, closed, groups])
    return out


def unpack_rings(tree: Any, reading: Any) -> tuple[dict[str, Ring], list[Store]]:
    """(the machine's rings by name, the stores that make them so).  Rings that only it has are empty then."""
    vm = reading.vm
    rings, stores = dict(vm.rings), []
    empty = ["", vm.ring_capacity, 0, 0, 0, False, []]
    found = {t[0]: t for t in tree}
    expect(len(found) == len(tree), "a ring twice")
    for name in sorted({*rings, *found}):
        _, capacity, base, taken, dropped, closed, groups = found.get(name, empty)
        expect(isinstance(name, str) and closed.__class__ is bool, "no ring")
        items = unpack_items(groups, lambda t: unpack_item(t, reading), reading)
        whole(base, 0, MOST, "a position"), whole(taken, base, base + len(items), "a position")
        ring = rings.setdefault(name, Ring(name, signal=vm.signal))
        stores += [attribute(ring, "capacity", whole(capacity, 1, MOST, "a capacity")), attribute(ring, "items", items),
                   attribute(ring, "base", base), attribute(ring, "taken", taken), attribute(ring, "closed", closed),
                   attribute(ring, "dropped", whole(dropped, 0, MOST, "a count"))]
    return rings, [*stores, attribute(vm, "rings", rings)]


# -- inputs -----------------------------------------------------------------------------------------------------------
def pack_inputs(vm: Any, packing: Any) -> list[Any]:
    """[["queue", name, first position, read up to, closed, drawn from an iterator, groups] or
    ["sound", name, rate, channels, frames it keeps, first frame, closed, pieces, where contexts began with it] ...]"""
    out: list[Any] = []
    for name, source in sorted(vm.sources.items()):
        if isinstance(source, QueueSource):
            with vm.signal:
                base, items, taken, closed = source.base, list(source.items), source.taken, source.closed
            if base or items or closed:
                groups = pack_items(f"input {name}", base, items, lambda i: pack_given(i, packing), packing.writer)
                out.append(["queue", name, base, taken, closed, source.draws, groups])
        elif isinstance(source, AudioRing):
            with vm.signal:
                base, samples, closed = source.base, source.kept(), source.closed
            cuts = [0, *range(PIECE - base % PIECE, len(samples), PIECE), len(samples)]
            pieces = [packing.writer.blob(memoryview(samples[a:b].reshape(-1).view(np.uint8)))
                      for a, b in zip(cuts, cuts[1:]) if a < b]
            began = [[c, at] for (c, key, ring), at in vm.machine._first_reads.items()
                     if key == name and ring == id(source)]
            out.append(["sound", name, source.rate, source.channels, source.frames, base, closed, pieces, began])
    return out


def unpack_inputs(tree: Any, reading: Any) -> tuple[dict[str, Any], list[Store]]:
    """(the machine's sources by name, the stores that make them so)."""
    vm, stores = reading.vm, []
    sources, first_reads = dict(vm.sources), dict(vm.machine._first_reads)
    for kind, name, *rest in tree:
        expect(isinstance(name, str), "an input without a name")
        if kind == "queue":
            stores += _queue(name, rest, sources, reading)
        else:
            expect(kind == "sound", f"an input of kind {kind!r}")
            stores += _sound(name, rest, sources, first_reads, reading)
    return sources, [*stores, attribute(vm, "sources", sources), attribute(vm.machine, "_first_reads", first_reads)]


def _queue(name: str, rest: list[Any], sources: dict[str, Any], reading: Any) -> list[Store]:
    base, taken, closed, draws, groups = rest
    items = unpack_items(groups, lambda t: unpack_plain(t, reading), reading)
    whole(base, 0, MOST, "a position"), whole(taken, 0, base + len(items), "a position")
    expect(closed.__class__ is bool and draws.__class__ is bool, "no word on whether an input is closed")
    found = sources.get(name)
    if found is not None and not getattr(found, "goes_on", False):
        return []                                      # the host gives it again
    if draws and found is None:
        raise ValueError(f"its input {name} was drawn from an iterator of the host, which is not here; attach it "
                         f"again, from its beginning, before you restore (VM.set_source)")
    if found is None:
        found = sources[name] = QueueSource(name, reading.vm.signal, waits=reading.vm.wait_input)
    else:
        closed, items = found.closed, items + found.items
    return [attribute(found, "items", items), attribute(found, "base", base), attribute(found, "taken", taken),
            attribute(found, "closed", closed)]


def _sound(name: str, rest: list[Any], sources: dict[str, Any], first_reads: dict[Any, int],
           reading: Any) -> list[Store]:
    rate, channels, frames, base, closed, pieces, began = rest
    whole(rate, 1, MOST, "a rate"), whole(channels, 1, MOST_BYTES, "channels"), whole(base, 0, MOST, "a position")
    whole(frames, 1, MOST_BYTES // 4 // channels, "frames of a ring")
    expect(closed.__class__ is bool, "no word on whether a ring is closed")
    parts = []
    for ref in pieces:
        expect(isinstance(ref, Ref) and ref.item == 0 and 0 < ref.length <= 4 * channels * PIECE and
               ref.length % (4 * channels) == 0, "a piece of sound that is none")
        parts.append(np.frombuffer(reading.data(ref, ref.length), np.float32).reshape(-1, channels))
    samples = np.concatenate([np.empty((0, channels), np.float32), *parts])
    expect(len(samples) <= frames, "more sound than its ring keeps")
    vm, found = reading.vm, sources.get(name)
    if found is None:
        reading.spend(4 * channels * frames)
        found = sources[name] = AudioRing(vm.signal, name, rate, frames / rate, channels, vm.wake_for_sound)
        expect(found.frames == frames, "a ring of another length")
        found.restored = True
    elif not isinstance(found, AudioRing):
        return []                                      # something else
    elif any(name in c.cursors for c in vm.memory.contexts()):
        if not _agree(base, samples, found):
            raise ValueError(f"its sound {name} is not what the ring attached here has had at the same positions, and "
                             f"this machine has read from that; restore it into a new machine")
        return []                                      # it is in use here: the same, and what came since
    elif (found.rate, found.channels) != (rate, channels):
        raise ValueError(f"its sound {name} has {channels} channels at {rate} Hz, and the ring attached here "
                         f"{found.channels} at {found.rate}; attach one of the same kind (VM.audio_input)")
    else:
        closed = found.closed
    samples = np.concatenate([samples, found.kept()])
    for context, at in began:
        first_reads[whole(context, 1, MOST, "a context"), name, id(found)] = whole(at, 0, MOST, "a position")
    return found.holding(base, samples, closed)


def _agree(base: int, samples: np.ndarray, ring: AudioRing) -> bool:
    """Are the frames that both have the same?"""
    there, start = ring.kept(), ring.base
    first, end = max(base, start), min(base + len(samples), start + len(there))
    return first >= end or samples[first - base:end - base].tobytes() == there[first - start:end - start].tobytes()


def check_positions(vm: Any, root: Any) -> None:
    """ValueError when a root stands at an item that a ring of this machine has never had: it is of another run."""
    for key, at in root.cursors.items():
        source = vm.sources.get(key)
        if source is None and key.startswith("RING:"):
            end = vm.rings[key[5:]].end if key[5:] in vm.rings else 0
        elif isinstance(source, RingSource):
            end = source.ring.end
        elif isinstance(source, AudioRing):
            end = source.end
        else:
            continue
        if at > end:
            raise ValueError(f"it stands at item {at} of {key}, which has had {end} on this machine; what rings hold "
                             f"is kept with a whole machine (FORK PERSIST, Store.commit without `context`), not with "
                             f"one context: restore it in the run that wrote it")
