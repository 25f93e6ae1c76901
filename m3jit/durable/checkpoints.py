"""What CHECKPOINT_SAVE, CHECKPOINT_RESTORE, PERSIST and the WAL region do to a disk (m3jit.vm.checkpoints).

A checkpoint is the newest version in a store of its own, in the folder its PATH names: what a snapshot of the context
holds.  The versions before it stay until that store compacts itself.  PERSIST writes the whole machine to its store,
under the name "run": the snapshot, and where all other contexts stand.  A run that is started again with that store
goes on at its last version, or at the beginning where it has none; what it appended to the log behind that is dropped,
as it appends it again.  What a run that came to its end appended stays (`ended`), and the next run appends behind it.
The notes of such a version are the length of its log and what the run was given (m3jit.durable.given).
"""
from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

from m3jit.durable import given, roots, version
from m3jit.durable.errors import StoreError
from m3jit.durable.states import BY_CLASS, BY_KIND, expect, pack_tensor, unpack_tensor
from m3jit.durable.store import Restored, Store
from m3jit.durable.version import LAYOUT
from m3jit.errors import OperandError
from m3jit.isa.types import Tensor
from m3jit.vm.commit import Store as Change
from m3jit.vm.snapshots import Snapshot

NAME = "checkpoint"                # of the version in the folder of a CHECKPOINT_SAVE
RUN = "run"                        # of a machine's main context, and of its log, in its own store
PENDING = 1 << 20                  # bytes that were appended and are not on the disk, at most


