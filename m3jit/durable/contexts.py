"""A whole machine as a tree: what lies outside the roots of its contexts, and the contexts beside the main one.

    [contexts, turns, SHARED, rings, inputs, locks, trap, numbers, window]

A machine that is made of it goes on with the same context at the same instruction, in the same order of turns.  A
context that waits goes on waiting, where that is for something the machine knows of.  Counters of instructions begin at
0: limits count from where a run goes on.
"""
from __future__ import annotations

import itertools
import time
from typing import Any, Iterable, Iterator, Sequence

from m3jit.durable import inputs
from m3jit.durable.states import expect, whole
from m3jit.errors import Trap
from m3jit.vm.audio_ring import AudioRing
from m3jit.vm.commit import Store, attribute
from m3jit.vm.context import DONE, KILLED, PRIORITIES, READY, WAITING, ByInput, Context, Root
from m3jit.vm.held import REGISTERS, distinct
from m3jit.vm.locks import Lock, Waiting
from m3jit.vm.memory import SHARED, ContextMemory, Pages
from m3jit.vm.scheduler import UNLIMITED
from m3jit.vm.snapshots import Snapshot, SnapshotHandle, SnapshotStore
from m3jit.vm.sources import QueueSource
from m3jit.vm.vm import MAIN
from m3jit.vm.waiting import Wait

MOST = 2 ** 62                     # a counter, a number
PIPELINES = ("MAMBA", "TRANSFORMER", "AUDIO")


def named_snapshots(roots: Iterable[Root], but: Snapshot | None = None) -> list[Snapshot]:
    """The live snapshots that roots name, and those these name, and so on; oldest first."""
    found: dict[int, Snapshot] = {} if but is None else {but.id: but}
    todo = list(roots)
    while todo:
        for snapshot in _names(todo.pop()):
            if snapshot.id not in found:
                found[snapshot.id] = snapshot
                todo.append(snapshot.root)
    return [found[n] for n in sorted(found) if found[n] is not but]


def _names(root: Root | Context) -> Iterator[Snapshot]:
    """The live snapshots in the registers of a root and its callers."""
    frame, banks = root.frames, [root.R]
    while frame is not None:
        banks.append(frame.R)
        frame = frame.parent
    for value in itertools.chain.from_iterable(banks):
        if value.__class__ is SnapshotHandle and (snapshot := value.get()) is not None:
            yield snapshot


def contexts_of(vm: Any) -> list[Context]:
    """The contexts of a machine that have not ended, in the scheduler's order; of one whose run failed: had not."""
    found = list(vm.scheduler.contexts.values() or vm.stopped)
    if vm.main not in found and vm.main.status not in (DONE, KILLED):          # it trapped: it may try again
        found.insert(0, vm.main)
    return found


class Standing:
    """Where the contexts of a machine stand, taken at one moment.  of: a snapshot that one of them is taking; it stands
    behind that instruction."""

    def __init__(self, vm: Any, of: Snapshot | None = None):
        self.contexts = contexts_of(vm)
        self.of, self.taking = of, None
        self.roots = {c.id: c.capture() for c in self.contexts}
        self.index = {c.id: c.index for c in self.contexts}
        self.newest = {c.id: c.newest_snapshot or 0 for c in self.contexts}
        if of is not None:
            self.taking, self.roots[of.context] = of.context, of.root
            self.index[of.context], self.newest[of.context] = of.resume, of.id


# -- writing ----------------------------------------------------------------------------------------------------------
def pack_machine(vm: Any, packing: Any, standing: Standing, stored: set[int]) -> Any:
    """A machine's tree.  stored: numbers of the snapshots that are stored with it."""
    shared = vm.memory.shared.share()
    return [[_pack_context(packing, standing, c) for c in standing.contexts], _pack_turns(vm, standing),
            packing.region(SHARED, shared) if shared.count else None, inputs.pack_rings(vm, packing),
            inputs.pack_inputs(vm, packing), _pack_locks(vm), _pack_trap(vm),
            [_peek(vm, "_ids"), _peek(vm.machine, "_handles"), _peek(vm.snapshots, "_ids")],
            [s.id if s is not None and s.id in stored else 0 for s in _window(vm.snapshots, standing.of)]]


