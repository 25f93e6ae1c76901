"""A machine beside the oracle: executes an operation, finds the first difference, walks to what is alive."""
from __future__ import annotations

import gc
import weakref
from typing import Any, Iterator

from m3jit.isa import cells, kv_pages
from m3jit.isa.cells import CellState
from m3jit.isa.kv import KVStream
from m3jit.isa.types import Tensor
from m3jit.vm import memory, reclaim
from m3jit.vm.machine_models import ModelState
from m3jit.vm.machine_system import ExtensionState
from m3jit.vm.snapshots import SnapshotHandle
from m3jit.vm.stopping import ATTENTION
from m3jit.vm.values import ContextRef, Handle
from m3jit.vm.vm import VM
from tests.vm.state_model.oracle import INPUTS, WINDOW_BYTES, Cells, Name, Oracle, Root, Stream, tensor
from tests.vm.state_model.programs import PROVIDER, SHARED, block_of, program, put_parameters, registry

NO_END = 10 ** 9


class Difference(AssertionError):
    """The machine and the oracle disagree."""


class Driven:
    """A machine that executes operations, and the names of the oracle for what its registers name."""

    def __init__(self, backend: str, window: int):
        self.program, self.starts, self.ends = program()
        self.vm = VM(self.program, backend=backend, threads=1, snapshot_window=window, models=PROVIDER,
                     extensions=registry())
        self.vm.set_source("TOKEN", INPUTS)
        self.written: list[str] = []
        self.vm.set_sink("OUTPUT", self.written.append)
        self.contexts: list[Any] = [self.vm.main]
        self.host: list[SnapshotHandle] = []
        self.lost_references = False                   # CPython may hold what nobody does (faults.Allocation)
        self.names: dict[tuple[str, int], int] = {}              # (what, the machine's number) -> the oracle's

    # -- executing --------------------------------------------------------------------------------------------------
    def execute(self, who: int, op: tuple, params: dict[str, Any], attention: bool = False) -> None:
        """One operation of a context.  attention: the stop word is raised meanwhile."""
        vm, ctx = self.vm, self.contexts[who]
        if op[0] == "host_fork":
            self.host.append(vm.fork())
            del self.host[:-2]
        elif op[0] == "host_abort":
            vm.abort(self.host[params["place"] % len(self.host)], params["resume"])
        elif op[0] == "interrupt":
            vm.interrupt(ctx)
        else:
            put_parameters(ctx, params)
            ctx.index = start = self.starts[block_of(op)]
            if attention:
                vm.stop_word.set(ATTENTION)
            while ctx.trap is None:
                vm.interpreter.run(ctx, NO_END)
                if vm.stop_word.raised:
                    vm.stop_word.take()
                if ctx.index in self.ends and ctx.index != start:      # one block ends where the next begins
                    break

    def settle(self) -> None:
        """See what the operation left: new contexts, ended ones."""
        alive = self.vm.scheduler.contexts
        for ctx in alive.values():
            if ctx not in self.contexts:
                self.contexts.append(ctx)
        for ctx in self.contexts:
            if ctx is not None:
                ctx.trap = None
        self.contexts = [c if c is not None and (c is self.vm.main or c.id in alive) else None for c in self.contexts]

    # -- comparing --------------------------------------------------------------------------------------------------
    def keeps_what_nobody_does(self, oracle: Oracle) -> bool:
        """Is a snapshot alive that is gone in the model, as CPython has lost a reference to what holds it?  An
        instruction can find it by a weak name, and what follows cannot be foretold."""
        return self.lost_references and \
            any(self.names.get(("snapshot", s.id)) not in oracle.snapshots for s in self.vm.snapshots.live())

    def difference(self, oracle: Oracle, whole: bool = True, who: int = 0, snapshot: int | None = None) -> str:
        """The first difference, "" for none.  whole: all contexts and snapshots; else `who` and one snapshot."""
        names = dict(self.names)
        found = self._difference(oracle, names, whole, who, snapshot)
        if not found:
            self.names = names
        return found

    def _difference(self, oracle: Oracle, names: dict, whole: bool, who: int, snapshot: int | None) -> str:
        if len(self.host) != len(oracle.host):
            return "snapshots of the host"
        for handle, number in zip(self.host, oracle.host):
            if _named("snapshot", handle.id, number, names) != number:
                return "snapshots of the host"
        have = self.contexts
        known = [c is not None for c in have]
        if known != [c is not None for c in oracle.contexts]:
            return f"contexts {known}, expected {[c is not None for c in oracle.contexts]}"
        for i, (ctx, want) in enumerate(zip(have, oracle.contexts)):
            if ctx is None or not (whole or i == who):
                continue
            found = _differs(ctx, want.root, names, oracle)
            newest = _named("snapshot", ctx.newest_snapshot, want.newest, names) if ctx.newest_snapshot else None
            if not found and newest != want.newest:
                found = f"newest snapshot {newest}, expected {want.newest}"
            if not found and bool(ctx.interrupt) != want.interrupt:
                found = "interrupt flag"
            if found:
                return f"context {i}: {found}"
        if "".join(self.written).encode() != oracle.written:
            return "written text"
        live = {names.get(("snapshot", s.id)): s for s in self.vm.snapshots.live()}
        if self.lost_references:
            live = {number: s for number, s in live.items() if number in oracle.snapshots}
        if set(live) != set(oracle.snapshots):
            return f"snapshots {sorted(map(str, live))}, expected {sorted(oracle.snapshots)}"
        for number, want in oracle.snapshots.items():
            if whole or number == snapshot:
                found = _differs(live[number].root, want, names, oracle)
                if found:
                    return f"snapshot {number}: {found}"
        shared = self.vm.main.memory.read(SHARED - (1 << 64), WINDOW_BYTES)
        return "" if shared == oracle.shared else "shared memory"


