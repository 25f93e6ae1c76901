"""What a program's state should be: plain Python values and NumPy arrays that are copied whole at every fork.

Nothing here knows pages, claims, shared maps or handles that keep things alive.  The arithmetic of attention, scans and
draws is the interpreter's, on the copied rows.
"""
from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np

from m3jit.errors import OperandError
from m3jit.ir import eager_attention
from m3jit.ir.eager import EagerXp
from m3jit.isa.cells import CellState, cell_of
from m3jit.isa.table import BY_NAME
from m3jit.isa.types import Tensor

GENERAL = 10                       # registers that are compared: 0-4 of programs, 5-9 results of tensor instructions
WINDOW_BYTES = 3 * 4096            # of memory regions that are compared
ARENA_BASE = 5 << 60
HEADS, WIDTH = 2, 8                # of the streams: 2 heads, 4 features each
NO_FLAGS = 4
SEED = 0x9E3779B97F4A7C15 - 2 ** 64
XP = EagerXp()
PIECES = [b"a", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0", b"\x9f\x98", b"\x80", b"", b"xyz"]
INPUTS = list(range(100, 130))


class Trapped(Exception):
    """The instruction traps; nothing changes."""


class Skipped(Exception):
    """The operation leaves what is compared; it is not done."""


@dataclass(frozen=True)
class Name:
    """A register value that names something."""
    what: str
    id: int


@dataclass
class Stream:
    """Rows of a key/value stream: layer -> (keys, values), f32 [rows, WIDTH], rounded as they are stored."""
    kind: str
    layers: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def clone(self) -> "Stream":
        return Stream(self.kind, {n: (k.copy(), v.copy()) for n, (k, v) in self.layers.items()})

    def rounded(self, a: np.ndarray) -> np.ndarray:
        return a.astype(np.float16).astype(np.float32) if self.kind == "F16" else a.copy()


@dataclass
class Cells:
    """(layer, part) -> f32 array."""
    arrays: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)

    def clone(self) -> "Cells":
        return Cells({k: a.copy() for k, a in self.arrays.items()})

    def built(self) -> CellState:
        return CellState({k: cell_of(k[1], a) for k, a in self.arrays.items()})


@dataclass
class Root:
    """What rolls back."""
    R: list[Any] = field(default_factory=lambda: [None] * GENERAL)
    S: list[Name | None] = field(default_factory=lambda: [None] * 3)
    frames: list[tuple[list[Any], tuple[int, ...]]] = field(default_factory=list)
    flags: int = NO_FLAGS
    rng: int = SEED
    states: dict[int, Any] = field(default_factory=dict)         # a name's number -> Stream, Cells, "model", ("ext", v)
    memory: bytearray = field(default_factory=lambda: bytearray(WINDOW_BYTES))
    arena: int | None = None                                     # bytes allocated
    blocks: bytearray = field(default_factory=lambda: bytearray(WINDOW_BYTES))      # of the arena
    position: int = 0
    text: bytes = b""
    model: Name | None = None

    def clone(self) -> "Root":
        states = {k: v.clone() if isinstance(v, (Stream, Cells)) else v for k, v in self.states.items()}
        return Root(list(self.R), list(self.S), [(list(R), args) for R, args in self.frames], self.flags, self.rng,
                    states, bytearray(self.memory), self.arena, bytearray(self.blocks), self.position, self.text,
                    self.model)


@dataclass
class Running:
    """A context: its root, and what does not roll back."""
    root: Root
    newest: int | None = None
    interrupt: bool = False

    def clone(self) -> "Running":
        return Running(self.root.clone(), self.newest, self.interrupt)