def _window(store: SnapshotStore, of: Snapshot | None) -> list[Snapshot | None]:
    """The snapshots of the window, oldest first, and None where one was that a restored machine did not get.  of: the
    one that is being taken, which is its newest."""
    ring, at = list(store._ring), store._at
    if of is not None and store.window:
        ring[at:at + 1], at = [of], at + 1
    return ring[at:] + ring[:at]


def _pack_context(packing: Any, standing: Standing, ctx: Context) -> Any:
    """[number, priority, lent, pipeline, virtual time, its deadline, order, interrupt, quiet, wait, place, newest
    snapshot, root]; the last three are None of the main one, whose version they are."""
    wait = ctx.waiting_for if ctx.status == WAITING and ctx.id != standing.taking else None
    pending = ctx.interrupt
    out = [ctx.id, ctx.priority, ctx.lent, ctx.pipeline, ctx.virtual_time, ctx.virtual_deadline, ctx.order,
           0 if not pending else 1 if pending is True else 2, max(0, ctx.quiet_until - ctx.retired),
           None if wait is None else [wait.what, wait.external, list(wait.terms), _left(wait.until)]]
    if ctx.id == MAIN:
        return [*out, None, None, None]
    return [*out, packing.place(standing.index[ctx.id]), standing.newest[ctx.id],
            packing.writer.tree(packing.root(standing.roots[ctx.id]))]


def _pack_turns(vm: Any, standing: Standing) -> Any:
    """[order of the newest, who has the turn, instructions of the turn, has it competitors, turns, the slice that goes
    on: [context, budget (0: it ends here), done] or None]."""
    scheduler, so_far = vm.scheduler, vm.slice_so_far()
    here = {c.id for c in standing.contexts}
    slice_ = None
    if so_far is not None and so_far[0].id in here:
        ctx, budget, done = so_far
        if ctx.id == standing.taking:
            done += 1
            budget = budget if done < budget else 0
        slice_ = [ctx.id, budget, done]
    current = scheduler._current
    return [scheduler._order, current.id if current is not None and current.id in here else 0, scheduler._used,
            scheduler._alone, scheduler.turns, slice_]


def _left(until: float | None) -> int | None:
    """ns until a moment of `time.monotonic`, None: there is none."""
    return None if until is None else max(0, round((until - time.monotonic()) * 1e9))


def _pack_locks(vm: Any) -> Any:
    """[[[number, holder, times, [[context, ns left] ...]] ...], [[context, lock that it got] ...],
    [[context, ns left of its running instruction] ...]]."""
    table = vm.locks
    by_id = {c.id: c for c in contexts_of(vm)}
    return [[[key, lock.holder.id, lock.count, [[w.context.id, _left(w.until)] for w in lock.waiting]]
             for key, lock in table.locks.items() if lock.holder.id in by_id],
            [list(pair) for pair in sorted(table.granted) if pair[0] in by_id],
            [[number, _left(until)] for number, (at, until) in vm.machine._until.items()
             if number in by_id and at == by_id[number].retired]]


def _pack_trap(vm: Any) -> Any:
    """What the run will raise at its end: a trap of a context that has ended."""
    t = vm._first_trap
    if t is None or t.context == MAIN:                 # the main context stands at its trap, and may try again
        return None
    return [t.message, t.pc, None if t.line is None else list(t.line), t.instruction, t.register, t.context, t.retired,
            t.code]


def _peek(owner: Any, name: str) -> int:
    """The next number of an `itertools.count`, which stays the next."""
    number = next(getattr(owner, name))
    setattr(owner, name, itertools.count(number))
    return number


