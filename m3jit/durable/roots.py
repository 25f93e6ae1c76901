"""Roots of contexts as trees: registers, frames, states, memory, positions.

`Packing` writes, `Unpacking` reads and checks.  A value of a kind without a codec is a TypeError that names the
register and the kind.
"""
from __future__ import annotations

import itertools
import weakref
from typing import Any, Sequence

from m3jit.durable.blocks import CHUNK
from m3jit.durable.states import (BY_CLASS, BY_KIND, begin_page, expect, joined_page, make_page, pack_tensor,
                                  unpack_tensor, whole)
from m3jit.durable.tree import HASH, TREE, Ref, as_bytes, unpack
from m3jit.errors import UserError, brief
from m3jit.isa.control import MAX_CALL_DEPTH
from m3jit.isa.fields import BANK_LETTERS, BANK_SIZES, Reg
from m3jit.isa.types import F32, Tensor
from m3jit.vm.commit import Store
from m3jit.vm.context import Frame, Root
from m3jit.vm.memory import ARENA_LIMIT, ARENAS, IN_ROOT, ContextMemory, Pages
from m3jit.vm.memory import PAGE as MEMORY_PAGE
from m3jit.vm.memory import Page as MemoryPage
from m3jit.vm.snapshots import Snapshot, SnapshotHandle, new_snapshot
from m3jit.vm.values import VECTOR_LANES, ContextRef, Handle

MAX_SNAPSHOTS = 1 << 16
MAX_NUMBER = 2 ** 62

_tensor_refs: "weakref.WeakKeyDictionary[Tensor, Ref]" = weakref.WeakKeyDictionary()
_memory_names: "weakref.WeakKeyDictionary[MemoryPage, bytes]" = weakref.WeakKeyDictionary()


def model_hash(model: Any) -> str:
    """A model's content hash.  TypeError when it has none."""
    found = getattr(model, "content_hash", None)
    if not isinstance(found, str):
        raise TypeError(f"the model {brief(model.name)} has no content hash, so that a version that uses it could not "
                        f"be told from one of another model")
    return found


