"""A context's version as a tree: what a snapshot of it holds, and where it stands in its program.

    ["version", 1, program, place, main root, named snapshots, given snapshots, models, model handles,
     extension handles, notes]

Snapshots that a running context's registers hold are stored with it, as they are kept alive by it; a snapshot that only
another snapshot names is not, and its handle is then one that was released.  Handles keep their numbers, but for those
that name a model or an extension in the machine that restores: a version of another run may have used them otherwise.
"""
from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Sequence

from m3jit.durable import roots
from m3jit.durable.errors import StoreError
from m3jit.durable.states import expect, whole
from m3jit.durable.tree import TreeError
from m3jit.errors import OperandError, brief
from m3jit.vm.commit import attribute, commit
from m3jit.vm.context import DONE, KILLED, READY, Context
from m3jit.vm.snapshots import Snapshot

if TYPE_CHECKING:
    from m3jit.durable.store import Restored, Store, Version

LAYOUT = 1
WRONG = (TreeError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)


def program_hash(image: Any) -> bytes:
    """What tells programs apart: code, data and entry (not the names of files)."""
    h = hashlib.blake2b(digest_size=16, person=b"m3jit program")
    for part in (len(image.text).to_bytes(8, "little"), image.text, image.data, image.entry_pc.to_bytes(8, "little")):
        h.update(part)
    return h.digest()


def write(store: "Store", vm: Any, ctx: Context, name: str, notes: Any = None, snapshots: Sequence[Snapshot] = (),
          of: Snapshot | None = None) -> "Version":
    """Commit a context as it is now, or a snapshot `of` it; the caller holds the machine.

    StoreError: a value without a form on a disk; a run that was broken off in the middle of an instruction; the store's
    errors."""
    if of is None and isinstance(vm.error, BaseException) and not isinstance(vm.error, Exception):
        raise StoreError(f"{store.path}: {brief(repr(name))}: the run was broken off ({vm.error.__class__.__name__}), "
                         f"maybe in the middle of an instruction; commit a snapshot made before, or end runs with "
                         f"VM.stop")
    pcs, end = vm.image.pcs, len(vm.image.text)
    root, index = (ctx.capture(), ctx.index) if of is None else (of.root, of.resume)
    held = roots.named_snapshots(ctx) if of is None else []
    newest = ctx.newest_snapshot if of is None else of.id
    ended = of is None and ctx.status in (DONE, KILLED)

    def build(writer: Any) -> Any:
        packing = roots.Packing(vm, writer)
        main = packing.root(root)
        named = [packing.snapshot(s) for s in held] if of is None else [packing.snapshot(of, main)]
        given = [packing.snapshot(s) for s in snapshots]
        place = [pcs[index] if index < len(pcs) else end, ended, newest or 0]
        return ["version", LAYOUT, program_hash(vm.image), place, main, named, given, packing.models,
                packing.model_handles(), packing.extension_handles(), notes]
    try:
        return store.put(name, build)
    except (TypeError, ValueError) as e:
        raise StoreError(f"{store.path}: {brief(repr(name))}: cannot be stored: {e}") from None


def restore(store: "Store", vm: Any, version: "Version") -> "Restored":
    """`Store.restore`."""
    from m3jit.durable.store import Restored
    with vm._entered():
        if vm._closed or vm.batch is not None:
            raise StoreError(f"{vm.image.name}: this machine {'has ended' if vm._closed else 'takes part in a batch'}; "
                             f"restore into a new one")
        loaded = load(store, vm, version)
        ctx = vm.main
        status = DONE if loaded.ended else READY
        commit([*ctx.restoring(loaded.root), attribute(ctx, "index", loaded.index), attribute(ctx, "status", status),
                   attribute(ctx, "newest_snapshot", loaded.newest), attribute(ctx, "trap", None),
                   attribute(ctx, "waiting_for", None),
                   attribute(vm, "_first_trap", None)])
        loaded.settle()
        scheduled = ctx.id in vm.scheduler.contexts
        if loaded.ended and scheduled:
            vm.scheduler.remove(ctx)
        elif not loaded.ended and not scheduled:
            vm.scheduler.add(ctx, ctx.virtual_time)
        return Restored(version, loaded.notes, loaded.given)


def load(store: "Store", vm: Any, version: "Version") -> "Loaded":
    """A version, completely read and checked, for a machine that is not changed yet."""
    where = f"{store.path}: {brief(repr(version.name))} version {version.number}"
    tree = store.read(version)
    try:
        expect(isinstance(tree, list) and len(tree) == 11 and tree[:1] == ["version"], "it is no version of a machine")
        expect(tree[1] == LAYOUT, f"its layout is {tree[1]!r}, this version of m3jit reads {LAYOUT}")
        if tree[2] != program_hash(vm.image):
            raise StoreError(f"{where}: was written by another program (its code and data have the hash "
                             f"{_hex(tree[2])}, those of {vm.image.name} {_hex(program_hash(vm.image))}); restore it "
                             f"with the program that wrote it (of a model: with the options it had then, such as --temp, "
                             f"--max-tokens, --kv-type, --lora), or use another folder or name")
        return Loaded(store, vm, tree)
    except OperandError as e:
        raise StoreError(f"{where}: {e.message}") from None
    except WRONG as e:
        raise StoreError(f"{where}: cannot be restored: {e}; an earlier version may be whole") from None


class Loaded:
    """A version that was read.  `settle` makes what the machine keeps beside the root agree with it."""

    def __init__(self, store: "Store", vm: Any, tree: list[Any]):
        _, _, _, place, main, named, given, models, model_handles, extension_handles, self.notes = tree
        pc, self.ended, newest = place
        expect(self.ended.__class__ is bool, "no word on whether it has ended")
        index = vm.image.index_of.get(pc)
        whole(pc, 0, len(vm.image.text), "its place")
        expect(index is not None or pc == len(vm.image.text), f"its place 0x{pc:x} is not the start of an instruction")
        self.index = len(vm.image.pcs) if index is None else index
        reading = roots.Unpacking(vm, store, models, model_handles, extension_handles)
        reading.announce(named, given)
        self.root = reading.root(main)
        self.given = [reading.handle_to(s) for s in given]
        for snapshot in (*named, *given):
            reading.fill(snapshot)
        self.newest = reading.snapshot_id(newest)
        self._reading = reading

    def snapshot(self) -> Snapshot:
        """The version as a snapshot of the machine."""
        return self._reading.as_snapshot(self.newest, self.root, self.index)

    def settle(self) -> None:
        self._reading.settle()


def _hex(digest: Any) -> str:
    return digest.hex() if isinstance(digest, bytes) else repr(digest)