class Checkpoints:
    """The disk of one machine.  store: where PERSIST writes; it stays open when the machine ends.

    given: what its run was given, as items of m3jit.durable.given, which versions note; `resume` then refuses one whose
    run was given something else.  None: not said, and not compared."""

    def __init__(self, store: Store | None = None, given: list[Any] | None = None):
        self.store, self.given = store, given
        self._open: dict[Path, Store] = {}             # of checkpoints, until the machine ends
        self._end = store.length(RUN) if store is not None else 0      # of the log
        self._pending: list[bytes] = []                # appended, not written yet
        self._held = 0                                 # bytes of these
        self._saved: dict[Path, str] = {}              # folder -> the checkpoint that this machine saved there last

    # -- CHECKPOINT_SAVE, CHECKPOINT_RESTORE ------------------------------------------------------------------------
    def _store(self, folder: Path) -> Store:
        found = self._open.get(folder)
        if found is None:
            found = self._open[folder] = Store.open(folder)
        return found

    def save(self, vm: Any, folder: Path, value: Any) -> int:
        """Write a `Snapshot`, a state or a tensor as the checkpoint in a folder; bytes of blocks written."""
        store = self._store(folder)
        if isinstance(value, Snapshot):
            written = version.write(store, vm, vm.main, NAME, of=value)
            self._saved[folder] = written.root.hash.hex()
            return written.bytes

        def build(writer: Any) -> Any:
            packing = roots.Packing(vm, writer)
            if isinstance(value, Tensor):
                content = ["tensor", pack_tensor(value, packing)]
            else:
                codec = BY_CLASS.get(value.__class__)
                if codec is None:
                    raise TypeError(f"a {value.kind_name} has no codec (m3jit.durable.states.CODECS)")
                content = [codec.kind, codec.pack(value, packing)]
            return ["value", LAYOUT, content, packing.models]
        try:
            return store.put(NAME, build).bytes
        except (TypeError, ValueError) as e:
            raise StoreError(f"{store.path}: cannot be stored: {e}") from None

    def newest(self, folder: Path) -> str:
        """What identifies the checkpoint in a folder: the hash of its tree."""
        if folder not in self._open and not folder.is_dir():
            raise StoreError(f"{folder}: no such folder; CHECKPOINT_SAVE makes one")
        return self._store(folder).latest(NAME).root.hash.hex()

    def load(self, vm: Any, folder: Path, which: str) -> tuple[Callable[[], list[Change]], Any]:
        """(what gives the stores that take the value, the value) of the checkpoint that `newest` named."""
        store = self._store(folder)
        found = next((v for v in reversed(store.versions.get(NAME, [])) if v.root.hash.hex() == which), None)
        if found is None:
            raise StoreError(f"{folder}: the checkpoint that this run read is not here; a replay has those that the "
                             f"run itself saved")
        tree = store.read(found)
        if isinstance(tree, list) and tree[:1] == ["version"]:
            loaded = version.load(store, vm, found, self._saved.get(folder) != which)
            snapshot = loaded.snapshot()

            def taking() -> list[Change]:
                stores = loaded.keep(snapshot)
                loaded.settle()
                return stores
            return taking, snapshot
        try:
            what, layout, (kind, content), models = tree
            expect(what == "value" and layout == LAYOUT, "it is no checkpoint")
            reading = roots.Unpacking(vm, store, models, [], [])
            unpack = unpack_tensor if kind == "tensor" else BY_KIND[kind].unpack
            return list, unpack(content, reading)
        except OperandError as e:
            raise StoreError(f"{folder}: {e.message}") from None
        except version.WRONG as e:
            raise StoreError(f"{folder}: cannot be restored: {e}") from None

    # -- PERSIST, WAL -----------------------------------------------------------------------------------------------
    def _own(self) -> Store:
        if self.store is None:
            raise OperandError("this machine has no store of its own; `m3jit run --store FOLDER` and VM(checkpoints="
                               "m3jit.Checkpoints(store)) give it one")
        return self.store

    def persist(self, vm: Any, snapshot: Snapshot) -> int:
        """Commit the machine as it is when a context has taken this snapshot, the log first."""
        store = self._own()
        self.flush()
        return version.write(store, vm, vm.main, RUN, [self._end, self.given], of=snapshot, whole=True).bytes

    def append(self, vm: Any, offset: int, data: bytes, durable: bool) -> int:
        """Add to the log.  offset: 0, or the log's length.  What is not durable is written when it gets too much.

        Whatever is raised: nothing was added."""
        self._own()
        if offset not in (0, self._end):
            raise OperandError(f"WAL is a log of {self._end} bytes: copy to its first address or to offset "
                               f"0x{self._end:x}, not to 0x{offset:x}")
        if durable or self._held + len(data) > PENDING:
            self._write(data)
        else:
            self._pending.append(data)
            self._held += len(data)
        self._end += len(data)
        return self._end

    def _write(self, data: bytes = b"") -> None:
        """Put what is pending on the disk, and `data` with it: all of it, or nothing."""
        if self._pending or data:
            self._own().append(RUN, self._end - self._held, b"".join([*self._pending, data]))
            self._pending, self._held = [], 0

    def flush(self) -> None:
        """Put what was appended on the disk."""
        self._write()

    def commit(self, vm: Any) -> None:
        """Commit the machine as it is now, between two instructions."""
        self.flush()
        self._own().commit(vm, RUN, [self._end, self.given])

    def resume(self, vm: Any) -> Restored | None:
        """Put the last version of the machine's store into a new machine; None when there is none: the run begins.

        What was appended to the log behind that version, or without one behind the last run that `ended`, goes.
        StoreError: it is of another program or model, or its run was given something else; nothing has changed."""
        store = self._own()
        back = None
        end = store.ended.get(RUN, 0)
        if RUN in store.names():
            back = store.restore(vm, RUN, accept=self._accept)
            end, noted = back.notes
            self.given = noted if self.given is None else given.kept(noted, self.given)
        if end < store.length(RUN):
            store.append(RUN, end, b"")
        self._end, self._pending, self._held = end, [], 0
        return back

    def _accept(self, notes: Any) -> None:
        """StoreError: a version with these notes is none that this machine goes on at."""
        store = self._own()
        if not isinstance(notes, list) or not notes or notes[0].__class__ is not int or \
                not 0 <= notes[0] <= store.length(RUN):
            raise StoreError(f"{store.path}: {RUN!r} was not written by a program; restore it with Store.restore")
        where = f"{store.path}: version {store.latest(RUN).number}"
        anew = f"name another folder, or forget it and begin anew (m3jit store {store.path} --remove {RUN})"
        if len(notes) != 2 or notes[1] is not None and not given.is_given(notes[1]):
            raise StoreError(f"{where}: does not say what its run was given, as another version of m3jit wrote it; "
                             f"{anew}")
        if self.given is None:
            return
        if notes[1] is None:
            raise StoreError(f"{where}: does not say what its run was given (it was not started by m3jit run), so it "
                             f"is not known whether this is the same run; {anew}")
        found = given.differences(notes[1], self.given)
        if found:
            raise StoreError(f"{where}: is of a run that was given something else: {'; '.join(found)}. Nothing has "
                             f"run. Give it the same to go on, {anew}")

    def ended(self) -> None:
        """The run came to its end: what it appended to the log is complete, and there is no version to go on from.

        The machine says so, when all its contexts have ended and what it wrote is complete (`VM.run`, `VM.close`)."""
        if self.store is not None:
            self.flush()
            self.store.end(RUN)

    def close(self) -> None:
        """Write what is pending; close the checkpoints (not the machine's store)."""
        try:
            self.flush()
        finally:
            for store in self._open.values():
                store.close()
            self._open.clear()
