"""Recording a run into a file: what was run, what came from outside, what left, and how it ended."""
from __future__ import annotations

import time
import zlib
from typing import Any, Callable

import xxhash

import m3jit
from m3jit.errors import InternalError, Trap, UserError
from m3jit.isa.fields import Reg
from m3jit.isa.types import Tensor
from m3jit.timetravel.log_file import LogWriter
from m3jit.timetravel.steering import Steering
from m3jit.vm.digest import digest
from m3jit.vm.recording import Recorder

COMPRESSED = 64 << 20              # bytes of a program up to which it is kept compressed
DIGEST_SECONDS, DIGEST_SHARE = 1.0, 50                 # a digest at most so often, and 1/50 of the time at most


class Recording:
    """A run into a file.  The machine is made with `recorder`; `begin` before its run, `end` after it.

    every: outputs between two digests of the state (None: one a second or less).  steering: what the host adds to the
    program (m3jit.timetravel.steering); more: what else the log's head says; finish: called when the program has come
    to its end, before the log does."""

    def __init__(self, path: str, every: int | None = None):
        self.path, self.every = path, every
        self.steering: Steering | None = None
        self.more: dict[str, Any] = {}
        self.finish: Callable[[], None] = lambda: None
        self.recorder = Recorder(record=self)
        self.recorder.wants_digest, self.recorder.digest = self._wants_digest, self._digest
        self.writer: LogWriter | None = None
        self._next, self._count = 0.0, 0

    def begin(self, vm: Any, command: str = "") -> None:
        """Write what is run: the machine as it stands, before its first instruction."""
        self.vm = vm
        head = head_of(vm, command) | self.more
        self.writer = LogWriter(self.path, head | ({"steering": self.steering.kept()} if self.steering else {}))
        self._next = time.monotonic() + DIGEST_SECONDS

    def run(self, vm: Any, command: str = "") -> None:
        """Run a machine from here to its end; raises what `VM.run` raises."""
        self.begin(vm, command)
        try:
            vm.run()
            self.finish()
        except BaseException as e:
            self.end(e)
            raise
        self.end()

    def append(self, event: Any) -> None:
        """Take an event (`recording.Log`)."""
        if self.writer is None:
            raise InternalError("a machine that is recorded ran before its recording began")
        self.writer.append(event)

    def end(self, error: BaseException | None = None, unclosed: int = 0) -> None:
        """The run has ended, with this error; unclosed: sessions that nobody had ended by then."""
        if self.writer is None:
            return
        exact = error is None or isinstance(error, (Trap, UserError))
        self.writer.close({"status": "done" if error is None else type(error).__name__, "message": str(error or ""),
                           "retired": self.vm.retired, "digest": digest(self.vm.main) if exact else "",
                           "exact": exact} | ({"unclosed": unclosed} if unclosed else {}))

    def _wants_digest(self) -> bool:
        if self.every is not None:
            self._count += 1
            return self._count % self.every == 0
        return time.monotonic() >= self._next

    def _digest(self, ctx: Any) -> str:
        began = time.monotonic()
        found = digest(ctx)
        now = time.monotonic()
        self._next = now + max(DIGEST_SECONDS, DIGEST_SHARE * (now - began))
        return found


def head_of(vm: Any, command: str = "") -> dict[str, Any]:
    """What a log says about a run: versions, program, models, options, registers that the host has set."""
    program = vm.image.program
    if program is None:
        raise UserError("a machine of bare instructions cannot be recorded; give it a program (m3jit.assemble)")
    raw = program.to_bytes()
    packed = zlib.compress(raw, 6) if len(raw) <= COMPRESSED else b""
    if any(value is not None for value in vm.main.S):
        raise UserError("the host has set S registers of this machine; a log holds no states")
    return {
        "m3jit": m3jit.__version__, "command": command, "name": program.name, "hash": program_hash(raw),
        "size": len(raw), "packed": packed, "program": b"" if packed else raw,
        "models": {name: fingerprint(vm.load_model(name)) for name in sorted(set(program.models.values()))},
        "seed": vm.seed, "wait_input": vm.wait_input, "max_steps": vm.max_steps, "memory_limit": vm.memory.limit,
        "tensor_limit": vm.xp.limit_bytes, "ring_capacity": vm.ring_capacity, "snapshot_window": vm.snapshots.window,
        "limits": {name: value for name, value in (("context_limit", getattr(vm, "context_limit", None)), (
            "snapshot_memory", getattr(getattr(vm.snapshots, "bound", None), "limit", None))) if value is not None},
        "backend": vm.backend, "threads": vm.threads or 0,
        "registers": {str(reg): _kept(reg, value) for reg, value in vm.main.live_registers().items()},
    }


def _kept(reg: Reg, value: Any) -> Any:
    if isinstance(value, (int, float, Tensor)):
        return value
    raise UserError(f"{reg} holds {value!r}, which a log cannot hold")


def program_hash(raw: bytes) -> str:
    """xxh3-128 of a container."""
    return xxhash.xxh3_128_hexdigest(raw)


def fingerprint(model: Any) -> str:
    """xxh3-128 of all bytes of a model: its file's, or those of its tensors in the order of their names.

    A model of another kind (a host's own class) is known by its name alone."""
    file = getattr(model, "file", None)
    if file is None:
        return f"name:{model.name}"
    if hasattr(file, "full_hash"):
        return file.full_hash()
    h = xxhash.xxh3_128(b"tensors")
    for name in sorted(file.tensors):
        h.update(name.encode())
        h.update(file.tensor_bytes(name))
    return h.hexdigest()