def _seen(value: Any, want: Any, names: dict) -> Any:
    """A register of the machine in the oracle's terms; a name not seen before is taken for the expected one."""
    if value.__class__ is Tensor:
        return tensor(value.data)
    what = {SnapshotHandle: "snapshot", ContextRef: "context", Handle: "state"}.get(value.__class__)
    if what is None:
        return value
    same = isinstance(want, Name) and want.what == what
    return Name(what, _named(what, value.id, want.id if same else None, names))


def _named(what: str, number: int, want: int | None, names: dict) -> int:
    """The oracle's number for the machine's; a new one is taken for the expected one, if that has no other."""
    taken = any(k[0] == what and n == want for k, n in names.items())
    if (what, number) not in names and want is not None and not taken:
        names[what, number] = want
    return names.get((what, number), -number)


def _registers(have: list, want: list, names: dict) -> str:
    for i, expected in enumerate(want):
        seen = _seen(have[i], expected, names)
        if seen != expected or seen.__class__ is not expected.__class__:
            return f"R{i} {seen}, expected {expected}"
    return ""


def _differs(have: Any, want: Root, names: dict, oracle: Oracle) -> str:
    """have: a context, or the root of a snapshot."""
    found = _registers(have.R, want.R, names)
    frame = have.frames
    for R, args in reversed(want.frames):
        if frame is None or frame.args != args:
            return "frames"
        found = found or _registers(frame.R, R, names)
        frame = frame.parent
    for i, expected in enumerate(want.S):
        seen = _seen(have.S[i], expected, names)
        if seen != expected:
            return f"S{i} {seen}, expected {expected}"
    if found or frame is not None:
        return found or "too many frames"
    for what, a, b in (("flags", have.flags, want.flags), ("random stream", have.rng, want.rng),
                       ("cursor", have.cursors.get("TOKEN", 0), want.position),
                       ("text", b"".join(have.texts.values()), want.text),
                       ("model", _seen(have.model, want.model, names), want.model),
                       ("arena", have.memory.arenas.get(0), want.arena)):
        if a != b:
            return f"{what} {a!r}, expected {b!r}"
    memory_ = have.memory
    pages = memory_.pages
    if (pages[3].read(0, WINDOW_BYTES) if 3 in pages else bytes(WINDOW_BYTES)) != want.memory:
        return "memory"
    if (pages[5].read(0, WINDOW_BYTES) if 5 in pages else bytes(WINDOW_BYTES)) != want.blocks:
        return "arena blocks"
    for p in pages.values():
        if p.count != len(p.map):
            return f"{len(p.map)} pages, counted as {p.count}"
    return _states(have, want, names, oracle)


def _states(have: Any, want: Root, names: dict, oracle: Oracle) -> str:
    left = set(want.states)
    for number, value in have.states.items():
        name = names.get(("state", number))
        if name is None and value.__class__ is ExtensionState and oracle.extension is not None:
            name = names["state", number] = oracle.extension.id
        if name not in left:
            return f"state {number} ({name}) should not be"
        left.remove(name)
        found = _state(value, want.states[name])
        if found:
            return f"state {name}: {found}"
    return f"states {left} are missing" if left else ""


