"""A context: typed registers, call frames and the roots of everything that rolls back.

`capture` puts the root aside and `restore` puts one back; both take time that depends on the number of registers, not
on the size of the state.  Outside the root: the instruction pointer, priority, deadline, status, counters.
"""
from __future__ import annotations

from typing import Any, Iterable

from m3jit.ir.eager_scalar import NOT_COMPARED
from m3jit.isa.fields import GPR, SPECIAL, STATE, VEC, Reg
from m3jit.vm.commit import Store, attribute, commit
from m3jit.vm.memory import ContextMemory
from m3jit.vm.persistent import PersistentMap
from m3jit.vm.reclaim import leavings
from m3jit.vm.snapshots import SnapshotHandle, revive, weaken, without_handles

DEFAULT_SEED = 0x9E3779B97F4A7C15 - 2 ** 64      # the random stream's state is a signed 64-bit integer
GREEN, BLUE, RED = range(3)
PRIORITIES = ("GREEN", "BLUE", "RED")
QUIET = 64                         # instructions a context gets done between two interrupts by input
READY, WAITING, DONE, TRAPPED, KILLED, PARKED = "ready", "waiting", "done", "trapped", "killed", "parked"


class ByInput:
    """An interrupt because of one item of an input; every item is one of its own."""
    __slots__ = ()


class Frame:
    """A caller's registers while its callee runs; immutable, shared by snapshots and child contexts."""
    __slots__ = ("R", "V", "back", "args", "parent", "depth", "_names", "_weak")

    def __init__(self, R: list, V: list, back: int, args: tuple[int, ...], parent: "Frame | None"):
        self.R, self.V, self.back, self.args, self.parent = R, V, back, args, parent
        self.depth: int = 1 + (parent.depth if parent else 0)
        self._names: bool | None = None
        self._weak: Frame | None = None

    @property
    def names_snapshots(self) -> bool:
        """Is a snapshot handle in this frame or a caller's?"""
        if self._names is None:
            self._names = SnapshotHandle in set(map(type, self.R)) or bool(self.parent and self.parent.names_snapshots)
        return self._names

    def weakened(self) -> "Frame":
        """The chain as a snapshot keeps it: snapshots named in it are not kept alive."""
        if not self.names_snapshots:
            return self
        if self._weak is None:
            self._weak = self._copy(weaken, self.parent and self.parent.weakened())
            self._weak._weak = self._weak
        return self._weak

    def revived(self) -> "Frame":
        """The chain as a running context keeps it."""
        return self._copy(revive, self.parent and self.parent.revived()) if self.names_snapshots else self

    def _copy(self, change: Any, parent: "Frame | None") -> "Frame":
        R = list(self.R)
        change(R, len(R))
        return Frame(R, self.V, self.back, self.args, parent)


class Root:
    """What a snapshot holds of a context.  R: the general registers that the program uses; the others hold nothing."""
    __slots__ = ("R", "V", "S", "frames", "flags", "rng", "states", "memory", "cursors", "texts", "model")


