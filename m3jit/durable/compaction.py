"""Compaction: a new log, and new segments in place of those that are mostly garbage.

The old log and its segments stay valid until the new log, complete and synced together with the blocks it needs, takes
its name; after that nobody needs them, and a crash before they are removed leaves files that the next opening removes.
"""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Iterable, Iterator

from m3jit.durable.blocks import Blocks, Place, Writer, pack_places
from m3jit.durable.files import syncing
from m3jit.durable.log import Log
from m3jit.durable.tree import pack

if TYPE_CHECKING:
    from m3jit.durable.store import Store
    from m3jit.durable.version import Version

KEPT_SHARE = 0.5                   # a segment of which this much is needed stays as it is
PLACES = 1 << 20                   # places a record holds
PIECE = 1 << 20                    # bytes of a piece of a log
Appended = dict[str, list[tuple[int, int, int]]]


def compact(store: "Store", kept: "dict[str, list[Version]]") -> tuple[Log, Blocks, Appended]:
    """The log, the blocks and the appended pieces of a store that has only these versions.

    OSError, DamagedStore: nothing changed."""
    old, new_log = store.blocks, store.path / "log.new"
    live: set[bytes] = set()
    for version in (v for versions in kept.values() for v in versions):
        live.update(store.needs(version))
    blocks = _moved(old, live)
    log: Log | None = None
    try:
        log = Log.create(store.files, new_log, store.log.generation + 1)
        appended = _write(log, blocks, store, kept)
    except BaseException:
        if log is not None:
            log.close()
        for segment in set(blocks.ends) - set(old.ends):
            _close_and_remove(blocks, segment)
        blocks.close()
        raise
    store.log.unsure = True                            # from here on either log may be the one that a crash leaves
    with syncing():
        store.files.rename(new_log, store.path / "log")
        store.files.sync_folder(store.path)
    log.path = store.path / "log"
    store.log.close()
    for segment in set(old.ends) - set(blocks.ends):
        _close_and_remove(old, segment)
    old.close()
    return log, blocks, appended


def _moved(old: Blocks, live: set[bytes]) -> Blocks:
    """The live blocks, those of mostly dead segments copied to new ones, which are on the disk."""
    needed: dict[int, int] = {}
    for name in live:
        place = old.index[name]
        needed[place.segment] = needed.get(place.segment, 0) + place.length
    stay = {s for s, n in needed.items() if n >= KEPT_SHARE * old.ends[s]}
    new = Blocks(old.files, old.folder, old.write)
    new.ends = dict(old.ends)                          # numbers that are taken
    writer = Writer(new, fresh=True)
    places: list[tuple[bytes, Place]] = []
    try:
        for name in sorted(live, key=lambda n: old.index[n][2:]):
            place = old.index[name]
            if place.segment in stay:
                places.append((name, place))
            else:
                writer.block(place.kind, old.read(name, place.kind), name)
        writer.sync()
    except BaseException:
        new.close()
        raise
    new.ends = {}
    new.add(places)
    writer.committed()
    return new


def _write(log: Log, blocks: Blocks, store: "Store", kept: "dict[str, list[Version]]") -> Appended:
    appended: Appended = {}
    places = list(blocks.index.items())
    for i in range(0, len(places), PLACES):
        log.append(pack(["blocks", pack_places(places[i:i + PLACES])]), sync=False)
    for name in store.appended:
        at = 0
        for piece in _joined(store.log_of(name)):
            appended.setdefault(name, []).append((log.end, at, len(piece)))
            log.append(pack(["append", name, at, piece]), sync=False)
            at += len(piece)
        if store.ended.get(name):
            log.append(pack(["remove", name, store.ended[name]]), sync=False)
    for versions in kept.values():
        for v in versions:
            log.append(pack(["commit", *v.fields(), b""]), sync=False)
    log.append(pack(["compacted"]), sync=False)
    log.sync()
    return appended


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces of a log, small ones put together: a record has at least a sector."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PIECE:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _close_and_remove(blocks: Blocks, segment: int) -> None:
    file = blocks._open.pop(segment, None)
    with contextlib.suppress(OSError):                     # nothing refers to it; the next opening removes it
        if file is not None:
            file.close()
        blocks.files.remove(blocks.path(segment))