class Packing:
    """Writes roots of one machine.  `models`: those the program names and has loaded, and those its states hold:
    [content hash, reference, name, whether the program names it]."""

    def __init__(self, vm: Any, writer: Any):
        self.vm, self.writer = vm, writer
        self.models: list[list[Any]] = []
        self._model_at: dict[int, int] = {}
        self._named_by_program = set(vm.image.program.models.values()) if vm.image.program is not None else set()
        for key, model in vm._models.items():
            if key.partition("\0")[0] in self._named_by_program:
                self.model(model)

    # -- what states and tensors ask for ----------------------------------------------------------------------------
    def blob(self, tensor: Tensor, raw: memoryview) -> Ref:
        """A tensor's bytes in blocks; they are hashed once while it is alive."""
        known = _tensor_refs.get(tensor)
        if known is None or not self.writer.has(known.hash) or known.length > CHUNK:
            known = self.writer.blob(raw)
            _tensor_refs[tensor] = known
        return known

    def weight(self, tensor: Tensor) -> Any:
        """[model, name] for a weight of a loaded model, None for any other tensor."""
        if tensor.key is None:
            return None
        name = tensor.key.partition("/")[2]
        for model in self.vm._models.values():
            try:
                if model.tensor(name) is tensor:
                    return [self.model(model), name]
            except KeyError:
                continue
        return None

    def model(self, model: Any) -> int:
        """The number of a model in `models`."""
        at = self._model_at.get(id(model))
        if at is None:
            reference = next((key.partition("\0")[0] for key, m in self.vm._models.items() if m is model), "")
            at = self._model_at[id(model)] = len(self.models)
            self.models.append([model_hash(model), reference, model.name, reference in self._named_by_program])
        return at

    def extension_of(self, state: Any) -> Any:
        """The extension whose state this is."""
        for (number, major), handle in self.vm.machine._extension_handles.items():
            if handle.id == self._state_number:
                found = self.vm.extensions.find(number, (major, 0))
                if found is not None:
                    return found
        raise TypeError("the extension it belongs to is not known to this machine")

    def model_handles(self) -> list[Any]:
        """[model, handle] of models that the program names and these roots use."""
        by_id = {id(m): m for m in self.vm._models.values()}
        return [[self._model_at[key], handle.id] for key, handle in self.vm.machine._model_handles.items()
                if key in by_id and key in self._model_at]

    def extension_handles(self) -> list[Any]:
        return [[number, major, handle.id] for (number, major), handle in self.vm.machine._extension_handles.items()]

    # -- roots ------------------------------------------------------------------------------------------------------
    def place(self, index: int) -> int:
        """The byte offset of an instruction, or of the program's end."""
        pcs = self.vm.image.pcs
        return pcs[index] if index < len(pcs) else len(self.vm.image.text)

    def snapshot(self, s: Snapshot, main: bool = False) -> Any:
        """[number, parent, place, context, root]; main: its root is that of the version, and stands there."""
        return [s.id, s.parent, self.place(s.resume), s.context, None if main else self.writer.tree(self.root(s.root))]

    def root(self, root: Root) -> Any:
        """[R, V, S, frames, flags, random stream, states, memory, arenas, positions, texts, current model]."""
        frames, frame = [], root.frames
        while frame is not None:
            frames.append([self.bank(0, frame.R), self.bank(1, frame.V), frame.back, bytes(frame.args)])
            frame = frame.parent
        self._named = root
        return [self.bank(0, root.R), self.bank(1, root.V), self.bank(2, root.S), frames, root.flags, root.rng,
                [self.state(n, s) for n, s in root.states.items()],
                [self.region(r, p) for r, p in sorted(root.memory.pages.items())],
                [[n, size] for n, size in sorted(root.memory.arenas.items())],
                [[source, at] for source, at in sorted(root.cursors.items())],
                [[sink, held] for sink, held in sorted(root.texts.items())],
                None if root.model is None else [root.model.id, root.model.what]]

    def bank(self, bank: int, values: list[Any]) -> list[Any]:
        out = []
        for i, value in enumerate(values):
            if value is not None:
                try:
                    out.append([i, self.value(value)])
                except TypeError as e:
                    raise TypeError(f"{BANK_LETTERS[bank]}{i} holds what has no form on a disk: {e}") from None
        return out

    def value(self, value: Any) -> Any:
        """A register's value."""
        kind = value.__class__
        if kind is int or kind is float:
            return value
        if kind is Tensor:
            return ["tensor", pack_tensor(value, self)]
        if kind is Handle:
            return ["handle", value.id, value.what]
        if kind is SnapshotHandle:
            return ["snapshot", value.id]
        if kind is ContextRef:
            return ["context", value.id]
        raise TypeError(f"a {kind.__name__}")

    def state(self, number: int, state: Any) -> Any:
        codec = BY_CLASS.get(state.__class__)
        self._state_number = number
        try:
            if codec is None:
                raise TypeError(f"a {getattr(state, 'kind_name', state.__class__.__name__)} has no codec "
                                f"(m3jit.durable.states.CODECS)")
            return [number, codec.kind, codec.pack(state, self)]
        except TypeError as e:
            raise TypeError(f"state #{number}{self._names_of(number)}: {e}") from None

    def _names_of(self, number: int) -> str:
        names = [f"{letter}{i}" for letter, bank in zip(BANK_LETTERS, (self._named.R, self._named.V, self._named.S))
                 for i, v in enumerate(bank) if v.__class__ is Handle and v.id == number]
        return f", which {', '.join(names)} names" if names else ""

    def region(self, region: int, pages: Pages) -> Any:
        numbers, names = [], []
        for number, page in pages.map.items():
            known = _memory_names.get(page)            # captured, so it is never written again
            if known is None or not self.writer.has(known):
                known = _memory_names[page] = self.writer.item(bytes(page.data))
            numbers.append(number.to_bytes(8, "little"))
            names.append(known)
        return [region, self.writer.blob(b"".join(numbers)), self.writer.table(b"".join(names), MEMORY_PAGE)]