class Oracle:
    """All contexts of a machine (None: ended), its shared memory and its snapshots."""

    def __init__(self, window: int):
        self.window = window
        self.contexts: list[Running | None] = [Running(Root())]
        self.shared = bytearray(WINDOW_BYTES)
        self.snapshots: dict[int, Root] = {}
        self.taken: list[int] = []
        self.host: list[int] = []                     # snapshots the host holds
        self.names = 0
        self.extension: Name | None = None
        self.written = b""

    def clone(self) -> "Oracle":
        o = Oracle.__new__(Oracle)
        o.window, o.shared, o.names, o.extension, o.written = \
            self.window, bytearray(self.shared), self.names, self.extension, self.written
        o.contexts = [c and c.clone() for c in self.contexts]
        o.snapshots = {k: r.clone() for k, r in self.snapshots.items()}
        o.taken, o.host = list(self.taken), list(self.host)
        return o

    # -- snapshots --------------------------------------------------------------------------------------------------
    def collect(self) -> None:
        """Forget the snapshots that no register of a running context, nor the host or the window holds."""
        held = {v.id for c in self.contexts if c for regs in [c.root.R, *(R for R, _ in c.root.frames)] for v in regs
                if isinstance(v, Name) and v.what == "snapshot"}
        held |= set(self.taken[-self.window:] if self.window else []) | set(self.host)
        self.snapshots = {k: r for k, r in self.snapshots.items() if k in held}

    def untold(self, before: "Oracle") -> "Oracle":
        """This state behind a `host_fork` when the host was not told which snapshot was taken, and holds what it
        held."""
        out = self.clone()
        out.host = list(before.host)
        out.snapshots = {**{k: r.clone() for k, r in before.snapshots.items()}, **out.snapshots}
        out.collect()
        return out

    def new(self, what: str) -> Name:
        self.names += 1
        return Name(what, self.names)

    def fork(self, c: Running, register: int | None) -> int:
        name = self.new("snapshot")
        if register is not None:
            c.root.R[register] = name
        self.snapshots[name.id] = c.root.clone()
        self.taken.append(name.id)
        c.newest = name.id
        return name.id

    def found(self, value: Any) -> Root:
        if not isinstance(value, Name) or value.what != "snapshot" or value.id not in self.snapshots:
            raise Trapped
        return self.snapshots[value.id]

    def abort(self, c: Running, value: Any) -> None:
        old = self.found(value)
        c.root, c.newest = old.clone(), value.id

    # -- instructions -----------------------------------------------------------------------------------------------
    def apply(self, who: int, op: tuple, params: dict[str, Any]) -> None:
        """Do one operation of context `who`.  Trapped: this value is used no more."""
        c = self.contexts[who]
        getattr(self, "do_" + op[0])(c, *op[1:], **params)
        self.collect()

    def do_set(self, c, r, value):
        c.root.R[r] = value

    def do_mov(self, c, r, s):
        if c.root.R[s] is None:
            raise Trapped
        c.root.R[r] = c.root.R[s]

    def do_cmp(self, c, r):
        if not isinstance(c.root.R[r], int):
            raise Trapped
        c.root.flags = 0 if c.root.R[r] == 0 else 1 if c.root.R[r] < 0 else 2

    def do_fork(self, c, r):
        self.fork(c, r)

    do_snapshot = do_switch = do_fork

    def do_abort(self, c, r):
        if c.root.R[r] is not None:
            self.abort(c, c.root.R[r])

    do_resume = do_abort

    def do_restore(self, c, r):
        old = self.found(c.root.R[r]).clone()
        for what in ("states", "memory", "arena", "blocks", "position", "text", "model", "rng"):
            setattr(c.root, what, getattr(old, what))
        c.newest = c.root.R[r].id

    def do_host_fork(self, c):
        self.host.append(self.fork(c, None))
        del self.host[:-2]

    def do_host_abort(self, c, resume, place):
        self.abort(c, Name("snapshot", self.host[place % len(self.host)]))

    def do_call(self, c, args):
        c.root.frames.append((c.root.R, args))
        c.root.R = [c.root.R[a] for a in args] + [None] * (GENERAL - len(args))

    def do_ret(self, c):
        if not c.root.frames:
            raise Trapped
        R, args = c.root.frames.pop()
        R = list(R)
        for i, a in enumerate(args):
            R[a] = c.root.R[i]
        c.root.R = R

    def do_child(self, c, r):
        self.contexts.append(Running(c.root.clone()))
        c.root.R[r] = Name("context", len(self.contexts))

    def do_spawn(self, c, r):
        self.contexts.append(Running(Root()))
        c.root.R[r] = Name("context", len(self.contexts))

    def do_kill(self, c, r):
        value = c.root.R[r]
        if not isinstance(value, Name) or value.what != "context" or self.contexts[value.id - 1] is None:
            raise Trapped
        self.contexts[value.id - 1] = None

    def do_load(self, c, r):
        c.root.R[r] = self.new("state")
        c.root.states[c.root.R[r].id] = "model"

    def _model(self, c, value):
        if not isinstance(value, Name) or value.what != "state" or c.root.states.get(value.id) != "model":
            raise Trapped

    def do_unload(self, c, r):
        self._model(c, c.root.R[r])
        del c.root.states[c.root.R[r].id]
        if c.root.model == c.root.R[r]:
            c.root.model = None

    def do_setmodel(self, c, r):
        self._model(c, c.root.R[r])
        c.root.model = c.root.R[r]

    def do_sense(self, c, r):
        if c.root.position < len(INPUTS):
            c.root.R[r] = INPUTS[c.root.position]
            c.root.position += 1
        else:
            c.root.R[r] = tensor(np.empty(0, np.uint8))

    def do_stream(self, c, r, token):
        self._model(c, c.root.R[r])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(c.root.text + PIECES[token])
        c.root.text = decoder.getstate()[0]
        self.written += text.encode()

    def do_sample(self, c, r, logits):
        c.root.R[r], c.root.rng = body("SAMPLE")(logits, c.root.rng)

    def do_draw(self, c, r):
        c.root.R[r], c.root.rng = body("RNG_NEXT")(c.root.rng)

    def do_seed(self, c, value):
        c.root.rng = value

    def do_interrupt(self, c):
        c.interrupt = True

    def do_preempt(self, c, r):
        c.root.R[r] = int(c.interrupt)

    # -- states -----------------------------------------------------------------------------------------------------
    def _state(self, c: Running, s: int, make: Callable[[], Any], store: bool = True) -> Any:
        """The state S register s names; a fresh one for a register that was never written, with store under a name."""
        name = c.root.S[s]
        if name is None:
            value = make()
            if store:
                c.root.S[s] = name = self.new("state")
                c.root.states[name.id] = value
            return value
        if name.id not in c.root.states:
            raise Trapped                              # made after the snapshot whose state was restored
        return c.root.states[name.id]

    def do_attend(self, c, s, layer, q, k, v):
        stream = self._state(c, s, lambda: Stream("F16" if s == 0 else "F32"))
        old = stream.layers.get(layer, (np.empty((0, WIDTH), np.float32),) * 2)
        rows = tuple(np.concatenate([a, stream.rounded(b.data)]) for a, b in zip(old, (k, v)))
        stream.layers[layer] = rows
        q, k, v = (a.reshape(len(a), HEADS, -1) for a in (q.data, *rows))
        y = eager_attention.attend(q, k, v, eager_attention.default_scale(WIDTH // HEADS), np.float32(0),
                                   np.ones((len(q), len(k)), bool))
        c.root.R[5] = tensor(y.reshape(len(y), WIDTH))

    def do_truncate(self, c, s, length):
        if length < 0:
            raise Trapped
        if c.root.S[s] is None:
            self._state(c, s, lambda: Stream("F16"))
            return
        stream = self._state(c, s, lambda: None)
        stream.layers = {n: (k[:length].copy(), v[:length].copy()) for n, (k, v) in stream.layers.items()}

    def do_compress(self, c, s, sink, window):
        if sink < 0 or window < 0 or not sink + window:
            raise Trapped
        if c.root.S[s] is None:
            self._state(c, s, lambda: Stream("F16"))
            return
        stream = self._state(c, s, lambda: None)
        for n, (k, v) in stream.layers.items():
            if len(k) > sink + window:
                keep = [*range(sink), *range(len(k) - window, len(k))]
                stream.layers[n] = (k[keep], v[keep])

    def _cells(self, c: Running, run: Callable[[CellState], tuple[Tensor, CellState]], r: int) -> None:
        cells = self._state(c, 2, Cells)
        y, after = run(cells.built())
        for layer, part in after.shapes:
            cells.arrays[layer, part] = after.array(layer, part)
        c.root.R[r] = tensor(y.data)

    def do_scan(self, c, layer, x, dt, a, b, g):
        self._cells(c, lambda h: body("SSM_SCAN")(x, h, dt, a, b, g, layer=layer), 6)

    def do_conv(self, c, layer, x, w):
        self._cells(c, lambda h: body("CONV")(x, w, None, h, layer=layer), 7)

    def do_reset(self, c):
        cells = self._state(c, 2, Cells)
        for a in cells.arrays.values():
            a[:] = 0

    def do_token_step(self, c, step, q, k, v, x, dt, a, b, g, w, logits):
        """One instruction of several in one region."""
        if step == 0:
            self.do_scan(c, 0, x, dt, a, b, g)
        elif step == 1:
            self.do_conv(c, 0, x, w)
        elif step == 2:
            self.do_attend(c, 0, 0, q, k, v)
        elif step == 3:
            self.do_sample(c, 8, logits)
        else:
            self.do_draw(c, 9)

    # -- memory -----------------------------------------------------------------------------------------------------
    def _block(self, c: Running, address: int, size: int) -> tuple[bytearray, int]:
        region, offset = address >> 60 & 15, address & (1 << 60) - 1
        if region == 6:
            return self.shared, offset
        if region == 3:
            return c.root.memory, offset
        if c.root.arena is None or offset + size > c.root.arena:
            raise Trapped
        return c.root.blocks, offset

    def do_memset(self, c, pattern, address, size):
        block, at = self._block(c, address, size)
        block[at:at + size] = bytes([pattern]) * size

    def do_memcpy(self, c, address, source):
        block, at = self._block(c, address, source.nbytes)
        block[at:at + source.nbytes] = source.data.tobytes()

    def do_memmove(self, c, address, source, size):
        block, at = self._block(c, address, size)
        other, first = self._block(c, source, size)
        block[at:at + size] = bytes(other[first:first + size])

    def do_alloc(self, c, r, size):
        start = (c.root.arena or 0) + 15 & ~15
        if start + size > WINDOW_BYTES:
            raise Skipped
        c.root.arena, c.root.R[r] = start + size, ARENA_BASE | start

    def do_arena_reset(self, c):
        if c.root.arena is None:
            raise Trapped
        c.root.arena = 0

    def do_ext(self, c, r, value):
        if self.extension is None:
            self.extension = self.new("state")
        kind, held = c.root.states.get(self.extension.id, ("ext", ()))
        new = (*held, value)[-4:]
        c.root.states[self.extension.id] = ("ext", new)
        c.root.R[r] = sum(new)


def body(name: str) -> Callable[..., Any]:
    """The function of an instruction; what it refuses is a trap."""
    found = BY_NAME[name].body

    def run(*args: Any, **options: Any) -> Any:
        try:
            return found(XP, None, *args, **options)
        except OperandError:
            raise Trapped from None
    return run


def tensor(a: np.ndarray) -> tuple:
    """A tensor as it is compared."""
    return "tensor", a.dtype.str, a.shape, a.tobytes()