# -- reading ----------------------------------------------------------------------------------------------------------
class Whole:
    """A machine's tree, read and checked.  `stores`: what makes a machine of it; `main`: the main context, or None
    when it has ended.  root: of the main context.  given: handles of snapshots that the host gets."""

    def __init__(self, reading: Any, tree: Any, root: Root, given: Sequence[SnapshotHandle]):
        contexts, turns, shared, rings, sources, locks, trap, numbers, window = tree
        self.reading, self.vm = reading, reading.vm
        vm = self.vm
        limit = vm.context_limit
        expect(len(contexts) <= limit, f"it has {len(contexts)} contexts, more than this machine may have ({limit}, "
                                       f"context_limit); raise the limit: m3jit run --context-limit N, "
                                       f"VM(context_limit=...)")
        self.contexts: dict[int, Context] = {}
        self.stores: list[Store] = []
        self.main: Any = None
        for entry in contexts:
            self._context(entry)
        self.next_context, self.next_handle, self.next_snapshot = (whole(n, 1, MOST, "a number") for n in numbers)
        expect(not self.contexts or max(self.contexts) < self.next_context, "a context that comes later")
        self.rings, stores = inputs.unpack_rings(rings, reading)
        self.sources, more = inputs.unpack_inputs(sources, reading)
        self.stores += [*stores, *more, *self._locks(locks), *self._turns(turns)]
        self._waits(contexts)
        memory = reading.memory([] if shared is None else [shared], [], (SHARED,))
        pages = memory.pages.get(SHARED) or Pages()
        self.stores += [attribute(vm.memory, "shared", pages),
                        attribute(vm.memory, "_counted", MOST),        # so that it counts all pages again
                        attribute(vm.scheduler, "contexts", self.contexts),
                        attribute(vm, "_first_trap", _trap(trap)), attribute(vm, "_slicing", None),
                        *(attribute(c, "ahead", None) for c in vm.scheduler.contexts.values()),    # (see `remove`)
                        *self._window(window, root, given)]

    def _context(self, entry: list[Any]) -> None:
        """A context at its place."""
        number, priority, lent, pipeline, virtual, deadline, order, pending, quiet, _, pc, newest, root = entry
        whole(number, 1, MOST, "a context")
        expect(number not in self.contexts, f"context {number} twice")
        reading, vm = self.reading, self.vm
        top = len(PRIORITIES) - 1
        whole(pending, 0, 2, "an interrupt")
        fields = {"priority": whole(priority, 0, top, "a priority"), "lent": whole(lent, -1, top, "a priority"),
                  "virtual_time": whole(virtual, 0, MOST, "a time"), "order": whole(order, 0, MOST, "a place"),
                  "virtual_deadline": whole(deadline, 0, 2 * MOST, "a time"), "answered": None,
                  "raised": ByInput() if pending == 2 else bool(pending), "looked": None, "heard": frozenset()}
        expect(pipeline in PIPELINES, f"a pipeline {pipeline!r}")
        fields["pipeline"] = pipeline
        if number == MAIN:
            ctx = self.main = vm.main
        else:
            made = reading.root(reading.tree(root))
            ctx = Context(number, ContextMemory(vm.memory), vm.image.registers, vm.seed)
            fields |= {"index": reading.index(pc),
                       "newest_snapshot": reading.snapshot_id(whole(newest, 0, MOST, "a snapshot"))}
            ctx.restore(made)
        fields["quiet_until"] = ctx.retired + whole(quiet, 0, MOST, "instructions")
        self.stores += [attribute(ctx, name, value) for name, value in fields.items()]
        self.contexts[number] = ctx

    def of(self, number: Any) -> Context:
        """A context by its number."""
        expect(number in self.contexts, f"context {number!r}, which is not there")
        return self.contexts[number]

    def _locks(self, tree: Any) -> list[Store]:
        locks, granted, until = tree
        table: dict[int, Lock] = {}
        for key, holder, count, waiting in locks:
            queue = tuple(Waiting(self.of(c), _moment(left)) for c, left in waiting)
            whole(key, -2 ** 63, 2 ** 63, "a lock")
            table[key] = Lock(self.of(holder), whole(count, 1, MOST, "times"), queue)
        got = frozenset((self.of(c).id, whole(key, -2 ** 63, 2 ** 63, "a lock")) for c, key in granted)
        times = {self.of(c).id: (self.contexts[c].retired, _moment(left)) for c, left in until}
        return [attribute(self.vm.locks, "locks", table), attribute(self.vm.locks, "granted", got),
                attribute(self.vm.machine, "_until", times)]

    def _turns(self, tree: Any) -> list[Store]:
        order, current, used, alone, turns, cut = tree
        scheduler = self.vm.scheduler
        expect(alone.__class__ is bool, "no word on whether a context is alone")
        slice_ = None
        if cut is not None:
            number, budget, done = cut
            slice_ = self.of(number), whole(budget, 0, UNLIMITED, "a budget"), whole(done, 0, MOST, "instructions")
        return [attribute(scheduler, "_order", whole(order, 0, MOST, "a place")),
                attribute(scheduler, "_current", self.of(current) if current else None),
                attribute(scheduler, "_used", whole(used, 0, MOST, "instructions")),
                attribute(scheduler, "_alone", alone),
                attribute(scheduler, "turns", whole(turns, 0, MOST, "turns")), attribute(self.vm, "_cut", slice_)]

    def _waits(self, entries: list[Any]) -> None:
        for entry in entries:
            ctx, found = self.contexts[entry[0]], entry[9]
            wait = None if found is None else self._wait(ctx, *found)
            self.stores += [attribute(ctx, "status", READY if wait is None else WAITING),
                            attribute(ctx, "waiting_for", wait)]

    def _wait(self, ctx: Context, what: Any, external: Any, terms: list[Any], left: Any) -> Wait:
        """What a context waits for.  It looks again where that is a source of the host's own kind, or one that is not
        attached."""
        expect(isinstance(what, str) and external.__class__ is bool, "a wait for nothing")
        kind, *rest = terms or ("",)
        until, machine = _moment(left), self.vm.machine
        if kind == "interrupt":
            return machine.wait_of_wfi(ctx, until)
        if kind == "lock":
            return machine.wait_of_lock(ctx, whole(rest[0], -2 ** 63, 2 ** 63, "a lock"), until, str(rest[1]))
        if kind in ("item", "space"):
            expect(rest[0] in self.rings, f"a wait for ring {rest[0]!r}, which is not there")
            ring = self.rings[rest[0]]
            if kind == "space":
                return ring.wait_for_space()
            return ring.wait_for_item(whole(rest[1], 0, MOST, "a position"))
        source = next((s for s in self.sources.values() if s.name == rest[0]), None) if rest else None
        if kind == "input" and isinstance(source, QueueSource):
            return source.wait_for_item(whole(rest[1], 0, MOST, "a position"))
        if kind == "sound" and isinstance(source, AudioRing):
            at = None if rest[1] is None else whole(rest[1], 0, MOST, "a position")
            return source.wait_for_frames(at, whole(rest[2], 0, MOST, "frames"))
        return Wait(lambda: True, what, external)

    def _window(self, tree: list[Any], root: Root, given: Sequence[SnapshotHandle]) -> list[Store]:
        """The window: as many of its newest snapshots as the bound leaves room for, as on a machine that runs.
        ValueError: it leaves none for those in registers."""
        snapshots = self.vm.snapshots
        window, limit = snapshots.window, snapshots.bound.limit
        ring = [self.reading.snapshot(whole(n, 0, MOST, "a snapshot")) for n in tree][-window:] if window else []
        running = [root, *(c for c in self.contexts.values() if c is not self.main)]     # the main one, if it has ended
        named = [*(h.get() for h in given), *(s for r in running for s in _names(r))]
        let_go = snapshots.let_go
        while (held := _held(running, [*ring, *named])) > limit:
            expect(bool(ring), f"its snapshots hold {held} bytes that no running context has, more than the {limit} "
                               f"they may (snapshot_memory); raise the bound: m3jit run --snapshot-memory SIZE, "
                               f"VM(snapshot_memory=...)")
            half = (len(ring) + 1) // 2
            let_go = max([let_go, *(s.id for s in ring[:half] if s is not None)])
            ring = ring[half:]
        return [attribute(snapshots, "_ring", ring), attribute(snapshots, "_at", len(ring) % max(window, 1)),
                attribute(snapshots, "let_go", let_go)]


def _held(running: Sequence[Root | Context], snapshots: Iterable[Snapshot | None]) -> int:
    """Bytes that these snapshots hold and the running contexts do not."""
    kept, seen = {s for s in snapshots if s is not None}, set[int]()
    distinct(running, seen)
    return distinct((s.root for s in kept), seen) + REGISTERS * len(kept)


def _moment(left: Any) -> float | None:
    return None if left is None else time.monotonic() + whole(left, 0, MOST, "ns") / 1e9


def _trap(tree: Any) -> Trap | None:
    if tree is None:
        return None
    message, pc, line, instruction, register, context, retired, code = tree
    for text, may_miss in ((message, False), (instruction, False), (register, True)):
        expect(isinstance(text, str) or may_miss and text is None, "a trap without words")
    for n in (pc, context, retired):
        whole(n, -1, MOST, "a trap")
    expect(line is None or isinstance(line[0], str) and line[1].__class__ is int, "a line that is none")
    expect(code is None or code.__class__ is int, "a code that is no number")
    place = None if line is None else (line[0], line[1])
    return Trap(message, pc, place, instruction, register, context, retired, code)
