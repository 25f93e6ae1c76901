"""A version as a tree: what a snapshot of a context holds, where it stands in its program, and a whole machine's rest.

    ["version", 2, program, place, main root, named snapshots, given snapshots, models, model handles,
     extension handles, machine, notes]

machine: what lies outside the root (m3jit.durable.contexts), None in a version of one context.  The live snapshots that
the roots name are stored with them, and those that these name.  Handles keep their numbers, but for those that name a
model or an extension in the machine that restores: a version of another run may have used them otherwise.
"""
from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Sequence

from m3jit.durable import contexts, inputs, roots
from m3jit.durable.errors import StoreError
from m3jit.durable.states import expect, whole
from m3jit.durable.tree import Ref, TreeError
from m3jit.errors import OperandError, brief
from m3jit.vm.commit import Store as Change
from m3jit.vm.commit import attribute, commit
from m3jit.vm.context import DONE, KILLED, READY, Context
from m3jit.vm.snapshots import Snapshot

if TYPE_CHECKING:
    from m3jit.durable.store import Store

LAYOUT = 2
WRONG = (TreeError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)


@dataclass(frozen=True)
class Version:
    """A committed version.  number: 1 for the first of its name.  time: ns since 1970, when it was committed.
    bytes: of the blocks that were new."""
    name: str
    number: int
    root: Ref
    time: int
    bytes: int

    def fields(self) -> list[Any]:
        """As they stand in the log."""
        return [self.name, self.number, self.root, self.time, self.bytes]


@dataclass(frozen=True)
class Restored:
    """What `Store.restore` put back.  notes: as given to `commit`.  snapshots: handles of those given to `commit`."""
    version: Version
    notes: Any
    snapshots: list[Any] = field(default_factory=list)


def program_hash(image: Any) -> bytes:
    """What tells programs apart: code, data and entry (not the names of files)."""
    h = hashlib.blake2b(digest_size=16, person=b"m3jit program")
    for part in (len(image.text).to_bytes(8, "little"), image.text, image.data, image.entry_pc.to_bytes(8, "little")):
        h.update(part)
    return h.digest()


def write(store: "Store", vm: Any, ctx: Context, name: str, notes: Any = None, snapshots: Sequence[Snapshot] = (),
          of: Snapshot | None = None, whole: bool = False) -> Version:
    """Commit a context as it is now, or a snapshot `of` one; whole: the machine, `ctx` is its main context, and `of`
    what one of its contexts is taking.  The caller holds the machine.

    StoreError: a value without a form on a disk; the store's errors."""
    vm._see_ends()
    taken = of if of is not None and (not whole or of.context == ctx.id) else None         # is it the main root?
    root, index = (ctx.capture(), ctx.index) if taken is None else (taken.root, taken.resume)
    newest = ctx.newest_snapshot if taken is None else taken.id
    ended = taken is None and ctx.status in (DONE, KILLED)
    standing = contexts.Standing(vm, of) if whole else None
    others = [] if standing is None else standing.roots.values()
    held = contexts.named_snapshots([root, *others, *(s.root for s in snapshots)], of)

    def build(writer: Any) -> Any:
        packing = roots.Packing(vm, writer)
        main = packing.root(root)
        named = [packing.snapshot(s) for s in held]
        if of is not None:
            named.append(packing.snapshot(of, of is taken))
        given = [packing.snapshot(s) for s in snapshots]
        stored = {s[0] for s in (*named, *given)}
        machine = None if standing is None else contexts.pack_machine(vm, packing, standing, stored)
        place = [packing.place(index), ended, newest or 0]
        return ["version", LAYOUT, program_hash(vm.image), place, main, named, given, packing.models,
                packing.model_handles(), packing.extension_handles(), machine, notes]
    try:
        return store.put(name, build)
    except (TypeError, ValueError) as e:
        raise StoreError(f"{store.path}: {brief(repr(name))}: cannot be stored: {e}") from None


