"""A context: typed registers, call frames and the roots of everything that rolls back.

`capture` puts the root aside and `restore` puts one back; both take time that depends on the number of registers, not
on the size of the state.  Outside the root: the instruction pointer, priority, deadline, status, counters.
"""
from __future__ import annotations

from typing import Any, Iterable

from m3jit.ir.eager_scalar import NOT_COMPARED
from m3jit.isa.fields import BANK_SIZES, GPR, SPECIAL, STATE, VEC, Reg
from m3jit.vm.commit import Store, commit
from m3jit.vm.memory import ContextMemory
from m3jit.vm.persistent import PersistentMap
from m3jit.vm.reclaim import leavings
from m3jit.vm.register_use import RegisterUse
from m3jit.vm.snapshots import SnapshotHandle, revive, weaken, without_handles

DEFAULT_SEED = 0x9E3779B97F4A7C15 - 2 ** 64      # the random stream's state is a signed 64-bit integer
GREEN, BLUE, RED = range(3)
PRIORITIES = ("GREEN", "BLUE", "RED")
QUIET = 64                         # instructions a context gets done between two interrupts by input
_NOTHING: list[Any] = []           # what all roots of programs without vector registers hold of them
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

    def names_snapshots(self, naming: Iterable[int]) -> bool:
        """Is a snapshot handle in this frame or a caller's?"""
        if self._names is None:
            self._names = any(self.R[n].__class__ is SnapshotHandle for n in naming) or \
                self.parent is not None and self.parent.names_snapshots(naming)
        return self._names

    def weakened(self, naming: Iterable[int]) -> "Frame":
        """The chain as a snapshot keeps it: snapshots named in it are not kept alive.  naming: of the program."""
        if not self.names_snapshots(naming):
            return self
        if self._weak is None:
            self._weak = self._copy(weaken, naming, self.parent and self.parent.weakened(naming))
            self._weak._weak = self._weak
        return self._weak

    def revived(self, naming: Iterable[int]) -> "Frame":
        """The chain as a running context keeps it."""
        if not self.names_snapshots(naming):
            return self
        return self._copy(revive, naming, self.parent and self.parent.revived(naming))

    def _copy(self, change: Any, naming: Iterable[int], parent: "Frame | None") -> "Frame":
        R = list(self.R)
        change(R, naming)
        return Frame(R, self.V, self.back, self.args, parent)


class Root:
    """What a snapshot holds of a context.  R, V, S: the registers that the program uses; the others hold nothing."""
    __slots__ = ("R", "V", "S", "frames", "flags", "rng", "states", "memory", "cursors", "texts", "model")


class Context:
    """One thread of execution inside a machine."""
    __slots__ = ("id", "index", "used", "R", "V", "S", "frames", "flags", "rng", "states", "memory", "cursors", "texts",
                 "model", "priority", "lent", "pipeline", "deadline", "virtual_time", "virtual_deadline", "order",
                 "retired",
                 "status", "waiting_for", "raised", "answered", "quiet_until", "looked", "heard", "leave", "budget",
                 "trap", "newest_snapshot", "parks", "parked", "ahead")

    def __init__(self, id: int, memory: ContextMemory, used: RegisterUse, seed: int = DEFAULT_SEED):
        self.id, self.index, self.used = id, 0, used
        self.R: list[Any] = [None] * BANK_SIZES[GPR]
        self.V: list[Any] = [None] * BANK_SIZES[VEC]
        self.S: list[Any] = [None] * BANK_SIZES[STATE]
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
        self.answered: ByInput | None = None             # .. and the one that is over: seen, or its input read
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
        r, used, memory = Root(), self.used, self.memory
        r.R, r.V, r.S = self.R[:used.R], self.V[:used.V] if used.V else _NOTHING, self.S[:used.S]
        for n in used.naming:
            if r.R[n].__class__ is SnapshotHandle:
                r.R[n] = r.R[n].weakened()
        r.frames = self.frames.weakened(used.naming) if self.frames is not None else None
        r.flags, r.rng, r.cursors, r.texts, r.model = self.flags, self.rng, self.cursors, self.texts, self.model
        r.states = self.states.share()
        r.memory = memory.share() if memory.pages or memory.arenas else memory.machine.nothing
        return r

    def restore(self, root: Root, registers: bool = True, more: Iterable[Store] = ()) -> None:
        """Make `root` the state of this context and do `more` stores with it, all at once or not at all; the root can
        be restored again.  registers False: memory and state only."""
        commit([*self.restoring(root, registers), *more])

    def restoring(self, root: Root, registers: bool = True) -> list[Store]:
        """The stores (m3jit.vm.commit) of `restore`."""
        stores: list[Store] = [
            (setattr, self, "states", root.states.share()), (setattr, self, "memory", root.memory.share()),
            (setattr, self, "rng", root.rng), (setattr, self, "cursors", root.cursors),
            (setattr, self, "texts", root.texts), (setattr, self, "model", root.model)]
        if registers:
            naming, (r, v, s, _) = self.used.naming, BANK_SIZES
            R, V, S = root.R, root.V, root.S
            R, V, S = R + [None] * (r - len(R)), V + [None] * (v - len(V)), S + [None] * (s - len(S))
            revive(R, naming)                                # while the registers that are replaced still hold them
            stores += ((setattr, self, "R", R), (setattr, self, "V", V), (setattr, self, "S", S),
                       (setattr, self, "frames", root.frames.revived(naming) if root.frames else None),
                       (setattr, self, "flags", root.flags))
        return stores

    def replaced(self, registers: bool = True) -> list[Any]:
        """What a `restore` replaces and may be freed later (m3jit.vm.reclaim)."""
        return leavings(self, without_handles(self.R, self.used)) if registers else leavings(self)

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