class Unpacking:
    """Reads roots for one machine.  Nothing of the machine changes before `settle`.

    ValueError, KeyError, TypeError, OperandError: a tree that is none, another model, more bytes than the machine
    takes."""

    def __init__(self, vm: Any, store: Any, models: list[Any], model_handles: list[Any], extension_handles: list[Any],
                 strangers: bool = False):
        """strangers: contexts that it names may have been those of another run."""
        self.vm, self.store, self.strangers = vm, store, strangers
        self._main_taken = False
        self._renamed: dict[int, int] = {}             # contexts of another run -> numbers that none has had here
        self._fresh = next(vm._ids)
        vm._ids = itertools.count(self._fresh)
        self.left = 2 * vm.xp.limit_bytes              # bytes that may still be allocated
        self._pages: dict[tuple[bytes, int], Any] = {}
        self._begun: dict[Any, Any] = {}               # (`joined_page`)
        self._blobs: dict[Ref, bytes] = {}
        self.tensors: dict[tuple, Tensor] = {}         # by content, type and shape
        self._models = [self._found(*m) for m in models]
        self._numbers: dict[int, int] = {}             # handle as stored -> here
        self._next = next(vm.machine._handles)
        vm.machine._handles = itertools.count(self._next)
        self._contexts = self._top = 0
        self._taken = {h.id for known in (vm.machine._model_handles, vm.machine._extension_handles)
                       for h in known.values()}
        self._snapshots: dict[int, Snapshot] = {}
        self._released: dict[int, SnapshotHandle] = {}
        self._model_handles: list[tuple[Any, Handle]] = []
        for at, number in model_handles:
            known = vm.machine._model_handles.get(id(self.model(at)))
            if known is not None:
                self._numbers[whole(number, 1, MAX_NUMBER, "a handle")] = known.id
            self._model_handles.append((self.model(at), known or Handle(self.number(number), "model")))
        self._extension_handles: list[tuple[tuple[int, int], Handle]] = []
        for number, major, handle in extension_handles:
            known = vm.machine._extension_handles.get((number, major))
            if known is not None:
                self._numbers[whole(handle, 1, MAX_NUMBER, "a handle")] = known.id
            key = whole(number, 0, 2 ** 32, "an extension"), whole(major, 0, 2 ** 32, "a version")
            self._extension_handles.append((key, known or Handle(self.number(handle), "extension state")))

    def _found(self, digest: Any, reference: Any, name: Any, by_program: Any) -> Any:
        """The model of a content hash: of a model that the program names, what it names now, of another one a model
        that is loaded, or what the reference names now."""
        named = self.vm.image.program.models.values() if self.vm.image.program is not None else ()
        loaded = {key.partition("\0")[0] for key in self.vm._models}
        wrong = "nothing is"
        for r in named if by_program else (*loaded, reference):
            try:
                model = self.vm.load_model(r)
            except UserError as e:
                wrong = str(e)
                continue
            if model_hash(model) == digest:
                return model
            wrong = f"{r} has the hash {model_hash(model)}"
        raise ValueError(f"it uses the model {brief(repr(name))} with the content hash {digest}, which is not here "
                         f"({wrong}); run it with the model it was written with")

    # -- what states and tensors ask for ----------------------------------------------------------------------------
    def spend(self, nbytes: int) -> None:
        """Note an allocation.  ValueError when all of them are more than the machine takes."""
        self.left -= nbytes
        if self.left < 0:
            raise ValueError(f"it needs more memory than the {2 * self.vm.xp.limit_bytes} bytes this machine takes")

    def data(self, content: Any, nbytes: int) -> bytes:
        """The `nbytes` bytes of a tree's bytes or reference."""
        if isinstance(content, bytes):
            expect(len(content) == nbytes, f"{len(content)} bytes where {nbytes} belong")
            return content
        expect(isinstance(content, Ref) and not content.item and content.length == nbytes, f"no {nbytes} bytes")
        found = self._blobs.get(content)
        if found is None:
            self.spend(nbytes)
            found = self._blobs[content] = self.store.bytes_of(content, nbytes)
        return found

    def names(self, table: Ref) -> bytes:
        """The names of a table's items."""
        expect(isinstance(table, Ref) and table.item > 0 and table.length % HASH == 0, "no table")
        self.spend(table.length)
        return self.store.bytes_of(table, table.length)

    def page(self, name: bytes, rows: int, like: Any, place: tuple[int, int]) -> Any:
        """(page of a stream, claim of its rows); pages with the same content are one, and so are those of one place
        (layer, number) of which one has the first rows of the other."""
        key = (name, rows)
        if rows == 64 and key in self._pages:
            return self._pages[key]
        raw = self.store.bytes_of(Ref(name, like.page_bytes), like.page_bytes)
        made = joined_page(raw, rows, like, place, self._begun)
        if made is None:
            self.spend(like.page_bytes)
            made = make_page(raw, rows, like)
            begin_page(made[0], rows, like, place, self._begun)
        self._pages[key] = made
        return made

    def model(self, at: Any) -> Any:
        return self._models[whole(at, 0, len(self._models) - 1, "a model")]

    def weight(self, at: Any, name: Any) -> Tensor:
        return self.model(at).tensor(name)

    def extension(self, number: Any, major: Any) -> Any:
        found = self.vm.extensions.find(number, (major, 0))
        expect(found is not None and found.state,
               f"extension {number!r} version {major!r} is not known to this machine")
        return found

    # -- numbers ----------------------------------------------------------------------------------------------------
    def number(self, stored: Any) -> int:
        """A handle's number on this machine: the same, unless that is the number of a model or an extension here."""
        whole(stored, 1, MAX_NUMBER, "a handle")
        found = self._numbers.get(stored)
        if found is None:
            found = self._numbers[stored] = self._next if stored in self._taken else stored
            self._taken.add(found)
            self._next = max(self._next, found + 1)
        return found

    def context(self, stored: Any) -> int:
        """A context's number here: the same; strangers: one of its own, that no context has had here."""
        whole(stored, 1, MAX_NUMBER, "a context")
        if self.strangers:
            stored = self._renamed.setdefault(stored, self._fresh + len(self._renamed))
        self._contexts = max(self._contexts, stored)
        return stored

    def tree(self, ref: Any) -> Any:
        """A tree that has blocks of its own."""
        expect(isinstance(ref, Ref) and ref.item == TREE, "no tree")
        self.spend(ref.length)
        return unpack(self.store.bytes_of(as_bytes(ref), ref.length))

    def index(self, pc: Any) -> int:
        """The instruction at a byte offset, or the end of the program."""
        found = self.vm.image.index_of.get(pc, len(self.vm.image.pcs) if pc == len(self.vm.image.text) else None)
        expect(found is not None, f"the place {pc!r} is not the start of an instruction")
        return found

    def announce(self, named: list[Any], given: list[Any]) -> None:
        """Make the snapshots that were stored, still empty."""
        expect(len(named) + len(given) <= MAX_SNAPSHOTS, "too many snapshots")
        store = self.vm.snapshots
        stored = {s[0]: whole(s[0], 1, MAX_NUMBER, "a snapshot") for s in (*named, *given)}
        taken = {s.id for s in store.live()}
        for number in sorted(taken & stored.keys()):   # these get a number that no other has, stored or live
            stored[number] = next(n for n in iter(store.new_id, 0) if n not in stored)
        for number, parent, pc, context, _ in (*named, *given):
            whole(parent, 0, MAX_NUMBER, "a snapshot")
            resume = self.index(pc)
            if number not in self._snapshots:
                here = stored[number]
                self._top = max(self._top, here)
                taken_by = self.context(context) if context else 0
                self._snapshots[number] = new_snapshot(here, stored.get(parent, parent), None, resume, taken_by, store)

    def handle_to(self, snapshot: list[Any]) -> SnapshotHandle:
        """A strong handle of a stored snapshot."""
        found = self._snapshots[snapshot[0]]
        return found.handle()

    def snapshot_id(self, stored: Any) -> int | None:
        """The number of a stored snapshot here; None for one that was not stored."""
        found = self._snapshots.get(stored)
        return found.id if found is not None else None

    def snapshot(self, stored: int) -> Snapshot | None:
        """The stored snapshot of that number."""
        return self._snapshots.get(stored)

    def keep(self, newest: Snapshot | None = None) -> list[Store]:
        """The stores (m3jit.vm.commit) that put the stored snapshots, and `newest` behind them, into the machine's
        window, which is what keeps alive those that only others name.  OperandError: they hold too much."""
        found = sorted((s for s in self._snapshots.values() if s is not newest), key=lambda s: s.id)
        return self.vm.snapshots.keep(found if newest is None else [*found, newest])

    def as_snapshot(self, number: int | None, root: Root, index: int) -> Snapshot:
        """The stored snapshot of that number here, else a new one of this root."""
        for found in self._snapshots.values():
            if found.id == number:
                return found
        store = self.vm.snapshots
        return new_snapshot(store.new_id(), 0, root, index, 0 if self.strangers else self.vm.main.id, store)

    def fill(self, snapshot: list[Any], main: Any) -> None:
        """Give a snapshot its root.  main: the tree of the version's."""
        found = self._snapshots[snapshot[0]]
        if found.root is None:
            if snapshot[4] is None:
                expect(not self._main_taken, "two snapshots that are the version itself")
                self._main_taken = True
            found.root = self.root(main if snapshot[4] is None else self.tree(snapshot[4]))

    def roots(self) -> list[Root]:
        """Those of the stored snapshots."""
        return [s.root for s in self._snapshots.values()]

    def settle(self, context: int = 0, handle: int = 0, snapshot: int = 0) -> None:
        """What the machine keeps beside its contexts' roots: numbers it must not give out again (those before the given
        ones neither), handles of models."""
        vm, machine = self.vm, self.vm.machine
        machine._handles = itertools.count(max(self._next, handle))
        for model, handle in self._model_handles:
            machine._model_handles[id(model)] = handle
        for key, handle in self._extension_handles:
            machine._extension_handles[key] = handle
        vm.snapshots._ids = itertools.count(max(vm.snapshots.new_id(), self._top + 1, snapshot))
        vm._ids = itertools.count(max(next(vm._ids), self._contexts + 1, context))
        vm.snapshots.know(self._snapshots.values())

    # -- roots ------------------------------------------------------------------------------------------------------
    def root(self, tree: list[Any]) -> Root:
        """A root; its handles of snapshots are weak."""
        R, V, S, frames, flags, rng, states, memory, arenas, cursors, texts, model = tree
        root = Root()
        root.R, root.V, root.S = self.bank(0, R), self.bank(1, V), self.bank(2, S)
        root.frames = self._frames(frames)
        root.flags, root.rng = whole(flags, 0, 4, "flags"), whole(rng, -2 ** 63, 2 ** 63 - 1, "a random stream")
        root.cursors = {self._text(s): whole(at, 0, MAX_NUMBER, "a position") for s, at in cursors}
        root.texts = {self._text(s): self._held(held) for s, held in texts}
        root.model = None if model is None else Handle(self.number(model[0]), self._text(model[1]))
        root.states = self.vm.main.states.__class__()
        for number, kind, content in states:
            expect(kind in BY_KIND, f"a state of kind {kind!r}, which this version of m3jit does not know")
            root.states.set(self.number(number), BY_KIND[kind].unpack(content, self))
        root.memory = self.memory(memory, arenas)
        return root

    def bank(self, bank: int, items: list[Any]) -> list[Any]:
        out: list[Any] = [None] * BANK_SIZES[bank]
        used = self.vm.image.registers
        for i, content in items:
            out[whole(i, 0, (255 if bank == 0 else BANK_SIZES[bank]) - 1, "a register")] = self.value(content, bank)
            used.cover(Reg(bank, i))
            if out[i].__class__ is SnapshotHandle:
                used.may_name_snapshots(i)
        return out

    def value(self, tree: Any, bank: int) -> Any:
        if tree.__class__ in (int, float):
            expect(bank == 0, "a number in a vector or state register")
            return tree
        what, *rest = tree
        if what == "tensor":
            found = unpack_tensor(rest[0], self)
            expect(bank == 0 or bank == 1 and found.dtype is F32 and found.shape == (VECTOR_LANES,),
                   "a tensor where none can be")
            return found
        expect(bank != 1, f"a {what!r} in a vector register")
        if what == "handle":
            return Handle(self.number(rest[0]), self._text(rest[1]))
        expect(bank == 0, f"a {what!r} in a state register")
        if what == "context":
            return ContextRef(self.context(rest[0]))
        expect(what == "snapshot", f"a value of kind {what!r}")
        return self._snapshot_handle(whole(rest[0], 1, MAX_NUMBER, "a number"))

    def _snapshot_handle(self, number: int) -> SnapshotHandle:
        snapshot = self._snapshots.get(number)
        if snapshot is not None:
            return snapshot.name
        if number not in self._released:
            self._released[number] = SnapshotHandle(None, number, _nothing)
        return self._released[number]

    def _frames(self, frames: list[Any]) -> Frame | None:
        expect(len(frames) <= MAX_CALL_DEPTH, f"{len(frames)} open calls")
        out = None
        for R, V, back, args in reversed(frames):
            expect(isinstance(args, bytes) and len(args) <= 12 and 255 not in args, "parameters of a call")
            whole(back, 0, len(self.vm.image.pcs), "a place to return to")
            out = Frame(self.bank(0, R), self.bank(1, V), back, tuple(args), out)
        return out

    def memory(self, regions: list[Any], arenas: list[Any], allowed: Sequence[int] = IN_ROOT) -> ContextMemory:
        """Regions (of those that are allowed) and arenas."""
        out = ContextMemory(self.vm.memory)
        for region, numbers, table in regions:
            expect(region in allowed and region not in out.pages, f"region {region!r}")
            expect(isinstance(table, Ref) and table.item == MEMORY_PAGE, "pages of memory of another size")
            names = self.names(table)
            raw = self.data(numbers, len(names) // HASH * 8)
            pages = out.pages[region] = Pages()
            for i in range(0, len(raw) // 8):
                number = int.from_bytes(raw[8 * i:8 * i + 8], "little")
                expect(number < 1 << 48 and pages.map.get(number) is None, f"page {number} of region {region}")
                self.spend(MEMORY_PAGE)
                content = self.store.bytes_of(Ref(names[HASH * i:HASH * i + HASH], MEMORY_PAGE), MEMORY_PAGE)
                pages.map.set(number, MemoryPage(pages.map.owner(), bytearray(content)))
                pages.count += 1
        out.arenas = {whole(n, 0, ARENAS - 1, "an arena"): whole(size, 0, ARENA_LIMIT, "an arena's bytes")
                      for n, size in arenas}
        return out

    @staticmethod
    def _text(value: Any) -> str:
        expect(isinstance(value, str), f"{value!r} where a name belongs")
        return value

    @staticmethod
    def _held(value: Any) -> bytes:
        expect(isinstance(value, bytes) and len(value) <= 3, "an unfinished code point")
        return value


def _nothing() -> None:
    """Stands for the weak reference of a snapshot that is gone."""