def restore(store: "Store", vm: Any, version: Version, accept: Callable[[Any], None] | None = None) -> Restored:
    """`Store.restore`."""
    with vm._entered(), vm.signal:                     # what is pushed meanwhile goes behind what comes back
        if vm._closed or vm.batch is not None:
            raise StoreError(f"{vm.image.name}: this machine {'has ended' if vm._closed else 'takes part in a batch'}; "
                             f"restore into a new one")
        loaded = load(store, vm, version)
        if accept is not None:
            accept(loaded.notes)
        ctx = vm.main
        status = DONE if loaded.ended else READY
        stores = [*ctx.restoring(loaded.root), attribute(ctx, "index", loaded.index), attribute(ctx, "status", status),
                  attribute(ctx, "newest_snapshot", loaded.newest), attribute(ctx, "trap", None),
                  attribute(ctx, "waiting_for", None), attribute(vm, "_first_trap", None)]
        if loaded.machine is None:
            try:
                stores += loaded.keep()
            except OperandError as e:                  # snapshots hold too much
                raise StoreError(f"{store.path}: {brief(repr(version.name))} version {version.number}: "
                                 f"{e.message}") from None
            scheduler = vm.scheduler
            if loaded.ended:
                stores.append(scheduler.removing(ctx))
            elif ctx.id not in scheduler.contexts:
                stores += scheduler.adding(ctx, ctx.virtual_time)
        elif vm._runner not in (None, threading.get_ident()):
            raise StoreError(f"{vm.image.name}: another thread runs this machine; restore it before, or when it has "
                             f"stopped")
        else:
            stores += loaded.machine.stores
        loaded.settle()                                # before: what is restored must not meet numbers given out again
        commit(stores)
        return Restored(version, loaded.notes, loaded.given)


def load(store: "Store", vm: Any, version: Version, strangers: bool = False) -> "Loaded":
    """A version, completely read and checked, for a machine that is not changed yet.  strangers: contexts that its
    registers name may have been those of another run."""
    where = f"{store.path}: {brief(repr(version.name))} version {version.number}"
    tree = store.read(version)
    try:
        expect(isinstance(tree, list) and len(tree) >= 3 and tree[:1] == ["version"], "it is no version of a machine")
        expect(tree[1] == LAYOUT and len(tree) == 12,
               f"its layout is {tree[1]!r}, this version of m3jit reads {LAYOUT}")
        if tree[2] != program_hash(vm.image):
            raise StoreError(f"{where}: was written by another program (its code and data have the hash "
                             f"{_hex(tree[2])}, those of {vm.image.name} {_hex(program_hash(vm.image))}); restore it "
                             f"with the program that wrote it (of a model: with the options it had then, such as "
                             f"--temp, --max-tokens, --kv-type, --lora), or use another folder or name")
        return Loaded(store, vm, tree, strangers)
    except OperandError as e:
        raise StoreError(f"{where}: {e.message}") from None
    except WRONG as e:
        raise StoreError(f"{where}: cannot be restored: {e}; an earlier version may be whole") from None


class Loaded:
    """A version that was read.  `machine`: its rest, of a whole one.  Before it is put into the machine, `settle` makes
    what that keeps beside it agree with it; `keep` gives the stores of its window of snapshots."""

    def __init__(self, store: "Store", vm: Any, tree: list[Any], strangers: bool):
        _, _, _, place, main, named, given, models, model_handles, extension_handles, machine, self.notes = tree
        pc, self.ended, newest = place
        expect(self.ended.__class__ is bool, "no word on whether it has ended")
        reading = roots.Unpacking(vm, store, models, model_handles, extension_handles, strangers)
        self.index = reading.index(pc)
        reading.announce(named, given)
        self.root = reading.root(main)
        self.given = [reading.handle_to(s) for s in given]
        for snapshot in (*named, *given):
            reading.fill(snapshot, main)
        self.newest = reading.snapshot_id(newest)
        self.machine = None if machine is None else contexts.Whole(reading, machine, self.root, self.given)
        if self.machine is None:
            for root in (self.root, *reading.roots()):
                inputs.check_positions(vm, root)
        else:
            expect((self.machine.main is None) == self.ended, "no word on whether the main context has ended")
        self._reading = reading

    def snapshot(self) -> Snapshot:
        """The version as a snapshot of the machine."""
        return self._reading.as_snapshot(self.newest, self.root, self.index)

    def keep(self, newest: Snapshot | None = None) -> list[Change]:
        """The stores that keep alive what only other snapshots name, and `newest`.  OperandError: snapshots hold too
        much."""
        return self._reading.keep(newest)

    def settle(self) -> None:
        """The numbers that are given out from now on, handles of models and extensions."""
        m = self.machine
        self._reading.settle(*(() if m is None else (m.next_context, m.next_handle, m.next_snapshot)))


def _hex(digest: Any) -> str:
    return digest.hex() if isinstance(digest, bytes) else repr(digest)