def _state(value: Any, want: Any) -> str:
    if value.__class__ is KVStream and isinstance(want, Stream):
        for n in (0, 1):
            rows = want.layers.get(n)
            count = 0 if rows is None else len(rows[0])
            if value.length(n) != count:
                return f"{value.length(n)} rows of layer {n}, expected {count}"
            if count and any(a.tobytes() != b.tobytes() for a, b in zip(value.rows(n), rows)):
                return f"rows of layer {n}"
        return "" if value.dtype.name == want.kind else "type of the stream"
    if value.__class__ is CellState and isinstance(want, Cells):
        if set(value.shapes) != set(want.arrays):
            return f"cells {set(value.shapes)}"
        return next((f"cell {k}" for k, a in want.arrays.items() if value.array(*k).tobytes() != a.tobytes()), "")
    if value.__class__ is ExtensionState:
        return "" if want == ("ext", value.value) else f"extension {value.value}, expected {want}"
    return "" if value.__class__ is ModelState and want == "model" else f"a {value.__class__.__name__}"


# -- what is alive ----------------------------------------------------------------------------------------------------
PASSES = 8                         # of the garbage collector, at most


class Audit:
    """Counts the pages and blocks that machines make while it is entered."""
    CLASSES = ((kv_pages.Page, "kv page"), (cells.Memory, "cell memory"), (memory.Page, "memory page"))

    def __init__(self) -> None:
        self.past: list[dict[str, weakref.WeakSet]] = []         # what earlier machines made, until `check_gone`
        self.begin()

    def begin(self) -> None:
        """What is made from now on belongs to another machine."""
        self.made: dict[str, weakref.WeakSet] = {what: weakref.WeakSet() for _, what in self.CLASSES}
        self.past.append(self.made)

    def __enter__(self) -> "Audit":
        self.old = [c.__init__ for c, _ in self.CLASSES]
        for (c, what), old in zip(self.CLASSES, self.old):
            def init(self_: Any, *args: Any, _old: Any = old, _what: str = what, **kwargs: Any) -> None:
                _old(self_, *args, **kwargs)
                self.made[_what].add(self_)
            c.__init__ = init                          # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for (c, _), old in zip(self.CLASSES, self.old):
            c.__init__ = old                           # type: ignore[method-assign]

    def check_live(self, driven: Driven) -> None:
        """Every live page is reachable from a running context or a live snapshot."""
        reclaim.drain()
        reached = {id(p) for p in reachable(driven)} | kept()
        for what, made in self.made.items():
            lost = [p for p in made if id(p) not in reached]
            if lost:
                raise Difference(f"{len(lost)} {what}s are alive and belong to no context and no snapshot")

    def forget(self) -> None:
        """Do not ask of the machine that was played last whether it is gone."""
        self.past.pop()

    def check_gone(self) -> None:
        """After the machines are gone nothing is left."""
        # Finalisers hand over, and what holds a machine goes one pass before it.
        for _ in range(PASSES):
            if not gc.collect():
                break
            reclaim.drain()
        for what in self.made:
            left = sum(id(p) not in kept() for made in self.past for p in made[what])
            if left:
                raise Difference(f"{left} {what}s outlive their machine")
        self.past = [self.made]


def reachable(driven: Driven) -> Iterator[Any]:
    """Every page and block that a root of the machine leads to."""
    roots = [c for c in driven.contexts if c is not None] + [s.root for s in driven.vm.snapshots.live()]
    for ctx in driven.contexts:
        if ctx is not None and ctx.ahead is not None:  # what a region gave for it before its turn
            held = ctx.ahead.outcome.held
            for value in (*ctx.ahead.values, *held.commits.values()):
                yield from _parts(value)
            for value, block in held.cells.brought if held.cells is not None else ():
                yield from _parts(value)
                yield block
    for root in roots:
        for _, value in root.states.items():
            yield from _parts(value)
        for pages in root.memory.pages.values():
            yield from (p for _, p in pages.map.items())
    yield from (p for _, p in driven.vm.memory.shared.map.items())


def _parts(value: Any) -> Iterator[Any]:
    """The pages and blocks of a state."""
    if value.__class__ is KVStream:
        for layer in value.layers.values():
            yield from layer.pages
    elif value.__class__ is CellState:
        yield from (c.memory for c in value.cells.values())


def kept() -> set[int]:
    """Blocks that compiled regions keep for all machines: the zeros that a cell nobody has written reads as."""
    compiled = program()[0].__dict__.get("_compiled_regions", {})
    return {id(cell.memory) for _, points in compiled.values() for point in points.values() for region in point.variants
            for share in region.cells.shares for cell in share.zeros.values()}
