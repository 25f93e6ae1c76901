"""The model-based test of versioned state notices plausible defects: with each of them some random program differs."""
from __future__ import annotations

import functools
import weakref
from typing import Any, Callable

import pytest

from m3jit.isa import kv_pages
from m3jit.isa.kv import KVStream
from m3jit.isa.kv_pages import Claim
from m3jit.vm import snapshots
from m3jit.vm.context import Context
from m3jit.vm.machine import Machine
from m3jit.vm.memory import PAGE, PAGE_BITS, ContextMemory, Pages
from m3jit.vm.persistent import PersistentMap
from m3jit.vm.snapshots import SnapshotHandle, SnapshotStore
from tests.vm.state_model import faults
from tests.vm.state_model.machine import Difference
from tests.vm.state_model.run import play_chunk
from tests.vm.test_state_model import at_every_point

PROGRAMS = 240                     # are played before a defect counts as not noticed
NOTICED = {"flags do not go back": 70, "two versions write one place": 50, "a return writes into a shared frame": 20,
           "pages are shared without copying": 15}     # by programs from there on: these are played first
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")   # faults in finalisers


def without(attribute: str) -> Callable[[Any], None]:
    """Putting a root back forgets a part of it."""
    def mutate(patch: Any) -> None:
        real = Context.restoring
        patch.setattr(Context, "restoring", lambda *a: [s for s in real(*a) if s[2] != attribute])
    return mutate


def shared_registers(patch: Any) -> None:
    real = Context.capture

    def capture(self: Context) -> Any:
        root = real(self)
        root.R = self.R
        return root
    patch.setattr(Context, "capture", capture)


def registers_too(patch: Any) -> None:
    real = Context.restoring
    patch.setattr(Context, "restoring", lambda self, root, registers=True: real(self, root, True))


def every_position_is_free(patch: Any) -> None:
    def take(self: Any, first: int, stop: int) -> Claim:
        claim = Claim(stop)
        self.claims.append((stop, weakref.ref(claim)))
        return claim
    patch.setattr(kv_pages.Mark, "take", take)


def one_by_one(patch: Any) -> None:
    def commit(stores: Any) -> None:
        for call, target, key, value in list(stores):
            call(target, key, value)
    patch.setattr(snapshots, "commit_columns", lambda *columns: commit(zip(*columns)))


def pages_as_it_goes(patch: Any) -> None:
    def writing(self: Pages, offset: int, data: Any) -> list:
        view, at = memoryview(data).cast("B"), 0
        while at < len(view):
            start = (offset + at) & (PAGE - 1)
            n = min(PAGE - start, len(view) - at)
            self._own((offset + at) >> PAGE_BITS).data[start:start + n] = view[at:at + n]
            at += n
        return []
    patch.setattr(Pages, "writing", writing)
    patch.setattr(Pages, "filling", lambda self, offset, byte, size: writing(self, offset, bytes((byte,)) * size))


def frames_in_place(patch: Any) -> None:
    real = Machine.ret

    def ret(self: Machine) -> Any:
        frame = self.ctx.frames
        to = real(self)
        for i, n in enumerate(frame.args):
            frame.R[n] = self.ctx.R[i]
        return to
    patch.setattr(Machine, "ret", ret)


def states_are_kept(patch: Any) -> None:
    kept, real = [], Machine.state_out

    def state_out(self: Machine, ctx: Any, operand: Any, handle: Any, state: Any) -> Any:
        kept.append(state)
        return real(self, ctx, operand, handle, state)
    patch.setattr(Machine, "state_out", state_out)


def snapshots_are_kept(patch: Any) -> None:
    kept, real = [], SnapshotStore._place

    def place(self: SnapshotStore, snapshot: Any) -> Any:
        kept.append(snapshot)
        return real(self, snapshot)
    patch.setattr(SnapshotStore, "_place", place)


def rows_stay(patch: Any) -> None:
    patch.setattr(KVStream, "truncate", lambda self, length: self)


def same_object(cls: type) -> Callable[[Any], None]:
    return lambda patch: patch.setattr(cls, "share", lambda self: self)


MUTANTS: dict[str, Callable[[Any], None]] = {
    "the random stream does not go back": without("rng"), "flags do not go back": without("flags"),
    "half code points do not go back": without("texts"), "stream positions do not go back": without("cursors"),
    "states do not go back": without("states"), "memory does not go back": without("memory"),
    "calls do not go back": without("frames"), "the current model does not go back": without("model"),
    "a snapshot shares its registers": shared_registers, "RESTORE changes registers": registers_too,
    "maps are shared without copying": same_object(PersistentMap),
    "pages are shared without copying": same_object(Pages),
    "memory is shared without copying": same_object(ContextMemory),
    "two versions write one place": every_position_is_free,
    "truncating keeps rows": rows_stay, "a return writes into a shared frame": frames_in_place,
    "a named snapshot is dropped": lambda patch: patch.setattr(SnapshotHandle, "revived", lambda self: self),
    "captured names keep snapshots": lambda patch: patch.setattr(SnapshotHandle, "weakened", lambda self: self),
    "snapshots are never released": snapshots_are_kept, "states are never released": states_are_kept,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_is_noticed(name, monkeypatch):
    MUTANTS[name](monkeypatch)
    with pytest.raises((Difference, AttributeError, TypeError)):
        for first in (NOTICED.get(name, 0), *range(0, PROGRAMS, 5)):
            play_chunk(first, 5, 0.0, "interpreter")


@pytest.mark.parametrize("operation, mutate", [("fork", one_by_one), ("memset", pages_as_it_goes)])
def test_a_defect_that_an_interrupt_shows_is_noticed(operation, mutate, monkeypatch):
    mutate(monkeypatch)
    interrupt = functools.partial(faults.Interrupt, watched=faults.WATCHED | {__file__})
    with pytest.raises(AssertionError, match="interrupt at bytecode"):
        at_every_point("interpreter", operation, interrupt, 1, 3)