class Context:
    """One thread of execution inside a machine."""
    __slots__ = ("id", "index", "used", "R", "V", "S", "frames", "flags", "rng", "states", "memory", "cursors", "texts",
                 "model", "priority", "lent", "pipeline", "deadline", "virtual_time", "virtual_deadline", "order", "retired",
                 "status", "waiting_for", "raised", "answered", "quiet_until", "looked", "heard", "leave", "budget",
                 "trap", "newest_snapshot", "parks", "parked", "ahead")

    def __init__(self, id: int, memory: ContextMemory, seed: int = DEFAULT_SEED, used: int = 256):
        self.id, self.index = id, 0
        self.used = used                                 # general registers from this number on are never written
        self.R: list[Any] = [None] * 256
        self.V: list[Any] = [None] * 32
        self.S: list[Any] = [None] * 64
        self.frames: Frame | None = None
        self.flags = NOT_COMPARED
        self.rng = seed
        self.states = PersistentMap()                    # handle number -> state value
        self.memory = memory
        self.cursors: dict[str, int] = {}                # source -> position of the next item (replaced, never changed)
        self.texts: dict[str, bytes] = {}                # sink -> bytes of an unfinished code point (likewise)
        self.model: Any = None                           # Handle of the current model
        self.priority, self.pipeline = GREEN, "TRANSFORMER"
        self.lent = -1                                   # the highest priority of who waits for a lock it holds
        self.deadline = -1                               # absolute ns, -1: none
        self.virtual_time = self.virtual_deadline = self.order = self.retired = 0
        self.status, self.waiting_for = READY, None
        self.raised: bool | ByInput = False              # the newest interrupt; ByInput: because of unread input ..
        self.answered: ByInput | None = None             # .. and the one whose input has been read: it is over
        self.quiet_until = 0                             # instructions before which input is no interrupt (QUIET)
        self.looked: Any = None                          # (retired, index) behind an IF_INTERRUPT that saw none
        self.heard: frozenset[int] = frozenset()         # signals that came since it got something done
        self.leave = False                               # ask the interpreter to return to the scheduler
        self.budget = 0                                  # instructions left in this slice, while in a slow path
        self.trap: Any = None
        self.newest_snapshot: Any = None                 # handle number of the tree's current node
        self.parks, self.parked = False, None            # stop before a compiled region; the region it stands at
        self.ahead: Any = None                           # what a region gave for it before its turn (m3jit.vm.ahead)

    @property
    def urgency(self) -> int:
        """The priority it runs with: its own, or an inherited one."""
        return max(self.priority, self.lent)

    @property
    def interrupt(self) -> bool | ByInput:
        """The pending interrupt, or False."""
        return False if self.raised is self.answered else self.raised

    @interrupt.setter
    def interrupt(self, value: bool | ByInput) -> None:
        self.raised = value

    def sees_interrupt(self, retired: int | None = None) -> bool:
        """Would IF_INTERRUPT see an interrupt now, or when that many instructions were done?"""
        pending = self.interrupt
        return pending is True or bool(pending) and (self.retired if retired is None else retired) >= self.quiet_until

    def looks_again(self) -> bool:
        """Go back in front of IF_INTERRUPT, if that was the last thing done in this slice, saw no interrupt, and would
        see one now.  That look has then not been: whatever happens before the next one is in front of the instruction,
        in a replay too."""
        if self.looked != (self.retired, self.index) or not self.sees_interrupt(self.retired - 1):
            return False
        self.retired, self.index, self.looked = self.retired - 1, self.index - 1, None
        return True

    # -- roots ------------------------------------------------------------------------------------------------------
    def capture(self) -> Root:
        """The root as it is now; later writes of this context do not reach it."""
        r = Root()
        r.R, r.V, r.S = self.R[:self.used], list(self.V), list(self.S)
        weaken(r.R, self.used)
        r.frames = self.frames.weakened() if self.frames else None
        r.flags, r.rng, r.cursors, r.texts, r.model = self.flags, self.rng, self.cursors, self.texts, self.model
        r.states, r.memory = self.states.share(), self.memory.share()
        return r

    def restore(self, root: Root, registers: bool = True, more: Iterable[Store] = ()) -> None:
        """Make `root` the state of this context and do `more` stores with it, all at once or not at all; the root can be
        restored again.  registers False: memory and state only."""
        commit([*self.restoring(root, registers), *more])

    def restoring(self, root: Root, registers: bool = True) -> list[Store]:
        """The stores (m3jit.vm.commit) of `restore`."""
        stores = [attribute(self, "states", root.states.share()), attribute(self, "memory", root.memory.share()),
                  attribute(self, "rng", root.rng), attribute(self, "cursors", root.cursors),
                  attribute(self, "texts", root.texts), attribute(self, "model", root.model)]
        if registers:
            R = root.R + [None] * (len(self.R) - len(root.R))
            revive(R, self.used)                             # while the registers that are replaced still hold them
            stores += [attribute(self, "R", R), attribute(self, "V", list(root.V)), attribute(self, "S", list(root.S)),
                       attribute(self, "frames", root.frames.revived() if root.frames else None),
                       attribute(self, "flags", root.flags)]
        return stores

    def replaced(self, registers: bool = True) -> list[Any]:
        """What a `restore` replaces and may be freed later (m3jit.vm.reclaim)."""
        out = leavings(self)
        if registers:
            out.append(without_handles(self.R, self.used))
        return out

    # -- registers --------------------------------------------------------------------------------------------------
    def bank(self, number: int) -> list[Any]:
        """The register list of a bank."""
        return (self.R, self.V, self.S)[number]

    def read(self, reg: Reg) -> Any:
        """A register's value, None when it was never written."""
        if reg.bank == SPECIAL:
            raise ValueError("special registers are read through the machine")
        return self.bank(reg.bank)[reg.index]

    def live_registers(self) -> dict[Reg, Any]:
        """All written registers."""
        return {Reg(bank, i): v for bank in (GPR, VEC, STATE) for i, v in enumerate(self.bank(bank)) if v is not None}

    @property
    def depth(self) -> int:
        """Open calls."""
        return self.frames.depth if self.frames else 0

    def __repr__(self) -> str:
        return f"<context {self.id} {PRIORITIES[self.priority]} {self.status}>"
